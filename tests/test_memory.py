"""What fits in a device's memory, and what is said when nothing does."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from toy_models import write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

from duochat import DuoChatError
from duochat.engine.pytorch import TorchTarget, loading, memory
from duochat.engine.pytorch.memory import GIB, Need
from duochat.engine.sampling import Sampling
from duochat.models import weights

SEVEN = Need(weights=13_460_000_000, token=2 * 32 * 32 * 128 * 2)
CUDA = torch.device("cuda")


def there(monkeypatch, gib: float) -> None:
    monkeypatch.setattr(memory, "free", lambda _: int(gib * GIB))


def test_need_of_a_model():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=100, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    need = Need.of(config, torch.bfloat16)
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
    assert need.weights == 2 * (2 * layer + 2 * 100 * 64 + 5 * 64)
    assert need.total(10) - need.total(0) == 10 * 2 * 2 * 2 * 16 * 2


def test_what_does_not_fit_names_what_would(monkeypatch):
    there(monkeypatch, 16)
    with SEVEN.held(4096, CUDA):
        there(monkeypatch, 14.5)
    with pytest.raises(
        DuoChatError, match=r"15\.\d GiB and 14\.5 GiB are free.*context_length \d+, a GGUF of it .* or a smaller"
    ):
        SEVEN.held(4096, CUDA).__enter__()
    there(monkeypatch, 3)
    with pytest.raises(DuoChatError, match="choose a GGUF of it in fewer bits or a smaller target"):
        SEVEN.held(4096, CUDA).__enter__()


def tiny_folder(path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=2, eos_token_id=[3, 5], **sizes))
    model.save_pretrained(path)
    return path


def test_running_out_while_loading_or_reading_is_the_users_matter(monkeypatch, tmp_path):
    folder = tiny_folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(loading.folder, "loaded", Mock(side_effect=torch.OutOfMemoryError("CUDA: no")))
        with pytest.raises(DuoChatError, match="GiB are free"):
            TorchTarget.load(folder, device="cpu")
    target = TorchTarget.load(folder, device="cpu", threads=1)
    assert target.eos == {3, 5}
    with monkeypatch.context() as patch:
        patch.setattr(target._forward, "answer", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA: no")))
        with pytest.raises(DuoChatError, match="ran out of memory"):
            target.verify([1, 2], (), Sampling())
    assert len(target.verify([1, 2], (), Sampling()).tokens) == 1


def test_running_out_while_a_file_is_unpacked_is_said_alike(monkeypatch, tmp_path):
    path = write_gguf(tmp_path / "toy.gguf")
    monkeypatch.setattr(weights, "allocated", Mock(side_effect=torch.OutOfMemoryError("CUDA: no")))
    with pytest.raises(DuoChatError, match="GiB are free"):
        TorchTarget.load(path, device="cpu")


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
            TorchTarget.load(tmp_path, threads=2)  # an empty folder
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(usual)
