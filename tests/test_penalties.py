"""Penalties depend on the path and on nothing else: not on how much of it was committed, nor on the rows beside it."""

import json
from collections import Counter

import numpy as np
import pytest
from fakes import EveryThird
from hypothesis import given
from hypothesis import strategies as st

from duochat import DuoChatError
from duochat.chat.chat import Options
from duochat.config import check
from duochat.engine.penalties import changes, paths, penalised
from duochat.engine.sampling import Sampling

VOCABULARY = 30
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=12)
PENALISED = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.6, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.1]),
    logit_bias=st.sampled_from([(), ((3, -100.0),), ((0, 1.5), (29, 0.1))]),
    grammar=st.sampled_from([None, EveryThird(VOCABULARY)]),
)


def one_by_one(row: np.ndarray, prompt: list[int], answer: list[int], s: Sampling) -> list[float]:
    """The rule as it is written down, a token at a time."""
    counts, bias, new = Counter(answer), dict(s.logit_bias), []
    for token, logit in enumerate(row.tolist()):
        if token in prompt or token in answer:
            logit = logit / s.repetition_penalty if logit > 0 else logit * s.repetition_penalty
        logit -= s.frequency_penalty * counts[token] + s.presence_penalty * (counts[token] > 0)
        new.append(logit + bias.get(token, 0))
    return new if s.grammar is None else np.where(s.grammar.allowed(answer, [()])[0], new, -1e6)


@given(PENALISED, TOKENS, TOKENS, TOKENS, st.integers(0, 99))
def test_a_row_is_changed_by_its_own_path(s, prompt, answer, tree, seed):
    """And to the same bits when the path is committed, whatever tree hangs beside it."""
    rng = np.random.default_rng(seed)
    row = rng.normal(size=VOCABULARY).astype(np.float32)
    s = s.after([1, *prompt])
    edges = [(token, int(rng.integers(-1, i)) if i else -1) for i, token in enumerate(tree)]
    whole = changes([1, *prompt, *answer], paths(edges), s)
    for number, path in enumerate(paths(edges)):
        before = row.copy()
        seen = penalised(row, whole, number)
        np.testing.assert_allclose(seen, one_by_one(before, [1, *prompt], answer + path, s), rtol=1e-5, atol=1e-5)
        assert (row == before).all()
        assert penalised(row, changes([1, *prompt, *answer, *path], [()], s), 0).tobytes() == seen.tobytes()


def test_nothing_is_computed_where_nothing_is_asked():
    assert changes([1, 2], [()], Sampling(temperature=1.0)) is None
    assert Sampling().after([1, 2]) == Sampling()


def test_a_row_of_few_tokens_has_its_own_places():
    """Of a draft that proposes some tokens, or has fewer than the target."""
    s = Sampling(logit_bias=((2, 1.0), (5, 2.0), (90, 3.0)))
    made = changes([7], [()], s)
    assert made.among(None, 6)[0].tolist() == [2, 5]
    named = made.among(np.array([0, 5, 8, 90]), 4)
    assert named.tokens.tolist() == [1, 3]
    assert named.added.tolist() == [[2.0, 3.0]]
    assert made.among(np.array([1, 3]), 2).tokens.tolist() == []
    ruled = changes(
        [7], [()], Sampling(grammar=EveryThird(8))
    )  # token 1, 4, 7 may not come, nor what the target has not
    assert ruled.among(None, 10).allowed.tolist() == [[True, False, True, True, False, True, True, False, False, False]]
    assert ruled.among(np.array([0, 4, 6, 9]), 4).allowed.tolist() == [[True, False, True, False]]


def test_biases_come_from_a_mapping_or_pairs():
    """JSON has token ids as texts and pairs as lists."""
    assert check("logit_bias", {"9": 1, 4: -100}) == ((4, -100.0), (9, 1.0))
    kept = json.loads(json.dumps([[4, -1.5]]))
    assert Options(logit_bias=kept).sampling().logit_bias == check("logit_bias", kept) == ((4, -1.5),)
    for wrong in ({"a": 1}, {4: 101}, {-1: 1}, {4: "x"}, {4: True}, [4], 7, "x", {4: float("nan")}, {2**31: 1}):
        with pytest.raises(DuoChatError, match="give token ids, and for each a number from -100 to 100"):
            check("logit_bias", wrong)
