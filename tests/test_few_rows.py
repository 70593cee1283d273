"""Linear layers for few rows: which product is chosen, and that it is the layer's. The kernel itself needs Triton."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from duochat.engine.pytorch import few_rows
from duochat.engine.pytorch.few_rows import FewRows, Tiling

INTERPRETED = """
import torch
from duochat.engine.pytorch.few_rows import Tiling, product
torch.manual_seed(0)
weight = torch.randn(128, 512).half()
for count in (1, 3, 16, 17, 32):
    rows = torch.randn(1, count, 512).half()
    for tiling in (Tiling(16, 256, 3, 2), Tiling(64, 128, 3, 4)):
        wanted = torch.nn.functional.linear(rows.float(), weight.float())
        assert (product(rows, weight, tiling).float() - wanted).abs().max() < 2e-3 * wanted.std(), (count, tiling)
"""


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch, tmp_path):
    monkeypatch.setattr(few_rows, "_chosen", {})
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path))


def layers(dtype=torch.bfloat16):
    torch.manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(256, 64, dtype=dtype), torch.nn.Linear(64, 256, bias=False, dtype=dtype))
    return made.requires_grad_(False)


def measured(monkeypatch, library, kernel, kernel_fits=True):
    """As if the products took so many seconds: library and kernel by rows."""
    monkeypatch.setattr(few_rows, "kernel", lambda: None)
    monkeypatch.setattr(few_rows, "product", lambda rows, weight, tiling: torch.nn.functional.linear(rows, weight) + 1)
    monkeypatch.setattr(few_rows, "_usable", lambda rows, weight: few_rows.TILINGS[:2] if kernel_fits else ())

    def seconds(multiply, weights):
        return (kernel if multiply.keywords else library)(len(multiply.args[0]))

    monkeypatch.setattr(few_rows, "seconds", seconds)


def test_the_kernel_multiplies_where_it_is_faster_and_nowhere_else(monkeypatch):
    measured(monkeypatch, library=lambda rows: 1.0, kernel=lambda rows: 0.5 if rows < 8 else 1.5)
    plain, swapped = layers(), layers()
    assert few_rows.swap(swapped)
    assert all(isinstance(layer, FewRows) for layer in swapped)
    for rows, added in ((4, 1), (8, 0), (3, 0), (100, 0)):  # of 3 rows nothing was measured
        x = torch.randn(1, rows, 256, dtype=torch.bfloat16)
        wanted = torch.nn.functional.linear(x, plain[0].weight) + added + plain[0].bias
        torch.testing.assert_close(swapped[0](x), wanted)


@pytest.mark.parametrize(("faster", "fits"), [(False, True), (True, False)])
def test_a_model_stays_as_it_is_where_the_kernel_is_slower_or_wrong(monkeypatch, faster, fits):
    measured(monkeypatch, lambda rows: 1.0, lambda rows: 0.5 if faster else 0.99, fits)
    model = layers()
    assert not few_rows.swap(model)
    assert all(type(layer) is torch.nn.Linear for layer in model)


@pytest.mark.parametrize("faster", [True, False])
def test_the_choice_is_kept_for_the_next_start(monkeypatch, tmp_path, faster):
    measured(monkeypatch, lambda rows: 1.0, lambda rows: 0.5 if faster else 1.5)
    assert few_rows.swap(layers()) == faster
    measured(monkeypatch, lambda rows: 1.0, lambda rows: 1.5 if faster else 0.5)
    monkeypatch.setattr(few_rows, "_chosen", {})
    assert few_rows.swap(layers()) == faster
    for note in (tmp_path / "facts").glob("few-rows-*"):
        note.write_text("[[")  # damaged: measured again
    monkeypatch.setattr(few_rows, "_chosen", {})
    assert few_rows.swap(layers()) != faster


def test_float32_is_left_alone(monkeypatch):
    measured(monkeypatch, library=lambda rows: 1.0, kernel=lambda rows: 0.5)
    assert not few_rows.swap(layers(torch.float32))


def test_without_triton_nothing_changes(monkeypatch):
    monkeypatch.setattr(few_rows, "kernel", few_rows.kernel.__wrapped__)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert not few_rows.swap(layers())


def test_a_tiling_takes_whole_tiles_only():
    tiling = Tiling(16, 128, 3, 2)
    assert tiling.fits(torch.empty(64, 256))
    assert not tiling.fits(torch.empty(72, 256))
    assert not tiling.fits(torch.empty(64, 200))
    assert not tiling.fits(torch.empty(2**21, 1024, device="meta"))


def test_a_tiling_that_fails_or_errs_is_not_used(monkeypatch):
    def product(rows, weight, tiling):
        if tiling == few_rows.TILINGS[1]:
            raise RuntimeError("too much shared memory")
        return torch.nn.functional.linear(rows, weight) * (1.5 if tiling == few_rows.TILINGS[2] else 1.001)

    monkeypatch.setattr(few_rows, "product", product)
    rows, weight = torch.randn(4, 512), torch.randn(128, 512)
    assert [*few_rows._usable(rows, weight)] == [t for i, t in enumerate(few_rows.TILINGS) if i not in (1, 2)]


def test_it_can_be_compiled():
    model = FewRows(layers()[0])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (2, 5):
        x = torch.randn(1, rows, 256, dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_the_kernel_multiplies():
    ran = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
