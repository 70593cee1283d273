"""Hardware: what each device costs, measured on this machine, and the draft budget that follows. Plots and a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

Series = list[tuple[int, float]]
GRID = "rgba(128, 136, 148, 0.25)"
KINDS = (  # (key, other name of the key, title, axis, what is counted)
    ("target", "", "Target: one forward", "tokens verified in it", "tokens"),
    ("draft", "", "Draft: one batch", "sequences in it", "sequences"),
    ("threads", "sweep", "Draft: one token", "threads", "threads"),
)


def table(costs: Mapping[str, Any]) -> dict[str, Series]:
    """The measured curves as (size, seconds), sizes ascending; [] where nothing was measured."""
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
        [
            title,
            f"{size} {unit if size > 1 else unit[:-1]}",
            round(1000 * seconds, 3),
            round(seconds / curves[key][0][1], 2),
        ]
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


def figures(costs: Mapping[str, Any]) -> list[Any]:
    """A plot for each curve, milliseconds over size, the chosen point marked (plotly)."""
    curves, point = table(costs), chosen(costs)
    marks = {"target": 1, "draft": 1, "threads": point["threads"]}
    return [_figure(curves[key], marks[key], title, axis, key == "target") for key, _, title, axis, _ in KINDS]


def _figure(series: Series, mark: int | None, title: str, axis: str, solid: bool) -> Any:
    from plotly.graph_objects import Figure, Scatter

    sizes = [size for size, _ in series]
    curve = Scatter(
        x=sizes, y=[1000 * seconds for _, seconds in series], mode="lines+markers+text",
        line={"color": "#00916c" if solid else "#b0689a", "width": 3, "dash": "solid" if solid else "dot"},
        marker={
            "size": [15 if size == mark else 8 for size in sizes], "opacity": 1,
            "symbol": "circle" if solid else "square",
        },
        text=["chosen" if size == mark else "" for size in sizes], textposition="top center",
        hovertemplate="%{x}: %{y:.2f} ms<extra></extra>",
    )  # fmt: skip
    plot = Figure(curve)
    plot.update_xaxes(title_text=axis, type="log", tickvals=sizes, gridcolor=GRID)
    plot.update_yaxes(title_text="ms", rangemode="tozero", gridcolor=GRID)
    plot.update_layout(
        title={"text": title, "font": {"size": 16}}, showlegend=False, height=320, template="none",
        margin={"l": 56, "r": 24, "t": 48, "b": 56}, paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
        font={"color": "#808894", "size": 13},
    )  # fmt: skip
    return plot


def facts(hardware: Mapping[str, Any]) -> str:
    """What is known of the devices, as a line of Markdown."""
    told = {k: v for k, v in hardware.items() if isinstance(v, (str, int, float)) and v != ""}
    return " · ".join(f"{key.replace('_', ' ')}: **{value}**" for key, value in told.items())


def shown(costs: Mapping[str, Any], hardware: Mapping[str, Any], note: str = "") -> tuple[Any, ...]:
    """What the tab shows: words, devices, plots, table, predicted against measured. note: instead of the words."""
    return (
        note or summary(costs),
        facts(costs.get("hardware") or hardware),
        *figures(costs),
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

    def html(value: str = "", **props: Any) -> gr.HTML:
        return gr.HTML(value, apply_default_css=False, **props)

    with gr.Column(elem_classes="dp-tab"):
        html(INTRO)
        words, devices = gr.Markdown(summary({}), elem_id="hardware-summary"), gr.Markdown("")
        button = gr.Button("Measure again", variant="primary", elem_id="measure")
        with gr.Row(elem_id="hardware-plots"):
            plots = [gr.Plot(figure, show_label=False, min_width=300) for figure in figures({})]
        filled = [words, devices, *plots, html(elem_id="hardware-table"), html()]
    button.click(measure, None, filled, api_visibility="private")
    return look, filled
