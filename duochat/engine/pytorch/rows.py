"""One forward's input as one array of 32-bit integers, so that it crosses to the device in a single copy.

Rows stand as [padding | uncached tail of the context | tree], so the last rows are always those with an answer. Row i
sees the committed slots and its ancestors among the rows. Sections of the array, for `width` rows and a KV span of
`span` slots: the sampling parameters; token, position, slot, parent row and noise key of each row; the ancestors of
each row and the committed slots as bits, lowest bit first. (Compiled code takes the rows' sections wherever they
begin, but for the very first places, which are code of their own.) Shapes are any on a CPU, and a fixed set where each
shape is a captured graph.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import inf, log
from struct import pack
from typing import NamedTuple

from duochat.engine.pytorch.memo import Edge, Memo
from duochat.engine.sampling import Sampling, key

PER_ROW = ("token", "position", "slot", "parent", "key")
PARAMETERS = 4  # 1/temperature, top_k, top_p, log(min_p)
MOST_ROWS = 64  # of a forward that answers at every row
WIDTHS = (1, 2, 4, 8, 16, 32, MOST_ROWS)
PREFILL_WIDTHS = (128, 512)
SPANS = (256, 512, 1024, 1536, 2048, 3072)  # then powers of two
LARGEST = 2.0**127  # as a 32-bit float


def words(bits: int) -> int:
    """32-bit words that hold so many bits."""
    return -(-bits // 32)


class Shape(NamedTuple):
    """Rows of a forward, how many of the last rows are answered, and the KV slots that attention reads."""

    width: int
    kept: int
    span: int

    @cache  # noqa: B019 (few shapes, and asked for in every round)
    def sections(self) -> dict[str, slice]:
        """Where each section lies in the packed array."""
        sizes = {"parameters": PARAMETERS} | dict.fromkeys(PER_ROW, self.width)
        sizes |= {"ancestors": self.width * words(self.width), "committed": self.span // 32}
        ends = accumulate(sizes.values())
        return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}

    @property
    def length(self) -> int:
        return (len(PER_ROW) + words(self.width)) * self.width + PARAMETERS + self.span // 32


class Shapes:
    """Chooses the shape of a forward. `capacity`: slots of the cache, a multiple of 32.

    fixed: only `WIDTHS` and `PREFILL_WIDTHS`, padded, with spans from a short list; else exactly what is needed.
    only: a single width for everything (reproducible decoding).
    """

    def __init__(self, capacity: int, fixed: bool, only: int | None = None) -> None:
        self.capacity = capacity
        self.padded = fixed or only is not None
        self.widths = (only,) if only else WIDTHS
        self.prefill_widths = () if only or not fixed else PREFILL_WIDTHS
        spans = (*SPANS, *(4096 << i for i in range(capacity.bit_length())))
        self.spans = sorted({min(span, capacity) for span in spans}) if fixed else ()

    @property
    def most_nodes(self) -> int:
        """The largest tree that one forward takes."""
        return self.widths[-1] - 1

    def room(self, nodes: int) -> int:
        """The most rows of a forward with a tree of so many nodes."""
        return (self.widths if nodes else self.widths + self.prefill_widths)[-1]

    def fit(self, rows: int, nodes: int, highest: int) -> Shape:
        """The cheapest shape for so many rows, the last 1 + nodes answered; `highest` is the highest slot in use."""
        width, kept = rows, nodes + 1
        if self.padded:
            widths = self.widths + self.prefill_widths
            width = widths[bisect_left(widths, rows)]
            kept = width if width in self.widths else 1
        return Shape(width, kept, self._span(highest + 1))

    def _span(self, slots: int) -> int:
        return self.spans[bisect_left(self.spans, slots)] if self.spans else 32 * words(slots)


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens of one forward: `tail` follows the committed tokens, `tree` hangs below the tail's last token."""

    tail: Sequence[int]
    tree: Sequence[Edge]
    start: int  # position of the first tail token
    slots: Sequence[int]
    last: int = 2**31 - 1  # position: a model that has learned one vector for each has none for what lies beyond

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
            positions.append(min(positions[above] + 1, self.last))
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
