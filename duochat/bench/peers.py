"""Other ways to decode with the same weights, in the same process: transformers' own, and llama.cpp alone.

They run as their libraries ship them; we hand over a prompt and read the clock. Weights are read from the target's
folder once more, so none of our kernels is in their way or to their help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from duochat import DuoChatError
from duochat.bench.contestants import Stopped, Timed
from duochat.config import Settings
from duochat.engine.choosing import choose
from duochat.engine.costs import available_cores, thread_counts
from duochat.engine.lanes import Cancelled
from duochat.engine.llama.library import BATCH, Llama
from duochat.engine.pytorch import loading
from duochat.engine.sampling import Sampling
from duochat.models import Progress, fetch, target_folder

LOOKUP_TOKENS = 10  # of prompt lookup, the number that transformers' documentation uses


class Clock(BaseStreamer):
    """Notes when the first token came: `generate` hands over the prompt, then each token."""

    def __init__(self) -> None:
        self.began = perf_counter()
        self.calls = 0
        self.first_s = 0.0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            self.first_s = perf_counter() - self.began

    def end(self) -> None:
        pass


class Stop(StoppingCriteria):
    """Ends `generate` on Ctrl-C."""

    def __init__(self, stopped: Stopped) -> None:
        self.stopped = stopped

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.stopped(), device=input_ids.device)


class Generate:
    """transformers `generate`; `options` choose its way of decoding."""

    kind = "peer"

    def __init__(self, name: str, model: Any, eos: Sequence[int], **options: Any) -> None:
        self.name, self.model, self.eos, self.options = name, model, sorted(eos), options

    def answer(self, context: Sequence[int], sampling: Sampling, max_tokens: int, stopped: Stopped) -> Timed:
        prompt = torch.tensor([list(context)], device=self.model.device)
        torch.manual_seed(sampling.seed)
        clock = Clock()
        with torch.inference_mode():
            output = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=self._config(sampling, max_tokens),
                streamer=clock,
                stopping_criteria=StoppingCriteriaList([Stop(stopped)]),
                **{name: value for name, value in self.options.items() if name == "assistant_model"},
            )
        tokens = output[0, len(context) :].tolist()
        total = perf_counter() - clock.began
        if stopped():
            raise Cancelled
        return Timed(clock.first_s, total, {"tokens": tokens, "finish": finish(tokens, self.eos)})

    def _config(self, sampling: Sampling, max_tokens: int) -> GenerationConfig:
        """Nothing of the model's own defaults: a repetition penalty would change the text."""
        chosen = {"do_sample": False}
        if sampling.temperature:
            chosen = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
            chosen |= {"do_sample": True}
        options = {name: value for name, value in self.options.items() if name != "assistant_model"}
        ends = {"eos_token_id": self.eos, "pad_token_id": self.eos[0]} if self.eos else {}
        return GenerationConfig(max_new_tokens=max_tokens, **chosen, **ends, **options)


class LlamaCpp:
    """llama.cpp decoding the target's own file on the CPU, one token at a time."""

    kind = "peer"
    name = "llama.cpp"

    def __init__(self, path: Path, context_length: int, eos: Sequence[int]) -> None:
        self.eos = frozenset(eos)
        self.llama = Llama(path, context_length, 1)
        self.threads = self._fastest(sorted({*thread_counts(available_cores()), available_cores()}))
        self.llama.set_threads(self.threads)

    def _fastest(self, counts: Sequence[int]) -> int:
        """The number of threads with the quickest single token."""
        seconds = {}
        for threads in counts:
            self.llama.set_threads(threads)
            began = perf_counter()
            for position in range(6):
                began = perf_counter() if position == 1 else began  # the first call warms up
                self._next([0], position, Sampling())
            seconds[threads] = perf_counter() - began
            self.llama.drop(0, 0)
        return min(seconds, key=lambda n: seconds[n])

    def _next(self, tokens: Sequence[int], start: int, sampling: Sampling) -> int:
        end = start + len(tokens)
        self.llama.decode(tokens, range(start, end), [(0,)] * len(tokens), [len(tokens) - 1])
        return choose(self.llama.logits(1)[0], end, sampling, 1).tokens[0]

    def answer(self, context: Sequence[int], sampling: Sampling, max_tokens: int, stopped: Stopped) -> Timed:
        self.llama.drop(0, 0)
        began = perf_counter()
        for start in range(0, len(context), BATCH):
            token = self._next(context[start : start + BATCH], start, sampling)
        first, tokens = perf_counter() - began, [token]
        while len(tokens) < max_tokens and tokens[-1] not in self.eos:
            if stopped():
                raise Cancelled
            tokens.append(self._next(tokens[-1:], len(context) + len(tokens) - 1, sampling))
        return Timed(first, perf_counter() - began, {"tokens": tokens, "finish": finish(tokens, self.eos)})


def finish(tokens: Sequence[int], eos: Sequence[int] | frozenset[int]) -> str:
    """How an answer ended, in the words of a Round."""
    return "stop" if tokens and tokens[-1] in eos else "length"


# ---------------------------------------------------------------- by name


def place(engine: Any) -> tuple[torch.device, torch.dtype]:
    """Where the engine's target computes, and its precision where torch has that."""
    cpu = engine.target.shares_cores
    device = "cpu" if cpu else "cuda" if torch.cuda.is_available() else "mps"
    usual = torch.float32 if cpu else torch.bfloat16
    return torch.device(device), getattr(torch, engine.describe().get("target_dtype", ""), usual)


class Loader:
    """Loads what peers need, each model once. Raises DuoChatError when one cannot be used here."""

    def __init__(self, settings: Settings, engine: Any, longest: int, progress: Progress) -> None:
        """longest: tokens of prompt and answer that a static cache must hold."""
        self.settings, self.engine, self.longest, self.progress = settings, engine, longest, progress
        self._models: dict[str, Any] = {}

    def __call__(self, name: str) -> Any:
        return WAYS[name](self)

    def generate(self, name: str, **options: Any) -> Generate:
        return Generate(name, self.model(self.settings.target), self.engine.eos, **options)

    def model(self, reference: str) -> Any:
        """A model as transformers loads it, in the engine's precision and on its device."""
        if reference not in self._models:
            folder = target_folder(fetch(reference, self.progress), self.progress)
            self.progress("Loading the peers' models", 0, 0)
            try:
                model = loading.read(folder, *place(self.engine), "sdpa")
            except torch.OutOfMemoryError:
                raise DuoChatError(
                    "The GPU has no room for the peers' copy of the target: leave --peers out."
                ) from None
            self._models[reference] = model.eval()
        return self._models[reference]

    def assisted(self) -> Generate:
        target, draft = (self.model(reference) for reference in (self.settings.target, self.settings.draft))
        sizes = [model.config.get_text_config().vocab_size for model in (target, draft)]
        if sizes[0] != sizes[1]:
            raise DuoChatError(
                f"Assisted generation needs vocabularies of one size, these have {sizes[0]} and {sizes[1]}: "
                "leave the peer out."
            )
        return self.generate("assisted", assistant_model=draft)

    def static(self) -> Generate:
        """The static-cache mode, which transformers compiles on a GPU; one cache length for all prompts."""
        return self.generate("generate-static", cache_implementation="static", max_cache_len=self.longest)

    def llama_cpp(self) -> LlamaCpp:
        path = fetch(self.settings.target, self.progress)
        if path.suffix != ".gguf":
            raise DuoChatError(
                f"llama.cpp needs the target as a GGUF file and {path.name} is none: leave the peer out."
            )
        return LlamaCpp(path, self.longest, self.engine.eos)


WAYS: dict[str, Callable[[Loader], Any]] = {  # by the names in `contestants.PEERS`
    "generate": lambda load: load.generate("generate"),
    "generate-static": Loader.static,
    "assisted": Loader.assisted,
    "prompt-lookup": lambda load: load.generate("prompt-lookup", prompt_lookup_num_tokens=LOOKUP_TOKENS),
    "llama.cpp": Loader.llama_cpp,
}
