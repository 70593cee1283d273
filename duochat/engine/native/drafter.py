"""The draft lane over native.c: a cached token has a cell of its own, and sees its parent's and what that sees.

So nothing moves when a draft becomes part of the context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from duochat.engine.choosing import Choice
from duochat.engine.native.library import Native, unfit
from duochat.engine.sampling import Sampling
from duochat.engine.tree_cache import Entry, Full, TreeCache
from duochat.engine.tree_drafter import CHUNK, TREE_CELLS, TreeDrafter

SILENT = Choice.of(Sampling(), 1)  # where no candidates are wanted


def load(path: Path, context_length: int, threads: int, vocabulary: int | str = "auto") -> NativeDrafter | None:
    """A drafter of this file; None when it does not fit, see `unfit`. vocabulary: see `duochat.models.trim`.

    Raises DuoChatError when the file is missing or broken, or memory is short.
    """
    return None if unfit(path) else NativeDrafter(path, context_length, threads, vocabulary)


class Cells(TreeCache):
    """The cells of one `Native`."""

    def __init__(self, native: Native, cells: int) -> None:
        super().__init__(CHUNK)
        self._native = native
        self._free = list(range(cells - 1, -1, -1))
        self._trunk: list[int] = []  # the cells of its tokens

    def told(self, new: Sequence[Entry], wanted: int) -> list[tuple[int, int, int, int, int]]:
        """New entries as `Native` takes them, the last ones wanted. Raises Full."""
        if len(new) > len(self._free):
            raise Full
        for entry in new:
            entry.cell = self._free.pop()
        first = len(new) - wanted
        return [(e.token, self.start + e.position, e.cell, e.parent.cell, i >= first) for i, e in enumerate(new)]

    def _read(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> None:
        self._root = self.grow(self.end, tokens)
        self.take(lambda new, _: self._native.decode(self.told(new, 0), self._native.reading, SILENT))
        self._keep(self._root, None)

    @property
    def _last_cell(self) -> int:
        return self._trunk[-1] if self._trunk else -1

    def _shorten(self, length: int) -> None:
        self._free += self._trunk[length:]
        del self._trunk[length:]

    def _settle(self, path: Sequence[Entry], dead: Sequence[Entry]) -> None:
        self._trunk += [entry.cell for entry in path]
        self._free += [entry.cell for entry in dead]

    def _undo(self, new: Sequence[Entry]) -> None:
        self._free += [entry.cell for entry in new if entry.cell >= 0]


class NativeDrafter(TreeDrafter):
    """A small draft in a GGUF file, read by native.c."""

    def __init__(self, path: Path, context_length: int, threads: int, vocabulary: int | str = "auto") -> None:
        """See `load`; the file must fit."""
        cells = context_length + TREE_CELLS
        self.path, self._native = path, Native(path, cells, vocabulary)
        super().__init__(self._native, Cells(self._native, cells))
        self.set_threads(threads)

    def stand_aside(self, cores: int) -> None:
        """With fewer threads than these cores, on which nobody else computes, whoever drafts waits on another one."""
        self._native.cores = cores

    def describe(self) -> dict[str, Any]:
        """See `Drafter.describe`."""
        return {"draft_backend": "native", "draft_kernels": self._native.kernels, "draft_file": self.path.name}

    def _decode(self, context: Sequence[int], cancelled: Callable[[], bool]) -> float:
        seconds = 0.0

        def run(new: list[Entry], rows: list[Entry]) -> None:
            nonlocal seconds
            told, made = self._cache.told(new, len(rows)), self._changes(context, rows)
            found, seconds = self._native.decode(told, self._native.threads, self._choice, made)
            for entry, candidates in zip(rows, found, strict=True):
                entry.note = candidates

        self._cache.take(run)
        return seconds
