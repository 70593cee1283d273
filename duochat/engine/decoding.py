"""The decoding loop, `decode`: two lanes, one draft tree, a stream of rounds.

The CPU lane (`drafting`) drafts without pause in the drafter's own thread; the loop verifies on the GPU lane and
re-roots the tree.
The decoders differ only in their schedule. Whatever is drafted, the tokens are the target's own: the same for every
decoder and seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from duochat import DuoChatError
from duochat.config import Settings
from duochat.engine.costs import Costs
from duochat.engine.drafting import DraftLane, State
from duochat.engine.lanes import Answer, Cancelled, Drafter, Edge, Target, never
from duochat.engine.rounds import Round
from duochat.engine.sampling import Sampling
from duochat.engine.schedules import DECODERS, Schedule
from duochat.engine.tree import Acceptance, Node, Tree


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of a decoder. `keep`, the stop rule, is given the tokens about to be emitted and answers how many
    of them to keep when the answer ends there, or None. draft_budget: γ, "auto" for the computed one."""

    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = Settings.max_tokens
    decoder: str = Settings.decoder
    draft_budget: int | str = Settings.draft_budget
    keep: Callable[[tuple[int, ...]], int | None] | None = None


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
    tree = Tree(context, acceptance, limit=len(context) + stop.left, vocabulary=target.vocabulary)
    schedule = schedules[request.decoder](costs, request.draft_budget)
    state = State(tree, schedule, "no usable draft model is loaded" if schedule.drafts and not drafter else "")
    with DraftLane(state, drafter, request.sampling.after(context)) as drafting:
        lane = TargetLane(target, drafting, stop, cancelled)
        try:
            while stop.finish is None:
                if lane.index == 1 or target.shares_cores:  # the first token at once; a CPU does no work meanwhile
                    yield from lane.tell()
                forward = lane.begin(progress)
                yield from lane.tell()  # while a device of its own is at work: a draft would wait for the interpreter
                lane.commit(forward)
        except Exception as fault:
            yield from lane.tell()
            if not isinstance(fault, Cancelled):
                raise
            yield lane.last_round()
        else:
            yield from lane.tell()
        finally:
            target.fill = 0  # whoever calls it next need not be a request


class StopRule:
    """Ends an answer at the first EOS, stop of the request, or limit; called once a round with the tokens to emit."""

    def __init__(self, request: Request, target: Target, position: int) -> None:
        self.eos, self.keep = target.eos, request.keep
        self.left = min(request.max_tokens, target.context_length - position)
        if self.left < 1:
            raise DuoChatError(
                f"The conversation has {position} tokens and the context holds {target.context_length}: "
                "shorten it or raise context_length."
            )
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


@dataclass(slots=True)
class Forward:
    """A forward of the target that has begun."""

    pending: list[Node]
    waited: float  # seconds
    began: float  # when `Target.begin` was called, and how long that took
    beginning: float
    answer: Callable[[], Answer]


class TargetLane:
    """The GPU lane as the loop drives it: choose and begin, commit, tell."""

    def __init__(self, target: Target, drafting: DraftLane, stop: StopRule, cancelled: Callable[[], bool]) -> None:
        self.target, self.drafting, self.state = target, drafting, drafting.state
        self.stop, self.cancelled = stop, cancelled
        self.index = 0  # of the round
        self.news: Callable[[], Round] | None = None  # the record of the last round, until it is told

    def begin(self, progress: Callable[[int, int], None] | None) -> Forward:
        """Wait for a draft if that is worth it, choose what to verify, and send it to the device."""
        drafting, state = self.drafting, self.state
        with drafting.changed:
            drafting.wait(state.schedule.patience, self.cancelled)
            waited, state.waited = state.waited, 0.0
            pending = state.choose()
            drafting.changed.notify_all()
        sharing = state.schedule.sharing
        if threads := sharing.crew.now:  # on a CPU
            self.target.set_threads(threads, state.schedule.whole.target_threads)
        self.target.fill = sharing.fill
        began = drafting.clock()
        answer = self.target.begin(state.tree.context, rows(pending), drafting.sampling, self.cancelled, progress)
        forward = Forward(pending, waited, began, drafting.clock() - began, answer)
        drafting.start()
        state.schedule.read(state.tree)
        return forward

    def commit(self, forward: Forward) -> None:
        """Take the answer, re-root the tree at the outcome; what happened becomes the news."""
        if self.cancelled():
            raise Cancelled
        asked = self.drafting.clock()
        answer = forward.answer()
        when = self._times(forward, asked)
        state, pending = self.state, forward.pending
        with self.drafting.changed:
            self.drafting.wait(state.schedule.settling, self.cancelled)
            when["position"] = len(state.tree.context)
            outcome = state.commit(pending, answer, self.stop)
            self.drafting.cut_short()
            if self.stop.finish is None:
                state.schedule.graft(state.tree)
            self.drafting.changed.notify_all()
            when |= state.since(outcome.ignored, self.stop.finish)
        self.index += 1
        self.news = partial(state.record, pending, answer, outcome, **when)

    def _times(self, forward: Forward, asked: float) -> dict[str, Any]:
        """The fields of the record that tell its place and times.

        asked: when the answer was asked for. A target on the CPU computes in its two calls only; one with a device of
        its own computes in between too, while a round is told, and whoever listens may take longer than it.
        """
        alone = self.target.shares_cores
        started = asked - forward.beginning if alone else forward.began
        held = 0.0 if alone else asked - forward.began - forward.beginning
        phase = "decode" if self.index else "prefill"
        times = {"started": started, "ended": self.drafting.clock(), "waited": forward.waited, "held": held}
        return {"index": self.index, "phase": phase} | times

    def tell(self) -> Iterator[Round]:
        """The news, if there are any. The schedule learns from them, which may give a resting draft lane work."""
        if self.news is None:
            return
        told, self.news = self.news(), None
        with self.drafting.changed:
            self.state.learn(told)
            self.drafting.changed.notify_all()
        yield told

    def last_round(self) -> Round:
        """The empty round that ends a cancelled request."""
        with self.drafting.changed:
            now, news = self.drafting.clock(), self.state.since((), "cancelled")
            place = (self.index, len(self.state.tree.context), now, now)
            return Round(*place, (), "plain", **news | {"drafted": tuple(news["drafted"])})


def rows(pending: Sequence[Node]) -> list[Edge]:
    """The subtree as the target takes it: (token, index of the parent or -1) for each node, parents first."""
    place = {id(node): i for i, node in enumerate(pending)}
    return [(node.token, place.get(id(node.parent), -1)) for node in pending]
