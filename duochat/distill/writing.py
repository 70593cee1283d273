"""Training text that the target writes itself: rows of chat in which it invents the user's turns and answers them.

All rows of a batch stand at the same position. What the chat template or a stem prescribes is queued and overrides the
sampled token, so prompts of any length and free writing run through the same captured step. Beside each token stand the
target's most likely ones with their logits: students learn from these, the target need not read its text again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from duochat import DuoChatError
from duochat.chat.text import Tokenizer
from duochat.distill.gguf_file import Source
from duochat.distill.student import Llama, Shape
from duochat.distill.texts import TAUGHT, Text

USER, ANSWER = 0, 1
BUCKET = 256  # columns of the cache by which the captured step grows
GROUP = 128  # neighbouring tokens that share a maximum
SAMPLED = 64  # of the target's most likely tokens: chosen from

LANGUAGES = ("German", "French", "Spanish", "Italian", "Portuguese", "Dutch")
TOPICS = (
    "the sea", "a long train journey", "bees", "the moon", "bread", "an old library", "electric cars", "the heart",
    "volcanoes", "chess", "a small town", "the Roman Empire", "sleep", "rivers", "jazz", "money", "glaciers",
    "a football final", "the weather", "coffee", "space travel", "elections", "a court case", "forests",
    "computers", "a new film", "schools", "the brain", "insects", "bridges", "wine", "birds", "cities",
    "a storm", "islands", "the stock market", "painting", "a king", "an airline", "farming", "television", "gold",
)  # fmt: skip
NAMES = ("Anna", "Omar", "Lucy", "Ken", "Maria", "Paul", "A farmer", "A baker", "Tom", "Sara", "The school", "A shop")
STEMS: dict[str, tuple[str, ...]] = {
    "chat": (
        "", "", "", "Write", "Can you", "Imagine", "Explain", "Describe", "Compose", "Suppose that", "Give me",
        "Write a short story about {topic}", "Draft an email", "Pretend to be", "What do you think about {topic}",
        "Compare", "Help me",
        "Act as", "I want to", "How would you", "Tell me about {topic}", "Edit the following", "Identify",
    ),
    "translation": (
        "Translate {language} to English:", "Translate German to English:", "Translate German to English: Die",
        "Translate German to English: Der", "Translate German to English: Ein", "Translate German to English: In",
        "Translate German to English: Wir", "Translate German to English: Das", "Translate this {language} sentence:",
        "Translate German to English: Nach", "Translate German to English: Es", "Translate into {language}:",
    ),
    "summary": (
        "Summarize:", "Summarize: The", "Summarize: A", "Summarize: By", "Summarize: In", "Summarize: Police",
        "Summarize: This week, {topic}", "Summarize the following article about {topic}:\n", "Summarize: (Reuters) -",
        "Give a short summary of this text:\n", "Summarize: When", "Summarize: He", "Summarize: She",
    ),
    "qa": (
        "Who", "When", "Where", "What is", "What", "How many", "How long", "Which", "Why", "When did",
        "Who was the first",
        "Where is", "Who plays", "Who wrote", "What year did", "Who sings", "When was", "How", "Where does", "In which",
    ),
    "maths": (
        "{name}", "{name} has", "{name} buys", "{name} wants to", "There are", "If", "In a", "{name} earns", "Each",
        "{name} sells", "{name} reads", "A train", "{name} makes", "Solve:", "How many", "Every day {name}", "Two",
    ),
    "retrieval": (
        "{topic} The history of {topic}", "Here are some passages about {topic}.\n", "The", "In", "{topic} (", "{name}",
        "Answer the question with these passages about {topic}:\n", "{topic} is", "The United", "{topic} are",
    ),
    "code": (
        "def", "from typing import List\n\n\ndef", "\ndef", "import math\n\n\ndef", "Write a Python function",
        "\n\ndef", "from typing import List, Tuple\n\n\ndef", "Write a program", "Complete this function:\n\ndef",
        "def is_", "def count_", "def find_", "def sort_", "def get_", "def add_", "def remove_",
        "def max_", "def check_",
    ),
}  # fmt: skip
LONG = ("summary", "retrieval", "code")


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
    """What one row writes: two stems, its temperatures (user's, assistant's) and turn lengths in tokens."""

    stems: tuple[list[int], list[int]]
    temperature: tuple[float, float]
    shortest: tuple[int, int]
    longest: tuple[int, int]


def plan(tokenizer: Tokenizer, rows: int, rng: random.Random, long: bool, length: int) -> list[Row]:
    """Rows of random tasks; `long` ones begin with a text of the target's own that fills most of `length`."""
    return [_row(tokenizer, rng, rng.choice(LONG if long else tuple(STEMS)), long, length) for _ in range(rows)]


def _row(tokenizer: Tokenizer, rng: random.Random, task: str, long: bool, length: int) -> Row:
    stems = tuple(tokenizer.encode(_stem(task, rng)) for _ in range(2))
    if long:
        most = rng.randint(length // 3, max(length // 3, length - 280))
        return Row((stems[0], []), (rng.uniform(0.8, 1.0), _answer_temperature(rng)), (most, 1), (most, 200))
    if rng.random() < 0.3 and task == "chat":
        stems = (stems[0], [])
    user = rng.uniform(0.7, 1.1)  # below, small models repeat themselves
    return Row(stems, (user, _answer_temperature(rng)), (2, 1), (120, rng.choice((96, 144, 192))))


def _stem(task: str, rng: random.Random) -> str:
    stem = rng.choice(STEMS[task])
    return stem.format(topic=rng.choice(TOPICS), name=rng.choice(NAMES), language=rng.choice(LANGUAGES))


def _answer_temperature(rng: random.Random) -> float:
    return 0.0 if rng.random() < 0.5 else rng.choice((0.4, 0.7, 0.7, 1.0))


def _padded(rows: Sequence[Sequence[int]], width: int, fill: int = -1) -> list[list[int]]:
    return [[*row[:width], *[fill] * (width - len(row))] for row in rows]


class Writer:
    """Lets the target write a batch of rows of `length` tokens; captured: the step is a CUDA graph for each BUCKET."""

    def __init__(self, target: Llama, chat: Format, batch: int, length: int, captured: bool = False) -> None:
        device = target.token_embd.weight.device
        self.target, self.chat, self.batch, self.length, self.device = target, chat, batch, length, device
        self.caches = target.cache(batch, length)
        columns = dict.fromkeys(("token", "place", "role", "count"), torch.int64)
        self.state = {k: torch.zeros(batch, dtype=t, device=device) for k, t in columns.items()}
        width = max(64, len(chat.to_user) + 24)
        self.queue, self.follow = (torch.full((batch, width), -1, device=device) for _ in range(2))
        self.to_answer = torch.tensor(_padded([chat.to_answer], width), device=device)
        self.temperature = torch.zeros(batch, 2, device=device)
        self.shortest, self.longest = (torch.zeros(batch, 2, dtype=torch.int64, device=device) for _ in range(2))
        self.tokens = torch.zeros(batch, length, dtype=torch.int64, device=device)
        self.answers = torch.zeros(batch, length, dtype=torch.bool, device=device)
        self.likely = torch.zeros(batch, length, min(TAUGHT, target.shape.vocab), dtype=torch.int32, device=device)
        self.logits = torch.zeros_like(self.likely, dtype=torch.float16)
        self.ends = torch.tensor(chat.ends, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.captured, self.steps = captured, dict[int, Callable[[], None]]()

    def write(self, rows: Sequence[Row]) -> Text:
        """The text of these rows."""
        width = self.queue.shape[1]
        first = _padded([[*self.chat.opening, *row.stems[0]] for row in rows], width)
        self.follow.copy_(torch.tensor(_padded([[*self.chat.to_user, *row.stems[1]] for row in rows], width)))
        self.temperature.copy_(torch.tensor([row.temperature for row in rows]))
        self.shortest.copy_(torch.tensor([row.shortest for row in rows]))
        self.longest.copy_(torch.tensor([row.longest for row in rows]))
        return self._run(torch.tensor(first))

    def answer(self, prompts: Sequence[Sequence[int]], temperature: float) -> Text:
        """The target's answers to whole prompts, each shorter than the length."""
        for name, value in ((self.temperature, temperature), (self.shortest, 1), (self.longest, self.length)):
            name.fill_(value)
        self.follow.fill_(-1)
        self.follow[:, : len(self.chat.to_user)] = torch.tensor(self.chat.to_user, device=self.device)
        return self._run(torch.tensor(_padded(prompts, self.length)), role=ANSWER)

    def _run(self, queue: Tensor, role: int = USER) -> Text:
        self.queue = self._resized(queue)
        self._reset(role)
        for at in range(self.length - 1):
            self._step_at(at)()
        found = (self.tokens.int(), self.answers, self.likely, self.logits)
        return Text(*(part.cpu().numpy().copy() for part in found))

    def _resized(self, queue: Tensor) -> Tensor:
        """The queue's own tensor if it has the shape (a captured graph points to it), else a new one."""
        if queue.shape != self.queue.shape:
            self.steps.clear()
            grow = queue.shape[1] - self.follow.shape[1]
            self.follow, self.to_answer = (
                torch.nn.functional.pad(t[:, : queue.shape[1]], (0, max(0, grow)), value=-1)
                for t in (self.follow, self.to_answer)
            )
            return queue.to(self.device)
        return self.queue.copy_(queue)

    def _reset(self, role: int) -> None:
        for name, value in (("token", self.queue[:, 0]), ("place", 1), ("role", role), ("count", 0)):
            self.state[name].copy_(value) if isinstance(value, Tensor) else self.state[name].fill_(value)
        self.at.zero_()
        self.answers.zero_()
        self.tokens[:, 0] = self.state["token"]

    def _step_at(self, at: int) -> Callable[[], None]:
        bucket = min((at // BUCKET + 1) * BUCKET, self.length)
        if bucket not in self.steps:
            seen = torch.arange(bucket, device=self.device)
            self.steps[bucket] = self._capture(lambda: self._advance(seen))
        return self.steps[bucket]

    def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step as a CUDA graph if wanted. Its warm-up runs change the state, so that is restored."""
        if not self.captured:
            return step
        kept = [*self.state.values(), self.queue, self.at, self.tokens, self.answers, self.likely, self.logits]
        saved = [t.clone() for t in kept]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for tensor, value in zip(kept, saved, strict=True):
            tensor.copy_(value)
        return graph.replay

    @torch.no_grad()
    def _advance(self, columns: Tensor) -> None:
        s = self.state
        logits = self.target.step(s["token"], self.caches, self.at, columns <= self.at)
        answering = s["role"][:, None]
        count, temperature = s["count"], self.temperature.gather(1, answering)
        too_short = count[:, None] < self.shortest.gather(1, answering)
        logits[:, self.ends] = logits[:, self.ends].masked_fill(too_short, -torch.inf)
        likely, values = best(logits, SAMPLED)
        chosen = likely.gather(1, _choose(values, temperature)[:, None])[:, 0]
        chosen = chosen.masked_fill(count >= self.longest.gather(1, answering)[:, 0], self.chat.ends[0])
        queued = self.queue.gather(1, s["place"].clamp(max=self.queue.shape[1] - 1)[:, None])[:, 0]
        forced = (queued >= 0) & (s["place"] < self.queue.shape[1])
        token = torch.where(forced, queued, chosen)
        for kept, value in ((self.likely, likely), (self.logits, values - values[:, :1])):
            kept.index_copy_(1, self.at, value[:, None, : kept.shape[-1]].to(kept.dtype))
        self.at += 1
        self.tokens.index_copy_(1, self.at, token[:, None])
        self.answers.index_copy_(1, self.at, (~forced & (s["role"] == ANSWER))[:, None])
        self._turn(token, forced, ~forced & (token[:, None] == self.ends).any(1))

    def _turn(self, token: Tensor, forced: Tensor, ended: Tensor) -> None:
        """Move every row on by its token; a turn that ended queues what the template puts before the next."""
        s = self.state
        following = torch.where(s["role"][:, None] == USER, self.to_answer, self.follow)
        self.queue.copy_(torch.where(ended[:, None], following, self.queue))
        s["token"].copy_(token)
        s["place"].copy_((s["place"] + forced).masked_fill(ended, 0))
        s["role"].copy_((s["role"] + ended) % 2)
        s["count"].copy_((s["count"] + 1).masked_fill(ended | forced, 0))


def row_bytes(shape: Shape, length: int) -> int:
    """About what a row of a batch takes on the device: cache, kept logits, and those of a step with their copies."""
    cached = 4 * shape.layers * shape.kv_heads * shape.head_width
    return length * (cached + 6 * TAUGHT + 9) + 12 * shape.vocab


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
    target: Llama,
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
