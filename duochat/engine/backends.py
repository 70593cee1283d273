"""Which backend serves which lane of a pair: by what its files are, and by measurement where two can."""

from __future__ import annotations

import hashlib
import platform
from contextlib import suppress
from pathlib import Path

from duochat import DuoChatError
from duochat.config import AUTO, Settings
from duochat.engine import native
from duochat.engine.costs import available_cores
from duochat.engine.lanes import Drafter, Target
from duochat.engine.llama.drafter import LlamaDrafter
from duochat.engine.llama.target import LlamaTarget
from duochat.models import Progress, target_folder
from duochat.models.files import Files
from duochat.models.store import cache_dir


def load_drafter(settings: Settings, path: Path, target: Target) -> Drafter:
    """The draft in C where that fits the file and is quicker here, else on llama.cpp. Raises DuoChatError."""
    threads = 1 if settings.draft_threads == AUTO else settings.draft_threads
    length = min(settings.context_length, target.context_length)
    asked = (path, length, threads, settings.draft_vocabulary)
    own = native.load(*asked)
    if own is None:
        return LlamaDrafter(*asked[:3], vocabulary=asked[3])
    about = [*asked, path.stat().st_mtime_ns, own.describe(), available_cores(), platform.node()]
    verdict = cache_dir() / "calibration" / f"drafter-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}"
    with suppress(OSError):
        if verdict.read_text() == "native":
            return own
    try:
        other = LlamaDrafter(*asked[:3], vocabulary=asked[3])
    except DuoChatError:  # llama.cpp cannot run here
        return own
    quicker, slower = sorted((own, other), key=lambda drafter: drafter.measure((1,), threads)[1])
    slower.close()
    with suppress(OSError):  # a cache that cannot be written: measured again
        verdict.parent.mkdir(parents=True, exist_ok=True)
        verdict.write_text("native" if quicker is own else "llama.cpp")
    return quicker


def load_target(settings: Settings, files: Files, progress: Progress) -> Target:
    """The target on the backend that was chosen for its files. Raises DuoChatError."""
    on = {"torch": _on_torch, "llama": _on_llama}
    return on[files.backend](settings, files.target, progress)


def _on_llama(settings: Settings, path: Path, progress: Progress) -> LlamaTarget:
    progress("Loading the target model", 0, 0)
    auto = settings.target_threads == AUTO
    return LlamaTarget.load(
        path,
        context_length=settings.context_length,
        threads=available_cores() if auto else settings.target_threads,
        gpu_layers=settings.gpu_layers,
        tensor_overrides=settings.tensor_overrides,
        devices=settings.devices,
        split=[float(share) for share in settings.split.split(",") if share],
        flash_attention={AUTO: None}.get(settings.flash_attention, settings.flash_attention),
        cache_type=settings.cache_type,
        reproducible=settings.reproducible,
        rpc=settings.rpc,
    )


def _on_torch(settings: Settings, path: Path, progress: Progress) -> Target:
    """path: a folder, or a GGUF file that is unpacked into the cache."""
    from duochat.engine.pytorch import TorchTarget  # torch comes with it

    folder = target_folder(path, progress)
    progress("Loading the target model", 0, 0)
    auto = settings.target_threads == AUTO
    return TorchTarget.load(
        folder,
        device=settings.device,
        dtype=settings.dtype,
        context_length=settings.context_length,
        compile=settings.compile,
        reproducible=settings.reproducible,
        threads=max(1, available_cores() // 2) if auto else settings.target_threads,
        prompt_threads=available_cores() if auto else 0,
    )
