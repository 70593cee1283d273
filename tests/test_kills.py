"""Twenty kills of the engine and five of the page, in the middle of answers: no conversation is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_chat import FakeSettings, prepare_fake

pytest.importorskip("psutil")
from duochat.app.room import Room
from duochat.app.store import Store
from duochat.chat.chat import Options
from duochat.chat.worker import Worker

pytestmark = pytest.mark.slow
LONG = FakeSettings(text="tick " * 800, rate=60)
PAGE = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_kills import LONG, Options, Room, Store, Worker, prepare_fake
from duochat.app import room as rooms
if __name__ == "__main__":
    rooms.KEEP_EVERY = 0.1
    room = Room(Worker(LONG, prepare_fake), Store(Path({store!r})), Options())
    asked = {{"kind": "send", "conversation": sys.argv[1], "text": sys.argv[2]}}
    conversation = room.ask(asked, Options(max_tokens=int(sys.argv[3])))
    print(conversation, flush=True)
    run = room.answers.under_way(conversation)
    while run and not run.done.is_set():
        if len(run.text) > 10:
            print("writing", flush=True)
        time.sleep(0.05)
    room.close()
    print("over", flush=True)
"""


def until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


@pytest.fixture
def room(tmp_path, monkeypatch):
    monkeypatch.setattr("duochat.chat.worker.START_METHOD", "forkserver")
    worker = Worker(LONG, prepare_fake)
    made = Room(worker, Store(tmp_path / "c.db"), Options())
    made.worker = worker
    yield made
    made.close()
    worker.close()


def ask(room, conversation, text, max_tokens):
    action = {"kind": "send", "conversation": conversation, "text": text}
    id = room.ask(action, Options(max_tokens=max_tokens))
    return id, room.answers.under_way(id)


def test_twenty_kills_of_the_engine(room):
    conversations, said = ["", "", ""], [[], [], []]
    for i in range(20):
        place, text = i % 3, f"message {i}"
        conversations[place], run = ask(room, conversations[place], text, 4000)
        until(lambda run=run, least=5 + i: len(run.text) >= least)
        os.kill(room.worker.status()["pid"], (signal.SIGKILL, signal.SIGSEGV)[i % 2])
        assert run.done.wait(10)
        assert "your next message starts it again" in run.answer.error
        _, after = ask(room, conversations[place], f"and {i}", 10)
        assert after.done.wait(20)
        assert (after.text, after.answer.finish) == ("tick tick ", "length")
        said[place] += [text, run.text, f"and {i}", "tick tick "]
    for conversation, texts in zip(conversations, said, strict=True):
        assert [m.content for m in room.store.thread(conversation)] == texts


def test_five_kills_of_the_page(tmp_path):
    script, store = tmp_path / "page.py", tmp_path / "c.db"
    tests = Path(__file__).parent
    script.write_text(PAGE.format(tests=str(tests), store=str(store)))
    environment = {**os.environ, "PYTHONPATH": str(tests.parent)}

    def page(*words):
        return subprocess.Popen([sys.executable, script, *words], stdout=subprocess.PIPE, text=True, env=environment)

    conversation = ""
    for i in range(5):
        running = page(conversation, f"message {i}", "4000")
        conversation = running.stdout.readline().strip()
        assert running.stdout.readline() == "writing\n"
        time.sleep(0.4)
        running.kill()
        running.wait()
        running.stdout.close()
        thread = Store(store).thread(conversation)
        assert [m.content for m in thread[::2]] == [f"message {n}" for n in range(i + 1)]
        assert all(m.content.startswith("tick ") and m.meta["finish"] is None for m in thread[1::2])
    last = page(conversation, "the next message", "10")
    assert last.communicate(timeout=60)[0].splitlines()[0] == conversation
    assert Store(store).thread(conversation)[-1].content == "tick tick "
