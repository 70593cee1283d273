"""The draft lane on a tiny random model: every branch must give the logits of a run of its own."""

import os
import threading
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from duochat import DuoChatError
from duochat.engine import choosing
from duochat.engine.choosing import choose
from duochat.engine.lanes import Cancelled, never
from duochat.engine.llama import drafter as drafter_module
from duochat.engine.llama import library as llama_module
from duochat.engine.llama.drafter import LlamaDrafter
from duochat.engine.llama.library import Llama
from duochat.engine.sampling import Sampling, gumbel
from duochat.engine.tree import Node
from duochat.models.trim import RANKING

gguf = pytest.importorskip("gguf")

VOCABULARY, WIDTH, LAYERS, HEADS, HIDDEN = 300, 64, 2, 4, 96
GREEDY = Sampling()
TOLERANCE = 1e-2  # of logits with a spread of 1.5, the cache being in 16 bits
FUSED_TOLERANCE = 5e-2  # fused attention sums in 16 bits too; a wrong branch is off by the whole spread


def write_tiny_model(path: Path, architecture: str = "llama", ranking: list[int] | None = None) -> Path:
    """A random fp32 model of two layers, without a tokenizer."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("none")
    if ranking:
        writer.add_array(RANKING, ranking)

    def add(name: str, *shape: int) -> None:
        norm = len(shape) == 1
        tensor = np.ones(shape) if norm else rng.standard_normal(shape) * 1.5 / shape[1] ** 0.5
        writer.add_tensor(f"{name}.weight", tensor.astype(np.float32))

    add("token_embd", VOCABULARY, WIDTH)
    add("output", VOCABULARY, WIDTH)
    add("output_norm", WIDTH)
    for layer in (f"blk.{i}." for i in range(LAYERS)):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(layer + name, WIDTH, WIDTH)
        add(layer + "ffn_gate", HIDDEN, WIDTH)
        add(layer + "ffn_up", HIDDEN, WIDTH)
        add(layer + "ffn_down", WIDTH, HIDDEN)
        add(layer + "attn_norm", WIDTH)
        add(layer + "ffn_norm", WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(params=[10**6, 1], ids=["plain", "fused"])
def attention(request, monkeypatch):
    """As on a machine with few cores, and with many."""
    monkeypatch.setattr(llama_module, "MANY_CORES", request.param)


@pytest.fixture
def draft(tiny, attention):
    lane = LlamaDrafter(tiny, context_length=256, threads=1)
    yield lane
    lane.close()


class Alone:
    """The same model, which runs each path by itself from an empty cache."""

    def __init__(self, path: Path) -> None:
        self.llama = Llama(path, 512, 1)

    def logits(self, tokens: list[int]) -> np.ndarray:
        self.llama.drop(0, 0)
        n = len(tokens)
        self.llama.decode(tokens, range(n), [(0,)] * n, [n - 1])
        return self.llama.logits(1)[0].copy()


@pytest.fixture(scope="session")
def alone(tiny) -> Alone:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_module, "MANY_CORES", 10**6)
        return Alone(tiny)


@pytest.fixture
def rows(monkeypatch) -> dict[int, np.ndarray]:
    """The logits that the drafter chose from, by the id of the Candidates that came out of them."""
    seen = {}

    def spy(logits, *rest):
        candidates = choose(logits, *rest)
        seen[id(candidates)] = logits.copy(), candidates
        return candidates

    monkeypatch.setattr(drafter_module, "choose", spy)
    return seen


def root_of(context: list[int]) -> Node:
    return Node(context[-1], None, len(context) - 1)


def grow(parent: Node, token: int) -> Node:
    child = parent.child(token)
    if child is None:
        child = Node(token, parent, parent.position + 1)
        parent.children.append(child)
    return child


def path_of(context: list[int], node: Node) -> list[int]:
    tail = []
    while node.position >= len(context):
        tail.append(node.token)
        node = node.parent
    return context + tail[::-1]


def test_of_a_drafts_top_p_less_is_cut(draft, rows):
    context = [5, 17, 99, 3]
    default, low = Sampling(), Sampling(temperature=1.0, top_p=0.6, seed=3)
    for asked, used in ((default, 1 - (1 - default.top_p) / 4), (low, 0.9)):
        (found,), _ = draft.expand(context, [root_of(context)], asked, never)
        assert found == choose(rows[id(found)][0], len(context), replace(asked, top_p=used), 8, None)


def cells(draft) -> int:
    """Cells that hold a token."""
    return len(draft._cache.tokens) + draft._cache._grown


def sequences(draft) -> int:
    """Sequences that hold a branch."""
    return len(draft._cache._tips)


def tolerance() -> float:
    return FUSED_TOLERANCE if llama_module.MANY_CORES == 1 else TOLERANCE


def check(draft, alone, rows, context, nodes, sampling=GREEDY):
    """Expand, and hold each node's logits to a run of its own."""
    answer, _ = draft.expand(context, nodes, sampling, never)
    assert len(answer) == len(nodes)
    for node, candidates in zip(nodes, answer, strict=True):
        expected = alone.logits(path_of(context, node))
        np.testing.assert_allclose(rows[id(candidates)][0], expected, atol=tolerance())


def recorded(draft, monkeypatch) -> list[int]:
    """The tokens that the drafter decodes from now on."""
    decoded: list[int] = []
    run = draft._llama.decode
    monkeypatch.setattr(draft._llama, "decode", lambda tokens, *a, **k: (decoded.extend(tokens), run(tokens, *a, **k)))
    return decoded


def test_branches_equal_separate_runs(draft, alone, rows):
    context = [5, 17, 99, 3]
    root = root_of(context)
    check(draft, alone, rows, context, [root])
    first = [grow(root, t) for t in (1, 2, 3)]
    check(draft, alone, rows, context, first)
    fork = [grow(first[0], 8), grow(first[0], 9), grow(first[2], 8)]
    check(draft, alone, rows, context, fork)
    check(draft, alone, rows, context, [grow(root, 4), grow(fork[1], 7)])


def test_uncached_ancestors_are_decoded_in_the_same_call(draft, alone, rows):
    context = [5, 17, 99, 3]
    chain = grow(grow(grow(root_of(context), 1), 2), 3)
    check(draft, alone, rows, context, [grow(chain, 4), grow(chain, 5), grow(chain.parent, 6), chain.parent])
    check(draft, alone, rows, context, [chain])


def test_what_the_tree_holds_is_not_decoded_again(draft, monkeypatch):
    """A re-rooting along cached nodes keeps their cells and those of the living branches, and frees the rest."""
    context = [5, 17, 99, 3]
    root = root_of(context)
    draft.expand(context, [root], GREEDY, never)
    a, b = grow(root, 1), grow(root, 2)
    draft.expand(context, [a, b, grow(a, 3), grow(a, 4), grow(b, 5)], GREEDY, never)
    monkeypatch.setattr(draft._llama, "decode", lambda *_, **__: pytest.fail("decoded again"))
    draft.expand([*context, 1], [a, *a.children], GREEDY, never)
    assert cells(draft) == 5 + 2
    assert sequences(draft) == 2


def test_random_trees_equal_separate_runs(draft, alone, rows):
    rng = np.random.default_rng(1)
    context = rng.integers(VOCABULARY, size=20).tolist()
    root = root_of(context)
    sampling = GREEDY
    for step in range(150):
        tree = [root]
        for node in tree:
            tree.extend(node.children)
        parents = rng.choice(len(tree), size=min(len(tree), 5), replace=False)
        nodes = {tree[i] if rng.random() < 0.2 else grow(tree[i], int(rng.integers(4))) for i in parents}
        nodes |= {grow(grow(grow(tree[-1], 1), 2), int(rng.integers(3)))} if rng.random() < 0.2 else set()
        check(draft, alone, rows, context, [*nodes], sampling)
        event = rng.random()
        if event < 0.3:
            while root.children and rng.random() < 0.7:
                root = root.children[rng.integers(len(root.children))]
                context = [*context, root.token]
            if rng.random() < 0.7:
                root = grow(root, int(rng.integers(VOCABULARY)))
                context = [*context, root.token]
        elif event < 0.36 or len(context) > 180:
            context = context[: rng.integers(1, 20)] + rng.integers(VOCABULARY, size=rng.integers(90)).tolist()
            root = root_of(context)
            sampling = Sampling(temperature=float(step % 2), seed=step)
        living = [root]
        for node in living:
            living.extend(node.children)
        draft.expand(context, [root], sampling, never)
        assert cells(draft) <= len(context) + len(living) - 1
        assert sequences(draft) <= len(living)


def cells_in_cache(draft) -> set[int]:
    """Sequences of llama.cpp's own cache that hold more than their share of the trunk."""
    import llama_cpp

    count = draft._llama.sequences
    ends = [llama_cpp.llama_memory_seq_pos_max(draft._llama._memory, s) + 1 for s in range(count)]
    return {s for s, end in enumerate(ends) if end > draft._cache._shared[s] and s}


def test_sequences_do_not_leak(draft):
    rng = np.random.default_rng(2)
    context = [1, 2, 3]
    for _ in range(100):
        root = root_of(context)
        nodes = [grow(root, int(t)) for t in rng.integers(VOCABULARY, size=8)]
        draft.expand(context, [*{*nodes}], GREEDY, never)
        context = [*context, nodes[0].token, 7]
    draft.expand(context, [root_of(context)], GREEDY, never)
    assert cells(draft) == len(context)
    assert cells_in_cache(draft) == set(draft._cache._tips)
    assert sequences(draft) <= 1


def test_more_branches_than_sequences_begin_the_tree_anew(draft, alone, rows):
    context = [4, 5, 6]
    root = root_of(context)
    nodes = [grow(root, t) for t in range(VOCABULARY - 1)]
    for start in range(0, len(nodes), 20):
        found, _ = draft.expand(context, nodes[start : start + 20], GREEDY, never)
        assert sequences(draft) == start % 120 + len(found)
    check(draft, alone, rows, context, [grow(node, 1) for node in nodes[:20]])
    check(draft, alone, rows, context, [grow(grow(node, 1), 2) for node in nodes[:280:20]])


def test_the_same_node_at_many_settings_takes_no_room(draft, alone, rows):
    context = [4, 5, 6]
    root = root_of(context)
    child = grow(root, 1)
    for seed in range(150):
        draft.expand(context, [root, child], Sampling(temperature=1.0, seed=seed), never)
    assert (cells(draft), sequences(draft)) == (4, 1)
    check(draft, alone, rows, context, [root, child, grow(child, 2)], Sampling(temperature=1.0))


def test_deep_trees_are_begun_anew_when_cells_run_out(draft, alone, rows):
    context = [4, 5, 6]
    root = root_of(context)
    for first in range(24):
        tip = grow(root, first)
        for depth in range(60):
            draft.expand(context, [tip], GREEDY, never)
            tip = grow(tip, depth)
        assert cells(draft) <= 3 + 1024
    check(draft, alone, rows, context, [tip, grow(grow(root, 0), 5)])


def test_next_turn_reuses_the_cache(draft, monkeypatch):
    context = list(range(100))
    draft.expand(context, [root_of(context)], GREEDY, never)
    decoded = recorded(draft, monkeypatch)
    longer = [*context, 1, 2, 3]
    draft.expand(longer, [root_of(longer)], GREEDY, never)
    assert decoded == [1, 2, 3]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, seed=5)], ids=["greedy", "T=1"])
def test_of_a_long_context_both_ends_are_read(draft, alone, rows, monkeypatch, sampling):
    monkeypatch.setattr(LlamaDrafter, "window", 100)
    monkeypatch.setattr("duochat.engine.tree_cache.LONGEST", 2)
    context = [int(t) for t in np.random.default_rng(4).integers(VOCABULARY, size=250)]
    decoded = recorded(draft, monkeypatch)

    def ask(length, read):
        del decoded[:]
        root = root_of(context[:length])
        found, _ = draft.expand(context[:length], [root, grow(root, 7)], sampling, never)
        assert decoded == [*read, 7]
        return found

    ends = [*context[:50], *context[150:200]]
    found = ask(200, ends)
    for tokens, candidates in zip((ends, [*ends, 7]), found, strict=True):
        position = 100 + len(tokens)
        logits = rows[id(candidates)][0]
        assert np.allclose(logits, alone.logits(tokens), atol=FUSED_TOLERANCE)
        assert candidates == choose(logits, position, sampling, 8, None)
    ask(230, context[200:230])  # it goes on from what is cached
    ask(40, context[:40])  # another conversation
    ask(250, [*context[:50], *context[200:]])  # a long message
    context += context[:200]
    for length in range(260, 351, 10):  # it goes on for two windows
        ask(length, context[length - 10 : length])
    ask(360, [*context[:50], *context[310:360]])


def test_cancelled_prompt_goes_on_from_where_it_was(draft, alone, rows):
    context = [int(t) for t in np.random.default_rng(3).integers(VOCABULARY, size=200)]
    asked = iter([False, False, *[False] * 20])

    def cancelled() -> bool:
        return next(asked, True)

    with pytest.raises(Cancelled):
        draft.expand(context, [root_of(context)], GREEDY, cancelled)
    assert cells(draft) % 64 == 0
    check(draft, alone, rows, context, [root_of(context)])


@pytest.mark.parametrize("when", ["continue", "fork", "again"])
def test_interrupted_batch_leaves_the_cache_sound(draft, alone, rows, monkeypatch, when):
    context = [5, 17, 99, 3]
    root = root_of(context)
    a = grow(root, 1)
    draft.expand(context, [root, a], GREEDY, never)
    nodes = {"continue": [grow(a, 2)], "fork": [grow(root, 2), grow(a, 2), grow(a, 3)], "again": [root, a]}[when]
    sampling = Sampling(temperature=1) if when == "again" else GREEDY
    used = (3, 0) if when == "again" else (cells(draft), sequences(draft))  # other settings, other tree
    run = draft._llama.decode
    monkeypatch.setattr(draft._llama, "decode", lambda *x, **k: (draft.interrupt(), run(*x, **k)))
    with pytest.raises(Cancelled):
        draft.expand(context, nodes, sampling, never)
    assert (cells(draft), sequences(draft)) == used
    monkeypatch.setattr(draft._llama, "decode", run)
    check(draft, alone, rows, context, nodes, sampling)
    check(draft, alone, rows, context, [grow(n, 4) for n in nodes], sampling)


def test_a_long_batch_asks_whether_it_is_cancelled(draft, alone, rows):
    """Up to 64 prompt tokens are decoded with the root: too long to wait for when the user stops."""
    context = list(range(60))
    asked = iter([False, False])
    with pytest.raises(Cancelled):
        draft.expand(context, [root_of(context)], GREEDY, lambda: next(asked, True))
    assert cells(draft) == 0
    check(draft, alone, rows, context, [root_of(context)])


def test_a_prompt_is_read_with_threads_of_its_own(draft, monkeypatch):
    used = []
    monkeypatch.setattr(draft._llama, "_use", used.append)
    draft.set_threads(1, reading=3)
    context = [token % VOCABULARY for token in range(200)]
    draft.expand(context, [Node(context[-1], None, 199)], GREEDY, never)
    assert used == [3, 3, 3, 1]  # three chunks, and the rest with the root
    assert draft.measure_reading([2, 1]).keys() == {2, 1}
    assert 2 in used


def test_interrupt_comes_from_another_thread(draft):
    """The flag is read by compiled code while this thread waits in it; an old interrupt does not count."""
    context = list(range(200))
    draft.interrupt()
    draft.expand(context[:150], [root_of(context[:150])], GREEDY, never)
    nodes = [grow(root_of(context), t) for t in range(16)]
    stop = threading.Event()

    def keep_interrupting() -> None:
        while not stop.wait(1e-4):
            draft.interrupt()

    def keep_expanding() -> None:
        for _ in range(1000):
            draft.expand(context, nodes, GREEDY, never)
            draft._cache.forget()

    thread = threading.Thread(target=keep_interrupting)
    thread.start()
    try:
        with pytest.raises(Cancelled):
            keep_expanding()
    finally:
        stop.set()
        thread.join()


def test_any_sequence_of_tokens_is_a_context(draft, alone, rows):
    for context in [(1, 2, 3), (1, 2, 3, 4), (1, 2), (1, 5), (1, 2, 3), (1, 2)]:
        answer, _ = draft.expand(context, [root_of(list(context))], GREEDY, never)
        np.testing.assert_allclose(rows[id(answer[0])][0], alone.logits(list(context)), atol=tolerance())
        assert cells(draft) == len(context)


def test_cancelled_before_the_call(draft):
    with pytest.raises(Cancelled):
        draft.expand([1], [root_of([1])], GREEDY, lambda: True)


def reference(logits: np.ndarray, position: int, s: Sampling) -> tuple[list[int], np.ndarray]:
    """Sort everything, filter, add noise: the plain way."""
    tokens = np.arange(len(logits))
    if s.temperature == 0:
        scores = logits.astype(np.float64)
    else:
        scores = logits.astype(np.float64) / s.temperature
        order = np.argsort(-scores)
        order = order[: s.top_k or None]
        p = np.exp(scores[order] - scores[order[0]])
        p /= p.sum()
        order = order[(np.cumsum(p) - p < s.top_p) & (p >= s.min_p * p[0])]
        tokens = order
        scores = scores[order] + gumbel(s.seed, position, tokens)
    p = np.exp(scores - scores.max())
    p /= p.sum()
    best = np.argsort(-scores)[:8]
    return tokens[best].tolist(), p[best]


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=0.7, top_k=5),
        Sampling(temperature=1.2, top_p=0.8, seed=9),
        Sampling(temperature=1.0, min_p=0.1),
        Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.02, seed=1),
        Sampling(temperature=1.0, top_k=1),
    ],
)
def test_candidates_equal_the_plain_way(sampling, monkeypatch):
    """With the cut out of reach; the cut itself trades exactness for speed."""
    monkeypatch.setattr(choosing, "REACH", np.float32(99))
    monkeypatch.setattr(choosing, "NOISY_REACH", np.float32(99))
    monkeypatch.setattr(choosing, "MOST", 2000)
    rng = np.random.default_rng(4)
    for position in range(50):
        logits = (rng.standard_normal(2000) * 3).astype(np.float32)
        tokens, probs = reference(logits, position, sampling)
        got = choose(logits, position, sampling, 8)
        assert list(got.tokens) == tokens
        np.testing.assert_allclose(got.probs, probs, rtol=1e-3)


def test_fewer_tokens_than_candidates():
    got = choose(np.float32([0, 50, 0]), 1, GREEDY, 8)
    assert got.tokens == (1,)
    assert got.probs == (1.0,)


@pytest.mark.parametrize(
    ("content", "fault"),
    [(None, "No such file"), (b"", "not a GGUF"), (b"no model at all", "not a GGUF"), (b"GGUF\x03\x00", "cut short")],
)
def test_a_file_that_is_no_model(tmp_path, content, fault):
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DuoChatError, match=fault):
        LlamaDrafter(path, 64, 1)


def test_a_truncated_model(tiny, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny.read_bytes()[:-1000])
    with pytest.raises(DuoChatError, match="cut short"):
        LlamaDrafter(path, 64, 1)


def test_an_unknown_architecture(tmp_path):
    path = write_tiny_model(tmp_path / "alien.gguf", "alien")
    with pytest.raises(DuoChatError, match="architecture: 'alien'"):
        LlamaDrafter(path, 64, 1)


def test_a_conversation_beyond_the_cache(draft, monkeypatch):
    monkeypatch.setattr(LlamaDrafter, "window", 10**6)
    context = [1] * (256 + 1024 + 1)
    with pytest.raises(DuoChatError, match="context_length"):
        draft.expand(context, [root_of(context)], GREEDY, never)
    draft.expand(context[:9], [root_of(context[:9])], GREEDY, never)
    assert cells(draft) == 9


def test_a_cache_larger_than_the_memory(tiny):
    with pytest.raises(DuoChatError, match="context_length"):
        LlamaDrafter(tiny, 10**11, 1)


def test_a_model_larger_than_the_memory(tiny, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(DuoChatError, match="smaller draft"):
        LlamaDrafter(tiny, 64, 1)


def test_a_token_beyond_the_vocabulary(draft, alone, rows):
    with pytest.raises(DuoChatError, match="token"):
        draft.expand([1, VOCABULARY], [root_of([1, VOCABULARY])], GREEDY, never)
    check(draft, alone, rows, [1, 2], [root_of([1, 2])])


def test_measure_gives_a_time_for_each_size(draft):
    times = draft.measure([1, 2, 4], threads=1, repeats=3)
    assert list(times) == [1, 2, 4]
    assert all(0 < t < 1 for t in times.values())


def test_other_work_meets_all_sizes_alike(draft, monkeypatch):
    calls = count()
    monkeypatch.setattr(draft, "_seconds", lambda context, nodes: len(nodes) + 100 * (8 <= next(calls) < 16))
    assert draft.measure([1, 2, 4, 8], threads=1) == {1: 1, 2: 2, 4: 4, 8: 8}


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The default draft, or the file that DUOCHAT_TEST_MODEL names."""
    if path := os.environ.get("DUOCHAT_TEST_MODEL"):
        return Path(path)
    from duochat.config import load
    from duochat.models.fetch import fetch

    return fetch(load().draft)


@pytest.fixture(scope="module")
def real(real_model):
    lane = LlamaDrafter(real_model, context_length=512, threads=1)
    yield lane
    lane.close()


@pytest.mark.real
class TestRealModel:
    def test_trees_equal_separate_runs(self, real, real_model, rows):
        alone = Alone(real_model)
        context = list(range(1000, 1040))
        root = root_of(context)
        candidates = real.expand(context, [root], GREEDY, never)[0][0]
        first = [grow(root, token) for token in candidates.tokens[:3]]
        second = [grow(node, token) for node in first for token in (7, 8)]
        answer, _ = real.expand(context, [*first[:2], *second], GREEDY, never)
        for node, found in zip([*first[:2], *second], answer, strict=True):
            logits, expected = rows[id(found)][0], alone.logits(path_of(context, node))[real._names]
            assert np.abs(logits - expected).max() < 0.02 * expected.std()
            assert found.tokens[0] == real._names[expected.argmax()]

    def test_the_cut_costs_little(self, real, rows):
        """On its own text the best token with noise is nearly always the right one; probabilities nearly so."""
        context, same = [1], 0
        for _ in range(48):
            sampling = Sampling(temperature=1.0, seed=5)
            answer, _ = real.expand(context, [root_of(context)], sampling, never)
            kept, found = rows[id(answer[0])]
            logits = np.full(49152, -99, np.float32)  # the tokens that this draft does not propose
            logits[real._names] = kept
            tokens, _ = reference(logits, len(context), sampling)
            plain, exact = choose(logits, len(context), GREEDY, 8), reference(logits, len(context), GREEDY)
            same += found.tokens[0] == tokens[0]
            assert plain.tokens == tuple(exact[0][: len(plain.tokens)])
            np.testing.assert_allclose(plain.probs[0], exact[1][0], rtol=0.12)
            context = [*context, tokens[0]]
        assert same >= 42

    def test_measure(self, real):
        times = real.measure([1, 4], threads=1, repeats=3)
        assert 0 < times[1] < times[4] < 4 * times[1] * 3
