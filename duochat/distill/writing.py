"""Training text that the target writes itself: rows of chat in which it invents the user's turns and answers them.

All rows of a batch stand at the same position. What the chat template or a stem prescribes is queued and overrides the
sampled token, so prompts of any length and free writing run through the same captured step. Beside each token stand the
target's most likely ones with their logits: students learn from these, the target need not read its text again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from duochat import DuoChatError
from duochat.chat.text import Tokenizer
from duochat.distill.gguf_file import Source
from duochat.distill.texts import TAUGHT, Text
from duochat.engine.pytorch import attention
from duochat.engine.pytorch.cache import SlotCache
from duochat.engine.pytorch.forward import Graphs
from duochat.engine.pytorch.masks import windows

USER, ANSWER, LATER = 0, 1, 2  # whose turn it is; later ones of the user's have limits of their own
BUCKET = 128  # columns of the cache by which the captured step grows: it reads half of these too many
GROUP = 128  # neighbouring tokens that share a maximum
SAMPLED = 64  # of the target's most likely tokens: chosen from

BEGINNINGS = yaml.safe_load(Path(__file__).with_name("stems.yaml").read_text("utf-8"))
LONG = ("summary", "retrieval")


@dataclass(frozen=True)
class Format:
    """The chat template cut into token ids around the two texts of a turn; ends: of a turn, the usual one first."""

    opening: list[int]
    to_answer: list[int]
    to_user: list[int]
    ends: list[int]

    @classmethod
    def of(cls, source: Source) -> Format:
        encode, roles = source.tokenizer.encode, ("user", "assistant", "user")
        marks = [encode(chr(code))[-1] for code in (1, 2, 3)]
        ids = source.tokenizer.prompt([{"role": r, "content": chr(n)} for n, r in enumerate(roles, start=1)])
        user, answer, next_user = map(ids.index, marks)
        to_answer, to_user = ids[user + 1 : answer], ids[answer + 1 : next_user]
        end = next((token for token in source.ends if token in to_user), None)
        if end is None or end not in to_answer:
            raise DuoChatError(f"The chat template of {source.path} does not end turns: give an instruction-tuned one.")
        after = [part[part.index(end) + 1 :] for part in (to_answer, to_user)]
        return cls(ids[:user], *after, ends=sorted(source.ends, key=lambda token: token != end))


@dataclass(frozen=True)
class Row:
    """What one row writes: stems of the user's first turn and of the later ones; temperatures and lengths in tokens of
    the user's first turn, the assistant's and the user's later ones."""

    stems: tuple[list[int], list[int]]
    temperature: tuple[float, float, float]
    shortest: tuple[int, int, int]
    longest: tuple[int, int, int]


def plan(tokenizer: Tokenizer, rows: int, rng: random.Random, long: bool, length: int) -> list[Row]:
    """Rows of random tasks; `long` ones begin with a text of the target's own that fills a third of `length` or more,
    and go on with short questions."""
    tasks = LONG if long else tuple(BEGINNINGS["stems"])
    return [_row(tokenizer, rng, rng.choice(tasks), long, length) for _ in range(rows)]


def _row(tokenizer: Tokenizer, rng: random.Random, task: str, long: bool, length: int) -> Row:
    first = BEGINNINGS["stems"][task]
    stems = tuple(tokenizer.encode(_stem(those, rng)) for those in (first, BEGINNINGS["later"] if long else first))
    if rng.random() < 0.3 and task == "chat":
        stems = (stems[0], [])
    user = rng.uniform(*((0.9, 1.15) if long else (0.7, 1.1)))  # below, small models repeat themselves
    temperature = (user, _answer_temperature(rng), user)
    if long:
        most = rng.randint(length // 3, max(length // 3, length - 280))
        return Row(stems, temperature, (most, 1, 2), (most, 200, 64))
    return Row(stems, temperature, (2, 1, 2), (120, rng.choice((96, 144, 192)), 120))


def _stem(stems: Sequence[str], rng: random.Random) -> str:
    stem, words = rng.choice(stems), ("topic", "name", "language")
    return stem.format(**{what: rng.choice(BEGINNINGS[f"{what}s"]) for what in words})


def _answer_temperature(rng: random.Random) -> float:
    return 0.0 if rng.random() < 0.5 else rng.choice((0.7, 1.0))


class Writer:
    """Lets the target write a batch of rows of `length` tokens; captured: the step is a CUDA graph for each BUCKET."""

    def __init__(self, target: nn.Module, chat: Format, batch: int, length: int, captured: bool = False) -> None:
        self.target, self.chat, self.length = target, chat, length
        self.device, config = target.device, target.config
        target.set_attn_implementation(attention.NAME)

        def zeros(dtype: torch.dtype, *size: int) -> Tensor:
            return torch.zeros(batch, *size, dtype=dtype, device=self.device)

        self.cache = SlotCache(config.num_hidden_layers, length)
        self.token, self.place, self.role, self.count = (zeros(torch.int64) for _ in range(4))
        self.queue, self.follow, self.tokens = (zeros(torch.int64, length) for _ in range(3))
        self.to_answer = self._queued(torch.zeros_like(self.queue[:1]), [chat.to_answer])
        self.temperature = zeros(torch.float32, 3)
        self.shortest, self.longest = zeros(torch.int64, 3), zeros(torch.int64, 3)
        self.answers = zeros(torch.bool, length)
        self.likely = zeros(torch.int32, length, min(TAUGHT, config.vocab_size))
        self.logits = torch.zeros_like(self.likely, dtype=torch.float16)
        self.ends = torch.tensor(chat.ends, device=self.device)
        self.at = torch.zeros(1, dtype=torch.int64, device=self.device)
        columns = torch.arange(length, device=self.device)
        self.seen = [columns[:bucket] for bucket in range(BUCKET, length + BUCKET, BUCKET)]
        self.play: Callable[[Hashable, Callable[[], object]], None] = Graphs() if captured else lambda _, step: step()
        for bucket in range(len(self.seen) if captured else 0):  # while the state is of no meaning: it runs twice
            self._step(bucket)

    def answer(self, prompts: Sequence[Sequence[int]], temperature: float) -> Text:
        """The target's answers to whole prompts, each shorter than the length."""
        rules = (temperature,) * 3, (1,) * 3, (self.length,) * 3
        return self.write([Row((list(ids), []), *rules) for ids in prompts], ANSWER)

    def write(self, rows: Sequence[Row], role: int = USER) -> Text:
        """The text of these rows. role: whose turn it is behind the first stems; the user's is opened before them."""
        opening = self.chat.opening if role == USER else []
        self._queued(self.queue, [[*opening, *row.stems[0]] for row in rows])
        self._queued(self.follow, [[*self.chat.to_user, *row.stems[1]] for row in rows])
        for name in ("temperature", "shortest", "longest"):
            getattr(self, name).copy_(torch.tensor([getattr(row, name) for row in rows]))
        self.token.copy_(self.queue[:, 0])
        self.tokens[:, 0] = self.token
        for state, value in ((self.place, 1), (self.role, role), (self.count, 0), (self.at, 0), (self.answers, 0)):
            state.fill_(value)
        for at in range(self.length - 1):
            self._step(at // BUCKET)
        found = (self.tokens.int(), self.answers, self.likely, self.logits)
        return Text(*(part.cpu().numpy().copy() for part in found))

    def _queued(self, queue: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """The queue with these tokens in it, and -1 behind them."""
        given = [torch.tensor(row[: self.length], dtype=torch.int64) for row in rows]
        found = pad_sequence(given, batch_first=True, padding_value=-1)
        queue.fill_(-1)[:, : found.shape[1]] = found.to(queue.device)
        return queue

    def _step(self, bucket: int) -> None:
        self.play(bucket, lambda: self._advance(self.seen[bucket]))

    def _logits(self, columns: Tensor) -> Tensor:
        """Of what follows each row's last token, [batch, vocab]. columns: of the cache, which are read."""
        self.cache.begin(self.at, columns)
        mask = torch.zeros(len(columns), dtype=self.target.dtype, device=self.device)
        mask = mask.masked_fill(columns > self.at, -torch.inf)[None, None, None]
        kinds = dict.fromkeys(windows(self.target.config), mask)
        mask = kinds.get("", kinds)
        return self.target(self.token[:, None], mask, self.at[None], self.cache, use_cache=True).logits[:, 0]

    @torch.no_grad()
    def _advance(self, columns: Tensor) -> None:
        answering = self.role[:, None]
        logits = self._logits(columns)
        too_short = self.count[:, None] < self.shortest.gather(1, answering)
        logits[:, self.ends] = logits[:, self.ends].masked_fill(too_short, -torch.inf)
        likely, values = best(logits, SAMPLED)
        chosen = likely.gather(1, _choose(values, self.temperature.gather(1, answering))[:, None])[:, 0]
        chosen = chosen.masked_fill(self.count >= self.longest.gather(1, answering)[:, 0], self.chat.ends[0])
        queued = self.queue.gather(1, self.place[:, None])[:, 0]
        forced = queued >= 0
        token = torch.where(forced, queued, chosen)
        for kept, value in ((self.likely, likely), (self.logits, values - values[:, :1])):
            kept.index_copy_(1, self.at, value[:, None, : kept.shape[-1]].to(kept.dtype))
        self.at += 1
        self.tokens.index_copy_(1, self.at, token[:, None])
        self.answers.index_copy_(1, self.at, (~forced & (self.role == ANSWER))[:, None])
        self._turn(token, forced, ~forced & (token[:, None] == self.ends).any(1))

    def _turn(self, token: Tensor, forced: Tensor, ended: Tensor) -> None:
        """Move every row on by its token; a turn that ended queues what the template puts before the next."""
        answered = self.role == ANSWER
        following = torch.where(answered[:, None], self.follow, self.to_answer)
        self.queue.copy_(torch.where(ended[:, None], following, self.queue))
        self.token.copy_(token)
        self.place.copy_((self.place + forced).masked_fill(ended, 0))
        self.role.copy_(torch.where(ended, ANSWER + answered.long(), self.role))
        self.count.copy_((self.count + 1).masked_fill(ended | forced, 0))


def row_bytes(config: Any, length: int) -> int:
    """About what a row of a batch takes on the device: cache, kept logits, and those of a step with their copies."""
    cached = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return length * (cached + 6 * TAUGHT + 41) + 12 * config.vocab_size


def best(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The tokens int64 and logits fp32 [rows, count] of the greatest logits of each row, the greatest first.

    They lie in the groups with the greatest maxima, so that one quick pass over the whole vocabulary is enough.
    """
    vocab = logits.shape[-1]
    if short := -vocab % GROUP:
        logits = F.pad(logits, (0, short), value=-torch.inf)
    groups = logits.unflatten(-1, (-1, GROUP))
    near = groups.amax(-1).topk(min(count, groups.shape[1])).indices
    inside = groups.gather(1, near[..., None].expand(-1, -1, GROUP)).flatten(1)
    values, at = inside.float().topk(min(count, vocab))
    return near.gather(1, at // GROUP) * GROUP + at % GROUP, values


def _choose(logits: Tensor, temperature: Tensor) -> Tensor:
    """One place a row: argmax where the temperature is 0, else a sample (Gumbel noise scaled by the temperature)."""
    noise = torch.empty_like(logits).exponential_().clamp_min_(1e-30).log_().neg_()
    return torch.addcmul(logits, noise, temperature).argmax(-1)


def written(
    target: nn.Module,
    source: Source,
    batches: Sequence[tuple[int, int, float]],
    seed: int,
    until: float,
    captured: bool = False,
) -> Iterator[Text]:
    """Texts until the clock (time.monotonic) says `until`; batches: (rows, length, share of the time), long ones > 512.

    Every kind of batch gives at least one text, so that a slow machine has something too.
    """
    torch.manual_seed(seed)
    rng, start, chat = random.Random(seed), time.monotonic(), Format.of(source)
    done = 0.0
    for kind, (rows, length, share) in enumerate(batches):
        done += share
        stop, writer = start + (until - start) * done, Writer(target, chat, rows, length, captured)
        first, took = True, 0.0
        while first or time.monotonic() + took * 0.7 < stop:
            began = time.monotonic()
            yield writer.write(plan(source.tokenizer, rows, rng, long=kind > 0, length=length))
            first, took = False, time.monotonic() - began
        del writer
