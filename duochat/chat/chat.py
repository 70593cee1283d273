"""A conversation answered: messages in, a stream of Steps out; stop rules, context and sentences for people.

The engine below knows token ids only, the rooms above read Steps only. `worker.Worker` has a Chat in its child.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from duochat import DuoChatError
from duochat.chat.answer import Step
from duochat.chat.grammar import Schemas
from duochat.chat.text import THINK, AnswerText, Messages, Tokenizer
from duochat.config import AUTO, AnswerSettings, check
from duochat.engine.decoding import Request
from duochat.engine.lanes import never
from duochat.engine.rounds import Round
from duochat.engine.sampling import Grammar, Sampling

if TYPE_CHECKING:
    from duochat.engine.engine import Engine

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Options(AnswerSettings):
    """What is asked of one answer. system: ignored when the messages have one."""

    schema: str = ""  # JSON schema that the answer follows; programs ask for it

    def __post_init__(self) -> None:
        if self.draft_budget is None:  # so "auto" was written in records of earlier versions
            object.__setattr__(self, "draft_budget", AUTO)
        object.__setattr__(self, "logit_bias", tuple(map(tuple, self.logit_bias)))  # JSON knows lists only

    @classmethod
    def of(cls, settings: Any, **overrides: Any) -> Options:
        """The settings' own values, with some replaced."""
        return cls(**{name: getattr(settings, name) for name in SETTINGS} | overrides)

    def check(self, context_length: int) -> None:
        """Raises DuoChatError on the first value that no answer can be made with."""
        if isinstance(self.stop, str):
            raise DuoChatError(f"stop is {self.stop!r}: give a list of texts that are not empty.")
        for name in SETTINGS:
            check(name, getattr(self, name), context_length if name == "max_tokens" else None)

    def sampling(self, grammar: Grammar | None = None) -> Sampling:
        return Sampling(
            **{f.name: getattr(self, f.name) for f in fields(Sampling) if f.name in SETTINGS}, grammar=grammar
        )


SETTINGS = tuple(f.name for f in fields(AnswerSettings))


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
        if unknown := next((token for token, _ in options.logit_bias if token >= self.engine.vocabulary), None):
            raise DuoChatError(
                f"logit_bias names token {unknown}, and the target has {self.engine.vocabulary}: give ids below that."
            )
        if bare := isinstance(messages, str):
            prompt = Prompt(_within(self.tokenizer.bare(messages), length))
        else:
            messages = conversation(messages, options.system)
            prompt = fit(self.tokenizer, messages, length, options.max_tokens)
        grammar = self._schemas.grammar(options.schema) if options.schema else None
        continued = bare or messages[-1]["role"] == "assistant"
        text = AnswerText(self.tokenizer, options.stop, self.engine.eos, continued)
        room = min(options.max_tokens, length - len(prompt.ids))
        request = Request(options.sampling(grammar), room, options.decoder, options.draft_budget, text.keep)
        thinks = not (continued or grammar) and self.tokenizer.opens_thought(prompt.ids)
        opening = THINK if thinks else ""  # the prompt said it
        size = {"prompt_tokens": len(prompt.ids), "context_length": length}
        yield Step(phase="prefill", progress=(0, len(prompt.ids)), notice=_dropped_notice(prompt, length), **size)
        for r in self.engine.decode(prompt.ids, request, cancelled, progress):
            cut_short = r.finish == "length" and room < options.max_tokens
            notice = f"The answer ends here because the context of {length} tokens is full." if cut_short else ""
            yield replace(self._step(r, text, "" if r.index else opening), notice=notice, **size)

    @cached_property
    def _schemas(self) -> Schemas:
        return self.tokenizer.schemas(self.engine.vocabulary, self.engine.eos)

    def _step(self, r: Round, text: AnswerText, opening: str) -> Step:
        pieces = [text.push(token) for token in r.tokens]
        pieces[:1] = [opening + piece for piece in pieces[:1]]
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
    turn = bisect_left(range(len(starts) - 1), True, key=lambda t: len(prompts(t)) <= aim)  # the last at the latest
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


def _dropped_notice(prompt: Prompt, context_length: int) -> str:
    if not prompt.dropped:
        return ""
    gone = "the oldest message was" if prompt.dropped == 1 else f"the {prompt.dropped} oldest messages were"
    return f"The context of {context_length} tokens is full: {gone} left out of this answer."
