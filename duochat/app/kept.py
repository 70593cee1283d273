"""What may stand in a record that comes from a file, told by the annotations of the records themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from duochat.chat.answer import STRICT
from duochat.chat.chat import Options

META = {  # of a message
    "finish": str | None, "error": str, "notices": tuple[str, ...], "edited": bool,
    "figures": dict[str, str | float | None], "options": dict[str, Any],
}  # fmt: skip
OPTIONS = get_type_hints(Options)
_adapter = lru_cache(lambda kind: TypeAdapter(kind, config=STRICT))


def fits(value: Any, kind: Any) -> bool:
    """Could the value, as JSON, be of the kind? Numbers must be finite."""
    try:
        _adapter(kind).validate_json(json.dumps(value))
    except ValidationError:
        return False
    return True


def options_of(kept: Any, defaults: Options) -> Options:
    """Options from what was kept of them; what is missing, unknown or of a wrong kind is taken from the defaults."""
    kept = kept if isinstance(kept, Mapping) else {}
    good = {name: kept[name] for name, kind in OPTIONS.items() if name in kept and fits(kept[name], kind)}
    return replace(defaults, **{name: tuple(v) if isinstance(v, list) else v for name, v in good.items()})
