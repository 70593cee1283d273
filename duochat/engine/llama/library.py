"""llama.cpp: one model, one context, batches by hand. With `loading` and `devices` all that knows its C interface.

Faults of the file or the machine become DuoChatError.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import llama_cpp
import numpy as np

from duochat import DuoChatError
from duochat.engine.lanes import Cancelled, never
from duochat.engine.llama import loading, probe
from duochat.engine.llama.loading import BATCH, Options
from duochat.engine.machine import available_cores

# A batch of more tokens is a prompt's: it asks `cancelled` while it runs. A shorter one is cut by `interrupt` alone:
# asking, 45 times in a two-layer model, costs 0.1 ms of the 0.6 to 4 ms that such a batch takes.
LONG = 16
FEW = 64  # cells that are shared before the other lane can have the interpreter
MANY_CORES = 8  # from here on the attention is one fused step: fewer barriers between threads, but slower arithmetic


class Llama:
    """A loaded model and its KV cache: `cells` tokens, shared by `sequences`."""

    def __init__(
        self,
        path: Path,
        cells: int,
        threads: int,
        options: Options | None = None,
    ) -> None:
        """options: None for a draft's.

        Raises DuoChatError when the file is missing or no usable model, or memory is short.
        """
        options = options or replace(Options(), fused=available_cores() >= MANY_CORES)
        self.notice = ""
        if options.extra_buffers is None:
            extra, self.notice = probe.extra_buffers()
            options = replace(options, extra_buffers=extra)
        self.path, self.options = path, options
        self.sequences = options.sequences - options.fillers
        self.least = 1  # rows of a forward, and of sequences if there are so many to fill it up
        loading.check_file(path, options.role)
        self.model = loading.load_model(path, options)
        try:
            if self.recurrent and options.role == "draft":
                raise DuoChatError(f"The draft model {path} is recurrent and cannot branch: choose another kind.")
            self._context = loading.new_context(self.model, path, cells, threads, options)
        except DuoChatError:
            llama_cpp.llama_model_free(self.model)
            raise
        self.close = weakref.finalize(self, _free, self._context, self.model)
        learned = llama_cpp.llama_model_rope_type(self.model) == llama_cpp.LLAMA_ROPE_TYPE_NONE
        # Where rows that fill a forward up stand: behind all others, so that one call drops all of them, if positions
        # may be that large.
        self._far = 0 if learned else cells
        self._fillers = range(self.sequences, options.sequences)[: 1 if learned else None]
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = _Batch(options.sequences)
        self._logits, self._address = np.empty((0, 0), np.float32), 0  # a view of llama.cpp's buffer, which stays
        self._threads = self._reading = self._used = threads
        self._stop = ctypes.create_string_buffer(2)
        self._abort: Callable | None = None
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    @property
    def recurrent(self) -> bool:
        """Whether a token changes a state that cannot be taken back: such a model cannot branch."""
        return bool(llama_cpp.llama_model_is_recurrent(self.model) or llama_cpp.llama_model_is_hybrid(self.model))

    def set_threads(self, threads: int, reading: int = 0) -> None:
        """reading: for LONG batches, which give more threads something to do; 0 = as many."""
        self._threads, self._reading = threads, reading or threads

    def _use(self, threads: int) -> None:
        if threads != self._used:
            llama_cpp.llama_set_n_threads(self._context, threads, threads)
            self._used = threads

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """Let the sequence `target` see the cells of `source` at positions start ... end - 1; no data moves."""
        call = _quick("llama_memory_seq_cp") if end - start < FEW else llama_cpp.llama_memory_seq_cp
        call(self._memory, source, target, start, end)

    def drop(self, seq: int, start: int) -> None:
        """End the sequence before position `start`; cells that no sequence sees are free."""
        _quick("llama_memory_seq_rm")(self._memory, seq, start, -1)

    def arm(self) -> None:
        """Make ready for an `interrupt` to come; an earlier one is forgotten."""
        self._stop[0] = 0

    def interrupt(self) -> None:
        """Abort the decode that is running now, from another thread."""
        self._stop[0] = 1

    def decode(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        outputs: Sequence[int] = (),
        cancelled: Callable[[], bool] = never,
    ) -> None:
        """Add tokens to the cache, each to all of its sequences, and compute the logits of the rows in `outputs`.

        Raises Cancelled after `interrupt`, and when `cancelled` says so at a step of a LONG batch's graph.
        After a fault the caller drops what may have been half done.
        """
        pad = max(0, self.least - len(outputs or tokens))  # the last layer sees the rows with logits alone
        self._batch.fill(
            [*tokens, *[tokens[0]] * pad],
            [*positions, *range(self._far, self._far + pad)],
            [*sequences, *self._filling(pad, sequences)],
            [*outputs, *range(len(tokens), len(tokens) + pad)] if outputs else (),
        )
        long = len(tokens) > LONG
        self._use(self._reading if long else self._threads)
        self._abort_when(cancelled if long else never)
        code = llama_cpp.llama_decode(self._context, self._batch.struct)
        if pad:
            self.drop(-1 if self._far else self._fillers[0], self._far)
        if code == 2:
            raise Cancelled
        if code:
            raise self._fault(code)

    def _filling(self, pad: int, sequences: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """The sequences of the rows that fill a forward up: the first has as many as make `least` with all others."""
        if not pad:
            return []
        missing = self.least - len({seq for own in sequences for seq in own})
        return [self._fillers[: max(1, missing)], *[self._fillers[:1]] * (pad - 1)]

    def _fault(self, code: int) -> DuoChatError:
        role = self.options.role
        if code == 1:
            return DuoChatError(f"The conversation is longer than the {role}'s cache: raise context_length.")
        if code == -1 and role == "draft":
            return DuoChatError(
                "The target uses a token that the draft does not know: choose a draft with the same vocabulary."
            )
        return DuoChatError(f"The {role} model {self.path.name} failed: choose another {role}.")

    def _abort_when(self, cancelled: Callable[[], bool]) -> None:
        """Set the abort callback, if it changes: llama.cpp logs each call, and that costs as much as the rest."""
        if cancelled is never and self._abort is _flag_set():
            return
        self._abort = _flag_set()
        if cancelled is not never:
            self._abort = llama_cpp.ggml_abort_callback(lambda _: self._stop[0] != b"\0" or cancelled())
        llama_cpp.llama_set_abort_callback(self._context, self._abort, ctypes.addressof(self._stop))

    def logits(self, rows: int) -> np.ndarray:
        """A view of the last decode's logits, rows x `vocabulary`, valid until the next one."""
        address = ctypes.addressof(llama_cpp.llama_get_logits(self._context).contents)
        if address != self._address:
            buffer = (ctypes.c_float * (self.options.sequences * self.vocabulary)).from_address(address)
            self._logits = np.ctypeslib.as_array(buffer).reshape(-1, self.vocabulary)
            self._address = address
        return self._logits[:rows]


class _Batch:
    """A llama_batch over arrays of our own. Most batches are of a token or two: single assignments are quickest."""

    def __init__(self, sequences: int) -> None:
        ints = ctypes.c_int32 * BATCH
        self.tokens, self.positions, self.counts = ints(), ints(), ints()
        self.sequences = [(ctypes.c_int32 * sequences)() for _ in range(BATCH)]
        rows = (ctypes.POINTER(ctypes.c_int32) * BATCH)(*self.sequences)
        self.outputs = (ctypes.c_int8 * BATCH)()
        self.struct = llama_cpp.llama_batch(0, self.tokens, None, self.positions, self.counts, rows, self.outputs)

    def fill(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        outputs: Sequence[int],
    ) -> None:
        self.struct.n_tokens = len(tokens)
        for i, (token, position, own) in enumerate(zip(tokens, positions, sequences, strict=True)):
            self.tokens[i], self.positions[i], self.counts[i], self.outputs[i] = token, position, len(own), 0
            self.sequences[i][: len(own)] = own
        for row in outputs:
            self.outputs[row] = 1


@cache
def _quick(name: str) -> Callable:
    """A function of llama.cpp that keeps the interpreter's lock. It takes some microseconds in a usual cache: to give
    the lock away dozens of times a forward, and wait until the other lane gives it back, takes longer."""
    given = getattr(llama_cpp, name)
    found = getattr(ctypes.PyDLL(llama_cpp.llama_cpp._lib._name, handle=llama_cpp.llama_cpp._lib._handle), name)
    found.argtypes, found.restype = given.argtypes, given.restype
    return found


@cache
def _flag_set() -> Callable:
    """An abort callback without Python in it: strlen of a one-letter buffer, 1 when the letter is set."""
    library = ctypes.CDLL("msvcrt" if os.name == "nt" else None)
    return ctypes.cast(library.strlen, llama_cpp.ggml_abort_callback)


def _free(context: int, model: int) -> None:
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
