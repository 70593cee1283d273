"""The draft model on the CPU, through llama.cpp's low-level interface: a batch of tree nodes in, candidates out.

The KV cache is a memo and nothing more. It holds a trunk (committed tokens, sequence 0) and a trie of drafted tokens
below it, each branch in a sequence of its own. What is asked for and not held is decoded, what the context no longer
leads to is dropped; a forgotten or aborted branch costs time, never correctness.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from duochat.engine.choosing import choose
from duochat.engine.lanes import Cancelled, Candidates, Drafter, never
from duochat.engine.llama.library import BATCH, SEQUENCES, Llama
from duochat.engine.sampling import Sampling
from duochat.engine.tree import Node

TRUNK = 0  # the sequence of the committed tokens; branches use 1 ... SEQUENCES - 1
MAX_NODES = 32
CHUNK = 64  # prompt tokens decoded in one call
TREE_CELLS = 1024  # cache cells beyond the context, for drafted tokens
LONG = 16  # a batch of more tokens asks `cancelled` while it runs; a shorter one is cut by `interrupt` alone, since the
#            asking, 45 times in a two-layer model, costs 0.1 ms of the 0.6 to 4 ms that such a batch takes


@dataclass(slots=True, eq=False)
class _Entry:
    """A cached token: a position of sequence `seq`, which holds the whole path to it."""

    token: int
    position: int
    parent: _Entry | None
    seq: int = TRUNK
    children: dict[int, _Entry] = field(default_factory=dict)
    chosen: tuple[Sampling, Candidates] | None = None

    def below(self) -> Iterator[_Entry]:
        stack = list(self.children.values())
        while stack:
            entry = stack.pop()
            yield entry
            stack.extend(entry.children.values())


class LlamaDrafter(Drafter):
    """A GGUF model that drafts. One thread at a time, `interrupt` apart. Takes no GPU memory."""

    most_nodes = MAX_NODES

    def __init__(
        self, path: Path, context_length: int, threads: int, candidates: int = 8, vocabulary: int | str = "auto"
    ) -> None:
        """vocabulary: how many of its most frequent tokens the model may propose, see `duochat.models.trim`.

        Raises DuoChatError when the file is missing, is no usable model, or memory is short.
        """
        self.candidates = candidates
        self.thread = ThreadPoolExecutor(1, "draft lane")
        self._llama = Llama(Path(path), context_length + TREE_CELLS, threads, vocabulary)
        self._threads = self._reading = threads
        self._trunk: list[int] = []
        self._root = _Entry(-1, -1, None)  # the trunk's last token
        self._tips: dict[int, _Entry] = {}  # sequence in use -> its deepest entry, least recently used first
        self._free = list(range(SEQUENCES - 1, TRUNK, -1))
        self._shared = [0] * SEQUENCES  # how many of the trunk's tokens a sequence holds, in use or free
        self._drafted = 0  # entries below the root

    @property
    def sequences_used(self) -> int:
        return len(self._tips)

    @property
    def cells_used(self) -> int:
        """Cache cells that hold a token."""
        return len(self._trunk) + self._drafted

    def set_threads(self, threads: int, reading: int = 0) -> None:
        """reading: for prompts, which give more threads something to do; 0 = as many."""
        self._threads, self._reading = threads, reading or threads
        self._llama.set_threads(threads)

    def describe(self) -> dict[str, Any]:
        """See `Drafter.describe`."""
        return {"draft_backend": "llama.cpp", "draft_file": self._llama.path.name}

    def close(self) -> None:
        """Give the memory back; the drafter is of no use afterwards."""
        self._llama.close()

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
        self._follow(context, cancelled)
        fresh: list[_Entry] = []
        try:
            root = self._descend(self._root, context[len(self._trunk) :], fresh)
            wanted = [self._find(node, root, fresh) for node in nodes]
            seconds = self._decode_tree(fresh, wanted, sampling, cancelled)
        except BaseException:
            self._undo(fresh)
            raise
        return [entry.chosen[1] for entry in wanted], seconds

    def measure(
        self, sizes: Iterable[int], threads: int, context_length: int = 128, repeats: int = 7
    ) -> dict[int, float]:
        """Median seconds of an `expand` that grows `size` branches by a token each, by size. Clears the cache."""
        return self.thread.submit(self._measure, sizes, threads, context_length, repeats).result()

    def _measure(self, sizes: Iterable[int], threads: int, context_length: int, repeats: int) -> dict[int, float]:
        self.set_threads(threads)
        context = [token % self._llama.vocabulary for token in range(context_length)]
        return {size: median(self._growth(context, size, repeats)) for size in sizes}

    def measure_reading(self, threads: Iterable[int], length: int = 4 * CHUNK + 1) -> dict[int, float]:
        """Seconds to read a prompt of so many tokens, the better of two, by the number of threads. Clears the cache."""
        return self.thread.submit(lambda: {n: min(self._read(n, length) for _ in range(2)) for n in threads}).result()

    def _read(self, threads: int, length: int) -> float:
        self.set_threads(self._threads, threads)
        context = [token % self._llama.vocabulary for token in range(length)]
        self._cut(0)
        started = time.perf_counter()
        self.expand(context, [Node(context[-1], None, length - 1)], Sampling(), never)
        return time.perf_counter() - started

    def _growth(self, context: list[int], size: int, repeats: int) -> Iterator[float]:
        self._cut(0)
        root = Node(context[-1], None, len(context) - 1)
        nodes = [Node(token, root, len(context)) for token in range(size)]
        self.expand(context, nodes, Sampling(), never)
        for _ in range(repeats):
            nodes = [Node(node.token, node, node.position + 1) for node in nodes]
            started = time.perf_counter()
            self.expand(context, nodes, Sampling(), never)
            yield time.perf_counter() - started

    # What is cached, and what of it the context leads to

    def _follow(self, context: Sequence[int], cancelled: Callable[[], bool]) -> None:
        """Bring the trunk along the context, all but the last CHUNK tokens of it that are not cached."""
        self._cut(_common(self._trunk, context))
        entry = self._root
        while entry.position + 1 < len(context) and context[entry.position + 1] in entry.children:
            entry = entry.children[context[entry.position + 1]]
        if entry is not self._root:
            self._reroot(entry, context)
        if len(self._trunk) < len(context):
            self._drop_branches()
        while len(context) - len(self._trunk) > CHUNK:
            self._prefill(context[len(self._trunk) : len(self._trunk) + CHUNK], cancelled)

    def _cut(self, length: int) -> None:
        """Forget the trunk from `length` on, and the tree if the trunk changes."""
        if length == len(self._trunk):
            return
        self._drop_branches()
        del self._trunk[length:]
        for seq in range(SEQUENCES):
            if seq == TRUNK or self._shared[seq] > length:
                self._llama.drop(seq, length)
                self._shared[seq] = length
        self._root = _Entry(self._trunk[-1] if length else -1, length - 1, None)

    def _drop_branches(self) -> None:
        self._root.children.clear()
        self._release([*self._tips])
        self._drafted = 0

    def _reroot(self, entry: _Entry, context: Sequence[int]) -> None:
        """Make the path to `entry` part of the trunk; keep what is below it, drop the rest."""
        self._llama.share(entry.seq, TRUNK, len(self._trunk), entry.position + 1)
        self._trunk.extend(context[len(self._trunk) : entry.position + 1])
        entry.parent, entry.seq, self._root = None, TRUNK, entry
        living = [e.seq for e in entry.below()]
        self._drafted = len(living)
        for seq in (alive := set(living)):
            self._shared[seq] = len(self._trunk)
        self._release([seq for seq in self._tips if seq not in alive])

    def _release(self, sequences: Iterable[int]) -> None:
        """Free sequences. They keep their part of the trunk, so that the next branch has less to copy."""
        for seq in sequences:
            del self._tips[seq]
            self._llama.drop(seq, self._shared[seq])
            self._free.append(seq)

    def _prefill(self, tokens: Sequence[int], cancelled: Callable[[], bool]) -> None:
        if cancelled():
            raise Cancelled
        start = len(self._trunk)
        self._llama.set_threads(self._reading)
        try:
            positions = range(start, start + len(tokens))
            self._llama.decode(tokens, positions, [(TRUNK,)] * len(tokens), cancelled=cancelled)
        except BaseException:
            self._llama.drop(TRUNK, start)
            raise
        finally:
            self._llama.set_threads(self._threads)
        self._trunk.extend(tokens)
        self._root = _Entry(tokens[-1], len(self._trunk) - 1, None)

    # From nodes to entries

    def _descend(self, entry: _Entry, tokens: Iterable[int], fresh: list[_Entry]) -> _Entry:
        """The entry that the tokens lead to; those not cached are made and put on `fresh`, parents first."""
        for token in tokens:
            child = entry.children.get(token)
            if child is None:
                child = entry.children[token] = _Entry(token, entry.position + 1, entry)
                fresh.append(child)
            entry = child
        return entry

    def _find(self, node: Node, root: _Entry, fresh: list[_Entry]) -> _Entry:
        path = []
        while node.position > root.position:
            path.append(node.token)
            node = node.parent
        return self._descend(root, reversed(path), fresh)

    def _undo(self, fresh: list[_Entry]) -> None:
        """Take entries that were not decoded out of the trie, and out of the sequences that they were given."""
        new = set(fresh)
        for seq, tip in [*self._tips.items()]:
            if tip in new:
                while tip in new:
                    tip = tip.parent
                self._shorten(seq, tip)
        for entry in reversed(fresh):
            if entry.parent and entry.parent.children.get(entry.token) is entry:
                del entry.parent.children[entry.token]

    def _shorten(self, seq: int, tip: _Entry | None) -> None:
        """Give the sequence its older tip back; free it when it had none."""
        if tip and tip.seq == seq:
            self._tips[seq] = tip
            self._llama.drop(seq, tip.position + 1)
        else:
            self._release([seq])

    # Decoding

    def _decode_tree(
        self, fresh: list[_Entry], wanted: list[_Entry], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> float:
        """Decode the new entries and see that each wanted one has its candidates; returns the seconds for choosing."""
        blank = {e for e in wanted if e.chosen is None or e.chosen[0] != sampling}
        again = {_Entry(e.token, e.position, e.parent): e for e in blank.difference(fresh)}
        fresh += again
        if not fresh:
            return 0.0
        rows = [i for i, e in enumerate(fresh) if e in blank or e in again]
        self._make_room(fresh)
        tokens, positions = [e.token for e in fresh], [e.position for e in fresh]
        self._llama.decode(tokens, positions, self._place(fresh), rows, cancelled if len(fresh) > LONG else None)
        started = time.perf_counter()
        for logits, i in zip(self._llama.logits(len(rows)), rows, strict=True):
            entry = again.get(fresh[i], fresh[i])
            entry.chosen = sampling, choose(logits, entry.position + 1, sampling, self.candidates, self._llama.names)
        seconds = time.perf_counter() - started
        self._release([e.seq for e in again])
        self._drafted += len(fresh) - len(again)
        return seconds

    def _place(self, fresh: list[_Entry]) -> list[list[int]]:
        """Give each new entry its sequences: one a branch that ends in this batch, all of those on the way to them."""
        inside: dict[_Entry, list[int]] = {e: [] for e in fresh}
        for entry in reversed(fresh):
            if not inside[entry]:
                inside[entry].append(self._branch(entry, inside))
            if entry.parent in inside:
                inside[entry.parent] += inside[entry]
            entry.seq = inside[entry][0]
        return list(inside.values())

    def _branch(self, tip: _Entry, inside: dict[_Entry, list[int]]) -> int:
        """The sequence for a new branch: its parent's if nothing continues that yet, else a copy up to the parent."""
        first = tip
        while first.parent in inside:
            first = first.parent
        parent = first.parent
        seq = parent.seq if parent else TRUNK
        linked = parent is not None and parent.children.get(first.token) is first
        if linked and self._tips.get(seq) is parent:
            del self._tips[seq]  # to the end of the order of use
        else:
            seq = self._copy(seq, first.position)
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
        self._shared[seq] = min(length, len(self._trunk))
        return seq

    def _make_room(self, fresh: list[_Entry]) -> None:
        """Forget the branches used longest ago until the new entries find sequences and cells."""
        if len(fresh) > BATCH:
            raise ValueError(f"{len(fresh)} tokens in one draft batch, {BATCH} at most")
        needed = {e.parent.seq for e in fresh if e.parent}
        for seq in [*self._tips]:
            if len(self._free) >= MAX_NODES + 1 and self._drafted + len(fresh) <= TREE_CELLS:
                return
            if seq not in needed:
                self._forget(seq)

    def _forget(self, seq: int) -> None:
        """Drop the branch that ends in this sequence; what other branches share with it stays in theirs."""
        entry = self._tips[seq]
        while entry.seq == seq and not entry.children:
            del entry.parent.children[entry.token]
            self._drafted -= 1
            entry = entry.parent
        while entry.seq == seq:
            entry.seq = next(iter(entry.children.values())).seq
            entry = entry.parent
        self._release([seq])


def _common(cached: list[int], context: Sequence[int]) -> int:
    """Length of the longest common prefix; quick when it is all that is cached."""
    if context[: len(cached)] == cached:
        return len(cached)
    pairs = enumerate(zip(cached, context, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(cached), len(context)))
