"""Attention by the Triton kernel: when it is asked, and that it attends. The kernel itself needs Triton."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import LlamaConfig, LlamaForCausalLM

from duochat.engine.pytorch import TorchTarget, attention
from duochat.engine.pytorch.attention import NAME, TREE, Tiling, attend, by_kernel
from duochat.engine.pytorch.compiled import vary

INTERPRETED = """
import torch
from duochat.engine.pytorch.attention import Tiling, by_kernel, mixed
Tiling.of = classmethod(lambda cls, device: cls(132))
torch.manual_seed(0)

def check(rows, group, span, size, tiling):
    owners = 2
    query = torch.randn(1, rows, owners * group, size).half().transpose(1, 2)
    key, value = torch.full((2, 1, owners, span + 40, size), torch.nan).half()
    for states in (key, value):
        states[:, :, :span] = torch.randn(owners, span, size)
    key, value = key[:, :, :span], value[:, :, :span]
    seen = torch.rand(rows, span) < 0.5
    seen[-1] = torch.arange(span) == 3  # one slot, as a padding row
    seen[1:2] = False
    mask = torch.zeros(rows, span).masked_fill(~seen, -torch.inf).half().repeat(group, 1)[None, None]
    scores = query.float() @ key.float().repeat_interleave(group, 1).transpose(-1, -2) * 0.2 + mask[:, :, :rows]
    wanted = scores.softmax(-1).nan_to_num(0) @ value.float().repeat_interleave(group, 1)
    wanted = wanted.transpose(1, 2)
    got = mixed(query, key, value, mask, 0.2, tiling) if tiling else by_kernel(None, query, key, value, mask, 0.2)[0]
    assert got.shape == wanted.shape and got.is_contiguous() and got.dtype == torch.float16
    off = (got.float() - wanted).abs().max()
    assert off < 4e-3, (rows, group, span, size, tiling, off)

for span in (32, 256, 1536):
    for rows, group in ((1, 1), (3, 1), (16, 1), (33, 1), (64, 1), (1, 4), (3, 4), (16, 4)):
        check(rows, group, span, 32, None)
for tiling in (Tiling(6, slots=16), Tiling(2, slots=128), Tiling(400)):
    for size in (16, 128, 256):
        check(5, 3, 480, size, tiling)
"""


def states(rows=5, heads=4, owners=2, size=32, span=64, dtype=torch.bfloat16):
    """Query, key, value and mask as a model's attention gets them; the last row sees a single slot."""
    torch.manual_seed(rows)
    query = torch.randn(1, rows, heads, size).to(dtype).transpose(1, 2)
    key, value = torch.randn(2, 1, owners, span + 9, size).to(dtype)[:, :, :, :span]
    mask = torch.zeros(rows, span).masked_fill_(torch.rand(rows, span) < 0.3, -torch.inf)
    mask[:, 0], mask[-1, 1:] = 0, -torch.inf
    return query, key, value, mask.repeat(heads // owners, 1)[None, None].to(dtype)


def plain(query, key, value, mask, scale):
    return attend(None, query, key, value, mask, scale)[0]


@pytest.fixture
def asked(monkeypatch):
    """What the kernel was asked; it answers like `attend`."""
    asked = []

    def mixed(*inputs):
        asked.append(inputs)
        return plain(*inputs)

    monkeypatch.setattr(attention, "mixed", mixed)
    return asked


@pytest.mark.parametrize(
    ("changes", "options", "taken"),
    [
        ({}, {}, True),
        ({"rows": 1}, {"scaling": 0.3}, True),
        ({"rows": 32}, {}, True),
        ({"rows": 65}, {}, False),  # 130 rows of a key head
        ({"heads": 2, "rows": 64}, {}, True),
        ({"dtype": torch.float16}, {}, True),
        ({"dtype": torch.float32}, {}, False),
        ({"size": 48}, {}, False),
        ({"size": 8}, {}, False),
        ({}, {"softcap": 20.0}, False),
    ],
    ids=str,
)
def test_the_kernel_is_asked_for_few_rows_of_common_heads(asked, changes, options, taken):
    inputs = states(**changes)
    got, _ = by_kernel(None, *inputs, **options)
    wanted, _ = attend(None, *inputs, **options)
    torch.testing.assert_close(got, wanted, atol=0.02, rtol=0.02)
    assert len(asked) == taken
    if taken:
        assert asked[0][4] == options.get("scaling", 32**-0.5)


def test_one_compilation_serves_all_numbers_of_rows_and_spans(asked):
    """Of few rows; a single row has code of its own."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *inputs: by_kernel(None, *inputs)[0].flatten(2), backend=counter, fullgraph=True)
    for rows, span in ((1, 64), (1, 96), (2, 64), (5, 128), (16, 256), (32, 32), (1, 256)):
        inputs = states(rows, span=span)
        for tensor in inputs:
            vary(tensor, 2, *((3,) if tensor is inputs[3] else ()))
        torch.testing.assert_close(compiled(*inputs), plain(*inputs, 32**-0.5).flatten(2))
    assert counter.frame_count == 2
    assert len(asked) == 7


def test_stretches_cover_the_span_and_keep_a_gpu_busy():
    for tiling in (Tiling(132), Tiling(264, slots=32)):
        for span in (32, 256, 480, 1536, 4096, 32768):
            for owners in (1, 8, 32, 40, 200):
                length, count = tiling.stretch(span, owners)
                assert length % tiling.slots == 0
                assert (count - 1) * length < span <= count * length
                assert count <= attention.MOST
                assert count == 1 or count * owners <= tiling.programs
    assert Tiling(132).stretch(256, 32) == (64, 4)
    assert Tiling(132).stretch(4096, 32) == (1024, 4)
    assert Tiling(132).stretch(4096, 8) == (256, 16)


def target():
    torch.manual_seed(3)
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation=NAME)
    return TorchTarget(LlamaForCausalLM(config).eval().to(torch.bfloat16), 256)


def taken(target):
    return target._forward.model.config._attn_implementation


def test_on_a_cpu_nothing_changes(asked, monkeypatch):
    monkeypatch.setattr(attention, "kernel", lambda: None)
    made = target()
    assert taken(made) == NAME
    assert made._forward._tried() == [1, 3]
    assert (asked, made._forward.notes) == ([], [])


def broken(*_):
    class CompilationError(Exception):
        """Like Triton's, no RuntimeError."""

    raise CompilationError("no such layout\nand more")


@pytest.mark.parametrize(
    ("kernel", "name", "notes"),
    [
        (plain, TREE, []),
        (broken, NAME, ["The attention kernel failed: CompilationError: no such layout"]),
        (lambda *inputs: -plain(*inputs), NAME, ["The attention kernel gave other logits"]),
        (None, NAME, []),  # no Triton
    ],
    ids=["works", "fails", "errs", "missing"],
)
def test_the_kernel_is_taken_where_it_works(monkeypatch, kernel, name, notes):
    made = target()
    if kernel:
        monkeypatch.setattr(attention, "kernel", lambda: None)
        monkeypatch.setattr(attention, "mixed", kernel)
    else:
        monkeypatch.setattr(attention, "kernel", attention.kernel.__wrapped__)
        monkeypatch.setitem(sys.modules, "duochat.engine.pytorch.attention_kernels", None)
    made._forward.take_kernel()
    assert taken(made) == name
    assert [note[: len(start)] for note, start in zip(made._forward.notes, notes, strict=True)] == notes


def test_a_gpu_tries_as_many_rows_as_the_kernel_takes(monkeypatch):
    forward = target()._forward
    monkeypatch.setattr(forward, "device", torch.device("cuda"))
    assert forward._tried() == [1, 2, 64]  # two query heads to a key head
    monkeypatch.setattr(forward.config, "num_key_value_heads", 1)
    assert forward._tried() == [1, 2, 32]
    monkeypatch.setattr(forward.config, "num_key_value_heads", 4)
    monkeypatch.setattr(forward.cache, "capacity", 96)
    assert forward._tried() == [1, 2, 32]


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_attends():
    ran = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
