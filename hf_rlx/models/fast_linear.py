"""Linear layers on a CPU: oneDNN's products with float32 matrices, and plain LoRA without passes over the output.

PEFT's LoRA adds `scaling * B(A(x))` to the base's output in three passes over it; here the product itself accumulates
into the output. A product with few rows, as in decoding, spends most of its time on bringing the matrix into the order
in which it is multiplied: while a model samples, its matrices are there in that order (measured on two cores with 32
rows: twice the rate). With the hundreds of rows of a training step that gains 8 % of the forward and nothing in the
backward, for a second and third copy of the weights: there the matrices are taken as they are.

Everything that is not float32 on a CPU, not plain LoRA on a plain linear layer, or too small to matter runs as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from hf_rlx.models.decoder_parts import hooked

# Numbers in a matrix. Below, a call's own cost is larger than what the layout saves.
MIN_ELEMENTS = 2**14


@cache
def available() -> bool:
    """Whether this build of torch has oneDNN's linear on blocked matrices."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
    )


def pack(weight: Tensor, rows: int | None = None) -> Tensor:
    """A copy of a (out, in) matrix in oneDNN's layout, for products with about `rows` rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., in) -> (..., out) through a matrix that `pack` made. Knows no gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def packable(weight: Tensor) -> bool:
    """Whether a matrix is of the kind that `pack` takes and large enough to gain by it."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.layout == torch.strided
        and weight.ndim == 2
        and weight.numel() >= MIN_ELEMENTS
    )


class Product(NamedTuple):
    """x W^T + bias + scaling x A^T B^T: weight (out, in), bias (out,) or None, a (r, in) and
    b (out, r) or both None. Its methods take and give matrices, and know no gradient."""

    weight: Tensor
    bias: Tensor | None
    a: Tensor | None
    b: Tensor | None
    scaling: float

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """(T, in) -> the product (T, out), and x A^T (T, r), which the gradient of B needs."""
        out = product_with(rows, self.weight, self.bias)
        if self.a is None or self.b is None:
            return out, None
        low = rows @ self.a.t()
        return out.addmm_(low, self.b.t(), alpha=self.scaling), low

    def grad_low(self, grad: Tensor) -> Tensor | None:
        """scaling g B (T, r) for g = d(loss)/d(output) (T, out)."""
        return None if self.b is None else (grad @ self.b).mul_(self.scaling)

    def grad_input(self, grad: Tensor, grad_low: Tensor | None) -> Tensor:
        """dx = g W + scaling g B A, (T, in)."""
        # oneDNN multiplies with the transposed view as fast as with a packed copy: no second copy of the weights.
        out = product_with(grad, self.weight.t())
        return out if grad_low is None or self.a is None else out.addmm_(grad_low, self.a)

    def grad_b(self, grad: Tensor, low: Tensor) -> Tensor:
        """dB = scaling g^T (x A^T), (out, r)."""
        return (low.t() @ grad).t().mul(self.scaling)


def product_with(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias, (T, in) -> (T, out), for W (out, in) or a transposed view: by oneDNN where it is made for that.
    Knows no gradient."""
    fast = x.dtype == torch.float32 and x.device.type == "cpu" and weight.numel() >= MIN_ELEMENTS and available()
    if not fast or len(x) == 0:
        return F.linear(x, weight, bias)
    return packed_linear(x, weight, bias)


_Backward = TypeVar("_Backward", bound=Callable[..., Any])


def without_autocast(backward: _Backward) -> _Backward:
    """A backward on a CPU in the type that its forward had, also where it is called inside autocast."""

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            return backward(ctx, *grads)

    return cast(_Backward, run)


EACH = 4  # tensors of a product: weight, bias, A and B


def tensors_of(products: tuple[Product, ...]) -> tuple[Tensor | None, ...]:
    """What a function gets beside its products, because only its own arguments can have a gradient."""
    return tuple(tensor for p in products for tensor in (p.weight, p.bias, p.a, p.b))


def products_backward(
    products: tuple[Product, ...],
    grads: tuple[Tensor, ...],
    lows: list[Tensor | None],
    make_x: Callable[[], Tensor],
    need_x: bool,
    needs: list[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The gradient of the products' common input x, and those of their tensors in turn.

    Args:
        grads: (T, out) of each product's output. lows: (T, r) what each one's forward gave.
        make_x: computes x (T, in) anew; called where a weight or an A wants its gradient.
        need_x, needs: whether x wants one, and which of the `tensors_of` them.
    """
    grad_x: Tensor | None = None
    matrices: list[Tensor | None] = []
    x = make_x() if any(needs[0::EACH] + needs[2::EACH]) else None
    for index, (product, grad, low) in enumerate(zip(products, grads, lows, strict=True)):
        grad_low = product.grad_low(grad)
        if need_x:
            part = product.grad_input(grad, grad_low)
            grad_x = part if grad_x is None else grad_x.add_(part)
        need_weight, need_bias, need_a, need_b = needs[EACH * index : EACH * (index + 1)]
        matrices += [
            grad.t() @ x if need_weight and x is not None else None,
            grad.sum(0) if need_bias else None,
            grad_low.t() @ x if need_a and grad_low is not None and x is not None else None,
            product.grad_b(grad, low) if need_b and low is not None else None,
        ]
    return grad_x, matrices


class _Linear(torch.autograd.Function):
    """One `Product` of x (..., in)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, product: Product, *tensors: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out, low = product.forward(rows)
        ctx.product, ctx.shape = product, x.shape
        *_, need_weight, _, need_a, _ = ctx.needs_input_grad
        ctx.save_for_backward(rows if need_weight or need_a else None, low, *tensors)
        return out.view(*x.shape[:-1], len(product.weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    @without_autocast
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, low, *_ = ctx.saved_tensors
        need_x, _, *needs = ctx.needs_input_grad
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        grad_x, matrices = products_backward((ctx.product,), (grad,), [low], lambda: rows, need_x, needs)
        return None if grad_x is None else grad_x.view(ctx.shape), None, *matrices


def linear(layer: Any, x: Tensor) -> Tensor:
    """(..., in) -> (..., out): `layer(x)`, through oneDNN where `layer` is a linear layer that a `Product` describes.

    Frozen and trained layers of equal weights agree to the bit: the KL of a policy and its copy starts at exactly 0.
    """
    product = product_of(layer) if fast_input(x) else None
    return layer(x) if product is None else _Linear.apply(x, product, *tensors_of((product,)))


class FastLoraLinear(lora.Linear):
    """PEFT's LoRA layer with `_Linear` where that computes the same; everything else is the layer's own."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(..., in) -> (..., out)."""
        base: Any = self.get_base_layer()
        fast = not (args or kwargs) and fast_input(x) and packable(base.weight)
        product = product_of(self) if fast else None
        if product is None:
            return super().forward(x, *args, **kwargs)
        return _Linear.apply(x, product, *tensors_of((product,)))


def fast_input(x: Tensor) -> bool:
    """Whether a layer's input is of the kind that `Product` is made for."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def product_of(layer: Any) -> Product | None:
    """What a linear layer computes, with its one active adapter or without any, as a product on float32 matrices in
    CPU memory; None where it computes something else (DoRA, dropout, two adapters, merged or quantised weights,
    hooks)."""
    adapted = isinstance(layer, lora.Linear)
    base = layer.get_base_layer() if adapted else layer
    if not _float_linear(base):
        return None
    if not adapted:
        return Product(base.weight, base.bias, None, None, 1.0)
    if layer.merged or hooked(layer):
        return None
    # Adapters that are off count too: with them on the layer runs its own forward, and a policy and its reference are
    # held to one arithmetic.
    if any(_dropping(layer, name) or not _plain(layer, name) for name in layer.lora_A):
        return None
    active = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.lora_A]
    if not active:
        return Product(base.weight, base.bias, None, None, 1.0)
    (name, *others) = active
    if others:
        return None
    return Product(
        base.weight, base.bias, layer.lora_A[name].weight, layer.lora_B[name].weight, float(layer.scaling[name])
    )


def _float_linear(base: Any) -> bool:
    """Whether a base layer is a plain float32 linear one in CPU memory."""
    return (
        type(base) is nn.Linear
        and base.weight.device.type == "cpu"
        and base.weight.dtype == torch.float32
        and base.weight.layout == torch.strided
        and not hooked(base)
    )


def _dropping(layer: Any, adapter: str) -> bool:
    dropout = layer.lora_dropout[adapter]
    return bool(dropout.training and getattr(dropout, "p", 0.0) > 0)


def _plain(layer: Any, adapter: str) -> bool:
    """Whether an adapter is the two float32 matrices alone: no variant (DoRA and others), no bias, no hooks."""
    a, b = layer.lora_A[adapter], layer.lora_B[adapter]
    return (
        adapter not in layer.lora_variant
        and type(a) is type(b) is nn.Linear
        and a.bias is b.bias is None
        and a.weight.dtype == b.weight.dtype == torch.float32
        and not hooked(a)
        and not hooked(b)
    )


def use_fast_lora(model: nn.Module) -> None:
    """Let every LoRA layer on a large float32 matrix in CPU memory compute as `FastLoraLinear`. The layers stay what
    they are to PEFT; each decides at every call, so adapters, devices and types may change later."""
    if not available():
        return
    for module in model.modules():
        base: Any = module.get_base_layer() if type(module) is lora.Linear else None
        if type(base) is nn.Linear and packable(base.weight):
            module.__class__ = FastLoraLinear


# Layers of one parent that are called with the same input, one after another: one product serves them all.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@contextmanager
def packed_for_sampling(model: nn.Module, rows: int) -> Iterator[None]:
    """Inside, large float32 linear layers on a CPU run from packed copies with the active adapters added in.

    The copies are made on entering, from the weights as they are then, and dropped on leaving; weights and adapters
    themselves are not touched. No gradient passes such a layer.

    Args:
        model: any. rows: that most calls will have.
    """
    patched: list[nn.Module] = []
    seen: set[int] = set()  # layers that have their forward, and the parts of LoRA layers
    try:
        for parent in model.modules() if available() else ():
            candidates: list[list[Any]] = [[parent._modules.get(name) for name in names] for names in _SIBLINGS]
            for layers in [*candidates, [parent]]:
                if any(id(layer) in seen or layer is None for layer in layers):
                    continue
                matrices = [_effective(layer) for layer in layers]
                found = [m for m in matrices if m is not None]
                if len(found) < len(layers) or len({weight.shape[1] for weight, _ in found}) > 1:
                    continue
                shared = _Sampler(found, rows)
                for index, layer in enumerate(layers):
                    seen.update(id(part) for part in layer.modules())
                    layer.forward = partial(shared, index)
                    patched.append(layer)
            if isinstance(parent, BaseTunerLayer):  # what an adapter of another kind does with its parts is its own
                seen.update(id(part) for part in parent.modules())
        yield
    finally:
        for module in patched:
            del module.forward


class _Sampler:
    """The forward of layers that get the same input, inside `packed_for_sampling`.

    Args:
        matrices: each layer's weight (out, in), and its bias or None. rows: that most calls will have.
    """

    def __init__(self, matrices: list[tuple[Tensor, Tensor | None]], rows: int) -> None:
        weights, biases = zip(*matrices, strict=True)
        self.sizes = [len(weight) for weight in weights]
        self.packed = pack(weights[0] if len(weights) == 1 else torch.cat(weights), rows)
        self.bias = None
        if any(bias is not None for bias in biases):
            self.bias = torch.cat([w.new_zeros(len(w)) if b is None else b.detach() for w, b in matrices])
        self.input: Tensor | None = None
        self.outputs: tuple[Tensor, ...] = ()

    def __call__(self, index: int, x: Tensor) -> Tensor:
        """Layer `index`'s output; the product is made at the first call with this `x` and kept until the last one."""
        if self.input is not x:
            self.outputs = packed_linear(x, self.packed, self.bias).split(self.sizes, dim=-1)
            self.input = x
        output = self.outputs[index]
        if index == len(self.sizes) - 1:
            self.input, self.outputs = None, ()
        return output


def _effective(layer: Any) -> tuple[Tensor, Tensor | None] | None:
    """The matrix of a linear layer, with its active adapters added in, and its bias; None where the layer is none or
    computes something else."""
    base = layer.get_base_layer() if isinstance(layer, lora.Linear) else layer
    if type(base) is not nn.Linear or not packable(base.weight) or hooked(base):
        return None
    weight = base.weight.detach()
    if base is layer:
        return weight, base.bias
    if layer.merged:
        return None
    active = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.lora_A]
    for name in active:
        if not _plain(layer, name):
            return None
        weight = torch.addmm(weight, layer.lora_B[name].weight, layer.lora_A[name].weight, alpha=layer.scaling[name])
    return weight, base.bias
