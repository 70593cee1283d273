"""Where a target's layers go: on the GPUs that llama.cpp has here, as many as fit, the rest on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from duochat import DuoChatError
from duochat.engine.llama import devices, loading
from duochat.engine.llama.probe import rebuild
from duochat.models import gguf

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
    there = devices.gpus()
    if not there and (names or gpu_layers not in ("auto", 0)):
        raise DuoChatError(f"llama.cpp sees no GPU: {devices.unused_gpu() or _build()}, or set gpu_layers to 0.")
    there = devices.gpus(names)
    note = "" if there or gpu_layers == 0 else devices.unused_gpu()
    layers = gpu_layers if there else 0
    if layers == "auto":
        layers, all_layers = _fitting(path, cells, sum(max(0, device.free - RESERVE) for device in there))
        if layers < all_layers:
            note = f"{layers} of {all_layers} layers fit the GPU's memory, the rest computes on the CPU"
    used = there if layers else [device for device in devices.found() if device.kind == devices.CPU]
    return Place(layers, " + ".join(device.title for device in used), note)


def _build() -> str:
    return f"build it for one with {rebuild('-DGGML_CUDA=on')} (VULKAN or HIP in place of CUDA for other makes)"


def _fitting(path: Path, cells: int, free: int) -> tuple[int, int]:
    """Layers that fit, and all there are."""
    header = gguf.read(path)
    layers = header.get("block_count", 1) + 1
    need = loading.size(path) + header.cache_bytes(cells)
    return min(layers, free * layers // need), layers
