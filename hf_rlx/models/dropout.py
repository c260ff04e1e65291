"""Switching dropout off for good, so that old, new and reference log-probs come from one function."""

from __future__ import annotations

import copy
import re
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_ATTRIBUTE = re.compile(r"(^|_)(dropout|pdrop|drop|layerdrop)(_p|_prob|_rate)?$")


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability in `model` to 0, adapters included.

    Attention dropout is often a plain number on a module rather than an `nn.Dropout`, and some families (Falcon,
    GPT-Neo, Persimmon) read it from the configuration in every forward; those count too. Their layers get a copy of
    the configuration: the model's own, which is saved with it, stays as it is.

    Evaluation mode would do the same, but transformers recomputes activations in training mode only.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in probabilities(module):
            setattr(module, name, 0.0)
        config: Any = vars(module).get("config")
        if config is None or isinstance(module, PreTrainedModel) or not probabilities(config):
            continue
        if id(config) not in copies:
            copies[id(config)] = copy.copy(config)
            for name in probabilities(config):
                setattr(copies[id(config)], name, 0.0)
        module.config = copies[id(config)]


def probabilities(holder: Any) -> list[str]:
    """Names of the attributes that are dropout probabilities above 0."""
    return [n for n, value in vars(holder).items() if isinstance(value, float) and value and _ATTRIBUTE.search(n)]
