"""A conversation answered: messages in, a stream of Steps out; stop rules, context and sentences for people.

The engine below knows token ids only, the page above reads Steps only. `Chat` and `worker.Worker` answer alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

from duochat import DuoChatError
from duochat.chat.text import AnswerText, Messages, Tokenizer
from duochat.engine.decoding import DECODERS, Request
from duochat.engine.lanes import never
from duochat.engine.rounds import Round
from duochat.engine.sampling import Sampling

ROLES = ("system", "user", "assistant")


class Engine(Protocol):
    """Both lanes, as the chat needs them."""

    eos: frozenset[int]
    context_length: int

    def decode(
        self,
        context: Sequence[int],
        request: Request,
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None] | None,
    ) -> Iterator[Round]: ...

    def calibrate(self) -> Any: ...

    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked of one answer. draft_budget None: the computed one. system: ignored when the messages have one."""

    decoder: str = "duotree"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    system: str = ""
    draft_budget: int | None = None

    @classmethod
    def of(cls, settings: Any, **overrides: Any) -> Options:
        """The settings' own values, with some replaced."""
        values = {f.name: getattr(settings, f.name) for f in fields(cls)} | overrides
        if values["draft_budget"] == "auto":
            values["draft_budget"] = None
        return cls(**values)

    def check(self, context_length: int) -> None:
        """Raises DuoChatError on the first value that no answer can be made with."""
        self.sampling()
        if self.decoder not in DECODERS:
            raise DuoChatError(f"There is no decoder {self.decoder!r}: choose one of {', '.join(DECODERS)}.")
        _whole("max_tokens", self.max_tokens, context_length)
        if self.draft_budget is not None:
            _whole("draft_budget", self.draft_budget, context_length)
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise DuoChatError("A stop string is empty: remove it, or write what the answer shall stop at.")

    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)


def _whole(name: str, value: Any, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise DuoChatError(f"{name} is {value}: give a whole number from 1 to {most} (the length of the context).")


@dataclass(frozen=True, slots=True)
class Step:
    """What is new since the step before. The last step of an answer has `finish`, and `error` if it failed.

    text is "".join(pieces), to be appended; all texts together are the answer. There is a piece for each emitted
    token, "" when its text comes with a later one; a last round may carry one more, of text that was held back.
    """

    round: Round | None = None
    text: str = ""
    pieces: tuple[str, ...] = ()
    draft_texts: Mapping[int, str] = field(default_factory=dict)  # id of a drafted token -> its text
    phase: str = ""  # "queued", "loading", "prefill", "decode" or "done"
    progress: tuple[int, int] | None = None  # (done, total) of the phase; in "queued": (requests ahead, waiting)
    notice: str = ""  # a sentence for the person, not part of the answer
    prompt_tokens: int = 0
    context_length: int = 0
    finish: str | None = None  # "stop", "length", "cancelled" or "error"
    error: str = ""  # one sentence: what happened, what to do

    def to_json(self) -> str:
        """One JSON line; `from_json` is its inverse."""
        return _to_json(self)

    @classmethod
    def from_json(cls, line: str | Mapping[str, Any]) -> Step:
        """Raises ValueError when the line is not a step."""
        raw = json.loads(line) if isinstance(line, str) else dict(line)
        try:
            raw["round"] = Round.from_json(raw["round"]) if raw["round"] else None
            raw["pieces"] = tuple(raw["pieces"])
            raw["draft_texts"] = {int(id): text for id, text in raw["draft_texts"].items()}
            raw["progress"] = tuple(raw["progress"]) if raw["progress"] else None
            return cls(**raw)
        except (KeyError, TypeError, AttributeError) as fault:
            raise ValueError("not a step") from fault


def plain(record: Any) -> dict[str, Any]:
    """The `default` of JSON encoders for records; dataclasses.asdict takes ten times as long."""
    return {f.name: getattr(record, f.name) for f in fields(record)}


_to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, default=plain).encode


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids that fit into the context, and how many of the oldest messages had to go for it."""

    ids: list[int]
    dropped: int = 0


class Chat:
    """Answers conversations with one engine and its target's tokenizer. One answer at a time, from one thread."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer

    def reply(
        self,
        messages: Messages | str,
        options: Options,
        cancelled: Callable[[], bool] = never,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[Step]:
        """Answer the last message, or continue it if it is the assistant's own; a bare text is continued as it stands.

        progress(done, total) is called while the prompt is read. Raises DuoChatError before the first step when the
        messages or options are unusable; close the generator to stop at any point.
        """
        length = self.engine.context_length
        options.check(length)
        if bare := isinstance(messages, str):
            prompt = Prompt(_within(self.tokenizer.bare(messages), length))
        else:
            messages = conversation(messages, options.system)
            prompt = fit(self.tokenizer, messages, length, options.max_tokens)
        continued = bare or messages[-1]["role"] == "assistant"
        text = AnswerText(self.tokenizer, options.stop, self.engine.eos, continued)
        room = min(options.max_tokens, length - len(prompt.ids))
        request = Request(options.sampling(), room, options.decoder, options.draft_budget, text.keep)
        size = {"prompt_tokens": len(prompt.ids), "context_length": length}
        yield Step(phase="prefill", progress=(0, len(prompt.ids)), notice=_dropped_notice(prompt, length), **size)
        for r in self.engine.decode(prompt.ids, request, cancelled, progress):
            cut_short = r.finish == "length" and room < options.max_tokens
            notice = f"The answer ends here because the context of {length} tokens is full." if cut_short else ""
            yield replace(self._step(r, text), notice=notice, **size)

    def _step(self, r: Round, text: AnswerText) -> Step:
        pieces = [text.push(token) for token in r.tokens]
        if r.finish and (held := text.flush()):
            pieces[-1:] = ["".join([*pieces[-1:], held])]
        return Step(
            round=r,
            text="".join(pieces),
            pieces=tuple(pieces),
            draft_texts={d.id: self.tokenizer.text_of(d.token) for d in r.drafted},
            phase="done" if r.finish else "decode",
            finish=r.finish,
        )


def conversation(messages: Messages, system: str = "") -> list[dict[str, str]]:
    """The messages as the template needs them, the system prompt in front. Raises DuoChatError if there is no text."""
    clean = [{"role": m["role"], "content": m["content"]} for m in messages if m["role"] != "assistant" or m["content"]]
    if unknown := next((m["role"] for m in clean if m["role"] not in ROLES), None):
        raise DuoChatError(f"A message has the role {unknown!r}: give {', '.join(ROLES)}.")
    if not any(m["role"] == "user" for m in clean) or not clean[-1]["content"].strip():
        raise DuoChatError("The message is empty: write something to answer.")
    if system.strip() and clean[0]["role"] != "system":
        clean.insert(0, {"role": "system", "content": system})
    return clean


def fit(tokenizer: Tokenizer, messages: Messages, context_length: int, max_tokens: int) -> Prompt:
    """The prompt, without the oldest turns if it would leave too little room for an answer.

    The system prompt and the last turn stay. Turns go in blocks of a quarter of the context, so that the prompt keeps
    its beginning (and the lanes their caches) over several turns. Raises DuoChatError when the last turn is too long.
    """
    head = [m for m in messages[:1] if m["role"] == "system"]
    starts = [i for i, m in enumerate(messages) if m["role"] == "user"]
    block = max(1, context_length // 4)
    prompts = lambda turn: tokenizer.prompt([*head, *messages[starts[turn] :]])  # noqa: E731
    ids = tokenizer.prompt(messages)
    excess = len(ids) - (context_length - min(max_tokens, block))
    if excess <= 0:
        return Prompt(ids)
    aim = len(ids) - -(-excess // block) * block
    turn = _first_within(lambda t: len(prompts(t)) <= aim, len(starts) - 1)
    ids = _within(prompts(turn), context_length)
    return Prompt(ids, dropped=starts[turn] - len(head))


def _within(ids: list[int], context_length: int) -> list[int]:
    if not ids:
        raise DuoChatError("The message is empty: write something to answer.")
    if len(ids) >= context_length:
        raise DuoChatError(
            f"The message needs {len(ids)} tokens, but the context holds {context_length}: "
            "shorten it or raise context_length."
        )
    return ids


def _first_within(good: Callable[[int], bool], last: int) -> int:
    """The smallest number from 0 to last for which good() holds, given that it holds from there on; else last."""
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle + 1, high)
    return low


def _dropped_notice(prompt: Prompt, context_length: int) -> str:
    if not prompt.dropped:
        return ""
    gone = "the oldest message was" if prompt.dropped == 1 else f"the {prompt.dropped} oldest messages were"
    return f"The context of {context_length} tokens is full: {gone} left out of this answer."
