"""The timing and checking of the target lane runs from end to end on a CPU."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from duochat import DuoChatError
from duochat.bench import speed

CPU = torch.device("cpu")
torch.set_num_threads(1)


def test_report(tmp_path, capsys, monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=500, **sizes)).save_pretrained(tmp_path)
    monkeypatch.setattr(speed, "CONTEXTS", (64,))
    speed.report(tmp_path, "cpu", 400, "compiled")
    out = capsys.readouterr().out
    assert "context    64" in out
    assert out.count("round of 16") == len(speed.SAMPLINGS)
    assert "first token of a prompt of 128" in out


def test_a_wrong_answer_fails_the_check():
    model = speed.small(CPU)
    target = speed.fast(CPU, ())
    context, tree = list(range(40)), [(1, -1), (2, 0)]
    right = target.verify(context, tree, speed.GREEDY)
    off, different = speed._compare(right, model, context, tree, CPU)
    assert off < speed.OFF
    assert different == 0
    off, different = speed._compare(right, model, context, [(1, -1), (2, -1)], CPU)
    assert off > speed.OFF


def test_a_check_that_breaks_is_one_that_failed():
    def _broken(_):
        yield "first", True, ""
        raise RuntimeError("no\nmore")

    assert list(speed._guarded(_broken, CPU)) == [("first", True, ""), ("broken", False, "RuntimeError: no")]


def test_nothing_to_do_is_said():
    args = type("Args", (), {"self_check": False, "target": None})
    with pytest.raises(DuoChatError, match="--target"):
        speed.main(args)
