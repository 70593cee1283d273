"""A cached tree over llama.cpp's sequences: which tokens are held, what has to be decoded, which sequence sees what.

A trunk (sequence 0) and a trie of entries below it, each branch in a sequence of its own. It is a memo and nothing
more: what the context no longer leads to is dropped; a forgotten or aborted branch costs time, never correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from duochat.engine.lanes import Cancelled, common
from duochat.engine.llama.library import BATCH, Llama

Progress = Callable[[int, int], None]

TRUNK = 0  # the sequence of the trunk; branches use the others


@dataclass(slots=True, eq=False)
class Entry:
    """A token of the tree: a position of sequence `seq`, which holds the whole path to it."""

    token: int
    position: int
    parent: Entry | None
    seq: int = TRUNK
    cell: int = -1  # of an ordered cache
    children: dict[int, Entry] = field(default_factory=dict)
    note: Any = None  # what a lane keeps of it

    def below(self) -> Iterator[Entry]:
        stack = list(self.children.values())
        while stack:
            entry = stack.pop()
            yield entry
            stack.extend(entry.children.values())


class TreeCache:
    """The cells of one `Llama`: `follow` a context, `grow` the tree below it, `decode` what is new."""

    def __init__(self, llama: Llama, chunk: int, room: int, ordered: bool = False) -> None:
        """chunk: tokens of a context read in one call. room: cells for the tree.

        ordered: cells stand in the order of positions, always. What a row sums over its cells is then the same to the
        bit as without a tree. A branch that would leave a hole behind is decoded again when it becomes the trunk.
        """
        self._llama, self._chunk, self._room, self._ordered = llama, chunk, room, ordered
        self.tokens: list[int] = []  # the trunk
        self.end = Entry(-1, -1, None)  # its last token
        self._root = self.end  # where the tree begins
        self._new: list[Entry] = []  # what waits for `decode`: the rest of a context, then the tree, parents first
        self._tips: dict[int, Entry] = {}  # sequence in use -> its deepest entry, least recently used first
        self._free = list(range(llama.sequences - 1, TRUNK, -1))
        self._shared = [0] * llama.sequences  # how many of the trunk's tokens a sequence holds, in use or free
        self._grown = 0  # decoded entries below the trunk

    @property
    def sequences(self) -> int:
        """Sequences that hold a branch."""
        return len(self._tips)

    @property
    def cells(self) -> int:
        """Cache cells that hold a token."""
        return len(self.tokens) + self._grown

    # What is held, and what of it a context leads to

    def follow(
        self,
        context: Sequence[int],
        cancelled: Callable[[], bool],
        progress: Progress | None = None,
        anew: bool = False,
        tail: int | None = None,
    ) -> Entry:
        """Bring the trunk along all but the last token of `context`; that one is returned, the root of the tree.

        anew: nothing is kept from the root down. tail: tokens that may be left to be decoded with the tree, at most and
        without it a chunk.
        """
        path = context[:-1]
        self._cut(common(self.tokens, path))
        end = self.end
        while end.position + 1 < len(path) and (child := self._held(end, path[end.position + 1])):
            end = child
        below = end.children.get(context[-1]) if end.position + 1 == len(path) and not anew else None
        self._keep(end, below)
        left = self._chunk if tail is None else min(tail, self._chunk)
        while len(path) - len(self.tokens) > left:
            self._read(path[len(self.tokens) : len(self.tokens) + self._chunk], cancelled)
            if progress:
                progress(len(self.tokens), len(context))
        self._root = self.grow(self.end, context[len(self.tokens) :])
        return self._root

    def _held(self, entry: Entry, token: int) -> Entry | None:
        """The child that may become part of the trunk."""
        child = entry.children.get(token)
        return child if child and (not self._ordered or child.cell == child.position) else None

    def forget(self) -> None:
        """Hold nothing."""
        self._cut(0)

    def clear(self) -> None:
        """Drop all branches."""
        self.end.children.clear()
        self._release([*self._tips])
        self._grown = 0

    def _cut(self, length: int) -> None:
        """Forget the trunk from `length` on, and the tree if the trunk changes."""
        if length == len(self.tokens):
            return
        self.clear()
        del self.tokens[length:]
        for seq in range(self._llama.sequences):
            if seq == TRUNK or self._shared[seq] > length:
                self._llama.drop(seq, length)
                self._shared[seq] = length
        self.end = Entry(self.tokens[-1] if length else -1, length - 1, None)

    def _keep(self, end: Entry, child: Entry | None) -> None:
        """Make the path to `end` part of the trunk; keep the branches through `child`, drop the rest."""
        if end is self.end and child is not None:
            return
        added, entry = [], end
        while entry is not self.end:
            added.append(entry.token)
            entry = entry.parent
        if added:
            self._llama.share(end.seq, TRUNK, len(self.tokens), end.position + 1)
        self.tokens += reversed(added)
        end.parent, end.seq, self.end = None, TRUNK, end
        end.children = {child.token: child} if child else {}
        living = [e.seq for e in end.below()]
        self._grown = len(living)
        for seq in (alive := set(living)):
            self._shared[seq] = len(self.tokens)
        self._release([seq for seq in self._tips if seq not in alive])

    def _release(self, sequences: Iterable[int]) -> None:
        """Free sequences. They keep their part of the trunk, so that the next branch has less to copy."""
        for seq in sequences:
            del self._tips[seq]
            self._llama.drop(seq, self._shared[seq])
            self._free.append(seq)

    def _read(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> None:
        if cancelled():
            raise Cancelled
        start = len(self.tokens)
        try:
            positions = range(start, start + len(tokens))
            self._llama.decode(tokens, positions, [(TRUNK,)] * len(tokens), (), cancelled)
        except BaseException:
            self._llama.drop(TRUNK, start)
            raise
        self.tokens.extend(tokens)
        self.end = Entry(tokens[-1], len(self.tokens) - 1, None)

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

    def decode(self, cancelled: Callable[[], bool]) -> list[Entry]:
        """Decode all that is new as one batch.

        Returns the new entries from the root down: the rows of the logits. All others had theirs before.
        """
        new, self._new = self._new, []
        if not new:
            return []
        outputs = [e for e in new if e.position >= self._root.position]
        try:
            self._make_room(new, len(outputs))
            tokens, positions = [e.token for e in new], [e.position for e in new]
            self._llama.decode(tokens, positions, self._place(new), range(len(new) - len(outputs), len(new)), cancelled)
        except BaseException:
            self._undo(new)
            raise
        for cell, entry in enumerate(new, len(self.tokens)):
            entry.cell = cell
        self._grown += len(new)
        self._keep(self._root.parent, self._root)
        return outputs

    def _undo(self, new: list[Entry]) -> None:
        """Take entries that were not decoded out of the trie, and out of the sequences that they were given."""
        lost = set(new)
        for seq, tip in [*self._tips.items()]:
            if tip in lost:
                while tip in lost:
                    tip = tip.parent
                self._shorten(seq, tip)
        for entry in reversed(new):
            del entry.parent.children[entry.token]

    def _shorten(self, seq: int, tip: Entry) -> None:
        """Give the sequence its older tip back; free it when it had none."""
        if tip.seq == seq:
            self._tips[seq] = tip
            self._llama.drop(seq, tip.position + 1)
        else:
            self._release([seq])

    def _place(self, new: list[Entry]) -> list[list[int]]:
        """Give each new entry its sequences: one a branch that ends in this batch, all of those on the way to them."""
        inside: dict[Entry, list[int]] = {e: [] for e in new}
        for entry in reversed(new):
            if not inside[entry]:
                inside[entry].append(self._branch(entry, inside))
            if entry.parent in inside:
                inside[entry.parent] += inside[entry]
            entry.seq = inside[entry][0]
        return list(inside.values())

    def _branch(self, tip: Entry, inside: dict[Entry, list[int]]) -> int:
        """The sequence for a new branch: its parent's if nothing continues that yet, else a copy up to the parent."""
        first = tip
        while first.parent in inside:
            first = first.parent
        parent = first.parent
        if self._tips.get(parent.seq) is parent:
            seq = parent.seq
            del self._tips[seq]  # to the end of the order of use
        else:
            seq = self._copy(parent.seq, first.position)
        self._tips[seq] = tip
        return seq

    def _copy(self, source: int, length: int) -> int:
        """A free sequence that shares the first `length` cells of another one; no data moves."""
        seq = self._free.pop()
        held = self._shared[seq]
        if held > length:
            self._llama.drop(seq, length)
        elif held < length:
            self._llama.share(source, seq, held, length)
        self._shared[seq] = min(length, len(self.tokens))
        return seq

    def _make_room(self, new: list[Entry], branches: int) -> None:
        """Forget the branches used longest ago until the new entries find sequences and cells."""
        if len(new) > BATCH:
            raise ValueError(f"{len(new)} tokens in one batch, {BATCH} at most")
        needed = {e.parent.seq for e in new}
        for seq in [*self._tips]:
            if len(self._free) >= branches and self._grown + len(new) <= self._room:
                return
            if seq not in needed:
                self._forget(seq)

    def _forget(self, seq: int) -> None:
        """Drop the branch that ends in this sequence; what other branches share with it stays in theirs."""
        entry = self._tips[seq]
        while entry.seq == seq and not entry.children:
            del entry.parent.children[entry.token]
            self._grown -= 1
            entry = entry.parent
        while entry.seq == seq:
            entry.seq = next(iter(entry.children.values())).seq
            entry = entry.parent
        self._release([seq])
