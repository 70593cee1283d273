"""A target that transformers can load: a folder stays itself, a GGUF model is converted once into the cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

from duochat.models import folder, gguf, store, tokenizer, weights
from duochat.models.store import Progress, silent

FORMAT = 3  # raise it when the converted folder's content changes


def target_folder(path: Path, progress: Progress | None = None) -> Path:
    """The folder with config.json and weights of a target. Raises DuoChatError when there can be none."""
    progress = progress or silent
    if path.is_dir():
        return path
    header = gguf.read(path)
    weights.config(header)  # refuses what has none before its gigabytes are read

    def build(partial: Path) -> None:
        partial.mkdir()
        progress(f"Unpacking the weights of {path.name}", 0, 0)
        weights.unpack(header, partial)
        tokenizer.write_tokenizer(header, partial)

    return store.make_once(converted(header, progress), build, progress)


def require_target(path: Path) -> None:
    """Raises DuoChatError when `path` cannot serve as a target of torch; converts nothing, reads no weights."""
    if path.is_dir():
        folder.require_loadable(path)
    else:
        weights.config(gguf.read(path))


def converted(header: gguf.Header, progress: Progress = silent) -> Path:
    """Where the folder made from a GGUF model lies, or would lie: named after the model and its whole content."""
    digests = [store.digest_of(part, progress) for part in header.parts]
    name = hashlib.sha256(f"{FORMAT} {digests}".encode()).hexdigest()[:12]
    return store.cache_dir() / "converted" / f"{header.path.stem}-{name}"
