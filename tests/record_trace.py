"""Record an answer of the real pair for Learn: python tests/record_trace.py assets/traces/NAME.jsonl PROMPT."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from duochat import config
from duochat.chat.chat import Options
from duochat.chat.recording import Recording, record
from duochat.chat.worker import Worker


def recorded(prompt: str, options: Options, settings: config.Settings) -> Recording:
    """One answer by the settings' pair, with what the machine was measured to be. Raises DuoChatError."""
    worker = Worker(settings)
    try:
        record(worker, "Say hello.", replace(options, max_tokens=4), lambda: False, lambda answer: None)
        return record(worker, prompt, options, lambda: False, lambda answer: None)
    finally:
        worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--config")
    parser.add_argument("--decoder", default="duotree")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=160)
    args = parser.parse_args()
    options = Options(decoder=args.decoder, temperature=args.temperature, seed=args.seed, max_tokens=args.max_tokens)
    made = recorded(args.prompt, options, config.load(args.config))
    args.file.write_text("\n".join(made.lines()) + "\n", "utf-8")
    print(f"{args.file}: {made.answer.stats.to_dict()}")


if __name__ == "__main__":
    main()
