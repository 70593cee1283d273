"""From rounds to figures: one record (`Run`) for each request, and the summaries over them. Pure.

Facts and sums are stored; rates are derived. Times are seconds. Definitions: DESIGN.md, section 2.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from duochat.engine.rounds import Round, total

REFERENCE = "autoregressive"  # what every decoder is compared with
RIVAL = "generate"  # the peer that speedups are given against too
PARTS = ("prefill", "verify", "transfer", "wait", "bookkeeping", "hidden")  # where a request's time goes
DRAFT_PARTS = ("decode", "choosing")  # what the CPU lane does meanwhile


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
    cpu_busy_s: float = 0.0  # between first and last token, as the next two
    gpu_busy_s: float = 0.0
    overlap_s: float = 0.0  # both devices busy
    split_s: dict[str, float] = field(default_factory=dict)  # PARTS, which add up to total_s
    draft_s: dict[str, float] = field(default_factory=dict)  # DRAFT_PARTS
    gap_s: float = 0.0  # median host time between two forwards, waiting for a draft apart
    depths: list[list[int]] = field(default_factory=list)  # [accepted, tested] by place in the draft, from the first on
    ranks: list[int] = field(default_factory=list)  # accepted by rank: [never drafted there, rank 1, rank 2, ...]
    ngram: int = 0  # accepted tokens that prompt lookup alone had found
    widths: dict[str, list[float]] = field(default_factory=dict)  # rows of a forward -> [forwards, seconds]
    speculation: str = ""  # of the last round
    reason: str = ""
    host_bytes: int = 0  # peak resident memory of the process
    gpu_bytes: int = 0  # peak GPU memory held by tensors

    @property
    def key(self) -> tuple[str, str, int, int, str]:
        """What tells a run from the others of a benchmark."""
        return self.task, self.question, self.turn, self.repeat, self.decoder

    @property
    def decode_s(self) -> float:
        """Seconds between first and last token."""
        return self.total_s - self.first_s

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first; 0 for an answer of one token."""
        return self.decode_s / (len(self.tokens) - 1) if len(self.tokens) > 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Run:
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in raw.items() if k in known})


# ---------------------------------------------------------------- one request


def of_rounds(rounds: Sequence[Round], total_s: float) -> dict[str, Any]:
    """The fields of a `Run` that its rounds tell. total_s: request to last token by the caller's own clock."""
    stats = total(rounds)
    first = next((r.ended for r in rounds if r.tokens), 0.0)
    last = max((r.ended for r in rounds if r.tokens), default=0.0)
    gpu = [clipped for r in rounds if (clipped := _clip(r.started, r.ended, first, last))]
    cpu = [clipped for r in rounds for b in r.batches if (clipped := _clip(b.started, b.ended, first, last))]
    return {
        "tokens": [token for r in rounds for token in r.tokens],
        "finish": rounds[-1].finish or "",
        "forwards": stats.rounds,
        **{name: getattr(stats, name) for name in ("drafted", "accepted", "rejected", "ignored", "pending")},
        "hits": stats.hits,
        "outcomes": stats.outcomes,
        "budget": fmean(stats.budgets),
        "cpu_busy_s": _length(cpu),
        "gpu_busy_s": _length(gpu),
        "overlap_s": overlap(cpu, gpu),
        "split_s": split(rounds, total_s),
        "draft_s": draft_split(rounds),
        "gap_s": median([*gaps(rounds)] or [0.0]),
        "depths": depths(rounds),
        **origins(rounds),
        "widths": widths(rounds),
        "speculation": rounds[-1].speculation,
        "reason": rounds[-1].reason,
    }


def _clip(start: float, end: float, low: float, high: float) -> tuple[float, float] | None:
    start, end = max(start, low), min(end, high)
    return (start, end) if end > start else None


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def overlap(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float:
    """Seconds that lie in both of two lists of intervals; each list is in order and free of overlaps."""
    shared, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        shared += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return shared


def gaps(rounds: Sequence[Round]) -> list[float]:
    """Host seconds between the forwards of an answer, without what was spent waiting for a draft."""
    return [max(0.0, b.started - a.ended - b.waited) for a, b in pairwise(rounds) if b.tokens]


def split(rounds: Sequence[Round], total_s: float) -> dict[str, float]:
    """The request's time by PARTS; `hidden` is what no record explains."""
    forwards = [r for r in rounds if r.tokens]
    decode = [r for r in forwards if r.phase != "prefill"]
    parts = {
        "prefill": sum(r.ended - r.started for r in forwards if r.phase == "prefill"),
        "verify": sum(r.ended - r.started - r.transfer for r in decode),
        "transfer": sum(r.transfer for r in decode),
        "wait": sum(r.waited for r in forwards),
        "bookkeeping": sum(gaps(forwards)),
    }
    return {**parts, "hidden": total_s - sum(parts.values())}


def draft_split(rounds: Sequence[Round]) -> dict[str, float]:
    """Seconds of the CPU lane: decoding, and choosing candidates from the logits."""
    batches = [b for r in rounds for b in r.batches]
    choosing = sum(b.sampling for b in batches)
    return {"decode": sum(b.ended - b.started for b in batches) - choosing, "choosing": choosing}


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


def origins(rounds: Sequence[Round]) -> dict[str, Any]:
    """Which of the draft's choices the target took: `ranks` (index 0: tested, and none of them) and `ngram`."""
    drafts = {d.id: d for r in rounds for d in r.drafted}
    ranks, ngram = [sum(bool(r.rejected) for r in rounds)], 0
    for draft in (drafts[i] for r in rounds for i in r.accepted):
        ranks += [0] * (draft.rank + 1 - len(ranks))
        ranks[draft.rank] += 1
        ngram += draft.origin == "ngram"
    return {"ranks": ranks, "ngram": ngram}


def widths(rounds: Sequence[Round]) -> dict[str, list[float]]:
    """Rows of a forward -> [how many forwards, their seconds together], the prompt's forward apart."""
    found: dict[str, list[float]] = {}
    for r in rounds:
        if r.tokens and r.phase != "prefill":
            cell = found.setdefault(str(len(r.pending) + 1), [0, 0.0])
            cell[0] += 1
            cell[1] += r.ended - r.started
    return found


# ---------------------------------------------------------------- over requests


def summary(runs: Sequence[Run], reference: Sequence[Run] = (), rival: Sequence[Run] = ()) -> dict[str, Any]:
    """Figures of one decoder over its runs, not empty. reference: plain decoding's runs; rival: another baseline's.

    Names and meanings: `report.FIGURES`.
    """
    return {
        **_speed(runs, reference, rival),
        **_latency(runs),
        **_drafting(runs),
        **_devices(runs),
    }


def _sum(runs: Iterable[Run], name: str) -> float:
    return sum(getattr(run, name) for run in runs)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _speed(runs: Sequence[Run], reference: Sequence[Run], rival: Sequence[Run]) -> dict[str, Any]:
    tokens, seconds = sum(len(run.tokens) for run in runs), _sum(runs, "total_s")
    others = _share(sum(len(run.tokens) for run in reference), _sum(reference, "total_s"))
    return {
        "requests": len(runs),
        "tokens": tokens,
        "tokens_per_s": fmean(speeds(runs).values()),
        "tokens_per_s_total": _share(tokens, seconds),
        "speedup": speedup(runs, reference),
        "speedup_total": _share(_share(tokens, seconds), others),
        "speedup_over_generate": speedup(runs, rival),
    }


def _latency(runs: Sequence[Run]) -> dict[str, Any]:
    firsts = [run.first_s for run in runs]
    tpots = [run.tpot_s for run in runs if len(run.tokens) > 1] or [0.0]
    return {
        "ttft_median_s": median(firsts),
        "ttft_p95_s": percentile(firsts, 95),
        "tpot_median_s": median(tpots),
        "tpot_p95_s": percentile(tpots, 95),
    }


def _drafting(runs: Sequence[Run]) -> dict[str, Any]:
    counts = {name: _sum(runs, name) for name in ("drafted", "accepted", "rejected", "ignored", "pending", "ngram")}
    forwards, places = _sum(runs, "forwards"), added(run.depths for run in runs)
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
        "share_by_rank": by_rank(runs),
        "paused": sum(run.speculation == "paused" for run in runs),
    }


def _devices(runs: Sequence[Run]) -> dict[str, Any]:
    spans, seconds = _sum((run for run in runs if run.forwards), "decode_s"), _sum(runs, "total_s")
    parts = {part: _share(sum(run.split_s.get(part, 0.0) for run in runs), seconds) for part in PARTS}
    drafting = {part: _share(sum(run.draft_s.get(part, 0.0) for run in runs), seconds) for part in DRAFT_PARTS}
    return {
        "cpu_idle": 1 - _share(_sum(runs, "cpu_busy_s"), spans) if spans else None,
        "gpu_idle": 1 - _share(_sum(runs, "gpu_busy_s"), spans) if spans else None,
        "overlap": _share(_sum(runs, "overlap_s"), spans),
        "gap_median_s": median(run.gap_s for run in runs),
        "split": parts,
        "draft_split": drafting,
        "seconds_by_width": by_width(runs),
        "host_peak_bytes": max(run.host_bytes for run in runs),
        "gpu_peak_bytes": max(run.gpu_bytes for run in runs),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks. values: not empty."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def speeds(runs: Iterable[Run]) -> dict[tuple[str, str], float]:
    """Tokens per second of each question, over its turns and repeats."""
    sums: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        cell = sums.setdefault((run.task, run.question), [0, 0.0])
        cell[0] += len(run.tokens)
        cell[1] += run.total_s
    return {key: tokens / seconds for key, (tokens, seconds) in sums.items() if seconds}


def speedup(runs: Iterable[Run], reference: Iterable[Run]) -> float:
    """Mean over tasks of: mean over questions of tokens/s, by the same of the reference. 0 without shared questions."""
    own, other = speeds(runs), speeds(reference)
    by_task: dict[str, list[tuple[float, float]]] = {}
    for key in own.keys() & other.keys():
        by_task.setdefault(key[0], []).append((own[key], other[key]))
    return _ratio(by_task.values())


def _ratio(tasks: Iterable[Sequence[tuple[float, float]]]) -> float:
    """Pairs of speeds, grouped by task -> the mean over tasks of the ratio of their sums."""
    return fmean([sum(a for a, _ in pairs) / sum(b for _, b in pairs) for pairs in tasks] or [0.0])


def added(lists: Iterable[Sequence[Sequence[int]]]) -> list[list[int]]:
    """Pairs summed place by place; lists may differ in length."""
    result: list[list[int]] = []
    for pairs in lists:
        result += [[0, 0] for _ in range(len(pairs) - len(result))]
        for cell, (accepted, tested) in zip(result, pairs, strict=False):
            cell[0] += accepted
            cell[1] += tested
    return result


def by_rank(runs: Iterable[Run]) -> list[float]:
    """Of all tested places, the share where the target took the draft's r-th choice; index 0: none of them."""
    counts: list[int] = []
    for run in runs:
        counts += [0] * (len(run.ranks) - len(counts))
        for rank, count in enumerate(run.ranks):
            counts[rank] += count
    places = sum(counts)
    return [count / places for count in counts] if places else []


def by_width(runs: Iterable[Run]) -> dict[str, float]:
    """Mean seconds of a forward by its rows."""
    sums: dict[int, list[float]] = {}
    for run in runs:
        for width, (count, seconds) in run.widths.items():
            cell = sums.setdefault(int(width), [0, 0.0])
            cell[0] += count
            cell[1] += seconds
    return {str(width): seconds / count for width, (count, seconds) in sorted(sums.items())}


# ---------------------------------------------------------------- equality and confidence


def differences(runs: Iterable[Run], reference: Iterable[Run]) -> list[dict[str, Any]]:
    """The requests whose tokens are not plain decoding's, each with the first differing position."""
    plain = {run.key[:4]: run.tokens for run in reference}
    found = []
    for run in runs:
        other = plain.get(run.key[:4])
        if other is not None and run.tokens != other:
            place = {"task": run.task, "question": run.question, "turn": run.turn, "repeat": run.repeat}
            found.append({**place, "position": first_difference(run.tokens, other)})
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Index of the first place where two sequences differ; the shorter one's length when it begins the other."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def interval(runs: Iterable[Run], reference: Iterable[Run], draws: int = 400, seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of `speedup`: questions are drawn anew within their task, and repeats within them.

    Both decoders' timings of a question stay together.
    """
    own, other = _timings(runs), _timings(reference)
    tasks: dict[str, list[list[Timing]]] = {}
    for key in sorted(own.keys() & other.keys()):
        repeats = own[key].keys() & other[key].keys()
        tasks.setdefault(key[0], []).append([(*own[key][n], *other[key][n]) for n in sorted(repeats)])
    rng = random.Random(seed)
    values = [_ratio([_drawn(questions, rng) for questions in tasks.values()]) for _ in range(draws if tasks else 0)]
    return (percentile(values, 2.5), percentile(values, 97.5)) if values else (0.0, 0.0)


Timing = tuple[float, ...]  # tokens, seconds, and the same of the reference


def _timings(runs: Iterable[Run]) -> dict[tuple[str, str], dict[int, tuple[float, float]]]:
    """Tokens and seconds of each question, by repeat."""
    found: dict[tuple[str, str], dict[int, tuple[float, float]]] = {}
    for run in runs:
        repeats = found.setdefault((run.task, run.question), {})
        tokens, seconds = repeats.get(run.repeat, (0.0, 0.0))
        repeats[run.repeat] = tokens + len(run.tokens), seconds + run.total_s
    return found


def _drawn(questions: Sequence[Sequence[Timing]], rng: random.Random) -> list[tuple[float, float]]:
    """As many questions, drawn with replacement, each as the two speeds over repeats drawn alike."""
    speeds_of = []
    for repeats in rng.choices(questions, k=len(questions)):
        tokens, seconds, others, other_seconds = (
            sum(c) for c in zip(*rng.choices(repeats, k=len(repeats)), strict=True)
        )
        speeds_of.append((tokens / seconds, others / other_seconds))
    return speeds_of
