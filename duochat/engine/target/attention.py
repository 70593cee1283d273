"""The attention function that the model is given (transformers' registry): grouped heads without copied keys."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "duochat"


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
    """query (1, heads, rows, size), key and value (1, kv heads, span, size), mask (1, 1, rows, span) of 0 and -inf.

    Query heads that share a key head stand as (kv heads, group), against keys of stride 0 along the group.
    Returns (1, rows, heads, size).
    """
    heads, rows, size = query.shape[1:]
    kv_heads, span = key.shape[1:3]
    group = heads // kv_heads
    query = query.reshape(kv_heads, group, rows, size)
    key = key.reshape(kv_heads, 1, span, size).expand(-1, group, -1, -1)
    value = value.reshape(kv_heads, 1, span, -1).expand(-1, group, -1, -1)
    if softcap is None:
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    else:
        scores = torch.matmul(query, key.transpose(-1, -2)).float() * (scaling or size**-0.5)
        scores = torch.tanh(scores / softcap) * softcap + attention_mask
        mixed = torch.matmul(scores.softmax(-1).to(value.dtype), value)
    return mixed.reshape(1, heads, rows, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
