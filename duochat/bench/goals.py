"""What a GPU lane at the hardware's speed must reach, beside what was measured: one table, made on CUDA only.

The roofline is the time to read all weights once at the bandwidth that this card reaches in a plain copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import ge, le
from statistics import median
from time import perf_counter
from typing import Any

from duochat.bench.contestants import Contestant
from duochat.bench.metrics import REFERENCE, RIVAL
from duochat.engine.lanes import never
from duochat.engine.sampling import Sampling

PROMPT = 128  # tokens of the prompt that TTFT is measured with
REPEATS = 7
CONTEXT = 512  # tokens that the forwards of the width ratio look back on


@dataclass(frozen=True, slots=True)
class Goal:
    """One row. measured None: not measured in this run."""

    what: str
    sign: str  # "≤" or "≥"
    goal: float
    measured: float | None
    detail: str = ""

    @property
    def reached(self) -> bool | None:
        return None if self.measured is None else {"≤": le, "≥": ge}[self.sign](self.measured, self.goal)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "reached": self.reached}


def probe(target: Any, contestants: Sequence[Contestant], context: Sequence[int]) -> dict[str, Any]:
    """What the benchmark's own runs do not tell: bandwidth, width ratio, TTFT of a prompt of 128 tokens; seconds."""
    prompt = (list(context) * (1 + PROMPT // len(context)))[:PROMPT]
    widest = min(32, target.most_nodes + 1)
    forwards = target.measure((1, widest), CONTEXT)
    return {
        "copy_bytes_per_s": copy_bandwidth(target.device),
        "width_1_s": forwards[1],
        "width_32_s": forwards[widest],
        "ttft_s": {c.name: first_token(c, prompt) for c in contestants},
    }


def copy_bandwidth(device: Any, size: int = 1 << 30) -> float:
    """Bytes per second, read and written, of a copy within the card's memory; median of ten."""
    import torch

    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for _ in range(11):
        torch.cuda.synchronize(device)
        began = perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(device)
        seconds.append(perf_counter() - began)
    return 2 * size / median(seconds[1:])


def first_token(contestant: Contestant, prompt: Sequence[int]) -> float:
    """Median seconds to the first token, the first try apart."""
    tries = [contestant.answer(prompt, Sampling(), 2, never).first_s for _ in range(REPEATS + 1)]
    return median(tries[1:])


def table(results: Mapping[str, Any], probed: Mapping[str, Any]) -> list[Goal]:
    """The rows, from a finished report and `probe`."""
    return [*_hardware(results, probed), *_speedups(results), *_devices(results, probed)]


def _hardware(results: Mapping[str, Any], probed: Mapping[str, Any]) -> list[Goal]:
    plain = results["decoders"][REFERENCE]["all"]
    floor = results["machine"]["lanes"]["target_weight_bytes"] / probed["copy_bytes_per_s"]
    token, one, wide = plain["tpot_median_s"], probed["width_1_s"], probed["width_32_s"]
    floor_text = f"{1e3 * token:.2f} ms / {1e3 * floor:.2f} ms at {probed['copy_bytes_per_s'] / 1e9:.0f} GB/s"
    gap = max(e["all"]["gap_median_s"] for e in results["decoders"].values() if e["kind"] == "decoder")
    return [
        Goal("plain decoding: time per token / weight bytes per copy bandwidth", "≤", 1.4, token / floor, floor_text),
        Goal("forward at width 32 / width 1", "≤", 1.15, wide / one, f"{1e3 * wide:.2f} ms / {1e3 * one:.2f} ms"),
        Goal("host gap between two target forwards, ms, slowest decoder", "≤", 0.3, 1e3 * gap),
    ]


def _speedups(results: Mapping[str, Any]) -> list[Goal]:
    decoders = results["decoders"]
    best: Callable[[Mapping[str, Any]], str] = lambda tasks: max(tasks, key=lambda t: tasks[t]["speedup"])  # noqa: E731
    tree = decoders.get("duotree")
    task = best(tree["tasks"]) if tree else ""
    versus = [("duodecoding", 1.15), (RIVAL, 12.0), ("assisted", 4.0)]
    return [
        Goal("duotree / plain decoding, mean of the tasks", "≥", 2.5, tree and tree["all"]["speedup"]),
        Goal("duotree / plain decoding, best task", "≥", 3.5, tree and tree["tasks"][task]["speedup"], task),
        *(Goal(f"duotree / {name}", "≥", goal, _ratio(decoders, "duotree", name)) for name, goal in versus),
    ]


def _ratio(decoders: Mapping[str, Any], one: str, other: str) -> float | None:
    """Mean over tasks of tokens/s by tokens/s."""
    if one not in decoders or other not in decoders:
        return None
    speed = lambda name, task: decoders[name]["tasks"][task]["tokens_per_s"]  # noqa: E731
    tasks = decoders[one]["tasks"].keys() & decoders[other]["tasks"].keys()
    return sum(speed(one, task) / speed(other, task) for task in tasks) / len(tasks) if tasks else None


def _devices(results: Mapping[str, Any], probed: Mapping[str, Any]) -> list[Goal]:
    ttft, tree = probed["ttft_s"], results["decoders"].get("duotree")
    to = lambda name: ttft["duotree"] / ttft[name] if {"duotree", name} <= ttft.keys() else None  # noqa: E731
    detail = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in ttft.items())
    return [
        Goal("duotree: GPU idle between first and last token, %", "≤", 5.0, tree and 100 * tree["all"]["gpu_idle"]),
        Goal("TTFT, 128-token prompt: duotree / plain decoding", "≤", 1.05, to(REFERENCE), detail),
        Goal("TTFT, 128-token prompt: duotree / speculative", "≤", 0.83, to("speculative")),
    ]
