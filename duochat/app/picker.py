"""The picker of model pairs: what is ready, what lies on this disk, what fits, what is loading, what failed and why."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from duochat import DuoChatError
from duochat.app.jobs import Job, Jobs
from duochat.chat.answer import Engine
from duochat.config import PAIR, Settings, check, presets
from duochat.models import store
from duochat.models.catalog import Entry, list_models, measure, unfit
from duochat.models.fetch import cached
from duochat.models.files import backend_of
from duochat.models.local import Local, list_local

STARTED = "the pair that DuoChat was started with"
OF_A_PAIR = (*PAIR, "draft_vocabulary")
ELSEWHERE = "A path or reference is taken from this machine's own browser only: choose a model of the list."
NO_DRAFT = "Name a draft too: none on this disk speaks this target's tokens (python -m duochat distill makes one)."
BUSY = "Another pair of models is being loaded: wait for it, then choose again."
FORECAST = (sys.executable, "-m", "duochat", "models", "--forecast", "--json", "--config")


class Models:
    """settings: those that DuoChat was started with; what a person has set in them is kept with every pair.

    here: is the page for this machine's own browser alone? Only then may it name a path.
    """

    def __init__(self, engine: Engine, settings: Settings, here: bool = True) -> None:
        shipped = presets().values()
        if all(not _same(settings, s) for s in shipped) and settings.description in [s.description for s in shipped]:
            settings = replace(settings, description=STARTED, target_gib=0, draft_gib=0)
        self.engine, self.own = engine, settings
        self._here, self._folder = here, settings.models_folder
        self._shipped = next(iter(presets().values()))
        self._jobs = Jobs(kept=0)
        self._local: list[Local] = []  # as they were listed last
        self._forecasts: dict[str, dict[str, Any]] = {}  # by target, with the best of its drafts
        self._one_at_a_time = threading.Lock()  # measurements of this machine
        self._failed: dict[str, str] = {}  # the pair that was last chosen in vain: target, draft, reason

    @property
    def settings(self) -> Settings:
        """Those of the pair in use."""
        return self.engine.status()["settings"] or self.own

    def state(self, _action: dict[str, Any]) -> dict[str, Any]:
        """What the head of the page shows of the pair, its state and the devices; asked for often, so it is cheap.

        choosing: how far the fetching of another pair is, while this one goes on. error: why it is not in use.
        exact: is the text plain decoding's to the last token, near ties too? demonstration: the pair that comes along.
        """
        status, settings = self.engine.status(), self.settings
        told = {name: status[name] for name in ("state", "loading", "choosing", "error", "hardware")}
        return {
            "target": short_name(settings.target), "draft": short_name(settings.draft),
            "exact": told["hardware"].get("target_exact", True),
            "demonstration": settings.target == self._shipped.target, "used": [settings.target, settings.draft],
            "changing": self._jobs.under_way("change") is not None, "failed": self._failed,
            "context_length": settings.context_length, **told,
        }  # fmt: skip

    def models(self, _action: dict[str, Any]) -> dict[str, Any]:
        """All ready pairs, what fits first and then by memory; the pair in use is always among them."""
        entries = list_models()
        for settings in (self.own, self.settings):
            if all(not _same(settings, entry.settings) for entry in entries):
                here = (cached(settings.target) is not None, cached(settings.draft) is not None)
                entries.insert(0, Entry("", settings, *here, unfit(settings, measure())))
        return {"pairs": [self._pair(entry) for entry in entries], "here": self._here, **self.state({})}

    def _pair(self, entry: Entry) -> dict[str, Any]:
        names = {"name": short_name(entry.settings.target), "draft_name": short_name(entry.settings.draft)}
        return {**entry.to_dict(), **names, "forecast": self._forecasts.get(entry.settings.target)}

    def local(self, action: dict[str, Any]) -> dict[str, Any]:
        """The models on this disk, each with the lane that would run it and the drafts that fit it, the best first;
        `alone`: a draft to name where none fits, and the target decodes alone.

        folder: another models folder, which this machine's own browser may name.
        """
        self._folder = (self._here and str(action.get("folder") or "")) or self.own.models_folder
        drafts = [path for entry in list_models() if (path := cached(entry.settings.draft))]
        self._local = list_local(self._folder, drafts)
        return {"folder": self._folder, "models": [self._target(m) for m in self._local]}

    def _target(self, model: Local) -> dict[str, Any]:
        drafts = [{"reference": draft, "name": short_name(draft)} for draft in model.drafts]
        told = {"lane": self._lane(model), "drafts": drafts, "alone": self._shipped.draft}
        return {**model.to_dict(), **told, "forecast": self._forecasts.get(model.reference)}

    def _lane(self, model: Local) -> str:
        """What would run it as a target: "torch", "llama", "" for nothing."""
        path, asked = Path(model.reference), self.own.backend
        if path.is_dir():
            return "torch"
        try:
            return store.remembered(f"lane {asked} {measure().gpu:.0f}", path, lambda: backend_of(path, asked))
        except DuoChatError:
            return ""

    def use(self, action: dict[str, Any]) -> dict[str, Any]:
        """Load a pair, for everybody, in the background. action: {target, draft, context_length}; what is missing is
        that of the pair in use, the draft of another target the best one on this disk."""
        used = self.settings
        target = str(action.get("target") or used.target).strip()
        draft = str(action.get("draft") or (used.draft if target == used.target else self._best(target))).strip()
        if not self._here and not self._known(target, draft):
            raise DuoChatError(ELSEWHERE)
        context = check("context_length", action.get("context_length") or used.context_length)
        wanted = replace(self._settings(target, draft), context_length=context)
        self._failed = {}
        self._jobs.start(lambda job: self._change(wanted, job), "change", busy=BUSY)
        return self.models({})

    def cancel(self, _action: dict[str, Any]) -> dict[str, Any]:
        """Of a pair that is being fetched; what has come of it stays for the next time."""
        self._jobs.stop("change")
        return self.state({})

    def forecast(self, _action: dict[str, Any]) -> dict[str, Any]:
        """Find how fast each pair would be here, in a process of its own: it measures this machine, for a minute."""
        with self._one_at_a_time, tempfile.TemporaryDirectory() as folder:
            config = Path(folder, "models.yaml")
            config.write_text(json.dumps({"models_folder": self._folder}), encoding="utf-8")
            done = subprocess.run([*FORECAST, str(config)], capture_output=True, text=True)
        if done.returncode:
            raise DuoChatError((done.stderr.strip().splitlines() or ["The forecast failed: try again."])[-1])
        self._forecasts = json.loads(done.stdout)["forecasts"]
        return self.models({})

    def _change(self, wanted: Settings, job: Job) -> None:
        try:
            self.engine.change(wanted, self._room_for(wanted), job.stop.is_set)
        except DuoChatError as fault:
            reason = "" if job.stop.is_set() else str(fault)
            self._failed = {"target": wanted.target, "draft": wanted.draft, "reason": reason}
            raise

    def _room_for(self, wanted: Settings) -> bool:
        """Do both pairs fit the memory together? Not known, where one does not say what it needs."""
        used = self.settings
        both = {name: getattr(used, name) + getattr(wanted, name) for name in ("target_gib", "draft_gib")}
        return min(used.target_gib, wanted.target_gib) > 0 and not unfit(replace(wanted, **both), measure())

    def _settings(self, target: str, draft: str) -> Settings:
        """A known pair's own, else those that DuoChat was started with and this pair; what is set by hand stays."""
        for pair in (self.own, *presets().values()):
            if (pair.target, pair.draft) == (target, draft):
                return joined(self.own, pair)
        needs = {model.reference: model.need for model in self._local}
        plain = {f.name: f.default for f in fields(Settings) if f.name in OF_A_PAIR and f.default is not MISSING}
        size = {"target_gib": needs.get(target, 0), "draft_gib": needs.get(draft, 0)}
        return replace(self.own, **{**plain, **size, "target": target, "draft": draft})

    def _best(self, target: str) -> str:
        """The first draft that fits a target on this disk. Raises DuoChatError when there is none."""
        if not self._local:
            self.local({})
        found = {model.reference: model.drafts for model in self._local}
        drafts = found.get(target) or found.get(str(Path(target).expanduser().absolute()))
        if not drafts:
            raise DuoChatError(NO_DRAFT)
        return drafts[0]

    def _known(self, target: str, draft: str) -> bool:
        listed = {(model.reference, d) for model in self._local for d in (*model.drafts, self._shipped.draft)}
        ready = {(pair.target, pair.draft) for pair in (self.own, self.settings, *presets().values())}
        return (target, draft) in listed | ready


def joined(own: Settings, pair: Settings) -> Settings:
    """The settings of a pair, with what `own` sets otherwise than by default laid over them."""
    set_by_hand = {
        f.name: getattr(own, f.name)
        for f in fields(Settings)
        if f.name not in OF_A_PAIR and f.default is not MISSING and getattr(own, f.name) != f.default
    }
    return replace(pair, **set_by_hand)


def _same(one: Settings, other: Settings) -> bool:
    return (one.target, one.draft) == (other.target, other.draft)


def short_name(reference: str) -> str:
    """The part of a reference that names the model: "hf:Qwen/Qwen3-8B" -> "Qwen3-8B"."""
    return reference.partition("#")[0].rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
