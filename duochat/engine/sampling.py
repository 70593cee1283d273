"""Sampling as a pure function of (logits, settings, position): argmax(logits/T + Gumbel noise).

The noise is a counter-based hash of (seed, position, token id), the same function in NumPy (draft lane) and torch
(target lane). So a seed gives one text, whatever was drafted, and the draft can rank its candidates with the
target's own noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np

from duochat.config import FIELDS, Settings, check


class Grammar(Protocol):
    """Which tokens an answer may go on with."""

    def allowed(self, answer: Sequence[int], paths: Sequence[Sequence[int]]) -> np.ndarray:
        """Behind the answer and each of the paths: bool, paths x the target's vocabulary. From any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target chooses a token. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 switch a filter off.

    Penalties are off at 1 (repetition) and 0; `engine.penalties` has them, and needs to know where the answer begins.
    """

    temperature: float = Settings.temperature
    top_k: int = Settings.top_k
    top_p: float = Settings.top_p
    min_p: float = Settings.min_p
    seed: int = Settings.seed
    repetition_penalty: float = Settings.repetition_penalty
    presence_penalty: float = Settings.presence_penalty
    frequency_penalty: float = Settings.frequency_penalty
    logit_bias: tuple[tuple[int, float], ...] = Settings.logit_bias
    grammar: Grammar | None = None
    start: int = 0  # of the answer, in tokens
    said: tuple[int, ...] = field(default=(), compare=False)  # the different tokens before

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.name in FIELDS:
                check(f.name, getattr(self, f.name))

    @property
    def penalised(self) -> bool:
        penalties = (self.presence_penalty, self.frequency_penalty, self.logit_bias)
        return self.repetition_penalty != 1 or any(penalties) or self.grammar is not None

    def after(self, prompt: Sequence[int]) -> Sampling:
        """For the answer to a prompt."""
        if not self.penalised:
            return self
        return replace(self, start=len(prompt), said=() if self.repetition_penalty == 1 else tuple({*prompt}))


_MASK32 = 0xFFFFFFFF


def _mix(x: Any) -> Any:
    """A 32-bit finaliser (xorshift-multiply) on wrapping int32 arrays, alike in NumPy and torch."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -0x7B935975  # 0x846CA68B as a signed number
    return x ^ ((x >> 16) & 0xFFFF)


def _mix_one(x: int) -> int:
    """`_mix` of one unsigned number."""
    x = (x ^ x >> 16) * 0x7FEB352D & _MASK32
    x = (x ^ x >> 15) * 0x846CA68B & _MASK32
    return x ^ x >> 16


def key(seed: int, position: int) -> int:
    """The int32 number that stands for (seed, position) in the hash."""
    mixed = _mix_one(position ^ _mix_one(seed >> 32 ^ _mix_one(seed & _MASK32)))
    return mixed - (mixed >> 31 << 32)


def uniform(tokens: Any, keys: Any) -> Any:
    """Numbers in (0, 1), multiples of 2^-24, from int32 token ids and keys that broadcast together."""
    h = _mix(_mix(tokens) + keys)
    return ((h >> 9) & 0x7FFFFF) * 2.0**-23 + 2.0**-24


def gumbel(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    """Gumbel noise of the given token ids at a position; tokens: any shape, returned in the same shape."""
    return -np.log(-np.log(uniform(tokens.astype(np.int32), np.int32(key(seed, position)))))
