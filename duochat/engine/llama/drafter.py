"""The draft model on the CPU, through llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from duochat.engine.choosing import choose, kernel
from duochat.engine.llama.library import Llama
from duochat.engine.llama.sequences import Sequences
from duochat.engine.penalties import penalised
from duochat.engine.tree_drafter import CHUNK, TREE_CELLS, TreeDrafter
from duochat.models import gguf
from duochat.models.trim import kept


class LlamaDrafter(TreeDrafter):
    """A GGUF model that drafts. Takes no GPU memory."""

    def __init__(self, path: Path, context_length: int, threads: int, vocabulary: int | str = "auto") -> None:
        """vocabulary: how many of its most frequent tokens the model may propose, see `duochat.models.trim`.

        Raises DuoChatError when the file is missing, is no usable model, or memory is short.
        """
        kernel()
        self._llama = Llama(Path(path), context_length + TREE_CELLS, threads)
        self._names = kept(gguf.read(self._llama.path), vocabulary)  # the token of each logit; None = its index
        super().__init__(self._llama, Sequences(self._llama, CHUNK, TREE_CELLS))

    def describe(self) -> dict[str, Any]:
        """See `Drafter.describe`."""
        return {
            "draft_backend": "llama.cpp",
            "draft_file": self._llama.path.name,
            "draft_notice": self._llama.notice,
        }

    def _decode(self, context: Sequence[int], cancelled: Callable[[], bool]) -> float:
        new = self._cache.decode(cancelled)
        if not new:
            return 0.0
        started = perf_counter()
        names, rows = self._names, self._llama.logits(len(new))
        rows = rows if names is None else rows.take(names, axis=1)
        made = self._changes(context, new)
        made = made and made.among(names, rows.shape[1])
        for number, entry in enumerate(new):
            row, position = penalised(rows[number], made, number), self._cache.start + entry.position + 1
            entry.note = choose(row, position, self._sampling, self.candidates, names)
        return perf_counter() - started
