"""What the document loads: styles and scripts of the page, and those of the picture alone, for a saved race."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

import yaml

from duochat.config import DECODERS

ASSETS = Path(__file__).resolve().parents[2] / "assets"
PAGE = ASSETS / "page"
NAMES = {key: decoder.title for key, decoder in DECODERS.items()}
STYLES = ("page.css", "chat.css", "picture.css")
PICTURE = (  # in this order: a script uses those before it
    "dom.js", "links.js", "memory.js", "format.js", "answer.js", "explain.js", "tip.js", "legend.js", "ribbon.js",
    "table.js", "overview.js", "lanes.js", "tree.js", "figures.js", "picture.js", "player.js", "race.js", "lesson.js",
    "prediction.js", "places.js", "forecast.js", "quiz.js", "theta.js", "learn.js", "hardware.js", "origins.js",
    "saved.js",
)  # fmt: skip
CHAT = (
    "gradio.js", "theme.js", "keys.js", "prompts.js", "composer.js", "state.js", "prose.js", "welcome.js", "message.js",
    "chat.js", "models.js", "head.js", "demo.js", "travel.js", "pane.js",
    "side.js",
)  # fmt: skip
HEAD = """
<meta name="viewport" content="width=device-width, initial-scale=1, viewport-fit=cover">
<meta name="color-scheme" content="light dark">
<meta name="decoders" content="{decoders}">
<link rel="manifest" href="manifest.json"><link rel="icon" href="page/icon.svg" type="image/svg+xml">
{styles}{formulas}{scripts}
"""


@lru_cache
def words(name: str) -> Any:
    """Texts of a tab, from a YAML file of the page."""
    return yaml.safe_load((PAGE / f"{name}.yaml").read_text("utf-8"))


def head(libraries: Path) -> str:
    """The document's head: the page's own files with their age, so that no browser keeps an old one.

    libraries: Gradio's package, whose copy of KaTeX typesets formulas; without it their source is shown.
    """
    katex = {f.suffix: f"assets/{f.name}" for f in sorted(libraries.glob("templates/frontend/assets/katex-*"))}
    formulas = f'<link rel="stylesheet" href="{katex[".css"]}">' if ".css" in katex else ""
    formulas += f'<meta name="katex" content="/{katex[".js"]}">' if ".js" in katex else ""
    return HEAD.format(
        decoders=escape(json.dumps(NAMES), quote=True), formulas=formulas,
        styles=_tags('<link rel="stylesheet" href="{}">', STYLES),
        scripts=_tags('<script src="{}"></script>', PICTURE + CHAT),
    )  # fmt: skip


def _tags(pattern: str, names: tuple[str, ...]) -> str:
    return "".join(pattern.format(f"page/{name}?{(PAGE / name).stat().st_mtime_ns}") for name in names)


def saved(show: str, title: str, record: Mapping[str, Any]) -> str:
    """A record as one file that needs nothing else: styles, scripts and the record are inside.

    show: the function of the scripts that draws it, such as "playRace".
    """
    data = json.dumps(record, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    page = (PAGE / "saved.html").read_text("utf-8")
    parts = {
        "title": escape(title), "decoders": escape(json.dumps(NAMES), quote=True), "style": joined(STYLES),
        "script": joined(PICTURE), "show": show, "record": data,
    }  # fmt: skip
    for name, content in parts.items():
        page = page.replace(f"/*{name}*/", content, 1)
    return page


def joined(names: tuple[str, ...]) -> str:
    """Files of the page as one text."""
    return "\n".join((PAGE / name).read_text("utf-8") for name in names)
