"""What fits in a device's memory, and what is said when nothing does."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from duochat import DuoChatError
from duochat.engine.pytorch import TorchTarget, loading, memory
from duochat.engine.pytorch.memory import GIB, Need
from duochat.engine.sampling import Sampling

SEVEN = Need(linear=6_600_000_000, other=130_000_000, slot=2 * 32 * 32 * 128, size=2)
CUDA = torch.device("cuda", 0)  # a card by its number: never spread


def there(monkeypatch, gib: float, cards: int = 1) -> None:
    monkeypatch.setattr(memory, "free", lambda _: int(gib * GIB))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)


def test_need_of_a_model():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=100, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    need = memory.needed(config, torch.bfloat16)
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
    assert need.linear == 2 * layer + 100 * 64
    assert need.other == 100 * 64 + 5 * 64
    assert need.cache(10) == 10 * 2 * 2 * 2 * 16 * 2
    assert need.weights("none") == 2 * (need.linear + need.other)
    assert need.weights("4bit") < need.weights("8bit") < need.weights("none")


@pytest.mark.parametrize(("gib", "chosen"), [(24, "none"), (12, "8bit"), (8, "4bit")])
def test_auto_takes_what_fits_and_says_so(monkeypatch, gib, chosen):
    there(monkeypatch, gib)
    plan = memory.plan(SEVEN, 4096, "auto", CUDA)
    assert plan.quantize == chosen
    assert (chosen in plan.note) == (chosen != "none")


def test_what_does_not_fit_names_what_would(monkeypatch):
    there(monkeypatch, 14.5)
    with pytest.raises(
        DuoChatError, match=r"15\.\d GiB and 14\.5 GiB are free.*8bit or context_length \d+ or a smaller"
    ):
        memory.plan(SEVEN, 4096, "none", CUDA)
    there(monkeypatch, 3)
    with pytest.raises(DuoChatError, match="choose a smaller target"):
        memory.plan(SEVEN, 4096, "auto", CUDA)


def test_several_cards_take_what_one_cannot(monkeypatch):
    there(monkeypatch, 12, cards=2)
    assert memory.plan(SEVEN, 4096, "none", torch.device("cuda")).spread
    assert not memory.plan(SEVEN, 4096, "8bit", torch.device("cuda")).spread
    with pytest.raises(DuoChatError):
        memory.plan(SEVEN, 4096, "none", CUDA)


def tiny_folder(path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, eos_token_id=[3, 5], **sizes))
    model.save_pretrained(path)
    return path


def test_running_out_while_loading_or_reading_is_the_users_matter(monkeypatch, tmp_path):
    folder = tiny_folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(loading, "_weights", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA: no")))
        with pytest.raises(DuoChatError, match="GiB are free"):
            TorchTarget.load(folder, device="cpu")
    target = TorchTarget.load(folder, device="cpu", threads=1)
    assert target.eos == {3, 5}
    with monkeypatch.context() as patch:
        patch.setattr(target._forward, "answer", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA: no")))
        with pytest.raises(DuoChatError, match="ran out of memory"):
            target.verify([1, 2], (), Sampling())
    assert len(target.verify([1, 2], (), Sampling()).tokens) == 1


@pytest.mark.parametrize("quantize", ["8bit", "4bit"])
def test_quantisation_without_its_package(monkeypatch, tmp_path, quantize):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(DuoChatError, match="pip install torchao"):
        TorchTarget.load(tiny_folder(tmp_path), device="cpu", quantize=quantize)


def test_8bit_weights_give_nearly_the_same_answers(tmp_path):
    pytest.importorskip("torchao")
    folder, rows = tiny_folder(tmp_path), []
    for quantize in ("none", "8bit"):
        target = TorchTarget.load(folder, device="cpu", quantize=quantize, threads=1)
        rows.append(target.verify([1, 2, 3], [(4, -1)], Sampling()).node_probs[0])
    assert rows[0] == pytest.approx(rows[1], rel=0.05)
    assert rows[0] != rows[1]


@pytest.mark.parametrize(
    ("options", "said"), [({"device": "cuda"}, "Device cuda"), ({"device": "cpu", "dtype": "int3"}, "dtype int3")]
)
def test_bad_options(monkeypatch, tmp_path, options, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DuoChatError, match=said):
        TorchTarget.load(tiny_folder(tmp_path), **options)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(DuoChatError, match=r"config\.json"):
        TorchTarget.load(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 9}')
    with pytest.raises(DuoChatError, match="cannot be loaded"):
        TorchTarget.load(tmp_path, device="cpu")


def test_torch_keeps_one_thread_beside_a_gpu(monkeypatch, tmp_path):
    """Its OpenMP pool and the draft's together would outnumber the cores."""
    monkeypatch.setattr(loading, "pick_device", lambda _: torch.device("cuda"))
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(DuoChatError):
            loading.load(TorchTarget, tmp_path, threads=2)  # an empty folder
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(usual)
