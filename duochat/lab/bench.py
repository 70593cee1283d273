"""The benchmark: tasks x decoders in one process -> table, JSON and HTML.

Every decoder answers the same contexts one after the other, in an order that turns with each prompt; the caches of
both lanes are emptied before each. A second turn continues plain decoding's answer, so contexts are the same for all.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from duochat import DuoChatError, config, terminal
from duochat.app.chat import fit
from duochat.engine.decoding import DECODERS
from duochat.engine.lanes import Cancelled, never
from duochat.engine.rounds import Round
from duochat.engine.sampling import Sampling
from duochat.lab import goals, machine, report, tasks
from duochat.lab.contestants import PEERS, Contestant, Decoder, Stopped
from duochat.lab.metrics import REFERENCE, Run
from duochat.models import cache_dir

UNEQUAL = 1  # exit status
SAVE_EVERY = 10.0  # seconds


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
        contexts = sorted((self.first_context(question) for question in self.plan.questions), key=len)
        chosen = [(contexts[0], 16)] + ([(contexts[-1], self.plan.max_tokens)] if machine.gpus() else [])
        for context, max_tokens in chosen:
            for contestant in self.contestants:
                contestant.answer(context, self.plan.sampling, min(max_tokens, self.plan.max_tokens), stopped)

    def first_context(self, question: tasks.Question) -> list[int]:
        """Token ids of a conversation's beginning."""
        return self._context([], question.turns[0])

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
    parser.add_argument("--peers", metavar="A,B", default="", help=f"other ways to decode: {', '.join(PEERS)}")
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
    names, rivals = chosen_decoders(args.decoders), chosen("peer", args.peers, PEERS)
    plan = read_plan(args)
    settings = config.load(args.config, target=args.target, draft=args.draft)
    about = {"settings": describe_settings(args, settings, [*names, *rivals]), "machine": machine.describe()}
    if sentence := machine.warning(about["machine"]):
        terminal.report(sentence)
    bar = terminal.Bar()
    talk = load_chat(settings, bar)
    if talk.engine.drafter is None:
        raise DuoChatError(f"There is nothing to compare without a draft: {talk.engine.fault}")
    contestants = [Decoder(name, talk.engine) for name in names]
    if rivals:
        contestants += load_peers(rivals, settings, talk, plan, bar)
    bar.close()
    return measure(args, plan, talk.engine, talk.tokenizer, contestants, about)


def load_peers(
    names: Sequence[str], settings: config.Settings, talk: Any, plan: Plan, bar: terminal.Bar
) -> list[Contestant]:
    """Loads transformers, and the target once more."""
    from duochat.lab.peers import Loader

    turns = [[{"role": "user", "content": turn} for turn in question.turns] for question in plan.questions]
    longest = max(len(talk.tokenizer.prompt(messages)) + plan.max_tokens * len(messages) for messages in turns)
    load = Loader(settings, talk.engine, min(longest, talk.engine.context_length), bar)
    return [load(name) for name in names]


def measure(
    args: argparse.Namespace,
    plan: Plan,
    engine: Any,
    tokenizer: Any,
    contestants: Sequence[Contestant],
    about: dict[str, Any],
) -> int:
    """The benchmark proper, on models that are loaded; returns the exit status."""
    from duochat.lab import page  # plotly takes its time to load

    about |= {"machine": about["machine"] | {"lanes": engine.describe()}, "calibration": engine.costs.to_dict()}
    about["strict"] = about["machine"]["lanes"]["target_dtype"] == "float32" or about["settings"]["reproducible"]
    bench = Bench(contestants, tokenizer, engine.context_length, plan)
    if args.resume:
        resume(bench, args.json, about["settings"])

    def results() -> dict[str, Any]:
        return report.build(bench.runs, kinds(bench), about, bench.timelines)

    stopped = carry_out(bench, args.json, results)
    if not any(run.decoder == REFERENCE for run in bench.runs):
        raise KeyboardInterrupt
    found = results() | {"complete": not stopped}
    if not stopped and engine.target.device.type == "cuda":
        found["goals"] = check_goals(bench, engine, found)
    save(args.json, found)
    page.write(args.html, found)
    print(report.text(found))
    terminal.report(f"Results: {args.json}. Report: {args.html}.")
    return terminal.INTERRUPTED if stopped else UNEQUAL if found["strict"] and not found["equal"] else 0


def check_goals(bench: Bench, engine: Any, results: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of `goals.table` as JSON."""
    ours = [contestant for contestant in bench.contestants if contestant.kind == "decoder"]
    context = bench.first_context(bench.plan.questions[0])
    return [goal.to_dict() for goal in goals.table(results, goals.probe(engine.target, ours, context))]


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
    return list(dict.fromkeys([REFERENCE, *chosen("decoder", text, DECODERS)]))


def chosen(what: str, text: str, known: Iterable[str]) -> list[str]:
    """Names from a list with commas, or all. Raises DuoChatError on one that is not known."""
    known = list(known)
    names = known if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise DuoChatError(f"There is no {what} {unknown[0]!r}: choose from {', '.join(known)}, or all.")
    return names


def read_plan(args: argparse.Namespace) -> Plan:
    questions = tasks.load(chosen("task", args.tasks, tasks.TASKS), args.limit, args.prompts)
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
