"""What the target wrote, on disk and dealt out in batches for training."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

TAUGHT = 32  # of the target's most likely tokens at each place, kept for the students
WINDOW = 512  # tokens: of longer rows a part is read, for the draft lane reads as much of a long conversation
CHUNK = 8192  # places whose logits are worked out together; a batch of more has a multiple of it
LEARNT_SHARE = 0.55


@dataclass(frozen=True)
class Text:
    """Rows of one length on the CPU: tokens int32 [rows, length]; answers bool, what the target said as the assistant;
    what it held most likely to follow each token, likely int32 and logits fp16 [rows, length, TAUGHT], the best 0."""

    tokens: np.ndarray
    answers: np.ndarray
    likely: np.ndarray
    logits: np.ndarray

    def save(self, path: Path) -> None:
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, **vars(self))
        part.replace(path)

    @classmethod
    def load(cls, path: Path) -> Text:
        with np.load(path) as saved:
            return cls(*(saved[field.name] for field in fields(cls)))


@dataclass(frozen=True)
class Batch:
    """tokens int64 [rows, length]; places: flat indices of the positions whose next token is learnt; for each of them
    the target's most likely tokens and their logits [places, TAUGHT]."""

    tokens: Tensor
    places: Tensor
    likely: Tensor
    logits: Tensor


class Texts:
    """Batches out of texts of several row lengths, each of about `tokens` tokens; everything lies on the device."""

    def __init__(self, texts: Iterable[Text], tokens: int, device: torch.device, seed: int) -> None:
        self.device, self.budget = device, tokens
        pools: dict[int, list[tuple[Tensor, ...]]] = {}
        for text in texts:
            parts = (text.tokens, text.answers, text.likely, text.logits)
            pools.setdefault(text.tokens.shape[1], []).append(tuple(torch.from_numpy(p).to(device) for p in parts))
        self.pools = [tuple(map(torch.cat, zip(*pools.pop(length), strict=True))) for length in sorted(pools)]
        self.weights = [float(answers.sum()) for _, answers, *_ in self.pools]
        self.choice = random.Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)

    @property
    def total(self) -> int:
        return sum(tokens.numel() for tokens, *_ in self.pools)

    def counts(self, vocab: int) -> np.ndarray:
        """How often the target answered with each token."""
        return sum(torch.bincount(tokens[answers], minlength=vocab) for tokens, answers, *_ in self.pools).cpu().numpy()

    def batches(self) -> Iterator[Batch]:
        """Endless; pools are drawn as often as their answers weigh, rows shuffled. Rows that are longer than a WINDOW
        are read whole too, as a conversation grows past it."""
        orders = [self._order(tokens) for tokens, *_ in self.pools]
        while True:
            pool = self.choice.choices(range(len(self.pools)), self.weights)[0]
            length = self.pools[pool][0].shape[1]
            window = self.choice.choice((min(length, WINDOW), length))
            begin = self.choice.randint(0, length - window)
            rows = max(1, min(self.budget // window, len(self.pools[pool][0])))
            if len(orders[pool]) < rows:
                orders[pool] = self._order(self.pools[pool][0])
            drawn, orders[pool] = orders[pool][:rows], orders[pool][rows:]
            tokens, answers, likely, logits = (part[drawn, begin : begin + window] for part in self.pools[pool])
            places = self._places(answers)
            yield Batch(tokens.long(), places, likely.flatten(0, 1)[places], logits.flatten(0, 1)[places])

    def _order(self, tokens: Tensor) -> Tensor:
        return torch.randperm(len(tokens), generator=self.generator, device=self.device)

    def _places(self, answers: Tensor) -> Tensor:
        """The same number of places in every batch, so that shapes stay fixed: before answers first, then others."""
        wanted = F.pad(answers[:, 1:], (0, 1)).float()
        wanted += torch.rand(wanted.shape, generator=self.generator, device=self.device)
        wanted[:, -1] = -1.0  # nothing follows the last token
        count = max(1, int(LEARNT_SHARE * wanted.numel()))
        return wanted.flatten().topk(count - count % CHUNK if count > CHUNK else count).indices
