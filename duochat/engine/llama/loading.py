"""From a GGUF file to llama.cpp's model and context: what is checked before, on which devices it goes, what it needs.

Faults of the file or the machine become DuoChatError. Without GPU layers no byte of GPU memory is taken.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import llama_cpp
from gguf import GGMLQuantizationType

from duochat import DuoChatError
from duochat.engine.llama import devices
from duochat.engine.llama.probe import rebuild
from duochat.engine.machine import require_memory
from duochat.models import gguf

BATCH = 512  # tokens of one decode at most
RESERVE = 2**30  # bytes of a GPU's memory that are not for weights and cache: activations, the driver


@dataclass(frozen=True, slots=True)
class Options:
    """How a model is loaded. The default is a draft's: on the CPU alone."""

    role: str = "draft"
    sequences: int = 128  # held at a time; llama.cpp reserves a row of logits for each
    fillers: int = 0  # of them for rows that fill a forward up
    unit: int = BATCH // 4  # tokens that go through the layers at once
    fused: bool | None = None  # attention as one step; None: as llama.cpp sees fit
    keys: str = "f16"  # the type of the cache's, as ggml names it
    values: str = "f16"
    extra_buffers: bool | None = None  # lay weights out for special kernels on the CPU; None: if they live there
    gpu_layers: int = 0  # layers on devices of their own, counted from the last; 999 = all
    devices: tuple[str, ...] = ()  # their names, () = all
    split: tuple[float, ...] = ()  # share of each device, () = by its free memory
    tensor_overrides: tuple[str, ...] = ()  # "pattern=device": tensors of such names go there


@dataclass(frozen=True, slots=True)
class Place:
    """gpu_layers: of the model, the output counted as one. device: for people. note: what they should know."""

    gpu_layers: int
    device: str
    note: str = ""


def check_file(path: Path, role: str) -> None:
    """Raises DuoChatError when the file cannot be read or is no GGUF."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise DuoChatError(f"The {role} model {path} cannot be read ({error.strerror}): check the path.") from error
    if magic != b"GGUF":
        raise DuoChatError(f"The {role} model {path} is not a GGUF file: give a model in llama.cpp's format.")


def size(path: Path) -> int:
    """Bytes of the model's file, or of all its parts. Raises DuoChatError when one is missing."""
    return sum(part.stat().st_size for part in gguf.read(path).parts)


def place(path: Path, cells: int, gpu_layers: int | str, names: Sequence[str], rpc: Sequence[str]) -> Place:
    """Find a place for a model with a cache of so many tokens. Raises DuoChatError when what is asked is not there."""
    start()
    for server in rpc:
        devices.connect(server)
    there = devices.gpus()
    if not there and (names or gpu_layers not in ("auto", 0)):
        build = f"build it for one with {rebuild('-DGGML_CUDA=on')} (VULKAN or HIP in place of CUDA for other makes)"
        raise DuoChatError(f"llama.cpp sees no GPU: {devices.unused_gpu() or build}, or set gpu_layers to 0.")
    there = devices.gpus(names)
    note = "" if there or gpu_layers == 0 else devices.unused_gpu()
    layers = gpu_layers if there else 0
    if layers == "auto":
        layers, all_layers = _fitting(path, cells, sum(max(0, device.free - RESERVE) for device in there))
        if layers < all_layers:
            note = f"{layers} of {all_layers} layers fit the GPU's memory, the rest computes on the CPU"
    used = there if layers else [device for device in devices.found() if device.kind == devices.CPU]
    return Place(layers, " + ".join(device.title for device in used), note)


def _fitting(path: Path, cells: int, free: int) -> tuple[int, int]:
    """Layers that fit, and all there are."""
    header = gguf.read(path)
    layers = header.get("block_count", 1) + 1
    need = size(path) + header.cache_bytes(cells)
    return min(layers, free * layers // need), layers


def load_model(path: Path, options: Options) -> int:
    """llama.cpp's handle of the model. Raises DuoChatError."""
    start()
    _errors.clear()
    role = options.role
    if not options.gpu_layers:
        require_memory(size(path), f"The {role} model {path}", f"choose a smaller {role}")
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = options.gpu_layers
    params.use_extra_bufts = options.extra_buffers
    kept = _place(params, options)
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    del kept
    if not model:
        raise DuoChatError(f"The {role} model {path} cannot be loaded ({_reason()}): fetch it again or choose another.")
    return model


def _place(params: ctypes.Structure, options: Options) -> list[ctypes.Array]:
    """Set where the weights go; what is returned lives until the model is loaded."""
    named = [device.handle for device in devices.gpus(options.devices)] if options.gpu_layers else []
    kept = []
    if options.devices or not options.gpu_layers:
        kept.append((ctypes.c_void_p * (len(named) + 1))(*named, None))
        params.devices = ctypes.cast(kept[-1], ctypes.c_void_p)
    if options.split:
        shares = [*options.split, *[0.0] * (llama_cpp.llama_max_devices() - len(options.split))]
        kept.append((ctypes.c_float * len(shares))(*shares))
        params.tensor_split = ctypes.cast(kept[-1], ctypes.POINTER(ctypes.c_float))
    if options.tensor_overrides:
        kept.append(devices.overrides(options.tensor_overrides))
        params.tensor_buft_overrides = ctypes.cast(kept[-1], ctypes.c_void_p)
    return kept


def new_context(model: int, path: Path, cells: int, threads: int, options: Options) -> int:
    """llama.cpp's handle of a context with a cache of so many tokens. Raises DuoChatError."""
    role = options.role
    if not options.gpu_layers:
        need = gguf.read(path).cache_bytes(cells) + 64 * cells  # and its book-keeping
        require_memory(need, f"A {role} cache for {cells} tokens", "choose a shorter context_length")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = cells
    params.n_batch, params.n_ubatch = BATCH, options.unit
    params.n_seq_max = options.sequences
    params.n_outputs_max = options.sequences  # llama.cpp aborts when fewer
    params.n_outputs_max_per_seq = 0
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = -1 if options.fused is None else int(options.fused)
    params.type_k, params.type_v = (GGMLQuantizationType[kind.upper()] for kind in (options.keys, options.values))
    params.kv_unified = params.swa_full = params.no_perf = True
    params.offload_kqv = params.op_offload = options.gpu_layers > 0
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        fault = f"The {role} model {path} cannot be set up ({_reason()})"
        raise DuoChatError(f"{fault}: choose another, or close programs.")
    return context


_errors: deque[str] = deque(maxlen=8)


@llama_cpp.llama_log_callback
def _keep_errors(level: int, text: bytes, _: object) -> None:
    if level == 4:
        _errors.append(text.decode("utf-8", "replace").strip())


@cache
def start() -> None:
    """Make llama.cpp ready, and silent."""
    llama_cpp.llama_log_set(_keep_errors, None)
    llama_cpp.llama_backend_init()


def _reason() -> str:
    return next((line.split(": ", 1)[-1] for line in _errors), "llama.cpp gave no reason")
