"""Linear layers for few rows on a CPU: `skinny.c`, built once by the system's C compiler.

A decode step multiplies a handful of rows with every weight. BLAS libraries are built for square products: on one AVX2
core 8 rows cost them 2.5 times as much as 1 row, this kernel 1.3 times. Without a compiler the model stays as it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from duochat.engine import kernels

SOURCE = Path(__file__).with_name("skinny.c")
PANEL = 8  # as in the source


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
    """The kernel; None without a compiler that can."""
    made = kernels.library(SOURCE, threading=True, beside=torch.__version__)
    if made is None:
        return None
    made.skinny.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int] * 4
    made.skinny.restype = None
    return made.skinny


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """(outputs, inputs) to (panels, inputs, PANEL), the last panel filled with zeros."""
    spare = -weight.shape[0] % PANEL
    weight = torch.nn.functional.pad(weight, (0, 0, 0, spare))
    return weight.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()
