"""Linear layers for few rows on a CPU: `skinny.c`, built once by the system's C compiler.

A decode step multiplies a handful of rows with every weight. BLAS libraries are built for square products: on one AVX2
core 8 rows cost them 2.5 times as much as 1 row, this kernel 1.3 times. Without a compiler the model stays as it is.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import platformdirs
import torch

SOURCE = Path(__file__).with_name("skinny.c")
PANEL = 8  # as in the source
THREADING = (["-fopenmp"], [])  # tried in this order


class SkinnyLinear(torch.nn.Module):
    """A float32 `nn.Linear` whose weight is packed for the kernel."""

    def __init__(self, linear: torch.nn.Linear, kernel: Callable[..., None]) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.packed = torch.nn.Parameter(_pack(linear.weight.data), requires_grad=False)
        self.bias = linear.bias
        self._kernel = kernel

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: (..., in_features) to (..., out_features)."""
        rows = rows.contiguous()
        out = rows.new_empty(*rows.shape[:-1], self.out_features)
        count = rows.numel() // self.in_features
        sizes = (count, self.in_features, self.out_features, torch.get_num_threads())
        self._kernel(self.packed.data_ptr(), rows.data_ptr(), out.data_ptr(), *sizes)
        return out if self.bias is None else out.add_(self.bias)


def swap(model: torch.nn.Module) -> bool:
    """Replace the model's float32 linear layers in place; False when no kernel can be built here."""
    kernel = build()
    if kernel is None:
        return False
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            plain = type(child) is torch.nn.Linear and type(child.weight) is torch.nn.Parameter  # not quantised
            if plain and child.weight.dtype == torch.float32:
                setattr(module, name, SkinnyLinear(child, kernel))
    return True


@cache
def build() -> Callable[..., None] | None:
    """The kernel, from the user's cache or compiled now (about a second); None without a compiler that can."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        return None
    identity = f"{SOURCE.read_text()}{compiler}{_processor()}{torch.__version__}"
    library = Path(platformdirs.user_cache_dir("duochat")) / "kernels"
    library = library / f"skinny-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    try:
        if not library.is_file():
            _compile(compiler, library)
        return _load(library)
    except (OSError, subprocess.SubprocessError):
        return None


def _compile(compiler: str, library: Path) -> None:
    """Under its final name only when it can be loaded.

    Linked without OpenMP: its symbols come from the library that torch has loaded, so both share one pool of threads.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        object_file, made = Path(folder) / "skinny.o", Path(folder) / library.name
        for threading in THREADING:
            try:
                _run(compiler, "-O3", "-march=native", "-fPIC", *threading, "-c", SOURCE, "-o", object_file)
                _run(compiler, "-shared", object_file, "-o", made)
                _load(made)
            except (OSError, subprocess.SubprocessError):
                if threading == THREADING[-1]:
                    raise
            else:
                os.replace(made, library)
                return


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=60)


def _load(library: Path) -> Callable[..., None]:
    kernel = ctypes.CDLL(str(library)).skinny
    kernel.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int] * 4
    kernel.restype = None
    return kernel


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """(outputs, inputs) to (panels, inputs, PANEL), the last panel filled with zeros."""
    spare = -weight.shape[0] % PANEL
    weight = torch.nn.functional.pad(weight, (0, 0, 0, spare))
    return weight.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
