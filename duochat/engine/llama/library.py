"""llama.cpp on the CPU: one model, one context, batches by hand. The only module that knows its C interface.

Faults of the file or the machine become DuoChatError; no byte of GPU memory is taken, whatever the build can do.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import llama_cpp
import numpy as np
import psutil

from duochat import DuoChatError
from duochat.engine.costs import available_cores
from duochat.engine.lanes import Cancelled, never
from duochat.engine.llama import probe
from duochat.models.trim import Trimmed, trim

SEQUENCES = 128  # branches held at a time; llama.cpp reserves a row of logits for each
BATCH = 512  # tokens of one decode at most
OUTPUTS = SEQUENCES  # logit rows of one decode; llama.cpp aborts when fewer than sequences
LONG = 16  # a batch of more tokens asks `cancelled` while it runs; a shorter one is cut by `interrupt` alone, since the
#            asking, 45 times in a two-layer model, costs 0.1 ms of the 0.6 to 4 ms that such a batch takes
MANY_CORES = 8  # from here on the attention is one fused step: fewer barriers between threads, but slower arithmetic

_FAULTS = {
    1: "The conversation is longer than the draft's cache: raise context_length.",
    -1: "The target uses a token that the draft does not know: choose a draft with the same vocabulary.",
}


class Llama:
    """A loaded model and its KV cache: `cells` tokens, shared by SEQUENCES sequences."""

    def __init__(
        self,
        path: Path,
        cells: int,
        threads: int,
        vocabulary: int | str = "auto",
        extra_buffers: bool | None = None,
    ) -> None:
        """vocabulary: how many tokens the model may propose, see `duochat.models.trim`.

        extra_buffers: lay weights out for special kernels; None: if they live on this CPU.
        Raises DuoChatError when the file is missing or no usable model, or memory is short.
        """
        self.path, self.notice = path, ""
        if extra_buffers is None:
            extra_buffers, self.notice = probe.extra_buffers()
        _check_file(path)
        trimmed = trim(path, vocabulary)
        model = _load_trimmed(trimmed, path, vocabulary, extra_buffers) if trimmed else _load_model(path, extra_buffers)
        try:
            self._context = _new_context(model, path, cells, threads)
        except DuoChatError:
            llama_cpp.llama_model_free(model)
            raise
        self.close = weakref.finalize(self, _free, self._context, model)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = _Batch(trimmed.embedding if trimmed else None)
        self._logits, self._address = np.empty((0, 0), np.float32), 0  # a view of llama.cpp's buffer, which stays
        self._threads = self._reading = threads
        self._stop = ctypes.create_string_buffer(2)
        self._abort: Callable | None = None
        self.names = trimmed.tokens if trimmed else None  # the token of each logit; None = its index
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def set_threads(self, threads: int, reading: int = 0) -> None:
        """reading: for prompts, which give more threads something to do; 0 = as many."""
        self._threads, self._reading = threads, reading or threads
        self._use(threads)

    def _use(self, threads: int) -> None:
        llama_cpp.llama_set_n_threads(self._context, threads, threads)

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """Let the sequence `target` see the cells of `source` at positions start ... end - 1; no data moves."""
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, start, end)

    def drop(self, seq: int, start: int) -> None:
        """End the sequence before position `start`; cells that no sequence sees are free."""
        llama_cpp.llama_memory_seq_rm(self._memory, seq, start, -1)

    def arm(self) -> None:
        """Make ready for an `interrupt` to come; an earlier one is forgotten."""
        self._stop[0] = 0

    def interrupt(self) -> None:
        """Abort the decode that is running now, from another thread."""
        self._stop[0] = 1

    def read(self, tokens: Sequence[int], start: int, seq: int, cancelled: Callable[[], bool]) -> None:
        """`decode` a part of a prompt at the positions from `start` on, without logits."""
        self._use(self._reading)
        try:
            self.decode(tokens, range(start, start + len(tokens)), [(seq,)] * len(tokens), (), cancelled)
        finally:
            self._use(self._threads)

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        outputs: Iterable[int] = (),
        cancelled: Callable[[], bool] = never,
    ) -> None:
        """Add tokens to the cache, each to all of its sequences, and compute the logits of the rows in `outputs`.

        Raises Cancelled after `interrupt`, and when `cancelled` says so at a step of a LONG batch's graph.
        After a fault the caller drops what may have been half done.
        """
        try:
            self._batch.fill(tokens, positions, sequences, outputs)
        except IndexError:
            raise DuoChatError(_FAULTS[-1]) from None
        self._abort_when(cancelled if len(tokens) > LONG else never)
        code = llama_cpp.llama_decode(self._context, self._batch.struct)
        if code == 2:
            raise Cancelled
        if code:
            raise DuoChatError(_FAULTS.get(code, f"The draft model {self.path.name} failed: choose another draft."))

    def _abort_when(self, cancelled: Callable[[], bool]) -> None:
        """Set the abort callback, if it changes: llama.cpp logs each call, and that costs as much as the rest."""
        if cancelled is never and self._abort is _flag_set():
            return
        self._abort = _flag_set()
        if cancelled is not never:
            self._abort = llama_cpp.ggml_abort_callback(lambda _: self._stop[0] != b"\0" or cancelled())
        llama_cpp.llama_set_abort_callback(self._context, self._abort, ctypes.addressof(self._stop))

    def logits(self, rows: int) -> np.ndarray:
        """A view of the last decode's logits, rows x `vocabulary`, valid until the next one; see `names`."""
        address = ctypes.addressof(llama_cpp.llama_get_logits(self._context).contents)
        if address != self._address:
            size = OUTPUTS * self.vocabulary
            self._logits = np.ctypeslib.as_array((ctypes.c_float * size).from_address(address)).reshape(OUTPUTS, -1)
            self._address = address
        return self._logits[:rows]


class _Batch:
    """A llama_batch over arrays of our own. Most batches are of a token or two: single assignments are quickest.

    With an embedding (float16, vocabulary x width) the model gets its rows in place of token ids.
    """

    def __init__(self, embedding: np.ndarray | None) -> None:
        ints = ctypes.c_int32 * BATCH
        self.tokens, self.positions, self.counts = ints(), ints(), ints()
        self.sequences = [(ctypes.c_int32 * SEQUENCES)() for _ in range(BATCH)]
        rows = (ctypes.POINTER(ctypes.c_int32) * BATCH)(*self.sequences)
        self.outputs = (ctypes.c_int8 * BATCH)()
        self.embedding, self.vectors, pointer = embedding, None, None
        if embedding is not None:
            self.vectors = np.empty((BATCH, embedding.shape[1]), np.float32)
            pointer = self.vectors.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        ids = self.tokens if embedding is None else None
        self.struct = llama_cpp.llama_batch(0, ids, pointer, self.positions, self.counts, rows, self.outputs)

    def fill(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        outputs: Iterable[int],
    ) -> None:
        self.struct.n_tokens = len(tokens)
        for i, (token, position, own) in enumerate(zip(tokens, positions, sequences, strict=True)):
            if self.embedding is None:
                self.tokens[i] = token
            else:
                self.vectors[i] = self.embedding[token]
            self.positions[i], self.counts[i], self.outputs[i] = position, len(own), 0
            self.sequences[i][: len(own)] = own
        for row in outputs:
            self.outputs[row] = 1


@cache
def _flag_set() -> Callable:
    """An abort callback without Python in it: strlen of a one-letter buffer, 1 when the letter is set."""
    library = ctypes.CDLL("msvcrt" if os.name == "nt" else None)
    return ctypes.cast(library.strlen, llama_cpp.ggml_abort_callback)


_errors: deque[str] = deque(maxlen=8)


@llama_cpp.llama_log_callback
def _keep_errors(level: int, text: bytes, _: object) -> None:
    if level == 4:
        _errors.append(text.decode("utf-8", "replace").strip())


@cache
def _start() -> None:
    llama_cpp.llama_log_set(_keep_errors, None)
    llama_cpp.llama_backend_init()


def _load_model(path: Path, extra_buffers: bool) -> int:
    _start()
    _errors.clear()
    params = llama_cpp.llama_model_default_params()
    no_devices = (ctypes.c_void_p * 1)(None)
    params.devices = ctypes.cast(no_devices, ctypes.c_void_p)
    params.n_gpu_layers = 0
    params.use_extra_bufts = extra_buffers
    _require_memory(path.stat().st_size, f"The draft model {path}", "choose a smaller draft")
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise DuoChatError(f"The draft model {path} cannot be loaded ({_reason()}): fetch it again or choose another.")
    if llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model):
        llama_cpp.llama_model_free(model)
        raise DuoChatError(f"The draft model {path} is recurrent and cannot branch: choose a plain transformer.")
    return model


def _load_trimmed(trimmed: Trimmed, path: Path, vocabulary: int | str, extra_buffers: bool) -> int:
    """The cut copy of `path` in the cache; a damaged one is made anew."""
    try:
        return _load_model(trimmed.path, extra_buffers)
    except DuoChatError:
        trimmed.path.unlink()
        trim(path, vocabulary)
        return _load_model(trimmed.path, extra_buffers)


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise DuoChatError(f"The draft model {path} cannot be read ({error.strerror}): check the path.") from error
    if magic != b"GGUF":
        raise DuoChatError(f"The draft model {path} is not a GGUF file: give a model in llama.cpp's format.")


def _require_memory(need: int, what: str, remedy: str) -> None:
    """Refuse here what the system would grant and then kill us for."""
    free = psutil.virtual_memory().available
    if need > free:
        raise DuoChatError(f"{what} needs {need / 2**30:.1f} GiB of memory, {free / 2**30:.1f} are free: {remedy}.")


def _cache_size(model: int, cells: int) -> int:
    """Bytes of the KV cache in 16 bits, and of its book-keeping."""
    width = llama_cpp.llama_model_n_embd(model) // llama_cpp.llama_model_n_head(model)
    values = 2 * width * llama_cpp.llama_model_n_head_kv(model) * llama_cpp.llama_model_n_layer(model)
    return cells * (2 * values + 64)


def _new_context(model: int, path: Path, cells: int, threads: int) -> int:
    _require_memory(_cache_size(model, cells), f"A draft cache for {cells} tokens", "choose a shorter context_length")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = cells
    params.n_batch, params.n_ubatch = BATCH, BATCH // 4
    params.n_seq_max = SEQUENCES
    params.n_outputs_max = OUTPUTS
    params.n_outputs_max_per_seq = 0
    params.n_threads = params.n_threads_batch = threads
    fused = available_cores() >= MANY_CORES
    params.flash_attn_type = (
        llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED if fused else llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    params.kv_unified = params.swa_full = params.no_perf = True
    params.offload_kqv = params.op_offload = False
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise DuoChatError(f"The draft model {path} cannot be set up ({_reason()}): choose another, or close programs.")
    return context


def _reason() -> str:
    return next((line.split(": ", 1)[-1] for line in _errors), "llama.cpp gave no reason")


def _free(context: int, model: int) -> None:
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
