"""A Llama-like decoder's forward over a packed row in a few autograd functions: float32 on a CPU.

The model's own forward keeps about thirty tensors a layer for its backward, many of them the same numbers a step
further: the input of a norm and its output, the parts of a rotation, gate, silu(gate) and that times up. Here a layer
is four functions. They keep what cannot be had cheaply again (the residual stream twice, the rotated queries, keys and
values, the attention's output, gate and up) and compute the rest anew while it is in the processor's cache:

    x = norm(h)               q, k, v = x W + scaling x A^T B^T, rotated
    h = h + o(attention(q, k, v))
    x = norm(h)               h = h + down(silu(gate(x)) up(x))

Of SmolLM2-135M a layer keeps 5,881 numbers a token and not 10,107; with 320 tokens the forward takes 3 to 7 % less
time, the backward as long as before. Behind the last attention only the rows that somebody reads are computed.

Every weight that trains gets its gradient, base weights and norms too: a policy trained in full and its frozen copy
are then one arithmetic, and the KL between them starts at exactly 0. What is not such a model (other norms, DoRA,
dropout, quantised weights, hooks) runs its own forward. Whether the result is the model's own is held against the
padded forward, see `hf_rlx.models.plan`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners import lora
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from hf_rlx.models.attention import tree_attention_forward
from hf_rlx.models.decoder_parts import DecoderParts, LayerParts, decoder_parts, plain_rms_norm, watched
from hf_rlx.models.dropout import probabilities
from hf_rlx.models.fast_linear import (
    EACH,
    Product,
    fast_input,
    product_of,
    products_backward,
    tensors_of,
    without_autocast,
)
from hf_rlx.models.packing import Batch


class Norm(NamedTuple):
    """y = w x / sqrt(mean(x^2) + eps) over the last dimension (Zhang and Sennrich 2019, eq. 4)."""

    weight: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """(T, H) -> (T, H)."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def backward(self, x: Tensor, grad: Tensor, want_weight: bool) -> tuple[Tensor, Tensor | None]:
        """With r = 1 / sqrt(mean(x^2) + eps): dx = r w g - x r^3 mean(w g x) and, where wanted, dw = sum of g x r over
        the rows. Takes `grad` as its workspace."""
        r = x.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        grad_weight = (grad * x).mul_(r).sum(0) if want_weight else None
        weighted = grad.mul_(self.weight)
        share = (weighted * x).mean(-1, keepdim=True).mul_(r * r * r)
        return weighted.mul_(r).addcmul_(x, share, value=-1), grad_weight


class Layer(NamedTuple):
    """One decoder layer, ready to run: its products and norms, and the modules that are called as they are."""

    parts: LayerParts
    input_norm: Norm
    inputs: tuple[Product, ...]  # q, k, v
    output: Product
    post_norm: Norm
    feed: tuple[Product, ...]  # gate, up, down


class _NormedProducts(torch.autograd.Function):
    """norm(hidden) (T, H) through several products -> a (T, out) each."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, norm: Norm, products: tuple[Product, ...], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        x = norm.forward(hidden)
        outs, lows = zip(*(product.forward(x) for product in products), strict=True)
        ctx.norm, ctx.products = norm, products
        ctx.save_for_backward(hidden, weight, *lows, *tensors)
        return outs

    @staticmethod
    @torch.autograd.function.once_differentiable
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, _, *rest = ctx.saved_tensors
        need_hidden, need_weight, _, _, *needs = ctx.needs_input_grad
        lows = rest[: len(ctx.products)]
        grad_x, matrices = products_backward(
            ctx.products, grads, lows, lambda: ctx.norm.forward(hidden), need_hidden or need_weight, needs
        )
        grad_hidden = grad_weight = None
        if grad_x is not None:
            grad_hidden, grad_weight = ctx.norm.backward(hidden, grad_x, need_weight)
        return grad_hidden, grad_weight, None, None, *matrices


class _AddedProduct(torch.autograd.Function):
    """hidden + the product of x: (T, H)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hidden: Tensor, product: Product, *tensors: Tensor | None) -> Tensor:
        out, low = product.forward(x)
        ctx.product = product
        ctx.save_for_backward(x, low, *tensors)
        return out.add_(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low, *_ = ctx.saved_tensors
        need_x, _, _, *needs = ctx.needs_input_grad
        grad_x, matrices = products_backward((ctx.product,), grads, [low], lambda: x, need_x, needs)
        return grad_x, grads[0], None, *matrices


class _FeedForward(torch.autograd.Function):
    """hidden + down(silu(gate(x)) up(x)) for x = norm(hidden): (T, H) -> (T, H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, norm: Norm, products: tuple[Product, ...], *tensors: Tensor | None
    ) -> Tensor:
        to_gate, to_up, down = products
        x = norm.forward(hidden)
        gate, low_gate = to_gate.forward(x)
        up, low_up = to_up.forward(x)
        out, low_down = down.forward(F.silu(gate).mul_(up))
        ctx.norm, ctx.products = norm, products
        ctx.save_for_backward(hidden, weight, gate, up, low_gate, low_up, low_down, *tensors)
        return out.add_(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, _, gate, up, low_gate, low_up, low_down, *_ = ctx.saved_tensors
        need_hidden, need_weight, _, _, *needs = ctx.needs_input_grad
        *inputs, down = ctx.products
        active = F.silu(gate)
        grad_inner, of_down = products_backward(
            (down,), grads, [low_down], lambda: active * up, True, needs[2 * EACH :]
        )
        assert grad_inner is not None
        grad_up = active.mul_(grad_inner)
        grad_gate = torch.ops.aten.silu_backward(grad_inner.mul_(up), gate)
        grad_x, of_inputs = products_backward(
            tuple(inputs),
            (grad_gate, grad_up),
            [low_gate, low_up],
            lambda: ctx.norm.forward(hidden),
            need_hidden or need_weight,
            needs[: 2 * EACH],
        )
        grad_hidden = grad_weight = None
        if grad_x is not None:
            grad_hidden, grad_weight = ctx.norm.backward(hidden, grad_x, need_weight)
            grad_hidden = grad_hidden.add_(grads[0])
        return grad_hidden, grad_weight, None, None, *of_inputs, *of_down


class _Rotate(torch.autograd.Function):
    """(T, heads, D) -> (heads, T, D), turned by the position: x cos + rotate_half(x) sin (RoFormer, eq. 34), with
    rotate_half(x) sin = roll(x, D / 2) (-sin, sin). cos, sin: (T, 1, D), sin with its first half negated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).transpose(0, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grad = grads[0].transpose(0, 1)
        return (grad * cos).add_((grad * sin).roll(grad.shape[-1] // 2, -1)), None, None


def lean_hidden_states(model: Any, batch: Batch, at: Tensor | None = None) -> Tensor | None:
    """(T, H) last hidden states of a causal language model's decoder on a packed row; None where this forward is not
    made for the model as it is now.

    Args:
        model: a transformers model, adapters injected or not. batch: packed.
        at: (N,) the row positions wanted, in the order wanted; None: all.
    """
    if batch.layout is None or batch.input_ids.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return None
    parts = decoder_parts(model)
    layers = None if parts is None else _layers(parts)
    if parts is None or layers is None:
        return None
    final = _norm(parts.norm)
    embedded = parts.embed(batch.input_ids)
    cos, sin = parts.rotary(embedded, batch.position_ids)
    if final is None or not fast_input(embedded) or any(cos.shape[-1] != p.head_dim for p in parts.layers):
        return None
    half = cos.shape[-1] // 2
    rotation = cos[0, :, None], torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)[0, :, None]
    hidden = embedded[0]
    for index, layer in enumerate(layers):
        run = partial(_run, layer, batch, rotation, at if index == len(layers) - 1 else None)
        module = layer.parts.layer
        if getattr(module, "gradient_checkpointing", False) and module.training:
            hidden = module._gradient_checkpointing_func(run, hidden)
        else:
            hidden = run(hidden)
    return final.forward(hidden)


def _run(layer: Layer, batch: Batch, rotation: tuple[Tensor, Tensor], at: Tensor | None, hidden: Tensor) -> Tensor:
    """One layer: (T, H) -> (T, H), or the rows `at` of it."""
    parts = layer.parts
    q, k, v = _NormedProducts.apply(
        hidden, layer.input_norm.weight, layer.input_norm, layer.inputs, *tensors_of(layer.inputs)
    )
    q, k, v = (states.unflatten(-1, (-1, parts.head_dim)) for states in (q, k, v))
    if parts.q_norm is not None and parts.k_norm is not None:
        q, k = parts.q_norm(q), parts.k_norm(k)
    mixed, _ = tree_attention_forward(
        parts.attention,
        _Rotate.apply(q, *rotation)[None],
        _Rotate.apply(k, *rotation)[None],
        v.transpose(0, 1)[None],
        None,
        layout=batch.layout,
        scaling=parts.scaling,
        sliding_window=_window(parts.attention),
    )
    mixed = mixed[0].flatten(-2)
    if at is not None:
        mixed, hidden = mixed.index_select(0, at), hidden.index_select(0, at)
    hidden = _AddedProduct.apply(mixed, hidden, layer.output, *tensors_of((layer.output,)))
    norm = layer.post_norm
    return _FeedForward.apply(hidden, norm.weight, norm, layer.feed, *tensors_of(layer.feed))


def _layers(parts: DecoderParts) -> list[Layer] | None:
    """All layers ready to run, or None where one of them computes something else."""
    layers = []
    for layer in parts.layers:
        norms = [_norm(module) for module in (layer.input_norm, layer.post_norm)]
        products = [None if _may_drop(module) else product_of(module) for module in layer.linear]
        found = [product for product in products if product is not None]
        if None in norms or len(found) < len(products) or not _gated(layer):
            return None
        if (layer.q_norm is None) != (layer.k_norm is None) or _dropping(layer.layer):
            return None
        before, after = norms
        assert before is not None
        assert after is not None
        q, k, v, o, *feed = found
        layers.append(Layer(layer, before, (q, k, v), o, after, tuple(feed)))
    return layers


def lean_kept(model: Any) -> int | None:
    """Numbers that this forward keeps a token for the backward, in all layers together; None where a model is built
    otherwise. The place of its weights does not count, so it may be on the meta device."""
    parts = decoder_parts(model)
    if parts is None:
        return None
    total = 0
    for layer in parts.layers:
        adapted = [m for m in layer.linear if isinstance(m, lora.Linear)]
        bases: list[Any] = [m.get_base_layer() if m in adapted else m for m in layer.linear]
        if any(plain_rms_norm(m) is None for m in (layer.input_norm, layer.post_norm)) or not _gated(layer):
            return None
        if any(type(base) is not nn.Linear for base in bases) or hasattr(layer.layer, "residual_multiplier"):
            return None
        if any(m.lora_variant for m in adapted):  # DoRA and others
            return None
        q, k, v, _, gate, up, down = (base.out_features for base in bases)
        ranks = sum(rank for m in adapted for rank in m.r.values())
        # The residual stream before and behind the attention; its queries, output, keys, values and normalisers.
        total += 2 * down + 2 * q + k + v + q // layer.head_dim + gate + up + ranks
    return total


def _gated(layer: LayerParts) -> bool:
    return isinstance(layer.act, SiLUActivation | nn.SiLU) and not watched(layer.act)


def _norm(module: nn.Module) -> Norm | None:
    found = plain_rms_norm(module)
    return None if found is None else Norm(*found)


def _window(attention: Any) -> int | None:
    """The layer's own sliding window; Mistral's layers read the configuration's."""
    return getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))


def _may_drop(module: Any) -> bool:
    """Whether an adapter of a layer has dropout, on or off: a policy in training and its reference in evaluation are
    one arithmetic then, and the KL of a fresh adapter starts at exactly 0."""
    dropouts = module.lora_dropout.values() if isinstance(module, lora.Linear) else ()
    return any(getattr(dropout, "p", 0.0) > 0 for dropout in dropouts)


def _dropping(layer: Any) -> bool:
    """Whether a layer, its attention or its feed-forward part drops anything now (SeedOss: from the residuals too)."""
    return any(module.training and probabilities(module) for module in (layer, layer.self_attn, layer.mlp))
