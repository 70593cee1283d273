"""The draft model on the CPU, through llama.cpp: a batch of tree nodes in, candidates out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from duochat.engine.choosing import choose, kernel
from duochat.engine.lanes import Cancelled, Candidates, Drafter, common
from duochat.engine.llama.library import Llama
from duochat.engine.llama.tree_cache import Entry, TreeCache
from duochat.engine.penalties import changes, path, penalised
from duochat.engine.sampling import Sampling
from duochat.engine.tree import Node
from duochat.models import gguf
from duochat.models.trim import kept

MAX_NODES = 32
CHUNK = 64  # prompt tokens decoded in one call
TREE_CELLS = 1024  # cache cells beyond the context, for drafted tokens


class LlamaDrafter(Drafter):
    """A GGUF model that drafts. One thread at a time, `interrupt` apart. Takes no GPU memory."""

    most_nodes = MAX_NODES
    window = 512  # tokens of a long context that it begins with: the target verifies whatever is drafted

    def __init__(
        self, path: Path, context_length: int, threads: int, candidates: int = 8, vocabulary: int | str = "auto"
    ) -> None:
        """vocabulary: how many of its most frequent tokens the model may propose, see `duochat.models.trim`.

        Raises DuoChatError when the file is missing, is no usable model, or memory is short.
        """
        kernel()
        self.candidates = candidates
        self.thread = ThreadPoolExecutor(1, "draft lane")
        self._llama = Llama(Path(path), context_length + TREE_CELLS, threads)
        self._names = kept(gguf.read(self._llama.path), vocabulary)
        self.vocabulary = self._llama.vocabulary
        self._cache = TreeCache(self._llama, CHUNK, TREE_CELLS)
        self._start = 0  # the token of the context that the cache begins with
        self._sampling = Sampling()  # of the candidates that the cache's entries hold

    def set_threads(self, threads: int, reading: int = 0) -> None:
        """reading: for prompts, which give more threads something to do; 0 = as many."""
        self._llama.set_threads(threads, reading)

    def describe(self) -> dict[str, Any]:
        """See `Drafter.describe`."""
        return {
            "draft_backend": "llama.cpp",
            "draft_file": self._llama.path.name,
            "draft_notice": self._llama.notice,
        }

    def close(self) -> None:
        """Give the memory back; the drafter is of no use afterwards."""
        self._llama.close()

    def forget(self) -> None:
        """See `Drafter.forget`."""
        self._cache.forget()
        self._start = 0

    def interrupt(self) -> None:
        """Cut the running `expand` short, from any thread; call it when `cancelled` has come true."""
        self._llama.interrupt()

    def expand(
        self, context: Sequence[int], nodes: Sequence[Node], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> tuple[list[Candidates], float]:
        """See `Drafter.expand`; at most `most_nodes` nodes. A node whose candidates are still known is not decoded."""
        if len(nodes) > MAX_NODES:
            raise ValueError(f"{len(nodes)} nodes in one draft batch, {MAX_NODES} at most")
        self._llama.arm()
        if cancelled():
            raise Cancelled
        anew, self._sampling = sampling != self._sampling, sampling
        root = self._cache.follow(self._near(context), cancelled, anew=anew)
        entries = [self._find(node, root) for node in nodes]
        new = self._cache.decode(cancelled)
        started = time.perf_counter()
        names, rows = self._names, self._llama.logits(len(new)) if new else ()
        rows = rows.take(names, axis=1) if new and names is not None else rows
        made = changes(context, [path(entry, len(context) - self._start) for entry in new], sampling) if new else None
        made = made and made.among(names, rows.shape[1])
        for number, entry in enumerate(new):
            with penalised(rows[number], made, number) as row:
                entry.note = choose(row, self._start + entry.position + 1, sampling, self.candidates, names)
        return [entry.note for entry in entries], time.perf_counter() - started

    def _near(self, context: Sequence[int]) -> Sequence[int]:
        """The part of the context that it reads: all that it holds, or the end where much is missing."""
        seen = context[self._start :]
        missing = len(seen) - common(self._cache.tokens, seen)
        short = self._start > 0 and len(seen) < self.window // 2
        if short or missing > self.window:
            self._start = max(0, len(context) - self.window)
        return context[self._start :]

    def _find(self, node: Node, root: Entry) -> Entry:
        return self._cache.grow(root, path(node, self._start + root.position + 1))
