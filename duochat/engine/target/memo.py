"""Which tokens the KV cache holds, and in which slots.

A key carries its position inside (rotary), so a slot's place in the cache means nothing: the mask says which slots a
row sees. Hence an accepted node simply stays where it was written; nothing is ever moved or computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Edge = tuple[int, int]  # (token, index of the parent in the tree; -1: the root)


class Memo:
    """The committed tokens in the cache, their slots, and the tree that was verified last."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens: list[int] = []
        self.slots: list[int] = []
        self.used = np.zeros(capacity, dtype=bool)
        self._tree: Sequence[Edge] = ()
        self._tree_slots: list[int] = []

    @property
    def highest(self) -> int:
        """The highest slot that holds a committed token, -1 when none does."""
        return int(np.flatnonzero(self.used)[-1]) if self.used.any() else -1

    def match(self, context: Sequence[int]) -> int:
        """Keep what `context` shares with the cache, and return how many of its tokens need no forward.

        The last token of the context is never among them: its row gives the next token.
        """
        limit = len(context) - 1
        kept = _common_prefix(self.tokens, context, limit)
        if kept == len(self.tokens):
            self._adopt(context, limit)
        else:
            self.used[self.slots[kept:]] = False
            del self.tokens[kept:], self.slots[kept:]
        self._tree, self._tree_slots = (), []
        return len(self.tokens)

    def _adopt(self, context: Sequence[int], limit: int) -> None:
        """Follow the context down the last tree; the nodes on its path become committed."""
        children: dict[Edge, int] = {}
        for i, (token, parent) in enumerate(self._tree):
            children.setdefault((token, parent), i)
        node = -1
        while len(self.tokens) < limit and (context[len(self.tokens)], node) in children:
            node = children[context[len(self.tokens)], node]
            self.commit([self._tree[node][0]], [self._tree_slots[node]])

    def free(self, count: int) -> list[int]:
        """The lowest `count` slots that hold nothing of the committed tokens."""
        found = np.flatnonzero(~self.used)[:count]
        assert len(found) == count, "the cache is smaller than context and tree"
        return found.tolist()

    def commit(self, tokens: Sequence[int], slots: Sequence[int]) -> None:
        """`tokens` follow the committed ones and were written to `slots`."""
        self.tokens.extend(tokens)
        self.slots.extend(slots)
        self.used[list(slots)] = True

    def remember(self, tree: Sequence[Edge], slots: Sequence[int]) -> None:
        """A tree below the last committed token was written to `slots`; it lasts until the next `match`."""
        self._tree, self._tree_slots = tuple(tree), list(slots)

    def forget(self) -> None:
        """Nothing in the cache is valid any more."""
        self.__init__(self.capacity)


def _common_prefix(held: list[int], context: Sequence[int], limit: int) -> int:
    """Length of the longest common prefix, at most `limit`."""
    end = min(len(held), limit)
    if held[:end] == list(context[:end]):
        return end
    return next(i for i in range(end) if held[i] != context[i])
