"""The worker: what the page sees when the engine answers, dies, hangs, queues and is told to stop."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_chat import FakeSettings, prepare_fake

from duochat import DuoChatError
from duochat.chat import child
from duochat.chat.chat import Options
from duochat.chat.worker import Worker
from duochat.config import load

ASK = [{"role": "user", "content": "Hi"}]
multiprocessing.set_forkserver_preload(["duochat.chat.worker", "fake_chat"])
LONG = FakeSettings(text="tick " * 800, rate=60)


@pytest.fixture(autouse=True, scope="module")
def fast():
    """A process in milliseconds; the tests of orphans start it as the app does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("duochat.chat.worker.START_METHOD", "forkserver")
        yield


@pytest.fixture
def start():
    workers = []

    def start(settings=FakeSettings(), **kwargs):  # noqa: B008  frozen
        workers.append(Worker(settings, prepare_fake, **kwargs))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


@pytest.fixture(scope="module")
def calm():
    """A worker for tests that do it no harm: it says "tick " 800 times, 60 letters a second."""
    worker = Worker(LONG, prepare_fake)
    yield worker
    worker.close()


def said(steps):
    return "".join(step.text for step in steps)


def answer(worker, **options):
    return list(worker.reply(ASK, Options(max_tokens=4000, **options)))


def ask(worker, max_tokens=4000):
    return list(worker.reply(ASK, Options(max_tokens=max_tokens)))


def until(condition, seconds=5):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def test_answers_with_phases_and_finish(start):
    steps = answer(start(FakeSettings(load_s=0.3)))
    assert said(steps) == "Hello from the engine."
    assert steps[-1].finish == "stop"
    assert list(dict.fromkeys(s.phase for s in steps)) == ["loading", "prefill", "decode", "done"]
    assert any(s.phase == "loading" and s.notice == "reading the fake target" for s in steps)
    assert any(s.phase == "prefill" and s.progress[0] == s.progress[1] for s in steps)


def test_second_answer_needs_no_loading(calm):
    ask(calm, 1)
    assert [s.phase for s in ask(calm, 2)] == ["prefill", "prefill", "decode", "done"]


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_killed_in_an_answer_keeps_the_text_and_starts_again(start, kill):
    worker = start(LONG)
    steps = []
    for step in worker.reply(ASK, Options(max_tokens=4000)):
        steps.append(step)
        if step.text and len(said(steps)) == 10:
            os.kill(worker.status()["pid"], kill)
    assert said(steps).startswith("tick tick ")
    assert steps[-1].finish == "error"
    assert kill.name in steps[-1].error
    assert steps[-1].error.count("\n") == 0
    again = worker.reply(ASK, Options(max_tokens=10))
    assert said(again) == "tick tick "


def test_killed_between_answers_is_started_again(start):
    worker = start()
    answer(worker)
    os.kill(worker.status()["pid"], signal.SIGKILL)
    until(lambda: worker.status()["state"] == "dead")
    steps = answer(worker)
    assert steps[0].phase == "loading"
    assert said(steps) == "Hello from the engine."


@pytest.mark.parametrize("fault", ["hangs", "stops"])
def test_a_hang_is_ended_and_the_next_message_works(start, fault, tmp_path):
    """hangs: the main thread sits in a call. stops: the whole process stands still."""
    worker = start(FakeSettings(fault=fault, marker=str(tmp_path / "once")), patience=2.5)
    steps = answer(worker)
    assert said(steps) == "Hello"
    assert "no sign of life" in steps[-1].error
    assert said(answer(worker)) == "Hello from the engine."


@pytest.mark.parametrize(
    ("fault", "words"), [("aborts", "SIGABRT"), ("breaks", "the fake target broke"), ("refuses", "ask less")]
)
def test_a_fault_of_the_engine_is_a_sentence(start, fault, words, tmp_path):
    worker = start(FakeSettings(fault=fault, marker=str(tmp_path / "once")))
    steps = answer(worker)
    assert said(steps) == "Hello"
    assert words in steps[-1].error
    if fault != "refuses":
        assert said(answer(worker)) == "Hello from the engine."


@pytest.mark.parametrize(
    ("fault", "words"),
    [("load refuses", "choose another"), ("load breaks", "a tensor is missing"), ("load dies of SIGABRT", "SIGABRT")],
)
def test_a_fault_in_loading_is_a_sentence_and_the_next_try_loads_again(start, fault, words, tmp_path):
    worker = start(FakeSettings(fault=fault, marker=str(tmp_path / "once")))
    until(lambda: worker.status()["state"] == "dead")
    assert words in worker.status()["error"]
    os.remove(tmp_path / "once")
    steps = answer(worker)
    assert words in steps[-1].error
    assert steps[-1].finish == "error"
    assert said(answer(worker)) == "Hello from the engine."


def test_bad_input_is_an_error_step_and_the_engine_lives_on(calm):
    pid = calm.status()["pid"]
    steps = answer(calm, temperature=-1.0)
    assert "temperature is -1.0" in steps[-1].error
    assert said(ask(calm, 5)) == "tick "
    assert calm.status()["pid"] == pid


def test_ctrl_c_is_left_to_the_parent(calm):
    """A terminal sends it to both; the child must not die of it before the parent has closed it."""
    pid = calm.status()["pid"]
    os.kill(pid, signal.SIGINT)
    assert said(ask(calm, 5)) == "tick "
    assert calm.status()["pid"] == pid


def test_stop_acts_within_a_step(calm):
    stop = threading.Event()
    steps = []
    for step in calm.reply(ASK, Options(max_tokens=4000), stop.is_set):
        steps.append(step)
        if step.text and len(said(steps)) == 20:
            stop.set()
            asked = time.monotonic()
    assert time.monotonic() - asked < 0.5
    assert steps[-1].finish == "cancelled"
    assert steps[-1].round.finish == "cancelled"  # the engine's own last round, so that its counts are whole
    assert len(said(steps)) < 40


def test_stop_does_not_wait_for_a_deaf_engine(start):
    worker, stop = start(FakeSettings(fault="hangs")), threading.Event()
    steps = []
    for step in worker.reply(ASK, Options(), stop.is_set):
        steps.append(step)
        if step.text and said(steps) == "Hello":
            stop.set()
            asked = time.monotonic()
    assert time.monotonic() - asked < 0.5
    assert steps[-1].finish == "cancelled"


def test_stop_does_not_wait_for_an_engine_that_talks_on(start):
    worker, stop = start(FakeSettings(fault="talks on", text="tick " * 800, rate=60)), threading.Event()
    for step in worker.reply(ASK, Options(max_tokens=4000), stop.is_set):
        if step.text and not stop.is_set():
            stop.set()
            asked = time.monotonic()
    assert time.monotonic() - asked < 0.6
    assert step.finish == "cancelled"


def test_stop_while_loading(start):
    worker, stop = start(FakeSettings(load_s=1.0)), threading.Event()
    for step in worker.reply(ASK, Options(), stop.is_set):
        if step.phase == "loading":
            stop.set()
    assert step.finish == "cancelled"
    assert worker.status()["state"] == "loading"
    assert said(answer(worker)) == "Hello from the engine."


def test_stop_while_the_prompt_is_read(start):
    worker, stop = start(FakeSettings(engine={"prefill_s": 20})), threading.Event()
    for step in worker.reply(ASK, Options(), stop.is_set):
        if step.phase == "prefill" and step.progress[0] > 0 and not stop.is_set():
            stop.set()
            asked = time.monotonic()
    assert time.monotonic() - asked < 0.5
    assert step.finish == "cancelled"
    assert step.round.tokens == ()


def test_closing_the_stream_frees_the_engine(calm):
    steps = calm.reply(ASK, Options(max_tokens=4000))
    while not next(steps).text:
        pass
    steps.close()
    asked = time.monotonic()
    assert said(ask(calm, 5)) == "tick "
    assert time.monotonic() - asked < 2


@pytest.mark.parametrize(
    ("parties", "wanted"), [(["", "", "", ""], [0, 1, 2, 3]), (["a", "a", "a", ""], [0, 1, 3, 2])], ids=["one", "two"]
)
def test_requests_wait_in_line_and_parties_take_turns(calm, parties, wanted):
    order, steps = [], [[] for _ in range(4)]

    def ask_in_turn(i):
        for step in calm.reply(ASK, Options(max_tokens=30), party=parties[i]):
            steps[i].append(step)
        order.append(i)

    threads = []
    for i in range(4):
        threads.append(threading.Thread(target=ask_in_turn, args=(i,)))
        threads[-1].start()
        until(lambda: calm.status()["requests"] == len(threads))
    for thread in threads:
        thread.join()
    assert order == wanted
    assert all(said(s) == "tick " * 6 for s in steps)
    places = [s.progress[0] for s in steps[3] if s.phase == "queued"]
    assert places[0] == wanted.index(3)
    assert sorted(set(places), reverse=True) == list(dict.fromkeys(places))


def test_stop_in_the_queue_leaves_it(calm):
    stop = threading.Event()
    first = calm.reply(ASK, Options(max_tokens=4000))
    while not next(first).text:
        pass
    for step in calm.reply(ASK, Options(), stop.is_set):
        assert step.phase in ("queued", "done")
        stop.set()
    assert step.finish == "cancelled"
    assert calm.status()["requests"] == 1
    first.close()


def test_a_slow_reader_does_not_slow_the_engine(calm):
    """The rounds carry the engine's clock: 90 tokens at 60 a second take 1.5 s however slowly they are read."""
    times = []
    for step in calm.reply(ASK, Options(max_tokens=90)):
        if step.round:
            times.append(step.round.ended)
            time.sleep(0.04)
    assert len(times) == 90
    assert times[-1] - times[0] < 2.0


def test_status_tells_the_state(start):
    worker = start(FakeSettings(load_s=0.3, text="x" * 60, rate=60))
    assert worker.status()["state"] == "loading"
    until(lambda: worker.status()["loading"] == ("reading the fake target", 1, 2))
    until(lambda: worker.status()["state"] == "ready")
    assert worker.status()["hardware"] == {"target_device": "fake", "calibrated": 0}
    steps = worker.reply(ASK, Options())
    while not next(steps).text:
        pass
    assert worker.status()["state"] == "busy"
    steps.close()
    until(lambda: worker.status()["state"] == "ready")


def test_measuring_again_stays_known(start):
    """The page showed the figures of the first start again, as soon as its tab was left."""
    worker = start()
    assert worker.calibrate()["calibrated"] == 1
    assert worker.status()["hardware"]["calibrated"] == 1
    assert said(answer(worker)) == "Hello from the engine."


def test_a_change_takes_other_settings(start):
    worker = start()
    answer(worker)
    worker.change(FakeSettings(text="Another model."))
    assert worker.status()["settings"].text == "Another model."
    assert said(answer(worker)) == "Another model."


def test_a_change_does_not_wait_for_loading(start):
    worker = start(FakeSettings(load_s=60))
    worker.change(FakeSettings(text="Quick."))
    assert said(answer(worker)) == "Quick."


def test_the_pair_in_use_answers_while_another_is_fetched(start):
    worker = start()
    answer(worker)
    changing = threading.Thread(target=worker.change, args=[FakeSettings(text="Other.", check_s=1.5)])
    changing.start()
    until(lambda: worker.status()["choosing"] == ("fetching the fake target", 0, 2))
    assert said(answer(worker)) == "Hello from the engine."
    with pytest.raises(DuoChatError, match="wait for it"):
        worker.change(FakeSettings())
    changing.join()
    assert worker.status()["choosing"] is None
    assert said(answer(worker)) == "Other."


def test_a_pair_that_cannot_be_fetched_leaves_the_other_in_use(start):
    worker = start()
    answer(worker)
    pid = worker.status()["pid"]
    with pytest.raises(DuoChatError, match="no model"):
        worker.change(FakeSettings(fault="check refuses"))
    assert worker.status()["pid"] == pid
    assert said(answer(worker)) == "Hello from the engine."


def test_where_there_is_room_the_pair_in_use_answers_until_the_other_is_loaded(start):
    worker = start()
    answer(worker)
    changing = threading.Thread(target=worker.change, args=[FakeSettings(text="Other.", load_s=1.5), True])
    changing.start()
    until(lambda: worker.status()["choosing"] == ("reading the fake target", 1, 2))
    assert said(answer(worker)) == "Hello from the engine."
    assert worker.status()["choosing"]
    changing.join()
    assert worker.status()["choosing"] is None
    assert said(answer(worker)) == "Other."


def test_a_pair_that_fails_beside_the_one_in_use_touches_nothing(start):
    worker = start()
    answer(worker)
    pid = worker.status()["pid"]
    with pytest.raises(DuoChatError, match="does not fit"):
        worker.change(FakeSettings(fault="load refuses"), beside=True)
    assert worker.status()["pid"] == pid
    assert said(answer(worker)) == "Hello from the engine."


def test_a_change_can_be_cancelled_while_it_is_fetched(start):
    worker, stop = start(), threading.Event()
    answer(worker)
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(DuoChatError, match="cancelled"):
        worker.change(FakeSettings(check_s=60), cancelled=stop.is_set)
    assert worker.status()["choosing"] is None
    assert said(answer(worker)) == "Hello from the engine."


@pytest.mark.parametrize("fault", ["load refuses", "load dies of SIGKILL"])
def test_a_pair_that_cannot_be_loaded_gives_the_other_back(start, fault):
    """For whoever asks meanwhile too, and the reason is told."""
    worker, heard = start(), []
    answer(worker)

    def change():
        with pytest.raises(DuoChatError) as refused:
            worker.change(FakeSettings(fault=fault, load_s=0.5))
        heard.append(refused)

    changing = threading.Thread(target=change)
    changing.start()
    until(lambda: worker.status()["state"] == "loading")
    assert said(answer(worker)) == "Hello from the engine."
    changing.join()
    reason = "does not fit" if fault == "load refuses" else "memory ran out"
    assert reason in str(heard[0].value)
    assert "The pair before is in use again." in worker.status()["error"]
    worker.change(FakeSettings(text="Good."))
    assert worker.status()["error"] == ""
    assert said(answer(worker)) == "Good."


@pytest.mark.parametrize(
    ("death", "words"),
    [("SIGILL", "built for another processor"), ("SIGSEGV", "A library of the engine crashed"),
     ("SIGKILL", "memory ran out"), ("SIGTERM", "ended from outside")],
)  # fmt: skip
@pytest.mark.parametrize("when", ["loading", "answering"])
def test_every_death_has_its_sentence(start, death, words, when):
    """A crash of a library was answered with "check the model files"."""
    worker = start(FakeSettings(fault=f"load dies of {death}") if when == "loading" else LONG)
    steps = []
    for step in worker.reply(ASK, Options()):
        steps.append(step)
        if step.text and len(steps) < 20:
            os.kill(worker.status()["pid"], signal.Signals[death])
    told = steps[-1].error
    assert words in told
    assert death in told
    assert "model files" not in told
    assert ("The text so far is kept" in told) == (when == "answering")


@pytest.mark.parametrize(
    ("fault", "words"),
    [(MemoryError(), "Memory ran out"), (RuntimeError("CUDA out of memory. Tried"), "Memory ran out"),
     (ImportError("x.so: failed to map segment from shared object"), "Memory ran out"),
     (ModuleNotFoundError("No module named 'torch'", name="torch"), "torch is missing"),
     (ValueError("odd\nand more"), "ValueError: odd)")],
)  # fmt: skip
def test_every_exception_has_its_sentence(fault, words):
    assert words in child.sentence(fault)
    assert "\n" not in child.sentence(fault)


def test_close_ends_the_child_and_answers_stay_sentences(start):
    worker = start()
    answer(worker)
    pid = worker.status()["pid"]
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert "closed" in answer(worker)[-1].error


@pytest.mark.real
def test_the_real_engine_is_killed_stopped_and_answers_again():
    """The default pair: kill -9 in an answer, Stop while a long prompt is read, and a question in between."""
    worker = Worker(load())
    try:
        steps = []
        for step in worker.reply([{"role": "user", "content": "Count from one to fifty."}], Options(max_tokens=200)):
            steps.append(step)
            if step.text and not said(steps[:-1]):
                os.kill(worker.status()["pid"], signal.SIGKILL)
        assert said(steps)
        assert "SIGKILL" in steps[-1].error
        question = [{"role": "user", "content": "Name the capital city of France."}]
        assert "Paris" in said(worker.reply(question, Options(max_tokens=20)))
        stop = threading.Event()
        for step in worker.reply([{"role": "user", "content": "word " * 3000}], Options(), stop.is_set):
            if step.phase == "prefill" and step.progress[0] > 0 and not stop.is_set():
                stop.set()
                asked = time.monotonic()
        assert time.monotonic() - asked < 0.5
        assert step.finish == "cancelled"
        assert "Paris" in said(worker.reply(question, Options(max_tokens=20)))
    finally:
        worker.close()


PARENT = """
import sys, time
sys.path.insert(0, {tests!r})
from fake_chat import FakeSettings, prepare_fake
from duochat.chat.worker import Worker
if __name__ == "__main__":
    worker = Worker(FakeSettings(), prepare_fake)
    while worker.status()["state"] != "ready":
        time.sleep(0.01)
    print(worker.status()["pid"], flush=True)
    {then}
"""


@pytest.mark.parametrize(
    ("then", "kill"),
    [
        ("time.sleep(60)", signal.SIGKILL),
        ("time.sleep(60)", signal.SIGTERM),
        ("time.sleep(60)", signal.SIGINT),
        ("pass", 0),
    ],
)
def test_no_orphan_when_the_parent_ends(tmp_path, then, kill):
    script = tmp_path / "parent.py"
    tests = Path(__file__).parent
    script.write_text(PARENT.format(tests=str(tests), then=then))
    environment = {**os.environ, "PYTHONPATH": str(tests.parent)}
    parent = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    child = int(parent.stdout.readline())
    if kill:
        parent.send_signal(kill)
    parent.wait(5)
    until(lambda: not Path(f"/proc/{child}").exists() or "(zombie)" in Path(f"/proc/{child}/status").read_text())
