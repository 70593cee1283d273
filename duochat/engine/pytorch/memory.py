"""What a target needs of its device's memory, what there is, and what would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from duochat import DuoChatError
from duochat.engine.pytorch.attention import key_heads

GIB = 2**30
RESERVE = GIB  # activations, graphs, the device's own context


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of a target: its weights, and the keys and values of one token."""

    weights: int
    token: int

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> Need:
        """Of a model that is yet to be loaded."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        config = config.get_text_config()
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token = 2 * config.num_hidden_layers * key_heads(config) * head
        return cls(sum(p.numel() for p in model.parameters()) * dtype.itemsize, token * dtype.itemsize)

    def total(self, context_length: int) -> int:
        return self.weights + self.token * context_length + RESERVE

    @contextmanager
    def held(self, context_length: int, device: torch.device) -> Iterator[None]:
        """Inside, the target is loaded. Raises DuoChatError when so much is not free on the device, or proves short."""
        there = free(device)
        if there is not None and self.total(context_length) > there:
            raise self.too_small(context_length, there)
        with refused(device, lambda: self.too_small(context_length, free(device) or 0)):
            yield

    def too_small(self, context_length: int, there: int) -> DuoChatError:
        """Says what is missing and what would fit. there: bytes that are free."""
        tokens = (there - RESERVE - self.weights) // max(1, self.token) // 256 * 256
        shorter = f"context_length {min(tokens, context_length)}, " if tokens >= 512 else ""
        return DuoChatError(
            f"The target needs about {self.total(context_length) / GIB:.1f} GiB and {there / GIB:.1f} GiB are free on "
            f"its device: choose {shorter}a GGUF of it in fewer bits or a smaller target."
        )


def free(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where nobody knows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available if device.type == "cpu" else None


def ran_out(fault: BaseException) -> bool:
    """Whether an exception of torch or NumPy says that memory was missing."""
    return isinstance(fault, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(fault)


def _short() -> DuoChatError:
    return DuoChatError(
        "The target's device ran out of memory: close what else uses it, or choose a smaller context_length."
    )


@contextmanager
def refused(device: torch.device, sentence: Callable[[], DuoChatError] = _short) -> Iterator[None]:
    """Turn a want of memory inside into a DuoChatError, and give back what can be."""
    try:
        yield
    except (RuntimeError, MemoryError) as fault:
        if not ran_out(fault):
            raise
        if device.type == "cuda":
            torch.cuda.empty_cache()
        raise sentence() from fault
