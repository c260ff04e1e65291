"""Fields of every trainer that learns from given pairs or ranked lists."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.trainers.config import BaseConfig, described, strict


@strict
@dataclass
class PreferenceConfig(BaseConfig):
    """Configuration of `PreferenceTrainer`; see the help text of each field.

    `per_device_train_batch_size` counts rows: pairs, or lists with all their answers.
    """

    max_length: int | None = described(
        1024, "Tokens of prompt and answer together; longer ones are cut, EOS kept. None: the model's context."
    )
    shuffle_dataset: bool = described(True, "Draw rows in a random order, every epoch its own.")
    chat_template_kwargs: dict[str, Any] | None = described(None, "Arguments of the chat template.")
    chat_template_path: str | None = described(
        None, "Chat template: a .jinja file, or a folder or Hub id whose tokenizer has one."
    )
    eos_token: str | None = described(None, "Token that ends an answer; None: the tokenizer's.")
    pad_token: str | None = described(None, "The tokenizer's padding token; scores do not depend on it.")
    dataset_num_proc: int | None = described(None, "No effect: rows are tokenized as they are used.")
    pad_to_multiple_of: int | str | None = described("auto", "No effect: packed rows have no padding.")
    activation_offloading: bool = described(False, "Not carried: set gradient_checkpointing=True to save memory.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, spec in type(self).__dataclass_fields__.items():
            told = str(spec.metadata.get("help", ""))
            if told.startswith("Not carried") and getattr(self, name) != spec.default:
                raise ValueError(f"{name}={getattr(self, name)!r} is not carried by hf_rlx: {told.partition(': ')[2]}")
        if self.max_length is not None and (type(self.max_length) is not int or self.max_length < 2):
            raise ValueError(
                f"max_length must be a whole number of at least 2 (prompt and answer) or None, got {self.max_length!r}"
            )
        if self.auto_find_batch_size:
            raise ValueError("auto_find_batch_size is not needed: micro-batches that do not fit are done in halves")
        if self.fsdp:
            raise ValueError("fsdp is not carried by trainers on preference data; DDP and DeepSpeed (stage 2) are")

    def longest_row(self, context: int | None) -> int | None:
        """Tokens that prompt and answer may have together; None: any number.

        Args:
            context: tokens that the model has positions for; None: unlimited.
        """
        limits = [limit for limit in (self.max_length, context) if limit is not None]
        return min(limits, default=None)


def set_tokens(args: PreferenceConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer the EOS, pad and chat template of a configuration.

    Raises:
        ValueError: a token that is not in the vocabulary, or a tokenizer without a template where one is named.
        OSError: a template's file that cannot be read.
    """
    for name in ("eos_token", "pad_token"):
        token = getattr(args, name)
        if token is None:
            continue
        if token not in tokenizer.get_vocab():
            raise ValueError(f"{name}={token!r} is not in the tokenizer's vocabulary; add it first, or leave it None")
        setattr(tokenizer, name, token)
    if args.chat_template_path is not None:
        path = Path(args.chat_template_path)
        if path.suffix in (".jinja", ".j2"):
            tokenizer.chat_template = path.read_text(encoding="utf-8")
        else:
            template = load_tokenizer(args.chat_template_path).chat_template
            if template is None:
                raise ValueError(f"the tokenizer of chat_template_path={args.chat_template_path!r} has no template")
            tokenizer.chat_template = template


__all__ = ["PreferenceConfig", "set_tokens"]
