"""LlamaTarget: a GGUF file as the target lane. llama.cpp verifies a tree in one forward, on whatever it can compute on.

Where all layers lie on the CPU, and rows of different forwards agree to the bit (`widths`), every decoder gives the
same text: the attention is one fused step that sums over cells in the order of positions, and no forward is wider than
rows agree. Its values are kept in another type than its keys, since llama.cpp splits and tiles the sum where both are
the same. (Where only few rows agree, a prompt's cells depend on the pieces that it was read in: decoders are then equal
after one history.) On other devices near ties may fall otherwise in forwards of another width; `reproducible` gives all
one width, but the sums over a cache that has grown past a multiple of 256 cells between them may still differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp

from duochat.config import AUTO, Settings
from duochat.engine.choosing import answer, kernel
from duochat.engine.lanes import Answer, Cancelled, Edge, Reading, Stopped, Target, children
from duochat.engine.llama import loading, widths
from duochat.engine.llama.library import BATCH, Llama, Options
from duochat.engine.llama.sequences import Line, Sequences
from duochat.engine.sampling import Sampling
from duochat.engine.tree_cache import Entry
from duochat.models import gguf

MOST_NODES = 63
REPRODUCIBLE_WIDTH = 8
FILLS = (4, 6, 8, 16, 32, MOST_NODES + 1)
FILLERS = 32  # sequences for rows that fill a GPU's forward up
CHUNK = BATCH - MOST_NODES - REPRODUCIBLE_WIDTH  # prompt tokens of one forward: a tree has room beside the last ones
INEXACT = "rows of wider forwards round otherwise here: decoders give the same text up to near ties"
RECURRENT = "a recurrent model's state cannot be taken back: it decodes plainly, nothing is drafted"
SPLIT = ("f16", "f32")  # types of keys and values over which attention on the CPU is split or tiled


class LlamaTarget(Target):
    """A GGUF model that samples its own token at every node of a tree. Not safe for several threads."""

    def __init__(self, llama: Llama, context_length: int, reproducible: bool = False) -> None:
        """reproducible: the same tokens whatever the shape of the forwards, at the cost of speed where rows differ."""
        self._llama, self.context_length = llama, context_length
        self.vocabulary = llama.vocabulary
        self.eos = _ends(llama)
        self.device = ""  # for people
        layers = llama_cpp.llama_model_n_layer(llama.model)  # the output is one more
        self.shares_cores = llama.options.gpu_layers <= layers or bool(llama.options.tensor_overrides)
        self.exact, self._least, most = _rows(llama, reproducible)
        llama.least = self._least
        self.fills = () if self.shares_cores or reproducible or most == 1 else FILLS
        kind = Line if llama.recurrent else Sequences
        self._cache = kind(llama, CHUNK, MOST_NODES + 1, ordered=self.exact, later=not self.shares_cores)
        self.notes = [RECURRENT] if llama.recurrent else [] if self.exact else [INEXACT]
        self.most_nodes = min(most - 1, MOST_NODES)
        self._tail = None if most == widths.ANY else most

    @classmethod
    def load(
        cls,
        path: Path,
        context_length: int = Settings.context_length,
        threads: int = 1,
        reproducible: bool = False,
        gpu_layers: int | str = AUTO,
        tensor_overrides: Sequence[str] = (),
        devices: Sequence[str] = (),
        split: str = "",
        flash_attention: bool | str = AUTO,
        cache_type: str = AUTO,
        rpc: Sequence[str] = (),
    ) -> LlamaTarget:
        """From a GGUF file, the first one of a split model; the rest is as in `Settings`. Raises DuoChatError.

        context_length: tokens at most; a model that was trained on fewer gets those.
        """
        path = Path(path)
        kernel()
        loading.check_file(path, "target")
        context_length = min(context_length, gguf.read(path).get("context_length", context_length))
        cells = context_length + 2 * MOST_NODES + REPRODUCIBLE_WIDTH  # two trees: `Sequences`, later
        found = loading.place(path, cells, gpu_layers, devices, rpc)
        fillers = FILLERS if found.gpu_layers else 1
        options = Options(
            role="target",
            sequences=MOST_NODES + 2 + fillers,
            fillers=fillers,
            unit=BATCH,
            fused=(None if flash_attention == AUTO else flash_attention) if found.gpu_layers else True,
            keys="f16" if cache_type == AUTO else cache_type,
            values=("f16" if found.gpu_layers else "bf16") if cache_type == AUTO else cache_type,
            gpu_layers=found.gpu_layers,
            devices=tuple(devices),
            split=tuple(float(share) for share in split.split(",") if share),
            tensor_overrides=tuple(tensor_overrides),
        )
        target = cls(Llama(path, cells, threads, options=options), context_length, reproducible)
        target.threads = threads
        if not target.shares_cores:  # embeddings are all that is left to them, and the draft has the cores
            target.set_threads(1)
        target.device = found.device
        target.notes += [found.note] if found.note else []
        return target

    def _begin(
        self, context: Sequence[int], tree: Sequence[Edge], sampling: Sampling, cancelled: Stopped, progress: Reading
    ) -> Callable[[], Answer]:
        """See `lanes.Target`. llama.cpp comes back before a GPU has done its work, and after the CPU has."""
        self._llama.arm()
        if cancelled():
            raise Cancelled
        tail = None if self._tail is None else self._tail - 1 - len(tree)
        root = self._cache.follow(list(context), cancelled, progress, anew=True, tail=tail)
        entries = self._grow(root, tree)
        cached = root.position == len(self._cache.tokens)  # all before it: no forward that reads a prompt is filled up
        self._llama.least = max(self._least, self.fill if cached else 0)
        rows = self._cache.decode(cancelled)
        place = {entry: row for row, entry in enumerate(rows)}

        def told() -> Answer:
            logits = self._llama.logits(len(rows))  # once the device has done its work
            return answer(lambda i: logits[place[entries[i]]], context, tree, sampling, self.every)

        return told

    def _grow(self, root: Entry, tree: Sequence[Edge]) -> list[Entry]:
        """The entry of the root and of each node. The likeliest branch, whose nodes come first, takes the first cells:
        it leaves no holes when it becomes the trunk."""
        below, entries = children(tree), [root] * (len(tree) + 1)
        stack = below[0][::-1]
        while stack:
            node = stack.pop()
            token, parent = tree[node]
            entries[node + 1] = self._cache.grow(entries[parent + 1], (token,))
            stack += below[node + 1][::-1]
        return entries

    def set_threads(self, threads: int, reading: int = 0) -> None:
        """See `Target.set_threads`."""
        self._llama.set_threads(threads, reading)

    def describe(self) -> dict[str, Any]:
        """The hardware part of a report."""
        options = self._llama.options
        return {
            "target_backend": "llama.cpp",
            "target_device": self.device,
            "target_dtype": gguf.read(self._llama.path).quantization,
            "target_file": self._llama.path.name,
            "target_weight_bytes": llama_cpp.llama_model_size(self._llama.model),
            "target_parameters": llama_cpp.llama_model_n_params(self._llama.model),
            "target_gpu_layers": options.gpu_layers,
            "target_cache": f"{options.keys}/{options.values}",
            "target_widths": "any" if self._tail is None else [self._least, self.most_nodes + 1],
            "target_exact": self.exact,
            "target_notice": self._llama.notice,
            "target_notes": list(self.notes),
        }

    def close(self) -> None:
        """See `lanes.Target.close`."""
        self._llama.close()


def _rows(llama: Llama, reproducible: bool) -> tuple[bool, int, int]:
    """Whether all decoders give the same text, and the fewest and the most rows of a forward."""
    options = llama.options
    if llama.recurrent:
        return True, 1, 1
    if options.gpu_layers or (options.keys == options.values and options.keys in SPLIT):
        return False, *((REPRODUCIBLE_WIDTH,) * 2 if reproducible else (1, widths.ANY))
    least, most = widths.agreeing(llama)
    exact = reproducible or (least == 1 and most > 1)
    return exact, *((least, most) if exact else (1, widths.ANY))


def _ends(llama: Llama) -> frozenset[int]:
    """All tokens that the file says end an answer: its end of text, of turn and of message."""
    vocabulary = llama_cpp.llama_model_get_vocab(llama.model)
    if llama_cpp.llama_vocab_type(vocabulary) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
        return frozenset()
    return frozenset(t for t in range(llama.vocabulary) if llama_cpp.llama_vocab_is_eog(vocabulary, t))
