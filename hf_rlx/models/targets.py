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
# What families call their layers: a list for several of them names some that a model lacks. Anything else is misspelt.
_OF_FAMILIES = {
    *("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "in_proj", "qkv_proj", "Wqkv", "query_key_value"),
    *("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "fc1", "fc2", "fc_in", "fc_out"),
    *("c_attn", "c_proj", "c_fc", "dense", "dense_h_to_4h", "dense_4h_to_h", "query", "key", "value"),
}


def check_targets(model: Any, config: Any) -> None:
    """Refuse an adapter that would not sit where it is told to: PEFT itself passes over names that fit nowhere.

    Beside names that fit, one that other families of models use is told and passed over.

    Args:
        model: that gets the adapter; may have others. config: of PEFT.

    Raises:
        ValueError: no module fits a name in `target_modules`, all of them, or the pattern; the message has the
            nearest names and all that there are.
    """
    if getattr(model, "peft_config", None) is not None and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    targets = getattr(config, "target_modules", None)
    if targets and str(targets).lower() != _SHORTHAND:
        known = [name for name, _ in model.named_modules() if name]
        unknown = _unknown(targets, known)
        none_fits = isinstance(targets, str) or len(unknown) == len(set(targets))
        wrong = unknown if none_fits else [name for name in unknown if name not in _OF_FAMILIES]
        if wrong and not getattr(config, "target_parameters", None):
            raise ValueError(f"target_modules: {_told(wrong, model)}")
        if unknown and not none_fits:
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
