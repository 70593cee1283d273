"""Every decoder gives exactly the tokens of plain decoding, whatever is drafted, and its records add up."""

import random
import threading
import time
from dataclasses import replace

import pytest
from fakes import EOS, EveryThird, FakeDrafter, FakeTarget, costs

from duochat import DuoChatError
from duochat.engine.costs import Costs
from duochat.engine.decoding import DECODERS, Request, decode
from duochat.engine.lanes import Cancelled
from duochat.engine.rounds import Round, total
from duochat.engine.sampling import Sampling
from duochat.engine.schedules import Sequential

PROMPT = [5, 9, 12, 3]
KINDS = ["perfect", "wrong", "random", "noisy"]


def run(decoder, drafter=None, sampling=None, target=None, prompt=PROMPT, **kwargs):
    request = Request(sampling or Sampling(), max_tokens=kwargs.pop("max_tokens", 60), decoder=decoder, **kwargs)
    return list(decode(prompt, request, target or FakeTarget(), drafter, costs()))


def tokens(rounds):
    return [t for r in rounds for t in r.tokens]


def check_identities(rounds):
    stats = total(rounds)
    assert stats.drafted == stats.accepted + stats.rejected + stats.ignored
    drafted = {d.id: d for r in rounds for d in r.drafted}
    fates = [i for r in rounds for i in (*r.accepted, *r.rejected, *r.ignored)]
    assert sorted(fates) == sorted(drafted)
    for r in rounds:
        emitted = dict(enumerate(r.tokens, r.position))
        assert all(emitted[drafted[i].position] == drafted[i].token for i in r.accepted)
        assert all(emitted.get(drafted[i].position) != drafted[i].token for i in r.rejected)
        assert len(r.tokens) - (r.last != "accepted" and bool(r.tokens)) == len(r.accepted)
        assert Round.from_json(r.to_json()) == r
    assert [r.finish is None for r in rounds] == [True] * (len(rounds) - 1) + [False]


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": ((7, 2.0),)}


@pytest.mark.parametrize(
    "penalties", [{}, PENALTIES, {"grammar": EveryThird()}], ids=["free", "penalised", "by a grammar"]
)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decoder", DECODERS)
def test_same_tokens_as_plain_decoding(decoder, kind, temperature, penalties):
    for seed in range(5):
        sampling = Sampling(temperature=temperature, seed=seed, **penalties)
        prompt = [*PROMPT, seed + 1]
        plain = run("autoregressive", sampling=sampling, prompt=prompt)
        rounds = run(decoder, FakeDrafter(kind, seed), sampling, prompt=prompt)
        assert tokens(rounds) == tokens(plain)
        check_identities(rounds)


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["speculative", "duodecoding", "duotree"])
def test_random_timing(decoder):
    """A thousand schedules in all: delays in both lanes move who is early, never what is said."""
    plain = tokens(run("autoregressive", max_tokens=40))
    for seed in range(333):
        rng = random.Random(seed)
        delay = lambda rng=rng: rng.random() ** 4 * 1e-3  # noqa: E731
        kind = KINDS[seed % len(KINDS)]
        rounds = run(decoder, FakeDrafter(kind, seed, delay), target=FakeTarget(delay=delay), max_tokens=40)
        assert tokens(rounds) == plain
        check_identities(rounds)


@pytest.mark.parametrize("decoder", ["speculative", "duodecoding", "duotree"])
def test_a_broken_draft_is_named_and_does_not_stop_the_answer(decoder):
    for fail_at in (1, 2, 5):
        rounds = run(
            decoder, FakeDrafter("perfect", fail_at=fail_at, delay=lambda: 1e-3), target=FakeTarget(delay=lambda: 2e-3)
        )
        assert tokens(rounds) == tokens(run("autoregressive"))
        assert "the fake draft broke" in rounds[-1].reason
        check_identities(rounds)


@pytest.mark.parametrize("decoder", DECODERS)
def test_eos_inside_a_block_ends_the_answer(decoder):
    """Nothing after the first EOS is emitted or counted, though the draft went on behind it."""
    endless = tokens(run("autoregressive", target=FakeTarget(eos=())))
    at = 17
    stop = endless[at]
    first = endless.index(stop)
    rounds = run(
        decoder, FakeDrafter("perfect", delay=lambda: 1e-4), target=FakeTarget(eos=(stop,), delay=lambda: 1e-3)
    )
    assert tokens(rounds) == endless[: first + 1]
    assert rounds[-1].finish == "stop"
    check_identities(rounds)


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("decoder", DECODERS)
def test_max_tokens_is_exact(decoder, max_tokens):
    target = FakeTarget(eos=(), delay=lambda: 1e-3)
    rounds = run(decoder, FakeDrafter("perfect"), target=target, max_tokens=max_tokens)
    assert len(tokens(rounds)) == max_tokens
    assert rounds[-1].finish == "length"
    check_identities(rounds)


@pytest.mark.parametrize("decoder", DECODERS)
def test_context_end(decoder):
    """The context length is never passed, not even by a drafted token."""
    target = FakeTarget(eos=(), context_length=20, delay=lambda: 1e-3)
    rounds = run(decoder, FakeDrafter("perfect"), target=target, max_tokens=100)
    assert len(tokens(rounds)) == 20 - len(PROMPT)
    assert all(d.position < 20 for r in rounds for d in r.drafted)


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("decoder", DECODERS)
def test_stop_rule_of_the_request(decoder, kept):
    """A stop string may end inside a block, and may take back the token that completed it."""
    plain = tokens(run("autoregressive"))
    seen = []

    def keep(new):
        for i, token in enumerate(new):
            seen.append(token)
            if len(seen) == 12:
                return i + kept
        return None

    rounds = run(decoder, FakeDrafter("perfect"), keep=keep, target=FakeTarget(delay=lambda: 1e-3))
    assert tokens(rounds) == plain[: 11 + kept]
    assert rounds[-1].finish == "stop"
    check_identities(rounds)


@pytest.mark.parametrize("decoder", DECODERS)
def test_early_close_and_cancel(decoder):
    """Leaving the generator stops the draft thread; a cancelled request ends with an empty round."""
    drafter = FakeDrafter("perfect")
    request = Request(decoder=decoder, max_tokens=50)
    rounds = decode(PROMPT, request, FakeTarget(), drafter, costs())
    next(rounds)
    rounds.close()
    calls = drafter.calls
    flag = []
    rest = []
    for r in decode(PROMPT, request, FakeTarget(eos=()), drafter, costs(), cancelled=lambda: bool(flag)):
        rest.append(r)
        flag.extend([1] * (len(rest) == 3))
    assert drafter.calls >= calls
    assert rest[-1].finish == "cancelled"
    assert rest[-1].tokens == ()
    check_identities(rest)


@pytest.mark.parametrize(("decoder", "least"), [("speculative", 2.0), ("duodecoding", 2.0), ("duotree", 3.0)])
def test_a_perfect_draft_makes_long_rounds(decoder, least):
    target = FakeTarget(eos=(), delay=lambda: 8e-3)
    rounds = run(decoder, FakeDrafter("perfect", delay=lambda: 5e-4), target=target)
    stats = total(rounds)
    assert stats.mean_accepted_length >= least
    assert stats.acceptance_rate > 0.9


def test_a_long_prompt_of_the_draft_does_not_delay_the_target():
    """The draft reads its prompt for 400 ms; plain tokens flow meanwhile and drafting joins later."""
    drafter = FakeDrafter("perfect")
    drafter.delay = lambda: 0.4 if drafter.calls == 1 else 5e-4
    rounds = run("duotree", drafter, target=FakeTarget(eos=(), delay=lambda: 8e-3), max_tokens=150)
    assert rounds[0].ended < 0.2
    assert rounds[0].speculation == "warming"
    assert rounds[-1].speculation == "on"


def test_a_hopeless_draft_is_paused_with_its_reason():
    rounds = run(
        "duotree",
        FakeDrafter("wrong", delay=lambda: 1e-3),
        target=FakeTarget(eos=(), delay=lambda: 8e-3),
        max_tokens=90,
    )
    paused = [r for r in rounds if r.speculation == "paused"]
    assert paused
    assert all("plain decoding" in r.reason for r in paused)
    assert all(not r.pending for r in paused)
    assert EOS not in tokens(rounds)


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_cancelled_request_ends_with_its_round(decoder):
    """Though neither lane asks: the target's forward is short, and nothing has to be waited for."""
    target, said = FakeTarget(eos=()), []
    verify = target.verify
    target.verify = lambda context, tree, sampling, *_: verify(context, tree, sampling)
    request = Request(decoder=decoder, max_tokens=60)
    for r in decode(PROMPT, request, target, FakeDrafter("wrong"), costs(), cancelled=lambda: len(said) == 2):
        said.append(r)
    assert [r.finish for r in said] == [None, None, "cancelled"]


@pytest.mark.parametrize("decoder", ["duodecoding", "duotree"])
def test_on_shared_cores_the_draft_reads_the_prompt_after_the_target(decoder):
    log, target, drafter = [], FakeTarget(), FakeDrafter("perfect")
    verify, expand = target.verify, drafter.expand
    target.verify = lambda *args: (time.sleep(0.02), log.append("target"), verify(*args))[-1]
    drafter.expand = lambda *args: (log.append("draft"), expand(*args))[-1]
    shared = replace(costs(), shared=True)
    rounds = list(decode(PROMPT, Request(decoder=decoder, max_tokens=60), target, drafter, shared))
    assert log[0] == "target"
    assert "draft" in log
    assert tokens(rounds) == tokens(run("autoregressive"))


def test_in_turns_the_second_forward_waits_for_the_draft():
    """It was asked whether to wait while the schedule still thought of the prompt: the draft then read it beside it."""
    shared = replace(costs(), turns=True, shared=True)
    target, request = FakeTarget(eos=(), delay=lambda: 0.01), Request(max_tokens=20, decoder="duotree")
    rounds = []
    for told in decode(PROMPT, request, target, FakeDrafter("perfect", delay=lambda: 0.002), shared):
        rounds.append(told)
        time.sleep(0.001)
    assert rounds[1].waited > 0
    assert rounds[1].pending


def test_in_turns_one_thread_does_all_and_is_cut_short_by_whoever_cancels():
    target, drafter, began, threads = FakeTarget(eos=()), FakeDrafter("perfect"), time.monotonic(), set()

    def expand(context, nodes, sampling, cancelled):
        threads.add(threading.current_thread())
        while not cancelled():
            assert time.monotonic() < began + 5
            time.sleep(0.01)
        raise Cancelled

    drafter.expand = expand
    late = lambda: time.monotonic() > began + 0.2  # noqa: E731
    request, shared = Request(max_tokens=20, decoder="duotree"), replace(costs(), turns=True, shared=True)
    rounds = list(decode(PROMPT, request, target, drafter, shared, cancelled=late))
    assert rounds[-1].finish == "cancelled"
    assert threads == {threading.current_thread()}
    assert time.monotonic() < began + 2


def test_a_draft_lane_at_rest_is_woken_when_the_target_waits_for_it():
    """A schedule may find work for the draft in what it learnt after the lane went to rest."""

    class Learning(Sequential):
        rounds = 0

        def frontier(self, tree, verifying):
            return super().frontier(tree, verifying) if self.rounds > 2 else []

        def observe(self, r):
            time.sleep(0.02)  # the lane has asked, and rests
            self.rounds += 1
            super().observe(r)

    drafter, until = FakeDrafter("perfect"), time.monotonic() + 5
    request = Request(max_tokens=40, decoder="speculative")
    late = lambda: time.monotonic() > until  # noqa: E731
    rounds = list(
        decode(
            PROMPT,
            request,
            FakeTarget(eos=()),
            drafter,
            costs(),
            cancelled=late,
            schedules={"speculative": Learning},
        )
    )
    assert rounds[-1].finish == "length"
    assert any(r.accepted for r in rounds)


@pytest.mark.parametrize("decoder", ["speculative", "duodecoding", "duotree"])
@pytest.mark.parametrize("budget", [None, 500])
def test_no_forward_is_wider_than_measured(decoder, budget):
    """However quick the draft is, and whatever budget a user asks for."""

    class Narrow(FakeTarget):
        def verify(self, context, tree, *rest):
            assert len(tree) <= 15
            return super().verify(context, tree, *rest)

    quick = Costs.of({1: 0.1, 16: 0.1}, {1: 1e-4, 8: 1e-4})
    request = Request(max_tokens=200, decoder=decoder, draft_budget=budget)
    target = Narrow(eos=(), delay=lambda: 4e-3)
    rounds = list(decode(PROMPT, request, target, FakeDrafter("perfect"), quick))
    assert rounds[-1].finish == "length"
    check_identities(rounds)


@pytest.mark.parametrize("decoder", ["speculative", "duodecoding", "duotree"])
def test_a_draft_that_stalls_goes_on_with_fewer_threads(decoder):
    class Stalling(FakeDrafter):
        threads, least = 8, 8

        def set_threads(self, threads, reading=0):
            self.threads, self.least = threads, min(threads, self.least)

    drafter = Stalling(delay=lambda: 6e-3 if drafter.threads > 4 else 1e-3)
    measured = replace(costs(), threads=8)
    rounds = list(decode(PROMPT, Request(Sampling(), 300, decoder), FakeTarget(delay=lambda: 8e-3), drafter, measured))
    assert drafter.least <= 4
    assert drafter.threads == measured.hands.now
    assert tokens(rounds) == tokens(run("autoregressive", max_tokens=300))


class Ahead(FakeTarget):
    """Computes by itself between `begin` and the answer; tells what is asked of it, and when."""

    def __init__(self, log, fails_at=10**6):
        super().__init__(eos=())
        self.log, self.fails_at = log, fails_at

    def begin(self, context, *rest):
        if len(self.log) >= self.fails_at:
            raise DuoChatError("The target broke: restart it.")
        self.log.append(f"begin {len(context)}")
        answer = self.verify(context, *rest)

        def wait():
            self.log.append(f"wait {len(context)}")
            return answer

        return wait


class Logged(FakeDrafter):
    def __init__(self, log, kind):
        super().__init__(kind)
        self.log = log

    def expand(self, *asked):
        self.log.append("draft")
        return super().expand(*asked)


@pytest.mark.parametrize("decoder", ["autoregressive", "duotree", "duodecoding", "speculative"])
def test_a_round_is_told_while_the_target_is_at_work_on_the_next(decoder):
    log = []
    request = Request(decoder=decoder, max_tokens=12)
    slow = Costs.of({1: 8e-3, 32: 8e-3}, {1: 8e-3, 8: 8e-3})
    for r in decode(PROMPT, request, Ahead(log), FakeDrafter("wrong", delay=lambda: 8e-3), slow):
        log.append(f"told {r.position + len(r.tokens)}")
    begun = [entry.split()[1] for entry in log if entry.startswith("begin")]
    assert log.index(f"told {begun[1]}") < log.index(f"begin {begun[1]}")  # the first token comes at once
    for after in begun[2:]:
        assert log.index(f"begin {after}") < log.index(f"told {after}") < log.index(f"wait {after}"), log
    assert log[-1].startswith("told")


def test_the_draft_is_told_to_begin_after_the_target():
    log = []
    [*decode(PROMPT, Request(decoder="duotree", max_tokens=8), Ahead(log), Logged(log, "perfect"), costs())]
    assert log[0].startswith("begin")


def test_beside_a_cpu_target_a_round_is_told_before_drafts_are_waited_for():
    log, target = [], FakeTarget(eos=())
    target.shares_cores = True
    for r in decode(PROMPT, Request(decoder="speculative", max_tokens=12), target, Logged(log, "wrong"), costs()):
        log.append(f"told {r.index}")
    assert all(log[log.index(f"told {n}") + 1 :].count("draft") for n in range(1, 4)), log


@pytest.mark.parametrize(("decoder", "filled"), [("duotree", {8}), ("duodecoding", {8}), ("autoregressive", {0})])
def test_forwards_are_filled_up_while_drafts_are_verified(decoder, filled):
    few = replace(costs(), fill=8)
    seen, target = [], FakeTarget(eos=(), delay=lambda: 8e-3)
    verify = target.verify
    target.verify = lambda *asked: (seen.append(target.fill), verify(*asked))[1]
    request = Request(decoder=decoder, max_tokens=20)
    known = Costs.from_dict(replace(costs(), at_once=few).to_dict())
    [*decode(PROMPT, request, target, FakeDrafter("perfect"), known)]
    assert set(seen) == filled
    assert target.fill == 0  # whoever comes next is not filled up
    seen.clear()
    [*decode(PROMPT, replace(request, max_tokens=40), target, FakeDrafter("random", fail_at=2), known)]
    assert seen[-1] == 0  # no draft will come any more


def test_what_was_said_before_a_fault_is_told():
    log, said = [], []

    def listen():
        for r in decode(PROMPT, Request(max_tokens=60), Ahead(log, fails_at=6), FakeDrafter("perfect"), costs()):
            said.append(r)

    with pytest.raises(DuoChatError, match="restart it"):
        listen()
    assert len(said) == 3
