"""The files of a pair: fetched and checked once, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from duochat import DuoChatError
from duochat.config import Settings
from duochat.models.convert import require_target
from duochat.models.fetch import fetch
from duochat.models.pair import require_pair
from duochat.models.store import Progress, silent


@dataclass(frozen=True, slots=True)
class Files:
    """A pair on this disk. draft None: it cannot be used, and `fault` says why."""

    target: Path
    draft: Path | None
    fault: str = ""


def locate(settings: Settings, progress: Progress = silent) -> Files:
    """Fetch both files and see whether they can work together. Raises DuoChatError when the target cannot be one."""
    target = fetch(settings.target, progress)
    require_target(target)
    try:
        draft = fetch(settings.draft, progress)
        require_pair(target, draft)
    except DuoChatError as fault:
        return Files(target, None, str(fault))
    return Files(target, draft)
