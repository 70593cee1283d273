"""The study of near ties, held to a target that turns one of them when a forward has several rows."""

from dataclasses import replace
from math import log

import numpy as np
import pytest
from fakes import FakeDrafter, FakeTarget, choose, costs, logits

from duochat.bench.ties import GREEDY, PLAIN, answer, compare, study
from duochat.engine.engine import Engine

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


def engine(target):
    return Engine(target, FakeDrafter(), costs())


def test_equal_answers_have_no_gaps():
    found = study(engine(FakeTarget()), [PROMPT, [4, 5]], 24)
    assert found["prompts"] == 2
    for one in found["decoders"].values():
        assert (one["answers_that_differ"], one["tokens_not_the_plain_choice"], one["greatest_gap_nats"]) == (0, 0, 0)


def test_a_turned_tie_is_found_and_its_gap_measured():
    pair = engine(Wide())
    plain = answer(pair, PROMPT, PLAIN, 24)
    second = int(np.argsort(-logits(PROMPT + plain[:2]))[1])
    other = answer(engine(FakeTarget()), [*PROMPT, *plain[:2], second], PLAIN, 21)
    found = compare(FakeTarget(), PROMPT, plain, [*plain[:2], second, *other])
    _, p, _ = choose(logits(PROMPT + plain[:2]), GREEDY, 5)
    assert found["first"] == 2
    assert found["gaps"] == [pytest.approx(log(p[plain[2]] / p[second]))]


def test_a_decoder_whose_forwards_are_wide_is_reported():
    found = study(engine(Wide()), [PROMPT], 24)
    assert found["decoders"]["speculative"]["answers_that_differ"] == 1
    assert found["decoders"]["speculative"]["first_differences"] == [2]


def test_an_answer_that_ends_early_differs_at_its_end():
    assert compare(FakeTarget(), PROMPT, [1, 2, 3], [1, 2])["first"] == 2
