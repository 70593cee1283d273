"""From rounds to figures: one record (`Run`) for each request, and the summary of a contestant's. Pure.

Facts and sums are stored; rates are derived. Times are seconds. Definitions: README, "Words", and `report.FIGURES`.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise, zip_longest
from statistics import fmean, median
from typing import Any

import numpy as np

from duochat.engine.rounds import Round, total

REFERENCE = "autoregressive"  # what every decoder is compared with
COUNTS = ("drafted", "accepted", "rejected", "ignored", "pending", "hits", "outcomes")

# An answer loops when it says again what it said before. Of 163 answers of SmolLM2 to our own and Spec-Bench's prompts
# (assets/results) all with a share of REPEATED or more go round in circles; up to .12 one sentence stands there twice.
PASSAGE = 8  # tokens: a repeated passage is no shorter
REPEATED = 0.15


@dataclass(slots=True)
class Run:
    """One request answered by one contestant. Peers know of no rounds: what they cannot tell stays 0 or empty."""

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
    task: str = ""
    question: str = ""
    turn: int = 0
    repeat: int = 0
    decoder: str = ""
    prompt_tokens: int = 0

    @classmethod
    def of_rounds(cls, rounds: Sequence[Round], first_s: float, total_s: float) -> Run:
        """What an answer's rounds tell. first_s, total_s: by the clock of whoever asked."""
        stats = total(rounds)
        gaps = [max(0.0, b.started - a.ended - b.waited) for a, b in pairwise(rounds) if b.tokens]
        return cls(
            [token for r in rounds for token in r.tokens],
            rounds[-1].finish or "",
            first_s,
            total_s,
            stats.rounds,
            **{name: getattr(stats, name) for name in COUNTS},
            budget=fmean(stats.budgets),
            cpu_busy_s=stats.cpu_busy,
            gpu_busy_s=stats.gpu_busy,
            gap_s=median(gaps or [0.0]),
            depths=depths(rounds),
            speculation=rounds[-1].speculation,
        )

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

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Run:
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in raw.items() if k in known})


def repeated(tokens: Sequence[int]) -> float:
    """The share of an answer's passages (PASSAGE tokens, one begins at each token) that it held before."""
    passages = [tuple(tokens[i : i + PASSAGE]) for i in range(len(tokens) - PASSAGE + 1)]
    return 1 - len(set(passages)) / len(passages) if passages else 0.0


def depths(rounds: Sequence[Round]) -> list[list[int]]:
    """[accepted, tested] at each place of the draft, counted from the root: siblings are one test."""
    taken = [len(r.accepted) for r in rounds]
    tested = [n + bool(r.rejected) for n, r in zip(taken, rounds, strict=True)]
    return [[sum(n > depth for n in counts) for counts in (taken, tested)] for depth in range(max(tested))]


# ---------------------------------------------------------------- over requests


def summary(runs: Sequence[Run], reference: Sequence[Run] = ()) -> dict[str, Any]:
    """`report.FIGURES` of one contestant over its runs, not empty. reference: plain decoding's runs."""
    straight, plain = without_loops(runs, reference)
    tokens = sum(len(run.tokens) for run in runs)
    counts = {name: sum(getattr(run, name) for run in runs) for name in (*COUNTS, "forwards", "loops")}
    by_round = lambda part: _share(part, counts["forwards"])  # noqa: E731
    firsts, tpots = [run.first_s for run in runs], [run.tpot_s for run in runs if len(run.tokens) > 1] or [0.0]
    span = sum(run.total_s - run.first_s for run in runs if run.forwards)
    idle = lambda busy: 1 - sum(busy) / span if span else None  # noqa: E731
    pairs = zip_longest(*(run.depths for run in runs), fillvalue=(0, 0))
    places = [[sum(column) for column in zip(*place, strict=True)] for place in pairs]
    return {
        "requests": len(runs),
        "tokens": tokens,
        "tokens_per_s": tokens_per_s(runs),
        "speedup": speedup(runs, reference),
        "speedup_interval": interval(runs, reference),
        "loops": counts["loops"],
        "requests_without_loops": len(straight),
        "tokens_per_s_without_loops": tokens_per_s(straight),
        "speedup_without_loops": speedup(straight, plain),
        "ttft_median_s": median(firsts),
        "ttft_p95_s": float(np.percentile(firsts, 95)),
        "tpot_median_s": median(tpots),
        "tpot_p95_s": float(np.percentile(tpots, 95)),
        "mean_accepted_length": by_round(tokens),
        "acceptance_rate": _share(counts["accepted"], counts["accepted"] + counts["rejected"]),
        **{name: counts[name] for name in COUNTS[:5]},
        "drafted_per_round": by_round(counts["drafted"]),
        "verified_per_round": by_round(counts["pending"]),
        "budget": fmean(run.budget for run in runs),
        "hit_rate": _share(counts["hits"], counts["outcomes"]),
        "acceptance_by_position": [_share(*place) for place in places],
        "tested_by_position": [tested for _, tested in places],
        "paused": sum(run.speculation.startswith("paused") for run in runs),
        "cpu_idle": idle(run.cpu_busy_s for run in runs),
        "gpu_idle": idle(run.gpu_busy_s for run in runs),
        "gap_median_s": median(run.gap_s for run in runs),
    }


def without_loops(runs: Iterable[Run], reference: Iterable[Run]) -> list[list[Run]]:
    """Both without the requests that either of them answered with a loop: one side alone would be flattered."""
    both = [*runs], [*reference]
    loops = {run.request for side in both for run in side if run.loops}
    return [[run for run in side if run.request not in loops] for side in both]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# ---------------------------------------------------------------- speed, and how sure it is

Timings = dict[tuple[str, str, int], np.ndarray]  # by task, question and repeat: tokens and seconds of all turns


def _timings(runs: Iterable[Run]) -> Timings:
    found: Timings = defaultdict(lambda: np.zeros(2))
    for run in runs:
        found[run.task, run.question, run.repeat] += len(run.tokens), run.total_s
    return found


def tokens_per_s(runs: Iterable[Run]) -> float:
    """Mean over questions of tokens / seconds from request to last token (as Spec-Bench); 0 without any."""
    questions: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(2))
    for (task, question, _), timing in _timings(runs).items():
        questions[task, question] += timing
    return fmean([_share(*timing) for timing in questions.values()] or [0.0])


def speedup(runs: Iterable[Run], reference: Iterable[Run]) -> float:
    """Mean over tasks of: mean over questions of tokens/s, by the same of the reference. 0 without shared questions."""
    return _ratio(_paired(runs, reference))


def interval(runs: Iterable[Run], reference: Iterable[Run], draws: int = 400, seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of `speedup`: questions are drawn anew within their task, and repeats within them.

    Both decoders' timings of a question stay together.
    """
    tasks, rng = _paired(runs, reference), random.Random(seed)
    again = lambda values: rng.choices(values, k=len(values))  # noqa: E731
    drawn = ([[again(pairs) for pairs in again(questions)] for questions in tasks] for _ in range(draws))
    low, high = np.percentile([_ratio(each) for each in drawn], (2.5, 97.5))
    return float(low), float(high)


def _paired(runs: Iterable[Run], reference: Iterable[Run]) -> list[list[list[np.ndarray]]]:
    """Task by task, question by question, repeat by repeat what both have measured: ours, then the reference's."""
    own, other = _timings(runs), _timings(reference)
    tasks: dict[str, dict[str, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    for key in sorted(own.keys() & other.keys()):
        tasks[key[0]][key[1]].append(np.array([own[key], other[key]]))
    return [list(questions.values()) for questions in tasks.values()]


def _ratio(tasks: Iterable[Sequence[Sequence[np.ndarray]]]) -> float:
    """The mean over tasks of the ratio of summed speeds."""
    sums = (np.array([sum(pairs) for pairs in questions]) for questions in tasks)
    return fmean([_share(*(each[..., 0] / each[..., 1]).sum(0)) for each in sums] or [0.0])


# ---------------------------------------------------------------- equality


def differences(runs: Iterable[Run], reference: Iterable[Run]) -> list[dict[str, Any]]:
    """The requests whose tokens are not plain decoding's, each with the first differing position."""
    plain = {run.request: run.tokens for run in reference}
    found = []
    for run in runs:
        if (position := first_difference(run.tokens, plain.get(run.request, run.tokens))) is not None:
            place = {"task": run.task, "question": run.question, "turn": run.turn, "repeat": run.repeat}
            found.append({**place, "position": position})
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first place where two sequences differ; the shorter one's length when it begins the other."""
    return next((i for i, (a, b) in enumerate(zip_longest(one, other)) if a != b), None)
