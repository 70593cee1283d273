"""Which numbers of rows in one forward give the same logits to the bit. Kernels for several rows may round otherwise.

Measured, since it differs by quantisation, processor and build: with AVX-512 any number for Q4_0, Q4_1 and Q8_0, up to
three for Q4_K, from two on for F16. Remembered by library, processor and file.
"""

from __future__ import annotations

import numpy as np

from duochat.engine.lanes import never
from duochat.engine.llama import probe
from duochat.engine.llama.library import Llama
from duochat.models import gguf
from duochat.models.store import recalled

TRIED = (1, 2, 3, 4, 8, 32)
ANY = 2**31 - 1  # what agrees up to the most that were tried agrees with any number


def agreeing(llama: Llama) -> tuple[int, int]:
    """The least and the most rows of forwards that agree to the bit; the least is 1, or 2 where one row is apart."""
    files = [(part.name, (about := part.stat()).st_size, about.st_mtime_ns) for part in gguf.read(llama.path).parts]
    least, most = recalled("widths", (files, probe.identity(), llama.options), lambda: _measure(llama))
    return least, most


def _measure(llama: Llama) -> tuple[int, int]:
    rows = {width: _rows(llama, width) for width in TRIED}
    one, two = _most(rows, 1), _most(rows, 2)
    return (1, one) if one > 1 or two == 2 else (2, two)


def _most(rows: dict[int, np.ndarray], least: int) -> int:
    """The most rows at a time that gave the same as `least`, and so did all between."""
    most, known = least, rows[least]
    for width in (w for w in TRIED if w > least):
        common = min(len(known), len(rows[width]))
        if not np.array_equal(known[:common], rows[width][:common]):
            break
        most, known = width, max(known, rows[width], key=len)
    return ANY if most == TRIED[-1] else most


def _rows(llama: Llama, width: int) -> np.ndarray:
    """The logits of some tokens of no meaning, read so many at a time; four at least."""
    count = max(width, -(-4 // width) * width)
    tokens = [(7919 * i + 13) % llama.vocabulary for i in range(count)]
    found = []
    llama.drop(0, 0)
    for start in range(0, count, width):
        positions = range(start, start + width)
        llama.decode(tokens[start : start + width], positions, [(0,)] * width, range(width), never)
        found.append(llama.logits(width).copy())
    llama.drop(0, 0)
    return np.concatenate(found)
