"""The report as one HTML file that needs nothing else: tables, plots, and how all was measured.

`python -m duochat.bench.report_page RESULTS.json` makes it again from a bench's results. The plots have Okabe and Ito's
colours, which the colour-blind tell apart; patterns, dashes and markers say the same in grey print.
"""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.express as px
import plotly.graph_objects as go

from duochat import DuoChatError, terminal
from duochat.bench import report
from duochat.bench.metrics import REFERENCE

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999", "#F0E442", "#000000")
INK, FONT = "#222222", 'system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif'
FEW = 5  # tests at a place of the draft; fewer are noise
STYLE = Path(__file__).with_name("report.css").read_text("utf-8")

Results = Mapping[str, Any]


def write(path: Path, results: Results) -> None:
    """The whole page."""
    words = pd.DataFrame.from_dict(report.FIGURES, orient="index", columns=["meaning"])
    known = {name: results[name] for name in ("settings", "machine", "calibration")}
    blocks = [
        f"<h1>DuoChat benchmark</h1><p>{_escaped(report.head(results))}</p>",
        f"<p class='{'note' if results['equal'] else 'wrong'}'>{_escaped(report.remarks(results))}</p>",
        *(_table(*table) for table in report.tables(results).items()),
        *_figures(results),
        f"<div class='words'>{_table('Meaning of the figures', words)}</div>",
        f"<h2>Settings and machine</h2><pre>{html.escape(json.dumps(known, indent=1, ensure_ascii=False))}</pre>",
    ]
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><style>{STYLE}</style>"
    head += "<title>DuoChat benchmark</title>"
    page = f"<!DOCTYPE html><html lang='en'><head>{head}</head><body>{''.join(blocks)}</body></html>\n"
    path.write_text(page, encoding="utf-8")


def _escaped(lines: Sequence[str]) -> str:
    return "<br>".join(map(html.escape, lines))


def _table(title: str, table: pd.DataFrame) -> str:
    return f"<h2>{html.escape(title)}</h2><div class='scroll'>{table.to_html(border=0)}</div>"


# ---------------------------------------------------------------- plots


def _figures(results: Results) -> Iterator[str]:
    """Each plot in a figure; the library comes once, inside the page."""
    options = {"full_html": False, "config": {"displaylogo": False, "displayModeBar": False, "responsive": True}}
    for i, plot in enumerate((speedup_by_task(results), acceptance_by_position(results))):
        yield f"<figure>{plot.to_html(include_plotlyjs=i == 0, div_id=f'plot-{i}', **options)}</figure>"


def _look(results: Results, title: str) -> dict[str, Any]:
    """What both plots share; a decoder looks alike in them."""
    order = {"decoder": list(results["decoders"])}
    title += report.faithful(results)
    return {"title": title, "color": "decoder", "color_discrete_sequence": COLOURS, "category_orders": order}


def _laid_out(plot: go.Figure) -> go.Figure:
    legend = {"orientation": "h", "y": -0.22, "x": 0, "title": None}
    return plot.update_layout(template="simple_white", font={"family": FONT, "color": INK}, legend=legend, height=420)


def speedup_by_task(results: Results) -> go.Figure:
    """Grouped bars with their 95 % intervals."""
    bars = []
    for name, entry in results["decoders"].items():
        for task, f in {**entry["tasks"], "mean": entry["all"]}.items():
            (low, high), at = f["speedup_interval"], f["speedup"]
            bars += [] if name == REFERENCE else [(name, task, at, high - at, at - low)]
    look = _look(results, "Speedup over plain decoding, by task") | {"pattern_shape": "decoder", "barmode": "group"}
    table = pd.DataFrame(bars, columns=["decoder", "task", "speedup", "above", "below"])
    plot = px.bar(table, x="task", y="speedup", error_y="above", error_y_minus="below", **look)
    plot.add_hline(y=1, line={"color": INK, "width": 1, "dash": "dot"})
    return _laid_out(plot).update_yaxes(title="tokens/s over plain decoding's").update_xaxes(title="")


def acceptance_by_position(results: Results) -> go.Figure:
    """Accepted share at each place below the root, and how many tests it rests on."""
    points = []
    for name, entry in results["decoders"].items():
        rates, tests = (entry["all"][figure] for figure in ("acceptance_by_position", "tested_by_position"))
        for place, (rate, tested) in enumerate(zip(rates, tests, strict=True), 1):
            points += [(name, place, rate, tested)] if tested >= FEW else []
    table = pd.DataFrame(points, columns=["decoder", "place", "rate", "tests"])
    look = _look(results, "Acceptance by position of the drafted token")
    look |= {"line_dash": "decoder", "symbol": "decoder", "markers": True, "hover_data": ["tests"]}
    plot = _laid_out(px.line(table, x="place", y="rate", **look))
    return plot.update_yaxes(title="accepted / tested", range=[0, 1.02]).update_xaxes(title="position in the draft")


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
