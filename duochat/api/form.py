"""An answer as a choice in OpenAI's form, in chunks or whole, and the figures at the end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import log
from typing import Any

from duochat.api.asked import Asked
from duochat.chat.answer import Answer, Step, Token
from duochat.chat.text import undecided
from duochat.engine.rounds import Round

OPENING, CLOSING = "<think>", "</think>"
UNKNOWN = -9999.0  # OpenAI's word for a probability that is too small to be told


def thoughts_and_content(text: str, last: bool = True) -> tuple[str, str]:
    """What a thinking model says in <think>…</think> before its answer, and the answer.

    last=False: the text goes on, so what may become part of a tag is left out.
    """
    start = text.lstrip()
    if not start.startswith(OPENING):
        return "", "" if not last and OPENING.startswith(start) else text
    thoughts, closed, content = start[len(OPENING) :].lstrip().partition(CLOSING)
    if not closed and not last:
        thoughts = thoughts[: len(thoughts) - undecided(thoughts, [CLOSING])]
    return thoughts, content.lstrip()


class Choice:
    """One answer to a chat, or to a bare prompt."""

    def __init__(self, index: int, asked: Asked) -> None:
        self.index, self.answer, self._asked = index, Answer(), asked
        self.chat, self._origins = bool(asked.messages), asked.duochat.get("origins", False)
        self._said = (0, 0)  # characters of thoughts and content so far
        self._passed = 0  # characters whose probabilities are told

    def begin(self) -> dict[str, Any]:
        """The first chunk's choice."""
        return self._choice({"delta": {"role": "assistant", "content": None}} if self.chat else {"text": ""}, [])

    def chunk(self, step: Step) -> dict[str, Any] | None:
        """What a step brings; None when there is nothing to tell."""
        self.answer.add(step)
        parts = self._parts(last=step.finish is not None)
        new = [part[said:] for part, said in zip(parts, self._said, strict=True)]
        self._said = (len(parts[0]), len(parts[1]))
        if not any(new) and not self._told([step]):
            return None
        said = {name: part for name, part in zip(("reasoning_content", "content"), new, strict=True) if part}
        return self._choice({"delta": said} if self.chat else {"text": new[1]}, [step])

    def end(self) -> dict[str, Any]:
        """The last chunk's choice."""
        return self._choice({"delta": {}} if self.chat else {"text": ""}, [], self.answer.finish)

    def whole(self) -> dict[str, Any]:
        thoughts, content = self._parts(last=True)
        message = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
        message |= {"reasoning_content": thoughts} if thoughts else {}
        said = {"message": message} if self.chat else {"text": content}
        return self._choice(said, self.answer.steps, self.answer.finish)

    def _parts(self, last: bool) -> tuple[str, str]:
        return thoughts_and_content(self.answer.text, last) if self.chat else ("", self.answer.text)

    def _told(self, steps: Sequence[Step]) -> list[tuple[Round, int, Token]]:
        """The tokens of which more than their text is asked: (round, place in it, token)."""
        wanted = steps if self._asked.alternatives is not None or self._origins else ()
        return [(s.round, place, token) for s in wanted for place, token in enumerate(self.answer.tokens_of(s))]

    def _choice(self, said: dict[str, Any], steps: Sequence[Step], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": self.index, **said, "logprobs": None, "finish_reason": finish}
        told = self._told(steps)
        if self._asked.alternatives is not None and told:
            choice["logprobs"] = self._logprobs([self._logprob(*one) for one in told])
        if self._origins:
            stats = {"stats": self.answer.stats.to_dict()} if finish else {}
            choice["duochat"] = {"tokens": [self._origin(*one) for one in told], **stats}
        return choice

    def _origin(self, r: Round, _place: int, token: Token) -> dict[str, Any]:
        rank = self.answer.drafts[token.draft].rank if token.origin == "accepted" else None
        about = {"id": token.id, "text": token.text, "origin": token.origin, "rank": rank}
        return about | {"probability": token.prob, "round": r.index}

    def _logprobs(self, told: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if self.chat:
            return {"content": told, "refusal": None}
        texts, start = [one["token"] for one in told], self._passed
        self._passed += sum(map(len, texts))
        beside = [{other["token"]: other["logprob"] for other in one["top_logprobs"]} for one in told]
        offsets = [*accumulate(map(len, texts[:-1]), initial=start)]
        logprobs = [one["logprob"] for one in told]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": beside, "text_offset": offsets}

    def _logprob(self, r: Round, place: int, token: Token) -> dict[str, Any]:
        """The alternatives are the token and what was verified in its place: more is not recorded."""
        drafts, texts = self.answer.drafts, self.answer.draft_texts
        beside = [
            _logprob(texts[id], prob)
            for id, prob in zip(r.pending, r.pending_probs, strict=False)
            if id in r.rejected and drafts[id].position == r.position + place
        ]
        own = _logprob(token.text, token.prob)
        likeliest = sorted([own, *beside], key=lambda known: -known["logprob"])
        return own | {"top_logprobs": likeliest[: self._asked.alternatives]}


def _logprob(text: str, prob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": log(prob) if prob else UNKNOWN, "bytes": list(text.encode())}


def usage(answers: Sequence[Answer], copies: int) -> dict[str, int]:
    """Token counts; `copies` answers share a prompt, which counts once."""
    read = sum(answer.prompt_tokens for answer in answers[::copies])
    written = sum(answer.stats.completion_tokens for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """`timings` as llama-server gives them (milliseconds), `metrics` named as vLLM names its counters.

    predicted_ms is the time from the first token to the last, so the rates count the tokens after the first round.
    """
    stats = [answer.stats for answer in answers]
    read, reading = sum(s.prompt_tokens for s in stats), sum(s.first_token_at or 0.0 for s in stats)
    written, writing = sum(s.completion_tokens for s in stats), sum(s.decode_s for s in stats)
    later = written - sum(s.first_tokens for s in stats)
    rounds = [r for answer in answers for r in answer.rounds if r.pending]
    verified, forwards = sum(len(r.pending) for r in rounds), len(rounds)
    accepted = sum(len({*r.pending} & {*r.accepted}) for r in rounds)  # others were drafted, and came of themselves
    return {
        "timings": {
            "prompt_n": read, "prompt_ms": 1000 * reading, "prompt_per_token_ms": _ratio(1000 * reading, read),
            "prompt_per_second": _ratio(read, reading), "predicted_n": written, "predicted_ms": 1000 * writing,
            "predicted_per_token_ms": _ratio(1000 * writing, later), "predicted_per_second": _ratio(later, writing),
            "draft_n": verified, "draft_n_accepted": accepted,
        },
        "metrics": {
            "speculative_decoding": {
                "num_drafts": forwards, "num_draft_tokens": verified, "num_accepted_tokens": accepted,
                "acceptance_rate": _ratio(accepted, verified), "mean_acceptance_length": 1 + _ratio(accepted, forwards),
            }
        },
    }  # fmt: skip


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
