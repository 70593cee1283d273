"""A library that dies on this CPU is noticed before it is used: a stand-in raises the signal where a real one would."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from duochat import DuoChatError
from duochat.engine.llama import probe

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

STAND_IN = '''
"""llama.cpp with a fault that $FAULT names."""
import importlib.util, os, signal, sys

here = os.path.dirname(__file__)
sys.path.remove(os.path.dirname(here))
del sys.modules["llama_cpp"]
real = importlib.util.find_spec("llama_cpp")
module = importlib.util.module_from_spec(real)
sys.modules["llama_cpp"] = module
real.loader.exec_module(module)
load, decode = module.llama_model_load_from_file, module.llama_decode
extra = True

def remembering(path, params):
    global extra
    extra = params.use_extra_bufts
    return load(path, params)

def dying(context, batch):
    fault = os.environ["FAULT"]
    if fault == "always" or fault == "extra" and extra or fault == "tiles" and extra and batch.n_tokens > 1:
        os.kill(os.getpid(), signal.SIGILL)
    if fault == "memory":
        os.kill(os.getpid(), signal.SIGKILL)
    return decode(context, batch)

module.llama_model_load_from_file, module.llama_decode = remembering, dying
if os.environ["FAULT"] == "import":
    os.kill(os.getpid(), signal.SIGILL)
'''


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Gives the library a fault; returns the processes that were asked for."""
    package = tmp_path / "stand-in" / "llama_cpp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "ROOT", package.parent)  # stands before what is installed
    asked = []
    run = probe._run
    monkeypatch.setattr(probe, "_run", lambda way: (asked.append(way), run(way))[1])

    def faulty(fault: str) -> list[str]:
        monkeypatch.setenv("FAULT", fault)
        probe._found.cache_clear()
        asked.clear()
        return asked

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    yield faulty
    probe._found.cache_clear()


def test_a_library_that_lives_is_asked_once(library):
    asked = library("none")
    assert [probe.extra_buffers() for _ in range(2)] == [(True, "")] * 2
    assert asked == ["extra"]
    asked = library("none")  # the next start
    assert probe.extra_buffers() == (True, "")
    assert asked == []


@pytest.mark.parametrize("fault", ["extra", "tiles"])
def test_one_that_dies_in_its_special_kernels_goes_without_them(library, fault):
    asked = library(fault)
    extra, notice = probe.extra_buffers()
    assert not extra
    assert "dies on this CPU with its fastest kernels" in notice
    assert probe.rebuild() in notice
    assert asked == ["extra", "plain"]
    asked = library(fault)
    assert probe.extra_buffers() == (extra, notice)
    assert asked == []


@pytest.mark.parametrize("fault", ["always", "import"])
def test_one_that_dies_always_is_refused_with_the_command(library, fault):
    library(fault)
    for _ in range(2):
        with pytest.raises(DuoChatError, match=r"dies on this CPU: build it anew with CMAKE_ARGS=.*--force-reinstall"):
            probe.extra_buffers()


@pytest.mark.parametrize("fault", ["memory", "none"])
def test_only_what_is_sure_is_remembered(library, monkeypatch, fault):
    """A probe that the system killed for memory, or could not start, says nothing of the CPU."""
    if fault == "none":
        monkeypatch.setattr(probe.sys, "executable", "/nonexistent/python")
    library(fault)
    assert probe.extra_buffers() == (True, "")
    assert not list((Path(os.environ["DUOCHAT_CACHE"])).glob("facts/*"))


def test_another_library_or_cpu_is_asked_anew(library, monkeypatch):
    library("none")
    probe.extra_buffers()
    monkeypatch.setattr(probe.machine, "processor", lambda: "flags: amx_tile")
    asked = library("extra")
    assert not probe.extra_buffers()[0]
    assert asked == ["extra", "plain"]


def test_a_cache_that_cannot_be_written_is_gone_without(library, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DUOCHAT_CACHE", str(tmp_path / "file"))
    asked = library("extra")
    assert not probe.extra_buffers()[0]
    library("extra")
    assert not probe.extra_buffers()[0]
    assert asked == ["extra", "plain"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_library_in_a_folder_of_its_own_brings_its_devices(tmp_path, monkeypatch):
    """llama-cpp-python takes llama.cpp from there, but its module for ggml the wheel's, which may know no GPU."""
    import llama_cpp

    own = shutil.copytree(Path(llama_cpp.__file__).parent / "lib", tmp_path / "lib")
    before = probe.identity()
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(own))
    assert probe.identity() != before
    script = "from duochat.engine.llama import devices; devices.found(); print(open('/proc/self/maps').read())"
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script], cwd=root, text=True, capture_output=True, check=True)
    loaded = {Path(line.split()[-1]) for line in done.stdout.splitlines() if "/lib" in line}
    assert {file.parent for file in loaded if file.name.startswith(("libggml", "libllama"))} == {own}


def test_asking_loads_no_library():
    script = "import sys; from duochat.engine.llama import probe; print('llama_cpp' in sys.modules)"
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script], cwd=root, text=True, capture_output=True, check=True)
    assert done.stdout == "False\n"


def test_a_lane_tells_what_was_found(library, tmp_path):
    from test_drafter import write_tiny_model

    from duochat.engine.llama.drafter import LlamaDrafter

    library("extra")
    lane = LlamaDrafter(write_tiny_model(tmp_path / "tiny.gguf"), 64, 1)
    assert lane.describe()["draft_notice"] == probe.extra_buffers()[1] != ""
    lane.close()
