"""What both lanes share during a request, and the CPU lane: a thread that drafts for as long as the request lives.

`State` has neither clock nor thread: the decoding loop and the simulation on a virtual clock both drive it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Any

from duochat.engine.lanes import Answer, Cancelled, Candidates, Drafter, never
from duochat.engine.rounds import Batch, Round
from duochat.engine.sampling import Sampling
from duochat.engine.schedules import Schedule
from duochat.engine.tree import Node, Outcome, Tree

Question = Callable[[Tree], float]  # of a schedule: for how many seconds at most the target waits


class State:
    """One request: the draft tree, the schedule, and what has happened since the last round."""

    def __init__(self, tree: Tree, schedule: Schedule, fault: str = "") -> None:
        """fault: why nothing can be drafted, though the schedule would."""
        self.tree, self.schedule, self.fault = tree, schedule, fault
        self.batches: list[Batch] = []
        self.in_flight: list[Node] = []  # what the draft decodes just now
        self.waited = 0.0  # seconds that the target waited for a draft since its last forward began
        self.verifying = False
        self.joined = False  # the draft has read what was said: the prompt, and what was committed during a pause

    def next_batch(self) -> list[Node]:
        """What the draft decodes next; empty: nothing is worth it."""
        self.in_flight = [] if self.fault else self.schedule.frontier(self.tree, self.verifying)
        self._claim(self.schedule.drafted(self.tree))
        return self.in_flight

    def grow(self, nodes: Sequence[Node], candidates: Iterable[Candidates], batch: Batch) -> int:
        """The draft has decoded a batch; returns with how many threads it should go on, 0 = as now."""
        for node, found in zip(nodes, candidates, strict=True):
            self.tree.grow(node, found)
        self.batches.append(batch)
        measured, self.joined = self.joined, True  # the first one reads what was said: no measure of a batch
        return self.schedule.costs.observe_batch(batch.size, batch.ended - batch.started) if measured else 0

    def patience(self, question: Question) -> float:
        """For how many seconds at most the target waits for a draft: for one that still reads not at all, or, where
        the schedule says so, until it has."""
        if self.fault or not (self.joined or self.schedule.waits_for_prompt or self.schedule.turns):
            return 0.0
        most = question(self.tree)
        return most if self.joined or not most else math.inf

    def choose(self) -> list[Node]:
        """What the target verifies now, parents first: no more than was measured."""
        self._claim(self.schedule.drafted(self.tree))
        self.schedule.failed = bool(self.fault)
        pending = self.schedule.choose(self.tree)[: self.schedule.costs.widest - 1]
        self._claim(pending)
        self.verifying = True
        return pending

    def commit(self, pending: Sequence[Node], answer: Answer, stop: Callable[..., int | None]) -> Outcome:
        """Walk down the tree with the target's own tokens and re-root it; stop: see `Tree.advance`."""
        self._claim(self.schedule.drafted(self.tree))
        outcome = self.tree.advance(pending, answer, stop)
        self.verifying = False
        return outcome

    def learn(self, told: Round) -> None:
        """Tree and schedule learn from a round; in a pause the draft falls behind."""
        self.tree.learn()
        self.schedule.observe(told)
        if self.schedule.reason:
            self.joined = False

    def _claim(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.tree.claim(node)

    def drop_useless(self, over: bool = False) -> bool:
        """Forget the running batch when nothing of it can be of use: the root moved away, or the request is over."""
        root = self.tree.root
        useless = over or not any(node.below(root) or root.below(node) for node in self.in_flight)
        dropped = bool(self.in_flight) and useless
        if dropped:
            self.in_flight = []
        return dropped

    def since(self, ignored: tuple[int, ...], finish: str | None) -> dict[str, Any]:
        """Fields of a record: what was drafted since the last round; at the end nothing stays without a fate."""
        batches, self.batches = tuple(self.batches), []
        ignored += self.tree.close() if finish else ()
        news = {"drafted": self.tree.take_drafted(), "batches": batches, "ignored": ignored, "finish": finish}
        return news | self._speculation()

    def _speculation(self) -> dict[str, str]:
        """Whether drafts are to be expected, and why not."""
        if self.fault or not self.schedule.drafts:
            return {"speculation": "off", "reason": self.fault}
        if self.schedule.reason:
            return {"speculation": "paused", "reason": self.schedule.reason}
        return {} if self.joined else {"speculation": "warming", "reason": "the draft reads what was said"}

    def record(self, pending: Sequence[Node], answer: Answer, outcome: Outcome, **rest: Any) -> Round:
        """The round that ended with this outcome; rest: its place, its times, and what `since` said."""
        drafts = self.schedule.drafts
        return Round(
            **rest | {"drafted": tuple(rest["drafted"])},
            tokens=outcome.tokens,
            last=outcome.last,
            pending=tuple(node.id for node in pending),
            accepted=outcome.accepted,
            rejected=outcome.rejected,
            token_probs=tuple(answer.probs[row] for row in outcome.rows),
            pending_probs=tuple(answer.node_probs),
            transfer=answer.transfer,
            budget=self.schedule.costs.budget if drafts else 0.0,
            plain=self.schedule.costs.plain if self.schedule.costs.known else 0.0,
            hit=outcome.hit if drafts else None,
        )


class DraftLane:
    """The CPU lane: asks what to draft next, decodes it in the drafter's thread, hangs the candidates into the tree."""

    def __init__(self, state: State, drafter: Drafter | None, sampling: Sampling) -> None:
        self.state, self.drafter, self.sampling = state, drafter, sampling
        self.began = perf_counter()
        self.changed = threading.Condition()  # its lock guards the state
        self.closed = False
        self.running: Future[None] | None = None

    def __enter__(self) -> DraftLane:
        if self.state.schedule.waits_for_prompt:
            self.start()
        return self

    def start(self) -> None:
        """Draft from now on. The target goes first: preparing a forward and a draft's prompt at once delays both."""
        if self.running is None and self.drafter and self.state.schedule.drafts:
            costs = self.state.schedule.costs
            self.drafter.set_threads(costs.hands.now, costs.reading)
            if not self.state.schedule.turns:
                self.running = self.drafter.thread.submit(self._run)

    def __exit__(self, *exc: object) -> None:
        with self.changed:
            self.closed = True
            self.cut_short()
            self.changed.notify_all()
        if self.running is not None:
            self.running.result()

    def clock(self) -> float:
        """Seconds since the request began."""
        return perf_counter() - self.began

    def cut_short(self) -> None:
        """Interrupt the running batch if it is of no use any more. Under the lock."""
        if self.state.drop_useless(self.closed):
            self.drafter.interrupt()

    def wait(self, question: Question, cancelled: Callable[[], bool]) -> None:
        """Sleep until the target need not wait any longer; asked again after each batch. Under the lock."""
        began, waited = self.clock(), 0.0
        while (left := self.state.patience(question) - waited) > 0:
            if cancelled():
                raise Cancelled
            if not self.state.schedule.turns:
                self.changed.wait(min(0.05, left))
            elif nodes := self.state.next_batch():
                self._attempt(nodes, cancelled)
            else:
                break
            waited = self.clock() - began
        self.state.waited += waited

    def _run(self) -> None:
        """The lane's life, as long as the request; under the lock, but for the decoding."""
        with self.changed:
            while nodes := self._next():
                self._attempt(nodes)

    def _next(self) -> list[Node]:
        """The next batch, as soon as there is one; empty: the request is over."""
        while not (self.closed or self.state.fault):
            if nodes := self.state.next_batch():
                return nodes
            self.changed.notify_all()  # the target may wait for this
            self.changed.wait()
        return []

    def _attempt(self, nodes: list[Node], cancelled: Callable[[], bool] = never) -> None:
        try:
            self._draft(nodes, cancelled)
        except Cancelled:
            return
        except Exception as fault:  # noqa: BLE001 - the chat goes on without drafts and says why
            self.state.fault = f"the draft failed: {fault or type(fault).__name__}"
        self.changed.notify_all()

    def _draft(self, nodes: list[Node], cancelled: Callable[[], bool]) -> None:
        started, context = self.clock(), self.state.tree.context
        dropped = lambda: nodes is not self.state.in_flight or cancelled()  # noqa: E731
        self.changed.release()
        try:
            candidates, choosing = self.drafter.expand(context, nodes, self.sampling, dropped)
            batch = Batch(started, self.clock(), len(nodes), choosing)
        finally:
            self.changed.acquire()
        if threads := self.state.grow(nodes, candidates, batch):
            self.drafter.set_threads(threads, self.state.schedule.costs.reading)
