"""From a folder or a GGUF file to a model on its device, with what is missing or does not fit said in one sentence."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from duochat import DuoChatError
from duochat.engine.pytorch import linear
from duochat.engine.pytorch.attention import NAME
from duochat.models import folder, gguf, weights
from duochat.models.folder import recipe, usable


def read_config(path: Path) -> Any:
    """The configuration of the model that `read` will give."""
    from transformers import AutoConfig

    if path.is_file():
        return AutoConfig.for_model(**weights.config(gguf.read(path)))
    if not (path / "config.json").is_file():
        raise DuoChatError(f"{path} holds no config.json: name a folder with a transformers model as the target.")
    with usable(path):
        return AutoConfig.from_pretrained(path, trust_remote_code=False)


def read(path: Path, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """The model of a folder or a GGUF file, ready for inference where it is to run; on CUDA its layers joined."""
    if made := recipe(path):  # by its maker, on the device
        model = import_module(made["maker"]).build(path, device, dtype)
    elif path.is_file():
        model = weights.loaded(gguf.read(path), device, dtype)
    else:
        model = folder.loaded(path, dtype=dtype, attn_implementation=NAME)
    if device.type == "cuda":
        linear.join(model, device)
    return model.to(device).eval().requires_grad_(False)


@torch.no_grad()
def fix_rotations(model: torch.nn.Module, context_length: int) -> str:
    """Rotations that follow the longest position of a forward: as they are at the context's end, for good.

    Keys stay in the cache, and a drafted row may lie beyond the answer's end. Returns their kind (LongRoPE, dynamic
    NTK), "" for none. Raises DuoChatError where they still follow others.
    """
    found = ""
    for module in model.modules():
        kinds = getattr(module, "rope_type", "")
        each = kinds if isinstance(kinds, dict) else {None: kinds}
        if moving := [kind for kind in each.values() if kind == "longrope" or "dynamic" in kind]:
            found = moving[0]
            _fix(module, each, context_length - 1)
            module.rope_type = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
            if not _fix(module, each, context_length - 1):
                raise DuoChatError(
                    f"The target's {found} positions follow the longest: choose a smaller context_length."
                )
    return found


def _fix(module: torch.nn.Module, layer_types: Iterable[str | None], last: int) -> bool:
    """Turn the first and the last position; whether the first is turned as it is alone."""
    ends = torch.tensor([[0, last]], device=next(module.buffers()).device)
    states, same = torch.zeros(1, device=ends.device), True
    for name in layer_types:
        options = {"layer_type": name} if name else {}
        alone, beside = (module(states, at, **options)[0][:, 0] for at in (ends[:, :1], ends))
        same = same and torch.equal(alone, beside)
    return same


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
    known = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
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


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return {"cpu": "CPU", "mps": "Apple GPU"}.get(device.type, device.type)
