"""`python -m duochat widen`: a target of another size with the same function, to time what cannot be fetched.

What is written is a recipe (a few kilobytes and the tokenizer): the widened weights are made on the device at load.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from duochat.config import load
from duochat.models import fetch, target_folder
from duochat.models.weights import RECIPE

KEPT = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama that decide what a forward costs."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head: int = 128


LIKE = {
    "llama-2-7b": Shape(4096, 11008, 32, 32, 32),
    "llama-2-13b": Shape(5120, 13824, 40, 40, 40),
    "qwen2.5-32b": Shape(5120, 27648, 64, 40, 8),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="REF", help="the small target (default: the configured one)")
    parser.add_argument("--like", required=True, choices=LIKE, help="whose shape to take")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a folder to name as --target")


def main(args: argparse.Namespace) -> int:
    source = target_folder(fetch(args.target or load().target))
    write(source, args.like, args.out)
    print(f"{args.out}: {source.name} with the shape of {args.like}; figures made with it are cost-faithful ones.")
    return 0


def write(source: Path, like: str, out: Path) -> None:
    """The widened folder of a small target's. Raises DuoChatError when that does not fit into the shape."""
    from transformers import AutoConfig

    from duochat.distill import widened

    config = widened.config(AutoConfig.from_pretrained(source), LIKE[like])
    out.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(out)
    for name in KEPT:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    recipe = {
        "maker": widened.__name__,
        "told": f"a small target with the shape of {like} (cost-faithful)",
        "source": str(source.resolve()),
        "like": like,
        "seed": 0,
    }
    (out / RECIPE).write_text(json.dumps(recipe))
