"""The schedules on a virtual clock: what each decoder would give on hardware of which only the costs are known.

The real tree, the real schedules and the real target lane run in a discrete-event model of both devices, with time in
place of threads. What is drafted on the way of a recorded answer is what the draft really proposed there; beside
that way nothing can be accepted, so proposals are drawn from the recorded ones and given tokens that do not exist.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import median
from threading import Condition
from time import perf_counter
from typing import Any

from duochat.bench.contest import Decoder
from duochat.bench.metrics import REFERENCE, Run
from duochat.engine.calibration import beside
from duochat.engine.costs import Costs
from duochat.engine.decoding import DECODERS, Request, StopRule, TargetLane
from duochat.engine.drafting import Question, State
from duochat.engine.lanes import Answer, Candidates, Drafter, Edge, Target, never
from duochat.engine.rounds import Batch, Round
from duochat.engine.sampling import Sampling
from duochat.engine.schedules import Schedule
from duochat.engine.tree import Acceptance, Node, Tree

NOWHERE = -1  # the target's token beside the recorded way: no draft has it
NOTHING = 1e-12  # seconds: what is left of a call by rounding
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


@dataclass(frozen=True, slots=True)
class Friction:
    """What the cost curves, each measured with the other lane at rest, do not tell."""

    target: float = 1.0  # how much slower a forward is beside a working draft
    draft: float = 1.0  # and a draft batch beside a working target
    between_forwards: float = 2e-4  # host seconds
    between_batches: float = 1e-4


def record(
    drafter: Drafter, prompt: Sequence[int], run: Run, sampling: Sampling | None = None, max_tokens: int = 128
) -> Recording:
    """Ask the draft, whose cache should not hold the prompt, what it proposes all along plain decoding's answer."""
    asked = drafter.thread.submit(proposals, drafter, prompt, run.tokens, sampling or Sampling())
    found, seconds = asked.result()
    times = (run.first_s, seconds, max_tokens, run.tpot_s)
    return Recording(tuple(prompt), tuple(run.tokens), tuple(found), *times)


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
    costs, acceptance = costs.untaught(), Acceptance()
    device = deepcopy(costs)  # the schedule's own copy follows what it observes
    found = []
    for recording in recordings:
        schedule = DECODERS[decoder](costs, None)
        meant = device if schedule.costs is costs else device.at_once
        found.append(Simulation(recording, schedule, meant, acceptance, friction or Friction()).run())
    return found


class Simulation(Target):
    """One request on the virtual clock: what `decoding.TargetLane` drives as its draft lane and as its target."""

    shares_cores, eos = False, frozenset()  # as the target

    def __init__(
        self, recording: Recording, schedule: Schedule, costs: Costs, acceptance: Acceptance, friction: Friction
    ) -> None:
        self.recording, self.costs, self.friction = recording, costs, friction
        self.context_length = len(recording.prompt) + recording.max_tokens
        self.state = State(Tree(recording.prompt, acceptance, self.context_length), schedule)
        self.sampling, self.changed = Sampling(), Condition()
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
        lane = TargetLane(self, self, stop, never)
        while stop.finish is None:
            forward = lane.begin(None)
            rounds += lane.tell()
            lane.commit(forward)
            end = self.now + self.friction.between_forwards
            while self.now < end - NOTHING:
                self._pass(end - self.now)
        return [*rounds, *lane.tell()]

    # time --------------------------------------------------------------------------------------------------------

    def clock(self) -> float:
        return self.now

    def _pass(self, most: float = math.inf) -> None:
        """Let time go by to the end of a call, but `most` seconds at most."""
        self._start_batch()
        rates = self._rates()
        step = min([most, *(self.work[lane] / rate for lane, rate in rates.items())])
        self.now += step
        for lane, rate in rates.items():
            left = self.work[lane] - step * rate
            self.work[lane] = left if left > NOTHING else 0.0
        if self.state.in_flight and not self.work["draft"]:
            self._end_batch()

    def _rates(self) -> dict[str, float]:
        """The lanes that work, and how fast: beside the other one they are slower."""
        busy = {"target": self.work["target"] > 0, "draft": bool(self.state.in_flight)}
        both = all(busy.values())
        slow = {"target": self.friction.target, "draft": self.friction.draft}
        return {lane: 1 / slow[lane] if both else 1.0 for lane, working in busy.items() if working}

    # the draft lane ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """It always runs."""

    def wait(self, question: Question, cancelled: Callable[[], bool]) -> None:
        """Let the draft work while the schedule says so; asked again at the end of each batch."""
        began = self.now
        while (left := self.state.patience(question) - (self.now - began)) > NOTHING:
            self._start_batch()
            if not self._rates():
                break  # both lanes rest: nothing will change
            self._pass(left)
        self.state.waited += self.now - began

    def cut_short(self) -> None:
        if self.state.drop_useless():
            self.work["draft"] = 0.0

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
        index, recorded = self._index(node) + 1, self.recording.candidates
        if index < len(recorded) and self._on_the_way(node):
            return recorded[index]
        like = self.random.choice(recorded)
        self.unknown -= len(like.tokens)
        return Candidates(tuple(range(self.unknown, self.unknown + len(like.tokens))), like.probs)

    def _index(self, node: Node) -> int:
        """In the answer; below 0: in the prompt."""
        return node.position - len(self.recording.prompt)

    def _on_the_way(self, node: Node) -> bool:
        """Whether prompt and answer lead to this node: all that is committed does."""
        if (index := self._index(node)) < 0:
            return True
        committed = node.position < len(self.state.tree.context)
        return self._token(index) == node.token and (committed or self._on_the_way(node.parent))

    # the target --------------------------------------------------------------------------------------------------

    def begin(self, context: Sequence[int], tree: Sequence[Edge], *_: Any) -> Callable[[], Answer]:
        """See `lanes.Target`: the recorded tokens along the way, NOWHERE beside it."""
        self.costs.see(len(context))
        ways = [len(context) - len(self.recording.prompt)]  # by rows: how many of the answer's tokens lead there
        self.work["target"] = self._forward_seconds(ways[0], len(tree) + 1)
        for token, parent in tree:
            ways.append(ways[parent + 1] + 1 if token == self._token(ways[parent + 1]) else len(self.recording.answer))

        def answer() -> Answer:
            while self.work["target"]:
                self._pass()
            return Answer([self._token(way) for way in ways], [1.0] * len(ways), [1.0] * len(tree))

        return answer

    def _token(self, index: int) -> int:
        return self.recording.answer[index] if index < len(self.recording.answer) else NOWHERE

    def _forward_seconds(self, answered: int, rows: int) -> float:
        curve, plain = self.costs.target.measured, self.recording.forward
        if not answered:
            return self.recording.target_prefill + curve(rows) - curve(1)
        return curve(rows) * (plain / self.costs.calibrated if plain else 1.0)


# ---------------------------------------------------------------- measuring what a prediction needs


def friction(target: Any, drafter: Any, costs: Costs, between_forwards: float) -> Friction:
    """How much each lane slows the other down: the target as calibrated, the draft measured beside it now."""
    with beside(lambda: target.measure((1,), 256)):
        busy = drafter.measure((1,), costs.threads)[1]
    return Friction(
        1 / (1 - (costs.at_once or costs).contention), max(1.0, busy / costs.draft.measured(1)), between_forwards
    )


def forecast(
    engine: Any,
    contexts: Sequence[Sequence[int]],
    sampling: Sampling | None = None,
    max_tokens: int = 96,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """Tokens per second to expect of each decoder here, from the engine's costs and plain decoding's answers to some
    prompts, given now."""
    plain, runs, recordings = Decoder(REFERENCE, engine), [], []
    for context in contexts:
        runs.append(plain.answer(context, sampling or Sampling(), max_tokens, never))
        recordings.append(record(engine.drafter, context, runs[-1], sampling, max_tokens))
        progress(len(runs), len(contexts))
    slowed = friction(engine.target, engine.drafter, engine.costs, median(run.gap_s for run in runs))
    return predict(engine.costs, recordings, friction=slowed)
