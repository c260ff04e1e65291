"""What a role is: names and a small record. Switching roles happens in `models/shared.py` only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

POLICY, REFERENCE, CRITIC, REWARD, STEP_REWARD = "policy", "reference", "critic", "reward", "step_reward"


@dataclass
class Role:
    """How a role runs: `adapter` to activate (None: adapters off), the name of its `head`, whether it trains; and
    `facts` that are saved with it, as plain JSON values (how a reward's scores are to be read)."""

    adapter: str | None
    head: str | None = None
    trainable: bool = True
    facts: dict[str, Any] = field(default_factory=dict)


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


def single_adapter(model: Any) -> str:
    """The active adapter of a `PeftModel`.

    Raises:
        ValueError: there are several, or none.
    """
    active = list(model.active_adapters)
    if len(active) != 1:
        raise ValueError(f"the policy must be one adapter, but {active} are active; call set_adapter(name) first")
    return active[0]


def runs(shared: Any, adapter: str | None) -> bool:
    """Whether every layer of a shared model runs this one adapter (None: no adapter) already: PEFT, which looks at the
    whole model several times, need not be asked."""
    for module in shared.modules():
        if isinstance(module, AuxiliaryTrainingWrapper):  # has a state of its own
            return False
        if isinstance(module, BaseTunerLayer):
            if module.disable_adapters != (adapter is None):
                return False
            if adapter is not None and list(module.active_adapters) != [adapter]:
                return False
    return adapter is None or list(shared.model.active_adapters) == [adapter]
