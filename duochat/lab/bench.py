"""The benchmark: tasks x decoders in one process -> table, JSON and HTML.

Every decoder answers the same contexts one after the other, in an order that turns with each prompt; the caches of
both lanes are emptied before each. A second turn continues plain decoding's answer, so contexts are the same for all.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, Protocol

from duochat import DuoChatError, config, terminal
from duochat.app.chat import fit
from duochat.engine.decoding import DECODERS, Request, decode
from duochat.engine.lanes import Cancelled, never
from duochat.engine.rounds import Round
from duochat.engine.sampling import Sampling
from duochat.engine.tree import Acceptance, Node
from duochat.lab import machine, metrics, report, tasks
from duochat.lab.metrics import REFERENCE, Run
from duochat.models import cache_dir

Stopped = Callable[[], bool]
UNEQUAL = 1  # exit status
SAVE_EVERY = 10.0  # seconds


# ---------------------------------------------------------------- who takes part


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer as its contestant gave it; times by the caller's clock, seconds since the request."""

    first_s: float
    total_s: float
    figures: dict[str, Any]  # further fields of a Run, `tokens` and `finish` among them
    rounds: tuple[Round, ...] = ()


class Contestant(Protocol):
    """Whoever answers: one of our decoders, a variant of one, or a peer."""

    name: str
    kind: str  # "decoder", "ablation" or "peer"

    def answer(self, context: Sequence[int], sampling: Sampling, max_tokens: int, stopped: Stopped) -> Timed:
        """Answer once, with empty caches. Raises Cancelled when stopped."""
        ...


class Decoder:
    """One of our decoders on the engine's lanes, with costs and acceptance of its own: none learns from another."""

    kind = "decoder"

    def __init__(self, name: str, engine: Any, budget: int | None = None) -> None:
        self.name, self.decoder, self.budget = name, name, budget
        self.engine, self.drafter = engine, engine.drafter
        self.costs, self.acceptance = deepcopy(engine.costs), Acceptance()
        self.schedules: Mapping[str, Callable[..., Any]] = DECODERS

    def answer(self, context: Sequence[int], sampling: Sampling, max_tokens: int, stopped: Stopped) -> Timed:
        request = Request(sampling, max_tokens, self.decoder, self.budget)
        lanes = (self.engine.target, self.drafter, self.costs, self.acceptance)
        forget(self.engine.target, self.drafter, context)
        rounds, at = [], []
        began = perf_counter()
        with closing(decode(context, request, *lanes, stopped, schedules=self.schedules)) as answer:
            for r in answer:
                at.append(perf_counter() - began)
                rounds.append(r)
        if rounds[-1].finish == "cancelled":
            raise Cancelled
        shown = [seconds for seconds, r in zip(at, rounds, strict=True) if r.tokens]
        return Timed(shown[0], shown[-1], metrics.of_rounds(rounds, shown[-1]), tuple(rounds))


def forget(target: Any, drafter: Any, context: Sequence[int]) -> None:
    """Empty the caches of both lanes: they keep only what a context shares with the one before."""
    other = [1 if context[0] == 0 else 0]
    target.verify(other, (), Sampling())
    if drafter is not None:
        drafter.expand(other, [Node(other[0], None, 0)], Sampling(), never)


# ---------------------------------------------------------------- what is asked


@dataclass(frozen=True, slots=True)
class Plan:
    """What a benchmark measures, apart from who takes part."""

    questions: Sequence[tasks.Question]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 128
    repeat: int = 1

    def requests(self) -> Iterator[tuple[int, int, tasks.Question]]:
        """(place in the order, repeat, question); a whole set before it is repeated."""
        for repeat in range(self.repeat):
            for place, question in enumerate(self.questions):
                yield repeat * len(self.questions) + place, repeat, question

    @property
    def size(self) -> int:
        """Requests to each contestant."""
        return self.repeat * sum(len(question.turns) for question in self.questions)


class Bench:
    """Asks every contestant everything and keeps the runs; `runs` and `timelines` may come from an earlier start."""

    def __init__(self, contestants: Sequence[Contestant], tokenizer: Any, context_length: int, plan: Plan) -> None:
        self.contestants, self.tokenizer, self.context_length, self.plan = contestants, tokenizer, context_length, plan
        self.runs: list[Run] = []
        self.timelines: dict[str, list[dict[str, Any]]] = {}

    def run(self, stopped: Stopped = never, progress: Callable[[int, int], None] | None = None) -> Iterator[None]:
        """Measure what is not measured yet; yields after each question. Ends early, without a fault, when stopped."""
        done = {run.key: run for run in self.runs}
        try:
            if len(done) < self.plan.size * len(self.contestants):
                self.warm_up(stopped)
            for place, repeat, question in self.plan.requests():
                self._ask(place, repeat, question, done, stopped)
                if progress:
                    progress(len(done), self.plan.size * len(self.contestants))
                yield
        except Cancelled:
            return

    def warm_up(self, stopped: Stopped) -> None:
        """One short answer of everybody, and on a GPU the longest too, so that nothing is compiled while we measure."""
        contexts = sorted((self._context([], question.turns[0]) for question in self.plan.questions), key=len)
        chosen = [(contexts[0], 16)] + ([(contexts[-1], self.plan.max_tokens)] if machine.gpus() else [])
        for context, max_tokens in chosen:
            for contestant in self.contestants:
                contestant.answer(context, self.plan.sampling, min(max_tokens, self.plan.max_tokens), stopped)

    def _context(self, messages: list[dict[str, str]], turn: str) -> list[int]:
        messages = [*messages, {"role": "user", "content": turn}]
        return fit(self.tokenizer, messages, self.context_length, self.plan.max_tokens).ids

    def _ask(
        self, place: int, repeat: int, question: tasks.Question, done: dict[tuple[Any, ...], Run], stopped: Stopped
    ) -> None:
        """All turns of a conversation, each to everybody."""
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(question.turns):
            context = self._context(messages, text)
            for contestant in rotated(self.contestants, place + turn):
                key = (question.task, question.id, turn, repeat, contestant.name)
                if key not in done:
                    done[key] = self._measure(contestant, context, key, stopped)
                    self.runs.append(done[key])
            answer = done[(*key[:4], REFERENCE)]
            messages += [{"role": "user", "content": text}]
            messages += [{"role": "assistant", "content": self.tokenizer.decode(answer.tokens).strip() or "…"}]

    def _measure(self, contestant: Contestant, context: list[int], key: tuple[Any, ...], stopped: Stopped) -> Run:
        sampling = replace(self.plan.sampling, seed=self.plan.sampling.seed + key[3])
        machine.reset_peaks()
        timed = contestant.answer(context, sampling, self.plan.max_tokens, stopped)
        if contestant.name not in self.timelines and timed.rounds:
            self.timelines[contestant.name] = timeline(timed.rounds)
        times = {"first_s": timed.first_s, "total_s": timed.total_s}
        return Run(*key, prompt_tokens=len(context), **times, **timed.figures, **machine.peaks())


def rotated(contestants: Sequence[Contestant], by: int) -> list[Contestant]:
    """The same order, begun elsewhere."""
    start = by % len(contestants)
    return [*contestants[start:], *contestants[:start]]


def timeline(rounds: Sequence[Round], first: int = 1, count: int = 12) -> list[dict[str, Any]]:
    """What both lanes did during a few rounds, for the picture; seconds since the request."""
    return [
        {
            "started": r.started,
            "ended": r.ended,
            "rows": len(r.pending) + 1,
            "tokens": len(r.tokens),
            "accepted": len(r.accepted),
            "batches": [[b.started, b.ended, b.size] for b in r.batches],
        }
        for r in rounds[first : first + count]
    ]


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", metavar="A,B|all", default="all", help=f"of {', '.join(tasks.TASKS)}")
    parser.add_argument("--limit", metavar="N", type=_positive, help="questions of each task")
    parser.add_argument("--decoders", metavar="A,B", default=",".join(DECODERS), help=f"of {', '.join(DECODERS)}")
    parser.add_argument("--prompts", metavar="DIR", type=Path, help="prompts in Spec-Bench's format instead of ours")
    parser.add_argument("--max-tokens", metavar="N", type=_positive, default=128, help="of each answer (128)")
    parser.add_argument("--temperature", metavar="T", type=float, default=0.0, help="0 = greedy")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="of the first repeat; the next has S + 1")
    parser.add_argument("--repeat", metavar="N", type=_positive, default=1, help="times that everything is asked")
    parser.add_argument("--json", metavar="FILE", type=Path, help="where the results go (default: the cache folder)")
    parser.add_argument("--html", metavar="FILE", type=Path, help="where the report goes (default: beside the JSON)")
    parser.add_argument("--resume", action="store_true", help="go on where the JSON file ends")
    terminal.add_pair(parser)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def main(args: argparse.Namespace) -> int:
    """Measure, print and write the report. Status 1 when a decoder's tokens are not plain decoding's."""
    from duochat.app.worker import load_chat

    args.json = args.json or cache_dir() / "bench" / "latest.json"
    args.html = args.html or args.json.with_suffix(".html")
    for path in (args.json, args.html):
        check_writable(path)
    names = chosen_decoders(args.decoders)
    plan = read_plan(args)
    settings = config.load(args.config, target=args.target, draft=args.draft)
    about = {"settings": describe_settings(args, settings, names), "machine": machine.describe()}
    if sentence := machine.warning(about["machine"]):
        terminal.report(sentence)
    bar = terminal.Bar()
    talk = load_chat(settings, bar)
    bar.close()
    return measure(args, plan, talk.engine, talk.tokenizer, names, about)


def measure(
    args: argparse.Namespace, plan: Plan, engine: Any, tokenizer: Any, names: Sequence[str], about: dict[str, Any]
) -> int:
    """The benchmark proper, on models that are loaded; returns the exit status."""
    if engine.drafter is None:
        raise DuoChatError(f"There is nothing to compare without a draft: {engine.fault}")
    about |= {"machine": about["machine"] | {"lanes": engine.describe()}, "calibration": engine.costs.to_dict()}
    about["strict"] = about["machine"]["lanes"]["target_dtype"] == "float32" or about["settings"]["reproducible"]
    bench = Bench([Decoder(name, engine) for name in names], tokenizer, engine.context_length, plan)
    if args.resume:
        resume(bench, args.json, about["settings"])

    def results() -> dict[str, Any]:
        return report.build(bench.runs, kinds(bench), about, bench.timelines)

    stopped = carry_out(bench, args.json, results)
    if not any(run.decoder == REFERENCE for run in bench.runs):
        raise KeyboardInterrupt
    found = results() | {"complete": not stopped}
    save(args.json, found)
    print(report.text(found))
    return terminal.INTERRUPTED if stopped else UNEQUAL if found["strict"] and not found["equal"] else 0


def kinds(bench: Bench) -> dict[str, str]:
    """Kind of each contestant by name, in the order of the report."""
    return {contestant.name: contestant.kind for contestant in bench.contestants}


def carry_out(bench: Bench, path: Path, results: Callable[[], dict[str, Any]]) -> bool:
    """Run with a progress bar, save now and then; returns whether Ctrl-C ended it."""
    bar, saved = terminal.Bar(), monotonic()
    with terminal.stop_on_interrupt() as stopped:
        for _ in bench.run(stopped, lambda done, total: bar("Benchmark", done, total)):
            if monotonic() - saved > SAVE_EVERY:
                save(path, results())
                saved = monotonic()
        bar.close()
        return stopped()


def chosen_decoders(text: str) -> list[str]:
    """Names from a list with commas; plain decoding, which the others are compared with, is always among them."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in DECODERS]:
        raise DuoChatError(f"There is no decoder {unknown[0]!r}: choose from {', '.join(DECODERS)}.")
    return list(dict.fromkeys([REFERENCE, *names]))


def read_plan(args: argparse.Namespace) -> Plan:
    names = tasks.TASKS if args.tasks == "all" else [name.strip() for name in args.tasks.split(",")]
    questions = tasks.load(names, args.limit, args.prompts)
    return Plan(questions, Sampling(args.temperature, seed=args.seed), args.max_tokens, args.repeat)


def describe_settings(args: argparse.Namespace, settings: config.Settings, names: Sequence[str]) -> dict[str, Any]:
    """What decides the results, for the report and for --resume."""
    return {
        "target": settings.target,
        "draft": settings.draft,
        "quantize": settings.quantize,
        "reproducible": settings.reproducible,
        "tasks": args.tasks,
        "limit": args.limit,
        "prompts": str(args.prompts) if args.prompts else "our own",
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "seeds": [args.seed + n for n in range(args.repeat)],
        "repeat": args.repeat,
        "decoders": list(names),
    }


# ---------------------------------------------------------------- files


FREE_TO_CHANGE = ("tasks", "limit", "repeat", "seeds", "decoders")  # settings that a resumed run may have otherwise


def resume(bench: Bench, path: Path, settings: Mapping[str, Any]) -> None:
    """Take over the runs of an earlier start. Raises DuoChatError when that had other settings."""
    if not path.exists():
        return
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        runs = [Run.from_dict(raw) for raw in earlier["runs"]]
    except (ValueError, KeyError, TypeError):
        raise DuoChatError(
            f"{path} is no result of this benchmark: name another file, or leave --resume out."
        ) from None
    for name in settings.keys() - set(FREE_TO_CHANGE):
        if earlier["settings"].get(name) != settings[name]:
            raise DuoChatError(f"{path} was measured with another {name}: start afresh, without --resume.")
    asked, names = {(q.task, q.id) for q in bench.plan.questions}, kinds(bench)
    known = [run for run in runs if run.decoder in names and (run.task, run.question) in asked]
    bench.runs = [run for run in known if run.repeat < bench.plan.repeat]
    bench.timelines = {name: rounds for name, rounds in earlier["timelines"].items() if name in names}


def save(path: Path, results: dict[str, Any]) -> None:
    """Write whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(results), encoding="utf-8")
    os.replace(partial, path)


def check_writable(path: Path) -> None:
    """Raises DuoChatError now instead of after an hour; what the file holds stays."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("a").close()
        if new:
            path.unlink()
    except OSError as fault:
        raise DuoChatError(f"{path} cannot be written ({fault.strerror}): give another file.") from None
