"""The lesson's scripts in a real browser: predictions against the design's table, explanations, exercises."""

import json

import numpy as np
import pytest
from browsing import CHROMIUM
from simulated import PROSE, Simulation

from duochat.app import assets, learn
from duochat.app.frames import frame
from duochat.chat.answer import Answer, Step
from duochat.chat.chat import Options
from duochat.chat.recording import Recording
from duochat.engine.rounds import Draft, Round
from duochat.engine.sampling import gumbel

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api")

PREDICTED = "lesson => { const answer = new Answer(); answer.apply(lesson.frame); return predicted(answer, lesson); }"
EXPLAINED = "({ frame, noise }) => { const answer = new Answer(); answer.apply(frame); return explain(answer, noise); }"
ASKED = """({ frame, costs }) => { const answer = new Answer(); answer.apply(frame);
  return ownQuestions(answer, costs); }"""


@pytest.fixture(scope="module")
def run():
    """run(script, argument) -> what a function of the page's scripts gives, which it may call by their names."""
    with playwright.sync_playwright() as p, p.chromium.launch(**CHROMIUM) as browser:
        page = browser.new_page()
        page.set_content(f"<script>{assets.joined(assets.PICTURE)}</script>")
        yield lambda script, argument: page.evaluate(
            f"(argument) => {{ with (duochat) return ({script})(argument); }}", argument
        )
        browser.close()


def case(c, alpha, gamma, k=1, hits=0.8, widen=0, **more):
    return {"c": c, "alpha": alpha, "gamma": gamma, "k": k, "hits": hits, "widen": widen, **more}


@pytest.fixture
def told(run):
    """told(schedule, case): its outcome."""
    return lambda name, of: run("([name, of]) => SCHEDULES[name](of)", [name, of])


@pytest.fixture
def panel(run):
    return lambda of, own="": run("([of, own]) => whatIf(of, own)", [of, own])


# -- prediction ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("c", "alpha", "chain", "sequential", "prefetch"),
    [(1 / 4, 0.7, 1.74, 1.46, 2.31), (1 / 8, 0.7, 1.91, 1.85, 2.67), (1 / 8, 0.8, 2.55, 2.27, 3.61),
     (1 / 24, 0.7, 1.96, 2.45, 3.02), (1 / 24, 0.8, 2.77, 3.25, 4.32)],
)  # fmt: skip
def test_the_schedules_reproduce_the_table_of_the_design(panel, c, alpha, chain, sequential, prefetch):
    """Each at its best: the paper's at γ* = 1/c, prefetch up to γ*, in turns at any γ."""
    found = panel(case(c, alpha, 1 / c))
    up_to = max(found["curves"]["prefetch"][: int(1 / c)])
    best = (found["now"]["chain"], found["best"]["sequential"][1], up_to)
    assert best == pytest.approx((chain, sequential, prefetch), abs=0.005)


def test_a_draft_that_is_always_right_gains_all_that_fits(told):
    assert told("sequential", case(0.25, 1.0, 4))["rate"] == pytest.approx(5 / 2)
    assert told("chain", case(0.25, 1.0, 4))["rate"] == pytest.approx(4)


def test_a_draft_that_is_always_wrong_never_gains(told):
    wrong = case(0.25, 0.0, 4, hits=0.0)
    assert told("sequential", wrong)["rate"] == pytest.approx(0.5)
    assert told("chain", wrong)["rate"] == pytest.approx(1.0)
    assert told("prefetch", wrong)["rate"] < 1


def test_in_turns_one_token_loses_exactly_when_alpha_is_below_c(told):
    assert told("sequential", case(0.3, 0.29, 1))["rate"] < 1 < told("sequential", case(0.3, 0.31, 1))["rate"]


def test_more_sequences_help_where_the_budget_is_large_and_the_draft_unsure(told):
    large = {k: told("chain", case(1 / 24, 0.5, 24, k=k))["rate"] for k in (1, 2, 4)}
    small = {k: told("chain", case(1 / 4, 0.8, 4, k=k))["rate"] for k in (1, 4)}
    assert large[1] < large[2] < large[4]
    assert small[4] < small[1]


@pytest.mark.parametrize("name", ["sequential", "chain", "prefetch"])
def test_wider_forwards_that_cost_more_lower_every_schedule(told, name):
    assert told(name, case(0.1, 0.7, 8, widen=0.1))["rate"] < told(name, case(0.1, 0.7, 8))["rate"]


def test_a_measured_rest_takes_the_place_of_what_the_schedule_would_wait(told, panel):
    """Nothing waits after a miss: then it has nothing to test and brings one token."""
    free = case(0.1, 0.5, 5, hits=0.6)
    rested, waits = told("prefetch", {**free, "rest": 0}), told("prefetch", free)
    assert (rested["tokens"], rested["rest"]) == (pytest.approx(0.6 * waits["tokens"] + 0.4), 0)
    assert told("prefetch", {**free, "rest": waits["rest"]}) == pytest.approx(waits)
    assert told("sequential", {**free, "rest": 1})["rate"] == pytest.approx((1 - 0.5**6) / 0.5 / 2)
    now = panel({**free, "rest": 0}, "prefetch")["now"]
    assert now["prefetch"] == rested["rate"]
    assert now["sequential"] == told("sequential", free)["rate"]


def test_the_panel_gets_curves_and_the_best_budget(panel):
    found = panel(case(0.125, 0.7, 8))
    best, rate = found["best"]["sequential"]
    assert rate == max(found["curves"]["sequential"])
    assert found["gammas"][best - 1] == best
    assert found["budget"] == 8


def test_sliders_out_of_range_are_held(panel):
    held = {"c": 0.005, "alpha": 0.99, "gamma": 1, "k": 8, "hits": 0.8, "widen": 0}
    assert panel({"c": 0, "alpha": 5, "gamma": -3, "k": 99})["case"] == held


@pytest.mark.parametrize("name", [name for name in learn.RECORDED if name != "h200-autoregressive"])
def test_a_prediction_of_a_recording_is_near_or_its_gap_is_explained(run, name):
    """Its own hits and waits were not asked: 2.62 times was predicted where 0.98 was measured, without a reason."""
    made = learn.lesson(learn.recorded(name), name)
    told, point = run(PREDICTED, made), made["measured"]
    assert told["case"]["hits"] == pytest.approx(point["hits"] or 0)
    assert told["case"]["rest"] > 0
    assert (abs(point["speedup"] / told["rate"] - 1) > 0.15) == bool(told["gap"])


def test_predictions_of_the_recorded_answers(run):
    told = {name: run(PREDICTED, learn.lesson(learn.recorded(name))) for name in ("h200-duotree", "formula")}
    assert told["h200-duotree"]["rate"] == pytest.approx(1.90, rel=0.1)
    assert "took 314 ms and not" in told["formula"]["gap"]
    assert "share one processor" in told["formula"]["gap"]
    assert run(PREDICTED, learn.lesson(learn.recorded("h200-autoregressive"))) is None


# -- rounds ----------------------------------------------------------------------------------------------------------


DRAFTED = (Draft(0, -1, 10, 7, 0.8, 0.8, 1), Draft(1, 0, 11, 8, 0.6, 0.5, 1), Draft(2, 0, 11, 9, 0.3, 0.2, 2),
           Draft(3, -1, 10, 6, 0.1, 0.1, 2))  # fmt: skip


@pytest.fixture
def explained(run):
    def explain(temperature=0.0, **fields):
        base = {"index": 1, "position": 10, "started": 1.0, "ended": 1.1, "tokens": (7, 5), "last": "correction",
                "drafted": DRAFTED, "pending": (0, 1, 2), "pending_probs": (0.9, 0.2, 0.1), "accepted": (0,),
                "rejected": (1, 2), "ignored": (3,), "token_probs": (0.9, 0.6)}  # fmt: skip
        texts = {0: "yes", 1: "no", 2: "maybe", 3: "other"}
        step = Step(round=Round(**{**base, **fields}), pieces=("yes", "right"), draft_texts=texts)
        options = Options(temperature=temperature, seed=5)
        noise = json.loads(json.dumps(learn.noise(Recording("p", options, (step,)))))
        return run(EXPLAINED, {"frame": frame(Answer([step]), options), "noise": noise})[0]

    return explain


def test_each_place_says_what_the_target_chose_and_what_the_draft_had(explained):
    first, second = explained()["places"]
    assert (first["kind"], second["kind"]) == ("accepted", "correction")
    assert "first choice" in first["why"]
    assert "‘right’" in second["why"]
    assert "‘no’ or ‘maybe’" in second["why"]


def test_paired_bars_hold_the_candidates_of_the_place_and_the_targets_token(explained):
    first, second = explained()["places"]
    assert [(b["text"], b["draft"], b["target"], b["chosen"]) for b in first["bars"]] == [
        ("yes", 0.8, 0.9, True), ("other", 0.1, None, False)]  # fmt: skip
    assert [(b["text"], b["draft"], b["target"], b["chosen"]) for b in second["bars"]] == [
        ("no", 0.6, 0.2, False), ("maybe", 0.3, 0.1, False), ("right", None, 0.6, True)]  # fmt: skip
    assert all(b["noise"] is None for b in first["bars"])


def test_tokens_of_a_branch_that_the_target_did_not_take_are_no_candidates(explained):
    other = Draft(4, 3, 11, 4, 0.4, 0.05, 1)
    place = explained(drafted=(*DRAFTED, other), ignored=(3, 4))["places"][1]
    assert [b["text"] for b in place["bars"]] == ["no", "maybe", "right"]


def test_drafts_below_a_dead_token_are_no_candidates_of_the_first_place(explained):
    """A batch in flight while the tree is re-rooted brings children of tokens that are gone."""
    late = Draft(4, 99, 10, 4, 0.9, 0.9, 1)
    place = explained(drafted=(*DRAFTED, late), ignored=(3, 4))["places"][0]
    assert [b["text"] for b in place["bars"]] == ["yes", "other"]


def test_at_a_temperature_the_bars_carry_the_noise_that_both_lanes_share(explained):
    bars = explained(temperature=0.8)["places"][1]["bars"]
    expected = {t: round(float(gumbel(5, 11, np.array([i]))[0]), 2) for t, i in (("no", 8), ("maybe", 9), ("right", 5))}
    assert {b["text"]: b["noise"] for b in bars} == expected


def test_a_prefetched_outcome_is_explained_as_such(explained):
    place = explained(tokens=(7, 8), last="accepted", accepted=(0, 1), pending=(0,), rejected=())["places"][1]
    assert "prepared this very outcome" in place["why"]


def test_a_round_without_drafts_says_why(explained):
    told = explained(tokens=(5,), accepted=(), rejected=(), pending=(), pending_probs=(), last="plain",
                     speculation="warming", reason="the draft reads the prompt")  # fmt: skip
    assert "the draft reads the prompt" in told["summary"]


def test_the_places_of_all_rounds_are_the_answer(run):
    answer = Answer(s for s in Simulation(PROSE).steps() if s.round)
    rounds = run(EXPLAINED, {"frame": frame(answer, Options()), "noise": None})
    assert "".join(p["text"] for r in rounds for p in r["places"]) == answer.text == PROSE


def test_exercises_have_answers_that_follow_from_the_record(run):
    answer = Answer(s for s in Simulation(PROSE).steps() if s.round)
    costs = {"target": 0.05, "draft": 0.01, "budget": 5.0}
    counted, budget = run(ASKED, {"frame": frame(answer, Options()), "costs": costs})
    shown = answer.rounds[int(counted["ask"].split("round ")[1].split(",")[0]) - 1]
    assert counted["right"] == len(shown.tokens) == len(shown.accepted) + 1
    assert (budget["right"], "takes 50 ms here, one drafted token 10 ms" in budget["ask"]) == (5, True)
