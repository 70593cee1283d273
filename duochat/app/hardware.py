"""Hardware: what each device costs on this machine, and how busy it is; the CPU by psutil, the GPU by NVML where there
is one. `hardware.js` draws it."""

from __future__ import annotations

import os
import time
from typing import Any

import psutil

from duochat.app.jobs import Jobs
from duochat.chat.worker import Worker

PERIOD = 0.5  # seconds between two readings


class Machine:
    """How busy it is, read when somebody asks, but not before PERIOD is over."""

    def __init__(self) -> None:
        self._gpu, self._load, self._read_at = _first_gpu(), {}, time.monotonic()
        psutil.cpu_percent()  # it tells of the time since it was asked last

    def load(self) -> dict[str, float]:
        """Utilisation 0..1: {"cpu": ...} and, with an NVIDIA GPU, {"gpu": ...}; empty before the first reading."""
        if time.monotonic() - self._read_at > PERIOD:
            self._read_at = time.monotonic()
            self._load = {"cpu": psutil.cpu_percent() / 100} | (self._gpu() if self._gpu else {})
        return self._load


def others() -> float:
    """The share 0..1 of the processor that other work takes, looked at while the engine rests."""
    return psutil.cpu_percent(PERIOD) / 100


def _first_gpu() -> Any:
    """A function that reads the utilisation of the first NVIDIA GPU that CUDA may use, or None where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = _handle(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0].strip())
        pynvml.nvmlDeviceGetUtilizationRates(handle)
    except Exception:  # noqa: BLE001  no package, no driver, no such card, no right to ask: all mean "not shown"
        return None

    def read() -> dict[str, float]:
        try:
            return {"gpu": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100}
        except pynvml.NVMLError:
            return {}

    return read


def _handle(pynvml: Any, name: str) -> Any:
    """NVML's handle of a card as CUDA_VISIBLE_DEVICES names it: by number or by UUID."""
    if name.startswith(("GPU-", "MIG-")):
        return pynvml.nvmlDeviceGetHandleByUUID(name)
    return pynvml.nvmlDeviceGetHandleByIndex(int(name))


class Hardware:
    """What the page's tab can ask for."""

    def __init__(self, engine: Worker, machine: Machine) -> None:
        self._engine, self._machine = engine, machine
        self._jobs = Jobs(kept=1)

    def look(self, _action: dict[str, Any]) -> dict[str, Any]:
        """What is known now: `hardware` as `chat --json` has it, and the devices' load (see `Machine`)."""
        hardware, measuring = self._engine.status()["hardware"], self._jobs.under_way("measure") is not None
        return {
            "hardware": hardware,
            "load": self._machine.load(),
            "fault": self._jobs.error("measure"),
            "measuring": measuring,
        }

    def measure(self, action: dict[str, Any]) -> dict[str, Any]:
        """Measure both devices anew, in the background; `look` tells when it is done, or what went wrong."""
        if not self._jobs.under_way("measure"):
            self._jobs.start(lambda job: self._engine.calibrate(), "measure")
        return self.look(action)
