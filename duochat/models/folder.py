"""A folder as transformers writes it: is it whole, can it be a target?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duochat import DuoChatError
from duochat.models.stand_in import recipe

if TYPE_CHECKING:
    import torch

OPTIONS = {"trust_remote_code": False, "ignore_mismatched_sizes": True, "output_loading_info": True}


def refuse_broken(folder: Path) -> None:
    """Raises DuoChatError when configuration or weights are missing or cut short; reads their heads only."""
    if not (folder / "config.json").is_file():
        raise DuoChatError(f"{folder} is no model folder (it has no config.json): give one made by transformers.")
    _json(folder / "config.json")
    if recipe(folder):
        return
    index = folder / "model.safetensors.index.json"
    listed = _json(index).get("weight_map", {}) if index.is_file() else {}
    if not isinstance(listed, dict):
        raise _damaged(index)
    if missing := sorted(name for name in set(map(str, listed.values())) if not (folder / name).is_file()):
        raise DuoChatError(f"{folder} lacks {missing[0]}: copy it there or fetch the model again.")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights and not next(folder.glob("*.bin"), None):
        raise DuoChatError(f"{folder} has no weights: copy its *.safetensors there or fetch the model again.")
    if broken := next((path for path in weights if not _is_whole(path)), None):
        raise DuoChatError(f"{broken} is cut short or damaged: delete it and fetch or copy it again.")


def require_loadable(folder: Path) -> None:
    """Raises DuoChatError when transformers would not load the folder as a decoder with all its weights.

    It loads it for real; of the weights' files only the heads are read as long as nobody asks for a value.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with usable(folder), quiet():
        about = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if getattr(about.get_text_config(), "num_attention_heads", None) is None:
            raise DuoChatError(f"{folder} is a {about.model_type} without attention: choose another model.")
        if not recipe(folder):
            refuse_invented(folder, *AutoModelForCausalLM.from_pretrained(folder, config=about, **OPTIONS))


def refuse_invented(folder: Path, model: torch.nn.Module, found: dict[str, Any]) -> None:
    """Raises DuoChatError when transformers had to invent weights, or left out what belongs to a layer.

    model, found: what its `from_pretrained` gives with OPTIONS.
    """
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


@contextmanager
def usable(folder: Path, kind: str = "") -> Iterator[None]:
    """What a folder's content makes transformers and torch raise, as one sentence: they raise everything."""
    try:
        yield
    except DuoChatError:
        raise
    except Exception as fault:
        why = first_line(fault)
        what = f"{folder} cannot be loaded as a causal language model{kind and f' of kind {kind}'}"
        raise DuoChatError(f"{what} ({why}): choose another target.") from fault


def first_line(fault: BaseException) -> str:
    """Of what an exception says, else its kind."""
    return (str(fault).strip().splitlines() or [type(fault).__name__])[0]


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


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise _damaged(path) from None
    if not isinstance(content, dict):
        raise _damaged(path)
    return content


def _damaged(path: Path) -> DuoChatError:
    return DuoChatError(f"{path} is damaged: delete it and fetch or copy it again.")


def _is_whole(path: Path) -> bool:
    """Does a safetensors file end where its head says?"""
    size = path.stat().st_size
    with path.open("rb") as f:
        head = int.from_bytes(f.read(8), "little")
        try:
            table = json.loads(f.read(head)) if head < size else {}
            ends = [entry["data_offsets"][1] for name, entry in table.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return False
    return bool(ends) and 8 + head + max(ends) == size
