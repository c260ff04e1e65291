"""From hidden states to log-probs, entropies and values, without a [tokens, vocabulary] tensor alive as a whole.

`score_batch` runs the decoder once on a `Batch` and reads the sampled tokens' log-probs in chunks over the
vocabulary matrix: log-sum-exp in float32, recomputed or pre-reduced for the backward.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from hf_rlx.models.attention import PackingUnsupportedError
from hf_rlx.models.fast_linear import linear, product_with
from hf_rlx.models.lean_blocks import lean_hidden_states
from hf_rlx.models.packing import Batch
from hf_rlx.types import TokenScores

logger = logging.getLogger(__name__)

# 64 MiB of float32 logits at a time: measured flat between 16 and 256 MiB on CPU.
CHUNK_ELEMENTS = 2**24


@dataclass(frozen=True)
class LogitTransform:
    """What a family does to its logits after the vocabulary matrix, before the temperature.

    logits -> softcap * tanh(scale * logits / softcap), or scale * logits where softcap is None.
    """

    scale: float = 1.0
    softcap: float | None = None

    @staticmethod
    def of(config: Any) -> LogitTransform:
        """Read it from a model configuration: `logit_scale` multiplies (Cohere), `logits_scaling` divides
        (Granite), `final_logit_softcapping` bounds (Gemma 2 and 3)."""
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        return LogitTransform(scale, getattr(config, "final_logit_softcapping", None))


def _log_softmax_terms(logits: Tensor, transform: LogitTransform, temperature: float) -> tuple[Tensor, Tensor | None]:
    """(n, V) raw logits -> (n, V) float32 tempered logits and, with a softcap, d(out)/d(in) up to constants."""
    z = logits.float()
    if transform.scale != 1.0:
        z = z * transform.scale
    slope = None
    if transform.softcap is not None:
        tanh = torch.tanh(z / transform.softcap)
        z, slope = transform.softcap * tanh, 1 - tanh.square()
    return (z / temperature if temperature != 1.0 else z), slope


def _read(z: Tensor, targets: Tensor, want_entropy: bool) -> tuple[Tensor, Tensor | None]:
    """(n, V) tempered logits -> log-prob of the targets (n,), entropy (n,) or None; differentiable.

    The arithmetic is that of `_FrozenHeadLogps`, so a trained and a frozen head of equal weights agree to the bit.
    """
    z = z - z.detach().amax(-1, keepdim=True)
    exps = torch.exp(z)
    total = exps.sum(-1)
    logps = z.gather(-1, targets[:, None])[:, 0] - total.log()
    if not want_entropy:
        return logps, None
    # A logit of -inf has probability 0 and contributes 0, not NaN, to the value and to the gradient.
    products = (exps / total[:, None] * torch.where(z == -torch.inf, 0.0, z)).sum(-1)
    return logps, total.log() - products


def _entropy(z: Tensor, exps: Tensor, total: Tensor) -> Tensor:
    """(n,) entropy of softmax(z) in nats, with exps = exp(z) and total = their sum."""
    products = torch.bmm(exps[:, None], z[:, :, None])[:, 0, 0]
    if not torch.isfinite(products).all():
        # A logit of -inf has probability 0 and contributes 0, not NaN.
        products = (exps * torch.where(z == -torch.inf, 0.0, z)).sum(-1)
    return total.log() - products / total


def _expected_row(exps: Tensor, total: Tensor, weight: Tensor, slope: Tensor | None) -> Tensor:
    """(n, H) float32: the vocabulary matrix's expected row under softmax = exps / total, each row times `slope`."""
    weights = exps if slope is None else exps * slope
    return product_with(weights.to(weight.dtype), weight.t()).float() / total[:, None]


class _FrozenHeadLogps(torch.autograd.Function):
    """Log-probs through a vocabulary matrix that is not trained.

    The gradient of the log-prob with respect to the hidden state is W[target] - E_p[W]: it is reduced to (N, H)
    in the forward, while the chunk's probabilities are at hand, so the backward touches no vocabulary at all.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        temperature: float,
        chunk: int,
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        need_grad = ctx.needs_input_grad[0]
        logps, entropies, jacobian = [], [], []
        for start in range(0, max(hidden.shape[0], 1), chunk):
            rows, wanted = hidden[start : start + chunk], targets[start : start + chunk]
            z, slope = _log_softmax_terms(product_with(rows.to(weight.dtype), weight, bias), transform, temperature)
            # Few passes: shifted logits, their exponentials and one sum serve the value, the entropy and the gradient.
            z = z.sub_(z.amax(-1, keepdim=True))
            exps = torch.exp(z)
            total = exps.sum(-1)
            logps.append(z.gather(-1, wanted[:, None])[:, 0] - total.log())
            entropies.append(_entropy(z, exps, total) if want_entropy else total.new_zeros(total.shape))
            if need_grad:
                expected = _expected_row(exps, total, weight, slope)
                at_target = weight.index_select(0, wanted).float()
                if slope is not None:
                    at_target *= slope.gather(-1, wanted[:, None])
                jacobian.append((at_target - expected) * (transform.scale / temperature))
        ctx.hidden_dtype = hidden.dtype
        ctx.save_for_backward(torch.cat(jacobian) if need_grad else hidden.new_empty(0))
        entropy_all = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_all)
        return torch.cat(logps), entropy_all

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (jacobian,) = ctx.saved_tensors
        return (grads[0][:, None] * jacobian).to(ctx.hidden_dtype), *(None,) * 7


def head_logps(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    transform: LogitTransform,
    temperature: float = 1.0,
    want_entropy: bool = False,
    entropy_grad: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(transform(head(hidden)) / temperature)[target], and the entropy of that softmax, in chunks.

    Args:
        hidden: (N, H). head: the output embeddings, any module (N, H) -> (N, V). targets: (N,) token ids.
        temperature: divides the logits, as the sampler did.
        want_entropy: return the entropy; entropy_grad: differentiably.
        chunk_elements: size bound of the logits that are alive at once, in numbers.

    Returns:
        log-probs (N,) float32 in nats; entropies (N,) float32 in nats, or None.
    """
    weight = getattr(head, "weight", None)
    vocabulary = weight.shape[0] if weight is not None and weight.ndim == 2 else 2**16
    chunk = max(1, chunk_elements // max(int(vocabulary), 1))
    bias = getattr(head, "bias", None)
    frozen = type(head) is nn.Linear and not head.weight.requires_grad and (bias is None or not bias.requires_grad)
    if frozen and not entropy_grad:
        dtype = autocast_dtype(hidden)
        head_weight = head.weight if dtype is None else head.weight.to(dtype)
        head_bias = bias if bias is None or dtype is None else bias.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            logps, entropy = _FrozenHeadLogps.apply(
                hidden, head_weight, head_bias, targets, transform, temperature, chunk, want_entropy
            )
        return logps, entropy if want_entropy else None

    def run(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
        z, _ = _log_softmax_terms(linear(head, rows), transform, temperature)
        return _read(z, wanted, want_entropy)

    parts = []
    for start in range(0, max(hidden.shape[0], 1), chunk):
        rows, wanted = hidden[start : start + chunk], targets[start : start + chunk]
        if torch.is_grad_enabled():
            parts.append(checkpoint(run, rows, wanted, use_reentrant=False))
        else:
            parts.append(run(rows, wanted))
    entropies = torch.cat([p[1] for p in parts]) if want_entropy else None
    if entropies is not None and not entropy_grad:
        entropies = entropies.detach()
    return torch.cat([p[0] for p in parts]), entropies


def autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """The type that autocast runs matrix products in on this tensor's device; None where autocast is off."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def hidden_states(model: PreTrainedModel, batch: Batch, at: Tensor | None = None) -> Tensor:
    """(tokens, H) last hidden states of a causal language model's decoder on `batch`, flattened.

    Args:
        at: (N,) indices of the tokens wanted, in the order wanted -> (N, H); None: all.
    """
    if batch.lean:
        lean = lean_hidden_states(model, batch, at)
        if lean is not None:
            return lean
    mask: Tensor | None = batch.attention_mask
    kwargs: dict[str, Any] = {}
    if batch.layout is not None:
        kwargs["layout"] = batch.layout
        # A 4-D mask is passed through untouched: transformers then builds no [T, T] mask for the row.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.input_ids.device)
    output = model.base_model(
        input_ids=batch.input_ids,
        attention_mask=mask,
        position_ids=batch.position_ids,
        use_cache=False,
        **kwargs,
    )
    hidden = output.last_hidden_state.flatten(0, 1)
    return hidden if at is None else hidden.index_select(0, at)


def score_batch(
    model: PreTrainedModel,
    batch: Batch,
    *,
    chunked: bool = True,
    temperature: float = 1.0,
    want_entropy: bool = False,
    entropy_grad: bool = False,
    critic: nn.Module | None = None,
) -> TokenScores:
    """One forward: log-probs, and on request entropies and critic values, of every response token.

    Args:
        model: a causal language model (`transformers`), adapters injected or not.
        batch: packed or padded.
        chunked: read from hidden states in chunks; False: from the model's own logits.
        temperature: divides the logits.
        want_entropy, entropy_grad: also the entropies, and whether a gradient flows through them.
        critic: scalar head on the same hidden states; its value at the state *before* each token.

    Returns:
        `TokenScores` with rows in group order, in float32, exactly 0 under the mask.
    """
    if not chunked:
        if critic is not None:
            raise PackingUnsupportedError("a critic needs the hidden states, which this model does not expose")
        return score_from_logits(model, batch, temperature, want_entropy, entropy_grad)
    before = hidden_states(model, batch, batch.predict_index)
    logps, entropy = head_logps(
        before,
        model.get_output_embeddings(),
        batch.targets,
        transform=LogitTransform.of(model.config.get_text_config()),
        temperature=temperature,
        want_entropy=want_entropy,
        entropy_grad=entropy_grad,
    )
    values = None if critic is None else critic(before)
    return TokenScores(
        batch.to_rows(logps),
        None if entropy is None else batch.to_rows(entropy),
        None if values is None else batch.to_rows(values),
        batch.completion_mask,
    )


def score_from_logits(
    model: PreTrainedModel, batch: Batch, temperature: float, want_entropy: bool, entropy_grad: bool
) -> TokenScores:
    """The generic way: the model's own logits, whatever it does to them."""
    logits = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
    ).logits
    rows = logits.flatten(0, 1).index_select(0, batch.predict_index)
    z, _ = _log_softmax_terms(rows, LogitTransform(), temperature)
    logps, entropy = _read(z, batch.targets, want_entropy)
    if entropy is not None and not entropy_grad:
        entropy = entropy.detach()
    return TokenScores(
        batch.to_rows(logps), None if entropy is None else batch.to_rows(entropy), None, batch.completion_mask
    )
