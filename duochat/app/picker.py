"""The picker of model pairs: what is ready, what lies on this disk, what fits, what is loading, what failed and why."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from duochat import DuoChatError
from duochat.api.service import short_name
from duochat.app.jobs import Job, Jobs
from duochat.chat.worker import Worker
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
MEASURING = "measuring this machine, some minutes; it stops for an answer and begins anew behind it"
WAITING = "waiting for the answer under way: both at once would falsify the measurement and slow the answer down"
GLANCE = 0.2  # seconds between two looks at whether somebody asks
FORECAST = (sys.executable, "-m", "duochat", "models", "--forecast", "--json", "--config")


class Models:
    """settings: those that DuoChat was started with; what a person has set in them is kept with every pair.

    here: is the page for this machine's own browser alone? Only then may it name a path.
    """

    def __init__(self, engine: Worker, settings: Settings, here: bool = True) -> None:
        shipped = presets().values()
        if all(not _same(settings, s) for s in shipped) and settings.description in [s.description for s in shipped]:
            settings = replace(settings, description=STARTED, target_gib=0, draft_gib=0)
        self.engine, self.own = engine, settings
        self._here, self._folder = here, settings.models_folder
        self._shipped = next(iter(presets().values()))
        self._jobs = Jobs(kept=2)
        self._local: list[Local] = []  # as they were listed last
        self._forecasts: dict[str, dict[str, Any]] = {}  # by target, with the best of its drafts
        self._failed: dict[str, str] = {}  # the pair that was last chosen in vain: target, draft, backend, reason

    @property
    def settings(self) -> Settings:
        """Those of the pair in use."""
        return self.engine.status()["settings"] or self.own

    def state(self, _action: dict[str, Any]) -> dict[str, Any]:
        """What the head of the page shows of the pair, its state and the devices; asked for often, so it is cheap.

        choosing: how far the fetching of another pair is, while this one goes on. error: why it is not in use.
        forecasting: what the forecast does now; unforeseen: why the last one failed.
        exact: is the text plain decoding's to the last token, near ties too? demonstration: the pair that comes along.
        """
        status, settings, forecast = self.engine.status(), self.settings, self._jobs.under_way("forecast")
        told = {name: status[name] for name in ("state", "loading", "choosing", "error", "hardware")}
        return {
            "target": short_name(settings.target), "draft": short_name(settings.draft),
            "exact": told["hardware"].get("target_exact", True),
            "demonstration": settings.target == self._shipped.target, "used": list(_key(settings)),
            "forecasting": forecast.note.get("words", WAITING) if forecast else "",
            "unforeseen": self._jobs.error("forecast"), "changing": self._jobs.under_way("change") is not None,
            "failed": self._failed, "context_length": settings.context_length, **told,
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
        settings = entry.settings
        names = {"name": short_name(settings.target), "draft_name": short_name(settings.draft)}
        known = self._forecasts.get(settings.target) if settings.backend != "torch" else None
        return {**entry.to_dict(), **names, "backend": settings.backend, "forecast": known}

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
        """Load a pair, for everybody, in the background. action: {target, draft, backend, context_length}; what is
        missing is that of the pair in use, the draft of another target the best one on this disk."""
        used = self.settings
        target = str(action.get("target") or used.target).strip()
        draft = str(action.get("draft") or (used.draft if target == used.target else self._best(target))).strip()
        if not self._here and not self._known(target, draft):
            raise DuoChatError(ELSEWHERE)
        context = check("context_length", action.get("context_length") or used.context_length)
        wanted = replace(self._settings(target, draft, action.get("backend")), context_length=context)
        self._failed = {}
        self._jobs.start(lambda job: self._change(wanted, job), "change", busy=BUSY)
        return self.models({})

    def cancel(self, action: dict[str, Any]) -> dict[str, Any]:
        """Of a pair that is being fetched, what has come of it stays for the next time; or {"of": "forecast"}."""
        self._jobs.stop("forecast" if action.get("of") == "forecast" else "change")
        return self.state({})

    def forecast(self, _action: dict[str, Any]) -> dict[str, Any]:
        """Begin to find how fast each pair would be here; `state` says how far it is and `cancel` ends it."""
        if not self._jobs.under_way("forecast"):
            self._jobs.start(self._foresee, "forecast")
        return self.state({})

    def _foresee(self, job: Job) -> None:
        """Only while nobody is answered: an answer that begins ends the measurement, which begins anew behind it."""
        while not job.stop.is_set():
            job.note = {"words": WAITING}
            while self.engine.status()["requests"] and not job.stop.wait(GLANCE):
                pass
            job.note = {"words": MEASURING}
            if told := self._measured(job):
                self._forecasts = told["forecasts"]
                return

    def _measured(self, job: Job) -> dict[str, Any] | None:
        """What a process of its own finds; None when it was ended before. Raises DuoChatError with its reason."""
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder, "models.yaml")
            config.write_text(json.dumps({"models_folder": self._folder}), encoding="utf-8")
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            with subprocess.Popen([*FORECAST, str(config)], **pipes) as process:
                while not job.stop.is_set() and not self.engine.status()["requests"]:
                    with suppress(subprocess.TimeoutExpired):
                        told, fault = process.communicate(timeout=GLANCE)
                        break
                else:
                    process.kill()
                    return None
        if process.returncode:
            raise DuoChatError((fault.strip().splitlines() or ["The forecast failed: try again."])[-1])
        return json.loads(told)

    def close(self) -> None:
        """End what goes on in the background."""
        self._jobs.close()

    def _change(self, wanted: Settings, job: Job) -> None:
        try:
            self.engine.change(wanted, self._room_for(wanted), job.stop.is_set)
        except DuoChatError as fault:
            reason = "" if job.stop.is_set() else str(fault)
            self._failed = dict(zip(("target", "draft", "backend"), _key(wanted), strict=True)) | {"reason": reason}
            raise

    def _room_for(self, wanted: Settings) -> bool:
        """Do both pairs fit the memory together? Not known, where one does not say what it needs."""
        used = self.settings
        both = {name: getattr(used, name) + getattr(wanted, name) for name in ("target_gib", "draft_gib")}
        return min(used.target_gib, wanted.target_gib) > 0 and not unfit(replace(wanted, **both), measure())

    def _settings(self, target: str, draft: str, backend: Any = None) -> Settings:
        """A known pair's own, else those that DuoChat was started with and this pair; what is set by hand stays.

        backend: which of two that differ in it alone, by default that in use."""
        backend = backend or self.settings.backend
        known = [pair for pair in (self.own, *presets().values()) if (pair.target, pair.draft) == (target, draft)]
        if known:
            return joined(self.own, min(known, key=lambda pair: pair.backend != backend))
        needs = {model.reference: model.need for model in self._local}
        size = {"target_gib": needs.get(target, 0), "draft_gib": needs.get(draft, 0)}
        return joined(self.own, Settings(target=target, draft=draft, **size))

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


def _key(settings: Settings) -> tuple[str, str, str]:
    """What a pair is known by."""
    return settings.target, settings.draft, settings.backend


def _same(one: Settings, other: Settings) -> bool:
    return _key(one) == _key(other)
