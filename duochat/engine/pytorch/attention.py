"""The attention functions that the model is given (transformers' registry).

Query heads that share a key head stand below one another, as further rows against the same keys: nothing is copied for
grouped heads. The mask has as many rows (`grouped` makes it so).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "duochat"
PRODUCTS = f"{NAME}-products"  # two matrix products: reads long caches with more of a GPU's cores
SPLIT = f"{NAME}-split"  # stretches of the cache side by side, for few rows on a GPU
EXACT = f"{NAME}-exact"  # the same whatever the order of the slots, to the last bit of the model's type
STRETCHES = 4
FEW = 64  # rows; more of them fill a GPU by themselves


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """query (1, heads, rows, size), key and value (1, kv heads, span, size), mask (1, 1, group * rows, span).

    The mask is added to the scores. Returns (1, rows, heads, size).
    """
    if softcap is not None:
        return by_products(module, query, key, value, attention_mask, scaling, softcap)
    rows = _rows(query, key)
    return _heads(scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling), query), None


def by_products(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """`attend`, written out: scores in the model's type, softmax in float32 at least."""
    scores = torch.matmul(_rows(query, key), key.transpose(-1, -2))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * (scaling or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = (scores + attention_mask).softmax(-1).to(value.dtype)
    return _heads(torch.matmul(weights, value), query), None


def in_stretches(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """`attend`, with the cache read in STRETCHES at a time and the results merged by their log-sum-exps.

    The idea is flash-decoding's: a dozen rows over one long stretch keep a fraction of a GPU busy.
    """
    rows = _rows(query, key)
    if softcap is not None or not 1 < rows.shape[2] <= FEW:
        return attend(module, query, key, value, attention_mask, scaling, softcap)
    keys, values = (states[0].unflatten(1, (STRETCHES, -1)).transpose(0, 1) for states in (key, value))
    hidden = torch.finfo(attention_mask.dtype).min / 2  # finite: a stretch in which a row sees nothing weighs nothing
    mask = attention_mask[0, 0].clamp(min=hidden).unflatten(1, (STRETCHES, -1)).transpose(0, 1)[:, None]
    mixed, sums = _attend_with_sums(rows.expand(STRETCHES, -1, -1, -1), keys, values, mask, scaling)
    weights = sums[:, :, : rows.shape[2], None].softmax(0)
    return _heads((weights * mixed).sum(0, keepdim=True).to(query.dtype), query), None


def _attend_with_sums(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the logarithm of each row's sum of exponentials (at least as many rows as asked)."""
    mask = mask.expand(-1, query.shape[1], -1, -1)
    if query.device.type == "cuda":
        fused = torch.ops.aten._scaled_dot_product_efficient_attention
        return fused(query, key, value, mask, True, scale=scaling)[:2]
    plain = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return plain(query, key, value, attn_mask=mask, scale=scaling)[:2]


def exactly(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`by_products` in float64: what the order of summation changes is lost when the result is rounded."""
    wide = (states.double() for states in (query, key, value))
    mixed, _ = by_products(module, *wide, attention_mask, **options)
    return mixed.to(query.dtype), None


def grouped(mask: torch.Tensor, config: Any) -> torch.Tensor:
    """(rows, span) to (1, 1, group * rows, span) for a model's query heads to a key head."""
    return mask.repeat(config.num_attention_heads // config.num_key_value_heads, 1)[None, None]


def _rows(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """(1, heads, rows, size) to (1, kv heads, group * rows, size)."""
    heads, rows, size = query.shape[1:]
    return query.reshape(1, key.shape[1], heads // key.shape[1] * rows, size)


def _heads(mixed: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Back, as the model wants it: (1, rows, heads, size)."""
    return mixed.reshape(1, query.shape[1], query.shape[2], -1).transpose(1, 2).contiguous()


for _name, _function in ((NAME, attend), (PRODUCTS, by_products), (SPLIT, in_stretches), (EXACT, exactly)):
    AttentionInterface.register(_name, _function)
