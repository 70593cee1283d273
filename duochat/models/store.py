"""The user's cache folder: files made in it once, whole or not at all, and facts remembered about files.

A cache that cannot be written costs time, not the run: what must be made says so in one sentence, facts are found anew.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from duochat import DuoChatError

Progress = Callable[[str, int, int], None]  # (label, done, total); total 0 = not known
PARTIAL = ".partial"
CHUNK = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR)


def silent(label: str, done: int, total: int) -> None:
    """The progress of a caller that shows none."""


def cache_dir() -> Path:
    """Where fetched models lie: $DUOCHAT_CACHE, else the user's cache folder."""
    import platformdirs

    return Path(os.environ.get("DUOCHAT_CACHE") or platformdirs.user_cache_dir("duochat", appauthor=False))


# ---------------------------------------------------------------- making


def make_once(
    final: Path, build: Callable[[Path], None], progress: Progress = silent, valid: Callable[[Path], bool] = Path.exists
) -> Path:
    """`final`, made by `build(partial)` when it is not there or not valid.

    `build` writes beside the final name; a rename finishes it, so an interruption leaves nothing under that name.
    A second process waits for the first. Raises DuoChatError on a full disk or a folder that cannot be written.
    """
    if valid(final):
        return final
    from filelock import FileLock, Timeout

    with disk_faults(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(final.with_name(f"{final.name}.lock"))  # the system frees it when its process dies
        try:
            held = lock.acquire(timeout=0.5)
        except Timeout:
            progress(f"Waiting for another DuoChat that is making {final.name}", 0, 0)
            held = lock.acquire()
        with held:
            if not valid(final):
                _build(final, build)
    return final


def _build(final: Path, build: Callable[[Path], None]) -> None:
    partial = final.with_name(f"{final.name}{PARTIAL}")
    remove(partial)  # what an interrupted process left
    try:
        build(partial)
        os.replace(partial, final)
    finally:
        remove(partial)


@contextmanager
def workshop(partial: Path) -> Iterator[Path]:
    """An empty folder beside a file in the making, gone afterwards."""
    folder = partial.with_name(f"{partial.name}.d")
    remove(folder)
    folder.mkdir()
    try:
        yield folder
    finally:
        remove(folder)


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def weight(folder: Path) -> int:
    """Bytes in all files below a folder, which another process may be writing: what has gone meanwhile is no fault."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(where, name)).st_size
    return total


@contextmanager
def disk_faults(path: Path) -> Iterator[None]:
    """Turn a full disk or a refused write into one sentence."""
    try:
        yield
    except OSError as fault:
        if fault.errno in FULL:
            raise full(path) from None
        if fault.errno not in UNWRITABLE:
            raise
        where = fault.filename or path
        raise DuoChatError(f"{where} cannot be written: set DUOCHAT_CACHE to a folder of yours.") from None


def full(path: Path, need: int = 0) -> DuoChatError:
    """The fault of a disk with too little room; need in bytes."""
    size = f"{need / 2**30:.1f} GiB are needed for {path.name}; " if need else ""
    return DuoChatError(f"{path.parent} has no room left: {size}free some or set DUOCHAT_CACHE to another disk.")


def need_room(path: Path, size: int) -> None:
    """Raises DuoChatError unless `size` bytes fit on the disk of `path`, whose folder exists."""
    if shutil.disk_usage(path.parent).free < size:
        raise full(path, size)


# ---------------------------------------------------------------- facts about files


def remembered(name: str, path: Path, find: Callable[[], Any]) -> Any:
    """What `find` says of a file, a JSON value: asked once, until the file's place, size or times change."""
    state = path.stat()
    about = (str(path.resolve()), state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    return recalled(name, about, find)


def recalled(name: str, about: object, find: Callable[[], Any]) -> Any:
    """What `find` says, a JSON value: asked once, and again where it was None. about: its repr tells all that the
    answer depends on."""
    note = cache_dir() / "facts" / f"{name}-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}.json"
    with suppress(OSError, ValueError):
        return json.loads(note.read_text(encoding="utf-8"))
    found = find()
    with suppress(OSError):
        if found is not None:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps(found), encoding="utf-8")
    return found


def digest_of(path: Path, progress: Progress = silent) -> str:
    """The SHA-256 of a file in hexadecimal, read whole when it is asked for the first time."""
    return remembered("sha256", path, lambda: sha256(path, progress))


def sha256(path: Path, progress: Progress = silent) -> str:
    """The SHA-256 of a file in hexadecimal."""
    sha = hashlib.sha256()
    with path.open("rb") as f:
        copy(f, sha.update, progress, f"Checking {shown(path)}", path.stat().st_size)
    return sha.hexdigest()


def shown(path: Path) -> str:
    """The name of a file, also of one in the making."""
    return path.name.removesuffix(PARTIAL)


def copy(source: IO[bytes], sink: Callable[[bytes], object], progress: Progress, label: str, size: int) -> None:
    """Hand a stream of so many bytes to `sink`, in chunks."""
    done = 0
    while chunk := source.read(CHUNK):
        sink(chunk)
        done += len(chunk)
        progress(label, done, size)
