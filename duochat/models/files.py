"""The files of a pair: fetched and checked once, before anything is loaded."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from duochat import DuoChatError
from duochat.config import AUTO, Settings
from duochat.models import catalog, folder, gguf, weights
from duochat.models.fetch import fetch
from duochat.models.pair import check_pair
from duochat.models.store import Progress, silent

HALF = 2  # bytes of a weight on a GPU, unpacked
ROOM = 0.8  # of a GPU's memory that is for weights


@dataclass(frozen=True, slots=True)
class Files:
    """A pair on this disk. draft None: it cannot be used, and `fault` says why. backend: what runs the target."""

    target: Path
    draft: Path | None
    fault: str = ""
    backend: str = "torch"


def locate(settings: Settings, progress: Progress = silent) -> Files:
    """Fetch both files and see whether they can work together. Raises DuoChatError when the target cannot be one."""
    target = fetch(settings.target, progress)
    backend = backend_of(target, settings.backend)
    try:
        draft = fetch(settings.draft, progress)
        if not (pair := check_pair(target, draft)).fits:
            raise DuoChatError(pair.sentence())
    except DuoChatError as fault:
        return Files(target, None, str(fault), backend)
    return Files(target, draft, backend=backend)


def backend_of(target: Path, asked: str = AUTO) -> str:
    """What runs the target. auto: a GGUF file stays as it is, on llama.cpp, unless a GPU has room for it unpacked and
    torch can run it: that is faster there. Raises DuoChatError when nothing can.
    """
    if target.is_dir() or asked == "torch":
        if asked not in (AUTO, "torch"):
            raise DuoChatError(f"{target} is a folder, and llama.cpp reads GGUF files: leave out backend.")
        require_target(target)
        return "torch"
    header = gguf.read(target)
    if asked != AUTO:
        return asked
    if HALF * sum(t.elements for t in header.tensors) < ROOM * catalog.measure().gpu * 2**30:
        with suppress(DuoChatError):
            require_target(target)
            return "torch"
    return "llama"


def require_target(path: Path) -> None:
    """Raises DuoChatError when `path` cannot serve as a target of torch; reads no weights."""
    if path.is_dir():
        folder.require_loadable(path)
    else:
        weights.config(gguf.read(path))
