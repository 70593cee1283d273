"""Training of students: small Llamas that learn the target's full distribution where the target answers.

Several students share the target's logits. The tied head's gradient is worked out by hand in chunks of tokens, because
the logits of a whole batch would not fit. Matrices learn by Muon (Jordan et al. 2024), embeddings and norms by AdamW.
"""

from __future__ import annotations

import copy
import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duochat import DuoChatError
from duochat.distill.student import Llama, Shape
from duochat.distill.writing import Text

log = logging.getLogger("distill")
CHUNK = 8192
CHECKED_EVERY = 50
LEARNT_SHARE = 0.55


@dataclass(frozen=True)
class Plan:
    """A student to train: `320x5` = width x layers, `320x5@0.02` with a Muon learning rate of its own."""

    name: str
    width: int
    layers: int
    rate: float

    @classmethod
    def parse(cls, text: str, rate: float = 0.01) -> Plan:
        sizes, _, own_rate = text.partition("@")
        try:
            width, layers = map(int, sizes.split("x"))
            return cls(sizes, width, layers, float(own_rate or rate))
        except ValueError as error:
            raise DuoChatError(f"{text!r} is no student: write width x layers, such as 320x5 or 320x5@0.02.") from error

    def shape(self, target: Shape) -> Shape:
        """The target's shape made narrower and flatter; heads keep their width, so the rotary angles stay."""
        if self.width % target.head_width or not 0 < self.layers <= target.layers or self.width > target.width:
            raise DuoChatError(
                f"Student {self.name} does not fit: its width must be a multiple of {target.head_width} up to "
                f"{target.width}, its layers at most {target.layers}."
            )
        heads = self.width // target.head_width
        kv_heads = next(k for k in range(min(heads, target.kv_heads), 0, -1) if heads % k == 0)
        ffn = -(-self.width * target.ffn // target.width // 64) * 64
        return replace(target, width=self.width, layers=self.layers, heads=heads, kv_heads=kv_heads, ffn=ffn)


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
    blocks = weight.float().reshape(-1, 32)
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
        self.adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
        self.good = self.copied()

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
                parameter.copy_(q4_0(parameter))
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


def head_loss(student: Tensor, target: Tensor, hard: float) -> tuple[Tensor, Tensor]:
    """Cross entropy against the target, and its gradient by the student's logits. Both logits: [tokens, vocab].

    What is learnt is (1 - hard) parts of the target's distribution and `hard` parts of its most likely token.
    """
    wanted = F.softmax(target.float(), -1) * (1 - hard)
    best = torch.arange(target.shape[-1], device=target.device) == target.argmax(-1, keepdim=True)
    wanted = torch.where(best, wanted + hard, wanted)
    logits = student.float()
    scores = F.log_softmax(logits, -1)
    return -(wanted * scores).sum(), (scores.exp() - wanted).to(student.dtype)


class Trainer:
    """Trains students side by side on the target's logits; one call of `step` is one batch."""

    def __init__(self, target: Llama, students: Sequence[Student], hard: float, compiled: bool) -> None:
        self.target, self.students, self.hard = target, list(students), hard
        self.device = target.token_embd.weight.device
        self.loss, self.steps = head_loss, 0
        self.losses = torch.zeros(len(students))
        if compiled:
            torch._dynamo.config.suppress_errors = True  # an uncompiled run is better than none
            torch._dynamo.config.recompile_limit = 64
            self.loss = torch.compile(head_loss, dynamic=False)
            for block in [b for model in (target, *(s.model for s in students)) for b in model.blk]:
                block.compile(dynamic=False)

    def step(self, tokens: Tensor, places: Tensor, share: float) -> None:
        """tokens [rows, length]; places: flat indices of the positions whose next token is learnt."""
        with torch.no_grad():
            taught = self.target(tokens).flatten(0, 1)[places]
        with ExitStack() as stack:
            for student in self.students:
                stack.enter_context(student.rounded())
            self._differentiate(tokens, places, taught)
        for student in self.students:
            student.learn(share)
        self.steps += 1
        if self.steps % CHECKED_EVERY == 0:
            for student, loss in zip(self.students, self.losses.tolist(), strict=True):
                student.checked(loss)

    def _differentiate(self, tokens: Tensor, places: Tensor, taught: Tensor) -> None:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden = [s.model(tokens).flatten(0, 1)[places] for s in self.students]
        heads = self._heads(taught, [h.detach().to(taught.dtype) for h in hidden])
        for student, h, (by_hidden, by_embedding) in zip(self.students, hidden, heads, strict=True):
            h.backward(by_hidden.to(h.dtype))
            student.model.token_embd.weight.grad.add_(by_embedding)

    @torch.no_grad()
    def _heads(self, taught: Tensor, hidden: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """For each student the mean loss's gradients by its hidden states and by its head; losses go to `losses`."""
        weights = [s.model.token_embd.weight.to(taught.dtype) for s in self.students]
        pairs = list(zip(hidden, weights, strict=True))
        found = [(torch.empty_like(h), torch.zeros_like(w, dtype=torch.float32)) for h, w in pairs]
        self.losses = torch.zeros(len(hidden), device=self.device)
        for part in (slice(at, at + CHUNK) for at in range(0, len(taught), CHUNK)):
            target = self.target.logits(taught[part])
            for i, (h, weight) in enumerate(pairs):
                loss, gradient = self.loss(h[part] @ weight.T, target, self.hard)
                self.losses[i] += loss / len(taught)
                found[i][0][part] = gradient @ weight / len(taught)
                found[i][1].add_(gradient.T @ h[part], alpha=1 / len(taught))
        return found


class Texts:
    """Batches out of texts of several row lengths, each of about `tokens` tokens; everything lies on the device."""

    def __init__(self, texts: Sequence[Text], tokens: int, device: torch.device, seed: int) -> None:
        self.device, self.budget = device, tokens
        self.pools: list[tuple[Tensor, Tensor]] = []
        for length in sorted({t.tokens.shape[1] for t in texts}):
            same = [t for t in texts if t.tokens.shape[1] == length]
            joined = (np.concatenate([getattr(t, part) for t in same]) for part in ("tokens", "answers"))
            self.pools.append(tuple(torch.from_numpy(array).to(device) for array in joined))
        self.weights = [float(answers.sum()) for _, answers in self.pools]
        self.choice = random.Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)

    @property
    def total(self) -> int:
        return sum(tokens.numel() for tokens, _ in self.pools)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless (tokens [rows, length], places); pools are drawn as often as their answers weigh, rows shuffled."""
        orders = [self._order(tokens) for tokens, _ in self.pools]
        while True:
            pool = self.choice.choices(range(len(self.pools)), self.weights)[0]
            tokens, answers = self.pools[pool]
            rows = max(1, min(self.budget // tokens.shape[1], len(tokens)))
            if len(orders[pool]) < rows:
                orders[pool] = self._order(tokens)
            drawn, orders[pool] = orders[pool][:rows], orders[pool][rows:]
            yield tokens[drawn].long(), self._places(answers[drawn])

    def _order(self, tokens: Tensor) -> Tensor:
        return torch.randperm(len(tokens), generator=self.generator, device=self.device)

    def _places(self, answers: Tensor) -> Tensor:
        """The same number of places in every batch, so that shapes stay fixed: before answers first, then others."""
        wanted = F.pad(answers[:, 1:], (0, 1)).float()
        wanted += torch.rand(wanted.shape, generator=self.generator, device=self.device)
        wanted[:, -1] = -1.0  # nothing follows the last token
        count = max(1, int(LEARNT_SHARE * wanted.numel()))
        return wanted.flatten().topk(count - count % CHUNK if count > CHUNK else count).indices


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
    for tokens, places in texts.batches():
        share = done()
        if share >= 1 and steps:
            break
        trainer.step(tokens, places, share_of_rate(share))
        seen, steps = seen + tokens.numel(), steps + 1
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
