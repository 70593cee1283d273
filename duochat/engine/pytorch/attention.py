"""The attention functions that the model is given (transformers' registry).

Query heads that share a key head stand below one another, as further rows against the same keys: nothing is copied for
grouped heads. The mask has as many rows (`grouped` makes it so). On a CUDA device a Triton kernel attends a tree's rows
as flash-decoding does: every key head's slots are read in stretches, side by side, so that the whole GPU reads; a
second kernel merges what the stretches found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "duochat"
TREE = f"{NAME}-tree"  # by the kernel, where it can
EXACT = f"{NAME}-exact"  # the same whatever the order of the slots, to the last bit of the model's type
HARMLESS = {"dropout", "is_causal", "sliding_window", "position_ids", "use_cache"}  # and what starts with "output_"
FEW = 128  # rows of all query heads that share a key head; more of them keep a GPU busy by themselves
SIZES = (16, 32, 64, 128, 256)  # of a head
MOST = 32  # stretches
TILE = 8192  # keys' elements at a time, at most: several tiles fit a core's shared memory


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    kernel: bool = False,
    exact: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query (1, heads, rows, size), key and value (1, kv heads, span, size), mask (1, 1, group * rows, span); but for
    the kernel's, any number of sequences in place of the first 1.

    The mask is added to the scores. s_aux: a score for each head that takes its share of a row's weights and adds
    nothing (an attention sink). kernel: by that, where it can. exact: in float64, so that what the order of summation
    changes is lost when the result is rounded. Returns (1, rows, heads, size). Raises TypeError on what else a model
    says, for it may change the result.
    """
    for name, given in others.items():
        if given is not None and name not in HARMLESS and not name.startswith("output_"):
            raise TypeError(f"{name} is not known")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    plain = softcap is None and s_aux is None
    if kernel and plain and _fits(query, key, value):
        return torch.ops.duochat.tree_attention(query, key, value, attention_mask, scale), None
    rows = _rows(query, key)
    if plain and not exact:
        mixed = scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scale)
    else:
        states = (x.double() if exact else x for x in (rows, key, value))
        mixed = _written_out(*states, attention_mask, scale, softcap, s_aux).to(query.dtype)
    return _heads(mixed, query), None


by_kernel = partial(attend, kernel=True)
exactly = partial(attend, exact=True)


def grouped(mask: torch.Tensor, config: Any) -> torch.Tensor:
    """(rows, span) to (1, 1, group * rows, span) for a model's query heads to a key head."""
    return mask.repeat(config.num_attention_heads // key_heads(config), 1)[None, None]


def key_heads(config: Any) -> int:
    """Heads with keys of their own: all, where the configuration names none."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernel takes states of this kind, and so few rows."""
    heads, rows, size = query.shape[1:]
    kind = size in SIZES and value.shape[-1] == size and query.dtype in (torch.float16, torch.bfloat16)
    return kind and heads // key.shape[1] * rows <= FEW


def _written_out(
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Scores in the states' type, softmax in float32 at least."""
    scores = torch.matmul(rows, key.transpose(-1, -2))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is not None:
        owners, lines = scores.shape[1:3]
        heads = sinks.to(scores.dtype).reshape(owners, -1, 1)
        column = heads.expand(-1, -1, lines // heads.shape[1]).reshape(1, owners, lines, 1)
        column = column.expand(len(scores), -1, -1, -1)
        scores = torch.cat([scores, column], -1)
    return torch.matmul(scores.softmax(-1)[..., : key.shape[2]].to(value.dtype), value)


def _rows(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """(1, heads, rows, size) to (1, kv heads, group * rows, size)."""
    count, heads, rows, size = query.shape
    return query.reshape(count, key.shape[1], heads // key.shape[1] * rows, size)


def _heads(mixed: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Back, as the model wants it: (1, rows, heads, size)."""
    return mixed.reshape(*query.shape[:3], -1).transpose(1, 2).contiguous()


# ---------------------------------------------------------------- the kernel


@dataclass(frozen=True, slots=True)
class Tiling:
    """Each of about `programs` thread blocks reads `slots` at a time, `ahead` tiles in flight."""

    programs: int
    slots: int = 64
    ahead: int = 3
    warps: int = 4

    @classmethod
    @cache
    def of(cls, device: torch.device) -> Tiling:
        """One thread block for each multiprocessor of the card."""
        return cls(torch.cuda.get_device_properties(device).multi_processor_count)

    def stretch(self, span: int, heads: int) -> tuple[int, int]:
        """Slots of a stretch, whole tiles, and how many stretches cover the span for each of the key heads."""
        tiles = -(-span // self.slots)
        length = self.slots * -(-tiles // min(max(self.programs // heads, 1), MOST))
        return length, -(-span // length)


@torch.library.custom_op("duochat::tree_attention", mutates_args=())
def _mixed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Opaque to torch.compile."""
    return mixed(query, key, value, mask, scale)


@_mixed.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    _, heads, rows, size = query.shape
    return query.new_empty(1, rows, heads, size)


def mixed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """As `attend` takes and gives them, in 16 bits. A row that sees nothing gets zeros."""
    tiling = tiling or Tiling.of(query.device)
    query, key, value, mask = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, mask))
    _, heads, rows, size = query.shape
    owners, span = key.shape[1:3]
    width = max(16, 1 << (heads // owners * rows - 1).bit_length())
    stretch, count = tiling.stretch(span, owners)
    out = query.new_empty(1, rows, heads, size)
    parts = out if count == 1 else query.new_empty(count, rows, heads, size, dtype=torch.float32)
    logs = query.new_empty(count, rows, heads, dtype=torch.float32)
    strides = (*query.stride()[1:3], *key.stride()[1:3], *value.stride()[1:3], mask.stride(2))
    ahead = tiling.ahead if width < 64 else min(tiling.ahead, 2)  # so that it fits smaller GPUs' shared memory
    options = {"num_stages": ahead, "num_warps": tiling.warps if width < 128 else 2 * tiling.warps}
    kernel().attend[(owners, count)](
        query, key, value, mask, parts, logs, scale * math.log2(math.e), span, stretch, rows, *strides,
        heads // owners, width, size, min(tiling.slots, TILE // size), **options,
    )  # fmt: skip
    if count > 1:
        most = 1 << (count - 1).bit_length()
        warps = max(1, most * size // 1024)
        kernel().merge[(rows * heads,)](parts, logs, out, count, rows * heads, most, size, num_warps=warps)
    return out


@cache
def kernel() -> Any:
    """The module of the kernels. Raises ImportError without Triton."""
    return import_module("duochat.engine.pytorch.attention_kernels")


def available() -> bool:
    """Whether Triton is there to compile the kernel."""
    try:
        kernel()
    except ImportError:
        return False
    return True


for _name, _function in ((NAME, attend), (TREE, by_kernel), (EXACT, exactly)):
    AttentionInterface.register(_name, _function)
