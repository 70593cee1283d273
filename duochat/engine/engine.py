"""Both lanes with their models, their measured costs and what was learned of them: all that outlives a request."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from duochat import DuoChatError
from duochat.config import Settings
from duochat.engine.budget import Costs, available_cores, measure
from duochat.engine.decoding import Request, decode
from duochat.engine.drafter import LlamaDrafter
from duochat.engine.lanes import Drafter, Target, never
from duochat.engine.rounds import Round
from duochat.engine.target import TorchTarget
from duochat.engine.tree import Acceptance
from duochat.models import Progress, cache_dir, fetch, require_pair, target_folder
from duochat.models.store import silent

CPU_WIDTHS = (1, 2, 4, 8, 16)
GPU_WIDTHS = (1, 2, 4, 8, 16, 32, 64)


class Engine:
    """One pair of models, ready to decode. One request at a time."""

    def __init__(self, target: Target, drafter: Drafter | None, costs: Costs, fault: str = "") -> None:
        """fault: why there is no drafter."""
        self.target, self.drafter, self.costs, self.fault = target, drafter, costs, fault
        self.acceptance = Acceptance()
        self.folder = Path()

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together."""
        return self.target.context_length

    @property
    def eos(self) -> frozenset[int]:
        """Token ids that end an answer."""
        return self.target.eos

    @classmethod
    def load(cls, settings: Settings, progress: Progress = silent) -> Engine:
        """Fetch, convert and load the pair, measure what each lane costs (cached by hardware and models).

        A draft that cannot be used leaves `fault` set: the target then decodes alone. Raises DuoChatError when the
        target cannot be used. progress(label, done, total).
        """
        sys.setswitchinterval(2e-4)  # two lanes share the interpreter: hand it over quickly
        folder = target_folder(fetch(settings.target, progress), progress)
        progress("loading the target model", 0, 0)
        cores = available_cores()
        target = _target(settings, folder, cores)
        try:
            draft = fetch(settings.draft, progress)
            require_pair(folder, draft)
            progress("loading the draft model", 0, 0)
            drafter = LlamaDrafter(draft, min(settings.context_length, target.context_length), 1)
        except DuoChatError as fault:
            engine = cls(target, None, Costs.of({1: 1.0}, {1: 1.0}), str(fault))
        else:
            engine = cls(target, drafter, _costs(settings, target, drafter, (folder, draft), cores, progress))
        engine.folder = folder
        return engine

    def decode(
        self,
        context: Sequence[int],
        request: Request,
        cancelled: Callable[[], bool] = never,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[Round]:
        """Continue `context`; see `decoding.decode`."""
        yield from decode(context, request, self.target, self.drafter, self.costs, self.acceptance, cancelled, progress)

    def describe(self) -> dict[str, Any]:
        """The `hardware` object of `chat --json`."""
        return {
            **self.target.describe(),
            "draft_threads": self.costs.threads,
            "cores": available_cores(),
            "draft_fault": self.fault,
        }


def _target(settings: Settings, folder: Path, cores: int) -> TorchTarget:
    threads = max(1, cores // 2) if settings.target_threads == "auto" else settings.target_threads
    return TorchTarget.load(
        folder,
        device=settings.device,
        dtype=settings.dtype,
        context_length=settings.context_length,
        compile=settings.compile,
        quantize=settings.quantize,
        reproducible=settings.reproducible,
        threads=threads,
    )


def _costs(
    settings: Settings,
    target: TorchTarget,
    drafter: LlamaDrafter,
    files: Sequence[Path],
    cores: int,
    progress: Progress,
) -> Costs:
    """The calibration of this hardware and pair, from the cache or measured now."""
    on_cpu = target.device.type == "cpu"
    threads = None if settings.draft_threads == "auto" else settings.draft_threads
    about = [os.uname().nodename, cores, threads, settings.quantize, settings.compile, settings.reproducible]
    about += [target.describe(), *(str(f) for f in files), *(f.stat().st_mtime_ns for f in files)]
    name = hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()[:16]
    stored = cache_dir() / "calibration" / f"{name}.json"
    if stored.exists():
        costs = Costs.from_dict(json.loads(stored.read_text()))
        drafter.set_threads(costs.threads)
        return costs
    progress("measuring both devices", 0, 0)
    costs = measure(target, drafter, CPU_WIDTHS if on_cpu else GPU_WIDTHS, cores // 2 + 1 if on_cpu else cores, threads)
    stored.parent.mkdir(parents=True, exist_ok=True)
    stored.write_text(json.dumps(costs.to_dict()))
    return costs
