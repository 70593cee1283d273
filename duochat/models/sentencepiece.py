"""Reading SentencePiece's tokenizer.model: the three fields that a BPE vocabulary needs, without its library.

The file is a protocol buffer (sentencepiece_model.proto): field 1 repeats the pieces, 2 describes the training, 3 the
normalisation. A piece has a text (1), a score (2) and a type (3), numbered as in llama.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from duochat import DuoChatError

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5  # wire types
BPE = 2  # TrainerSpec.model_type


@dataclass(frozen=True, slots=True)
class Pieces:
    """A vocabulary by id. space_prefix: a space is put before each text."""

    tokens: list[str]
    scores: list[float]
    types: list[int]
    space_prefix: bool = True


def read(path: Path) -> Pieces:
    """The pieces of a tokenizer.model. Raises DuoChatError when it is damaged or no BPE."""
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = [dict(_fields(value)) for number, value in fields if number == 1]
        training, normalising = (dict(_fields(dict(fields).get(n, b""))) for n in (2, 3))
        tokens = [piece[1].decode() for piece in pieces]
    except (IndexError, KeyError, struct.error, UnicodeDecodeError, AttributeError, TypeError, ValueError):
        raise DuoChatError(f"{path} is no SentencePiece model or is damaged: fetch the model again.") from None
    if training.get(3, 1) != BPE:
        raise DuoChatError(f"{path} is a unigram vocabulary, which is not read: name a model with a tokenizer.json.")
    scores = [struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces]
    return Pieces(tokens, scores, [piece.get(3, 1) for piece in pieces], bool(normalising.get(3, 1)))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and raw values of a message's fields."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        size, at = _varint(data, at) if wire == BYTES else ({EIGHT: 8, FOUR: 4}[wire], at)
        if at + size > len(data):
            raise ValueError("a field runs past the end")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
