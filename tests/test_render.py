"""Frames for the picture: what a step shows, numbering, snapshots, texts, gauges."""

import json
import re
from dataclasses import replace

import pytest
from simulated import PROSE, Simulation, Step

from duochat.app import assets
from duochat.app.frames import frame
from duochat.chat.answer import Answer
from duochat.chat.chat import Options
from duochat.engine.rounds import SETTLED, Batch, Draft, Round, total


def draft(id, parent, position, prob=0.5, rank=1, **more):
    return Draft(id, parent, position, 100 + id, prob, prob, rank, **more)


def a_round(**fields):
    base = {"index": 1, "position": 10, "started": 1.0, "ended": 1.05, "tokens": (5,), "last": "plain"}
    return Round(**{**base, **fields})


def text_of(frames):
    """What picture.js writes: the texts of the tokens and the tails."""
    rounds = [r for f in frames for r in f["rounds"]]
    return "".join(t[0] for r in rounds for t in r["tokens"]) + "".join(r.get("tail", "") for r in rounds)


def drawn(*steps, **options):
    """The whole picture of an answer."""
    return frame(Answer(steps), Options(**options))


def fed(steps):
    """An answer, and the frames of a page that asked after each step."""
    answer, frames = Answer(), []
    for step in steps:
        answer.add(step)
        frames.append(frame(answer, Options(), len(answer.steps) - 1))
    return answer, frames


def paced(count, plain=0.0, seconds=0.05, tokens=2, **more):
    """Rounds of two tokens each, in so many seconds."""
    return [
        Step(a_round(index=i, started=i * seconds, ended=(i + 1) * seconds, tokens=(5,) * tokens, plain=plain, **more))
        for i in range(count)
    ]


def test_frames_are_numbered_without_gaps_and_make_up_the_chat_text():
    steps = list(Simulation(PROSE).steps())
    answer, frames = fed(steps)
    assert [(f["from"], f["n"]) for f in frames] == [(i, i + 1) for i in range(len(steps))]
    assert text_of(frames) == "".join(s.text for s in steps) == answer.text == PROSE
    whole = frame(answer, Options())
    assert text_of([whole]) == PROSE
    assert (whole["from"], whole["n"]) == (0, len(steps))
    assert text_of([frame(answer, Options(), 0), frame(answer, Options(), len(steps))]) == PROSE


def test_a_frame_is_json_and_small_enough_for_sixty_a_second():
    _, frames = fed(list(Simulation(PROSE * 4).steps()))
    sizes = [len(json.dumps(f)) for f in frames]
    assert sum(sizes) / len(sizes) < 4000


def test_every_drafted_token_gets_exactly_one_fate():
    """Guards the simulation itself: the browser tests and the shipped lesson stand on it."""
    rounds = [s.round for s in Simulation(PROSE, seed=3).steps() if s.round]
    fates = [d for r in rounds for d in (*r.accepted, *r.rejected, *r.ignored)]
    assert sorted(fates) == sorted(d.id for r in rounds for d in r.drafted)
    figures = total(rounds)
    assert figures.drafted == figures.accepted + figures.rejected + figures.ignored > 100


def test_kinds_follow_the_record_and_a_correction_names_what_it_replaced():
    drafted = (draft(0, -1, 10), draft(1, 0, 11, 0.6), draft(2, 0, 11, 0.2, rank=2), draft(3, 1, 12))
    r = a_round(tokens=(100, 7), last="correction", drafted=drafted, pending=(0, 1, 2), pending_probs=(0.9, 0.1, 0.05),
                accepted=(0,), rejected=(1, 2), ignored=(3,), token_probs=(0.9, 0.7))  # fmt: skip
    picture = drawn(Step(r, "ab", ("a", "b"), {i: f"d{i}" for i in range(4)}))
    (shown,) = picture["rounds"]
    assert shown["tokens"] == [["a", "accepted", 0.9, 0], ["b", "correction", 0.7, 1]]
    assert shown["drafted"][1][:4] == [1, 0, 11, "d1"]
    assert shown["pending"] == [[0, 0.9], [1, 0.1], [2, 0.05]]
    assert (shown["rejected"], shown["ignored"]) == ([1, 2], [3])
    assert {k: picture["gauges"][k] for k in ("drafted", "verified", "tested", "accepted", "rejected", "ignored")} == {
        "drafted": 4, "verified": 3, "tested": 3, "accepted": 1, "rejected": 2, "ignored": 1}  # fmt: skip


def test_an_outcome_that_waited_in_the_tree_is_accepted_to_the_last_token():
    r = a_round(tokens=(100, 101), last="accepted", drafted=(draft(0, -1, 10), draft(1, 0, 11)), pending=(0,),
                accepted=(0, 1), hit=True)  # fmt: skip
    (shown,) = drawn(Step(r, "ab", ("a", "b")))["rounds"]
    assert [t[1] for t in shown["tokens"]] == ["accepted", "accepted"]


def test_a_correction_stands_for_the_likeliest_rejected_token_at_its_place():
    drafted = (draft(0, -1, 10, 0.2), draft(1, -1, 10, 0.7), draft(2, 1, 11, 0.99))
    r = a_round(last="correction", drafted=drafted, rejected=(0, 1, 2))
    assert drawn(Step(r, "a", ("a",)))["rounds"][0]["tokens"][0][3] == 1
    assert drawn(Step(replace(r, rejected=()), "a", ("a",)))["rounds"][0]["tokens"][0][3] == -1


@pytest.mark.parametrize(
    ("pieces", "text", "shown"),
    [
        (("a", "b", "c"), "abc", ["a", "b", "c"]),
        (("", "", "🚀"), "🚀", ["", "", "🚀"]),
        (("a", "b", "c", "held back"), "abcheld back", ["a", "b", "cheld back"]),
        (("a",), "a", ["a", "", ""]),
        ((), "abc", ["abc", "", ""]),
    ],
)
def test_no_text_is_lost_when_pieces_and_tokens_do_not_match(pieces, text, shown):
    assert [t[0] for t in drawn(Step(a_round(tokens=(1, 2, 3)), text, pieces))["rounds"][0]["tokens"]] == shown


def test_text_without_a_round_goes_to_the_tail_of_the_last_token():
    """A page that has drawn that token already gets the whole again."""
    answer, frames = fed([Step(a_round(), "a", ("a",)), Step(text="b"), Step(text="c", finish="stop")])
    assert frame(answer, Options())["rounds"][0]["tail"] == "bc"
    assert [f["from"] for f in frames] == [0, 0, 0]
    assert text_of(frames[-1:]) == "abc"


def test_the_state_is_that_of_the_answer():
    paused = a_round(speculation="paused", reason="the measured gain is 0.9")
    _, frames = fed([Step(phase="prefill", progress=(1, 9)), Step(paused, "a", ("a",), phase="decode")])
    assert frames[0]["state"] == {"phase": "prefill", "progress": (1, 9), "decoder": "duotree"}
    told = {"phase": "decode", "speculation": "paused", "reason": "the measured gain is 0.9", "decoder": "duotree"}
    assert frames[1]["state"] == told
    assert drawn(Step(), draft_budget=3)["state"]["own_budget"] == 3


def test_what_is_being_loaded_is_no_notice_of_the_answer():
    """It stood beside a finished answer."""
    answer = Answer([Step(phase="loading", notice="fetching"), Step(a_round(), "a", ("a",), notice="It is full.")])
    assert (answer.doing, answer.notices) == ("fetching", ["It is full."])


def test_gauges_are_the_figures_of_the_rounds():
    steps = list(Simulation(PROSE).steps())
    stats = total(s.round for s in steps if s.round)
    g = drawn(*steps)["gauges"]
    assert g["tokens"] == stats.completion_tokens
    assert g["tau"] == pytest.approx(stats.mean_accepted_length, abs=1e-4)
    assert g["alpha"] == pytest.approx(stats.acceptance_rate, abs=1e-4)
    assert g["tested"] == g["accepted"] + g["rejected"]
    assert g["drafted"] == g["tested"] + g["ignored"]
    assert frame(Answer(steps), Options(), load={"cpu": 0.4})["gauges"]["cpu_load"] == 0.4


def test_a_page_that_asks_seldom_costs_no_gauges_in_between(monkeypatch):
    """They were computed for each of 221 rounds a second: a seventh of a core, which the draft wants."""
    counted = []
    monkeypatch.setattr("duochat.app.frames.gauges_of", lambda *_: counted.append(1) or {})
    answer = Answer(Simulation(PROSE).steps())
    frame(answer, Options())
    assert len(counted) == 1


# ---- the speedup


def test_the_speedup_compares_with_plain_rounds_of_about_now():
    """Two tokens in 50 ms where plain decoding needs 40 ms for each, then 30 ms in a longer context."""
    steps = [*paced(20, plain=0.04), *(replace(s, round=replace(s.round, started=s.round.started + 1,
             ended=s.round.ended + 1, plain=0.03)) for s in paced(20))]  # fmt: skip
    g = drawn(*steps)["gauges"]
    assert g["speedup"] == round((19 * 0.08 + 20 * 0.06) / (39 * 0.05), 2)
    assert g["compared_rate"] / g["plain_rate"] == pytest.approx(g["speedup"], abs=0.005)  # what stands beside it
    assert g["compared_rate"] == pytest.approx(2 / 0.05, abs=1e-4)


def test_no_speedup_before_it_is_known():
    """The first number ever seen was 0.17×, of an answer that ended at 0.92×."""
    assert drawn(*paced(SETTLED, plain=0.04))["gauges"]["speedup"] is None
    assert drawn(*paced(SETTLED + 1, plain=0.04))["gauges"]["speedup"] == 1.6
    assert drawn(*paced(40))["gauges"]["speedup"] is None
    assert drawn(*paced(40))["gauges"]["rate"] == pytest.approx(40)


def test_plain_decoding_has_no_speedup():
    """It stood at 0.87×, "slower: too little is drafted"."""
    rounds = paced(40, plain=0.05, tokens=1, speculation="off")
    assert drawn(*rounds, decoder="autoregressive")["gauges"]["speedup"] is None


def test_a_speedup_that_reads_as_one_is_not_below_it():
    """The page said "slower" beside 1.00×."""
    assert drawn(*paced(40, plain=0.0249))["gauges"]["speedup"] == 1.0


def test_recent_shares_count_only_what_ran_in_the_window():
    first = a_round(index=0, ended=1.0)
    second = a_round(started=1.1, ended=2.0, tokens=(1, 2), batches=(Batch(0.9, 1.5, 1),), drafted=(draft(0, -1, 10),))
    now = drawn(Step(first), Step(second))["gauges"]
    assert now["now"] == pytest.approx(2.0)
    assert now["gpu_busy"] == pytest.approx(0.9)
    assert now["cpu_busy"] == pytest.approx(0.5)
    assert now["drafted_per_round"] == 0.5
    assert drawn(Step(first))["gauges"]["now"] is None


def test_the_last_seconds_are_those_of_the_answers_own_clock():
    steps = paced(200, tokens=1)
    assert Answer(steps).recent(2.0).rounds == 42  # the window, and the round that ends where it begins
    assert Answer(steps[:1]).recent().rate is None
    assert Answer().recent().rounds == 0


def test_an_unknown_draft_text_and_missing_probabilities_do_not_break_a_frame():
    r = a_round(tokens=(1,), drafted=(draft(0, -1, 10),), pending=(0,), rejected=(0,), last="correction")
    (shown,) = drawn(Step(r, "x", ("x",)))["rounds"]
    assert shown["drafted"][0][3] == "�"
    assert shown["pending"] == [[0, None]]


def test_the_tokens_of_an_answer_carry_origin_and_probability():
    answer = Answer(Simulation(PROSE).steps())
    assert "".join(t.text for t in answer.tokens) == PROSE
    assert [t.id for t in answer.tokens] == answer.token_ids
    assert {t.origin for t in answer.tokens} == {"accepted", "correction", "bonus", "plain"}
    accepted = [t for t in answer.tokens if t.origin == "accepted"]
    assert all(answer.drafts[t.draft].token == t.id for t in accepted)


def test_the_pictures_assets_hold_all_scripts_and_no_foreign_address():
    css, script = assets.joined(("picture.css",)), assets.joined(assets.PICTURE)
    assert "playRace" in script
    assert "http" not in script.replace("http://www.w3.org/2000/svg", "")
    assert "http" not in css


def test_every_script_is_loaded_and_short():
    """A room that its name tells is found at a glance: at most 500 lines, and none that nobody loads."""
    lengths = {p.name: len(p.read_text("utf-8").splitlines()) for p in assets.PAGE.glob("*.js")}
    assert lengths.keys() == {*assets.PICTURE, *assets.CHAT}
    assert {name: n for name, n in lengths.items() if n > 500} == {}


def test_a_script_uses_only_what_those_before_it_give():
    """The scripts share one namespace: a name that nobody gives would be undefined without a word."""
    given, missing = set(), []
    for name in (*assets.PICTURE, *assets.CHAT):
        script = (assets.PAGE / name).read_text("utf-8")
        used = re.findall(r"const \{([^}]*)\} = window\.duochat;", script)
        missing += [(name, word) for names in used for word in re.findall(r"\w+", names) if word not in given]
        for names in re.findall(r"Object\.assign\(window\.duochat, \{([^}]*)\}", script):
            given |= set(re.findall(r"\w+", names))
    assert missing == []
