"""The default pair, real models: every decoder says what plain decoding says, and the records add up."""

import pytest

from duochat.config import load
from duochat.engine.decoding import DECODERS, Request
from duochat.engine.rounds import total
from duochat.engine.sampling import Sampling

pytestmark = pytest.mark.real
QUESTIONS = ["Write a Python function that reverses a string.", "Why is the sky blue?", "Tell me a story about a fox."]


@pytest.fixture(scope="module")
def pair():
    from duochat.app.text import Tokenizer
    from duochat.engine.engine import Engine
    from duochat.models import fetch, target_folder

    settings = load(context_length=2048)
    return Engine.load(settings), Tokenizer.load(target_folder(fetch(settings.target)))


def test_the_draft_is_used(pair):
    engine, _ = pair
    assert engine.fault == ""
    assert 0 < engine.costs.draft(1) < engine.costs.target(1)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("question", QUESTIONS)
def test_same_tokens_with_every_decoder(pair, question, temperature):
    engine, tokenizer = pair
    context = tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    sampling, said = Sampling(temperature=temperature, seed=7), {}
    for decoder in DECODERS:
        rounds = list(engine.decode(context, Request(sampling, max_tokens=40, decoder=decoder)))
        said[decoder] = [t for r in rounds for t in r.tokens]
        stats = total(rounds)
        assert stats.drafted == stats.accepted + stats.rejected + stats.ignored
        assert stats.completion_tokens == len(said[decoder]) <= 40
    assert all(tokens == said["autoregressive"] for tokens in said.values())


def test_the_draft_proposes_what_the_target_says(pair):
    engine, tokenizer = pair
    context = tokenizer.encode(f"<|im_start|>user\n{QUESTIONS[0]}<|im_end|>\n<|im_start|>assistant\n")
    stats = total(engine.decode(context, Request(max_tokens=60)))
    assert stats.acceptance_rate > 0.4
    assert stats.mean_accepted_length > 1.3
