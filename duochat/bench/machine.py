"""The machine that a benchmark runs on: what it is, and how busy it was before."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from duochat import __version__
from duochat.engine.machine import available_cores
from duochat.models.catalog import gpus

PACKAGES = ("torch", "transformers", "llama-cpp-python", "tokenizers", "numpy")  # that matter for speed
BUSY = 0.15  # share of the machine that others may use before timings suffer


def describe() -> dict[str, Any]:
    """Processor, memory, cards and versions; how busy the machine is just now, so call it before loading models."""
    import psutil

    versions = {"duochat": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "cpu": cpu_name(),
        "cores": available_cores(),
        "cores_of_host": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "cpu_load": psutil.cpu_percent(interval=1.0) / 100,
        "load_average": list(psutil.getloadavg()),
        "gpus": gpus(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions,
    }


def warning(machine: dict[str, Any]) -> str:
    """A sentence when the machine was busy before the start, else ""."""
    devices = [{"name": "the CPU", "load": machine["cpu_load"]}, *machine["gpus"]]
    busy = [f"{one['name']} is {100 * one['load']:.0f} % busy" for one in devices if one["load"] > BUSY]
    return f"Before the start {' and '.join(busy)} with other work: expect noisy timings." if busy else ""


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
