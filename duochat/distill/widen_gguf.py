"""A stand-in target as a GGUF file for llama.cpp: widened one tensor at a time, quantised by llama.cpp itself.

Memory: the small model and the largest tensor. A quantised file is made from one in 16 bits, which goes afterwards.
"""

from __future__ import annotations

import os
from pathlib import Path

import llama_cpp
import psutil
import torch

from duochat import DuoChatError, terminal
from duochat.distill import gguf_file
from duochat.distill.gguf_file import Source
from duochat.distill.widened import LIKE, Wide
from duochat.models import store, weights
from duochat.models.folder import KEY
from duochat.models.store import Progress

BITS = {"q4_k_m": 4.85, "q8_0": 8.5, "bf16": 16, "f16": 16}  # of a weight
PLAIN = ("bf16", "f16")
COPIES = 3  # of the largest tensor in 32 bits, held at a time


@torch.no_grad()
def write(source: Path, like: str, path: Path, kind: str, progress: Progress = store.silent) -> None:
    """Write `source` (a GGUF file of a Llama or Qwen2) with the shape `like`; kind: of BITS.

    Raises DuoChatError when it cannot be widened, or disk or memory do not suffice.
    """
    opened, device = Source.open(source), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wide = Wide(weights.loaded(opened.header), LIKE[like], device)
    require([p.numel() for p in wide.empty.parameters()], path, kind)
    with store.workshop(path) as half, store.disk_faults(path):
        made, plain = half / f"{kind}.gguf", kind if kind in PLAIN else "f16"
        _write(wide, opened, like, half / f"{plain}.gguf", plain, progress)
        if kind != plain:
            progress(f"Quantising to {kind}", 0, 0)
            quantise(half / f"{plain}.gguf", made, kind)
        made.replace(path)


def require(sizes: list[int], path: Path, kind: str) -> None:
    """Say what a file of tensors with so many weights takes, and raise DuoChatError where there is not as much."""
    made = int(sum(sizes) * BITS[kind] / 8)
    memory = 4 * COPIES * max(sizes)
    on_disk = made + (0 if kind in PLAIN else 2 * sum(sizes))
    terminal.report(
        f"{path.name}: {terminal.amount(made)}, and as much memory where it is to run; to make it takes "
        f"{terminal.amount(on_disk)} of disk and {terminal.amount(memory)} of memory."
    )
    store.need_room(path, on_disk)
    if memory > psutil.virtual_memory().available:
        raise DuoChatError(
            f"Widening needs {terminal.amount(memory)} of memory: close programs or take a smaller --like."
        )


def _write(wide: Wide, source: Source, like: str, path: Path, kind: str, progress: Progress) -> None:
    """The whole file in 16 bits, norms and biases in 32."""
    parameters = dict(wide.empty.named_parameters())
    places = {name: place for place, name in enumerate(parameters)}

    def made(name: str) -> torch.Tensor:
        progress(f"Widening to {like}", places[name], len(places))
        large = torch.empty(parameters[name].shape, device=wide.generator.device)
        wide.fill(name, large)
        return large

    name = source.header.metadata.get("general.name", "a small model")
    told = f"{name} with the shape of {like} (cost-faithful)"
    gguf_file.write(path, wide.config, source, told, parameters, made, lambda _: kind, {KEY: like})


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, _: object) -> None:
    """llama.cpp tells of each tensor."""


def quantise(source: Path, path: Path, kind: str) -> None:
    """A GGUF file in another of llama.cpp's kinds. Raises DuoChatError when that fails."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
    llama_cpp.llama_log_set(_quiet, None)
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(path), params):
        raise DuoChatError(f"llama.cpp could not quantise the file to {kind}: see that the disk has room.")
