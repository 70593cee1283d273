"""The target lane: a transformers causal LM as shipped, which answers a tree of drafted tokens in one forward.

`lane` is what decoders see; `memo` knows which tokens the KV cache holds; `rows` packs one forward's integers;
`forward` is the device side of it; `choose` samples there; `attention` and `cache` are what the model is given.
"""

from duochat.engine.pytorch.lane import TorchTarget

__all__ = ["TorchTarget"]
