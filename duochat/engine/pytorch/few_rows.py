"""Linear layers for few rows on a CUDA device: a Triton kernel where it is faster than the library's product.

It streams the weights through the tensor cores, several tiles ahead. Which of the two multiplies is measured for each
shape and number of rows when a model is first loaded, and kept: another choice could round otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch.nn.functional import linear

from duochat.engine.pytorch.forward import Graphs
from duochat.models.store import recalled

TOLERANCE = 0.1  # of the spread of the products: the last place of a large bfloat16
WIDTHS = (1, 2, 4, 8, 16, 32)  # rows
LAYERS = 12  # of a shape are multiplied in turn, so that no weight comes from the cache
REPEATS = 3
FASTER = 0.98  # of the library's seconds: less is noise


Place = tuple[torch.nn.Module, str, torch.nn.Linear]  # a layer, and whose it is under which name


@dataclass(frozen=True, slots=True)
class Tiling:
    """A thread block takes `outputs` rows of the weight, `inputs` columns at a time, `ahead` tiles in flight."""

    outputs: int
    inputs: int
    ahead: int
    warps: int

    def fits(self, weight: torch.Tensor) -> bool:
        """Whether whole tiles cover the weight (the kernel has no masks for it), and 32 bits its indices."""
        whole = weight.shape[0] % self.outputs == 0 and weight.shape[1] % self.inputs == 0
        return whole and weight.numel() < 2**31


TILINGS = (
    Tiling(16, 512, 3, 2),
    Tiling(32, 128, 6, 4),
    Tiling(32, 256, 3, 4),
    Tiling(64, 128, 5, 4),
    Tiling(128, 128, 3, 8),
)
_chosen: dict[tuple[int, ...], Tiling | None] = {}  # (rows, outputs, inputs) -> None: the library is faster


@torch.library.custom_op("duochat::few_rows", mutates_args=())
def _product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """rows (..., inputs) times weight (outputs, inputs): (..., outputs). Opaque to torch.compile."""
    tiling = _chosen.get((rows.numel() // weight.shape[1], *weight.shape))
    return product(rows, weight, tiling) if tiling else linear(rows, weight)


@_product.register_fake
def _(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], weight.shape[0])


class FewRows(torch.nn.Module):
    """An `nn.Linear` that multiplies in the way chosen for its shape."""

    def __init__(self, plain: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        self.out_features, self.in_features = plain.out_features, plain.in_features

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out = torch.ops.duochat.few_rows(rows, self.weight)
        return out if self.bias is None else out + self.bias


def product(rows: torch.Tensor, weight: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """rows (..., inputs) times weight (outputs, inputs), by the kernel; 64 rows at most, in the weight's type."""
    rows = rows.contiguous()
    out = rows.new_empty(*rows.shape[:-1], weight.shape[0])
    count, (outputs, inputs) = rows.numel() // rows.shape[-1], weight.shape
    width = max(16, 1 << (count - 1).bit_length())
    options = {"num_stages": tiling.ahead, "num_warps": tiling.warps}
    grid = (outputs // tiling.outputs,)
    kernel()[grid](rows, weight, out, count, inputs, outputs, width, tiling.outputs, tiling.inputs, **options)
    return out


@cache
def kernel() -> Any:
    """Raises ImportError without Triton."""
    import triton
    import triton.language as tl

    @triton.jit
    def few_rows(
        rows, weight, out, count, inputs, outputs,
        WIDTH: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    ):  # fmt: skip
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        row = tl.arange(0, WIDTH)
        column = tl.arange(0, INPUTS)
        there = (row < count)[None, :]
        weights = weight + output[:, None] * inputs + column[None, :]
        values = rows + row[None, :] * inputs + column[:, None]
        sums = tl.zeros((OUTPUTS, WIDTH), tl.float32)
        for _ in range(0, inputs, INPUTS):
            sums = tl.dot(tl.load(weights), tl.load(values, mask=there, other=0.0), sums)
            weights += INPUTS
            values += INPUTS
        place = out + row[None, :] * outputs + output[:, None]
        tl.store(place, sums.to(out.dtype.element_ty), mask=there)

    return few_rows


def swap(model: torch.nn.Module) -> bool:
    """Replace the model's linear layers in place where the kernel is faster; False where it nowhere is.

    Those of 16 bits: float32 would be rounded by the tensor cores, and promises more.
    """
    try:
        kernel()
    except ImportError:
        return False
    shapes: dict[torch.Size, list[Place]] = {}
    for owner in list(model.modules()):
        for name, child in owner.named_children():
            plain = type(child) is torch.nn.Linear and type(child.weight) is torch.nn.Parameter
            if plain and child.weight.dtype in (torch.bfloat16, torch.float16):
                shapes.setdefault(child.weight.shape, []).append((owner, name, child))
    swapped = [_swap_alike(shape, alike) for shape, alike in shapes.items()]
    return any(swapped)


def _swap_alike(shape: torch.Size, alike: list[Place]) -> bool:
    """The layers of one shape, all in the way that is chosen for it on this card, with these libraries."""
    weights = [layer.weight for *_, layer in alike]
    device, of = weights[0].device, (*shape, weights[0].dtype)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    found = recalled("few-rows", (card, torch.__version__, TILINGS, of), lambda: _choose(weights[:LAYERS]))
    tilings = [Tiling(*tiling) if tiling else None for tiling in found]
    if not any(tilings):
        return False
    _chosen.update({(width, *shape): tiling for width, tiling in zip(WIDTHS, tilings, strict=True)})
    for owner, name, layer in alike:
        setattr(owner, name, FewRows(layer))
    return True


@torch.no_grad()
def _choose(weights: list[torch.Tensor]) -> list[Sequence[int] | None]:
    """For each of WIDTHS the tiling that is fastest for weights of this shape, None where the library is."""
    found: list[Sequence[int] | None] = []
    for width in WIDTHS:
        rows = torch.randn(width, weights[0].shape[1], device=weights[0].device, dtype=weights[0].dtype)
        best, chosen = FASTER * seconds(partial(linear, rows), weights), None
        for tiling in _usable(rows, weights[0]):
            took = seconds(partial(product, rows, tiling=tiling), weights)
            if took < best:
                best, chosen = took, tiling
        found.append(chosen and astuple(chosen))
    return found


def _usable(rows: torch.Tensor, weight: torch.Tensor) -> Iterator[Tiling]:
    """The tilings that fit the weight and the card, and give the library's products."""
    wanted = linear(rows, weight).float()
    for tiling in TILINGS:
        if not tiling.fits(weight):
            continue
        try:
            off = (product(rows, weight, tiling).float() - wanted).abs().max() / wanted.std()
        except Exception:  # noqa: BLE001 (Triton's own: too much shared memory, no compiler, ...)
            continue
        if off < TOLERANCE:
            yield tiling


def seconds(multiply: Callable[[torch.Tensor], torch.Tensor], weights: Sequence[torch.Tensor]) -> float:
    """Of a product with each of the weights, in a CUDA graph as in a chat."""
    graphs = Graphs()

    def play() -> float:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graphs("products", lambda: [multiply(weight) for weight in weights])
        ended.record()
        ended.synchronize()
        return begun.elapsed_time(ended) / 1e3

    play()
    return median(play() for _ in range(REPEATS))
