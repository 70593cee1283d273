"""What an answer is so far: the one fold of its Steps. Page, race, recordings, terminal and API read it here.

A `Step` is what is new; an `Answer` takes steps and holds text, phase, figures and all that was drafted.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from duochat.engine.rounds import Draft, Round, Stats, total

RECENT = 2.0  # seconds of an answer over which figures of "now" are taken


@dataclass(frozen=True, slots=True)
class Step:
    """What is new since the step before. The last step of an answer has `finish`, and `error` if it failed.

    text is "".join(pieces), to be appended; all texts together are the answer. There is a piece for each emitted
    token, "" when its text comes with a later one; a last round may carry one more, of text that was held back.
    """

    round: Round | None = None
    text: str = ""
    pieces: tuple[str, ...] = ()
    draft_texts: Mapping[int, str] = field(default_factory=dict)  # id of a drafted token -> its text
    phase: str = ""  # "queued", "loading", "prefill", "decode" or "done"
    progress: tuple[int, int] | None = None  # (done, total) of the phase; in "queued": (requests ahead, waiting)
    notice: str = ""  # a sentence for the person, not part of the answer; in "loading": what is being done
    prompt_tokens: int = 0
    context_length: int = 0
    finish: str | None = None  # "stop", "length", "cancelled" or "error"
    error: str = ""  # one sentence: what happened, what to do

    def to_json(self) -> str:
        """One JSON line; `read_steps` reads such."""
        return _to_json(self)


STRICT = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
_STEPS = TypeAdapter(list[Step], config=STRICT)


def read_steps(lines: Iterable[str]) -> list[Step]:
    """Raises ValueError when a line is no step, or a value in it is of a wrong kind; numbers must be finite."""
    try:
        return _STEPS.validate_json(f"[{','.join(lines)}]")
    except ValidationError as fault:
        raise ValueError("a trace holds values of a wrong kind") from fault


def plain(record: Any) -> dict[str, Any]:
    """The `default` of JSON encoders for records; dataclasses.asdict takes ten times as long."""
    return {f.name: getattr(record, f.name) for f in fields(record)}


_to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, default=plain).encode


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token."""

    id: int
    text: str  # "" while its text comes with a later token
    origin: str  # "accepted", "correction", "bonus" or "plain", see `Round.origins`
    prob: float | None  # the target's probability of it
    draft: int  # id of the drafted token that it is, or of the rejected one that a correction stands for; else -1


class Answer:
    """One answer as its steps arrive. One thread adds; others read, holding `lock` for what must belong together."""

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        self.lock = threading.RLock()
        self.steps: list[Step] = []
        self.text = ""
        self.phase = "queued"  # then as Step.phase
        self.progress: tuple[int, int] | None = None  # of the phase
        self.doing = ""  # what is being loaded
        self.notices: list[str] = []
        self.error = ""
        self.finish: str | None = None
        self.prompt_tokens = self.context_length = 0
        self.speculation = self.reason = ""  # of the last round, see `Round`
        self.stats = Stats()
        self.drafts: dict[int, Draft] = {}  # all drafted tokens by id
        self.draft_texts: dict[int, str] = {}
        for step in steps:
            self.add(step)

    def add(self, step: Step) -> Step:
        """Take one step; gives it back."""
        with self.lock:
            self.steps.append(step)
            self.text += step.text
            self.phase = step.phase or self.phase
            self.progress = step.progress
            self.error = step.error or self.error
            self.finish = step.finish or self.finish
            self.prompt_tokens = self.stats.prompt_tokens = step.prompt_tokens or self.prompt_tokens
            self.context_length = step.context_length or self.context_length
            if step.phase == "loading":
                self.doing = step.notice
            elif step.notice:
                self.notices.append(step.notice)
            if step.round is not None:
                self._count(step.round, step.draft_texts)
        return step

    def _count(self, r: Round, draft_texts: Mapping[int, str]) -> None:
        self.stats.add(r)
        self.speculation, self.reason = r.speculation, r.reason
        self.drafts.update((d.id, d) for d in r.drafted)
        self.draft_texts.update(draft_texts)

    @property
    def rounds(self) -> list[Round]:
        return [step.round for step in self.steps if step.round is not None]

    @property
    def token_ids(self) -> list[int]:
        return [token for r in self.rounds for token in r.tokens]

    @property
    def tokens(self) -> Iterator[Token]:
        """All emitted tokens; their texts, joined, are the text, as far as it came with rounds."""
        return (token for step in self.steps for token in self.tokens_of(step))

    def tokens_of(self, step: Step) -> list[Token]:
        """The tokens that one of its steps brought."""
        r = step.round
        if r is None:
            return []
        facts = zip(r.tokens, texts_of(step), r.origins, padded(r.token_probs, r.tokens), strict=True)
        return [Token(*fact, self._draft_at(r, place)) for place, fact in enumerate(facts)]

    def _draft_at(self, r: Round, place: int) -> int:
        """A correction stands for the rejected token that seemed the likeliest at its place."""
        if place < len(r.accepted):
            return r.accepted[place]
        there = [self.drafts[d] for d in r.rejected if d in self.drafts] if r.last == "correction" else []
        there = [d for d in there if d.position == r.position + place]
        return max(there, key=lambda d: (d.reach, -d.rank)).id if there else -1

    def recent(self, seconds: float = RECENT) -> Stats:
        """Figures of the last rounds only; time runs from the end of the first of them."""
        rounds: list[Round] = []
        for step in reversed(self.steps):
            if step.round is not None:
                rounds.append(step.round)
                if rounds[0].ended - step.round.ended > seconds:
                    break
        return total(reversed(rounds))


def texts_of(step: Step) -> list[str]:
    """One text for each emitted token; what does not match up goes to the last token, so that no text is lost."""
    count, pieces = len(step.round.tokens) if step.round else 0, list(step.pieces) or [step.text]
    if not count:
        return []
    return [*pieces[: count - 1], *[""] * (count - 1 - len(pieces)), "".join(pieces[count - 1 :])]


def padded(values: tuple[float, ...], like: tuple[int, ...]) -> list[float | None]:
    """As many values as `like` has, None for those that are missing."""
    return [*values, *[None] * (len(like) - len(values))][: len(like)]
