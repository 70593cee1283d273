"""The report as one HTML file that needs nothing else: tables, plots, and how all was measured.

`python -m duochat.bench.report_page RESULTS.json` makes it again from a bench's results.
"""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from duochat import DuoChatError, terminal
from duochat.bench import figures, report

STYLE = """
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; color: #222; background: #fff;
       max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid #222; }
.note { color: #555; } .wrong { border-left: 4px solid #D55E00; padding-left: .8rem; }
pre { white-space: pre-wrap; font-size: .8rem; }
@media print { body { max-width: none; margin: 0; } figure, table { break-inside: avoid; } }
figure { margin: 1.5rem 0; }
"""
CONFIG = {"displaylogo": False, "displayModeBar": False, "responsive": True}


def render(results: Mapping[str, Any]) -> str:
    """The whole page."""
    blocks = [_introduction(results)]
    blocks += [_table(title, headers, rows) for title, headers, rows in report.tables(results)]
    blocks += [f"<p>{html.escape(line)}</p>" for line in report.remarks(results)]
    blocks += _plots(results)
    blocks += [_glossary(), _details(results)]
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width'><style>{STYLE}</style>"
    title = "<title>DuoChat benchmark</title>"
    return f"<!DOCTYPE html><html lang='en'><head>{head}{title}</head><body>{''.join(blocks)}</body></html>\n"


def write(path: Path, results: Mapping[str, Any]) -> None:
    path.write_text(render(results), encoding="utf-8")


def _introduction(results: Mapping[str, Any]) -> str:
    lines = "<br>".join(html.escape(line) for line in report.head(results))
    equal = results["equal"]
    verdict = "Every decoder gave the tokens of plain decoding." if equal else "Some answers differ, see below."
    return f"<h1>DuoChat benchmark</h1><p>{lines}</p><p class='{'note' if equal else 'wrong'}'>{verdict}</p>"


def _table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    table = f"<table><thead>{line(headers, 'th')}</thead><tbody>{body}</tbody></table>"
    return f"<h2>{html.escape(title)}</h2><div class='scroll'>{table}</div>"


def _plots(results: Mapping[str, Any]) -> list[str]:
    """Each plot in a figure; the library comes once, inside the page."""
    found = []
    for i, figure in enumerate(figures.all_figures(results)):
        division = figure.to_html(full_html=False, include_plotlyjs=i == 0, config=CONFIG, div_id=f"plot-{i}")
        found.append(f"<figure>{division}</figure>")
    return found


def _glossary() -> str:
    rows = [[name, meaning] for name, meaning in report.FIGURES.items()]
    return _table("Meaning of the figures", ["figure", "meaning"], rows).replace("<td>", "<td style='text-align:left'>")


def _details(results: Mapping[str, Any]) -> str:
    """Settings and machine, so that the page can be quoted."""
    known = {name: results[name] for name in ("settings", "machine", "calibration")}
    return f"<h2>Settings and machine</h2><pre>{html.escape(json.dumps(known, indent=1, ensure_ascii=False))}</pre>"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, metavar="FILE.json", help="what bench wrote")
    parser.add_argument("--html", type=Path, metavar="FILE", help="where the report goes (default: here, named alike)")


def main(args: argparse.Namespace) -> None:
    target = args.html or Path(args.results.with_suffix(".html").name)
    try:
        write(target, json.loads(args.results.read_text("utf-8")))
    except (KeyError, TypeError, ValueError) as fault:
        raise DuoChatError(f"{args.results} is no result of bench: give a JSON file that bench wrote.") from fault
    except OSError as fault:
        raise DuoChatError(f"{fault.filename}: {fault.strerror}. Choose another file.") from fault
    print(target)


if __name__ == "__main__":
    terminal.start("duochat.bench.report_page", __doc__, add_arguments, main)
