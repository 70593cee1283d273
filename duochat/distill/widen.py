"""`python -m duochat widen`: a target of another size with the same function, to time what cannot be fetched.

A folder for the torch lane is a recipe (a few kilobytes and the tokenizer): its weights are made on the device at load.
`--gguf` writes them as a file for the llama.cpp lane.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from duochat import DuoChatError, terminal
from duochat.config import load
from duochat.models.convert import target_folder
from duochat.models.fetch import fetch
from duochat.models.folder import RECIPE

KEPT = ("generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")
KINDS = ("q4_k_m", "q8_0", "bf16", "f16")


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that decide what a forward costs."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head: int = 128


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
    source, made = target_folder(path), args.out
    args.out.mkdir(parents=True, exist_ok=True)
    if args.gguf:
        from duochat.distill import widen_gguf

        made, bar = args.out / f"{args.like}-{args.gguf}.gguf", terminal.Bar()
        widen_gguf.write(path, source, args.like, made, args.gguf, bar)
        bar.close()
    else:
        write(source, args.like, args.out)
    print(f"{made}: {path.name} with the shape of {args.like}; figures made with it are cost-faithful ones.")
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
