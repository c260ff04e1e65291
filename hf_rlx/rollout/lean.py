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
    decoder = model.base_model
    parts: list[Any] = [getattr(decoder, name, None) for name in ("embed_tokens", "layers", "norm", "rotary_emb")]
    head = model.get_output_embeddings()
    if any(part is None for part in parts) or head is None or hasattr(model, "hf_device_map"):
        return None
    embed, layers, norm, rotary = parts
    if len(layers) != len(cache.layers) or any(type(layer) is not GrowingLayer for layer in cache.layers):
        return None  # a sliding window or another kind of state
    blocks = [_block(layer) for layer in layers]
    found = [block for block in blocks if block is not None]
    if len(found) < len(blocks) or _hooked(decoder) or _hooked(model):
        return None
    return LeanStep(_call(embed), _call(rotary), found, _norm(norm), _call(head))


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "act_fn", "down_proj")


def _block(layer: Any) -> _Block | None:
    attention: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    norms: list[Any] = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    projections: list[Any] = [getattr(attention, name, None) for name in _ATTENTION]
    feed: list[Any] = [getattr(mlp, name, None) for name in _MLP]
    scaling: Any = getattr(attention, "scaling", None)
    head_dim: Any = getattr(attention, "head_dim", None)
    if any(part is None for part in (*norms, *projections, *feed, scaling, head_dim)):
        return None
    if any(_hooked(module) for module in (layer, attention, mlp)):  # placed, split or watched by somebody
        return None
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    q, k, v, o = (_call(module) for module in projections)
    gate, up, act, down = (_call(module) for module in feed)
    return _Block(
        before_attention=_norm(norms[0]),
        q=q,
        k=k,
        v=v,
        q_norm=None if q_norm is None else _norm(q_norm),
        k_norm=None if k_norm is None else _norm(k_norm),
        o=o,
        before_mlp=_norm(norms[1]),
        gate=gate,
        up=up,
        act=act,
        down=down,
        scaling=float(scaling),
        head_dim=int(head_dim),
    )


def _norm(module: Any) -> _Call:
    """In float32 one call of torch for the six of transformers' own RMSNorm."""
    eps, weight = getattr(module, "variance_epsilon", None), getattr(module, "weight", None)
    if eps is None or weight is None or weight.dtype != torch.float32 or _hooked(module):
        return _call(module)
    return partial(F.rms_norm, normalized_shape=tuple(weight.shape), weight=weight, eps=eps)


def _call(module: Any) -> Any:
    """The module's forward, without the module's own call around it where nothing is hooked into that."""
    return module if not isinstance(module, nn.Module) or _hooked(module) else module.forward


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"))
