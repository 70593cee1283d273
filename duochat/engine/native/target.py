"""NativeTarget: a small Llama in GGUF's plain 4 or 8 bits as the target lane on the CPU, over native.c.

A row of several costs little there, and is the same to the bit whatever stands beside it: cells hold a context in the
order of positions, and a sum passes over what is out of sight. So every decoder gives the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from duochat.engine.choosing import answer
from duochat.engine.lanes import Answer, Cancelled, Edge, Reading, Stopped, Target, common
from duochat.engine.native.library import MOST, Native
from duochat.engine.sampling import Sampling
from duochat.models import gguf, tokenizer

CHUNK = 8 * MOST  # prompt tokens between two looks at `cancelled`


class NativeTarget(Target):
    """A GGUF model that native.c takes (`unfit`), sampling at every node of a tree. Not safe for several threads."""

    shares_cores = True
    most_nodes = 4 * MOST - 1

    def __init__(self, path: Path, context_length: int = 4096, threads: int = 1) -> None:
        """Raises DuoChatError when memory is short."""
        header = gguf.read(path)
        self.path, self.eos = path, frozenset(tokenizer.stops(header))
        self.context_length = min(context_length, header.get("context_length", context_length))
        self._native = Native(path, self.context_length + self.most_nodes, role="target")
        self.vocabulary = self._native.vocabulary
        self._tokens: list[int] = []  # in the first cells, by position
        self._tree: dict[tuple[int, int], int] = {}  # the last tree: (cell of the parent, token) to the cell
        self.threads = threads
        self.set_threads(threads)

    def set_threads(self, threads: int, reading: int = 0) -> None:
        """See `Target.set_threads`."""
        self._native.set_threads(threads, reading)

    def _begin(
        self, context: Sequence[int], tree: Sequence[Edge], sampling: Sampling, cancelled: Stopped, progress: Reading
    ) -> Callable[[], Answer]:
        if cancelled():
            raise Cancelled
        self._keep(context[:-1])
        self._read(context, cancelled, progress)
        return partial(self._sample, context, tree, sampling)

    def _keep(self, past: Sequence[int]) -> None:
        """Forget what does not lead to the context; what it goes along of the last tree moves to its place."""
        held, shared = self._tokens, common(self._tokens, past)
        cell = len(held) - 1
        while shared == len(held) < len(past) and (cell := self._tree.get((cell, past[shared]), -1)) >= 0:
            self._native.move(cell, shared)
            held.append(past[shared])
            shared += 1
        del held[shared:]
        self._tree = {}

    def _read(self, context: Sequence[int], cancelled: Stopped, progress: Reading) -> None:
        """All but the last token of the context."""
        while (start := len(self._tokens)) < (end := min(start + CHUNK, len(context) - 1)):
            for first in range(start, end, MOST):
                places = range(first, min(first + MOST, end))
                self._native.logits([(context[i], i, i, i - 1, 0) for i in places], self._native.reading)
            self._tokens += context[start:end]
            if progress:
                progress(end, len(context))
            if cancelled():
                raise Cancelled

    def _sample(self, context: Sequence[int], tree: Sequence[Edge], sampling: Sampling) -> Answer:
        first = len(context)  # the cell of the tree's first node
        nodes = [(context[-1], first - 1, first - 1, first - 2, 1)]
        for i, (token, parent) in enumerate(tree):
            nodes.append((token, nodes[parent + 1][1] + 1, first + i, first + parent, 1))
        rows: list[np.ndarray] = []

        def row(number: int) -> np.ndarray:
            while len(rows) <= number:
                part = nodes[len(rows) : len(rows) + MOST]
                rows.extend(self._native.logits(part, self._native.threads))
            return rows[number]

        told = answer(row, context, tree, sampling, self.every)
        row(len(tree))  # those that are left, so that the cache holds the whole tree
        self._tokens.append(context[-1])
        self._tree = {(parent, token): cell for token, _, cell, parent, _ in nodes[1:]}
        return told

    def describe(self) -> dict[str, Any]:
        """The hardware part of a report."""
        header = gguf.read(self.path)
        return {
            "target_backend": "native",
            "target_device": f"CPU, {self._native.kernels}",
            "target_dtype": header.quantization,
            "target_file": self.path.name,
            "target_weight_bytes": sum(t.size for t in header.tensors),
            "target_parameters": sum(t.elements for t in header.tensors),
            "target_widths": "any",
            "target_exact": True,
            "target_notes": [],
        }

    def close(self) -> None:
        """See `lanes.Target.close`."""
        self._native.close()
