"""Fields and arguments that DPO, IPO, SimPO and ORPO have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hf_rlx.trainers.config import described, strict
from hf_rlx.trainers.preference_config import PreferenceConfig


@strict
@dataclass
class PairConfig(PreferenceConfig):
    """Fields of every trainer on pairs; names and defaults are TRL 1.16's."""

    learning_rate: float = described(
        1e-6, "Step size; TRL's, for training all weights. An adapter wants about ten times as much, e.g. 1e-5."
    )
    truncation_mode: str = described(
        "keep_start",
        "Not carried: an answer is cut at its end and a prompt at its beginning, and each answer keeps at least half "
        "of max_length; leave truncation_mode out",
    )
    max_completion_length: int | None = described(
        None, "Tokens of an answer at most, EOS included: longer ones lose what stands before it. None: max_length's."
    )
    max_prompt_length: int | None = described(
        None, "Tokens of a prompt at most: longer ones lose their beginning, BOS kept. None: max_length's."
    )
    padding_free: bool = described(False, "No effect: packed rows have no padding.")
    router_aux_loss_coef: float | None = described(
        None, "Not carried: routers train through the log-probs alone; leave router_aux_loss_coef out"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.max_prompt_length
        if most is not None and (type(most) is not int or most < 1):
            raise ValueError(f"max_prompt_length must be a whole number of at least 1 or None, got {most!r}")


@strict
@dataclass
class ReferencedConfig(PairConfig):
    """Fields of the trainers that hold the policy near a reference."""

    precompute_ref_log_probs: bool = described(
        False,
        "Compute the reference's log-probs of all rows once, before training, and keep them on disk: a later run over "
        "the same data, model, template and lengths reads them.",
    )
    precompute_ref_batch_size: int | None = described(None, "Rows at a time of it; None: per_device_train_batch_size.")
    ref_cache_dir: str | None = described(
        None, "Folder of the kept log-probs; None: `reference_cache` in output_dir. Runs may share one."
    )
    keep_reference: bool = described(
        False,
        "Hold the policy near the reference that the SharedModel has already, an earlier trainer's; False: near the "
        "policy as this trainer starts.",
    )
    sync_ref_model: bool = described(False, "Move the reference towards the policy every ref_model_sync_steps.")
    ref_model_mixup_alpha: float = described(0.6, "Share of the policy in the moved reference.")
    ref_model_sync_steps: int = described(512, "Optimizer steps between two moves of the reference.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precompute_ref_log_probs and self.sync_ref_model:
            raise ValueError("precompute_ref_log_probs keeps what sync_ref_model would change; use one of them")
        rows = self.precompute_ref_batch_size
        if rows is not None and (isinstance(rows, bool) or rows < 1 or rows != int(rows)):
            raise ValueError(f"precompute_ref_batch_size must be a whole number of at least 1 or None, got {rows!r}")


def check_number(name: str, value: Any, *, above: float = -math.inf, at_least: float = -math.inf) -> None:
    """Refuse what is no finite number, or not in range.

    Raises:
        ValueError: names the field and what it may be.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if number and value > above and value >= at_least:
        return
    allowed = f" above {above:g}" if above > -math.inf else ""
    allowed = f" of at least {at_least:g}" if at_least > -math.inf else allowed
    raise ValueError(f"{name} must be a finite number{allowed}, got {value!r}")


_INSTEAD = {
    "data_collator": "rows become packed groups; change the dataset instead",
    "compute_metrics": "evaluate() has the metrics, of pairs rewards, margins, accuracies with their interval and KL",
    "compute_loss_func": "a subclass may override `pair_loss`",
    "formatting_func": "dataset = dataset.map(...) makes the text beforehand",
    "preprocess_logits_for_metrics": "no logits are kept; evaluate() has the metrics",
    "model_init": "pass the model, or its name, as model=",
}


def refuse_arguments(**given: Any) -> None:
    """Refuse constructor arguments of TRL's that are not carried.

    Raises:
        ValueError: the first that is not None, with what to do instead.
    """
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} is not carried by hf_rlx: {_INSTEAD[name]}")


__all__ = ["PairConfig", "ReferencedConfig", "check_number", "refuse_arguments"]
