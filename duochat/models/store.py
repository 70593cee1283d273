"""The user's cache folder, and making a file or folder in it once: whole or not at all, by one process at a time."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from duochat import DuoChatError

Progress = Callable[[str, int, int], None]  # (label, done, total); total 0 = not known
PARTIAL = ".partial"
FULL = (errno.ENOSPC, errno.EDQUOT)
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR)


def silent(label: str, done: int, total: int) -> None:
    """The progress of a caller that shows none."""


def cache_dir() -> Path:
    """Where fetched and converted models lie: $DUOCHAT_CACHE, else the user's cache folder."""
    import platformdirs

    return Path(os.environ.get("DUOCHAT_CACHE") or platformdirs.user_cache_dir("duochat", appauthor=False))


def make_once(
    final: Path, build: Callable[[Path], None], progress: Progress = silent, valid: Callable[[Path], bool] = Path.exists
) -> Path:
    """`final`, made by `build(partial)` when it is not there or not valid.

    `build` writes beside the final name; a rename finishes it, so an interruption leaves nothing under that name.
    A second process waits for the first. Raises DuoChatError on a full disk or a folder that cannot be written.
    """
    if valid(final):
        return final
    with disk_faults(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final, progress):
            if not valid(final):
                _build(final, build)
    return final


def _build(final: Path, build: Callable[[Path], None]) -> None:
    partial = final.with_name(f"{final.name}{PARTIAL}")
    remove(partial)  # what an interrupted process left
    try:
        build(partial)
        remove(final)
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
    """Bytes in all files below a folder, which another process may be writing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # moved since it was listed
            continue
    return total


@contextmanager
def _locked(final: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock of a file to be; the system frees it when its process dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(final.with_name(f"{final.name}.lock"))
    while True:
        try:
            lock.acquire(timeout=0.5)
            break
        except Timeout:
            progress(f"Waiting for another DuoChat that is making {final.name}", 0, 0)
    try:
        yield
    finally:
        lock.release()


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
