"""Several drafts for one target, compared in one run: each on the lane that serves it best, and how often it agrees.

"REF@N" lets a draft propose its N most frequent tokens alone, "REF@0" all, see `duochat.models.trim`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from duochat.bench import simulate
from duochat.bench.contest import Plan, forget
from duochat.bench.metrics import Run
from duochat.config import Settings
from duochat.engine.backends import load_drafter
from duochat.engine.engine import Engine
from duochat.models.fetch import fetch
from duochat.models.trim import named


def with_draft(engine: Engine, reference: str, settings: Settings) -> Engine:
    """The engine's target beside another draft, on the lane that serves it best, calibrated with it.

    Its calls come from the thread of the engine's own draft, so that one pool of threads holds the cores.
    """
    name, vocabulary = named(reference)
    drafter = load_drafter(replace(settings, draft_vocabulary=vocabulary), fetch(name), engine.target)
    drafter.thread = engine.drafter.thread
    return Engine(engine.target, drafter)


def figures(plan: Plan, pair: Engine, plain: Sequence[Run]) -> dict[str, Any]:
    """What a draft costs, and how often a token of plain decoding's answers is its first choice and among its first
    four: means over the tasks, of first turns, whose context is the same in every run."""
    hits: dict[str, list[list[bool]]] = {}
    answers = {run.request: run.tokens for run in plain}
    for question, context in zip(plan.questions, plan.firsts, strict=True):
        answer = answers[question.task, question.id, 0, 0]
        forget(pair.target, pair.drafter, context)
        asked = (simulate.proposals, pair.drafter, context, answer, plan.sampling)
        found, _ = pair.drafter.thread.submit(*asked).result()
        agreed = [[token in c.tokens[:n] for n in (1, 4)] for token, c in zip(answer, found, strict=True)]
        hits.setdefault(question.task, []).extend(agreed)
    first, four = np.mean([np.mean(task, axis=0) for task in hits.values()], axis=0).tolist()
    costs, lane = pair.costs, pair.drafter.describe()["draft_backend"]
    milliseconds = {"ms/token": 1e3 * costs.draft(1), "ms/8": 1e3 * costs.draft(8)}
    return {"rank-1": first, "top-4": four, **milliseconds, "threads": costs.threads, "lane": lane}
