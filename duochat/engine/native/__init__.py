"""Both lanes in C, for small Llamas such as `distill` makes: `load` gives a drafter, `unfit` says why not."""

from duochat.engine.native.drafter import NativeDrafter, load
from duochat.engine.native.library import unfit
from duochat.engine.native.target import NativeTarget

__all__ = ["NativeDrafter", "NativeTarget", "load", "unfit"]
