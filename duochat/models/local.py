"""Models on this disk, in a folder of one's own, LM Studio's, Ollama's and the hub's cache: what each says of itself,
whether it fits this machine, and the drafts that speak its tokens."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from duochat import DuoChatError
from duochat.config import Settings
from duochat.models import gguf, pair, store
from duochat.models.catalog import Memory, measure, short_of

OTHER = re.compile(r"^mmproj|-(?!00001)\d{5}-of-\d{5}\.gguf$")  # eyes of a vision model, later parts of a model


@dataclass(frozen=True, slots=True)
class Local:
    """A model on this disk. need: GiB of its weights and, for a GGUF, of the cache of a context of default length."""

    reference: str
    name: str
    source: str
    kind: str  # "gguf" or "folder"
    architecture: str
    quantization: str
    size: float  # GiB
    need: float
    vocabulary: str  # digest of the token strings, see `pair.digest`
    unfit: str = ""  # why it cannot be a target on this machine
    drafts: tuple[str, ...] = ()  # references, the best first

    def to_dict(self) -> dict[str, Any]:
        return {"fits": not self.unfit, **asdict(self)}


def list_local(models_folder: str, shipped: Iterable[Path] = (), memory: Memory | None = None) -> list[Local]:
    """All models found, by name. shipped: drafts that lie elsewhere. What cannot be read is left out."""
    found = {model.reference: model for place in _places(models_folder) if (model := _read(*place))}
    drafts = [model for path in shipped if (model := _read(path, path.stem, "DuoChat"))]
    drafts += [model for model in found.values() if model.kind == "gguf"]
    unfit = partial(short_of, draft=0, memory=memory or measure())
    fit = [replace(m, unfit=unfit(m.need, shared=m.kind == "gguf"), drafts=_fitting(m, drafts)) for m in found.values()]
    return sorted(fit, key=lambda m: (m.name.lower(), m.reference))


def _fitting(target: Local, drafts: Iterable[Local]) -> tuple[str, ...]:
    """The smallest first: a draft's time goes with its bytes, and one of twice the work seldom guesses so much more."""
    fit = [d for d in drafts if d.vocabulary == target.vocabulary and 2 * d.size <= target.size]
    return tuple(dict.fromkeys(d.reference for d in sorted(fit, key=lambda d: d.size)))


def _places(models_folder: str) -> Iterator[tuple[Path, str, str]]:
    """(file or folder, name, source) of all that may be a model."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if models_folder:
        yield from _below(Path(models_folder).expanduser(), "models folder")
    for folder in (".lmstudio/models", ".cache/lm-studio/models"):
        yield from _below(Path.home() / folder, "LM Studio")
    for folder in (os.environ.get("OLLAMA_MODELS") or "~/.ollama/models", "/usr/share/ollama/.ollama/models"):
        yield from _ollama(Path(folder).expanduser())
    for main in Path(HF_HUB_CACHE).glob("models--*--*/refs/main"):
        repo = "/".join(main.parts[-3].split("--")[1:])
        for path, name, source in _below(main.parents[1] / "snapshots" / main.read_text().strip(), "Hugging Face"):
            yield path, repo if path.is_dir() else f"{repo}/{name}", source


def _below(folder: Path, source: str) -> Iterator[tuple[Path, str, str]]:
    for path in folder.rglob("*"):
        if path.suffix == ".gguf" and not OTHER.search(path.name):
            yield path, path.stem, source
        elif path.name == "config.json" and next(path.parent.glob("*.safetensors"), None):
            yield path.parent, path.parent.name, source


def _ollama(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """Manifests (registry/owner/name/tag) name a model's layers by digest; the one of its weights is a GGUF file."""
    for manifest in folder.glob("manifests/*/*/*/*"):
        try:
            layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
            (digest,) = [e["digest"] for e in layers if e["mediaType"] == "application/vnd.ollama.image.model"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        yield folder / "blobs" / digest.replace(":", "-"), f"{manifest.parent.name}:{manifest.name}", "Ollama"


def _read(path: Path, name: str, source: str) -> Local | None:
    """None for what is no model that could be a draft or a target."""
    try:
        kind, about = ("folder", _folder(path)) if path.is_dir() else ("gguf", _file(path))
        return Local(str(path), name, source, kind, **about)
    except (DuoChatError, OSError, ValueError, TypeError, KeyError, AttributeError, StopIteration):
        return None


def _file(path: Path) -> dict[str, Any]:
    def find() -> dict[str, Any]:
        header = gguf.read(path)
        size = sum(part.stat().st_size for part in header.parts) / 2**30
        need = size + header.cache_bytes(Settings.context_length) / 2**30
        about = {"architecture": header.architecture, "quantization": header.quantization}
        return {**about, "size": size, "need": need, "vocabulary": pair.digest(path)}

    return store.remembered("model 1", path, find)  # another number when the facts change


def _folder(path: Path) -> dict[str, Any]:
    about = json.loads((path / "config.json").read_text(encoding="utf-8"))
    size = sum(file.stat().st_size for file in path.glob("*.safetensors")) / 2**30
    kind = about.get("quantization_config", {}).get("quant_method") or about.get("dtype") or about.get("torch_dtype")
    words = next(file for name in ("tokenizer.json", "tokenizer.model") if (file := path / name).is_file())
    known = {"architecture": about["model_type"], "quantization": kind or "?", "size": size, "need": size}
    return {**known, "vocabulary": store.remembered("vocabulary", words, lambda: pair.digest(path))}
