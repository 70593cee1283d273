"""TorchTarget: the target lane as the decoders see it (`duochat.engine.lanes.Target`)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from duochat.config import AUTO, Settings
from duochat.engine.lanes import Answer, Cancelled, Edge, Reading, Stopped, Target
from duochat.engine.penalties import Changes, changes, paths
from duochat.engine.pytorch import few_rows, loading, memory
from duochat.engine.pytorch.attention import EXACT, NAME
from duochat.engine.pytorch.forward import Forward
from duochat.engine.pytorch.memo import Memo
from duochat.engine.pytorch.rows import MOST_ROWS, Rows, Shape, Shapes
from duochat.engine.sampling import Sampling
from duochat.models.folder import recipe, usable

REPRODUCIBLE_WIDTH = 16  # of every forward then: a product of another width may round otherwise
PROMPT = 24  # tokens to read from which on a forward on a CPU is no round any more, but the reading of a prompt


class TorchTarget(Target):
    """A causal LM that samples its own token at every node of a tree. Not safe for several threads."""

    def __init__(
        self,
        model: torch.nn.Module,
        context_length: int,
        compile: bool = False,
        graphs: bool = False,
        reproducible: bool = False,
    ) -> None:
        """compile, graphs: see `Forward.settle`. reproducible: the same tokens whatever the shape of the forwards."""
        capacity = -(-(context_length + MOST_ROWS) // 32) * 32
        self.context_length = context_length
        self.exact = reproducible or model.dtype == torch.float32
        self._reading = 0  # threads for reading prompts on a CPU; 0 = as many as for rounds
        self.facts: dict[str, Any] = {}  # what loading adds to `describe`
        self.eos = loading.end_tokens(model)
        self.vocabulary = model.config.get_text_config().vocab_size
        self._memo = Memo(capacity)
        fixed = loading.fix_rotations(model, context_length)
        self._forward = Forward(model, capacity, EXACT if reproducible else NAME)
        self._forward.settle(compile, graphs)
        if fixed:
            self._forward.notes.append(f"Positions ({fixed}) are those of texts of {context_length} tokens.")
        self._shapes = Shapes(capacity, self._forward.graphs, REPRODUCIBLE_WIDTH if reproducible else None)
        self.device: torch.device = self._forward.device
        self.shares_cores = self.device.type == "cpu"
        self.most_nodes = self._shapes.most_nodes

    @classmethod
    def load(
        cls,
        path: Path,
        device: str = AUTO,
        dtype: str = AUTO,
        context_length: int = Settings.context_length,
        compile: bool = True,
        reproducible: bool = False,
        threads: int | str = AUTO,
    ) -> TorchTarget:
        """From a folder as transformers writes it, or a GGUF file; the options are as in `Settings`.

        Raises DuoChatError.
        """
        place = loading.pick_device(device)
        kind = loading.pick_dtype(dtype, place)
        if place.type != "cpu":
            torch.set_num_threads(1)  # OpenMP pools that together outnumber the cores sleep at barriers
        elif threads != AUTO:
            torch.set_num_threads(threads)
        config = loading.read_config(path)
        made_for = getattr(config.get_text_config(), "max_position_embeddings", None) or context_length
        length, cuda = min(context_length, made_for), place.type == "cuda"
        with usable(path, config.model_type), memory.Need.of(config, kind).held(length, place):
            model, told = loading.read(path, place, kind), recipe(path).get("told")
            products = "few rows" if compile and cuda and few_rows.swap(model) else "torch"
            made = cls(model, length, compile and cuda, cuda, reproducible)
        made.threads = torch.get_num_threads() if made.shares_cores else 0
        made.facts = {"target_products": products} | ({"target": told} if told else {})
        return made

    def set_threads(self, threads: int, reading: int = 0) -> None:
        """See `lanes.Target.set_threads`."""
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        self._reading = reading

    def _begin(
        self, context: Sequence[int], tree: Sequence[Edge], sampling: Sampling, cancelled: Stopped, progress: Reading
    ) -> Callable[[], Answer]:
        done = self._memo.match(context)
        reading = self._reading if len(context) - done >= PROMPT else 0
        with memory.refused(self.device), _threads(reading):
            done = self._prefill(context, done, len(tree), cancelled, progress)
            made = changes(context, paths(tree), sampling) if sampling.penalised else None
            shape = self._send(list(context[done:]), tree, sampling, made)
        return partial(self._answer, shape, 1 + len(tree))

    def _answer(self, shape: Shape, count: int) -> Answer:
        with memory.refused(self.device):
            return self._forward.answer(shape, count)

    def _prefill(self, context: Sequence[int], done: int, nodes: int, cancelled: Stopped, progress: Reading) -> int:
        """Read the context in chunks until the rest fits into one forward with the tree; returns the tokens read."""
        while len(context) - done + nodes > self._shapes.room(nodes):
            if cancelled():
                raise Cancelled
            chunk = list(context[done : min(done + self._shapes.room(0), len(context) - 1)])
            rows = self._rows(chunk, ())
            self._forward.fill(rows, self._fit(rows), self._memo)
            self._memo.commit(chunk, rows.slots)
            done += len(chunk)
            if progress:
                progress(done, len(context))
        return done

    def _send(self, tail: list[int], tree: Sequence[Edge], sampling: Sampling, made: Changes | None) -> Shape:
        """Begin the last forward of a round, and note what the cache will hold."""
        rows = self._rows(tail, tree)
        shape = self._fit(rows)
        self._forward.begin(rows, shape, self._memo, sampling, made)
        self._memo.commit(tail, rows.slots[: len(tail)])
        self._memo.remember(tree, rows.slots[len(tail) :])
        return shape

    def _rows(self, tail: Sequence[int], tree: Sequence[Edge]) -> Rows:
        slots = self._memo.free(len(tail) + len(tree))
        return Rows(tail, tree, len(self._memo.tokens), slots, self.context_length - 1)

    def _fit(self, rows: Rows) -> Shape:
        return self._shapes.fit(len(rows), len(rows.tree), max(self._memo.highest, max(rows.slots)))

    def describe(self) -> dict[str, Any]:
        """The hardware part of a report."""
        model = self._forward.model
        return {
            "target_backend": "torch",
            "target_device": loading.device_name(self._forward.device),
            "target_dtype": str(model.dtype).removeprefix("torch."),
            "target_weight_bytes": sum(weights.numel() * weights.element_size() for weights in model.parameters()),
            "target_widths": list(self._shapes.widths) if self._shapes.padded else "any",
            "target_attention": model.config._attn_implementation,
            "target_compiled_layers": self._forward.compiled,
            "target_graphs": self._forward.graphs,
            "target_exact": self.exact,
            "target_notes": list(self._forward.notes),
            **self.facts,
        }

    def close(self) -> None:
        """See `lanes.Target.close`."""
        del self._forward
        gc.unfreeze()  # the engine freezes what it has loaded
        gc.collect()
        gc.freeze()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many inside, 0: as many as before. To read a prompt is bound by arithmetic, a round by its memory."""
    usual = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count:
            torch.set_num_threads(usual)
