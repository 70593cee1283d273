"""When to draft what, and what to verify: the one thing in which the decoders differ.

A schedule is asked under the lanes' lock and must answer at once. `frontier` feeds the CPU lane, `pending` the GPU
lane; `patience` and `settling` say how long the GPU lane waits for a draft before and after its forward.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable

from duochat.config import AUTO
from duochat.engine.costs import Costs
from duochat.engine.lookup import Lookup
from duochat.engine.rounds import Round
from duochat.engine.tree import Node, Tree
from duochat.engine.watch import Watch


class Schedule:
    """Plain decoding: nothing is drafted. The base of the others."""

    drafts = False
    parallel = False  # whether it always drafts while the target computes
    waits_for_prompt = False  # whether the target's first forward waits until the draft has read the prompt
    turns = False  # whether lanes that share their cores take turns, the draft's reading included

    def __init__(self, costs: Costs, budget: int | str = AUTO) -> None:
        self.whole = costs  # of plain decoding
        self.costs = (self.parallel and costs.at_once) or costs
        self.fixed_budget = 0 if budget == AUTO else budget
        self.reason = ""  # why drafting is paused just now
        self.failed = False  # the draft has: what is verified now comes from elsewhere
        self._begun: deque[Costs] = deque()  # `sharing` of forwards whose rounds are not told yet
        self.reading = costs.shared  # the target reads the prompt with the draft's cores too: the draft reads it next

    @property
    def sharing(self) -> Costs:
        """Of the target's next forward."""
        return self.whole if self.reason or self.failed else self.costs

    def frontier(self, tree: Tree, verifying: bool) -> list[Node]:
        """The nodes that the draft model decodes next as one batch; empty: the CPU lane rests."""
        return []

    def drafted(self, tree: Tree) -> Iterable[Node]:
        """Tokens that count as drafted though the draft model has not decoded them: those that end a sequence."""
        return ()

    def pending(self, tree: Tree) -> list[Node]:
        """The nodes that the target verifies now, parents first."""
        return []

    def choose(self, tree: Tree) -> list[Node]:
        """`pending`, when it is done: a round will tell what came of it."""
        for costs in (self.whole, self.costs):
            costs.see(len(tree.context))
        self._begun.append(self.sharing)
        return self.pending(tree)

    def patience(self, tree: Tree) -> float:
        """How many seconds at most the target should wait for the next draft batch before its forward."""
        return 0.0

    def settling(self, tree: Tree) -> float:
        """How many seconds at most the target's answer should wait for the drafting beside it to end."""
        return 0.0

    def read(self, tree: Tree) -> None:
        """Make ready for `graft`, while the target is at work."""

    def graft(self, tree: Tree) -> None:
        """Hang candidates from other sources than the draft model below the new root."""

    def observe(self, r: Round) -> None:
        """Learn from a finished round."""
        self.reading = False
        self._begun.popleft().observe(r)


def firsts(node: Node, most: int) -> list[Node]:
    """The draft's first choice after a node, the first one after that, and so on: at most `most`, as far as known."""
    found: list[Node] = []
    while node.children and len(found) < most:
        node = node.children[0]
        found.append(node)
    return found


class Chained(Schedule):
    """A schedule that verifies chains, with the acceptance rate that its budget follows from."""

    drafts = True

    def __init__(self, costs: Costs, budget: int | str = AUTO) -> None:
        super().__init__(costs, budget)
        self.tested, self.taken = 4.0, 3.0  # a prior of 0.75

    def sequences(self, tree: Tree) -> list[tuple[Node, int]]:
        """What is being drafted: after which node a sequence of first choices stands, and how long it may grow."""
        raise NotImplementedError

    def frontier(self, tree: Tree, verifying: bool) -> list[Node]:
        """The ends of all sequences that are too short."""
        found = []
        for start, length in self.sequences(tree):
            sequence = [start, *firsts(start, length)]
            if len(sequence) <= length and not sequence[-1].expanded:
                found.append(sequence[-1])
        return found

    def drafted(self, tree: Tree) -> Iterable[Node]:
        return [node for start, length in self.sequences(tree) for node in firsts(start, length)]

    @property
    def acceptance(self) -> float:
        """Accepted / tested draft tokens, the last fifty of them above all."""
        return self.taken / self.tested

    def observe(self, r: Round) -> None:
        super().observe(r)
        self.tested = 0.98 * self.tested + len(r.accepted) + len(r.rejected)
        self.taken = 0.98 * self.taken + len(r.accepted)


class Sequential(Chained):
    """Conventional speculative decoding (arXiv 2211.17192): draft γ tokens, then verify them; no overlap."""

    waits_for_prompt = True

    def sequences(self, tree: Tree) -> list[tuple[Node, int]]:
        return [(tree.root, self.fixed_budget or self.costs.sequential_budget(self.acceptance))]

    def frontier(self, tree: Tree, verifying: bool) -> list[Node]:
        return [] if verifying else super().frontier(tree, verifying)

    def pending(self, tree: Tree) -> list[Node]:
        return list(self.drafted(tree))

    def patience(self, tree: Tree) -> float:
        return math.inf if self.frontier(tree, verifying=False) else 0.0


class Parallel(Chained):
    """The paper's schedule (arXiv 2503.00784): while the target verifies a chain, k sequences grow from its tip.

    θ = p(1,1)·p(2,1): each first token more probable than that opens a sequence; together they hold γ tokens. No
    sequence grows longer than pays to verify: with few open ones and a wide forward that costs, that is below γ.
    """

    parallel = True
    SEQUENCES = 8

    def __init__(self, costs: Costs, budget: int | str = AUTO) -> None:
        super().__init__(costs, budget)
        self.tip: Node | None = None  # the end of the chain that the target verifies
        self.longest = self.budget  # of a sequence

    @property
    def budget(self) -> int:
        return self.fixed_budget or max(1, round(self.costs.budget))

    def pending(self, tree: Tree) -> list[Node]:
        """The rest of the sequence that the outcome began."""
        chain: list[Node] = []
        self.tip = tree.root
        while (child := next((c for c in self.tip.children if c.id >= 0), None)) is not None:
            chain.append(child)
            self.tip = child
        self.longest = self.fixed_budget or self.costs.chain_length(self.acceptance)
        return chain

    def sequences(self, tree: Tree) -> list[tuple[Node, int]]:
        """γ tokens over k sequences, none longer than pays; the more probable ones take the remainder.

        Before θ is known the first sequence is two tokens long.
        """
        heads = self._heads()
        if not heads:
            return [(self.tip, min(2, self.budget))] if self.tip else []
        each, rest = divmod(self.budget, len(heads))
        lengths = (min(each + (i < rest), self.longest) for i in range(len(heads)))
        return [(head, length - 1) for head, length in zip(heads, lengths, strict=True)]

    def _heads(self) -> list[Node]:
        """The first tokens after the tip that open a sequence each."""
        best = self.tip.children if self.tip else []
        if not best or not (best[0].expanded or self.budget == 1):
            return []
        second = best[0].children[0].prob if best[0].children else 1.0
        most = min(self.SEQUENCES, self.budget)
        return [best[0], *(node for node in best[1:most] if node.prob > best[0].prob * second)]

    def drafted(self, tree: Tree) -> Iterable[Node]:
        return [*self._heads(), *super().drafted(tree)]

    def frontier(self, tree: Tree, verifying: bool) -> list[Node]:
        return super().frontier(tree, verifying) if verifying and not self.reading else []

    def settling(self, tree: Tree) -> float:
        return math.inf if self.frontier(tree, verifying=True) else 0.0


class Best(Schedule):
    """The persistent tree: expand what the target most probably reaches, verify what pays, wait only when it pays.

    Where both lanes share few cores they take turns: the draft works while that is worth a wait, and then rests.
    """

    drafts = True
    SMALLEST = 2e-3  # reach below which a node is not worth a decode, though it costs the target nothing
    SURE = 0.9  # of a draft's first choices that are accepted, at most
    WORTH = 0.2  # tokens that a decoded node brings when the target reaches it; the rest come too late or are wrong.
    #              `simulate` gives the same speed, within 2 %, from .1 to .4, with and without a GPU
    BATCHES = (1, 2, 4, 8)

    def __init__(self, costs: Costs, budget: int | str = AUTO) -> None:
        self.turns, self.parallel = costs.turns, not costs.turns
        super().__init__(costs, budget)
        self.costs.watch = self.watch = self.costs.watch or Watch(self.costs)
        self.watch.before = None
        self.lookup = Lookup()
        self._promises: deque[tuple[float, int]] = deque()  # tokens and rows of forwards whose rounds are not told yet
        self._chosen: tuple[int, list[Node]] | None = None  # the tree's version, and what to verify of it
        self._batch: tuple[int, list[Node]] | None = None  # and what to decode next
        self.gain = max(1.0, self.watch.speedup) if self.watch.window else 1.5  # over plain decoding lately
        self.reason = self._vain() or self.watch.reason

    @property
    def rate(self) -> float:
        """Tokens per second lately."""
        return self.gain / self.costs.plain

    def _vain(self) -> str:
        """Why no draft can pay, where it takes the target's cores: not even chains that are nearly always right."""
        costs, delay = self.costs, 1.0 if self.turns else self.costs.contention
        lengths = range(1, min(9, costs.widest)) if costs.shared else ()
        gain = costs.plain * max((costs.rate(self.SURE, n, delay) for n in lengths), default=float("inf"))
        return f"drafting would give {gain:.2f}× plain decoding here at best" if gain < 1 else ""

    def frontier(self, tree: Tree, verifying: bool) -> list[Node]:
        if (self.reason and not self.watch.looking) or self.reading or (self.turns and verifying):
            return []
        nodes = self._likeliest(tree)
        if self.turns and not self._worth_waiting(tree, nodes):
            return []
        return [*nodes]  # a list of its own: by that a batch is told from one that was dropped

    def _likeliest(self, tree: Tree) -> list[Node]:
        """The batch that gathers the most reach per second. Both lanes ask for it."""
        if self._batch is None or self._batch[0] != tree.version:
            nodes, smallest, reach, best = tree.frontier(self.BATCHES[-1]), self._smallest, 0.0, (0.0, 0)
            for n, node in enumerate(nodes, 1):
                if node.reach < smallest:
                    break
                reach += node.reach
                if n in self.BATCHES:
                    best = max(best, (reach / self.costs.draft(n), n))
            self._batch = tree.version, nodes[: best[1]]
        return self._batch[1]

    @property
    def _smallest(self) -> float:
        """Reach of a node that brings as many tokens as the target loses while it is drafted."""
        return max(self.SMALLEST, self.rate * self.costs.contention * self.costs.draft(1) / self.WORTH)

    def pending(self, tree: Tree) -> list[Node]:
        """The subtree that maximises expected tokens minus time at the present rate (Dinkelbach's method)."""
        if self._chosen is None or self._chosen[0] != tree.version:
            self._chosen = tree.version, [] if self.reason else self._worthy(tree)
        return self._chosen[1]

    def choose(self, tree: Tree) -> list[Node]:
        nodes = super().choose(tree)
        seen = self._worthy(tree) if self.watch.looking else nodes
        self._promises.append((1 + sum(node.reach for node in seen), len(seen) + 1))
        return nodes

    @property
    def _most(self) -> int:
        """Nodes that a forward may verify."""
        return min(self.fixed_budget or self.costs.widest, self.costs.widest - 1)

    def _worthy(self, tree: Tree) -> list[Node]:
        rate, seconds, expected = self.rate, self.costs.target, 0.0
        nodes = tree.best(self._most, max(self.SMALLEST, rate * seconds.slope))  # less reach can nowhere pay
        gains = [(-rate * seconds(1), 0)]
        for n, node in enumerate(nodes, 1):
            expected += node.reach
            gains.append((expected - rate * seconds(n + 1), n))
        return nodes[: max(gains)[1]]

    def read(self, tree: Tree) -> None:
        self.lookup.read(tree.context)

    def graft(self, tree: Tree) -> None:
        self.read(tree)
        if not self.reason or self.watch.looking:
            tree.graft(*self.lookup.continuation(tree.context))

    def patience(self, tree: Tree) -> float:
        """Wait while the next batch brings more expected tokens than the wait costs at the present rate.

        A batch that is overdue is expected to take as long again as it has taken. In turns it has the cores, and ends.
        """
        if self.reason or self.reading or self.rate * self.costs.draft(1) > 1:  # not even for a sure token
            return 0.0
        worth = self._worth_waiting(tree, self._likeliest(tree))
        return math.inf if worth and self.turns else worth

    def _worth_waiting(self, tree: Tree, nodes: list[Node]) -> float:
        """The seconds that this batch may take, in which plain decoding gives what its nodes bring; 0 when they do not
        pay, together with the likeliest below them.

        A decoded node brings one token when the target reaches it and accepts what the draft puts after it, and widens
        the forward by a row. Where the first further row costs the most, only several pay.
        """
        rate, rows, gain, worth = self.rate, len(self.pending(tree)) + 1, 0.0, 0.0
        bring = [-node.reach * tree.promise for node in nodes]  # the next node of each, as a heap
        own, here, one = -sum(bring) / rate, self.costs.target(rows), self.costs.draft(1)
        for more in range(1, self._most - rows + 2):
            if not bring or -bring[0] < rate * one:
                break
            gain -= heapq.heapreplace(bring, bring[0] * tree.promise)
            later = max(0, more - len(nodes)) * one
            worth = max(worth, gain / rate - max(0.0, self.costs.target(rows + more) - here) - later)
        return min(own, worth) if worth > self.costs.draft(len(nodes)) else 0.0

    def observe(self, r: Round) -> None:
        super().observe(r)
        self._chosen = self._batch = None
        self.reason = self.watch.observe(r, *self._promises.popleft()) or self._vain()
        if self.watch.window:
            self.gain = max(1.0, self.watch.speedup)
        if self.reason and self.costs is not self.whole:  # what is not used now follows what is
            self.costs.target.now.observe(self.whole.target.now.value)
            self.costs.draft.now.observe(1.0)


DECODERS: dict[str, Callable[..., Schedule]] = {
    "autoregressive": Schedule,
    "speculative": Sequential,
    "duodecoding": Parallel,
    "duotree": Best,
}
