"""One forward's input as one array of 32-bit integers, so that it crosses to the device in a single copy.

Rows stand as [padding | uncached tail of the context | tree], so the last rows are always those with an answer. Row i
sees the committed slots and its ancestors among the rows. Sections of the array, for `width` rows and a KV span of
`span` slots: the sampling parameters; token, position, slot, parent row and noise key of each row; the ancestors of
each row and the committed slots as bits, lowest bit first. (Compiled code takes the rows' sections wherever they
begin, but for the very first places, which are code of their own.)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log
from struct import pack

from duochat.engine.pytorch.memo import Edge, Memo
from duochat.engine.pytorch.shapes import Shape, words
from duochat.engine.sampling import Sampling, key

LARGEST = 2.0**127  # as a 32-bit float


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens of one forward: `tail` follows the committed tokens, `tree` hangs below the tail's last token."""

    tail: Sequence[int]
    tree: Sequence[Edge]
    start: int  # position of the first tail token
    slots: Sequence[int]

    def __len__(self) -> int:
        return len(self.tail) + len(self.tree)

    def pack(self, shape: Shape, memo: Memo, sampling: Sampling, out: memoryview) -> None:
        """Fill the first `shape.length` words of `out` (bytes). Padding rows see what the first real row sees."""
        pad = shape.width - len(self)
        positions, parents, ancestors = self._structure(pad, shape.width - shape.kept)
        numbers = [0] * pad
        numbers += self.tail
        numbers += [token for token, _ in self.tree]
        numbers += positions
        numbers += [memo.capacity] * pad
        numbers += self.slots
        numbers += parents
        numbers += _keys(sampling, positions)
        size = 4 * words(shape.width)
        sections = [parameters(sampling), array("i", numbers).tobytes()]
        sections += [bits.to_bytes(size, "little") for bits in ancestors]
        sections.append(memo.used.to_bytes(shape.span // 8, "little"))
        out[: 4 * shape.length] = b"".join(sections)

    def _structure(self, pad: int, silent: int) -> tuple[list[int], list[int], list[int]]:
        """Position, parent row and ancestor bits (itself among them) of each row.

        silent: so many rows come before the answered ones, from which parents count. Outside of the tree they are 0.
        """
        first, root = pad, pad + len(self.tail) - 1
        end = self.start + len(self.tail)
        positions = [self.start] * pad + list(range(self.start, end))
        parents = [0] * (root + 1)
        ancestors = [1 << first] * pad + [(2 << i) - 1 << first for i in range(len(self.tail))]
        for i, (_, parent) in enumerate(self.tree, 1):
            assert -1 <= parent < i - 1, "a parent stands before its children"
            above = root + 1 + parent
            parents.append(above - silent)
            positions.append(positions[above] + 1)
            ancestors.append(ancestors[above] | 1 << root + i)
        return positions, parents, ancestors


def _keys(sampling: Sampling, positions: Sequence[int]) -> list[int]:
    """The noise keys of the places after these. Greedy reads none."""
    if sampling.temperature == 0:
        return [0] * len(positions)
    known = {position: key(sampling.seed, position + 1) for position in set(positions)}
    return [known[position] for position in positions]


def parameters(sampling: Sampling) -> bytes:
    """The section of the same name. At temperature 0 logits are scaled by 1."""
    scale = min(1 / sampling.temperature, LARGEST) if sampling.temperature > 0 else 1.0
    floor = log(sampling.min_p) if sampling.min_p > 0 else -inf
    return pack("=fiff", scale, sampling.top_k, sampling.top_p, floor)
