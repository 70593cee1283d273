"""Frames for the picture: what a step shows, numbering, snapshots, texts, gauges."""

import json
from dataclasses import replace

import pytest
from simulated import PROSE, Simulation, Step

from duochat.app.frames import Live, decode_rate, displaced, draw_round, page_assets, recent
from duochat.engine.rounds import Batch, Draft, Round, total


def draft(id, parent, position, prob=0.5, rank=1, **more):
    return Draft(id, parent, position, 100 + id, prob, prob, rank, **more)


def a_round(**fields):
    base = {"index": 1, "position": 10, "started": 1.0, "ended": 1.05, "tokens": (5,), "last": "plain"}
    return Round(**{**base, **fields})


def text_of(frames):
    """What picture.js writes: the texts of the tokens and the tails."""
    rounds = [r for f in frames for r in f["rounds"]]
    tails = "".join(f.get("tail", "") for f in frames)
    return "".join(t[0] for r in rounds for t in r["tokens"]) + "".join(r.get("tail", "") for r in rounds) + tails


def fed(steps):
    live = Live("duotree", plain_rate=20.0)
    return live, [live.feed(s) for s in steps]


def test_frames_are_numbered_without_gaps_and_make_up_the_chat_text():
    steps = list(Simulation(PROSE).steps())
    live, frames = fed(steps)
    assert [(f["from"], f["n"]) for f in frames] == [(i, i + 1) for i in range(len(steps))]
    assert text_of(frames) == "".join(s.text for s in steps) == PROSE
    assert text_of([live.snapshot()]) == PROSE
    assert (live.snapshot()["from"], live.snapshot()["n"]) == (0, len(steps))


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
    frame = Live().feed(Step(r, "ab", ("a", "b"), {i: f"d{i}" for i in range(4)}))
    (drawn,) = frame["rounds"]
    assert drawn["tokens"] == [["a", "accepted", 0.9, 0], ["b", "correction", 0.7, 1]]
    assert drawn["drafted"][1][:4] == [1, 0, 11, "d1"]
    assert drawn["pending"] == [[0, 0.9], [1, 0.1], [2, 0.05]]
    assert (drawn["rejected"], drawn["ignored"]) == ([1, 2], [3])


def test_an_outcome_that_waited_in_the_tree_is_accepted_to_the_last_token():
    r = a_round(tokens=(100, 101), last="accepted", drafted=(draft(0, -1, 10), draft(1, 0, 11)), pending=(0,),
                accepted=(0, 1), hit=True)  # fmt: skip
    drawn = draw_round(r, ["a", "b"], {}, {d.id: d for d in r.drafted})
    assert [t[1] for t in drawn["tokens"]] == ["accepted", "accepted"]


def test_displaced_is_the_likeliest_rejected_token_at_the_place():
    drafts = {d.id: d for d in (draft(0, -1, 10, 0.2), draft(1, -1, 10, 0.7), draft(2, 1, 11, 0.99))}
    assert displaced(a_round(rejected=(0, 1, 2)), 10, drafts) == 1
    assert displaced(a_round(rejected=()), 10, drafts) == -1


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
    frame = Live().feed(Step(a_round(tokens=(1, 2, 3)), text, pieces))
    assert [t[0] for t in frame["rounds"][0]["tokens"]] == shown


def test_text_without_a_round_goes_to_the_tail_of_the_last_token():
    live, frames = fed([Step(a_round(), "a", ("a",)), Step(text="b"), Step(text="c", finish="stop")])
    assert text_of(frames) == "abc"
    assert live.snapshot()["rounds"][0]["tail"] == "bc"


def test_state_is_sent_when_it_changes_only():
    paused = a_round(speculation="paused", reason="the measured gain is 0.9")
    steps = [Step(phase="prefill", progress=(1, 9)), Step(phase="prefill", progress=(9, 9)),
             Step(paused, "a", ("a",), phase="decode")]  # fmt: skip
    live, frames = fed(steps)
    assert frames[0]["state"] == {"phase": "prefill", "progress": (1, 9), "decoder": "duotree"}
    assert frames[1]["state"] == {"progress": (9, 9)}
    assert frames[2]["state"] == {"phase": "decode", "speculation": "paused", "reason": "the measured gain is 0.9"}
    assert live.snapshot()["state"]["progress"] == (9, 9)


def test_what_is_being_loaded_is_no_notice_of_the_answer():
    """It stood beside a finished answer."""
    live, _ = fed(
        [Step(phase="loading", notice="fetching"), Step(a_round(), "a", ("a",), notice="The context is full.")]
    )
    assert (live.snapshot()["state"]["doing"], live.snapshot()["state"]["notice"]) == (
        "fetching",
        "The context is full.",
    )


def test_gauges_are_the_figures_of_the_rounds():
    steps = list(Simulation(PROSE).steps())
    live, frames = fed(steps)
    stats = total(s.round for s in steps if s.round)
    g = frames[-1]["gauges"]
    assert g["tokens"] == stats.completion_tokens
    assert g["tau"] == pytest.approx(stats.mean_accepted_length, abs=1e-4)
    assert g["alpha"] == pytest.approx(stats.acceptance_rate, abs=1e-4)
    assert g["speedup"] == pytest.approx(decode_rate(stats) / 20.0, abs=1e-4)
    assert live.feed(steps[-1], {"cpu": 0.4})["gauges"]["cpu_load"] == 0.4


def test_no_speedup_without_a_measured_baseline():
    live = Live()
    for step in Simulation(PROSE).steps():
        frame = live.feed(step)
    assert frame["gauges"]["speedup"] is None
    assert frame["gauges"]["rate"] > 0


def test_recent_shares_count_only_what_ran_in_the_window():
    first = a_round(index=0, ended=1.0)
    second = a_round(started=1.1, ended=2.0, tokens=(1, 2), batches=(Batch(0.9, 1.5, 1),), drafted=(draft(0, -1, 10),))
    now = recent([first, second])
    assert now["now"] == pytest.approx(2.0)
    assert now["gpu_busy"] == pytest.approx(0.9)
    assert now["cpu_busy"] == pytest.approx(0.5)
    assert now["drafted_per_round"] == 1
    assert recent([first])["now"] is None


def test_drafts_are_forgotten_with_their_fate():
    """A long answer must not grow the server's memory by every drafted token."""
    live, _ = fed(list(Simulation(PROSE).steps()))
    assert not live._drafts


def test_an_unknown_draft_text_and_missing_probabilities_do_not_break_a_frame():
    r = a_round(tokens=(1,), drafted=(draft(0, -1, 10),), pending=(0,), rejected=(0,), last="correction")
    drawn = Live().feed(Step(replace(r), "x", ("x",)))["rounds"][0]
    assert drawn["drafted"][0][3] == "�"
    assert drawn["pending"] == [[0, None]]


def test_page_assets_hold_all_scripts_and_no_foreign_address():
    css, script = page_assets()
    assert "duochatPicture" in script
    assert "playRace" in script
    assert "http" not in script.replace("http://www.w3.org/2000/svg", "")
    assert "http" not in css
