"""An answer as its Steps arrive: text, tokens with their origin, figures."""

from __future__ import annotations

from dataclasses import dataclass

from duochat.chat.chat import Step
from duochat.engine.rounds import Draft, Round, Stats


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token."""

    id: int
    text: str  # "" while its text comes with a later token
    origin: str  # "accepted", "correction", "bonus" or "plain"
    prob: float | None  # the target's probability of it
    draft: int  # id of the drafted token that it is; else -1


class Answer:
    """One answer so far."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.text = self.error = ""
        self.prompt_tokens = 0
        self.finish: str | None = None
        self.stats = Stats()
        self.drafts: dict[int, Draft] = {}
        self.draft_texts: dict[int, str] = {}

    def add(self, step: Step) -> Step:
        self.steps.append(step)
        self.text += step.text
        self.prompt_tokens = self.stats.prompt_tokens = step.prompt_tokens or self.prompt_tokens
        self.finish, self.error = step.finish or self.finish, step.error or self.error
        if step.round is not None:
            self.stats.add(step.round)
            self.drafts.update((d.id, d) for d in step.round.drafted)
            self.draft_texts.update(step.draft_texts)
        return step

    @property
    def rounds(self) -> list[Round]:
        return [step.round for step in self.steps if step.round is not None]

    def tokens_of(self, step: Step) -> list[Token]:
        r = step.round
        if r is None or not r.tokens:
            return []
        count, accepted = len(r.tokens), len(r.accepted)
        texts = [*step.pieces[: count - 1], "".join(step.pieces[count - 1 :])]
        origins = ["accepted"] * accepted + [r.last] * (count - accepted)
        probs, drafts = [*r.token_probs, *[None] * count][:count], [*r.accepted, *[-1] * (count - accepted)]
        return [Token(*facts) for facts in zip(r.tokens, texts, origins, probs, drafts, strict=True)]
