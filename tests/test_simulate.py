"""The simulation against times computed by hand, and against the real lanes with threads."""

import random
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from fakes import FakeDrafter, FakeTarget, path_of
from test_decoding import check_identities, tokens

from duochat.bench import simulate
from duochat.bench.metrics import Run
from duochat.bench.simulate import Friction, Recording
from duochat.engine.costs import Costs
from duochat.engine.decoding import DECODERS, Request, decode
from duochat.engine.lanes import Candidates
from duochat.engine.rounds import total
from duochat.engine.sampling import Sampling

T, D = 8.0, 1.0
COSTS = Costs.of({1: T, 64: T}, {1: D, 8: D})
NONE = Friction(between_forwards=0.0, between_batches=0.0)


def recording(count=40, right=lambda i: True, prompt=10):
    """An answer of distinct tokens. right: whether the draft's first choice for token i is the target's."""
    answer = tuple(range(1000, 1000 + count))
    found = tuple(Candidates((answer[i] if right(i) else 7, 8), (0.8, 0.1)) for i in range(count))
    return Recording(tuple(range(prompt)), answer, found, target_prefill=T, draft_prefill=D, max_tokens=count)


def play(decoder, one, costs=COSTS, friction=NONE):
    return simulate.replay(decoder, costs, [one], friction)[0]


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("right", [lambda i: True, lambda i: False, lambda i: i % 3 != 0], ids=["all", "none", "some"])
def test_every_decoder_gives_the_recorded_answer_and_its_records_add_up(decoder, right):
    one = recording(right=right)
    rounds = play(decoder, one)
    assert tuple(tokens(rounds)) == one.answer
    check_identities(rounds)
    for a, b in pairwise(rounds):
        assert b.started >= a.ended


def test_plain_decoding_takes_a_forward_a_token():
    friction = replace(NONE, between_forwards=0.5, target=3.0)  # nothing drafts, so nothing slows down
    one = replace(recording(), target_prefill=20.0)
    assert play("autoregressive", one, friction=friction)[-1].ended == pytest.approx(20 + 39 * (T + 0.5))
    speeds = simulate.predict(COSTS, [one, one], ["autoregressive"], NONE)
    assert speeds == {"autoregressive": pytest.approx(80 / (2 * (20 + 39 * T)))}


def test_conventional_speculation_takes_turns():
    """A perfect draft, γ tokens a round: γ·D, then T; γ + 1 tokens. The first batch reads the prompt, for D too."""
    rounds = play("speculative", recording())
    for r in rounds[:-1]:
        assert r.waited == pytest.approx(len(r.pending) * D)
        assert r.ended - r.started == pytest.approx(T)
        assert len(r.tokens) == len(r.pending) + 1
    wait = sum(r.waited for r in rounds)
    assert rounds[-1].ended == pytest.approx(len(rounds) * T + wait)


def test_the_papers_schedule_drafts_beside_the_forward():
    """Perfect draft, γ* = 8: a round of T gives the verified tokens and the next one; the draft fits beside it."""
    rounds = play("duodecoding", recording(right=lambda i: True))
    assert all(r.waited == 0 for r in rounds)
    assert rounds[-1].ended == pytest.approx(len(rounds) * T)
    assert len(rounds) <= 8


def test_the_papers_schedule_grows_no_longer_chain_than_pays():
    """Each further row costs the target half a forward: at 90 % acceptance four drafted tokens are worth it, not 8."""
    steep = Costs.of({1: T, 2: 1.5 * T, 16: 8.5 * T}, {1: D, 8: D})
    rounds = play("duodecoding", recording(right=lambda i: i % 10 != 9), steep)
    assert 1 < max(len(r.pending) for r in rounds) < 6


def test_a_useless_draft_costs_the_papers_schedule_nothing_but_waiting():
    rounds = play("duodecoding", recording(right=lambda i: False))
    stats = total(rounds)
    assert stats.accepted == 0
    assert stats.mean_accepted_length == 1
    assert sum(r.ended - r.started for r in rounds) == pytest.approx(40 * T)


def test_the_draft_reads_its_prompt_while_the_target_goes_on():
    one = replace(recording(), draft_prefill=10 * T + 0.1)
    rounds = play("duotree", one)
    early = [r for r in rounds if r.ended <= 10 * T]
    assert len(early) == 10
    assert all(r.tokens and not r.pending and r.speculation == "warming" for r in early)
    assert any(r.accepted for r in rounds[11:])
    assert play("speculative", one)[0].started >= 10 * T  # that one waits


@pytest.mark.parametrize("decoder", ["duodecoding", "duotree"])
def test_on_shared_cores_the_draft_reads_the_prompt_after_the_target(decoder):
    """So the first token comes as early as in plain decoding, though each lane slows the other down by half."""
    one, friction = replace(recording(), draft_prefill=T / 2), replace(NONE, target=2.0, draft=2.0)
    assert play(decoder, one, friction=friction)[0].ended > T
    shared = replace(COSTS, shared=True)
    rounds = play(decoder, one, shared, friction)
    assert rounds[0].ended == pytest.approx(T)
    assert not rounds[0].batches
    assert rounds[1].batches[0].started == pytest.approx(T)
    assert any(r.accepted for r in rounds)


def test_in_turns_the_lanes_never_work_at_once():
    """Each has all cores then. The draft's reading of the prompt is waited for too, once the first token is out."""
    costs = replace(Costs.of({1: T, 64: T}, {1: D, 8: D}), turns=True, shared=True)
    rounds = play("duotree", recording(), costs)
    batches = [batch for r in rounds for batch in r.batches]
    assert all(b.ended <= r.started + 1e-9 or b.started >= r.ended - 1e-9 for r in rounds for b in batches)
    assert batches[0].started >= rounds[0].ended
    assert sum(len(r.accepted) for r in rounds) > 5
    assert sum(len(r.tokens) for r in rounds) == len(recording().answer)


@pytest.mark.parametrize("budget", ["auto", 2])
def test_in_turns_no_more_is_drafted_than_a_forward_takes(budget, monkeypatch):
    """However sure the draft is, the target waits for it in vain where there are no more rows."""
    bound = lambda costs, _: simulate.DECODERS["duotree"](costs, budget)  # noqa: E731
    costs = replace(Costs.of({1: T, 4: T}, {1: D / 8, 8: D / 4}), turns=True, shared=True)
    monkeypatch.setattr(simulate, "DECODERS", DECODERS | {"bound": bound})
    rounds = play("bound", recording(), costs)
    assert any(len(r.pending) == (2 if budget == 2 else 3) for r in rounds)
    assert all(len(r.drafted) <= len(r.pending) + 2 for r in rounds[2:])


def test_where_the_first_further_row_costs_most_several_are_waited_for():
    """No single one pays for it; a chain of which most is accepted does."""
    costs = replace(Costs.of({1: T, 2: 2 * T, 16: 2 * T}, {1: D / 8, 8: D / 4}), turns=True, shared=True)
    rounds = play("duotree", recording(right=lambda i: i % 8 != 0), costs)
    assert sum(len(r.tokens) for r in rounds) / len(rounds) > 3
    assert rounds[-1].ended < 0.8 * play("autoregressive", recording())[-1].ended


def test_a_draft_that_costs_a_forward_is_never_asked_in_turns():
    costs = replace(Costs.of({1: T, 2: 1.4 * T, 64: 20 * T}, {1: 0.6 * T}), turns=True, shared=True)
    rounds = play("duotree", recording(), costs)
    assert {(r.speculation, len(r.batches)) for r in rounds} == {("paused", 0)}
    assert rounds[-1].reason == "drafting would give 0.95× plain decoding here at best"


def test_lanes_slow_each_other_down_only_while_both_work():
    """Forwards at half speed beside drafts: the paper's schedule drafts for part of the time."""
    one = recording(right=lambda i: False, count=2)
    alone = play("duodecoding", one)
    beside = play("duodecoding", one, friction=replace(NONE, target=2.0))
    drafted = sum(b.ended - b.started for b in alone[0].batches)
    assert 0 < drafted < T
    assert beside[0].ended == pytest.approx(T + drafted / 2)
    assert play("speculative", one, friction=replace(NONE, target=2.0))[-1].ended == play("speculative", one)[-1].ended


def test_forwards_cost_by_their_width():
    costs = Costs.of({1: T, 2: 2 * T, 64: 64 * T}, {1: D, 8: D})
    for r in play("speculative", recording(), costs):
        assert r.ended - r.started == pytest.approx((len(r.pending) + 1) * T)


def test_what_the_draft_has_not_decoded_on_the_way_is_paid_for():
    """After a prompt that took 5 forwards to read, the draft catches up on what was said meanwhile."""
    costs = Costs.of({1: T, 64: T}, {1: D, 2: 2 * D, 8: 8 * D})
    one = replace(recording(), draft_prefill=5 * T - 0.5)
    rounds = play("duotree", one, costs)
    batches = [b for r in rounds for b in r.batches]
    assert batches[1].ended - batches[1].started >= 4 * D


def test_recording_what_the_draft_proposes():
    drafter, prompt = FakeDrafter("perfect"), [5, 9, 12, 3]
    answer = tokens(list(decode(prompt, Request(max_tokens=50), FakeTarget(eos=()), None, COSTS)))
    one = simulate.record(drafter, prompt, Run(answer, "length", 0.5, 0.5))
    assert one.answer == tuple(answer)
    assert tuple(c.tokens[0] for c in one.candidates) == one.answer
    assert one.target_prefill == 0.5
    assert one.draft_prefill > 0
    rounds = play("duotree", one)
    assert total(rounds).acceptance_rate > 0.95


class HashDrafter(FakeDrafter):
    """Half right, but always alike for the same tokens: a recording of it says what it will do."""

    def _one(self, path, sampling):
        self.rng = random.Random(hash(tuple(path)))
        return super()._one(path, sampling)


def speeds_with_threads(decoder, prompts, costs):
    target = FakeTarget(eos=(), delay=lambda: costs.target.measured(1))
    drafter = HashDrafter("noisy", delay=lambda: costs.draft.measured(1))
    given = [list(decode(p, Request(decoder=decoder, max_tokens=32), target, drafter, costs)) for p in prompts]
    return sum(len(tokens(rounds)) for rounds in given) / sum(rounds[-1].ended for rounds in given)


def test_prediction_against_real_threads():
    """The same schedules with threads and sleeping models: speedups agree within a quarter (busy machines apart)."""
    costs = Costs.of({1: 40e-3, 64: 40e-3}, {1: 6e-3, 8: 6e-3})
    prompts = [[5, 9, 12, 3], [8, 8, 2, 30]]
    drafter, recordings = HashDrafter("noisy"), []
    for prompt in prompts:
        answer = tokens(list(decode(prompt, Request(max_tokens=32), FakeTarget(eos=()), None, costs)))
        run = Run(answer, "length", 40e-3, 40e-3)
        recordings.append(replace(simulate.record(drafter, prompt, run), draft_prefill=6e-3))
    predicted = simulate.predict(costs, recordings, friction=Friction(between_forwards=1e-3, between_batches=1e-3))
    for decoder in ("speculative", "duodecoding", "duotree"):
        for _ in range(3):
            plain = speeds_with_threads("autoregressive", prompts, costs)
            measured = speeds_with_threads(decoder, prompts, costs) / plain
            error = predicted[decoder] / predicted["autoregressive"] / measured - 1
            if abs(error) <= 0.25:
                break
        assert abs(error) <= 0.25, (decoder, measured, error)


@pytest.mark.parametrize(("seconds", "slower"), [(1.25 * D, 1.25), (0.9 * D, 1.0)])
def test_friction_is_the_targets_as_calibrated_and_the_drafts_beside_it(seconds, slower):
    class Lane:
        calls = 0

        def measure(self, sizes, *_):
            self.calls += 1
            time.sleep(1e-3)
            return {1: seconds}

    class Drafter(Lane):
        def measure(self, sizes, *_):
            before, until = target.calls, time.monotonic() + 1
            while target.calls == before and time.monotonic() < until:
                time.sleep(1e-3)
            assert target.calls > before  # at work
            return super().measure(sizes)

    target = Lane()
    found = simulate.friction(target, Drafter(), replace(COSTS, contention=1 / 3), 0.3)
    assert found.target == pytest.approx(1.5)
    assert found.draft == pytest.approx(slower)
    assert found.between_forwards == 0.3


def test_sampling_reaches_the_recorded_draft():
    drafter = FakeDrafter("perfect")
    seen = []
    expand = drafter.expand
    drafter.expand = lambda c, n, sampling, x: seen.append(sampling) or expand(c, n, sampling, x)
    simulate.record(drafter, [5, 6], Run([7, 8, 9], "length", 0.1, 0.2), Sampling(0.7, seed=4))
    assert set(seen) == {Sampling(0.7, seed=4)}
    assert path_of([5, 6], simulate.Node(9, None, 1)) == [5, 6]


def test_a_recording_knows_how_long_its_forwards_took():
    one = replace(recording(), forward=2 * T, target_prefill=3.0)
    assert play("autoregressive", one)[-1].ended == pytest.approx(3 + 39 * 2 * T)


def test_forecast_of_an_engine():
    class Lanes:
        drafter, target, costs = FakeDrafter("perfect"), FakeTarget(eos=()), COSTS

    Lanes.target.measure = lambda widths, context: {1: T}
    Lanes.drafter.measure = lambda sizes, threads: {1: D}
    steps = []
    found = simulate.forecast(Lanes, [[5, 9, 12, 3], [8, 8, 2]], None, 20, lambda *step: steps.append(step))
    assert steps == [(1, 2), (2, 2)]
    assert found.keys() == DECODERS.keys()
    assert all(speed > 0 for speed in found.values())
