"""What each idea is worth: our decoders with one thing taken away or held fast.

| name | what differs |
|---|---|
| tree-budget-N | duotree verifies N drafted tokens at most, instead of the number that pays |
| paper-budget-N | duodecoding drafts N tokens a round, instead of the measured γ* |
| paper-one-sequence | duodecoding grows one sequence (k = 1), instead of as many as the θ rule opens |
| tree-no-prefetch | duotree drafts beside a forward only below the leaves it verifies: nothing for a rejection |
| tree-in-turns | duotree drafts only while the target rests |
| tree-no-calibration | duotree takes the draft's probabilities as they are, and learns nothing from verdicts |
| tree-no-ngram | duotree without candidates from prompt lookup |
| tree-other-noise | T > 0: the draft ranks with noise of its own, as two samplers without a shared seed would |
| tree-no-noise | T > 0: the draft ranks by probability alone |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from duochat.bench.contestants import Decoder
from duochat.engine.lanes import Candidates
from duochat.engine.sampling import Sampling
from duochat.engine.schedules import Best, Parallel
from duochat.engine.tree import Acceptance, Node, Tree

BUDGETS = (1, 2, 4, 8, 16, 32, 64)


class OneSequence(Parallel):
    """k = 1: the most probable first token alone."""

    SEQUENCES = 1


class InTurns(Best):
    """The draft rests while the target computes."""

    waits_for_prompt = True  # else it would never come to read it
    PATIENCE = 0.8  # it has no other time to draft

    def frontier(self, tree: Tree, verifying: bool) -> list[Node]:
        return [] if verifying else super().frontier(tree, verifying)


class NoPrefetch(Best):
    """Beside a forward only what follows the verified leaves is drafted: a rejection finds nothing prepared."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.verified: set[Node] = set()
        self.inner: set[Node] = set()  # nodes with a verified child

    def pending(self, tree: Tree) -> list[Node]:
        chosen = super().pending(tree)
        self.verified, self.inner = set(chosen), {node.parent for node in chosen if node.parent}
        return chosen

    def frontier(self, tree: Tree, verifying: bool) -> list[Node]:
        if not verifying or self.reason or self.reading:
            return super().frontier(tree, verifying)
        nodes = [n for n in tree.frontier(64) if n.reach >= self._smallest and not self._beside(n, tree.root)]
        return nodes[: self._batch([n.reach for n in nodes])]

    def _beside(self, node: Node, root: Node) -> bool:
        """Whether the way to the node leaves the verified subtree before one of its leaves."""
        while node is not root and node not in self.verified and node.parent is not None:
            node = node.parent
            if node in self.inner:
                return True
        return False


class NoLookup(Best):
    """The draft model's candidates alone."""

    def graft(self, tree: Tree) -> None:
        pass


def as_drafted(origin: str, rank: int, prob: float) -> float:
    """The draft's own probability in place of a learned acceptance."""
    return prob if origin == "model" else Acceptance.prior(origin, rank, prob)


class Reseeded:
    """A drafter that is told another sampling than the target."""

    def __init__(self, drafter: Any, change: Callable[[Sampling], Sampling]) -> None:
        self.drafter, self.change = drafter, change
        self.candidates, self.thread = drafter.candidates, drafter.thread

    def expand(
        self, context: Sequence[int], nodes: Sequence[Node], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> tuple[list[Candidates], float]:
        return self.drafter.expand(context, nodes, self.change(sampling), cancelled)

    def interrupt(self) -> None:
        self.drafter.interrupt()


def other_noise(sampling: Sampling) -> Sampling:
    return replace(sampling, seed=sampling.seed ^ 0x5EED)


def no_noise(sampling: Sampling) -> Sampling:
    return replace(sampling, temperature=0.0)


def variants(engine: Any, temperature: float) -> list[Decoder]:
    """All ablations that mean something at this temperature and on these devices."""
    widest = engine.costs.widest - 1
    found = [_fixed("tree", "duotree", engine, budget) for budget in BUDGETS if budget <= widest]
    found += [_fixed("paper", "duodecoding", engine, budget) for budget in BUDGETS if budget <= widest]
    found.append(_scheduled("paper-one-sequence", "duodecoding", engine, OneSequence))
    found.append(_scheduled("tree-no-prefetch", "duotree", engine, NoPrefetch))
    found.append(_scheduled("tree-in-turns", "duotree", engine, InTurns))
    found.append(_variant("tree-no-calibration", "duotree", engine, acceptance=as_drafted))
    found.append(_scheduled("tree-no-ngram", "duotree", engine, NoLookup))
    if temperature > 0:
        noises = (("tree-other-noise", other_noise), ("tree-no-noise", no_noise))
        found += [_variant(n, "duotree", engine, drafter=Reseeded(engine.drafter, change)) for n, change in noises]
    return found


def _variant(name: str, decoder: str, engine: Any, **changes: Any) -> Decoder:
    variant = Decoder(name, engine)
    for attribute, value in {"kind": "ablation", "decoder": decoder, **changes}.items():
        setattr(variant, attribute, value)
    return variant


def _fixed(prefix: str, decoder: str, engine: Any, budget: int) -> Decoder:
    return _variant(f"{prefix}-budget-{budget}", decoder, engine, budget=budget)


def _scheduled(name: str, decoder: str, engine: Any, schedule: Callable[..., Any]) -> Decoder:
    return _variant(name, decoder, engine, schedules={decoder: schedule})
