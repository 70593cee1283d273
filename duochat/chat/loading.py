"""From settings to a Chat: the files are fetched and checked first, then loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from duochat import DuoChatError

if TYPE_CHECKING:
    from duochat.chat.chat import Chat
    from duochat.config import Settings
    from duochat.models.files import Files
    from duochat.models.store import Progress

    Load = Callable[[], Chat]
    Prepare = Callable[[Settings, Progress], Load]  # runs in the engine's process; must be importable by name


def prepare(settings: Settings, progress: Progress, alone: bool = True) -> Load:
    """Fetch the pair and check it; the function that is returned loads it. Both raise DuoChatError.

    alone: a draft that cannot be used leaves the target to decode alone, and the engine says why. Otherwise it is
    refused.
    """
    from duochat.models.files import locate

    files = locate(settings, progress)
    if not alone and files.draft is None:
        raise DuoChatError(files.fault)
    return partial(_load, files, settings, progress, alone)


def _load(files: Files, settings: Settings, progress: Progress, alone: bool) -> Chat:
    from duochat.chat.chat import Chat
    from duochat.chat.text import Tokenizer
    from duochat.engine.engine import Engine  # llama_cpp comes with it

    tokenizer = Tokenizer.load(files.target, settings.chat_template)
    engine = Engine.load(settings, progress, files)
    if engine.fault and not alone:
        raise DuoChatError(engine.fault)
    engine.target.eos |= tokenizer.eos  # fine-tunes come whose other settings name another end token, or none
    return Chat(engine, tokenizer)


def load_chat(settings: Settings, progress: Progress) -> Chat:
    """Both steps in this process: lanes and tokenizer as the settings say. Raises DuoChatError."""
    return prepare(settings, progress)()
