"""Small kernels in C, each built once by the system's compiler. Without a compiler their callers do without."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from functools import cache, partial
from pathlib import Path

from duochat.models import cache_dir

THREADING = (["-fopenmp"], [])  # tried in this order
FAULTS = (OSError, subprocess.SubprocessError)


@cache
def library(source: Path, *options: str, threading: bool = False, beside: str = "") -> ctypes.CDLL | None:
    """The compiled source, from the user's cache or made now (about a second); None without a compiler that can.

    options: for the compiler, after -march=native. threading: with OpenMP where there is one. beside: what else it was
    made for. A cache that cannot be written costs the making at each start.
    """
    compiler = _compiler()
    if not compiler:
        return None
    identity = f"{_text(source)}{compiler}{options}{beside}{_processor()}"
    name = f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    make = partial(_made, compiler, source, options, THREADING if threading else THREADING[1:])
    try:
        return make(cache_dir() / "kernels" / name)
    except FAULTS:
        pass
    try:
        with tempfile.TemporaryDirectory() as folder:
            return make(Path(folder) / name)
    except FAULTS:
        return None


def _compiler() -> list[str]:
    """The command: $CC, which may have arguments, or the system's."""
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return shlex.split(os.environ.get("CC", "")) or ([found] if found else [])


def _text(source: Path) -> str:
    """The source and what it includes of ours."""
    text = source.read_text()
    return text + "".join(_text(source.parent / name) for name in re.findall(r'^#include "(.+)"', text, re.MULTILINE))


def _made(
    compiler: list[str], source: Path, options: tuple[str, ...], threadings: tuple[list[str], ...], path: Path
) -> ctypes.CDLL:
    """The library of this name, compiled if it is not there; under its name only when it can be loaded.

    Linked without OpenMP: its symbols come from the library that torch has loaded, so both share one pool of threads.
    """
    if path.is_file():
        return ctypes.CDLL(str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        object_file, unproved = Path(folder) / "kernel.o", Path(folder) / path.name
        for threading in threadings:
            try:
                _run(*compiler, "-O3", "-march=native", "-fPIC", *options, *threading, "-c", source, "-o", object_file)
                _run(*compiler, "-shared", object_file, "-lm", "-o", unproved)
                ctypes.CDLL(str(unproved))
            except FAULTS:
                if threading == threadings[-1]:
                    raise
            else:
                break
        os.replace(unproved, path)
    return ctypes.CDLL(str(path))


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=60)


def _processor() -> str:
    """What -march=native depends on: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine() + platform.node()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
