"""Sentences for what ends an engine: an exception that nobody expected, or the death of its process."""

from __future__ import annotations

import signal

from duochat import terminal

DEATHS = {
    "SIGKILL": f"The engine was killed (SIGKILL), most often because memory ran out: {terminal.MEMORY}.",
    "SIGTERM": "The engine was ended from outside (SIGTERM): see who did it, then try again.",
    "SIGILL": "A library of the engine was built for another processor (SIGILL): on this machine, run "
    f"{terminal.INSTALL} --force-reinstall --no-cache-dir.",
}
CRASHED = (
    "A library of the engine crashed ({}): its own words, if any, are on the terminal. Update llama-cpp-python and "
    "torch, choose another pair, or start the servers of rpc again."
)


def sentence(fault: Exception) -> str:
    """What happened and what to do, for an exception while models are loaded or used."""
    return (
        terminal.explained(fault) or f"The engine failed ({terminal.named(fault)}): try again, or choose another pair."
    )


def obituary(code: int | None, answering: bool) -> str:
    """What the engine's process died of. code: its exit status, below 0 a signal. answering: a text was under way."""
    name = signal.Signals(-code).name if code and code < 0 else ""
    died = DEATHS.get(name) or (CRASHED.format(name) if name else f"The engine ended (exit status {code}): try again.")
    return f"{died} The text so far is kept, and your next message starts it again." if answering else died
