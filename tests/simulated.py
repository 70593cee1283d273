"""A simulated engine for tests and demonstrations: no models, a clock of its own, the fates of a real one.

`python tests/simulated.py assets/traces/example.jsonl` writes the example that the Learn tab ships.

Two devices take turns on a virtual clock as in the design: the GPU verifies the tree, the CPU keeps drafting. The
target's text is given; the draft's i-th choice is the target's token with a probability that differs by token.
"""

from __future__ import annotations

import random
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fake_engine import Ready

from duochat.chat.answer import Step
from duochat.engine.rounds import Batch, Draft, Round

WORDS = [
    "the",
    "a",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "for",
    "on",
    "with",
    "as",
    "are",
    "this",
    "be",
    "by",
    "or",
    "from",
    "which",
    "one",
    "may",
    "can",
    "not",
    "model",
    "token",
]


def tokens_of(text: str) -> list[str]:
    """Words with their leading space, line ends with their indentation, signs: about what a tokenizer makes."""
    return re.findall(r"\n+ *| ?\w{1,7}|\s|[^\w\s]", text)


@dataclass
class Simulation:
    """Rounds of one answer. target_s, draft_s: seconds of a forward; hard: share of tokens that the draft misses."""

    text: str
    target_s: float = 0.052
    draft_s: float = 0.009
    hard: float = 0.27
    width: int = 8
    seed: int = 1
    prompt_tokens: int = 42

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.answer = tokens_of(self.text)
        self.texts: dict[int, str] = {}
        self.tree: dict[int, Draft] = {}
        self.ready: list[tuple[float, Draft]] = []
        self.count = 0

    def token(self, text: str) -> int:
        return zlib.crc32(text.encode()) % 49152

    def steps(self, decoder: str = "duotree") -> Iterator[Step]:
        """All steps, as `Chat.reply` yields them."""
        yield Step(phase="prefill", progress=(0, self.prompt_tokens), prompt_tokens=self.prompt_tokens,
                   context_length=4096)  # fmt: skip
        rounds = self.plain() if decoder == "autoregressive" else self.duo()
        done = 0
        for r in rounds:
            pieces = tuple(self.answer[done : done + len(r.tokens)])
            done += len(r.tokens)
            last = done >= len(self.answer)
            r = replace(r, finish="stop" if last else None)
            if last:
                r = replace(r, ignored=(*r.ignored, *self.tree))
            texts = {d.id: self.texts[d.token] for d in r.drafted}
            yield Step(r, "".join(pieces), pieces, texts, "done" if last else "decode", finish=r.finish,
                       prompt_tokens=self.prompt_tokens, context_length=4096)  # fmt: skip

    def prefill(self, speculation: str) -> Round:
        return Round(0, self.prompt_tokens, 0.0, 4 * self.target_s, (self.token(self.answer[0]),), "plain",
                     token_probs=(0.9,), phase="prefill", speculation=speculation)  # fmt: skip

    def plain(self) -> Iterator[Round]:
        yield self.prefill("off")
        now = 4 * self.target_s
        for i, text in enumerate(self.answer[1:], 1):
            ended = now + self.jitter(self.target_s) * 0.97
            yield Round(i, self.prompt_tokens + i, now, ended, (self.token(text),), "plain", speculation="off",
                        token_probs=(self.random.uniform(0.3, 1),))  # fmt: skip
            now = ended

    def duo(self) -> Iterator[Round]:
        yield self.prefill("warming")
        now, done, index = 4 * self.target_s, 1, 1
        fresh, batches = self.draft(now, now + 2 * self.draft_s, done)
        now += 2 * self.draft_s
        while done < len(self.answer):
            ended = now + self.jitter(self.target_s)
            pending = sorted(self.tree.values(), key=lambda d: -d.reach)[: self.width]
            pending = [d for d in pending if d.parent not in self.tree or self.tree[d.parent] in pending]
            r, done = self.verify(index, now, ended, pending, done)
            alive = dict(self.tree)
            yield replace(r, drafted=tuple(fresh), batches=tuple(batches))
            fresh, batches = self.draft(now, ended, done)
            assert set(alive) <= set(self.tree)
            waited = 0.0
            if not any(d.position == self.prompt_tokens + done for d in self.tree.values()) and done < len(self.answer):
                more, extra = self.draft(ended, ended + self.draft_s, done)
                fresh, batches, waited = fresh + more, batches + extra, self.draft_s
            index, now = index + 1, ended + waited + 0.002

    def verify(self, index: int, now: float, ended: float, pending: list[Draft], done: int) -> tuple[Round, int]:
        """Walk the tree with the answer's tokens; everything beside the walk leaves the tree."""
        parent, accepted, start = None, [], done
        while done < len(self.answer):
            position = self.prompt_tokens + done
            ours = [d for d in self.tree.values() if d.position == position and (parent is None or d.parent == parent)]
            match = next((d for d in ours if self.texts[d.token] == self.answer[done]), None)
            tested = match is not None and (match in pending or len(accepted) == done - start)
            if not tested or (match not in pending and accepted and accepted[-1] not in pending):
                break
            accepted.append(match)
            parent, done = match.id, done + 1
            if match not in pending:
                break
        waiting_hit = bool(accepted) and accepted[-1] not in pending
        siblings = [d for d in self.tree.values() if d.position == self.prompt_tokens + done
                    and (parent is None or d.parent == parent)] if not waiting_hit else []  # fmt: skip
        emitted = self.answer[start:done]
        last = "accepted"
        if not waiting_hit and done < len(self.answer):
            emitted, last = [*emitted, self.answer[done]], "correction" if siblings else "bonus" if pending else "plain"
            done += 1
        rejected = [d.id for d in siblings if d in pending]
        return self.settle(index, now, ended, pending, accepted, rejected, emitted, last, start, waiting_hit), done

    def settle(self, index, now, ended, pending, accepted, rejected, emitted, last, start, hit) -> Round:
        tip = accepted[-1].id if accepted else None
        below = {tip} if last == "accepted" else set()
        keep = set()
        for d in sorted(self.tree.values(), key=lambda d: d.id):
            if d.parent in below:
                below.add(d.id)
                keep.add(d.id)
        gone = {d.id for d in accepted} | set(rejected)
        ignored = [i for i in self.tree if i not in keep and i not in gone]
        for i in [*gone, *ignored]:
            self.tree.pop(i, None)
        return Round(
            index, self.prompt_tokens + start, now, ended, tuple(self.token(t) for t in emitted), last,
            pending=tuple(d.id for d in pending), accepted=tuple(d.id for d in accepted), rejected=tuple(rejected),
            ignored=tuple(ignored), token_probs=tuple(self.random.uniform(0.35, 1) for _ in emitted),
            pending_probs=tuple(round(min(1, d.prob * self.random.uniform(0.6, 1.2)), 4) for d in pending),
            budget=self.target_s / self.draft_s * self.random.uniform(0.97, 1.03), hit=hit, transfer=0.0004,
        )  # fmt: skip

    def draft(self, start: float, until: float, done: int) -> tuple[list[Draft], list[Batch]]:
        """Expand the likeliest leaves until the time is up."""
        fresh, batches = [], []
        now = start
        while now + self.draft_s <= until + 1e-9 and len(self.tree) < 24:
            spots = self.frontier(done)
            if not spots:
                break
            ended = now + self.jitter(self.draft_s) * (1 + 0.25 * (len(spots) - 1))
            for parent, position, reach in spots:
                fresh += self.children(parent, position, reach)
            batches.append(Batch(now, ended, len(spots)))
            now = ended + 0.0004
        return fresh, batches

    def frontier(self, done: int) -> list[tuple[int, int, float]]:
        root = self.prompt_tokens + done
        if not any(d.position == root for d in self.tree.values()):
            return [(-1, root, 1.0)]
        parents = {d.parent for d in self.tree.values()}
        leaves = [d for d in self.tree.values() if d.id not in parents and d.position + 1 < root + 12]
        return [(d.id, d.position + 1, d.reach) for d in sorted(leaves, key=lambda d: -d.reach)[:2]]

    def children(self, parent: int, position: int, reach: float) -> list[Draft]:
        place = position - self.prompt_tokens
        if place >= len(self.answer):
            return []
        right = self.answer[place]
        others = [" " + w for w in self.random.sample(WORDS, 3) if " " + w != right]
        first = min(0.98, max(0.3, self.random.gauss(1 - self.hard, 0.2)))
        roll = self.random.random()
        order = [right, others[0]] if roll < first else [others[0], right] if roll < first + 0.12 else others[:2]
        made = []
        for rank, (text, prob) in enumerate(zip(order, (first, (1 - first) * 0.6), strict=True), 1):
            if rank == 2 and prob < 0.09:
                continue
            self.texts[self.token(text)] = text
            origin = "ngram" if self.random.random() < 0.08 else "model"
            made.append(Draft(self.count, parent, position, self.token(text), prob, reach * prob, rank, origin))
            self.count += 1
        self.tree.update((d.id, d) for d in made)
        return made

    def jitter(self, seconds: float) -> float:
        return seconds * self.random.uniform(0.94, 1.1)


PROSE = """The quadratic formula gives the roots of a·x² + b·x + c = 0:

x = (−b ± √(b² − 4·a·c)) / (2·a)

The expression under the root is called the discriminant. If it is positive there are two real roots, if it is zero \
there is one, and if it is negative the roots are complex.

def roots(a, b, c):
    d = b * b - 4 * a * c
    if d < 0:
        return None
    r = d ** 0.5
    return (-b + r) / (2 * a), (-b - r) / (2 * a)
"""


@dataclass
class SimulatedEngine(Ready):
    """Answers with the simulation's rounds."""

    text: str = PROSE
    settings: dict[str, Any] = field(default_factory=dict)

    def reply(self, messages: list, options: Any, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Step]:
        for step in Simulation(self.text, **self.settings).steps(options.decoder):
            if cancelled():
                return
            yield step


def main(file: str) -> None:
    from duochat.chat.chat import Options
    from duochat.chat.recording import Recording

    steps = [s for s in Simulation(PROSE).steps() if s.round]
    costs = {
        "target": {1: 0.052, 2: 0.0522, 4: 0.0526, 8: 0.0535, 16: 0.0554},
        "draft": {1: 0.009, 2: 0.0113, 4: 0.016},
        "sweep": {1: 0.0121, 2: 0.009, 4: 0.0094},
        "threads": 2,
    }
    prompt = "Write the quadratic formula and a Python function for it."
    made = Recording(prompt, Options(seed=7, max_tokens=256), tuple(steps), {"target_device": "simulated"}, costs)
    Path(file).write_text("\n".join(made.lines()) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
