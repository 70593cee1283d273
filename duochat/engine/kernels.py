"""Small kernels in C, each built once by the system's compiler. Without a compiler their callers do without."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import platformdirs

THREADING = (["-fopenmp"], [])  # tried in this order


@cache
def library(source: Path, *options: str, threading: bool = False, beside: str = "") -> ctypes.CDLL | None:
    """The compiled source, from the user's cache or made now (about a second); None without a compiler that can.

    options: for the compiler. threading: with OpenMP where there is one. beside: what else it was made for.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        return None
    identity = f"{source.read_text()}{compiler}{options}{beside}{_processor()}"
    folder = Path(platformdirs.user_cache_dir("duochat")) / "kernels"
    made = folder / f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    try:
        if not made.is_file():
            _compile(compiler, source, options, THREADING if threading else THREADING[1:], made)
        return ctypes.CDLL(str(made))
    except (OSError, subprocess.SubprocessError):
        return None


def _compile(
    compiler: str, source: Path, options: tuple[str, ...], threadings: tuple[list[str], ...], made: Path
) -> None:
    """Under its final name only when it can be loaded.

    Linked without OpenMP: its symbols come from the library that torch has loaded, so both share one pool of threads.
    """
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        object_file, partial = Path(folder) / "kernel.o", Path(folder) / made.name
        for threading in threadings:
            try:
                _run(compiler, "-O3", "-march=native", "-fPIC", *options, *threading, "-c", source, "-o", object_file)
                _run(compiler, "-shared", object_file, "-lm", "-o", partial)
                ctypes.CDLL(str(partial))
            except (OSError, subprocess.SubprocessError):
                if threading == threadings[-1]:
                    raise
            else:
                os.replace(partial, made)
                return


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=60)


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
