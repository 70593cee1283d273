"""Conversations on disk: branches, search, trash, traces, stale tabs, damaged files, export and import."""

import json
import lzma
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import zlib
from base64 import b64encode
from pathlib import Path

import pytest
from fake_chat import chat_that_says
from hypothesis import given, settings
from hypothesis import strategies as st

from duochat import DuoChatError
from duochat.app import exchange, packing
from duochat.app.exchange import Entry, Parcel
from duochat.app.frames import frame
from duochat.app.store import Store, data_dir
from duochat.chat.answer import Answer
from duochat.chat.chat import Options
from duochat.chat.recording import Recording

ROOT = Path(__file__).parent.parent
SPOKEN = list(chat_that_says("Grüße 🙂").reply([{"role": "user", "content": "Hi"}], Options()))
STEPS = packing.unpack(packing.pack(SPOKEN))  # as they are kept


@pytest.fixture
def path(tmp_path):
    return tmp_path / "data" / "conversations.db"


@pytest.fixture
def store(path):
    opened = Store(path)
    yield opened
    opened.close()


def talk(store, *contents, title="", **settings):
    """A conversation of user and assistant in turns; returns it and the messages."""
    c = store.create(settings, title)
    said = []
    for i, content in enumerate(contents):
        parent = said[-1].id if said else None
        said.append(store.add(c.id, parent, ("user", "assistant")[i % 2], content))
    return store.get(c.id), said


def on_view(store, c):
    return [m.content for m in store.thread(c.id)]


class TestTree:
    def test_messages_come_back_in_order(self, store):
        c, said = talk(store, "Hi", "Hello 🙂", "Bye\n", title="Greetings", temperature=0.7)
        assert on_view(store, c) == ["Hi", "Hello 🙂", "Bye\n"]
        assert (c.title, c.settings, c.leaf) == ("Greetings", {"temperature": 0.7}, said[-1].id)
        assert store.thread(c.id) == said

    def test_a_retry_is_a_branch(self, store):
        c, (asked, first) = talk(store, "Hi", "one")
        second = store.add(c.id, asked.id, "assistant", "two")
        assert on_view(store, c) == ["Hi", "two"]
        assert store.thread(c.id)[1].versions == (first.id, second.id) == second.versions
        store.select(c.id, first.id)
        assert on_view(store, c) == ["Hi", "one"]

    def test_an_edited_first_message_is_a_branch(self, store):
        c, (asked, _) = talk(store, "Hi", "one")
        edited = store.add(c.id, None, "user", "Hello")
        assert on_view(store, c) == ["Hello"]
        assert edited.versions == (asked.id, edited.id)

    def test_select_shows_what_was_last_on_view_below(self, store):
        c, (asked, one, more, _) = talk(store, "Hi", "one", "more", "much")
        two = store.add(c.id, asked.id, "assistant", "two")
        store.select(c.id, one.id)
        assert on_view(store, c) == ["Hi", "one", "more", "much"]
        store.add(c.id, one.id, "user", "less")
        store.select(c.id, two.id)
        store.select(c.id, one.id)
        assert on_view(store, c) == ["Hi", "one", "less"]
        store.select(c.id, more.id)
        store.select(c.id, two.id)
        store.select(c.id, one.id)
        assert on_view(store, c) == ["Hi", "one", "more", "much"]

    def test_settle_ends_the_view_and_keeps_what_followed(self, store):
        c, (asked, one) = talk(store, "Hi", "one")
        store.settle(c.id, asked.id)
        assert on_view(store, c) == ["Hi"]
        store.settle(c.id, None)
        assert on_view(store, c) == []
        store.select(c.id, one.id)
        assert on_view(store, c) == ["Hi", "one"]

    def test_one_message_is_removed_and_what_followed_stays(self, store):
        c, (asked, one, more, much) = talk(store, "Hi", "one", "more", "much")
        store.remove(c.id, one.id)
        assert on_view(store, c) == ["Hi", "more", "much"]
        store.remove(c.id, much.id)
        assert on_view(store, c) == ["Hi", "more"]
        store.remove(c.id, asked.id)
        assert on_view(store, c) == ["more"]
        store.remove(c.id, more.id)
        assert on_view(store, c) == []

    def test_of_a_removed_version_what_followed_goes_too(self, store):
        c, (asked, one) = talk(store, "Hi", "one")
        two = store.add(c.id, asked.id, "assistant", "two")
        store.add(c.id, two.id, "user", "more")
        store.remove(c.id, two.id)
        assert on_view(store, c) == ["Hi", "one"]
        assert store.thread(c.id)[1].versions == (one.id,)
        _, (foreign,) = talk(store, "Other")
        with pytest.raises(DuoChatError, match="no longer part"):
            store.remove(c.id, foreign.id)

    def test_a_message_of_another_conversation_is_refused(self, store):
        c, _ = talk(store, "Hi", "one")
        _, (foreign,) = talk(store, "Other")
        for act in (
            lambda: store.add(c.id, foreign.id, "assistant", "x"),
            lambda: store.select(c.id, foreign.id),
            lambda: store.settle(c.id, foreign.id),
        ):
            with pytest.raises(DuoChatError, match="no longer part"):
                act()
        with pytest.raises(DuoChatError, match="role 'tool'"):
            store.add(c.id, None, "tool", "x")
        with pytest.raises(DuoChatError, match="no longer there"):
            store.message(12345)

    def test_an_answer_is_written_bit_by_bit(self, store):
        c, (asked,) = talk(store, "Hi")
        answer = store.add(c.id, asked.id, "assistant", "", {"finish": None})
        store.update(answer.id, "Grü")
        assert store.message(answer.id).meta == {"finish": None}
        store.update(answer.id, "Grüße 🙂", {"finish": "stop"}, STEPS)
        store.update(answer.id, "Grüße 🙂")
        assert store.message(answer.id).meta == {"finish": "stop"}
        assert store.trace(answer.id) == STEPS
        assert store.trace(asked.id) == []

    def test_half_a_surrogate_pair_does_no_harm(self, store):
        c, _ = talk(store, "a\ud83db", title="\ud83d")
        assert on_view(store, c) == ["a?b"]


class TestList:
    def test_latest_first(self, store):
        a, b = talk(store, "a")[0], talk(store, "b")[0]
        assert [c.id for c in store.conversations()] == [b.id, a.id]
        store.add(a.id, a.leaf, "assistant", "more")
        assert [c.id for c in store.conversations()] == [a.id, b.id]

    def test_search_finds_all_words_in_title_and_messages_of_all_branches(self, store):
        a, (asked, _) = talk(store, "How do I brew TEA?", "Hot water.", title="Kitchen")
        store.add(a.id, asked.id, "assistant", "Use ÄPFEL instead 100%")
        talk(store, "Nothing of that kind.")
        for query in ("tea", "kitchen tea", "äpfel", "hot", "100%"):
            assert [c.id for c in store.conversations(query)] == [a.id], query
        assert len(store.conversations(" ")) == 2
        for query in ("kitchen coffee", "tea%brew", "_", "ea? kitchen zzz"):
            assert store.conversations(query) == [], query

    def test_rename_and_configure(self, store):
        c, _ = talk(store, "Hi")
        assert store.rename(c.id, "  A  new\nname ").title == "A new name"
        assert len(store.rename(c.id, "x" * 10_000).title) == 200
        assert store.configure(c.id, {"stop": ("x",), "seed": 1}).settings == {"stop": ["x"], "seed": 1}

    def test_a_folder_is_kept_and_exported(self, store):
        c, _ = talk(store, "Hi")
        store.move(c.id, " Work  place ")
        assert store.get(c.id).folder == "Work place"
        (copy,) = store.import_(store.export(c.id))
        assert copy.folder == "Work place"
        assert store.move(c.id, "").folder == ""

    def test_users_see_their_own_and_what_began_without_a_password(self, store):
        open_to_all, of_ann = store.create(title="all"), store.create(title="ann", user="ann")
        said = store.add(of_ann.id, None, "user", "secret")
        (copy,) = store.import_(store.export(of_ann.id), "bob")
        seen = {user: {c.id for c in store.conversations(user=user)} for user in ("", "ann", "bob")}
        assert seen == {
            "": {open_to_all.id, of_ann.id, copy.id},
            "ann": {open_to_all.id, of_ann.id},
            "bob": {open_to_all.id, copy.id},
        }
        assert "ann" not in store.export(user="bob").replace(of_ann.title, "", 1)
        for user in ("", "ann"):
            store.allow(user, of_ann.id, said.id)
        store.allow("bob", open_to_all.id)
        for asked in ((of_ann.id, None), (open_to_all.id, said.id), ("", said.id)):
            with pytest.raises(DuoChatError, match="no longer there"):
                store.allow("bob", *asked)

    def test_delete_can_be_undone(self, store):
        c, said = talk(store, "Hi", "one")
        store.delete(c.id)
        assert store.get(c.id) is None
        assert store.conversations() == store.conversations("Hi") == store.thread(c.id) == []
        with pytest.raises(DuoChatError, match="no longer there"):
            store.add(c.id, said[-1].id, "user", "x")
        store.restore(c.id)
        assert on_view(store, c) == ["Hi", "one"]
        with pytest.raises(DuoChatError, match="no longer there"):
            store.restore("nothing")

    def test_the_trash_is_emptied_after_its_time(self, store, path, monkeypatch):
        old, (said,) = talk(store, "old")
        store.update(said.id, "old", steps=STEPS)
        store.delete(old.id)
        kept, _ = talk(store, "kept")
        Store(path).restore(old.id)
        store.delete(old.id)
        later = time.time() + 31 * 86400
        monkeypatch.setattr(time, "time", lambda: later)
        late = Store(path)
        with pytest.raises(DuoChatError, match="no longer there"):
            late.restore(old.id)
        assert late.trace(said.id) == []
        assert on_view(late, kept) == ["kept"]


class TestStaleTab:
    def test_a_stale_tab_makes_a_branch(self, store):
        c, (asked,) = talk(store, "Hi")
        other = store.add(c.id, asked.id, "assistant", "in the other tab")
        mine = store.add(c.id, asked.id, "assistant", "mine")
        assert mine.versions == (other.id, mine.id)


class TestFile:
    def test_everything_is_there_after_a_restart(self, store, path):
        c, (_, answer) = talk(store, "Hi", "one", title="T", seed=7)
        store.update(answer.id, "one", {"finish": "stop"}, STEPS)
        again = Store(path)
        assert again.get(c.id) == store.get(c.id)
        assert again.thread(c.id) == store.thread(c.id)
        assert again.trace(answer.id) == STEPS
        assert again.notice == ""

    @pytest.mark.parametrize("harm", ["text", "zeroed", "truncated"])
    def test_a_damaged_file_is_moved_aside(self, store, path, harm):
        for _ in range(30):
            talk(store, "x" * 3000)
        store.close()
        data = path.read_bytes()
        harmed = {"text": b"no database", "zeroed": data[:4096] + bytes(8192) + data[12288:], "truncated": data[:9000]}
        path.write_bytes(harmed[harm])
        fresh = Store(path)
        assert "was damaged: it was moved to" in fresh.notice
        aside = next(path.parent.glob("conversations.damaged-*.db"))
        assert aside.read_bytes()[:1000] == harmed[harm][:1000]
        assert fresh.conversations() == []
        talk(fresh, "Hi")
        assert Store(path).notice == ""

    def test_a_file_of_a_newer_version_is_left_alone(self, store, path):
        store.close()
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA user_version = 99")
        with pytest.raises(DuoChatError, match="newer DuoChat"):
            Store(path)
        assert sqlite3.connect(path).execute("PRAGMA user_version").fetchone() == (99,)

    def test_an_unusable_folder_is_a_sentence(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(DuoChatError, match="set DUOCHAT_DATA"):
            Store(tmp_path / "file" / "conversations.db")

    def test_a_full_disk_is_a_sentence_and_nothing_is_lost(self, store):
        c, (said,) = talk(store, "Hi")
        store._db.execute("PRAGMA max_page_count = 20")
        with pytest.raises(DuoChatError, match="full"):
            store.add(c.id, said.id, "assistant", "x" * 200_000)
        assert on_view(store, c) == ["Hi"]
        store._db.execute("PRAGMA max_page_count = 100000")
        store.add(c.id, said.id, "assistant", "again")
        assert on_view(store, c) == ["Hi", "again"]

    def test_the_folder_can_be_chosen(self, monkeypatch, tmp_path):
        monkeypatch.setenv("DUOCHAT_DATA", str(tmp_path / "mine"))
        assert data_dir() == tmp_path / "mine"
        monkeypatch.delenv("DUOCHAT_DATA")
        assert data_dir().name == "duochat"
        assert data_dir().is_absolute()

    def test_threads_do_not_lose_messages(self, store):
        c, _ = talk(store, "Hi")
        write = lambda: [store.add(c.id, c.leaf, "assistant", "x") for _ in range(20)]  # noqa: E731
        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store.thread(c.id)[1].versions) == 80
        assert store.get(c.id).version == c.version + 80

    def test_processes_do_not_lose_messages(self, store, path):
        c, _ = talk(store, "Hi")
        script = (
            "import sys; from pathlib import Path; from duochat.app.store import Store\n"
            "store = Store(Path(sys.argv[1])); print('ready', flush=True); input()\n"
            "for _ in range(40): store.add(sys.argv[2], int(sys.argv[3]), 'assistant', 'x')"
        )
        root = str(Path(__file__).parents[1])
        call = [sys.executable, "-c", script, path, c.id, str(c.leaf)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {**os.environ, "PYTHONPATH": root}}
        others = [subprocess.Popen(call, text=True, **pipes) for _ in range(2)]
        for other in others:
            assert other.stdout.readline() == "ready\n"
        for other in others:
            print(file=other.stdin, flush=True)
        for _ in range(40):
            store.add(c.id, c.leaf, "assistant", "x")
        assert [other.wait(60) for other in others] == [0, 0]
        assert len(store.thread(c.id)[1].versions) == 120


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=30)
TRICKY = st.lists(st.sampled_from(["## You", "# T", "\\## You", "\n", "a", "## Assistant ", "\\# x", " "]), max_size=6)
CONTENT = TEXT | TRICKY.map("\n".join)
TITLES = TEXT.map(lambda t: " ".join(t.split()) or "T")


def packed(columns):
    return b64encode(lzma.compress(json.dumps(columns).encode())).decode()


class TestExchange:
    def test_json_keeps_all_branches_settings_and_traces(self, store):
        c, (asked, one) = talk(store, "Hi", "one", title="T", seed=7)
        store.update(one.id, "one", {"finish": "stop"}, STEPS)
        store.add(c.id, asked.id, "assistant", "two")
        store.select(c.id, one.id)
        c = store.get(c.id)
        (copy,) = store.import_(store.export(c.id))
        assert copy.id != c.id
        assert (copy.title, copy.settings, copy.created, copy.updated) == (c.title, c.settings, c.created, c.updated)
        thread = store.thread(copy.id)
        assert [(m.role, m.content, m.meta, len(m.versions)) for m in thread] == [
            ("user", "Hi", {}, 1),
            ("assistant", "one", {"finish": "stop"}, 2),
        ]
        assert store.trace(thread[1].id) == STEPS
        assert store.message(thread[1].versions[1]).content == "two"

    def test_all_at_once(self, store):
        talk(store, "a")
        talk(store, "b", "c")
        assert len(store.import_(store.export())) == 2
        assert len(store.conversations()) == 4

    def test_markdown_is_what_is_on_view(self, store):
        c, (asked, _) = talk(store, "Hi", "one", title="T")
        store.add(c.id, asked.id, "assistant", "# Big\n\ntwo")
        text = store.export(c.id, "markdown")
        assert text == "# T\n\n## You\n\nHi\n\n## Assistant\n\n# Big\n\ntwo\n"
        (copy,) = store.import_(text)
        assert (copy.title, on_view(store, copy)) == ("T", ["Hi", "# Big\n\ntwo"])

    @given(st.lists(st.tuples(TITLES, st.lists(CONTENT, min_size=1, max_size=4)), min_size=1, max_size=3))
    def test_markdown_comes_back_letter_by_letter(self, talks):
        """Also when a message looks like the headings around it."""
        parcels = [
            Parcel(
                title=title,
                messages=[Entry(id=i, parent=i - 1 if i else None, role="user", content=c) for i, c in enumerate(cs)],
                leaf=len(cs) - 1,
            )
            for title, cs in talks
        ]
        back = exchange.parse(exchange.markdown(parcels))
        assert [(p.title, [m.content for m in p.messages]) for p in back] == talks

    def test_markdown_from_elsewhere(self):
        (parcel,) = exchange.parse("\ufeff\r\n## You\r\nHi\r\n## Assistant\r\n\r\nHello\r\n")
        assert [(m.role, m.content) for m in parcel.messages] == [("user", "Hi"), ("assistant", "Hello")]

    def good(self):
        """A file of before, whose trace is a list of steps."""
        said = [Entry(id=1, role="user", content="Hi"), Entry(id=2, parent=1, role="assistant", content="x")]
        body = json.loads(exchange.dump([Parcel(title="T", messages=said, leaf=2)]))
        body["version"] = 1
        body["conversations"][0]["messages"][1]["trace"] = [json.loads(step.to_json()) for step in STEPS]
        return body, body["conversations"][0], body["conversations"][0]["messages"]

    def test_the_good_file_is_read(self):
        (parcel,) = exchange.parse(json.dumps(self.good()[0]))
        assert packing.unpack(parcel.messages[1].trace) == STEPS

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda body, c, m: body.update(format="other"),
            lambda body, c, m: body.update(version=3),
            lambda body, c, m: body.update(conversations={}),
            lambda body, c, m: body.update(conversations=[1]),
            lambda body, c, m: body.update(conversations=[]),
            lambda body, c, m: c.update(messages=None),
            lambda body, c, m: c.update(title=5),
            lambda body, c, m: c.update(settings=[]),
            lambda body, c, m: c.update(leaf=9),
            lambda body, c, m: m.append("x"),
            lambda body, c, m: (m[1].update(id=1), c.update(leaf=1)),
            lambda body, c, m: m[0].update(parent=2),
            lambda body, c, m: m[1].update(parent=True),
            lambda body, c, m: m[0].update(role="tool"),
            lambda body, c, m: m[0].update(content=None),
            lambda body, c, m: m[0].update(meta="x"),
            lambda body, c, m: m[0].update(meta={"notices": "x"}),
            lambda body, c, m: m[0].update(meta={"figures": {"rate": []}}),
            lambda body, c, m: m[0].update(meta={"finish": 5}),
            lambda body, c, m: c.update(settings={"stop": 5}),
            lambda body, c, m: c.update(settings={"temperature": "hot"}),
            lambda body, c, m: m[1].update(trace=5),
            lambda body, c, m: m[1].update(trace="%%%"),
            lambda body, c, m: m[1].update(trace="AAAA"),
            lambda body, c, m: m[1].update(trace=packed([5])),
            lambda body, c, m: m[1].update(trace=packed([{"text": 5}])),
            lambda body, c, m: m[1].update(trace=packed([])[:-8]),
            lambda body, c, m: m[1].update(trace=[5]),
            lambda body, c, m: m[1]["trace"][1].update(text=5),
            lambda body, c, m: m[1]["trace"][1].update(evil=5),
            lambda body, c, m: m[1]["trace"][1].update(draft_texts={"0": ["<b>"]}),
            lambda body, c, m: m[1]["trace"][1]["round"].update(started="0"),
            lambda body, c, m: m[1]["trace"][1]["round"].update(started=float("nan")),
            lambda body, c, m: m[1]["trace"][1]["round"].update(tokens=["1"]),
            lambda body, c, m: m[1]["trace"][1]["round"]["drafted"][0].update(prob=None),
        ],
    )
    def test_a_wrong_file_is_a_sentence_and_adds_nothing(self, store, spoil):
        body, conversation, messages = self.good()
        spoil(body, conversation, messages)
        with pytest.raises(DuoChatError, match="choose a file that Export has made"):
            store.import_(json.dumps(body))
        assert store.conversations() == []

    def test_a_number_too_large_for_the_page_is_refused(self):
        text = json.dumps(self.good()[0])
        assert '"prob": 0.5' in text
        with pytest.raises(DuoChatError, match="values of a wrong kind"):
            exchange.parse(text.replace('"prob": 0.5', '"prob": 1e999'))

    @pytest.mark.parametrize("text", ["", "   ", "hello", "{", "{}", "[]", "# Only a title", '{"a": ' * 100_000])
    def test_no_export_at_all(self, text):
        with pytest.raises(DuoChatError, match="choose a file that Export has made"):
            exchange.parse(text)

    def test_own_exports_can_always_be_imported(self, store, monkeypatch):
        """Ten copies of one small chat made a file that the page refused."""
        c, (_, answer) = talk(store, "Hi", "one")
        store.update(answer.id, "one", steps=STEPS)
        whole = store.export(c.id)
        monkeypatch.setattr(exchange, "LARGEST", len(whole) - 1)
        (copy,) = store.import_(store.export(c.id))
        assert on_view(store, copy) == ["Hi", "one"]
        assert store.trace(store.thread(copy.id)[1].id) == []
        monkeypatch.setattr(exchange, "LARGEST", 20)
        with pytest.raises(DuoChatError, match="export fewer"):
            store.export(c.id)

    @pytest.mark.parametrize("name", ["formula", "h200-duotree"])
    def test_a_hundred_answers_with_their_traces_are_at_most_10_megabytes(self, store, name):
        """Of 256 tokens each, also where the rounds draft the most: ten of fewer tokens, in proportion."""
        recording = Recording.read((ROOT / "assets" / "traces" / f"{name}.jsonl").read_text("utf-8").splitlines())
        answer = recording.answer
        c = store.create()
        for _ in range(10):
            store.add(c.id, None, "assistant", answer.text, steps=answer.steps)
        text = store.export(c.id)
        assert len(text.encode()) < 10e6 / 10 * len(answer.token_ids) / 256
        (copy,) = store.import_(text)
        kept, back = (store.thread(id)[-1].id for id in (c.id, copy.id))
        assert store.trace(back) == store.trace(kept)
        assert [r.tokens for r in Answer(store.trace(back)).rounds] == [r.tokens for r in answer.rounds]

    def test_too_large(self, monkeypatch):
        monkeypatch.setattr(exchange, "LARGEST", 10)
        with pytest.raises(DuoChatError, match="export fewer"):
            exchange.parse("x" * 11)


class TestTraces:
    def test_a_trace_comes_back_to_five_decimals(self):
        back = packing.unpack(packing.pack(SPOKEN))
        assert [(s.text, s.pieces, s.draft_texts, s.finish) for s in back] == [
            (s.text, s.pieces, s.draft_texts, s.finish) for s in SPOKEN
        ]
        assert all(abs(a.round.ended - b.round.ended) < 1e-5 for a, b in zip(back, SPOKEN, strict=True) if a.round)
        assert packing.unpack(packing.pack(back)) == back
        assert frame(Answer(back), Options())["rounds"] == frame(Answer(SPOKEN), Options())["rounds"]

    @given(st.recursive(st.integers() | st.text(max_size=3) | st.none(), lambda v: st.lists(v, max_size=4)
           | st.dictionaries(st.sampled_from("abc"), v, max_size=3), max_leaves=12).map(lambda v: [v, v]))  # fmt: skip
    @settings(max_examples=200)
    def test_columns_come_back_as_rows(self, rows):
        assert packing._rows(packing._columns(rows)) == rows

    def test_a_bomb_is_refused(self, monkeypatch):
        monkeypatch.setattr(packing, "LONGEST", 1000)
        for pack in (lzma.compress, zlib.compress):
            with pytest.raises(ValueError, match="too long"):
                packing.unpack(pack(b"0" * 10_000))

    def test_a_damaged_trace_is_none(self, store):
        _, (said,) = talk(store, "Hi")
        store.update(said.id, "Hi", steps=STEPS)
        with store._db.writing():
            store._db.execute("UPDATE traces SET steps = ?", b"nothing")
        assert store.trace(said.id) == []


class TestOld:
    """What an earlier DuoChat has written opens as it did; tests/old was made by its code."""

    def check(self, store, conversations):
        (c,) = (c for c in conversations if c.title == "The formula")
        _, answer = store.thread(c.id)
        assert (c.settings["temperature"], c.settings["stop"]) == (0.7, ["END"])
        assert answer.content.startswith("The quadratic formula gives")
        assert (answer.meta["figures"]["plain_rate"], len(answer.versions)) == (15.0, 2)
        steps = store.trace(answer.id)
        assert "".join(s.text for s in steps) == answer.content
        assert (steps[1].round.speculation, steps[1].round.reason) == ("paused", "the measured gain is 0.9: too little")
        assert "Empty" in [c.title for c in conversations]

    def test_an_old_store(self, tmp_path):
        shutil.copy(ROOT / "tests" / "old" / "conversations.db", tmp_path / "c.db")
        store = Store(tmp_path / "c.db")
        assert store.notice == ""
        self.check(store, store.conversations())
        self.check(store, store.import_(store.export()))

    def test_an_old_export(self, store):
        self.check(store, store.import_((ROOT / "tests" / "old" / "export.json").read_text("utf-8")))
