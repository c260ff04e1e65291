"""Moving the reference towards the policy every few steps."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from hf_rlx.models.shared import SharedModel


class SyncReference(TrainerCallback):
    """reference <- alpha * policy + (1 - alpha) * reference every `every` optimizer steps (TR-DPO, 2404.09656 eq. 5;
    TRL's `sync_ref_model`, here for adapters too)."""

    def __init__(self, shared: SharedModel, alpha: float, every: int) -> None:
        self.shared, self.alpha, self.every = shared, alpha, every

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer."""
        if state.global_step % self.every == 0:
            self.shared.sync_reference(self.alpha)
