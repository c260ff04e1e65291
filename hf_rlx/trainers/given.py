"""What a trainer is given as `model`: as a `SharedModel`, and with its tokenizer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.shared import SharedModel

if TYPE_CHECKING:
    from hf_rlx.trainers.config import BaseConfig


_LOADED_WITH = "loaded_with"


def note_loading(shared: SharedModel, args: BaseConfig) -> None:
    """Remember that `shared` was loaded by name with `model_init_kwargs`, for constructors that it goes on to."""
    vars(shared)[_LOADED_WITH] = dict(args.model_init_kwargs or {})


def as_shared_model(
    model: str | PreTrainedModel | PeftModel | SharedModel,
    args: BaseConfig,
    quantization_config: Any = None,
    peft_config: PeftConfig | None = None,
) -> SharedModel:
    """Whatever the user passed as `model`, as a `SharedModel`.

    Raises:
        ValueError: arguments that contradict each other; the message names the one to drop.
    """
    if isinstance(model, str | os.PathLike):
        kwargs: dict[str, Any] = {"trust_remote_code": True} if args.trust_remote_code else {}
        if peft_config is not None and args.device.type == "cuda" and (args.bf16 or args.fp16):
            # A frozen base needs no float32 master copy; rollouts read half the bytes. Adapters stay float32.
            kwargs["dtype"] = torch.bfloat16 if args.bf16 else torch.float16
        shared = SharedModel.from_pretrained(
            Path(model) if isinstance(model, os.PathLike) else model,
            peft_config=peft_config,
            quantization_config=quantization_config,
            packing=args.packing,
            **{**kwargs, **(args.model_init_kwargs or {})},
        )
        note_loading(shared, args)
        return shared
    if quantization_config is not None:
        raise ValueError("quantization_config works with a model name; a model in memory has been loaded")
    if args.model_init_kwargs and vars(model).get(_LOADED_WITH) != args.model_init_kwargs:
        raise ValueError("model_init_kwargs works with a model name; a model in memory has been made already")
    if isinstance(model, SharedModel):
        if peft_config is not None:
            raise ValueError("both a SharedModel and a peft_config were given; drop peft_config")
        return model
    return SharedModel.build(model, peft_config, packing=args.packing)


def tokenizer_of(model: Any, shared: SharedModel) -> PreTrainedTokenizerBase:
    """The tokenizer that was saved with a model, or the one that its name has.

    Args:
        model: what was given to the trainer. shared: what it has become.

    Raises:
        ValueError: a model that was made in memory has no name.
    """
    if shared.folder is not None and (shared.folder / "tokenizer_config.json").is_file():
        return load_tokenizer(str(shared.folder))  # saved or pushed with the model
    name = str(model) if isinstance(model, str | os.PathLike) else shared.config.name_or_path
    if not name:
        raise ValueError("the model was made in memory: no name to find its tokenizer by; pass processing_class=")
    return load_tokenizer(name)


__all__ = ["as_shared_model", "note_loading", "tokenizer_of"]
