"""The draft lane in C, for the small drafts that `distill` makes: `load` gives a drafter, `unfit` says why not."""

from duochat.engine.native.drafter import NativeDrafter, load
from duochat.engine.native.library import unfit

__all__ = ["NativeDrafter", "load", "unfit"]
