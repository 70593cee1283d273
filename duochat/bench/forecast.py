"""What a pair would give on this machine before it is downloaded or loaded: tokens per second, plain and drafted.

A forward's time is measured on a pretended model of its sizes (`speeds`), those of a file that is not here
guessed from its name; `simulate` then runs the schedules over answers in which the draft agrees as often as is known.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from math import log
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from duochat.bench import simulate, speeds
from duochat.bench.speeds import Lane
from duochat.config import AUTO, Settings
from duochat.engine import native
from duochat.engine.calibration import CPU_WIDTHS, displacing
from duochat.engine.costs import Costs, Curve
from duochat.engine.lanes import Candidates
from duochat.engine.llama.probe import KINDS, OUTER, Shape
from duochat.models import gguf
from duochat.models.fetch import cached
from duochat.models.trim import HALF

WORTH = 1.1  # a smaller gain is none
ASSUMED = 0.65  # agreement of a pair of which none is known
ANSWERS, LENGTH, PROMPT = 4, 64, 128  # of the imagined ones; tokens
SURE = 1.2  # how a draft's confidence spreads around its mean: less is more often near 0 or 1
BATCHES = (1, 2, 4, 8)  # of a draft

# What today's models of so many billion parameters look like, and their usual kinds by the label in a file's name.
SIZES = {
    0.3: Shape(640, 2048, 18, 4, 1, 256, 262_144, True),
    0.6: Shape(1024, 3072, 28, 16, 8, 128, 151_936, True),
    1: Shape(2048, 8192, 16, 32, 8, 64, 128_256, True),
    3: Shape(3072, 8192, 28, 24, 8, 128, 128_256, True),
    4: Shape(2560, 9728, 36, 32, 8, 128, 151_936, True),
    8: Shape(4096, 12_288, 36, 32, 8, 128, 151_936),
    14: Shape(5120, 17_408, 40, 40, 8, 128, 151_936),
    24: Shape(5120, 32_768, 40, 32, 8, 128, 131_072),
    32: Shape(5120, 25_600, 64, 40, 8, 128, 151_936),
}
LABELS = {
    "Q4_K_M": dict.fromkeys(KINDS, "Q4_K") | dict.fromkeys(("attn_v", "ffn_down", *OUTER), "Q6_K"),
    **{kind: dict.fromkeys(KINDS, kind) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "BF16", "F16")},
}
NAMED = re.compile(rf"(?i)(?P<size>\d+(\.\d+)?)(?P<unit>[BM])(-A(?P<active>\d+)B)?\b.*\b(?P<label>{'|'.join(LABELS)})")


@dataclass(frozen=True, slots=True)
class Model:
    """What decides how long a forward takes. scale: of the layers' bytes to those of the shape with these kinds."""

    shape: Shape
    kinds: Mapping[str, str]
    scale: float = 1.0
    share: float = 1.0  # of the experts that a token takes ...
    expert: float = 0.0  # ... and their part of what a token reads of a layer

    @classmethod
    def of_file(cls, path: Path) -> Model | None:
        """From a GGUF file's header; None for a model without attention. Raises DuoChatError."""
        header = gguf.read(path)
        found: dict[str, Counter[str]] = defaultdict(Counter)  # bytes of the matrices of a name by their kind
        for tensor in (t for t in header.tensors if len(t.shape) > 1):
            name = tensor.name.removesuffix(".weight").rpartition(".")[2]
            found[name][GGMLQuantizationType(tensor.type).name] += tensor.size
        if "attn_output" not in found:
            return None
        share = header.get("expert_used_count", 0) / max(1, header.get("expert_count", 0)) or 1.0
        shape = replace(_shape(header), tied="output" not in found)
        layers = [(name.endswith("_exps"), kind.total()) for name, kind in found.items() if name not in OUTER]
        expert = share * sum(size for mixed, size in layers if mixed)
        size = expert + sum(size for mixed, size in layers if not mixed)
        of = {name: found[name] + found[f"{name}_exps"] for name in KINDS}
        usual = sum(of.values(), Counter()).most_common(1)
        kinds = {name: (kind.most_common(1) or usual)[0][0] for name, kind in of.items()}
        return cls(shape, kinds, size / speeds.size(shape, kinds, False), share, expert / size)

    @classmethod
    def of_name(cls, reference: str) -> Model | None:
        """From the size and the kind that a file's name tells; None where it does not."""
        if not (told := NAMED.search(reference.partition("#")[0].rpartition("/")[2])):
            return None
        billions = float(told["size"]) / (1 if told["unit"] in "Bb" else 1000)
        active = float(told["active"] or billions)
        near = min(SIZES, key=lambda size: abs(log(size / active)))
        kinds = LABELS[told["label"].upper()]
        return cls(SIZES[near], kinds, active / near, active / billions, 0.8 if told["active"] else 0.0)

    @property
    def size(self) -> float:
        """Bytes of all weights."""
        read = self.scale * speeds.size(self.shape, self.kinds, False)
        return read * (1 - self.expert + self.expert / self.share) + speeds.size(self.shape, self.kinds, True)

    def curve(self, lane: Lane) -> dict[int, float]:
        """Seconds of a forward by its rows; each row of a mixture of experts takes some of its own."""
        layers, output = speeds.forwards(lane, self.shape, self.kinds)
        found = {}
        for width, seconds in layers.items():
            experts = (1 - (1 - self.share) ** width) / self.share
            dense = (1 - self.expert) * seconds + self.expert * (layers[1] if self.share < 1 else seconds) * experts
            found[width] = self.scale * dense + output[width]
        return found


def _shape(header: gguf.Header) -> Shape:
    def largest(key: str, default: Any = None) -> int:
        """Some models have another number in each layer."""
        value = header.get(key, default)
        return max(value) if isinstance(value, list) else value

    width, heads = header.get("embedding_length"), largest("attention.head_count")
    inner = largest("feed_forward_length", 0)
    if used := header.get("expert_used_count", 0):
        inner = used * header.get("expert_feed_forward_length", inner)
    head = header.get("attention.key_length", width // heads)
    groups = largest("attention.head_count_kv", heads)
    return Shape(width, inner, header.get("block_count"), heads, groups, head, len(header.tokens))


@dataclass(frozen=True, slots=True)
class Forecast:
    """Tokens per second while an answer is written. agreement: as known or as assumed."""

    plain: float
    drafted: float
    agreement: float
    assumed: bool

    @property
    def sentence(self) -> str:
        if self.drafted < WORTH * self.plain:
            return f"about {self.plain:.3g} tokens/s; plain decoding is as fast as drafting"
        how = "if the draft agrees" if self.assumed else "the draft agrees"
        return f"about {self.plain:.3g} tokens/s, drafted {self.drafted:.3g} ({how} at {100 * self.agreement:.0f} %)"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sentence": self.sentence}


def of_pair(settings: Settings) -> Forecast | None:
    """For a preset, or any pair by its references; None where too little is known of it (a folder, an odd kind).

    The first call measures this machine, some seconds for each kind of weights. Raises DuoChatError when a file that
    is here cannot be read.
    """
    target, draft = _model(settings.target), _model(settings.draft)
    if settings.backend == "torch" or target is None or draft is None:
        return None
    costs = _costs(settings, target, draft)
    agreement = settings.agreement or ASSUMED
    return Forecast(*expected(costs, agreement), agreement, not settings.agreement)


def _model(reference: str) -> Model | None:
    path = cached(reference)
    return Model.of_file(path) if path is not None and path.suffix == ".gguf" else Model.of_name(reference)


@cache
def _in_c(path: Path | None, target: bool, threads: int, displaced: int = 0) -> dict[int, float] | None:
    """Seconds by rows where the lane in C takes the file: it is here and small, so that is measured.

    displaced: bytes that the other lane reads in turn with this one, 0 = it has caches of its own.
    """
    if path is None or path.suffix != ".gguf" or native.unfit(path):
        return None
    make = native.NativeTarget if target else partial(native.load, vocabulary=HALF if displaced else AUTO)
    if (lane := make(path, 4 * PROMPT, threads)) is None:
        return None
    read = displacing(displaced)
    found = lane.measure(CPU_WIDTHS, 2 * PROMPT, before=read) if target else lane.measure(BATCHES, threads, before=read)
    lane.close()
    return found


def _costs(settings: Settings, target: Model, draft: Model) -> Costs:
    """Where both lanes compute on the CPU they take turns, each with all cores."""
    one, other = speeds.lanes()
    forwards, shared = _beside(target, one), not one.gpu_layers
    drafting = Curve(
        _in_c(cached(settings.draft), False, other.threads, shared and int(target.size)) or draft.curve(other)
    )
    if shared and (own := _in_c(cached(settings.target), True, one.threads, int(draft.size))):
        forwards = min(forwards, own, key=lambda seconds: seconds[1])
    batches = Curve({size: drafting(size) for size in BATCHES})
    return Costs(Curve(forwards), batches, other.threads, shared=shared, turns=shared)


def _beside(target: Model, lane: Lane) -> dict[int, float]:
    """Seconds of a forward where what the GPU has no room for is on the CPU."""
    found = target.curve(lane)
    if not lane.gpu_layers or (part := min(1.0, speeds.room() / target.size)) == 1:
        return found
    rest = Curve(target.curve(Lane(0, lane.threads)))
    return {width: part * seconds + (1 - part) * rest(width) for width, seconds in found.items()}


def expected(costs: Costs, agreement: float) -> tuple[float, float]:
    """Tokens per second of plain decoding and of the best that drafting gives, at this agreement of first choices."""
    found = simulate.predict(costs, list(imagined(costs, agreement)), ("autoregressive", "duotree"))
    return found["autoregressive"], found["duotree"]


def imagined(costs: Costs, agreement: float) -> Iterator[simulate.Recording]:
    """Answers of no meaning, in which a draft's confidence is right as often as it says, and its first choice as
    often as asked."""
    rng = random.Random(0)
    for _ in range(ANSWERS):
        answer, found = range(PROMPT, PROMPT + LENGTH), []
        for token in answer:
            first = min(0.99, rng.betavariate(SURE * agreement, SURE * (1 - agreement)))
            probs = [first, *((1 - first) / 2**rank for rank in range(1, 8))]
            chosen = rng.choices(range(9), [*probs, 1 - sum(probs)])[0]
            others = [-1 - 8 * token - rank for rank in range(8)]
            found.append(Candidates(tuple(token if r == chosen else o for r, o in enumerate(others)), tuple(probs)))
        prompt = tuple(range(PROMPT))
        reading = PROMPT / BATCHES[-1] * costs.draft(BATCHES[-1])
        yield simulate.Recording(prompt, tuple(answer), tuple(found), costs.target(1), reading, LENGTH)
