"""The model compiled: its layers one for all, and what stands before and after them as a few kernels.

Every layer is handed its own part of the cache and forgets its index, so that the first layer's code serves the rest.
Numbers of rows and slots are variables of all code, which is compiled twice: for one row, and for more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from duochat.engine.pytorch import choose, masks
from duochat.engine.pytorch.cache import SlotCache, SlotLayer

FEW = 32  # rows whose ancestors fit into one word each; beside a forward of more, small kernels do not matter


class OwnCache(torch.nn.Module):
    """A decoder layer that is handed its own part of the cache, so that its code does not depend on its index."""

    def __init__(self, layer: torch.nn.Module, cache: SlotCache, own: SlotLayer, argument: str) -> None:
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


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """Raises TypeError when the model is not a plain stack of layers."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise TypeError(f"{type(model).__name__} is no plain stack of layers")
    return layers


def compile_layers(layers: torch.nn.ModuleList, cache: SlotCache, argument: str, **options: Any) -> None:
    """Wrap the decoder layers and mark them for compilation, which happens at their first call (seconds each).

    argument: the name under which layers take the cache. options: for `torch.compile`.
    """
    raise_limit()
    for i, (layer, part) in enumerate(zip(layers, cache.layers, strict=True)):
        layer.compile(**options)
        layers[i] = OwnCache(layer, cache, part, argument)


def undo(layers: torch.nn.ModuleList) -> None:
    """Back to plain calls. The wrappers stay: the layers have forgotten their indices."""
    for wrapped in layers:
        wrapped.layer._compiled_call_impl = None


def mask_builder(**options: Any) -> Callable[..., masks.Masks]:
    """`masks.build`, compiled for few rows. options: for `torch.compile`."""
    raise_limit()
    fast = torch.compile(masks.build, **options)

    def build(sections: masks.Sections, positions: torch.Tensor, *rest: Any) -> masks.Masks:
        if len(sections["slot"]) > FEW:
            return masks.build(sections, positions, *rest)
        needed = {name: sections[name] for name in masks.NEEDED}
        for tensor in (*needed.values(), positions):
            vary(tensor, 0)
        return fast(needed, positions, *rest)

    return build


def teller(**options: Any) -> Callable[[choose.Way, torch.Tensor, choose.Ask], torch.Tensor]:
    """`choose.told`, compiled for the two ways over the whole vocabulary. The best tokens alone are few numbers."""
    raise_limit()
    fast = torch.compile(choose.told, **options)

    def told(way: choose.Way, logits: torch.Tensor, ask: choose.Ask) -> torch.Tensor:
        if way not in (choose.greedy, choose.noise):
            return choose.told(way, logits, ask)
        for tensor in (logits, ask.token, ask.parent, ask.key):
            vary(tensor, 0)
        return fast(way, logits, ask)

    return told


def held_to_plain_masks(build: Callable[..., masks.Masks]) -> Callable[..., masks.Masks]:
    """The plain masks; raises AssertionError where those of `build` differ."""

    def both(*given: Any) -> masks.Masks:
        wanted, got = masks.build(*given), build(*given)
        assert all(torch.equal(wanted[kind], got[kind]) for kind in wanted), "other masks"
        return wanted

    return both


def held_to_plain_choices(told: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The plain choices; raises AssertionError where those of `told` differ, among logits with many ties too."""

    def both(way: choose.Way, logits: torch.Tensor, ask: choose.Ask) -> torch.Tensor:
        asked = logits.clone()
        for some in (asked.round(), asked):
            logits.copy_(some)  # in its place: compiled code asks what its arguments are views of
            wanted, got = choose.told(way, logits, ask), told(way, logits, ask)
            assert torch.equal(wanted[0], got[0]), "other tokens"
            assert torch.allclose(wanted, got, rtol=1e-3, atol=1e-6), "other probabilities"
        return wanted

    return both


def raise_limit() -> None:
    """Models of one process share the codes' places: past the limit a function would run plainly, without a word."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)


def vary(tensor: torch.Tensor, *dimensions: int) -> None:
    """Compile for any size of these dimensions; a size of 1 keeps code of its own."""
    for dimension in dimensions:
        if tensor.shape[dimension] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)
