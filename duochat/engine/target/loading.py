"""From a folder to a model on its device, with what is missing or does not fit said in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from duochat import DuoChatError
from duochat.engine.target import skinny, widened
from duochat.engine.target.attention import NAME
from duochat.engine.target.joining import join

if TYPE_CHECKING:
    from duochat.engine.target.lane import TorchTarget

COMPILE = ("parts", "whole")  # in the order of trial; the first is the one whose speed was measured


def load(
    target: type[TorchTarget],
    folder: Path,
    device: str = "auto",
    dtype: str = "auto",
    context_length: int = 4096,
    compile: bool = True,
    quantize: str = "none",
    reproducible: bool = False,
    threads: int | str = "auto",
) -> TorchTarget:
    """See `config.Settings` for the options. Raises DuoChatError when folder or device cannot be used."""
    place = pick_device(device)
    if isinstance(threads, int) and place.type == "cpu":
        torch.set_num_threads(threads)
    model = read(folder, place, pick_dtype(dtype, place))
    cuda = place.type == "cuda"
    products = "skinny" if compile and place.type == "cpu" and skinny.swap(model) else "torch"
    if compile and cuda and join(model):
        products = "torch, joined"
    made = target(model, min(context_length, longest(model)), COMPILE if compile and cuda else (), cuda, reproducible)
    made.facts["target_products"] = products
    return made


def read(folder: Path, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """The model with our attention, ready for inference."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # its bars write over ours and leave a semaphore behind
    if not (Path(folder) / "config.json").is_file():
        raise DuoChatError(f"{folder} holds no config.json: name a folder with a transformers model as the target.")
    if widened.is_recipe(Path(folder)):
        return widened.build(Path(folder), device, dtype, NAME)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=NAME)
    except (OSError, ValueError, KeyError, RuntimeError) as fault:
        raise DuoChatError(f"{folder} cannot be loaded as a causal language model: {_first_line(fault)}") from fault
    return model.to(device).eval().requires_grad_(False)


def pick_device(name: str) -> torch.device:
    """`auto`: CUDA, then MPS, then the CPU."""
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, there in found.items() if there))
    if not found.get(name.split(":")[0], False):
        raise DuoChatError(f"Device {name} is not there: choose one of {', '.join(k for k, v in found.items() if v)}.")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: float32 on a CPU, bfloat16 where the GPU has it, else float16."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    known |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if name != "auto":
        if name not in known:
            raise DuoChatError(f"dtype {name} is unknown: choose one of {', '.join(known)} or auto.")
        return known[name]
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float16


def end_tokens(model: torch.nn.Module) -> frozenset[int]:
    """All ids that end an answer, by the generation settings and the model's own."""
    sources = (getattr(model, "generation_config", None), model.config.get_text_config())
    found = [getattr(source, "eos_token_id", None) for source in sources]
    return frozenset(i for ids in found if ids is not None for i in ([ids] if isinstance(ids, int) else ids))


def longest(model: torch.nn.Module) -> int:
    """The context that the model was made for."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all weights, shared ones once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return {"cpu": f"CPU, {torch.get_num_threads()} threads", "mps": "Apple GPU"}.get(device.type, device.type)


def _first_line(fault: BaseException) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0]
