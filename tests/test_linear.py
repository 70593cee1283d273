"""The CPU kernel for few rows, against torch's own linear layer."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch

from duochat.engine import kernels
from duochat.engine.pytorch.linear import SkinnyLinear, skinny, swap

torch.set_num_threads(1)
needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("outputs", "inputs"), [(13, 7), (8, 576), (57, 1537), (1, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_torch(outputs, inputs, bias, threads):
    linear = torch.nn.Linear(inputs, outputs, bias=bias)
    packed = SkinnyLinear(linear, skinny())
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            for rows in range(1, 40):
                x = torch.randn(1, rows, inputs)
                assert torch.allclose(packed(x), linear(x), atol=1e-4)
    finally:
        torch.set_num_threads(1)


@needs_compiler
def test_swap_takes_float32_layers_only():
    class Special(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).bfloat16(), Special(4, 4))
    kept = copy.deepcopy(model)
    assert swap(model) == "skinny"
    assert [type(m).__name__ for m in model] == ["SkinnyLinear", "Linear", "Special"]
    assert torch.allclose(model[0](torch.eye(4)), kept[0](torch.eye(4)), atol=1e-6)


def test_without_a_compiler_the_model_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    skinny.cache_clear()
    kernels.library.cache_clear()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert swap(model) == "torch"
    assert type(model[0]) is torch.nn.Linear
    skinny.cache_clear()
    kernels.library.cache_clear()
