"""From rounds to figures: one record (`Run`) for each request, and the summaries over them. Pure.

Facts and sums are stored; rates are derived. Times are seconds. Definitions: README, "Words", and `report.FIGURES`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise, zip_longest
from statistics import fmean, median
from typing import Any

import numpy as np

from duochat.engine.rounds import Round, total

REFERENCE = "autoregressive"  # what every decoder is compared with
COUNTS = ("drafted", "accepted", "rejected", "ignored", "pending")

# An answer loops when it says again what it said before. Of 163 answers of SmolLM2 to our own and Spec-Bench's prompts
# (assets/results) all with a share of REPEATED or more go round in circles; up to .12 one sentence stands there twice.
PASSAGE = 8  # tokens: a repeated passage is no shorter
REPEATED = 0.15


@dataclass(slots=True)
class Run:
    """One request answered by one decoder. Peers know of no rounds: what they cannot tell stays 0 or empty."""

    task: str
    question: str
    turn: int
    repeat: int
    decoder: str
    prompt_tokens: int
    tokens: list[int]  # the answer
    finish: str  # "stop" or "length"
    first_s: float  # request to first token: TTFT
    total_s: float  # request to last token
    forwards: int = 0  # of the target; 0: not known
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    ignored: int = 0
    pending: int = 0  # drafted tokens that went through a target forward
    hits: int = 0  # rounds whose outcome the draft had already expanded ...
    outcomes: int = 0  # ... of so many
    budget: float = 0.0  # mean computed γ*
    cpu_busy_s: float = 0.0  # between first and last token, as the next one
    gpu_busy_s: float = 0.0
    gap_s: float = 0.0  # median host time between two forwards, waiting for a draft apart
    depths: list[list[int]] = field(default_factory=list)  # [accepted, tested] by place in the draft, from the first on
    speculation: str = ""  # of the last round

    @property
    def request(self) -> tuple[str, str, int, int]:
        """What was asked, whoever answered."""
        return self.task, self.question, self.turn, self.repeat

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first; 0 for an answer of one token."""
        return (self.total_s - self.first_s) / (len(self.tokens) - 1) if len(self.tokens) > 1 else 0.0

    @property
    def loops(self) -> bool:
        """Whether the answer goes round in circles: see REPEATED."""
        return repeated(self.tokens) >= REPEATED

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Run:
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in raw.items() if k in known})


def repeated(tokens: Sequence[int]) -> float:
    """The share of an answer's passages (PASSAGE tokens, one begins at each token) that it held before."""
    passages = [tuple(tokens[i : i + PASSAGE]) for i in range(len(tokens) - PASSAGE + 1)]
    return 1 - len(set(passages)) / len(passages) if passages else 0.0


# ---------------------------------------------------------------- one request


def of_rounds(rounds: Sequence[Round]) -> dict[str, Any]:
    """The fields of a `Run` that its rounds tell."""
    stats = total(rounds)
    return {
        "tokens": [token for r in rounds for token in r.tokens],
        "finish": rounds[-1].finish or "",
        "forwards": stats.rounds,
        **{name: getattr(stats, name) for name in (*COUNTS, "hits", "outcomes")},
        "budget": fmean(stats.budgets),
        "cpu_busy_s": stats.cpu_busy,
        "gpu_busy_s": stats.gpu_busy,
        "gap_s": median([*gaps(rounds)] or [0.0]),
        "depths": depths(rounds),
        "speculation": rounds[-1].speculation,
    }


def gaps(rounds: Sequence[Round]) -> list[float]:
    """Host seconds between the forwards of an answer, without what was spent waiting for a draft."""
    return [max(0.0, b.started - a.ended - b.waited) for a, b in pairwise(rounds) if b.tokens]


def depths(rounds: Sequence[Round]) -> list[list[int]]:
    """[accepted, tested] at each place of the draft, counted from the root: siblings are one test."""
    found: list[list[int]] = []
    for r in rounds:
        taken = len(r.accepted)
        for depth in range(taken + bool(r.rejected)):
            if depth == len(found):
                found.append([0, 0])
            found[depth][0] += depth < taken
            found[depth][1] += 1
    return found


# ---------------------------------------------------------------- over requests


def summary(runs: Sequence[Run], reference: Sequence[Run] = ()) -> dict[str, Any]:
    """Figures of one decoder over its runs, not empty. reference: plain decoding's runs."""
    straight, plain = without_loops(runs, reference)
    return {
        "requests": len(runs),
        "tokens": sum(len(run.tokens) for run in runs),
        "tokens_per_s": tokens_per_s(runs),
        "speedup": speedup(runs, reference),
        "speedup_interval": interval(runs, reference),
        "loops": sum(run.loops for run in runs),
        "requests_without_loops": len(straight),
        "tokens_per_s_without_loops": tokens_per_s(straight),
        "speedup_without_loops": speedup(straight, plain),
        **_latency(runs),
        **_drafting(runs),
        **_devices(runs),
    }


def without_loops(runs: Iterable[Run], reference: Iterable[Run]) -> tuple[list[Run], list[Run]]:
    """Both without the requests that either of them answered with a loop: one side alone would be flattered."""
    both = [*runs], [*reference]
    out = {run.request for side in both for run in side if run.loops}
    own, other = ([run for run in side if run.request not in out] for side in both)
    return own, other


def _sum(runs: Iterable[Run], name: str) -> float:
    return sum(getattr(run, name) for run in runs)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _latency(runs: Sequence[Run]) -> dict[str, Any]:
    firsts = [run.first_s for run in runs]
    tpots = [run.tpot_s for run in runs if len(run.tokens) > 1] or [0.0]
    return {
        "ttft_median_s": median(firsts),
        "ttft_p95_s": float(np.percentile(firsts, 95)),
        "tpot_median_s": median(tpots),
        "tpot_p95_s": float(np.percentile(tpots, 95)),
    }


def _drafting(runs: Sequence[Run]) -> dict[str, Any]:
    counts = {name: _sum(runs, name) for name in COUNTS}
    forwards, places = _sum(runs, "forwards"), _added(run.depths for run in runs)
    return {
        "mean_accepted_length": _share(sum(len(run.tokens) for run in runs), forwards),
        "acceptance_rate": _share(counts["accepted"], counts["accepted"] + counts["rejected"]),
        **counts,
        "drafted_per_round": _share(counts["drafted"], forwards),
        "verified_per_round": _share(counts["pending"], forwards),
        "budget": fmean(run.budget for run in runs),
        "hit_rate": _share(_sum(runs, "hits"), _sum(runs, "outcomes")),
        "acceptance_by_position": [_share(accepted, tested) for accepted, tested in places],
        "tested_by_position": [tested for _, tested in places],
        "paused": sum(run.speculation.startswith("paused") for run in runs),
    }


def _devices(runs: Sequence[Run]) -> dict[str, Any]:
    span = sum(run.total_s - run.first_s for run in runs if run.forwards)
    return {
        "cpu_idle": 1 - _sum(runs, "cpu_busy_s") / span if span else None,
        "gpu_idle": 1 - _sum(runs, "gpu_busy_s") / span if span else None,
        "gap_median_s": median(run.gap_s for run in runs),
    }


def _added(lists: Iterable[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Pairs summed place by place; lists may differ in length."""
    columns = (zip(*pairs, strict=True) for pairs in zip_longest(*lists, fillvalue=(0, 0)))
    return [[sum(column) for column in pair] for pair in columns]


# ---------------------------------------------------------------- speed, and how sure it is

Timing = tuple[float, float]  # tokens, seconds


def _timings(runs: Iterable[Run]) -> dict[tuple[str, str], dict[int, Timing]]:
    """Tokens and seconds of each question, its turns together, by repeat."""
    found: dict[tuple[str, str], dict[int, Timing]] = {}
    for run in runs:
        repeats = found.setdefault((run.task, run.question), {})
        tokens, seconds = repeats.get(run.repeat, (0, 0.0))
        repeats[run.repeat] = tokens + len(run.tokens), seconds + run.total_s
    return found


def _speed(timings: Iterable[Timing]) -> float:
    tokens, seconds = (sum(values) for values in zip(*timings, strict=True))
    return _share(tokens, seconds)


def tokens_per_s(runs: Iterable[Run]) -> float:
    """Mean over questions of tokens / seconds from request to last token (as Spec-Bench); 0 without any."""
    return fmean([_speed(repeats.values()) for repeats in _timings(runs).values()] or [0.0])


def speedup(runs: Iterable[Run], reference: Iterable[Run]) -> float:
    """Mean over tasks of: mean over questions of tokens/s, by the same of the reference. 0 without shared questions."""
    return _ratio(_paired(runs, reference))


def interval(runs: Iterable[Run], reference: Iterable[Run], draws: int = 400, seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of `speedup`: questions are drawn anew within their task, and repeats within them.

    Both decoders' timings of a question stay together.
    """
    tasks, rng = _paired(runs, reference), random.Random(seed)
    drawn = ([_drawn(questions, rng) for questions in tasks] for _ in range(draws if tasks else 0))
    values = [_ratio(each) for each in drawn] or [0.0]
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


Pairs = list[tuple[Timing, Timing]]  # of one question: a repeat each, ours and the reference's


def _paired(runs: Iterable[Run], reference: Iterable[Run]) -> list[list[Pairs]]:
    """Task by task, question by question: what both have measured."""
    own, other = _timings(runs), _timings(reference)
    tasks: dict[str, list[Pairs]] = {}
    for key in sorted(own.keys() & other.keys()):
        if repeats := sorted(own[key].keys() & other[key].keys()):
            tasks.setdefault(key[0], []).append([(own[key][n], other[key][n]) for n in repeats])
    return list(tasks.values())


def _ratio(tasks: Iterable[Sequence[Pairs]]) -> float:
    """The mean over tasks of the ratio of summed speeds."""
    sides = ([[_speed(side) for side in zip(*pairs, strict=True)] for pairs in questions] for questions in tasks)
    return fmean(
        [_share(sum(own for own, _ in speeds), sum(other for _, other in speeds)) for speeds in sides] or [0.0]
    )


def _drawn(questions: Sequence[Pairs], rng: random.Random) -> list[Pairs]:
    """As many questions, drawn with replacement, each with repeats drawn alike."""
    return [rng.choices(pairs, k=len(pairs)) for pairs in rng.choices(questions, k=len(questions))]


# ---------------------------------------------------------------- equality


def differences(runs: Iterable[Run], reference: Iterable[Run]) -> list[dict[str, Any]]:
    """The requests whose tokens are not plain decoding's, each with the first differing position."""
    plain = {run.request: run.tokens for run in reference}
    found = []
    for run in runs:
        other = plain.get(run.request, run.tokens)
        if run.tokens != other:
            place = {"task": run.task, "question": run.question, "turn": run.turn, "repeat": run.repeat}
            found.append({**place, "position": first_difference(run.tokens, other)})
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Index of the first place where two sequences differ; the shorter one's length when it begins the other."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
