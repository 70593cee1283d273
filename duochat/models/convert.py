"""A target that transformers can load: a folder stays itself, a GGUF file is converted once into the cache.

A folder that has a SentencePiece file only is joined by links in the cache, beside the tokenizer.json made from it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from duochat import DuoChatError
from duochat.models import gguf, sentencepiece, store, tokenizer, weights
from duochat.models.store import Progress, silent

FORMAT = 1  # raise it when the converted folder's content changes
SAMPLE = 1 << 20


def target_folder(path: Path, progress: Progress | None = None) -> Path:
    """The folder with config.json, tokenizer and weights of a target. Raises DuoChatError when there can be none."""
    progress = progress or silent
    if path.is_dir():
        return _with_tokenizer(_checked(path), progress)
    header = gguf.read(path)

    def build(partial: Path) -> None:
        partial.mkdir()
        progress(f"Reading the vocabulary of {path.name}", 0, 0)
        weights.write_config(header, partial)
        tokenizer.write_tokenizer(header, partial)
        weights.write_weights(header, partial, progress)

    return store.make_once(converted(path), build, progress)


def _with_tokenizer(folder: Path, progress: Progress) -> Path:
    pieces = folder / "tokenizer.model"
    if (folder / "tokenizer.json").is_file():
        return folder
    if not pieces.is_file():
        raise DuoChatError(f"{folder} has no tokenizer.json: copy the model's tokenizer there or fetch it again.")

    def build(partial: Path) -> None:
        partial.mkdir()
        progress(f"Reading the vocabulary of {folder.name}", 0, 0)
        tokenizer.from_pieces(sentencepiece.read(pieces)).save(str(partial / "tokenizer.json"))
        for file in folder.iterdir():
            (partial / file.name).symlink_to(file.resolve())

    joined = store.cache_dir() / "converted" / f"{folder.name}-{_fingerprint(pieces, str(folder.resolve()))}"
    return store.make_once(joined, build, progress)


def require_target(path: Path) -> None:
    """Raises DuoChatError when `path` cannot serve as a target; converts nothing."""
    if path.is_dir():
        _checked(path)
    else:
        weights.config(gguf.read(path))


def converted(path: Path) -> Path:
    """Where the folder made from a GGUF file lies, or would lie: named after the file and its content."""
    return store.cache_dir() / "converted" / f"{path.stem}-{_fingerprint(path)}"


def _fingerprint(path: Path, salt: str = "") -> str:
    """Stands for a file's content without reading gigabytes: its size, its first and its last MiB."""
    size = path.stat().st_size
    sha = hashlib.sha256(f"{FORMAT} {size} {salt}".encode())
    with path.open("rb") as f:
        sha.update(f.read(SAMPLE))
        f.seek(max(0, size - SAMPLE))
        sha.update(f.read(SAMPLE))
    return sha.hexdigest()[:12]


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise DuoChatError(f"{folder} is no model folder (it has no config.json): give one made by transformers.")
    weights.refuse_broken(folder)
    return folder
