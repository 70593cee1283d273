"""Training of a student: a small Llama that learns what the target held most likely where it answers.

The head is that of the tokens to be proposed alone, so a vocabulary of 152,000 costs no more than one of 24,000. Its
gradient is worked out by hand in chunks of tokens, because the logits of a whole batch would not fit. Matrices learn by
Muon (Jordan et al. 2024), embeddings and norms by AdamW, all at rates in proportion.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from duochat import DuoChatError
from duochat.distill.student import KEPT, hidden
from duochat.distill.texts import CHUNK, Batch, Texts

log = logging.getLogger("distill")
BLOCK = 32  # weights that share a scale in GGUF's Q4_0 and Q8_0
MOMENTUM = 0.95  # Muon's
CHECKED_EVERY = 50  # steps
SAVED_EVERY = 60.0  # seconds


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

    def config(self, target: Any) -> LlamaConfig:
        """The target's configuration made narrower and flatter; heads keep their width, so the rotary angles stay.

        A key head serves three queries, or as many as the target's if these are fewer.
        """
        head, width, inner = target.head_dim, target.hidden_size, target.intermediate_size
        step = math.lcm(head, BLOCK)
        fits = 0 < self.layers <= target.num_hidden_layers and self.width <= width
        if self.width % step or self.ffn % BLOCK or not fits:
            raise DuoChatError(
                f"Student {self.name} does not fit: its width must be a multiple of {step} up to {width}, its "
                f"layers at most {target.num_hidden_layers}, its inner width a multiple of {BLOCK}."
            )
        heads = self.width // head
        most = min(heads, max(target.num_key_value_heads, heads // 3))
        return LlamaConfig(
            hidden_size=self.width,
            intermediate_size=min(self.ffn or -(-self.width * inner // width // 64) * 64, inner),
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=next(k for k in range(most, 0, -1) if heads % k == 0),
            head_dim=head,
            tie_word_embeddings=True,
            **{name: getattr(target, name) for name in KEPT},
        )


class Muon(torch.optim.Optimizer):
    """What torch.optim.Muon does, with all matrices of one shape as a batch: a seventh of the kernels, which are too
    small to fill a card."""

    def __init__(self, matrices: Iterable[nn.Parameter], base: float) -> None:
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            shapes.setdefault(matrix.shape, []).append(matrix)
        super().__init__([{"params": alike, "base": base} for alike in shapes.values()], {"lr": 0.0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            gradient = torch.stack([matrix.grad for matrix in group["params"]])
            velocity = self.state[group["params"][0]].setdefault("velocity", torch.zeros_like(gradient))
            velocity.lerp_(gradient, 1 - MOMENTUM)
            update = orthogonal(gradient.lerp(velocity, MOMENTUM)).float()
            rate = group["lr"] * max(1, update.shape[-2] / update.shape[-1]) ** 0.5
            torch._foreach_add_(group["params"], list(update.unbind()), alpha=-rate)


def orthogonal(x: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrices of a batch in bfloat16, roughly, by five steps of Newton-Schulz: singular
    values end in about [0.7, 1.2]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[-2] > x.shape[-1]
    x = (x.mT if tall else x).bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


@torch.no_grad()
def q4_0(weight: Tensor) -> Tensor:
    """The weight as GGUF's Q4_0 keeps it: 16 levels times a scale in fp16 for each 32 neighbours in a row."""
    blocks = weight.float().reshape(-1, BLOCK)
    scale = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)) / -8
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    levels = (blocks * inverse + 8.5).trunc().clamp(0, 15) - 8
    return (levels * scale.half().float()).reshape(weight.shape).to(weight.dtype)


def share_of_rate(done: float, warm: float = 0.01, decay_from: float = 0.4) -> float:
    """Warm-up, plateau, then a straight line down to zero; done: the part of the training that is over, 0 to 1."""
    if done < warm:
        return max(done / warm, 0.01)
    return min(1.0, max(0.0, (1 - done) / (1 - decay_from)))


class Head:
    """What a student learns to propose: rows of the embedding, and of what the target held likely the part among them.

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

    @torch.no_grad()
    def loss(self, batch: Batch, hidden: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The mean cross entropy against `wanted`, its gradient by the hidden states and that by the head's rows."""
        head, count = embedding[self.tokens].to(hidden.dtype), len(hidden)
        by_hidden, by_head = torch.empty_like(hidden), torch.zeros_like(head, dtype=torch.float32)
        total = torch.zeros((), device=hidden.device)
        for part in (slice(at, at + CHUNK) for at in range(0, count, CHUNK)):
            rows, weights = self.wanted(batch.likely[part], batch.logits[part])
            found = (hidden[part] @ head.T).softmax(-1)
            total -= (weights * found.gather(-1, rows).float().clamp_min(1e-9).log()).sum() / count
            gradient = found.scatter_add_(-1, rows, -weights.to(found.dtype))
            share = (weights.sum(-1, keepdim=True) > 0) / count  # where nothing is kept, nothing is learnt
            by_hidden[part] = gradient @ head * share
            by_head += gradient.T @ (hidden[part] * share.to(hidden.dtype))
        return total, by_hidden, by_head


class Student:
    """A student under training with its optimisers. When its loss is no number it goes back to its last good state.

    coarse: names of the parameters that will be kept in Q4_0. They are trained to be right when rounded to it.
    """

    def __init__(
        self, plan: Plan, model: nn.Module, head: Head, coarse: Sequence[str] = (), compiled: bool = False
    ) -> None:
        self.plan, self.model, self.head, self.steps = plan, model, head, 0
        self.slower, self.loss, self.q4_0 = 1.0, float("nan"), q4_0
        self.coarse = [model.get_parameter(name) for name in coarse]
        self.embedding = model.get_input_embeddings().weight
        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and p is not self.embedding]
        others = [p for name, p in model.named_parameters() if p.ndim == 1]
        rates = {plan.rate / 10: [self.embedding], plan.rate / 5: others}
        groups = [{"params": parameters, "base": rate} for rate, parameters in rates.items()]
        fused = self.embedding.is_cuda
        self.optimisers = (
            Muon(matrices, plan.rate),
            torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0, fused=fused),
        )
        self.good = copy.deepcopy(self.state())
        if compiled:
            for layer in model.model.layers:
                layer.compile(dynamic=False)
            self.q4_0 = torch.compile(q4_0, dynamic=True)

    def step(self, batch: Batch, share: float) -> None:
        """Learn from one batch at `share` of the full learning rates."""
        with self.rounded():
            loss = self.differentiate(batch)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["base"] * share * self.slower
            optimiser.step()
        self.model.zero_grad(set_to_none=True)
        self.steps += 1
        if self.steps % CHECKED_EVERY == 0:
            self._checked(loss.item())

    def differentiate(self, batch: Batch) -> Tensor:
        """The gradients of a batch are added to the parameters'; returns its loss."""
        embedding = self.embedding
        with torch.autocast(embedding.device.type, torch.bfloat16, enabled=embedding.is_cuda):
            states = hidden(self.model, batch.tokens).flatten(0, 1)[batch.places]
        loss, by_hidden, by_head = self.head.loss(batch, states.detach(), embedding)
        states.backward(by_hidden)
        embedding.grad.index_add_(0, self.head.tokens, by_head)
        return loss

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

    def _checked(self, loss: float) -> None:
        """Keep the present state as good, or after a loss that is no number return to the last one, more slowly."""
        if math.isfinite(loss):
            self.loss, self.good = loss, copy.deepcopy(self.state())
            return
        log.warning("student %s lost its way: back to its last good state at half the rate", self.plan.name)
        self.slower /= 2
        self.restore(self.good)

    def state(self) -> dict:
        return {"model": self.model.state_dict(), "optimisers": [one.state_dict() for one in self.optimisers]}

    def restore(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        for mine, saved in zip(self.optimisers, state["optimisers"], strict=True):
            mine.load_state_dict(copy.deepcopy(saved))

    def save(self, path: Path, share: float) -> None:
        """share: the part of the training that is over."""
        part = path.with_suffix(".part")
        torch.save({"share": share, **self.state()}, part)
        part.replace(path)

    def resume(self, path: Path) -> float:
        """Go on from what was saved, if it was; returns its share."""
        if not path.exists():
            return 0.0
        saved = torch.load(path, map_location=self.head.tokens.device, weights_only=True)
        self.restore(saved)
        return saved["share"]


def train(student: Student, texts: Texts, seconds: float, checkpoint: Path) -> dict[str, float]:
    """Train for so many seconds, a step at least, from the checkpoint on, which is written each minute and at the end.

    Returns tokens trained on, steps, and tokens per second without the first steps (compilation).
    """
    start, seen, timed = student.resume(checkpoint), 0, 0
    first = began = saved = time.monotonic()
    reported = 0.0
    speed = lambda: (seen - timed) / (time.monotonic() - began + 1e-9)  # noqa: E731
    for steps, batch in enumerate(texts.batches()):
        now = time.monotonic()
        if steps == 1:  # the first one compiles for many times what it takes to warm up
            seconds, first = max(seconds - (now - first), 1e-3), now
        share = min(1.0, start + (1 - start) * (now - first) / seconds)
        if share >= 1 and steps:
            break
        student.step(batch, share_of_rate(share))
        seen += batch.tokens.numel()
        if steps == 20:
            began, timed = time.monotonic(), seen
        if now - reported > 10:
            reported, told = now, (student.plan.name, share * 100, seen / 1e6, speed(), student.loss)
            log.info("train %s %3.0f %%  %.1f M tokens  %.0f tokens/s  loss %.4f", *told)
        if now - saved > SAVED_EVERY:
            student.save(checkpoint, share)
            saved = now
    student.save(checkpoint, 1.0)
    return {"tokens": seen, "steps": steps, "tokens_per_s": speed()}
