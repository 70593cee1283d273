"""The draft tree: nodes, candidates, expansion order, selection of a subtree, re-rooting. Pure: no models, no clock.

The tree hangs below the last committed token (the root) and lives over rounds. A node's `reach` is the estimated
probability that the target arrives at it: the product of the calibrated acceptance of the edges below the root.
Since an edge is at most 1, the nodes of highest reach always form a connected subtree.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import starmap

from duochat.engine.lanes import Answer, Candidates
from duochat.engine.rounds import Draft


@dataclass(slots=True, eq=False)
class Node:
    """One token of the tree."""

    token: int
    parent: Node | None
    position: int
    prob: float = 1.0
    rank: int = 0
    origin: str = "model"
    edge: float = 1.0  # estimated acceptance, given that the parent is reached
    reach: float = 1.0
    id: int = -1  # set when the token counts as drafted
    expanded: bool = False  # the draft model has decoded it: its children are known
    committed: bool = False  # a root, now or before
    children: list[Node] = field(default_factory=list)

    def child(self, token: int) -> Node | None:
        """The child with this token, or None."""
        for child in self.children:
            if child.token == token:
                return child
        return None

    def below(self, root: Node) -> bool:
        """Whether the node is `root` or hangs below it."""
        node: Node | None = self
        while node is not None and node.position > root.position:
            node = node.parent
        return node is root


class Acceptance:
    """How often the target takes a candidate, learned from its verdicts by origin, rank and draft probability.

    A draft's 0.9 is rarely the target's 0.9. Each cell is a Beta estimate: the prior counts as WEIGHT trials. Bins are
    even in log-odds: what tells 0.99 from 0.9 matters as much as 0.1 from 0.01.
    """

    WEIGHT = 8.0
    BINS = tuple(1 / (1 + math.exp(5 - i / 1.2)) for i in range(1, 12))  # where a bin ends

    RANKS = 4  # from here on all are alike

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, int], tuple[float, float]] = {}  # trials and hits of a cell
        self._lines = {
            (origin, rank): [self._prior(origin, rank)] * (len(self.BINS) + 1)
            for origin in ("model", "ngram", "both")
            for rank in range(1, self.RANKS + 1)
        }  # of each cell (a, b): a candidate of probability p is taken with a·p + b

    @staticmethod
    def _prior(origin: str, rank: int) -> tuple[float, float]:
        """Before any verdict: a distilled draft is a little overconfident, the more so at low rank."""
        model = 0.95 if rank == 1 else 0.8
        return {"model": (model, 0.0), "ngram": (0.0, 0.5), "both": (model / 2, 0.5)}[origin]

    def __call__(self, origin: str, rank: int, prob: float) -> float:
        """Estimated probability of acceptance, in (0, 1)."""
        a, b = self._lines[origin, rank if rank < self.RANKS else self.RANKS][bisect(self.BINS, prob)]
        return a * prob + b

    def learn(self, node: Node, accepted: bool) -> None:
        """Count one verdict of the target; old ones fade so that a change of subject is followed."""
        kind, place = (node.origin, min(node.rank, self.RANKS)), bisect(self.BINS, node.prob)
        trials, hits = self._seen.get((*kind, place), (0.0, 0.0))
        if trials >= 400:
            trials, hits = trials / 2, hits / 2
        trials, hits = trials + 1, hits + accepted
        self._seen[(*kind, place)] = trials, hits
        (a, b), weight = self._prior(*kind), self.WEIGHT + trials
        self._lines[kind][place] = self.WEIGHT * a / weight, (self.WEIGHT * b + hits) / weight


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one answer of the target did to the tree."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]  # the answer's row that gave each token
    last: str
    accepted: tuple[int, ...]
    rejected: tuple[int, ...]
    ignored: tuple[int, ...]
    hit: bool


class Tree:
    """The tree of one request. Not thread-safe: the lanes share a lock."""

    LEAST = 0.02  # a less probable candidate is hopeless: on a virtual clock .004 to .03 give the same speed, within
    #               2 %, and each candidate costs the interpreter microseconds that both lanes wait for
    FAINT = 1e-3  # and so is one of less reach: on that clock 0 gives the same, .004 1 % less

    def __init__(
        self,
        context: Sequence[int],
        acceptance: Callable[[str, int, float], float] | None = None,
        limit: int = 2**31,  # no token may stand at this position or behind
        vocabulary: int = 2**31,  # no token may be this or more: a draft's padding may go further than the target's
    ) -> None:
        self.context, self.limit, self.vocabulary = list(context), limit, vocabulary  # a new list for each root
        self.root = Node(self.context[-1], None, len(self.context) - 1, committed=True)
        self.acceptance = acceptance or Acceptance()
        self._verdicts: list[tuple[list[Node], int]] = []  # candidates and the target's token, since the last `learn`
        self._drafted: list[tuple] = []  # a Draft's fields, since the last `take_drafted`
        self.version = 0  # counts what changes the tree
        self.promise = 0.75  # estimated acceptance of the draft's first choices, the last twenty above all
        self._open: dict[int, Node] = {}  # drafted and without a fate
        self._frontier: list[tuple[float, int, Node]] = [(-1.0, 0, self.root)]  # unexpanded, best reach first
        self._pushed = 0
        self._ids = 0

    # growing -------------------------------------------------------------------------------------------------

    def frontier(self, n: int) -> list[Node]:
        """The n unexpanded nodes of highest reach, best first; they stay in the frontier until `grow`."""
        found: dict[Node, tuple[float, int, Node]] = {}
        while self._frontier and len(found) < n:
            entry = heapq.heappop(self._frontier)
            node = entry[2]
            if not node.expanded and entry[0] == -node.reach:  # else decoded, or pushed anew with another reach
                found[node] = entry
        for entry in found.values():
            heapq.heappush(self._frontier, entry)
        return list(found)

    def grow(self, node: Node, candidates: Candidates) -> None:
        """The draft has decoded `node`: hang its candidates below it, but for hopeless ones.

        A node that left the tree is only counted.
        """
        self.claim(node)
        node.expanded = True
        if not node.below(self.root):
            return
        self.version += 1
        known = {child.token: child for child in node.children}
        for rank, (token, prob) in enumerate(zip(candidates.tokens, candidates.probs, strict=True), 1):
            if token in known:
                self._agree(known[token], rank, prob)
            elif rank == 1 or (prob >= self.LEAST and node.reach * prob >= self.FAINT):
                self._hang(node, token, prob, rank)
            elif not known:
                break
        if first := candidates.tokens and node.child(candidates.tokens[0]):  # else at the limit
            self.promise += (first.edge - self.promise) / 20

    def _agree(self, child: Node, rank: int, prob: float) -> None:
        """The draft model and prompt lookup propose the same token here."""
        child.prob, child.rank, child.origin = prob, rank, "both"
        child.edge = self.acceptance("both", rank, prob)
        child.reach = child.parent.reach * child.edge
        self._rescale(child)

    def graft(self, tokens: Sequence[int], probs: Sequence[float]) -> None:
        """Hang a chain of tokens from prompt lookup below the root, each with its own chance of acceptance."""
        node = self.root
        self.version += 1
        for token, prob in zip(tokens, probs, strict=True):
            child = node.child(token)
            if child is None:
                child = self._hang(node, token, prob, 1, "ngram")
            elif child.origin == "model":
                self._agree(child, child.rank, child.prob)
            node = child

    def _hang(self, parent: Node, token: int, prob: float, rank: int, origin: str = "model") -> Node:
        """A new node below its parent and in the frontier; one too many stays outside."""
        edge, position = self.acceptance(origin, rank, prob), parent.position + 1
        child = Node(token, parent, position, prob, rank, origin, edge, parent.reach * edge)
        if position < self.limit and token < self.vocabulary:
            parent.children.append(child)
            self._push(child)
        return child

    def claim(self, node: Node) -> None:
        """Count a token as drafted: it was decoded by the draft, or is sent to the target. The root is not drafted."""
        if node.id >= 0 or node.committed:
            return
        node.id = self._ids
        self._ids += 1
        self._open[node.id] = node
        parent = node.parent.id if node.parent is not None else -1
        reach = min(1.0, node.reach)
        self._drafted.append((node.id, parent, node.position, node.token, node.prob, reach, node.rank, node.origin))

    def take_drafted(self) -> Iterator[Draft]:
        """The tokens drafted since the last call; made when they are asked for."""
        drafted, self._drafted = self._drafted, []
        return starmap(Draft, drafted)

    def _push(self, node: Node) -> None:
        self._pushed += 1
        heapq.heappush(self._frontier, (-node.reach, self._pushed, node))

    # verifying -----------------------------------------------------------------------------------------------

    def best(self, n: int, least: float = 0.0) -> list[Node]:
        """The n nodes of highest reach below the root, best first: a parent always stands before its children.

        Nodes with less reach than `least` are left out.
        """
        chosen: list[Node] = []
        heap: list[tuple[float, int, Node]] = []
        node, pushed = self.root, 0
        while len(chosen) < n:
            for child in node.children:
                if child.reach >= least:
                    pushed += 1
                    heapq.heappush(heap, (-child.reach, pushed, child))
            if not heap:
                break
            node = heapq.heappop(heap)[2]
            chosen.append(node)
        return chosen

    def advance(
        self, pending: Sequence[Node], answer: Answer, keep: Callable[[tuple[int, ...]], int | None]
    ) -> Outcome:
        """Walk down `pending` with the target's own tokens, commit them, and re-root at the last. What they say of the
        draft is kept for `learn`.

        keep: given the tokens, how many of them to commit when the answer ends here, or None for all.
        """
        path, rows = self._walk(pending, answer)
        tokens = tuple(answer.tokens[row] for row in rows)
        kept = keep(tokens)
        self._verdicts += ((node.children, token) for node, token in zip(path, tokens, strict=False))
        if kept is not None and kept < len(tokens):
            path, rows, tokens = path[: kept + 1], rows[:kept], tokens[:kept]
        return self._commit(path, tuple(rows), tokens)

    def _walk(self, pending: Sequence[Node], answer: Answer) -> tuple[list[Node], list[int]]:
        """The nodes from the root to the outcome (the node of the last token), and the row that gave each token."""
        row_of = {node: row for row, node in enumerate(pending, 1)}
        node, row = self.root, 0
        path, rows = [node], []
        while row is not None:
            token = answer.tokens[row]
            rows.append(row)
            node = node.child(token) or Node(token, node, node.position + 1)
            path.append(node)
            row = row_of.get(node)
        return path, rows

    def learn(self) -> None:
        """Let `acceptance` learn from the target's verdicts since the last call, if it does."""
        verdicts, self._verdicts = self._verdicts, []
        learn = getattr(self.acceptance, "learn", None)
        for candidates, token in verdicts if learn else ():
            for child in candidates:
                learn(child, child.token == token)

    def _commit(self, path: list[Node], rows: tuple[int, ...], tokens: tuple[int, ...]) -> Outcome:
        accepted = tuple(node.id for node in path[1:] if node.id >= 0)
        tested = tuple(c.id for c in path[-2].children if c.id >= 0) if tokens else ()
        hit = path[-1].id >= 0
        rejected = () if hit else tested
        last = "accepted" if hit and tokens else "correction" if rejected else "bonus" if accepted else "plain"
        for fate in (*accepted, *rejected):
            self._open.pop(fate, None)
        for node in path[:-1]:  # committed: what else hung here is dead
            node.children = []
        self.context = [*self.context, *tokens]
        self.root = path[-1]
        self.root.committed = True
        return Outcome(tokens, rows, last, accepted, rejected, self._reroot(), self.root.expanded)

    def _reroot(self) -> tuple[int, ...]:
        """Keep what lives below the new root; return the ids of the drafted tokens that died."""
        self.version += 1
        self.root.reach = 1.0
        self._frontier = []
        alive = self._rescale(self.root)
        dead = tuple(i for i in self._open if i not in alive)
        for i in dead:
            del self._open[i]
        return dead

    def _rescale(self, top: Node) -> set[int]:
        """Compute each node's reach below `top`, put the unexpanded ones into the frontier; return the ids of all."""
        alive, stack = set(), [top]
        while stack:
            node = stack.pop()
            alive.add(node.id)
            if not node.expanded:
                self._push(node)
            for child in node.children:
                child.reach = node.reach * child.edge
                stack.append(child)
        return alive

    def close(self) -> tuple[int, ...]:
        """The request ends: the ids of the drafted tokens still without a fate, which are now ignored."""
        left, self._open = tuple(self._open), {}
        return left
