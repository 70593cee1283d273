"""The KV cache that the model is given: rows are written at the slots named, and only the span in use is read."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

SPARE = 32  # slots beyond the capacity; the first takes what padding rows write, the rest keep the length aligned


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, each (1, heads, capacity + SPARE, head size), allocated at the first update."""

    is_compileable = True

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        length = self.cache.capacity + SPARE
        self.keys = key_states.new_zeros(*key_states.shape[:2], length, key_states.shape[-1])
        self.values = value_states.new_zeros(*value_states.shape[:2], length, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows' states at `cache.slots` and return the slots that `cache.reach` covers.

        A decoder layer may be handed this object in place of the whole cache: further arguments say which layer.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, self.cache.slots, key_states)
        self.values.index_copy_(2, self.cache.slots, value_states)
        span = self.cache.reach.shape[0]
        return self.keys[:, :, :span], self.values[:, :, :span]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.reach.shape[0], 0

    def get_seq_length(self) -> int:
        return self.cache.reach.shape[0]

    def get_max_length(self) -> int:
        return self.cache.capacity


class SlotCache(Cache):
    """The layers of one model; `begin` comes before each forward."""

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.begin(torch.zeros(1, dtype=torch.int64), torch.zeros(capacity))
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])

    def begin(self, slots: torch.Tensor, reach: torch.Tensor) -> None:
        """slots: (rows,) int64, where to write. reach: (span,), whatever is in it: how many slots attention reads.

        The size of a tensor, because compiled code keeps that as a variable where it would fix a number.
        """
        self.slots, self.reach = slots, reach
