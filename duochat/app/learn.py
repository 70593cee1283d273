"""Learn: a recorded answer becomes a lesson. Pure functions; `learn.js` shows what `lesson` gives, `places.js` explains
every round of it, and `prediction.js` says what the formulas expect. Words are in `assets/page/lesson.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np

from duochat import DuoChatError
from duochat.app.assets import ASSETS, words
from duochat.app.frames import frame
from duochat.app.jobs import Job, Jobs
from duochat.app.kept import options_of
from duochat.app.store import Message, Store
from duochat.chat.answer import Answer
from duochat.chat.chat import Options
from duochat.chat.recording import Recording, checked_prompt, record
from duochat.chat.worker import Worker
from duochat.engine.rounds import Round
from duochat.engine.sampling import gumbel

TRACES = ASSETS / "traces"
RECORDED = {  # file in TRACES -> what it shows; measured answers first, and the first one is what a lesson begins with
    "h200-duotree": "A formula on an H200, both devices at once (DuoTree): it pays",
    "h200-duodecoding": "The same on an H200 with the paper’s schedule (DuoDecoding)",
    "h200-speculative": "The same on an H200, draft and target in turns",
    "h200-autoregressive": "The same on an H200 by the large model alone: nothing is drafted",
    "formula": "The same on two processor cores: it hardly pays",
    "story": "A wild story at temperature 1.3 on two processor cores: it does not pay",
    "example": "A formula and its code, simulated: no machine was measured",
}
OF_EVERY_LESSON = ("colours", "glossary", "formulas", "questions")  # words that no answer changes
CHAT = "chat"  # the name of the last answer of a conversation
OWN_TOKENS = 96  # length of an answer to the user's own prompt
STAND_IN = re.compile(r"a small target with the shape of (.*) \(cost-faithful\)")


def lesson(recording: Recording, name: str = "") -> dict[str, Any]:
    """All that learn.js needs, as JSON."""
    costs = measured_costs(recording)
    return {
        "name": name, "prompt": recording.prompt, "decoder": recording.options.decoder,
        "device": _device(recording.hardware), "options": asdict(recording.options),
        "frame": frame(recording.answer, recording.options), "noise": noise(recording), "costs": costs,
        "measured": measured_point(recording, costs), "shared": shared(recording.hardware),
        "chapters": chapters(recording, costs), **{name: words("lesson")[name] for name in OF_EVERY_LESSON},
    }  # fmt: skip


def noise(recording: Recording) -> dict[str, Any] | None:
    """What both lanes add to the logits of tokens: {"drafted": by id, "written": of each}; None at temperature 0."""
    options, answer = recording.options, recording.answer
    if options.temperature == 0:
        return None

    def of(position: int, token: int) -> float:
        return round(float(gumbel(options.seed, position, np.array([token]))[0]), 2)

    written = [of(r.position + place, token) for r in answer.rounds for place, token in enumerate(r.tokens)]
    drafted = {str(d.id): of(d.position, d.token) for d in answer.drafts.values()}
    return {"drafted": drafted, "written": written}


def chapters(recording: Recording, costs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The lesson's chapters; what is said of the machine is said of the recording's."""
    told = words("lesson")
    here = told["shared" if shared(recording.hardware) else "apart"]
    eight = told["eight"].format(1 + 7 * costs["widen"]) if costs["curve"] else ""
    return [{**c, "text": [text.format(eight=eight, **here) for text in c["text"]]} for c in told["chapters"]]


def _device(machine: Mapping[str, Any]) -> str:
    """What answered, and on which device; a recording of a stand-in for a large model says so in `target`."""
    device, target = machine.get("target_device", ""), str(machine.get("target", "the target"))
    if stands_for := STAND_IN.fullmatch(target):
        target = f"a target with the size and the cost of {stands_for[1]} (it writes what a small model would)"
    return f"{target} on {device}" if device else ""


@lru_cache(maxsize=1)
def compared() -> list[dict[str, Any]]:
    """The measured points of the recorded answers in which something was drafted, the best first; none is simulated."""
    read = {name: r for name in RECORDED if "simulated" not in (r := recorded(name)).hardware.get("target_device", "")}
    costs = {name: measured_costs(recording) for name, recording in read.items()}
    points = [
        {"name": name, "title": RECORDED[name], "c": costs[name]["c"], **measured_point(recording, costs[name])}
        for name, recording in read.items()
    ]
    return sorted((p for p in points if p["alpha"] is not None), key=lambda p: -(p["speedup"] or 0))


def recorded(name: str) -> Recording:
    """One of RECORDED."""
    return Recording.read((TRACES / f"{name}.jsonl").read_text("utf-8").splitlines())


# -- measured --------------------------------------------------------------------------------------------------------


def shared(machine: Mapping[str, Any]) -> bool:
    """Do draft and target compute on one processor?"""
    return bool(machine.get("shares_cores", str(machine.get("target_device", "")).startswith("CPU")))


def measured_costs(recording: Recording) -> dict[str, Any]:
    """{target, draft: seconds of a forward and of a drafted token, c, budget, widen, source, curve: was the cost of
    wider forwards measured?}.

    From the machine's calibration if the recording carries one, else from the recording's own times.
    """
    wide, drafted = (_curve(recording.costs.get(device)) for device in ("target", "draft"))
    if wide and drafted:
        target, draft = wide[0][1], drafted[0][1]
        source = "measured on its machine at start"
    else:
        target, draft = _seen_costs(recording.answer.rounds)
        source = "taken from this answer's own times"
    target, draft = _digits(target), _digits(draft)
    return {"target": target, "draft": draft, "plain": recording.costs.get("plain") or target, "c": draft / target,
            "budget": target / draft, "widen": _widening(wide), "source": source,
            "curve": len(wide) > 1}  # fmt: skip


def _curve(costs: Mapping[Any, float] | None) -> list[tuple[int, float]]:
    """A measured curve as (size, seconds), sizes ascending; [] where nothing was measured."""
    return sorted((int(size), float(seconds)) for size, seconds in (costs or {}).items())


def _widening(target: Sequence[tuple[int, float]]) -> float:
    """Share of a narrow forward that each further token adds, from width 1 to the one nearest to 8."""
    if len(target) < 2:
        return 0.0
    (first, narrow), (width, wide) = target[0], min(target[1:], key=lambda point: abs(point[0] - 8))
    return max(0.0, (wide - narrow) / (width - first) / narrow)


def _digits(seconds: float) -> float:
    """In the four digits that are shown: what is computed from them is what a reader computes."""
    return float(f"{seconds:.4g}")


def _seen_costs(rounds: list[Round]) -> tuple[float, float]:
    """Median seconds of a forward and of one drafted token; 1/8 of a forward where nothing was drafted."""
    forwards = [r.ended - r.started for r in rounds if r.phase != "prefill"] or [1.0]
    batches = [(b.ended - b.started) / max(1, b.size) for r in rounds for b in r.batches]
    target = max(1e-6, median(forwards))
    return target, max(1e-6, median(batches)) if batches else target / 8


def measured_point(recording: Recording, costs: Mapping[str, float]) -> dict[str, float | None]:
    """Where this answer lies in the what-if panel. gamma: what a step verified of the tokens that fit beside it."""
    stats = recording.answer.stats
    verified = [len(r.pending) for r in recording.answer.rounds if r.pending]
    return {
        "alpha": stats.acceptance_rate if stats.tested else None,
        "gamma": max(1.0, min(costs["budget"], sum(verified) / len(verified))) if verified else None,
        "tau": stats.mean_accepted_length,
        "speedup": stats.rate * costs["plain"] if stats.rate else None,
        "hits": stats.hits / stats.outcomes if stats.outcomes else None,
    }


# -- the tab ---------------------------------------------------------------------------------------------------------


class Lessons:
    """What the page's learn tab can ask for. store: the conversations of the chat, None where there is none."""

    def __init__(self, engine: Worker, store: Store | None = None) -> None:
        self._engine, self._store = engine, store
        self._jobs = Jobs()

    def recorded(self, action: dict[str, Any]) -> dict[str, Any]:
        """The recorded answers that come with DuoChat; said: what the last answer of a conversation was asked."""
        said = self._said(action)
        prompt = "" if said is None else self._store.message(said.parent).content[:60]
        return {"recorded": [[name, title] for name, title in RECORDED.items()], "said": prompt}

    def _said(self, action: dict[str, Any]) -> Message | None:
        """The last answer of a conversation whose trace was kept."""
        conversation = str(action.get("conversation") or "")
        if not self._store or not conversation or not self._store.get(conversation):
            return None
        answers = (m for m in reversed(self._store.thread(conversation)) if m.role == "assistant" and m.parent)
        return next((m for m in answers if self._store.trace(m.id)), None)

    def lesson(self, action: dict[str, Any]) -> dict[str, Any]:
        """The lesson of a recorded answer, or of the last one of a conversation. Only names from the list are taken: no
        path comes from a page."""
        name = str(action.get("name"))
        if name == CHAT and (said := self._said(action)):
            return lesson(self._recording(said), CHAT)
        if name not in RECORDED:
            raise DuoChatError("There is no such recorded answer: reload the page.")
        return lesson(recorded(name), name)

    def _recording(self, said: Message) -> Recording:
        """An answer of the chat. Its costs are those of its own rounds: another pair may be in use by now."""
        steps, hardware = tuple(self._store.trace(said.id)), dict(self._engine.status()["hardware"])
        hardware.pop("costs", None)
        stats = Answer(steps).stats
        plain = stats.compared_plain_s / stats.compared_tokens if stats.compared else 0.0
        options = options_of(said.meta.get("options"), Options())
        asked = self._store.message(said.parent).content
        return Recording(asked, options, steps, hardware, {"plain": plain} if plain else {})

    def compared(self, _action: dict[str, Any]) -> dict[str, Any]:
        """What each recorded answer gained or lost."""
        return {"answers": compared()}

    def own(self, action: dict[str, Any]) -> dict[str, Any]:
        """Answer the user's own prompt and make a lesson of it; returns {ticket}."""
        options = Options(
            decoder="duotree", temperature=float(action.get("temperature") or 0), seed=7, max_tokens=OWN_TOKENS
        )
        options.sampling()
        prompt = checked_prompt(action.get("prompt"))
        return {"ticket": self._jobs.start(lambda job: self._answer(prompt, options, job))}

    def _answer(self, prompt: str, options: Options, job: Job) -> dict[str, Any]:
        def seen(answer: Answer) -> None:
            job.note = {"phase": answer.phase, "tokens": answer.stats.completion_tokens, "of": options.max_tokens}

        return lesson(record(self._engine, prompt, options, job.stop.is_set, seen))

    def progress(self, action: dict[str, Any]) -> dict[str, Any]:
        """How far the answer is, and at its end the lesson."""
        return self._jobs.look(action.get("ticket"))
