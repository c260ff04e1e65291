"""The role `reference`: what the policy is held near.

| the policy | the reference | memory |
|---|---|---|
| a fresh adapter | adapters off | none |
| an adapter that starts trained | a frozen copy of it (trl#1340: the base is far from an SFT adapter) | one adapter |
| all weights, or weights outside the adapter | a frozen copy of the model | one model |
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from peft.utils import get_peft_model_state_dict
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_rlx.models.roles import POLICY, REFERENCE, Role, belongs
from hf_rlx.models.sharding import share_of, whole

if TYPE_CHECKING:
    from hf_rlx.models.shared import SharedModel

IN_WORDS = {
    "adapters_off": "the base with its adapters off",
    "adapter_copy": "a frozen copy of the adapter that training starts from",
    "model_copy": "a frozen copy of the model that training starts from, a second model in memory",
}
"""Each `kind` for people."""


def kind(shared: SharedModel) -> str:
    """`"adapters_off"`, `"adapter_copy"` or `"model_copy"`."""
    if REFERENCE in shared.frozen_copies:
        return "model_copy"
    return "adapters_off" if shared.roles[REFERENCE].adapter is None else "adapter_copy"


def prepare(shared: SharedModel, anew: bool = False) -> str:
    """Make the reference from the policy as it is now, unless there is one; returns its `kind`. `anew`: also where an
    earlier trainer left one, which that trainer's policy started from."""
    left = shared.roles.get(REFERENCE)
    if left is not None and not anew:
        return kind(shared)
    adapter = shared.roles[POLICY].adapter
    shared.frozen_copies.pop(REFERENCE, None)
    if adapter is None or any(not belongs(name, adapter) for name in shared.policy_parameters):
        shared.frozen_copies[REFERENCE] = copy.deepcopy(shared.causal_lm).requires_grad_(False).eval()
        shared.roles[REFERENCE] = Role(adapter, trainable=False)
        return kind(shared)
    if left is not None and left.adapter == REFERENCE:
        with torch.no_grad():
            for _, mine, policy in _pairs(shared):
                mine.copy_(_alike(policy, mine))
        return kind(shared)
    shared.roles[REFERENCE] = Role(None, trainable=False)
    if not _same_outputs(shared):
        _copy_adapter(shared, adapter)
    return kind(shared)


def sync(shared: SharedModel, alpha: float) -> None:
    """reference <- alpha * policy + (1 - alpha) * reference, on the adapter where there is one (trl#3108)."""
    prepare(shared)
    if kind(shared) == "adapters_off":
        _copy_adapter(shared, str(shared.roles[POLICY].adapter), identity=True)
    with torch.no_grad():
        for _, reference, policy in _pairs(shared):
            reference.lerp_(_alike(policy, reference).to(reference.dtype), alpha)


def state(shared: SharedModel, with_model: bool = False) -> dict[str, Tensor] | None:
    """The weights of a reference that is a copy, by name, for a checkpoint; None where there is nothing to keep.

    Args:
        with_model: also those of a whole-model copy; False where it has not moved from the model that the run began
            with, which makes it again.
    """
    if REFERENCE not in shared.roles or kind(shared) == "adapters_off":
        return None
    if kind(shared) == "model_copy" and not with_model:
        return None
    return {name: whole(reference.detach()) for name, reference, _ in _pairs(shared)}


def load_state(shared: SharedModel, tensors: dict[str, Tensor]) -> None:
    """Put back what `state` gave.

    Raises:
        KeyError: a weight of the reference is not among `tensors`.
    """
    prepare(shared)
    if kind(shared) == "adapters_off":
        _copy_adapter(shared, str(shared.roles[POLICY].adapter), identity=True)
    with torch.no_grad():
        for name, reference, _ in _pairs(shared):
            reference.copy_(share_of(tensors[name], reference))


def _copy_adapter(shared: SharedModel, adapter: str, identity: bool = False) -> None:
    """A frozen adapter `reference` equal to `adapter`; `identity` makes it equal to adapters off instead."""
    config: Any = copy.deepcopy(shared.model.peft_config[adapter])
    if getattr(config, "init_lora_weights", True) is not True:
        config.init_lora_weights = True  # other initialisations rewrite the base's weights again, or are not 0
    state = None
    if not identity:
        state = get_peft_model_state_dict(shared.model, adapter_name=adapter, save_embedding_layers=False)
    shared.add_adapter(REFERENCE, config, state)
    shared.roles[REFERENCE] = Role(REFERENCE, trainable=False)
    if identity:
        # A fresh adapter with the policy's A (of an embedding, B): only the factor that starts at 0 moves then, which
        # keeps the average of products close to the product of averages.
        with torch.no_grad():
            for name, mine, policy in _pairs(shared):
                if "lora_A" in name or "lora_embedding_B" in name:
                    mine.copy_(_alike(policy, mine))


def _same_outputs(shared: SharedModel) -> bool:
    """Whether the policy's adapter changes nothing yet: the same outputs with it on and off."""
    vocabulary = shared.config.get_text_config().vocab_size
    probe = (torch.arange(1, 9) % vocabulary)[None].to(shared.device)

    def run() -> Tensor:
        return shared.causal_lm(input_ids=probe, use_cache=False).logits

    with torch.no_grad(), shared.rollout_mode():
        policy = run()
        with shared.as_role(REFERENCE):
            return torch.equal(policy, run())


def _alike(policy: Tensor, reference: Tensor) -> Tensor:
    """The policy's weight, split over processes only where the reference's is."""
    return policy if isinstance(reference, DTensor) else whole(policy)


def _pairs(shared: SharedModel) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, reference, policy) of the tensors that correspond."""
    if REFERENCE in shared.frozen_copies:
        policies = shared.causal_lm.named_parameters()
        for reference, (name, policy) in zip(shared.frozen_copies[REFERENCE].parameters(), policies, strict=True):
            yield name, reference, policy
        return
    named = dict(shared.named_parameters())
    adapter = shared.roles[POLICY].adapter
    for name, parameter in named.items():
        if belongs(name, REFERENCE):
            yield name, parameter, named[re.sub(rf"\.{REFERENCE}(\.|$)", rf".{adapter}\1", name)]
