"""Reading a GGUF file's header: metadata and tensor table, without touching the weights.

Takes 0.1 s for a 50k vocabulary where the gguf package's reader takes 5. Standard library only.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from duochat import DuoChatError

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

# Tensor type: (elements, bytes) of a block, as ggml.h defines them.
BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where one tensor lies: shape in row-major order, offset in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: int  # a value of `gguf.GGMLQuantizationType`
    offset: int

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes in the file; at least 1 for a type that is not known here."""
        elements, size = BLOCKS.get(self.type, (self.elements, 1))
        return self.elements // elements * size


@dataclass(frozen=True, slots=True)
class Header:
    """What a GGUF file says of itself."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[Tensor, ...]

    @property
    def architecture(self) -> str:
        return self.metadata.get("general.architecture", "")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of "<architecture>.<key>"."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    @property
    def tokens(self) -> list[str]:
        """The token strings by id."""
        return self.metadata.get("tokenizer.ggml.tokens", [])


def is_gguf(path: Path) -> bool:
    with path.open("rb") as f:
        return f.read(4) == b"GGUF"


def read(path: Path) -> Header:
    """The header of a GGUF file. Raises DuoChatError when it is none or is cut short."""
    if path.stat().st_size < 24 or not is_gguf(path):
        raise DuoChatError(f"{path} is not a model: give a GGUF file, or a folder with config.json and safetensors.")
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            header = _Cursor(data).header(path)
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError, MemoryError, RecursionError):
            raise _broken(path) from None
        if any(t.offset + t.size > len(data) for t in header.tensors):
            raise _broken(path)
    return header


def _broken(path: Path) -> DuoChatError:
    return DuoChatError(f"{path} is cut short or damaged: delete it and fetch or copy it again.")


class _Cursor:
    """A place in the mapped file that moves on as values are read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def header(self, path: Path) -> Header:
        _, version, tensors, entries = self._numbers("4sIQQ")
        if version not in (2, 3):
            raise DuoChatError(f"{path} is GGUF version {version}: convert it to version 3 with a current llama.cpp.")
        metadata = {self._text(): self._value(self._numbers("I")[0]) for _ in range(entries)}
        table = [self._tensor() for _ in range(tensors)]
        align = metadata.get("general.alignment", 32)
        start = -(-self.at // align) * align
        return Header(path, metadata, tuple(Tensor(n, s, t, start + o) for n, s, t, o in table))

    def _numbers(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return values

    def _text(self) -> str:
        (size,) = self._numbers("Q")
        self.at += size
        if self.at > len(self.data):
            raise struct.error("text runs past the end")
        return self.data[self.at - size : self.at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind != ARRAY:
            return self._numbers(SCALARS[kind])[0]
        inner, count = self._numbers("IQ")
        if inner in SCALARS:
            return list(self._numbers(f"{count}{SCALARS[inner]}"))
        return [self._value(inner) for _ in range(count)]

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        (dims,) = self._numbers("I")
        shape = self._numbers(f"{dims}Q")[::-1]  # the file names the fastest-moving dimension first
        return name, shape, *self._numbers("IQ")
