"""What may stand in a record that comes from a file, told by the annotations of the records themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from math import isfinite
from typing import Any

from duochat.chat.chat import Options

META = {  # of a message
    "finish": "str | None", "error": "str", "notices": "tuple[str, ...]", "edited": "bool",
    "figures": "Mapping[str, str | float | None]", "options": "Mapping[str, Any]",
}  # fmt: skip
OPTIONS = {f.name: f.type for f in fields(Options)}


def sound(record: Any) -> bool:
    """Do all fields of a record, and of the records in it, hold what their annotations say?"""
    return all(fits(getattr(record, f.name), f.type) for f in fields(record))


def fits(value: Any, kind: str) -> bool:
    """Is the value of the annotated kind, such as "tuple[int, ...]" or "str | None"? Numbers must be finite.

    A list passes as a tuple: JSON knows no other.
    """
    if kind.endswith(" | None"):
        return value is None or fits(value, kind.removesuffix(" | None"))
    if kind.startswith("tuple["):
        if not isinstance(value, list | tuple):
            return False
        each, several, _ = kind[6:-1].partition(", ...")
        kinds = [each] * len(value) if several else each.split(", ")
        return len(kinds) == len(value) and all(map(fits, value, kinds))
    if kind.startswith("Mapping["):
        inner = kind[8:-1].partition(", ")[2]
        return isinstance(value, Mapping) and all(fits(v, inner) for v in value.values())
    if " | " in kind:
        return any(fits(value, one) for one in kind.split(" | "))
    if kind == "float":
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if kind in ("int", "str", "bool"):
        return type(value).__name__ == kind
    return kind == "Any" or (type(value).__name__ == kind and sound(value))


def options_of(kept: Any, defaults: Options) -> Options:
    """Options from what was kept of them; what is missing, unknown or of a wrong kind is taken from the defaults."""
    kept = kept if isinstance(kept, Mapping) else {}
    good = {name: kept[name] for name, kind in OPTIONS.items() if name in kept and fits(kept[name], kind)}
    return replace(defaults, **{name: tuple(v) if isinstance(v, list) else v for name, v in good.items()})
