"""What each device costs: T_target(width), T_draft(batch), and the draft budget γ* that follows from them.

Curves are measured once per hardware and model, scaled by live timings, and measured again when those drift.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from duochat.engine.rounds import Round
from duochat.engine.threads import Threads

if TYPE_CHECKING:
    from duochat.engine.watch import Watch

MEASURED = 256  # tokens of context over which forwards are measured
KEPT = ("threads", "reading", "contention", "shared", "target_threads", "turns", "fill")  # as they are, in JSON too


class Scale:
    """How many times as long something takes now as when it was measured.

    The median of the last timings: an outlier counts for nothing, and what lasts counts in full after eight of them.
    """

    def __init__(self) -> None:
        self._last = deque([1.0] * 7, maxlen=15)
        self.value = 1.0

    def observe(self, ratio: float) -> None:
        self._last.append(ratio)
        self.value = median(self._last)


class Baseline:
    """Of a plain forward, seen through forwards of any kind.

    Those of a draft are slower for reasons that no curve tells: caches that the draft has filled, threads that wake,
    graphs that are launched anew. So after some plain ones in a row it follows how the drafting ones change from there.
    """

    FEW = 4  # drafting forwards that tell how slow these are at the start
    ENOUGH = 8  # plain ones in a row that tell what a plain one takes: they turn a median

    def __init__(self) -> None:
        self.value = 1.0
        self.forwards = 0  # of this answer
        self._scale, self._run = Scale(), 0
        self._plain = 0.0  # after the last plain ones in a row; 0 = there were none yet
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=15)

    def observe(self, ratio: float, drafting: bool) -> None:
        """drafting: the draft worked before or beside this forward, or it verified drafts."""
        if drafting:
            self._follow(ratio)
        self._run = 0 if drafting else self._run + 1
        if not (drafting and self._plain):
            self._scale.observe(ratio)
        if self._run >= self.ENOUGH:
            self._plain = self.value = self._scale.value
        elif not self._plain:
            self.value = self._scale.value

    def _follow(self, ratio: float) -> None:
        if self._run >= self.ENOUGH:
            self._first, self._last = [], deque(maxlen=15)
        self._last.append(ratio)
        if len(self._first) < self.FEW:
            self._first.append(ratio)
        elif self._plain:
            self.value = self._plain * median(self._last) / median(self._first)


@dataclass(slots=True)
class Curve:
    """Seconds by size, linear between the measured sizes and beyond the last one, and linear in the length of the
    context; followed by live timings."""

    seconds: dict[int, float]  # over a context of MEASURED tokens
    growth: dict[int, float] = field(default_factory=dict)  # seconds more for each further token of it, by size
    now: Scale = field(default_factory=Scale, repr=False, compare=False)
    _context: int = field(default=MEASURED, init=False, repr=False, compare=False)
    _known: dict[int, float] = field(init=False, repr=False, compare=False)  # sizes asked for: a round asks for dozens

    def __post_init__(self) -> None:
        self.seconds = dict(sorted(self.seconds.items()))
        self._known = {}

    def see(self, context: int) -> None:
        """What is asked for is over so many tokens of context, to the nearest 64, from now on."""
        if self.growth and (near := 64 * round(context / 64)) != self._context:
            self._context, self._known = near, {}

    def measured(self, size: int) -> float:
        """Seconds for a call of this size as calibrated, live scale apart."""
        if size not in self._known:
            more = between(self.growth, size) * (self._context - MEASURED) if self.growth else 0.0
            self._known[size] = max(1e-9, between(self.seconds, size) + more)
        return self._known[size]

    def __call__(self, size: int) -> float:
        """Seconds that a call of this size takes now."""
        return self.now.value * self.measured(size)

    @property
    def slope(self) -> float:
        """Seconds that one more costs now wherever it costs least, at least 0."""
        steps = pairwise(self.seconds)
        return max(0.0, min(((self(high) - self(low)) / (high - low) for low, high in steps), default=0.0))

    def observe(self, size: int, seconds: float) -> None:
        """Follow a live timing."""
        self.now.observe(seconds / self.measured(size))


def between(known: Mapping[int, float], size: int) -> float:
    """Linear between known sizes, in ascending order, and beyond the last ones."""
    sizes = list(known)
    if len(sizes) == 1:
        return known[sizes[0]]
    i = min(max(1, bisect_left(sizes, size)), len(sizes) - 1)
    low, high = sizes[i - 1], sizes[i]
    return known[low] + (known[high] - known[low]) / (high - low) * (size - low)


def _rate(acceptance: float) -> float:
    """An acceptance rate short of 1, so that a geometric series ends."""
    return min(0.999, max(0.0, acceptance))


@dataclass(slots=True)
class Costs:
    """The two curves, what live timings say of them, and what drafting costs the target."""

    target: Curve
    draft: Curve
    threads: int = 1  # of the draft, as calibrated
    reading: int = 0  # draft threads for prompts; 0 = as many
    sweep: dict[int, float] = field(default_factory=dict)  # seconds of a usual batch by threads
    contention: float = 0.0  # seconds by which each second of drafting delays the target: shared cores and memory
    shared: bool = False  # the target computes on the draft's cores, and reads a prompt with all of them
    target_threads: int = 0  # of the target, on the CPU; 0 = as many as it has
    at_once: Costs | None = None  # while both lanes work, where that differs: of lanes that share the cores each has
    #                               some then, not all of them in turns; or the target's forwards are filled up
    turns: bool = False  # `duotree` is expected to be faster in turns
    fill: int = 0  # rows up to which the target's forwards are filled
    alone: Curve | None = field(default=None, init=False, repr=False, compare=False)  # of plain decoding, if it differs
    watch: Watch | None = field(default=None, init=False, repr=False, compare=False)  # of the last requests
    hands: Threads = field(init=False, repr=False, compare=False)
    crew: Threads = field(init=False, repr=False, compare=False)  # the target's
    _baseline: Baseline = field(default_factory=Baseline, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.hands, few = Threads(self.threads, self.sweep), self.at_once
        sweep = {c.target_threads: c.target.measured(1) for c in (few, self) if c}
        self.crew = Threads(self.target_threads, sweep)
        if self.at_once:
            self.at_once.alone, self.at_once._baseline = self.target, self._baseline

    @classmethod
    def of(cls, target: Mapping[int, float], draft: Mapping[int, float]) -> Costs:
        return cls(Curve(dict(target)), Curve(dict(draft)))

    @property
    def drafting(self) -> Costs:
        """Those of `duotree` at work."""
        return self if self.turns else self.at_once or self

    @property
    def widest(self) -> int:
        """The widest forward that was measured."""
        return max(self.target.seconds)

    def see(self, context: int) -> None:
        """See `Curve.see`."""
        for curve in filter(None, (self.target, self.alone)):
            curve.see(context)

    @property
    def budget(self) -> float:
        """γ* = T_target(one forward) / T_draft(one token), arXiv 2503.00784."""
        return self.target(1) / self.draft(1)

    @property
    def calibrated(self) -> float:
        """Seconds of a forward of one token beside an idle draft over this length of context, live timings apart."""
        return (self.alone or self.target).measured(1)

    @property
    def slowness(self) -> float:
        """How many times as long it takes now."""
        return self._baseline.value

    @property
    def plain(self) -> float:
        """Seconds of it now."""
        return self.slowness * self.calibrated

    def untaught(self) -> Costs:
        """A copy that has learned nothing of any text."""
        copy = deepcopy(self)
        for costs in filter(None, (copy, copy.at_once)):
            costs.watch = None
        return copy

    @property
    def known(self) -> bool:
        """Whether enough forwards of this answer were seen for `plain` to be of now: it is of the last 15 then."""
        return self._baseline.forwards >= 16

    def observe(self, r: Round) -> None:
        """Follow a round's forward, unless whoever listens may have kept the loop longer than the device took."""
        seconds = r.ended - r.started
        if r.phase == "prefill":
            self._baseline.forwards = 0
        if r.phase == "prefill" or not r.tokens or r.held > 0.5 * seconds:
            return
        calibrated = self.target.measured(len(r.pending) + 1)
        self.target.now.observe(seconds / calibrated)
        self.crew.observe(seconds / calibrated)
        beside = sum(max(0.0, min(b.ended, r.ended) - max(b.started, r.started)) for b in r.batches)
        ratio = (seconds - self.contention * beside) / calibrated
        looked_at = r.speculation == "paused" and not r.pending  # see `Watch`: the forward is a plain one
        self._baseline.observe(ratio, drafting=bool(r.batches or r.pending) and not looked_at)
        self._baseline.forwards += 1
        if not r.batches and r.speculation != "off":  # lest a bad minute keep the draft from being tried
            self.draft.now.observe(1.0)

    def observe_batch(self, size: int, seconds: float) -> int:
        """Follow a draft batch; returns with how many threads the draft should go on, 0 = as now."""
        self.draft.observe(size, seconds)
        return self.hands.observe(seconds / self.draft.measured(size))

    def sequential_budget(self, acceptance: float, most: int = 16) -> int:
        """γ that gives the most tokens per second when drafting and verifying take turns (arXiv 2211.17192, eq. 1)."""
        return max(range(1, most + 1), key=lambda n: self.rate(acceptance, n, 1.0))

    def rate(self, acceptance: float, length: int, delay: float) -> float:
        """Tokens per second of chains of this length; delay: seconds by which one of drafting delays a forward."""
        a = _rate(acceptance)
        return (1 - a ** (length + 1)) / (1 - a) / (length * delay * self.draft(1) + self.target(length + 1))

    def _cycle(self, acceptance: float, length: int, hits: float = 0.0) -> float:
        """Seconds in which chains of this length that are drafted beside forwards give 1/(1 - a) tokens.

        A round that rejects is followed by one with nothing pending, which gives a token, but for the share `hits`, in
        which the outcome was foreseen. All other tokens come in wide forwards, as many as that takes.
        """
        a, delay = _rate(acceptance), self.contention * length * self.draft(1)
        wide = (a + hits * (1 - a)) / (1 - a ** (length + 1))
        return (1 - hits) * (self.target(1) + delay) + wide * (self.target(length + 1) + delay)

    def chain_length(self, acceptance: float) -> int:
        """The pending chain that gives the most tokens per second when it is drafted beside a forward; γ* at most.

        Where wide forwards cost no more and drafting delays none, it is γ* as in the paper; on a CPU both cost.
        """
        return min(range(1, max(1, round(self.budget)) + 1), key=lambda n: self._cycle(acceptance, n))

    def overlapped(self, acceptance: float, hits: float) -> float:
        """Tokens per second of the best such chain; `rate` is of lanes that take turns."""
        lengths = range(1, max(1, round(self.budget)) + 1)
        return 1 / (1 - _rate(acceptance)) / min(self._cycle(acceptance, n, hits) for n in lengths)

    @property
    def drifted(self) -> bool:
        """Whether live timings left the calibration by more than a quarter."""
        live = self.hands.now < self.threads or any(
            not 0.75 <= curve.now.value <= 1.25 for curve in (self.target, self.draft)
        )
        return live or bool(self.at_once and self.at_once.drifted)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; `from_dict` is its inverse, live scales apart."""
        by_size = {"target": self.target.seconds, "growth": self.target.growth}
        by_size |= {"draft": self.draft.seconds, "sweep": self.sweep}
        return {
            **{name: {str(size): s for size, s in seconds.items()} for name, seconds in by_size.items()},
            **{name: getattr(self, name) for name in KEPT},
            "plain": self.target.seconds[1],
            "at_once": self.at_once and self.at_once.to_dict(),
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Costs:
        names = ("target", "growth", "draft", "sweep")
        target, growth, draft, sweep = ({int(k): float(v) for k, v in raw[name].items()} for name in names)
        more = {name: raw[name] for name in KEPT} | {"sweep": sweep}
        at_once = raw["at_once"] and cls.from_dict(raw["at_once"])
        return cls(Curve(target, growth), Curve(draft), at_once=at_once, **more)
