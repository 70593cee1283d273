"""Hardware: what each device costs on this machine, and the draft budget that follows. `hardware.js` draws it."""

from __future__ import annotations

from typing import Any

from duochat import DuoChatError
from duochat.app.jobs import Job, Jobs
from duochat.app.load import Machine
from duochat.chat.worker import Worker


class Hardware:
    """What the page's tab can ask for."""

    def __init__(self, engine: Worker) -> None:
        self._engine, self._machine = engine, Machine()
        self._jobs, self._fault = Jobs(kept=0), ""

    def look(self, _action: dict[str, Any]) -> dict[str, Any]:
        """What is known now: `hardware` as `chat --json` has it, and the devices' load (see `Machine`)."""
        hardware, measuring = self._engine.status()["hardware"], self._jobs.under_way("measure") is not None
        return {"hardware": hardware, "load": self._machine.load(), "fault": self._fault, "measuring": measuring}

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
