"""`python -m duochat widen`: a target of another size with the same function, to time what cannot be fetched.

What is written is a recipe (a few kilobytes and the tokenizer): the widened weights are made on the device at load.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from duochat.config import load
from duochat.models import fetch, target_folder

KEPT = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from duochat.engine.pytorch.widened import LIKE

    parser.add_argument("--target", metavar="REF", help="the small target (default: the configured one)")
    parser.add_argument("--like", required=True, choices=LIKE, help="whose shape to take")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="a folder to name as --target")


def main(args: argparse.Namespace) -> int:
    source = target_folder(fetch(args.target or load().target))
    args.out.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (source / name).is_file():
            shutil.copyfile(source / name, args.out / name)
    recipe = {"source": str(source.resolve()), "like": args.like, "seed": 0}
    (args.out / "widen.json").write_text(json.dumps(recipe))
    print(f"{args.out}: {source.name} with the shape of {args.like}; figures made with it are cost-faithful ones.")
    return 0
