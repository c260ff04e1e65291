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

    @property
    def peft_config(self) -> dict[str, Any]:
        """The adapters' settings by name; absent where all weights train."""
        return getattr(self.model, "peft_config")  # noqa: B009

    @property
    def input_modalities(self) -> Any:
        """What `transformers.pipeline` asks: text."""
        return self.causal_lm.input_modalities

    @property
    def output_modalities(self) -> Any:
        """See `input_modalities`."""
        return self.causal_lm.output_modalities

    def forward_plain(self, groups: Any, inputs: dict[str, Any]) -> Any:
        """The transformers model's own forward, with the policy's adapter, on `inputs` of its own.

        Raises:
            TypeError: there are groups too, or a tensor in their place, or nothing at all.
        """
        if groups is not None or not {"input_ids", "inputs_embeds"} & inputs.keys():
            got = ["groups"] * (groups is not None) + sorted(inputs)
            raise TypeError(
                f"a SharedModel takes groups, or input_ids by name with what the transformers model takes; got {got}"
            )
        return self.model(**inputs)

    def can_generate(self) -> bool:
        """Whether the base is one that `generate` takes."""
        return bool(self.causal_lm.can_generate())

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate` with the policy."""
        return self.model.generate(*args, **kwargs)

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Numbers in the base and its adapters, as transformers counts them; heads of roles are not among them."""
        return int(self.causal_lm.num_parameters(only_trainable, exclude_embeddings))

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """(numbers that train, all of them), as PEFT counts them; heads of roles are not among them."""
        if isinstance(self.model, PeftModel):
            trained, total = self.model.get_nb_trainable_parameters()
            return int(trained), int(total)
        return self.num_parameters(only_trainable=True), self.num_parameters()

    def print_trainable_parameters(self) -> None:
        """Print what `get_nb_trainable_parameters` counts, in PEFT's words."""
        trained, total = self.get_nb_trainable_parameters()
        share = 100 * trained / total
        print(f"trainable params: {trained:,d} || all params: {total:,d} || trainable%: {share:.4f}")

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> Any:
        """Nothing is merged here: other roles stand on the same base.

        Raises:
            AttributeError: says how a saved adapter is merged.
        """
        raise AttributeError(
            "a SharedModel is not merged in memory, as its other roles stand on the same base; save it with "
            'trainer.save_model("folder") and merge that: `hf-rlx merge folder merged`'
        )

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Recompute activations in the backward. Non-reentrant: the reentrant form gives frozen inputs no gradient."""
        options = {"use_reentrant": False, **(activation_checkpointing_kwargs or {})}
        if options["use_reentrant"] and isinstance(self.model, PeftModel):
            raise ValueError("use_reentrant=True gives adapters on a frozen base no gradient; leave it False")
        self.causal_lm.activation_checkpointing_enable(activation_checkpointing_kwargs=options, **kwargs)
