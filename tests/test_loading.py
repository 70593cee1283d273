"""Folders as targets: what would give another model's text is refused, in one sentence."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch
import toy_models as toy
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from duochat import DuoChatError, config
from duochat.chat.chat import Options
from duochat.chat.loading import load_chat
from duochat.engine import engine as engine_module
from duochat.engine.decoding import DECODERS
from duochat.engine.engine import Engine
from duochat.engine.pytorch import TorchTarget
from duochat.engine.sampling import Sampling
from duochat.models import gguf, tokenizer

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256}
UP = "model.layers.1.mlp.up_proj.weight"


def folder(path, kind="llama", sizes=SIZES, **more):
    """A random model of a kind as transformers writes it."""
    torch.manual_seed(0)
    made = AutoConfig.for_model(kind, vocab_size=600, **{"bos_token_id": 1, "eos_token_id": 2} | sizes | more)
    model = AutoModelForCausalLM.from_config(made)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
    model.save_pretrained(path)
    return path


def load(path, **options):
    return TorchTarget.load(path, **{"device": "cpu", "context_length": 128, "compile": False, "threads": 1} | options)


def refused(path, match):
    with pytest.raises(DuoChatError, match=match) as fault:
        load(path)
    assert "\n" not in str(fault.value)


def change(path, weights):
    """Write a model's weights anew, as `weights` changes them."""
    held = load_file(path / "model.safetensors")
    weights(held)
    save_file(held, path / "model.safetensors", {"format": "pt"})


def edit(path, **entries):
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | entries))


# ---------------------------------------------------------------- weights


def test_a_missing_tensor_is_not_invented(tmp_path):
    path = folder(tmp_path / "hole")
    change(path, lambda held: held.pop(UP))
    refused(path, f"lacks {UP}")


def test_weights_under_other_names_are_missing(tmp_path):
    path = folder(tmp_path / "renamed")
    change(path, lambda held: [held.update({f"gpt.{name}": held.pop(name)}) for name in list(held)])
    refused(path, "lacks lm_head.weight")


def test_tied_weights_are_not_missing(tmp_path):
    path = folder(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    assert len(load(path).verify([1, 2], (), Sampling()).tokens) == 1


def test_a_tensor_that_its_layer_does_not_know_is_refused(tmp_path):
    path = folder(tmp_path / "bias")
    change(path, lambda held: held.update({UP.replace("weight", "bias"): torch.ones(96)}))
    refused(path, "has model.layers.1.mlp.up_proj.bias, of which")


def test_what_no_layer_of_the_model_owns_may_lie_beside_it(tmp_path):
    path = folder(tmp_path / "spare")
    change(path, lambda held: held.update({"vision.tower.weight": torch.ones(2)}))
    assert load(path).vocabulary == 600


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    path = folder(tmp_path / "shape")
    change(path, lambda held: held.update({UP: torch.zeros(90, 64)}))
    refused(path, rf"{UP} in .* has the shape \(90, 64\) and config.json asks for \(96, 64\)")


def test_a_vocabulary_smaller_than_the_weights_is_refused(tmp_path):
    path = folder(tmp_path / "small")
    edit(path, vocab_size=500)
    refused(path, r"has the shape \(600, 64\)")


def test_a_bin_file_cut_short_is_refused(tmp_path):
    path = folder(tmp_path / "bin")
    whole = io.BytesIO()
    torch.save(load_file(path / "model.safetensors"), whole)
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(whole.getvalue()[:-5000])
    refused(path, "cannot be loaded")


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("compressed-tensors", {"format": "pack-quantized"}),
        ("awq", {"bits": 4}),
        ("bitsandbytes", {"load_in_4bit": True}),
    ],
)
def test_quantised_weights_without_their_package_are_refused(tmp_path, monkeypatch, method, more):
    for package in ("compressed_tensors", "awq", "gptqmodel", "bitsandbytes"):
        monkeypatch.setitem(sys.modules, package, None)
    path = folder(tmp_path / "quantised")
    edit(path, quantization_config={"quant_method": method} | more)
    refused(path, rf"(?i)cannot be loaded.*{method}")


# ---------------------------------------------------------------- kinds

BARE = {"hidden_size": 64, "num_hidden_layers": 2}
HEADS = {"n_head": 4, "n_layer": 2}
STRANGE = {
    "bloom": {"hidden_size": 64} | HEADS,
    "falcon": BARE | {"num_attention_heads": 4},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2},
    "bert": BARE | {"num_attention_heads": 4, "intermediate_size": 96},
    "mamba": BARE,
    "rwkv": BARE,
}


@pytest.mark.parametrize("kind", STRANGE)
def test_kinds_that_the_lane_cannot_run_are_refused(tmp_path, kind):
    refused(folder(tmp_path / kind, kind, STRANGE[kind]), f"(kind {kind}|{kind} models)")


def test_a_model_of_two_halves_is_refused(tmp_path):
    AutoConfig.for_model("t5", d_model=64, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    refused(tmp_path, "cannot be loaded as a causal language model")


def test_an_unknown_kind_of_positions_is_refused(tmp_path):
    path = folder(tmp_path / "rope")
    edit(path, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
    refused(path, "cannot be loaded.*spiral")


def test_a_folders_own_code_is_neither_run_nor_asked_about(tmp_path, monkeypatch, capsys):
    """transformers asked on standard output and read the answer from standard input."""
    path = folder(tmp_path / "own")
    edit(path, model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"})
    (path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    refused(path, "cannot be loaded")
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("named", "ends"),
    [("<|im_end|>", {0, 2}), ({"content": "<|im_end|>"}, {0, 2}), ("<|nowhere|>", {0})],
    ids=["text", "object", "unknown"],
)
def test_the_tokenizers_end_token_ends_an_answer_too(tmp_path, monkeypatch, named, ends):
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path / "cache"))
    draft, path = toy.write_gguf(tmp_path / "draft.gguf"), folder(tmp_path / "model", eos_token_id=0)
    (path / "generation_config.json").unlink()
    tokenizer.build(gguf.read(draft)).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    settings = config.load(target=str(path), draft=str(draft), context_length=128, device="cpu")
    assert load_chat(settings, lambda *_: None).engine.eos == ends


# ---------------------------------------------------------------- what is measured


def test_what_other_code_has_measured_is_measured_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path / "cache"))
    settings = config.load(target=str(toy.write_gguf(tmp_path / "a.gguf")), draft=str(tmp_path / "a.gguf"))
    measured = lambda: len(list((tmp_path / "cache" / "calibration").iterdir()))  # noqa: E731
    for _ in range(2):
        Engine.load(settings)
    assert measured() == 1
    monkeypatch.setattr(engine_module, "measurer", lambda: (1, "here", "changed"))
    Engine.load(settings)
    assert measured() == 2


# ---------------------------------------------------------------- positions


def test_all_decoders_give_one_text_past_the_switch_of_positions(tmp_path, monkeypatch):
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path / "cache"))
    draft = toy.write_gguf(tmp_path / "draft.gguf")
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, "rope_theta": 1e4}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [1.0 + 3 * i for i in range(8)]}
    more = {"original_max_position_embeddings": 64, "pad_token_id": 0, "rope_parameters": rope}
    path = folder(tmp_path / "phi", "phi3", **more)
    tokens = gguf.read(draft)
    tokenizer.build(tokens).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer.settings(tokens)))
    settings = config.load(target=str(path), draft=str(draft), context_length=256, max_tokens=90, device="cpu")
    chat = load_chat(settings, lambda *_: None)
    texts = {}
    for name in DECODERS:
        steps = chat.reply([{"role": "user", "content": "one two three four"}], Options.of(settings, decoder=name))
        texts[name] = [token for step in steps if step.round for token in step.round.tokens]
    assert len(texts["autoregressive"]) == 90
    assert all(text == texts["autoregressive"] for text in texts.values())
