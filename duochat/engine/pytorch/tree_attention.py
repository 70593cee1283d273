"""Attention of few rows over the slot cache: a Triton kernel, for a tree's rows on a CUDA device.

Flash-decoding: every key head's slots are read in stretches, side by side, so that the whole GPU reads; a second kernel
merges what the stretches found. Queries are read and results are written as the model lays them out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import AttentionInterface

from duochat.engine.pytorch.attention import NAME, in_stretches

TREE = f"{NAME}-tree"
FEW = 128  # rows of all query heads that share a key head; more of them keep a GPU busy by themselves
SIZES = (16, 32, 64, 128, 256)  # of a head
MOST = 32  # stretches
TILE = 8192  # keys' elements at a time, at most: several tiles fit a core's shared memory


@dataclass(frozen=True, slots=True)
class Tiling:
    """Each of about `programs` thread blocks reads `slots` at a time, `ahead` tiles in flight."""

    slots: int = 64
    ahead: int = 3
    warps: int = 4
    programs: int = 132  # cores of an H200

    def stretch(self, span: int, heads: int) -> tuple[int, int]:
        """Slots of a stretch, whole tiles, and how many stretches cover the span for each of the key heads."""
        tiles = -(-span // self.slots)
        length = self.slots * -(-tiles // min(max(self.programs // heads, 1), MOST))
        return length, -(-span // length)


def attend_few(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """`in_stretches`, by the kernel where it can."""
    heads, rows, size = query.shape[1:]
    fits = size in SIZES and value.shape[-1] == size and query.dtype in (torch.float16, torch.bfloat16)
    if softcap is not None or not fits or heads // key.shape[1] * rows > FEW:
        return in_stretches(module, query, key, value, attention_mask, scaling, softcap)
    scale = size**-0.5 if scaling is None else scaling
    return torch.ops.duochat.tree_attention(query, key, value, attention_mask, scale), None


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
    tiling: Tiling = Tiling(),
) -> torch.Tensor:
    """As `attend` takes and gives them, in 16 bits. A row that sees nothing gets zeros."""
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
    kernel()[(owners, count)](
        query, key, value, mask, parts, logs, scale * math.log2(math.e), span, stretch, rows, *strides,
        heads // owners, width, size, min(tiling.slots, TILE // size), **options,
    )  # fmt: skip
    if count > 1:
        most = 1 << (count - 1).bit_length()
        warps = max(1, most * size // 1024)
        merging()[(rows * heads,)](parts, logs, out, count, rows * heads, most, size, num_warps=warps)
    return out


@cache
def kernel() -> Any:
    """One stretch of one key head: its mix of values for every row, and the logarithm of each row's sum of weights.

    Raises ImportError without Triton.
    """
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=["rows"])
    def attend(
        query, key, value, mask, parts, logs, scale, span, stretch, rows,
        query_head, query_row, key_head, key_slot, value_head, value_slot, mask_row,
        GROUP: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr,
    ):  # fmt: skip
        owner = tl.program_id(0)
        part = tl.program_id(1)
        line = tl.arange(0, WIDTH)  # the rows of the group's first head, then those of the next
        head = owner * GROUP + line // rows
        row = line % rows
        column = tl.arange(0, SIZE)
        there = line < GROUP * rows
        asked = query + head[:, None] * query_head + row[:, None] * query_row + column[None, :]
        asking = tl.load(asked, mask=there[:, None], other=0.0)
        top = tl.full((WIDTH,), -1e30, tl.float32)  # finite: what a row that sees nothing subtracts from -inf
        total = tl.zeros((WIDTH,), tl.float32)
        mix = tl.zeros((WIDTH, SIZE), tl.float32)
        first = part * stretch
        for start in range(first, tl.minimum(first + stretch, span), SLOTS):
            slot = start + tl.arange(0, SLOTS)
            held = slot < span
            place = key + owner * key_head + slot[None, :] * key_slot + column[:, None]
            keys = tl.load(place, mask=held[None, :], other=0.0)
            place = value + owner * value_head + slot[:, None] * value_slot + column[None, :]
            values = tl.load(place, mask=held[:, None], other=0.0)
            place = mask + line[:, None] * mask_row + slot[None, :]
            added = tl.load(place, mask=there[:, None] & held[None, :], other=float("-inf"))
            scores = tl.dot(asking, keys) * scale + added.to(tl.float32)
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            fading = tl.exp2(top - higher)
            total = total * fading + tl.sum(weights, 1)
            mix = tl.dot(weights.to(value.dtype.element_ty), values, mix * fading[:, None])
            top = higher
        cell = (part * rows + row) * (GROUP * tl.num_programs(0)) + head
        tl.store(logs + cell, top + tl.log2(total), mask=there)
        mix = mix / tl.where(total > 0, total, 1.0)[:, None]
        place = parts + cell[:, None] * SIZE + column[None, :]
        tl.store(place, mix.to(parts.dtype.element_ty), mask=there[:, None])

    return attend


@cache
def merging() -> Any:
    """The stretches' mixes as one, each by its share of the row's weights."""
    import triton
    import triton.language as tl

    @triton.jit
    def merge(parts, logs, out, count, cells, MOST: tl.constexpr, SIZE: tl.constexpr):
        cell = tl.program_id(0)
        part = tl.arange(0, MOST)
        column = tl.arange(0, SIZE)
        there = part < count
        log = tl.load(logs + part * cells + cell, mask=there, other=float("-inf"))
        place = parts + (part[:, None] * cells + cell) * SIZE + column[None, :]
        mixes = tl.load(place, mask=there[:, None], other=0.0)
        weights = tl.exp2(log - tl.maximum(tl.max(log, 0), -1e30))
        total = tl.sum(weights, 0)
        mix = tl.sum(mixes * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
        tl.store(out + cell * SIZE + column, mix.to(out.dtype.element_ty))

    return merge


def available() -> bool:
    """Whether Triton is there to compile the kernel."""
    try:
        kernel()
    except ImportError:
        return False
    return True


AttentionInterface.register(TREE, attend_few)
