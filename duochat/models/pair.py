"""Do a target and a draft speak the same tokens? Compared string by string, without loading weights."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from duochat import DuoChatError
from duochat.models import gguf, tokenizer

PADDING = re.compile(r"\[PAD\d+\]|<(?:unused|extra_id_|reserved|dummy)\S*>|<pad>|<\|(?:extra|reserved\w*|dummy)_\d+\|>")


@dataclass(frozen=True, slots=True)
class Pair:
    """What a comparison of two vocabularies found. fits: one token list, padding at the end apart."""

    target_tokens: int
    draft_tokens: int
    shared: int  # ids that hold the same string in both
    first_difference: int | None = None
    target_token: str | None = None  # at the first difference; None = there is none
    draft_token: str | None = None

    @property
    def fits(self) -> bool:
        return self.first_difference is None

    def to_dict(self) -> dict[str, object]:
        return {"fits": self.fits, **asdict(self)}

    def sentence(self) -> str:
        """The verdict for people, with the remedy where they do not fit."""
        if self.fits:
            return f"Target and draft fit: {self.shared} tokens in common."
        return (
            f"Target and draft do not fit: token {self.first_difference} is {self.target_token!r} in the target and "
            f"{self.draft_token!r} in the draft; choose a draft of the target's own family."
        )


def check_pair(target: Path, draft: Path) -> Pair:
    """Compare the token strings of two models (GGUF file or folder) id by id.

    Unused ids past the end of the other vocabulary are padding and accepted. Raises DuoChatError when a vocabulary
    cannot be read; that they differ is an answer, see `Pair.fits`.
    """
    ours, theirs = vocabulary(target), vocabulary(draft)
    shared = 0
    for id in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(id), theirs.get(id)
        if a == b:
            shared += 1
        elif not (_is_padding(a) and _is_padding(b)):
            return Pair(len(ours), len(theirs), shared, id, a, b)
    return Pair(len(ours), len(theirs), shared)


def digest(path: Path) -> str:
    """Stands for a model's vocabulary: two that fit, in the sense of `check_pair`, have the same."""
    tokens = vocabulary(path)
    told = ["" if _is_padding(tokens.get(id)) else tokens[id] for id in range(max(tokens) + 1)]
    return hashlib.sha256("\0".join(told).rstrip("\0").encode()).hexdigest()


def vocabulary(path: Path) -> dict[int, str]:
    """Token strings by id of a GGUF file or a model folder."""
    if path.is_file():
        tokens = dict(enumerate(gguf.read(path).tokens))
    else:
        tokens = {id: token for token, id in tokenizer.of_folder(path).get_vocab().items()}
    if not tokens:
        raise DuoChatError(f"{path} holds no vocabulary: give a whole model, with its tokenizer.")
    return tokens


def _is_padding(token: str | None) -> bool:
    return token is None or PADDING.fullmatch(token) is not None
