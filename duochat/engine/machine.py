"""What this machine lends a process: its cores, their abilities, its memory; and what measures it."""

from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from pathlib import Path

import psutil

from duochat import DuoChatError


def available_cores() -> int:
    """Cores that this process may use: its affinity, cut by the control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return max(1, cores)


def processor() -> str:
    """What -march=native depends on: a home folder may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine() + platform.node()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def measurer() -> tuple[int, str, str]:
    """What a measured time belongs to beside the models: these cores, this machine, and this version of the lanes."""
    return available_cores(), platform.node(), _code()


@cache
def _code() -> str:
    sources = sorted(p for p in Path(__file__).parent.rglob("*") if p.suffix in (".c", ".py"))
    return hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()


def require_memory(need: int, what: str, remedy: str) -> None:
    """Raises DuoChatError for bytes that are not free: the system would grant them, and then kill us."""
    free = psutil.virtual_memory().available
    if need > free:
        raise DuoChatError(f"{what} needs {need / 2**30:.1f} GiB of memory, {free / 2**30:.1f} are free: {remedy}.")
