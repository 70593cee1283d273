"""From one row of logits to a few ranked candidates. Pure, and quick: it runs once a drafted node.

Sorting or exponentiating a whole vocabulary costs as much as a small draft's forward pass. `choosing.c` reads the row
twice and keeps a few. Where there is no C compiler NumPy does it: tokens far below the best one are cut first, by
comparison alone, and all the rest works on what is left. Right after a forward pass the processor's caches hold none of
this code: what counts is the number of different NumPy kernels, more than their work.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from duochat.engine import kernels
from duochat.engine.lanes import Candidates
from duochat.engine.sampling import Sampling, key, uniform

SOURCE = Path(__file__).with_suffix(".c")
REACH = np.float32(6)  # greedy: tokens whose logit is this far below the best are cut, their weight is estimated
NOISY_REACH = np.float32(
    8
)  # T > 0: the same in logits/T; in a chat, noise would lift a cut token to the top once in 100
MOST = 512  # T > 0: no more tokens than this get noise after a filter
SHORT = 256  # from here on, finding the best before sorting them is quicker than sorting all


class Choice(ctypes.Structure):
    """A sampling as the kernels take it, `Choice` in choosing.c."""

    _fields_ = (
        *((name, ctypes.c_float) for name in ("scale", "reach", "top_p", "least")),
        *((name, ctypes.c_int32) for name in ("most", "noisy", "count")),
        ("seed", ctypes.c_int64),
    )

    @classmethod
    def of(cls, sampling: Sampling, count: int) -> Choice:
        """For the best `count` tokens. min-p, which stands before the noise, is a cut nearer to the best."""
        if sampling.temperature == 0:
            return cls(1.0, REACH, 1.0, 0.0, 0, 0, count, 0)
        filtered = sampling.top_k > 0 or sampling.top_p < 1
        least = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        reach = NOISY_REACH if filtered else min(NOISY_REACH, -least)
        most = min(MOST, sampling.top_k or MOST) if filtered else 0
        least = max(least, -1e9)
        return cls(1 / sampling.temperature, reach, sampling.top_p, least, most, 1, count, sampling.seed)


def choose(
    row: np.ndarray, position: int, sampling: Sampling, count: int, names: np.ndarray | None = None
) -> Candidates:
    """The best `count` tokens for `position` by logits/T + shared noise; row: float32 logits.

    names: the token of each logit, int64, ascending; None = its index. Probabilities are the softmax of the scores; at
    T > 0 over the tokens that passed the cut and the filters.
    """
    if (kernel := _kernel()) is None:
        return by_numpy(row, position, sampling, count, names)
    tokens, probs = (ctypes.c_int32 * count)(), (ctypes.c_float * count)()
    found = kernel(
        _address(row),
        len(row),
        None if names is None else _address(names),
        Choice.of(sampling, count),
        position,
        tokens,
        probs,
    )
    return Candidates(tuple(tokens[:found]), tuple(probs[:found]))


@cache
def _kernel() -> Callable[..., int] | None:
    library = kernels.library(SOURCE, "-ffast-math")
    if library is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.choose.argtypes = [pointer, number, pointer, ctypes.POINTER(Choice), number, pointer, pointer]
    return library.choose


def _address(array: np.ndarray) -> int:
    """Quicker than the array's own `ctypes`, which is Python."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))


def by_numpy(
    row: np.ndarray, position: int, sampling: Sampling, count: int, names: np.ndarray | None = None
) -> Candidates:
    """`choose` without the kernel."""
    if sampling.temperature == 0:
        top = np.maximum.reduce(row)
        tokens = (row >= top - REACH).nonzero()[0]
        weights = np.exp(row[tokens] - top)
        total = float(np.add.reduce(weights)) + _cut_weight(row, top, len(tokens))
        return _candidates(tokens if names is None else names[tokens], weights, total, count)
    tokens, scores = _noisy(row, position, sampling, names)
    weights = np.exp(scores)  # the noise is below 17, so nothing overflows
    return _candidates(tokens, weights, float(np.add.reduce(weights)), count)


def _candidates(tokens: np.ndarray, weights: np.ndarray, total: float, count: int) -> Candidates:
    best = _best(weights, count)
    return Candidates(tuple(tokens[best].tolist()), tuple([weight / total for weight in weights[best].tolist()]))


def _cut_weight(row: np.ndarray, top: np.float32, within: int) -> float:
    """Softmax weight of the tokens out of reach, from a sample of the row: 16 neighbours of every 512.

    In the sample those within reach, of which the row has so many, stand at its edge; that much is taken off again.
    """
    sample = row[: len(row) // 512 * 512].reshape(-1, 512)[:, :16]
    weights = np.exp(np.minimum(sample - top, -REACH))
    return max(0.0, 32 * float(np.add.reduce(weights, axis=None)) - within * float(np.exp(-REACH)))


def _noisy(
    row: np.ndarray, position: int, sampling: Sampling, names: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that pass the cut and the filters, and their scores: logits/T, less the greatest, and the noise."""
    temperature = np.float32(sampling.temperature)
    top = np.maximum.reduce(row)
    tokens = (row >= top - NOISY_REACH * temperature).nonzero()[0]
    tokens, scores = _filtered(tokens, (row[tokens] - top) / temperature, sampling)
    tokens = tokens if names is None else names[tokens]
    noise = uniform(tokens.astype(np.int32), np.int32(key(sampling.seed, position))).astype(np.float32)
    return tokens, scores - np.log(-np.log(noise))


def _best(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` greatest values, the greatest first."""
    if len(values) <= max(count, SHORT):
        return values.argsort()[: -count - 1 : -1]
    best = values.argpartition(-count)[-count:]
    return best[values[best].argsort()[::-1]]


def _filtered(tokens: np.ndarray, scores: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """What top-k, top-p and min-p leave; scores: logits/T less the greatest."""
    most = min(MOST, sampling.top_k or MOST)
    if len(tokens) > most or sampling.top_p < 1:
        best = _best(scores, most)
        if sampling.top_p < 1:
            weights = np.exp(scores[best])
            best = best[np.cumsum(weights) - weights < sampling.top_p * weights.sum()]
        tokens, scores = tokens[best], scores[best]
    if sampling.min_p > 0:
        probable = scores >= np.log(sampling.min_p)
        tokens, scores = tokens[probable], scores[probable]
    return tokens, scores
