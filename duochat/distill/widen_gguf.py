"""A stand-in target as a GGUF file for llama.cpp: widened one tensor at a time, quantised by llama.cpp itself.

Memory: the small model and the largest tensor. A quantised file is made from one in 16 bits, which goes afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import psutil
import torch

from duochat import DuoChatError, terminal
from duochat.distill import gguf_file, widened
from duochat.distill.gguf_file import interleaved
from duochat.distill.widen import LIKE
from duochat.models import store
from duochat.models.folder import KEY
from duochat.models.store import Progress
from duochat.models.weights import LAYER, MODEL

BITS = {"q4_k_m": 4.85, "q8_0": 8.5, "bf16": 16, "f16": 16}  # of a weight
PLAIN = {
    "bf16": (torch.bfloat16, gguf.GGMLQuantizationType.BF16),
    "f16": (torch.float16, gguf.GGMLQuantizationType.F16),
}
OUTER = {inner: outer for outer, inner in (MODEL | LAYER).items()}
COPIES = 3  # of the largest tensor in 32 bits, held at a time


@torch.no_grad()
def write(source: Path, folder: Path, like: str, path: Path, kind: str, progress: Progress = store.silent) -> None:
    """Write `source` (a GGUF file of a Llama; `folder` has the same weights) with the shape `like`; kind: of BITS.

    Raises DuoChatError when it cannot be widened, or disk or memory do not suffice.
    """
    wide = Wide(source, folder, like)
    require(wide, path, kind)
    with store.workshop(path) as half, store.disk_faults(path):
        made, plain = half / f"{kind}.gguf", kind if kind in PLAIN else "f16"
        wide.write(half / f"{plain}.gguf", plain, progress)
        if kind != plain:
            progress(f"Quantising to {kind}", 0, 0)
            quantise(half / f"{plain}.gguf", made, kind)
        made.replace(path)


def require(wide: Wide, path: Path, kind: str) -> None:
    """Say what the file takes, and raise DuoChatError where there is not as much."""
    weights = sum(np.prod(shape) for shape in wide.shapes.values())
    made = int(weights * BITS[kind] / 8)
    memory = int(4 * COPIES * max(np.prod(shape) for shape in wide.shapes.values()))
    on_disk = made + (0 if kind in PLAIN else 2 * int(weights))
    terminal.report(
        f"{path.name}: {terminal.amount(made)}, and as much memory where it is to run; to make it takes "
        f"{terminal.amount(on_disk)} of disk and {terminal.amount(memory)} of memory."
    )
    store.need_room(path, on_disk)
    if memory > psutil.virtual_memory().available:
        raise DuoChatError(
            f"Widening needs {terminal.amount(memory)} of memory: close programs or take a smaller --like."
        )


class Wide:
    """The widened model, of which a tensor at a time exists."""

    def __init__(self, source: Path, folder: Path, like: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # its bars write over ours
        self.source, self.like, self.shape = gguf_file.Source.open(source), like, LIKE[like]
        small = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = widened.config(small.config, self.shape)
        with torch.device("meta"):
            large = type(small)(config)
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        self.shapes = {name: tuple(p.shape) for name, p in large.state_dict().items() if name not in tied}
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.small = {name: value.to(self.device) for name, value in small.state_dict().items()}
        self.places = widened.Places(small.config, self.shape, self.device)
        self.eps = config.rms_norm_eps

    def write(self, path: Path, kind: str, progress: Progress) -> None:
        """The whole file in 16 bits, norms in 32."""
        dtype, raw = PLAIN[kind]
        writer = gguf.GGUFWriter(path, self.source.header.architecture)
        self._describe(writer)
        for name, shape in self.shapes.items():
            wide, size = (raw, 2) if len(shape) == 2 else (gguf.GGMLQuantizationType.F32, 4)
            writer.add_tensor_info(outer(name), shape, np.dtype(np.float32), size * int(np.prod(shape)), wide)
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_ti_data_to_file):
            step()
        for done, tensor in enumerate(self._tensors(dtype)):
            progress(f"Widening to {self.like}", done, len(self.shapes))
            writer.write_tensor_data(tensor)
        writer.close()

    def _describe(self, writer: gguf.GGUFWriter) -> None:
        s = self.shape
        sizes = {"width": s.hidden, "ffn": s.ffn, "layers": s.layers, "heads": s.heads, "kv_heads": s.kv_heads}
        small = self.source.header.metadata.get("general.name", "a small model")
        name = f"{small} with the shape of {self.like} (cost-faithful)"
        gguf_file.write_meta(writer, replace(self.source.shape, **sizes, norm_eps=self.eps), self.source, name)
        writer.add_string(KEY, self.like)

    def _tensors(self, dtype: torch.dtype) -> Iterator[np.ndarray]:
        """In the order of `shapes`, each as the bytes of the file: uint8 [rows, bytes]."""
        generator = torch.Generator(self.device).manual_seed(0)
        for name, shape in self.shapes.items():
            large = torch.empty(shape, device=self.device).normal_(0, 0.02, generator=generator)
            self.places.fill(name, large, self.small)
            kept = interleaved(large, self._heads(name)).to(torch.float32 if large.ndim == 1 else dtype)
            yield kept.cpu().contiguous().view(torch.uint8).numpy()

    def _heads(self, name: str) -> int:
        """Of how many heads the tensor's rows are kept in another order, 0 = none."""
        heads = {"q_proj": self.shape.heads, "k_proj": self.shape.kv_heads}
        return heads.get(name.split(".")[-2], 0) if self.source.header.architecture == "llama" else 0


def outer(name: str) -> str:
    """GGUF's name of a parameter of transformers' Llama and Qwen2."""
    layer, name = ("", name) if ".layers." not in name else name.removeprefix("model.layers.").split(".", 1)
    stem, _, kind = name.rpartition(".")
    return f"blk.{layer}.{OUTER[stem]}.{kind}" if layer else f"{OUTER[stem]}.{kind}"


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
