"""A sequence classifier as a reward function."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from hf_rlx.data.special_tokens import encode_messages


class ModelReward:
    """A sequence classifier as a reward function: one float32 score per completion.

    The score is read at the last token that the attention mask attends to. transformers' own forward looks for the
    rightmost token that is not the pad token, which with pad == eos skips the EOS the reward model was trained on, so
    the hidden states of the backbone and the `score` head are used directly. A classifier without that pair (encoders
    with a pooled head, for example) answers through its own logits, which must be of shape (batch, 1).

    Args:
        model: a `*ForSequenceClassification` with one label, possibly wrapped by PEFT or `torch.compile`.
        tokenizer: the model's tokenizer; None loads the one of `model.config._name_or_path`.
        batch_size: rows in one forward.
        max_length: tokens; a longer text loses its beginning, since the score is read at its end. None takes the
            model's `max_position_embeddings` or the tokenizer's limit, whichever is lower.
        append_eos: end plain text with EOS (once). For reward models that were trained so; a chat template says
            itself how an answer ends.
        chat_template_kwargs: passed to the tokenizer's chat template.

    Raises:
        ValueError: more than one label, PEFT prompt learning, no tokenizer to be found, or (when called) logits of
            another shape, or a conversation and no chat template.
    """

    runs_on_main_thread = True  # shares device and compute with the policy

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        batch_size: int = 16,
        max_length: int | None = None,
        append_eos: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.model: Any = model
        self.config: Any = model.config
        labels = getattr(self.config, "num_labels", 1)
        if labels != 1:
            raise ValueError(f"a reward model gives one score, but {name_of(model)!r} has num_labels={labels}")
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError("a reward model with PEFT prompt learning is not supported; LoRA is")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.__name__ = name_of(model)
        if tokenizer is None:
            tokenizer = _tokenizer_of(self.config, self.__name__)
        self.tokenizer = tokenizer
        self._pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        self.batch_size = batch_size
        text_config = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        limits = (getattr(text_config, "max_position_embeddings", None), self.tokenizer.model_max_length)
        self.max_length: int = max_length or min(limit for limit in limits if limit)
        self.append_eos = append_eos
        self.chat_template_kwargs = chat_template_kwargs or {}

    def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float | None]:
        """Score N completions (text, or message lists); None for a row without a single token."""
        rows = [self._encode(prompt, answer) for prompt, answer in zip(prompts, completions, strict=True)]
        scores: list[float | None] = [None] * len(rows)
        # Rows of like length share a forward, so little is spent on padding.
        order = sorted((i for i in range(len(rows)) if rows[i]), key=lambda i: len(rows[i]))
        flags = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                for start in range(0, len(order), self.batch_size):
                    chosen = order[start : start + self.batch_size]
                    for i, score in zip(chosen, self._forward([rows[i] for i in chosen]).tolist(), strict=True):
                        scores[i] = score
        finally:
            for module, training in flags:  # one by one: a part may have been frozen in eval mode
                module.training = training
        return scores

    def to(self, device: torch.device | str) -> None:
        """Move the model, unless it is quantised or accelerate has placed its parts."""
        placed = getattr(self.model, "hf_device_map", None) is not None
        if not placed and getattr(self.model, "quantization_method", None) is None:
            self.model.to(device)

    def _encode(self, prompt: Any, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            text = prompt + (completion if isinstance(completion, str) else completion[-1]["content"])
            eos = self.tokenizer.eos_token
            if self.append_eos and eos and not text.endswith(eos):
                text += eos
        else:
            if not getattr(self.tokenizer, "chat_template", None):
                raise ValueError(f"{self.__name__!r} cannot score conversations: its tokenizer has no chat template")
            answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
            messages = [*prompt, *answer]
            # A policy that writes `<|im_end|>` in letters must not end its turn here.
            encoded = encode_messages(messages, self.tokenizer, "split", **self.chat_template_kwargs)
            return encoded.ids[-self.max_length :]
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids[-self.max_length :]

    def _forward(self, rows: list[list[int]]) -> torch.Tensor:
        """Scores (B,) float32 of B non-empty rows of token ids."""
        device = next(self.model.parameters()).device
        width = max(len(row) for row in rows)
        ids = torch.tensor([row + [self._pad_id] * (width - len(row)) for row in rows], device=device)
        last = torch.tensor([len(row) - 1 for row in rows], device=device)
        mask = (torch.arange(width, device=device) <= last[:, None]).long()
        inner: Any = getattr(self.model, "_orig_mod", self.model)
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()  # PEFT has put its layers inside
        head, backbone = getattr(inner, "score", None), getattr(inner, "base_model", None)
        if isinstance(head, nn.Module) and isinstance(backbone, nn.Module) and backbone is not inner:
            hidden = backbone(input_ids=ids, attention_mask=mask).last_hidden_state  # (B, T, hidden)
            logits = head(hidden[torch.arange(len(rows), device=hidden.device), last.to(hidden.device)])
        else:
            logits = self.model(input_ids=ids, attention_mask=mask).logits
        if logits.shape != (len(rows), 1):
            raise ValueError(
                f"{self.__name__!r} ({type(inner).__name__}) gave logits of shape {tuple(logits.shape)} for "
                f"{len(rows)} texts; expected a *ForSequenceClassification with num_labels=1"
            )
        return logits[:, 0].float()


def name_of(func: Any) -> str:
    """What a reward function is called: its `__name__`, its class, or the last part of a model's path."""
    while isinstance(func, functools.partial):
        func = func.func
    if isinstance(func, nn.Module):
        path = getattr(getattr(func, "config", None), "_name_or_path", "")
        return str(path).rstrip("/").split("/")[-1] or type(func).__name__
    return str(getattr(func, "__name__", type(func).__name__))


def _tokenizer_of(config: Any, name: str) -> Any:
    from transformers import AutoTokenizer

    if not getattr(config, "_name_or_path", ""):
        raise ValueError(
            f"the reward model {name!r} has no name to load its tokenizer by; pass it in reward_processing_classes"
        )
    return AutoTokenizer.from_pretrained(config._name_or_path)
