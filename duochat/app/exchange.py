"""Conversations as files: JSON with everything, Markdown of what is on view. Pure; `store` reads and writes with it.

What `dump` and `markdown` write, `parse` reads back. It trusts nothing: a file from elsewhere is checked before
anything of it is stored.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from duochat import DuoChatError
from duochat.app import packing
from duochat.app.kept import META, OPTIONS, fits
from duochat.chat.chat import ROLES

FORMAT = "duochat-conversations"
VERSION = 2
READ = (1, 2)  # 1: traces as lists of steps
LARGEST = 100_000_000  # characters of a file
HEADINGS = {"system": "System", "user": "You", "assistant": "Assistant"}
_NAMES = "|".join(HEADINGS.values())
_HEADING = rf"## (?:{_NAMES})[ \t]*$"
TITLE = re.compile(rf"^# (.*)\n+(?={_HEADING})", re.MULTILINE)
MESSAGE = re.compile(rf"^## ({_NAMES})[ \t]*$", re.MULTILINE)
LOOKALIKE = re.compile(rf"^\\*(?:{_HEADING}|# .*\n*\Z)", re.MULTILINE)  # in a message: gets a backslash


def _trace(raw: Any) -> bytes:
    """The bytes of a trace that can be read; what older files have, a list of steps, becomes such."""
    if isinstance(raw, list):
        return packing.pack(packing.checked(raw))
    if not isinstance(raw, str | None):
        raise ValueError("a trace is no text")
    packed = b64decode(raw or "", validate=True)
    packing.unpack(packed)
    return packed


def _known(kinds: Mapping[str, Any]) -> BeforeValidator:
    """A record whose known values are of their kind; null stands for the default."""

    def check(values: Any) -> Any:
        for name, value in (values or {}).items() if isinstance(values, dict | None) else ():
            if value is not None and name in kinds and not fits(value, kinds[name]):
                raise ValueError(f"{name!r} is of a wrong kind")
        return {} if values is None else values

    return BeforeValidator(check)


Words = Annotated[str, BeforeValidator(lambda words: "" if words is None else words)]
Time = Annotated[float | None, AfterValidator(lambda at: at if at is not None and 0 <= at < 1e11 else None)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class Entry(_Strict):
    """A message in a file. id: its number there; parent: that of the message before it, None for a first one."""

    id: int
    parent: int | None = None
    role: Literal[ROLES]
    content: str
    created: Time = None
    meta: Annotated[dict[str, Any], _known(META)] = {}
    trace: Annotated[bytes, BeforeValidator(_trace)] = b""  # see `packing`; in a file base64


class Parcel(_Strict):
    """A conversation in a file: all its branches, parents before children. leaf: the last message on view."""

    title: Words = ""
    created: Time = None
    updated: Time = None
    settings: Annotated[dict[str, Any], _known(OPTIONS)] = {}
    folder: Words = ""
    leaf: int | None = None
    messages: list[Entry]

    @model_validator(mode="after")
    def _joined(self) -> Parcel:
        seen: set[int] = set()
        for m in self.messages:
            if m.id in seen or (m.parent is not None and m.parent not in seen):
                raise ValueError(f"message {m.id} is there twice or comes before the one it answers")
            seen.add(m.id)
        if self.leaf is not None and self.leaf not in seen:
            raise ValueError(f"its last message {self.leaf} is missing")
        return self


class _File(_Strict):
    format: Literal[FORMAT]
    version: Literal[READ]
    conversations: list[Parcel]


def dump(parcels: Iterable[Parcel]) -> str:
    """The JSON file of some conversations."""
    body = {"format": FORMAT, "version": VERSION, "conversations": [p.model_dump(warnings=False) for p in parcels]}
    return json.dumps(body, ensure_ascii=False, indent=1, default=lambda trace: b64encode(trace).decode())


def markdown(parcels: Iterable[Parcel]) -> str:
    """The Markdown file of some conversations: a heading for each and for each message, branches left out."""
    return "\n".join(_markdown_one(p) for p in parcels)


def _markdown_one(parcel: Parcel) -> str:
    blocks = [f"# {' '.join(parcel.title.split()) or 'Conversation'}\n"]
    blocks += [
        f"## {HEADINGS[e.role]}\n\n{LOOKALIKE.sub(_backslash, e.content)}\n"
        for e in shown(parcel.messages, parcel.leaf)
    ]
    return "\n".join(blocks)


def _backslash(match: re.Match[str]) -> str:
    return "\\" + match[0]


def shown(messages: Iterable[Any], leaf: int | None) -> list[Any]:
    """Of messages that have an id and a parent those on view, the first one first."""
    by_id, path = {m.id: m for m in messages}, []
    while leaf is not None:
        path.append(by_id[leaf])
        leaf = path[-1].parent
    return path[::-1]


def parse(text: str) -> list[Parcel]:
    """The conversations of an exported file, JSON or Markdown. Raises DuoChatError that says what is wrong with it."""
    require_size(text)
    text = text.lstrip("\ufeff")
    try:
        found = _parse_json(text) if text.lstrip().startswith("{") else _parse_markdown(text)
    except (ValueError, RecursionError) as fault:
        raise DuoChatError(f"This is no export of DuoChat ({fault}): choose a file that Export has made.") from fault
    if not found:
        raise DuoChatError("This file holds no conversation: choose a file that Export has made.")
    return found


def require_size(text: str) -> None:
    """Raises DuoChatError on a file that is too large to be read."""
    if len(text) > LARGEST:
        raise DuoChatError(f"This file has more than {LARGEST // 10**6} million characters: export fewer at once.")


def _parse_json(text: str) -> list[Parcel]:
    try:
        return _File.model_validate_json(text).conversations
    except ValidationError as fault:
        first = fault.errors(include_url=False)[0]
        raise ValueError(": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))) from None


def _parse_markdown(text: str) -> list[Parcel]:
    """Each "# title" before a message begins a conversation, each "## You", "## Assistant", "## System" a message."""
    parts = TITLE.split(text.replace("\r\n", "\n") + "\n")
    if MESSAGE.search(parts[0]):
        parts.insert(0, "")  # messages without a title before them
        parts.insert(0, "")
    return [_read_markdown(title, body) for title, body in zip(parts[1::2], parts[2::2], strict=True)]


def _read_markdown(title: str, body: str) -> Parcel:
    roles = {heading: role for role, heading in HEADINGS.items()}
    parts = MESSAGE.split(body)
    messages = [
        Entry(id=i, parent=i - 1 if i else None, role=roles[heading], content=_read_content(content))
        for i, (heading, content) in enumerate(zip(parts[1::2], parts[2::2], strict=True))
    ]
    return Parcel(title=title.strip(), messages=messages, leaf=messages[-1].id)


def _read_content(text: str) -> str:
    """A message without the lines around it and the backslashes before what looks like a heading."""
    text = text.removeprefix("\n").removeprefix("\n")
    text = text.removesuffix("\n").removesuffix("\n")
    return LOOKALIKE.sub(lambda match: match[0].removeprefix("\\"), text)
