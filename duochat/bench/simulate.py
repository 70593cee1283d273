"""The schedules on a virtual clock: what each decoder would give on hardware of which only the costs are known.

The real Tree and the real Schedules run in a discrete-event model of both lanes (`engine/decoding.py` with time in
place of threads). What is drafted on the way of a recorded answer is what the draft really proposed there; beside
that way nothing can be accepted, so proposals are drawn from the recorded ones and given tokens that do not exist.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from duochat.bench.contestants import Decoder
from duochat.bench.metrics import REFERENCE
from duochat.engine.calibration import beside
from duochat.engine.costs import Costs
from duochat.engine.decoding import DECODERS, Request, StopRule
from duochat.engine.drafting import Question, State
from duochat.engine.lanes import Answer, Candidates, Drafter, never
from duochat.engine.rounds import Batch, Round
from duochat.engine.sampling import Sampling
from duochat.engine.schedules import Schedule
from duochat.engine.tree import Acceptance, Node, Tree

NOWHERE = -1  # the target's token beside the recorded way: no draft has it
CHUNK = 16  # tokens of an answer that the draft is shown at a time


@dataclass(frozen=True, slots=True)
class Recording:
    """A prompt, the target's answer, and what the draft proposes for each of the answer's tokens."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    candidates: tuple[Candidates, ...]
    target_prefill: float  # seconds until the target has read the prompt and given the first token
    draft_prefill: float  # seconds until the draft has read the prompt
    max_tokens: int = 128
    forward: float = 0.0  # seconds of a plain forward at this length of context; 0: as the curve says

    def proposal(self, index: int) -> Candidates | None:
        """What the draft proposes for the answer's token number `index`, when that is known."""
        return self.candidates[index] if index < len(self.candidates) else None


@dataclass(frozen=True, slots=True)
class Friction:
    """What the cost curves, each measured with the other lane at rest, do not tell."""

    target: float = 1.0  # how much slower a forward is beside a working draft
    draft: float = 1.0  # and a draft batch beside a working target
    between_forwards: float = 2e-4  # host seconds
    between_batches: float = 1e-4


def record(
    drafter: Drafter,
    prompt: Sequence[int],
    answer: Sequence[int],
    target_prefill: float,
    sampling: Sampling | None = None,
    **others: Any,
) -> Recording:
    """Ask the draft, whose cache should not hold the prompt, what it proposes all along an answer.

    others: `max_tokens` and `forward` of the Recording.
    """
    asked = drafter.thread.submit(proposals, drafter, prompt, answer, sampling or Sampling())
    found, seconds = asked.result()
    return Recording(tuple(prompt), tuple(answer), tuple(found), target_prefill, seconds, **others)


def proposals(
    drafter: Drafter, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling
) -> tuple[list[Candidates], float]:
    """For each token of the answer what the draft proposes in its place, and the seconds until the first of these.

    Called in the drafter's thread.
    """
    way = [Node(prompt[-1], None, len(prompt) - 1)]
    for token in answer[:-1]:
        way.append(Node(token, way[-1], way[-1].position + 1))
    began = perf_counter()
    found, _ = drafter.expand(prompt, way[:1], sampling, never)
    seconds = perf_counter() - began
    for start in range(1, len(way), CHUNK):
        found = [*found, *drafter.expand(prompt, way[start : start + CHUNK], sampling, never)[0]]
    return found, seconds


def predict(
    costs: Costs,
    recordings: Sequence[Recording],
    decoders: Iterable[str] = tuple(DECODERS),
    friction: Friction | None = None,
) -> dict[str, float]:
    """Tokens per second of each decoder: all tokens of the recordings over all seconds, prompts included."""
    speeds = {}
    for decoder in decoders:
        seconds = sum(rounds[-1].ended for rounds in replay(decoder, costs, recordings, friction))
        speeds[decoder] = sum(len(recording.answer) for recording in recordings) / seconds
    return speeds


def replay(
    decoder: str, costs: Costs, recordings: Sequence[Recording], friction: Friction | None = None
) -> list[list[Round]]:
    """The rounds of each recording, one after the other; what is learned of costs and acceptance stays."""
    costs, acceptance = deepcopy(costs), Acceptance()
    device = deepcopy(costs)  # the schedule's own copy follows what it observes
    found = []
    for recording in recordings:
        schedule = DECODERS[decoder](costs, None)
        meant = device if schedule.costs is costs else device.at_once
        found.append(Simulation(recording, schedule, meant, acceptance, friction or Friction()).run())
    return found


class Simulation:
    """One request on the virtual clock: `decoding.decode`, with time in place of threads."""

    shares_cores, eos = False, frozenset()  # what `StopRule` asks of a target

    def __init__(
        self, recording: Recording, schedule: Schedule, costs: Costs, acceptance: Acceptance, friction: Friction
    ) -> None:
        self.recording, self.schedule, self.costs, self.friction = recording, schedule, costs, friction
        limit = len(recording.prompt) + recording.max_tokens
        self.tree = Tree(recording.prompt, acceptance, limit)
        self.state = State(self.tree, schedule)
        self.context_length = limit
        self.random = random.Random(len(recording.prompt))
        self.now = 0.0
        self.work = {"target": 0.0, "draft": 0.0}  # seconds that the running call still takes when alone
        self.held: set[Node] = set()  # nodes that are in the draft's cache ...
        self.fresh: set[Node] = set()  # ... and those that the running batch adds
        self.batch_began = 0.0
        self.unknown = NOWHERE

    def run(self) -> list[Round]:
        """All rounds until the recorded answer is given."""
        rounds: list[Round] = []
        stop = StopRule(Request(max_tokens=len(self.recording.answer)), self, len(self.recording.prompt))
        while stop.finish is None:
            waited = self._wait_while(self.schedule.patient)
            pending, started = self.state.choose(), self.now
            self.work["target"] = self._forward_seconds(len(rounds), len(pending))
            self._pass(lambda: self.work["target"] <= 0)
            when = {"index": len(rounds), "phase": "decode" if rounds else "prefill", "started": started}
            when["ended"] = self.now
            when["waited"] = waited + self._wait_while(self.schedule.settling)
            rounds.append(self._commit(pending, stop, when))
            self.state.learn(rounds[-1])
            self._pass_seconds(self.friction.between_forwards)
        return rounds

    def _commit(self, pending: list[Node], stop: StopRule, when: dict[str, Any]) -> Round:
        when["position"] = len(self.tree.context)
        answer = self._answer(pending)
        outcome = self.state.commit(pending, answer, stop)
        if self.state.drop_useless():
            self.work["draft"] = 0.0
        if stop.finish is None:
            self.schedule.graft(self.tree)
        return self.state.record(pending, answer, outcome, **when, **self.state.since(outcome.ignored, stop.finish))

    def _forward_seconds(self, index: int, nodes: int) -> float:
        curve, plain = self.costs.target.measured, self.recording.forward
        if index == 0:
            return self.recording.target_prefill + curve(nodes + 1) - curve(1)
        return curve(nodes + 1) * (plain / curve(1) if plain else 1.0)

    def _wait_while(self, question: Question) -> float:
        """Let the draft work while the schedule says so; returns the seconds that took."""
        began, token = self.now, self.costs.draft.measured(1)
        waits = lambda: self.state.waits(question, self.now - began)  # noqa: E731
        while waits():
            self._start_batch()
            if not self.state.in_flight:
                break  # both lanes rest: nothing will change
            again = self.now + token
            self._pass(lambda again=again: self.now >= again - 1e-12 or not waits(), again)
        return self.now - began

    # time --------------------------------------------------------------------------------------------------------

    def _pass_seconds(self, seconds: float) -> None:
        end = self.now + seconds
        self._pass(lambda: self.now >= end - 1e-12, end)

    def _pass(self, over: Callable[[], bool], end: float = float("inf")) -> None:
        """Let time go by until `over`, from one end of a call to the next."""
        while not over():
            self._start_batch()
            rates = self._rates()
            steps = [self.work[lane] / rate for lane, rate in rates.items()]
            if not steps and end == float("inf"):
                return  # both lanes rest: nothing will change
            step = min([*steps, end - self.now])
            self.now += step
            for lane, rate in rates.items():
                self.work[lane] = max(0.0, self.work[lane] - step * rate)
            if self.state.in_flight and self.work["draft"] <= 1e-12:
                self._end_batch()
            if self.work["target"] <= 1e-12:
                self.work["target"] = 0.0

    def _rates(self) -> dict[str, float]:
        """The lanes that work, and how fast: beside the other one they are slower."""
        busy = {"target": self.work["target"] > 0, "draft": bool(self.state.in_flight)}
        both = all(busy.values())
        slow = {"target": self.friction.target, "draft": self.friction.draft}
        return {lane: 1 / slow[lane] if both else 1.0 for lane, working in busy.items() if working}

    # the draft ---------------------------------------------------------------------------------------------------

    def _start_batch(self) -> None:
        if not self.state.in_flight and (nodes := self.state.next_batch()):
            self.fresh = {missing for node in nodes for missing in self._missing(node)}
            self.batch_began = self.now
            joined, prefill = self.state.joined, self.recording.draft_prefill
            seconds = self.costs.draft.measured(len(self.fresh)) if joined else prefill
            self.work["draft"] = seconds + self.friction.between_batches

    def _missing(self, node: Node) -> list[Node]:
        """The nodes down to this one that the draft has not decoded; the prompt is not among them."""
        found, start = [], len(self.recording.prompt) - 1
        while node.position > start and node not in self.held:
            found.append(node)
            node = node.parent
        return found

    def _end_batch(self) -> None:
        nodes, self.state.in_flight = self.state.in_flight, []
        self.held |= self.fresh
        self.state.grow(nodes, map(self._proposal, nodes), Batch(self.batch_began, self.now, len(nodes)))

    def _proposal(self, node: Node) -> Candidates:
        index = node.position + 1 - len(self.recording.prompt)
        known = self.recording.proposal(index) if self._on_the_way(node) else None
        if known is not None:
            return known
        like = self.random.choice(self.recording.candidates)
        self.unknown -= len(like.tokens)
        return Candidates(tuple(range(self.unknown, self.unknown + len(like.tokens))), like.probs)

    def _on_the_way(self, node: Node) -> bool:
        """Whether prompt and answer lead to this node: all that is committed does."""
        answer, start = self.recording.answer, len(self.recording.prompt)
        while node.position >= len(self.tree.context):
            index = node.position - start
            if index >= len(answer) or node.token != answer[index]:
                return False
            node = node.parent
        return node.position < start or node.token == answer[node.position - start]

    # the target --------------------------------------------------------------------------------------------------

    def _answer(self, pending: Sequence[Node]) -> Answer:
        """The recorded tokens along the way, NOWHERE beside it."""
        tokens = [self._next_token(self.tree.root), *(self._next_token(node) for node in pending)]
        return Answer(tokens, [1.0] * len(tokens), [1.0] * len(pending))

    def _next_token(self, node: Node) -> int:
        index = node.position + 1 - len(self.recording.prompt)
        known = index < len(self.recording.answer) and self._on_the_way(node)
        return self.recording.answer[index] if known else NOWHERE


# ---------------------------------------------------------------- measuring what a prediction needs


def friction(target: Any, drafter: Any, costs: Costs, between_forwards: float = 2e-4) -> Friction:
    """How much each lane slows the other down: the target as calibrated, the draft measured beside it now."""
    with beside(lambda: target.measure((1,), 256)):
        busy = drafter.measure((1,), costs.threads)[1]
    return Friction(1 / (1 - costs.contention), max(1.0, busy / costs.draft.measured(1)), between_forwards)


def rehearse(engine: Any, context: Sequence[int], max_tokens: int) -> Recording:
    """A recording of plain decoding's greedy answer, made now."""
    timed = Decoder(REFERENCE, engine).answer(context, Sampling(), max_tokens, never)
    tokens = timed.figures["tokens"]
    forward = (timed.total_s - timed.first_s) / (len(tokens) - 1) if len(tokens) > 1 else 0.0
    return record(engine.drafter, context, tokens, timed.first_s, max_tokens=max_tokens, forward=forward)


def forecast(
    engine: Any,
    contexts: Sequence[Sequence[int]],
    max_tokens: int = 96,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """Tokens per second to expect of each decoder here, from the engine's costs and a rehearsal of some prompts."""
    recordings = []
    for context in contexts:
        recordings.append(rehearse(engine, context, max_tokens))
        progress(len(recordings), len(contexts))
    return predict(engine.costs, recordings, friction=friction(engine.target, engine.drafter, engine.costs))
