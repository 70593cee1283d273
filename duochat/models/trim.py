"""A draft with a smaller head: only the tokens that its target uses most can be proposed, all can be read.

The output layer of a small model with a large vocabulary takes a good part of its time. So the draft is loaded from a
second file in the cache, whose vocabulary is cut to the frequent tokens, and is fed the embeddings of the whole
vocabulary as vectors (a frequency-ranked vocabulary, as in FR-Spec, arXiv 2502.14856). A token that was cut is never
drafted by the model; that costs a rejection, never a word of the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from duochat import DuoChatError
from duochat.models import gguf
from duochat.models.store import cache_dir, make_once

RANKING = "duochat.frequent_tokens"  # in the file's metadata: token ids, the most frequent first
FAMILIES = ("llama", "qwen2", "qwen3")  # architectures that take the embedding as it is, unscaled
ALL = 2**31 - 1  # more tokens than any vocabulary has
HEADS = ("token_embd.weight", "output.weight")


@dataclass(frozen=True, slots=True, eq=False)
class Trimmed:
    """What to load in place of a draft's own file."""

    path: Path  # a GGUF file without a tokenizer
    tokens: np.ndarray  # int64 [rows]: the token of each row of logits
    embedding: np.ndarray  # float16 [vocabulary, width]


def trim(draft: Path, most: int | str = "auto") -> Trimmed | None:
    """The draft cut to its `most` frequent tokens; None when there is nothing to cut.

    "auto" keeps what the file itself ranks as frequent, and all tokens of a file without a ranking. In such a file a
    number keeps the lowest ids: a byte-pair vocabulary numbers the common merges first. Raises DuoChatError when the
    file is none, or cannot be cut and a number was asked for.
    """
    header = gguf.read(draft)
    tokens = kept(header, most)
    if tokens is None:
        return None
    if header.architecture not in FAMILIES:
        if most == "auto":
            return None
        raise DuoChatError(f"{draft.name} keeps all tokens, being a {header.architecture}: leave out draft_vocabulary.")
    identity = f"{draft.resolve()} {draft.stat().st_mtime_ns} {draft.stat().st_size}".encode() + tokens.tobytes()
    name = f"{draft.stem}-{len(tokens)}-{hashlib.sha256(identity).hexdigest()[:12]}.gguf"
    try:
        path = make_once(cache_dir() / "trimmed" / name, lambda partial: _write(header, tokens, partial))
    except DuoChatError:  # no place to keep it: the whole draft is slower, not worse
        if most == "auto":
            return None
        raise
    return Trimmed(path, tokens, _embedding(header))


def kept(header: gguf.Header, most: int | str) -> np.ndarray | None:
    """The tokens that a draft may propose, int64, ascending; None = all. most: see `trim`."""
    ranking = header.metadata.get(RANKING, [])
    size = len(ranking) if most == "auto" else most
    vocabulary = next((t.shape[0] for t in header.tensors if t.name == HEADS[0]), 0)
    return most_frequent(ranking, vocabulary, size) if 0 < size < vocabulary else None


def named(reference: str) -> tuple[str, int | str]:
    """A draft named "REF" or "REF@N": the reference, and how many tokens it may propose; "REF@0": all."""
    name, _, most = reference.partition("@")
    if most and not most.isdecimal():
        raise DuoChatError(f"{reference!r} is not REF or REF@N, N a number of tokens: such as {name}@16384.")
    return name, (int(most) or ALL) if most else "auto"


def most_frequent(ranking: Sequence[int], vocabulary: int, size: int) -> np.ndarray:
    """The first `size` tokens of the ranking, then of the lowest ids, as int64 in order of their ids."""
    return np.sort(np.fromiter(dict.fromkeys([*ranking, *range(vocabulary)]), np.int64, size))


def _embedding(header: gguf.Header) -> np.ndarray:
    from gguf import GGMLQuantizationType, quants

    tensor = next(t for t in header.tensors if t.name == HEADS[0])
    rows, kind = tensor.rows(), GGMLQuantizationType(tensor.type)
    parts = [np.ascontiguousarray(part) for part in np.array_split(rows, max(1, len(rows) // 8192))]
    try:
        return np.concatenate([quants.dequantize(part, kind).astype(np.float16) for part in parts])
    except NotImplementedError:
        raise DuoChatError(
            f"{header.path.name} keeps all tokens, being {kind.name}: leave out draft_vocabulary."
        ) from None


def _write(header: gguf.Header, tokens: np.ndarray, path: Path) -> None:
    """The model with the rows of `tokens` as its vocabulary, which has no strings."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, header.architecture)
    for key, value in header.metadata.items():
        if not key.startswith(("tokenizer.", "general.", "duochat.", "split.")):
            add_entry(writer, key, value)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(len(tokens))
    for tensor in header.tensors:
        rows = tensor.rows()
        writer.add_tensor(
            tensor.name,
            np.ascontiguousarray(rows[tokens] if tensor.name in HEADS else rows),
            raw_dtype=GGMLQuantizationType(tensor.type),
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_entry(writer: object, key: str, value: object) -> None:
    """Copy an entry in the type that llama.cpp reads hyperparameters in."""
    if key.endswith(".vocab_size"):
        return
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(key, value)
