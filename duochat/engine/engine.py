"""Both lanes with their models, their measured costs and what was learned of them: all that outlives a request."""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from duochat import DuoChatError
from duochat.config import Settings
from duochat.engine.backends import load_drafter, load_target
from duochat.engine.calibration import calibrate
from duochat.engine.costs import Costs
from duochat.engine.decoding import Request, decode
from duochat.engine.lanes import Drafter, Target, never
from duochat.engine.machine import available_cores, measurer
from duochat.engine.rounds import Round
from duochat.engine.tree import Acceptance
from duochat.models.files import Files, locate
from duochat.models.store import Progress, cache_dir, silent


class Engine:
    """One pair of models, ready to decode. One request at a time."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        costs: Costs | None = None,
        fault: str = "",
        store: Path | None = None,
    ) -> None:
        """fault: why there is no drafter. store: where the calibration is kept. Without `costs` both are measured."""
        self.target, self.drafter, self.fault, self.store = target, drafter, fault, store
        self.context_length, self.vocabulary = target.context_length, target.vocabulary
        self.acceptance = Acceptance()
        self.costs = costs or self._stored() or self.calibrate()

    @property
    def eos(self) -> frozenset[int]:
        """Tokens that end an answer; a chat adds those that its tokenizer names."""
        return self.target.eos

    @classmethod
    def load(cls, settings: Settings, progress: Progress = silent, files: Files | None = None) -> Engine:
        """Load the pair, measure what each lane costs (cached by hardware and models).

        files: of this pair, as `locate` found them; without them it is asked.

        A draft that cannot be used leaves `fault` set: the target then decodes alone. Raises DuoChatError when the
        target cannot be used. progress(label, done, total).
        """
        gc.unfreeze()
        engine = cls._load(settings, files or locate(settings, progress), progress)
        gc.collect()
        gc.freeze()  # what loading made lasts; to look through it would stop a chat now and then
        return engine

    @classmethod
    def _load(cls, settings: Settings, files: Files, progress: Progress) -> Engine:
        sys.setswitchinterval(2e-4)  # two lanes share the interpreter: hand it over quickly
        target, draft = load_target(settings, files, progress), files.draft
        if draft is None:
            return cls(target, None, fault=files.fault)
        try:
            progress("Loading the draft model", 0, 0)
            drafter = load_drafter(settings, draft, target)
        except DuoChatError as fault:
            return cls(target, None, fault=str(fault))
        progress("Measuring both devices", 0, 0)
        about = [files.target, draft, draft.stat().st_mtime_ns, settings.context_length, settings.draft_threads]
        about += [settings.draft_vocabulary, target.describe(), drafter.describe(), *measurer()]
        name = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
        return cls(target, drafter, store=cache_dir() / "calibration" / f"{name}.json")

    def decode(
        self,
        context: Sequence[int],
        request: Request,
        cancelled: Callable[[], bool] = never,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[Round]:
        """Continue `context`; see `decoding.decode`."""
        lanes = (self.target, self.drafter, self.costs, self.acceptance)
        yield from decode(context, request, *lanes, cancelled, progress)
        if self.costs.drifted and self.store:  # the next start measures again
            with suppress(OSError):
                self.store.unlink(missing_ok=True)

    def calibrate(self) -> Costs:
        """Measure both devices anew and keep the result for the next start. Seconds; nothing else should run."""
        self.costs = calibrate(self.target, self.drafter)
        if self.store:
            with suppress(OSError):  # a cache that cannot be written: the next start measures again
                self.store.parent.mkdir(parents=True, exist_ok=True)
                self.store.write_text(json.dumps(self.costs.to_dict()))
        return self.costs

    def _stored(self) -> Costs | None:
        """The calibration of an earlier start; None when there is none that can be read."""
        try:
            return Costs.from_dict(json.loads(self.store.read_text())) if self.store else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def describe(self) -> dict[str, Any]:
        """The `hardware` object of `chat --json`."""
        return {
            **self.target.describe(),
            **(self.drafter.describe() if self.drafter else {}),
            "shares_cores": self.target.shares_cores,
            "draft_threads": self.costs.drafting.hands.now,
            "cores": available_cores(),
            "draft_fault": self.fault,
            "costs": self.costs.to_dict(),
        }
