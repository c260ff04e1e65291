"""The parts of a Llama-like decoder: what the short forwards of training (`lean_blocks`) and of decoding
(`hf_rlx.rollout.lean`) run one by one.

Parts are found by the names that transformers gives them. Names do not say what a family computes with the parts
(Granite scales its residuals, for one): both users hold their result against the model's own forward.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as nn_module


class LayerParts(NamedTuple):
    """The modules of one decoder layer; the two norms of queries and keys may be absent."""

    layer: Any
    attention: Any
    input_norm: nn.Module
    q: nn.Module
    k: nn.Module
    v: nn.Module
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    o: nn.Module
    post_norm: nn.Module
    gate: nn.Module
    up: nn.Module
    act: Any
    down: nn.Module
    scaling: float
    head_dim: int

    @property
    def linear(self) -> tuple[Any, ...]:
        """The seven projections, in the order in which they run."""
        return self.q, self.k, self.v, self.o, self.gate, self.up, self.down


class DecoderParts(NamedTuple):
    """The modules of a decoder."""

    embed: nn.Module
    rotary: Any
    layers: list[LayerParts]
    norm: nn.Module


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "act_fn", "down_proj")
# torch's own question for these has a name from torch 2.8 on only.
_GLOBAL_HOOKS = tuple(f"_global_{kind}_hooks" for kind in ("forward_pre", "forward", "backward_pre", "backward"))


def decoder_parts(model: Any) -> DecoderParts | None:
    """The parts of a transformers model's decoder; None where it is not built like Llama, spread over devices, or
    where something is hooked into the modules whose own forward is left out or stands in that forward's place."""
    decoder = model.base_model
    found: list[Any] = [getattr(decoder, name, None) for name in ("embed_tokens", "layers", "norm", "rotary_emb")]
    if any(part is None for part in found) or hasattr(model, "hf_device_map"):
        return None
    embed, layers, norm, rotary = found
    if watched(decoder) or hooked(model) or any(getattr(nn_module, name) for name in _GLOBAL_HOOKS):
        return None
    parts = [_layer_parts(layer) for layer in layers]
    whole = [part for part in parts if part is not None]
    if len(whole) < len(parts) or len(parts) != getattr(decoder.config, "num_hidden_layers", None):
        return None
    return DecoderParts(embed, rotary, whole, norm)


def _layer_parts(layer: Any) -> LayerParts | None:
    attention: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    norms: list[Any] = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    projections: list[Any] = [getattr(attention, name, None) for name in _ATTENTION]
    feed: list[Any] = [getattr(mlp, name, None) for name in _MLP]
    scaling: Any = getattr(attention, "scaling", None)
    head_dim: Any = getattr(attention, "head_dim", None)
    if any(part is None for part in (*norms, *projections, *feed, scaling, head_dim)):
        return None
    if any(watched(module) for module in (layer, attention, mlp)):  # placed, split or watched by somebody
        return None
    kind: Any = type(attention)
    if _reads_positions(kind):
        return None
    q, k, v, o = projections
    gate, up, act, down = feed
    return LayerParts(
        layer=layer,
        attention=attention,
        input_norm=norms[0],
        q=q,
        k=k,
        v=v,
        q_norm=getattr(attention, "q_norm", None),
        k_norm=getattr(attention, "k_norm", None),
        o=o,
        post_norm=norms[1],
        gate=gate,
        up=up,
        act=act,
        down=down,
        scaling=float(scaling),
        head_dim=int(head_dim),
    )


def hooked(module: nn.Module) -> bool:
    """Whether something runs around a module's forward or backward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or hasattr(module, "_hf_hook")
    )


def watched(module: nn.Module) -> bool:
    """Whether a module is `hooked`, or has a forward that is not its class's."""
    return hooked(module) or "forward" in vars(module)


@cache
def _reads_positions(attention: Any) -> bool:
    """Whether an attention class takes positions beside the rotation: Ministral 3 scales its queries by them, from
    the position on at which the context was extended."""
    return "position_ids" in inspect.signature(attention.forward).parameters


def plain_rms_norm(module: Any) -> tuple[Any, float] | None:
    """Weight (H,) and epsilon of a module that is x / sqrt(mean(x^2) + eps) * weight with a float32 weight; None for
    another one."""
    eps, weight = getattr(module, "variance_epsilon", None), getattr(module, "weight", None)
    if eps is None or weight is None or weight.dtype != torch.float32 or watched(module):
        return None
    return weight, float(eps)
