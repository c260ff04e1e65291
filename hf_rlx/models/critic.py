"""The role `critic`: what predicts the return from every state.

| the critic | forward and backward | what trains |
|---|---|---|
| a head on the policy's hidden states | the policy's own | the head; the policy too, where that is asked for |
| an adapter of its own, with a head | its own, inside `as_role("critic")` | adapter and head |

Both heads start at 0, so that the first advantages are the returns themselves; or as a copy of the reward model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftConfig, PeftModel
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

from hf_rlx.models.forward import hidden_states
from hf_rlx.models.roles import CRITIC, POLICY, REWARD
from hf_rlx.types import Group

if TYPE_CHECKING:
    from hf_rlx.models.shared import SharedModel


def has_own_adapter(shared: SharedModel) -> bool:
    """Whether the critic has an adapter that is not the policy's."""
    return shared.roles[CRITIC].adapter not in (None, shared.roles[POLICY].adapter)


def prepare(shared: SharedModel, adapter: bool = False, from_reward: bool = False, detached: bool = True) -> str:
    """Make the role `critic`, or take the one that `shared` has, as it is; call it before the optimizer is built.

    Args:
        adapter: with an adapter of its own, set up like the policy's.
        from_reward: adapter and head are copied from the role `reward`, the head over the temperature that was fitted:
            its values are then the scores as `RoleReward` reads them without a normaliser.
        detached: a head on the policy's hidden states sends no gradient into them.

    Returns:
        `"head"` or `"adapter"`.

    Raises:
        ValueError: an adapter is asked for but all weights train; there is no reward model to copy, or it has no
            adapter; the critic that is there is of the other kind.
    """
    own = adapter or from_reward
    if CRITIC not in shared.roles:
        if own and not isinstance(shared.model, PeftModel):
            raise ValueError(
                "a critic with an adapter of its own needs an adapter on the policy too, but here all weights train; "
                "pass peft_config=LoraConfig(...), or leave critic_adapter and critic_init_from_reward off"
            )
        if from_reward:
            _copy_reward(shared)
        else:
            shared.add_role(CRITIC, _like_policy(shared) if own else None)
    elif own != has_own_adapter(shared):
        has, asked = ("an adapter of its own", "none") if has_own_adapter(shared) else ("none", "one")
        raise ValueError(
            f"the model has a critic already, with {has}, but {asked} is asked for: set critic_adapter={not own}, or "
            "start from a model without the role"
        )
    own = has_own_adapter(shared)
    shared.roles[CRITIC].trainable = True
    head: Any = shared.heads[CRITIC]
    head.detached = detached and not own
    # The head on the policy's own forward trains in the policy's role.
    shared.roles[POLICY].head = None if own else CRITIC
    return "adapter" if own else "head"


def put_aside(shared: SharedModel) -> None:
    """The policy trains without a critic that an earlier trainer left on its forward."""
    shared.roles[POLICY].head = None


def parameters(shared: SharedModel) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters of the critic alone: its head, and its adapter where it has one."""
    return shared.trainable_parameters(CRITIC)


def values(shared: SharedModel, groups: Sequence[Group]) -> Tensor:
    """(B, R) float32 value before each response token, in reward units, 0 under the mask; in the current role, without
    the vocabulary matrix. Differentiable."""
    shared.verify(groups)
    batch = shared.plan.batch(groups, shared.device, shared._pad_token_id)
    hidden = hidden_states(shared.causal_lm, batch, batch.predict_index)
    return batch.to_rows(shared.heads[CRITIC](hidden))


def _like_policy(shared: SharedModel) -> PeftConfig:
    """The policy's adapter configuration, for a fresh adapter that changes nothing yet."""
    config = _plain(shared.model.peft_config[shared.roles[POLICY].adapter])
    if getattr(config, "modules_to_save", None):
        config.modules_to_save = None  # copies of whole layers: a value needs none
    return config


def _plain(config: Any) -> Any:
    config = copy.deepcopy(config)
    if getattr(config, "init_lora_weights", True) is not True:
        config.init_lora_weights = True  # others rewrite the base's weights, which the policy stands on
    return config


def _copy_reward(shared: SharedModel) -> None:
    reward = shared.roles.get(REWARD)
    if reward is None or reward.head is None or reward.adapter in (None, shared.roles[POLICY].adapter):
        raise ValueError(
            "critic_init_from_reward=True copies the adapter and head of the role 'reward', but the model has "
            f"{sorted(shared.roles)}; train one with RewardTrainer(model=shared, ...) first, or leave it False"
        )
    adapter = str(reward.adapter)
    state = get_peft_model_state_dict(shared.model, adapter_name=adapter, save_embedding_layers=False)
    shared.add_role(CRITIC, _plain(shared.model.peft_config[adapter]))
    set_peft_model_state_dict(shared.model, state, adapter_name=CRITIC)
    with torch.no_grad():
        theirs: Any = shared.heads[reward.head]
        ours: Any = shared.heads[CRITIC]
        ours.linear.load_state_dict(theirs.linear.state_dict())
        for parameter in ours.linear.parameters():
            parameter.div_(reward.facts.get("temperature", 1.0))
