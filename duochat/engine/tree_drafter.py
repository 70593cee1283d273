"""A draft model over a `TreeCache`: a batch of tree nodes in, candidates out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from duochat.engine.choosing import Choice
from duochat.engine.lanes import Cancelled, Candidates, Drafter
from duochat.engine.penalties import Changes, changes, path
from duochat.engine.sampling import Sampling
from duochat.engine.tree import Node
from duochat.engine.tree_cache import Entry, Full, TreeCache

CHUNK = 64  # prompt tokens decoded in one call
TREE_CELLS = 1024  # cache cells beyond the context, for drafted tokens
LOOSER = 4  # so much less than the target's top-p cuts does the draft's: what that leaves it can but guess, and what is
#             cut is never drafted. On a virtual clock 4 and 8 give 1 to 2 % more than 1 on two sets of prompts; to cut
#             nothing gave as much on one and less than 1 on the other


class Model(Protocol):
    """What a backend's model is asked for, its decoding apart; see `Drafter`."""

    vocabulary: int
    close: Callable[[], object]

    def set_threads(self, threads: int, reading: int = 0) -> None: ...

    def arm(self) -> None:
        """Make ready for an `interrupt` to come; an earlier one is forgotten."""

    def interrupt(self) -> None: ...


class TreeDrafter(Drafter):
    """What a backend adds is `_decode` and `describe`. One thread at a time, `interrupt` apart."""

    candidates = 8
    most_nodes = 32
    window = 512  # tokens of a long context that it reads: the target verifies whatever is drafted

    def __init__(self, model: Model, cache: TreeCache) -> None:
        self.thread = ThreadPoolExecutor(1, "draft lane")
        self.vocabulary = model.vocabulary
        self._model, self._cache = model, cache
        self._asked: Sampling | None = None  # of the candidates that the cache's entries hold ...
        self._sampling = Sampling()  # ... and as a draft has it
        self._choice = Choice.of(self._sampling, self.candidates)

    def set_threads(self, threads: int, reading: int = 0) -> None:
        """See `Drafter.set_threads`."""
        self._model.set_threads(threads, reading)

    def interrupt(self) -> None:
        """See `Drafter.interrupt`."""
        self._model.interrupt()

    def forget(self) -> None:
        """See `Drafter.forget`."""
        self._cache.forget()

    def close(self) -> None:
        """See `Drafter.close`."""
        self._model.close()

    def expand(
        self, context: Sequence[int], nodes: Sequence[Node], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> tuple[list[Candidates], float]:
        """See `Drafter.expand`. A node whose candidates are still known is not decoded."""
        if len(nodes) > self.most_nodes:
            raise ValueError(f"{len(nodes)} nodes in one draft batch, {self.most_nodes} at most")
        self._model.arm()
        if cancelled():
            raise Cancelled
        anew = sampling is not self._asked and sampling != self._asked
        if sampling is not self._asked:
            self._asked, self._sampling = sampling, replace(sampling, top_p=1 - (1 - sampling.top_p) / LOOSER)
            self._choice = Choice.of(self._sampling, self.candidates)
        try:
            entries, seconds = self._expand(context, nodes, cancelled, anew)
        except Full:
            self._cache.clear()
            entries, seconds = self._expand(context, nodes, cancelled, anew)
        return [entry.note for entry in entries], seconds

    def _expand(
        self, context: Sequence[int], nodes: Sequence[Node], cancelled: Callable[[], bool], anew: bool
    ) -> tuple[list[Entry], float]:
        root = self._cache.follow(context, cancelled, anew=anew, window=self.window)
        entries = [self._cache.grow(root, path(node, len(context))) for node in nodes]
        return entries, self._decode(context, cancelled)

    def _decode(self, context: Sequence[int], cancelled: Callable[[], bool]) -> float:
        """Decode what is new in the cache, note the candidates of its entries; returns the seconds spent choosing."""
        raise NotImplementedError

    def _changes(self, context: Sequence[int], entries: Sequence[Entry]) -> Changes | None:
        """Of the logits after each entry."""
        if not self._sampling.penalised:
            return None
        ways = [path(entry, len(context) - self._cache.start) for entry in entries]
        return changes(context, ways, self._sampling)
