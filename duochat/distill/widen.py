"""`python -m duochat widen`: a target of another size with the same function, to time what cannot be fetched.

A folder for the torch lane is a recipe (a few kilobytes and the tokenizer): its weights are made on the device at load.
`--gguf` writes them as a file for the llama.cpp lane.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from duochat import DuoChatError, terminal
from duochat.config import load
from duochat.distill import widen_gguf, widened
from duochat.distill.widened import LIKE
from duochat.models.convert import target_folder
from duochat.models.fetch import fetch
from duochat.models.folder import RECIPE, usable

KEPT = ("generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="REF", help="the small target (default: the configured one)")
    parser.add_argument("--like", required=True, choices=LIKE, help="whose shape to take")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a folder to name as --target")
    kinds = widen_gguf.BITS
    parser.add_argument("--gguf", choices=kinds, help="write DIR/LIKE-KIND.gguf, a file to name as --target")


def main(args: argparse.Namespace) -> int:
    path = fetch(args.target or load().target)
    if args.gguf and path.suffix != ".gguf":
        raise DuoChatError(f"A GGUF file is widened from one, and {path.name} is none: name a GGUF file as --target.")
    source, made = target_folder(path), args.out
    args.out.mkdir(parents=True, exist_ok=True)
    if args.gguf:
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

    with usable(source):
        small = AutoConfig.from_pretrained(source)
    config = widened.config(small, LIKE[like])
    out.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(out)
    for name in KEPT:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    told = f"a small target with the shape of {like} (cost-faithful)"
    made = {"maker": widened.__name__, "told": told, "source": str(source.resolve()), "like": like, "seed": 0}
    (out / RECIPE).write_text(json.dumps(made))
