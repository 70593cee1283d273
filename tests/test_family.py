"""A target like Qwen2.5-Coder-0.5B, made narrow: biases, a head apart, 152,000 tokens with padding at their end.

Random weights: what is said makes no sense, and must be the same with every decoder.
"""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("llama_cpp")

from toy_models import byte_level_vocabulary, write_gguf

from duochat.__main__ import main
from duochat.distill import gguf_file
from duochat.distill.student import student_of
from duochat.distill.training import Plan
from duochat.models import weights

NAMED, ALL = 151_665, 151_936  # tokens that the tokenizer has, and rows of the embedding


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The arguments that name a target and a draft cut out of it, as `distill` writes it."""
    folder = tmp_path_factory.mktemp("family")
    tokens, merges = byte_level_vocabulary()
    tokens += [f"Ġword{i}" for i in range(len(tokens), NAMED)] + [f"[PAD{i}]" for i in range(NAMED, ALL)]
    source = gguf_file.Source.open(write_gguf(folder / "target.gguf", "qwen2", (tokens, merges), context=4096))
    student = student_of(weights.loaded(source.header), Plan.parse("64x2").config(source.config))
    gguf_file.write_student(student, source, folder / "draft.gguf", "q4_0", "draft", range(0, ALL, 6))
    return ["--target", str(folder / "target.gguf"), "--draft", str(folder / "draft.gguf")]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path_factory.getbasetemp() / "family-cache"))


def test_the_pair_fits(pair, capsys):
    assert main(["check", *pair]) == 0
    assert f"{ALL} tokens in common" in capsys.readouterr().out


@pytest.mark.slow
def test_all_decoders_say_the_same(pair, capsys):
    said = []
    for decoder in ("autoregressive", "duotree", "duodecoding"):
        asked = ["chat", "Hello there", "--decoder", decoder, "--max-tokens", "24", "--temperature", "0.7", "--json"]
        assert main([*asked, *pair]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert len(said[0]["token_ids"]) == 24
    assert all(one["token_ids"] == said[0]["token_ids"] for one in said)
    assert said[1]["hardware"]["draft_backend"] == "native"


@pytest.mark.slow
def test_the_benchmark_measures_it(pair, tmp_path, capsys):
    options = ["--tasks", "chat,code", "--limit", "1", "--max-tokens", "12", "--json", str(tmp_path / "found.json")]
    assert main(["bench", *options, *pair]) == 0
    assert "duotree" in capsys.readouterr().out
