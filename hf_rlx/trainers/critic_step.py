"""The critic's part of a PPO update where it has an adapter of its own, and its place in the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hf_rlx.models import critic
from hf_rlx.models.packing import split_by_tokens
from hf_rlx.models.roles import CRITIC, POLICY
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.base import pad_columns
from hf_rlx.trainers.health import loss_fault
from hf_rlx.trainers.processes import raise_together
from hf_rlx.trainers.windows import MiniBatch
from hf_rlx.types import Group

if TYPE_CHECKING:
    from hf_rlx.trainers.ppo import PPOTrainer
    from hf_rlx.trainers.ppo_config import PPOConfig

_HEAD_FACTOR, _HEAD_RATE = 100.0, 1e-3  # a linear probe takes steps of 1e-3 where an adapter takes 1e-5


def add_groups(optimizer: torch.optim.Optimizer, shared: SharedModel, args: PPOConfig, given: bool) -> None:
    """Put the critic's parameters into groups of their own, with their own step sizes.

    Args:
        given: the user made the optimizer; it is left as it is.

    Raises:
        ValueError: a given optimizer lacks a parameter of the critic.
    """
    named = critic.parameters(shared)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if given:
        missing = [name for name, p in named if id(p) not in held]
        if missing:
            raise ValueError(
                f"the optimizer misses {len(missing)} parameters of the critic, e.g. {missing[0]}; add "
                'trainer.shared.trainable_parameters("critic"), or pass optimizers=(None, None)'
            )
        return
    ours = {id(p) for _, p in named}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in ours]
    rate, own = args.learning_rate, args.critic_learning_rate
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in named:
        of_head = max(rate, min(_HEAD_FACTOR * rate, _HEAD_RATE))
        step = own if own is not None else of_head if name.startswith("heads.") else rate
        decay = 0.0 if name.endswith("bias") else args.weight_decay
        groups.setdefault((step, decay), []).append(parameter)
    for (step, decay), parameters in groups.items():
        optimizer.add_param_group({"params": parameters, "lr": step, "weight_decay": decay})


def old_values(trainer: PPOTrainer, groups: list[Group]) -> Tensor:
    """(B, R) values of the critic's own forward, without gradient, a few rows at a time."""
    shared = trainer.shared

    def run(most: int | None) -> Tensor:
        with torch.no_grad(), shared.as_role(CRITIC), shared.rollout_mode(), trainer.accelerator.autocast():
            return pad_columns([critic.values(shared, row) for row in split_by_tokens(groups, most)])

    return trainer.forward_limit.run(run, groups)


def forward_backward(trainer: PPOTrainer, batch: MiniBatch) -> Tensor:
    """Forward and backward of the critic inside its own role, after the policy's backward: PEFT falsifies a gradient
    when adapters are switched between the two (peft#2832). Returns the value loss without vf_coef.

    Raises:
        NonFiniteError: of the loss.
    """
    loss, fault = torch.zeros((), device=trainer.args.device), None
    with trainer.shared.as_role(CRITIC):
        if batch.groups:
            with trainer.accelerator.autocast():
                values = critic.values(trainer.shared, batch.groups)
            loss = trainer.value_loss(values, batch)
            fault = loss_fault(loss, trainer.shared, batch, trainer.state.global_step)
        if trainer.accelerator.scaler is None:  # a scaler drops such a step by itself
            raise_together(fault)
        if batch.groups:
            trainer.backward(trainer.args.vf_coef * loss)
    return loss.detach()


def add_up_gradients(shared: SharedModel, processes: int) -> None:
    """The sum over processes, whose losses are shares of one; every process must call it. DDP does not know of these
    parameters. A process that had nothing to learn from adds 0."""
    if processes == 1:
        return
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for _, parameter in critic.parameters(shared):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        by_type.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_type.values():  # one call for hundreds of small matrices
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        torch.distributed.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def drop_policy_gradients(shared: SharedModel) -> None:
    """Only the critic is stepped: a parameter without a gradient is left alone, by momentum and weight decay too."""
    ours = {id(p) for _, p in critic.parameters(shared)}
    for _, parameter in shared.trainable_parameters(POLICY):
        if id(parameter) not in ours:
            parameter.grad = None
