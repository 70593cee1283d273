"""One forward on the device: packed integers in, sampled tokens and probabilities out.

On CUDA each shape is a graph, captured when first needed, between two small copies; elsewhere the same functions are
simply called. Nothing here looks at a tensor's value on the host until the answer is there.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from duochat import DuoChatError
from duochat.engine.sampling import Sampling
from duochat.engine.target import choose, tree_attention
from duochat.engine.target.attention import FEW, NAME, SPLIT, grouped
from duochat.engine.target.cache import SPARE, SlotCache
from duochat.engine.target.compiling import compile_layers, undo
from duochat.engine.target.memo import Memo
from duochat.engine.target.rows import Rows
from duochat.engine.target.shapes import MOST_ROWS, PREFILL_WIDTHS, WIDTHS, Shape
from duochat.engine.target.tree_attention import TREE

TOLERANCE = 0.3  # of the logits' spread: what bfloat16 may round, and far less than a fault changes


@dataclass(frozen=True, slots=True)
class Answers:
    """Of the answered rows, in order: token, its probability, and the probability of the row's own token."""

    tokens: list[int]
    probs: list[float]
    own_probs: list[float]
    transfer: float  # seconds


class Forward:
    """The model with its cache and the buffers that stay in place between forwards."""

    def __init__(self, model: torch.nn.Module, capacity: int, attention: str = NAME) -> None:
        model.set_attn_implementation(attention)
        self.model = model
        self.config = model.config.get_text_config()
        self.device = model.get_input_embeddings().weight.device
        self.cache = SlotCache(self.config.num_hidden_layers, capacity)
        self.windows = _windows(self.config)
        cuda = self.device.type == "cuda"
        widest = Shape(PREFILL_WIDTHS[-1], 1, capacity + SPARE)
        self._host = torch.zeros(widest.length, dtype=torch.int32, pin_memory=cuda)
        self._packed = torch.zeros(widest.length, dtype=torch.int32, device=self.device)
        self._positions = torch.zeros(capacity + SPARE, dtype=torch.int32, device=self.device)
        self._logits = torch.zeros(MOST_ROWS, self.config.vocab_size, device=self.device)
        self._answer = torch.zeros(4, MOST_ROWS, dtype=torch.int32, device=self.device)
        self._reply = torch.zeros(4, MOST_ROWS, dtype=torch.int32, pin_memory=cuda)
        self._play: Callable[[Hashable, Callable[[], None]], None] = _call
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.compiled, self.graphs = "off", False
        self.notes: list[str] = []  # which fast ways failed here, and why

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
        try:
            got = self._trial()
        except torch.OutOfMemoryError:
            raise
        except Exception as fault:  # noqa: BLE001 (compilers raise their own)
            self.notes.append(f"{label} failed: {_first_line(fault)}")
            return False
        off = max(float((a - b).abs().max() / a.std()) for a, b in zip(wanted, got, strict=True))
        if not off < TOLERANCE:
            self.notes.append(f"{label} gave other logits (off by {off:.2g} of their spread)")
        return off < TOLERANCE

    def _trial(self) -> list[torch.Tensor]:
        """Logits of forwards with one row and with two; on CUDA with as many as attention calls few, too."""
        logits = []
        for width in self._tried():
            rows = Rows(range(1, 1 + width), (), 0, range(width))
            shape = Shape(width, width, min(256, self.cache.capacity))
            self._start(rows, shape, Memo(self.cache.capacity), Sampling())
            logits.append(self._logits[:width][-2:].clone())
        return logits

    def _tried(self) -> list[int]:
        """Numbers of rows that different code serves."""
        if self.device.type != "cuda":
            return [1, 2]
        few = min(FEW * self.config.num_key_value_heads // self.config.num_attention_heads, self.cache.capacity)
        return [1, 2, max(width for width in WIDTHS if width <= max(few, 2))]

    @torch.no_grad()
    def fill(self, rows: Rows, shape: Shape, memo: Memo) -> None:
        """Compute the rows' keys and values, and wait for it."""
        self._start(rows, shape, memo, Sampling())
        if self.device.type != "cpu":
            torch.accelerator.current_stream(self.device).synchronize()

    @torch.no_grad()
    def answer(self, rows: Rows, shape: Shape, memo: Memo, sampling: Sampling) -> Answers:
        """What the model says at the last `shape.kept` rows."""
        self._start(rows, shape, memo, sampling)
        way = choose.way(sampling)
        self._play((way, shape.width, shape.kept), lambda: self._choose(way, shape))
        reply, transfer = self._fetch()
        if not reply[3, : shape.kept].view(np.float32)[-1 - len(rows.tree) :].all():
            self._choose(choose.everything, shape)
            reply, transfer = self._fetch()
        tokens, *probs = reply[:3, : shape.kept]
        return Answers(tokens.tolist(), *(p.view(np.float32).tolist() for p in probs), transfer)

    @torch.no_grad()
    def alone(self, rows: Rows, shape: Shape, memo: Memo, count: int = 20) -> float:
        """Seconds of a greedy answer on the device, `count` of them back to back."""
        self.answer(rows, shape, memo, Sampling())
        begun = time.perf_counter()
        for _ in range(count):
            self._play(shape, lambda: self._compute(shape))
            self._play((choose.greedy, shape.width, shape.kept), lambda: self._choose(choose.greedy, shape))
        self._fetch()
        return (time.perf_counter() - begun) / count

    def _start(self, rows: Rows, shape: Shape, memo: Memo, sampling: Sampling) -> None:
        rows.pack(shape, memo, sampling, self._host.numpy())
        self._packed[: shape.length].copy_(self._host[: shape.length], non_blocking=True)
        self._play(shape, lambda: self._compute(shape))

    def _compute(self, shape: Shape) -> None:
        """From the packed rows to logits: everything between is on the device."""
        at = {name: self._packed[section] for name, section in shape.sections().items()}
        slots = at["slot"].long()
        self._positions.index_copy_(0, slots, at["position"])
        self.cache.begin(slots, self._positions[: shape.span])
        output = self.model(
            input_ids=at["token"].long()[None],
            position_ids=at["position"].long()[None],
            attention_mask=self._masks(shape, at, slots),
            use_cache=True,
            logits_to_keep=shape.kept,
            **{self._cache_name: self.cache},
        )
        self._logits[: shape.kept].copy_(output.logits[0])

    def _masks(
        self, shape: Shape, at: dict[str, torch.Tensor], slots: torch.Tensor
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive masks, one for each kind of the model's layers."""
        committed = _bits(at["committed"][None], shape.span)
        ancestors = _bits(at["ancestors"].view(shape.width, -1), shape.width)
        nobody = torch.zeros_like(ancestors[:, :1])
        owner = torch.full((shape.span + 1,), shape.width, dtype=torch.int64, device=self.device)
        owner[slots.clamp(max=shape.span)] = torch.arange(shape.width, device=self.device)
        visible = committed | torch.cat([ancestors, nobody], 1)[:, owner[: shape.span]]
        distance = at["position"][:, None] - self._positions[: shape.span]
        masks = {
            kind: self._additive(visible if window is None else visible & (distance < window))
            for kind, window in self.windows.items()
        }
        return masks.get("", masks)

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        """0 where visible, -inf elsewhere, in the form that our attention takes."""
        mask = torch.zeros_like(visible, dtype=self.model.dtype).masked_fill_(~visible, -torch.inf)
        return grouped(mask, self.config)

    def _choose(self, way: Callable[[torch.Tensor, choose.Ask], choose.Choice], shape: Shape) -> None:
        """From logits to the answer."""
        at = {name: self._packed[section] for name, section in shape.sections().items()}
        scale, _, top_p, floor = at["parameters"].view(torch.float32)
        last = slice(shape.width - shape.kept, None)
        ask = choose.Ask(
            token=at["token"][last].long(),
            parent=(at["parent"][last].long() - (shape.width - shape.kept)).clamp(min=0),
            key=at["key"][last],
            scale=scale,
            top_k=at["parameters"][1],
            top_p=top_p,
            floor=floor,
        )
        token, *numbers = way(self._logits[: shape.kept], ask)
        self._answer[0, : shape.kept].copy_(token)
        self._answer[1:, : shape.kept].view(torch.float32).copy_(torch.stack(numbers))

    def _fetch(self) -> tuple[np.ndarray, float]:
        """The answer on the host, and the seconds of the copy. Waiting leaves the GIL to others."""
        if self.device.type != "cuda":
            begun = time.perf_counter()
            self._reply.copy_(self._answer)
            return self._reply.numpy(), time.perf_counter() - begun
        computed, copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        computed.record()
        self._reply.copy_(self._answer, non_blocking=True)
        copied.record()
        copied.synchronize()
        return self._reply.numpy(), computed.elapsed_time(copied) / 1e3


class Graphs:
    """Plays a function as a CUDA graph; the first call with a key runs it once and captures it."""

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, key: Hashable, function: Callable[[], object]) -> None:
        if key not in self._graphs:
            self._graphs[key] = self._capture(function)
        self._graphs[key].replay()

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


def _bits(words: torch.Tensor, count: int) -> torch.Tensor:
    """(n, words) int32 to (n, count) bool, lowest bit first."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :count]


def _windows(config: object) -> dict[str, int | None]:
    """The sliding window of each kind of layer, None: sees all. A model without kinds has the single kind ""."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return {"": window}
    known = {"full_attention": None, "sliding_attention": window}
    if strange := set(kinds) - known.keys():
        raise DuoChatError(f"The target model has layers of kind {min(strange)}: choose a model with plain attention.")
    return {kind: known[kind] for kind in set(kinds)}
