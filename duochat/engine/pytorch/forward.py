"""One forward on the device: packed integers in, sampled tokens and probabilities out.

On CUDA each shape is a graph, captured when first needed, that begins or ends with a small copy; elsewhere the same
functions are simply called. Nothing here looks at a tensor's value on the host until the answer is there.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from duochat.engine.lanes import Answer
from duochat.engine.pytorch import choose, fused, masks, tree_attention
from duochat.engine.pytorch.attention import NAME, SPLIT
from duochat.engine.pytorch.cache import SPARE, SlotCache
from duochat.engine.pytorch.compiling import compile_layers, undo
from duochat.engine.pytorch.memo import Memo
from duochat.engine.pytorch.rows import Rows
from duochat.engine.pytorch.shapes import MOST_ROWS, PREFILL_WIDTHS, WIDTHS, Shape
from duochat.engine.pytorch.tree_attention import FEW, TREE
from duochat.engine.sampling import Sampling

TOLERANCE = 0.6  # root mean square, of the logits' spread: bfloat16 rounds half of it at most, a fault gives 1.4


class Forward:
    """The model with its cache and the buffers that stay in place between forwards."""

    def __init__(self, model: torch.nn.Module, capacity: int, attention: str = NAME) -> None:
        model.set_attn_implementation(attention)
        self.model = model
        self.config = model.config.get_text_config()
        self.device = model.get_input_embeddings().weight.device
        self.cache = SlotCache(self.config.num_hidden_layers, capacity)
        self.windows = masks.windows(self.config)
        cuda = self.device.type == "cuda"
        widest = Shape(PREFILL_WIDTHS[-1], 1, capacity + SPARE)
        self._host = torch.zeros(widest.length, dtype=torch.int32, pin_memory=cuda)
        self._packed = torch.zeros(widest.length, dtype=torch.int32, device=self.device)
        self._positions = torch.zeros(capacity + SPARE, dtype=torch.int32, device=self.device)
        self._logits = torch.zeros(MOST_ROWS, self.config.vocab_size, device=self.device)
        self._reply = torch.zeros(4 * MOST_ROWS, pin_memory=cuda)
        self._bytes, self._numbers = memoryview(self._host.numpy()).cast("B"), self._reply.numpy()
        self._masks, self._told = masks.build, choose.told
        self._play: Callable[[Hashable, Callable[[], None]], None] = _call
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.compiled, self.graphs = "off", False
        self._working = False
        self.notes: list[str] = []  # which fast ways failed here, and why

    @torch.no_grad()
    def fuse(self, **options: Any) -> None:
        """Compile what stands before and after the layers, but for a part that fails or differs from the plain one.

        Comes before `settle`. options: for `torch.compile`.
        """
        build, told = fused.mask_builder(**options), fused.teller(**options)
        rest = self.windows, self.config, self.model.dtype
        if self._attempt("Compiled masks", lambda: fused.check_masks(build, self._packed, self._positions, *rest)):
            self._masks = build
        if self._attempt("Compiled choices", lambda: fused.check_choices(told, self._packed, self._random_logits())):
            self._told = told
        wanted = self._trial()
        for name in ("norm", "rotary_emb"):
            if module := getattr(self.model.base_model, name, None):
                module.compile(**options)
                if not self._works(wanted, f"Compiled {name}"):
                    module._compiled_call_impl = None

    def _random_logits(self) -> torch.Tensor:
        """With many ties."""
        return self._logits[:3].normal_(std=2).round_()

    @torch.no_grad()
    def settle(self, compile: Sequence[str] = (), graphs: bool = False) -> None:
        """Allocate the cache, then take what works here: the first of `compile` ("whole", "parts"), and graphs.

        Each way is tried on forwards whose logits are known. Raises torch.OutOfMemoryError.
        """
        wanted = self._trial()
        if self.device.type == "cuda" and self.model.config._attn_implementation == NAME:
            self._take_attention(wanted)
        for extent in compile:
            compile_layers(self.model, self.cache, self._cache_name, extent == "whole")
            if self._works(wanted, f"Compiled layers ({extent})"):
                self.compiled = extent
                break
            undo(self.model)
        if graphs:
            self._play = Graphs()
            self.graphs = self._works(wanted, "CUDA graphs")
            self._play = self._play if self.graphs else _call

    def _take_attention(self, wanted: list[torch.Tensor]) -> None:
        """The fastest attention function that works here."""
        kernel = {TREE: "The attention kernel"} if tree_attention.available() else {}
        for name, label in (kernel | {SPLIT: "Attention in stretches"}).items():
            self.model.set_attn_implementation(name)
            if self._works(wanted, label):
                return
        self.model.set_attn_implementation(NAME)

    def _works(self, wanted: list[torch.Tensor], label: str) -> bool:
        """Whether the way that is on gives the logits wanted, up to rounding."""
        got = self._attempt(label, self._trial)
        if got is None:
            return False
        off = max(float(((a - b).square().mean(-1).sqrt() / a.std(-1)).max()) for a, b in zip(wanted, got, strict=True))
        if not off < TOLERANCE:
            self.notes.append(f"{label} gave other logits (off by {off:.2g} of their spread)")
        return off < TOLERANCE

    def _attempt(self, label: str, function: Callable[[], Any]) -> Any:
        """What the function gives; None when it fails, and a note says why."""
        try:
            return function()
        except torch.OutOfMemoryError:
            raise
        except Exception as fault:  # noqa: BLE001 (compilers raise their own)
            self.notes.append(f"{label} failed: {_first_line(fault)}")
            return None

    def _trial(self) -> list[torch.Tensor]:
        """Logits of forwards with one row and with two; on CUDA with as many as attention calls few, too.

        Of tokens well inside the vocabulary: those at its beginning may never have been trained, and what a
        model makes of such a one depends on rounding alone.
        """
        logits, size = [], self.config.vocab_size
        for width in self._tried():
            rows = Rows([(size // 4 + i) % size for i in range(width)], (), 0, range(width))
            shape = Shape(width, width, min(256, self.cache.capacity))
            self.begin(rows, shape, Memo(self.cache.capacity), Sampling())
            self.answer(shape, width)
            logits.append(self._logits[:width][-2:].clone())
        return logits

    def _tried(self) -> list[int]:
        """Numbers of rows that different code serves."""
        if self.device.type != "cuda":
            return [1, 2]
        few = min(FEW * self.config.num_key_value_heads // self.config.num_attention_heads, self.cache.capacity)
        return [1, 2, max(width for width in WIDTHS if width <= max(few, 2))]

    def begin(self, rows: Rows, shape: Shape, memo: Memo, sampling: Sampling) -> None:
        """Send the rows and begin to compute what `answer` tells: a GPU is left at work."""
        self._start(rows, shape, memo, sampling)
        way = choose.way(sampling)
        self._play((way, shape.width, shape.kept), lambda: self._choose(way, shape))

    def answer(self, shape: Shape, count: int) -> Answer:
        """What the model says at the last `count` rows of those that it began with."""
        (tokens, probs, own, complete), transfer = self._fetch(shape, count)
        if not all(complete):
            self._choose(choose.everything, shape)
            (tokens, probs, own, _), transfer = self._fetch(shape, count)
        return Answer([int(token) for token in tokens], probs, own[1:], transfer)

    def fill(self, rows: Rows, shape: Shape, memo: Memo) -> None:
        """Compute the rows' keys and values, and wait for it."""
        self._start(rows, shape, memo, Sampling())
        self._wait()

    def _start(self, rows: Rows, shape: Shape, memo: Memo, sampling: Sampling) -> None:
        if self._working:  # on what nobody wants any more
            self._wait()
        rows.pack(shape, memo, sampling, self._bytes)
        self._working = True
        self._play(shape, lambda: self._compute(shape))

    def alone(self, rows: Rows, shape: Shape, memo: Memo, count: int = 20) -> float:
        """Seconds of a greedy answer on the device, `count` of them back to back."""
        self.begin(rows, shape, memo, Sampling())
        self.answer(shape, 1)
        begun = time.perf_counter()
        for _ in range(count):
            self._play(shape, lambda: self._compute(shape))
            self._play((choose.greedy, shape.width, shape.kept), lambda: self._choose(choose.greedy, shape))
        self._wait()
        return (time.perf_counter() - begun) / count

    @torch.no_grad()
    def _compute(self, shape: Shape) -> None:
        """From the packed rows on the host to logits."""
        packed = self._packed[: shape.length]
        packed.copy_(self._host[: shape.length], non_blocking=True)
        at = {name: packed[section] for name, section in shape.sections().items()}
        at["ancestors"] = at["ancestors"].view(shape.width, -1)
        slots = at["slot"].long()
        if any(self.windows.values()):
            self._positions.index_copy_(0, slots, at["position"])
        reach = self._positions[: shape.span]
        self.cache.begin(slots, reach)
        kinds = self._masks(at, reach, self.windows, self.config, self.model.dtype)
        output = self.model(
            input_ids=at["token"][None],
            position_ids=at["position"][None],
            attention_mask=kinds.get("", kinds),
            use_cache=True,
            logits_to_keep=shape.kept,
            **{self._cache_name: self.cache},
        )
        self._logits[: shape.kept].copy_(output.logits[0])

    @torch.no_grad()
    def _choose(self, way: choose.Way, shape: Shape) -> None:
        """From logits to the answer on the host."""
        at = {name: self._packed[section] for name, section in shape.sections().items()}
        rows = (at[name][shape.width - shape.kept :] for name in ("token", "parent", "key"))
        told = self._told(way, self._logits[: shape.kept], choose.Ask.of(*rows, at["parameters"]))
        self._reply[: told.numel()].view(told.shape).copy_(told, non_blocking=self.device.type == "cuda")

    def _fetch(self, shape: Shape, count: int) -> tuple[list[list[float]], float]:
        """The answer's last `count` rows as numbers, and the seconds of that once the device was done."""
        self._wait()
        begun = time.perf_counter()
        rows = self._numbers[: 4 * shape.kept].reshape(4, shape.kept)[:, -count:].tolist()
        return rows, time.perf_counter() - begun

    def _wait(self) -> None:
        """For the device. Leaves the GIL to others."""
        if self.device.type != "cpu":
            torch.accelerator.current_stream(self.device).synchronize()
        self._working = False


class Graphs:
    """Plays a function as a CUDA graph; the first call with a key runs it once and captures it."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, key: Hashable, function: Callable[[], object]) -> None:
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(function)
        graph.replay()

    def _capture(self, function: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """The run before loads kernels, compiles, and allocates what lives outside the graph."""
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            function()
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        torch._C._cuda_clearCublasWorkspaces()  # so that the graph gets one of its own, which nobody else can free
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        torch._C._cuda_clearCublasWorkspaces()
        return graph


def _first_line(fault: BaseException) -> str:
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0]


def _call(_: Hashable, function: Callable[[], None]) -> None:
    function()
