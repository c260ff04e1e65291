"""Linear layers on a CPU: frozen matrices in oneDNN's blocked layout, and plain LoRA without passes over the output.

A product with few rows spends most of its time on bringing the matrix into the order in which it is multiplied. A
matrix that stays as it is can be brought into it once: measured on two cores with 32 rows, twice the rate, and the
result of a row then does not depend on the rows beside it. PEFT's LoRA adds `scaling * B(A(x))` to the base's output
in three passes over it; here the product itself accumulates into the output.

Everything that is not float32 on a CPU, not plain LoRA on a plain linear layer, or too small to matter runs as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

# Numbers in a matrix. Below, a call's own cost is larger than what the layout saves.
MIN_ELEMENTS = 2**14


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


class PackedCopies:
    """A matrix and its transpose in oneDNN's layout, made when first asked for and again when the matrix changes."""

    def __init__(self) -> None:
        self._made: dict[bool, tuple[tuple[int, int], Tensor]] = {}

    def get(self, weight: Tensor, transposed: bool = False) -> Tensor:
        """The copy of `weight` (out, in), or of its transpose."""
        state = (weight.data_ptr(), weight._version)
        made = self._made.get(transposed)
        if made is None or made[0] != state:
            source = weight.detach().t().contiguous() if transposed else weight
            made = self._made[transposed] = (state, pack(source))
        return made[1]

    def __deepcopy__(self, memo: Any) -> PackedCopies:
        return PackedCopies()

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return PackedCopies, ()


class _LoraProduct(torch.autograd.Function):
    """x W^T + bias + scaling x A^T B^T with a frozen W. The gradients, for g = d(loss)/d(output):

    dx = g W + scaling g B A,   dA = scaling (g B)^T x,   dB = scaling g^T (x A^T).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
        scaling: float,
        copies: PackedCopies,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = packed_linear(rows, copies.get(weight), bias)
        low = None
        if a is not None and b is not None:
            low = rows @ a.t()
            out.addmm_(low, b.t(), alpha=scaling)
        ctx.scaling, ctx.copies, ctx.shape = scaling, copies, x.shape
        ctx.save_for_backward(rows if ctx.needs_input_grad[3] else None, weight, a, b, low)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, a, b, low = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        grad_x = grad_a = grad_b = None
        grad_low = None if b is None else (grad @ b).mul_(ctx.scaling)
        if ctx.needs_input_grad[0]:
            grad_x = packed_linear(grad, ctx.copies.get(weight, transposed=True))
            if grad_low is not None:
                grad_x.addmm_(grad_low, a)
            grad_x = grad_x.view(ctx.shape)
        if grad_low is not None and ctx.needs_input_grad[3]:
            grad_a = grad_low.t() @ rows
        if ctx.needs_input_grad[4]:
            grad_b = (low.t() @ grad).t().mul(ctx.scaling)
        return grad_x, None, None, grad_a, grad_b, None, None


class FastLoraLinear(lora.Linear):
    """PEFT's LoRA layer with `_LoraProduct` where that computes the same; everything else is the layer's own."""

    copies: PackedCopies

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(..., in) -> (..., out)."""
        base = self.get_base_layer()
        adapter = None if args or kwargs else self._fast_adapter(x, base)
        if adapter is None:
            return super().forward(x, *args, **kwargs)
        if adapter == "":
            return _LoraProduct.apply(x, base.weight, base.bias, None, None, 1.0, self.copies)
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        return _LoraProduct.apply(x, base.weight, base.bias, a, b, self.scaling[adapter], self.copies)

    def _fast_adapter(self, x: Tensor, base: nn.Module) -> str | None:
        """The one adapter to add, "" for the base alone, None where the fast product would not be the same."""
        if (
            x.dtype != torch.float32
            or x.device.type != "cpu"
            or self.merged
            or not frozen_linear(base)
            or torch.is_autocast_enabled("cpu")
        ):
            return None
        active = [] if self.disable_adapters else [name for name in self.active_adapters if name in self.lora_A]
        if not active:
            return ""
        (name, *others) = active
        dropout = self.lora_dropout[name]
        dropping = dropout.training and getattr(dropout, "p", 0.0) > 0
        return None if others or dropping or not _plain(self, name) else name


def frozen_linear(base: nn.Module) -> bool:
    """Whether a base layer is a plain linear one that does not train and can be packed."""
    return (
        type(base) is nn.Linear
        and not base.weight.requires_grad
        and (base.bias is None or not base.bias.requires_grad)
        and packable(base.weight)
        and not _hooked(base)
    )


def _plain(layer: Any, adapter: str) -> bool:
    """Whether an adapter is the two float32 matrices alone: no variant (DoRA and others), no bias, no hooks."""
    a, b = layer.lora_A[adapter], layer.lora_B[adapter]
    return (
        adapter not in layer.lora_variant
        and type(a) is type(b) is nn.Linear
        and a.bias is b.bias is None
        and a.weight.dtype == b.weight.dtype == torch.float32
        and not _hooked(a)
        and not _hooked(b)
    )


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def use_fast_lora(model: nn.Module) -> None:
    """Let every LoRA layer on a large float32 matrix in CPU memory compute as `FastLoraLinear`. The layers stay what
    they are to PEFT; each decides at every call, so adapters, devices and types may change later."""
    if not available():
        return
    for module in model.modules():
        base: Any = module.get_base_layer() if type(module) is lora.Linear else None
        if type(base) is nn.Linear and packable(base.weight):
            module.__class__ = FastLoraLinear
            module.copies = PackedCopies()  # type: ignore[assignment]


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
    if type(base) is not nn.Linear or not packable(base.weight) or _hooked(base):
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
