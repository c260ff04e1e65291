"""A key-value cache that grows in place and can lose rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):
    """`DynamicLayer` without a copy of the whole cache per token: keys and values live in a buffer that doubles,
    and `update` returns views of the filled part."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._key_buffer: Tensor | None = None
        self._value_buffer: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (rows, heads, t, D) and return all keys and values so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = key_states.new_empty(*key_states.shape[:2], 0, key_states.shape[3])
            self.values = value_states.new_empty(*value_states.shape[:2], 0, value_states.shape[3])
        used, added = self.keys.shape[2], key_states.shape[2]
        if self._key_buffer is None or self._value_buffer is None or used + added > self._key_buffer.shape[2]:
            capacity = max(2 * used, used + added + 32)
            self._key_buffer = _grown(self.keys, capacity)
            self._value_buffer = _grown(self.values, capacity)
        self._key_buffer[:, :, used : used + added] = key_states
        self._value_buffer[:, :, used : used + added] = value_states
        self.keys = self._key_buffer[:, :, : used + added]
        self.values = self._value_buffer[:, :, : used + added]
        return self.keys, self.values

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times: one prefilled prompt becomes K rows."""
        if self.is_initialized:
            self._rebuild(self.keys.repeat_interleave(repeats, dim=0), self.values.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices`."""
        if self.is_initialized:
            self._rebuild(self.keys.index_select(0, indices), self.values.index_select(0, indices))

    def _rebuild(self, keys: Tensor, values: Tensor) -> None:
        self._key_buffer = self._value_buffer = None
        self.keys, self.values = keys, values


def _grown(states: Tensor, capacity: int) -> Tensor:
    buffer = states.new_empty(*states.shape[:2], capacity, states.shape[3])
    buffer[:, :, : states.shape[2]] = states
    return buffer


def new_cache(config: Any) -> DynamicCache:
    """A cache for a decoder of this configuration: growing layers in place of plain dynamic ones, and
    transformers' own where the layer is a sliding window or has another kind of state."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def repeats_rows(cache: Any) -> bool:
    """Whether every layer of the cache can repeat and drop rows."""
    return bool(cache.layers) and all(
        hasattr(layer, "batch_repeat_interleave") and hasattr(layer, "batch_select_indices") for layer in cache.layers
    )


def as_index(rows: list[int], device: torch.device) -> Tensor:
    """Row numbers as an index tensor on `device`."""
    return torch.tensor(rows, dtype=torch.long, device=device)
