"""The benchmark: tasks x decoders in one process -> tables, JSON and HTML. How it measures: `contest`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from duochat import DuoChatError, config, terminal
from duochat.bench import contest, drafts, machine, report, simulate, ties
from duochat.bench.contest import Bench, Contestant, Decoder, Plan, chosen, positive
from duochat.bench.metrics import REFERENCE, Run
from duochat.bench.peers import PEERS, Peers
from duochat.engine.calibration import GPU_WIDTHS
from duochat.engine.decoding import DECODERS
from duochat.engine.engine import Engine
from duochat.engine.lanes import Target
from duochat.engine.sampling import Sampling
from duochat.models.fetch import fetch
from duochat.models.folder import stands_for
from duochat.models.store import cache_dir

UNEQUAL = 1  # exit status
SAVE_EVERY = 10.0  # seconds


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    contest.add_arguments(parser, limit=None, max_tokens=None)
    parser.add_argument("--decoders", metavar="A,B", default=",".join(DECODERS), help=f"of {', '.join(DECODERS)}")
    references = lambda text: list(dict.fromkeys(text.split(",")))  # noqa: E731
    about = "drafts to compare, each proposing its N most frequent tokens (0: all)"
    parser.add_argument("--drafts", metavar="REF[@N],…", type=references, default=[], help=about)
    parser.add_argument("--peers", metavar="A,B", default="", help=f"llama.cpp's own server: {', '.join(PEERS)}")
    parser.add_argument("--llama-server", metavar="PATH", default="llama-server", help="the server of --peers")
    lengths, least = "tokens that its draft may write, the best is taken", "probabilities that end its draft, likewise"
    numbers = lambda kind: lambda text: [kind(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--draft-max", metavar="N,…", type=numbers(int), default=[2, 4, 8, 16], help=lengths)
    parser.add_argument("--draft-p-min", metavar="P,…", type=numbers(float), default=[0.0, 0.75], help=least)
    parser.add_argument("--ties", action="store_true", help="also tell how near the ties are at which answers part")
    parser.add_argument("--simulate", action="store_true", help="also predict the same on a virtual clock")
    parser.add_argument("--temperature", metavar="T", type=float, default=0.0, help="0 = greedy")
    parser.add_argument("--top-k", metavar="K", type=int, default=0, help="0 = off")
    parser.add_argument("--top-p", metavar="P", type=float, default=1.0, help="1 = off")
    parser.add_argument("--seed", metavar="S", type=int, default=0, help="of the first repeat; the next has S + 1")
    parser.add_argument("--repeat", metavar="N", type=positive, default=1, help="times that everything is asked")
    parser.add_argument("--json", metavar="FILE", type=Path, help="where the results go (default: the cache folder)")
    parser.add_argument("--html", metavar="FILE", type=Path, help="where the report goes (default: beside the JSON)")
    parser.add_argument("--resume", action="store_true", help="go on where the JSON file ends")


def main(args: argparse.Namespace) -> int:
    """Measure, print and write the report. Status 1 when a decoder's tokens are not plain decoding's."""
    from duochat.chat.loading import load_chat

    args.json = args.json or cache_dir() / "bench" / "latest.json"
    args.html = args.html or args.json.with_suffix(".html")
    for path in (args.json, args.html):
        check_writable(path)
    args.max_tokens = args.max_tokens or (128 if machine.gpus() else 96)
    names = list(dict.fromkeys([REFERENCE, *chosen("decoder", args.decoders, DECODERS)]))
    rivals = chosen("peer", args.peers, PEERS)
    if args.ties and args.temperature:
        raise DuoChatError("--ties looks at greedy answers: leave out --temperature.")
    sampling = Sampling(args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    plan = Plan.of(args, sampling, args.repeat)
    settings = config.load(args.config, target=args.target, draft=args.draft)
    about = {"settings": describe_settings(args, settings, [*names, *rivals]), "machine": machine.describe()}
    if sentence := machine.warning(about["machine"]):
        terminal.report(sentence)
    bar = terminal.Bar()
    chat = load_chat(settings, bar)
    engine, plan = chat.engine, plan.on(chat)
    if engine.drafter is None:
        raise DuoChatError(f"There is nothing to compare without a draft: {engine.fault}")
    bar("Measuring both devices", 0, 0)
    engine.calibrate()  # a stored calibration may be of a busier hour
    pairs = {}
    for reference in args.drafts:
        bar(f"Measuring {reference}", 0, 0)
        pairs[reference] = drafts.with_draft(engine, reference, settings)
    contestants = entered(names, engine, pairs)
    if rivals:
        peers = Peers(settings, engine, args.llama_server, args.draft_max, args.draft_p_min, plan.firsts, bar)
        contestants += [peers(name) for name in rivals]
        about["tried"] = peers.tried
    bar.close()
    return measure(args, plan, engine, contestants, about, pairs)


def entered(names: Sequence[str], engine: Engine, pairs: Mapping[str, Engine]) -> list[Decoder]:
    """Plain decoding, and the other decoders with each draft: the engine's own, or those of `pairs`, by reference."""
    others = [name for name in names if name != REFERENCE]
    several = [Decoder(name, pair, f"{reference} {name}") for reference, pair in pairs.items() for name in others]
    return [Decoder(REFERENCE, engine), *(several or [Decoder(name, engine) for name in others])]


def measure(
    args: argparse.Namespace,
    plan: Plan,
    engine: Engine,
    contestants: Sequence[Contestant],
    about: dict[str, Any],
    pairs: Mapping[str, Engine],
) -> int:
    """The benchmark proper, on models that are loaded; returns the exit status."""
    from duochat.bench import report_page  # plotly takes its time to load

    lanes = engine.describe()
    compiles = not engine.target.shares_cores and lanes.get("target_backend") == "torch"
    about |= {"machine": about["machine"] | {"lanes": lanes}, "calibration": engine.costs.to_dict()}
    about["strict"] = lanes.get("target_dtype") == "float32" or about["settings"]["reproducible"]
    bench = Bench(contestants, plan, compiles)
    if args.resume:
        resume(bench, args.json, about["settings"])

    def results() -> dict[str, Any]:
        return report.build(bench.runs, kinds(bench), about)

    if compiles:
        capture(engine.target, plan.longest)
    stopped = carry_out(bench, args.json, results)
    if not any(run.decoder == REFERENCE for run in bench.runs):
        raise KeyboardInterrupt
    about["complete"] = not stopped
    if not stopped:
        about |= look_closer(args, bench, engine, pairs)
    found = results()
    save(args.json, found)
    report_page.write(args.html, found)
    print(report.text(found))
    terminal.report(f"Results: {args.json}. Report: {args.html}.")
    return terminal.INTERRUPTED if stopped else UNEQUAL if found["strict"] and not found["equal"] else 0


def look_closer(args: argparse.Namespace, bench: Bench, engine: Engine, pairs: Mapping[str, Engine]) -> dict[str, Any]:
    """What is asked for beside the runs, and measured after them."""
    plain = [run for run in bench.runs if run.decoder == REFERENCE]
    found: dict[str, Any] = {}
    if pairs:
        found["drafts"] = {name: drafts.figures(bench.plan, pair, plain) for name, pair in pairs.items()}
    if args.ties:
        found["ties"] = ties.study(engine.target, bench.plan, bench.runs)
    if args.simulate:
        found["simulation"] = check_simulation(bench, engine)
    return found


def capture(target: Target, longest: int) -> None:
    """Have all that a device makes for a width and a length made now, and not while we measure."""
    for context in range(128, min(longest + 128, target.context_length - max(GPU_WIDTHS)), 128):
        target.measure(GPU_WIDTHS, context)


def check_simulation(bench: Bench, engine: Any) -> dict[str, Any]:
    """Tokens/s measured, and simulated now, over one request of each task: its first turn's."""
    plan = bench.plan
    first = {question.task: question for question in reversed(plan.questions)}.values()
    asked = {(question.task, question.id, 0, 0): plan.context(question.turns[:1]) for question in first}
    measured = {}
    for contestant in bench.contestants:
        if contestant.kind == "decoder":
            runs = [run for run in bench.runs if run.decoder == contestant.name and run.request in asked]
            measured[contestant.name] = sum(len(r.tokens) for r in runs) / sum(r.total_s for r in runs)
    predicted = simulate.forecast(engine, list(asked.values()), plan.sampling, plan.max_tokens)
    return {"requests": len(asked), "measured": measured, "predicted": predicted}


def kinds(bench: Bench) -> dict[str, str]:
    """The kind of each contestant, in the order of the report."""
    return {contestant.name: contestant.kind for contestant in bench.contestants}


def carry_out(bench: Bench, path: Path, results: Callable[[], dict[str, Any]]) -> bool:
    """Run with a progress bar, save now and then; returns whether Ctrl-C ended it."""
    bar, saved = terminal.Bar(), monotonic()
    bar("Warming up", 0, 0)
    with terminal.stop_on_interrupt() as stopped:
        for _ in bench.run(stopped, lambda done, total: bar("Benchmark", done, total)):
            if monotonic() - saved > SAVE_EVERY:
                save(path, results())
                saved = monotonic()
        bar.close()
        return stopped()


def describe_settings(args: argparse.Namespace, settings: config.Settings, names: Sequence[str]) -> dict[str, Any]:
    """What decides the results, for the report and for --resume."""
    asked = ("tasks", "limit", "max_tokens", "temperature", "top_k", "top_p", "repeat")
    return {
        **{name: getattr(settings, name) for name in ("target", "draft", "reproducible")},
        **{name: getattr(args, name) for name in asked},
        "prompts": str(args.prompts) if args.prompts else "our own",
        "seeds": [args.seed + n for n in range(args.repeat)],
        "decoders": list(names),
        "cost_faithful": stands_for(fetch(settings.target)),
    }


# ---------------------------------------------------------------- files


FREE_TO_CHANGE = {"tasks", "limit", "repeat", "seeds", "decoders"}  # in the settings of a resumed run


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
    for name in settings.keys() - FREE_TO_CHANGE:
        if earlier["settings"].get(name) != settings[name]:
            raise DuoChatError(f"{path} was measured with another {name}: start afresh, without --resume.")
    asked, names = {(q.task, q.id) for q in bench.plan.questions}, kinds(bench)
    known = [run for run in runs if run.decoder in names and (run.task, run.question) in asked]
    bench.runs = [run for run in known if run.repeat < bench.plan.repeat]


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
