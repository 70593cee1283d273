"""From one row of draft logits to a few ranked candidates. Pure, and quick: it runs once a drafted node.

Sorting or exponentiating a whole vocabulary costs as much as a small draft's forward pass. So tokens far below the
best one are cut first, by comparison alone, and all the rest works on what is left. Right after a forward pass the
processor's caches hold none of this code: what counts is the number of different NumPy kernels, more than their work.
"""

from __future__ import annotations

import numpy as np

from duochat.engine.lanes import Candidates
from duochat.engine.sampling import Sampling, key, uniform

REACH = np.float32(7)  # tokens whose logit/T is this far below the best are cut: some 9 % of the probability of a
#                        flat row, 1 % of a peaked one
MOST = 512  # T > 0: no more tokens than this get noise
SHORT = 256  # from here on, finding the best before sorting them is quicker than sorting all


def choose(row: np.ndarray, position: int, sampling: Sampling, count: int) -> Candidates:
    """The best `count` tokens for `position` by logits/T + shared noise; row: float32 logits, not changed.

    Probabilities are the softmax of the scores over the tokens that passed the cut and the filters.
    """
    temperature = np.float32(sampling.temperature or 1)
    top = np.maximum.reduce(row)
    tokens = (row >= top - REACH * temperature).nonzero()[0]
    scores = (row[tokens] - top) / temperature
    if sampling.temperature > 0:
        tokens, scores = _filtered(tokens, scores, sampling)
        noise = uniform(tokens.astype(np.int32), np.int32(key(sampling.seed, position))).astype(np.float32)
        scores -= np.log(-np.log(noise))
    weights = np.exp(scores)  # the noise is below 17, so nothing overflows
    total = float(np.add.reduce(weights))
    best = _best(weights, count)
    return Candidates(tuple(tokens[best].tolist()), tuple([weight / total for weight in weights[best].tolist()]))


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
