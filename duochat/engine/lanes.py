"""The two lanes as all others see them: everything that is asked of a draft model and of a target model.

A backend is a class for one of these two pages, or two.

Only token ids cross. The drafter proposes candidates with probabilities; the target gives its own sampled token at
every node of a tree. Each keeps a private KV cache as a memo: both are handed full token sequences, keep the longest
common prefix, and can be left at any point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from duochat import DuoChatError

if TYPE_CHECKING:
    from duochat.engine.sampling import Sampling
    from duochat.engine.tree import Node


Edge = tuple[int, int]  # a node of a tree as the target takes it: (token, index of its parent or -1 for the root)


Stopped = Callable[[], bool]  # whether a call is to be cut short
Reading = Callable[[int, int], None] | None  # is told how many tokens of a prompt are read, of how many


class Cancelled(Exception):
    """Raised by a lane that was told to stop inside a long call."""


def never() -> bool:
    """The `cancelled` argument of a call that nobody cancels."""
    return False


def common(held: list[int], context: Sequence[int]) -> int:
    """Length of the longest common prefix; quick when it is all that is held."""
    if context[: len(held)] == held:
        return len(held)
    pairs = enumerate(zip(held, context, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(held), len(context)))


def undisturbed(seconds: Sequence[float]) -> float:
    """What it takes by itself, of several timings: the second best, since other work on the machine only adds."""
    return sorted(seconds)[:2][-1]


def children(tree: Sequence[Edge]) -> list[list[int]]:
    """The numbers of the nodes below the root, and below each node."""
    found: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    for node, (_, parent) in enumerate(tree):
        found[parent + 1].append(node)
    return found


@dataclass(frozen=True, slots=True)
class Candidates:
    """The draft's best next tokens at one node, best first; at most `Drafter.candidates` of them.

    probs: softmax of the scores (logits/T, shared noise added when T > 0) over all that passed the cut.
    """

    tokens: tuple[int, ...]
    probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the target says of a tree of n nodes: n + 1 rows, row 0 after the root, row i + 1 after node i.

    None: of a row that the target's path does not reach; one on the host leaves these alone.
    """

    tokens: list[int | None]  # the target's own token at each row
    probs: list[float | None]  # its probability (temperature and filters applied, noise apart), n + 1
    node_probs: list[float | None]  # the target's probability of each node's token, n
    transfer: float = 0.0  # seconds spent bringing the answer to the host, once the device was done


class Drafter(Protocol):
    """A draft model on the CPU. All calls that decode are made in its own `thread`, one worker, or, where lanes take
    turns, in the target's.

    A pool of threads is kept for each thread that calls, and when the pools together outnumber the cores their
    barriers sleep instead of spinning: many times slower for a model whose token takes less than a millisecond.
    """

    candidates: int  # of a node, at most
    most_nodes: int  # of one `expand`
    vocabulary: int  # token ids are below this
    window: int  # tokens of a long context that it reads, from both ends
    thread: Executor

    def expand(
        self, context: Sequence[int], nodes: Sequence[Node], sampling: Sampling, cancelled: Callable[[], bool]
    ) -> tuple[list[Candidates], float]:
        """Decode the nodes as one batch and return the candidates after each, and the seconds spent choosing them.

        context: all committed token ids; its last one is the tree's root. nodes: distinct; each is the root or hangs
        below it. What the cache lacks on the way to them is decoded too (the prompt in chunks, asking `cancelled`
        between and within them). Raises Cancelled; the cache is sound afterwards.
        """
        ...

    def interrupt(self) -> None:
        """From any thread: `cancelled` of the running `expand` has come true, so cut its decode short."""
        ...

    def set_threads(self, threads: int, reading: int = 0) -> None:
        """Between calls: decode with so many threads. reading: as many for the prompt, 0 = the same."""
        ...

    def forget(self) -> None:
        """Empty the cache."""
        ...

    def measure(
        self,
        sizes: Iterable[int],
        threads: int,
        context_length: int = 128,
        repeats: int = 5,
        before: Callable[[], object] = lambda: None,
    ) -> dict[int, float]:
        """Seconds of an `expand` by size, `undisturbed`: so many branches grow by a token each. The sizes take turns,
        so that other work on the machine meets all of them alike. Clears the cache.

        before: called before every two of a size, in the drafter's thread. Where that reads as much memory as a
        forward of a target with the same cores, the first finds its weights displaced and the second most of them back,
        as in turns: their mean counts.
        """
        self.set_threads(threads)
        return self.thread.submit(self._growth, list(sizes), context_length, repeats, before).result()

    def _growth(
        self, sizes: Sequence[int], context_length: int, repeats: int, before: Callable[[], object]
    ) -> dict[int, float]:
        from duochat.engine.tree import Node

        context, tokens = self._pretended(context_length), count()
        root = Node(context[-1], None, context_length - 1)
        ends = {size: [Node(next(tokens), root, context_length) for _ in range(size)] for size in sizes}
        taken: dict[int, list[float]] = {size: [] for size in sizes}

        def grow(size: int) -> float:
            ends[size] = [Node(node.token, node, node.position + 1) for node in ends[size]]
            return self._seconds(context, ends[size])

        self.forget()
        for size in sizes:
            self._seconds(context, ends[size])
        for _ in range(repeats):
            for size in sizes:
                before()
                taken[size].append((grow(size) + grow(size)) / 2)
        return {size: undisturbed(seconds) for size, seconds in taken.items()}

    def measure_reading(self, threads: Iterable[int], length: int = 258) -> dict[int, float]:
        """Seconds to read a prompt of so many tokens, the better of two, by the number of threads. Clears the cache."""
        better = lambda n: min(self._timed_reading(n, length) for _ in range(2))  # noqa: E731
        return self.thread.submit(lambda: {n: better(n) for n in threads}).result()

    def _timed_reading(self, threads: int, length: int) -> float:
        from duochat.engine.tree import Node

        context = self._pretended(length)
        self.set_threads(threads)
        self.forget()
        return self._seconds(context, [Node(context[-1], None, length - 1)])

    def _seconds(self, context: Sequence[int], nodes: Sequence[Node]) -> float:
        from duochat.engine.sampling import Sampling

        started = perf_counter()
        self.expand(context, nodes, Sampling(), never)
        return perf_counter() - started

    def _pretended(self, length: int) -> list[int]:
        """A context of no meaning."""
        return [token % self.vocabulary for token in range(length)]

    def describe(self) -> dict[str, Any]:
        """What a report says of this lane: `draft_backend` and what else its users may want to know."""
        ...

    def close(self) -> None:
        """Give memory and threads back; the drafter is of no use afterwards."""
        ...


class Target(Protocol):
    """A target model. All calls come from one thread."""

    eos: frozenset[int]  # token ids that end an answer
    context_length: int  # tokens of prompt and answer together
    vocabulary: int  # token ids are below this
    most_nodes: int  # of one `verify`
    shares_cores: bool  # it computes on the CPU, with the draft's cores
    threads: int = 0  # of these it may have; 0 = all
    every: bool = False  # what it says is of all rows, for tests
    fills: Sequence[int] = ()  # rows up to which forwards may be filled, if it is quicker when all have as many
    fill: int = 0  # between calls: fill them up to so many

    def verify(
        self,
        context: Sequence[int],
        tree: Sequence[Edge],
        sampling: Sampling,
        cancelled: Stopped = never,
        progress: Reading = None,
    ) -> Answer:
        """One forward over the uncached tail of `context` and a tree, parents before their children.

        The tree's first level follows context[-1] at position len(context). A long prompt is read in chunks before;
        progress(done, total) reports its tokens. Raises Cancelled, and DuoChatError on a fault; the cache is sound
        afterwards.
        """
        return self.begin(context, tree, sampling, cancelled, progress)()

    def begin(
        self,
        context: Sequence[int],
        tree: Sequence[Edge],
        sampling: Sampling,
        cancelled: Stopped = never,
        progress: Reading = None,
    ) -> Callable[[], Answer]:
        """`verify` in two steps: what is returned gives the answer. A device of its own computes in between, a CPU
        afterwards: nothing would be done beside it."""
        if len(context) > self.context_length:
            raise DuoChatError(
                f"The conversation has {len(context)} tokens and the target model reads {self.context_length}: "
                "shorten it or raise context_length."
            )
        assert context, "a context has at least one token"
        assert len(tree) <= self.most_nodes, "the tree is larger than most_nodes"
        begin = partial(self._begin, context, tree, sampling, cancelled, progress)
        return (lambda: begin()()) if self.shares_cores else begin()

    def _begin(
        self, context: Sequence[int], tree: Sequence[Edge], sampling: Sampling, cancelled: Stopped, progress: Reading
    ) -> Callable[[], Answer]:
        """What `begin` says, at once, for a context and a tree that are not too long."""
        ...

    def set_threads(self, threads: int, reading: int = 0) -> None:
        """Between calls: compute with so many threads on the CPU. reading: as many for prompts, 0 = the same."""

    def measure(
        self, widths: Iterable[int], context: int, repeats: int = 5, before: Callable[[], object] = lambda: None
    ) -> dict[int, float]:
        """Seconds of a forward by rows, `undisturbed`, over so many cached tokens, or as many as fit; too wide ones are
        left out. They take turns, so that other work on the machine meets all of them alike, and branch as a chat's
        trees do. One row is timed by itself too, as plain decoding runs, and the better time is its: llama.cpp launches
        a forward as wide as the one before as one graph, and of a CPU's caches each forward displaces what the next one
        of its kind would find.

        before: called before each but those of one row by itself. Clears the cache.
        """
        from duochat.engine.sampling import Sampling

        length = max(1, min(context, self.context_length - 2 * repeats - 4))
        tree = [(node % self.vocabulary, (node - 1) // 2) for node in range(self.most_nodes)]
        fitting = [width for width in widths if width <= self.most_nodes + 1]
        held = [token % self.vocabulary for token in range(length)]

        def taken(width: int, before: Callable[[], object] = lambda: None) -> float:
            before()
            begun = perf_counter()
            self.verify(held, tree[: width - 1], Sampling())
            return perf_counter() - begun

        def again(fitting: Sequence[int], *before: Callable[[], object]) -> dict[int, float]:
            turns: dict[int, list[float]] = {width: [] for width in fitting}
            for _ in range(repeats + 1):
                held.append(len(held) % self.vocabulary)
                for width in fitting:
                    turns[width].append(taken(width, *before))
            return {width: undisturbed(seconds[1:]) for width, seconds in turns.items()}  # the first one warms up

        taken(1)
        in_turn = again(fitting, before)
        return in_turn | {1: min(in_turn[1], again([1])[1])} if 1 in in_turn else in_turn

    def describe(self) -> dict[str, Any]:
        """What a report says of this lane: `target_backend`, `target_device`, `target_dtype`, its size, …

        target_exact: whether all decoders give the same text, near ties too.
        """
        ...

    def close(self) -> None:
        """Give memory back; the target is of no use afterwards."""
        ...
