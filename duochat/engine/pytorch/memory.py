"""What a target needs of its device's memory, what there is, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from duochat import DuoChatError

GIB = 2**30
RESERVE = GIB  # activations, graphs, the device's own context
BITS = {"none": None, "8bit": 8.25, "4bit": 4.5}  # of a weight, its share of the scales included


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes by part. Linear layers can be quantised; embeddings and norms cannot."""

    linear: int  # weights in linear layers
    other: int  # weights elsewhere
    slot: int  # KV numbers of one token
    size: int  # bytes of an unquantised number

    @classmethod
    def of(cls, model: torch.nn.Module, dtype: torch.dtype) -> Need:
        """From a model of any device, "meta" included."""
        linear = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)}
        everything = {id(p): p.numel() for p in model.parameters()}
        config = model.config.get_text_config()
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        slot = 2 * config.num_hidden_layers * config.num_key_value_heads * head
        rest = sum(count for key, count in everything.items() if key not in linear)
        return cls(sum(linear.values()), rest, slot, dtype.itemsize)

    def weights(self, quantize: str) -> int:
        bits = BITS[quantize] or 8 * self.size
        return int(self.linear * bits / 8 + self.other * self.size)

    def cache(self, context_length: int) -> int:
        return self.slot * self.size * context_length

    def total(self, quantize: str, context_length: int) -> int:
        return self.weights(quantize) + self.cache(context_length) + RESERVE


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model is brought to its device. note: a choice that the user should hear of, or ""."""

    quantize: str
    spread: bool = False  # over all CUDA cards
    note: str = ""


def needed(config: Any, dtype: torch.dtype) -> Need:
    """Of a model that is yet to be loaded."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return Need.of(AutoModelForCausalLM.from_config(config), dtype)


def free(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where nobody knows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available if device.type == "cpu" else None


def plan(need: Need, context_length: int, quantize: str, device: torch.device) -> Plan:
    """Where and how small: on one device, unquantised if that fits. Raises DuoChatError when nothing does."""
    there = free(device)
    fits = lambda q: there is None or need.total(q, context_length) <= there  # noqa: E731
    if quantize != "auto" and fits(quantize):
        return Plan(quantize)
    cards = torch.cuda.device_count() if device == torch.device("cuda") else 0
    together = sum(free(torch.device("cuda", i)) - RESERVE for i in range(cards))
    if (
        cards > 1
        and quantize in ("auto", "none")
        and not fits("none")
        and need.total("none", context_length) <= together
    ):
        return Plan("none", True, f"The target is spread over {cards} cards: decoding runs without CUDA graphs.")
    smallest = next((q for q in BITS if fits(q) and (q != "4bit" or device.type == "cuda")), None)
    if quantize != "auto" or smallest is None:
        raise too_small(need, "4bit" if quantize == "auto" else quantize, context_length, there or 0)
    note = f"The target's weights are kept in {smallest}, which is what fits in memory." if smallest != "none" else ""
    return Plan(smallest, note=note)


def too_small(need: Need, quantize: str, context_length: int, there: int) -> DuoChatError:
    """Says what is missing and what would fit."""
    total, has = need.total(quantize, context_length) / GIB, there / GIB
    remedies = [f"quantize {q}" for q in BITS if need.total(q, context_length) <= there and q != quantize][:1]
    left = there - RESERVE - need.weights(quantize)
    tokens = left // max(1, need.slot * need.size) // 256 * 256
    if tokens >= 512:
        remedies.append(f"context_length {min(tokens, context_length)}")
    remedies.append("a smaller target")
    return DuoChatError(
        f"The target needs about {total:.1f} GiB and {has:.1f} GiB are free on its device: "
        f"choose {' or '.join(remedies)}."
    )


def ran_out(fault: BaseException) -> bool:
    """Whether an exception of torch says that memory was missing."""
    return isinstance(fault, torch.OutOfMemoryError) or "can't allocate memory" in str(fault)


@contextmanager
def refused(device: torch.device) -> Iterator[None]:
    """Turn a want of memory inside into a DuoChatError, and give back what can be."""
    try:
        yield
    except RuntimeError as fault:
        if not ran_out(fault):
            raise
        if device.type == "cuda":
            torch.cuda.empty_cache()
        raise DuoChatError(
            "The target's device ran out of memory: close what else uses it, or choose a smaller context_length."
        ) from fault
