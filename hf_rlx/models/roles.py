"""What a role is: names and a small record. Switching roles happens in `models/shared.py` only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

POLICY, REFERENCE, CRITIC, REWARD, STEP_REWARD = "policy", "reference", "critic", "reward", "step_reward"


@dataclass
class Role:
    """How a role runs: `adapter` to activate (None: adapters off), the name of its `head`, whether it trains."""

    adapter: str | None
    head: str | None = None
    trainable: bool = True


@dataclass
class Flags:
    """Everything that `as_role` may touch, as it was."""

    requires_grad: list[tuple[nn.Parameter, bool]]
    training: list[tuple[nn.Module, bool]]
    adapters: list[str]
    active_adapter: str
    adapters_off: bool
    role: str


def belongs(parameter: str, adapter: str) -> bool:
    """Whether a parameter, by its dotted name, is a part of the adapter called `adapter`."""
    return adapter in parameter.split(".") and not parameter.startswith("heads.")
