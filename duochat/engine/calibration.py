"""All that is measured of a pair at its first start: each device's curve, and what drafting costs the target.

The last is taken from the decoding loop itself, with all that a lane does there.
"""

from __future__ import annotations

from copy import deepcopy
from statistics import median
from types import SimpleNamespace

from duochat.engine.costs import Costs, available_cores, measure
from duochat.engine.decoding import Request, decode
from duochat.engine.lanes import Drafter, Target
from duochat.engine.rounds import Round
from duochat.engine.schedules import Schedule
from duochat.engine.tree import Node, Tree

CONTEXT = 128  # tokens, or a third of a shorter context
ROUNDS = 40


def calibrate(target: Target, drafter: Drafter | None) -> Costs:
    """Measure both devices; seconds, in which nothing else should run. drafter: None when there is none."""
    costs = measure(target, drafter, available_cores())
    if drafter is not None:
        alone = costs.at_once or costs
        alone.contention = contention(target, drafter, costs)
        costs.turns = costs is not alone and in_turns(costs)
    return costs


def in_turns(costs: Costs, acceptance: float = 0.7) -> bool:
    """Whether the best chain gives more tokens per second when each lane has all cores for a while."""
    best = lambda c, delay: max(c.rate(acceptance, n, delay) for n in range(1, 9))  # noqa: E731
    return best(costs, 1.0) > best(costs.at_once, costs.at_once.contention)


class Alternating(Schedule):
    """Drafts without pause beside every other forward, and verifies nothing."""

    drafts = parallel = True
    working = False

    def frontier(self, tree: Tree, verifying: bool) -> list[Node]:
        return tree.frontier(4) if self.working else []

    def observe(self, r: Round) -> None:
        self.working = not self.working


def contention(target: Target, drafter: Drafter, costs: Costs) -> float:
    """The share of its speed that a forward loses beside a draft lane that never rests; it rests every other round."""
    length = target.context_length
    same = {name: getattr(target, name) for name in ("vocabulary", "begin", "shares_cores", "set_threads")}
    endless = SimpleNamespace(eos=frozenset(), context_length=length, **same)
    context = [token % target.vocabulary for token in range(min(CONTEXT, length // 3))]  # of no meaning
    request = Request(max_tokens=ROUNDS, decoder="alternating")
    rounds = decode(context, request, endless, drafter, deepcopy(costs), schedules={"alternating": Alternating})
    told = [r for r in rounds if r.speculation == "on"][1:]  # the draft has read its prompt
    if len(told) < ROUNDS / 4:  # the draft failed
        return 0.0
    beside, alone = ([r.ended - r.started for r in told if r.index % 2 == odd] for odd in (1, 0))
    return max(0.0, 1 - median(alone) / median(beside))
