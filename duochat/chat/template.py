"""A model's chat template: from messages to the text that the model was trained to see. Jinja in a sandbox.

A template is a stranger's program: whatever it does wrong becomes one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from duochat import DuoChatError
from duochat.models.folder import read_json

Messages = Sequence[dict[str, str]]  # [{"role": "system" | "user" | "assistant", "content": text}, ...]

PROBE = "7305519"  # a message that survives trimming and change of case

# For models without a template: the transcript that Vicuna was trained on, which base models also continue sensibly.
TRANSCRIPT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}USER: {{ m.content }} ASSISTANT:"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)


class Template:
    """names: the special tokens that templates write by name, such as {"bos_token": "<s>"}."""

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self._compiled = _compile(source)
        self._names = {"bos_token": "", "eos_token": "", **names}

    def render(self, messages: Messages) -> str:
        """The prompt up to where the answer begins. Raises DuoChatError when the template refuses the conversation."""
        try:
            return self._fill(messages, self._wants_parts)
        except DuoChatError:
            # many templates know no system role, or insist on alternating roles
            return self._fill(_alternating(messages), self._wants_parts)

    @cached_property
    def _wants_parts(self) -> bool:
        """Must contents be lists of parts, as templates of vision models have them? Tried, once."""
        shown = []
        for parts in (False, True):
            try:
                shown.append(self._fill([{"role": "user", "content": PROBE}], parts))
            except DuoChatError:
                continue
            if PROBE in shown[-1]:
                return parts
        if shown:
            raise DuoChatError("The model's chat template leaves out what is said: set chat_template to a whole one.")
        return False  # it refuses this conversation, perhaps not another

    def _fill(self, messages: Messages, parts: bool) -> str:
        if parts:
            messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        values = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._compiled.render(**self._names, **values)
        except Exception as fault:
            raise DuoChatError(
                f"The model's chat template refuses this conversation ({fault}): "
                "start a new chat or choose another model."
            ) from fault


def _alternating(messages: Messages) -> list[dict[str, str]]:
    """The same words for templates that know only user and assistant, in turns."""
    return merged({**m, "role": m["role"].replace("system", "user")} for m in messages)


def merged(messages: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """Messages of the same role that follow each other as one."""
    told: list[dict[str, str]] = []
    for message in messages:
        if told and told[-1]["role"] == message["role"]:
            told[-1]["content"] += f"\n\n{message['content']}"
        else:
            told.append({"role": message["role"], "content": message["content"]})
    return told


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks what the assistant says; here it only passes its body through."""

    tags = {"generation"}  # noqa: RUF012  declared so by jinja2

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(template: str) -> jinja2.Template:
    """The template in a sandbox with what chat templates expect to find there."""
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    sandbox.filters["tojson"] = lambda value, indent=None, **_: json.dumps(value, ensure_ascii=False, indent=indent)
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return sandbox.from_string(template)
    except jinja2.TemplateError as fault:
        raise DuoChatError(f"The model's chat template is broken ({fault}): choose another model.") from fault


def _refuse(reason: str) -> None:
    raise jinja2.TemplateError(reason)


def template_of(folder: Path, config: Mapping[str, Any]) -> str:
    """The default chat template of a model's folder, from its own file or from the tokenizer's settings."""
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        return _text(alone)
    named = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(named, list):
        named = next((e.get("template") for e in named if isinstance(e, dict) and e.get("name") == "default"), None)
    if not isinstance(named, str | None):
        raise DuoChatError(f"The chat template in {folder} is no text but {named!r}: set chat_template to one.")
    return named or TRANSCRIPT


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DuoChatError(f"{path} is damaged or not UTF-8: fetch the model again.") from None
