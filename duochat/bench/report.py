"""What the benchmark found: the JSON object (its figures are described in `FIGURES`) and the tables on a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import pandas as pd

from duochat.bench import metrics
from duochat.bench.metrics import REFERENCE, Run

SCHEMA = 2  # raise it when a name changes its meaning or goes

ABOUT = ("settings", "machine", "calibration", "strict", "simulation", "tried", "drafts", "ties")
FIGURES = {
    "requests": "answers, a turn of a conversation each",
    "tokens": "tokens emitted",
    "tokens_per_s": "mean over questions of tokens / seconds from request to last token (as Spec-Bench)",
    "speedup": "mean over tasks of tokens_per_s / that of plain decoding in the same engine",
    "speedup_interval": "95 % bootstrap interval of the speedup: questions within tasks, repeats within questions",
    "loops": f"answers that loop: at least {metrics.REPEATED:.0%} of their passages of {metrics.PASSAGE} tokens stood "
    "in the same answer before; what repeats is drafted from there, which flatters a mean",
    "requests_without_loops": "requests that neither this decoder nor plain decoding answered with a loop",
    "tokens_per_s_without_loops": "tokens_per_s over these",
    "speedup_without_loops": "speedup over these; 0: there are none",
    "ttft_median_s": "request to first token, median over requests",
    "ttft_p95_s": "the same, 95th percentile",
    "tpot_median_s": "(end to end - TTFT) / (tokens - 1), median over requests",
    "tpot_p95_s": "the same, 95th percentile",
    "mean_accepted_length": "τ: tokens emitted per target forward",
    "acceptance_rate": "α: accepted / tested draft tokens; tested = accepted + rejected",
    "drafted": "draft tokens = accepted + rejected + ignored",
    "accepted": "draft tokens that the target chose too",
    "rejected": "draft tokens where the target chose a token that was not drafted",
    "ignored": "draft tokens never tested: their place was not reached, or another branch won there",
    "pending": "verified draft tokens: those that went through a target forward",
    "drafted_per_round": "drafted / target forwards",
    "verified_per_round": "pending / target forwards",
    "budget": "γ* = T_target(one forward) / T_draft(one token), mean over rounds",
    "hit_rate": "share of rounds whose outcome the draft had already expanded",
    "acceptance_by_position": "accepted / tested at the 1st, 2nd ... place below the root; siblings are one test",
    "tested_by_position": "how many tests these are",
    "paused": "requests at whose end drafting was paused because it did not pay",
    "cpu_idle": "share of the time between first and last token in which the draft runs nothing",
    "gpu_idle": "the same of the target, seen from the host",
    "gap_median_s": "host time between two target forwards, waiting for drafts apart",
}


def build(runs: Sequence[Run], kinds: Mapping[str, str], about: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object. `decoders`, by name: kind, figures over `all` and by `tasks`, requests whose tokens differ from
    plain decoding's, speedup over each peer. `runs`: a `metrics.Run` a request, from which all that follows.

    kinds: "decoder" or "peer" by name. about: what no run tells: `settings`, `machine` (its `lanes` as engine.describe
    has them), `calibration`, `strict` (tokens must be plain decoding's), `complete`, `simulation`,
    `drafts` and `ties` where they were asked for.
    """
    by_name = {name: own for name in kinds if (own := [run for run in runs if run.decoder == name])}
    plain, decoders = by_name.get(REFERENCE, ()), {}
    of = lambda runs, task: [run for run in runs if run.task == task]  # noqa: E731
    for name, own in by_name.items():
        decoders[name] = {
            "kind": kinds[name],
            "all": metrics.summary(own, plain),
            "tasks": {t: metrics.summary(of(own, t), of(plain, t)) for t in dict.fromkeys(run.task for run in own)},
            "differing": metrics.differences(own, plain),
            "over_peers": {peer: metrics.speedup(own, by_name[peer]) for peer in by_name if kinds[peer] == "peer"},
        }
    return {
        **{name: about[name] for name in ABOUT if name in about},
        "schema": SCHEMA,
        "fields": FIGURES,
        "complete": about.get("complete", True),
        "equal": not any(entry["differing"] for entry in decoders.values() if entry["kind"] == "decoder"),
        "decoders": decoders,
        "runs": [asdict(run) for run in runs],
    }


def again(results: Mapping[str, Any]) -> dict[str, Any]:
    """Stored results with all figures computed anew from their runs: older files get what later versions look at."""
    kinds = {name: entry["kind"] for name, entry in results["decoders"].items() if entry["kind"] != "ablation"}
    runs = [run for run in map(Run.from_dict, results["runs"]) if run.decoder in kinds]
    return build(runs, kinds, results)


# ---------------------------------------------------------------- tables


def text(results: Mapping[str, Any]) -> str:
    """For the terminal: all tables, and one JSON line with the main figures at the end."""
    blocks = ["\n".join(head(results)), *(f"{title}\n{table.to_string()}" for title, table in tables(results).items())]
    return "\n\n".join([*blocks, "\n".join(remarks(results)), json.dumps(brief(results))])


def brief(results: Mapping[str, Any]) -> dict[str, Any]:
    """The main figures, for one line."""
    wanted = ("tokens_per_s", "speedup", "loops", "speedup_without_loops", "ttft_median_s", "mean_accepted_length")
    decoders = {
        name: {figure: round(entry["all"][figure], 4) for figure in (*wanted, "acceptance_rate")}
        for name, entry in results["decoders"].items()
    }
    return {**{name: results[name] for name in ("complete", "equal", "strict")}, "decoders": decoders}


def head(results: Mapping[str, Any]) -> list[str]:
    """What was measured, on what, how: a few lines."""
    s, m = results["settings"], results["machine"]
    lanes, gpus = m["lanes"], ", ".join(gpu["name"] for gpu in m["gpus"]) or "none"
    target = ", ".join(lanes[name] for name in ("target_backend", "target_dtype", "target_device") if name in lanes)
    draft = ", ".join([*filter(None, [lanes.get("draft_backend")]), f"{lanes['draft_threads']} threads"])
    asked = f"{results['decoders'][REFERENCE]['all']['requests']} requests to each"
    return [
        f"target {_short(s['target'])}{faithful(results)} ({target})",
        f"draft  {_short(s['draft'])} ({draft})",
        f"CPU {m['cpu']}, {m['cores']} cores, {100 * m['cpu_load']:.0f} % busy before the start; GPU {gpus}",
        ", ".join(f"{name} {version}" for name, version in m["versions"].items()),
        f"{s['max_tokens']} tokens at most, temperature {s['temperature']:g}, seeds {s['seeds']}, {asked}",
        *([] if results["complete"] else ["Interrupted: not all was asked."]),
    ]


def tables(results: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """By title all tables that have rows, a contestant each; a dash where nothing was measured."""
    faith, entries, rows = faithful(results), results["decoders"], partial(pd.DataFrame.from_dict, orient="index")
    speedups = by_task(results, lambda f: f"{f['speedup']:.2f}")
    speedups["95 %"] = ["{:.2f}–{:.2f}".format(*entry["all"]["speedup_interval"]) for entry in entries.values()]
    over = {name: entry["over_peers"] for name, entry in entries.items() if entry["kind"] == "decoder"}
    found = {
        f"Speedup over plain decoding, by task{faith}": speedups,
        f"The same without requests whose answer loops; in brackets how many do{faith}": without_loops(results),
        f"Speedup over other ways to decode, mean of the tasks{faith}": pd.DataFrame(over).T.map("{:.2f}".format),
        "Agreement of the drafts with plain decoding, and what they cost": rows(results.get("drafts", {})).round(3),
        "Where answers part from plain decoding's": rows(results.get("ties", {})),
        "Settings tried, tokens/s on a few prompts": pd.DataFrame(results.get("tried", {})).T.map("{:.1f}".format),
        "Figures over all requests": pd.DataFrame({name: figures(entry) for name, entry in entries.items()}).T,
        "Simulation of this machine, tokens/s": simulation(results),
    }
    return {title: frame.fillna("–") for title, frame in found.items() if not frame.empty}


def by_task(results: Mapping[str, Any], cell: Callable[[Mapping[str, Any]], str]) -> pd.DataFrame:
    """A cell for each task that plain decoding has, and one for all."""
    entries = results["decoders"]
    cells = {name: {task: cell(f) for task, f in entry["tasks"].items()} for name, entry in entries.items()}
    frame = pd.DataFrame(cells).T.reindex(index=entries, columns=entries[REFERENCE]["tasks"])
    return frame.assign(mean=[cell(entry["all"]) for entry in entries.values()])


def without_loops(results: Mapping[str, Any]) -> pd.DataFrame:
    """The same without the answers that loop, and how many those are; no rows when there are none."""

    def cell(f: Mapping[str, Any]) -> str:
        return (f"{f['speedup_without_loops']:.2f}" if f["requests_without_loops"] else "–") + f" ({f['loops']})"

    looping = any(entry["all"]["loops"] for entry in results["decoders"].values())
    return by_task(results, cell) if looping else pd.DataFrame()


def figures(entry: Mapping[str, Any]) -> dict[str, str]:
    f = entry["all"]
    ms = lambda name: f"{1e3 * f[name]:.1f}"  # noqa: E731
    share = lambda name: "–" if f[name] is None else f"{100 * f[name]:.1f} %"  # noqa: E731
    row = {"tok/s": f"{f['tokens_per_s']:.1f}", "TTFT ms": ms("ttft_median_s"), "TTFT p95": ms("ttft_p95_s")}
    row |= {"TPOT ms": ms("tpot_median_s"), "TPOT p95": ms("tpot_p95_s")}
    if entry["kind"] == "peer":  # which tells of no rounds
        return row
    row |= {"τ": f"{f['mean_accepted_length']:.2f}", "α": f"{f['acceptance_rate']:.2f}", "hits": share("hit_rate")}
    row |= {"γ*": f"{f['budget']:.1f}", "drafted/rd": f"{f['drafted_per_round']:.1f}"}
    row |= {"verified/rd": f"{f['verified_per_round']:.1f}", "CPU idle": share("cpu_idle")}
    return row | {"GPU idle": share("gpu_idle"), "host gap ms": f"{1e3 * f['gap_median_s']:.2f}"}


def simulation(results: Mapping[str, Any]) -> pd.DataFrame:
    """What the schedules give on a virtual clock with this machine's costs, against what was measured."""
    found = results.get("simulation", {"measured": {}, "predicted": {}})
    frame = pd.DataFrame({name: found[name] for name in ("measured", "predicted")}).dropna()
    error = (100 * (frame["predicted"] / frame["measured"] - 1)).map("{:+.1f} %".format)
    return frame.map("{:.1f}".format).assign(error=error)


def remarks(results: Mapping[str, Any]) -> list[str]:
    """A line for each contestant whose tokens differ somewhere, that loops, or whose drafting was paused."""
    differing, others = [], []
    for name, entry in results["decoders"].items():
        f = entry["all"]
        if entry["differing"]:
            first = min(entry["differing"], key=lambda d: d["position"])
            word = "unequal" if results["strict"] and entry["kind"] != "peer" else "differs"
            where = f"token {first['position']} ({first['task']} {first['question']}, turn {first['turn'] + 1})"
            many = f"{len(entry['differing'])} of {f['requests']} answers"
            differing.append(f"{name}: {word} in {many}, the earliest at {where}")
        if f["loops"]:
            others.append(f"{name}: {f['loops']} of {f['requests']} answers loop")
        if f["paused"]:
            why = "because it did not pay"
            others.append(f"{name}: drafting was paused at the end of {f['paused']} answers, {why}")
    return [*(differing or ["Every decoder gave the tokens of plain decoding."]), *others]


def faithful(results: Mapping[str, Any]) -> str:
    """What has to be said with every figure of a widened target."""
    like = results["settings"].get("cost_faithful")
    return f", cost-faithful {like}" if like else ""


def _short(reference: str) -> str:
    """A model's reference without its checksum and folders."""
    return reference.split("#")[0].rsplit("/", 1)[-1]
