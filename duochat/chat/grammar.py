"""Answers that follow a JSON schema: which tokens may come next, as llguidance knows them of the model's tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from duochat import DuoChatError

SPACE = {"whitespace_pattern": "[ \\n]{0,20}"}  # between two parts; without an end a small model pads for ever
ANYTHING = {"type": "object"}  # what a schema says that asks for JSON alone


class Schemas:
    """Of one tokenizer."""

    def __init__(self, tokenizer: str, vocabulary: int, ends: Iterable[int]) -> None:
        """tokenizer: the text of its tokenizer.json. ends: tokens that end an answer."""
        try:
            from llguidance import LLMatcher, LLTokenizer

            self.ends = frozenset(ends)
            self._tokens = LLTokenizer(tokenizer, n_vocab=vocabulary, eos_token=sorted(self.ends))
        except ValueError as fault:
            raise DuoChatError(f"Answers by a schema need another tokenizer ({fault}): leave the schema out.") from None
        self.vocabulary, self._matcher = vocabulary, LLMatcher

    def grammar(self, schema: str) -> Grammar:
        """Raises DuoChatError for what is no schema."""
        try:
            rules = self._matcher.grammar_from_json_schema(schema, overrides=SPACE)
            fault = self._matcher.validate_grammar(rules, self._tokens)
        except ValueError as wrong:
            fault = str(wrong)
        if fault:
            why = " ".join(fault.split())[:200]
            raise DuoChatError(f"The schema cannot be followed ({why}): give another.")
        return Grammar(self, lambda: self._matcher(self._tokens, rules, log_level=0))


class Grammar:
    """Of one answer; each thread has a matcher of its own, which goes along with it."""

    def __init__(self, schemas: Schemas, begin: Callable[[], Any]) -> None:
        self._schemas, self._begin, self._own = schemas, begin, threading.local()

    def allowed(self, answer: Sequence[int], paths: Sequence[Sequence[int]]) -> np.ndarray:
        """What may follow the answer and each path, rows x vocabulary; anything after a path that may not be."""
        matcher = self._follow(answer)
        rows = np.ones((len(paths), self._schemas.vocabulary), bool)
        for row, path in zip(rows, paths, strict=True):
            if self._schemas.ends.isdisjoint(path):
                taken = matcher.try_consume_tokens(list(path))
                if taken == len(path):
                    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
                    row[:] = np.unpackbits(bits, count=len(row), bitorder="little")
                matcher.rollback(taken)
        if matcher.is_error():
            fault = matcher.get_error().partition("\n")[0]
            raise DuoChatError(f"The schema cannot be followed any further ({fault}): give a simpler one.")
        return rows

    def _follow(self, answer: Sequence[int]) -> Any:
        """The matcher where the answer stands, which only grows."""
        own = self._own
        if not hasattr(own, "matcher"):
            own.matcher, own.held = self._begin(), 0
        assert own.held <= len(answer), "an answer only grows"
        own.matcher.consume_tokens(list(answer[own.held :]))
        own.held = len(answer)
        return own.matcher
