"""Nothing that is given up under a disturbance stays given up: threads, pauses, scales. On a virtual clock."""

import random
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest

from duochat.bench.simulate import Friction, Recording, Simulation
from duochat.engine.costs import Costs
from duochat.engine.decoding import DECODERS
from duochat.engine.lanes import Candidates
from duochat.engine.threads import Threads
from duochat.engine.tree import Acceptance

TOKENS = 4000
CORES = {
    "gpu": Costs.of({1: 20e-3, 16: 21e-3, 64: 24e-3}, {1: 3e-3, 2: 4e-3, 4: 6e-3, 8: 10e-3}),
    "cpu": replace(
        Costs.of({1: 0.07, 2: 0.075, 4: 0.085, 8: 0.11, 16: 0.18}, {1: 5e-3, 2: 7e-3, 4: 11e-3, 8: 19e-3}),
        shared=True,
        contention=0.15,
    ),
}


def a_recording(agreement=0.7, tokens=TOKENS):
    """Texts whose tokens are new each time, so that only the draft model can propose them."""
    rng, answer, proposals = random.Random(1), tuple(range(100, 100 + tokens)), []
    for token in answer:
        wrong = [10**6 + rng.randrange(10**6) for _ in range(8)]
        right = rng.random() < agreement
        proposals.append(Candidates((token, *wrong[1:]) if right else tuple(wrong), (0.7, *[0.03] * 7)))
    return Recording((1, 2, 3), answer, tuple(proposals), 0.1, 0.05, tokens)


class Disturbed(Simulation):
    """Between two points of time each lane takes so many times as long."""

    begins = ends = 0.0
    target_slower = draft_slower = 1.0

    def _rates(self):
        busy = self.begins <= self.now < self.ends
        slower = {"target": self.target_slower, "draft": self.draft_slower}
        return {lane: rate / slower[lane] if busy else rate for lane, rate in super()._rates().items()}


def play(decoder, costs, **disturbance):
    schedule = DECODERS[decoder](deepcopy(costs))
    one = Disturbed(a_recording(), schedule, deepcopy(costs), Acceptance(), Friction())
    for name, value in disturbance.items():
        setattr(one, name, value)
    return one.run()


def speed(rounds):
    return sum(len(r.tokens) for r in rounds) / (rounds[-1].ended - rounds[0].started)


@pytest.mark.parametrize("lane", CORES)
@pytest.mark.parametrize("decoder", ["speculative", "duodecoding", "duotree"])
@pytest.mark.parametrize(
    "slower", [(3.0, 3.0), (1.0, 8.0), (1.5, 20.0)], ids=["both lanes", "the draft", "the draft most"]
)
def test_ten_busy_seconds_leave_no_trace(decoder, lane, slower):
    costs = CORES[lane]
    quiet = play(decoder, costs)
    begins = quiet[len(quiet) // 4].started
    busy = {"begins": begins, "ends": begins + 10, "target_slower": slower[0], "draft_slower": slower[1]}
    rounds, plain = play(decoder, costs, **busy), play("autoregressive", costs, **busy)
    after = [r for r in rounds if r.started >= begins + 10][200:]
    assert len(after) > 100
    assert speed(after) >= 0.97 * speed(quiet[50:])
    if decoder == "duotree":  # the others follow their papers and never pause
        during = lambda told: [r for r in told if begins + 0.5 <= r.started < begins + 9.5]  # noqa: E731
        assert speed(during(rounds)) >= 0.95 * speed(during(plain))


def stalls(threads, batches, seconds):
    """The threads in use after each batch; seconds(batch, threads): its ratio to the calibrated time."""
    used = []
    for batch in range(batches):
        threads.observe(seconds(batch, threads.now))
        used.append(threads.now)
    return used


def test_threads_that_stall_are_given_up_and_come_back():
    used = stalls(Threads(8, {}), 1500, lambda batch, n: 5.0 if n > 4 and batch < 150 else 1.0)
    assert min(used) == 4
    assert used[-1] == 8
    assert used.index(4) < 10
    assert used[1250:] == [8] * 250


@pytest.mark.parametrize(("slower", "soon"), [(1.2, 80), (5.0, 1100), (40.0, 10500)])
def test_threads_that_stall_for_good_are_tried_as_often_as_that_costs_little(slower, soon):
    """What is little slower is soon tried again: it may be well by then."""
    seconds = lambda batch, n: 3.0 * slower if n > 4 else 3.0  # noqa: E731
    used = stalls(Threads(8, {1: 4.0, 2: 3.0, 4: 2.0, 8: 1.0}), 30_000, seconds)
    trials = [i for i in range(1, len(used)) if used[i] == 8 and used[i - 1] != 8]
    assert all(b - a < soon for a, b in pairwise(trials[1:]))
    assert len(trials) > 2
    assert sum(seconds(0, n) for n in used) < 1.05 * 3.0 * len(used)


def test_fewer_threads_that_are_no_faster_are_taken_back():
    """A long context, say: all batches are slow, and slower with less to compute them."""
    used = stalls(Threads(2, {}), 5000, lambda batch, n: 4.0 if n == 2 else 6.0)
    assert used.count(1) < 0.07 * len(used)  # and loses half of that
    assert used[-1] == 2


def test_one_slow_batch_gives_nothing_up():
    assert stalls(Threads(8, {}), 100, lambda batch, n: 40.0 if batch % 10 == 0 else 1.0) == [8] * 100


def test_few_threads_are_slow_without_stalling():
    """One of eight takes six times as long: that alone is no reason to try fewer, nor to stay."""
    sweep = {1: 6e-3, 2: 3e-3, 4: 1.7e-3, 8: 1e-3}
    used = stalls(Threads(8, sweep), 300, lambda batch, n: 9.0 if n == 8 and batch < 60 else sweep[n] / 1e-3)
    assert min(used) == 4
    assert used[-1] == 8
