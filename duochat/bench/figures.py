"""The plots of a report, from its JSON object alone.

Okabe and Ito's colours, which the colour-blind tell apart; patterns, dashes and markers say the same in grey print.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import plotly.graph_objects as go

from duochat.bench import metrics
from duochat.bench.metrics import REFERENCE
from duochat.bench.report import faithful, of_kind

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999", "#F0E442", "#000000")
PATTERNS = ("", "/", "x", ".", "\\", "-", "|", "+")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
INK, GRID, FONT = "#222222", "#DDDDDD", "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"

Results = Mapping[str, Any]


def all_figures(results: Results) -> list[go.Figure]:
    """Those for which there is something to show, in the order of the report."""
    makers = (speedup_by_task, round_timeline, acceptance_by_position, idle_by_budget, time_by_width, time_split)
    found = [figure for maker in makers if (figure := maker(results)) is not None]
    for figure in found:
        figure.layout.title.text += faithful(results)
    return found


def styles(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Colour, pattern, dash and marker of each name, the same in every figure."""
    looks = zip(names, cycle(COLOURS), cycle(PATTERNS), cycle(DASHES), cycle(MARKERS), strict=False)
    return {name: {"colour": c, "pattern": p, "dash": d, "marker": m} for name, c, p, d, m in looks}


def _figure(title: str, x: str, y: str, **layout: Any) -> go.Figure:
    axis = {"gridcolor": GRID, "linecolor": INK, "zerolinecolor": GRID, "ticks": "outside", "automargin": True}
    return go.Figure(
        layout={
            "title": {"text": title, "x": 0, "xanchor": "left", "font": {"size": 17}},
            "xaxis": {"title": {"text": x}, **axis},
            "yaxis": {"title": {"text": y}, **axis},
            "font": {"family": FONT, "size": 13, "color": INK},
            "paper_bgcolor": "white",
            "plot_bgcolor": "white",
            "margin": {"l": 60, "r": 20, "t": 50, "b": 90},
            "legend": {"orientation": "h", "y": -0.22, "x": 0},
            "height": 420,
            **layout,
        }
    )


def speedup_by_task(results: Results) -> go.Figure:
    """Grouped bars; the mean carries its 95 % interval."""
    entries = of_kind(results, "decoder", "peer")
    tasks = list(results["decoders"][REFERENCE]["tasks"])
    figure = _figure("Speedup over plain decoding, by task", "", "tokens/s over plain decoding's", barmode="group")
    looks = styles(list(entries))
    for name, entry in entries.items():
        if name != REFERENCE:
            figure.add_bar(name=name, x=[*tasks, "mean"], **_bars(entry, tasks), marker=_fill(looks[name]))
    figure.add_hline(y=1, line={"color": INK, "width": 1, "dash": "dot"})
    return figure


def _bars(entry: Mapping[str, Any], tasks: Sequence[str]) -> dict[str, Any]:
    cells = [entry["tasks"].get(task, {"speedup": None, "speedup_interval": (0, 0)}) for task in tasks] + [entry["all"]]
    values = [cell["speedup"] for cell in cells]
    spans = [cell["speedup_interval"] if value else (0, 0) for cell, value in zip(cells, values, strict=True)]
    return {
        "y": values,
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [max(0, high - (value or 0)) for value, (_, high) in zip(values, spans, strict=True)],
            "arrayminus": [max(0, (value or 0) - low) for value, (low, _) in zip(values, spans, strict=True)],
            "thickness": 1,
            "width": 3,
        },
    }


def _fill(look: Mapping[str, str]) -> dict[str, Any]:
    return {
        "color": look["colour"],
        "line": {"color": INK, "width": 0.5},
        "pattern": {"shape": look["pattern"], "fgcolor": "white", "size": 6, "solidity": 0.25},
    }


def round_timeline(results: Results) -> go.Figure | None:
    """What both lanes did during the first rounds of an answer: one pair of bars a decoder."""
    shown = {n: results["timelines"][n] for n in of_kind(results, "decoder") if results["timelines"].get(n)}
    if not shown:
        return None
    figure = _figure(
        "Time line of the first rounds", "milliseconds", "", height=120 + 90 * len(shown), barmode="overlay"
    )
    for name, rounds in shown.items():
        start = rounds[0]["started"]
        gpu = [(r["started"], r["ended"], f"{r['rows']} rows → {r['tokens']} tokens") for r in rounds]
        cpu = [(s, e, f"{size} drafted") for r in rounds for s, e, size in r["batches"] if e > start]
        last = name == next(reversed(shown))  # the one that drafts most
        figure.add_bar(**_lane(f"{name}, target", gpu, start), name="target", marker=_lane_fill(0), showlegend=last)
        figure.add_bar(**_lane(f"{name}, draft", cpu, start), name="draft", marker=_lane_fill(1), showlegend=last)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def _lane(label: str, spans: Sequence[tuple[float, float, str]], start: float) -> dict[str, Any]:
    return {
        "orientation": "h",
        "y": [label] * len(spans),
        "base": [1e3 * (begun - start) for begun, _, _ in spans],
        "x": [1e3 * (ended - begun) for begun, ended, _ in spans],
        "hovertext": [text for _, _, text in spans],
        "width": 0.7,
    }


def _lane_fill(which: int) -> dict[str, Any]:
    look = {"colour": COLOURS[which], "pattern": PATTERNS[which]}
    return {**_fill(look), "line": {"color": "white", "width": 1}}


def acceptance_by_position(results: Results) -> go.Figure | None:
    """Accepted share at each place below the root, and how many tests it rests on."""
    entries = {n: e for n, e in of_kind(results, "decoder").items() if e["all"]["acceptance_by_position"]}
    if not entries:
        return None
    figure = _figure("Acceptance by position of the drafted token", "position in the draft", "accepted / tested")
    looks = styles(list(of_kind(results, "decoder", "peer")))
    for name, entry in entries.items():
        rates, tests = entry["all"]["acceptance_by_position"], entry["all"]["tested_by_position"]
        kept = [i for i, n in enumerate(tests) if n >= 5]  # a handful of tests is noise
        figure.add_scatter(
            **_line(looks[name], name),
            x=[i + 1 for i in kept],
            y=[rates[i] for i in kept],
            hovertext=[f"{tests[i]} tests" for i in kept],
        )
    figure.update_yaxes(range=[0, 1.02])
    figure.update_xaxes(tick0=1, dtick=1)
    return figure


def _line(look: Mapping[str, str], name: str) -> dict[str, Any]:
    return {
        "name": name,
        "mode": "lines+markers",
        "line": {"color": look["colour"], "dash": look["dash"], "width": 2},
        "marker": {"symbol": look["marker"], "size": 8, "color": look["colour"]},
    }


IDLE = {"target idle": "gpu_idle", "draft idle": "cpu_idle"}


def idle_by_budget(results: Results) -> go.Figure:
    """Idle share of both devices: over fixed budgets when they were measured, else of each decoder."""
    fixed = [entry for entry in of_kind(results, "ablation").values() if entry["budget"]]
    figure = _idle_by_fixed_budget(fixed) if fixed else _idle_by_decoder(of_kind(results, "decoder"))
    return figure.update_yaxes(range=[0, 1.02], tickformat=".0%")


def _idle_by_decoder(entries: Mapping[str, Any]) -> go.Figure:
    figure = _figure("Idle time between first and last token", "", "share of the time", barmode="group")
    looks = styles(list(IDLE))
    for label, name in IDLE.items():
        values = [entry["all"][name] for entry in entries.values()]
        figure.add_bar(name=label, x=list(entries), y=values, marker=_fill(looks[label]))
    return figure


def _idle_by_fixed_budget(entries: Sequence[Mapping[str, Any]]) -> go.Figure:
    figure = _figure("Idle time against a fixed draft budget", "drafted tokens a round at most", "share of the time")
    decoders = dict.fromkeys(entry["decoder"] for entry in entries)
    looks = styles([f"{decoder}, {label}" for decoder in decoders for label in IDLE])
    for decoder in decoders:
        own = sorted((entry for entry in entries if entry["decoder"] == decoder), key=lambda entry: entry["budget"])
        for label, name in IDLE.items():
            line = _line(looks[f"{decoder}, {label}"], f"{decoder}, {label}")
            figure.add_scatter(**line, x=[e["budget"] for e in own], y=[e["all"][name] for e in own])
    return figure.update_xaxes(type="log", tickvals=sorted({entry["budget"] for entry in entries}))


def time_by_width(results: Results) -> go.Figure:
    """Seconds of a target forward by its rows: as calibrated, and as it went beside a working draft."""
    figure = _figure("Time of a target forward over its width", "rows (1 + drafted tokens)", "milliseconds")
    curve = {int(width): seconds for width, seconds in results["calibration"]["target"].items()}
    looks = styles(list(of_kind(results, "decoder", "peer")))
    black = {"colour": INK, "dash": "solid", "marker": "circle-open"}
    figure.add_scatter(**_line(black, "calibrated, alone"), x=list(curve), y=[1e3 * s for s in curve.values()])
    for name, entry in of_kind(results, "decoder").items():
        points = entry["all"]["seconds_by_width"]
        style = _line(looks[name], name) | {"mode": "markers"}
        figure.add_scatter(**style, x=[int(w) for w in points], y=[1e3 * s for s in points.values()])
    figure.update_yaxes(rangemode="tozero")
    return figure


def time_split(results: Results) -> go.Figure:
    """Where each decoder's time went."""
    entries = of_kind(results, "decoder")
    figure = _figure("Time split", "share of all time", "", barmode="stack")
    looks = styles(metrics.PARTS)
    for part in metrics.PARTS:
        shares = [entry["all"]["split"][part] for entry in entries.values()]
        figure.add_bar(name=part, orientation="h", y=list(entries), x=shares, marker=_fill(looks[part]))
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(tickformat=".0%")
    return figure
