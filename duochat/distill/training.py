"""Training of students: small Llamas that learn what the target held most likely where it answers.

The head is that of the tokens to be proposed alone, so a vocabulary of 152,000 costs no more than one of 24,000. Its
gradient is worked out by hand in chunks of tokens, because the logits of a whole batch would not fit. Matrices learn by
Muon (Jordan et al. 2024), embeddings and norms by AdamW.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from duochat import DuoChatError
from duochat.distill.student import Llama, Shape
from duochat.distill.texts import CHUNK, Batch, Texts

log = logging.getLogger("distill")
BLOCK = 32  # weights that share a scale in GGUF's Q4_0 and Q8_0
CHECKED_EVERY = 50


@dataclass(frozen=True)
class Plan:
    """A student to train: `320x5` = width x layers, `320x5x1536` = x feed-forward's width, else in proportion to the
    target's; `320x5@0.02` with a Muon learning rate of its own."""

    name: str
    width: int
    layers: int
    ffn: int
    rate: float

    @classmethod
    def parse(cls, text: str, rate: float = 0.01) -> Plan:
        sizes, _, own_rate = text.partition("@")
        try:
            width, layers, *ffn = map(int, sizes.split("x"))
            return cls(sizes, width, layers, *(ffn or [0]), float(own_rate or rate))
        except (ValueError, TypeError) as error:
            form = "width x layers, such as 320x5, or width x layers x inner width"
            raise DuoChatError(f"{text!r} is no student: write {form}.") from error

    def shape(self, target: Shape) -> Shape:
        """The target's shape made narrower and flatter; heads keep their width, so the rotary angles stay.

        A key head serves three queries, or as many as the target's if these are fewer.
        """
        step = math.lcm(target.head_width, BLOCK)
        if self.width % step or self.ffn % BLOCK or not 0 < self.layers <= target.layers or self.width > target.width:
            raise DuoChatError(
                f"Student {self.name} does not fit: its width must be a multiple of {step} up to {target.width}, its "
                f"layers at most {target.layers}, its inner width a multiple of {BLOCK}."
            )
        heads = self.width // target.head_width
        most = min(heads, max(target.kv_heads, heads // 3))
        kv_heads = next(k for k in range(most, 0, -1) if heads % k == 0)
        ffn = min(self.ffn or -(-self.width * target.ffn // target.width // 64) * 64, target.ffn)
        sizes = {"width": self.width, "layers": self.layers, "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
        return replace(target, **sizes, biased=False, tied=True)


class Muon:
    """Momentum whose matrix updates are orthogonalised by Newton-Schulz; equal shapes are done as one batch."""

    def __init__(self, matrices: Iterable[nn.Parameter], momentum: float = 0.95) -> None:
        groups: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            groups.setdefault(matrix.shape, []).append(matrix)
        self.groups, self.momentum = list(groups.values()), momentum
        self.velocity = [torch.zeros((len(g), *g[0].shape), device=g[0].device) for g in self.groups]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group, velocity in zip(self.groups, self.velocity, strict=True):
            gradient = torch.stack([p.grad for p in group])
            velocity.lerp_(gradient, 1 - self.momentum)
            update = orthogonal(gradient.lerp(velocity, self.momentum))
            scale = max(1, update.shape[-2] / update.shape[-1]) ** 0.5
            torch._foreach_add_(group, list(update.float().unbind()), alpha=-rate * scale)


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrices of a batch, roughly: singular values end in about [0.7, 1.2]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[-2] > x.shape[-1]
    x = (x.mT if tall else x).to(torch.bfloat16 if x.is_cuda else torch.float32)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


@torch.no_grad()
def q4_0(weight: Tensor) -> Tensor:
    """The weight as GGUF's Q4_0 keeps it: 16 levels times a scale in fp16 for each 32 neighbours in a row."""
    blocks = weight.float().reshape(-1, BLOCK)
    scale = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)) / -8
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    levels = (blocks * inverse + 8.5).trunc().clamp(0, 15) - 8
    return (levels * scale.half().float()).reshape(weight.shape).to(weight.dtype)


class Student:
    """A student under training with its optimisers. When its loss is no number it goes back to its last good state.

    coarse: names of the parameters that will be kept in Q4_0. They are trained to be right when rounded to it.
    """

    def __init__(self, plan: Plan, model: Llama, coarse: Sequence[str] = ()) -> None:
        self.plan, self.model, self.slower, self.loss = plan, model, 1.0, float("nan")
        self.coarse = [model.get_parameter(name) for name in coarse]
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name.startswith("blk")]
        others = [p for name, p in model.named_parameters() if p.ndim == 1]
        self.muon = Muon(matrices)
        groups = [{"params": [model.token_embd.weight], "base": 1e-3}, {"params": others, "base": 2e-3}]
        cuda = model.token_embd.weight.is_cuda
        self.adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0, fused=cuda)
        self.good, self.q4_0 = self.copied(), q4_0

    def learn(self, share: float) -> None:
        """One step at `share` of the full learning rates."""
        share *= self.slower
        self.muon.step(self.plan.rate * share)
        for group in self.adam.param_groups:
            group["lr"] = group["base"] * share
        self.adam.step()
        self.model.zero_grad(set_to_none=True)

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """Inside, the coarse parameters are rounded; their gradients count for the exact ones (straight through)."""
        exact = [parameter.detach().clone() for parameter in self.coarse]
        with torch.no_grad():
            for parameter in self.coarse:
                parameter.copy_(self.q4_0(parameter))
        yield
        with torch.no_grad():
            for parameter, value in zip(self.coarse, exact, strict=True):
                parameter.copy_(value)

    def checked(self, loss: float) -> None:
        """Keep the present state as good, or after a loss that is no number return to the last one, more slowly."""
        if loss == loss and abs(loss) != float("inf"):
            self.loss, self.good = loss, self.copied()
            return
        log.warning("student %s lost its way: back to its last good state at half the rate", self.plan.name)
        self.slower /= 2
        self.restore(self.good)

    def copied(self) -> dict:
        return copy.deepcopy(self.state())

    def state(self) -> dict:
        velocity = self.muon.velocity
        return {"model": self.model.state_dict(), "adam": self.adam.state_dict(), "velocity": velocity}

    def restore(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(copy.deepcopy(state["adam"]))
        for mine, saved in zip(self.muon.velocity, state["velocity"], strict=True):
            mine.copy_(saved)


def share_of_rate(done: float, warm: float = 0.01, decay_from: float = 0.4) -> float:
    """Warm-up, plateau, then a straight line down to zero; done: the part of the training that is over, 0 to 1."""
    if done < warm:
        return max(done / warm, 0.01)
    return min(1.0, max(0.0, (1 - done) / (1 - decay_from)))


class Head:
    """What students learn to propose: rows of the embedding, and of what the target held likely the part among them.

    frequent: the tokens to be proposed; none = all. hard: weight of the most likely one beside the distribution.
    """

    def __init__(self, vocab: int, frequent: Sequence[int], hard: float, device: torch.device) -> None:
        self.tokens = torch.tensor(list(frequent) or range(vocab), device=device)
        self.row = torch.full((vocab,), -1, device=device)
        self.row[self.tokens] = torch.arange(len(self.tokens), device=device)
        self.hard = hard

    def wanted(self, likely: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the head int64 and their weights fp32 [places, TAUGHT]; weights sum to 1, or to 0 if none is kept."""
        rows = self.row[likely.long()]
        weights = logits.float().masked_fill(rows < 0, -torch.inf).softmax(-1).nan_to_num(0) * (1 - self.hard)
        known, first = (rows >= 0).any(-1, keepdim=True), (rows >= 0).float().argmax(-1, keepdim=True)
        return rows.clamp_min(0), weights.scatter_add(-1, first, self.hard * known)


def head_loss(logits: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy against `Head.wanted`, and its gradient by the student's logits [places, rows of the head]."""
    found = logits.softmax(-1)
    loss = -(weights * found.gather(-1, rows).float().clamp_min(1e-9).log()).sum()
    return loss, found.scatter_add_(-1, rows, -weights.to(found.dtype))


class Trainer:
    """Trains students side by side; one call of `step` is one batch."""

    def __init__(self, students: Sequence[Student], head: Head, compiled: bool) -> None:
        self.students, self.head, self.steps = list(students), head, 0
        self.device = head.tokens.device
        self.losses = torch.zeros(len(students))
        if compiled:
            for block in [b for s in students for b in s.model.blk]:
                block.compile(dynamic=False)
            for student in students:
                student.q4_0 = torch.compile(q4_0, dynamic=True)

    def step(self, batch: Batch, share: float) -> None:
        """Learn from one batch at `share` of the full learning rates."""
        with ExitStack() as stack:
            for student in self.students:
                stack.enter_context(student.rounded())
            self._differentiate(batch)
        for student in self.students:
            student.learn(share)
        self.steps += 1
        if self.steps % CHECKED_EVERY == 0:
            for student, loss in zip(self.students, self.losses.tolist(), strict=True):
                student.checked(loss)

    def _differentiate(self, batch: Batch) -> None:
        cuda = self.device.type == "cuda"
        self.losses = torch.zeros(len(self.students), device=self.device)
        for i, student in enumerate(self.students):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=cuda):
                hidden = student.model(batch.tokens).flatten(0, 1)[batch.places]
            embedding = student.model.token_embd.weight
            head = embedding.detach()[self.head.tokens].to(hidden.dtype)
            self.losses[i], by_hidden, by_head = self._through_head(batch, hidden.detach(), head)
            hidden.backward(by_hidden)
            embedding.grad.index_add_(0, self.head.tokens, by_head)

    @torch.no_grad()
    def _through_head(self, batch: Batch, hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The mean loss and its gradients by the hidden states and by the head."""
        by_hidden, by_head = torch.empty_like(hidden), torch.zeros_like(head, dtype=torch.float32)
        total, count = torch.zeros((), device=self.device), len(hidden)
        for part in (slice(at, at + CHUNK) for at in range(0, count, CHUNK)):
            wanted = self.head.wanted(batch.likely[part], batch.logits[part])
            loss, gradient = head_loss(hidden[part] @ head.T, *wanted)
            share = (wanted[1].sum(-1, keepdim=True) > 0) / count  # where nothing is kept, nothing is learnt
            total += loss / count
            by_hidden[part] = gradient @ head * share
            by_head += gradient.T @ (hidden[part] * share.to(hidden.dtype))
        return total, by_hidden, by_head


def train(
    trainer: Trainer,
    texts: Texts,
    done: Callable[[], float],
    every: float,
    save: Callable[[float], None],
) -> dict[str, float]:
    """Train until `done()` (part of the budget that is spent) reaches 1; `save` runs every `every` seconds.

    Returns tokens trained on, steps, and tokens per second without the first steps (compilation).
    """
    seen = steps = timed = 0
    began, reported, saved = time.monotonic(), 0.0, time.monotonic()
    for batch in texts.batches():
        share = done()
        if share >= 1 and steps:
            break
        trainer.step(batch, share_of_rate(share))
        seen, steps = seen + batch.tokens.numel(), steps + 1
        if steps == 20:
            began, timed = time.monotonic(), seen
        if time.monotonic() - reported > 10:
            reported = time.monotonic()
            _report(trainer, share, seen, steps, (seen - timed) / (time.monotonic() - began + 1e-9))
        if time.monotonic() - saved > every:
            save(share)
            saved = time.monotonic()
    return {"tokens": seen, "steps": steps, "tokens_per_s": (seen - timed) / (time.monotonic() - began + 1e-9)}


def _report(trainer: Trainer, share: float, seen: int, steps: int, speed: float) -> None:
    losses = "  ".join(f"{s.plan.name} {s.loss:.4f}" for s in trainer.students)
    log.info(
        "train %3.0f %%  %d steps  %.1f M tokens  %.0f tokens/s  loss %s", share * 100, steps, seen / 1e6, speed, losses
    )
