"""The page's parts without a browser: markdown, runs, what a page sees, settings."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("gradio")
from fake_engine import ANSWER, HOSTILE, FakeEngine

from duochat import DuoChatError
from duochat.app.drawer import PRESETS, options_from, options_of, preset_of
from duochat.app.page import dispatcher
from duochat.app.picker import short_name
from duochat.app.prose import Stream, render
from duochat.app.room import Room, title_of
from duochat.app.store import Store
from duochat.app.view import AHEAD, Look
from duochat.chat.chat import Options, Step

# ---- markdown


@pytest.mark.parametrize("size", [1, 3, 17])
def test_a_growing_text_ends_as_the_whole_text_does(size: int) -> None:
    """Block by block, from any cut, with code, list, table and formula."""
    stream, shown = Stream(), []
    for end in range(size, len(ANSWER) + size, size):
        first, blocks = stream.blocks(ANSWER[:end])
        assert first <= len(shown)
        shown[first:] = blocks
    assert shown == render(ANSWER)


@given(
    st.lists(st.sampled_from(["word ", "\n", "\n\n", "- ", "```", "`", "$", "$$", "|a|b|", "> ", "# ", "    ", "*"]))
)
def test_any_growing_text_ends_as_the_whole_text_does(pieces: list[str]) -> None:
    stream, shown, text = Stream(), [], ""
    for piece in pieces:
        text += piece
        first, blocks = stream.blocks(text)
        shown[first:] = blocks
    first, blocks = stream.blocks(text, finished=True)
    shown[first:] = blocks
    assert shown == render(text)


def test_settled_blocks_are_not_parsed_again() -> None:
    stream = Stream()
    stream.blocks("one\n\ntwo\n\nthree")
    first, blocks = stream.blocks("one\n\ntwo\n\nthree and a half")
    assert (first, len(blocks)) == (2, 1)


def test_hostile_markdown_becomes_harmless() -> None:
    html = "".join(render(HOSTILE))
    for tag in ("<img", "<script", "<style", "<iframe", "<link", 'href="javascript'):
        assert tag not in html
    assert 'rel="noopener noreferrer"' in html


@pytest.mark.parametrize(
    ("text", "formulas"),
    [("$x^2$", 1), ("$$a$$ and \\(b\\) and \\[c\\]", 3), ("it costs $5 and $10", 0), ("`$x$`", 0), ("\\$x\\$", 0)],
)
def test_formulas_are_told_from_money_and_code(text: str, formulas: int) -> None:
    assert "".join(render(text)).count('class="math') == formulas


def test_an_open_code_block_is_coloured_when_it_closes() -> None:
    stream = Stream()
    assert '<span class="k">' not in "".join(stream.blocks("```python\ndef f(): pass\n")[1])
    assert '<span class="k">' in "".join(stream.blocks("```python\ndef f(): pass\n```\n")[1])


# ---- room and runs


class Held:
    """An engine that answers only what the test lets it."""

    def __init__(self, deaf: bool = False) -> None:
        self.let, self.deaf = threading.Semaphore(0), deaf

    def reply(self, messages: list[dict[str, str]], options: Options, cancelled: Callable[[], bool]) -> Iterator[Step]:
        self.messages = messages
        for piece in ("one ", "two ", "three"):
            while not self.let.acquire(timeout=0.01):
                if cancelled() and not self.deaf:
                    yield Step(phase="done", finish="cancelled")
                    return
            yield Step(text=piece, pieces=(piece,), phase="decode")
        yield Step(phase="done", finish="stop")


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    held = Room(Held(), Store(tmp_path / "c.db"), Options())
    yield held
    held.close()


def until(true: Callable[[], Any], seconds: float = 5.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
    return found


def finished(room: Room, conversation: str) -> None:
    for _ in range(3):
        room._engine.let.release()
    until(lambda: room.runs.of(conversation) is None)


def texts(room: Room, conversation: str) -> list[str]:
    return [m.content for m in room.store.thread(conversation)]


def ask(room: Room, kind: str, conversation: str = "", **more: Any) -> str:
    return room.ask({"kind": kind, "conversation": conversation, **more}, Options())


def test_send_then_continue_extends_the_answer(room: Room) -> None:
    """The engine gets the answer so far as the last message; the result is a version beside it."""
    conversation = ask(room, "send", text="hello")
    finished(room, conversation)
    answer = room.store.thread(conversation)[-1]
    ask(room, "continue", conversation, message=answer.id)
    finished(room, conversation)
    assert room._engine.messages[-1] == {"role": "assistant", "content": "one two three"}
    assert texts(room, conversation) == ["hello", "one two threeone two three"]
    assert len(room.store.thread(conversation)[-1].versions) == 2


def test_a_conversation_has_one_answer_at_a_time(room: Room) -> None:
    conversation = ask(room, "send", text="hello")
    with pytest.raises(DuoChatError, match="still being answered"):
        ask(room, "send", conversation, text="more")
    assert texts(room, conversation)[0] == "hello"
    assert len(texts(room, conversation)) == 2


def test_a_tab_that_missed_a_message_cannot_send(room: Room) -> None:
    conversation = ask(room, "send", text="hello")
    finished(room, conversation)
    with pytest.raises(DuoChatError, match="another tab"):
        ask(room, "send", conversation, text="more", after=None)
    assert len(texts(room, conversation)) == 2


def test_an_answer_is_kept_while_it_is_written(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that dies in the middle of an answer has its beginning on the disk."""
    monkeypatch.setattr("duochat.app.runs.KEEP_EVERY", 0.0)
    conversation = ask(room, "send", text="hello")
    room._engine.let.release()
    until(lambda: texts(room, conversation)[-1] == "one ")
    room._engine.let.release()
    until(lambda: texts(room, conversation)[-1] == "one two ")


def test_stop_does_not_wait_for_a_deaf_engine(tmp_path: Path) -> None:
    """The page goes on; what the engine says later is not added."""
    room = Room(Held(deaf=True), Store(tmp_path / "c.db"), Options())
    conversation = ask(room, "send", text="hello")
    room._engine.let.release()
    until(lambda: (run := room.runs.of(conversation)) and run.text)
    begun = time.monotonic()
    room.stop({"conversation": conversation})
    until(lambda: room.runs.of(conversation) is None)
    assert time.monotonic() - begun < 0.45
    room._engine.let.release(2)
    time.sleep(0.1)
    assert texts(room, conversation)[-1] == "one "
    assert room.store.thread(conversation)[-1].meta["finish"] == "cancelled"


def test_a_disk_that_fails_is_told_and_the_answer_shown(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = ask(room, "send", text="hello")
    run = room.runs.of(conversation)
    monkeypatch.setattr(room.store, "update", lambda *_: (_ for _ in ()).throw(DuoChatError("full")))
    for _ in range(3):
        room._engine.let.release()
    until(run.done.is_set)
    assert run.text == "one two three"
    assert "could not be saved" in run.notices[0]


# ---- what a page sees


async def values(room: Room, conversation: str, look: Look) -> list[dict[str, Any]]:
    return [value async for value in room.view.watch(conversation, look)]


def test_what_a_page_gets_joins_to_the_whole_answer(tmp_path: Path) -> None:
    """First the thread, then growing blocks, last the thread; the frames have no gap."""
    room = Room(FakeEngine(rate=2000), Store(tmp_path / "c.db"), Options())
    conversation = ask(room, "send", text="hello")
    got = asyncio.run(values(room, conversation, Look()))
    assert "thread" in got[0]
    assert got[-1]["thread"]["messages"][-1]["blocks"] == render(ANSWER)
    seen = 0
    for frame in (f for value in got for f in value.get("frames", ())):
        assert frame["from"] in (0, seen)
        seen = frame["n"]
    shown: list[str] = []
    for value in got[1:-1]:
        assert value["stream"]["from"] <= len(shown)
        shown[value["stream"]["from"] :] = value["stream"]["blocks"]
    assert shown[: len(shown) - 1] == render(ANSWER)[: len(shown) - 1]


def test_a_page_that_does_not_keep_up_is_not_overrun(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word from the page it gets AHEAD values and then one a second; nothing piles up."""
    conversation = ask(room, "send", text="hello")
    monkeypatch.setattr("duochat.app.view.IDLE", 0.0)
    look, got = Look(), []

    async def watch() -> None:
        async for value in room.view.watch(conversation, look):
            got.append(value)
            look.number()

    async def for_a_while() -> None:
        watching = asyncio.create_task(watch())
        await asyncio.sleep(0.9)
        look.open = False
        await watching

    asyncio.run(for_a_while())
    assert len(got) == AHEAD


def test_an_interrupted_answer_shows_as_such(room: Room) -> None:
    """What a server left behind that was killed."""
    conversation = room.store.create().id
    asked = room.store.add(conversation, None, "user", "hello")
    room.store.add(conversation, asked.id, "assistant", "half", {"finish": None})
    drawn = room.view.thread(conversation)["messages"][-1]
    assert drawn["finish"] is None
    assert not drawn["live"]


# ---- settings and odds and ends


def test_settings_survive_the_store() -> None:
    kept = {"temperature": 0.7, "stop": ["a", "b\n"], "unknown": 1}
    options = options_of(kept, Options(seed=3))
    assert (options.temperature, options.stop, options.seed) == (0.7, ("a", "b\n"), 3)


def test_every_preset_is_known_by_its_values() -> None:
    for name, values in PRESETS.items():
        assert preset_of(Options(**values)) == name
    assert preset_of(Options(temperature=0.33)) is None


FIELDS = ["duotree", 0.7, 40, 0.95, 0.0, 7, 128, "END\\n\n\nstop", "be kind", 0]


def test_options_from_the_fields() -> None:
    options = options_from(FIELDS, 4096)
    assert options.stop == ("END\n", "stop")
    assert options.draft_budget == "auto"


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [(0, "magic", "decoder"), (1, -1, "temperature"), (3, 1.2, "top_p"), (5, -3, "seed"), (6, 10**9, "max_tokens"),
     (6, 0, "max_tokens"), (9, 10**6, "draft_budget"), (5, "many", "seed")],
)  # fmt: skip
def test_a_field_out_of_range_is_named(place: int, value: object, told: str) -> None:
    values = [*FIELDS[:place], value, *FIELDS[place + 1 :]]
    with pytest.raises(DuoChatError, match=told):
        options_from(values, 4096)


def test_a_part_serves_by_name_and_tells_faults() -> None:
    def good(action: dict[str, Any]) -> dict[str, Any]:
        return {"got": action["x"]}

    def bad(_action: dict[str, Any]) -> None:
        raise DuoChatError("Do it otherwise.")

    serve = dispatcher([good, bad])
    assert serve({"name": "good", "action": {"x": 1}}) == {"got": 1}
    assert serve({"name": "bad"}) == {"refused": "Do it otherwise."}
    assert "refused" in serve({"name": "__class__"})


@pytest.mark.parametrize(
    ("reference", "name"),
    [("hf:Qwen/Qwen3-8B", "Qwen3-8B"), ("pypi:a==1/b/Model.Q4_1.gguf#sha256=ab", "Model.Q4_1"), ("/x/y/", "y")],
)
def test_short_names_of_models(reference: str, name: str) -> None:
    assert short_name(reference) == name


def test_titles_end_at_a_word() -> None:
    assert title_of("short") == "short"
    assert title_of("word " * 30) == "word word word word word word word word word…"
