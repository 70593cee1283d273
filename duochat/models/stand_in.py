"""What a target made by `python -m duochat widen` says of itself: whose shape it has. Its timings are of that size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from duochat import DuoChatError
from duochat.models import gguf

RECIPE = "recipe.json"  # in a folder
KEY = "duochat.stands_for"  # in a GGUF file's metadata


def recipe(folder: Path) -> dict[str, Any]:
    """How the weights of a folder are made at load, {} where they lie in it. Raises DuoChatError.

    maker: the module whose `build(folder, device, dtype, attention)` does it. told: what users should know of it.
    """
    path = folder / RECIPE
    if not path.is_file():
        return {}
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        made = None
    if not isinstance(made, dict) or not str(made.get("maker")).startswith("duochat."):
        raise DuoChatError(f"{path} names nobody who makes its weights: make the folder again.")
    return made


def stands_for(model: Path) -> str:
    """Such as "llama-2-7b"; "" for a model that is what it seems. Raises DuoChatError when a file is no GGUF."""
    return recipe(model).get("like", "") if model.is_dir() else gguf.read(model).metadata.get(KEY, "")
