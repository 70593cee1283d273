"""From one row of draft logits to a few ranked candidates. Pure, and quick: it runs once a drafted node.

Sorting or exponentiating a whole vocabulary costs as much as a small draft's forward pass. So tokens far below the
best one are cut first, by comparison alone; all the rest works on what is left.
"""

from __future__ import annotations

import numpy as np

from duochat.engine.lanes import Candidates
from duochat.engine.sampling import Sampling, gumbel

REACH = 10.0  # greedy: tokens this far below the best logit are cut; a few per cent of the probability at most
NOISY_REACH = 8.0  # T > 0: the same in logits/T; what is cut would be sampled as rarely as its probability says
MOST = 1024  # T > 0: no more tokens than this get noise


def choose(logits: np.ndarray, position: int, sampling: Sampling, count: int) -> Candidates:
    """The best `count` tokens for `position` by logits/T + shared noise; logits: one row, not changed.

    Probabilities are the softmax of the scores over the tokens that passed the cut and the filters.
    """
    if sampling.temperature == 0:
        tokens = np.flatnonzero(logits > logits.max() - REACH)
        return _best(tokens, logits[tokens], count)
    tokens, scores = _kept(logits, sampling)
    return _best(tokens, scores + gumbel(sampling.seed, position, tokens).astype(np.float32), count)


def _kept(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Token ids that pass the filters, and their logits/T."""
    temperature = np.float32(sampling.temperature)
    tokens = np.flatnonzero(logits >= logits.max() - NOISY_REACH * temperature)
    most = min(MOST, sampling.top_k or MOST)
    if len(tokens) > most:
        tokens = tokens[np.argpartition(logits[tokens], -most)[-most:]]
    scores = logits[tokens] / temperature
    if sampling.top_p < 1:
        tokens, scores = _nucleus(tokens, scores, sampling.top_p)
    if sampling.min_p > 0:
        probable = scores >= scores.max() + np.log(sampling.min_p)
        tokens, scores = tokens[probable], scores[probable]
    return tokens, scores


def _nucleus(tokens: np.ndarray, scores: np.ndarray, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """The smallest set of the most probable tokens that holds top_p of the probability."""
    order = np.argsort(-scores)
    weights = np.exp(scores[order] - scores[order[0]])
    before = np.cumsum(weights) - weights
    order = order[before < top_p * weights.sum()]
    return tokens[order], scores[order]


def _best(tokens: np.ndarray, scores: np.ndarray, count: int) -> Candidates:
    weights = np.exp(scores - scores.max())
    top = np.argpartition(weights, -count)[-count:] if len(weights) > count else np.arange(len(weights))
    top = top[np.argsort(-scores[top], kind="stable")]
    return Candidates(tuple(tokens[top].tolist()), tuple((weights[top] / weights.sum()).tolist()))
