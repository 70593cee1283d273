"""What a recorded answer was measured to be, and what the formulas predict of it. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from statistics import median
from typing import Any

from duochat.app import hardware
from duochat.app.prediction import SCHEDULES, Case, Outcome
from duochat.chat.recording import Recording
from duochat.engine.rounds import Round

FASTER = (1, 2, 4, 8)  # GPUs to compare the budget with
SCHEDULE_OF = {"speculative": "sequential", "duodecoding": "chain", "duotree": "prefetch"}  # by decoder
FAR = 0.15  # a prediction that misses by more is explained


def shared(machine: Mapping[str, Any]) -> bool:
    """Do draft and target compute on one processor?"""
    return bool(machine.get("shares_cores", str(machine.get("target_device", "")).startswith("CPU")))


def measured_costs(recording: Recording) -> dict[str, Any]:
    """{target, draft: seconds of a forward and of a drafted token, c, budget, widen, source, curve: was the cost of
    wider forwards measured?}.

    From the machine's calibration if the recording carries one, else from the recording's own times.
    """
    table = hardware.table(recording.costs)
    if table["target"] and table["draft"]:
        target, draft = table["target"][0][1], table["draft"][0][1]
        source = "measured on its machine at start, each alone"
    else:
        target, draft = _seen_costs(recording.answer.rounds)
        source = "taken from this answer's own times"
    target, draft = _digits(target), _digits(draft)
    return {"target": target, "draft": draft, "plain": recording.costs.get("plain") or target, "c": draft / target,
            "budget": target / draft, "widen": hardware.widening(table["target"]), "source": source,
            "curve": len(table["target"]) > 1}  # fmt: skip


def _digits(seconds: float) -> float:
    """In the four digits that are shown: what is computed from them is what a reader computes."""
    return float(f"{seconds:.4g}")


def _seen_costs(rounds: list[Round]) -> tuple[float, float]:
    """Median seconds of a forward and of one drafted token; 1/8 of a forward where nothing was drafted."""
    forwards = [r.ended - r.started for r in rounds if r.phase != "prefill"] or [1.0]
    batches = [(b.ended - b.started) / max(1, b.size) for r in rounds for b in r.batches]
    target = max(1e-6, median(forwards))
    return target, max(1e-6, median(batches)) if batches else target / 8


def arithmetic(costs: Mapping[str, float]) -> list[dict[str, float]]:
    """The budget on this machine, and with a GPU that is 2, 4, 8 times as fast."""
    forwards = {f: _digits(costs["target"] / f) for f in FASTER}
    return [
        {"factor": f, "target": target, "draft": costs["draft"], "budget": target / costs["draft"]}
        for f, target in forwards.items()
    ]


def measured_point(recording: Recording, costs: Mapping[str, float]) -> dict[str, float | None]:
    """Where this answer lies in the what-if panel. gamma: what a step verified of the tokens that fit beside it."""
    stats = recording.answer.stats
    verified = [len(r.pending) for r in recording.answer.rounds if r.pending]
    return {
        "alpha": stats.acceptance_rate if stats.tested else None,
        "gamma": max(1.0, min(costs["budget"], sum(verified) / len(verified))) if verified else None,
        "tau": stats.mean_accepted_length,
        "speedup": stats.rate * costs["plain"] if stats.rate else None,
        "hits": stats.hits / stats.outcomes if stats.outcomes else None,
    }


def predicted(recording: Recording, costs: Mapping[str, float]) -> dict[str, Any] | None:
    """What the formula of its schedule says of this answer, from its own acceptance, hits and waits: {schedule, case,
    rate, gap}; None where nothing was drafted. gap: what explains a miss of more than FAR, "" where there is none."""
    point, schedule = measured_point(recording, costs), SCHEDULE_OF.get(recording.options.decoder)
    if not schedule or point["alpha"] is None:
        return None
    forward, rest, waited = _seen_round(recording.answer.rounds, costs["plain"])
    gamma, hits = round(point["gamma"]), point["hits"] or 0.0
    case = Case(costs["c"], point["alpha"], gamma, 1, hits, costs["widen"], rest, waited)
    told = SCHEDULES[schedule](case)
    far = abs((point["speedup"] or told.rate) / told.rate - 1) > FAR
    gap = _gap(told, point["tau"], forward, costs["plain"], shared(recording.hardware)) if far else ""
    return {"schedule": schedule, "case": asdict(case), "rate": told.rate, "gap": gap}


def _seen_round(rounds: list[Round], plain: float) -> tuple[float, float, float]:
    """Time of a round in which the target worked, rested and, of that, waited for a draft: mean after the first, in
    plain forwards."""
    pairs = list(pairwise(rounds))
    times = [(r.ended - r.started, max(0.0, r.started - before.ended), r.waited) for before, r in pairs]
    forward, rest, waited = (sum(column) / len(pairs) / plain for column in zip(*times, strict=True))
    return forward, rest, min(rest, waited)


def _gap(told: Outcome, tau: float, forward: float, plain: float, beside: bool) -> str:
    """The parts of a round in which a prediction misses, in words."""
    parts = []
    if abs(forward / told.forward - 1) > FAR / 2:
        why = " (draft and target share one processor)" if beside else ""
        parts.append(
            f"a step of the target took {1000 * forward * plain:.3g} ms and not "
            f"{1000 * told.forward * plain:.3g} ms as measured alone{why}"
        )
    if abs(tau / told.tokens - 1) > FAR / 2:
        parts.append(
            f"a step wrote {tau:.2f} tokens where the formula expects {told.tokens:.2f} (it takes every guess to be "
            "right with the same chance; real text comes in easy and hard stretches)"
        )
    return f"What explains the gap: {', and '.join(parts)}." if parts else ""
