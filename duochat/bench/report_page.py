"""The report as one HTML file that needs nothing else: tables, plots, and how all was measured.

`python -m duochat.bench.report_page RESULTS.json` makes it again from a bench's results. The plots have Okabe and Ito's
colours, which the colour-blind tell apart; patterns, dashes and markers say the same in grey print.
"""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from duochat import DuoChatError, terminal
from duochat.bench import report
from duochat.bench.metrics import REFERENCE

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999", "#F0E442", "#000000")
PATTERNS = ("", "/", "x", ".", "\\", "-", "|", "+")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
INK, GRID, FONT = "#222222", "#DDDDDD", 'system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif'
FEW = 5  # tests at a place of the draft; fewer are noise
STYLE = f"""
body {{ font: 15px/1.5 {FONT}; color: {INK}; background: #fff; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.2rem; margin-top: 2.2rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .25rem .6rem; text-align: right; border-bottom: 1px solid {GRID}; white-space: nowrap; }}
th:first-child, td:first-child, .words td {{ text-align: left; }}
thead th {{ border-bottom: 2px solid {INK}; }}
.note {{ color: #555; }} .wrong {{ border-left: 4px solid #D55E00; padding-left: .8rem; }}
pre {{ white-space: pre-wrap; font-size: .8rem; }}
@media print {{ body {{ max-width: none; margin: 0; }} figure, table {{ break-inside: avoid; }} }}
figure {{ margin: 1.5rem 0; }}
"""

Results = Mapping[str, Any]


def render(results: Results) -> str:
    """The whole page."""
    lines = "<br>".join(map(html.escape, report.head(results)))
    blocks = [f"<h1>DuoChat benchmark</h1><p>{lines}</p>"]
    blocks += [f"<p class='{'note' if results['equal'] else 'wrong'}'>{_escaped(report.remarks(results))}</p>"]
    blocks += [_table(title, headers, rows) for title, headers, rows in report.tables(results)]
    blocks += _plots(results)
    words = [[name, meaning] for name, meaning in report.FIGURES.items()]
    blocks += [f"<div class='words'>{_table('Meaning of the figures', ['figure', 'meaning'], words)}</div>"]
    known = {name: results[name] for name in ("settings", "machine", "calibration")}
    details = html.escape(json.dumps(known, indent=1, ensure_ascii=False))
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><style>{STYLE}</style>"
    body = f"{''.join(blocks)}<h2>Settings and machine</h2><pre>{details}</pre>"
    title = "<title>DuoChat benchmark</title>"
    return f"<!DOCTYPE html><html lang='en'><head>{head}{title}</head><body>{body}</body></html>\n"


def write(path: Path, results: Results) -> None:
    path.write_text(render(results), encoding="utf-8")


def _escaped(lines: Sequence[str]) -> str:
    return "<br>".join(map(html.escape, lines))


def _table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    table = f"<table><thead>{line(headers, 'th')}</thead><tbody>{body}</tbody></table>"
    return f"<h2>{html.escape(title)}</h2><div class='scroll'>{table}</div>"


# ---------------------------------------------------------------- plots


def _plots(results: Results) -> list[str]:
    """Each plot in a figure; the library comes once, inside the page."""
    options = {"full_html": False, "config": {"displaylogo": False, "displayModeBar": False, "responsive": True}}
    made = enumerate((speedup_by_task(results), acceptance_by_position(results)))
    divisions = (plot.to_html(include_plotlyjs=i == 0, div_id=f"plot-{i}", **options) for i, plot in made)
    return [f"<figure>{division}</figure>" for division in divisions]


def styles(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Colour, pattern, dash and marker of each name, the same in every plot."""
    looks = zip(names, cycle(COLOURS), cycle(PATTERNS), cycle(DASHES), cycle(MARKERS), strict=False)
    return {name: {"colour": c, "pattern": p, "dash": d, "marker": m} for name, c, p, d, m in looks}


def _plot(results: Results, title: str, x: str, y: str) -> go.Figure:
    axis = {"gridcolor": GRID, "linecolor": INK, "zerolinecolor": GRID, "ticks": "outside", "automargin": True}
    return go.Figure(
        layout={
            "title": {"text": title + report.faithful(results), "x": 0, "xanchor": "left", "font": {"size": 17}},
            "xaxis": {"title": {"text": x}, **axis},
            "yaxis": {"title": {"text": y}, **axis},
            "font": {"family": FONT, "size": 13, "color": INK},
            "paper_bgcolor": "white",
            "plot_bgcolor": "white",
            "margin": {"l": 60, "r": 20, "t": 50, "b": 90},
            "legend": {"orientation": "h", "y": -0.22, "x": 0},
            "height": 420,
        }
    )


def speedup_by_task(results: Results) -> go.Figure:
    """Grouped bars with their 95 % intervals."""
    plot = _plot(results, "Speedup over plain decoding, by task", "", "tokens/s over plain decoding's")
    looks = styles(list(results["decoders"]))
    for name, entry in results["decoders"].items():
        cells = {**entry["tasks"], "mean": entry["all"]}
        spans = [(cell["speedup"], *cell["speedup_interval"]) for cell in cells.values()]
        error = {"type": "data", "symmetric": False, "thickness": 1, "width": 3}
        error |= {"array": [high - at for at, _, high in spans], "arrayminus": [at - low for at, low, _ in spans]}
        fill = {"shape": looks[name]["pattern"], "fgcolor": "white", "size": 6, "solidity": 0.25}
        fill = {"color": looks[name]["colour"], "line": {"color": INK, "width": 0.5}, "pattern": fill}
        if name != REFERENCE:
            plot.add_bar(name=name, x=list(cells), y=[at for at, _, _ in spans], error_y=error, marker=fill)
    plot.add_hline(y=1, line={"color": INK, "width": 1, "dash": "dot"})
    return plot


def acceptance_by_position(results: Results) -> go.Figure:
    """Accepted share at each place below the root, and how many tests it rests on."""
    plot = _plot(results, "Acceptance by position of the drafted token", "position in the draft", "accepted / tested")
    looks = styles(list(results["decoders"]))
    for name, entry in results["decoders"].items():
        look, tests = looks[name], entry["all"]["tested_by_position"]
        rates = enumerate(entry["all"]["acceptance_by_position"])
        points = [(i + 1, rate, f"{tests[i]} tests") for i, rate in rates if tests[i] >= FEW]
        if points:
            x, y, hovertext = zip(*points, strict=True)
            line = {"color": look["colour"], "dash": look["dash"], "width": 2}
            marker = {"symbol": look["marker"], "size": 8, "color": look["colour"]}
            plot.add_scatter(name=name, mode="lines+markers", x=x, y=y, hovertext=hovertext, line=line, marker=marker)
    return plot.update_yaxes(range=[0, 1.02]).update_xaxes(tick0=1, dtick=1)


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, metavar="FILE.json", help="what bench wrote")
    parser.add_argument("--html", type=Path, metavar="FILE", help="where the report goes (default: here, named alike)")


def main(args: argparse.Namespace) -> None:
    target = args.html or Path(args.results.with_suffix(".html").name)
    try:
        write(target, report.again(json.loads(args.results.read_text("utf-8"))))
    except (KeyError, TypeError, ValueError) as fault:
        raise DuoChatError(f"{args.results} is no result of bench: give a JSON file that bench wrote.") from fault
    except OSError as fault:
        raise DuoChatError(f"{fault.filename}: {fault.strerror}. Choose another file.") from fault
    print(target)


if __name__ == "__main__":
    terminal.start("duochat.bench.report_page", __doc__, add_arguments, main)
