"""What the text so far does to the logits of its next token: every lane changes them before all else. Pure.

It depends on the path, so each node of a tree has its own. In this order, for a token with the logit l:
- repetition (transformers' form of arXiv 1909.05858): l / r where l > 0, else l · r, if prompt or answer holds it;
- frequency and presence (OpenAI's): l - f · n - p · [n > 0], for a token that the answer holds n times;
- bias (OpenAI's): l + what was given for the token;
- grammar: FORBIDDEN, for a token that it does not allow.
Counts are added up before they meet a logit: so a row gives the same bits, whichever part of its path was committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from duochat.engine.lanes import Edge
from duochat.engine.sampling import Sampling

FORBIDDEN = np.float32(-1e6)  # a logit that no noise at any temperature lifts; finite, as kernels take it


class Changes(NamedTuple):
    """Of the logits of some rows: all rows share the tokens that may change."""

    tokens: np.ndarray  # (k,) int64, ascending
    divisors: np.ndarray  # (rows, k) float32
    added: np.ndarray  # (rows, k) float32
    allowed: np.ndarray | None = None  # (rows, vocabulary) bool, by a grammar

    def among(self, names: np.ndarray | None, size: int) -> Changes:
        """For rows of `size` logits, of the tokens `names` in ascending order (None: their index)."""
        places = self.tokens if names is None else names.searchsorted(self.tokens)
        there = places < size
        if names is not None:
            there[there] = names[places[there]] == self.tokens[there]
        parts = [self.divisors[:, there], self.added[:, there]]
        if self.allowed is not None:
            named = np.arange(size) if names is None else names  # a draft may have more tokens than the target
            known = named < self.allowed.shape[1]
            parts.append(self.allowed[:, np.where(known, named, 0)] & known)
        return Changes(places[there], *map(np.ascontiguousarray, parts))


def changes(context: Sequence[int], paths: Sequence[Sequence[int]], sampling: Sampling) -> Changes | None:
    """For a row behind each path, the tokens from the context's end to it; None without a penalty."""
    if not sampling.penalised:
        return None
    said, answer = _ids(sampling.said), _ids(context[sampling.start :])
    along, bias = _ids([token for path in paths for token in path]), dict(sampling.logit_bias)
    tokens = np.unique(np.concatenate([said, answer, along, _ids(bias)]))
    counts = np.tile(np.bincount(tokens.searchsorted(answer), minlength=len(tokens)), (len(paths), 1))
    np.add.at(counts, (np.repeat(np.arange(len(paths)), [len(path) for path in paths]), tokens.searchsorted(along)), 1)
    held = counts > 0
    added = -sampling.frequency_penalty * counts - sampling.presence_penalty * held
    added[:, tokens.searchsorted(_ids(bias))] += list(bias.values())
    held[:, tokens.searchsorted(said)] = True
    divisors = np.where(held, sampling.repetition_penalty, 1)
    allowed = sampling.grammar and sampling.grammar.allowed(context[sampling.start :], paths)
    return Changes(tokens, divisors.astype(np.float32), added.astype(np.float32), allowed)


def changed(logits: Any, divisors: Any, added: Any) -> Any:
    """Arrays or tensors of float32 that broadcast together."""
    return logits.clip(min=0) / divisors + logits.clip(max=0) * divisors + added


def penalised(row: np.ndarray, made: Changes | None, number: int) -> np.ndarray:
    """The row of that number as `made` changes it; without changes the row itself."""
    if made is None:
        return row
    row = row.copy()
    row[made.tokens] = changed(row[made.tokens], made.divisors[number], made.added[number])
    if made.allowed is not None:
        row[~made.allowed[number]] = FORBIDDEN
    return row


def paths(tree: Sequence[Edge]) -> list[list[int]]:
    """Of the root and of each node."""
    found: list[list[int]] = [[]]
    for token, parent in tree:
        found.append([*found[parent + 1], token])
    return found


def path(entry: Any, length: int) -> list[int]:
    """The tokens from position `length` on that lead to a node of a tree, or to an entry of a cache."""
    tokens = []
    while entry is not None and entry.position >= length:
        tokens.append(entry.token)
        entry = entry.parent
    return tokens[::-1]


def _ids(tokens: Any) -> np.ndarray:
    return np.fromiter(tokens, np.int64, len(tokens))
