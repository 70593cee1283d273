"""A draft that proposes only the tokens that its target uses most; it reads all.

The output layer of a small model with a large vocabulary takes a good part of its time; the draft lane in C computes
these tokens' logits alone (a frequency-ranked vocabulary, as in FR-Spec, arXiv 2502.14856). A token that was cut is
never drafted by the model; that costs a rejection, never a word of the answer.
"""

from __future__ import annotations

import numpy as np

from duochat import DuoChatError
from duochat.models import gguf

RANKING = "duochat.frequent_tokens"  # in the file's metadata: token ids, the most frequent first
HALF = "half"  # of the tokens that the file ranks
ALL = 2**31 - 1  # more tokens than any vocabulary has


def kept(header: gguf.Header, most: int | str) -> np.ndarray | None:
    """The `most` frequent tokens, which a draft may propose, int64, ascending; None = all.

    "auto" keeps what the file itself ranks as frequent, HALF the first half of that, and both all tokens of a file
    without a ranking. In such a file a number keeps the lowest ids: a byte-pair vocabulary numbers the common merges
    first.
    """
    ranking = header.metadata.get(RANKING, [])
    size = {"auto": len(ranking), HALF: len(ranking) // 2}.get(most, most)
    vocabulary = next((t.shape[0] for t in header.tensors if t.name == "token_embd.weight"), 0)
    if not 0 < size < vocabulary:
        return None
    return np.sort(np.fromiter(dict.fromkeys([*ranking, *range(vocabulary)]), np.int64, size))


def named(reference: str) -> tuple[str, int | str]:
    """A draft named "REF" or "REF@N": the reference, and how many tokens it may propose; "REF@0": all."""
    name, _, most = reference.partition("@")
    if most and not most.isdecimal():
        raise DuoChatError(f"{reference!r} is not REF or REF@N, N a number of tokens: such as {name}@16384.")
    return name, (int(most) or ALL) if most else "auto"
