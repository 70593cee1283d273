"""The cached tree over llama.cpp's sequences: the trunk is sequence 0, each branch below it has one of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from duochat.engine.llama.library import BATCH, Llama
from duochat.engine.tree_cache import Entry, Full, TreeCache

TRUNK = 0  # the sequence of the trunk; branches use the others


class Sequences(TreeCache):
    """The cells of one `Llama`."""

    def __init__(self, llama: Llama, chunk: int, room: int, ordered: bool = False, later: bool = False) -> None:
        """room: cells for the tree. later: sequences that end are dropped once the next forward has begun, while a
        device of its own is at work; until then they take as much room again.

        ordered: cells stand in the order of positions, always. What a row sums over its cells is then the same to the
        bit as without a tree. A branch that would leave a hole behind is decoded again when it becomes the trunk.
        """
        super().__init__(chunk)
        self._llama, self._room, self._ordered, self._later = llama, room, ordered, later
        self._ended: list[int] = []  # sequences to be dropped
        self._tips: dict[int, Entry] = {}  # sequence in use -> its deepest entry
        self._free = list(range(llama.sequences - 1, TRUNK, -1))
        self._shared = [0] * llama.sequences  # how many of the trunk's tokens a sequence holds, in use or free

    def decode(self, cancelled: Callable[[], bool]) -> list[Entry]:
        """Decode all that is new as one batch. Raises Full.

        Returns the new entries from the root down: the rows of the logits. All others had theirs before.
        """

        def run(new: list[Entry], rows: list[Entry]) -> None:
            if len(new) > BATCH:
                raise ValueError(f"{len(new)} tokens in one batch, {BATCH} at most")
            if len(self._free) < max(len(rows), self._llama.least):
                self._drop_ended()
            if len(rows) > min(len(self._free), self._room - self._grown):
                raise Full
            outputs = range(len(new) - len(rows), len(new))
            tokens, positions, places = [e.token for e in new], [e.position for e in new], self._place(new)
            with self._company(rows, places[-len(rows) :]):
                self._llama.decode(tokens, positions, places, outputs, cancelled)
            self._drop_ended()
            for cell, entry in enumerate(new, len(self.tokens)):
                entry.cell = cell

        return self.take(run)

    def _held(self, entry: Entry, token: int) -> Entry | None:
        child = entry.children.get(token)
        return child if child and (not self._ordered or child.cell == child.position) else None

    def _read(self, tokens: Sequence[int], cancelled: Callable[[], bool], outputs: Sequence[int] = ()) -> None:
        start = len(self.tokens)
        try:
            positions = range(start, start + len(tokens))
            self._llama.decode(tokens, positions, [(TRUNK,)] * len(tokens), outputs, cancelled)
        except BaseException:
            self._llama.drop(TRUNK, start)
            raise
        self.tokens.extend(tokens)
        self.end = Entry(tokens[-1], len(self.tokens) - 1, None)

    def _shorten(self, length: int) -> None:
        for seq in range(self._llama.sequences):
            if seq == TRUNK or self._shared[seq] > length:
                self._llama.drop(seq, length)
                self._shared[seq] = length

    def _settle(self, path: Sequence[Entry], dead: Sequence[Entry]) -> None:
        if path:
            end = path[-1]
            self._llama.share(end.seq, TRUNK, path[0].position, end.position + 1)
            end.seq = TRUNK
        alive = {entry.seq for entry in self.end.below()}
        for seq in alive:
            self._shared[seq] = len(self.tokens)
        self._release([seq for seq in self._tips if seq not in alive])

    def _release(self, sequences: Iterable[int]) -> None:
        """Free sequences. They keep their part of the trunk, so that the next branch has less to copy."""
        for seq in sequences:
            del self._tips[seq]
            self._ended.append(seq)
        if not self._later:
            self._drop_ended()

    def _drop_ended(self) -> None:
        for seq in self._ended:
            self._llama.drop(seq, self._shared[seq])
        self._free += self._ended
        self._ended = []

    def _undo(self, new: Sequence[Entry]) -> None:
        """Give each sequence its older tip back; free it when it had none."""
        lost = set(new)
        for seq, tip in [*self._tips.items()]:
            if tip in lost:
                while tip in lost:
                    tip = tip.parent
                if tip.seq == seq:
                    self._tips[seq] = tip
                    self._llama.drop(seq, tip.position + 1)
                else:
                    self._release([seq])
        self._drop_ended()  # the next forward may need their cells

    def _place(self, new: Sequence[Entry]) -> list[list[int]]:
        """Give each new entry its sequences: one a branch that ends in this batch, all of those on the way to them."""
        inside: dict[Entry, list[int]] = {e: [] for e in new}
        for entry in reversed(new):
            if not inside[entry]:
                inside[entry].append(self._branch(entry, inside))
            if entry.parent in inside:
                inside[entry.parent] += inside[entry]
            entry.seq = inside[entry][0]
        return list(inside.values())

    @contextmanager
    def _company(self, rows: Sequence[Entry], places: Sequence[list[int]]) -> Iterator[None]:
        """Inside, the root of as many rows as a forward is filled up to belongs to more sequences, so that it has as
        many of them as rows. A forward with fewer rows gets them by those that fill it up.

        llama.cpp keeps its graph, and a GPU's of it, as long as both numbers stay.
        """
        start = self._root.position
        missing = len(rows) - len({seq for own in places for seq in own}) if len(rows) == self._llama.least else 0
        free = len(self._free) if start == len(self.tokens) else 0  # all before it is cached: they may join
        more = [self._copy(TRUNK, start) for _ in range(min(missing, free))]
        places[0].extend(more)
        try:
            yield
        finally:
            for seq in more:
                self._llama.drop(seq, start)
                self._free.append(seq)

    def _branch(self, tip: Entry, inside: dict[Entry, list[int]]) -> int:
        """The sequence for a new branch: its parent's if nothing continues that yet, else a copy up to the parent."""
        first = tip
        while first.parent in inside:
            first = first.parent
        parent = first.parent
        seq = parent.seq if self._tips.get(parent.seq) is parent else self._copy(parent.seq, first.position)
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


class Line(Sequences):
    """A recurrent model's: one line of tokens, whose state cannot be taken back.

    What is no continuation of the tokens held is read from the start, and so it is after a fault.
    """

    def decode(self, cancelled: Callable[[], bool]) -> list[Entry]:
        """The root alone."""
        root = self._root
        self.clear()
        self._read([root.token], cancelled, outputs=(0,))
        return [root]

    def _read(self, tokens: Sequence[int], cancelled: Callable[[], bool], outputs: Sequence[int] = ()) -> None:
        try:
            super()._read(tokens, cancelled, outputs)
        except BaseException:
            self._cut(0)
            raise

    def _cut(self, length: int) -> None:
        super()._cut(length if length == len(self.tokens) else 0)
