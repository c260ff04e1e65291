"""One decoding step of a Llama-like decoder, through its own layers but with a third of the calls.

With few rows a step spends as long between the matrix products as in them: wrappers around every module, one mask and
one position embedding made anew, keys repeated for every query head. `LeanStep` calls the same projections, adapters
included, and does the rest itself. Whether that computes what the model computes is not read from the family's name:
the generator holds the first step against the model's own forward and falls back to that where they differ.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_rlx.models.decoder_parts import LayerParts, decoder_parts, hooked, plain_rms_norm
from hf_rlx.rollout.cache import GrowingLayer

_Call = Callable[[Tensor], Tensor]


class _Block(NamedTuple):
    """The parts of one decoder layer, as functions."""

    before_attention: _Call
    q: _Call
    k: _Call
    v: _Call
    q_norm: _Call | None
    k_norm: _Call | None
    o: _Call
    before_mlp: _Call
    gate: _Call
    up: _Call
    act: _Call
    down: _Call
    scaling: float
    head_dim: int


class LeanStep:
    """One token a row in, next logits out. Made by `lean_step`; valid while the layers stay as they are."""

    def __init__(
        self, embed: _Call, rotary: Callable[..., Any], blocks: list[_Block], norm: _Call, head: _Call
    ) -> None:
        self.embed, self.rotary, self.blocks, self.norm, self.head = embed, rotary, blocks, norm, head

    def __call__(self, tokens: Tensor, cache: Any, bias: Tensor | None, position: Tensor) -> Tensor:
        """Append one token per row to the cache.

        Args:
            tokens: (n,). position: (n, 1), of these tokens.
            cache: with n rows; its layers are `GrowingLayer`s.
            bias: (n, 1, 1, T) added to the scores of all T tokens, this one included: 0, or -inf on padding; or None.

        Returns:
            (n, V) logits.
        """
        rows = len(tokens)
        hidden = self.embed(tokens)
        cos, sin = self.rotary(hidden, position)  # (n, 1, D)
        half = cos.shape[-1] // 2
        # rotate_half(x) sin = roll(x, D / 2) (-sin, sin): one call less, twice a layer.
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x = block.before_attention(hidden)
            shape = (rows, -1, block.head_dim)
            q, k, v = block.q(x).view(shape), block.k(x).view(shape), block.v(x).view(shape)
            if block.q_norm is not None and block.k_norm is not None:
                q, k = block.q_norm(q), block.k_norm(k)
            q = torch.addcmul(q * cos, q.roll(half, -1), sin)
            k = torch.addcmul(k * cos, k.roll(half, -1), sin)
            keys, values = layer.update(k[:, :, None], v[:, :, None])
            # The query heads that share a key head are the queries of one call: no key is repeated.
            q = q.view(rows, keys.shape[1], -1, block.head_dim)
            mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=block.scaling)
            hidden = hidden + block.o(mixed.reshape(rows, -1))
            x = block.before_mlp(hidden)
            hidden = hidden + block.down(block.act(block.gate(x)) * block.up(x))
        return self.head(self.norm(hidden))


def lean_step(model: Any, cache: Any) -> LeanStep | None:
    """The lean step of a causal language model with this cache, or None where it is not built like Llama.

    Args:
        model: a transformers model, adapters injected or not.
        cache: what the generator decodes with.
    """
    parts, head = decoder_parts(model), model.get_output_embeddings()
    if parts is None or head is None or len(parts.layers) != len(cache.layers):
        return None
    if any(type(layer) is not GrowingLayer for layer in cache.layers):
        return None  # a sliding window or another kind of state
    blocks = [_block(layer) for layer in parts.layers]
    return LeanStep(_call(parts.embed), _call(parts.rotary), blocks, _norm(parts.norm), _call(head))


def _block(parts: LayerParts) -> _Block:
    q, k, v, o = (_call(module) for module in (parts.q, parts.k, parts.v, parts.o))
    gate, up, act, down = (_call(module) for module in (parts.gate, parts.up, parts.act, parts.down))
    return _Block(
        before_attention=_norm(parts.input_norm),
        q=q,
        k=k,
        v=v,
        q_norm=None if parts.q_norm is None else _norm(parts.q_norm),
        k_norm=None if parts.k_norm is None else _norm(parts.k_norm),
        o=o,
        before_mlp=_norm(parts.post_norm),
        gate=gate,
        up=up,
        act=act,
        down=down,
        scaling=parts.scaling,
        head_dim=parts.head_dim,
    )


def _norm(module: Any) -> _Call:
    """In float32 one call of torch for the six of transformers' own RMSNorm."""
    found = plain_rms_norm(module)
    if found is None:
        return _call(module)
    weight, eps = found
    return partial(F.rms_norm, normalized_shape=tuple(weight.shape), weight=weight, eps=eps)


def _call(module: Any) -> Any:
    """The module's forward, without the module's own call around it where nothing is hooked into that."""
    return module if not isinstance(module, nn.Module) or hooked(module) else module.forward
