"""When to draft what, and what to verify: the one thing in which the decoders differ.

A schedule is asked under the lanes' lock and must answer at once. `frontier` feeds the CPU lane, `pending` the GPU
lane; `patient` and `settling` say whether the GPU lane waits for a draft before or after its forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from duochat.engine.costs import Costs
from duochat.engine.rounds import Round
from duochat.engine.tree import Node, Tree


class Schedule:
    """Plain decoding: nothing is drafted. The base of the others."""

    drafts = False
    waits_for_prompt = False  # whether the target's first forward waits until the draft has read the prompt

    def __init__(self, costs: Costs, budget: int | None = None) -> None:
        self.costs = costs
        self.fixed_budget = budget
        self.reason = ""  # why drafting is paused just now
        self.reading = costs.shared  # the target reads the prompt with the draft's cores too: the draft reads it next

    def frontier(self, tree: Tree, verifying: bool) -> list[Node]:
        """The nodes that the draft model decodes next as one batch; empty: the CPU lane rests."""
        return []

    def pending(self, tree: Tree) -> list[Node]:
        """The nodes that the target verifies now, parents first."""
        return []

    def patient(self, tree: Tree) -> bool:
        """Whether the target should wait for the next draft batch before its forward."""
        return False

    def settling(self, tree: Tree) -> bool:
        """Whether the target's answer should wait for the drafting beside it to end."""
        return False

    def read(self, tree: Tree) -> None:
        """Make ready for `graft`, while the target is at work."""

    def graft(self, tree: Tree) -> None:
        """Hang candidates from other sources than the draft model below the new root."""

    def observe(self, r: Round) -> None:
        """Learn from a finished round."""
        self.reading = False
        if r.phase == "prefill" or not r.tokens:
            return
        self.costs.target.observe(len(r.pending) + 1, r.ended - r.started)
        if not r.batches and not r.pending:
            self.costs.observe_plain(r.ended - r.started)


def chain(node: Node) -> list[Node]:
    """The drafted tokens below a node, following the drafted child at each step."""
    found: list[Node] = []
    while (child := next((c for c in node.children if c.id >= 0), None)) is not None:
        found.append(child)
        node = child
    return found


class Chained(Schedule):
    """A schedule that verifies chains, with the acceptance rate that its budget follows from."""

    drafts = True

    def __init__(self, costs: Costs, budget: int | None = None) -> None:
        super().__init__(costs, budget)
        self.tested, self.taken = 4.0, 3.0  # a prior of 0.75

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

    @property
    def budget(self) -> int:
        return self.fixed_budget or self.costs.sequential_budget(self.acceptance)

    def frontier(self, tree: Tree, verifying: bool) -> list[Node]:
        if verifying:
            return []
        drafted = chain(tree.root)
        tip = drafted[-1] if drafted else tree.root
        while tip.expanded and len(drafted) < self.budget and tip.children:
            tip = tip.children[0]
            tree.claim(tip)
            drafted.append(tip)
        return [tip] if len(drafted) < self.budget and not tip.expanded else []

    def pending(self, tree: Tree) -> list[Node]:
        return chain(tree.root)[: self.budget]

    def patient(self, tree: Tree) -> bool:
        return bool(self.frontier(tree, verifying=False))


class Parallel(Chained):
    """The paper's schedule (arXiv 2503.00784): while the target verifies a chain, k sequences grow from its tip.

    θ = p(1,1)·p(2,1): each first token more probable than that opens a sequence; together they hold γ tokens. No
    sequence grows longer than pays to verify: with few open ones and a wide forward that costs, that is below γ.
    """

    SEQUENCES = 8

    def __init__(self, costs: Costs, budget: int | None = None) -> None:
        super().__init__(costs, budget)
        self.tip: Node | None = None
        self.heads: list[Node] = []
        self.longest = self.budget  # of a sequence

    @property
    def budget(self) -> int:
        return self.fixed_budget or max(1, round(self.costs.budget))

    def pending(self, tree: Tree) -> list[Node]:
        drafted = chain(tree.root)
        self.tip = drafted[-1] if drafted else tree.root
        self.heads = []
        self.longest = self.fixed_budget or self.costs.chain_length(self.acceptance)
        return drafted

    def frontier(self, tree: Tree, verifying: bool) -> list[Node]:
        tip = self.tip
        if self.reading or not verifying or tip is None:
            return []
        if not tip.expanded:
            return [tip]
        if not self.heads and tip.children:
            if not tip.children[0].expanded and self.budget > 1:
                tree.claim(tip.children[0])
                return [tip.children[0]]
            self._open_sequences(tree, tip.children)
        tips = (self._tip(tree, head, n) for head, n in zip(self.heads, self._lengths(), strict=True))
        return [node for node in tips if node is not None]

    def settling(self, tree: Tree) -> bool:
        return bool(self.frontier(tree, verifying=True))

    def _open_sequences(self, tree: Tree, firsts: list[Node]) -> None:
        second = firsts[0].children[0].prob if firsts[0].children else 1.0
        threshold = firsts[0].prob * second
        most = min(self.SEQUENCES, self.budget)
        self.heads = [firsts[0], *(c for c in firsts[1:most] if c.prob > threshold)]
        for head in self.heads:
            tree.claim(head)

    def _lengths(self) -> list[int]:
        """γ tokens over k sequences, none longer than pays; the more probable ones take the remainder."""
        each, rest = divmod(self.budget, max(1, len(self.heads)))
        return [min(each + (i < rest), self.longest) for i in range(len(self.heads))]

    @staticmethod
    def _tip(tree: Tree, head: Node, length: int) -> Node | None:
        """The end of a sequence when it must be decoded to make the sequence longer; None when it is long enough."""
        sequence = [head, *chain(head)]
        while sequence[-1].expanded and sequence[-1].children and len(sequence) < length:
            sequence.append(sequence[-1].children[0])
            tree.claim(sequence[-1])
        return sequence[-1] if len(sequence) < length and not sequence[-1].expanded else None


class Watch:
    """Never slower: pauses drafting when the last rounds gave fewer tokens per second than plain decoding would."""

    WINDOW = 16  # rounds
    PAUSE = 16  # rounds of the first pause; each further one is twice as long, up to MOST
    MOST = 512

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.window: deque[tuple[int, float]] = deque(maxlen=self.WINDOW)
        self.left = 0  # rounds of the pause still to go
        self.pause = self.PAUSE
        self.before: float | None = None  # when the round before ended

    @property
    def speedup(self) -> float:
        """Measured tokens per second of the window over those of plain decoding."""
        seconds = sum(seconds for _, seconds in self.window)
        return sum(tokens for tokens, _ in self.window) * self.costs.plain / seconds if seconds else 1.0

    def observe(self, r: Round) -> str:
        """Count a round; returns the reason while drafting is paused, "" otherwise."""
        seconds = r.ended - (self.before if self.before is not None else r.started)
        self.before = r.ended
        if self.left:
            self.left -= 1
            return self.reason if self.left else ""
        if r.phase == "decode" and r.speculation == "on":
            self.window.append((len(r.tokens), seconds))
        speedup = self.speedup
        if len(self.window) < self.WINDOW or speedup >= 1.0:
            self.pause = self.PAUSE if speedup > 1.1 else self.pause
            return ""
        self.reason = f"drafting gave {speedup:.2f}× plain decoding over {self.WINDOW} rounds"
        self.left, self.pause = self.pause, min(self.MOST, 2 * self.pause)
        self.window.clear()
        return self.reason


class Lookup:
    """Prompt lookup: what followed the last few tokens when they stood earlier in the conversation."""

    SIZES = (4, 3, 2)
    PROBS = (0.8, 0.6, 0.3)  # where calibration starts for a match of each size
    LENGTH = 8

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._read = 0

    def read(self, context: Sequence[int]) -> None:
        """Index the n-grams that end before the last token; each call reads only what is new."""
        for end in range(max(self._read, 2), len(context)):
            for n in self.SIZES:
                if end >= n:
                    self._after[tuple(context[end - n : end])] = end
        self._read = len(context)

    def continuation(self, context: Sequence[int]) -> tuple[list[int], list[float]]:
        """Up to LENGTH tokens after the latest occurrence of the longest match, and their chances of acceptance."""
        for n, prob in zip(self.SIZES, self.PROBS, strict=True):
            if (at := self._after.get(tuple(context[-n:]))) is not None:
                tokens = list(context[at : at + self.LENGTH])
                return tokens, [prob] + [0.8] * (len(tokens) - 1)
        return [], []


class Best(Schedule):
    """The persistent tree: expand what the target most probably reaches, verify what pays, wait only when it pays."""

    drafts = True
    SMALLEST = 2e-3  # reach below which a node is not worth a decode, though it costs the target nothing
    WORTH = 0.25  # tokens that a decoded node brings when the target reaches it; the rest come too late or are wrong
    SHARED_WORTH = 0.1  # the same where both lanes share the cores
    PATIENCE = 0.15  # tokens that a wait gains for each expected token of the batch waited for
    BATCHES = (1, 2, 4, 8)

    def __init__(self, costs: Costs, budget: int | None = None) -> None:
        super().__init__(costs, budget)
        self.watch = Watch(costs)
        self.lookup = Lookup()
        self.rate = 1.5 / costs.plain  # tokens per second lately

    def frontier(self, tree: Tree, verifying: bool) -> list[Node]:
        if self.reason or self.reading:
            return []
        nodes = [n for n in tree.frontier(self.BATCHES[-1]) if n.reach >= self._smallest]
        return nodes[: self._batch([n.reach for n in nodes])]

    @property
    def _smallest(self) -> float:
        """Reach of a node that brings as many tokens as the target loses while it is drafted."""
        worth = self.SHARED_WORTH if self.costs.shared else self.WORTH
        return max(self.SMALLEST, self.rate * self.costs.contention * self.costs.draft(1) / worth)

    def _batch(self, reaches: list[float]) -> int:
        """The batch size that gathers the most reach per second."""
        sizes = [n for n in self.BATCHES if n <= len(reaches)]
        return max(sizes, key=lambda n: sum(reaches[:n]) / self.costs.draft(n), default=0)

    def pending(self, tree: Tree) -> list[Node]:
        """The subtree that maximises expected tokens minus time at the present rate (Dinkelbach's method)."""
        if self.reason:
            return []
        widest = self.fixed_budget or self.costs.widest - 1
        nodes = tree.best(widest, self.SMALLEST)
        gains, expected = [(-self.rate * self.costs.target(1), 0)], 0.0
        for n, node in enumerate(nodes, 1):
            expected += node.reach
            gains.append((expected - self.rate * self.costs.target(n + 1), n))
        return nodes[: max(gains)[1]]

    def read(self, tree: Tree) -> None:
        self.lookup.read(tree.context)

    def graft(self, tree: Tree) -> None:
        self.read(tree)
        if not self.reason:
            tree.graft(*self.lookup.continuation(tree.context))

    def patient(self, tree: Tree) -> bool:
        """Wait when the next batch brings more expected tokens than the wait costs at the present rate."""
        if self.reason or self.rate * self.costs.draft(1) > self.PATIENCE:  # not even for a sure token
            return False
        nodes = self.frontier(tree, verifying=False)
        gain = sum(node.reach for node in nodes) * self.PATIENCE
        return gain > self.rate * self.costs.draft(len(nodes)) if nodes else False

    def observe(self, r: Round) -> None:
        super().observe(r)
        self.reason = self.watch.observe(r)
        if self.watch.window:
            self.rate = max(1.0, self.watch.speedup) / self.costs.plain


DECODERS: dict[str, Callable[..., Schedule]] = {
    "autoregressive": Schedule,
    "speculative": Sequential,
    "duodecoding": Parallel,
    "duotree": Best,
}
