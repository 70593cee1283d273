"""The cache of a recurrent model: one line of tokens, whose state cannot be taken back. Else as `TreeCache`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from duochat.engine.lanes import Cancelled
from duochat.engine.llama.library import Llama
from duochat.engine.llama.tree_cache import TRUNK, Entry, Progress


class LineCache:
    """What is no continuation of the tokens held is read from the start."""

    def __init__(self, llama: Llama, chunk: int) -> None:
        self._llama, self._chunk = llama, chunk
        self.tokens: list[int] = []

    def follow(
        self, context: Sequence[int], cancelled: Callable[[], bool], progress: Progress | None = None, **_: Any
    ) -> Entry:
        """See `TreeCache.follow`."""
        if len(self.tokens) >= len(context) or list(context[: len(self.tokens)]) != self.tokens:
            self.forget()
        while (left := context[len(self.tokens) : -1][: self._chunk]) and not cancelled():
            self._decode(left, cancelled)
            if progress:
                progress(len(self.tokens), len(context))
        if left:
            raise Cancelled
        self._root = Entry(context[-1], len(context) - 1, None)
        return self._root

    def decode(self, cancelled: Callable[[], bool]) -> list[Entry]:
        """See `TreeCache.decode`; the root alone."""
        self._decode([self._root.token], cancelled, outputs=(0,))
        return [self._root]

    def _decode(self, tokens: Sequence[int], cancelled: Callable[[], bool], outputs: Sequence[int] = ()) -> None:
        start = len(self.tokens)
        try:
            positions = range(start, start + len(tokens))
            self._llama.decode(tokens, positions, [(TRUNK,)] * len(tokens), outputs, cancelled)
        except BaseException:
            self.forget()  # nobody knows how far it came
            raise
        self.tokens.extend(tokens)

    def forget(self) -> None:
        """Hold nothing."""
        self._llama.drop(TRUNK, 0)
        self.tokens.clear()
