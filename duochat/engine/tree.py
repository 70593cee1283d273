"""The draft tree: nodes, candidates, expansion order, selection of a subtree, re-rooting. Pure: no models, no clock.

The tree hangs below the last committed token (the root) and lives over rounds. A node's `reach` is the estimated
probability that the target arrives at it: the product of the calibrated acceptance of the edges from the root.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

Accept = Callable[[str, int, float], float]  # (origin, rank, draft probability) -> probability of acceptance


@dataclass(slots=True, eq=False)
class Node:
    """One token of the tree. `slot` belongs to the drafter: where the node's KV lies, None while it has none."""

    token: int
    parent: Node | None
    position: int
    prob: float = 1.0
    rank: int = 0
    origin: str = "model"
    edge: float = 1.0  # calibrated acceptance given that the parent is reached
    reach: float = 1.0
    id: int = -1  # set when the node counts as drafted (expanded by the draft or sent to the target)
    expanded: bool = False
    children: list[Node] = field(default_factory=list)
    slot: object | None = None

    def child(self, token: int) -> Node | None:
        return next((c for c in self.children if c.token == token), None)
