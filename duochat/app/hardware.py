"""Hardware: what each device costs, measured on this machine, and the draft budget that follows. Plots and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from duochat import DuoChatError
from duochat.app.jobs import Jobs
from duochat.chat.answer import Engine

Series = list[tuple[int, float]]
GRID = "rgba(128, 136, 148, 0.25)"
KINDS = (  # (key, title, axis, what is counted)
    ("target", "Target: one forward", "tokens verified in it", "tokens"),
    ("draft", "Draft: one batch", "sequences in it", "sequences"),
    ("sweep", "Draft: one token", "threads", "threads"),
)


def table(costs: Mapping[str, Any]) -> dict[str, Series]:
    """The measured curves as (size, seconds), sizes ascending; [] where nothing was measured."""
    return {key: sorted((int(n), float(s)) for n, s in (costs.get(key) or {}).items()) for key, *_ in KINDS}


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
    return {
        "threads": costs.get("threads"), "target": target, "draft": draft,
        "c": draft / target if both else None, "budget": target / draft if both else None,
    }  # fmt: skip


def summary(costs: Mapping[str, Any]) -> str:
    """The two costs and the budget that follows from them, as HTML."""
    point = chosen(costs)
    if point["budget"] is None:
        return '<p class="dp dp-plain">Nothing is measured yet: press “Measure again”.</p>'
    threads = f"{point['threads'] or 1} {'thread' if point['threads'] == 1 else 'threads'}"
    fits = f"the draft budget γ* = T_target / T_draft; c\u00a0=\u00a0{point['c']:.3f}"
    told = (
        ("One step of the target", _ms(point["target"]), "T_target: one forward of the large model"),
        ("One guess of the draft", _ms(point["draft"]), f"T_draft, on {threads}"),
        ("So beside one step fit", f"{point['budget']:.1f} tokens", fits),
    )
    cards = "".join(f"<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>" for name, value, note in told)
    return f'<dl class="dp dp-plain dp-costs">{cards}</dl>'


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.{2 if seconds < 0.01 else 1}f} ms"


def rows(costs: Mapping[str, Any]) -> list[list[Any]]:
    """The plots' data as a table: what, size, milliseconds, times the first of its kind."""
    curves = table(costs)
    return [
        [title, f"{n} {unit if n > 1 else unit[:-1]}", round(1000 * s, 3), round(s / curves[key][0][1], 2)]
        for key, title, _, unit in KINDS
        for n, s in curves[key]
    ]


def html_table(head: Sequence[str], body: Sequence[Sequence[Any]]) -> str:
    """A table in the page's style; "" when there are no rows."""
    if not body:
        return ""
    cells = "".join(f"<th scope=col>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(str(value))}</td>" for value in row) + "</tr>" for row in body)
    return f'<div class="dp dp-plain"><table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>'


def figures(costs: Mapping[str, Any]) -> list[Any]:
    """A plot of what a forward and a draft batch cost, milliseconds over size, one alone marked (plotly)."""
    return [_figure(table(costs)[key], title, axis, key == "target") for key, title, axis, _ in KINDS[:2]]


def _figure(series: Series, title: str, axis: str, solid: bool) -> Any:
    from plotly.graph_objects import Figure, Scatter

    sizes = [size for size, _ in series]
    curve = Scatter(
        x=sizes, y=[1000 * seconds for _, seconds in series], mode="lines+markers+text",
        line={"color": "#00916c" if solid else "#b0689a", "width": 3, "dash": "solid" if solid else "dot"},
        marker={
            "size": [15 if size == 1 else 8 for size in sizes], "opacity": 1,
            "symbol": "circle" if solid else "square",
        },
        text=["one alone" if size == 1 else "" for size in sizes], textposition="top center",
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


FACTS = {  # what is told of the devices, in this order
    "target_device": "Target on", "target_dtype": "its arithmetic", "target_weight_bytes": "its weights",
    "target_quantize": "its quantisation", "draft_backend": "Draft by", "draft_threads": "its threads",
    "cores": "Processor cores", "draft_fault": "Draft does not work",
}  # fmt: skip


def facts(hardware: Mapping[str, Any]) -> str:
    """What is known of the devices, as HTML; what people cannot read is left to `chat --json`."""
    told = {FACTS[k]: hardware[k] for k in FACTS if hardware.get(k) not in (None, "", "none")}
    if "its weights" in told:
        told["its weights"] = f"{told['its weights'] / 1e9:.2f} GB"
    lines = "".join(f"<dt>{name}</dt><dd>{escape(str(value))}</dd>" for name, value in told.items())
    return f'<dl class="dp dp-plain dp-machine">{lines}</dl>'


def shown(hardware: Mapping[str, Any], note: str = "") -> tuple[Any, ...]:
    """What the tab shows: the costs, the plots, folded the rest. note: a fault, instead of the costs."""
    costs = hardware.get("costs") or {}
    return (
        f'<p class="dp dp-plain">{escape(note)}</p>' if note else summary(costs),
        *figures(costs),
        MORE.format(facts(hardware) + html_table(("what", "size", "ms", "times the first"), rows(costs))),
    )


MORE = '<details class="dp-more"><summary>More of this machine</summary>{}</details>'
INTRO = (
    '<header class="dp-intro"><h2>Hardware</h2><p>What a target forward and a drafted token cost on this machine. '
    "The draft budget follows from these two numbers.</p></header>"
)


def build(engine: Engine) -> Any:
    """Fill a gr.Tab. Returns the function that shows what is known now and the components that it fills, for the
    tab's `select`."""
    import gradio as gr

    jobs = Jobs()

    def look(note: str = "") -> tuple[Any, ...]:
        return shown(engine.status()["hardware"], note)

    def measure() -> tuple[Any, ...]:
        try:
            if not jobs.under_way("measure"):
                jobs.start(lambda job: engine.calibrate(), "measure")
            jobs.wait("measure")
        except DuoChatError as fault:
            return look(str(fault))
        return look()

    def html(value: str = "", **props: Any) -> gr.HTML:
        return gr.HTML(value, apply_default_css=False, **props)

    with gr.Column(elem_classes="dp-tab"):
        html(INTRO)
        words = html(summary({}), elem_id="hardware-summary")
        with gr.Row(elem_id="hardware-plots"):
            plots = [gr.Plot(figure, show_label=False, min_width=300) for figure in figures({})]
        button = gr.Button("Measure again", variant="primary", elem_id="measure")
        filled = [words, *plots, html(elem_id="hardware-table")]
    button.click(measure, None, filled, api_visibility="private")
    return look, filled
