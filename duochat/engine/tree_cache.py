"""A KV cache as a memo: a trunk of tokens, a tree below it, and what of both a context leads to or has to be decoded.

A memo and nothing more: what the context no longer leads to is dropped; what was forgotten or cut short costs time,
never correctness. In which cells keys and values lie is a subclass's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from duochat import DuoChatError
from duochat.engine.lanes import Cancelled, Reading, common

LONGEST = 4  # windows that are held: a small model's attention costs as much as all else by then


class Full(DuoChatError):
    """There is no room for what is new: `clear` makes some."""

    def __init__(self) -> None:
        super().__init__("The conversation is longer than the draft's cache: raise context_length.")


@dataclass(slots=True, eq=False)
class Entry:
    """A token of the tree; its place is the cell, or the sequence that holds the whole path to it, or both."""

    token: int
    position: int
    parent: Entry | None
    cell: int = -1
    seq: int = 0
    children: dict[int, Entry] = field(default_factory=dict)
    note: Any = None  # what a lane keeps of it

    def below(self) -> Iterator[Entry]:
        stack = list(self.children.values())
        while stack:
            entry = stack.pop()
            yield entry
            stack.extend(entry.children.values())


class TreeCache:
    """`follow` a context, `grow` the tree below it, decode what is new."""

    def __init__(self, chunk: int) -> None:
        """chunk: tokens of a context read in one call."""
        self._chunk = chunk
        self.opening, self.start = 0, 0  # behind so many tokens of the context so many are left out of the trunk
        self.tokens: list[int] = []  # the trunk
        self.end = Entry(-1, -1, None)  # its last token
        self._root = self.end  # where the tree begins
        self._followed: Sequence[int] | None = None  # the context that leads to it
        self._new: list[Entry] = []  # to be decoded: the rest of a context, then the tree, parents first
        self._grown = 0  # decoded entries below the trunk

    # What is held, and what of it a context leads to

    def follow(
        self,
        context: Sequence[int],
        cancelled: Callable[[], bool],
        progress: Reading = None,
        anew: bool = False,
        tail: int | None = None,
        window: int | None = None,
    ) -> Entry:
        """Bring the trunk along all but the last token of `context`; that one is returned, the root of the tree.

        anew: nothing is kept from the root down. tail: tokens that may be left to be decoded with the tree, at most and
        without it a chunk. window: where more tokens than that are missing, or very many are held, it reads so many,
        half of them from the beginning, which tells what is asked and what an answer takes up first, half from the end.
        A context is never changed in place: the one followed last is known by its identity.
        """
        if context is self._followed and not anew:
            return self._root
        self._followed = None
        seen = self._seen(context)
        self._cut(max(0, min(common(self.tokens, seen), len(seen) - 1)))
        if window and self._unfit(len(seen), window):
            self.forget()
            self.opening, self.start = window // 2, max(0, len(context) - window)
            seen = self._seen(context)
        path = seen[:-1]
        end = self.end
        while end.position + 1 < len(path) and (child := self._held(end, path[end.position + 1])):
            end = child
        below = end.children.get(context[-1]) if end.position + 1 == len(path) and not anew else None
        self._keep(end, below)
        left = self._chunk if tail is None else min(tail, self._chunk)
        while len(path) - len(self.tokens) > left:
            if cancelled():
                raise Cancelled
            self._read(path[len(self.tokens) : len(self.tokens) + self._chunk], cancelled)
            if progress:
                progress(len(self.tokens), len(context))
        self._root, self._followed = self.grow(self.end, seen[len(self.tokens) :]), context
        return self._root

    def _unfit(self, seen: int, window: int) -> bool:
        """Whether a window is quicker read than the tokens that are missing, or better than what is held."""
        short = self.start and seen < window * 3 // 4
        return bool(short) or seen > min(len(self.tokens) + window, LONGEST * window)

    def _held(self, entry: Entry, token: int) -> Entry | None:
        """The child that may become part of the trunk."""
        return entry.children.get(token)

    def _seen(self, context: Sequence[int]) -> Sequence[int]:
        """The tokens that the trunk leads along. From the gap on a token's position is less by `start` in the trunk."""
        return [*context[: self.opening], *context[self.opening + self.start :]] if self.start else context

    def forget(self) -> None:
        """Hold nothing."""
        self.clear()
        self._cut(0)
        self.opening, self.start = 0, 0

    def clear(self) -> None:
        """Drop the tree."""
        self._new, self._followed = [], None
        self._keep(self.end, None)

    def _cut(self, length: int) -> None:
        """Forget the trunk from `length` on, and the tree if the trunk changes."""
        if length == len(self.tokens):
            return
        self.clear()
        del self.tokens[length:]
        self._shorten(length)
        self.end = Entry(self.tokens[-1] if length else -1, length - 1, None, self._last_cell)

    def _keep(self, end: Entry, child: Entry | None) -> None:
        """Make the path to `end` part of the trunk; keep the branches through `child`, drop the rest."""
        if end is self.end and child is not None:
            return
        path, entry = [], end
        while entry is not self.end:
            path.append(entry)
            entry = entry.parent
        path.reverse()
        dead, trunk, stack = [], {*path}, [*self.end.children.values()]
        while stack:
            entry = stack.pop()
            if entry is not child:
                stack.extend(entry.children.values())
                if entry not in trunk:
                    dead.append(entry)
        end.parent, self.end = None, end
        end.children = {child.token: child} if child else {}
        self._grown -= len(path) + len(dead)
        self.tokens += [entry.token for entry in path]
        self._settle(path, dead)

    # Growing

    def grow(self, entry: Entry, tokens: Iterable[int]) -> Entry:
        """The entry that the tokens lead to from `entry`; those not held are new."""
        for token in tokens:
            child = entry.children.get(token)
            if child is None:
                child = entry.children[token] = Entry(token, entry.position + 1, entry)
                self._new.append(child)
            entry = child
        return entry

    def take(self, decode: Callable[[list[Entry], list[Entry]], object]) -> list[Entry]:
        """Have decoded what is new; returns the new entries from the root down.

        decode: is given all new ones and those, which may want an answer; a fault of it undoes what was grown.
        """
        new, self._new = self._new, []
        if not new:
            return []
        rows = [entry for entry in new if entry.position >= self._root.position]
        try:
            decode(new, rows)
        except BaseException:
            self._followed = None
            self._undo(new)
            for entry in reversed(new):
                del entry.parent.children[entry.token]
            raise
        self._grown += len(new)
        self._keep(self._root.parent, self._root)
        return rows

    # What a subclass knows

    _last_cell = -1  # of the trunk

    def _read(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> None:
        """Decode tokens behind the trunk, and make them part of it."""
        raise NotImplementedError

    def _shorten(self, length: int) -> None:
        """The trunk was cut to so many tokens."""

    def _settle(self, path: Sequence[Entry], dead: Sequence[Entry]) -> None:
        """Entries have become part of the trunk, others are gone."""

    def _undo(self, new: Sequence[Entry]) -> None:
        """Entries were not decoded, though they may have got their places."""
