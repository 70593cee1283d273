"""Text <-> token ids by the model's own tokenizer and chat template; answers streamed token by token.

Reads vocabulary and template from the model's folder or file with `tokenizers` and jinja2 alone. What people write
never becomes a control token. A piece never holds part of a character, nor what could begin a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any
from uuid import uuid4

import tokenizers

from duochat.chat.grammar import Schemas
from duochat.chat.template import TRANSCRIPT, Messages, Template, template_of
from duochat.models import gguf, tokenizer
from duochat.models.folder import read_json

THINK = "<think>\n"  # as templates open it
CHARACTER_PART = "…"  # shown for a drafted token that is no whole character


class Tokenizer:
    """A model's vocabulary and chat template.

    special: the named special tokens that templates use, such as {"bos_token": "<s>"}. eos: ids that end an answer by
    the vocabulary's own word, its eos_token included; a model's settings may name more.
    """

    def __init__(
        self,
        tokens: tokenizers.Tokenizer,
        template: str = TRANSCRIPT,
        special: Mapping[str, str] | None = None,
        eos: Iterable[int] = (),
    ) -> None:
        tokens.no_truncation()
        tokens.no_padding()
        self._tokens = tokens
        self._template = Template(template, special or {})
        named = tokens.token_to_id((special or {}).get("eos_token", ""))
        self.eos = frozenset(eos) | ({named} if named is not None else set())
        added = tokens.get_added_tokens_decoder()
        self._special = {id: token.content for id, token in added.items() if token.special}
        self._plain: dict[bool, tokenizers.Tokenizer] = {}
        self._anchor = tokens.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = tokens.decode(self._anchor)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, path: Path, template: str = "") -> Tokenizer:
        """Read a model's folder or GGUF file; a given template replaces its own.

        Raises DuoChatError when something is unusable.
        """
        if path.is_file():
            header = gguf.read(path)
            config = tokenizer.settings(header)
            tokens, eos = tokenizer.build(header), tokenizer.stops(header)
        else:
            tokens, eos = tokenizer.of_folder(path), ()
            config = read_json(path / "tokenizer_config.json")
        return cls(tokens, template or template_of(path, config), _special_of(config), eos)

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
        mark = f"\ufdd0{uuid4().hex}\ufdd0"
        messages = [{**m, "content": self._broken(m["content"], mark)} for m in messages]
        tail = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        text = self._template.render(messages[:-1] if tail else messages)
        text += tail.removeprefix(THINK) if text.endswith(THINK) else tail
        return self._apart(text, mark) if mark in text else self.encode(text)

    def schemas(self, vocabulary: int, ends: Iterable[int]) -> Schemas:
        """What makes grammars of JSON schemas. vocabulary: of the model, which may be larger."""
        return Schemas(self._tokens.to_str(), vocabulary, self.eos | {*ends})

    def opens_thought(self, ids: Sequence[int]) -> bool:
        """Does a prompt end with the tag that begins what a model thinks before it answers?"""
        return self._tokens.decode(list(ids[-8:]), skip_special_tokens=False).endswith(THINK)

    def _broken(self, content: str, mark: str) -> str:
        """What a person wrote, with `mark` between the letters of each control token: a template's code still sees
        the content, and what it makes of it holds no control token but the template's own."""
        found, broken, at = self._tokens.encode(content, add_special_tokens=False), "", 0
        for token, (start, end) in zip(found.ids, found.offsets, strict=True):
            if token in self._special:
                broken += content[at:start] + mark.join(content[start:end])
                at = end
        return broken + content[at:]

    def _apart(self, text: str, mark: str) -> list[int]:
        """Token ids of a rendered prompt: its control tokens, and between them text in which the broken ones stay
        text. A tokenizer, too, cuts a text at its control tokens first."""
        found = self._tokens.encode(text, add_special_tokens=False)
        ids, at = [], 0
        for token, (start, end) in zip(found.ids, found.offsets, strict=True):
            if token in self._special:
                ids += [*self._as_text(text[at:start].replace(mark, ""), at == 0), token]
                at = end
        return ids + self._as_text(text[at:].replace(mark, ""), at == 0)

    def _as_text(self, text: str, first: bool) -> list[int]:
        """Token ids of text without control tokens; first: at the very front, where some put a space."""
        if first not in self._plain:
            saved = self._tokens.to_str()
            later = saved.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
            self._plain[first] = tokenizers.Tokenizer.from_str(saved if first else later)
            self._plain[first].encode_special_tokens = True
        return self._plain[first].encode(text, add_special_tokens=False).ids

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
        self._part = b""  # of a character that is not whole yet
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        if self.stopped:
            return ""
        if token in self._eos:
            self.stopped = True
            return self.flush()
        if self._tokenizer.is_special(token):
            return ""
        data = self._part + self._tokenizer.bytes_of(token, self._first)
        text, whole = codecs.utf_8_decode(data, "replace")
        self._first, self._part = False, data[whole:]
        return self._release(text)

    def keep(self, tokens: Sequence[int]) -> int | None:
        """How many of the tokens to keep when the answer stops within them, or None. Changes nothing."""
        trial = copy(self)
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
        free = len(text) - undecided(text, self._stop) if found is None else found
        self._held = "" if self.stopped else text[free:]
        return text[:free]


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the stop string that is complete first begins (of two that end together, the longer), or None."""
    ends = ((start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0)
    return min(ends, default=(0, None))[1]


def undecided(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that is a beginning of a stop string."""
    longest = max(map(len, stops), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in stops)), 0)


def _special_of(config: dict[str, Any]) -> dict[str, str]:
    """{"bos_token": "<s>", ...} from the tokenizer's settings, where a token is its text or an object with it."""
    plain = {k: v.get("content") if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
    return {k: v for k, v in plain.items() if isinstance(v, str)}


def _byte_alphabet() -> dict[str, int]:
    """The letters by which byte-level BPE writes bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()
