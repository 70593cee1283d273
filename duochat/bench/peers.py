"""llama.cpp's own server as a peer: the same GGUF files, asked over HTTP for the same token ids, limits and seed.

It reads the clock itself, so that HTTP costs it nothing. With a draft it takes part with those of the settings asked
for that gave the most tokens per second on some of the benchmark's own prompts.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import product
from time import monotonic, sleep
from typing import Any

import httpx

from duochat import DuoChatError
from duochat.bench.metrics import Run
from duochat.config import Settings
from duochat.engine.lanes import Cancelled, Stopped, never
from duochat.engine.machine import available_cores
from duochat.engine.sampling import Sampling
from duochat.models.fetch import fetch
from duochat.models.store import Progress

PEERS = {"llama-server": None, "llama-server-gpu-draft": "all", "llama-server-cpu-draft": "0"}  # the draft's -ngld
STARTS = 300.0  # seconds until a server must have loaded
ANSWERS = 600.0  # seconds of one answer
TRIED = 5  # prompts that settings are chosen by
FEW = 64  # tokens of their answers
RULES = ("temperature", "top_k", "top_p", "min_p")  # in our order; nothing else touches the logits


class Server:
    """A llama-server with options of its own, and a contestant of the benchmark."""

    kind = "peer"

    def __init__(self, name: str, binary: str, options: Iterable[str], eos: frozenset[int]) -> None:
        """Raises DuoChatError when it does not come up."""
        self.name, self.eos = name, eos
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._told = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the server lives)
        command = [binary, *options, "--host", "127.0.0.1", "--port", str(port)]
        self._process = subprocess.Popen(command, stdout=self._told, stderr=subprocess.STDOUT)
        self.close = weakref.finalize(self, _end, self._process)
        end = monotonic() + STARTS
        while not self._ready():
            if self._process.poll() is not None or monotonic() > end:
                self.close()
                raise DuoChatError(f"{binary} does not start ({self._last_words()}): leave the peer out.")
            sleep(0.05)

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=1.0, trust_env=False).is_success
        except httpx.TransportError:
            return False

    def _last_words(self) -> str:
        self._told.seek(0)
        lines = self._told.read().decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it says nothing")

    def answer(self, context: Sequence[int], sampling: Sampling, max_tokens: int, stopped: Stopped) -> Run:
        """See `Contestant.answer`."""
        asked = {"prompt": list(context), "n_predict": max_tokens, "seed": sampling.seed & 0x7FFFFFFF}
        asked |= {"samplers": RULES, **{rule: getattr(sampling, rule) for rule in RULES}}
        told = self._ask(asked | {"cache_prompt": False, "return_tokens": True})
        if stopped():
            raise Cancelled
        tokens, clock = told["tokens"], told["timings"]
        first = clock["prompt_ms"] / 1e3
        finish = "stop" if tokens and tokens[-1] in self.eos else "length"
        return Run(tokens, finish, first, first + clock["predicted_ms"] / 1e3)

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            told = httpx.post(f"{self.url}/completion", json=asked, timeout=ANSWERS, trust_env=False)
            return told.raise_for_status().json()
        except (httpx.HTTPError, ValueError) as fault:
            raise DuoChatError(f"{self.name} failed ({fault}; {self._last_words()}): leave the peer out.") from None


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass
class Peers:
    """Starts the peers of a benchmark. Raises DuoChatError when the server or a GGUF file is missing."""

    settings: Settings
    engine: Any
    binary: str  # llama-server, a name or a path
    lengths: Sequence[int]  # drafted tokens a round that are tried ...
    thresholds: Sequence[float]  # ... and probabilities below which a draft ends
    contexts: Sequence[Sequence[int]]  # that they are tried on
    progress: Progress
    tried: dict[str, dict[str, float]] = field(default_factory=dict)  # tokens/s by peer and settings

    def __post_init__(self) -> None:
        if not shutil.which(self.binary):
            raise DuoChatError(
                f"There is no {self.binary}: name llama.cpp's server with --llama-server PATH, or leave --peers out."
            )
        paths = [fetch(reference, self.progress) for reference in (self.settings.target, self.settings.draft)]
        for path in paths:
            if path.suffix != ".gguf":
                raise DuoChatError(f"llama-server needs GGUF files and {path.name} is none: leave --peers out.")
        self.target, self.draft = map(str, paths)

    def __call__(self, name: str) -> Server:
        """The peer of this name, a key of PEERS; one with a draft has the quickest settings."""
        if (layers := PEERS[name]) is None:
            return self._start(name)
        found, cores = {}, str(available_cores())
        draft = ["-md", self.draft, "--spec-type", "draft-simple", "-ngld", layers, "-tbd", cores]
        draft += ["-td", str(self.engine.costs.threads)]
        pairs = list(product(self.lengths, self.thresholds))
        for done, (length, threshold) in enumerate(pairs):
            self.progress(f"Trying settings of {name}", done, len(pairs))
            options = [*draft, "--spec-draft-n-max", str(length), "--spec-draft-p-min", str(threshold)]
            with closing(self._start(name, options)) as server:
                found[f"{length} tokens, p {threshold:g}"] = tokens_per_s(server, self.contexts), options
        self.tried[name] = {asked: speed for asked, (speed, _) in found.items()}
        return self._start(name, max(found.values())[1])

    def _start(self, name: str, options: Iterable[str] = ()) -> Server:
        """With the layers on the GPU, the threads and the length of context of our own lane."""
        own = self.engine.target
        layers = self.engine.describe().get("target_gpu_layers", 0 if own.shares_cores else 999)
        common = ["-m", self.target, "-ngl", str(layers), "-c", str(own.context_length), "-np", "1", "-fit", "off"]
        common += ["-t", str(available_cores()), "--cache-ram", "0"]
        return Server(name, self.binary, [*common, *options], self.engine.eos)


def tokens_per_s(server: Server, contexts: Sequence[Sequence[int]]) -> float:
    """Of greedy answers, after one to warm up."""
    server.answer(contexts[0], Sampling(), FEW, never)
    runs = [server.answer(context, Sampling(), FEW, never) for context in contexts[:TRIED]]
    return sum(len(run.tokens) for run in runs) / sum(run.total_s for run in runs)
