"""Steps of an answer -> frames, the JSON that picture.js draws. Pure: no clock, no page.

A frame is {"from": a, "n": b, "rounds": [...], "tail": str, "state": {...}, "gauges": {...}}: it takes a picture that
has seen a steps to b steps. "from": 0 starts afresh, so a snapshot is an ordinary frame. The text of a round's tokens,
joined over all rounds and followed by their tails, is the text of the answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duochat.engine.rounds import Draft, Round, Stats

if TYPE_CHECKING:
    from duochat.chat.chat import Step

Frame = dict[str, Any]

ASSETS = Path(__file__).resolve().parents[2] / "assets"
SCRIPTS = ("picture.js", "race.js", "learn.js")  # in this order; the later ones use the first
RECENT = 2.0  # seconds of the answer over which the "now" gauges are taken


def page_assets() -> tuple[str, str]:
    """The style sheet and the scripts of the picture and its tabs: (css, js), for the page's head."""
    page = ASSETS / "page"
    script = "\n".join((page / name).read_text("utf-8") for name in SCRIPTS if (page / name).exists())
    return (page / "picture.css").read_text("utf-8"), script


class Live:
    """The picture of one answer: feed it every step, send what it returns to the page.

    decoder: name shown on the badge. plain_rate: tokens/s of plain decoding measured on this machine, None while
    unknown (then no speedup is shown).
    """

    def __init__(self, decoder: str = "", plain_rate: float | None = None) -> None:
        self.decoder, self.plain_rate = decoder, plain_rate
        self.stats = Stats()
        self._n = 0
        self._rounds: list[Frame] = []
        self._state: dict[str, Any] = {"decoder": decoder}
        self._load: dict[str, float] = {}
        self._drafts: dict[int, Draft] = {}
        self._recent: deque[Round] = deque()

    def feed(self, step: Step, load: Mapping[str, float] | None = None) -> Frame:
        """The frame that shows one more step. load: utilisation 0..1 of the devices now, {"cpu": ..., "gpu": ...}."""
        self._load = dict(load) if load is not None else self._load
        changed = self._note(step)
        frame: Frame = {"from": self._n, "n": self._n + 1, "rounds": [], "state": changed}
        if step.round is not None:
            frame["rounds"] = [self._round(step, step.round)]
            self._rounds += frame["rounds"]
        elif step.text:
            frame["tail"] = step.text
            self._add_tail(step.text)
        self._n += 1
        return {**frame, "gauges": self._gauges()}

    def snapshot(self) -> Frame:
        """The whole picture as one frame: for a page that missed one, a finished answer, a replay."""
        return {
            "from": 0, "n": self._n, "rounds": list(self._rounds), "state": dict(self._state), "gauges": self._gauges()
        }  # fmt: skip

    def _note(self, step: Step) -> dict[str, Any]:
        """Take over what the step says of the answer as a whole; returns what changed."""
        said = {
            "phase": step.phase, "progress": step.progress, "error": step.error,
            "doing" if step.phase == "loading" else "notice": step.notice,
            "finish": step.finish, "prompt_tokens": step.prompt_tokens, "context_length": step.context_length,
            "speculation": step.round.speculation if step.round else "",
            "reason": step.round.reason if step.round else "",
        }  # fmt: skip
        changed = {k: v for k, v in said.items() if v and self._state.get(k) != v}
        if not self._n:
            changed["decoder"] = self.decoder
        self._state.update(changed)
        return changed

    def _round(self, step: Step, r: Round) -> Frame:
        self._drafts.update((d.id, d) for d in r.drafted)
        self.stats.add(r)
        self._recent.append(r)
        while r.ended - self._recent[0].ended > RECENT:
            self._recent.popleft()
        drawn = draw_round(r, _texts(step, len(r.tokens)), step.draft_texts, self._drafts)
        for fated in (*r.accepted, *r.rejected, *r.ignored):
            self._drafts.pop(fated, None)
        return drawn

    def _add_tail(self, text: str) -> None:
        """Text that came after the last round belongs to its last token."""
        if self._rounds:
            self._rounds[-1] = {**self._rounds[-1], "tail": self._rounds[-1].get("tail", "") + text}

    def _gauges(self) -> dict[str, Any]:
        figures = self.stats.to_dict()
        gauges = {
            "tokens": self.stats.completion_tokens, "rounds": self.stats.rounds, "drafted": self.stats.drafted,
            "accepted": self.stats.accepted, "rejected": self.stats.rejected, "ignored": self.stats.ignored,
            "alpha": figures["acceptance_rate"] if self.stats.tested else None,
            "tau": self.stats.mean_accepted_length or None,
            "ttft": self.stats.first_token_at,
            "cpu_idle": figures["cpu_idle"], "gpu_idle": figures["gpu_idle"],
            "hit_rate": figures["hit_rate"] if self.stats.outcomes else None,
            "budget": figures["draft_budget"] or None,
            "cpu_load": self._load.get("cpu"), "gpu_load": self._load.get("gpu"),
            **recent(self._recent), "rate": decode_rate(self.stats),
        }  # fmt: skip
        gauges["speedup"] = gauges["rate"] / self.plain_rate if self.plain_rate and gauges["rate"] else None
        gauges["plain_rate"] = self.plain_rate
        return {k: _short(v) for k, v in gauges.items()}


def decode_rate(stats: Stats) -> float | None:
    """Tokens/s between first and last token, the prefill apart; None before there are two tokens."""
    first = 1 if stats.completion_tokens else 0
    return (stats.completion_tokens - first) / stats.decode_s if stats.decode_s > 0 else None


def recent(rounds: Iterable[Round]) -> dict[str, float | None]:
    """The "now" gauges: tokens/s, drafted per round, and the share of the time in which each lane ran.

    rounds: the last ones, in order. Time runs from the first one's end to the last one's.
    """
    rounds = list(rounds)
    span = rounds[-1].ended - rounds[0].ended if rounds else 0.0
    if span <= 0:
        return {"now": None, "drafted_per_round": None, "cpu_busy": None, "gpu_busy": None}
    since, later = rounds[0].ended, rounds[1:]
    cpu = sum(max(0.0, b.ended - max(b.started, since)) for r in later for b in r.batches)
    return {
        "now": sum(len(r.tokens) for r in later) / span,
        "drafted_per_round": sum(len(r.drafted) for r in later) / len(later),
        "cpu_busy": min(1.0, cpu / span),
        "gpu_busy": min(1.0, sum(r.ended - r.started for r in later) / span),
    }


def draw_round(r: Round, texts: list[str], draft_texts: Mapping[int, str], drafts: Mapping[int, Draft]) -> Frame:
    """One round in the short form of the wire.

    texts: one for each emitted token. drafts: all drafted tokens still without a fate, this round's included.
    tokens: [text, kind, target's probability, draft id]; kind is "accepted", "correction", "bonus" or "plain", the
    draft id of a correction is the rejected token it stands for, -1 where there is none.
    """
    drawn: Frame = {
        "i": r.index, "at": [_short(r.started), _short(r.ended)], "position": r.position,
        "tokens": [[text, *facts] for text, facts in zip(texts, _tokens(r, drafts), strict=True)],
        "drafted": [
            [d.id, d.parent, d.position, draft_texts.get(d.id, "�"), _short(d.prob), _short(d.reach), d.rank, d.origin]
            for d in r.drafted
        ],
        "batches": [[_short(b.started), _short(b.ended), b.size] for b in r.batches],
        "pending": [[p, _short(prob)] for p, prob in zip(r.pending, _padded(r.pending_probs, r.pending), strict=True)],
        "accepted": list(r.accepted), "rejected": list(r.rejected), "ignored": list(r.ignored),
        "budget": _short(r.budget), "waited": _short(r.waited), "hit": r.hit, "phase": r.phase,
        "speculation": r.speculation, "reason": r.reason, "finish": r.finish,
    }  # fmt: skip
    return {k: v for k, v in drawn.items() if v not in ([], None, 0.0) or k in ("i", "at", "tokens")}


def _tokens(r: Round, drafts: Mapping[int, Draft]) -> list[tuple[str, float | None, int]]:
    """(kind, target's probability, draft id) of every emitted token."""
    facts = []
    for place, prob in enumerate(_padded(r.token_probs, r.tokens)):
        if place < len(r.accepted):
            facts.append(("accepted", _short(prob), r.accepted[place]))
        else:
            replaced = displaced(r, r.position + place, drafts) if r.last == "correction" else -1
            facts.append((r.last, _short(prob), replaced))
    return facts


def displaced(r: Round, position: int, drafts: Mapping[int, Draft]) -> int:
    """The rejected draft that a correction at this position stands for: the likeliest one; -1 when there is none."""
    there = [drafts[d] for d in r.rejected if d in drafts and drafts[d].position == position]
    return max(there, key=lambda d: (d.reach, -d.rank)).id if there else -1


def _texts(step: Step, count: int) -> list[str]:
    """One text for each emitted token; what does not match up goes to the last token, so that no text is lost."""
    pieces = list(step.pieces) or [step.text]
    if not count:
        return []
    return [*pieces[: count - 1], *[""] * (count - 1 - len(pieces)), "".join(pieces[count - 1 :])]


def _padded(values: tuple[float, ...], like: tuple[int, ...]) -> list[float | None]:
    return [*values, *[None] * (len(like) - len(values))][: len(like)]


def _short(value: Any) -> Any:
    """Times to 10 microseconds, probabilities to 5 digits: a frame is sent many times a second."""
    return round(value, 5) if isinstance(value, float) else value
