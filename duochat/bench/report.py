"""What the benchmark found: the JSON object (its schema is `SECTIONS` and `FIGURES`) and the tables on a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from duochat.bench import metrics
from duochat.bench.metrics import REFERENCE, RIVAL, Run

SCHEMA = 1  # raise it when a name changes its meaning

SECTIONS = {
    "schema": "version of this description",
    "fields": "meaning of every figure in `decoders`",
    "settings": "what was asked for: models, prompts, sampling, seeds (one a repeat)",
    "machine": "processor, cards, versions, load before the start; `lanes`: devices and threads of both models",
    "calibration": "seconds of a target forward by rows, of a draft batch by tokens, of one drafted token by threads",
    "complete": "false when the benchmark was interrupted",
    "strict": "whether tokens must be plain decoding's (fp32, or reproducible)",
    "equal": "whether they were, for all our decoders",
    "decoders": "by name: kind, figures over `all` and by `tasks`, differing requests; ablations: `decoder` that they "
    "vary, fixed `budget`, speed over that decoder's own (`over_base`, with its interval)",
    "simulation": "tokens/s predicted and measured over a few requests, and predicted for other hardware",
    "goals": "on CUDA: what, sign, goal, measured, reached",
    "timelines": "some rounds of each decoder's first answer: [start, end] of both lanes, seconds since the request",
    "runs": "one record a request, from which all figures follow (fields: duochat/bench/metrics.py, Run)",
}
FIGURES = {
    "requests": "answers, a turn of a conversation each",
    "tokens": "tokens emitted",
    "tokens_per_s": "mean over questions of tokens / seconds from request to last token (as Spec-Bench)",
    "tokens_per_s_total": "all tokens / all seconds",
    "speedup": "mean over tasks of tokens_per_s / that of plain decoding in the same engine",
    "speedup_interval": "95 % bootstrap interval of the speedup: questions within tasks, repeats within questions",
    "speedup_total": "tokens_per_s_total / that of plain decoding",
    "speedup_over_generate": "as `speedup`, against transformers generate; 0 when that was not measured",
    "ttft_median_s": "request to first token, median over requests",
    "ttft_p95_s": "the same, 95th percentile",
    "tpot_median_s": "(end to end - TTFT) / (tokens - 1), median over requests",
    "tpot_p95_s": "the same, 95th percentile",
    "mean_accepted_length": "τ: tokens emitted per target forward",
    "acceptance_rate": "α: accepted / tested draft tokens",
    "drafted": "draft tokens decoded or verified = accepted + rejected + ignored",
    "accepted": "draft tokens that the target chose too",
    "rejected": "draft tokens tested where the target chose a token that was not drafted",
    "ignored": "draft tokens never tested, or beside the accepted one",
    "pending": "draft tokens that went through a target forward",
    "ngram": "accepted tokens that prompt lookup alone had found",
    "drafted_per_round": "drafted / target forwards",
    "verified_per_round": "pending / target forwards",
    "budget": "γ* = T_target(one forward) / T_draft(one token), mean over rounds",
    "hit_rate": "share of rounds whose outcome the draft had already expanded",
    "acceptance_by_position": "accepted / tested at the 1st, 2nd ... place below the root; siblings are one test",
    "tested_by_position": "how many tests these are",
    "share_by_rank": "of all tested places: none of the drafted tokens right, the draft's 1st choice, 2nd ...",
    "paused": "requests at whose end drafting was paused because it did not pay",
    "cpu_idle": "share of the time between first and last token in which the draft runs nothing",
    "gpu_idle": "the same of the target, seen from the host",
    "overlap": "share of that time in which both run",
    "gap_median_s": "host time between two target forwards, waiting for drafts apart",
    "split": "shares of all time: prefill, verify, transfer, wait (for drafts), bookkeeping, hidden (unexplained)",
    "draft_split": "the draft lane's time beside that: decode, choosing candidates; shares of all time",
    "seconds_by_width": "mean seconds of a target forward by its rows",
    "host_peak_bytes": "peak resident memory of the process",
    "gpu_peak_bytes": "peak GPU memory held by tensors",
}


def build(
    runs: Sequence[Run],
    contestants: Mapping[str, Mapping[str, Any]],
    about: Mapping[str, Any],
    timelines: Mapping[str, Any],
) -> dict[str, Any]:
    """The JSON object. contestants: `kind`, `decoder` and `budget` by name; about: the sections `settings`, `machine`,
    `calibration`, `strict`."""
    by_name = {name: [run for run in runs if run.decoder == name] for name in contestants}
    decoders = {
        name: {**contestants[name], **_decoder(name, contestants, by_name)} for name in by_name if by_name[name]
    }
    ours = [entry for entry in decoders.values() if entry["kind"] != "peer"]
    return {
        "schema": SCHEMA,
        "fields": FIGURES,
        **about,
        "complete": True,
        "equal": not any(entry["differing"] for entry in ours),
        "decoders": decoders,
        "timelines": dict(timelines),
        "runs": [run.to_dict() for run in runs],
    }


def _decoder(name: str, contestants: Mapping[str, Any], by_name: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """The figures of one contestant: only requests that plain decoding answered too count in comparisons."""
    own, plain, rival = by_name[name], by_name.get(REFERENCE, ()), by_name.get(RIVAL, ())
    base = by_name.get(contestants[name]["decoder"], ())
    of = lambda runs, task: [run for run in runs if run.task == task]  # noqa: E731
    names = dict.fromkeys(run.task for run in own)
    return {
        "all": _figures(own, plain, rival),
        "tasks": {task: _figures(of(own, task), of(plain, task), of(rival, task)) for task in names},
        "over_base": metrics.speedup(own, base),
        "over_base_interval": metrics.interval(own, base),
        "differing": metrics.differences(own, plain),
    }


def _figures(own: Sequence[Run], plain: Sequence[Run], rival: Sequence[Run]) -> dict[str, Any]:
    return {**metrics.summary(own, plain, rival), "speedup_interval": metrics.interval(own, plain)}


# ---------------------------------------------------------------- tables

Table = tuple[str, list[str], list[list[str]]]  # title, headers, rows


def text(results: Mapping[str, Any]) -> str:
    """For the terminal: all tables, and one JSON line with the main figures at the end."""
    blocks = ["\n".join(head(results)), *(f"{title}\n{grid(*table)}" for title, *table in tables(results))]
    return "\n\n".join([*blocks, "\n".join(remarks(results)), json.dumps(brief(results))])


def grid(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts: the first column to the left, the others to the right."""
    table = [headers, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(headers))]
    first, others = widths[0], widths[1:]
    lines = [
        "  ".join([row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], others, strict=True))])
        for row in table
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def brief(results: Mapping[str, Any]) -> dict[str, Any]:
    """The main figures, for one line."""
    wanted = ("tokens_per_s", "speedup", "ttft_median_s", "mean_accepted_length", "acceptance_rate")
    return {
        "complete": results["complete"],
        "equal": results["equal"],
        "strict": results["strict"],
        "decoders": {
            name: {figure: round(entry["all"][figure], 4) for figure in wanted}
            for name, entry in results["decoders"].items()
        },
    }


def head(results: Mapping[str, Any]) -> list[str]:
    """What was measured, on what, how: a few lines."""
    s, m = results["settings"], results["machine"]
    lanes, gpus = m["lanes"], ", ".join(gpu["name"] for gpu in m["gpus"]) or "none"
    asked = f"{results['decoders'][REFERENCE]['all']['requests']} requests to each"
    return [
        f"target {_short(s['target'])}{faithful(results)} ({lanes['target_dtype']} on {lanes['target_device']})",
        f"draft  {_short(s['draft'])} ({lanes['draft_threads']} threads)",
        f"CPU {m['cpu']}, {m['cores']} cores, {100 * m['cpu_load']:.0f} % busy before the start; GPU {gpus}",
        ", ".join(f"{name} {version}" for name, version in m["versions"].items()),
        f"{s['max_tokens']} tokens at most, temperature {s['temperature']:g}, seeds {s['seeds']}, {asked}",
        *([] if results["complete"] else ["Interrupted: not all was asked."]),
    ]


def tables(results: Mapping[str, Any]) -> list[Table]:
    """All tables that have rows."""
    makers = (speedups, figures, time_split, ablations, simulation, elsewhere, goals)
    found = [maker(results) for maker in makers]
    return [table for table in found if table[2]]


def speedups(results: Mapping[str, Any]) -> Table:
    tasks = list(results["decoders"][REFERENCE]["tasks"])
    rows = []
    for name, entry in of_kind(results, "decoder", "peer").items():
        by_task = [f"{entry['tasks'][task]['speedup']:.2f}" if task in entry["tasks"] else "–" for task in tasks]
        low, high = entry["all"]["speedup_interval"]
        rows.append([name, *by_task, f"{entry['all']['speedup']:.2f}", f"{low:.2f}–{high:.2f}"])
    return f"Speedup over plain decoding, by task{faithful(results)}", ["decoder", *tasks, "mean", "95 %"], rows


def figures(results: Mapping[str, Any]) -> Table:
    headers = ["decoder", "tok/s", "total", "TTFT ms", "p95", "TPOT ms", "p95", "τ", "α", "hits", "γ*", "drafted/rd"]
    headers += ["verified/rd", "CPU idle", "GPU idle", "both"]
    rows = [
        [name, *_figure_row(entry["all"], entry["kind"])] for name, entry in of_kind(results, "decoder", "peer").items()
    ]
    return "Figures over all requests", headers, rows


def _figure_row(f: Mapping[str, Any], kind: str) -> list[str]:
    speed = [f"{f['tokens_per_s']:.1f}", f"{f['tokens_per_s_total']:.1f}"]
    latency = [f"{1e3 * f[name]:.1f}" for name in ("ttft_median_s", "ttft_p95_s", "tpot_median_s", "tpot_p95_s")]
    if kind == "peer":
        return [*speed, *latency, *(["–"] * 9)]
    drafting = [f"{f['mean_accepted_length']:.2f}", f"{f['acceptance_rate']:.2f}", _percent(f["hit_rate"])]
    counts = [f"{f[name]:.1f}" for name in ("budget", "drafted_per_round", "verified_per_round")]
    return [*speed, *latency, *drafting, *counts, *(_percent(f[name]) for name in ("cpu_idle", "gpu_idle", "overlap"))]


def time_split(results: Mapping[str, Any]) -> Table:
    """Shares of each decoder's own time; the draft's run beside the others."""
    headers = ["decoder", *metrics.PARTS, "| draft decode", "choosing", "host gap ms", "host GiB", "GPU GiB"]
    rows = []
    for name, entry in of_kind(results, "decoder").items():
        f = entry["all"]
        shares = [_percent(f["split"][part]) for part in metrics.PARTS]
        shares += [_percent(f["draft_split"][part]) for part in metrics.DRAFT_PARTS]
        memory = [f"{f[peak] / 2**30:.2f}" for peak in ("host_peak_bytes", "gpu_peak_bytes")]
        rows.append([name, *shares, f"{1e3 * f['gap_median_s']:.2f}", *memory])
    return "Time split", headers, rows


def ablations(results: Mapping[str, Any]) -> Table:
    """What is left of a decoder's speed when one thing is taken from it."""
    rows = []
    for name, entry in of_kind(results, "ablation").items():
        f, (low, high) = entry["all"], entry["over_base_interval"]
        shares = [_percent(f[figure]) for figure in ("hit_rate", "cpu_idle", "gpu_idle")]
        counts = [f"{f[figure]:.2f}" for figure in ("mean_accepted_length", "acceptance_rate", "verified_per_round")]
        over = [f"{entry['over_base']:.2f}", f"{low:.2f}–{high:.2f}"]
        rows.append([name, entry["decoder"], *over, f"{f['speedup']:.2f}", *counts, *shares])
    headers = [
        "ablation",
        "of",
        "over it",
        "95 %",
        "over plain",
        "τ",
        "α",
        "verified/rd",
        "hits",
        "CPU idle",
        "GPU idle",
    ]
    return "Ablations", headers, rows


def simulation(results: Mapping[str, Any]) -> Table:
    """What the schedule model says of this machine, against what was measured."""
    found = results.get("simulation", {"measured": {}})
    rows = [
        [name, f"{measured:.1f}", f"{found['predicted'][name]:.1f}", f"{100 * found['error'][name]:+.1f} %"]
        for name, measured in found["measured"].items()
    ]
    return "Simulation of this machine, tokens/s", ["decoder", "measured", "predicted", "error"], rows


def elsewhere(results: Mapping[str, Any]) -> Table:
    """What the schedule model promises for other hardware: plain tokens/s, and speedups over it."""
    rows, others = [], []
    for scenario in results.get("simulation", {}).get("elsewhere", ()):
        speeds = scenario["tokens_per_s"]
        others = [name for name in speeds if name != REFERENCE]
        gains = [f"{speeds[name] / speeds[REFERENCE]:.2f}" for name in others]
        rows.append([scenario["name"], f"{speeds[REFERENCE]:.1f}", *gains])
    title = "Simulation of other hardware: plain decoding's tokens/s, and speedups over it"
    return title, ["target, card and CPU", REFERENCE, *others], rows


def of_kind(results: Mapping[str, Any], *kinds: str) -> dict[str, Any]:
    """The contestants of these kinds, in the order of the report."""
    return {name: entry for name, entry in results["decoders"].items() if entry["kind"] in kinds}


def goals(results: Mapping[str, Any]) -> Table:
    """What a GPU lane must reach, and what was measured."""
    rows = []
    for goal in results.get("goals", ()):
        measured = "not measured" if goal["measured"] is None else f"{goal['measured']:.2f}"
        verdict = {None: "", True: "reached", False: "missed"}[goal["reached"]]
        rows.append([goal["what"], f"{goal['sign']} {goal['goal']:g}", measured, verdict, goal["detail"]])
    return "Goals", ["what", "goal", "measured", "", "detail"], rows


def remarks(results: Mapping[str, Any]) -> list[str]:
    """A line for each contestant whose tokens differ somewhere, or whose drafting was paused."""
    entries = results["decoders"].items()
    differing = [_difference(name, entry, results["strict"]) for name, entry in entries if entry["differing"]]
    paused = [
        f"{name}: drafting was paused at the end of {entry['all']['paused']} answers, because it did not pay"
        for name, entry in entries
        if entry["all"]["paused"]
    ]
    return [*(differing or ["Every decoder gave the tokens of plain decoding."]), *paused]


def _difference(name: str, entry: Mapping[str, Any], strict: bool) -> str:
    first = min(entry["differing"], key=lambda d: d["position"])
    word = "unequal" if strict and entry["kind"] != "peer" else "differs"
    return (
        f"{name}: {word} in {len(entry['differing'])} of {entry['all']['requests']} answers, the earliest at token "
        f"{first['position']} ({first['task']} {first['question']}, turn {first['turn'] + 1})"
    )


def faithful(results: Mapping[str, Any]) -> str:
    """What has to be said with every figure of a widened target."""
    like = results["settings"].get("cost_faithful")
    return f", cost-faithful {like}" if like else ""


def _short(reference: str) -> str:
    """A model's reference without its checksum and folders."""
    return reference.split("#")[0].rsplit("/", 1)[-1]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
