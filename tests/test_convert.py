"""A GGUF target on torch: the same function, the same tokens as llama.cpp."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import toy_models
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from toy_models import byte_level_vocabulary, sentencepiece_vocabulary, write_gguf, write_sentencepiece

from duochat import DuoChatError
from duochat.chat.text import Tokenizer
from duochat.engine.pytorch.loading import end_tokens, read_config
from duochat.models import gguf, weights
from duochat.models import tokenizer as conversion
from duochat.models.files import require_target
from duochat.models.sentencepiece import Pieces

KINDS = [GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1]
TEXTS = [
    "What is the capital of France?",
    "In 2024, 3.14159 and 1234567 items cost $99.50, 50% off.",
    "def f(x):\n    return x**2  # squared\n\n\n\tif a:\r\n\r\n",
    "  leading   spaces  and trailing   ",
    "日本語 😀👩‍👩‍👧 émigré naïve ﬁ ½ ²³ Ⅷ ١٢٣",
    "I'm you're they'LL DON'T don’t",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    '!!!???...---___*** {"k": [1, 22, 333]}',
    "a\u00a0b\u200bc",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path / "cache"))


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_converted_model_is_the_same_function(tmp_path, architecture):
    """llama.cpp on the file and transformers on the folder give the same logits (fp32 throughout)."""
    import llama_cpp
    import torch

    path = write_gguf(tmp_path / "toy.gguf", architecture, quantized=GGMLQuantizationType.F32)
    ids = [5, 9, 77, 300, 4]
    model = weights.loaded(gguf.read(path))
    with torch.no_grad():
        ours = model(torch.tensor([ids])).logits[0].numpy()
    theirs = llama_cpp.Llama(str(path), n_ctx=64, logits_all=True, n_threads=1, type_k=0, type_v=0, verbose=False)
    theirs.eval(ids)
    np.testing.assert_allclose(ours, np.array(theirs.scores[: len(ids)]), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_value_is_kept(tmp_path, kind):
    """What is quantised becomes exactly what the gguf package makes of it."""
    path = write_gguf(tmp_path / "toy.gguf", "qwen2", quantized=kind)
    made = dict(weights.loaded(gguf.read(path)).named_parameters())
    assert len(made) == len(GGUFReader(path).tensors)
    for tensor in GGUFReader(path).tensors:
        *layer, part, what = tensor.name.split(".")
        inside = f"model.layers.{layer[1]}.{weights.LAYER[part]}" if layer else weights.MODEL[part]
        np.testing.assert_array_equal(made[f"{inside}.{what}"], dequantize(tensor.data, tensor.tensor_type))


def test_a_model_in_parts_is_read_as_one(tmp_path):
    write_gguf(tmp_path / "parts.gguf", part=8)
    parts, whole = (tmp_path / "parts-00001-of-00003.gguf", write_gguf(tmp_path / "whole.gguf"))
    require_target(parts)
    one, other = (weights.loaded(gguf.read(path)).state_dict() for path in (parts, whole))
    assert all(one[name].equal(other[name]) for name in one.keys() | other.keys())


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("llama", "blk.1.ffn_up.weight"),
        ("llama", "token_embd.weight"),
        ("qwen2", "blk.0.attn_k.bias"),
        ("qwen3", "blk.1.attn_q_norm.weight"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path, architecture, name):
    """transformers would invent it, at random, anew at each start."""
    path = write_gguf(tmp_path / "toy.gguf", architecture, without=[name])
    for use in (read_config, require_target):
        with pytest.raises(DuoChatError, match=f"lacks the tensor {name}: fetch or copy the whole model"):
            use(path)


def test_a_header_that_does_not_say_its_shape_is_refused(tmp_path):
    path = write_gguf(tmp_path / "toy.gguf")
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"llama.embedding_length", b"llama.embedding_lengtx"))
    with pytest.raises(DuoChatError, match="does not say its embedding_length"):
        require_target(path)


@pytest.mark.parametrize(
    ("architecture", "extra", "says"),
    [
        ("mamba", {}, "architecture 'mamba' is not converted .only llama, qwen2, qwen3.*hf:owner/repo"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, "scales its rotary positions"),
        ("qwen2", {"qwen2.attention.sliding_window": "64"}, "holds attention.sliding_window, which is not converted"),
        ("llama", {"llama.rope.dimension_count": "8"}, "holds rope.dimension_count, which is not converted"),
    ],
)
def test_what_would_not_be_the_same_function_is_refused(tmp_path, architecture, extra, says):
    path = write_gguf(tmp_path / "toy.gguf", architecture, extra=extra)
    for use in (read_config, require_target):
        with pytest.raises(DuoChatError, match=says):
            use(path)


# ---------------------------------------------------------------- tokenizers


@pytest.fixture(scope="module", params=["bytes", "llama"])
def both(request, tmp_path_factory):
    """The converted tokenizer of a vocabulary, and llama.cpp's."""
    import llama_cpp

    vocabulary = byte_level_vocabulary() if request.param == "bytes" else "llama"
    path = write_gguf(tmp_path_factory.mktemp("vocabulary") / "toy.gguf", vocabulary=vocabulary)
    return conversion.build(gguf.read(path)), llama_cpp.Llama(str(path), vocab_only=True, verbose=False)


def agree(both, text):
    ours, theirs = both
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ids == theirs.tokenize(text.encode(), add_bos=False, special=True), text
    return ids


@pytest.mark.parametrize("text", TEXTS)
def test_texts_become_llama_cpps_tokens(both, text):
    assert both[0].decode(agree(both, text), skip_special_tokens=False).strip() == text.strip()


@settings(max_examples=150, deadline=None)
@example(text="what <unk> is")
@given(text=st.text(st.characters(blacklist_categories=["Cs", "Cn"]), max_size=40).filter(lambda t: "\0" not in t))
def test_any_text_becomes_llama_cpps_tokens(both, text):
    agree(both, text)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2"])
def test_other_families_cut_words_alike(tmp_path, pre):
    import llama_cpp

    path = write_gguf(tmp_path / "toy.gguf", extra={"tokenizer.ggml.pre": pre})
    ours = conversion.build(gguf.read(path))
    theirs = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in TEXTS:
        agree((ours, theirs), text)
        assert ours.encode(text).ids == theirs.tokenize(text.encode(), add_bos=True, special=True)


def test_a_bare_text_begins_as_for_llama_cpp(both):
    ours, theirs = both
    assert ours.encode("Hi").ids == theirs.tokenize(b"Hi", add_bos=True)


def test_letters_are_never_joined_to_a_control_token():
    """Else what a user types could end a turn, however it is encoded."""
    tokens, scores, types = sentencepiece_vocabulary()
    pieces = Pieces([*tokens, "<s", "<", ">"], [*scores, -1.0, -2.0, -2.0], [*types, 1, 1, 1])
    made = conversion.from_pieces(pieces)
    made.encode_special_tokens = True
    assert made.encode("<s>").tokens == ["▁", "<s", ">"]


def test_an_unknown_vocabulary_is_refused(tmp_path):
    path = write_gguf(tmp_path / "toy.gguf", extra={"tokenizer.ggml.pre": "klingon"})
    with pytest.raises(DuoChatError, match="kind 'klingon' is not converted"):
        Tokenizer.load(path)


def test_template_and_stop_tokens_come_along(tmp_path):
    header = gguf.read(write_gguf(tmp_path / "toy.gguf"))
    conversion.write_tokenizer(header, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == toy_models.TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
    assert end_tokens(weights.loaded(header)) == {0, 2}


# ---------------------------------------------------------------- folders


def model_folder(folder, **files):
    """A folder with config.json and these files; an underscore in a name stands for the dot."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    return folder


def test_a_folder_with_pieces_only_is_read(tmp_path):
    """The Vicuna folders on the hub are such."""
    folder = model_folder(tmp_path / "m", model_bin="weights")
    write_sentencepiece(folder / "tokenizer.model", *sentencepiece_vocabulary())
    tokens = sentencepiece_vocabulary()[0]
    assert [tokens[id] for id in Tokenizer.load(folder).encode("the model")] == ["▁the", "▁model"]


def test_a_unigram_vocabulary_is_refused(tmp_path):
    write_sentencepiece(tmp_path / "tokenizer.model", *sentencepiece_vocabulary(), model_type=1)
    with pytest.raises(DuoChatError, match="unigram vocabulary"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"\x0a", b"\x0a\xff\xff\xff\xff", b"not pieces", b"\x0a\x02\x08\x01"])
def test_damaged_pieces_are_refused(tmp_path, content):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(DuoChatError, match=r"tokenizer.model is (no SentencePiece model|a unigram)"):
        Tokenizer.load(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(DuoChatError, match="has no tokenizer"):
        Tokenizer.load(model_folder(tmp_path / "b", model_bin=""))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model folder that transformers wrote."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("whole") / "m"
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=600, num_hidden_layers=2, **shape)).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def test_a_folder_that_transformers_loads_can_be_a_target(folder):
    require_target(folder)


def cut(to):
    return lambda folder: os.truncate(folder / "model.safetensors", to)


def in_parts(index):
    """The weights under the name of the first of two parts, and what lists them."""

    def change(folder):
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        (folder / "model.safetensors.index.json").write_text(index)

    return change


@pytest.mark.parametrize(
    "harm",
    [
        *map(cut, (0, 4, 20, 100_000)),
        *map(in_parts, ("{", "[]", '{"weight_map": []}', '{"metadata": {}, "weight_map": {"a": "2.safetensors"}}')),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "config.json").write_text("["),
        lambda folder: (folder / "config.json").write_text("[]"),
        lambda folder: (folder / "config.json").unlink(),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(folder, harm):
    harm(folder)
    with pytest.raises(DuoChatError, match=r"cannot be loaded as a causal.*: fetch or copy it again") as fault:
        require_target(folder)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda held: held.pop("model.layers.1.mlp.up_proj.weight"),
            r"lacks model.layers.1.mlp.up_proj.weight: its weights",
        ),
        (
            lambda held: held.update({"model.norm.weight": np.zeros(3, np.float32)}),
            r"the shape \(3,\) and config.json asks for \(64,\)",
        ),
        (
            lambda held: held.update({"x": held.pop("lm_head.weight")}),
            r"lacks lm_head.weight: its weights are incomplete",
        ),
    ],
)
def test_weights_that_transformers_would_invent(folder, change, says):
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DuoChatError, match=says):
        require_target(folder)


def test_transformers_own_report_is_not_for_people(folder):
    held = load_file(folder / "model.safetensors")
    del held["model.norm.weight"]
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    command = [sys.executable, "-m", "duochat", "check", "--target", str(folder)]
    done = subprocess.run(command, text=True, capture_output=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "lacks model.norm.weight" in line


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "mamba"}, "is a mamba without attention: choose another model"),
        ({"model_type": "t5"}, "cannot be loaded as a causal language model"),
        ({"model_type": "klingon"}, "cannot be loaded as a causal language model"),
        ({"model_type": "x", "auto_map": {"AutoConfig": "configuration_x.X"}}, "cannot be loaded as a causal"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "klingon"}}, "cannot be loaded as a causal"),
    ],
)
def test_a_kind_that_cannot_be_a_target(folder, config, says, capfd, monkeypatch):
    """A folder with code of its own is not asked about on the terminal either."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_x.py").write_text("raise SystemExit('it ran')")
    monkeypatch.setattr("builtins.input", None)
    with pytest.raises(DuoChatError, match=says):
        require_target(folder)
    assert capfd.readouterr() == ("", "")
