"""Other hardware, for the simulation: cards and targets by their data sheets, the draft scaled to other cores.

Assumed: a forward reads all weights once and computes each further row, at the shares of the data sheet's figures that
a captured forward of 7B reached on an H100; draft threads help by the power 0.75 up to 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from duochat.bench import simulate
from duochat.engine.costs import Costs

BANDWIDTH_USE, COMPUTE_USE = 0.7, 0.3  # of the data sheet: what a captured forward reaches (7B on an H100)
MOST_THREADS = 16  # a small draft gains nothing from more


@dataclass(frozen=True, slots=True)
class Card:
    """Bytes per second of memory, and bf16 operations per second (dense), by the data sheet."""

    name: str
    bandwidth: float
    operations: float


@dataclass(frozen=True, slots=True)
class Model:
    """Parameters of a target, and the bytes of all its weights as stored."""

    name: str
    parameters: float
    weight_bytes: float


@dataclass(frozen=True, slots=True)
class Scenario:
    """A target on a card, and the cores that draft."""

    card: Card
    model: Model
    cores: int

    @property
    def name(self) -> str:
        return f"{self.model.name} on {self.card.name}, {self.cores} CPU cores"

    def forward(self, width: int) -> float:
        """Seconds: the weights are read once, and each further row is computed."""
        read = self.model.weight_bytes / (BANDWIDTH_USE * self.card.bandwidth)
        return read + 2 * self.model.parameters * (width - 1) / (COMPUTE_USE * self.card.operations)

    def costs(self, here: Costs) -> Costs:
        """The draft's own curve, scaled to these cores, beside the forwards of this target."""
        factor = thread_gain(here.threads) / thread_gain(self.cores)
        draft = {size: seconds * factor for size, seconds in here.draft.seconds.items()}
        return Costs.of({width: self.forward(width) for width in (1, 2, 4, 8, 16, 32, 64)}, draft)

    def moved(self, recording: simulate.Recording, here: Costs) -> simulate.Recording:
        """The same texts with this hardware's times for reading the prompt."""
        factor = thread_gain(here.threads) / thread_gain(self.cores)
        return replace(
            recording,
            target_prefill=self.forward(len(recording.prompt)),
            draft_prefill=recording.draft_prefill * factor,
            forward=0.0,
        )


def thread_gain(threads: int) -> float:
    """How much faster than one thread; a small model's tokens are bound by memory and by waiting at barriers."""
    return min(threads, MOST_THREADS) ** 0.75


H100, A100 = Card("H100", 3.35e12, 989e12), Card("A100 80 GB", 2.04e12, 312e12)
RTX_4090, RTX_3060 = Card("RTX 4090", 1.01e12, 165e12), Card("RTX 3060", 0.36e12, 51e12)
TWO_H100 = Card("2 x H100", 2 * 3.35e12, 2 * 989e12)
LLAMA_7B, LLAMA_7B_8BIT = Model("7B bf16", 6.7e9, 13.5e9), Model("7B 8-bit", 6.7e9, 6.9e9)
QWEN_32B, LLAMA_70B = Model("32B bf16", 32.5e9, 65e9), Model("70B bf16", 69e9, 138e9)

SCENARIOS = tuple(
    Scenario(card, model, cores)
    for card, model in (
        (RTX_3060, LLAMA_7B_8BIT),
        (RTX_4090, LLAMA_7B),
        (A100, LLAMA_7B),
        (H100, LLAMA_7B),
        (H100, QWEN_32B),
        (TWO_H100, LLAMA_70B),
    )
    for cores in (8, 64)
)


def elsewhere(costs: Costs, recordings: Sequence[simulate.Recording], decoders: Sequence[str]) -> list[dict[str, Any]]:
    """What each scenario promises: tokens per second of each decoder. costs: as measured here."""
    found = []
    for scenario in SCENARIOS:
        there = [scenario.moved(recording, costs) for recording in recordings]
        speeds = simulate.predict(scenario.costs(costs), there, decoders)
        found.append({"name": scenario.name, "tokens_per_s": speeds})
    return found
