"""The Triton kernels of `attention.mixed`. To import it raises ImportError without Triton."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def attend(
    query, key, value, mask, parts, logs, scale, span, stretch, rows,
    query_head, query_row, key_head, key_slot, value_head, value_slot, mask_row,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One stretch of one key head: its mix of values for every row, and the logarithm of each row's sum of weights."""
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


@triton.jit
def merge(parts, logs, out, count, cells, MOST: tl.constexpr, SIZE: tl.constexpr):
    """The stretches' mixes as one, each by its share of the row's weights."""
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
