"""Learn: a recorded answer becomes a lesson. Pure functions; `learn.js` shows what `lesson` gives.

The lesson explains every round from its record: what was drafted, what the target chose at each place, and why that
was an accepted token or a correction. Words are in `assets/page/lesson.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np
import yaml

from duochat import DuoChatError
from duochat.app.assets import ASSETS, PAGE
from duochat.app.frames import frame
from duochat.app.jobs import Job, Jobs
from duochat.app.kept import options_of
from duochat.app.measured import arithmetic, measured_costs, measured_point, predicted, shared
from duochat.app.prediction import case_from, what_if
from duochat.app.store import Message, Store
from duochat.chat.answer import Answer, Engine, Token
from duochat.chat.chat import Options
from duochat.chat.recording import Recording, checked_prompt, record
from duochat.engine.rounds import Draft, Round
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
CHAT = "chat"  # the name of the last answer of a conversation
OWN_TOKENS = 96  # length of an answer to the user's own prompt
ORDINALS = ("first", "second", "third")
STAND_IN = re.compile(r"a small target with the shape of (.*) \(cost-faithful\)")


@lru_cache(maxsize=1)
def words() -> dict[str, Any]:
    """The lesson's texts, questions and glossary."""
    return yaml.safe_load((PAGE / "lesson.yaml").read_text("utf-8"))


def lesson(recording: Recording, name: str = "") -> dict[str, Any]:
    """All that learn.js needs, as JSON."""
    costs = measured_costs(recording)
    return {
        "name": name, "prompt": recording.prompt, "decoder": recording.options.decoder,
        "device": _device(recording.hardware), "options": asdict(recording.options),
        "frame": frame(recording.answer, recording.options), "rounds": explain_all(recording), "costs": costs,
        "arithmetic": arithmetic(costs), "measured": measured_point(recording, costs),
        "predicted": predicted(recording, costs), "questions": questions(recording, costs),
        "chapters": chapters(recording, costs), **{k: words()[k] for k in ("colours", "glossary", "formulas")},
    }  # fmt: skip


def chapters(recording: Recording, costs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The lesson's chapters; what is said of the machine is said of the recording's."""
    here = words()["shared" if shared(recording.hardware) else "apart"]
    eight = words()["eight"].format(1 + 7 * costs["widen"]) if costs["curve"] else ""
    return [{**c, "text": [text.format(eight=eight, **here) for text in c["text"]]} for c in words()["chapters"]]


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


# -- rounds ----------------------------------------------------------------------------------------------------------


def explain_all(recording: Recording) -> list[dict[str, Any]]:
    """One explanation a round, in order."""
    reader, answer = _Reader(recording), recording.answer
    return [reader.explain(step.round, answer.tokens_of(step)) for step in answer.steps if step.round is not None]


class _Reader:
    """Reads the rounds in order."""

    def __init__(self, recording: Recording) -> None:
        self.options, self.texts = recording.options, recording.answer.draft_texts
        self.drafts = recording.answer.drafts
        self.probs: dict[int, float] = {}  # the target's probability of the drafted tokens that a forward verified
        self.root = -1  # draft id of the last token written, -1 if it was not drafted

    def explain(self, r: Round, tokens: Sequence[Token]) -> dict[str, Any]:
        """What happened at each place of a round: {index, verified, tested, places, summary}."""
        self.probs.update(zip(r.pending, r.pending_probs, strict=False))
        places = [self._place(r, place, token) for place, token in enumerate(tokens)]
        self.root = r.accepted[-1] if r.accepted and r.last == "accepted" else -1
        counts = {"verified": len(r.pending), "tested": len(r.accepted) + len(r.rejected)}
        return {"index": r.index, **counts, "places": places, "summary": _summary(r)}

    def _place(self, r: Round, place: int, token: Token) -> dict[str, Any]:
        here = self._candidates(r, place)
        why = self._why(r, token, [d for d in here if d.id in r.rejected])
        return {"kind": token.origin, "text": token.text, "bars": self._bars(r, place, token, here), "why": why}

    def _candidates(self, r: Round, place: int) -> list[Draft]:
        """The drafted tokens that stood at this place of the path which the target took."""
        fated = [self.drafts[d] for d in (*r.accepted, *r.rejected, *r.ignored) if d in self.drafts]
        before = r.accepted[place - 1] if 0 < place <= len(r.accepted) else self.root
        return [d for d in fated if d.position == r.position + place and d.parent == before]

    def _bars(self, r: Round, place: int, token: Token, here: list[Draft]) -> list[dict[str, Any]]:
        """Pairs of bars: each candidate of the draft, and the target's token if it is none of them."""
        bars = [
            {"text": self.texts.get(d.id, "�"), "draft": d.prob, "target": self.probs.get(d.id), "token": d.token,
             "origin": d.origin}
            for d in here
        ]  # fmt: skip
        if token.id not in {d.token for d in here}:
            bars.append({"text": token.text, "draft": None, "target": None, "token": token.id, "origin": "target"})
        noise = self._noise(r.position + place, [b["token"] for b in bars])
        for bar, extra in zip(bars, noise, strict=True):
            bar.update(chosen=bar.pop("token") == token.id, noise=extra)
            if bar["chosen"] and token.prob is not None:
                bar["target"] = token.prob
        return sorted(bars, key=lambda b: (-(b["draft"] or 0.0), not b["chosen"]))

    def _noise(self, position: int, tokens: list[int]) -> list[float | None]:
        """The shared noise of some tokens at a position; at temperature 0 there is none."""
        if self.options.temperature == 0:
            return [None] * len(tokens)
        return [round(float(x), 2) for x in gumbel(self.options.seed, position, np.array(tokens))]

    def _why(self, r: Round, token: Token, rejected: Sequence[Draft]) -> str:
        """Why a token stands where it does. rejected: what the draft had there."""
        said = f"The target chose {_quote(token.text)}"
        if token.origin == "correction":
            had = " or ".join(_quote(self.texts.get(d.id, "�")) for d in rejected) or "something else"
            return (
                f"{said}; the draft had {had}. The target's token is written, and whatever was drafted below the "
                "wrong one is thrown away."
            )
        if token.origin == "bonus":
            return f"The whole branch was accepted, and the forward also gave the token after it: {_quote(token.text)}."
        if token.origin == "plain":
            return f"Nothing was tested here, so the forward gave one token: {_quote(token.text)}."
        if token.draft not in r.pending:
            return (
                f"{said}. It had no row in this forward, but the draft had prepared this very outcome: what hangs "
                "below it stays, and the next forward has something to verify."
            )
        found = self.drafts.get(token.draft)
        choice = f"the draft's {_ordinal(found.rank)} choice" if found else "drafted"
        return f"{said}, which was {choice} here: accepted."


def _summary(r: Round) -> str:
    if not r.pending:
        reason = f" ({r.reason})" if r.reason else ""
        return f"Nothing to verify in this round{reason}: one token, as in plain decoding."
    gained = len(r.tokens)
    return (
        f"{len(r.pending)} drafted {_tokens(len(r.pending))} verified in one forward, {len(r.accepted)} accepted, "
        f"{gained} {_tokens(gained)} written. Plain decoding would have needed {gained} "
        f"{'forward' if gained == 1 else 'forwards'}."
    )


def _ordinal(rank: int) -> str:
    return ORDINALS[rank - 1] if 1 <= rank <= len(ORDINALS) else f"{rank}th"


def _quote(text: str) -> str:
    return f"‘{text.replace(chr(10), '↵')}’" if text else "a token without text"


def _tokens(count: int) -> str:
    return "token" if count == 1 else "tokens"


# -- exercises -------------------------------------------------------------------------------------------------------


def questions(recording: Recording, costs: Mapping[str, float]) -> list[dict[str, Any]]:
    """Exercises with their answers: some of every lesson, some with this answer's numbers."""
    return [*_own_questions(recording, costs), *words()["questions"]]


def _own_questions(recording: Recording, costs: Mapping[str, float]) -> list[dict[str, Any]]:
    asked = [{
        "kind": "number", "unit": "tokens", "right": round(costs["budget"], 1), "slack": 0.06 * costs["budget"] + 0.05,
        "ask": f"One forward of the target takes {1000 * costs['target']:.4g} ms here, one drafted token "
               f"{1000 * costs['draft']:.4g} ms. What is the draft budget γ*?",
        "because": "γ* = T_target / T_draft: as many drafted tokens as fit beside one forward.",
    }]  # fmt: skip
    shown = next((r for r in recording.answer.rounds if len(r.accepted) >= 2 and r.last == "correction"), None)
    if shown:
        asked.insert(0, {
            "kind": "number", "unit": "tokens", "right": len(shown.tokens), "slack": 0,
            "ask": f"In round {shown.index + 1}, {len(shown.pending)} drafted tokens were verified and "
                   f"{len(shown.accepted)} accepted, then the target corrected. How many tokens did the round write?",
            "because": "The accepted ones and the correction: accepted + 1.",
        })  # fmt: skip
    return asked


# -- the tab ---------------------------------------------------------------------------------------------------------


class Lessons:
    """What the page's learn tab can ask for. store: the conversations of the chat, None where there is none."""

    def __init__(self, engine: Engine, store: Store | None = None) -> None:
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

    def predict(self, action: dict[str, Any]) -> dict[str, Any]:
        """The what-if panel's figures for its sliders."""
        return what_if(case_from(action), str(action.get("own") or ""))


def build(part: Callable[..., Any], engine: Engine, store: Store | None = None) -> Any:
    """The tab's content, inside a gr.Tab. part: `page.part`."""
    lessons = Lessons(engine, store)
    served = [lessons.recorded, lessons.lesson, lessons.compared, lessons.own, lessons.progress, lessons.predict]
    return part("learn", serve=served)
