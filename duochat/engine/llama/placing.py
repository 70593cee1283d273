"""Where a target's layers go: on the GPUs that llama.cpp has here, as many as fit, the rest on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import llama_cpp

from duochat import DuoChatError
from duochat.engine.llama import devices, loading
from duochat.engine.llama.probe import rebuild
from duochat.models import gguf

ALL = 999  # as many layers as there are
RESERVE = 2**30  # bytes of a GPU's memory that are not for weights and cache: activations, the driver


@dataclass(frozen=True, slots=True)
class Place:
    """gpu_layers: of the model, the output counted as one. device: for people. note: what they should know."""

    gpu_layers: int
    device: str
    note: str = ""


def place(path: Path, cells: int, gpu_layers: int | str, names: Sequence[str], rpc: Sequence[str]) -> Place:
    """Find a place for a model with a cache of so many tokens. Raises DuoChatError when what is asked is not there."""
    loading.start()
    for server in rpc:
        devices.connect(server)
    there = devices.gpus(names) if llama_cpp.llama_supports_gpu_offload() else []
    if not there and (names or gpu_layers not in ("auto", 0)):
        raise DuoChatError(f"llama.cpp sees no GPU: {devices.unused_gpu() or _build()}, or set gpu_layers to 0.")
    if not there or gpu_layers == 0:
        title = next(device.title for device in devices.found() if device.kind == devices.CPU)
        return Place(0, title, devices.unused_gpu() if gpu_layers == "auto" else "")
    title = " + ".join(device.title for device in there)
    if gpu_layers != "auto":
        return Place(gpu_layers, title)
    layers, blocks = _fitting(path, cells, sum(device.free for device in there))
    note = f"{layers} of {blocks + 1} layers fit the GPU's memory, the rest computes on the CPU"
    return Place(layers, title) if layers == ALL else Place(layers, title, note)


def _build() -> str:
    return f"build it for one with {rebuild('-DGGML_CUDA=on')} (VULKAN or HIP in place of CUDA for other makes)"


def _fitting(path: Path, cells: int, free: int) -> tuple[int, int]:
    """Layers that fit, and all there are, the output apart."""
    header = gguf.read(path)
    blocks = header.get("block_count", 1)
    need = loading.size(path) + header.cache_bytes(cells)
    if need + RESERVE <= free:
        return ALL, blocks
    return max(0, int((free - RESERVE) * (blocks + 1) / need)), blocks
