"""The draft lane over native.c: a trie of cached tokens, each in a cell of its own, which it keeps as long as it lives.

The cache is a memo and nothing more. What is asked for and not held is decoded, what the context no longer leads to is
dropped; nothing moves when a draft becomes part of the context. A long context is begun near its end: the target
verifies whatever is drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from duochat.engine.choosing import Choice
from duochat.engine.lanes import Cancelled, Candidates, Drafter, common
from duochat.engine.native.library import Native, unfit
from duochat.engine.penalties import changes, path
from duochat.engine.sampling import Sampling
from duochat.engine.tree import Node

CHUNK = 64  # prompt tokens decoded in one call
TREE_CELLS = 1024  # cells beyond the context, for drafted tokens


def load(
    path: Path, context_length: int, threads: int, vocabulary: int | str = "auto", candidates: int = 8
) -> NativeDrafter | None:
    """A drafter of this file; None when it does not fit, see `unfit`. vocabulary: see `duochat.models.trim`.

    Raises DuoChatError when the file is missing or broken, or memory is short.
    """
    return None if unfit(path) else NativeDrafter(path, context_length, threads, vocabulary, candidates)


@dataclass(slots=True, eq=False)
class _Entry:
    """A cached token, or one that is about to be (cell -1); the base of the trie is no token."""

    token: int
    position: int
    parent: _Entry | None
    cell: int = -1
    children: dict[int, _Entry] = field(default_factory=dict)
    chosen: tuple[Sampling, Candidates] | None = None


class NativeDrafter(Drafter):
    """A small draft in a GGUF file, read by native.c. One thread at a time, `interrupt` apart."""

    most_nodes = 32
    window = 512  # tokens of a long context that it begins with

    def __init__(
        self, path: Path, context_length: int, threads: int, vocabulary: int | str = "auto", candidates: int = 8
    ) -> None:
        """See `load`; the file must fit."""
        self.candidates, self.path, self._length = candidates, path, context_length
        self.thread = ThreadPoolExecutor(1, "draft lane")
        self._native = Native(path, context_length + TREE_CELLS, vocabulary)
        self.vocabulary = self._native.vocabulary
        self._threads = self._reading = threads
        self._restart(0)

    def set_threads(self, threads: int, reading: int = 0) -> None:
        """See `Drafter.set_threads`."""
        self._threads, self._reading = threads, reading or threads

    def describe(self) -> dict[str, Any]:
        """See `Drafter.describe`."""
        return {"draft_backend": "native", "draft_kernels": self._native.kernels, "draft_file": self.path.name}

    def close(self) -> None:
        """Give the memory and the threads back; the drafter is of no use afterwards."""
        self._native.close()

    def interrupt(self) -> None:
        """See `Drafter.interrupt`."""
        self._native.stop(1)

    def forget(self) -> None:
        """See `Drafter.forget`."""
        self._restart(0)

    @property
    def cells_used(self) -> int:
        """Cells that hold a token."""
        return self._length + TREE_CELLS - len(self._free)

    def expand(
        self, context: Sequence[int], nodes: Sequence[Node], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> tuple[list[Candidates], float]:
        """See `Drafter.expand`; a node whose candidates are still known is not decoded."""
        if len(nodes) > self.most_nodes:
            raise ValueError(f"{len(nodes)} nodes in one draft batch, {self.most_nodes} at most")
        self._native.stop(0)
        if cancelled():
            raise Cancelled
        self._follow(context, cancelled)
        fresh, wanted = self._locate(context, nodes)
        if len(fresh) > len(self._free):
            self._drop_tree()
            fresh, wanted = self._locate(context, nodes)
        seconds = self._decode(fresh, wanted, sampling, self._threads, context)
        return [entry.chosen[1] for entry in wanted], seconds

    # What is cached, and what of it the context leads to

    def _restart(self, start: int) -> None:
        """An empty cache, for a context from token `start` on."""
        self._root = _Entry(-1, start - 1, None)  # the trunk's last token
        self._start, self._tokens, self._trunk = start, [], [self._root]  # the trunk begins with the base
        self._free = list(range(self._length + TREE_CELLS - 1, -1, -1))

    def _follow(self, context: Sequence[int], cancelled: Callable[[], bool]) -> None:
        """Bring the trunk along the context, all but the last CHUNK tokens of it that are not cached."""
        self._cut(common(self._tokens, context[self._start :]))
        self._advance(context)
        seen, missing = len(context) - self._start, len(context) - 1 - self._root.position
        short = self._start > 0 and seen < self.window // 2
        if missing > self.window or seen > self._length or short:
            self._restart(max(0, len(context) - self.window))
        if self._root.position < len(context) - 1:
            self._drop_tree()
        while (done := self._root.position + 1) < len(context) - CHUNK:
            self._read(context[done : done + CHUNK], cancelled)
            self._advance(context)

    def _cut(self, length: int) -> None:
        """Forget the trunk from `length` on, and the tree if the trunk changes."""
        if length < len(self._tokens):
            self._drop_tree()
            self._free += [entry.cell for entry in self._trunk[length + 1 :]]
            del self._trunk[length + 1 :], self._tokens[length:]
            self._root = self._trunk[-1]
            self._root.children.clear()

    def _advance(self, context: Sequence[int]) -> None:
        """Let the trunk grow by cached tokens; drop what stands beside it."""
        for token in context[self._root.position + 1 :]:
            child = self._root.children.pop(token, None)
            if child is None:
                return
            self._drop_tree()
            self._root.children[token] = child
            self._tokens.append(token)
            self._trunk.append(child)
            self._root = child

    def _drop_tree(self) -> None:
        """Forget all below the root."""
        stack = [*self._root.children.values()]
        self._root.children.clear()
        while stack:
            entry = stack.pop()
            self._free.append(entry.cell)
            stack.extend(entry.children.values())

    def _read(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> None:
        if cancelled():
            raise Cancelled
        fresh: list[_Entry] = []
        _descend(self._root, tokens, fresh)
        self._decode(fresh, [], Sampling(), self._reading)

    # From nodes to entries

    def _locate(self, context: Sequence[int], nodes: Sequence[Node]) -> tuple[list[_Entry], list[_Entry]]:
        """The entries to decode, parents first, and the entry of each node."""
        fresh: list[_Entry] = []
        root = _descend(self._root, context[self._root.position + 1 :], fresh)
        wanted = []
        for node in nodes:
            path = []
            while node.position > root.position:
                path.append(node.token)
                node = node.parent
            wanted.append(_descend(root, reversed(path), fresh))
        return fresh, wanted

    def _decode(
        self, fresh: list[_Entry], wanted: list[_Entry], sampling: Sampling, threads: int, context: Sequence[int] = ()
    ) -> float:
        """Decode the new entries and see that each wanted one has its candidates; returns the seconds for choosing.

        A known entry whose candidates are not is decoded again in its own cell, to what is there.
        """
        blank = dict.fromkeys(e for e in wanted if e.chosen is None or e.chosen[0] != sampling)
        work = [e for e in blank if e.cell >= 0] + fresh
        if not work:
            return 0.0
        done = 0
        try:
            for entry in fresh:
                entry.cell = self._free.pop()
            told = [(e.token, e.position, e.cell, e.parent.cell, e in blank) for e in work]
            asked = [e for e in work if e in blank]
            made = changes(context, [path(e, len(context)) for e in asked], sampling) if asked else None
            done, found, seconds = self._native.decode(told, threads, Choice.of(sampling, self.candidates), made)
            for entry, candidates in zip(asked, found, strict=False):
                entry.chosen = sampling, candidates
        finally:
            self._undo(work[max(done, len(work) - len(fresh)) :])
        if done < len(work):
            raise Cancelled
        return seconds

    def _undo(self, entries: list[_Entry]) -> None:
        """Take entries that were not decoded out of the trie."""
        for entry in reversed(entries):
            del entry.parent.children[entry.token]
            if entry.cell >= 0:
                self._free.append(entry.cell)


def _descend(entry: _Entry, tokens: Iterable[int], fresh: list[_Entry]) -> _Entry:
    """The entry that the tokens lead to; those not cached are made and put on `fresh`, parents first."""
    for token in tokens:
        child = entry.children.get(token)
        if child is None:
            child = entry.children[token] = _Entry(token, entry.position + 1, entry)
            fresh.append(child)
        entry = child
    return entry
