"""What the Trainer, its callbacks and PEFT ask a model for, answered by the transformers model inside."""

from __future__ import annotations

from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from hf_rlx.models.modules import WalkedModule


class ModelFace(WalkedModule):
    """A module around `model`, a `PreTrainedModel` or a `PeftModel`, with the attributes of the former."""

    model: Any

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model, adapters injected or not."""
        base: Any = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        return base

    @property
    def config(self) -> Any:
        """The base's configuration."""
        return self.causal_lm.config

    @property
    def context_length(self) -> int | None:
        """Tokens that the base has positions for; None: its configuration does not say."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    @property
    def generation_config(self) -> Any:
        """The base's generation configuration; absent for a classifier, which has none."""
        return self.causal_lm.generation_config

    @property
    def device(self) -> torch.device:
        """Where the base is."""
        return self.causal_lm.device

    @property
    def dtype(self) -> torch.dtype:
        """The base's floating-point type."""
        return self.causal_lm.dtype

    @property
    def quantization_method(self) -> Any:
        """bitsandbytes models must not be moved; the Trainer asks here."""
        return getattr(self.causal_lm, "quantization_method", None)

    @property
    def hf_device_map(self) -> dict[str, Any]:
        """Where accelerate placed the base's parts; absent where it was not asked to."""
        return getattr(self.causal_lm, "hf_device_map")  # noqa: B009

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate` with the policy."""
        return self.model.generate(*args, **kwargs)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Recompute activations in the backward. Non-reentrant: the reentrant form gives frozen inputs no gradient."""
        options = {"use_reentrant": False, **(activation_checkpointing_kwargs or {})}
        if options["use_reentrant"] and isinstance(self.model, PeftModel):
            raise ValueError("use_reentrant=True gives adapters on a frozen base no gradient; leave it False")
        self.causal_lm.activation_checkpointing_enable(activation_checkpointing_kwargs=options, **kwargs)
