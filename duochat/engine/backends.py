"""Which backend serves which lane of a pair: by what its files are, and by measurement where two can."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from duochat import DuoChatError
from duochat.config import AUTO, FIELDS, Settings
from duochat.engine import native
from duochat.engine.lanes import Drafter, Target
from duochat.engine.machine import available_cores, measurer
from duochat.models.files import Files
from duochat.models.store import Progress, recalled
from duochat.models.trim import HALF

SHORT = 128  # tokens that a draft reads where the target waits for it: simulated, no task gains from more
TURNS = 3  # of two lanes that are compared
Lane = TypeVar("Lane", Drafter, Target)
OF_LLAMA = ("gpu_layers", "tensor_overrides", "devices", "split", "flash_attention", "cache_type", "rpc")  # settings
OF_TORCH = ("device", "dtype", "context_length", "compile", "reproducible")


def load_drafter(settings: Settings, path: Path, target: Target) -> Drafter:
    """The draft in C where that fits the file and is quicker here, else on llama.cpp. Raises DuoChatError.

    On the target's own cores it proposes half as many tokens: that saves a fifth of its time and costs one in eighty of
    its first choices.
    """
    from duochat.engine.llama.drafter import LlamaDrafter

    threads = 1 if settings.draft_threads == AUTO else settings.draft_threads
    vocabulary = HALF if target.shares_cores and settings.draft_vocabulary == AUTO else settings.draft_vocabulary
    asked = (path, min(settings.context_length, target.context_length), threads, vocabulary)
    own, load = native.load(*asked), partial(LlamaDrafter, *asked)
    seconds = lambda drafter: drafter.measure((1,), threads)[1]  # noqa: E731
    drafter = _quicker("drafter", asked, own, load, seconds) if own else load()
    if target.shares_cores:
        drafter.window = SHORT
    elif drafter is own:
        own.stand_aside(available_cores() - 1)
    return drafter


def _quicker(
    role: str, asked: tuple[Any, ...], own: Lane, load: Callable[[], Lane], seconds: Callable[[Lane], float]
) -> Lane:
    """The lane in C, or the one on llama.cpp if that takes less time here. Both are measured in turns, and again at the
    next start if llama.cpp won: on a busy machine it may win by chance, and the lane in C would be lost for good.

    asked: of the lane, its file first.
    """
    lanes = {"native": own}

    def proved() -> str | None:
        try:
            lanes["llama.cpp"] = load()
        except DuoChatError:  # llama.cpp cannot run here
            return None
        turns = [[seconds(lane) for lane in lanes.values()] for _ in range(TURNS)]
        ours, theirs = map(min, zip(*turns, strict=True))
        return "native" if ours <= theirs else None

    about = (*asked, asked[0].stat().st_mtime_ns, own.describe(), measurer())
    quicker = recalled(role, about, proved) or [*lanes][-1]
    for name, lane in lanes.items():
        if name != quicker:
            lane.close()
    return lanes[quicker]


def load_target(settings: Settings, files: Files, progress: Progress) -> Target:
    """The target on the backend that was chosen for its files. Raises DuoChatError."""
    on = {"torch": _on_torch, "llama": _on_llama, "native": _on_native}
    return on[files.backend](settings, files.target, progress)


def _cores(settings: Settings) -> int:
    return available_cores() if settings.target_threads == AUTO else settings.target_threads


def _on_native(settings: Settings, path: Path, progress: Progress) -> Target:
    if reason := native.unfit(path):
        raise DuoChatError(f"The native lane does not take {path.name}, {reason}: leave out backend.")
    progress("Loading the target model", 0, 0)
    return native.NativeTarget(path, settings.context_length, _cores(settings))


def _on_llama(settings: Settings, path: Path, progress: Progress) -> Target:
    """On llama.cpp; where that is not asked for, in C if the file fits and that is quicker."""
    from duochat.engine.llama.target import LlamaTarget

    progress("Loading the target model", 0, 0)
    named = _named(settings, OF_LLAMA)
    asked = (path, settings.context_length, _cores(settings), settings.reproducible)
    load = partial(LlamaTarget.load, *asked, **named)
    if settings.backend != AUTO or any(named[name] != FIELDS[name].default for name in named) or native.unfit(path):
        return load()
    own = _on_native(settings, path, progress)
    return _quicker("target", asked, own, load, lambda target: target.measure((1,), 128)[1])


def _on_torch(settings: Settings, path: Path, progress: Progress) -> Target:
    """path: a folder, or a GGUF file that is unpacked."""
    from duochat.engine.pytorch import TorchTarget

    progress("Loading the target model", 0, 0)
    return TorchTarget.load(path, threads=_cores(settings), **_named(settings, OF_TORCH))


def _named(settings: Settings, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in names}
