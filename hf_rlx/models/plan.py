"""Packed or padded, chunked or through the model's own logits: decided once for a model, and verified."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_rlx.models.attention import TREE_ATTENTION
from hf_rlx.models.classifier import is_classifier, probe
from hf_rlx.models.classifier import obstacle as classifier_obstacle
from hf_rlx.models.fast_linear import use_fast_lora
from hf_rlx.models.forward import hidden_states, score_batch, score_from_logits
from hf_rlx.models.lean_blocks import lean_hidden_states
from hf_rlx.models.packing import Batch, pack_groups, pad_groups
from hf_rlx.types import Group

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ForwardPlan:
    """How this model's forward is run: `packed` prefix-tree rows or padded batches; log-probs in `chunked`
    form from the hidden states or from the model's own logits. `reason` says why not the fast way. `lean`: packed rows
    through `lean_blocks` where a model is made for that."""

    packed: bool = True
    chunked: bool = True
    reason: str | None = None
    verified: bool = False
    lean: bool = True

    def batch(self, groups: Sequence[Group], device: torch.device | str, pad_token_id: int = 0) -> Batch:
        """Lay `groups` out as this plan wants them."""
        if self.packed:
            return pack_groups(groups, device, lean=self.lean and self.chunked)
        return pad_groups(groups, device, pad_token_id)


def initial_plan(model: PreTrainedModel, packing: bool) -> ForwardPlan:
    """The fast way where the configuration allows it; routes the model's attention through the packed function."""
    use_fast_lora(model)
    reason = packing_obstacle(model) if packing else "switched off"
    if reason is None:
        model.set_attn_implementation(TREE_ATTENTION)
        return ForwardPlan()
    return ForwardPlan(packed=False, reason=reason, lean=False)


def not_a_decoder(model: Any) -> str | None:
    """Why a model cannot be trained here at all: it does not predict the next token from the ones before; or None."""
    if not isinstance(model, PreTrainedModel):
        return f"the model must be a transformers causal language model, got {type(model).__name__}"
    if model.config.is_encoder_decoder:
        return f"{type(model).__name__} is an encoder-decoder model; hf_rlx trains decoder-only models"
    if is_classifier(model):
        return classifier_obstacle(model)
    if model.get_output_embeddings() is None:
        return f"{type(model).__name__} has no vocabulary head; load it with AutoModelForCausalLM"
    return None


def packing_obstacle(model: PreTrainedModel) -> str | None:
    """Why a family cannot run packed rows as far as its configuration tells, or None.

    What a configuration does not tell is caught by comparing both forwards on the first micro-batch.
    """
    config = model.config.get_text_config()
    if getattr(model, "_is_stateful", False):
        return "recurrent state"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "soft-capped attention scores"
    if not model._can_set_attn_implementation() or not getattr(model, "_supports_sdpa", False):
        return "its attention does not go through transformers' AttentionInterface"
    mixers = {str(t) for t in getattr(config, "layer_types", None) or []}
    foreign = mixers - {"full_attention", "sliding_attention"}
    if foreign:
        return f"layers of type {', '.join(sorted(foreign))}"
    if getattr(config, "alibi", False):
        return "ALiBi positions"
    return None


# Nats. Half-precision kernels round differently for every shape; the leak test below stays exact for them.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.03}
_PROBE_PROMPT, _PROBE_RESPONSE = 48, 24
# What a forward that a model is not made for raises.
_CANNOT = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)


@torch.no_grad()
def verify_plan(
    model: PreTrainedModel, groups: Sequence[Group], plan: ForwardPlan, device: torch.device
) -> ForwardPlan:
    """Hold the fast forward against the model's own padded forward on a probe cut from the first micro-batch.

    Two tests: the log-probs agree (1e-4 in float32), and no response sees another one (its log-probs stay
    the same when its sibling's tokens change). Recurrent and convolution layers fail the second even where
    the first looks like noise. Falls back to the next slower plan and says so in one log line.
    """
    groups = _probe(groups)
    candidate = plan
    # Without autocast float32 weights compute in float32, where a small tolerance means something.
    with torch.autocast(device.type, enabled=False):
        reference = _plainly(model, pad_groups(groups, device))
        _check_causal(model, groups, reference, device)
        if candidate.lean and not _lean_is_own(model, device):
            candidate = replace(candidate, lean=False)
        while candidate.packed or candidate.chunked:
            problem = _disagreement(model, groups, candidate, reference, device)
            if problem is None:
                break
            if candidate.packed and candidate.lean:  # the names of a Llama, another arithmetic
                candidate = replace(candidate, lean=False)
                continue
            candidate = ForwardPlan(False, candidate.chunked if candidate.packed else False, problem, lean=False)
    if candidate.reason is not None:
        way = "from hidden states" if candidate.chunked else "from the model's logits"
        layout = "packed rows" if candidate.packed else "padded batches"
        logger.warning("%s: %s, log-probs %s (%s)", model.config.model_type, layout, way, candidate.reason)
    return replace(candidate, verified=True)


def _plainly(model: PreTrainedModel, batch: Batch) -> Tensor:
    """(B, R) what the model's own padded forward says of response tokens: log-probs, or of a classifier its probe."""
    if is_classifier(model):
        return probe(model, batch)
    return score_from_logits(model, batch, 1.0, False, False).per_token_logps


def _check_causal(model: PreTrainedModel, groups: list[Group], reference: Tensor, device: torch.device) -> None:
    """Refuse a model whose log-prob of a token depends on later tokens (BERT with `is_decoder=False`)."""
    responses = [ids for group in groups for ids in group.response_ids]
    row = max(range(len(responses)), key=lambda i: responses[i].numel())
    batch = pad_groups(groups, device)
    last = batch.last_index[row]
    batch.input_ids.view(-1)[last] = (batch.input_ids.view(-1)[last] + 1) % model.config.get_text_config().vocab_size
    scores = _plainly(model, batch)
    gaps = (scores - reference)[row, : responses[row].numel() - 1].abs()
    dtype = _compute_dtype(model)
    if gaps.numel() and _size(gaps, dtype) > _TOLERANCE[dtype]:
        raise ValueError(
            f"{model.config.model_type}: the log-prob of a token changes with the tokens after it, so this is no "
            "causal language model; load it with is_decoder=True or use another one"
        )


def _probe(groups: Sequence[Group]) -> list[Group]:
    """Up to two groups of two non-empty short responses each, cut from the first micro-batch."""
    probes = []
    for group in groups[:2]:
        responses = [ids[:_PROBE_RESPONSE] for ids in group.response_ids if ids.numel()][:2]
        prompt = group.prompt_ids[-_PROBE_PROMPT:]
        if not responses:
            responses = [prompt[:1]]
        if len(responses) == 1:
            responses.append(torch.cat([responses[0], responses[0][:1]]))
        probes.append(Group(prompt, tuple(responses)))
    return probes


def _disagreement(
    model: PreTrainedModel, groups: list[Group], plan: ForwardPlan, reference: Tensor, device: torch.device
) -> str | None:
    """Why `plan` cannot be used on this model, or None."""

    def run(batch: Batch) -> Tensor:
        if is_classifier(model):
            return probe(model, batch)
        return score_batch(model, batch, chunked=plan.chunked).per_token_logps

    batch = plan.batch(groups, device)
    try:
        ours = run(batch)
    except torch.OutOfMemoryError:
        raise
    except _CANNOT as error:
        return f"{type(error).__name__}: {error}"
    dtype = _compute_dtype(model)
    gaps = (ours - reference)[batch.completion_mask].abs()
    gap = _size(gaps, dtype)
    if not gap <= _TOLERANCE[dtype]:
        return f"log-probs differ from the padded forward by {gap:.1e}"
    if batch.layout is None:
        return None
    unseen = _windows(model.config.get_text_config()) - batch.layout.windows
    if unseen:  # the probe may be shorter than the window, so that the log-probs above agree all the same
        return f"its sliding window of {unseen.pop()} tokens does not reach the attention function"
    first, *others = groups
    other_tokens = (first.response_ids[0] + 1) % model.config.get_text_config().vocab_size
    changed = Group(first.prompt_ids, (other_tokens, first.response_ids[1]))
    leak = (run(plan.batch([changed, *others], device))[1] - ours[1]).abs().max().item()
    # Rows of a matrix product do not depend on one another; expert routing may regroup them, hence not 0.
    if not leak <= min(_TOLERANCE[dtype], 1e-4):
        return f"a response changes by {leak:.1e} when its sibling changes"
    return None


def _lean_is_own(model: PreTrainedModel, device: torch.device) -> bool:
    """Whether `lean_blocks` runs the model as it is now, and computes what the model's own packed forward does where
    the first micro-batch may show nothing: on tokens that differ, at the end of the context (Ministral 3 scales its
    scores far from the start), and with the windows that reach attention (a Llama may have one in its configuration
    that its layers ignore)."""
    config = model.config.get_text_config()
    tokens = torch.arange(32) % config.vocab_size
    groups = [Group(tokens[:16], (tokens[16:25], tokens[20:32]))]
    lean, own = (pack_groups(groups, device, lean=True), pack_groups(groups, device))
    far = (getattr(config, "max_position_embeddings", None) or 0) - 1 - int(own.position_ids.max())
    positions = own.position_ids + max(far, 0)
    try:
        ours = lean_hidden_states(model, replace(lean, position_ids=positions))
        if ours is None:
            return False
        theirs = hidden_states(model, replace(own, position_ids=positions))
    except torch.OutOfMemoryError:
        raise
    except _CANNOT:
        return False
    assert lean.layout is not None
    assert own.layout is not None
    # Rounding in float32: 5e-5 with SmolLM2-135M.
    return lean.layout.windows == own.layout.windows and bool((ours - theirs).abs().max() <= 1e-3 * theirs.abs().max())


def _size(gaps: Tensor, dtype: torch.dtype) -> float:
    """How far two forwards differ: at most, or for most tokens where a half-precision logit of 40 is a multiple of
    0.25 and a single token may differ by one rounding."""
    return (gaps.max() if dtype in (torch.float32, torch.float64) else gaps.median()).item()


def difference(model: PreTrainedModel, ours: Tensor, reference: Tensor) -> str | None:
    """How far log-probs (nats, any shape) of two ways to run a model are apart, where that is more than the rounding
    of the type that it computes in; else None."""
    dtype = _compute_dtype(model)
    gap = _size((ours - reference).abs(), dtype)
    return None if gap <= _TOLERANCE[dtype] else f"log-probs differ by {gap:.1e}"


def _compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """The coarsest type that the model computes in: of its parameters, or of its quantised layers."""
    found = {p.dtype for p in model.parameters() if p.dtype in _TOLERANCE}
    quantization = getattr(model.config, "quantization_config", None)
    compute = getattr(quantization, "bnb_4bit_compute_dtype", None)
    if compute in _TOLERANCE:
        found.add(compute)
    return max(found, key=lambda dtype: _TOLERANCE[dtype])


def _windows(config: Any) -> set[int]:
    """The sliding windows of a decoder's layers, as its configuration has them."""
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None)
    return {window} if window and (layers is None or "sliding_attention" in layers) else set()
