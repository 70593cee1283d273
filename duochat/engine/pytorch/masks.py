"""What each row of a forward sees, from the bits that `rows` packs to the masks that attention adds."""

from __future__ import annotations

from typing import Any

import torch

from duochat import DuoChatError
from duochat.engine.pytorch.attention import grouped

Windows = dict[str, int | None]
Sections = dict[str, torch.Tensor]
Masks = dict[str, torch.Tensor]
NEEDED = ("slot", "position", "ancestors", "committed")  # of the packed rows


def build(sections: Sections, positions: torch.Tensor, windows: Windows, config: Any, dtype: torch.dtype) -> Masks:
    """Additive masks in the form that our attention takes, one for each kind of the model's layers.

    sections: NEEDED, ancestors as (rows, words). positions: of all slots that attention reads. windows: how far a kind
    of layer sees, None: everywhere.
    """
    seen = visible(sections["committed"], sections["ancestors"], sections["slot"], positions.shape[0])
    position = sections["position"][:, None]
    return {
        kind: additive(seen if window is None else seen & (position - positions < window), config, dtype)
        for kind, window in windows.items()
    }


def visible(committed: torch.Tensor, ancestors: torch.Tensor, slots: torch.Tensor, span: int) -> torch.Tensor:
    """(rows, span) bool: a row sees the committed slots and those of its ancestors, itself among them."""
    rows = slots.shape[0]
    owner = torch.full((span + 1,), rows, dtype=torch.int64, device=slots.device)
    owner[slots.clamp(max=span)] = torch.arange(rows, device=slots.device)
    owner = owner[:span]  # the row that writes to a slot; `rows`: none does
    kin = _bit(ancestors, owner.clamp(max=rows - 1)) & (owner < rows)
    return kin | _bit(committed, torch.arange(span, device=slots.device))


def additive(seen: torch.Tensor, config: Any, dtype: torch.dtype) -> torch.Tensor:
    """0 where seen, -inf elsewhere."""
    return grouped(torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -torch.inf), config)


def _bit(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The bits of int32 words (along the last dimension, lowest first) at these places."""
    return (words[..., places >> 5] >> (places & 31)) & 1 > 0


def windows(config: Any) -> Windows:
    """The sliding window of each kind of layer, None: sees all. A model without kinds has the single kind ""."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return {"": window}
    known = {"full_attention": None, "sliding_attention": window}
    if strange := set(kinds) - known.keys():
        raise DuoChatError(f"The target model has layers of kind {min(strange)}: choose a model with plain attention.")
    return {kind: known[kind] for kind in set(kinds)}
