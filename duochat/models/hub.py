"""The Hugging Face Hub, `hf:owner/repo[/file]`, by its own client, its cache and its settings (HF_HOME, HF_TOKEN)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from duochat import DuoChatError
from duochat.config import FORMS
from duochat.models import gguf, store
from duochat.models.store import Progress

PATTERN = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>.+))?")
MODEL_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]  # beside the weights


def fetch(reference: str, progress: Progress) -> Path:
    """The file, with the other parts of its model, or the folder, in the hub's cache. Raises DuoChatError."""
    from httpx import HTTPError
    from huggingface_hub import errors, hf_hub_download

    repo, file = parse(reference)
    try:
        with store.disk_faults(store.cache_dir()):
            bar = _bar(f"Downloading {file or repo}", progress)
            if not file:
                return _folder(repo, tqdm_class=bar)
            first, *_ = [hf_hub_download(repo, part, tqdm_class=bar) for part in gguf.part_names(file)]
            return Path(first)
    except errors.GatedRepoError:
        raise DuoChatError(f"{repo} is gated: accept its licence on the hub, then run `hf auth login`.") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise DuoChatError(f"The hub has no public model {repo}: check the name, or run `hf auth login`.") from None
    except errors.RemoteEntryNotFoundError:
        raise DuoChatError(f"{repo} has no file {file}: check the name on the hub.") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, HTTPError):
        raise DuoChatError(f"No network, so {repo} cannot be fetched: connect, or name a model you have.") from None


def cached(reference: str) -> Path | None:
    """The file or folder if it is in the hub's cache already."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError

    repo, file = parse(reference)
    if file:
        found = try_to_load_from_cache(repo, file)
        return Path(found) if isinstance(found, str) else None
    try:
        return _folder(repo, local_files_only=True)
    except LocalEntryNotFoundError:
        return None


def parse(reference: str) -> tuple[str, str | None]:
    """The repository and the file in it, None for the whole of it."""
    match = PATTERN.fullmatch(reference)
    if not match:
        raise DuoChatError(f"{reference!r} is no reference to the model hub: {FORMS}.")
    return match["repo"], match["file"]


def _folder(repo: str, **options: Any) -> Path:
    """Configuration, tokenizer and weights; safetensors where the repository has them, else PyTorch's own."""
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(repo, allow_patterns=[*MODEL_FILES, "*.safetensors"], **options))
    if not list(folder.glob("*.safetensors")):
        folder = Path(snapshot_download(repo, allow_patterns=[*MODEL_FILES, "*.bin"], **options))
    return folder


def _bar(label: str, progress: Progress) -> type:
    """A progress bar class for the hub's client that draws nothing and reports bytes."""
    from tqdm.auto import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.bytes = options.get("unit") == "B"
            options.pop("name", None)
            super().__init__(*args, **options)

        def display(self, *_: Any, **__: Any) -> None:
            if self.bytes:
                progress(label, int(self.n), int(self.total or 0))

        def close(self) -> None:
            if not self.disable:  # the last bytes, once
                self.display()
            super().close()

    return Bar
