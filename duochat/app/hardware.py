"""Hardware: what each device costs on this machine, and the draft budget that follows. `hardware.js` draws it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from duochat import DuoChatError
from duochat.app.jobs import Job, Jobs
from duochat.app.load import Machine
from duochat.chat.answer import Engine

Series = list[tuple[int, float]]
CURVES = ("target", "draft", "sweep")  # a forward by tokens in it, a batch by sequences, a drafted token by threads
WEIGHTS = "The target’s weights alone"  # a pair's need in `Models` has the cache and working space on top
FACTS = {  # what is told of the devices, in this order
    "target_device": "The target runs on", "target_dtype": "Its numbers are", "target_weight_bytes": WEIGHTS,
    "draft_backend": "The draft is computed by", "draft_threads": "Threads of the draft", "cores": "Processor cores",
    "draft_fault": "The draft does not work",
}  # fmt: skip
BACKENDS = {"native": "DuoChat’s own code in C"}


def table(costs: Mapping[str, Any]) -> dict[str, Series]:
    """The measured curves as (size, seconds), sizes ascending; [] where nothing was measured."""
    return {key: sorted((int(n), float(s)) for n, s in (costs.get(key) or {}).items()) for key in CURVES}


def widening(target: Series) -> float:
    """Share of a narrow forward that each further token adds, from width 1 to the one nearest to 8."""
    if len(target) < 2:
        return 0.0
    (first, narrow), (width, wide) = target[0], min(target[1:], key=lambda point: abs(point[0] - 8))
    return max(0.0, (wide - narrow) / (width - first) / narrow)


def facts(hardware: Mapping[str, Any]) -> dict[str, str]:
    """What is known of the devices, in words; what people cannot read is left to `chat --json`."""
    told = {FACTS[k]: str(hardware[k]) for k in FACTS if hardware.get(k) not in (None, "", "none")}
    if WEIGHTS in told:
        told[WEIGHTS] = f"{int(told[WEIGHTS]) / 2**30:.2f} GiB; cache and working space come on top"
    return {name: BACKENDS.get(value, value) for name, value in told.items()}


class Hardware:
    """What the page's tab can ask for."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._machine = engine, Machine()
        self._jobs, self._fault = Jobs(kept=0), ""

    def look(self, _action: dict[str, Any]) -> dict[str, Any]:
        """What is known now: the curves, the threads they belong to, words, and the devices' load (see `Machine`)."""
        hardware = self._engine.status()["hardware"]
        costs = hardware.get("costs") or {}
        return {
            "curves": table(costs), "threads": costs.get("threads"), "facts": facts(hardware),
            "shared": bool(hardware.get("shares_cores")), "load": self._machine.load(), "fault": self._fault,
            "measuring": self._jobs.under_way("measure") is not None,
        }  # fmt: skip

    def measure(self, action: dict[str, Any]) -> dict[str, Any]:
        """Measure both devices anew, in the background; `look` tells when it is done, or what went wrong."""
        if not self._jobs.under_way("measure"):
            self._jobs.start(self._measure, "measure")
        return self.look(action)

    def _measure(self, _job: Job) -> None:
        self._fault = ""
        try:
            self._engine.calibrate()
        except DuoChatError as fault:
            self._fault = str(fault)


def build(part: Callable[..., Any], engine: Engine) -> Any:
    """The tab's content, inside a gr.Tab. part: `page.part`."""
    hardware = Hardware(engine)
    return part("hardware", serve=[hardware.look, hardware.measure])
