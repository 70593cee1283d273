"""The study of near ties, held to a target that turns one of them when a forward has several rows."""

from dataclasses import replace
from math import log

import numpy as np
import pytest
from fakes import FakeDrafter, FakeTarget, choose, costs, logits

from duochat.bench import tasks
from duochat.bench.contest import Bench, Decoder, Plan
from duochat.bench.metrics import first_difference
from duochat.bench.ties import gaps, study
from duochat.engine.decoding import DECODERS
from duochat.engine.engine import Engine
from duochat.engine.sampling import Sampling

PROMPT = [7, 8, 9]


class Wide(FakeTarget):
    """Takes the second best token after the prompt and two more, in forwards of several rows."""

    def verify(self, context, tree, sampling, *rest, **named):
        told = super().verify(context, tree, sampling, *rest, **named)
        paths = [list(context)]
        for token, parent in tree:
            paths.append([*paths[parent + 1], token])
        turned = {i for i, path in enumerate(paths) if tree and len(path) == len(PROMPT) + 2}
        seconds = [int(np.argsort(-logits(path))[1]) for path in paths]
        return replace(told, tokens=[seconds[i] if i in turned else t for i, t in enumerate(told.tokens)])


class Words:
    """A question's text is its token ids."""

    def prompt(self, messages):
        return [int(word) for word in messages[0]["content"].split()]

    def decode(self, ids):
        return ""


def engine(target):
    return Engine(target, FakeDrafter(), costs())


def studied(target, *prompts):
    questions = [tasks.Question("qa", prompt, (prompt, "and more")) for prompt in prompts]
    plan, pair = Plan(questions, max_tokens=24, tokenizer=Words(), context_length=1000), engine(target)
    bench = Bench([Decoder(name, pair) for name in DECODERS], plan)
    assert all(step is None for step in bench.run())
    return study(pair.target, plan, bench.runs)


def answer(target, context, most):
    return Decoder("autoregressive", engine(target)).answer(context, Sampling(), most, lambda: False).tokens


def test_equal_answers_have_no_gaps():
    found = studied(FakeTarget(), "7 8 9", "4 5")
    assert found.keys() == {"speculative", "duodecoding", "duotree"}
    for one in found.values():
        assert one["answers"] == 2
        assert (one["answers_that_differ"], one["tokens_not_the_plain_choice"], one["greatest_gap_nats"]) == (0, 0, 0)


def test_a_turned_tie_is_found_and_its_gap_measured():
    plain = answer(FakeTarget(), PROMPT, 24)
    second = int(np.argsort(-logits(PROMPT + plain[:2]))[1])
    other = [*plain[:2], second, *answer(FakeTarget(), [*PROMPT, *plain[:2], second], 21)]
    _, p, _ = choose(logits(PROMPT + plain[:2]), Sampling(), 5)
    assert first_difference(plain, other) == 2
    assert list(gaps(FakeTarget(), PROMPT, other, 2)) == [pytest.approx(log(p[plain[2]] / p[second]))]


def test_a_decoder_whose_forwards_are_wide_is_reported():
    found = studied(Wide(), "7 8 9")["speculative"]
    assert found["answers_that_differ"] == 1
    assert found["first_differences"] == [2]
    assert found["tokens_not_the_plain_choice"] == 1
    assert found["greatest_gap_nats"] > 0


def test_an_answer_that_ends_early_differs_at_its_end():
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2], [1, 2]) is None
