"""Switching dropout off for good, so that old, new and reference log-probs come from one function."""

from __future__ import annotations

import re

from torch import nn

_ATTRIBUTE = re.compile(r"(^|_)(dropout|pdrop|drop)(_p|_prob|_rate)?$")


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability in `model` to 0, adapters included.

    Attention dropout is often a plain number on a module rather than an `nn.Dropout`; those count too.
    Evaluation mode would do the same, but transformers recomputes activations in training mode only.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and _ATTRIBUTE.search(name):
                setattr(module, name, 0.0)
