"""What a target made by `python -m duochat widen` says of itself: whose shape it has. Its timings are of that size."""

from __future__ import annotations

import json
from pathlib import Path

from duochat.models import gguf

RECIPE = "widen.json"  # in a folder
KEY = "duochat.stands_for"  # in a GGUF file's metadata


def stands_for(model: Path) -> str:
    """Such as "llama-2-7b"; "" for a model that is what it seems. Raises DuoChatError when a file is no GGUF."""
    if model.is_dir():
        recipe = model / RECIPE
        return json.loads(recipe.read_text())["like"] if recipe.is_file() else ""
    return gguf.read(model).metadata.get(KEY, "")
