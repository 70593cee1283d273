"""How often a student proposes the target's token: teacher-forced on the target's own answers, task by task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from duochat.bench.tasks import Question
from duochat.distill.gguf_file import Source
from duochat.distill.student import hidden
from duochat.distill.writing import Format, Writer
from duochat.engine.sampling import key, uniform

COVERAGE = (1, 2, 4, 8)
LONGEST, TOGETHER = 2048, 64  # tokens of a prompt; prompts of a batch, alike in length


@dataclass(frozen=True)
class Answered:
    """A prompt with the target's answer: ids of both, where the answer begins, and the target's choice at each place.

    The choice is the answer's own token (greedy), or what the target takes at temperature 1 with the shared noise.
    """

    task: str
    ids: list[int]
    start: int
    chosen: list[int]


def answers(
    target: nn.Module,
    source: Source,
    asked: Sequence[Question],
    tokens: int,
    temperature: float,
    captured: bool = False,
) -> list[Answered]:
    """The target's answers of at most `tokens` tokens to first turns, end of turn included; prompts that are too long
    are left out."""
    chat, found = Format.of(source), []
    prompts = [(q.task, source.tokenizer.prompt([{"role": "user", "content": q.turns[0]}])) for q in asked]
    prompts = sorted((one for one in prompts if len(one[1]) <= LONGEST), key=lambda one: len(one[1]))
    for at in range(0, len(prompts), TOGETHER):
        group = prompts[at : at + TOGETHER]
        writer = Writer(target, chat, len(group), -(-len(group[-1][1]) // 8) * 8 + tokens, captured)
        written = writer.answer([ids for _, ids in group], temperature)
        for (task, ids), row in zip(group, written.tokens.tolist(), strict=True):
            answer = row[len(ids) : len(ids) + tokens]
            end = next((i + 1 for i, token in enumerate(answer) if token in chat.ends), tokens)
            found.append(Answered(task, [*ids, *answer[:end]], len(ids), answer[:end]))
        del writer
    target.set_attn_implementation("sdpa")  # the writer's needs a mask
    return [_with_choices(target, one) for one in found] if temperature else found


@torch.no_grad()
def _with_choices(target: nn.Module, one: Answered) -> Answered:
    logits = _logits(target, one)
    return replace(one, chosen=(logits + _noise(one, logits)).argmax(-1).tolist())


@torch.no_grad()
def agreement(
    student: nn.Module, answered: Sequence[Answered], noisy: bool = False, kept: Sequence[int] = ()
) -> dict[str, dict[str, float]]:
    """Task -> share of the target's choices that are among the student's best 1, 2, 4, 8; "mean" over the tasks.

    noisy: the student ranks with the noise that the target chose with, as the draft lane does at temperature 1.
    kept: the tokens that it may propose, if not all.
    """
    cut = torch.full((student.config.vocab_size,), -torch.inf if len(kept) else 0.0)
    cut[list(kept)] = 0.0
    cut = cut.to(student.device)
    ranks: dict[str, list[Tensor]] = {}
    for one in answered:
        logits = _logits(student, one) + cut
        if noisy:
            logits += _noise(one, logits)
        chosen = torch.tensor(one.chosen, device=logits.device)[:, None]
        before = (logits > logits.gather(-1, chosen)).sum(-1)  # tokens that stand before the chosen one
        ranks.setdefault(one.task, []).append(before)
    tops = {task: [(torch.cat(r) < k).float().mean().item() for k in COVERAGE] for task, r in ranks.items()}
    tops["mean"] = np.mean(list(tops.values()), axis=0).tolist()
    return {task: {f"top{k}": round(v, 4) for k, v in zip(COVERAGE, top, strict=True)} for task, top in tops.items()}


def _logits(model: nn.Module, one: Answered) -> Tensor:
    """Logits [answer, vocab] in fp32 at the places whose next token belongs to the answer."""
    ids = torch.tensor([one.ids], device=model.device)
    return model.lm_head(hidden(model, ids)[0, one.start - 1 : -1]).float()


def _noise(one: Answered, like: Tensor, seed: int = 0) -> Tensor:
    """The Gumbel noise [answer, vocab] that both lanes share, at the answer's positions."""
    keys = [key(seed, place) for place in range(one.start, len(one.ids))]
    tokens = torch.arange(like.shape[-1], dtype=torch.int32, device=like.device)
    numbers = uniform(tokens[None, :], torch.tensor(keys, dtype=torch.int32, device=like.device)[:, None])
    return -torch.log(-torch.log(numbers))
