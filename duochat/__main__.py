"""The commands: python -m duochat chat|bench|serve|calibrate|check|models|distill|widen.

Each command imports what it needs when it runs, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from duochat import DuoChatError, config, terminal

if TYPE_CHECKING:
    from duochat.bench.forecast import Forecast
    from duochat.chat.answer import Answer, Step
    from duochat.chat.chat import Options
    from duochat.config import Settings

ANSWER = {  # arguments of `chat` by setting: a word for the value, and the help
    "decoder": ("NAME", ", ".join(config.DECODERS)),
    "max_tokens": ("N", None),
    "temperature": ("T", "0 = greedy"),
    "top_k": ("K", "0 = off"),
    "top_p": ("P", "1 = off"),
    "min_p": ("P", "0 = off"),
    "repetition_penalty": ("R", "of what prompt or answer holds; 1 = off"),
    "presence_penalty": ("A", "of what the answer holds; 0 = off"),
    "frequency_penalty": ("A", "the same for each time; 0 = off"),
    "logit_bias": ("JSON", 'added to logits, {"token id": number}'),
    "seed": ("S", "same seed, same text, with every decoder"),
    "draft_budget": ("N|auto", "drafted tokens a round"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 done, 2 bad input, 130 interrupted."""
    return terminal.run(_dispatch, arguments)


# Of a command: its line of the help text, what adds its arguments, what runs it.
Command = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]


def _dispatch(arguments: Sequence[str]) -> int:
    parser = terminal.Parser(
        prog="python -m duochat", description="Chat that drafts on the CPU and verifies on the GPU."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (summary, add_arguments, run) in COMMANDS.items():
        one = commands.add_parser(name, help=summary, description=summary)
        if name in arguments[:1]:  # the others' arguments would cost imports
            add_arguments(one)
            one.set_defaults(run=run)
    args = parser.parse_args(arguments)
    return args.run(args)


def _elsewhere(module: str, summary: str) -> Command:
    """A command that lives in a module of its own."""

    def loaded() -> Any:
        return import_module(f"duochat.{module}")

    return summary, lambda parser: loaded().add_arguments(parser), lambda args: loaded().main(args)


def _settings(args: argparse.Namespace, *names: str) -> Settings:
    return config.load(args.config, **{name: getattr(args, name) for name in ("target", "draft", *names)})


# ---------------------------------------------------------------- chat


def _chat_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", type=terminal.text, help="what to answer")
    parser.add_argument("--system", metavar="S", type=terminal.text, help="system prompt")
    for name, (word, about) in ANSWER.items():
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=word, type=terminal.value, help=about)
    terminal.add_pair(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    parser.add_argument("--trace", metavar="FILE.jsonl", help="write each round as a JSON line")


def chat(args: argparse.Namespace) -> int:
    """Answer one prompt, streaming its text, or as one JSON object."""
    from duochat.chat import loading, worker  # the engine starts before the rest of the chat is imported

    settings = _settings(args, "system", *ANSWER)
    with ExitStack() as stack:
        trace = stack.enter_context(_writable(args.trace)) if args.trace else None
        prepare = partial(loading.prepare, alone=settings.decoder == "autoregressive")
        engine = stack.enter_context(closing(worker.Worker(settings, prepare)))
        from duochat.chat.answer import Answer
        from duochat.chat.chat import Options

        options, answer = Options.of(settings), Answer()
        stopped = stack.enter_context(terminal.stop_on_interrupt())
        show = _Shown(None if args.json else sys.stdout, trace)
        for step in engine.reply([{"role": "user", "content": args.prompt}], options, stopped):
            show(answer.add(step))
        if args.json and answer.rounds:
            print(json.dumps(_summary_of(answer, options, engine.status()["hardware"])))
        elif answer.rounds:
            print(f"\n{_summary(answer)}", file=sys.stderr)
    return _status(answer)


@dataclass(slots=True)
class _Shown:
    """Steps as they come: text, notices, what is being loaded, and the trace."""

    stream: IO[str] | None
    trace: IO[str] | None
    bar: terminal.Bar = field(default_factory=terminal.Bar)

    def __call__(self, step: Step) -> None:
        if step.phase == "loading" and step.notice:
            return self.bar(step.notice, *(step.progress or (0, 0)))
        self.bar.close()
        if step.notice:
            terminal.report(step.notice)
        if self.stream:
            print(step.text, end="", file=self.stream, flush=True)
        if self.trace and step.round:
            self.trace.write(step.round.to_json() + "\n")


def _summary_of(answer: Answer, options: Options, hardware: dict[str, Any]) -> dict[str, Any]:
    """The object of `chat --json`."""
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish,
        "decoder": options.decoder,
        "seed": options.seed,
        "stats": answer.stats.to_dict(),
        "hardware": hardware,
    }


def _summary(answer: Answer) -> str:
    s = answer.stats
    return (
        f"{s.completion_tokens} tokens, {s.tokens_per_s:.1f} tokens/s, first after {s.first_token_at or 0:.2f} s, "
        f"α {s.acceptance_rate:.2f}, τ {s.mean_accepted_length:.2f}"
    )


def _status(answer: Answer) -> int:
    """The exit status; says what went wrong."""
    if answer.finish == "error":
        terminal.report(answer.error or "The engine stopped without an answer: try again.")
        return terminal.BAD_INPUT
    if answer.finish == "cancelled" and not answer.rounds:
        terminal.report("Stopped.")
    return terminal.INTERRUPTED if answer.finish == "cancelled" else 0


@contextmanager
def _writable(path: str) -> Iterator[IO[str]]:
    try:
        out = Path(path).expanduser().open("w", encoding="utf-8")
    except OSError as fault:
        raise DuoChatError(f"{path} cannot be written ({fault.strerror}): give another file.") from None
    with out:
        yield out


# ---------------------------------------------------------------- calibrate, check, models


def _calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    terminal.add_pair(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def calibrate(args: argparse.Namespace) -> int:
    """Measure both devices, and print the draft budget that follows and the tokens per second to expect."""
    from duochat.bench import simulate, tasks
    from duochat.chat.loading import load_chat

    with closing(terminal.Bar()) as bar:
        talk = load_chat(_settings(args), bar)
        if talk.engine.fault:
            raise DuoChatError(talk.engine.fault)
        bar("Measuring both devices", 0, 0)
        costs = talk.engine.calibrate()
        questions = tasks.load(limit=1)
        contexts = [talk.tokenizer.prompt([{"role": "user", "content": q.turns[0]}]) for q in questions]
        expected = simulate.forecast(talk.engine, contexts, progress=partial(bar, "Trying a prompt of each task"))
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
    """Say whether a target can be one and a draft fits it; status 2 when not."""
    from duochat.chat.text import Tokenizer
    from duochat.models.fetch import fetch
    from duochat.models.files import backend_of
    from duochat.models.pair import check_pair

    settings = _settings(args)
    with closing(terminal.Bar()) as bar:
        target, draft = fetch(settings.target, bar), fetch(settings.draft, bar)
    backend_of(target, settings.backend)
    Tokenizer.load(target, settings.chat_template).prompt([{"role": "user", "content": "Hello"}])
    pair = check_pair(target, draft)
    if args.json:
        print(json.dumps({"target": settings.target, "draft": settings.draft} | pair.to_dict()))
    elif pair.fits:
        print(pair.sentence())
    if not pair.fits:
        raise DuoChatError(pair.sentence())
    return 0


def _models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="settings with a models_folder of your own")
    parser.add_argument("--forecast", action="store_true", help="tokens/s to expect; measures this machine, a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def models(args: argparse.Namespace) -> int:
    """List the presets, what each needs and has, and the models that lie on this disk with the drafts that fit."""
    from duochat.models.catalog import list_models
    from duochat.models.fetch import cached
    from duochat.models.local import list_local
    from duochat.models.store import cache_dir, weight

    entries, cache, settings = list_models(), cache_dir(), config.load(args.config)
    drafts = [path for entry in entries if (path := cached(entry.settings.draft))]
    found = list_local(settings.models_folder, drafts)
    pairs = [entry.settings for entry in entries if not entry.unfit]
    pairs += [replace(settings, target=m.reference, draft=m.drafts[0], agreement=0) for m in found if m.drafts]
    told = _forecasts(pairs) if args.forecast else {}
    if args.json:
        listed = {"presets": [e.to_dict() for e in entries], "local": [model.to_dict() for model in found]}
        listed["forecasts"] = {target: forecast.to_dict() for target, forecast in told.items()}
        print(json.dumps({"cache": str(cache), "cache_bytes": weight(cache), **listed}))
        return 0
    sentence = {target: f"\n    {forecast.sentence}" for target, forecast in told.items()}
    print(f"{'PRESET':<24} {'TARGET GiB':>10} {'DRAFT GiB':>10}  {'CACHED':<8} FITS HERE")
    for entry in entries:
        s, here = entry.settings, {0: "no", 1: "in part", 2: "yes"}[entry.target_cached + entry.draft_cached]
        print(f"{entry.name:<24} {s.target_gib:>10g} {s.draft_gib:>10g}  {here:<8} {_fits(entry)}")
        print(f"    {s.description}{sentence.get(s.target, '') if s.backend != 'torch' else ''}")
    print(f"\n{'ON THIS DISK':<40} {'GiB':>6}  {'KIND':<8} {'QUANT':<8} FITS HERE")
    for model in found:
        print(f"{model.name:<40} {model.size:>6.1f}  {model.architecture:<8} {model.quantization:<8} {_fits(model)}")
        drafts = "".join(f"\n    draft: {draft}" for draft in model.drafts)
        print(f"    {model.reference}{drafts}{sentence.get(model.reference, '')}")
    print(f"\nCache: {cache} ({terminal.amount(weight(cache))})")
    return 0


def _forecasts(pairs: Sequence[Settings]) -> dict[str, Forecast]:
    """By target, of which enough is known."""
    from duochat.bench import forecast

    found = {}
    with closing(terminal.Bar()) as bar:
        for done, pair in enumerate(pairs):
            bar("Measuring this machine", done, len(pairs))
            if told := forecast.of_pair(pair):
                found[pair.target] = told
    return found


def _fits(listed: Any) -> str:
    return f"no: {listed.unfit}" if listed.unfit else "yes"


COMMANDS: dict[str, Command] = {
    "chat": ("answer one prompt", _chat_arguments, chat),
    "bench": _elsewhere("bench.bench", "measure the decoders on the tasks"),
    "serve": _elsewhere("api.serve", "answer programs over HTTP, in OpenAI's form"),
    "calibrate": ("measure both devices", _calibrate_arguments, calibrate),
    "check": ("can a target be one, does a draft fit it?", _calibrate_arguments, check),
    "models": ("presets, and the models that lie on this disk", _models_arguments, models),
    "distill": _elsewhere("distill.distill", "make a draft for a target"),
    "widen": _elsewhere("distill.widened", "make a target of another size with the same function, for timing"),
}

if __name__ == "__main__":
    sys.exit(main())
