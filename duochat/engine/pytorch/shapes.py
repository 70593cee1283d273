"""The shapes that forwards come in: any on a CPU, a fixed set where each shape is a captured graph."""

from __future__ import annotations

from bisect import bisect_left
from functools import cache
from itertools import accumulate
from typing import NamedTuple

PER_ROW = ("token", "position", "slot", "parent", "key")
PARAMETERS = 4  # 1/temperature, top_k, top_p, log(min_p)
MOST_ROWS = 64  # of a forward that answers at every row
WIDTHS = (1, 2, 4, 8, 16, 32, MOST_ROWS)
PREFILL_WIDTHS = (128, 512)
SPANS = (256, 512, 1024, 1536, 2048, 3072)  # then powers of two


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
        self.spans = sorted({min(s, capacity) for s in (*SPANS, *(4096 << i for i in range(9)))}) if fixed else ()

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
