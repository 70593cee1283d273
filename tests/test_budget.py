"""The measured costs: curves, the sweep of threads, and the target at work beside the draft."""

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duochat.engine.calibration import beside, fewest, in_turns, measure, thread_counts
from duochat.engine.costs import Costs, Curve
from duochat.engine.decoding import DECODERS
from duochat.engine.lanes import Candidates
from duochat.engine.rounds import Batch, Round
from duochat.engine.schedules import Best, Schedule
from duochat.engine.tree import Acceptance, Tree
from duochat.engine.watch import Watch


class Target:
    threads, shares_cores, context_length, fills = 0, False, 4096, ()

    def __init__(self) -> None:
        self.calls = 0

    def measure(self, widths, context, repeats=5):
        self.calls += 1
        return dict.fromkeys(widths, 0.005)


class OnCpu(Target):
    """As quick as its threads."""

    shares_cores, now = True, 0

    def describe(self):
        return {"target_weight_bytes": 8000}

    def set_threads(self, threads, reading=0):
        self.now = threads

    def measure(self, widths, context, repeats=5):
        return {width: seconds / self.now for width, seconds in super().measure(widths, context).items()}


class Disturbed(OnCpu):
    """Half as quick at first: more work than ours on the machine."""

    def measure(self, widths, context, repeats=5):
        found = super().measure(widths, context)
        return {width: seconds * (2 if self.calls < 5 else 1) for width, seconds in found.items()}


class Draft:
    """As quick as its threads, up to six of them; notes whether the target was at work."""

    def __init__(self, target: Target) -> None:
        self.target, self.threads, self.alone = target, 0, 0

    def measure(self, sizes, threads, before=lambda: None):
        calls, until = self.target.calls, time.monotonic() + 0.2
        while self.target.calls == calls and time.monotonic() < until:
            time.sleep(0.001)
        self.alone += self.target.calls == calls
        self.read = before()
        return {size: size * 0.006 / min(threads, 6) for size in sizes}

    def measure_reading(self, threads):
        return {n: 0.1 / min(n, 12) for n in threads}

    def set_threads(self, threads, reading=0):
        self.threads, self.reading = threads, reading


def test_a_curve_is_linear_between_sizes_and_follows_live_timings():
    curve = Curve({1: 1.0, 4: 2.5})
    assert curve(2) == pytest.approx(1.5)
    assert curve(6) == pytest.approx(3.5)
    for _ in range(200):
        curve.observe(4, 5.0)
    assert curve(1) == pytest.approx(2.0, rel=0.01)


def test_the_draft_is_measured_beside_a_target_at_work():
    target = Target()
    draft = Draft(target)
    costs = measure(target, draft, cores=17)
    assert draft.alone == 0
    assert costs.threads == draft.threads == 6
    assert costs.reading == draft.reading == 8
    assert costs.draft(8) == pytest.approx(0.008)


class Quickening(Draft):
    """Its first four calls fall into a quick minute, as do those after the seventh."""

    calls = 0

    def measure(self, sizes, threads, before=lambda: None):
        self.calls += 1
        quick = 0.5 if self.calls <= 4 or self.calls > 7 else 1.0
        return {size: quick * seconds for size, seconds in super().measure(sizes, threads, before).items()}


def test_a_quick_minute_does_not_choose_the_drafts_threads():
    target = Target()
    assert measure(target, Quickening(target), cores=17).threads == 6


class Steady(Target):
    """Quicker when all forwards have sixteen rows."""

    fills, fill = (16,), 0

    def measure(self, widths, context, repeats=5):
        natural = {width: 0.005 if width == 1 else 0.009 for width in super().measure(widths, context)}
        return dict.fromkeys(natural, 0.006) if self.fill else natural


def test_forwards_that_are_filled_up_have_costs_of_their_own():
    target = Steady()
    costs = measure(target, Draft(target), cores=17)
    both = costs.at_once
    assert (costs.fill, both.fill, target.fill) == (0, 16, 0)
    assert (costs.target(1), both.target(1), both.widest) == (0.005, 0.006, 16)
    assert both.plain == costs.plain == 0.005
    assert costs.drafting is both
    again = Costs.from_dict(costs.to_dict())
    assert again == costs
    assert again.at_once.plain == costs.plain


def test_on_a_cpu_both_ways_to_share_the_cores_are_measured():
    """In turns each lane has all of them; at once they are divided, and plain decoding has all of them still."""
    target = OnCpu()
    draft = Draft(target)
    costs = measure(target, draft, cores=4)
    assert draft.alone > 0
    assert draft.read == 1000, "as much as a forward reads, which displaces the draft's weights"
    assert (costs.threads, costs.target_threads, costs.target(1)) == (4, 4, 0.005 / 4)
    both = costs.at_once
    assert (both.threads, both.target_threads, both.target(1)) == (2, 2, 0.005 / 2)
    assert both.plain == costs.plain == 0.005 / 4
    assert costs.draft(1) < both.draft(1)
    again = Costs.from_dict(costs.to_dict())
    assert again == costs
    assert again.at_once.plain == costs.plain
    target.threads = 1  # as the settings say
    costs = measure(target, draft, cores=4)
    assert (costs.target_threads, costs.at_once.target_threads) == (1, 1)


def test_a_disturbance_does_not_decide_between_numbers_of_threads():
    target = Disturbed()
    costs = measure(target, Draft(target), cores=4)
    assert target.calls > 5
    assert (costs.target(1), costs.at_once.target(1)) == (0.005 / 4, 0.005 / 2)


def test_lanes_take_turns_where_that_gives_more():
    """Two cores: a forward of one is slower by more than drafting beside it brings. Many: one core less is nothing."""

    def made(alone, divided):
        return replace(
            Costs.of({1: alone, 8: 2 * alone}, {1: 1e-3}), at_once=Costs.of({1: divided, 8: 2 * divided}, {1: 1e-3})
        )

    assert in_turns(made(10e-3, 18e-3))
    assert in_turns(made(10e-3, 11.5e-3)), "half of the outcomes are not foreseen"
    assert not in_turns(made(10e-3, 10e-3))


def test_a_thread_that_brings_a_tenth_is_left_to_others():
    assert fewest({1: 3.0, 2: 1.6, 4: 1.09, 8: 1.0}) == 4


@pytest.mark.parametrize(("cores", "most"), [(1, 1), (2, 1), (3, 2), (4, 3), (8, 4), (16, 8), (128, 32)])
def test_half_of_many_cores_are_not_drafted_with(cores, most):
    assert max(thread_counts(cores)) == most


def a_round(ended, pending=(), batches=(), **more):
    started = ended - 0.01
    return Round(1, 5, started, ended, (1,), "plain", pending=pending, batches=batches, **more)


def test_the_baseline_is_of_about_now():
    """Plain decoding's speed follows the forwards of any width, what drafting beside them cost apart."""
    costs = replace(Costs.of({1: 5e-3, 5: 1e-2}, {1: 1e-3}), contention=0.5)
    assert not costs.known
    for i in range(60):
        drafted = Batch(i, i + 0.01, 1)
        costs.observe(replace(a_round(i + 0.01, (1, 2, 3, 4), (drafted,)), ended=i + 0.025))
    assert costs.known
    assert costs.plain == pytest.approx(0.02 * 5e-3 / 1e-2, rel=0.05)  # 25 ms, 5 of them lost to drafting; twice slower


def test_drafting_forwards_that_are_slower_do_not_raise_the_baseline():
    """Caches that the draft has filled are no fault of plain decoding; a machine that becomes slower is."""
    costs = Costs.of({1: 5e-3}, {1: 1e-3})

    def told(seconds, rounds, drafted=(), **more):
        for i in range(rounds):
            costs.observe(replace(a_round(i, batches=drafted, **more), ended=i - 0.01 + seconds))
        return costs.plain

    assert told(6e-3, 20) == pytest.approx(6e-3)
    beside = (Batch(-9.0, -8.999, 1),)
    assert told(9e-3, 20, beside) == pytest.approx(6e-3)
    assert told(18e-3, 20, beside) == pytest.approx(12e-3)
    assert told(7e-3, 20) == pytest.approx(7e-3)
    assert told(7e-3, 16, beside, speculation="paused") == pytest.approx(7e-3), "looked at beside plain forwards"
    assert told(9e-3, 20, beside) == pytest.approx(7e-3)


def test_the_baseline_of_another_answer_is_none():
    costs = Costs.of({1: 5e-3}, {1: 1e-3})
    for i in range(20):
        costs.observe(a_round(i))
    assert costs.known
    costs.observe(a_round(30, phase="prefill"))
    assert not costs.known


def test_a_round_whose_reader_was_slow_is_no_measure():
    costs = Costs.of({1: 1e-3}, {1: 1e-3})
    for i in range(60):
        costs.observe(a_round(i, held=0.009))
    assert costs.target.now.value == costs.plain / 1e-3 == 1.0
    assert not costs.known


@pytest.mark.parametrize("speculation", ["on", "warming"])
def test_a_draft_that_seemed_slow_is_tried_again(speculation):
    """Also where it has to read first what was said in a pause."""
    costs = Costs.of({1: 1e-2}, {1: 1e-3})
    for _ in range(15):
        costs.observe_batch(1, 4e-3)
    assert costs.draft.now.value == 4.0
    for i in range(15):
        costs.observe(a_round(i, speculation=speculation))
    assert costs.draft.now.value == 1.0


def test_a_forward_over_a_long_context_is_no_slow_one():
    curve = Curve({1: 3e-3, 4: 4e-3}, {1: 1e-6, 4: 3e-6})
    costs = replace(Costs.of({1: 1.0}, {1: 1e-3}), target=curve, shared=True, target_threads=2)
    costs.see(256 + 6400)
    assert [curve(n) for n in (1, 4)] == pytest.approx([9.4e-3, 23.2e-3])
    assert costs.plain == curve(1)
    for i in range(40):
        costs.observe(Round(i, 9, 0.0, 9.4e-3, (3,), "plain"))
    assert costs.plain == pytest.approx(9.4e-3)
    assert costs.crew.now == 2
    assert Costs.from_dict(costs.to_dict()).target == Curve({1: 3e-3, 4: 4e-3}, {1: 1e-6, 4: 3e-6})


def test_a_fault_of_the_target_at_work_is_not_lost():
    class Broken(Target):
        def measure(self, widths, context):
            raise RuntimeError("out of order")

    with pytest.raises(RuntimeError, match="out of order"), beside(lambda: Broken().measure((1,), 256)):
        pass


def test_a_chain_is_as_long_as_it_pays_to_verify():
    free = Costs.of({1: 0.02, 64: 0.02}, {1: 0.001})
    assert free.chain_length(0.7) == round(free.budget) == 20  # wide forwards cost nothing: the paper's budget
    steep = Costs.of({1: 0.02, 2: 0.03, 16: 0.17}, {1: 0.001})  # half a forward for each further row
    assert steep.chain_length(0.3) == 1
    assert 1 < steep.chain_length(0.9) < 6
    free.contention = 1.0  # each second of drafting holds the target up for one
    assert free.chain_length(0.7) < 6


def pays(costs: Costs, rounds: int, tokens: int, seconds: float, chance: float = 0.9) -> Schedule:
    """A request's schedule after so many rounds that drafted."""
    schedule, now = DECODERS["duotree"](costs), 0.0
    for index in range(rounds):
        tree = Tree([1, 2], Acceptance(), 100)
        if schedule.frontier(tree, verifying=False):
            tree.grow(tree.root, Candidates((3,), (chance,)))
        nodes = schedule.choose(tree)
        now += seconds
        began = now - costs.target.measured(len(nodes) + 1)
        told = Round(index, 2, began, now, (3,) * tokens, "plain", pending=tuple(range(len(nodes))))
        schedule.observe(replace(told, speculation="paused" if schedule.reason else "on"))
    return schedule


def test_a_pause_outlives_a_request():
    costs = Costs.of({1: 1.0, 2: 1.05, 8: 1.3}, {1: 0.01})
    assert "0." in pays(costs, 10, 1, 2.5).reason
    assert DECODERS["duotree"](costs).reason == costs.watch.reason
    left = costs.watch.left
    assert pays(costs, 5, 1, 1.0).reason
    assert costs.watch.left == left - 5


@pytest.mark.parametrize("shared", [False, True])
def test_a_draft_with_cores_of_its_own_is_looked_at_before_it_is_tried_again(shared):
    costs = Costs.of({1: 1.0, 2: 1.05, 8: 1.3}, {1: 0.01})
    costs.shared = shared
    assert pays(costs, 16, 1, 1.3, chance=0.05).reason, "1.05 tokens in 1.3 plain forwards"
    for chance in (0.05, 0.9):
        schedule = pays(costs, costs.watch.left, 1, 1.0)
        assert bool(schedule.reason) == costs.watch.looking == (not shared)
        if not shared:
            pays(costs, 15, 1, 1.0, chance)  # beside plain forwards
            assert costs.watch.looking
            assert ("would" in pays(costs, 1, 1, 1.0, chance).reason) == (chance == 0.05)
        else:
            assert ("gave" in pays(costs, 30, 1, 1.3, chance).reason) == (chance == 0.05)


def test_a_plain_forward_is_no_measure_of_what_would_have_been_verified():
    """The one that is under way when a draft is believed."""
    watch = Watch(Costs.of({1: 1.0, 2: 1.05, 8: 1.3}, {1: 0.01}))
    watch.observe(a_round(1.0), promised=2.5, rows=4)
    assert not watch.window
    watch.observe(a_round(2.0, pending=(1, 2, 3)), promised=2.5, rows=4)
    assert watch.window


def test_a_few_bad_rounds_are_no_reason_for_a_pause():
    """A tree's promise tells more than what chance made of it; but promises that never come true are not believed."""
    costs = Costs.of({1: 1.0, 2: 1.05, 8: 1.3}, {1: 0.01})
    for rounds, tokens, reason in ((100, 2, False), (12, 1, False), (200, 1, True)):
        pays(costs, rounds, tokens, 1.3)
        assert bool(costs.watch.reason) == reason


@given(st.floats(0, 1e-2), st.floats(0, 1e-2), st.randoms())
def test_the_subtree_is_the_best_of_all_though_few_nodes_are_looked_at(first, later, random):
    """first, later: plain forwards that a row costs, up to eight and from there."""
    costs = Costs.of({1: 1.0, 8: 1 + 7 * first, 64: 1 + 7 * first + 56 * later}, {1: 0.1})
    schedule, tree = Best(costs), Tree([1])
    schedule.gain = 3.0
    for _ in range(12):
        probs = sorted((random.uniform(0.02, 0.9) for _ in range(4)), reverse=True)
        tree.grow(tree.frontier(1)[0], Candidates((1, 2, 3, 4), tuple(probs)))
    worth = [-schedule.rate * costs.target(1)]
    for n, node in enumerate(nodes := tree.best(63, schedule.SMALLEST), 1):
        worth.append(sum(node.reach for node in nodes[:n]) - schedule.rate * costs.target(n + 1))
    chosen = schedule.pending(tree)
    assert chosen == nodes[: len(chosen)]
    assert worth[len(chosen)] == pytest.approx(max(worth))
