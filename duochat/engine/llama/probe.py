"""Does this build of llama.cpp live on this CPU? Asked once, in a process of its own, and remembered.

A build for another CPU, or with AMX by a compiler that loses its tiles' configuration (GCC before 13), dies at a decode
by a signal that no program survives. Nothing here loads the library into this process.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path

from duochat import DuoChatError
from duochat.engine import machine
from duochat.models.store import recalled

ROOT = Path(__file__).resolve().parents[3]
FATAL = {-getattr(signal, name) for name in ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT", "SIGTRAP")}
PATIENCE = 60.0  # seconds; a probe takes one
KINDS = {
    **{"token_embd": "Q8_0", "output": "Q4_0", "attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "Q4_1"},
    **{"attn_output": "Q4_K", "ffn_gate": "Q6_K", "ffn_up": "Q5_K", "ffn_down": "F16"},
}
OUTER = ("token_embd", "output")  # what is no layer's
CONTEXT, BYTES = 512, (0x20, 0x30)  # of a pretended model
LIVES, PLAIN_ONLY, DIES = "lives", "lives without extra buffers", "dies"


def extra_buffers() -> tuple[bool, str]:
    """Whether weights may be laid out for special kernels (repacked ones, AMX), and a sentence for users if not.

    Raises DuoChatError when the library dies either way.
    """
    found = _found()
    if found == LIVES:
        return True, ""
    fault = "This build of llama.cpp dies on this CPU"
    if found == DIES:
        raise DuoChatError(f"{fault}: build it anew with {rebuild()}")
    return False, f"{fault} with its fastest kernels and runs without them; for full speed build it anew: {rebuild()}"


def rebuild(*options: str) -> str:
    """The command that builds llama.cpp for this machine. options: for CMake."""
    include = f"-DCMAKE_PROJECT_INCLUDE='{ROOT / 'configs' / 'llama-cpp.cmake'}'"
    package = f"llama-cpp-python=={metadata.version('llama-cpp-python')}"
    return (
        f'CMAKE_ARGS="{" ".join((include, *options))}" {sys.executable} -m pip install --force-reinstall --no-deps '
        f"--no-cache-dir --no-binary llama-cpp-python {package}"
    )


@cache
def _found() -> str:
    """What is sure is remembered."""
    asked = []

    def sure() -> str | None:
        asked.append(_ask())
        return asked[0][0] if asked[0][1] else None

    return recalled("llama.cpp", identity(), sure) or asked[0][0]


def _ask() -> tuple[str, bool]:
    """What the library does here, and whether that is sure: a probe may end for other reasons than the CPU."""
    status = _run("extra")
    if status not in FATAL:
        return LIVES, status == 0
    status = _run("plain")
    return (DIES, True) if status in FATAL else (PLAIN_ONLY, status == 0)


def _run(way: str) -> int:
    """The exit status of a decode in a process of its own; negative: the signal that ended it."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "duochat.engine.llama.probe", way]
    try:
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired):
        return 1
    return done.returncode


def identity() -> str:
    """The library's files and the CPU's abilities. LLAMA_CPP_LIB_PATH: llama-cpp-python's, a folder to take it from."""
    spec = util.find_spec("llama_cpp")
    folders = [Path(folder) / "lib" for folder in spec.submodule_search_locations] if spec else []
    folders = [Path(chosen)] if (chosen := os.environ.get("LLAMA_CPP_LIB_PATH")) else folders
    files = sorted(file for folder in folders for file in folder.glob("*"))
    facts = [(str(file), (about := file.stat()).st_size, about.st_mtime_ns) for file in files]
    return hashlib.sha256(repr((facts, machine.processor())).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a pretended model. groups: heads of keys and values. tied: the output is the embedding."""

    width: int = 256
    inner: int = 256
    layers: int = 1
    heads: int = 4
    groups: int = 4
    head: int = 64
    vocabulary: int = 256
    tied: bool = False

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of each, by the keys of KINDS."""
        narrow, wide = (n * self.head for n in (self.groups, self.heads))
        rows = {"attn_q": wide, "attn_k": narrow, "attn_v": narrow, "ffn_gate": self.inner, "ffn_up": self.inner}
        rows |= {"token_embd": self.vocabulary, "output": self.vocabulary}
        columns = {"attn_output": wide, "ffn_down": self.inner}
        there = (name for name in KINDS if not (self.tied and name == "output"))
        return {name: (rows.get(name, self.width), columns.get(name, self.width)) for name in there}


def write(path: Path, shape: Shape, kinds: Mapping[str, str]) -> None:
    """A Llama of no meaning. kinds: the quantisation of each matrix, by the keys of KINDS.

    Bytes of BYTES are small numbers in every kind, with the highest bit negative ones where scales have a sign. Not
    zeros: tokens that are all alike take up to a quarter less time.
    """
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.groups)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("none")
    for name in ("output_norm", *(f"blk.{i}.{norm}_norm" for i in range(shape.layers) for norm in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", np.ones(shape.width, np.float32))
    random = np.random.default_rng(0)
    for name, (rows, columns) in shape.matrices.items():
        block, size = GGML_QUANT_SIZES[raw := GGMLQuantizationType[kind := kinds[name]]]
        weights = random.integers(*BYTES, (rows, columns // block * size), np.uint8)
        weights |= random.integers(1 if kind == "MXFP4" else 2, size=weights.shape, dtype=np.uint8) << 7
        for place in ("",) if name in OUTER else (f"blk.{i}." for i in range(shape.layers)):
            writer.add_tensor(f"{place}{name}.weight", weights, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _decode(extra: bool) -> None:
    from duochat.engine.llama.library import Llama, Options

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "probe.gguf", Shape(), KINDS)
        llama = Llama(Path(folder) / "probe.gguf", 256, 2, options=Options(extra_buffers=extra))
        for count in (1, 2, 33):
            llama.drop(0, 0)
            llama.decode([1] * count, range(count), [(0,)] * count, [count - 1])
            llama.logits(1).sum()  # waits for it


if __name__ == "__main__":
    _decode(sys.argv[1] == "extra")
