"""How busy the machine is: the CPU by psutil, the GPU by NVML where there is one."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import psutil

PERIOD = 0.5  # seconds between two readings


class Machine:
    """Readings are taken by a thread of its own while somebody asks; `load` never waits."""

    def __init__(self) -> None:
        self._load: dict[str, float] = {}
        self._asked = 0.0
        self._wake = threading.Event()
        threading.Thread(target=self._read, name="machine", daemon=True).start()

    def load(self) -> dict[str, float]:
        """Utilisation 0..1: {"cpu": ...} and, with an NVIDIA GPU, {"gpu": ...}; empty before the first reading."""
        self._asked = time.monotonic()
        self._wake.set()
        return self._load

    def _read(self) -> None:
        gpu = _first_gpu()
        psutil.cpu_percent()
        while True:
            self._wake.wait()
            if time.monotonic() - self._asked > 5:
                self._wake.clear()
            time.sleep(PERIOD)
            self._load = {"cpu": psutil.cpu_percent() / 100} | (gpu() if gpu else {})


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
