"""A widened target computes what the small one computes."""

import shutil

import llama_cpp
import numpy as np
import pytest
import torch
from toy_models import write_gguf
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from duochat import DuoChatError
from duochat.__main__ import main
from duochat.distill import widen_gguf
from duochat.distill.widened import LIKE, Shape, widen, write
from duochat.engine.pytorch import TorchTarget
from duochat.engine.sampling import Sampling
from duochat.models import store
from duochat.models.files import require_target
from duochat.models.folder import RECIPE, recipe, stands_for

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}


def small(family="llama", **changes):
    torch.manual_seed(1)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6}
    config, kind = FAMILIES[family]
    return kind(config(vocab_size=90, num_key_value_heads=2, head_dim=4, **sizes, **changes)).eval()


@pytest.mark.parametrize("shape", [Shape(32, 64, 3, 8, 8, 8), Shape(40, 48, 4, 12, 4, 16), Shape(24, 40, 2, 8, 2, 4)])
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen2", False)])
def test_same_logits(shape, family, tied):
    """More heads than the small one, fewer queries a key head, more queries a key head, head size times 1, 2 and 4."""
    model = small(family, tie_word_embeddings=tied)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.normal_(1, 0.3)
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                if part.bias is not None:
                    part.bias.normal_(0, 0.3)
    large = widen(model, shape, torch.device("cpu"), torch.float32)
    assert large.config.hidden_size == shape.hidden_size
    assert len(large.model.layers) == shape.num_hidden_layers
    ids = torch.randint(0, 90, (2, 11))
    with torch.no_grad():
        expected, got = model(ids).logits, large(ids).logits
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
    assert (
        not torch.equal(large.model.layers[0].mlp.up_proj.weight[-1], torch.zeros(shape.hidden_size))
        or shape.intermediate_size == 40
    )


def test_a_target_that_is_too_large_is_refused():
    with pytest.raises(DuoChatError, match="larger"):
        widen(small(), Shape(16, 64, 3, 8, 8, 8), torch.device("cpu"), torch.float32)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(DuoChatError, match=r"holds no config\.json"):
        write(tmp_path, "llama-2-7b", tmp_path / "wide")


def test_a_widened_folder_loads_as_any_other_and_says_what_it_stands_for(tmp_path, monkeypatch):
    monkeypatch.setitem(LIKE, "llama-2-7b", Shape(32, 64, 3, 8, 8, 8))
    small().save_pretrained(tmp_path / "small")
    write(tmp_path / "small", "llama-2-7b", tmp_path / "wide")
    require_target(tmp_path / "wide")
    options = {"device": "cpu", "context_length": 64, "compile": False}
    made, plain = (TorchTarget.load(tmp_path / name, **options) for name in ("wide", "small"))
    assert "llama-2-7b (cost-faithful)" in made.describe()["target"]
    assert recipe(tmp_path / "wide")["like"] == "llama-2-7b"
    assert "target" not in plain.describe()
    assert made.describe()["target_weight_bytes"] > plain.describe()["target_weight_bytes"]
    answers = [target.verify([5, 6, 7], [(8, -1)], Sampling()) for target in (made, plain)]
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].probs == pytest.approx(answers[1].probs, abs=1e-4)


@pytest.mark.parametrize("text", ["[]", "{}", '{"maker": "os"}', '{"maker": "duochat.nobody"}'])
def test_a_recipe_that_nobody_here_makes_is_refused(tmp_path, text):
    small().save_pretrained(tmp_path)
    (tmp_path / RECIPE).write_text(text)
    with pytest.raises(DuoChatError):
        TorchTarget.load(tmp_path, device="cpu", context_length=64)


def test_a_widened_folder_whose_small_target_is_gone_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(LIKE, "llama-2-7b", Shape(32, 64, 3, 8, 8, 8))
    small().save_pretrained(tmp_path / "small")
    write(tmp_path / "small", "llama-2-7b", tmp_path / "wide")
    (tmp_path / "small").rename(tmp_path / "gone")
    with pytest.raises(DuoChatError, match="is gone: run widen again"):
        TorchTarget.load(tmp_path / "wide", device="cpu", context_length=64)


# ---------------------------------------------------------------- as a GGUF file


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A small target as a GGUF file, and a shape to widen it to: more layers, heads twice as wide."""
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(LIKE, "llama-2-7b", Shape(256, 512, 3, 8, 8, 32))
    return write_gguf(tmp_path / "toy.gguf", quantized=0)


def made(toy, kind):
    out = toy.parent / "wide"
    assert main(["widen", "--target", str(toy), "--like", "llama-2-7b", "--out", str(out), "--gguf", kind]) == 0
    return out / f"llama-2-7b-{kind}.gguf"


def logits(path, sequences):
    """By llama.cpp on the CPU, one row a token, all sequences below each other."""
    runner = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, logits_all=True, verbose=False)
    rows = []
    for sequence in sequences:
        runner.reset()
        runner.eval(sequence)
        rows.append(runner.scores[: len(sequence)].copy())
    return np.concatenate(rows)


SEQUENCES = np.random.default_rng(3).integers(3, 600, (12, 30)).tolist()


@pytest.mark.parametrize(
    ("family", "kind", "off", "same"),
    [
        ("llama", "f16", 0.005, 0.98),
        ("llama", "bf16", 0.03, 0.96),
        ("llama", "q8_0", 0.08, 0.92),
        ("qwen2", "f16", 0.005, 0.98),
    ],
)
def test_a_file_has_the_small_models_logits(toy, family, kind, off, same):
    """Guards the order of query and key rows, the scale of norms and queries, and what must stay zero."""
    write_gguf(toy, family, quantized=0)
    own, wide = (logits(path, SEQUENCES) for path in (toy, made(toy, kind)))
    assert np.abs(wide - own).max() < off * np.abs(own).max()
    assert (wide.argmax(-1) == own.argmax(-1)).mean() >= same


def test_four_bits_keep_the_first_choice_mostly(toy):
    own, wide = (logits(path, SEQUENCES) for path in (toy, made(toy, "q4_k_m")))
    assert (wide.argmax(-1) == own.argmax(-1)).mean() > 0.6


def test_a_file_says_what_it_stands_for_and_what_it_takes(toy, capsys):
    path = made(toy, "q8_0")
    assert stands_for(path) == "llama-2-7b"
    assert stands_for(toy) == ""
    assert "of disk and" in capsys.readouterr().err
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # the file in 16 bits has gone
    header = llama_cpp.Llama(str(path), vocab_only=True, verbose=False).metadata
    assert header["general.name"] == "toy with the shape of llama-2-7b (cost-faithful)"
    assert header["llama.block_count"] == "3"


def test_a_folder_says_what_it_stands_for(toy):
    out = toy.parent / "wide"
    assert main(["widen", "--target", str(toy), "--like", "llama-2-7b", "--out", str(out)]) == 0
    assert stands_for(out) == "llama-2-7b"
    wide, own = (TorchTarget.load(path, device="cpu", context_length=64, compile=False) for path in (out, toy))
    answers = [target.verify([5, 6, 7], [(8, -1)], Sampling()) for target in (wide, own)]
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].probs == pytest.approx(answers[1].probs, abs=1e-3)
    assert wide.eos == own.eos == {0, 2}


@pytest.mark.parametrize("fault", ["disk", "memory", "llama.cpp", "folder"])
def test_what_cannot_be_made_is_one_sentence_and_leaves_nothing(toy, fault, monkeypatch, capsys):
    said = {"disk": "no room left", "memory": "--like", "llama.cpp": "could not quantise", "folder": "is none"}[fault]
    if fault == "disk":
        monkeypatch.setattr(store.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))
    elif fault == "memory":
        monkeypatch.setattr(widen_gguf, "COPIES", 10**9)
    elif fault == "llama.cpp":
        monkeypatch.setattr(llama_cpp, "llama_model_quantize", lambda *_: 1)
    else:
        toy = store.cache_dir()
        small().save_pretrained(toy)
    out = toy.parent / "wide"
    arguments = ["--target", str(toy), "--like", "llama-2-7b", "--out", str(out), "--gguf", "q8_0"]
    assert main(["widen", *arguments]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert said in last
    assert not out.exists() or not list(out.iterdir())
