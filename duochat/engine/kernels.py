"""Small kernels in C, each built once by the system's compiler."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from duochat import DuoChatError
from duochat.engine import machine
from duochat.models.store import cache_dir

FAULTS = (OSError, subprocess.SubprocessError)


@cache
def library(source: Path, *options: str) -> ctypes.CDLL | None:
    """The compiled source, from the user's cache or made now (about a second); None without a compiler that can.

    options: for the compiler, after -march=native. A cache that cannot be written costs the making at each start.
    """
    compiler = _compiler()
    if not compiler:
        return None
    identity = f"{_text(source)}{compiler}{options}{machine.processor()}"
    name = f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    make = partial(_made, compiler, source, options)
    with suppress(*FAULTS):
        return make(cache_dir() / "kernels" / name)
    with suppress(*FAULTS), tempfile.TemporaryDirectory() as folder:
        return make(Path(folder) / name)
    return None


def needed(source: Path, *options: str) -> ctypes.CDLL:
    """`library`, or DuoChatError without a compiler."""
    made = library(source, *options)
    if made is None:
        raise DuoChatError(f"No C compiler here can build {source.name}: install one, such as gcc or clang.")
    return made


def _compiler() -> list[str]:
    """The command: $CC, which may have arguments, or the system's."""
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    return shlex.split(os.environ.get("CC", "")) or ([found] if found else [])


def _text(source: Path) -> str:
    """The source and what it includes of ours."""
    text = source.read_text()
    return text + "".join(_text(source.parent / name) for name in re.findall(r'^#include "(.+)"', text, re.MULTILINE))


def _made(compiler: list[str], source: Path, options: tuple[str, ...], path: Path) -> ctypes.CDLL:
    """The library of this name, compiled if it is not there; under its name only when it can be loaded."""
    if path.is_file():
        return ctypes.CDLL(str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        unproved = Path(folder) / path.name
        command = [*compiler, "-O3", "-march=native", "-fPIC", "-shared", *options, source, "-lm", "-o", unproved]
        subprocess.run([*map(str, command)], check=True, capture_output=True, timeout=60)
        ctypes.CDLL(str(unproved))
        os.replace(unproved, path)
    return ctypes.CDLL(str(path))
