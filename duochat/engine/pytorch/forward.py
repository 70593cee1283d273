"""One forward on the device: packed integers in, sampled tokens and probabilities out.

On CUDA each shape is a graph, captured when first needed, that begins or ends with a small copy; elsewhere the same
functions are simply called. Nothing here looks at a tensor's value on the host until the answer is there.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from duochat import DuoChatError, terminal
from duochat.engine.lanes import Answer
from duochat.engine.penalties import FORBIDDEN, Changes, changed
from duochat.engine.pytorch import attention, choose, compiled, masks, memory
from duochat.engine.pytorch.cache import SPARE, SlotCache
from duochat.engine.pytorch.memo import Edge, Memo
from duochat.engine.pytorch.rows import MOST_ROWS, PREFILL_WIDTHS, WIDTHS, Rows, Shape
from duochat.engine.sampling import Sampling

# Root mean square of the differences, of the logits' spread. Unrelated logits are sqrt(2) apart. Two attentions of
# transformers' own differ by 0.13 on SmolLM2-135M in bfloat16, and by 8e-6 in float32.
TOLERANCE = 0.6
TOLERANCE_FLOAT32 = 0.01
SLOTS = (4, 1)  # of the tokens before a trial: in no order, with room between them
TRIED = (Sampling(), Sampling(temperature=1.0, min_p=0.02))  # the ways to choose that are compiled


class Forward:
    """The model with its cache and the buffers that stay in place between forwards."""

    def __init__(self, model: torch.nn.Module, capacity: int, function: str = attention.NAME) -> None:
        """function: the attention. Raises DuoChatError when that and the cache give other logits than transformers."""
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
        self.compiled, self.graphs = False, False
        self._working = False
        self.notes: list[str] = []  # which fast ways failed here, and why
        self._wanted = self._reference()
        if not self._attends(function):
            kind = self.config.model_type
            raise DuoChatError(f"This engine cannot run {kind} models ({self.notes[-1]}): choose another target.")

    def _attends(self, function: str) -> bool:
        """Whether every layer attends by the function, and the logits are those wanted.

        One with an attention of its own may place keys by their slots, which rounding to 16 bits would hide.
        """
        attend, calls = ALL_ATTENTION_FUNCTIONS[function], []

        def counted(*given: Any, **options: Any) -> tuple[torch.Tensor, None]:
            calls.append(function)
            return attend(*given, **options)

        AttentionInterface.register(f"{function}-counted", counted)
        self.model.set_attn_implementation(f"{function}-counted")
        works = self._works("its attention")
        self.model.set_attn_implementation(function)
        if works and len(calls) < self.config.num_hidden_layers * (len(SLOTS) + len(self._tried())):
            self.notes.append("its layers attend in a way of their own")
            return False
        return works

    def settle(self, compile: bool = False, graphs: bool = False) -> None:
        """Take what is fast and works here: the attention kernel, compiled code, CUDA graphs."""
        if self.device.type == "cuda" and self.model.config._attn_implementation == attention.NAME:
            self.take_kernel()
        if compile:
            self.fuse()
            self.compile_layers()
        if graphs:
            self._play = Graphs()
            self.graphs = self._works("CUDA graphs")
            self._play = self._play if self.graphs else _call

    def take_kernel(self) -> None:
        """Attention by the kernel, if that works here."""
        if attention.available():
            self.model.set_attn_implementation(attention.TREE)
            if not self._works("The attention kernel"):
                self.model.set_attn_implementation(attention.NAME)

    def fuse(self, **options: Any) -> None:
        """Compile what stands before and after the layers, but for a part that fails or differs from the plain one.

        options: for `torch.compile`.
        """
        build, told = compiled.mask_builder(**options), compiled.teller(**options)
        self._masks = compiled.held_to_plain_masks(build)
        self._masks = build if self._attempt("Compiled masks", self._trial) else masks.build
        self._told = compiled.held_to_plain_choices(told)
        works = self._attempt("Compiled choices", lambda: [self._trial(sampling) for sampling in TRIED])
        self._told = told if works else choose.told
        for name in ("norm", "rotary_emb"):
            if module := getattr(self.model.base_model, name, None):
                module.compile(**options)
                if not self._works(f"Compiled {name}"):
                    module._compiled_call_impl = None

    def compile_layers(self, **options: Any) -> None:
        """Compile the decoder layers, cache and attention included. options: for `torch.compile`."""
        layers = self._attempt("Compiled layers", lambda: compiled.decoder_layers(self.model))
        if layers:
            compiled.compile_layers(layers, self.cache, self._cache_name, **options)
            self.compiled = self._works("Compiled layers")
            if not self.compiled:
                compiled.undo(layers)

    def _works(self, label: str) -> bool:
        """Whether the way that is on gives the logits wanted, up to rounding."""
        got = self._attempt(label, self._trial)
        if got is None:
            return False
        pairs = zip(self._wanted, got, strict=True)
        off = max(float(((a - b).square().mean(-1).sqrt() / a.std(-1)).max()) for a, b in pairs)
        works = off < (TOLERANCE_FLOAT32 if self.model.dtype == torch.float32 else TOLERANCE)
        if not works:
            self.notes.append(f"{label} gave other logits (off by {off:.2g} of their spread)")
        return works

    def _attempt(self, label: str, function: Callable[[], Any]) -> Any:
        """What the function gives; None when it fails, and a note says why."""
        try:
            return function()
        except Exception as fault:  # compilers raise their own, and models of strange kinds
            if memory.ran_out(fault):
                raise
            self.notes.append(f"{label} failed: {terminal.named(fault)}")
            return None

    @torch.no_grad()
    def _reference(self) -> list[torch.Tensor]:
        """What transformers' own attention, masks and positions give where `_trial` looks."""
        self.model.set_attn_implementation("eager")
        found = []
        for width in self._tried():
            held, (tail, tree) = self._held(), self._branching(width)
            paths = [[token for token, _ in tree[:-2]] + [token] for token, _ in tree[-2:]] or [[]]
            ids = [torch.tensor([held + tail + path], device=self.device) for path in paths]
            found.append(torch.stack([self.model(i, use_cache=False).logits[0, -1].float() for i in ids]))
        return found

    @torch.no_grad()
    def _trial(self, sampling: Sampling = TRIED[0]) -> list[torch.Tensor]:
        """Logits of two branches, in forwards of each number of rows, below tokens that lie anywhere in the cache."""
        memo, span, found = Memo(self.cache.capacity), min(512, self.cache.capacity), []
        for i, slot in enumerate(SLOTS):
            rows = Rows(self._held()[i : i + 1], (), i, [slot])
            self.fill(rows, Shape(1, 1, span), memo)
            memo.commit(rows.tail, rows.slots)
        for width in self._tried():
            tail, tree = self._branching(width)
            shape = Shape(width, width, span)
            self.begin(Rows(tail, tree, len(SLOTS), memo.free(width)), shape, memo, sampling)
            self.answer(shape, width)
            found.append(self._logits[:width][-min(2, len(tree) or 1) :].clone())
        return found

    def _tried(self) -> list[int]:
        """Numbers of rows that different code serves; on CUDA as many as attention calls few, too."""
        if self.device.type != "cuda":
            return [1, 3]
        group = self.config.num_attention_heads // attention.key_heads(self.config)
        few = min(attention.FEW // group, self.cache.capacity - MOST_ROWS)
        return [1, 2, max(width for width in WIDTHS if width <= max(few, 4))]

    def _held(self) -> list[int]:
        """Tokens that lie in the cache."""
        return self._tokens(len(SLOTS), MOST_ROWS)

    def _branching(self, width: int) -> tuple[list[int], list[Edge]]:
        """A token, a chain below it, and two leaves, or fewer."""
        tail, *nodes = self._tokens(width, 0)
        parents = [*range(-1, width - 3), max(-1, width - 4)]
        return [tail], list(zip(nodes, parents, strict=False))

    def _tokens(self, count: int, first: int) -> list[int]:
        """Well inside the vocabulary.

        Those at its beginning may never have been trained, and what a model makes of such a one depends on rounding.
        """
        size = self.config.vocab_size
        return [(size // 4 + first + i) % size for i in range(count)]

    def begin(self, rows: Rows, shape: Shape, memo: Memo, sampling: Sampling, made: Changes | None = None) -> None:
        """Send the rows and begin to compute what `answer` tells: a GPU is left at work. made: of the last rows."""
        parts = [torch.from_numpy(part) for part in made or () if part is not None]
        sent = [part.to(self.device) for part in parts]  # later it would wait for the rows
        self._start(rows, shape, memo, sampling)
        if sent:
            self._penalise(shape, *sent)
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
    def _penalise(
        self, shape: Shape, tokens: torch.Tensor, divisors: torch.Tensor, added: torch.Tensor,
        allowed: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Change the logits of the last rows where they stand, see `engine.penalties`."""
        rows = self._logits[shape.kept - len(added) : shape.kept]
        rows[:, tokens] = changed(rows[:, tokens], divisors, added)
        if allowed is not None:
            rows.masked_fill_(~allowed, float(FORBIDDEN))

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


def _call(_: Hashable, function: Callable[[], None]) -> None:
    function()
