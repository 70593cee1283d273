"""Kernels in C: built once, where the user wants them, and without a cache that can be written."""

import os
import shutil
import subprocess
import sys

import pytest

from duochat import DuoChatError
from duochat.engine import kernels

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Sources of a kernel, and a fresh cache."""
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    kernels.library.cache_clear()
    (tmp_path / "part.c").write_text("int part(void) { return 3; }\n")
    (tmp_path / "whole.c").write_text('#include "part.c"\nint whole(void) { return part() + 1; }\n')
    yield tmp_path / "whole.c"
    kernels.library.cache_clear()


def made(tmp_path):
    return [*(tmp_path / "cache" / "kernels").glob("*.so")]


def test_the_cache_is_where_the_user_says(source, tmp_path):
    assert kernels.library(source).whole() == 4
    assert len(made(tmp_path)) == 1


def test_what_is_included_counts(source, tmp_path):
    kernels.library(source)
    kernels.library.cache_clear()
    (tmp_path / "part.c").write_text("int part(void) { return 5; }\n")
    assert kernels.library(source).whole() == 6


def test_each_processor_has_its_own(source, tmp_path, monkeypatch):
    kernels.library(source)
    kernels.library.cache_clear()
    monkeypatch.setattr(kernels.machine, "processor", lambda: "another")
    kernels.library(source)
    assert len(made(tmp_path)) == 2


def test_a_cache_that_cannot_be_written(source, tmp_path):
    (tmp_path / "cache").write_text("a file stands where the folder should")
    assert kernels.library(source).whole() == 4


def test_a_damaged_kernel_is_passed_over(source, tmp_path):
    kernels.library(source)
    kernels.library.cache_clear()
    (kernel,) = made(tmp_path)
    os.unlink(kernel)  # still mapped: to write into it would harm this process
    kernel.write_bytes(b"no library")
    assert kernels.library(source).whole() == 4


def test_a_compiler_with_arguments(source, monkeypatch):
    monkeypatch.setenv("CC", "env LANG=C cc")
    assert kernels.library(source).whole() == 4


def test_a_compiler_that_fails(source, monkeypatch):
    monkeypatch.setenv("CC", "false")
    assert kernels.library(source) is None
    with pytest.raises(DuoChatError, match="No C compiler here can build"):
        kernels.needed(source)


LOADED = """
import numpy as np
from duochat.engine import choosing
from duochat.engine.native.library import _library
choosing.kernel(), _library()
assert (np.full(64, 1e-40, np.float32) * np.float32(1)).all()
"""


def test_a_kernel_leaves_small_numbers_to_others():
    """Linked with fast mathematics it set them to 0 in the thread that loaded it: a target said something else then."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
