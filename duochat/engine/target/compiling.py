"""Decoder layers compiled one for all: norms, rotary embedding, activation and residuals as fused kernels.

The cache and the attention stay outside the compiled code, so that it depends on the rows' number alone. Layers are
told apart by the cache's own count instead of their index: one layer's code serves all.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface

from duochat.engine.target import attention
from duochat.engine.target.cache import SlotCache


def compile_layers(model: torch.nn.Module) -> bool:
    """Mark the layers for compilation, which happens at the first call with each number of rows (seconds each).

    False, and the model as it was, when it is not a plain stack of decoder layers.
    """
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList) or not all(hasattr(layer, "self_attn") for layer in layers):
        return False
    torch._dynamo.config.recompile_limit = 64  # widths times kinds of layers
    SlotCache.update = torch.compiler.disable(SlotCache.update)
    AttentionInterface.register(attention.NAME, torch.compiler.disable(attention.attend))
    for layer in layers:
        layer.self_attn.layer_idx = 0
        layer.compile(dynamic=False)
    return True
