"""Which tokens the KV cache holds, and in which slots.

A key carries its position inside (rotary), so a slot's place in the cache means nothing: the mask says which slots a
row sees. Hence an accepted node simply stays where it was written; nothing is ever moved or computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from duochat.engine.lanes import Edge, common


class Memo:
    """The committed tokens in the cache, their slots, and the tree that was verified last.

    `used`: their slots as the bits of a number, so that a round's questions are a few operations.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.tokens: list[int] = []
        self.slots: list[int] = []
        self.used = 0
        self._tree: dict[Edge, int] = {}  # the last tree: (token, slot of the parent or -1) to the slot

    @property
    def highest(self) -> int:
        """The highest slot that holds a committed token, -1 when none does."""
        return self.used.bit_length() - 1

    def match(self, context: Sequence[int]) -> int:
        """Keep what `context` shares with the cache, and return how many of its tokens need no forward.

        The last token of the context is never among them: its row gives the next token.
        """
        limit = len(context) - 1
        kept = min(common(self.tokens, context), limit)
        if kept == len(self.tokens):
            self._adopt(context[kept:limit])
        else:
            self.used ^= _bits(self.slots[kept:])
            del self.tokens[kept:], self.slots[kept:]
        self._tree = {}
        return len(self.tokens)

    def _adopt(self, following: Sequence[int]) -> None:
        """Follow the tokens down the last tree; the nodes on their path become committed."""
        path = [-1]
        for token in following:
            if (slot := self._tree.get((token, path[-1]))) is None:
                break
            path.append(slot)
        self.commit(following[: len(path) - 1], path[1:])

    def free(self, count: int) -> list[int]:
        """The lowest `count` slots that hold nothing of the committed tokens."""
        lowest = (~self.used & self.used + 1).bit_length() - 1
        above = self.used >> lowest  # a short number, as a rule
        found = list(islice((s for s in range(lowest, self.capacity) if not above >> s - lowest & 1), count))
        assert len(found) == count, "the cache is smaller than context and tree"
        return found

    def commit(self, tokens: Sequence[int], slots: Sequence[int]) -> None:
        """`tokens` follow the committed ones and were written to `slots`."""
        self.tokens.extend(tokens)
        self.slots.extend(slots)
        self.used |= _bits(slots)

    def remember(self, tree: Sequence[Edge], slots: Sequence[int]) -> None:
        """A tree below the last committed token was written to `slots`; it lasts until the next `match`."""
        self._tree = {(token, slots[above] if above >= 0 else -1): slots[i] for i, (token, above) in enumerate(tree)}


def _bits(slots: Sequence[int]) -> int:
    """The number whose bits are these slots."""
    packed = bytearray(max(slots, default=0) // 8 + 1)
    for slot in slots:
        packed[slot >> 3] |= 1 << (slot & 7)
    return int.from_bytes(packed, "little")
