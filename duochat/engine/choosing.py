"""From one row of logits to a few ranked candidates. Pure, and quick: it runs once a drafted node.

Sorting or exponentiating a whole vocabulary costs as much as a small draft's forward pass. `choosing.c` reads the row
twice and keeps a few.
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
from duochat.engine.sampling import Sampling

SOURCE = Path(__file__).with_suffix(".c")
REACH = 6.0  # greedy: tokens whose logit is this far below the best are cut, their weight is estimated
NOISY_REACH = 8.0  # T > 0: the same in logits/T; in a chat, noise would lift a cut token to the top once in 100
MOST = 512  # T > 0: no more tokens than this get noise after a filter


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
    tokens, probs = (ctypes.c_int32 * count)(), (ctypes.c_float * count)()
    found = kernel()(
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
def kernel() -> Callable[..., int]:
    """choosing.c's. Raises DuoChatError without a compiler."""
    library = kernels.needed(SOURCE, "-ffast-math")
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.choose.argtypes = [pointer, number, pointer, ctypes.POINTER(Choice), number, pointer, pointer]
    return library.choose


def _address(array: np.ndarray) -> int:
    """Quicker than the array's own `ctypes`, which is Python."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))
