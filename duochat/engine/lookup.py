"""Drafts without a draft model: what the conversation itself says comes next."""

from __future__ import annotations

from collections.abc import Sequence


class Lookup:
    """Prompt lookup: what followed the last few tokens when they stood earlier in the conversation."""

    SIZES = (4, 3, 2)
    PROBS = (0.8, 0.6, 0.3)  # where calibration starts for a match of each size
    LENGTH = 8

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._read = 0

    def read(self, context: Sequence[int]) -> None:
        """Index the n-grams that end before the last token; each call reads only what is new."""
        for end in range(max(self._read, 2), len(context)):
            for n in self.SIZES:
                if end >= n:
                    self._after[tuple(context[end - n : end])] = end
        self._read = len(context)

    def continuation(self, context: Sequence[int]) -> tuple[list[int], list[float]]:
        """Up to LENGTH tokens after the latest occurrence of the longest match, and their chances of acceptance."""
        for n, prob in zip(self.SIZES, self.PROBS, strict=True):
            if (at := self._after.get(tuple(context[-n:]))) is not None:
                tokens = list(context[at : at + self.LENGTH])
                return tokens, [prob] + [0.8] * (len(tokens) - 1)
        return [], []
