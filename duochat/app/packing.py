"""The trace of an answer as a few bytes: its steps in columns, compressed. The store and the export keep these bytes.

Numbers are kept to five decimals, as the picture shows them: times to 10 µs.
"""

from __future__ import annotations

import json
import lzma
import zlib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from duochat.chat.answer import Step, read_steps

DECIMALS = 5
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "pb": 0}]  # pb 0: text has no alignment
LONGEST = 1 << 28  # bytes of an unpacked trace; a larger one is no answer but an attack


def pack(steps: Iterable[Step]) -> bytes:
    """b"" for no steps."""
    rows = [_row(json.loads(step.to_json(), parse_float=_rounded)) for step in steps]
    text = json.dumps(_columns(rows), separators=(",", ":"))
    return lzma.compress(text.encode(), filters=FILTERS) if rows else b""


def unpack(data: bytes) -> list[Step]:
    """Raises ValueError when the bytes are no trace. Those of older stores, compressed lines, are read too."""
    if not data:
        return []
    try:
        if data.startswith(b"\xfd7zXZ"):
            rows = map(_unrow, _rows(json.loads(_bounded(lzma.LZMADecompressor(), data))))
        else:
            rows = map(json.loads, _bounded(zlib.decompressobj(), data).decode().split("\n"))
        return checked(rows)
    except (lzma.LZMAError, zlib.error, KeyError, TypeError, IndexError, AttributeError) as fault:
        raise ValueError("a trace is damaged") from fault


def checked(rows: Iterable[Any]) -> list[Step]:
    """The steps of a trace. Raises ValueError when one is no step, or a value in it is of a wrong kind."""
    return read_steps(json.dumps(_renewed(row)) for row in rows)


def _renewed(row: Any) -> Any:
    """In older traces a round's `speculation` held the reason too."""
    r = row.get("round") if isinstance(row, dict) else None
    if isinstance(r, dict) and ": " in str(r.get("speculation")):
        r["speculation"], _, r["reason"] = r["speculation"].partition(": ")
    return row


def _bounded(unpacker: Any, data: bytes) -> bytes:
    unpacked = unpacker.decompress(data, LONGEST)
    if not unpacker.eof:
        raise ValueError("a trace is cut short or too long")
    return unpacked


def _row(step: dict[str, Any]) -> dict[str, Any]:
    """Texts by id as pairs: columns need the same keys in every row."""
    return {**step, "draft_texts": list(step["draft_texts"].items())}


def _unrow(row: Any) -> Any:
    return {**row, "draft_texts": dict(row["draft_texts"])}


def _rounded(number: str) -> float:
    return round(float(number), DECIMALS)


def _columns(values: Sequence[Any]) -> Any:
    """Records of the same keys become a list for each key, lists become their lengths and one list of all items."""
    if values and all(isinstance(v, dict) and v and v.keys() == values[0].keys() for v in values):
        return {"keys": {k: _columns([v[k] for v in values]) for k in values[0]}}
    if values and all(isinstance(v, list) for v in values):
        return {"lengths": [len(v) for v in values], "items": _columns([item for v in values for item in v])}
    return list(values)


def _rows(packed: Any) -> list[Any]:
    """The inverse of `_columns`."""
    if isinstance(packed, list):
        return packed
    if "keys" in packed:
        columns = {k: _rows(v) for k, v in packed["keys"].items()}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    items = iter(_rows(packed["items"]))
    return [list(islice(items, length)) for length in packed["lengths"]]
