"""A folder as transformers writes it, or `python -m duochat widen`: can it be a target?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duochat import DuoChatError, terminal
from duochat.models import gguf

if TYPE_CHECKING:
    import torch

OPTIONS = {"trust_remote_code": False, "ignore_mismatched_sizes": True, "output_loading_info": True}
RECIPE = "recipe.json"  # of what `widen` made: whose shape it has, and its timings are of that size
KEY = "duochat.stands_for"  # the same in a GGUF file's metadata


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, {} when there is no such file. Raises DuoChatError when it holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as fault:
        raise DuoChatError(f"{path} is not JSON ({fault}): fetch the model again.") from fault
    if not isinstance(content, dict):
        raise DuoChatError(f"{path} holds no settings: fetch the model again.")
    return content


def recipe(folder: Path) -> dict[str, Any]:
    """How the weights of a folder are made at load, {} where they lie in it. Raises DuoChatError.

    maker: the module whose `build(folder, device, dtype)` does it. told: what users should know of it.
    """
    path = folder / RECIPE
    made = read_json(path)
    if path.is_file() and not str(made.get("maker")).startswith("duochat."):
        raise DuoChatError(f"{path} names nobody who makes its weights: make the folder again.")
    return made


def stands_for(model: Path) -> str:
    """Such as "llama-2-7b"; "" for a model that is what it seems. Raises DuoChatError when a file is no GGUF."""
    return recipe(model).get("like", "") if model.is_dir() else gguf.read(model).metadata.get(KEY, "")


def require_loadable(folder: Path) -> None:
    """Raises DuoChatError when transformers would not load the folder as a decoder with all its weights.

    It loads it for real; of the weights' files only the heads are read as long as nobody asks for a value.
    """
    from transformers import AutoConfig

    with usable(folder), quiet():
        about = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if getattr(about.get_text_config(), "num_attention_heads", None) is None:
            raise DuoChatError(f"{folder} is a {about.model_type} without attention: choose another model.")
        if not recipe(folder):
            loaded(folder, config=about)


def loaded(folder: Path, **options: Any) -> torch.nn.Module:
    """The model of a folder as its files lie in memory; they are read when they are moved. options: transformers'.

    Raises DuoChatError when transformers had to invent weights, or left out what belongs to a layer.
    """
    from transformers import AutoModelForCausalLM

    with quiet():
        model, found = AutoModelForCausalLM.from_pretrained(folder, **OPTIONS, **options)
    if missing := found["missing_keys"]:
        raise DuoChatError(f"{folder} lacks {min(missing)}: its weights are incomplete, fetch or copy them again.")
    if found["mismatched_keys"]:
        name, there, wanted = min(found["mismatched_keys"])
        raise DuoChatError(
            f"{name} in {folder} has the shape {tuple(there)} and config.json asks for {tuple(wanted)}: "
            "fetch both again from one place."
        )
    modules = {name for name, _ in model.named_modules()}
    if spare := [name for name in found["unexpected_keys"] if name.rpartition(".")[0] in modules]:
        raise DuoChatError(f"{folder} has {min(spare)}, of which its config.json knows nothing: choose another target.")
    return model


@contextmanager
def usable(folder: Path, kind: str = "") -> Iterator[None]:
    """What a folder's content makes transformers and torch raise, as one sentence: they raise everything."""
    try:
        yield
    except DuoChatError:
        raise
    except Exception as fault:
        what = f"{folder} cannot be loaded as a causal language model{kind and f' of kind {kind}'}"
        remedy = "fetch or copy it again, or choose another target"
        raise DuoChatError(f"{what} ({terminal.named(fault)}): {remedy}.") from fault


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own report and bars: what they say becomes one sentence."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()  # for good: they write over ours and leave a semaphore behind
    try:
        yield
    finally:
        logging.set_verbosity(before)
