"""The drawer with what an answer is made with: decoder, sampling, stop strings, system prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import gradio as gr

from duochat import DuoChatError
from duochat.chat.chat import SETTINGS, Options
from duochat.config import AUTO, DECODERS, check

PRESETS = {
    "Precise": {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "Balanced": {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.0},
    "Creative": {"temperature": 1.1, "top_k": 0, "top_p": 1.0, "min_p": 0.05},
}
SHAPED = ("temperature", "top_k", "top_p", "min_p")
WHOLE = {  # fields of whole numbers: their label and the least
    "seed": ("Seed", 0), "max_tokens": ("Max tokens", 1), "top_k": ("Top-k", 0), "draft_budget": ("Draft budget γ", 0),
}  # fmt: skip
KEEP = "(...values) => duochat.keepSettings(...values)"  # the browser remembers what a hand has set


def slider(low: float, high: float, value: float, step: float, label: str, info: str) -> gr.Slider:
    return gr.Slider(low, high, value, step=step, label=label, info=info)


def number(value: int, label: str, info: str) -> gr.Number:
    """No minimum: Gradio would refuse the event without a word to the page; `options_from` says what is wrong."""
    return gr.Number(value, precision=0, label=label, info=info)


def stop_lines(stop: tuple[str, ...]) -> str:
    """Stop strings as the text field shows them: one a line, a line end within as \\n."""
    return "\n".join(s.replace("\n", "\\n") for s in stop)


def shown_budget(options: Options) -> int:
    """The draft budget in a number field, where 0 stands for "auto"."""
    return 0 if options.draft_budget == AUTO else options.draft_budget


class Controls:
    """Build inside a Blocks. `inputs` are the components, in the order of SETTINGS."""

    def __init__(self, defaults: Options, context_length: int) -> None:
        self.decoder = gr.Radio(
            [(f"{name}: {line}", key) for key, (name, line) in DECODERS.items()], value=defaults.decoder,
            label="Decoder", elem_id="decoder",
        )  # fmt: skip
        self.preset = gr.Radio(list(PRESETS), value=preset_of(defaults), label="Sampling", elem_id="preset")
        self._sampling(defaults)
        self._limits(defaults, context_length)
        with gr.Accordion("Penalties", open=False, elem_id="penalties"):
            self._penalties(defaults)
        self.inputs = [getattr(self, name) for name in SETTINGS]
        self._join()

    def _sampling(self, d: Options) -> None:
        self.temperature = slider(0, 2, d.temperature, 0.05, "Temperature", "0: always the likeliest token")
        self.top_p = slider(0.05, 1, d.top_p, 0.01, "Top-p", "1: off")
        self.top_k = slider(0, 200, d.top_k, 1, "Top-k", "0: off")
        self.min_p = slider(0, 0.5, d.min_p, 0.01, "Min-p", "0: off")
        self.seed = number(d.seed, "Seed", "The same seed gives the same text with every decoder")
        gr.Checkbox(False, label="Keep the seed", info="“Answer again” takes another one otherwise", elem_id="pinned")

    def _penalties(self, d: Options) -> None:
        self.repetition_penalty = slider(
            0.5, 2, d.repetition_penalty, 0.01, "Repetition penalty", "1: off. Of all said"
        )
        self.presence_penalty = slider(-2, 2, d.presence_penalty, 0.05, "Presence penalty", "0: off. Of the answer's")
        self.frequency_penalty = slider(-2, 2, d.frequency_penalty, 0.05, "Frequency penalty", "0: off. For each time")
        self.logit_bias = gr.Textbox(
            json.dumps(dict(d.logit_bias)), lines=1, label="Logit bias", info='{"token id": what is added}'
        )

    def _limits(self, d: Options, context_length: int) -> None:
        self.max_tokens = slider(1, context_length, d.max_tokens, 1, "Max tokens", "An answer ends here at the latest")
        self.draft_budget = number(shown_budget(d), "Draft budget γ", "0: computed from this machine's speed")
        self.stop = gr.Textbox(
            stop_lines(d.stop), lines=1, max_lines=4, label="Stop strings",
            info="One a line; the answer ends before them. \\n is a line end",
        )  # fmt: skip
        self.system = gr.Textbox(
            d.system, lines=3, max_lines=12, label="System prompt", elem_id="system",
            placeholder="What the model shall be or do",
        )  # fmt: skip

    def _join(self) -> None:
        """A preset moves the sliders; a moved slider leaves the preset."""
        sliders = [getattr(self, name) for name in SHAPED]
        quiet = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
        chosen = self.preset.input(lambda name: [PRESETS[name][k] for k in SHAPED], self.preset, sliders, **quiet)
        chosen.then(None, self.inputs, None, js=KEEP)
        for slider in sliders:
            slider.input(preset_of_values, sliders, self.preset, **quiet)
        for field in self.inputs:
            field.input(None, self.inputs, None, js=KEEP)

    def updates(self, options: Options, context_length: int) -> list[Any]:
        """Values for `inputs`, then for the preset."""
        values = [getattr(options, name) for name in SETTINGS]
        longest = gr.update(value=min(options.max_tokens, context_length), maximum=context_length)
        shown = {"stop": stop_lines(options.stop), "draft_budget": shown_budget(options), "max_tokens": longest}
        shown["logit_bias"] = json.dumps(dict(options.logit_bias))
        return [shown.get(name, v) for name, v in zip(SETTINGS, values, strict=True)] + [preset_of(options)]


def options_from(values: Sequence[Any], context_length: int) -> Options:
    """Options from the components' values. Raises DuoChatError on the first one that no answer can be made with."""
    raw = dict(zip(SETTINGS, values, strict=True))
    for name, (label, least) in WHOLE.items():
        most = context_length if name in ("max_tokens", "draft_budget") else sys.maxsize
        raw[name] = _whole(label, raw[name], least, most)
    raw["draft_budget"] = raw["draft_budget"] or AUTO
    raw["stop"] = tuple(line.replace("\\n", "\n") for line in str(raw["stop"] or "").split("\n") if line)
    raw["system"] = str(raw["system"] or "")
    raw["logit_bias"] = check("logit_bias", _json(raw["logit_bias"] or "{}"))
    options = Options(**raw)
    options.check(context_length)
    return options


def _json(text: str) -> Any:
    """As it is where it is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _whole(label: str, value: Any, least: int, most: int) -> int:
    """A number field that was emptied counts as 0."""
    try:
        if least <= (number := int(value or 0)) <= most:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    upwards = f" to {most}, the length of the context" if most < sys.maxsize else " on"
    raise DuoChatError(f"{label} is {value}: give a whole number from {least}{upwards}.")


def remembered(kept: Any, context_length: int, defaults: Options) -> Options:
    """Options from what a browser remembers of the fields (JSON of their values); the defaults where it is no good."""
    try:
        return options_from(json.loads(kept), context_length)
    except (DuoChatError, ValueError, TypeError):
        return defaults


def preset_of(options: Options) -> str | None:
    return preset_of_values(*(getattr(options, name) for name in SHAPED))


def preset_of_values(*values: float) -> str | None:
    """The name of the preset that the values of SHAPED make, None for none."""
    return next(
        (n for n, p in PRESETS.items() if all(abs(p[k] - v) < 1e-9 for k, v in zip(SHAPED, values, strict=True))), None
    )
