"""The target's own token of a row of logits: argmax(logits/T + shared noise) over what the filters leave, exactly.

The same rule as the torch lane's (`engine/pytorch/choose.py`): top-k, then top-p of what is left, then min-p; of equal
scores the lower token. Both round differently in the last bit, so where two tokens' scores differ by less than that,
which is once in some million tokens, the lanes may part. `sample.c` does it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from duochat import DuoChatError
from duochat.engine import kernels
from duochat.engine.lanes import Answer, Edge
from duochat.engine.penalties import Changes, penalised
from duochat.engine.sampling import Sampling, key

OPTIONS = ("-fno-trapping-math", "-fno-math-errno", "-ffinite-math-only", "-fno-signed-zeros")  # so loops are vectors
NO_FLOOR = -1e30
LARGEST = 2.0**127  # as a 32-bit float


def sample(row: np.ndarray, position: int, sampling: Sampling, asked: Sequence[int] = ()) -> tuple[int, list[float]]:
    """The token for `position`, and the probabilities of it and of the tokens `asked`, noise apart.

    row: float32 logits, contiguous, not changed. Probabilities are those at temperature 1 when greedy, else those that
    temperature and filters leave.
    """
    greedy = sampling.temperature == 0
    scale = np.float32(1.0 if greedy else min(1 / sampling.temperature, LARGEST))
    floor = math.log(sampling.min_p) if sampling.min_p > 0 and not greedy else NO_FLOOR
    top_k, top_p = (0, 1.0) if greedy else (sampling.top_k, sampling.top_p)
    tokens, probs = (ctypes.c_int32 * len(asked))(*asked), (ctypes.c_float * (len(asked) + 1))()
    noise = 0 if greedy else key(sampling.seed, position)
    rules = (scale, not greedy, noise, top_k, top_p, floor)
    token = kernel()(row.__array_interface__["data"][0], len(row), *rules, len(asked), tokens, probs)
    if token < 0:
        raise DuoChatError("The target's logits are no numbers, or memory is short: fetch the model again.")
    return token, [*probs]


def answer(
    rows: Iterable[np.ndarray], position: int, tree: Sequence[Edge], sampling: Sampling, made: Changes | None
) -> Answer:
    """What the target says of a tree. rows: logits after its root and after each node, in this order, each good until
    the next. position: of the token after the root. made: what penalties do to the rows."""
    below: list[list[int]] = [[] for _ in range(len(tree) + 1)]
    places = [position]
    for node, (_, parent) in enumerate(tree):
        below[parent + 1].append(node)
        places.append(places[parent + 1] + 1)
    told = Answer([], [], [0.0] * len(tree))
    for number, (row, nodes) in enumerate(zip(rows, below, strict=True)):
        with penalised(row, made, number) as changed:
            token, probs = sample(changed, places[number], sampling, [tree[node][0] for node in nodes])
        told.tokens.append(token)
        told.probs.append(probs[0])
        for node, prob in zip(nodes, probs[1:], strict=True):
            told.node_probs[node] = prob
    return told


@cache
def kernel() -> Callable[..., int]:
    """sample.c's. Raises DuoChatError without a compiler."""
    library = kernels.needed(Path(__file__).with_suffix(".c"), *OPTIONS)
    pointer, number, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    rules = (real, number, ctypes.c_uint32, number, real, real)
    library.sample.argtypes = [pointer, number, *rules, number, pointer, pointer]
    return library.sample
