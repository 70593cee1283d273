"""One forward's input as one array of 32-bit integers, so that it crosses to the device in a single copy.

Rows stand as [padding | uncached tail of the context | tree], so the last rows are always those with an answer. Row i
sees the committed slots and its ancestors among the rows. Sections of the array, for `width` rows and a KV span of
`span` slots: token, position, slot, parent row and noise key of each row; the sampling parameters; the ancestors of
each row and the committed slots as bits, lowest bit first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from duochat.engine.sampling import Sampling, keys
from duochat.engine.target.memo import Edge, Memo
from duochat.engine.target.shapes import Shape, words


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens of one forward: `tail` follows the committed tokens, `tree` hangs below the tail's last token."""

    tail: Sequence[int]
    tree: Sequence[Edge]
    start: int  # position of the first tail token
    slots: Sequence[int]

    def __len__(self) -> int:
        return len(self.tail) + len(self.tree)

    def pack(self, shape: Shape, memo: Memo, sampling: Sampling, out: np.ndarray) -> None:
        """Fill the first `shape.length` numbers of `out` (int32). Padding rows see what the first real row sees."""
        pad = shape.width - len(self)
        parents, positions, ancestors = self._structure(pad)
        at = shape.sections()
        place = np.asarray(positions, dtype=np.int32)
        out[at["token"]] = [0] * pad + list(self.tail) + [token for token, _ in self.tree]
        out[at["position"]] = place
        out[at["slot"]] = [memo.capacity] * pad + list(self.slots)
        out[at["parent"]] = parents
        if sampling.temperature > 0:  # greedy reads neither
            out[at["key"]] = keys(sampling.seed, place + 1)
            out[at["parameters"]] = parameters(sampling)
        size = 4 * words(shape.width)
        out[at["ancestors"]] = np.frombuffer(b"".join(a.to_bytes(size, "little") for a in ancestors), np.int32)
        committed = np.zeros(shape.span, dtype=bool)
        known = memo.used[: shape.span]
        committed[: len(known)] = known
        out[at["committed"]] = np.packbits(committed, bitorder="little").view(np.int32)

    def _structure(self, pad: int) -> tuple[list[int], list[int], list[int]]:
        """Parent row, position and ancestor bits (itself among them) of each row."""
        first, root = pad, pad + len(self.tail) - 1
        parents, positions, ancestors = [first] * pad, [self.start] * pad, [1 << first] * pad
        for i in range(len(self.tail)):
            row = first + i
            parents.append(max(row - 1, first))
            positions.append(self.start + i)
            ancestors.append((ancestors[-1] if i else 0) | 1 << row)
        for i, (_, parent) in enumerate(self.tree):
            assert -1 <= parent < i, "a parent stands before its children"
            above = root + 1 + parent
            parents.append(above)
            positions.append(positions[above] + 1)
            ancestors.append(ancestors[above] | 1 << (root + 1 + i))
        return parents, positions, ancestors


def parameters(sampling: Sampling) -> np.ndarray:
    """The section of the same name: floats as the int32 of equal bits. At temperature 0 logits are scaled by 1."""
    scale = 1 / sampling.temperature if sampling.temperature > 0 else 1.0
    floor = np.log(sampling.min_p) if sampling.min_p > 0 else -np.inf
    out = np.array([scale, 0, sampling.top_p, floor], dtype=np.float32).view(np.int32)
    out[1] = sampling.top_k
    return out
