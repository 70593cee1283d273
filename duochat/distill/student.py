"""The Llamas of transformers' that `distill` works with: how they compute here, and students cut out of a target."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from duochat import DuoChatError
from duochat.models.weights import LAYER

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
KEPT = ("vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters")  # of the target's configuration


def sizes(config: Any) -> dict[str, int]:
    """What of a configuration makes a model small or large."""
    return {name: getattr(config, name) for name in SIZES}


def hidden(model: nn.Module, ids: Tensor) -> Tensor:
    """Normed hidden states [batch, time, width] of ids [batch, time], causal, in the type that is computed in."""
    weight = model.get_input_embeddings().weight
    kind = weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    states = F.embedding(ids, weight).to(dtype)
    return model.model(inputs_embeds=states, use_cache=False).last_hidden_state.to(dtype)


def fuse(model: nn.Module) -> None:
    """Compile what of a layer depends neither on its index nor on how much is cached."""
    for layer in model.model.layers:
        for part in (layer.mlp, layer.input_layernorm, layer.post_attention_layernorm):
            part.compile(dynamic=False)


# ---------------------------------------------------------------- students of a target


@torch.no_grad()
def student_of(target: nn.Module, config: Any) -> LlamaForCausalLM:
    """A student cut out of the target: its first, last and evenly spaced layers, in the embedding's main directions."""
    student, whole = LlamaForCausalLM(config), {n: value.float().cpu() for n, value in target.named_parameters()}
    embedding, width = whole["model.embed_tokens.weight"], config.hidden_size
    basis = torch.eye(width)  # orthonormal columns that keep most of the embedding's energy
    if width < embedding.shape[1]:
        basis = torch.linalg.eigh(embedding.T @ embedding)[1].flip(1)[:, :width].contiguous()
    student.model.embed_tokens.weight.copy_(embedding @ basis)
    student.model.norm.weight.copy_((basis.T @ (whole["model.norm.weight"][:, None] * basis)).diagonal())
    chosen = torch.linspace(0, target.config.num_hidden_layers - 1, config.num_hidden_layers).round().long().tolist()
    for block, layer in zip(student.model.layers, chosen, strict=True):
        for name in LAYER.values():
            part, full = block.get_submodule(name), whole[f"model.layers.{layer}.{name}.weight"]
            if name in ("self_attn.o_proj", "mlp.down_proj"):
                part.weight.copy_(basis.T @ full[:, : part.in_features])
            elif isinstance(part, nn.Linear):
                before = "input" if "attn" in name else "post_attention"
                norm = whole[f"model.layers.{layer}.{before}_layernorm.weight"]
                part.weight.copy_((full * norm)[torch.arange(part.out_features) % len(full)] @ basis)
    return student.to(target.device)


@torch.no_grad()
def deepened(student: nn.Module, config: Any) -> LlamaForCausalLM:
    """An earlier student with more layers, which give nothing yet, so that its function stays; same widths as before.

    Raises DuoChatError when it is deeper or differs in anything but its layers.
    """
    count, old = config.num_hidden_layers, sizes(student.config)
    same = all(getattr(student.config, name) == getattr(config, name) for name in KEPT)
    if not same or old | {"num_hidden_layers": count} != sizes(config) or old["num_hidden_layers"] > count:
        raise DuoChatError(f"A student of {old} cannot be deepened to {sizes(config)}: only layers can be added.")
    deep = LlamaForCausalLM(config)
    deep.model.embed_tokens.load_state_dict(student.model.embed_tokens.state_dict())
    deep.model.norm.load_state_dict(student.model.norm.state_dict())
    kept = torch.linspace(0, count - 1, old["num_hidden_layers"]).round().long().tolist()
    for layer, block in enumerate(deep.model.layers):
        source = max(i for i, place in enumerate(kept) if place <= layer)
        block.load_state_dict(student.model.layers[source].state_dict())
        if layer not in kept:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    return deep
