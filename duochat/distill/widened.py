"""`python -m duochat widen`: a small Llama or Qwen2 in a large one's shape, to time what cannot be fetched.

Its function stays, so timing and acceptance are both real (cost-faithful). Hidden states are padded with zeros
(RMSNorm: weight * sqrt(d/D), eps * d/D); added heads and neurons are random but their output projections are zero, and
so are those of added layers. Head size h -> nh: rotary pair i goes to pair n*i, which has the same frequency, and the
query is scaled by sqrt(n). A folder for the torch lane is a recipe: its weights are made on the device at load.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from duochat import DuoChatError, terminal
from duochat.config import load
from duochat.engine.pytorch import loading
from duochat.models import gguf, tokenizer
from duochat.models.fetch import fetch
from duochat.models.folder import RECIPE, recipe
from duochat.models.weights import allocated

FAMILIES = ("llama", "qwen2")
KINDS = ("q4_k_m", "q8_0", "bf16", "f16")  # of a GGUF file
KEPT = ("generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")
SILENT = ("norm", "o_proj", "down_proj", "embed_tokens", "lm_head")  # zero where the small model has nothing


class Shape(NamedTuple):
    """The sizes of a model that decide what a forward costs, by transformers' names."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128


LIKE = {
    "llama-2-7b": Shape(4096, 11008, 32, 32, 32),
    "llama-2-13b": Shape(5120, 13824, 40, 40, 40),
    "qwen2.5-7b": Shape(3584, 18944, 28, 28, 4),
    "qwen2.5-32b": Shape(5120, 27648, 64, 40, 8),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="REF", help="the small target (default: the configured one)")
    parser.add_argument("--like", required=True, choices=LIKE, help="whose shape to take")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a folder to name as --target")
    parser.add_argument("--gguf", choices=KINDS, help="write DIR/LIKE-KIND.gguf, a file to name as --target")


def main(args: argparse.Namespace) -> int:
    path = fetch(args.target or load().target)
    if args.gguf and path.suffix != ".gguf":
        raise DuoChatError(f"A GGUF file is widened from one, and {path.name} is none: name a GGUF file as --target.")
    made = args.out
    made.mkdir(parents=True, exist_ok=True)
    if args.gguf:
        from duochat.distill import widen_gguf

        made, bar = args.out / f"{args.like}-{args.gguf}.gguf", terminal.Bar()
        widen_gguf.write(path, args.like, made, args.gguf, bar)
        bar.close()
    else:
        write(path, args.like, made)
    print(f"{made}: {path.name} with the shape of {args.like}; figures made with it are cost-faithful ones.")
    return 0


def write(source: Path, like: str, out: Path) -> None:
    """The widened folder of a small target, a folder or a GGUF file. Raises DuoChatError when it does not fit."""
    large = config(loading.read_config(source), LIKE[like])
    out.mkdir(parents=True, exist_ok=True)
    large.save_pretrained(out)
    if source.is_file():
        tokenizer.write_tokenizer(gguf.read(source), out)
    for name in KEPT:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    told = f"a small target with the shape of {like} (cost-faithful)"
    made = {"maker": __name__, "told": told, "source": str(source.resolve()), "like": like, "seed": 0}
    (out / RECIPE).write_text(json.dumps(made))


def build(folder: Path, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """The widened model of a folder that `python -m duochat widen` wrote; its weights are made here, on the device."""
    made = recipe(folder)
    source = Path(made["source"])
    if not source.exists():
        raise DuoChatError(f"{source}, which {folder} widens, is gone: run widen again.")
    small = loading.read(source, torch.device("cpu"), torch.float32)
    return widen(small, LIKE[made["like"]], device, dtype, made["seed"])


@torch.no_grad()
def widen(
    small: torch.nn.Module, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> torch.nn.Module:
    """A model of the larger shape with the function of `small` (a Llama). Raises DuoChatError when it cannot fit."""
    wide = Wide(small, shape, device, seed)
    large = allocated(wide.empty, device, dtype)
    for name, parameter in large.named_parameters():
        wide.fill(name, parameter)
    large.generation_config = copy.deepcopy(small.generation_config)
    return large


def config(small: Any, shape: Shape) -> Any:
    """The configuration of a small one's widened model. Raises DuoChatError when the shape cannot hold it."""
    if small.model_type not in FAMILIES:
        raise DuoChatError(
            f"A target of the {small.model_type} family cannot be widened: give a Llama or Qwen2, such as SmolLM2."
        )
    sizes = shape._asdict()
    fits = all(getattr(small, name) <= size for name, size in sizes.items())
    if not fits or shape.head_dim % small.head_dim or not _kv_slots(small, shape):
        raise DuoChatError("The target is larger than the shape to widen it to: choose a larger --like.")
    large = copy.deepcopy(small)
    large.update(sizes | {"rms_norm_eps": small.rms_norm_eps * small.hidden_size / shape.hidden_size})
    if kinds := getattr(small, "layer_types", None):
        large.layer_types = kinds[:1] * shape.num_hidden_layers
    return large


def _kv_slots(small: Any, shape: Shape) -> list[tuple[int, list[int]]]:
    """For each used kv head of the large model: that of the small one, and the query heads it serves there. Empty when
    there are too few."""
    per_small, per_large = (c.num_attention_heads // c.num_key_value_heads for c in (small, shape))
    starts = range(0, small.num_attention_heads, per_small)
    found = [
        (kv, list(range(at, min(at + per_large, start + per_small))))
        for kv, start in enumerate(starts)
        for at in range(start, start + per_small, per_large)
    ]
    return found if len(found) <= shape.num_key_value_heads else []


class Wide:
    """The widened model, of which a parameter at a time can be made. Raises DuoChatError when it cannot fit."""

    def __init__(self, small: torch.nn.Module, shape: Shape, device: torch.device, seed: int = 0) -> None:
        c, self.config = small.config, config(small.config, shape)
        with torch.device("meta"):
            self.empty = type(small)(self.config)
        self.empty.tie_weights()
        self.small = {name: value.to(device) for name, value in small.state_dict().items()}
        self.generator = torch.Generator(device).manual_seed(seed)
        self.width, self.head = c.hidden_size, shape.head_dim
        times, group = shape.head_dim // c.head_dim, shape.num_attention_heads // shape.num_key_value_heads
        slots = _kv_slots(c, shape)
        queries = [(q, large * group + i) for large, (_, served) in enumerate(slots) for i, q in enumerate(served)]
        keys = [(kv, large) for large, (kv, _) in enumerate(slots)]
        pairs, plain = torch.arange(c.head_dim // 2), torch.arange(c.head_dim)
        rotary = torch.cat([pairs * times, pairs * times + shape.head_dim // 2])
        first = lambda n: (slice(n), slice(n))  # noqa: E731
        self.places = {  # by part: which rows (o_proj, down_proj: columns) of the small one, and where they go
            "q_proj": self._heads(queries, plain, rotary),
            "k_proj": self._heads(keys, plain, rotary),
            "v_proj": self._heads(keys, plain, plain),
            "o_proj": self._heads(queries, plain, plain),
            **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), first(c.intermediate_size)),
            **dict.fromkeys(("embed_tokens", "lm_head"), first(c.vocab_size)),
        }
        self.scale = {"q_proj": times**0.5, "norm": (c.hidden_size / shape.hidden_size) ** 0.5}

    def _heads(self, moved: list[tuple[int, int]], inside: Tensor, inside_large: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of heads in the small and in the large projection."""
        small = torch.cat([inside + head * len(inside) for head, _ in moved])
        large = torch.cat([inside_large + head * self.head for _, head in moved])
        return small, large

    def fill(self, name: str, large: Tensor) -> None:
        """Write one parameter, random beside the small model's part or, where it must not act, zero."""
        part = "norm" if "norm" in name else name.split(".")[-2]
        large.normal_(0, 0.02, generator=self.generator)
        if part in SILENT:
            large.zero_()
        if (small := self.small.get(name)) is None:
            return
        source, target = self.places.get(part, (slice(self.width), slice(self.width)))
        if part in ("o_proj", "down_proj"):
            large[: self.width, target] = small[:, source].to(large.dtype)
            return
        if part == "q_proj":  # what a used head has beyond the small one's size must not meet the random keys
            large.view(-1, self.head, *large.shape[1:])[target // self.head] = 0
        met = large if large.ndim == 1 else large[:, : self.width]
        met[target] = (small[source] * self.scale.get(part, 1)).to(large.dtype)
