"""The commands: python -m duochat chat|bench|serve|calibrate|check|models|distill|widen.

Each command imports what it needs when it runs, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from duochat import DuoChatError, terminal

if TYPE_CHECKING:
    from duochat.chat.chat import Chat, Options, Step
    from duochat.config import Settings
    from duochat.engine.rounds import Round

SAMPLING = ("decoder", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "draft_budget", "system")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 done, 2 bad input, 130 interrupted."""
    return terminal.run(_dispatch, arguments)


@dataclass(frozen=True, slots=True)
class Command:
    """A line of the help text, and how to add the command's arguments and run it."""

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _dispatch(arguments: Sequence[str]) -> int:
    parser = terminal.Parser(
        prog="python -m duochat", description="Chat that drafts on the CPU and verifies on the GPU."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=command.summary, description=command.summary)
        if name in arguments[:1]:  # the others' arguments would cost imports
            command.add_arguments(one)
            one.set_defaults(run=command.run)
    args = parser.parse_args(arguments)
    return args.run(args)


def _elsewhere(module: str, summary: str) -> Command:
    """A command that lives in a module of its own."""

    def loaded() -> Any:
        return import_module(f"duochat.{module}")

    return Command(summary, lambda parser: loaded().add_arguments(parser), lambda args: loaded().main(args))


def _settings(args: argparse.Namespace, *names: str) -> Settings:
    from duochat import config

    return config.load(args.config, **{name: getattr(args, name) for name in ("target", "draft", *names)})


# ---------------------------------------------------------------- chat


def _chat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="what to answer")
    parser.add_argument("--system", metavar="S", help="system prompt")
    parser.add_argument("--decoder", metavar="NAME", help="autoregressive, speculative, duodecoding or duotree")
    parser.add_argument("--max-tokens", metavar="N", type=int)
    parser.add_argument("--temperature", metavar="T", type=float, help="0 = greedy")
    parser.add_argument("--top-k", metavar="K", type=int, help="0 = off")
    parser.add_argument("--top-p", metavar="P", type=float, help="1 = off")
    parser.add_argument("--min-p", metavar="P", type=float, help="0 = off")
    parser.add_argument("--seed", metavar="S", type=int, help="same seed, same text, with every decoder")
    parser.add_argument("--draft-budget", metavar="N|auto", type=terminal.number_or_auto, help="drafted tokens a round")
    terminal.add_pair(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    parser.add_argument("--trace", metavar="FILE.jsonl", help="write each round as a JSON line")


def chat(args: argparse.Namespace) -> int:
    """Answer one prompt, streaming its text, or as one JSON object."""
    settings = _settings(args, *SAMPLING)
    with ExitStack() as stack:
        trace = stack.enter_context(_writable(args.trace)) if args.trace else None
        _refuse_unfit(settings)
        talk, options = _load_chat(settings)
        if options.decoder != "autoregressive" and (fault := talk.engine.describe().get("draft_fault")):
            raise DuoChatError(fault)
        answer = Answer(stream=None if args.json else sys.stdout, trace=trace)
        with terminal.stop_on_interrupt() as stopped:
            for step in talk.reply([{"role": "user", "content": args.prompt}], options, stopped):
                answer.add(step)
    if args.json:
        print(json.dumps(answer.to_dict(options, talk.engine.describe())))
    else:
        print(f"\n{answer.summary()}", file=sys.stderr)
    return answer.status()


def _refuse_unfit(settings: Settings) -> None:
    """Raises DuoChatError on a pair that cannot work, before seconds are spent on loading it."""
    from duochat import models

    bar = terminal.Bar()
    target = models.fetch(settings.target, bar)
    models.require_target(target)
    if settings.decoder != "autoregressive":
        models.require_pair(target, models.fetch(settings.draft, bar))
    bar.close()


def _load_chat(settings: Settings) -> tuple[Chat, Options]:
    from duochat.chat.chat import Options
    from duochat.chat.worker import load_chat

    bar = terminal.Bar()
    try:
        return load_chat(settings, bar), Options.of(settings)
    finally:
        bar.close()


@contextmanager
def _writable(path: str) -> Iterator[IO[str]]:
    try:
        out = Path(path).expanduser().open("w", encoding="utf-8")
    except OSError as fault:
        raise DuoChatError(f"{path} cannot be written ({fault.strerror}): give another file.") from None
    with out:
        yield out


@dataclass(slots=True)
class Answer:
    """An answer as its steps arrive: streamed, traced and summed up."""

    stream: IO[str] | None = None
    trace: IO[str] | None = None
    text: str = ""
    prompt_tokens: int = 0
    finish: str = "error"
    error: str = ""
    rounds: list[Round] = field(default_factory=list)

    def add(self, step: Step) -> None:
        self.text += step.text
        self.prompt_tokens = step.prompt_tokens or self.prompt_tokens
        self.finish = step.finish or self.finish
        self.error = step.error or self.error
        if step.notice:
            terminal.report(step.notice)
        if self.stream:
            print(step.text, end="", file=self.stream, flush=True)
        if step.round:
            self.rounds.append(step.round)
            if self.trace:
                self.trace.write(step.round.to_json() + "\n")

    def stats(self) -> Any:
        from duochat.engine.rounds import total

        return total(self.rounds, self.prompt_tokens)

    def to_dict(self, options: Options, hardware: dict[str, Any]) -> dict[str, Any]:
        """The object of `chat --json`."""
        return {
            "text": self.text,
            "token_ids": [token for r in self.rounds for token in r.tokens],
            "finish_reason": self.finish,
            "decoder": options.decoder,
            "seed": options.seed,
            "stats": self.stats().to_dict(),
            "hardware": hardware,
        }

    def summary(self) -> str:
        s = self.stats().to_dict()
        return (
            f"{s['completion_tokens']} tokens, {s['tokens_per_s']:.1f} tokens/s, first after {s['ttft_s']:.2f} s, "
            f"α {s['acceptance_rate']:.2f}, τ {s['mean_accepted_length']:.2f}"
        )

    def status(self) -> int:
        """The exit status; says what went wrong."""
        if self.finish == "error":
            terminal.report(self.error or "The engine stopped without an answer: try again.")
            return terminal.BAD_INPUT
        return terminal.INTERRUPTED if self.finish == "cancelled" else 0


# ---------------------------------------------------------------- calibrate, check, models


def _calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    terminal.add_pair(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def calibrate(args: argparse.Namespace) -> int:
    """Measure both devices, and print the draft budget that follows and the tokens per second to expect."""
    from duochat.bench import simulate, tasks

    bar = terminal.Bar()
    talk, _ = _load_chat(_settings(args))
    if talk.engine.fault:
        raise DuoChatError(talk.engine.fault)
    bar("Measuring both devices", 0, 0)
    costs = talk.engine.calibrate()
    questions = tasks.load(limit=1)
    contexts = [talk.tokenizer.prompt([{"role": "user", "content": q.turns[0]}]) for q in questions]
    expected = simulate.forecast(talk.engine, contexts, progress=partial(bar, "Trying a prompt of each task"))
    bar.close()
    budget = {"c": 1 / costs.budget, "draft_budget": costs.budget, "tokens_per_s": expected}
    _print({**budget, **costs.to_dict(), **talk.engine.describe()}, args.json)
    return 0


def _print(values: dict[str, Any], as_json: bool) -> None:
    """One JSON object, or a line per value."""
    if as_json:
        print(json.dumps(values))
        return
    for name, value in values.items():
        print(f"{name:<24} {json.dumps(value) if isinstance(value, (dict, list)) else value}")


def check(args: argparse.Namespace) -> int:
    """Say whether a draft fits a target; status 2 when it does not."""
    from duochat import models

    settings, bar = _settings(args), terminal.Bar()
    target, draft = models.fetch(settings.target, bar), models.fetch(settings.draft, bar)
    bar.close()
    models.require_target(target)
    pair = models.check_pair(target, draft)
    if args.json:
        print(json.dumps({"target": settings.target, "draft": settings.draft} | pair.to_dict()))
    elif pair.fits:
        print(pair.sentence())
    if not pair.fits:
        raise DuoChatError(pair.sentence())
    return 0


def _models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def models(args: argparse.Namespace) -> int:
    """List the presets: what each needs, whether that is here, what is in the cache already."""
    from duochat.models import cache_dir, list_models, weight

    entries, cache = list_models(), cache_dir()
    if args.json:
        presets = [entry.to_dict() for entry in entries]
        print(json.dumps({"cache": str(cache), "cache_bytes": weight(cache), "presets": presets}))
        return 0
    print(f"{'PRESET':<18} {'TARGET GiB':>10} {'DRAFT GiB':>10}  {'CACHED':<8} FITS HERE")
    for entry in entries:
        s, here = entry.settings, {0: "no", 1: "in part", 2: "yes"}[entry.target_cached + entry.draft_cached]
        fits = f"no: {entry.unfit}" if entry.unfit else "yes"
        print(f"{entry.name:<18} {s.target_gib:>10g} {s.draft_gib:>10g}  {here:<8} {fits}\n    {s.description}")
    print(f"Cache: {cache} ({terminal.amount(weight(cache))})")
    return 0


COMMANDS = {
    "chat": Command("answer one prompt", _chat_arguments, chat),
    "bench": _elsewhere("bench.bench", "measure the decoders on the tasks"),
    "serve": _elsewhere("api.serve", "answer programs over HTTP, in OpenAI's form"),
    "calibrate": Command("measure both devices", _calibrate_arguments, calibrate),
    "check": Command("does a draft fit a target?", _calibrate_arguments, check),
    "models": Command("presets, and what of them is here", _models_arguments, models),
    "distill": _elsewhere("distill.distill", "make a draft for a target"),
    "widen": _elsewhere("distill.widen", "make a target of another size with the same function, for timing"),
}

if __name__ == "__main__":
    sys.exit(main())
