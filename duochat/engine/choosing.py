"""From one row of logits to a draft's few candidates (`choose`), or to the target's own token (`sample`).

Both by `choosing.c`: to sort or exponentiate a whole vocabulary costs as much as a small draft's forward pass.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from duochat import DuoChatError
from duochat.engine import kernels
from duochat.engine.lanes import Answer, Candidates, Edge, children
from duochat.engine.penalties import changes, paths, penalised
from duochat.engine.sampling import Sampling, key

SOURCE = Path(__file__).with_suffix(".c")
# Sums keep their order, so a row gives the same bits wherever it lies; loops are vectors still. No -ffast-math:
# a library with it turns small numbers to 0 in the thread that loads it, a target's too.
ORDERED = ("-fno-trapping-math", "-fno-math-errno", "-ffinite-math-only", "-fno-signed-zeros")
REACH = 6.0  # greedy: tokens whose logit is this far below the best are cut, their weight is estimated
NOISY_REACH = 8.0  # T > 0: the same in logits/T; in a chat, noise would lift a cut token to the top once in 100
MOST = 512  # T > 0: no more tokens than this get noise after a filter
NO_FLOOR = -1e30
LARGEST = 2.0**127  # as a 32-bit float


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
    found = kernel().choose(
        _address(row),
        len(row),
        None if names is None else _address(names),
        Choice.of(sampling, count),
        position,
        tokens,
        probs,
    )
    return Candidates(tuple(tokens[:found]), tuple(probs[:found]))


def sample(row: np.ndarray, position: int, sampling: Sampling, asked: Sequence[int] = ()) -> tuple[int, list[float]]:
    """The token for `position`, and the probabilities of it and of the tokens `asked`, noise apart.

    argmax(logits/T + shared noise) over what the filters leave, exactly: top-k, then top-p of what is left, then min-p;
    of equal scores the lower token. Probabilities are those at temperature 1 when greedy, else those that temperature
    and filters leave. row: float32 logits, contiguous, not changed.

    The torch lane has the same rule (`engine/pytorch/choose.py`). Both round differently in the last bit: where scores
    differ by less, which is once in some million tokens, the lanes may part.
    """
    greedy = sampling.temperature == 0
    scale = np.float32(1.0 if greedy else min(1 / sampling.temperature, LARGEST))
    floor = math.log(sampling.min_p) if sampling.min_p > 0 and not greedy else NO_FLOOR
    top_k, top_p = (0, 1.0) if greedy else (sampling.top_k, sampling.top_p)
    tokens, probs = (ctypes.c_int32 * len(asked))(*asked), (ctypes.c_float * (len(asked) + 1))()
    noise = 0 if greedy else key(sampling.seed, position)
    rules = (scale, not greedy, noise, top_k, top_p, floor)
    token = kernel().sample(_address(row), len(row), *rules, len(asked), tokens, probs)
    if token < 0:
        raise DuoChatError("The target's logits are no numbers, or memory is short: fetch the model again.")
    return token, [*probs]


def answer(
    row: Callable[[int], np.ndarray], context: Sequence[int], tree: Sequence[Edge], sampling: Sampling, every: bool
) -> Answer:
    """What the target says of a tree below a context.

    row: logits after its root (0), and after node i (i + 1); asked for in this order, each good until the next. every:
    of all rows, not only of those that the target's path reaches. To sample one of a large vocabulary takes a tenth of
    a millisecond, and most are never reached.
    """
    ways, count = paths(tree), len(tree)
    made = changes(context, ways, sampling)
    told = Answer([None] * (count + 1), [None] * (count + 1), [None] * count)
    reached: int | None = 0
    for number, nodes in enumerate(children(tree)):
        if number != reached and not every:
            continue
        position, asked = len(context) + len(ways[number]), [tree[node][0] for node in nodes]
        token, probs = sample(penalised(row(number), made, number), position, sampling, asked)
        told.tokens[number], told.probs[number] = token, probs[0]
        for node, prob in zip(nodes, probs[1:], strict=True):
            told.node_probs[node] = prob
        if number == reached:
            reached = next((node + 1 for node in nodes if tree[node][0] == token), None)
    return told


@cache
def kernel() -> ctypes.CDLL:
    """choosing.c's functions. Raises DuoChatError without a compiler."""
    library = kernels.needed(SOURCE, *ORDERED)
    pointer, number, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    library.choose.argtypes = [pointer, number, pointer, ctypes.POINTER(Choice), number, pointer, pointer]
    rules = (real, number, ctypes.c_uint32, number, real, real)
    library.sample.argtypes = [pointer, number, *rules, number, pointer, pointer]
    return library


def _address(array: np.ndarray) -> int:
    """Quicker than the array's own `ctypes`, which is Python."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array))
