"""Races: order, verdict, record, files, jobs."""

import json
import threading

import pytest
from simulated import PROSE, SimulatedEngine, Simulation, Step

from duochat import DuoChatError
from duochat.app import race
from duochat.app.recording import Job, Jobs, Recording, checked_prompt, record
from duochat.chat.chat import Options
from duochat.chat.chat import Step as RealStep


def recording(decoder="duotree", text=PROSE, **settings):
    steps = tuple(RealStep(round=s.round, text=s.text, pieces=s.pieces, draft_texts=s.draft_texts, finish=s.finish)
                  for s in Simulation(text, **settings).steps(decoder) if s.round)  # fmt: skip
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


def test_the_runs_follow_one_another_each_after_a_warm_up_on_another_prompt():
    """Both on one GPU at once would distort each other; a cached prompt would favour the second run."""
    engine = Watched(PROSE[:200])
    race.run(engine, "the prompt", ("duotree", "autoregressive"), Options(max_tokens=64), Job())
    assert [a[0] for a in engine.asked] == [race.WARM_UP, "the prompt"] * 2
    assert [a[1] for a in engine.asked] == ["duotree"] * 2 + ["autoregressive"] * 2
    assert engine.asked[1][2] == engine.asked[3][2] == 64


def test_the_verdict_comes_from_measured_times_only():
    fast, slow = recording(), recording("autoregressive")
    made = race.record_of(fast, slow)
    expected = slow.stats.last_token_at / fast.stats.last_token_at
    assert made["verdict"]["identical"] is True
    assert made["verdict"]["winner"] == "duotree"
    assert made["verdict"]["speedup"] == pytest.approx(expected)
    assert race.record_of(slow, fast)["verdict"]["speedup"] == pytest.approx(1 / expected)


def test_the_first_difference_is_named_with_both_texts():
    other = PROSE.replace("discriminant", "determinant")
    difference = race.first_difference(recording(), recording("autoregressive", other))
    assert difference["left"] != difference["right"]
    assert "discrim" in difference["left"]
    assert "determ" in difference["right"]


def test_a_shorter_output_differs_where_it_ends():
    short = recording(text=PROSE[:40])
    assert race.first_difference(short, recording())["token"] == len(short.tokens)


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
    assert again.snapshot() == made.snapshot()


@pytest.mark.parametrize("lines", [[], ["{}"], ["no json"], ['{"format": "duochat-trace"}'], ["[1]"]])
def test_a_file_that_is_no_trace_is_refused_with_a_sentence(lines):
    with pytest.raises(DuoChatError, match="not a recorded answer"):
        Recording.read(lines)


def test_a_failing_engine_ends_the_race_with_its_sentence():
    class Broken:
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
    class Silent:
        def reply(self, *_):
            yield Step(phase="prefill")

    with pytest.raises(DuoChatError, match="no token"):
        record(Silent(), "x", Options(), lambda: False, lambda step: None)


def test_old_jobs_are_stopped_and_forgotten():
    jobs = Jobs()
    first = jobs.start(lambda job: {"stopped": job.stop.wait(5)})
    kept = jobs._jobs[first]
    for _ in range(40):
        jobs.start(lambda job: {})
    kept.done.wait(5)
    assert kept.result == {"stopped": True}
    with pytest.raises(DuoChatError):
        jobs.look(first)


def test_prompts_are_trimmed():
    assert checked_prompt("  a \n") == "a"
