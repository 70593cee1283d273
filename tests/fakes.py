"""Models without weights: a target whose logits are a hash of the last tokens, and drafters of every kind."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial

import numpy as np

from duochat.engine.costs import Costs
from duochat.engine.lanes import Answer, Cancelled, Candidates, Drafter, Target
from duochat.engine.penalties import changes, penalised
from duochat.engine.sampling import gumbel

VOCAB = 40
EOS = 0


@lru_cache(maxsize=100_000)
def _row(tail):
    rng = np.random.default_rng(tail)
    row = rng.normal(size=VOCAB)
    row[rng.integers(1, VOCAB)] += 3.0
    row[EOS] -= 3.0
    return row


def logits(context):
    """The fake language: logits depend on the last three tokens; a clear favourite most of the time."""
    return _row(tuple(int(t) for t in context[-3:]))


def choose(row, sampling, position, context=()):
    """argmax(logits/T + noise), and the probability of the chosen token. context: what penalties look at."""
    t, made = sampling.temperature, changes(context, [()], sampling)
    return _chosen(penalised(row.astype(np.float32), made, 0).astype(float), t, sampling.seed, position)


def _chosen(row, t, seed, position):
    scaled = row / t if t else row
    p = np.exp(scaled - scaled.max())
    scores = scaled + gumbel(seed, position, np.arange(VOCAB)) if t else scaled
    token = int(np.argmax(scores))
    return token, p / p.sum(), scores


class EveryThird:
    """A grammar: a third of the tokens is forbidden, others after each path. The answer's end is always allowed."""

    def __init__(self, vocabulary=VOCAB):
        self.vocabulary = vocabulary

    def allowed(self, answer, paths):
        rows = [np.arange(self.vocabulary) % 3 != sum([*answer, *path]) % 3 for path in paths]
        for row in rows:
            row[EOS] = True
        return np.stack(rows)


class FakeTarget(Target):
    """Answers from `logits`; checks that every tree is well-formed."""

    def __init__(self, eos=(EOS,), context_length=10_000, delay=lambda: 0.0):
        self.eos, self.context_length, self.delay = frozenset(eos), context_length, delay
        self.vocabulary, self.most_nodes, self.shares_cores = VOCAB, 63, False
        self.calls = 0

    def _begin(self, *asked):
        return partial(self.verify, *asked)

    def verify(self, context, tree, sampling, cancelled=lambda: False, progress=None):
        if cancelled():
            raise Cancelled
        self.calls += 1
        time.sleep(self.delay())
        paths, tokens, probs, node_probs = [list(context)], [], [], []
        for i, (token, parent) in enumerate(tree):
            assert -1 <= parent < i
            paths.append([*paths[parent + 1], token])
        dists = []
        for path in paths:
            token, p, _ = choose(logits(path), sampling, len(path), path)
            tokens.append(token)
            probs.append(float(p[token]))
            dists.append(p)
        node_probs = [float(dists[parent + 1][token]) for token, parent in tree]
        return Answer(tokens, probs, node_probs)


def path_of(context, node):
    """The whole token sequence that ends in this node."""
    below = []
    while node.position >= len(context):
        below.append(node.token)
        node = node.parent
    return list(context) + below[::-1]


class FakeDrafter(Drafter):
    """kind: perfect (the target's own scores), wrong (never its first choice), random, or noisy (half right)."""

    candidates, most_nodes = 4, 32
    thread = ThreadPoolExecutor(1)

    def __init__(self, kind="perfect", seed=0, delay=lambda: 0.0, fail_at=None):
        self.kind, self.rng, self.delay, self.fail_at = kind, random.Random(seed), delay, fail_at
        self.calls = 0

    def expand(self, context, nodes, sampling, cancelled):
        self.calls += 1
        if self.fail_at is not None and self.calls >= self.fail_at:
            raise RuntimeError("the fake draft broke")
        time.sleep(self.delay())
        if cancelled():
            raise Cancelled
        return [self._one(path_of(context, node), sampling) for node in nodes], 0.0

    def interrupt(self):
        pass

    def _one(self, path, sampling):
        right, _, scores = choose(logits(path), sampling, len(path), path)
        order = [int(t) for t in np.argsort(-scores)]
        if self.kind == "wrong":
            order = [t for t in order if t != right]
        if self.kind == "random" or (self.kind == "noisy" and self.rng.random() < 0.5):
            self.rng.shuffle(order)
        probs = np.exp(scores - scores.max())
        probs /= probs.sum()
        top = order[: self.candidates]
        ranked = sorted((float(probs[t]) for t in top), reverse=True)
        return Candidates(tuple(top), tuple(ranked))


class Guessing(Drafter):
    """Knows the answer, and proposes its next token at a random rank or not at all."""

    candidates, most_nodes = 3, 32

    def __init__(self, answer, vocabulary=600):
        self.answer, self.vocabulary = answer, vocabulary
        self.rng, self.thread = random.Random(5), ThreadPoolExecutor(1)

    def expand(self, context, nodes, sampling, cancelled):
        return [self._guess(node.position + 1) for node in nodes], 0.0

    def _guess(self, position):
        tokens = self.rng.sample(range(3, self.vocabulary), 3)
        if position < len(self.answer) and self.rng.random() < 0.8:
            tokens = self.rng.sample([self.answer[position], *tokens[:2]], 3)
        return Candidates(tuple(dict.fromkeys(tokens)), (0.5, 0.3, 0.1)[: len({*tokens})])

    def interrupt(self):
        pass

    def set_threads(self, threads, reading=0):
        pass


def costs():
    """A target of 8 ms, a little more when wide, beside a draft of 1 ms."""
    return Costs.of({1: 8e-3, 4: 8.2e-3, 16: 9e-3, 32: 10e-3}, {1: 1e-3, 2: 1.4e-3, 4: 2e-3, 8: 3.5e-3})
