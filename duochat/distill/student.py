"""A small Llama in torch whose weights are named and ordered as in a GGUF file: what is read is what is written.

GGUF keeps the query and key rows of Llama for rotary embedding over neighbouring pairs (x0, x1), so this model rotates
pairs and needs no permutation. Used for both the target and the students of `distill`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duochat import DuoChatError


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama; biased: queries, keys and values are (Qwen2); tied: the embedding is the head."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    context: int = 8192
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    biased: bool = False
    tied: bool = True

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def rotary(positions: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [len(positions), head_width / 2], in fp32."""
    half = shape.head_width // 2
    rates = shape.rope_base ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angles = positions.float()[:, None] * rates
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of x [..., time, head_width] by the angles of `rotary`."""
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class Norm(nn.RMSNorm):
    """In the type of what comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind an RMS norm. Attribute names are GGUF's tensor names."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, kv = shape.width, shape.kv_heads * shape.head_width
        self.kv_heads, self.head_width = shape.kv_heads, shape.head_width
        self.attn_norm, self.ffn_norm = Norm(d, shape.norm_eps), Norm(d, shape.norm_eps)
        self.attn_q, self.attn_k, self.attn_v = (nn.Linear(d, n, bias=shape.biased) for n in (d, kv, kv))
        self.attn_output = nn.Linear(d, d, bias=False)
        self.ffn_gate, self.ffn_up = (nn.Linear(d, shape.ffn, bias=False) for _ in range(2))
        self.ffn_down = nn.Linear(shape.ffn, d, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [batch, heads, time, head_width] of x [batch, time, width]."""
        h = self.attn_norm(x)
        parts = (part(h) for part in (self.attn_q, self.attn_k, self.attn_v))
        q, k, v = (part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in parts)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """x after the attention's output [batch, time, width] and the feed-forward are added."""
        x = x + self.attn_output(attended)
        h = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        k, v = (part.repeat_interleave(q.shape[1] // self.kv_heads, dim=1) for part in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.finish(x, attended.transpose(1, 2).flatten(-2))

    def step(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, at: Tensor, seen: Tensor) -> Tensor:
        """One token a row, x [batch, 1, width]; cache [2, batch, kv_heads, length, head_width] is written at `at`.

        seen: bool [length], the cache columns that may be attended to.
        """
        q, k, v = self.project(x, cos, sin)
        cache[0].index_copy_(2, at, k)
        cache[1].index_copy_(2, at, v)
        grouped = q.view(q.shape[0], self.kv_heads, -1, self.head_width)
        keys, values = cache[:, :, :, : len(seen)]
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen[None, None, None, :])
        return self.finish(x, attended.reshape(x.shape))


class Llama(nn.Module):
    """Token ids in, hidden states out; `logits` is the head, apart so that it need not run everywhere."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.vocab, shape.width)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output_norm = Norm(shape.width, shape.norm_eps)
        self.output = None if shape.tied else nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Normed hidden states [batch, time, width] of ids [batch, time], causal."""
        x = F.embedding(ids, self.token_embd.weight).to(self.activation_dtype())
        cos, sin = rotary(torch.arange(ids.shape[1], device=ids.device), self.shape)
        for block in self.blk:
            x = block(x, cos, sin)
        return self.output_norm(x)

    def step(self, ids: Tensor, caches: Tensor, at: Tensor, seen: Tensor) -> Tensor:
        """Logits [batch, vocab] after one more token a row, ids [batch], all at position `at` (one element)."""
        x = F.embedding(ids[:, None], self.token_embd.weight).to(self.activation_dtype())
        cos, sin = rotary(at, self.shape)
        for block, cache in zip(self.blk, caches, strict=True):
            x = block.step(x, cos, sin, cache, at, seen)
        return self.logits(self.output_norm(x)[:, 0])

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ (self.output or self.token_embd).weight.to(hidden.dtype).T

    def activation_dtype(self) -> torch.dtype:
        device = self.token_embd.weight.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.token_embd.weight.dtype

    def fuse(self) -> None:
        """Compile what of a layer does not depend on how much is cached, for `step`."""
        for block in self.blk:
            block.project, block.finish = (torch.compile(part, dynamic=False) for part in (block.project, block.finish))

    def cache(self, batch: int, length: int) -> Tensor:
        """An empty key-value cache [layers, 2, batch, kv_heads, length, head_width]."""
        s, like = self.shape, self.token_embd.weight
        size = (s.layers, 2, batch, s.kv_heads, length, s.head_width)
        return torch.zeros(size, dtype=like.dtype, device=like.device)


# ---------------------------------------------------------------- students of a target


@torch.no_grad()
def student_of(target: Llama, shape: Shape) -> Llama:
    """A student cut out of the target: its first, last and evenly spaced layers, in the embedding's main directions."""
    student, whole = Llama(shape), {name: value.float().cpu() for name, value in target.state_dict().items()}
    embedding = whole["token_embd.weight"]
    basis = torch.eye(shape.width)  # orthonormal columns that keep most of the embedding's energy
    if shape.width < target.shape.width:
        basis = torch.linalg.eigh(embedding.T @ embedding)[1].flip(1)[:, : shape.width].contiguous()
    student.token_embd.weight.copy_(embedding @ basis)
    student.output_norm.weight.copy_((basis.T @ (whole["output_norm.weight"][:, None] * basis)).diagonal())
    chosen = torch.linspace(0, target.shape.layers - 1, shape.layers).round().long().tolist()
    for block, layer in zip(student.blk, chosen, strict=True):
        for name, part in block.named_children():
            full = whole[f"blk.{layer}.{name}.weight"]
            if name in ("attn_output", "ffn_down"):
                part.weight.copy_(basis.T @ full[:, : part.in_features])
            elif isinstance(part, nn.Linear):
                norm = whole[f"blk.{layer}.{name.partition('_')[0]}_norm.weight"]
                part.weight.copy_((full * norm)[torch.arange(part.out_features) % len(full)] @ basis)
    return student.to(target.token_embd.weight.device)


@torch.no_grad()
def deepened(student: Llama, shape: Shape) -> Llama:
    """An earlier student with more layers, which give nothing yet, so that its function stays; same widths as before.

    Raises DuoChatError when it is deeper or differs in anything but its layers.
    """
    if replace(student.shape, layers=shape.layers) != shape or student.shape.layers > shape.layers:
        raise DuoChatError(f"{student.shape} cannot be deepened to {shape}: only layers can be added.")
    deep = Llama(shape)
    deep.token_embd.load_state_dict(student.token_embd.state_dict())
    deep.output_norm.load_state_dict(student.output_norm.state_dict())
    kept = torch.linspace(0, shape.layers - 1, student.shape.layers).round().long().tolist()
    for layer, block in enumerate(deep.blk):
        source = max(i for i, place in enumerate(kept) if place <= layer)
        block.load_state_dict(student.blk[source].state_dict())
        if layer not in kept:
            block.attn_output.weight.zero_()
            block.ffn_down.weight.zero_()
    return deep
