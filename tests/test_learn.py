"""Learn and Hardware: predictions against the design's table, explanations, exercises, calibration figures."""

import json
from dataclasses import replace

import pytest
from simulated import PROSE, SimulatedEngine, Simulation

from duochat import DuoChatError
from duochat.app import hardware, learn, prediction
from duochat.app.prediction import Case, best, case_from, what_if
from duochat.app.store import Store
from duochat.chat.answer import Step
from duochat.chat.chat import Options
from duochat.chat.recording import Recording
from duochat.engine.rounds import Draft, Round
from duochat.engine.sampling import gumbel

COSTS = {"target": {"1": 0.05, "8": 0.0535, "16": 0.06}, "draft": {"1": 0.01, "2": 0.013},
         "sweep": {"1": 0.012, "2": 0.01, "4": 0.02}, "threads": 2}  # fmt: skip


def recording(costs=COSTS, **settings):
    steps = tuple(s for s in Simulation(PROSE, **settings).steps() if s.round)
    return Recording("a prompt", Options(seed=5), steps, costs=costs)


# -- prediction ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("c", "alpha", "chain", "sequential", "prefetch"),
    [(1 / 4, 0.7, 1.74, 1.46, 2.31), (1 / 8, 0.7, 1.91, 1.85, 2.67), (1 / 8, 0.8, 2.55, 2.27, 3.61),
     (1 / 24, 0.7, 1.96, 2.45, 3.02), (1 / 24, 0.8, 2.77, 3.25, 4.32)],
)  # fmt: skip
def test_the_schedules_reproduce_the_table_of_the_design(c, alpha, chain, sequential, prefetch):
    """Each at its best: the paper's at γ* = 1/c, prefetch up to γ*, in turns at any γ."""
    case = Case(c, alpha, gamma=1 / c)
    found = (prediction.chain(case).rate, best("sequential", case, 64)[1], best("prefetch", case, int(1 / c))[1])
    assert found == pytest.approx((chain, sequential, prefetch), abs=0.005)


def test_a_draft_that_is_always_right_gains_all_that_fits():
    case = Case(c=0.25, alpha=1.0, gamma=4)
    assert prediction.sequential(case).rate == pytest.approx(5 / 2)
    assert prediction.chain(case).rate == pytest.approx(4)


def test_a_draft_that_is_always_wrong_never_gains():
    case = Case(c=0.25, alpha=0.0, gamma=4, hits=0.0)
    assert prediction.sequential(case).rate == pytest.approx(0.5)
    assert prediction.chain(case).rate == pytest.approx(1.0)
    assert prediction.prefetch(case).rate < 1


def test_in_turns_one_token_loses_exactly_when_alpha_is_below_c():
    assert (
        prediction.sequential(Case(c=0.3, alpha=0.29, gamma=1)).rate
        < 1
        < prediction.sequential(Case(0.3, 0.31, 1)).rate
    )


def test_more_sequences_help_where_the_budget_is_large_and_the_draft_unsure():
    large = {k: prediction.chain(Case(1 / 24, 0.5, 24, k=k)).rate for k in (1, 2, 4)}
    small = {k: prediction.chain(Case(1 / 4, 0.8, 4, k=k)).rate for k in (1, 4)}
    assert large[1] < large[2] < large[4]
    assert small[4] < small[1]


def test_wider_forwards_that_cost_more_lower_every_schedule():
    for schedule in prediction.SCHEDULES.values():
        assert schedule(Case(0.1, 0.7, 8, widen=0.1)).rate < schedule(Case(0.1, 0.7, 8)).rate


def test_a_measured_rest_takes_the_place_of_what_the_schedule_would_wait():
    """Nothing waits after a miss: then it has nothing to test and brings one token."""
    case = Case(c=0.1, alpha=0.5, gamma=5, hits=0.6)
    told, waits = prediction.prefetch(replace(case, rest=0.0)), prediction.prefetch(case)
    assert (told.tokens, told.rest) == (pytest.approx(0.6 * waits.tokens + 0.4), 0)
    assert prediction.prefetch(replace(case, rest=waits.rest)) == pytest.approx(waits)
    assert prediction.sequential(replace(case, rest=1.0)).rate == pytest.approx(prediction.emitted(0.5, 5) / 2)
    now = what_if(replace(case, rest=0.0), "prefetch")["now"]
    assert now["prefetch"] == told.rate
    assert now["sequential"] == prediction.sequential(case).rate


def test_the_panel_gets_curves_and_the_best_budget():
    panel = what_if(Case(0.125, 0.7, 8))
    best, rate = panel["best"]["sequential"]
    assert rate == max(panel["curves"]["sequential"])
    assert panel["gammas"][best - 1] == best
    assert panel["budget"] == 8
    json.dumps(panel)


def test_sliders_out_of_range_are_held():
    assert case_from({"c": 0, "alpha": 5, "gamma": -3, "k": 99}) == Case(0.005, 0.99, 1, 8)


# -- lesson ----------------------------------------------------------------------------------------------------------


DRAFTED = (Draft(0, -1, 10, 7, 0.8, 0.8, 1), Draft(1, 0, 11, 8, 0.6, 0.5, 1), Draft(2, 0, 11, 9, 0.3, 0.2, 2),
           Draft(3, -1, 10, 6, 0.1, 0.1, 2))  # fmt: skip


def explained(**fields):
    base = {"index": 1, "position": 10, "started": 1.0, "ended": 1.1, "tokens": (7, 5), "last": "correction",
            "drafted": DRAFTED, "pending": (0, 1, 2), "pending_probs": (0.9, 0.2, 0.1), "accepted": (0,),
            "rejected": (1, 2), "ignored": (3,), "token_probs": (0.9, 0.6)}  # fmt: skip
    options = Options(temperature=fields.pop("temperature", 0.0), seed=5)
    texts = {0: "yes", 1: "no", 2: "maybe", 3: "other"}
    step = Step(round=Round(**{**base, **fields}), pieces=("yes", "right"), draft_texts=texts)
    return learn.explain_all(Recording("p", options, (step,)))[0]


def test_each_place_says_what_the_target_chose_and_what_the_draft_had():
    first, second = explained()["places"]
    assert (first["kind"], second["kind"]) == ("accepted", "correction")
    assert "first choice" in first["why"]
    assert "‘right’" in second["why"]
    assert "‘no’ or ‘maybe’" in second["why"]


def test_paired_bars_hold_the_candidates_of_the_place_and_the_targets_token():
    first, second = explained()["places"]
    assert [(b["text"], b["draft"], b["target"], b["chosen"]) for b in first["bars"]] == [
        ("yes", 0.8, 0.9, True), ("other", 0.1, None, False)]  # fmt: skip
    assert [(b["text"], b["draft"], b["target"], b["chosen"]) for b in second["bars"]] == [
        ("no", 0.6, 0.2, False), ("maybe", 0.3, 0.1, False), ("right", None, 0.6, True)]  # fmt: skip
    assert all(b["noise"] is None for b in first["bars"])


def test_tokens_of_a_branch_that_the_target_did_not_take_are_no_candidates():
    other = Draft(4, 3, 11, 4, 0.4, 0.05, 1)
    place = explained(drafted=(*DRAFTED, other), ignored=(3, 4))["places"][1]
    assert [b["text"] for b in place["bars"]] == ["no", "maybe", "right"]


def test_drafts_below_a_dead_token_are_no_candidates_of_the_first_place():
    """A batch in flight while the tree is re-rooted brings children of tokens that are gone."""
    late = Draft(4, 99, 10, 4, 0.9, 0.9, 1)
    assert [b["text"] for b in explained(drafted=(*DRAFTED, late), ignored=(3, 4))["places"][0]["bars"]] == [
        "yes",
        "other",
    ]


def test_at_a_temperature_the_bars_carry_the_noise_that_both_lanes_share():
    import numpy as np

    bars = explained(temperature=0.8)["places"][1]["bars"]
    expected = {t: round(float(gumbel(5, 11, np.array([i]))[0]), 2) for t, i in (("no", 8), ("maybe", 9), ("right", 5))}
    assert {b["text"]: b["noise"] for b in bars} == expected


def test_a_prefetched_outcome_is_explained_as_such():
    place = explained(tokens=(7, 8), last="accepted", accepted=(0, 1), pending=(0,), rejected=())["places"][1]
    assert "prepared this very outcome" in place["why"]


def test_a_round_without_drafts_says_why():
    told = explained(tokens=(5,), accepted=(), rejected=(), pending=(), pending_probs=(), last="plain",
                     speculation="warming", reason="the draft reads the prompt")  # fmt: skip
    assert "the draft reads the prompt" in told["summary"]


def test_the_places_of_all_rounds_are_the_answer():
    made = recording()
    assert "".join(p["text"] for r in learn.lesson(made)["rounds"] for p in r["places"]) == made.answer.text == PROSE


def test_costs_come_from_the_calibration_or_else_from_the_answer_itself():
    known = learn.measured_costs(recording())
    assert (known["target"], known["draft"], known["budget"]) == (0.05, 0.01, pytest.approx(5))
    assert known["widen"] == pytest.approx(0.01)
    seen = learn.measured_costs(recording(costs={}, target_s=0.1, draft_s=0.02))
    assert seen["target"] == pytest.approx(0.1, rel=0.1)
    assert "own times" in seen["source"]


@pytest.mark.parametrize("name", [name for name in learn.RECORDED if name != "h200-autoregressive"])
def test_a_prediction_of_a_recording_is_near_or_its_gap_is_explained(name):
    """Its own hits and waits were not asked: 2.62 times was predicted where 0.98 was measured, without a reason."""
    made = learn.lesson(learn.recorded(name), name)
    told, point = made["predicted"], made["measured"]
    assert told["case"]["hits"] == pytest.approx(point["hits"])
    assert told["case"]["rest"] > 0
    assert (abs(point["speedup"] / told["rate"] - 1) > 0.15) == bool(told["gap"])


def test_predictions_of_the_recorded_answers():
    told = {name: learn.lesson(learn.recorded(name))["predicted"] for name in ("h200-duotree", "formula")}
    assert told["h200-duotree"]["rate"] == pytest.approx(1.90, rel=0.1)
    assert "took 314 ms and not" in told["formula"]["gap"]
    assert "share one processor" in told["formula"]["gap"]
    assert learn.lesson(learn.recorded("h200-autoregressive"))["predicted"] is None


def test_the_first_chapter_speaks_of_the_recordings_machine():
    """It said "CPU and GPU" and "costs little more" also where both shared a processor and eight cost a third more."""
    on_card, on_cores = (
        " ".join(learn.lesson(learn.recorded(n))["chapters"][0]["text"]) for n in ("h200-duotree", "formula")
    )
    assert "large target model on the GPU" in on_card
    assert "took 1.02 times as long" in on_card
    assert "there is no GPU here" in on_cores
    assert "took 1.14 times as long" in on_cores
    own = recording(costs={})
    assert "eight tokens took" not in learn.lesson(own)["chapters"][0]["text"][0]


def test_a_faster_gpu_makes_the_budget_smaller():
    budgets = [row["budget"] for row in learn.arithmetic(learn.measured_costs(recording()))]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[1] == pytest.approx(budgets[0] / 2)


def test_exercises_have_answers_that_follow_from_the_record():
    made = recording()
    asked = learn.questions(made, learn.measured_costs(made))
    counted = next(q for q in asked if "corrected" in q["ask"])
    shown = made.answer.rounds[int(counted["ask"].split("round ")[1].split(",")[0]) - 1]
    assert counted["right"] == len(shown.tokens) == len(shown.accepted) + 1
    assert next(q for q in asked if "budget γ*?" in q["ask"] and q["kind"] == "number")["right"] == 5
    for q in asked:
        assert q["because"]
        assert q["kind"] == "number" or 0 <= q["right"] < len(q["options"])


def test_figures_of_a_stand_in_say_what_it_stands_for():
    recording = Recording.read((learn.TRACES / "h200-duotree.jsonl").read_text("utf-8").splitlines())
    assert "the size and the cost of llama-2-7b" in learn.lesson(recording)["device"]
    assert "on NVIDIA H200" in learn.lesson(recording)["device"]


def test_the_lesson_is_json_and_has_a_word_for_everything():
    made = learn.lesson(recording(), "formula")
    json.dumps(made)
    assert [c["id"] for c in made["chapters"]] == [
        "idea", "rounds", "exact", "budget", "pays", "hurts", "branches", "exercises", "words"]  # fmt: skip
    assert {kind for kind, *_ in made["colours"]} >= {"accepted", "correction", "bonus", "plain", "ghost", "chip"}


@pytest.mark.parametrize("name", learn.RECORDED)
def test_every_shipped_trace_makes_a_lesson(name):
    made = learn.Lessons(SimulatedEngine()).lesson({"name": name})
    drafted = made["decoder"] != "autoregressive"
    assert (made["frame"]["gauges"]["accepted"] > 0) == drafted
    assert any(r["tested"] > 1 for r in made["rounds"]) == drafted


def test_there_is_a_shipped_trace_and_no_way_to_another_file():
    lessons = learn.Lessons(SimulatedEngine())
    assert {name for name, _ in lessons.recorded({})["recorded"]} == {p.stem for p in learn.TRACES.glob("*.jsonl")}
    with pytest.raises(DuoChatError):
        lessons.lesson({"name": "../../README"})


def test_an_own_prompt_becomes_a_lesson_with_this_machines_costs():
    engine = SimulatedEngine(PROSE[:200])
    engine.hardware = {"costs": COSTS}
    lessons = learn.Lessons(engine)
    ticket = lessons.own({"prompt": "x"})["ticket"]
    lessons._jobs._jobs[ticket].done.wait(20)
    assert lessons.progress({"ticket": ticket})["result"]["costs"]["budget"] == pytest.approx(5)


def test_the_last_answer_of_a_chat_is_a_lesson(tmp_path):
    """Whoever asks something of their own learns most from it."""
    store = Store(tmp_path / "c.db")
    chat = store.create()
    asked = store.add(chat.id, None, "user", "What is a draft?")
    steps = [replace(s, round=replace(s.round, plain=0.05)) for s in recording().answer.steps]
    said = store.add(chat.id, asked.id, "assistant", PROSE, {"options": {"decoder": "duotree", "temperature": 0.5}})
    lessons = learn.Lessons(SimulatedEngine(), store)
    assert lessons.recorded({"conversation": chat.id})["said"] == ""
    store.update(said.id, PROSE, steps=steps)
    assert lessons.recorded({"conversation": chat.id})["said"] == "What is a draft?"
    made = lessons.lesson({"name": "chat", "conversation": chat.id})
    assert "".join(p["text"] for r in made["rounds"] for p in r["places"]) == PROSE
    assert (made["name"], made["options"]["temperature"]) == ("chat", 0.5)
    assert made["costs"]["plain"] == pytest.approx(0.05)
    for other in ("", "nowhere"):
        with pytest.raises(DuoChatError):
            lessons.lesson({"name": "chat", "conversation": other})


# -- hardware --------------------------------------------------------------------------------------------------------


def test_the_curves_and_the_devices_are_told_in_words():
    known = hardware.Hardware(SimulatedEngine(PROSE)).look({})
    assert known["curves"] == {"target": [], "draft": [], "sweep": []}
    assert hardware.table(COSTS)["target"] == [(1, 0.05), (8, 0.0535), (16, 0.06)]
    told = hardware.facts({"target_device": "CPU", "target_weight_bytes": 651306240, "target_graphs": False})
    assert told == {
        "The target runs on": "CPU",
        hardware.WEIGHTS: "0.61 GiB; cache and working space come on top",
    }
