"""The page's parts without a browser: markdown, runs, what a page sees, settings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.testclient import TestClient

pytest.importorskip("gradio")
from fake_engine import ANSWER, HOSTILE, FakeEngine, Ready
from simulated import PROSE, SimulatedEngine

from duochat import DuoChatError, config
from duochat.app import hardware, picker
from duochat.app.drawer import PRESETS, options_from, preset_of
from duochat.app.kept import options_of
from duochat.app.page import dispatcher
from duochat.app.picker import Models, short_name
from duochat.app.prose import Stream, render
from duochat.app.room import Room, title_of
from duochat.app.store import Store
from duochat.app.view import AHEAD, Live, Look
from duochat.chat.answer import Step
from duochat.chat.chat import Options

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


def test_thinking_is_folded_while_it_is_written() -> None:
    """Lists and paragraphs within end where the thinking does, also before the end is there."""
    assert render("<think>\n- a\n</think>\nSo: b") == [
        '<details class="think"><summary>Thinking</summary><ul>\n<li>a</li>\n</ul>\n</details>\n',
        "<p>So: b</p>\n",
    ]
    assert Stream().blocks("<think>\nHm")[1] == [
        '<details class="think"><summary>Thinking</summary><p>Hm</p>\n</details>\n'
    ]


def test_bare_addresses_become_links_and_tasks_boxes() -> None:
    drawn = "".join(render("- [x] see https://a.b/c, readme.md and www.a.b"))
    assert drawn.count("<a ") == 1
    assert 'href="https://a.b/c"' in drawn
    assert 'checked="checked" disabled="disabled"' in drawn


@given(
    st.lists(
        st.sampled_from(
            [
                "word ",
                "\n",
                "\n\n",
                "- ",
                "```",
                "`",
                "$",
                "$$",
                "|a|b|",
                "> ",
                "# ",
                "    ",
                "*",
                "[x] ",
                "https://a.b ",
                "<think>\n",
                "\n</think>\n",
            ]
        )
    )
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


def test_footnotes_lead_to_their_notes_and_back_within_the_answer() -> None:
    text, notes = render("One[^a], two[^b], not[^c].\n\n[^a]: First <b>\n[^b]: [Second](https://a.b)")
    assert "not[^c]" in text
    marks = re.findall(r'href="#" role="doc-noteref" data-at="([\d.]+)" data-to="(\d)"', text)
    assert marks == [("1.0", "1"), ("2.0", "2")]
    assert re.findall(r'<li data-at="(\d)">', notes) == ["1", "2"]
    assert re.findall(r'role="doc-backlink" data-to="([\d.]+)"', notes) == ["1.0", "2.0"]
    assert "&lt;b&gt;" in notes
    assert " id=" not in text + notes


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
    "target",
    ["vscode://x", "ms-msdt:/id", "/logout", "//host/a", "tel:1", "javascript:a", "data:text/html,a", "x.html"],
)
def test_a_link_to_anything_but_the_web_and_mail_stays_text(target: str) -> None:
    assert "<a" not in "".join(render(f"[a]({target}) ![b]({target}) <{target}>"))


@pytest.mark.parametrize("target", ["http://a.b/c", "HTTPS://a.b", "mailto:a@b.c"])
def test_links_to_the_web_and_mail_work(target: str) -> None:
    assert "".join(render(f"[a]({target})")).count("<a ") == 1


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


class Held(Ready):
    """An engine that answers only what the test lets it."""

    def __init__(self) -> None:
        self.let = threading.Semaphore(0)

    def reply(self, messages: list[dict[str, str]], options: Options, cancelled: Callable[[], bool]) -> Iterator[Step]:
        self.messages, self.options = messages, options
        for piece in ("one ", "two ", "three"):
            while not self.let.acquire(timeout=0.01):
                if cancelled():
                    yield Step(phase="done", finish="cancelled")
                    return
            yield Step(text=piece, pieces=(piece,), phase="decode")
        yield Step(phase="done", finish="stop")


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    engine = Held()
    held = Room(engine, Store(tmp_path / "c.db"), Options())
    held.engine = engine
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
        room.engine.let.release()
    until(lambda: room.answers.under_way(conversation) is None)


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
    assert room.engine.messages[-1] == {"role": "assistant", "content": "one two three"}
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
    monkeypatch.setattr("duochat.app.room.KEEP_EVERY", 0.0)
    conversation = ask(room, "send", text="hello")
    room.engine.let.release()
    until(lambda: texts(room, conversation)[-1] == "one ")
    room.engine.let.release()
    until(lambda: texts(room, conversation)[-1] == "one two ")


def test_stop_keeps_what_is_there(room: Room) -> None:
    conversation = ask(room, "send", text="hello")
    room.engine.let.release()
    until(lambda: (run := room.answers.under_way(conversation)) and run.text)
    room.stop({"conversation": conversation})
    until(lambda: room.answers.under_way(conversation) is None)
    assert texts(room, conversation)[-1] == "one "
    assert room.store.thread(conversation)[-1].meta["finish"] == "cancelled"


def test_the_end_of_the_server_keeps_what_is_there(room: Room) -> None:
    conversation = ask(room, "send", text="hello")
    room.engine.let.release()
    until(lambda: (run := room.answers.under_way(conversation)) and run.text)
    room.close()
    assert texts(room, conversation)[-1] == "one "


def test_a_conversation_that_is_gone_is_refused_before_anything_is_made(room: Room) -> None:
    """Each try left an untitled conversation, and was refused as one that had gone on in another tab."""
    conversation = ask(room, "send", text="hello")
    finished(room, conversation)
    room.store.delete(conversation)
    for gone in (conversation, "doesnotexist"):
        with pytest.raises(DuoChatError, match="no longer there"):
            ask(room, "send", gone, text="more", after=None)
        with pytest.raises(DuoChatError, match="no longer there"):
            room.view.look({"conversation": gone})
    assert room.store.conversations() == []
    with pytest.raises(DuoChatError, match="empty"):
        ask(room, "send", text="  ")
    assert room.store.conversations() == []
    room.store.restore(conversation)
    assert texts(room, conversation) == ["hello", "one two three"]


def again(room: Room, conversation: str, pinned: bool = False, **options: Any) -> dict[str, Any]:
    """Answer again; the meta of what comes of it."""
    last = room.store.thread(conversation)[-1].id
    room.ask({"kind": "retry", "conversation": conversation, "message": last, "pinned": pinned}, Options(**options))
    finished(room, conversation)
    return room.store.thread(conversation)[-1].meta


def test_answer_again_takes_a_new_seed_unless_it_is_pinned(room: Room) -> None:
    """Version 2/2 was letter by letter version 1/2 at temperature 0.8."""
    conversation = room.ask({"kind": "send", "conversation": "", "text": "hello"}, Options(temperature=0.8))
    finished(room, conversation)
    assert again(room, conversation, temperature=0.8)["options"]["seed"] == 1
    assert again(room, conversation, temperature=0.8)["options"]["seed"] == 2
    assert again(room, conversation, pinned=True, temperature=0.8)["options"]["seed"] == 0
    assert again(room, conversation, pinned=True, temperature=0.8, seed=77)["options"]["seed"] == 77
    assert room.store.get(conversation).settings["seed"] == 77


def test_one_message_is_deleted_and_its_neighbours_are_one_turn(room: Room) -> None:
    conversation = ask(room, "send", text="hello")
    finished(room, conversation)
    answer = room.store.thread(conversation)[-1].id
    gone = {"conversation": conversation, "message": answer}
    assert [m["text"] for m in room.remove(gone)["messages"]] == ["hello"]
    ask(room, "send", conversation, text="and you?")
    assert room.engine.messages == [{"role": "user", "content": "hello\n\nand you?"}]
    with pytest.raises(DuoChatError, match="still being answered"):
        room.remove({**gone, "message": room.store.thread(conversation)[0].id})
    finished(room, conversation)


def test_an_answer_is_shared_as_a_page_of_its_own(room: Room) -> None:
    conversation = ask(room, "send", text="What is <b>?")
    finished(room, conversation)
    last = room.store.thread(conversation)[-1].id
    share = {"conversation": conversation, "message": last}
    with pytest.raises(DuoChatError, match="No trace"):
        room.share(share)
    steps = SimulatedEngine(PROSE[:200]).reply([{"role": "user", "content": "x"}], Options())
    room.store.update(last, PROSE[:200], {"finish": "stop"}, [s for s in steps if s.round])
    page = room.share(share)
    assert page["name"] == "what-is-b.html"
    assert "What is \\u003cb>?" in page["html"]
    assert 'openSaved("showAnswer")' in page["html"]


def test_at_temperature_0_the_same_text_is_explained(room: Room) -> None:
    conversation = ask(room, "send", text="hello")
    finished(room, conversation)
    assert room.store.thread(conversation)[-1].meta["notices"] == []
    assert "raise the temperature" in again(room, conversation)["notices"][0]
    assert again(room, conversation, temperature=0.8)["notices"] == []


def test_a_disk_that_fails_is_told_and_the_answer_shown(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = ask(room, "send", text="hello")
    run = room.answers.under_way(conversation)
    assert run
    monkeypatch.setattr(room.store, "update", lambda *_: (_ for _ in ()).throw(DuoChatError("full")))
    for _ in range(3):
        room.engine.let.release()
    until(run.done.is_set)
    assert run.text == "one two three"
    assert "could not be saved" in run.answer.notices[0]


# ---- what a page sees


async def values(room: Room, conversation: str) -> list[dict[str, Any]]:
    return [value async for value in room.view.watch(Look(conversation))]


def test_what_a_page_gets_joins_to_the_whole_answer(tmp_path: Path) -> None:
    """First the thread, then growing blocks, last the thread; the frames have no gap."""
    room = Room(FakeEngine(rate=2000), Store(tmp_path / "c.db"), Options())
    conversation = ask(room, "send", text="hello")
    got = asyncio.run(values(room, conversation))
    assert "thread" in got[0]
    assert got[-1]["thread"]["messages"][-1]["blocks"] == render(ANSWER)
    seen = 0
    for frame in (value["frame"] for value in got[1:]):
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
    look, got = Look(conversation), []

    async def watch() -> None:
        async for value in room.view.watch(look):
            got.append(value)
            look.number()

    with contextlib.suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(watch(), 0.9))
    assert len(got) == AHEAD


# ---- the address at which a page hears them


def asked(live: Live, path: str, **request: Any) -> Any:
    return TestClient(Starlette(routes=live.routes())).request(request.pop("method", "GET"), path, **request)


def told(body: str) -> list[dict[str, Any]]:
    """The values of an event stream, which must end by saying so."""
    *values, end, rest = body.split("\n\n")
    assert (end, rest) == ("event: end\ndata:", "")
    return [json.loads(value.removeprefix("data: ")) for value in values]


def test_a_conversation_is_heard_at_its_address_alone(tmp_path: Path) -> None:
    room = Room(FakeEngine(rate=2000), Store(tmp_path / "c.db"), Options())
    conversation = ask(room, "send", text="hello")
    live = Live(room.view)
    key = live.key(conversation)
    values = told(asked(live, f"/live/{key}").text)
    assert [value["number"] for value in values] == list(range(1, len(values) + 1))
    assert values[-1]["thread"]["messages"][-1]["text"] == ANSWER
    assert told(asked(live, f"/live/{key}").text)[0]["thread"] == values[-1]["thread"]  # a lost connection comes back
    assert asked(live, f"/live/{conversation}").status_code == 404
    assert key not in (live.key(conversation), conversation)


def test_what_cannot_be_heard_is_told(room: Room) -> None:
    live = Live(room.view)
    (value,) = told(asked(live, f"/live/{live.key('gone')}").text)
    assert "refused" in value


def test_a_page_says_how_far_it_has_come(room: Room) -> None:
    live = Live(room.view)
    key = live.key("")
    for number in (3, 2):
        asked(live, f"/live/{key}", method="POST", content=str(number))
    assert live._looks[key].heard == 3
    assert asked(live, "/live/unknown", method="POST", content="1").status_code == 204


def test_only_the_latest_addresses_are_kept(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duochat.app.view.MANY", 2)
    live = Live(room.view)
    first, *others = [live.key("") for _ in range(3)]
    assert [asked(live, f"/live/{key}").status_code for key in (first, *others)] == [404, 200, 200]


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


@pytest.mark.parametrize("kept", [{"stop": 5}, {"temperature": "hot"}, {"seed": True}, {"stop": [1]}, None, "x"])
def test_settings_of_a_wrong_kind_are_the_defaults(kept: object) -> None:
    """A conversation that was imported with `stop: 5` could never be opened again."""
    assert options_of(kept, Options(seed=3)) == Options(seed=3)


def test_a_message_with_odd_notes_is_drawn_without_them(room: Room) -> None:
    conversation = room.store.create().id
    room.store.add(conversation, None, "assistant", "x", {"notices": "x", "error": 5, "finish": "stop"})
    (drawn,) = room.view.thread(conversation)["messages"]
    assert drawn["finish"] == "stop"
    assert not {"notices", "error"} & drawn.keys()


def test_every_preset_is_known_by_its_values() -> None:
    for name, values in PRESETS.items():
        assert preset_of(Options(**values)) == name
    assert preset_of(Options(temperature=0.33)) is None


FIELDS = ["duotree", 0.7, 40, 0.95, 0.0, 1.1, 0.5, 0, '{"9": -1}', 7, 128, "END\\n\n\nstop", "be kind", 0]


def test_options_from_the_fields() -> None:
    options = options_from(FIELDS, 4096)
    assert options.stop == ("END\n", "stop")
    assert options.draft_budget == "auto"
    assert (options.repetition_penalty, options.logit_bias) == (1.1, ((9, -1.0),))


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [(0, "magic", "decoder"), (1, -1, "temperature"), (3, 1.2, "top_p"), (9, -3, "Seed is -3"),
     (5, 0, "repetition_penalty"), (8, "[", "logit_bias"), (8, '{"x": 1}', "logit_bias"), (10, 10**9, "Max tokens"),
     (10, 0, "Max tokens is 0: give a whole number from 1 to"), (9, "many", "Seed"),
     (13, -5, "Draft budget γ is -5: give a whole number from 0 to"), (13, 10**6, "Draft budget γ")],
)  # fmt: skip
def test_a_field_out_of_range_is_named(place: int, value: object, told: str) -> None:
    values = [*FIELDS[:place], value, *FIELDS[place + 1 :]]
    with pytest.raises(DuoChatError, match=told):
        options_from(values, 4096)


def test_a_part_serves_by_name_and_tells_faults() -> None:
    def good(action: dict[str, Any]) -> dict[str, Any]:
        return {"got": action["x"], "user": action["user"]}

    def bad(_action: dict[str, Any]) -> None:
        raise DuoChatError("Do it otherwise.")

    app = SimpleNamespace(cookie_id="c", tokens={"t": "ann"})
    nobody, ann = (SimpleNamespace(scope={"app": app}, cookies=c) for c in ({}, {"access-token-unsecure-c": "t"}))
    serve = dispatcher([good, bad], lambda action: None)
    assert serve({"name": "good", "action": {"x": 1, "user": "bob"}}, nobody) == {"got": 1, "user": ""}
    assert serve({"name": "good", "action": {"x": 1, "user": "bob"}}, ann) == {"got": 1, "user": "ann"}
    assert serve({"name": "bad"}, ann) == {"refused": "Do it otherwise."}
    assert "refused" in serve({"name": "__class__"}, ann)


@pytest.mark.parametrize(
    ("reference", "name"),
    [("hf:Qwen/Qwen3-8B", "Qwen3-8B"), ("pypi:a==1/b/Model.Q4_1.gguf#sha256=ab", "Model.Q4_1"), ("/x/y/", "y")],
)
def test_short_names_of_models(reference: str, name: str) -> None:
    assert short_name(reference) == name


# ---- models and hardware


class Changing(Ready):
    """An engine whose pairs change at once, or not at all."""

    def __init__(self, settings: config.Settings, fault: str = "") -> None:
        self.settings, self.fault = settings, fault
        self.asked: list[tuple[config.Settings, bool]] = []

    def change(self, settings: config.Settings, beside: bool = False, cancelled: Callable[[], bool] = bool) -> None:
        self.asked.append((settings, beside))
        if self.fault == "slow":
            until(cancelled)
        if self.fault:
            raise DuoChatError(self.fault)
        self.settings = settings


def pair_of(name: str) -> dict[str, str]:
    preset = config.presets()[name]
    return {"target": preset.target, "draft": preset.draft}


def test_a_preset_keeps_what_the_configuration_sets() -> None:
    """quantize, device and context_length were those of the preset's file, that is, the defaults."""
    own = config.load(device="cpu", context_length=2048, temperature=0.4)
    models = Models(Changing(own), own)
    models.use(pair_of("qwen3-8b"))
    until(lambda: models.settings is not own)
    used = models.settings
    assert (used.device, used.context_length, used.temperature) == ("cpu", 2048, 0.4)
    assert (used.target, used.description) == (
        config.presets()["qwen3-8b"].target, config.presets()["qwen3-8b"].description)  # fmt: skip


def test_the_pair_of_the_command_line_can_be_chosen_again(tmp_path: Path) -> None:
    own = config.load(target=str(tmp_path / "my.gguf"), draft=str(tmp_path / "mine.gguf"), context_length=2048)
    models = Models(Changing(own), own)
    shown = models.models({})
    first = shown["pairs"][0]
    assert (first["name"], first["description"]) == ("my", "the pair that DuoChat was started with")
    assert shown["used"] == [first["target"], first["draft"], "auto"]
    models.use(pair_of("default"))
    until(lambda: models.settings.target == config.load().target)
    shown = models.models({})
    used = [p["name"] for p in shown["pairs"] if [p["target"], p["draft"], p["backend"]] == shown["used"]]
    assert used == ["SmolLM2-135M-Instruct.Q4_1"]
    until(lambda: not models.state({})["changing"])
    models.use({"target": own.target, "draft": own.draft})
    until(lambda: models.settings.target == own.target)
    assert models.settings.context_length == 2048
    assert len(Models(Changing(config.load()), config.load()).models({})["pairs"]) == len(config.presets())


def test_a_choice_that_fails_leaves_the_pair_in_use_and_says_why() -> None:
    own = config.load()
    models = Models(Changing(own, "It cannot be fetched: go online."), own)
    models.use(pair_of("qwen3-8b"))
    told = until(lambda: models.state({})["failed"])
    assert told == {**pair_of("qwen3-8b"), "backend": "auto", "reason": "It cannot be fetched: go online."}
    assert models.state({})["used"] == [own.target, own.draft, own.backend]
    models.engine.fault = ""
    until(lambda: not models.state({})["changing"])
    models.use(told)
    until(lambda: models.settings.target == told["target"])
    assert models.state({})["failed"] == {}


def test_a_change_is_cancelled_without_a_fault() -> None:
    own = config.load()
    models = Models(Changing(own, "slow"), own)
    models.use(pair_of("qwen3-8b"))
    with pytest.raises(DuoChatError, match="wait for it"):
        models.use(pair_of("qwen3-8b"))
    models.cancel({})
    until(lambda: not models.state({})["changing"])
    assert models.state({})["failed"]["reason"] == ""


def test_from_another_machine_only_what_is_listed_can_be_loaded(toys: Path) -> None:
    own = config.load(models_folder=str(toys))
    models = Models(Changing(own), own, here=False)
    for asked in ({"target": "/etc/passwd", "draft": own.draft}, {"target": "hf:a/b", "draft": "hf:a/c"}):
        with pytest.raises(DuoChatError, match="own browser"):
            models.use(asked)
    assert models.local({"folder": "/"})["folder"] == str(toys)
    models.use({"target": str(toys / "target.gguf")})
    until(lambda: models.settings.target == str(toys / "target.gguf"))


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A models folder: a target, two drafts that speak its tokens, and one that does not."""
    from gguf import GGMLQuantizationType
    from toy_models import byte_level_vocabulary, write_gguf

    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder, (tokens, merges) = tmp_path / "toys", byte_level_vocabulary()
    folder.mkdir()
    write_gguf(folder / "target.gguf", quantized=GGMLQuantizationType.F32)
    write_gguf(folder / "larger-draft.gguf")
    write_gguf(folder / "small-draft.gguf", quantized=GGMLQuantizationType.Q4_0)
    write_gguf(folder / "other.gguf", vocabulary=([*tokens[:-1], "other"], merges))
    return folder


def test_models_on_this_disk_come_with_their_lane_and_the_drafts_that_fit(toys: Path) -> None:
    own = config.load(models_folder=str(toys))
    models = Models(Changing(own), own)
    found = {m["name"]: m for m in models.local({})["models"]}
    assert [d["name"] for d in found["target"]["drafts"]] == ["small-draft", "larger-draft"]
    assert (found["target"]["lane"], found["target"]["fits"]) == ("llama", True)
    assert found["other"]["drafts"] == []
    models.use({"target": str(toys / "target.gguf")})
    until(lambda: models.settings.draft == str(toys / "small-draft.gguf"))
    assert models.settings.target_gib > 0
    with pytest.raises(DuoChatError, match="Name a draft too"):
        models.use({"target": str(toys / "other.gguf")})


def test_a_pair_is_loaded_beside_the_other_where_both_are_known_to_fit(toys: Path) -> None:
    own = config.load(models_folder=str(toys))
    models = Models(Changing(own), own)
    models.local({})
    models.use({"target": str(toys / "target.gguf")})
    until(lambda: not models.state({})["changing"])
    models.use({"target": "unheard.gguf", "draft": "of.gguf"})
    until(lambda: not models.state({})["changing"])
    assert [beside for _, beside in models.engine.asked] == [True, False]


def test_how_fast_pairs_would_be_is_asked_of_a_process_of_its_own(toys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {str(toys / "target.gguf"): {"sentence": "about 2 tokens/s"}}
    script = f"import sys; assert {str(toys)!r} in open(sys.argv[1]).read(); print({json.dumps({'forecasts': told})!r})"
    monkeypatch.setattr(picker, "FORECAST", (sys.executable, "-c", script))
    own = config.load(models_folder=str(toys))
    models = Models(Changing(own), own)
    models.forecast({})
    until(lambda: not models.state({})["forecasting"])
    found = {m["name"]: m["forecast"] for m in models.local({})["models"]}
    assert found == {
        "target": {"sentence": "about 2 tokens/s"},
        "larger-draft": None,
        "small-draft": None,
        "other": None,
    }


class Answering(Changing):
    """How many answers are under way is set by the test."""

    requests = 0

    def status(self) -> dict[str, Any]:
        return {**super().status(), "requests": self.requests}


def test_a_forecast_gives_way_to_an_answer_and_ends_when_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside an answer it falsified its own figures and took the processor from the answer."""
    begun = tmp_path / "begun"
    script = f"open({str(begun)!r}, 'a').write('x'); import time; time.sleep(60)"
    monkeypatch.setattr(picker, "FORECAST", (sys.executable, "-c", script))
    engine = Answering(config.load())
    models = Models(engine, config.load())
    engine.requests = 1
    models.forecast({})
    until(lambda: models.state({})["forecasting"].startswith("waiting"))
    assert not begun.exists()
    engine.requests = 0
    until(lambda: begun.exists() and begun.read_text() == "x")
    engine.requests = 1
    until(lambda: models.state({})["forecasting"].startswith("waiting"))
    engine.requests = 0
    until(lambda: begun.read_text() == "xx")
    models.cancel({"of": "forecast"})
    until(lambda: not models.state({})["forecasting"])


def test_a_forecast_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picker, "FORECAST", (sys.executable, "-c", "raise SystemExit('No room on the disk.')"))
    models = Models(Changing(config.load()), config.load())
    models.forecast({})
    until(lambda: not models.state({})["forecasting"])
    assert models.state({})["unforeseen"] == "No room on the disk."


def test_a_pair_that_differs_in_its_backend_alone_is_another_one() -> None:
    own = config.load()
    models = Models(Changing(own), own)
    models.use({"target": own.target, "draft": own.draft, "backend": "torch"})
    until(lambda: models.settings.backend == "torch")
    assert models.settings.dtype == "fp32"
    used = models.state({})["used"]
    assert used[2] == "torch"
    assert [[p["target"], p["draft"], p["backend"]] for p in models.models({})["pairs"]].count(used) == 1
    models.use({"context_length": 2048})
    until(lambda: models.settings.context_length == 2048)
    assert models.settings.backend == "torch"
    models.use({"target": own.target, "draft": own.draft, "backend": own.backend})
    until(lambda: models.settings.backend == own.backend)


def test_the_context_is_loaded_anew_with_another_length() -> None:
    own = config.load()
    models = Models(Changing(own), own)
    models.use({"context_length": 8192})
    until(lambda: models.settings.context_length == 8192)
    assert models.settings.target == own.target
    with pytest.raises(DuoChatError, match="context_length is 3"):
        models.use({"context_length": 3})


def test_what_was_measured_last_is_shown() -> None:
    """Leaving the tab brought the figures of the first start back."""

    class Measured(Ready):
        hardware: ClassVar[dict[str, Any]] = {"costs": {"target": {"1": 0.1}, "draft": {"1": 0.01}, "threads": 1}}

        def calibrate(self) -> dict[str, Any]:
            type(self).hardware = {"costs": {"target": {"1": 0.05}, "draft": {"1": 0.01}, "threads": 1}}
            return self.hardware

    known = hardware.Hardware(Measured(), hardware.Machine())
    assert known.look({})["hardware"]["costs"]["target"] == {"1": 0.1}
    known.measure({})
    until(lambda: not known.look({})["measuring"])
    assert hardware.Hardware(Measured(), hardware.Machine()).look({})["hardware"]["costs"]["target"] == {"1": 0.05}


@pytest.mark.parametrize(
    ("visible", "card"),
    [(None, 0), ("2,0", 2), ("GPU-abc", "GPU-abc"), ("", None), ("-1", None), ("NoDevFiles", None)],
)
def test_the_load_shown_is_that_of_the_card_in_use(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, card: int | str | None
) -> None:
    class Nvml:
        NVMLError = RuntimeError
        nvmlInit = staticmethod(lambda: None)
        nvmlDeviceGetHandleByUUID = staticmethod(lambda name: name)

        @staticmethod
        def nvmlDeviceGetHandleByIndex(index: int) -> int:
            if not 0 <= index < 4:
                raise RuntimeError("no such card")
            return index

        @staticmethod
        def nvmlDeviceGetUtilizationRates(handle: Any) -> SimpleNamespace:
            return SimpleNamespace(gpu={0: 10, 2: 30, "GPU-abc": 70}[handle])

    monkeypatch.setitem(sys.modules, "pynvml", Nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    read = hardware._first_gpu()
    shares = {0: 0.1, 2: 0.3, "GPU-abc": 0.7}
    assert (read() if read else None) == ({"gpu": shares[card]} if card is not None else None)


def test_titles_end_at_a_word() -> None:
    assert title_of("short") == "short"
    assert title_of("word " * 30) == "word word word word word word word word word…"
