"""A widened target computes what the small one computes."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from duochat import DuoChatError
from duochat.distill.widen import LIKE, Shape, write
from duochat.distill.widened import widen
from duochat.engine.pytorch import TorchTarget
from duochat.engine.sampling import Sampling
from duochat.models.weights import RECIPE, recipe, refuse_broken


def small(**changes):
    torch.manual_seed(1)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6}
    config = LlamaConfig(vocab_size=90, num_key_value_heads=2, head_dim=4, **sizes, **changes)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("shape", [Shape(32, 64, 3, 8, 8, 8), Shape(40, 48, 4, 12, 4, 16), Shape(24, 40, 2, 8, 2, 4)])
@pytest.mark.parametrize("tied", [True, False])
def test_same_logits(shape, tied):
    """More heads than the small one, fewer queries a key head, more queries a key head, head size times 1, 2 and 4."""
    model = small(tie_word_embeddings=tied)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight.normal_(1, 0.3)
    large = widen(model, shape, torch.device("cpu"), torch.float32)
    assert large.config.hidden_size == shape.hidden
    assert len(large.model.layers) == shape.layers
    ids = torch.randint(0, 90, (2, 11))
    with torch.no_grad():
        expected, got = model(ids).logits, large(ids).logits
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)
    assert not torch.equal(large.model.layers[0].mlp.up_proj.weight[-1], torch.zeros(shape.hidden)) or shape.ffn == 40


def test_a_target_that_is_too_large_is_refused():
    with pytest.raises(DuoChatError, match="larger"):
        widen(small(), Shape(16, 64, 3, 8, 8, 8), torch.device("cpu"), torch.float32)


def test_a_widened_folder_loads_as_any_other_and_says_what_it_stands_for(tmp_path, monkeypatch):
    monkeypatch.setitem(LIKE, "llama-2-7b", Shape(32, 64, 3, 8, 8, 8))
    small().save_pretrained(tmp_path / "small")
    write(tmp_path / "small", "llama-2-7b", tmp_path / "wide")
    refuse_broken(tmp_path / "wide")
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
