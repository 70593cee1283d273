"""native.c and the files that it takes: which models fit, and a loaded one as an object. The only module that knows C.

A model that does not fit is no fault: llama.cpp computes it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from duochat import DuoChatError
from duochat.engine import kernels
from duochat.engine.choosing import ORDERED, Choice
from duochat.engine.lanes import Cancelled, Candidates
from duochat.engine.machine import require_memory
from duochat.engine.penalties import Changes
from duochat.models import gguf
from duochat.models.trim import kept

SOURCE = Path(__file__).with_name("native.c")
IN_ORDER = "-fno-tree-ter"  # GCC would multiply ahead of the sums, and AVX2's sixteen registers hold half of that
GROUP = 16  # rows of a matrix, and cells, that are held together
MOST = 8  # nodes of a pass
NORMS, MATRICES = (0, 1), (2, 3, 8)  # tensor types: F32, F16 and Q4_0, Q4_1, Q8_0
UNKNOWN = "The target uses a token that the draft does not know: choose a draft with the same vocabulary."
KNOWN = {  # what the file may say of its architecture; whatever else it says would change the result
    "context_length", "vocab_size", "block_count", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
    "attention.layer_norm_rms_epsilon", "rope.freq_base",
}  # fmt: skip


class _Shape(ctypes.Structure):
    _fields_ = (
        *((n, ctypes.c_int32) for n in ("width", "layers", "heads", "groups", "head", "inner", "cells")),
        *((name, ctypes.c_float) for name in ("epsilon", "base")),
    )


class _Tensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int32) for name in ("type", "rows", "cols")))


class _Changes(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int32), *((n, ctypes.c_void_p) for n in ("place", "divisor", "added", "allowed")))


@cache
def _library() -> ctypes.CDLL | None:
    library = kernels.library(SOURCE, *ORDERED, IN_ORDER, "-pthread")
    if library is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_int
        library.load.restype, library.path.restype = pointer, ctypes.c_char_p
        library.logits.restype = ctypes.POINTER(ctypes.c_float)
        library.load.argtypes = [pointer, pointer, pointer, number]
        library.run.argtypes = [pointer, number, number, pointer, number, ctypes.POINTER(Choice), *[pointer] * 5]
        library.stop.argtypes = library.discard.argtypes = [pointer]
        library.logits.argtypes, library.move.argtypes = [pointer, number], [pointer, number, number]
        library.stop.restype = ctypes.POINTER(ctypes.c_int32)
        library.discard.restype = library.move.restype = None
    return library


def unfit(path: Path) -> str:
    """Why the native lane does not take this file; "" when it does. Raises DuoChatError when it is no GGUF file."""
    header = gguf.read(path)
    if header.architecture != "llama":
        return f"its architecture is {header.architecture}, not llama"
    if len(header.parts) > 1:
        return "it lies in several files"
    try:
        shape, expected = _shape(header, 0), _expected(header)
    except TypeError:
        return "its layers differ"
    reason = _unknown(header, expected) or _misshapen(header, shape, expected)
    return reason or ("" if _library() else "no C compiler here can build it")


def _expected(header: gguf.Header) -> dict[str, tuple[int, ...]]:
    """The tensors that native.c takes, in its order, and their shapes."""
    s, vocabulary = _shape(header, 0), _vocabulary(header)
    queries, keys, norm = s.heads * s.head, s.groups * s.head, (s.width,)
    found = {"token_embd": (vocabulary, s.width), "output_norm": norm, "output": (vocabulary, s.width)}
    layer = {"attn_norm": norm, "attn_q": (queries, s.width), "attn_k": (keys, s.width), "attn_v": (keys, s.width)}
    layer |= {"attn_output": (s.width, queries), "ffn_norm": norm}
    layer |= {"ffn_gate": (s.inner, s.width), "ffn_up": (s.inner, s.width), "ffn_down": (s.width, s.inner)}
    for i in range(s.layers):
        found |= {f"blk.{i}.{part}": shape for part, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in found.items()}


def _unknown(header: gguf.Header, expected: Mapping[str, tuple[int, ...]]) -> str:
    """What native.c does not know of a file."""
    said = {key.removeprefix("llama.") for key in header.metadata if key.startswith("llama.")}
    there = {t.name for t in header.tensors}
    if strange := said - KNOWN | there - expected.keys():
        return f"it has {min(strange)}, which is not known here"
    if missing := expected.keys() - there - {"output.weight"}:
        return f"it lacks {min(missing)}"
    odd = (t.name for t in header.tensors if t.type not in (NORMS if t.name.endswith("norm.weight") else MATRICES))
    return f"{name} is neither Q4_0, Q4_1 nor Q8_0" if (name := next(odd, "")) else ""


def _misshapen(header: gguf.Header, s: _Shape, expected: Mapping[str, tuple[int, ...]]) -> str:
    """What of the model's shape native.c cannot do."""
    turned, value = header.get("rope.dimension_count", s.head), header.get("attention.value_length", s.head)
    if not turned == value == s.head or s.head % GROUP or s.heads % s.groups or s.heads // s.groups * s.head % 32:
        return f"its {s.heads} heads in {s.groups} groups are {s.head} wide, {turned} of it turned"
    if wrong := [n for n in (s.width, s.heads * s.head, s.inner) if n % 32]:
        return f"it is {wrong[0]} wide, not a multiple of 32"
    return next((f"{t.name} has the shape {t.shape}" for t in header.tensors if t.shape != expected[t.name]), "")


def _vocabulary(header: gguf.Header) -> int:
    return next((t.shape[0] for t in header.tensors if t.name == "token_embd.weight"), 0)


def _shape(header: gguf.Header, cells: int) -> _Shape:
    """cells: rounded up to whole groups."""
    get = header.get
    width, layers, inner = get("embedding_length"), get("block_count"), get("feed_forward_length")
    heads = get("attention.head_count")
    groups, head = get("attention.head_count_kv", heads), get("attention.key_length", width // heads)
    epsilon, base = get("attention.layer_norm_rms_epsilon", 1e-5), get("rope.freq_base", 10_000.0)
    return _Shape(width, layers, heads, groups, head, inner, -(-cells // GROUP) * GROUP, epsilon, base)


class Native:
    """A loaded model and its cache: `cells` tokens, each of which sees its parent and what that sees."""

    cores = 0  # that nobody else computes on: on one more than there are threads the caller waits, its caches its own

    def __init__(self, path: Path, cells: int, vocabulary: int | str = "auto", role: str = "draft") -> None:
        """vocabulary: how many tokens a draft may propose, see `duochat.models.trim`. The file must fit, see `unfit`.

        role: "draft" or "target", for people. A row is the same to the bit however many nodes are decoded at once.
        """
        header, self._library = gguf.read(path), _library()
        shape = _shape(header, cells)
        need = 3 * path.stat().st_size + 4 * shape.cells * shape.layers * shape.groups * shape.head
        require_memory(need, f"The {role} model {path}", f"choose a smaller {role} or a shorter context_length")
        self.kernels, self.vocabulary = self._library.path().decode(), _vocabulary(header)
        self._names = kept(header, vocabulary) if role == "draft" else None
        self._lane = self._load(header, shape, self._names)
        if not self._lane:
            raise DuoChatError(f"The {role} model {path} does not fit into memory: choose a smaller {role}.")
        self.close = weakref.finalize(self, self._library.discard, self._lane)
        self._stop = self._library.stop(self._lane)
        self._nodes, self._choosing = (ctypes.c_int32 * (5 * cells))(), ctypes.c_double()
        self._room(0)

    def _load(self, header: gguf.Header, shape: _Shape, names: np.ndarray | None) -> int | None:
        """native.c's `load`: it keeps nothing of the file but the embedding, which is kept here."""
        data = np.fromfile(header.path, np.uint8)
        found = {t.name: t for t in header.tensors}
        found.setdefault("output.weight", found["token_embd.weight"])
        first = found["token_embd.weight"]
        self._embedding = data[first.offset : first.offset + first.size].copy()
        ordered = [found[name] for name in _expected(header)]
        tensors = (_Tensor * len(ordered))()
        for place, t in zip(tensors, ordered, strict=True):
            place.data, place.type = data.ctypes.data + t.offset, t.type
            place.rows, place.cols = (1, *t.shape)[-2:]
        tensors[0].data = self._embedding.ctypes.data
        rows, pointer = (self.vocabulary, None) if names is None else (len(names), names.ctypes.data)
        return self._library.load(ctypes.byref(shape), tensors, pointer, rows)

    def set_threads(self, threads: int, reading: int = 0) -> None:
        """See `Drafter.set_threads`: what its users then ask for."""
        self.threads, self.reading = threads, reading or threads

    def interrupt(self) -> None:
        """From any thread: end the running `decode` early, and all later ones until `arm`."""
        self._stop[0] = 1

    def arm(self) -> None:
        """Make ready for an `interrupt` to come; an earlier one is forgotten."""
        self._stop[0] = 0

    def move(self, source: int, target: int) -> None:
        """Let what one cell holds stand in another one too, behind the cell before that."""
        if source != target:
            self._library.move(self._lane, source, target)

    def logits(self, nodes: Sequence[tuple[int, int, int, int, int]], threads: int) -> list[np.ndarray]:
        """Decode at most MOST nodes, as `decode`; the logits of the wanted ones, valid until the next call."""
        wanted = self._tell(nodes)
        self._library.run(self._lane, threads, 0, self._nodes, len(nodes), *[None] * 5, ctypes.byref(self._choosing))
        rows = (self._library.logits(self._lane, i) for i in range(wanted))
        return [np.ctypeslib.as_array(row, (self.vocabulary,)) for row in rows]

    def _tell(self, nodes: Sequence[tuple[int, int, int, int, int]]) -> int:
        """Set the nodes down for C; returns how many are wanted."""
        for i, node in enumerate(nodes):
            self._nodes[5 * i : 5 * i + 5] = node
            if not 0 <= node[0] < self.vocabulary:
                raise DuoChatError(UNKNOWN)
        return sum(node[4] for node in nodes)

    def _room(self, candidates: int) -> None:
        """See that what C answers has room for so many."""
        self._tokens, self._probs = (ctypes.c_int32 * candidates)(), (ctypes.c_float * candidates)()
        self._found = (ctypes.c_int32 * candidates)()

    def decode(
        self, nodes: Sequence[tuple[int, int, int, int, int]], threads: int, choice: Choice,
        changes: Changes | None = None,
    ) -> tuple[list[Candidates], float]:  # fmt: skip
        """nodes: (token, position, cell, parent's cell or -1, 1 if its candidates are wanted), parents first. changes:
        of the wanted ones' logits.

        Returns the candidates of the wanted ones, and the seconds spent choosing. Raises Cancelled after an
        `interrupt`, and DuoChatError for a token that the model does not know.
        """
        wanted, count = self._tell(nodes), choice.count
        if wanted * count > len(self._tokens):
            self._room(wanted * count)
        if changes is not None:
            changes = changes.among(self._names, self.vocabulary if self._names is None else len(self._names))
            made = _Changes(len(changes.tokens), *(None if part is None else part.ctypes.data for part in changes))
        out = (self._tokens, self._probs, self._found, ctypes.byref(self._choosing))
        told = (self._nodes, len(nodes), choice, changes and ctypes.byref(made), *out)
        if self._library.run(self._lane, threads, threads < self.cores, *told) < len(nodes):
            raise Cancelled
        spans = [(i * count, i * count + found) for i, found in enumerate(self._found[:wanted])]
        candidates = [Candidates(tuple(self._tokens[a:b]), tuple(self._probs[a:b])) for a, b in spans]
        return candidates, self._choosing.value
