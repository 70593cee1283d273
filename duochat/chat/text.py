"""Text <-> token ids by the model's own tokenizer and chat template; answers streamed token by token.

Reads tokenizer.json and the template from the model's folder with `tokenizers` and jinja2 alone. A piece never holds
part of a character, nor text that could be the beginning of a stop string.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from duochat import DuoChatError

Messages = Sequence[dict[str, str]]  # [{"role": "system" | "user" | "assistant", "content": text}, ...]

CHARACTER_PART = "…"  # shown for a drafted token that is no whole character

# For models without a template: the transcript that Vicuna was trained on, which base models also continue sensibly.
TRANSCRIPT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}USER: {{ m.content }} ASSISTANT:"
    "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)


class Tokenizer:
    """A model's vocabulary and chat template.

    special: the named special tokens that templates use, such as {"bos_token": "<s>"}.
    """

    def __init__(self, tokens: tokenizers.Tokenizer, template: str = TRANSCRIPT, special: dict[str, str] | None = None):
        tokens.no_truncation()
        tokens.no_padding()
        self._tokens = tokens
        self._template = _compile(template)
        self._names = {"bos_token": "", "eos_token": "", **(special or {})}
        added = tokens.get_added_tokens_decoder()
        self._special = {id: token.content for id, token in added.items() if token.special}
        self._anchor = tokens.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = tokens.decode(self._anchor)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path, template: str = "") -> Tokenizer:
        """Read a model's folder; a given template replaces its own. Raises DuoChatError when something is unusable."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise DuoChatError(f"{folder} has no tokenizer.json: give the folder of a model that has one.")
        try:
            tokens = tokenizers.Tokenizer.from_file(str(path))
        except Exception as fault:  # the tokenizers library raises nothing narrower
            raise DuoChatError(f"{path} is not a usable tokenizer ({fault}): fetch the model again.") from fault
        config = _read_json(folder / "tokenizer_config.json")
        return cls(tokens, template or _template_of(folder, config), _special_of(config))

    def encode(self, text: str) -> list[int]:
        """Token ids of text in which special tokens may be written out, as templates do."""
        return self._tokens.encode(text, add_special_tokens=False).ids

    def bare(self, text: str) -> list[int]:
        """Token ids of text without a template, after the token that the model expects at the beginning, if any."""
        return self._tokens.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return self._tokens.decode(list(ids), skip_special_tokens=True)

    def prompt(self, messages: Messages) -> list[int]:
        """Token ids that make the model answer; a last message of the assistant is continued where it stops.

        Raises DuoChatError when the model's template refuses the conversation.
        """
        tail = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        return self.encode(self._render(messages[:-1] if tail else messages) + tail)

    def _render(self, messages: Messages) -> str:
        try:
            return self._fill(messages)
        except jinja2.TemplateError:
            pass  # many templates know no system role, or insist on alternating roles
        try:
            return self._fill(_alternating(messages))
        except jinja2.TemplateError as fault:
            raise DuoChatError(
                f"The model's chat template refuses this conversation ({fault}): "
                "start a new chat or choose another model."
            ) from fault

    def _fill(self, messages: Messages) -> str:
        values = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": True}
        return self._template.render(**self._names, **values)

    def is_special(self, token: int) -> bool:
        return token in self._special

    def bytes_of(self, token: int, first: bool = False) -> bytes:
        """The token's share of a text's UTF-8 bytes; `first`: it opens the text (some decoders strip a space there)."""
        if first:
            return self._spell(token, self._tokens.decode([token], skip_special_tokens=False))
        if token not in self._bytes:
            text = self._tokens.decode([*self._anchor, token], skip_special_tokens=False)
            self._bytes[token] = self._spell(token, text[len(self._anchor_text) :])
        return self._bytes[token]

    def _spell(self, token: int, text: str) -> bytes:
        if "\ufffd" not in text:
            return text.encode()
        name = self._tokens.id_to_token(token)
        if len(name) == 6 and name.startswith("<0x"):
            return bytes.fromhex(name[3:5])
        known = all(c in _BYTE_OF for c in name)
        return bytes(_BYTE_OF[c] for c in name) if known else text.encode()

    def text_of(self, token: int) -> str:
        """What to show for one token alone: a leading space is kept, a special token is written out."""
        if token in self._special:
            return self._special[token]
        try:
            return self.bytes_of(token).decode()
        except UnicodeDecodeError:
            return CHARACTER_PART


class AnswerText:
    """The text of an answer, token by token.

    push() gives each token's piece: "" while it completes no character or could begin a stop string; what was held
    back comes with the piece that decides it. After `stopped` every piece is "". `eos`: tokens that end the answer.
    `continued`: the answer goes on from earlier text, so its first token is not the first of the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Iterable[str] = (), eos: Iterable[int] = (), continued: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._eos = frozenset(eos)
        self._first = not continued
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def fork(self) -> AnswerText:
        """A copy that can be tried on tokens that may not be emitted."""
        other = AnswerText(self._tokenizer, self._stop, self._eos, not self._first)
        other._utf8.setstate(self._utf8.getstate())
        other._held, other.stopped = self._held, self.stopped
        return other

    def push(self, token: int) -> str:
        if self.stopped:
            return ""
        if token in self._eos:
            self.stopped = True
            return self.flush()
        if self._tokenizer.is_special(token):
            return ""
        data = self._tokenizer.bytes_of(token, self._first)
        self._first = False
        return self._release(self._utf8.decode(data))

    def keep(self, tokens: Sequence[int]) -> int | None:
        """How many of the tokens to keep when the answer stops within them, or None. Changes nothing."""
        trial = self.fork()
        for count, token in enumerate(tokens, 1):
            trial.push(token)
            if trial.stopped:
                return count
        return None

    def flush(self) -> str:
        """Text held back that no stop string followed; bytes of an unfinished character are dropped."""
        held, self._held = self._held, ""
        return held

    def _release(self, new: str) -> str:
        text = self._held + new
        found = _first_stop(text, self._stop)
        self.stopped = found is not None
        free = len(text) - _undecided(text, self._stop) if found is None else found
        self._held = "" if self.stopped else text[free:]
        return text[:free]


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string that is complete first begins (of two that end together, the longer), or None."""
    ends = ((start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0)
    return min(ends, default=(0, None))[1]


def _undecided(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that is a beginning of a stop string."""
    longest = max(map(len, stops), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in stops)), 0)


def _alternating(messages: Messages) -> list[dict[str, str]]:
    """The same words for templates that know only user and assistant, in turns."""
    merged: list[dict[str, str]] = []
    for message in messages:
        role = "user" if message["role"] == "system" else message["role"]
        if merged and merged[-1]["role"] == role:
            merged[-1]["content"] += "\n\n" + message["content"]
        else:
            merged.append({"role": role, "content": message["content"]})
    return merged


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


def _template_of(folder: Path, config: dict[str, Any]) -> str:
    """The default chat template of a model's folder, from its own file or from the tokenizer's settings."""
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        return alone.read_text(encoding="utf-8")
    named = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(named, list):
        named = next((entry["template"] for entry in named if entry["name"] == "default"), None)
    return named or TRANSCRIPT


def _special_of(config: dict[str, Any]) -> dict[str, str]:
    """{"bos_token": "<s>", ...} from the tokenizer's settings, where a token is its text or an object with it."""
    plain = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
    return {k: v for k, v in plain.items() if isinstance(v, str)}


def _read_json(path: Path) -> dict[str, Any]:
    """{} when there is no such file. Raises DuoChatError when it is not JSON."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as fault:
        raise DuoChatError(f"{path} is not JSON ({fault}): fetch the model again.") from fault


def _byte_alphabet() -> dict[str, int]:
    """The letters by which byte-level BPE writes bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()
