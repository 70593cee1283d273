"""Cost-faithful targets: a small Llama or Qwen2 widened to a large one's shape without changing its function.

Hidden states are padded with zeros (RMSNorm: weight * sqrt(d/D), eps * d/D); added heads and neurons are random but
their output projections are zero, and so are those of added layers. Head size h -> nh: rotary pair i goes to pair
n*i, which has the same frequency, and the query is scaled by sqrt(n). Timing and acceptance are both real then, at a
size whose weights are not at hand.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duochat import DuoChatError
from duochat.distill.widen import LIKE, Shape
from duochat.models.folder import recipe

FAMILIES = ("llama", "qwen2")


def build(folder: Path, device: torch.device, dtype: torch.dtype, attention: str) -> torch.nn.Module:
    """The widened model of a folder that `python -m duochat widen` wrote; its weights are made here, on the device."""
    from transformers import AutoModelForCausalLM

    made = recipe(folder)
    source = Path(made["source"])
    if not (source / "config.json").is_file():
        raise DuoChatError(f"{source}, which {folder} widens, is gone: run widen again.")
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation=attention)
    return widen(small, LIKE[made["like"]], device, dtype, made["seed"])


@torch.no_grad()
def widen(
    small: torch.nn.Module, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> torch.nn.Module:
    """A model of the larger shape with the function of `small` (a Llama). Raises DuoChatError when it cannot fit."""
    large_config = config(small.config, shape)
    with torch.device("meta"):
        large = type(small)(large_config)
    large = large.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in large.parameters():
        parameter.normal_(0, 0.02, generator=generator)
    large.tie_weights()
    large.model.rotary_emb = type(large.model.rotary_emb)(large_config).to(device)
    weights = {name: value.to(device) for name, value in small.state_dict().items()}
    places = Places(small.config, shape, device)
    for name, parameter in large.named_parameters():
        places.fill(name, parameter, weights)
    large.generation_config = copy.deepcopy(small.generation_config)
    return large.eval().requires_grad_(False)


def config(small: Any, shape: Shape) -> Any:
    """The configuration of a small one's widened model. Raises DuoChatError when the shape cannot hold it."""
    if small.model_type not in FAMILIES:
        raise DuoChatError(
            f"A target of the {small.model_type} family cannot be widened: give a Llama or Qwen2, such as SmolLM2."
        )
    times = shape.head // small.head_dim
    slots = _kv_slots(small, shape)
    fits = small.hidden_size <= shape.hidden and small.intermediate_size <= shape.ffn
    if not fits or small.num_hidden_layers > shape.layers or times * small.head_dim != shape.head or not slots:
        raise DuoChatError("The target is larger than the shape to widen it to: choose a larger --like.")
    large = copy.deepcopy(small)
    large.hidden_size, large.intermediate_size = shape.hidden, shape.ffn
    large.num_hidden_layers, large.num_attention_heads = shape.layers, shape.heads
    large.num_key_value_heads, large.head_dim = shape.kv_heads, shape.head
    large.rms_norm_eps = small.rms_norm_eps * small.hidden_size / shape.hidden
    if kinds := getattr(small, "layer_types", None):
        large.layer_types = kinds[:1] * shape.layers
    return large


def _kv_slots(small: Any, shape: Shape) -> list[tuple[int, int, list[int]]]:
    """(small kv head, large kv head, small query heads that it serves); empty when there are too few."""
    per_small = small.num_attention_heads // small.num_key_value_heads
    per_large = shape.heads // shape.kv_heads
    found = []
    for kv in range(small.num_key_value_heads):
        queries = list(range(kv * per_small, (kv + 1) * per_small))
        for at in range(0, per_small, per_large):
            found.append((kv, len(found), queries[at : at + per_large]))
    return found if len(found) <= shape.kv_heads else []


class Places:
    """Where each weight of the small model goes in the large one."""

    def __init__(self, small: Any, shape: Shape, device: torch.device) -> None:
        self.d, self.D, self.head, self.small_layers = (
            small.hidden_size,
            shape.hidden,
            shape.head,
            small.num_hidden_layers,
        )
        self.norm = (self.d / self.D) ** 0.5
        h, times = small.head_dim, shape.head // small.head_dim
        pairs = torch.arange(h // 2)
        inside = torch.cat([pairs * times, pairs * times + shape.head // 2])  # rotary pair i -> pair times*i
        self.scale = times**0.5
        group = shape.heads // shape.kv_heads
        slots = _kv_slots(small, shape)
        queries = [(q, large * group + i) for _, large, served in slots for i, q in enumerate(served)]
        keys = [(kv, large) for kv, large, _ in slots]
        self.rows = {
            "q_proj": self._heads(queries, h, inside, device),
            "k_proj": self._heads(keys, h, inside, device),
            "v_proj": self._heads(keys, h, torch.arange(h), device),
            "o_proj": self._heads(queries, h, torch.arange(h), device),
        }

    def _heads(
        self, pairs: list[tuple[int, int]], h: int, inside: Tensor, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Row numbers in the small and in the large projection."""
        small = torch.cat([torch.arange(h) + a * h for a, _ in pairs])
        large = torch.cat([inside + b * self.head for _, b in pairs])
        return small.to(device), large.to(device)

    def fill(self, name: str, large: Tensor, weights: dict[str, Tensor]) -> None:
        """Write the small model's part of one parameter; what must not act is set to zero."""
        part = name.split(".")[-2]
        small = weights.get(name)
        if part.endswith("norm"):
            large.zero_()
            if small is not None:
                large[: self.d] = small * self.norm
        elif part == "o_proj" or part == "down_proj":
            large.zero_()
            if small is not None:
                source, target = self.rows.get(part, (slice(None), slice(small.shape[1])))
                large[: self.d, target] = small[:, source].to(large.dtype)
        elif part in self.rows and small is not None:
            source, target = self.rows[part]
            if part == "q_proj":  # what a used head has beyond the small one's size must not meet the random keys
                large.view(-1, self.head, *large.shape[1:])[target // self.head] = 0
                small = small * self.scale
            met = large if name.endswith("bias") else large[:, : self.d]
            met[target] = small[source].to(large.dtype)
        elif small is not None:  # embedding, head, gate and up: more rows are random, more columns meet zeros
            if part in ("embed_tokens", "lm_head"):
                large.zero_()
            large[: small.shape[0], : self.d] = small.to(large.dtype)
