"""An answer -> frames, the JSON that picture.js draws. Pure: no clock, no page; made when a page asks for one.

A frame is {"from": a, "n": b, "rounds": [...], "state": {...}, "gauges": {...}}: it takes a picture that has seen a
steps to b steps. "from": 0 starts afresh, so the whole answer is an ordinary frame. The text of a round's tokens,
joined over all rounds and followed by their tails, is the text of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from duochat.chat.answer import Answer, Step, padded
from duochat.chat.chat import Options
from duochat.config import AUTO
from duochat.engine.rounds import Round

Frame = dict[str, Any]


def frame(answer: Answer, options: Options, seen: int = 0, load: Mapping[str, float] | None = None) -> Frame:
    """What a picture lacks that has seen so many steps.

    load: utilisation 0..1 of the devices now, {"cpu": ..., "gpu": ...}.
    """
    with answer.lock:
        rounds = draw_rounds(answer, answer.steps[seen:])
        if rounds is None:
            return frame(answer, options, 0, load)
        return {
            "from": seen, "n": len(answer.steps), "rounds": rounds, "state": state_of(answer, options),
            "gauges": gauges_of(answer, load or {}),
        }  # fmt: skip


def draw_rounds(answer: Answer, steps: list[Step]) -> list[Frame] | None:
    """The rounds of some steps. Text that comes without a round is the tail of the one before, which gets it; None
    when that one is not among them."""
    drawn: list[Frame] = []
    for step in steps:
        if step.round is not None:
            drawn.append(draw_round(answer, step, step.round))
        elif step.text and drawn:
            drawn[-1]["tail"] = drawn[-1].get("tail", "") + step.text
        elif step.text and len(steps) < len(answer.steps):
            return None
    return drawn


def state_of(answer: Answer, options: Options) -> dict[str, Any]:
    """What is true of the answer as a whole."""
    known = {
        "decoder": options.decoder, "own_budget": options.draft_budget if options.draft_budget != AUTO else None,
        "phase": answer.phase, "progress": answer.progress, "error": answer.error, "doing": answer.doing,
        "notice": answer.notices[-1] if answer.notices else "", "finish": answer.finish,
        "prompt_tokens": answer.prompt_tokens, "context_length": answer.context_length,
        "speculation": answer.speculation, "reason": answer.reason,
    }  # fmt: skip
    return {k: v for k, v in known.items() if v}


def gauges_of(answer: Answer, load: Mapping[str, float]) -> dict[str, Any]:
    """Figures of the answer so far, and of its last seconds: `now`, `*_busy`, `drafted_per_round`."""
    stats, now = answer.stats, answer.recent()
    alive = now.decode_s > 0
    gauges = {
        "tokens": stats.completion_tokens, "rounds": stats.rounds, "drafted": stats.drafted,
        "verified": stats.pending, "tested": stats.tested, "accepted": stats.accepted, "rejected": stats.rejected,
        "ignored": stats.ignored,
        "alpha": stats.acceptance_rate if stats.tested else None, "tau": stats.mean_accepted_length or None,
        "ttft": stats.first_token_at, "rate": stats.rate,
        "cpu_idle": stats.idle(stats.cpu_busy), "gpu_idle": stats.idle(stats.gpu_busy),
        "hit_rate": stats.hits / stats.outcomes if stats.outcomes else None,
        "budget": (stats.budgets or [0.0])[-1] or None,
        "cpu_load": load.get("cpu"), "gpu_load": load.get("gpu"),
        "now": now.rate, "drafted_per_round": now.drafted / now.rounds if alive else None,
        "cpu_busy": 1 - now.idle(now.cpu_busy) if alive else None,
        "gpu_busy": 1 - now.idle(now.gpu_busy) if alive else None,
    }  # fmt: skip
    if stats.speedup:  # and the two rates that it is the ratio of
        gauges["compared_rate"] = stats.compared_tokens / stats.compared_s
        gauges["plain_rate"] = stats.compared_tokens / stats.compared_plain_s
    return {k: _short(v) for k, v in gauges.items()} | {"speedup": stats.speedup and round(stats.speedup, 2)}


def draw_round(answer: Answer, step: Step, r: Round) -> Frame:
    """One round in the short form of the wire.

    tokens: [text, origin, target's probability, draft id], see `answer.Token`.
    """
    drawn: Frame = {
        "i": r.index, "at": [_short(r.started), _short(r.ended)], "position": r.position,
        "tokens": [[t.text, t.origin, _short(t.prob), t.draft] for t in answer.tokens_of(step)],
        "drafted": [
            [d.id, d.parent, d.position, step.draft_texts.get(d.id, "�"), _short(d.prob), _short(d.reach), d.rank,
             d.origin]
            for d in r.drafted
        ],
        "batches": [[_short(b.started), _short(b.ended), b.size] for b in r.batches],
        "pending": [[p, _short(prob)] for p, prob in zip(r.pending, padded(r.pending_probs, r.pending), strict=True)],
        "accepted": list(r.accepted), "rejected": list(r.rejected), "ignored": list(r.ignored),
        "budget": _short(r.budget), "waited": _short(r.waited), "hit": r.hit, "phase": r.phase,
        "speculation": r.speculation, "reason": r.reason, "finish": r.finish,
    }  # fmt: skip
    return {k: v for k, v in drawn.items() if v not in ([], None, 0.0) or k in ("i", "at", "tokens")}


def _short(value: Any) -> Any:
    """Times to 10 microseconds, probabilities to 5 digits: a frame is sent many times a second."""
    return round(value, 5) if isinstance(value, float) else value
