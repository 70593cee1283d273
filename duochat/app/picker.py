"""The picker of model pairs: what there is, what fits, what is loading."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from typing import Any

from duochat import DuoChatError
from duochat.app.jobs import Jobs
from duochat.chat.answer import Engine
from duochat.config import Settings, presets
from duochat.models.catalog import Entry, list_models, measure, unfit
from duochat.models.fetch import cached

OWN = "own"  # name of the pair that DuoChat was started with
STARTED = "the pair that DuoChat was started with"
OF_A_PAIR = ("target", "draft", "description", "target_gib", "draft_gib", "chat_template", "draft_vocabulary")


class Models:
    """settings: those that DuoChat was started with; what a person has set in them is kept with every pair."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        shipped = presets().values()
        if all(not _same(settings, s) for s in shipped) and settings.description in [s.description for s in shipped]:
            settings = replace(settings, description=STARTED, target_gib=0, draft_gib=0)
        self.engine, self.own = engine, settings
        self._shipped = next(iter(presets().values())).target
        self._jobs = Jobs(kept=0)

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
            "demonstration": settings.target == self._shipped, **told,
        }  # fmt: skip

    def models(self, _action: dict[str, Any]) -> dict[str, Any]:
        """All pairs, the one in use marked; one that does not fit says why."""
        entries = list_models()
        if all(not _same(self.own, entry.settings) for entry in entries):
            here = (cached(self.own.target) is not None, cached(self.own.draft) is not None)
            entries.insert(0, Entry(OWN, self.own, *here, unfit(self.own, measure())))
        return {"pairs": [self._pair(entry) for entry in entries], **self.state({})}

    def _pair(self, entry: Entry) -> dict[str, Any]:
        names = {"target": short_name(entry.settings.target), "draft": short_name(entry.settings.draft)}
        return {**entry.to_dict(), **names, "used": _same(entry.settings, self.settings)}

    def use(self, action: dict[str, Any]) -> dict[str, Any]:
        """Load a pair, for everybody, in the background. Only names are taken: no path comes from a page."""
        wanted = {**presets(), OWN: self.own}.get(str(action.get("name")))
        if wanted is None:
            raise DuoChatError("There is no such pair of models: reload the page.")
        busy = "Another pair of models is being loaded: wait for it, then choose again."
        self._jobs.start(lambda job: self.engine.change(joined(self.own, wanted)), "change", busy=busy)
        return self.models({})


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
