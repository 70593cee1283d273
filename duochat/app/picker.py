"""The picker of model pairs: what there is, what fits, what is loading."""

from __future__ import annotations

from typing import Any

from duochat import DuoChatError
from duochat.config import Settings, presets
from duochat.models.catalog import Entry, list_models


class Models:
    """worker: has `status()` and `restart(settings)`; without them the picker only names the pair."""

    def __init__(self, worker: Any, settings: Settings) -> None:
        self.worker, self.settings = worker, settings

    def state(self, _action: dict[str, Any]) -> dict[str, Any]:
        """What the head of the page shows: {pair, state, loading, error, hardware}; asked for often, so it is cheap."""
        status = self.worker.status() if hasattr(self.worker, "status") else {"state": "ready"}
        return {
            "target": short_name(self.settings.target), "draft": short_name(self.settings.draft),
            "state": status["state"], "loading": status.get("loading"), "error": status.get("error", ""),
            "hardware": status.get("hardware") or {},
        }  # fmt: skip

    def models(self, _action: dict[str, Any]) -> dict[str, Any]:
        """All pairs, the one in use marked; one that does not fit says why."""
        return {"pairs": [self._pair(entry) for entry in list_models()], **self.state({})}

    def _pair(self, entry: Entry) -> dict[str, Any]:
        used = (entry.settings.target, entry.settings.draft) == (self.settings.target, self.settings.draft)
        names = {"target": short_name(entry.settings.target), "draft": short_name(entry.settings.draft)}
        return {**entry.to_dict(), **names, "used": used}

    def use(self, action: dict[str, Any]) -> dict[str, Any]:
        """Load the pair of a preset, for everybody. Only names of presets are taken: no path comes from a page."""
        found = presets().get(str(action.get("name")))
        if found is None:
            raise DuoChatError("There is no such pair of models: reload the page.")
        before, self.settings = self.settings, found
        try:
            self.worker.restart(found)
        except DuoChatError:
            self.settings = before
            raise
        return self.models({})


def short_name(reference: str) -> str:
    """The part of a reference that names the model: "hf:Qwen/Qwen3-8B" -> "Qwen3-8B"."""
    return reference.partition("#")[0].rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
