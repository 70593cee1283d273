"""What is in the cache, which presets there are, and which of them fit this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from duochat import config
from duochat.config import PAIR, Settings
from duochat.models.fetch import cached


@dataclass(frozen=True, slots=True)
class Entry:
    """One preset as `list_models` reports it; sizes in GiB."""

    name: str
    settings: Settings
    target_cached: bool
    draft_cached: bool
    unfit: str  # why it does not fit this machine; "" = it fits

    def to_dict(self) -> dict[str, object]:
        about = {name: getattr(self.settings, name) for name in PAIR if name != "chat_template"}
        cached = {"target_cached": self.target_cached, "draft_cached": self.draft_cached}
        return {"name": self.name, **about, **cached, "fits": not self.unfit, "unfit": self.unfit}


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of this machine in GiB; gpu is that of all cards together, 0 without one."""

    ram: float
    gpu: float


def list_models() -> list[Entry]:
    """All presets, the default first."""
    memory = measure()
    return [
        Entry(name, s, cached(s.target) is not None, cached(s.draft) is not None, unfit(s, memory))
        for name, s in config.presets().items()
    ]


def unfit(settings: Settings, memory: Memory) -> str:
    """Why a pair does not fit the memory, "" when it does."""
    shared = settings.target.endswith(".gguf") and settings.backend != "torch"
    return short_of(settings.target_gib, settings.draft_gib, memory, shared)


def short_of(target: float, draft: float, memory: Memory, shared: bool = False) -> str:
    """Why a target and a draft of so many GiB do not fit. Without a card torch has the target in RAM, in fp32.

    shared: llama.cpp runs the target, on the CPU what the GPU has no room for.
    """
    need, room = draft, memory.ram
    if shared:
        need, room = target + draft, memory.ram + memory.gpu
    elif not memory.gpu:
        need = 2 * target + draft
    elif target > memory.gpu:
        return f"the target needs {target:.1f} GiB on the GPU, which has {memory.gpu:.1f}"
    return f"needs {need:.1f} GiB of memory, there are {room:.1f}" if need > room else ""


def measure() -> Memory:
    """RAM by psutil and GPU memory by NVML; neither loads torch."""
    import psutil

    return Memory(psutil.virtual_memory().total / 2**30, sum(card["memory_bytes"] for card in gpus()) / 2**30)


def gpus() -> list[dict[str, Any]]:
    """Name, memory in bytes, driver and present load of each NVIDIA card."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        driver = pynvml.nvmlSystemGetDriverVersion()
        return [
            {
                "name": pynvml.nvmlDeviceGetName(handle),
                "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
                "load": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
                "driver": driver,
            }
            for handle in handles
        ]
    except pynvml.NVMLError:
        return []
