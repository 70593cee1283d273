"""The target lane with all that a device offers (graphs, compiled layers, kernels) against plain forwards.

Where there is no CUDA the CPU's ways are held to the same, and what concerns a card alone is skipped.
"""

from __future__ import annotations

import random
import time
from statistics import median

import numpy as np
import pytest
import torch
from test_target import paths
from transformers import LlamaConfig, LlamaForCausalLM

from duochat.engine.pytorch import TorchTarget, choose, memory
from duochat.engine.pytorch.linear import join
from duochat.engine.pytorch.rows import parameters
from duochat.engine.sampling import Sampling, key

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
OFF = 5e-3  # log-probabilities in float32 may differ by this much
GREEDY = Sampling()
VOCAB = 3000
on_a_card = pytest.mark.skipif(not CUDA, reason="needs CUDA")
torch.set_num_threads(1)


def small(device=DEVICE):
    """A random Llama with grouped heads, far from uniform."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    torch.manual_seed(5)
    config = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, max_position_embeddings=8192, **sizes)
    model = LlamaForCausalLM(config).to(device).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data.mul_(3 if parameter.dim() > 1 else 1)
    return model


def fast(compile=True):
    """`small` with all that this device offers."""
    model = small()
    if CUDA:
        join(model)
    return TorchTarget(model, 3000, compile and CUDA, CUDA)


def tokens(count, rng):
    return [rng.randrange(VOCAB) for _ in range(count)]


def random_tree(nodes, rng):
    return [(token, rng.randrange(-1, i)) for i, token in enumerate(tokens(nodes, rng))]


def check(answer, reference, context, tree):
    """Probabilities are those of separate sequences, and so are the tokens, near ties apart."""
    rows = [reference(torch.tensor([context + p], device=DEVICE)).logits[0, -1].softmax(-1) for p in paths(tree)]
    probs = torch.stack(rows).cpu()
    wanted = [*probs.max(-1).values, *(probs[parent + 1, token] for token, parent in tree)]
    assert np.abs(np.log(wanted) - np.log([*answer.probs, *answer.node_probs])).max() < OFF
    own = probs[range(len(rows)), list(answer.tokens)]
    assert (probs.max(-1).values / own).max() < 1.01


@on_a_card
def test_layers_are_compiled_and_captured():
    facts = fast().describe()
    assert facts["target_compiled_layers"], facts["target_notes"]
    assert facts["target_graphs"]


@pytest.mark.parametrize("length", (1, 100, 250, 700, 1500, 2900) if CUDA else (1, 100))
def test_trees_of_every_width(length):
    target, reference, rng = fast(), small(), random.Random(1)
    for nodes in (0, 1, 2, 7, 12, 31, 63):
        context, tree = tokens(length, rng), random_tree(nodes, rng)
        check(target.verify(context, tree, GREEDY), reference, context, tree)


def test_accepting_rejecting_and_rewinding():
    """The cache is always what a fresh one would be."""
    target, reference, rng = fast(), small(), random.Random(2)
    context = tokens(200, rng)
    for _ in range(60 if CUDA else 8):
        tree = random_tree(rng.randrange(12), rng)
        check(target.verify(context, tree, GREEDY), reference, context, tree)
        context = [*context, *rng.choice(paths(tree)), *tokens(1, rng)]
        if rng.random() < 0.2:
            context = context[: rng.randrange(1, len(context))]


@on_a_card
@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(1.0, seed=1),
        Sampling(0.7, min_p=0.05, seed=1),
        Sampling(1.0, 40, 0.9, seed=1),
        Sampling(1.0, top_p=0.999, seed=1),
    ],
    ids=str,
)
def test_a_card_chooses_the_cpus_tokens(sampling):
    logits, way = torch.randn(64, 50_000) * 4, choose.way(sampling)
    here, there = (way(logits.to(place), ask(64, sampling, place)) for place in ("cpu", DEVICE))
    assert (here[0] == there[0].cpu()).float().mean() > 0.98  # logarithms differ by a last bit
    assert bool((here[3] == there[3].cpu()).all())


def ask(rows, sampling, device):
    each = torch.arange(rows, device=device)
    noise = torch.tensor([key(sampling.seed, row) for row in range(rows)], dtype=torch.int32, device=device)
    numbers = torch.frombuffer(bytearray(parameters(sampling)), dtype=torch.int32)
    return choose.Ask.of(each, each, noise, numbers.to(device))


@on_a_card
def test_growing_past_a_span_of_the_cache_does_not_stall():
    target, seconds = fast(), []
    context = tokens(460, random.Random(4))
    for i in range(120):
        began = time.perf_counter()
        target.verify([*context, *range(i)], (), GREEDY)
        seconds.append(time.perf_counter() - began)
    assert max(seconds[2:]) - median(seconds) < 0.05


@on_a_card
def test_a_cache_larger_than_the_card_is_said_and_the_card_goes_on():
    with pytest.raises(RuntimeError) as fault:
        TorchTarget(small(), 400_000_000)
    assert memory.ran_out(fault.value)
    assert len(fast(False).verify([1, 2], (), GREEDY).tokens) == 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two cards")
def test_layers_on_two_cards():
    from accelerate import dispatch_model

    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    places |= {f"model.layers.{i}": i // 2 for i in range(4)}
    target = TorchTarget(dispatch_model(small(torch.device("cpu")), places), 3000)
    context, tree = tokens(100, random.Random(5)), [(1, -1), (2, -1), (3, 1)]
    check(target.verify(context, tree, GREEDY), small(), context, tree)
