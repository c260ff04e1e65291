"""NaN and infinity are found where they arise: a run stops before they reach the weights or a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_rlx.models.sharding import local
from hf_rlx.trainers.processes import agreed, raise_together

if TYPE_CHECKING:
    from hf_rlx.trainers.base import BaseTrainer

logger = logging.getLogger(__name__)


class NonFiniteError(FloatingPointError):
    """A weight, loss or gradient is NaN or infinite; the message says which and where to look."""


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the floating-point tensors that hold NaN or infinity; of split ones, in this process's share."""
    named = [(n, local(t.detach())) for n, t in tensors if t.is_floating_point() and t.numel()]
    # One pass and no intermediate tensor: the sum is finite unless an entry is not. It may overflow where none is,
    # so suspects are looked at entry by entry.
    suspects = [
        (n, t)
        for n, t in named
        if not torch.isfinite(t.sum(dtype=torch.float32 if t.dtype != torch.float64 else None))
    ]
    return [n for n, t in suspects if not torch.isfinite(t).all()]


def check_weights(parameters: Iterable[tuple[str, Tensor]], when: str) -> None:
    """Refuse weights that are not finite. Of split weights every process looks at its share, and all must call it.

    Raises:
        NonFiniteError: names them.
    """
    named = list(parameters)
    bad, fault = not_finite(named), None
    if bad:
        fault = NonFiniteError(
            f"{when}: {_listed(bad)} not finite. The last checkpoint is untouched; resume from it with a lower "
            "learning_rate or max_grad_norm"
        )
    if any(isinstance(t, DTensor) for _, t in named):
        raise_together(fault)
    elif fault is not None:
        raise fault


def loss_fault(loss: Tensor, shared: nn.Module, batch: Any, step: int) -> NonFiniteError | None:
    """What is wrong with a loss that is not finite, and where it came from: the weights, the inputs of the loss, or
    the forward; None for a finite one.

    Args:
        loss: scalar. batch: a `MiniBatch`. step: optimizer steps done.
    """
    if torch.isfinite(loss.detach()):
        return None
    weights = not_finite(shared.named_parameters())
    fields = ("advantages", "returns", "old_logps", "old_values", "ref_logps", "is_weights", "normalizer")
    inputs = not_finite((n, getattr(batch, n)) for n in fields if getattr(batch, n, None) is not None)
    if weights:
        where = f"of the weights {_listed(weights)} not finite"
    elif inputs:
        where = f"of the loss's inputs {_listed(inputs)} not finite"
    else:
        where = "the forward made it from finite weights and inputs; float32 (bf16=False, fp16=False) may hold it"
    return NonFiniteError(
        f"the loss of step {step + 1} is {float(loss.detach())}: {where}. Nothing was stepped or saved over; the last "
        "checkpoint is as it was"
    )


class GradientGuard:
    """Drops an optimizer step whose gradient is not finite, before the clip spreads it over all weights; too many in a
    row end the run. Where a gradient scaler is at work (float16), it does the same by itself.

    Args:
        allowed: steps in a row that may be dropped.
    """

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.skipped = 0

    def check(self, trainer: BaseTrainer) -> None:
        """Look at the gradients; every process calls it before the optimizer's step.

        Raises:
            NonFiniteError: one time too many; names the parameters.
        """
        if trainer.accelerator.scaler is not None:
            return
        bad = not_finite((n, p.grad) for n, p in trainer.shared.named_parameters() if p.grad is not None)
        found = f"the gradient of {_listed(bad) if bad else 'a weight in another process is'} not finite"
        if self.note(trainer, agreed(bool(bad)), found):
            for parameter in trainer.shared.parameters():
                parameter.grad = None

    def note(self, trainer: BaseTrainer, dropped: bool, found: str) -> bool:
        """Count a step that is dropped, or start anew at one that is not; returns `dropped`.

        Args:
            dropped: the same on every process. found: what is wrong, as half a sentence.

        Raises:
            NonFiniteError: one time too many.
        """
        if not dropped:
            self.skipped = 0
            return False
        self.skipped += 1
        trainer.metrics["train"].add("skipped_steps", 1.0 / trainer.accelerator.num_processes, reduce="sum")
        if self.skipped > self.allowed:
            raise NonFiniteError(
                f"step {trainer.state.global_step + 1}: {found}, {self.skipped} steps in a row. The weights are as "
                "before it; resume with a lower learning_rate, or look at the rewards"
            )
        logger.warning("step %d is skipped: %s", trainer.state.global_step + 1, found)
        return True

    def state_dict(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"skipped": self.skipped}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Put back what `state_dict` gave."""
        self.skipped = state["skipped"]


def _listed(names: list[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"
