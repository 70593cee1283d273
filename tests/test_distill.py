"""The maker of drafts: its Llama, its text, its training step, its GGUF. Runs on a toy target without weights."""

import argparse
import json
import random
from itertools import islice

import numpy as np
import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
pre_tokenizers = pytest.importorskip("tokenizers").pre_tokenizers

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from duochat import DuoChatError  # noqa: E402
from duochat.distill import distill, gguf_file  # noqa: E402
from duochat.distill.evaluate import Answered, agreement  # noqa: E402
from duochat.distill.student import deepened, hidden, sizes, student_of  # noqa: E402
from duochat.distill.texts import TAUGHT, WINDOW, Text, Texts  # noqa: E402
from duochat.distill.training import (  # noqa: E402
    Head,
    Muon,
    Plan,
    Student,
    q4_0,
    share_of_rate,
)
from duochat.distill.writing import ANSWER, BUCKET, Format, Row, Writer, best, plan  # noqa: E402
from duochat.models import gguf as header  # noqa: E402
from duochat.models import weights  # noqa: E402
from duochat.models.trim import RANKING  # noqa: E402

Q4_0 = gguf.GGMLQuantizationType.Q4_0
VOCAB = 300
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

HEAD = Head(VOCAB, [], 0.25, torch.device("cpu"))


def config_of(family="llama", **changes):
    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[family]
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 128, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 256}
    rest = {"rms_norm_eps": 2.0**-17, "tie_word_embeddings": family == "llama"}
    return kind(**sizes | rest | changes)


def sharp_llama(config=None, seed=0):
    """A random target that is sure of its next token, which depends on the last one and a little on those before."""
    torch.manual_seed(seed)
    config = config or config_of()
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    for name, value in model.named_parameters():
        if value.ndim == 2:
            value.uniform_(-1, 1).mul_(value.shape[1] ** -0.5)
        if name.endswith("bias"):
            value.uniform_(-0.1, 0.1)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            value.uniform_(0.2, 0.5)
    model.model.embed_tokens.weight.normal_(0, 0.1)
    if not config.tie_word_embeddings:
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.flip(1))
    model.model.norm.weight.mul_(30)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.mul_(6)
        layer.self_attn.o_proj.weight.mul_(0.3)
    return model


def logits_of(model, ids):
    return model.lm_head(hidden(model, ids))


@pytest.fixture(autouse=True)
def one_thread():
    """Toy matrices on several threads of a busy machine wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=["llama", "qwen2", "qwen3"])
def target_file(tmp_path_factory, request):
    return write_target(tmp_path_factory.mktemp("target") / "target.gguf", request.param)


def write_target(path, family):
    """A toy GGUF file: 256 bytes as tokens, a few merges, two control tokens; a Qwen has a head apart."""
    qwen = family != "llama"
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [f"{a} {b}" for a, b in (("t", "h"), ("i", "n"), ("e", "r"), ("a", "n"), ("Ġ", "t"))]
    tokens = ["<|start|>", "<|end|>", *characters, *(m.replace(" ", "") for m in merges)]
    tokens += [f"[unused{i}]" for i in range(VOCAB - len(tokens))]
    writer = gguf.GGUFWriter(path, family)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if qwen else "smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    _add_model(writer, sharp_llama(config_of(family)))
    return path


def _add_model(writer, model):
    for key, name in gguf_file.KEYS.items():
        value = getattr(model.config, name)
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"{writer.arch}.{key}", value)
    for name, value in model.named_parameters():
        writer.add_tensor(gguf_file.outer(name), weights.reordered(value, model.config, name).numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def loaded(path):
    return weights.loaded(header.read(path))


def test_stepping_with_a_cache_gives_the_logits_of_one_forward(target_file):
    """On each side of a bucket of the cache."""
    source = gguf_file.Source.open(target_file)
    target = loaded(target_file)
    text = Writer(target, Format.of(source), batch=2, length=BUCKET + 40).answer([[0, 50, 60], [0, 70, 80, 90]], 1.0)
    target.set_attn_implementation("sdpa")
    whole = logits_of(target, torch.from_numpy(text.tokens).long())[:, :-1]
    found = whole.gather(-1, torch.from_numpy(text.likely).long()[:, :-1]) - whole.amax(-1, True)
    torch.testing.assert_close(torch.from_numpy(text.logits[:, :-1]).float(), found, atol=0.02, rtol=2e-3)
    assert found[:, BUCKET:].std() > 1


def test_gguf_returns_the_weights_that_were_written(target_file, tmp_path):
    source, model = gguf_file.Source.open(target_file), sharp_llama(seed=1)
    assert source.tokenizer.encode("in the") == [source.header.tokens.index(t) for t in ("in", "Ġ", "th", "e")]
    gguf_file.write_student(model, source, tmp_path / "again.gguf", "f32", "again")
    again = gguf_file.Source.open(tmp_path / "again.gguf")
    assert sizes(again.config) == sizes(model.config)
    for name, value in loaded(again.path).state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    kept = [{k: v for k, v in s.header.metadata.items() if k.startswith("tokenizer.")} for s in (source, again)]
    assert kept[0] == kept[1]


def test_llama_cpp_gives_the_torch_models_logits(target_file, tmp_path):
    """Guards the order of query and key rows: a wrong rotary pairing leaves position 0 right and all others wrong."""
    llama_cpp = pytest.importorskip("llama_cpp")
    source, student, ids = gguf_file.Source.open(target_file), sharp_llama(seed=2), [5, 80, 200, 7, 9, 33]
    gguf_file.write_student(student, source, tmp_path / "student.gguf", "f32", "student")
    for path, model in ((target_file, loaded(target_file)), (tmp_path / "student.gguf", student)):
        runner = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
        runner.eval(ids)
        expected = logits_of(model, torch.tensor([ids]))[0].numpy()
        assert np.abs(runner.scores[: len(ids)] - expected).max() < 0.02 * np.abs(expected).max()


def test_unknown_quantisation_and_unfit_students_are_named():
    with pytest.raises(DuoChatError, match="q9_9"):
        gguf_file.kinds("q9_9")
    with pytest.raises(DuoChatError, match="wide"):
        Plan.parse("wide")
    for unfit in ("48x1", "32x1x40", "32x3", "96x1"):
        with pytest.raises(DuoChatError, match="multiple of 32 up to 64, its layers at most 2"):
            Plan.parse(unfit).config(config_of())
    wide = config_of("qwen2", hidden_size=192, num_attention_heads=12)
    student = Plan.parse("192x1x64@0.1").config(wide)
    assert list(sizes(student).values()) == [192, 64, 1, 12, 4]
    kept = ("vocab_size", "rms_norm_eps", "rope_parameters", "head_dim", "max_position_embeddings")
    assert all(getattr(student, name) == getattr(wide, name) for name in kept)


def test_format_cuts_the_template_around_the_turns(target_file):
    source = gguf_file.Source.open(target_file)
    chat = Format.of(source)
    whole, middle = source.tokenizer.prompt([{"role": "user", "content": "hi"}]), source.tokenizer.encode("hi")
    assert whole == [*chat.opening, *middle, chat.ends[0], *chat.to_answer]


def test_greedy_answers_are_the_argmax_of_the_target(target_file):
    source = gguf_file.Source.open(target_file)
    target = loaded(target_file)
    text = Writer(target, Format.of(source), batch=2, length=24).answer([[0, 50, 60], [0, 70, 80, 90, 91]], 0.0)
    assert text.tokens[0, :3].tolist() == [0, 50, 60]
    assert text.tokens[1, :5].tolist() == [0, 70, 80, 90, 91]
    target.set_attn_implementation("sdpa")
    logits = logits_of(target, torch.from_numpy(text.tokens).long())
    for row in range(2):
        places = text.answers[row].nonzero()[0]
        assert len(places) > 3
        logits[row, places[0] - 1, 1] = -torch.inf  # no answer is empty
        assert logits[row, places - 1].argmax(-1).tolist() == text.tokens[row, places].tolist()
        kept = text.likely[row, places - 1]
        assert kept.shape == (len(places), TAUGHT)
        assert kept.tolist() == logits[row, places - 1].topk(TAUGHT).indices.tolist()
        beside = logits[row, places - 1].gather(-1, torch.from_numpy(kept).long()) - logits[row, places - 1].amax(
            -1, True
        )
        torch.testing.assert_close(torch.from_numpy(text.logits[row, places - 1]).float(), beside, atol=0.02, rtol=2e-3)


@pytest.mark.parametrize("vocab", [40, 300, 1280])
def test_the_best_of_a_row_are_those_of_a_sort(vocab):
    logits = torch.rand(50, vocab).argsort(-1).float()  # no two alike in a row
    tokens, values = best(logits, 64)
    expected = logits.sort(-1, descending=True)
    assert torch.equal(tokens, expected.indices[:, :64])
    assert torch.equal(values, expected.values[:, :64])


def test_rows_follow_stems_caps_and_template(target_file):
    source = gguf_file.Source.open(target_file)
    chat = Format.of(source)
    row = Row(([100, 101], [102]), (1.0, 0.0, 1.0), shortest=(2, 3, 5), longest=(3, 4, 6))
    length = len(chat.opening) + len(chat.to_answer) + len(chat.to_user) + 30
    text = Writer(loaded(target_file), chat, 1, length).write([row])
    ids, role = text.tokens[0].tolist(), text.answers[0].tolist()
    assert ids[: len(chat.opening) + 2] == [*chat.opening, 100, 101]
    first = role.index(True)
    assert ids[first - len(chat.to_answer) - 1 : first] == [chat.ends[0], *chat.to_answer]
    end = ids.index(chat.ends[0], first)
    assert 3 <= end - first <= 4
    assert ids[end + 1 : end + 1 + len(chat.to_user) + 1] == [*chat.to_user, 102]
    later = end + 1 + len(chat.to_user) + 1
    assert 5 <= ids.index(chat.ends[0], later) - later <= 6
    assert ids[ids.index(chat.ends[0], later) + 1 :][: len(chat.to_answer)] == chat.to_answer


def test_the_same_seed_plans_the_same_rows(target_file):
    tokenizer = gguf_file.Source.open(target_file).tokenizer
    first, second = (plan(tokenizer, 5, random.Random(3), long=True, length=96) for _ in range(2))
    assert first == second
    assert all(row.shortest[0] >= 32 and row.temperature[ANSWER] <= 1 for row in first)


def test_rounding_is_that_of_the_file():
    weight = torch.randn(6, 96) * torch.logspace(-3, 1, 6)[:, None]
    weight[0] = 0
    kept = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), Q4_0), Q4_0)
    assert torch.equal(q4_0(weight), torch.from_numpy(kept))


def test_coarse_parameters_are_rounded_for_the_forward_alone():
    model = sharp_llama()
    names = gguf_file.coarse(model, "q8_0,token_embd=q4_0")
    assert names == ["model.embed_tokens.weight"]
    embedding = model.model.embed_tokens.weight
    student, exact = Student(Plan.parse("64x1"), model, HEAD, names), embedding.clone()
    with student.rounded():
        assert torch.equal(embedding, q4_0(exact))
        assert not torch.equal(embedding, exact)
    assert torch.equal(embedding, exact)


def test_equal_shapes_learn_together_as_torchs_muon_lets_each_alone():
    shapes = [(48, 48), (16, 48), (96, 48), (48, 96)] * 2
    mine, alone = ([torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    optimisers = Muon(mine, base=1.0), torch.optim.Muon(alone, lr=0.1, weight_decay=0.0)
    assert len(optimisers[0].param_groups) == 4
    for _ in range(3):
        for group in optimisers[0].param_groups:
            group["lr"] = 0.1
        for a, b in zip(mine, alone, strict=True):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        for optimiser in optimisers:
            optimiser.step()
    for a, b in zip(mine, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.01)


def test_rate_warms_up_stays_and_ends_at_zero():
    assert share_of_rate(0.0) < 0.05
    assert share_of_rate(0.2) == share_of_rate(0.39) == 1.0
    assert share_of_rate(0.7) == pytest.approx(0.5)
    assert share_of_rate(1.0) == 0.0


def _taught(target, rows: int = 64, length: int = 32, kept: int = TAUGHT) -> Text:
    ids = torch.randint(2, target.config.vocab_size, (rows, length))
    likely, logits = best(logits_of(target, ids).flatten(0, 1), kept)
    found = [part.unflatten(0, ids.shape).numpy() for part in (likely.int(), logits.half())]
    return Text(ids.int().numpy(), np.ones((rows, length), dtype=bool), *found)


@pytest.mark.parametrize("frequent", [[], [*range(2, 300, 3)]])
def test_head_gradients_by_hand_are_autograds(frequent):
    """The gradients of the tied embedding and of a matrix below, against a loss written out plainly: over what the
    target's most likely tokens and the tokens to be proposed have in common."""
    target = sharp_llama()
    head = Head(VOCAB, frequent, 0.25, torch.device("cpu"))
    student = Student(Plan.parse("32x1"), student_of(target, Plan.parse("32x1").config(target.config)), head)
    batch = next(Texts([_taught(target, kept=4)], 128, torch.device("cpu"), 0).batches())
    student.differentiate(batch)
    found = [p.grad.clone() for p in student.model.parameters()]
    student.model.zero_grad()
    proposed = torch.tensor(frequent or range(VOCAB))
    states = hidden(student.model, batch.tokens).flatten(0, 1)[batch.places]
    scores = (states @ student.embedding[proposed].T).log_softmax(-1)
    taught = torch.full((len(batch.places), VOCAB), -torch.inf)
    taught = taught.scatter(1, batch.likely.long(), batch.logits.float())[:, proposed]
    some = taught.isfinite().any(-1)
    assert some.all() != bool(frequent)
    taught, scores = taught[some], scores[some]
    wanted = 0.75 * taught.softmax(-1) + 0.25 * torch.nn.functional.one_hot(taught.argmax(-1), len(proposed))
    (-(wanted * scores).sum() / len(some)).backward()
    for mine, parameter in zip(found, student.model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-5)


def test_long_rows_are_read_in_windows_and_whole():
    long = _taught(sharp_llama(), rows=4, length=2 * WINDOW)
    batches = Texts([long], 2 * WINDOW, torch.device("cpu"), 0).batches()
    by_shape = {batch.tokens.shape: batch for batch in islice(batches, 20)}
    assert by_shape.keys() == {(1, 2 * WINDOW), (2, WINDOW)}
    batch = by_shape[2, WINDOW]
    rows = long.tokens.tolist()
    places = [
        (r, at)
        for window in batch.tokens.tolist()
        for r, row in enumerate(rows)
        for at in range(WINDOW + 1)
        if row[at : at + WINDOW] == window
    ]
    assert len(places) == 2
    row, at = batch.places[0] // WINDOW, batch.places[0] % WINDOW
    assert batch.likely[0].tolist() == long.likely[places[row][0], places[row][1] + at].tolist()


def test_a_student_comes_to_agree_and_survives_a_lost_step():
    target = sharp_llama(config_of(vocab_size=120))
    config = Plan.parse("64x1").config(target.config)
    head = Head(120, [], 0.25, torch.device("cpu"))
    student = Student(Plan.parse("64x1"), student_of(target, config), head)
    ids = torch.randint(2, 120, (40,)).tolist()
    chosen = logits_of(target, torch.tensor([ids]))[0].argmax(-1).tolist()
    asked = [Answered("toy", ids, 1, chosen[:-1])]
    before = agreement(student.model, asked)["mean"]["top4"]
    batches = Texts([_taught(target, rows=2000)], 512, torch.device("cpu"), 0).batches()
    for step, batch in zip(range(100), batches, strict=False):
        if step == 55:
            student.model.model.layers[0].self_attn.q_proj.weight.data.fill_(float("nan"))
        student.step(batch, share_of_rate(step / 100))
    assert student.slower == 0.5
    assert agreement(student.model, asked)["mean"]["top4"] > before + 0.1


def test_a_deepened_student_keeps_its_function(target_file, tmp_path):
    source = gguf_file.Source.open(target_file)
    plans = Plan.parse("32x1"), Plan.parse("32x2")
    earlier = student_of(loaded(target_file), plans[0].config(source.config))
    gguf_file.write_student(earlier, source, tmp_path / "earlier.gguf", "f16", "earlier")
    read = loaded(tmp_path / "earlier.gguf")
    deeper = deepened(read, plans[1].config(source.config))
    ids = torch.tensor([[3, 7, 11, 2]])
    torch.testing.assert_close(hidden(deeper, ids), hidden(read, ids))
    assert deeper.config.num_hidden_layers == 2
    with pytest.raises(DuoChatError, match="only layers can be added"):
        deepened(deeper, plans[0].config(source.config))


def test_a_run_goes_on_from_the_earlier_student_of_its_width(target_file, tmp_path):
    source, plan = gguf_file.Source.open(target_file), Plan.parse("32x1")
    earlier = student_of(loaded(target_file), plan.config(source.config))
    earlier.model.embed_tokens.weight.data += 1
    gguf_file.write_student(earlier, source, tmp_path / "earlier.gguf", "f32", "earlier")
    args = _arguments("--target", target_file, "--out", tmp_path / "draft.gguf", "--start", tmp_path / "earlier.gguf")
    args.worker, args.work = 0, tmp_path
    worker = distill.Worker(args)
    worker.answered = {"greedy": [Answered("toy", [5, 9, 44, 8], 2, [44, 8])]}
    begun = worker._begun(loaded(target_file), plan)
    assert all(torch.equal(a, b) for a, b in zip(begun.parameters(), earlier.parameters(), strict=True))
    wider, target = worker._begun(loaded(target_file), Plan.parse("64x1")), loaded(target_file)
    assert torch.equal(wider.model.embed_tokens.weight, target.model.embed_tokens.weight)


def test_agreement_counts_ranks_with_the_shared_noise():
    model, ids = sharp_llama(), [5, 9, 44, 8]
    greedy = logits_of(model, torch.tensor([ids]))[0].argmax(-1).tolist()
    assert agreement(model, [Answered("t", ids, 1, greedy[:-1])])["mean"]["top1"] == 1.0
    noisy = agreement(model, [Answered("t", ids, 1, greedy[:-1])], noisy=True)["mean"]
    assert noisy["top1"] <= noisy["top8"]
    half = agreement(model, [Answered("t", ids, 1, greedy[:-1])], kept=greedy[:1])["mean"]
    assert half["top1"] == pytest.approx(sum(token == greedy[0] for token in greedy[:-1]) / 3, abs=1e-3)


def _arguments(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    distill.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def test_a_student_that_does_not_fit_is_refused_before_the_work(target_file, tmp_path):
    with pytest.raises(DuoChatError, match="48x1 does not fit"):
        distill.main(_arguments("--target", target_file, "--out", tmp_path / "draft.gguf", "--students", "64x1,48x1"))
    assert not list((tmp_path / "draft.work").iterdir())


@pytest.mark.slow
def test_two_workers_make_drafts_and_a_second_run_goes_on(tmp_path):
    """The whole command at toy size, with the code path of two devices; then again from its checkpoints."""
    llama_cpp = pytest.importorskip("llama_cpp")
    target_file = write_target(tmp_path / "target.gguf", "qwen2")
    work = tmp_path / "work"
    options = ["--target", target_file, "--out", tmp_path / "draft.gguf", "--work", work]
    options += [
        "--students",
        "64x1;32x1,32x2",
        "--batches",
        "8x96:0.5,4x128:0.5",
        "--answer-tokens",
        24,
        "--batch-tokens",
        512,
        "--vocabulary",
        40,
    ]
    options += ["--minutes", 1.8]
    distill.main(_arguments(*options))
    report = json.loads((work / "report.json").read_text())
    figures = report["students"]["32x1"]
    assert figures["greedy"]["mean"]["top4"] > figures["untrained"]["mean"]["top4"]
    assert set(report["students"]) == {"64x1", "32x1", "32x2"}
    runner = llama_cpp.Llama(str(tmp_path / "draft.gguf"), n_ctx=64, n_threads=1, verbose=False)
    assert runner.eval([5, 6, 7]) is None
    ranked = gguf_file.Source.open(tmp_path / "draft.gguf").header.metadata[RANKING]
    texts = Texts(map(Text.load, work.glob("text-*.npz")), 512, torch.device("cpu"), 0)
    counts = texts.counts(VOCAB)
    assert counts[ranked].tolist() == sorted(counts.tolist(), reverse=True)[:40]
    distill.main(_arguments(*options[:-1], 0.2))
    again = json.loads((work / "report.json").read_text())
    assert all(student["training"]["steps"] <= 5 for student in again["students"].values())
