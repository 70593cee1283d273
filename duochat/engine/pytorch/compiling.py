"""Decoder layers compiled one for all: norms, rotary embedding, activation and residuals as fused kernels.

Every layer is handed its own part of the cache and forgets its index, so that the first layer's code serves the rest;
numbers of rows and slots are variables of that code. Two compilations a kind of layer: for one row, and for more.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from duochat import DuoChatError
from duochat.engine.pytorch import attention
from duochat.engine.pytorch.cache import SlotCache, SlotLayer

APART = f"{attention.NAME}-apart"


class ApartLayer:
    """A layer's part of the cache that stays outside of compiled code."""

    def __init__(self, layer: SlotLayer) -> None:
        self.layer = layer

    @torch.compiler.disable
    def update(self, *states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer.update(*states)


class OwnCache(torch.nn.Module):
    """A decoder layer that is handed its own part of the cache, so that its code does not depend on its index."""

    def __init__(self, layer: torch.nn.Module, cache: SlotCache, own: SlotLayer | ApartLayer, argument: str) -> None:
        super().__init__()
        self.layer, self.cache, self.own, self.argument = layer, cache, own, argument
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = 0

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        vary(self.cache.slots, 0)
        vary(self.cache.reach, 0)
        for value in (hidden, *args, *kwargs.values()):
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, torch.Tensor):
                    vary(tensor, *((2, 3) if tensor.dim() == 4 else (1,)))
        return self.layer(hidden, *args, **kwargs | {self.argument: self.own})

    def __getattr__(self, name: str) -> Any:
        """What the model asks of its layers, such as their kind of attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


def compile_layers(model: torch.nn.Module, cache: SlotCache, argument: str, whole: bool = True, **options: Any) -> None:
    """Wrap the decoder layers and mark them for compilation, which happens at their first call (seconds each).

    argument: the name under which layers take the cache. whole: the cache's writes and the attention are compiled
    too. options: for `torch.compile`.
    """
    raise_limit()
    if not whole:
        function = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
        AttentionInterface.register(APART, torch.compiler.disable(function))
        model.set_attn_implementation(APART)
    layers = decoder_layers(model)
    for i, (layer, part) in enumerate(zip(layers, cache.layers, strict=True)):
        layer = layer.layer if isinstance(layer, OwnCache) else layer
        layer.compile(**options)
        layers[i] = OwnCache(layer, cache, part if whole else ApartLayer(part), argument)


def undo(model: torch.nn.Module) -> None:
    """Back to plain calls. The wrappers stay: the layers have forgotten their indices."""
    for wrapped in decoder_layers(model):
        wrapped.layer._compiled_call_impl = None


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """Raises DuoChatError when the model is not a plain stack of layers."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise DuoChatError(f"{type(model).__name__} is no plain stack of layers: set compile to false.")
    return layers


def raise_limit() -> None:
    """Models of one process share the codes' places: past the limit a function would run plainly, without a word."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)


def vary(tensor: torch.Tensor, *dimensions: int) -> None:
    """Compile for any size of these dimensions; a size of 1 keeps code of its own."""
    for dimension in dimensions:
        if tensor.shape[dimension] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)
