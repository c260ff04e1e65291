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
        keys: Any = self.keys  # `DynamicLayer` types them as absent before the first call
        used, added = keys.shape[2], key_states.shape[2]
        if self._key_buffer is None or self._value_buffer is None or used + added > self._key_buffer.shape[2]:
            capacity = max(2 * used, used + added + 32)
            self._key_buffer = _grown(keys, capacity)
            values: Any = self.values
            self._value_buffer = _grown(values, capacity)
        self._key_buffer[:, :, used : used + added] = key_states
        self._value_buffer[:, :, used : used + added] = value_states
        self.keys = self._key_buffer[:, :, : used + added]
        self.values = self._value_buffer[:, :, : used + added]
        return self.keys, self.values

    def shorten(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        keys: Any = self.keys
        values: Any = self.values
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]

    def reorder_cache(self, beam_idx: Any) -> None:
        """Keep the rows at these indices, in this order; an index may come several times."""
        if self._key_buffer is None or self._value_buffer is None:
            super().reorder_cache(beam_idx)
            return
        used = self.get_seq_length()
        index = beam_idx.to(self._key_buffer.device)
        self._key_buffer = self._key_buffer.index_select(0, index)
        self._value_buffer = self._value_buffer.index_select(0, index)
        self.keys = self._key_buffer[:, :, :used]
        self.values = self._value_buffer[:, :, :used]


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


def takes_rows(cache: Any) -> bool:
    """Whether every layer can repeat and drop rows. `reorder_cache` is asked for, as it carries the recurrent
    state of hybrid layers too; their inherited `batch_repeat_interleave` repeats the keys alone."""
    return bool(cache.layers) and all(hasattr(layer, "reorder_cache") for layer in cache.layers)


def as_index(rows: list[int], device: torch.device) -> Tensor:
    """Row numbers as an index tensor on `device`."""
    return torch.tensor(rows, dtype=torch.long, device=device)
