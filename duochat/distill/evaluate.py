"""How often a student proposes the target's token: teacher-forced on the target's own answers, task by task."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from duochat import DuoChatError
from duochat.distill.gguf_file import Source
from duochat.distill.student import Llama
from duochat.distill.writing import Format, Writer
from duochat.engine.sampling import key, uniform

COVERAGE = (1, 2, 4, 8)
ROOMS = (320, 640, 1152, 2048)
OWN_PROMPTS = {
    "chat": ("Write a letter to a friend who moved to another country.", "Explain why the sky is blue to a child."),
    "code": ("Write a Python function that reverses the words of a sentence.",),
    "maths": ("A box holds 12 pencils. How many pencils are in 7 boxes if 5 pencils are missing?",),
}


@dataclass(frozen=True)
class Answered:
    """A prompt with the target's answer: ids of both, where the answer begins, and the target's choice at each place.

    The choice is the answer's own token (greedy), or what the target takes at temperature 1 with the shared noise.
    """

    task: str
    ids: list[int]
    start: int
    chosen: list[int]


def prompts(folder: Path | None, limit: int) -> dict[str, list[str]]:
    """Task -> first user turns, from Spec-Bench's format (`turns`) or HumanEval's (`prompt`); own ones if None."""
    if folder is None:
        return {task: list(texts[:limit]) for task, texts in OWN_PROMPTS.items()}
    files = sorted(Path(folder).glob("*.jsonl"))
    if not files:
        raise DuoChatError(f"{folder} holds no .jsonl files: give a folder of prompts in Spec-Bench's format.")
    return {f.stem: [_first_turn(line) for line in f.read_text("utf-8").splitlines()[:limit]] for f in files}


def _first_turn(line: str) -> str:
    entry = json.loads(line)
    return entry["turns"][0] if "turns" in entry else entry["prompt"]


def answers(
    target: Llama,
    source: Source,
    asked: dict[str, list[str]],
    tokens: int,
    temperature: float,
    captured: bool = False,
) -> list[Answered]:
    """The target's answers of at most `tokens` tokens, end of turn included; prompts that are too long are left out."""
    chat = Format.of(source)
    found = []
    for room, group in _by_room(source, asked):
        writer = Writer(target, chat, len(group), room + tokens, captured)
        written = writer.answer([ids for _, ids in group], temperature)
        for (task, ids), row in zip(group, written.tokens.tolist(), strict=True):
            answer = row[len(ids) : len(ids) + tokens]
            end = next((i + 1 for i, token in enumerate(answer) if token in chat.ends), tokens)
            found.append(Answered(task, [*ids, *answer[:end]], len(ids), answer[:end]))
        del writer
    return [_with_choices(target, one) for one in found] if temperature else found


@torch.no_grad()
def _with_choices(target: Llama, one: Answered) -> Answered:
    logits = _logits(target, one)
    return replace(one, chosen=(logits + _noise(one, logits)).argmax(-1).tolist())


def _by_room(source: Source, asked: dict[str, list[str]]) -> Iterator[tuple[int, list[tuple[str, list[int]]]]]:
    """Prompts with the chat template around them, grouped by the room that they need."""
    encoded = [
        (task, source.tokenizer.prompt([{"role": "user", "content": text}]))
        for task, texts in asked.items()
        for text in texts
    ]
    for above, room in zip((0, *ROOMS), ROOMS, strict=False):
        group = [(task, ids) for task, ids in encoded if above < len(ids) <= room]
        if group:
            yield (min(room, max(len(ids) for _, ids in group)) + 7) // 8 * 8, group


@torch.no_grad()
def agreement(
    student: Llama, answered: Sequence[Answered], noisy: bool = False, kept: Sequence[int] = ()
) -> dict[str, dict[str, float]]:
    """Task -> share of the target's choices that are among the student's best 1, 2, 4, 8; "mean" over the tasks.

    noisy: the student ranks with the noise that the target chose with, as the draft lane does at temperature 1.
    kept: the tokens that it may propose, if not all.
    """
    cut = torch.full((student.shape.vocab,), -torch.inf if len(kept) else 0.0)
    cut[list(kept)] = 0.0
    cut = cut.to(student.token_embd.weight.device)
    ranks: dict[str, list[Tensor]] = {}
    for one in answered:
        logits = _logits(student, one) + cut
        chosen = torch.tensor(one.chosen, device=logits.device)
        ranks.setdefault(one.task, []).append(rank(logits + _noise(one, logits) if noisy else logits, chosen))
    return summary({task: torch.cat(values).cpu() for task, values in ranks.items()})


def rank(logits: Tensor, chosen: Tensor) -> Tensor:
    """How many tokens [rows] stand before the chosen one."""
    return (logits > logits.gather(-1, chosen[:, None])).sum(-1)


def summary(ranks: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    table = {task: {f"top{k}": round(float((r < k).float().mean()), 4) for k in COVERAGE} for task, r in ranks.items()}
    table["mean"] = {f"top{k}": round(float(np.mean([row[f"top{k}"] for row in table.values()])), 4) for k in COVERAGE}
    return table


def _logits(model: Llama, one: Answered) -> Tensor:
    """Logits [answer, vocab] in fp32 at the places whose next token belongs to the answer."""
    ids = torch.tensor([one.ids], device=model.token_embd.weight.device)
    return model.logits(model(ids)[0, one.start - 1 : -1]).float()


def _noise(one: Answered, like: Tensor, seed: int = 0) -> Tensor:
    """The Gumbel noise [answer, vocab] that both lanes share, at the answer's positions."""
    keys = [key(seed, place) for place in range(one.start, len(one.ids))]
    tokens = torch.arange(like.shape[-1], dtype=torch.int32, device=like.device)
    numbers = uniform(tokens[None, :], torch.tensor(keys, dtype=torch.int32, device=like.device)[:, None])
    return -torch.log(-torch.log(numbers))
