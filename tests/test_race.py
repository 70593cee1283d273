"""Races: order, record, files, jobs."""

import json
import threading

import pytest
from fake_engine import Ready
from simulated import PROSE, SimulatedEngine, Simulation

from duochat import DuoChatError
from duochat.app import race
from duochat.app.frames import frame
from duochat.app.jobs import Job, Jobs
from duochat.chat.answer import Step
from duochat.chat.chat import Options
from duochat.chat.recording import Recording, checked_prompt, record


def recording(decoder="duotree", text=PROSE, **settings):
    steps = tuple(s for s in Simulation(text, **settings).steps(decoder) if s.round)
    return Recording("a prompt", Options(decoder=decoder), steps)


class Watched(SimulatedEngine):
    """Notes who was asked what, and that no two answers overlap."""

    def reply(self, messages, options, cancelled=lambda: False):
        self.__dict__.setdefault("asked", []).append((messages[-1]["content"], options.decoder, options.max_tokens))
        assert not self.__dict__.get("running")
        self.running = True
        yield from super().reply(messages, options, cancelled)
        self.running = False


def finished(jobs, ticket):
    jobs._jobs[ticket].done.wait(20)
    return jobs.look(ticket)


@pytest.fixture(autouse=True)
def load(monkeypatch):
    """What other work takes of the processor, as each look at it finds it."""
    looks = []
    monkeypatch.setattr(race, "others", lambda: looks.pop(0) if looks else 0.0)
    return looks


def test_a_record_says_how_busy_the_machine_was_beside_the_race(load):
    """It stood there as run "on the idle machine" whatever else was going on."""
    load[:] = 0.1, 0.9, 0.2
    made = race.run(SimulatedEngine(PROSE[:60]), "x", ("duotree", "autoregressive"), Options(max_tokens=8), Job())
    assert made["busy"] == 0.9


def test_the_runs_follow_one_another_each_after_a_warm_up_on_another_prompt():
    """Both on one GPU at once would distort each other; a cached prompt would favour the second run."""
    engine = Watched(PROSE[:200])
    race.run(engine, "the prompt", ("duotree", "autoregressive"), Options(max_tokens=64), Job())
    assert [a[0] for a in engine.asked] == [race.WARM_UP, "the prompt"] * 2
    assert [a[1] for a in engine.asked] == ["duotree"] * 2 + ["autoregressive"] * 2
    assert engine.asked[1][2] == engine.asked[3][2] == 64


def test_the_record_is_json_and_the_file_needs_nothing_else():
    made = race.record_of(recording(text="a </script><b> c " * 9), recording("autoregressive", "a </script><b> c " * 9))
    html = race.to_html(made)
    inside = html.split('id="record">')[1].split("</script>")[0]
    assert json.loads(inside)["runs"][0]["text"] == "a </script><b> c " * 9
    assert "default-src 'none'" in html
    assert "src=" not in html
    assert "@import" not in html


def test_recorded_lines_read_back_as_the_same_recording():
    made = recording()
    again = Recording.read(made.lines())
    assert again == made
    assert frame(again.answer, again.options) == frame(made.answer, made.options)


@pytest.mark.parametrize("lines", [[], ["{}"], ["no json"], ['{"format": "duochat-trace"}'], ["[1]"]])
def test_a_file_that_is_no_trace_is_refused_with_a_sentence(lines):
    with pytest.raises(DuoChatError, match="not a recorded answer"):
        Recording.read(lines)


def test_a_failing_engine_ends_the_race_with_its_sentence():
    class Broken(Ready):
        def reply(self, *_):
            yield Step(error="The draft's file ends too early: fetch it again.", finish="error")

    races = race.Races(Broken())
    ticket = races.start({"prompt": "x"})["ticket"]
    assert finished(races._jobs, ticket)["error"] == "The draft's file ends too early: fetch it again."


def test_stop_ends_a_race_between_two_tokens():
    go = threading.Event()

    class Slow(SimulatedEngine):
        def reply(self, messages, options, cancelled=lambda: False):
            for step in super().reply(messages, options):
                go.wait(5)
                if cancelled():
                    return
                yield step

    races = race.Races(Slow())
    ticket = races.start({"prompt": "x"})["ticket"]
    races.halt({"ticket": ticket})
    go.set()
    assert finished(races._jobs, ticket)["error"] == "Stopped."


def test_a_whole_race_through_what_the_page_calls():
    races = race.Races(SimulatedEngine(PROSE[:300]))
    wish = {"prompt": " x ", "left": "duotree", "right": "speculative", "temperature": "0.7", "seed": "3"}
    answer = races.start(wish)
    result = finished(races._jobs, answer["ticket"])["result"]
    assert [r["decoder"] for r in result["runs"]] == ["duotree", "speculative"]
    assert result["options"]["temperature"] == 0.7
    assert "<html" in races.saved(answer)["html"]
    assert "<html" in races.saved({"record": result})["html"]


@pytest.mark.parametrize(("asked", "given"), [("96", 96), (10**9, race.MOST_TOKENS), (-3, 1), (None, 128)])
def test_the_length_of_a_race_is_held(asked, given):
    races = race.Races(SimulatedEngine(PROSE[:60]))
    ticket = races.start({"prompt": "x", "max_tokens": asked})["ticket"]
    assert finished(races._jobs, ticket)["result"]["options"]["max_tokens"] == given


@pytest.mark.parametrize(
    ("action", "words"),
    [({"prompt": " "}, "empty"), ({"prompt": "x", "left": "magic"}, "magic"), ({"prompt": "x" * 9000}, "longer"),
     ({"prompt": "x", "temperature": -1}, "temperature")],
)  # fmt: skip
def test_what_cannot_be_raced_is_refused_before_it_starts(action, words):
    with pytest.raises(DuoChatError, match=words):
        race.Races(SimulatedEngine()).start(action)


def test_an_unknown_ticket_and_a_foreign_record_are_refused():
    races = race.Races(SimulatedEngine())
    with pytest.raises(DuoChatError, match="no longer knows"):
        races.follow({"ticket": "7"})
    with pytest.raises(DuoChatError, match="not finished"):
        races.saved({"record": {"format": "other"}})


def test_an_answer_without_tokens_is_no_recording():
    class Silent(Ready):
        def reply(self, *_):
            yield Step(phase="prefill")

    with pytest.raises(DuoChatError, match="no token"):
        record(Silent(), "x", Options(), lambda: False, lambda answer: None)


def over(jobs, key):
    """A job, when it has ended."""
    job = jobs._jobs[key]
    job.done.wait(5)
    return job


def test_finished_jobs_are_forgotten_running_ones_are_not():
    jobs, go = Jobs(kept=3), threading.Event()
    running = jobs.start(lambda job: go.wait(20))
    others = [jobs.start(lambda job: {}) for _ in range(6)]
    for job in list(jobs._jobs.values())[1:]:
        job.done.wait(5)
    last = jobs.start(lambda job: {"last": 1})
    assert over(jobs, last).result == {"last": 1}
    assert jobs.look(running) == {"note": {}}
    with pytest.raises(DuoChatError, match="no longer knows"):
        jobs.look(others[0])
    go.set()
    assert over(jobs, running).result is True


def test_a_key_has_one_job_at_a_time():
    jobs, go = Jobs(), threading.Event()
    jobs.start(lambda job: go.wait(20), "measure")
    with pytest.raises(DuoChatError, match="Wait for it"):
        jobs.start(lambda job: {}, "measure", busy="Wait for it.")
    go.set()
    over(jobs, "measure")
    jobs.start(lambda job: 1 / 0, "measure")
    assert "ZeroDivisionError" in over(jobs, "measure").error


def test_prompts_are_trimmed():
    assert checked_prompt("  a \n") == "a"
