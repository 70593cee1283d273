"""Hardware: what each device costs, measured on this machine, and the draft budget that follows. Plots and a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

Series = list[tuple[int, float]]
KINDS = (  # (key, other name of the key, title, axis, what is counted)
    ("target", "", "Target on the GPU: one forward", "tokens verified in it", "tokens"),
    ("draft", "", "Draft on the CPU: one batch", "sequences in it", "sequences"),
    ("threads", "sweep", "Draft on the CPU: one token", "threads", "threads"),
)


def table(costs: Mapping[str, Any]) -> dict[str, Series]:
    """The three measured curves as (size, seconds), sizes ascending; [] where nothing was measured."""
    curves = {}
    for key, other, *_ in KINDS:
        raw = next((costs[k] for k in (key, other) if isinstance(costs.get(k), Mapping)), {})
        curves[key] = sorted((int(size), float(seconds)) for size, seconds in raw.items())
    return curves


def as_dict(costs: Any) -> dict[str, Any]:
    """The calibration as a plain dict: what a worker gives may be one already, or have `to_dict`."""
    return dict(costs.to_dict() if hasattr(costs, "to_dict") else costs or {})


def known(engine: Any) -> dict[str, Any]:
    """The calibration that a worker's status carries, without measuring; {} when there is none."""
    status = engine.status() if hasattr(engine, "status") else {}
    return dict((status.get("hardware") or {}).get("costs") or {})


def plain_rate(engine: Any) -> float | None:
    """Tokens/s of plain decoding as calibrated, the base of every speedup; None while it is not known."""
    costs = known(engine)
    narrow = table(costs)["target"][:1]
    seconds = costs.get("plain") or (narrow[0][1] if narrow else None)
    return 1 / seconds if seconds else None


def widening(target: Series) -> float:
    """Share of a narrow forward that each further token adds, from width 1 to the one nearest to 8."""
    if len(target) < 2:
        return 0.0
    (first, narrow), (width, wide) = target[0], min(target[1:], key=lambda point: abs(point[0] - 8))
    return max(0.0, (wide - narrow) / (width - first) / narrow)


def chosen(costs: Mapping[str, Any]) -> dict[str, float | None]:
    """The chosen point: threads, T_target, T_draft, c and γ* = T_target / T_draft."""
    curves = table(costs)
    target = curves["target"][0][1] if curves["target"] else None
    draft = curves["draft"][0][1] if curves["draft"] else None
    both = target and draft
    threads = costs.get("threads")
    return {
        "threads": threads if isinstance(threads, int) else _fastest(curves["threads"]),
        "target": target, "draft": draft,
        "c": draft / target if both else None, "budget": target / draft if both else None,
    }  # fmt: skip


def _fastest(series: Series) -> int | None:
    return min(series, key=lambda point: point[1])[0] if series else None


def summary(costs: Mapping[str, Any]) -> str:
    """The arithmetic in words (Markdown)."""
    point = chosen(costs)
    if point["budget"] is None:
        return "Nothing is measured yet: press **Measure again**."
    threads = point["threads"] or 1
    return (
        f"One target forward takes **{_ms(point['target'])}**, one drafted token **{_ms(point['draft'])}** with "
        f"{threads} draft {'thread' if threads == 1 else 'threads'}. So c = T_draft / T_target = **{point['c']:.3f}**, "
        f"and the draft budget is γ\\* = T_target / T_draft = **{point['budget']:.1f} tokens** a forward."
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.{2 if seconds < 0.01 else 1}f} ms"


def rows(costs: Mapping[str, Any]) -> list[list[Any]]:
    """The plots' data as a table: what, size, milliseconds, times the first of its kind."""
    curves = table(costs)
    return [
        [title, f"{size} {unit}", round(1000 * seconds, 3), round(seconds / curves[key][0][1], 2)]
        for key, _, title, _, unit in KINDS
        for size, seconds in curves[key]
    ]


def comparison(costs: Mapping[str, Any]) -> list[list[Any]]:
    """Predicted against measured tokens/s of each decoder; "" where a figure is missing."""
    sources = [costs.get(name) or {} for name in ("predicted", "measured")]
    return [[name, *(_rate(source.get(name)) for source in sources)] for name in {**sources[0], **sources[1]}]


def _rate(value: Any) -> Any:
    return round(value, 1) if isinstance(value, (int, float)) else ""


def html_table(head: Sequence[str], body: Sequence[Sequence[Any]]) -> str:
    """A table in the page's style; "" when there are no rows."""
    if not body:
        return ""
    cells = "".join(f"<th scope=col>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row) + "</tr>" for row in body)
    return f'<div class="dp dp-plain"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>'


def figure(costs: Mapping[str, Any]) -> Any:
    """The three curves side by side, milliseconds over size, the chosen point marked (plotly)."""
    from plotly.graph_objects import Figure, Scatter
    from plotly.subplots import make_subplots

    curves, point = table(costs), chosen(costs)
    plot: Figure = make_subplots(1, 3, subplot_titles=[title for _, _, title, _, _ in KINDS])
    marks = {"target": 1, "draft": 1, "threads": point["threads"]}
    for column, (key, _, title, axis, _) in enumerate(KINDS, 1):
        sizes = [size for size, _ in curves[key]]
        times = [1000 * seconds for _, seconds in curves[key]]
        marked = [13 if size == marks[key] else 7 for size in sizes]
        colour = "#007a5c" if key == "target" else "#a5568a"
        plot.add_trace(
            Scatter(x=sizes, y=times, name=title, mode="lines+markers", line={"color": colour, "width": 2.5},
                    marker={"size": marked, "symbol": "circle" if key == "target" else "square"},
                    hovertemplate="%{x}: %{y:.2f} ms<extra></extra>"),
            1, column,
        )  # fmt: skip
        plot.update_xaxes(title_text=axis, type="log", tickvals=sizes, row=1, col=column)
        plot.update_yaxes(title_text="ms" if column == 1 else "", rangemode="tozero", row=1, col=column)
    plot.update_layout(
        showlegend=False, height=340, margin={"l": 50, "r": 16, "t": 48, "b": 50}, template="none",
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font={"color": "#808894"},
    )  # fmt: skip
    return plot


def facts(hardware: Mapping[str, Any]) -> str:
    """What is known of the devices, as a line of Markdown."""
    told = {k: v for k, v in hardware.items() if isinstance(v, (str, int, float)) and v != ""}
    return " · ".join(f"{key.replace('_', ' ')}: **{value}**" for key, value in told.items())


def shown(costs: Mapping[str, Any], hardware: Mapping[str, Any], note: str = "") -> tuple[Any, ...]:
    """What the tab shows: words, devices, plot, table, predicted against measured. note: instead of the words."""
    return (
        note or summary(costs),
        facts(costs.get("hardware") or hardware),
        figure(costs),
        html_table(("what", "size", "ms", "times the first"), rows(costs)),
        html_table(("decoder", "predicted tokens/s", "measured tokens/s"), comparison(costs)),
    )


INTRO = (
    '<header class="dp-intro"><h2>Hardware</h2><p>What a target forward and a drafted token cost on this machine. '
    "The draft budget follows from these two numbers.</p></header>"
)


def build(worker: Any, sentence: Callable[[Exception], str] = str) -> Any:
    """Fill a gr.Tab. worker: has `calibrate()`, and `status()` for what is known already. sentence: words for a fault.

    Returns the function that shows what is known now and the components that it fills, for the tab's `select`.
    """
    import gradio as gr

    def status() -> Mapping[str, Any]:
        return (worker.status().get("hardware") or {}) if hasattr(worker, "status") else {}

    def look() -> tuple[Any, ...]:
        return shown(known(worker), status())

    def measure() -> tuple[Any, ...]:
        try:
            return shown(as_dict(worker.calibrate()), status())
        except Exception as fault:  # noqa: BLE001  whatever it was, the page says so and stays usable
            return shown(known(worker), status(), sentence(fault))

    with gr.Column(elem_classes="dp-tab"):
        gr.HTML(INTRO)
        words, devices = gr.Markdown(summary({}), elem_id="hardware-summary"), gr.Markdown("")
        button = gr.Button("Measure again", variant="primary", elem_id="measure")
        plot = gr.Plot(figure({}), show_label=False, elem_id="hardware-plot")
        filled = [words, devices, plot, gr.HTML("", elem_id="hardware-table"), gr.HTML("")]
    button.click(measure, None, filled, api_visibility="private")
    return look, filled
