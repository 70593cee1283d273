"""What a forward of a file would take here, told by a pretended model of its sizes with fewer layers and no meaning.

Measured once for each kind of file, and remembered by library, processor and cores.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from duochat.engine.calibration import CPU_WIDTHS, GPU_WIDTHS
from duochat.engine.llama import devices, loading, probe
from duochat.engine.llama.loading import RESERVE
from duochat.engine.llama.probe import OUTER, Shape
from duochat.engine.llama.target import LlamaTarget
from duochat.engine.machine import available_cores
from duochat.models.store import recalled

ROOM = 192 * 2**20  # bytes of layers, and of output, that are pretended: past every cache
CONTEXT = 256  # tokens
TRIES = 7  # of which the best counts: what else the machine does only adds


@dataclass(frozen=True, slots=True)
class Lane:
    """Where a model computes: layers on the GPU, 999 = all, and threads."""

    gpu_layers: int
    threads: int

    @property
    def widths(self) -> Sequence[int]:
        return GPU_WIDTHS if self.gpu_layers else CPU_WIDTHS


def lanes() -> tuple[Lane, Lane]:
    """The target's and the draft's on this machine."""
    loading.start()
    cores = available_cores()
    if devices.gpus():
        return Lane(999, cores), Lane(0, max(1, min(8, cores // 2)))
    return Lane(0, cores), Lane(0, cores)


def room() -> int:
    """Bytes that the GPUs have free for weights."""
    return sum(max(0, device.free - RESERVE) for device in devices.gpus())


def size(shape: Shape, kinds: Mapping[str, str], outer: bool) -> float:
    """Bytes of the output, or of all layers."""
    found = 0.0
    for name, (rows, columns) in shape.matrices.items():
        if name == ("token_embd" if shape.tied else "output") if outer else name not in OUTER:
            block, each = GGML_QUANT_SIZES[GGMLQuantizationType[kinds[name]]]
            found += rows * columns / block * each
    return found if outer else found * shape.layers


def forwards(lane: Lane, shape: Shape, kinds: Mapping[str, str]) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of all layers and of the output, each by rows of the forward."""
    layers = max(1, min(shape.layers, int(ROOM * shape.layers / size(shape, kinds, False))))
    rows = max(256, min(shape.vocabulary, int(ROOM * shape.vocabulary / size(shape, kinds, True))))
    inner = _seconds(lane, replace(shape, layers=layers, vocabulary=256), kinds)
    both = _seconds(lane, replace(shape, layers=1, vocabulary=rows), kinds)
    widths = sorted(inner.keys() & both.keys())  # of more rows such a file may not be asked at once, see `widths`
    outer = {w: max(0.0, both[w] - inner[w] / layers) * shape.vocabulary / rows for w in widths}
    return {w: inner[w] * shape.layers / layers for w in widths}, outer


def _seconds(lane: Lane, shape: Shape, kinds: Mapping[str, str]) -> dict[int, float]:
    def measure() -> dict[int, float]:
        with tempfile.TemporaryDirectory() as folder:
            target = _load(lane, shape, kinds, Path(folder) / "pretended.gguf")
            tries = [target.measure(lane.widths, CONTEXT, repeats=1) for _ in range(TRIES)]
            target.close()
        return {width: min(one[width] for one in tries) for width in tries[0]}

    about = (lane, shape, sorted(kinds.items())), probe.identity(), available_cores(), [d.title for d in devices.gpus()]
    return {int(width): seconds for width, seconds in recalled("speed", about, measure).items()}


def _load(lane: Lane, shape: Shape, kinds: Mapping[str, str], path: Path) -> LlamaTarget:
    probe.write(path, shape, kinds)
    return LlamaTarget.load(path, probe.CONTEXT, lane.threads, gpu_layers=lane.gpu_layers)
