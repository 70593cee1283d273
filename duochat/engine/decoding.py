"""The decoding loop: two lanes, one draft tree, a stream of rounds.

The CPU lane drafts without pause in the drafter's own thread; the loop verifies on the GPU lane and re-roots the tree.
The decoders differ only in their schedule. Whatever is drafted, the tokens are the target's own: the same for every
decoder and seed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any

from duochat.engine.costs import Costs
from duochat.engine.lanes import Answer, Cancelled, Drafter, Target, never
from duochat.engine.rounds import Batch, Round
from duochat.engine.sampling import Sampling
from duochat.engine.schedules import DECODERS, Schedule
from duochat.engine.tree import Acceptance, Node, Outcome, Tree


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a decoder. `keep`, the stop rule, is given the tokens about to be emitted and answers how many
    of them to keep when the answer ends there, or None. draft_budget: fixed γ instead of the computed one."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 512
    decoder: str = "duotree"
    draft_budget: int | None = None
    keep: Callable[[tuple[int, ...]], int | None] | None = None


class DraftLane:
    """The CPU lane: asks the schedule what to draft next, decodes it, hangs the candidates into the tree."""

    def __init__(self, tree: Tree, drafter: Drafter | None, schedule: Schedule, sampling: Sampling) -> None:
        self.tree, self.drafter, self.schedule, self.sampling = tree, drafter, schedule, sampling
        self.began = perf_counter()
        self.changed = threading.Condition()
        self.batches: list[Batch] = []
        self.waited = 0.0  # seconds that the target waited for a draft since its last forward began
        self.in_flight: list[Node] = []  # what the draft decodes just now
        self.verifying = self.joined = self.closed = False
        self.fault = ""
        self.running: Future[None] | None = None
        self.news: Callable[[], Round] | None = None  # the record of the last round, until it is told

    def __enter__(self) -> DraftLane:
        if self.schedule.drafts and self.drafter is None:
            self.fault = "no usable draft model is loaded"
        elif self.schedule.waits_for_prompt:
            self.start()
        return self

    def start(self) -> None:
        """Draft from now on. The target goes first: preparing a forward and a draft's prompt at once delays both."""
        if self.running is None and self.schedule.drafts and not self.fault:
            self.running = self.drafter.thread.submit(self.run)

    def __exit__(self, *exc: object) -> None:
        with self.changed:
            self.closed = True
            self._drop_in_flight()
            self.changed.notify_all()
        if self.running is not None:
            self.running.result()

    def run(self) -> None:
        """The lane's life, in the drafter's thread: as long as the request."""
        while (work := self._next()) is not None:
            try:
                self._draft(*work)
            except Cancelled:
                continue
            except Exception as fault:  # noqa: BLE001 - the chat goes on without drafts and says why
                self.fault = f"the draft failed: {fault or type(fault).__name__}"
                break
        with self.changed:
            self.changed.notify_all()

    def _next(self) -> tuple[list[Node], list[int]] | None:
        with self.changed:
            while not self.closed:
                self.in_flight = self.schedule.frontier(self.tree, self.verifying)
                if self.in_flight:
                    return self.in_flight, list(self.tree.context)
                self.changed.wait()
        return None

    def _draft(self, nodes: list[Node], context: Sequence[int]) -> None:
        started = self.clock()
        candidates, choosing = self.drafter.expand(context, nodes, self.sampling, lambda: nodes is not self.in_flight)
        ended = self.clock()
        with self.changed:
            for node, found in zip(nodes, candidates, strict=True):
                self.tree.grow(node, found)
            self.batches.append(Batch(started, ended, len(nodes), choosing))
            if self.joined:  # the first call reads the prompt: no measure of a batch
                self._observe(len(nodes), ended - started)
            self.joined = True
            self.changed.notify_all()

    def _observe(self, size: int, seconds: float) -> None:
        """Follow a batch's time; a draft that stalls goes on with fewer threads."""
        costs = self.schedule.costs
        costs.draft.observe(size, seconds)
        if threads := costs.relieve():
            self.drafter.set_threads(threads)

    def _drop_in_flight(self) -> None:
        """Cut the running decode short when nothing of it can be of use: the root moved away, or the request ends."""
        root = self.tree.root
        if self.in_flight and (self.closed or not any(n.below(root) or root.below(n) for n in self.in_flight)):
            self.in_flight = []
            self.drafter.interrupt()

    def clock(self) -> float:
        """Seconds since the request began."""
        return perf_counter() - self.began

    @property
    def state(self) -> dict[str, str]:
        """Two fields of a round: whether drafts are to be expected, and why not."""
        if not self.schedule.drafts or self.drafter is None:
            return {"speculation": "off", "reason": self.fault}
        if self.fault or self.schedule.reason:
            return {"speculation": "paused", "reason": self.fault or self.schedule.reason}
        warming = {"speculation": "warming", "reason": "the draft reads the prompt"}
        return {"speculation": "on"} if self.joined else warming

    def ready(self) -> bool:
        """Whether the next forward can begin without waiting for a draft."""
        with self.changed:
            return not self._waits(self.schedule.patient)

    def choose(self, cancelled: Callable[[], bool]) -> tuple[list[Node], float]:
        """What the target verifies now, and the seconds spent waiting for drafts since the forward before."""
        with self.changed:
            self._wait_while(self.schedule.patient, cancelled)
            waited, self.waited = self.waited, 0.0
            pending = self.schedule.pending(self.tree)[: self.schedule.costs.widest - 1]  # no wider than was measured
            for node in pending:
                self.tree.claim(node)
            self.verifying = True
            self.changed.notify_all()
        return pending, waited

    def commit(
        self, pending: Sequence[Node], answer: Answer, stop: StopRule, cancelled: Callable[[], bool], **when: Any
    ) -> None:
        """Walk down the tree with the target's own tokens and re-root it; what happened becomes the news.

        when: the fields of the record that tell its place and times.
        """
        with self.changed:
            self._wait_while(self.schedule.settling, cancelled)
            when["position"] = len(self.tree.context)
            outcome = self.tree.advance(pending, answer, stop)
            self.verifying = False
            self._drop_in_flight()
            if stop.finish is None:
                self.schedule.graft(self.tree)
            self.changed.notify_all()
            when |= self.state | self._since(outcome.ignored, stop.finish)
        self.news = partial(self._record, pending, answer, outcome, when)

    def _record(self, pending: Sequence[Node], answer: Answer, outcome: Outcome, when: dict[str, Any]) -> Round:
        return Round(
            **when,
            tokens=outcome.tokens,
            last=outcome.last,
            pending=tuple(n.id for n in pending),
            accepted=outcome.accepted,
            rejected=outcome.rejected,
            token_probs=tuple(answer.probs[row] for row in outcome.rows),
            pending_probs=tuple(answer.node_probs),
            transfer=answer.transfer,
            budget=self.schedule.costs.budget if self.schedule.drafts else 0.0,
            hit=outcome.hit if self.schedule.drafts else None,
        )

    def tell(self) -> Iterator[Round]:
        """The news, if there are any. The schedule learns from them, which may give a resting draft lane work."""
        if self.news is None:
            return
        told, self.news = self.news(), None
        with self.changed:
            self.schedule.observe(told)
            self.changed.notify_all()
        yield told

    def last_round(self, index: int) -> Round:
        """The empty round that ends a cancelled request."""
        with self.changed:
            now, position = self.clock(), len(self.tree.context)
            rest = self.state | self._since((), "cancelled")
            return Round(index, position, now, now, (), "plain", **rest)

    def _since(self, ignored: tuple[int, ...], finish: str | None) -> dict[str, Any]:
        """What was drafted since the last round; at the end nothing stays without a fate."""
        batches, self.batches = tuple(self.batches), []
        ignored += self.tree.close() if finish else ()
        return {"drafted": self.tree.take_drafted(), "batches": batches, "ignored": ignored, "finish": finish}

    def _wait_while(self, question: Callable[[Tree], bool], cancelled: Callable[[], bool]) -> None:
        """Sleep until the schedule's question is answered no, or the draft has failed. Never for the draft's prompt."""
        asked = self.clock()
        while self._waits(question):
            if cancelled():
                raise Cancelled
            self.changed.wait(0.05)
            self.waited += self.clock() - asked
            asked = self.clock()

    def _waits(self, question: Callable[[Tree], bool]) -> bool:
        return not self.fault and (self.joined or self.schedule.waits_for_prompt) and question(self.tree)


class StopRule:
    """Ends an answer at the first EOS, stop of the request, or limit; called once a round with the tokens to emit."""

    def __init__(self, request: Request, target: Target, position: int) -> None:
        self.eos, self.keep = target.eos, request.keep
        self.left = min(request.max_tokens, target.context_length - position)
        self.finish: str | None = None

    def __call__(self, tokens: tuple[int, ...]) -> int | None:
        """How many of the tokens to keep when the answer ends here, else None."""
        allowed = tokens[: self.left]
        end = next((i + 1 for i, token in enumerate(allowed) if token in self.eos), None)
        allowed = allowed[:end]
        kept = self.keep(allowed) if self.keep else None
        if end is not None or kept is not None:
            self.finish = "stop"
        elif len(allowed) == self.left:
            self.finish = "length"
        self.left -= len(allowed)
        return (len(allowed) if kept is None else kept) if self.finish else None


def decode(
    context: Sequence[int],
    request: Request,
    target: Target,
    drafter: Drafter | None,
    costs: Costs,
    acceptance: Acceptance | None = None,
    cancelled: Callable[[], bool] = never,
    progress: Callable[[int, int], None] | None = None,
    schedules: Mapping[str, Callable[..., Schedule]] = DECODERS,
) -> Iterator[Round]:
    """Continue `context` (token ids, not empty) and yield a Round for each target forward.

    Close the generator to stop early; the caches of both lanes stay sound. The last round has its `finish` set; that
    of a cancelled request is empty. schedules: by the names that `request.decoder` may have.
    """
    stop = StopRule(request, target, len(context))
    tree = Tree(context, acceptance, limit=len(context) + stop.left)
    schedule = schedules[request.decoder](costs, request.draft_budget)
    with DraftLane(tree, drafter, schedule, request.sampling) as lane:
        for index in count():
            try:
                if index == 1 or not lane.ready():  # the first token comes at once
                    yield from lane.tell()
                pending, waited = lane.choose(cancelled)
                started = lane.clock()
                answer = target.begin(tree.context, rows(pending), request.sampling, cancelled, progress)
                lane.start()
                schedule.read(tree)
                yield from lane.tell()  # while a device of its own is at work
                if cancelled():
                    raise Cancelled
                told = answer()
                when = {"index": index, "started": started, "ended": lane.clock(), "waited": waited}
                lane.commit(pending, told, stop, cancelled, phase="decode" if index else "prefill", **when)
            except Exception as fault:
                yield from lane.tell()
                if not isinstance(fault, Cancelled):
                    raise
                yield lane.last_round(index)
                return
            if stop.finish:
                yield from lane.tell()
                return


def rows(pending: Sequence[Node]) -> list[tuple[int, int]]:
    """The subtree as the target takes it: (token, index of the parent or -1) for each node, parents first."""
    place = {id(node): i for i, node in enumerate(pending)}
    return [(node.token, place.get(id(node.parent), -1)) for node in pending]
