"""The target lane against plain forwards of the same model, on tiny random models of each family."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest
import torch
import transformers
from fakes import EveryThird, Guessing, costs
from torch._dynamo.utils import counters

from duochat import DuoChatError
from duochat.engine.decoding import DECODERS, Request, decode
from duochat.engine.lanes import Answer, Cancelled
from duochat.engine.penalties import changes, penalised
from duochat.engine.pytorch import TorchTarget, choose, compiled, forward, masks
from duochat.engine.pytorch.attention import NAME, attend, exactly
from duochat.engine.pytorch.linear import join
from duochat.engine.pytorch.memo import Memo
from duochat.engine.pytorch.rows import Rows, Shape, Shapes, parameters
from duochat.engine.sampling import Sampling, gumbel, key

torch.set_num_threads(1)
VOCAB = 97
GREEDY = Sampling()
ASKED = ("token", "parent", "key", "parameters")
ALL_KEYS = {"num_key_value_heads": None}  # of its own for each head, and the configuration has no such number
FAMILIES = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 7}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "sliding_window": 7}),
    "gpt_oss": ("GptOss", {"head_dim": 16, "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2", ALL_KEYS),
    "gpt_neox": ("GPTNeoX", ALL_KEYS),
    "gptj": ("GPTJ", {"rotary_dim": 8} | ALL_KEYS),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64} | ALL_KEYS),
}
JOINED = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3")


def build(family: str = "llama", **changes) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A random model with transformers' own attention, and the same one with ours."""
    name, extra = FAMILIES[family]
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    models = []
    for attention in ("eager", NAME):
        torch.manual_seed(3)
        given = {key: value for key, value in (sizes | extra | changes).items() if value is not None}
        config = getattr(transformers, f"{name}Config")(**given, attn_implementation=attention)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for label, parameter in model.named_parameters():  # far from uniform, so that a wrong mask shows
            parameter.data.mul_(4 if parameter.dim() > 1 else 100 if "sinks" in label else 1)
        models.append(model)
    models[1].load_state_dict(models[0].state_dict())
    return tuple(models)


def plain(model: torch.nn.Module, sequence: list[int]) -> torch.Tensor:
    """Logits after a sequence, by an ordinary forward without a cache."""
    with torch.no_grad():
        return model(torch.tensor([sequence])).logits[0, -1]


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def paths(tree: list[tuple[int, int]]) -> list[list[int]]:
    """The tokens from the root to each row: the root's own (empty) first."""
    out: list[list[int]] = [[]]
    for token, parent in tree:
        out.append([*out[parent + 1], token])
    return out


def random_tree(size: int, rng: random.Random) -> list[tuple[int, int]]:
    return [(rng.randrange(VOCAB), rng.randrange(-1, i)) for i in range(size)]


def check(answer, model, context, tree) -> None:
    """Greedy tokens and probabilities equal those of separate sequences."""
    logits = [plain(model, context + path) for path in paths(tree)]
    probs = [row.softmax(-1) for row in logits]
    assert list(answer.tokens) == [int(row.argmax()) for row in logits]
    assert answer.probs == pytest.approx([float(p.max()) for p in probs], abs=1e-4)
    wanted = [float(probs[parent + 1][token]) for token, parent in tree]
    assert answer.node_probs == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_tree_equals_separate_sequences(family, padded):
    reference, model = build(family)
    target = TorchTarget(model, 256)
    target._shapes.padded = padded
    context, tree = tokens(23), [(5, -1), (6, -1), (7, 0), (8, 1), (9, 3), (5, 3)]
    check(target.verify(context, tree, GREEDY), reference, context, tree)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("fixed", [False, True])
def test_memo_fuzz(family, fixed):
    """Accepted paths, rejections, rewinds, edits and repeats all answer like a fresh forward."""
    reference, model = build(family)
    target, rng = TorchTarget(model, 300), random.Random(1)
    if fixed:
        target._shapes = type(target._shapes)(target._memo.capacity, fixed=True)
    context = tokens(70)
    for _ in range(40):
        tree = random_tree(rng.randrange(6), rng)
        check(target.verify(context, tree, GREEDY), reference, context, tree)
        context = context + rng.choice(paths(tree)) + [rng.randrange(VOCAB)]
        if rng.random() < 0.3:
            context = context[: rng.randrange(1, len(context))] + tokens(rng.randrange(4), rng.randrange(99))
        assert target._memo.used.bit_count() == len(target._memo.tokens) == len(set(target._memo.slots))


def test_an_accepted_path_is_not_computed_again():
    _, model = build()
    target, context = TorchTarget(model, 256), tokens(20)
    target.verify(context, [(1, -1), (2, 0), (3, 1)], GREEDY)
    assert target._memo.match([*context, 1, 2, 9]) == 22


def test_prefill_reports_and_cancels_between_chunks():
    reference, model = build()
    target, context, seen = TorchTarget(model, 400), tokens(300), []

    def cancelled() -> bool:
        return len(seen) == 2

    with pytest.raises(Cancelled):
        target.verify(context, [], GREEDY, cancelled, lambda *p: seen.append(p))
    assert seen == [(64, 300), (128, 300)]
    assert target._memo.tokens == context[:128]
    check(target.verify(context, [(4, -1)], GREEDY), reference, context, [(4, -1)])


def test_a_closed_target_gives_its_memory_back():
    """The engine freezes what it has loaded, rings of references among it."""
    _, model = build()
    target = TorchTarget(model, 64)
    gone = [weakref.ref(model), weakref.ref(target._forward.cache)]
    del model
    gc.freeze()
    target.close()
    assert [ref() for ref in gone] == [None, None]


def test_a_context_too_long_is_the_users_fault():
    _, model = build()
    with pytest.raises(DuoChatError, match="context_length"):
        TorchTarget(model, 32).verify(tokens(33), [], GREEDY)


@pytest.mark.parametrize(("fixed", "context"), [(False, 100), (True, 100), (True, 700)])
def test_measure_takes_as_many_tokens_as_fit_and_leaves_the_cache_sound(fixed, context):
    """A GPU's graphs for 700 tokens of context are measured whatever context_length is."""
    reference, model = build()
    target, held = TorchTarget(model, 256), tokens(30)
    target._shapes = Shapes(target._memo.capacity, fixed)
    target.verify(held, [], GREEDY)
    assert target.measure([1, 4, 64, 65], context, 1).keys() == {1, 4, 64}
    held = [*held, 3]
    check(target.verify(held, [(4, -1)], GREEDY), reference, held, [(4, -1)])


def test_spans_reach_any_context():
    for capacity in (128, 4160, 2**20 + 64):
        assert Shapes(capacity, True).fit(64, 63, capacity - 1).span == capacity


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_a_tree_may_reach_beyond_the_last_position(family):
    """Of which a model with learned positions has no vector. What lies there is never emitted."""
    reference, model = build(family, max_position_embeddings=96)
    target, context = TorchTarget(model, 96), tokens(95)
    answer = target.verify(context, [(5, -1), (6, 0), (7, 1)], GREEDY)
    check(Answer(answer.tokens[:2], answer.probs[:2], answer.node_probs[:1]), reference, context, [(5, -1)])


def test_torch_noise_is_the_drafts_noise():
    ids = torch.arange(5000, dtype=torch.int32)
    from duochat.engine.sampling import key as key_of

    key = torch.tensor([key_of(123456789012345, 17)], dtype=torch.int32)
    assert np.allclose(choose._gumbel(ids, key).numpy(), gumbel(123456789012345, 17, np.arange(5000)), atol=2e-5)


def test_a_rows_noise_belongs_to_the_position_after_it():
    """Row i answers for the token at its position + 1: what autoregressive decoding would draw there."""
    reference, model = build()
    sampling, context, tree = Sampling(temperature=1.0, seed=5), tokens(12), [(3, -1), (4, 0)]
    answer = TorchTarget(model, 64).verify(context, tree, sampling)
    for path, token in zip(paths(tree), answer.tokens, strict=True):
        noise = gumbel(5, 12 + len(path), np.arange(VOCAB))
        assert token == int((plain(reference, context + path).numpy() + noise).argmax())


PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": ((9, 2.0),)}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "more",
    [{}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.0, "top_p": 0.99}, {"grammar": EveryThird(97)}],
    ids=["greedy", "noise", "nucleus", "grammar"],
)
def test_penalties_are_those_of_each_rows_path(padded, more):
    """With candidates that do not suffice too: the row is then sampled anew."""
    _, model = build()
    target, context, tree = TorchTarget(model, 64), tokens(12), [(3, -1), (4, 0), (3, 1), (9, -1)]
    target._shapes = Shapes(96, padded)
    sampling = Sampling(**more, **PENALTIES).after(context[:8])
    answer = target.verify(context, tree, sampling)
    alone = [target.verify(context + path, (), sampling) for path in paths(tree)]
    assert [*answer.tokens] == [one.tokens[0] for one in alone]
    assert answer.probs == pytest.approx([one.probs[0] for one in alone], abs=1e-4)
    for (token, parent), prob in zip(tree, answer.node_probs, strict=True):
        row = plain(build()[0], context + paths(tree)[parent + 1]).numpy()
        seen = penalised(row, changes(context, [paths(tree)[parent + 1]], sampling), 0)
        scaled = torch.from_numpy(seen / more.get("temperature", 1))
        assert more.get("top_p") or prob == pytest.approx(float(scaled.softmax(-1)[token]), abs=1e-4)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("grammar", [None, EveryThird(97)], ids=["free", "grammar"])
def test_every_decoder_gives_the_text_of_plain_decoding_with_penalties(temperature, grammar):
    target = TorchTarget(build()[1], 200)
    sampling, said, accepted = Sampling(temperature=temperature, seed=4, grammar=grammar, **PENALTIES), {}, 0
    for name in DECODERS:
        drafter = Guessing([*tokens(30), *said["autoregressive"]], VOCAB) if said else None
        rounds = [*decode(tokens(30), Request(sampling, 40, name), target, drafter, costs())]
        said[name] = [t for r in rounds for t in r.tokens]
        assert said[name] == said["autoregressive"]
        accepted += sum(len(r.accepted) for r in rounds)
    assert accepted > 10


def ask(rows: int, sampling: Sampling, token: int = 0) -> choose.Ask:
    from duochat.engine.sampling import key as key_of

    noise = torch.tensor([key_of(sampling.seed, row) for row in range(rows)], dtype=torch.int32)
    numbers = torch.frombuffer(bytearray(parameters(sampling)), dtype=torch.int32)
    return choose.Ask.of(torch.full((rows,), token), torch.arange(rows), noise, numbers)


def filtered(logits: np.ndarray, s: Sampling) -> np.ndarray:
    """The distribution that sampling should follow, written out plainly."""
    order = np.argsort(-logits, kind="stable")
    p = np.exp((logits - logits.max()) / s.temperature)[order]
    p[s.top_k or len(p) :] = 0
    p /= p.sum()
    p[np.cumsum(p) - p >= s.top_p] = 0
    p[p < s.min_p * p[0]] = 0
    out = np.zeros_like(p)
    out[order] = p / p.sum()
    return out


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8, "min_p": 0.1}],
    ids=str,
)
def test_chi_square(settings):
    sampling = Sampling(**{"temperature": 1.0, "seed": 11} | settings)
    logits = np.random.default_rng(0).normal(0, 1.5, 24).astype(np.float32)
    wanted, count = filtered(logits, sampling), 40_000
    way = choose.way(sampling)
    token, prob, own, complete = way(torch.from_numpy(logits).expand(count, -1), ask(count, sampling, token=2))
    seen = np.bincount(token.numpy(), minlength=24)
    live = wanted > 0
    assert seen[~live].sum() == 0
    statistic = ((seen - count * wanted)[live] ** 2 / (count * wanted[live])).sum()
    assert statistic < live.sum() + 4 * np.sqrt(2 * live.sum()) + 6
    assert np.allclose(prob.numpy(), wanted[token.numpy()], atol=1e-5)
    assert np.allclose(own.numpy(), wanted[2], atol=1e-5)
    assert complete.all()


@pytest.mark.parametrize("settings", [{"top_p": 0.99}, {"top_k": 300}, {"top_k": 300, "top_p": 0.9}], ids=str)
def test_candidates_that_do_not_suffice_are_noticed(settings):
    sampling = Sampling(temperature=1.0, **settings)
    logits = torch.zeros(2, 1000)
    assert not choose.nucleus(logits, ask(2, sampling))[3].any()
    assert choose.nucleus(logits * 0, ask(2, Sampling(temperature=1.0, top_k=200)))[3].all()
    _, prob, *_ = choose.everything(logits, ask(2, sampling))
    kept = 300 * sampling.top_p if sampling.top_k else 990
    assert prob.tolist() == pytest.approx([1 / kept] * 2, rel=0.01)


def test_memo_reuses_the_slots_of_dead_branches():
    memo = Memo(8)
    memo.commit([1, 2], memo.free(2))
    memo.remember([(3, -1), (4, -1), (5, 1)], memo.free(3))
    assert memo.match([1, 2, 4, 5, 9]) == 4
    assert memo.slots == [0, 1, 3, 4]
    assert memo.free(2) == [2, 5]
    assert memo.match([1, 7]) == 1
    assert memo.free(3) == [1, 2, 3]


def test_memo_knows_its_highest_and_lowest_slots():
    memo = Memo(100)
    assert (memo.highest, memo.free(2)) == (-1, [0, 1])
    memo.commit([1, 2, 3, 4], [5, 0, 70, 1])
    assert (memo.highest, memo.free(5)) == (70, [2, 3, 4, 6, 7])
    assert memo.match([1, 2, 3, 9, 9]) == 3  # slot 1 is free again
    assert (memo.highest, memo.free(2)) == (70, [1, 2])
    memo.remember([(8, -1), (9, 0), (8, 1)], [1, 2, 3])
    assert memo.match([1, 2, 3, 8, 9, 7]) == 5
    assert memo.slots == [5, 0, 70, 1, 2]
    assert memo.match([1, 2, 3, 8, 9, 8, 7]) == 5  # a tree lasts until the next match
    assert memo.match([1, 2]) == 1
    assert (memo.highest, memo.free(2)) == (5, [0, 1])
    with pytest.raises(AssertionError, match="smaller"):
        memo.free(101)


@pytest.mark.parametrize("width", [1, 4, 32, 64, 128])
def test_packed_rows_say_what_each_row_sees(width):
    """Against sets of slots, on random trees and memos."""
    rng, sampling = random.Random(width), Sampling(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, seed=2**40 + 1)
    for _ in range(20):
        memo, tail = Memo(256), tokens(rng.randrange(1, width + 1))
        memo.commit(held := tokens(rng.randrange(100)), rng.sample(range(192), len(held)))
        tree = random_tree(rng.randrange(width - len(tail) + 1), rng)
        rows = Rows(tail, tree, len(held), memo.free(len(tail) + len(tree)))
        kept = rng.choice([width, len(tree) + 1])
        at = packed(rows, shape := Shape(width, kept, 256), memo, sampling)
        pad, root = width - len(rows), width - len(tree) - 1
        seen = masks.visible(at["committed"], at["ancestors"].view(width, -1), at["slot"], shape.span)
        lines = [tail[: i + 1] for i in range(len(tail))] + [tail + path for path in paths(tree)[1:]]
        slots = [rows.slots[: i + 1] for i in range(len(tail))]
        for i, (_, parent) in enumerate(tree):
            slots.append([*slots[len(tail) + parent], rows.slots[len(tail) + i]])
        for row, (line, own) in enumerate(zip(lines, slots, strict=True), pad):
            assert set(seen[row].nonzero()[:, 0].tolist()) == {*memo.slots, *own}
            assert (at["token"][row], at["position"][row]) == (line[-1], len(held) + len(line) - 1)
            assert at["key"][row] == key(sampling.seed, len(held) + len(line))
        assert at["slot"].tolist() == [256] * pad + rows.slots
        assert (at["parent"][root + 1 :] + width - kept).tolist() == [root + 1 + parent for _, parent in tree]
        asked = choose.Ask.of(at["token"], at["parent"], at["key"], at["parameters"])
        assert [float(x) for x in asked[3:]] == pytest.approx([2, 3, 0.5, np.log(0.1)])


def packed(rows: Rows, shape: Shape, memo: Memo, sampling: Sampling, into=None) -> dict[str, torch.Tensor]:
    whole = torch.full((shape.length,), -1, dtype=torch.int32) if into is None else into
    rows.pack(shape, memo, sampling, memoryview(whole.numpy()).cast("B"))
    return {name: whole[section] for name, section in shape.sections().items()}


def test_the_smallest_temperature_can_be_packed():
    assert len(parameters(Sampling(temperature=5e-324))) == len(parameters(Sampling(temperature=1e-39))) == 16


@pytest.mark.parametrize("count", [96, 97])
def test_the_first_of_equal_tokens_wins(count):
    """Whether a row can be cut into stretches or not."""
    logits = torch.randint(3, (50, count), generator=torch.Generator().manual_seed(1)).float()
    token, prob, own, _ = choose.greedy(logits, ask(50, GREEDY, token=2))
    assert token.tolist() == logits.numpy().argmax(-1).tolist()
    assert torch.allclose(prob, logits.softmax(-1).amax(-1))
    assert torch.allclose(own, logits.softmax(-1)[:, 2])


@pytest.mark.slow
def test_compiled_masks_and_choices_are_the_plain_ones():
    """At any number of rows and slots, with two compilations of each: for one row, and for more."""
    torch._dynamo.reset()
    counters.clear()
    config, whole, scores = build("gemma2")[1].config, torch.zeros(4096, dtype=torch.int32), torch.zeros(64, 640)
    places = torch.randint(90, (4096,), dtype=torch.int32)
    mask, told = compiled.mask_builder(), compiled.teller()
    rest = {"full_attention": None, "sliding_attention": 9}, config, torch.float32
    rng = random.Random(3)
    for width, span in ((1, 256), (2, 512), (4, 4096), (16, 256), (32, 1024), (1, 1024), (64, 256)):
        memo = Memo(span)
        memo.commit(held := tokens(60), rng.sample(range(200), len(held)))
        rows = Rows([1], random_tree(width - 1, rng), 60, memo.free(width))
        at = packed(rows, Shape(width, width, span), memo, Sampling(temperature=0.7), whole)
        at["ancestors"] = at["ancestors"].view(width, -1)
        compiled.held_to_plain_masks(mask)(at, places[:span], *rest)
        question = choose.Ask.of(*(at[n] for n in ASKED))
        for way in (choose.greedy, choose.noise, choose.nucleus):
            compiled.held_to_plain_choices(told)(way, scores[:width].random_(5), question)
    assert counters["stats"]["unique_graphs"] == 6


def test_compiled_parts_are_held_to_the_plain_ones():
    at = {name: torch.zeros(2, dtype=torch.int32) for name in ("slot", "position")}
    at |= {"ancestors": torch.ones(2, 1, dtype=torch.int32), "committed": torch.ones(1, dtype=torch.int32)}
    given = at, torch.zeros(32, dtype=torch.int32), {"": None}, build()[1].config, torch.float32
    compiled.held_to_plain_masks(masks.build)(*given)
    with pytest.raises(AssertionError, match="other masks"):
        compiled.held_to_plain_masks(lambda *given: {"": masks.build(*given)[""] * 0})(*given)
    logits = torch.tensor([[0.0, 2.4, 2.0]])

    def last_of_equals(*given):
        told = choose.told(*given)
        told[0, 0] += (logits[0, 1] == logits[0, 2]).float()
        return told

    compiled.held_to_plain_choices(choose.told)(choose.greedy, logits, ask(1, GREEDY))
    assert logits[0, 1] == torch.tensor(2.4)
    with pytest.raises(AssertionError, match="other tokens"):
        compiled.held_to_plain_choices(last_of_equals)(choose.greedy, logits, ask(1, GREEDY))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_compiled_ends_serve_all_widths_and_spans(family):
    torch._dynamo.reset()
    reference, model = build(family)
    target, context, rng = TorchTarget(model, 400), tokens(60), random.Random(2)
    target._forward.fuse(backend="aot_eager")
    assert not target._forward.notes
    counters.clear()
    for size, more in ((0, 60), (3, 70), (9, 1), (0, 60), (0, 1), (5, 1), (0, 1)):
        tree = random_tree(size, rng)
        check(target.verify(context, tree, GREEDY), reference, context, tree)
        context = context + tokens(more, size)
    assert not counters["stats"]["unique_graphs"]


def test_ends_that_cannot_be_compiled_stay_plain(monkeypatch):
    reference, model = build()

    def broken(*_, **__):
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(compiled, "mask_builder", lambda: lambda *given: {"": masks.build(*given)[""] * 0})
    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    target = TorchTarget(model, 256)
    target._forward.fuse()
    failed = [note.partition(": ")[2] for note in target._forward.notes]
    assert failed == ["AssertionError: other masks"] + 3 * ["RuntimeError: no compiler here"]
    check(target.verify(tokens(9), [(1, -1)], GREEDY), reference, tokens(9), [(1, -1)])


@pytest.mark.parametrize("family", JOINED)
def test_joined_projections(family):
    reference, model = build(family)
    assert join(model) == 4
    target, context, tree = TorchTarget(model, 256), tokens(23), [(5, -1), (6, -1), (7, 0)]
    check(target.verify(context, tree, GREEDY), reference, context, tree)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_exact_attention(family):
    reference, model = build(family)
    target, context, tree = TorchTarget(model, 256, reproducible=True), tokens(23), [(5, -1), (6, -1), (7, 0)]
    check(target.verify(context, tree, GREEDY), reference, context, tree)


@pytest.mark.slow
def test_one_compilation_serves_all_layers_widths_and_spans():
    torch._dynamo.reset()
    counters.clear()
    reference, model = build(num_hidden_layers=5)
    join(model)
    target, context, rng = TorchTarget(model, 400), tokens(60), random.Random(2)
    target._forward.compile_layers(backend="aot_eager")
    for size, more in ((0, 60), (3, 70), (9, 1), (0, 60), (0, 1), (5, 1), (0, 1)):
        tree = random_tree(size, rng)
        check(target.verify(context, tree, GREEDY), reference, context, tree)
        context = context + tokens(more, size)
    assert counters["stats"]["unique_graphs"] == 2


def test_what_cannot_be_compiled_runs_plainly(monkeypatch):
    """And the report says why."""
    reference, model = build()

    def broken(*_, **__):
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(type(model.model.layers[0]), "compile", lambda self: setattr(self, "forward", broken))
    monkeypatch.setattr(compiled, "undo", lambda layers: [vars(wrapped.layer).pop("forward") for wrapped in layers])
    monkeypatch.setattr(forward.Forward, "fuse", lambda self: None)
    target = TorchTarget(model, 256, compile=True)
    assert not target.describe()["target_compiled_layers"]
    assert target.describe()["target_notes"] == ["Compiled layers failed: RuntimeError: no compiler here"]
    check(target.verify(tokens(9), [(1, -1)], GREEDY), reference, tokens(9), [(1, -1)])


def test_a_model_without_a_stack_of_layers_is_not_compiled(monkeypatch):
    monkeypatch.setattr(forward.Forward, "fuse", lambda self: None)
    told = TorchTarget(build("gpt2")[1], 256, compile=True).describe()
    assert told["target_notes"] == ["Compiled layers failed: TypeError: GPT2LMHeadModel is no plain stack of layers"]


def test_a_way_with_other_logits_is_refused(monkeypatch):
    _, model = build()
    monkeypatch.setattr(compiled, "compile_layers", lambda *_: model.lm_head.weight.data.normal_())
    monkeypatch.setattr(compiled, "undo", lambda layers: None)
    monkeypatch.setattr(forward.Forward, "fuse", lambda self: None)
    target = TorchTarget(model, 256, compile=True)
    assert not target.describe()["target_compiled_layers"]
    assert "other logits" in target.describe()["target_notes"][0]


def test_the_order_of_slots_is_lost_in_exact_attention():
    """Rounded to bfloat16, it gives the same bits wherever keys lie; the other functions do not."""
    torch.manual_seed(0)
    query = torch.randn(1, 4, 64, 64).bfloat16()
    key, value = torch.randn(2, 1, 2, 700, 64).bfloat16()
    order, mask = torch.randperm(700), torch.zeros(1, 1, 128, 700)
    for function, same in ((exactly, True), (attend, False)):
        straight, _ = function(None, query, key, value, mask)
        moved, _ = function(None, query, key[:, :, order], value[:, :, order], mask)
        assert torch.equal(straight, moved) == same


def test_reproducible_is_the_same_to_the_last_bit():
    """In bfloat16, whatever was drafted before: the same tokens with the same probabilities."""
    _, model = build(num_hidden_layers=3)
    model = model.to(torch.bfloat16)
    rng, seen = random.Random(4), []
    for decoder in ("plain", "drafted"):
        target, context, rows = TorchTarget(model, 300, reproducible=True), tokens(50), []
        while len(context) < 130:
            size = rng.randrange(target.most_nodes + 1) if decoder == "drafted" else 0
            tree = random_tree(size, rng)
            if decoder == "drafted":  # a path that will be accepted, somewhere in the tree
                tree += [(seen[len(context) - 50][0], -1)]
                tree = tree[-target.most_nodes :] if len(tree) <= target.most_nodes else [tree[-1]]
            answer = target.verify(context, tree, GREEDY)
            node = -1
            while True:
                row = (answer.tokens[node + 1], answer.probs[node + 1])
                rows.append(row)
                context = [*context, row[0]]
                node = next((i for i, edge in enumerate(tree) if edge == (row[0], node)), None)
                if node is None:
                    break
        seen = rows[:80] if decoder == "plain" else seen
    assert rows[:80] == seen


ROPES = {
    "phi3": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + 3 * i for i in range(8)],
        "original_max_position_embeddings": 64,
        "rope_theta": 1e4,
    },
    "llama": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
}
FAMILIES_BY_ROPE = {
    "phi3": ("Phi3", {"original_max_position_embeddings": 64, "pad_token_id": 0}),
    "llama": ("Llama", {}),
}


@pytest.mark.parametrize("family", ROPES)
def test_positions_do_not_follow_the_longest_of_a_forward(family, monkeypatch):
    """Drafted rows beyond the switch left keys of before it in the cache: decoders differed from plain decoding."""
    monkeypatch.setitem(FAMILIES, family, FAMILIES_BY_ROPE[family])
    _, model = build(family, rope_parameters=ROPES[family], max_position_embeddings=128)
    target, other, context = TorchTarget(model, 128), TorchTarget(model, 128), tokens(50)
    for chain in range(70):
        tree = [(i % VOCAB, i - 1) for i in range(chain % 30)]
        drafted = target.verify(context, tree, GREEDY)
        other._memo = Memo(other._memo.capacity)
        alone = other.verify(context, [], GREEDY)
        assert (drafted.tokens[0], drafted.probs[0]) == (alone.tokens[0], pytest.approx(alone.probs[0], abs=1e-4))
        context = [*context, alone.tokens[0]]
    assert len(context) == 120
    assert target.describe()["target_notes"] == [
        f"Positions ({ROPES[family]['rope_type']}) are those of texts of 128 tokens."
    ]


@pytest.mark.parametrize("length", [64, 128])
def test_long_positions_are_transformers_own(length, monkeypatch):
    """Up to the switch with a context up to it, beyond it with a longer one."""
    monkeypatch.setitem(FAMILIES, "phi3", FAMILIES_BY_ROPE["phi3"])
    reference, model = build("phi3", rope_parameters=ROPES["phi3"], max_position_embeddings=128)
    target, context, tree = TorchTarget(model, length), tokens(length - 20), [(5, -1), (6, 0), (7, 0)]
    check(target.verify(context, tree, GREEDY), reference, context, tree)


def test_an_argument_of_attention_that_is_not_known_is_refused(monkeypatch):
    """It was swallowed, and the text was that of another model."""
    _, model = build()
    layer = type(model.model.layers[0].self_attn)
    usual = layer.forward
    monkeypatch.setattr(layer, "forward", lambda *given, **more: usual(*given, **more, position_bias=torch.ones(1)))
    with pytest.raises(DuoChatError, match=r"cannot run llama models .*position_bias is not known"):
        TorchTarget(model, 128)


def test_layers_that_do_not_attend_by_our_function_are_refused(monkeypatch):
    """They may place keys by their slots, which bfloat16 would hide."""
    _, model = build()
    layer = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(layer, "forward", lambda self, hidden_states, **more: (hidden_states, None))
    with pytest.raises(DuoChatError, match="attend in a way of their own"):
        TorchTarget(model, 128)
