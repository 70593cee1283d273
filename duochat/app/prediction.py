"""Predicted speedup of each schedule over plain decoding, from c, α, γ, k and the share of prefetched outcomes.

All times are in target steps: one target forward of width 1 takes 1, one drafted token takes c. Each drafted token is
taken to be accepted with probability α, whatever came before it. Pure arithmetic; lesson.yaml states the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

SECOND_CHOICE = 0.5  # share of the draft's misses that each further sequence catches
FURTHEST = 40  # budgets that curves go to


@dataclass(frozen=True)
class Case:
    """c: T_draft/T_target. alpha: acceptance. gamma: drafted tokens a round. k: sequences. hits: share of outcomes
    prefetched. widen: share of a target step that each verified token adds (0: a forward costs the same at any width).
    rest: time of a round in which the target rested, where it was measured; None: what the schedule makes it wait.
    waited: the part of it in which it waited for a draft; None: all.
    """

    c: float
    alpha: float
    gamma: float
    k: int = 1
    hits: float = 0.8
    widen: float = 0.0
    rest: float | None = None
    waited: float | None = None


class Outcome(NamedTuple):
    """What a schedule makes of a round: tokens written, and its time in two parts, the target at work and at rest."""

    tokens: float
    forward: float
    rest: float

    @property
    def rate(self) -> float:
        """Speedup over plain decoding."""
        return self.tokens / (self.forward + self.rest)


def emitted(alpha: float, tested: float) -> float:
    """Expected tokens of a forward that tests a chain: 1 + α + α² + … + α^tested."""
    return tested + 1 if alpha >= 1 else (1 - alpha ** (tested + 1)) / (1 - alpha)


def sequential(case: Case) -> Outcome:
    """Draft γ tokens, then verify them (arXiv 2211.17192)."""
    rest = case.gamma * case.c if case.rest is None else case.rest
    return Outcome(emitted(case.alpha, case.gamma), 1 + case.gamma * case.widen, rest)


def chain(case: Case) -> Outcome:
    """The paper's schedule: k sequences of γ/k tokens beside each forward, one pending chain, nothing after a miss."""
    length = max(1.0, case.gamma / case.k)
    start = 1 - (1 - case.alpha) * SECOND_CHOICE ** (case.k - 1)
    full = start / (1 + start - start * case.alpha ** (length - 1))
    tokens = full * emitted(case.alpha, length - 1) + (1 - full)
    forward = 1 + full * (length - 1) * case.widen
    return Outcome(tokens, forward, _behind(case, forward) if case.rest is None else case.rest)


def prefetch(case: Case) -> Outcome:
    """Drafts also wait below the likely rejections; after a miss the target rests for γ new ones, or for as many as a
    measured rest leaves time for."""
    forward = 1 + case.gamma * case.widen
    behind, wait = _behind(case, forward), (1 - case.hits) * case.gamma * case.c
    rest = behind + wait if case.rest is None else case.rest
    waited = rest if case.waited is None else case.waited
    new = case.gamma * min(1.0, max(0.0, waited - behind) / wait) if wait else case.gamma
    return Outcome(
        case.hits * emitted(case.alpha, case.gamma) + (1 - case.hits) * emitted(case.alpha, new), forward, rest
    )


def _behind(case: Case, forward: float) -> float:
    """How long γ drafted tokens take beyond the forward beside them."""
    return max(0.0, case.gamma * case.c - forward)


SCHEDULES = {"sequential": sequential, "chain": chain, "prefetch": prefetch}


def best(name: str, case: Case, most: int) -> tuple[int, float]:
    """(γ, speedup) of the best whole budget from 1 to most."""
    rates = {n: SCHEDULES[name](replace(case, gamma=n)).rate for n in range(1, most + 1)}
    return max(rates.items(), key=lambda item: item[1])


def what_if(measured: Case, own: str = "") -> dict[str, Any]:
    """For the panel: speedups at this γ, each schedule's best γ, curves over γ, and γ* = 1/c.

    own: the schedule whose rest was measured; the others wait as their formulas say."""
    budgets, case = list(range(1, FURTHEST + 1)), replace(measured, rest=None, waited=None)
    now = {name: schedule(measured if name == own else case).rate for name, schedule in SCHEDULES.items()}
    return {
        "case": asdict(case),
        "budget": 1 / case.c,
        "now": {"plain": 1.0, **now},
        "best": {name: best(name, case, FURTHEST) for name in SCHEDULES},
        "gammas": budgets,
        "curves": {name: [s(replace(case, gamma=n)).rate for n in budgets] for name, s in SCHEDULES.items()},
    }


def case_from(action: Mapping[str, Any]) -> Case:
    """The panel's sliders, held to sane ranges."""

    def within(name: str, low: float, high: float, default: float) -> float:
        value = action.get(name)
        return min(high, max(low, float(default if value is None else value)))

    return Case(
        c=within("c", 0.005, 2, 0.125),
        alpha=within("alpha", 0, 0.99, 0.7),
        gamma=within("gamma", 1, FURTHEST, 8),
        k=int(within("k", 1, 8, 1)),
        hits=within("hits", 0, 1, 0.8),
        widen=within("widen", 0, 0.5, 0),
        **{name: within(name, 0, 100, 0) for name in ("rest", "waited") if action.get(name) is not None},
    )
