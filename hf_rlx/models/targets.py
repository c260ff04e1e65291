"""The modules that an adapter names, held against those that the model has, before PEFT looks for them."""

from __future__ import annotations

import difflib
import logging
import re
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

logger = logging.getLogger(__name__)

_SHORTHAND = "all-linear"


def check_targets(model: Any, config: Any) -> None:
    """Refuse an adapter that would sit nowhere, and point out names that fit no module.

    Args:
        model: that gets the adapter; may have others. config: of PEFT.

    Raises:
        ValueError: no module fits `target_modules`; the message has the nearest names and all that there are.
    """
    if getattr(model, "peft_config", None) is not None and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    targets = getattr(config, "target_modules", None)
    if targets and str(targets).lower() != _SHORTHAND:
        known = [name for name, _ in model.named_modules() if name]
        unknown = _unknown(targets, known)
        if unknown and (isinstance(targets, str) or len(unknown) == len(set(targets))):
            if not getattr(config, "target_parameters", None):
                raise ValueError(f"target_modules: {_told(unknown, model)}")
        elif unknown:
            logger.warning("target_modules: %s. The others are taken", _told(unknown, model))
    saved = getattr(config, "modules_to_save", None)
    if saved:
        known = [name for name, _ in model.named_modules() if name]
        # PEFT adds the heads of classifiers by itself, whatever they are called.
        missing = [name for name in _unknown(saved, known) if name not in ("score", "classifier")]
        if missing:
            logger.warning("modules_to_save: %s", _told(missing, model))


def _unknown(targets: Any, known: list[str]) -> list[str]:
    """Which of `targets` fit no module; a text is a pattern for whole names."""
    if isinstance(targets, str):
        try:
            pattern = re.compile(targets)
        except re.error as error:
            raise ValueError(f"target_modules={targets!r} is no regular expression: {error}") from error
        return [] if any(pattern.fullmatch(name) for name in known) else [targets]
    ends = {".".join(parts[-n:]) for name in known for parts in [name.split(".")] for n in range(1, len(parts) + 1)}
    return sorted(target for target in set(targets) if target not in ends)


def _told(unknown: list[str], model: nn.Module) -> str:
    """What is unknown, the nearest names, and all that an adapter can sit on."""
    full = [name for name, module in model.named_modules() if name and _adaptable(name, module)]
    names = list(dict.fromkeys(name.rpartition(".")[2] for name in full))
    parts = []
    for target in unknown:
        depth = target.count(".") + 1
        ends = list(dict.fromkeys(".".join(name.split(".")[-depth:]) for name in full))
        near = difflib.get_close_matches(target, ends, n=2, cutoff=0.5)
        parts.append(f"{target!r}" + (f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""))
    first = next((name for name in full if re.search(r"\.\d+\.", name)), "".join(full[:1]))
    listed = ", ".join(names[:16]) + (", ..." if len(names) > 16 else "")
    return (
        f"the model has no module {', '.join(parts)}; it has {listed} (in full: {first}); "
        'target_modules="all-linear" takes every linear layer but the head'
    )


def _adaptable(name: str, module: nn.Module) -> bool:
    """Whether it is a layer of the model with a matrix, and no part of an adapter."""
    if "lora_" in name or name.endswith(".base_layer") or ".base_layer." in name:
        return False
    if isinstance(module, BaseTunerLayer):
        return True
    weight = getattr(module, "weight", None)
    return weight is not None and getattr(weight, "ndim", 0) == 2


__all__ = ["check_targets"]
