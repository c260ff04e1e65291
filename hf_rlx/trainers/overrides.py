"""Methods of TRL's and transformers' trainers that a subclass may override there, and our hooks in their place.

A trainer here has a loop of its own, so an override that it never calls would change nothing without a word: such a
subclass is refused by name when it is constructed. One that overrides our hook too may have methods of any name.
"""

from __future__ import annotations

import inspect
from typing import Any

_LOSS = "minibatch_loss"
_EVALUATE = "evaluate"
_ANY = dict.fromkeys(
    ("prediction_step", "prediction_loop", "evaluation_loop", "get_eval_dataloader", "_get_eval_sampler"), _EVALUATE
) | {"_get_train_sampler": "get_train_dataloader"}

# Method there -> hook here, of trainers that sample.
_ONLINE: dict[str, str] = {
    **_ANY,
    "compute_loss": _LOSS,
    "_compute_loss": _LOSS,
    "compute_liger_loss": _LOSS,
    "_get_per_token_logps": _LOSS,
    "_get_per_token_logps_and_entropies": _LOSS,
    "_get_last_hidden_state": _LOSS,
    "batched_forward_pass": _LOSS,
    "train_minibatch": _LOSS,
    "_calculate_rewards": "compute_rewards",
    "_generate_and_score_completions": "sample",
    "_generate": "sample",
    "_generate_single_turn": "sample",
    "_tokenize_prompts": "sample",
    "_prepare_inputs": "collect",
}
# The same of trainers on given rows; `LOSS` is `pair_objective` or `pair_loss`.
_GIVEN: dict[str, str] = {
    **_ANY,
    **dict.fromkeys(
        (
            "compute_loss",
            "_compute_loss",
            "get_batch_loss_metrics",
            "get_batch_logps",
            "concatenated_forward",
            "dpo_loss",
            "cpo_loss",
            "simpo_loss",
            "ipo_loss",
            "odds_ratio_loss",
        ),
        "LOSS",
    ),
    "compute_ref_log_probs": "pairs",
    "compute_reference_log_probs": "pairs",
    "_prepare_inputs": "encode_row",
    "_prepare_dataset": "encode_row",
    "tokenize_row": "encode_row",
    "process_row": "encode_row",
    "build_tokenized_answer": "encode_row",
    "concatenated_inputs": "encode_row",
}
# Of those of them that sample in rounds.
_ROUNDS: dict[str, str] = dict.fromkeys(("compute_rewards", "_calculate_rewards"), "the argument reward_funcs")
# Names that TRL's old PPOTrainer had with other arguments.
_SAME_NAME = {"compute_rewards": "total", "compute_advantages": "advantages"}


def ignored_override(trainer: Any) -> str | None:
    """What to say of a subclass whose override would never be called, or with other arguments; None: all is well.

    Args:
        trainer: the class.
    """
    online = hasattr(trainer, _LOSS)
    rounds = _ROUNDS if "reward_funcs" in inspect.signature(trainer.__init__).parameters else {}
    for name, hook in (_ONLINE if online else {**_GIVEN, **rounds}).items():
        found = _written(trainer, name)
        hook = _loss_hook(trainer) if hook == "LOSS" else hook
        if found is not None and _written(trainer, hook) is None:
            what = f"override {_form(trainer, hook)}" if hasattr(trainer, hook) else f"use {hook}"
            return f"{found.__name__}.{name} would never be called: {what} instead"
    for name, field in _SAME_NAME.items():
        found = _written(trainer, name) if online else None
        if found is not None and not _takes_rollouts(vars(found)[name]):
            return (
                f"{found.__name__}.{name} has other arguments than here: {name}(self, rollouts) changes `{field}` of "
                "every rollout"
            )
    return None


def _written(trainer: Any, name: str) -> Any:
    """The class that defines `name`, where it is neither ours nor transformers'."""
    owner = next((cls for cls in trainer.__mro__ if name in vars(cls)), None)
    ours = owner is None or owner.__module__.partition(".")[0] in ("hf_rlx", "transformers")
    return None if ours else owner


def _loss_hook(trainer: Any) -> str:
    """`pair_objective` where the trainer has one of its own, else `pair_loss`."""
    owners = [cls.__name__ for cls in trainer.__mro__ if "pair_objective" in vars(cls)]
    return "pair_objective" if owners and owners[0] != "PreferenceTrainer" else "pair_loss"


def _form(trainer: Any, hook: str) -> str:
    return f"{hook}({', '.join(inspect.signature(getattr(trainer, hook)).parameters)})"


def _takes_rollouts(function: Any) -> bool:
    """Whether a method may be called with rollouts alone."""
    try:
        inspect.signature(function).bind(None, [])
    except TypeError:
        return False
    return True


class Gone:
    """A method that a trainer does not have: reading it raises AttributeError, which says what replaces it.

    Args:
        instead: what to do.
    """

    def __init__(self, instead: str) -> None:
        self.instead = instead
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trainer: Any, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__} has no {self.name}(): {self.instead}")


__all__ = ["Gone", "ignored_override"]
