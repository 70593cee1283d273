"""The records of decoding: what was drafted, when, by whom, and what the target answered.

One append-only stream of `Round` feeds page, terminal, race, replay, benchmark and tests. Facts are stored here;
everything else is derived (`Stats`). Standard library only. Times are seconds since the request began.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Draft:
    """One drafted token, a node of the draft tree."""

    id: int  # unique within the request, in the order of drafting
    parent: int  # id of the drafted token before it; -1: it follows a committed token that was not drafted
    position: int  # index in the whole token sequence, the prompt included
    token: int
    prob: float  # the draft model's probability of the token, among its candidates, shared noise included
    reach: float  # estimated probability, when drafted, that the target arrives at this token
    rank: int  # 1 = the draft's first choice at this place
    origin: str = "model"  # "model", "ngram" (found by prompt lookup) or "both"


@dataclass(frozen=True, slots=True)
class Batch:
    """One call of the draft model on the CPU lane."""

    started: float
    ended: float
    size: int  # tokens decoded in the call
    sampling: float = 0.0  # seconds of it spent choosing candidates


@dataclass(frozen=True, slots=True)
class Round:
    """One target forward and the drafting beside it."""

    index: int
    position: int  # length of the sequence before this round: the first emitted token's index
    started: float  # the target's forward began
    ended: float  # the target's answer was on the host
    tokens: tuple[int, ...]  # emitted by this round, in order
    last: str  # what the last emitted token is: "accepted", "correction", "bonus" or "plain"
    drafted: tuple[Draft, ...] = ()  # since the round before
    batches: tuple[Batch, ...] = ()  # ended since the round before
    pending: tuple[int, ...] = ()  # draft ids verified: they had a row in this forward, whether tested or not
    accepted: tuple[int, ...] = ()  # draft ids, in order; each is one of the emitted tokens
    rejected: tuple[int, ...] = ()  # draft ids at the place where the target's own token was none of the drafted
    ignored: tuple[int, ...] = ()  # draft ids that left the tree untested: another branch won, or none was reached
    token_probs: tuple[float, ...] = ()  # the target's probability of each emitted token
    pending_probs: tuple[float | None, ...] = ()  # the target's probability of each pending token, where it was asked
    phase: str = "decode"  # "prefill" for the round that reads the prompt
    budget: float = 0.0  # the computed draft budget γ* = T_target / T_draft at this round
    waited: float = 0.0  # seconds that the target waited for a draft before `started`
    transfer: float = 0.0  # seconds of the round spent bringing the answer to the host
    held: float = 0.0  # seconds of the round in which whoever is told of rounds kept the loop: its end may be late
    plain: float = 0.0  # seconds of a forward of one token beside an idle draft, by the last rounds; 0 = not known yet
    hit: bool | None = None  # outcome prefetch: was the new root already expanded by the draft?
    speculation: str = "on"  # "on", "off" (nothing will be drafted), "warming" or "paused"
    reason: str = ""  # a sentence's part: why speculation is not on; "" where there is nothing to say
    finish: str | None = None  # "stop", "length", "cancelled" or "error" on the last round

    @property
    def origins(self) -> tuple[str, ...]:
        """Where each emitted token comes from: "accepted" for the drafted ones, then what `last` says."""
        return ("accepted",) * len(self.accepted) + (self.last,) * (len(self.tokens) - len(self.accepted))

    def to_json(self) -> str:
        """One JSON line; `from_json` is its inverse."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str | dict[str, Any]) -> Round:
        """Raises ValueError when the line is not a round."""
        raw = json.loads(line) if isinstance(line, str) else dict(line)
        known = {f.name for f in fields(cls)}
        if not {"index", "tokens", "started", "ended"} <= raw.keys() <= known:
            raise ValueError("not a round record")
        raw["drafted"] = tuple(Draft(**d) for d in raw.get("drafted", ()))
        raw["batches"] = tuple(Batch(**b) for b in raw.get("batches", ()))
        if ": " in raw.get("speculation", ""):  # older traces
            raw["speculation"], _, raw["reason"] = raw["speculation"].partition(": ")
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()})


SETTLED = 16  # rounds before a speedup is told: the first ones compile, warm up and wait for the draft


@dataclass(slots=True)
class Stats:
    """Figures of one answer, or of some rounds of it, summed from its rounds (definitions: README, "Words")."""

    prompt_tokens: int = 0
    rounds: int = 0
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    ignored: int = 0
    pending: int = 0
    hits: int = 0
    outcomes: int = 0
    first_token_at: float | None = None
    first_tokens: int = 0  # emitted by that time
    last_token_at: float = 0.0
    cpu_busy: float = 0.0
    gpu_busy: float = 0.0
    compared: int = 0  # rounds of speculation whose plain forward is known
    compared_tokens: int = 0  # what they emitted
    compared_s: float = 0.0  # what they took
    compared_plain_s: float = 0.0  # what plain decoding would have taken for their tokens
    budgets: list[float] = field(default_factory=list)

    def add(self, r: Round) -> Stats:
        self.rounds += 1
        self.completion_tokens += len(r.tokens)
        self.drafted += len(r.drafted)
        self.accepted += len(r.accepted)
        self.rejected += len(r.rejected)
        self.ignored += len(r.ignored)
        self.pending += len(r.pending)
        self.hits += r.hit is True
        self.outcomes += r.hit is not None
        self.budgets.append(r.budget)
        self._clock(r)
        return self

    def _clock(self, r: Round) -> None:
        """Busy time counts between first and last token only (DESIGN: idle)."""
        if self.first_token_at is None:
            self.first_token_at, self.first_tokens = (r.ended, len(r.tokens)) if r.tokens else (None, 0)
        elif r.tokens:
            self.gpu_busy += r.ended - r.started
            self._compare(r)
        if self.first_token_at is not None:
            since = self.first_token_at
            self.cpu_busy += sum(max(0.0, b.ended - max(b.started, since)) for b in r.batches)
        if r.tokens:
            self.last_token_at = r.ended

    def _compare(self, r: Round) -> None:
        """With plain decoding as it is about now; one that is itself plain has nothing to be compared with."""
        if r.plain and r.speculation != "off":
            self.compared += 1
            self.compared_tokens += len(r.tokens)
            self.compared_s += r.ended - self.last_token_at
            self.compared_plain_s += len(r.tokens) * r.plain

    @property
    def tested(self) -> int:
        return self.accepted + self.rejected

    @property
    def acceptance_rate(self) -> float:
        """α = accepted / tested; 0 when nothing was tested."""
        return self.accepted / self.tested if self.tested else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """τ = tokens emitted per target forward; plain decoding = 1."""
        return self.completion_tokens / self.rounds if self.rounds else 0.0

    @property
    def decode_s(self) -> float:
        """Seconds between first and last token."""
        return self.last_token_at - (self.first_token_at or 0.0)

    @property
    def rate(self) -> float | None:
        """Tokens/s of decoding: those after the first round's, over `decode_s`; None while there are none."""
        return (self.completion_tokens - self.first_tokens) / self.decode_s if self.decode_s > 0 else None

    @property
    def tokens_per_s(self) -> float:
        """Tokens/s from the request to the last token, the prompt's reading included."""
        return self.completion_tokens / self.last_token_at if self.last_token_at else 0.0

    @property
    def speedup(self) -> float | None:
        """Plain decoding's time over this answer's, for the rounds where the first is known; None before SETTLED."""
        return self.compared_plain_s / self.compared_s if self.compared >= SETTLED and self.compared_s > 0 else None

    def idle(self, busy: float) -> float:
        """The share of the time between first and last token that is left beside so many busy seconds."""
        return max(0.0, 1 - busy / self.decode_s) if self.decode_s > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The `stats` object of `chat --json`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_s": self.first_token_at or 0.0,
            "total_s": self.last_token_at,
            "tokens_per_s": self.tokens_per_s,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "verified": self.pending,
            "tested": self.tested,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "ignored": self.ignored,
            "acceptance_rate": self.acceptance_rate,
            "mean_accepted_length": self.mean_accepted_length,
            "draft_budget": self.budgets[-1] if self.budgets else 0.0,
            "hit_rate": self.hits / self.outcomes if self.outcomes else 0.0,
            "cpu_idle": self.idle(self.cpu_busy),
            "gpu_idle": self.idle(self.gpu_busy),
        }


def total(rounds: Iterable[Round], prompt_tokens: int = 0) -> Stats:
    """Figures over all rounds of one answer."""
    stats = Stats(prompt_tokens=prompt_tokens)
    for r in rounds:
        stats.add(r)
    return stats
