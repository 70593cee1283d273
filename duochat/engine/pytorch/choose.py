"""Sampling of all rows on the device: argmax(logits/T + shared noise) over what the filters leave.

Three ways, so that greedy pays for nothing: `greedy`; `noise` (no filter but min-p, over the whole vocabulary);
`nucleus` (top-k or top-p, within the `CANDIDATES` best tokens, and a sign that these were enough).
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import NamedTuple

import torch

from duochat.engine.sampling import Sampling, uniform

CANDIDATES = 256  # more than top-k asks for, as a rule; a row that needs more is sampled anew from all
STRETCHES = 64  # of a row, where its length allows it: with a few rows enough to keep a GPU's cores busy


class Ask(NamedTuple):
    """What sampling needs beside the logits. Rows of width n; parameters are 0-dimensional tensors."""

    token: torch.Tensor  # (n,) each row's own token
    parent: torch.Tensor  # (n,) the row whose logits give that token's probability
    key: torch.Tensor  # (n,) int32, the noise key of the position after the row
    scale: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    floor: torch.Tensor  # log(min_p)

    @classmethod
    def of(cls, token: torch.Tensor, parent: torch.Tensor, key: torch.Tensor, parameters: torch.Tensor) -> Ask:
        """parameters: int32, as `rows.parameters` packs them."""
        scale, _, top_p, floor = parameters.view(torch.float32)
        return cls(token, parent, key, scale, parameters[1], top_p, floor)


Choice = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(token, its probability, probability of the row's own token after its parent row, was the answer complete)."""
Way = Callable[[torch.Tensor, Ask], Choice]


def greedy(logits: torch.Tensor, ask: Ask) -> Choice:
    """logits: (n, vocabulary) float32. Probabilities are those at temperature 1."""
    best, token = _best(logits)
    total = _total(logits)
    own = logits[ask.parent, ask.token]
    return token, (best - total).exp(), (own - total[ask.parent]).exp(), torch.ones_like(best)


def noise(logits: torch.Tensor, ask: Ask) -> Choice:
    """Every token may win that min-p leaves."""
    scaled = logits * ask.scale
    floor = scaled.amax(-1, keepdim=True) + ask.floor
    scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    tokens = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    _, token = _best(scaled + _gumbel(tokens, ask.key[:, None]))
    total = _total(scaled)
    won = scaled.gather(-1, token[:, None])[:, 0]
    own = scaled[ask.parent, ask.token]
    return token, (won - total).exp(), (own - total[ask.parent]).exp(), torch.ones_like(won)


def nucleus(logits: torch.Tensor, ask: Ask, candidates: int = CANDIDATES) -> Choice:
    """Top-k, then top-p of what is left, then min-p. With `candidates` = the vocabulary the answer is complete."""
    scaled = logits * ask.scale
    value, index = scaled.topk(min(candidates, logits.shape[-1]), dim=-1)
    rank = torch.arange(value.shape[-1], device=logits.device)
    limited = ask.top_k > 0
    kept = ~limited | (rank < ask.top_k)
    value = value.masked_fill(~kept, -torch.inf)
    total = torch.where(limited, value.logsumexp(-1), scaled.logsumexp(-1))
    prob = (value - total[:, None]).exp()
    before = prob.cumsum(-1) - prob
    complete = torch.where(limited, ask.top_k <= value.shape[-1], prob.sum(-1) >= ask.top_p)
    kept = kept & (before < ask.top_p) & (value >= value[:, :1] + ask.floor)
    value = value.masked_fill(~kept, -torch.inf)
    prob = value.softmax(-1)
    place = (value + _gumbel(index.to(torch.int32), ask.key[:, None])).argmax(-1, keepdim=True)
    own = (prob[ask.parent] * (index[ask.parent] == ask.token[:, None])).sum(-1)
    return index.gather(-1, place)[:, 0], prob.gather(-1, place)[:, 0], own, complete.to(prob.dtype)


def everything(logits: torch.Tensor, ask: Ask) -> Choice:
    """`nucleus` without its limit: slow, for rows so flat that the best tokens do not hold top-p of the mass."""
    return nucleus(logits, ask, logits.shape[-1])


def told(way: Way, logits: torch.Tensor, ask: Ask) -> torch.Tensor:
    """A choice as one tensor (4, n) of float32, which holds a token's number exactly."""
    return torch.stack([part.float() for part in way(logits, ask)])


def way(sampling: Sampling) -> Way:
    """The cheapest function that is right for these settings."""
    if sampling.temperature == 0:
        return greedy
    return nucleus if sampling.top_k > 0 or sampling.top_p < 1 else noise


def _gumbel(tokens: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return -torch.log(-torch.log(uniform(tokens, keys)))


def _best(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest number of each row and its place, the first of equal ones."""
    stretches = _cut(rows)
    best, place = stretches.max(-1)
    best, stretch = best.max(-1)
    return best, place.gather(-1, stretch[:, None])[:, 0] + stretch * stretches.shape[-1]


def _total(rows: torch.Tensor) -> torch.Tensor:
    """The logarithm of each row's sum of exponentials."""
    return _cut(rows).logsumexp(-1).logsumexp(-1)


def _cut(rows: torch.Tensor) -> torch.Tensor:
    """Each row in stretches: a few rows of so many numbers would keep few of a GPU's cores busy."""
    return rows.unflatten(-1, (gcd(rows.shape[-1], STRETCHES), -1))
