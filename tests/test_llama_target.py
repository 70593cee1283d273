"""The target lanes on a GGUF file: every node of a tree must get the answer of a run of its own, to the bit."""

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fakes import EveryThird, Guessing, costs
from toy_models import write_gguf

from duochat import DuoChatError
from duochat.engine import choosing
from duochat.engine.decoding import Request, decode
from duochat.engine.lanes import Cancelled
from duochat.engine.llama import devices, loading, widths
from duochat.engine.llama.loading import Place, place
from duochat.engine.llama.target import LlamaTarget
from duochat.engine.native import NativeTarget, unfit
from duochat.engine.sampling import Sampling
from duochat.models import gguf as gguf_header

llama_cpp = pytest.importorskip("llama_cpp")
gguf = pytest.importorskip("gguf")

GREEDY = Sampling()
SETTINGS = [GREEDY, Sampling(temperature=0.7, seed=3), Sampling(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01)]
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": ((9, 1.5),)}
SETTINGS += [Sampling(**PENALTIES), Sampling(temperature=0.7, top_p=0.9, seed=3, **PENALTIES)]
SETTINGS += [Sampling(grammar=EveryThird(600)), Sampling(1.0, top_k=40, grammar=EveryThird(600), **PENALTIES)]
FAMILIES = ["llama", "qwen3", "gemma3", "qwen3moe"]
NATIVE = ["Q4_0", "Q4_1", "Q8_0"]  # of llama: the lane in C


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("targets")
    made = {name: write_gguf(folder / f"{name}.gguf", name) for name in [*FAMILIES, "mamba"]}
    kinds = {"half": "F16"} | {kind: kind for kind in NATIVE}
    quantized = {name: gguf.GGMLQuantizationType[kind] for name, kind in kinds.items()}
    return made | {name: write_gguf(folder / f"{name}.gguf", quantized=kind) for name, kind in quantized.items()}


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache, monkeypatch):
    monkeypatch.setenv("DUOCHAT_CACHE", str(cache))


@pytest.fixture
def load(files, request):
    def loaded(name: str, **options) -> LlamaTarget | NativeTarget:
        assert name not in NATIVE or not unfit(files[name])
        make = NativeTarget if name in NATIVE else LlamaTarget.load
        target = make(files[name], **{"context_length": 250, "threads": 1} | options)
        target.every = True
        request.addfinalizer(target.close)
        return target

    return loaded


class Alone:
    """The same model, which reads each context from the start."""

    def __init__(self, target: LlamaTarget | NativeTarget) -> None:
        self.target = target

    def __call__(self, context, sampling=GREEDY):
        self.target.verify([1], (), GREEDY)  # nothing of the context is held any more
        answer = self.target.verify(context, (), sampling)
        return answer.tokens[0], answer.probs[0]


@pytest.fixture
def alone(load):
    return lambda name, **options: Alone(load(name, **options))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 600, size=length).tolist()


def paths(context, tree):
    found = [list(context)]
    for token, parent in tree:
        found.append([*found[parent + 1], token])
    return found


def check(target, alone, context, tree, sampling=GREEDY):
    answer = target.verify(context, tree, sampling)
    assert list(zip(answer.tokens, answer.probs, strict=True)) == [alone(p, sampling) for p in paths(context, tree)]
    return answer


def grown(rng: random.Random, rights: list[int], size: int) -> list[tuple[int, int]]:
    """A random tree that holds some of the right tokens, at random places among their siblings."""
    tree: list[tuple[int, int]] = []
    on_path, last = {-1: 0}, -1
    while len(tree) < size:
        parent = rng.choice([last, rng.randrange(-1, len(tree)) if tree else -1])
        taken = {token for token, above in tree if above == parent}
        right = rights[on_path[parent]] if parent in on_path and on_path[parent] < len(rights) else None
        token = right if right is not None and right not in taken and rng.random() < 0.5 else rng.randrange(600)
        if token in taken:
            continue
        tree.append((token, parent))
        if token == right:
            on_path[len(tree) - 1] = on_path[parent] + 1
            last = len(tree) - 1
    return tree


def accepted(answer, tree) -> list[int]:
    """The tokens that a round emits."""
    node, tokens = -1, [answer.tokens[0]]
    while (child := next((i for i, edge in enumerate(tree) if edge == (tokens[-1], node)), None)) is not None:
        node = child
        tokens.append(answer.tokens[node + 1])
    return tokens


@pytest.mark.parametrize("family", [*FAMILIES, *NATIVE])
def test_trees_equal_separate_runs(load, alone, monkeypatch, family):
    """Rounds as in a chat: branches off the likeliest are accepted too, contexts change, forwards are stopped, the
    number of threads changes, and whether forwards are filled up."""
    target, alone = load(family), alone(family)
    assert target.describe()["target_exact"]
    rng = random.Random(1)
    context = prompt(20)
    for step in range(25):
        sampling = SETTINGS[step // 3 % 3]
        rights = []
        for _ in range(3):
            rights.append(alone([*context, *rights], sampling)[0])
        tree = grown(rng, rights, rng.randrange(20 if family in NATIVE else 9))
        target.set_threads(1 + step % 2)
        target.fill = step % 4 // 2 * min(12, target.most_nodes + 1)
        if step % 7 == 6:
            with monkeypatch.context() as patch:
                if family in FAMILIES:
                    patch.setattr(target._llama, "arm", target._llama.interrupt)
                with pytest.raises(Cancelled):
                    target.verify(context, tree, sampling, lambda: family in NATIVE)
        context = [*context, *accepted(check(target, alone, context, tree, sampling), tree)]
        if rng.random() < 0.15 or len(context) > 100:
            context = context[: rng.randrange(1, 40)] + prompt(rng.randrange(1, 30), step)


def test_forwards_that_are_filled_up_have_one_shape(load, monkeypatch):
    """As many rows and as many sequences: then llama.cpp launches the graph of the forward before."""
    monkeypatch.setattr(loading, "place", lambda *asked: Place(99, "a GPU", ""))
    target, context, shapes = load("llama"), prompt(20), []
    batch = target._llama._batch
    monkeypatch.setattr(batch, "fill", lambda *told, fill=batch.fill: (shapes.append(told), fill(*told)))
    target.verify(context, (), GREEDY)
    target.fill, rng = 8, random.Random(3)
    for size in (1, 7, 3, 2, 5, 6, 4):
        context.append(size)
        target.verify(context, grown(rng, [], size), GREEDY)
    asked = [(len(tokens), len({seq for own in places for seq in own})) for tokens, _, places, _ in shapes]
    assert asked[1:] == [(8, 8)] * 7, asked  # the first one reads the prompt
    target.verify([*context, 9], (), GREEDY)  # nothing to verify: while the draft works, this round too
    assert len(shapes[-1][0]) == 8
    target.verify([*context, 9, *prompt(3)], (), GREEDY)
    assert len(shapes[-1][0]) == 3  # the reading of a prompt is not filled up


def test_beside_a_gpu_trees_equal_separate_runs(tmp_path, monkeypatch):
    """Branches that ended are dropped after the next forward has begun, and rows fill it up: nobody sees either."""
    monkeypatch.setattr(loading, "place", lambda *asked: Place(99, "a GPU", ""))
    file = write_gguf(tmp_path / "float.gguf", quantized=gguf.GGMLQuantizationType.F32)  # nothing is rounded to less
    target, single = (LlamaTarget.load(file, 128, cache_type="f32", flash_attention=False) for _ in range(2))
    target.every, single, rng, context = True, Alone(single), random.Random(4), prompt(20)
    for step in range(60):
        target.fill = rng.choice([0, 4, 8, 8, 32])
        rights = [single(context)[0]]
        rights.append(single([*context, *rights])[0])
        tree = grown(rng, rights, rng.randrange(0, max(1, target.fill) if step % 5 else 40))
        if step % 7 == 6:
            with monkeypatch.context() as patch:
                patch.setattr(target._llama, "arm", target._llama.interrupt)
                with pytest.raises(Cancelled):
                    target.verify(context, tree, GREEDY)
        answer, told = target.verify(context, tree, GREEDY), [single(p) for p in paths(context, tree)]
        assert answer.tokens == [token for token, _ in told]
        assert answer.probs == pytest.approx([prob for _, prob in told], rel=1e-4)
        context = [*context, *accepted(answer, tree)]
        if rng.random() < 0.15 or len(context) > 100:
            context = context[: rng.randrange(1, 40)] + prompt(rng.randrange(1, 30), step)


def test_beside_a_gpu_llama_cpp_computes_with_one_thread(load, monkeypatch):
    """Its pool and the draft's threads would outnumber the cores, and wait for each other at every barrier."""
    monkeypatch.setattr(loading, "place", lambda *asked: Place(99, "a GPU", ""))
    used, target = [], load("llama", threads=3)
    monkeypatch.setattr(target._llama, "_use", used.append)
    target.verify(prompt(9), (), GREEDY)
    assert used == [1]
    assert target.fills[-1] == target.most_nodes + 1


def probs_after(target, context) -> np.ndarray:
    """Of every token of the vocabulary, in parts that fit into a tree."""
    parts = np.array_split(np.arange(600), -(-600 // target.most_nodes))
    found = [target.verify(context, [(int(t), -1) for t in part], GREEDY).node_probs for part in parts]
    return np.concatenate(found)


@pytest.mark.parametrize("kind", NATIVE)
def test_the_lane_in_c_says_what_llama_cpp_says(load, files, kind):
    """Up to rounding, activations being held in 8 bits."""
    ours, theirs = load(kind), LlamaTarget.load(files[kind], 250)
    for length in (1, 9, 40, 200):
        told = [probs_after(target, prompt(length)) for target in (ours, theirs)]
        assert abs(told[0].sum() - 1) < 1e-3
        assert np.abs(told[0] - told[1]).sum() < 0.1
    assert ours.eos == theirs.eos
    theirs.close()


@pytest.mark.parametrize("name", ["llama", "Q4_1"])
def test_probabilities_are_those_of_the_parents_row(load, name):
    target, context = load(name), prompt(12)
    tree = [(5, -1), (6, -1), (7, 0)]
    for sampling in SETTINGS:
        answer = target.verify(context, tree, sampling)
        for (token, parent), prob in zip(tree, answer.node_probs, strict=True):
            row = paths(context, tree)[parent + 1]
            told = target.verify(row, [(token, -1)], sampling)
            assert told.node_probs == [prob]
        again = target.verify(context, [(answer.tokens[0], -1)], sampling)
        assert again.node_probs == again.probs[:1]


@pytest.mark.parametrize("name", ["llama", "Q4_1"])
def test_a_row_that_is_not_reached_is_not_sampled(load, monkeypatch, name):
    target, context, places, honest = load(name), prompt(12), [], choosing.sample
    first = target.verify(context, (), GREEDY).tokens[0]
    second = target.verify([*context, first], (), GREEDY).tokens[0]
    told = lambda row, place, *rest: (places.append(place), honest(row, place, *rest))[1]  # noqa: E731
    monkeypatch.setattr(choosing, "sample", told)
    for more in (0, 12):  # in one part of the native lane's forward, and over two
        tree = [(first + 1, -1), *[(node, 0) for node in range(more)], (first, -1), (7, 0), (second, more + 1)]
        everything = target.verify(context, tree, GREEDY)
        monkeypatch.setattr(target, "every", False)
        del places[:]
        answer = target.verify(context, tree, GREEDY)
        assert places == [12, 13, 14]
        rows = [0, more + 2, more + 4]
        assert [row for row, token in enumerate(answer.tokens) if token is not None] == rows
        assert all(answer.tokens[row] == everything.tokens[row] for row in rows)
        assert [node for node, prob in enumerate(answer.node_probs) if prob is not None] == [0, more + 1, more + 3]
        monkeypatch.setattr(target, "every", True)


@pytest.mark.parametrize("name", ["llama", "Q4_1"])
def test_the_noise_is_that_of_the_place_after_the_row(load, monkeypatch, name):
    places, honest = [], choosing.sample
    told = lambda row, place, *rest: (places.append(place), honest(row, place, *rest))[1]  # noqa: E731
    monkeypatch.setattr(choosing, "sample", told)
    tree = [(5, -1), (6, -1), (7, 0)]
    load(name).verify(prompt(12), tree, GREEDY)
    assert places == [len(path) for path in paths(prompt(12), tree)]


def decoded(target, monkeypatch) -> list[int]:
    """The tokens of each forward from now on."""
    forwards = []
    run = target._llama.decode
    monkeypatch.setattr(target._llama, "decode", lambda tokens, *a: (forwards.append([*tokens]), run(tokens, *a)))
    return forwards


def test_the_accepted_branch_is_kept_and_no_hole(load, monkeypatch):
    """Cells stand in the order of positions: what stands behind a rejected branch is decoded again."""
    target, context = load("llama"), prompt(12)
    tree = [(5, -1), (6, -1), (7, 0), (8, 1)]
    target.verify(context, tree, GREEDY)
    forwards = decoded(target, monkeypatch)
    target.verify([*context, 5, 7, 9], (), GREEDY)
    assert forwards == [[9]]
    target.verify([*context, 5, 7, 9], tree, GREEDY)
    target.verify([*context, 5, 7, 9, 6, 8, 10], (), GREEDY)
    assert forwards[2:] == [[6, 8, 10]]


@pytest.mark.parametrize("name", ["llama", "Q4_1"])
def test_a_prompt_is_read_in_chunks_with_progress_and_can_be_cancelled(load, alone, monkeypatch, name):
    target, alone = load(name), alone(name)
    monkeypatch.setattr("duochat.engine.native.target.CHUNK", 50)
    if name == "llama":
        target._cache._chunk = 50
    context, told, asked = prompt(220), [], []

    def cancelled() -> bool:
        asked.append(0)
        return len(told) == 2 and len(asked) > (4 if name == "llama" else 2)

    with pytest.raises(Cancelled):
        target.verify(context, (), GREEDY, cancelled, lambda *step: told.append(step))
    assert told == [(50, 220), (100, 220)]
    told.clear()
    target.verify(context, (), GREEDY, progress=lambda *step: told.append(step))
    assert told[0] == (150, 220)
    check(target, alone, context, [(4, -1)])
    with pytest.raises(Cancelled):
        target.verify(context, (), GREEDY, lambda: True)


def test_a_prompt_longer_than_a_batch(tmp_path, monkeypatch):
    """Whatever of it is left for the last forward, a whole tree has room there."""
    target = LlamaTarget.load(write_gguf(tmp_path / "long.gguf", context=2048), 2048)
    tree = [(5 + node, -1) for node in range(target.most_nodes)]
    forwards = decoded(target, monkeypatch)
    for length in (441, 442, 443, 513, 900):
        target._cache.forget()
        told = target.verify(prompt(length), tree, GREEDY)
        assert told.tokens[0] == target.verify(prompt(length), (), GREEDY).tokens[0]
    assert max(map(len, forwards)) == 442 + target.most_nodes
    target.close()


def text(target, drafter, decoder, sampling, context) -> tuple[list[int], int]:
    """The answer, and how many of its tokens were drafted."""
    target.every = False
    rounds = [*decode(context, Request(sampling, 80, decoder), target, drafter, costs())]
    return [t for r in rounds for t in r.tokens], sum(len(r.accepted) for r in rounds)


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("options", [("gemma3", {}), ("half", {"reproducible": True})], ids=["exact", "reproducible"])
def test_every_decoder_gives_the_text_of_plain_decoding(load, sampling, options):
    name, more = options
    target = load(name, **more)
    plain, _ = text(target, None, "autoregressive", sampling, prompt(30))
    drafter = Guessing([*prompt(30), *plain])
    told = [text(target, drafter, name, sampling, prompt(30)) for name in ("speculative", "duodecoding", "duotree")]
    assert [answer for answer, _ in told] == [plain] * 3
    assert sum(drafted for _, drafted in told) > 10


def test_rows_that_round_otherwise_are_told_or_avoided(load, alone, monkeypatch):
    """Half precision rounds one row otherwise than several: then two are decoded, or the target says so."""
    monkeypatch.setattr(widths, "agreeing", lambda _: (2, 8))
    target = load("half")
    assert (target.exact, target._llama.least, target.most_nodes) == (False, 1, 63)
    target, alone = load("half", reproducible=True), alone("half", reproducible=True)
    assert (target.exact, target._llama.least, target.most_nodes) == (True, 2, 7)
    assert target.describe()["target_widths"] == [2, 8]
    rows, run = [], llama_cpp.llama_decode
    monkeypatch.setattr(llama_cpp, "llama_decode", lambda c, batch: (rows.append(batch.n_tokens), run(c, batch))[1])
    for context in (prompt(1), prompt(2), prompt(9)):
        check(target, alone, context, ())
        check(target, alone, context, [(4, -1), (5, 0)])
    assert min(rows) == 2
    monkeypatch.setattr(widths, "agreeing", lambda _: (1, 3))
    target = load("llama")
    assert (target.exact, target._llama.least, target.most_nodes) == (True, 1, 2)
    assert not load("llama", cache_type="f16").exact
    assert load("llama", cache_type="bf16").exact


def test_no_forward_is_wider_than_rows_agree(load, alone, monkeypatch):
    """What is left of a prompt, or of a branch off the likeliest, is then read by itself."""
    monkeypatch.setattr(widths, "agreeing", lambda _: (1, 3))
    target, alone, context = load("llama"), alone("llama"), prompt(20)
    forwards = decoded(target, monkeypatch)
    check(target, alone, context, [(5, -1), (6, -1)])
    check(target, alone, [*context, 6, 7], [(5, -1), (6, -1)])
    assert [len(tokens) for tokens in forwards] == [19, 3, 1, 3]


def test_widths_are_measured_once(load, monkeypatch, tmp_path):
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path))
    load("llama")
    (store,) = (tmp_path / "facts").glob("widths-*")
    store.write_text("[1, 4]")
    assert load("llama").most_nodes == 3
    store.write_text("nonsense")
    assert load("llama").most_nodes == 63


def test_widths_find_the_rows_that_differ(load, monkeypatch):
    llama = load("llama")._llama
    rows = {w: np.zeros((max(w, 4), 3)) for w in widths.TRIED}
    monkeypatch.setattr(widths, "_rows", lambda _, width: rows[width])
    assert widths._measure(llama) == (1, widths.ANY)
    rows[32][31] = 1  # of which no other row knows
    assert widths._measure(llama) == (1, widths.ANY)
    rows[8][2] = 1
    assert widths._measure(llama) == (1, 4)
    rows[1][3] = 1
    assert widths._measure(llama) == (2, 4)
    rows[4][0] = rows[3][0] = 1
    assert widths._measure(llama) == (1, 1)


def test_a_recurrent_model_decodes_plainly(load, alone, monkeypatch):
    target, alone = load("mamba"), alone("mamba")
    assert target.most_nodes == 0
    assert target.measure((1, 2, 4), 30).keys() == {1}
    assert "recurrent" in target.describe()["target_notes"][0]
    context = prompt(30)
    for _ in range(5):
        context.append(check(target, alone, context, ()).tokens[0])
    check(target, alone, context[:20], ())
    check(target, alone, context[:20], ())  # once more: its state has gone on
    target._cache._chunk = 10
    with pytest.raises(Cancelled):
        target.verify(prompt(40, 1), (), GREEDY, lambda: len(target._cache.tokens) == 20)
    check(target, alone, prompt(40, 1), ())
    run = target._llama.decode
    monkeypatch.setattr(target._llama, "decode", lambda *a: (target._llama.interrupt(), run(*a)))
    with pytest.raises(Cancelled):
        target.verify(prompt(45, 1), (), GREEDY)
    monkeypatch.setattr(target._llama, "decode", run)
    check(target, alone, prompt(45, 1), ())


def test_it_says_what_it_is(load, files):
    target = load("llama")
    told = target.describe()
    assert told["target_backend"] == "llama.cpp"
    assert (told["target_dtype"], told["target_gpu_layers"]) == ("Q8_0", 0)
    assert told["target_device"]
    assert 0 < told["target_weight_bytes"] < files["llama"].stat().st_size
    assert target.eos == {0, 2}
    assert (target.vocabulary, target.context_length, target.shares_cores) == (600, 250, True)
    assert LlamaTarget.load(files["llama"], 10**6).context_length == 256  # as many as it was trained on
    assert target.measure((1, 2, 4, 65), 40).keys() == {1, 2, 4}


def test_one_row_is_measured_by_itself(load, monkeypatch):
    """A forward that is as wide as the one before it takes less time."""
    target, clock, last = load("llama"), SimpleNamespace(now=0.0), []

    def verify(_context, tree, *_):
        clock.now += 1.0 if last[-1:] == [len(tree)] else 2.0
        last.append(len(tree))

    monkeypatch.setattr(target, "verify", verify)
    monkeypatch.setattr("duochat.engine.lanes.perf_counter", lambda: clock.now)
    assert target.measure((1, 2, 4), 40) == {1: 1.0, 2: 2.0, 4: 2.0}
    assert target.measure((2, 4), 40) == {2: 2.0, 4: 2.0}


def test_a_model_in_parts(tmp_path):
    in_one = LlamaTarget.load(write_gguf(tmp_path / "whole.gguf"), 100)
    write_gguf(tmp_path / "toy.gguf", part=8)
    first, second, *_ = sorted(tmp_path.glob("toy-*"))
    target, context = LlamaTarget.load(first, 100), prompt(9)
    assert target.verify(context, (), GREEDY) == in_one.verify(context, (), GREEDY)
    with pytest.raises(DuoChatError, match="part 2 of"):
        LlamaTarget.load(second, 100)
    second.unlink()
    with pytest.raises(DuoChatError, match="is missing"):
        LlamaTarget.load(first, 100)


def test_what_cannot_be_is_one_sentence(load, files, tmp_path, monkeypatch):
    with pytest.raises(DuoChatError, match="shorten it or raise context_length"):
        load("llama").verify(prompt(251), (), GREEDY)
    (tmp_path / "no.gguf").write_bytes(b"nothing at all, really")
    with pytest.raises(DuoChatError, match=r"target model .* is not a GGUF"):
        LlamaTarget.load(tmp_path / "no.gguf")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(DuoChatError, match="choose a smaller target"):
        load("llama")


needs_cpu_build = pytest.mark.skipif(llama_cpp.llama_supports_gpu_offload(), reason="this build knows GPUs")


@needs_cpu_build
def test_a_gpu_that_this_build_cannot_use(load, monkeypatch):
    with pytest.raises(DuoChatError, match=r"sees no GPU: build it for one with CMAKE_ARGS=.*DGGML_CUDA=on"):
        load("llama", gpu_layers=5)
    monkeypatch.setattr(devices, "DRIVERS", ((str(Path(__file__)), "NVIDIA", "CUDA"),))
    notes = load("llama").describe()["target_notes"]
    assert len(notes) == 1
    assert "without support for this NVIDIA GPU" in notes[0]
    assert "-DGGML_CUDA=on" in notes[0]
    with pytest.raises(DuoChatError, match=r"GGML_RPC=ON"):
        load("llama", rpc=["127.0.0.1:50052"])


def test_as_many_layers_as_fit(files, monkeypatch):
    """The output counts as a layer; a gibibyte of each GPU's memory is for other things."""
    need = files["qwen3"].stat().st_size + gguf_header.read(files["qwen3"]).cache_bytes(1000)

    def there(*free: int):
        gpus = [devices.Device(7 + i, f"CUDA{i}", f"GPU {i}", 1, room, 2**40) for i, room in enumerate(free)]
        monkeypatch.setattr(devices, "found", lambda: [*gpus, devices.Device(1, "CPU", "a CPU", 0, 0, 0)])
        return place(files["qwen3"], 1000, "auto", (), ())

    assert there(2**30 + need, 10) == Place(3, "GPU 0 + GPU 1")
    part = there(2**30 + need * 2 // 3 + 9)
    assert (part.gpu_layers, part.device) == (2, "GPU 0")
    assert part.note.startswith("2 of 3 layers fit")
    assert there(2**20).device == "a CPU"
    assert place(files["qwen3"], 1000, 1, ("CUDA0",), ()) == Place(1, "GPU 0")
    assert place(files["qwen3"], 1000, 0, (), ()) == Place(0, "a CPU")
    with pytest.raises(DuoChatError, match="no device CUDA1: choose of CUDA0"):
        place(files["qwen3"], 1000, "auto", ("CUDA1",), ())


def test_tensors_are_placed_by_name(load, alone):
    with pytest.raises(DuoChatError, match=r"PATTERN=DEVICE, one of .*CPU"):
        load("llama", tensor_overrides=["exps=MOON"])
    target = load("qwen3moe", tensor_overrides=["ffn_.*_exps=CPU"])
    check(target, alone("qwen3moe"), prompt(9), [(4, -1)])


def test_a_token_is_sampled_as_on_the_torch_lane():
    """Same order, same ties, same noise."""
    torch = pytest.importorskip("torch")
    from duochat.engine.pytorch import choose
    from duochat.engine.pytorch.rows import parameters
    from duochat.engine.sampling import key

    rng = np.random.default_rng(2)
    for n, spread in ((600, 1), (600, 4), (49152, 2), (5000, 0.1)):
        row = (rng.standard_normal(n) * spread).astype(np.float32)
        for t, k, p, m in [
            (0, 5, 0.5, 0.5),
            (1, 0, 1, 0),
            (0.7, 40, 0.9, 0),
            (1.5, 0, 0.8, 0),
            (1, 0, 1, 0.05),
            (2, 7, 1, 0.1),
        ]:
            sampling = Sampling(temperature=t, top_k=k, top_p=p, min_p=m, seed=11)
            asked = [int(row.argmax()), int(rng.integers(n))]
            ask = choose.Ask.of(
                torch.tensor(asked),
                torch.tensor([0, 0]),
                torch.tensor([key(11, 9)] * 2, dtype=torch.int32),
                torch.frombuffer(bytearray(parameters(sampling)), dtype=torch.int32),
            )
            way = choose.way(sampling)
            way = choose.everything if way is choose.nucleus else way
            token, prob, own, _ = way(torch.from_numpy(np.stack([row, row])), ask)
            told, probs = choosing.sample(row, 9, sampling, asked)
            assert told == int(token[0])
            np.testing.assert_allclose(probs, [prob[0], *own], rtol=1e-4, atol=1e-9)


def test_of_equal_logits_the_first_one_wins(monkeypatch):
    row = np.zeros(300, np.float32)
    row[[70, 200]] = 3
    for top_k, kept in ((1, [70]), (2, [70, 200])):
        found = {choosing.sample(row, place, Sampling(temperature=1.0, top_k=top_k))[0] for place in range(40)}
        assert sorted(found) == kept
    assert choosing.sample(row, 0, GREEDY)[0] == 70


def test_logits_that_are_no_numbers_are_a_sentence():
    with pytest.raises(DuoChatError, match="no numbers"):
        choosing.sample(np.full(300, np.nan, np.float32), 0, Sampling(temperature=1.0, top_p=0.9))


def test_samples_follow_the_softmax():
    """Chi-square of 4,000 samples over ten tokens: above 27.9 in one case of a thousand."""
    row = np.log(np.arange(1, 11, dtype=np.float32))
    drawn = np.bincount(
        [choosing.sample(row, place, Sampling(temperature=1.0))[0] for place in range(4000)], minlength=10
    )
    expected = 4000 * np.arange(1, 11) / 55
    assert ((drawn - expected) ** 2 / expected).sum() < 27.9
