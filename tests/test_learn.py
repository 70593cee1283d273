"""Learn: what a lesson is made of; in test_lesson.py what the page makes of it."""

import json
from dataclasses import replace

import orjson
import pytest
from simulated import PROSE, SimulatedEngine, Simulation

from duochat import DuoChatError
from duochat.app import learn
from duochat.app.store import Store
from duochat.chat.chat import Options
from duochat.chat.recording import Recording

COSTS = {"target": {"1": 0.05, "8": 0.0535, "16": 0.06}, "draft": {"1": 0.01, "2": 0.013},
         "sweep": {"1": 0.012, "2": 0.01, "4": 0.02}, "threads": 2}  # fmt: skip


def recording(costs=COSTS, **settings):
    steps = tuple(s for s in Simulation(PROSE, **settings).steps() if s.round)
    return Recording("a prompt", Options(seed=5), steps, costs=costs)


# -- lesson ----------------------------------------------------------------------------------------------------------


def test_costs_come_from_the_calibration_or_else_from_the_answer_itself():
    known = learn.measured_costs(recording())
    assert (known["target"], known["draft"], known["budget"]) == (0.05, 0.01, pytest.approx(5))
    assert known["widen"] == pytest.approx(0.01)
    seen = learn.measured_costs(recording(costs={}, target_s=0.1, draft_s=0.02))
    assert seen["target"] == pytest.approx(0.1, rel=0.1)
    assert "own times" in seen["source"]


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


def test_questions_of_every_lesson_have_answers():
    for q in learn.words("lesson")["questions"]:
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
    assert orjson.loads(orjson.dumps(made)) == json.loads(json.dumps(made)), "Gradio sends it so: no keys but texts"
    drafted = made["decoder"] != "autoregressive"
    assert (made["frame"]["gauges"]["accepted"] > 0) == drafted
    assert any(len(r.get("accepted", [])) > 1 for r in made["frame"]["rounds"]) == drafted


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
    assert "".join(text for r in made["frame"]["rounds"] for text, *_ in r["tokens"]) == PROSE
    assert len(made["noise"]["written"]) == len(recording().answer.token_ids)
    assert (made["name"], made["options"]["temperature"]) == ("chat", 0.5)
    assert made["costs"]["plain"] == pytest.approx(0.05)
    for other in ("", "nowhere"):
        with pytest.raises(DuoChatError):
            lessons.lesson({"name": "chat", "conversation": other})
