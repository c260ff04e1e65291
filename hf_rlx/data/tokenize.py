"""Prompts to the text and the token ids that a model sees."""

from __future__ import annotations

from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_rlx.data.formats import PromptError
from hf_rlx.data.special_tokens import SpecialTokens, encode_messages


class EncodedPrompt(NamedTuple):
    """text: what the model reads, template applied. ids: its token ids. conversational: whether it was messages.
    neutralised: special tokens inside messages that became plain text."""

    text: str
    ids: list[int]
    conversational: bool
    neutralised: int = 0


def is_conversational(prompt: Any) -> bool:
    """Whether a prompt is a list of messages with `role` and `content` (or `tool_calls`)."""
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(m, dict) and "role" in m and ("content" in m or "tool_calls" in m) for m in prompt)
    )


def encode_prompt(
    prompt: Any,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: dict[str, Any] | None = None,
    special_tokens: SpecialTokens = "split",
) -> EncodedPrompt:
    """Tokenize one prompt for generation.

    Plain text gets the tokenizer's own special tokens, and special tokens written in it act as tokens: whoever gives
    plain text writes the template by hand. Messages go through the chat template, with the generation prompt added,
    or continued where the last message is the assistant's (a prefilled answer); special tokens inside them are text.

    Args:
        prompt: text, or messages.
        tokenizer: of the policy.
        chat_template_kwargs: further arguments of the template.
        special_tokens: what becomes of special tokens inside messages, see `encode_messages`.

    Raises:
        PromptError: neither text nor messages; messages without a chat template, or that it refuses; special tokens
            in messages that are refused or cannot be split; a prompt without tokens.
    """
    neutralised = 0
    if isinstance(prompt, str):
        text = prompt
        ids = list(tokenizer(text)["input_ids"])
    elif is_conversational(prompt):
        if tokenizer.chat_template is None:
            raise PromptError(
                "the prompts are messages but the tokenizer has no chat template; set tokenizer.chat_template, or "
                "give prompts as plain text",
                prompt,
            )
        prefilled = prompt[-1]["role"] == "assistant"
        options = {"add_generation_prompt": not prefilled, "continue_final_message": prefilled}
        try:
            text, ids, neutralised = encode_messages(
                prompt, tokenizer, special_tokens, **options, **(chat_template_kwargs or {})
            )
        except (ValueError, TypeError, TemplateError) as error:
            raise PromptError(str(error), prompt) from error
    else:
        raise PromptError(
            f"a prompt must be text or a list of messages with `role` and `content`, got {type(prompt).__name__}: "
            f"{str(prompt)[:80]!r}",
            prompt,
        )
    if not ids:
        raise PromptError(f"the prompt {text[:80]!r} has no tokens", prompt)
    return EncodedPrompt(text, ids, not isinstance(prompt, str), neutralised)


def char_to_token(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], char_ends: list[int]) -> list[int]:
    """Index of the token in which each character position of the decoded text ends.

    Steps are marked by character: step markers tokenise differently in context, so searching for a marker's ids
    finds nothing (OpenRLHF#683). The text is decoded prefix by prefix, which is right for every tokenizer; a
    character that several tokens share ends with the last of them.

    Args:
        tokenizer: that decodes `token_ids`.
        token_ids: n ids of one response.
        char_ends: positions after the last character of each step, in the text decoded without special tokens.

    Returns:
        token indices in [0, n), one per entry.
    """
    if not token_ids:
        return []
    prefixes = [str(tokenizer.decode(token_ids[: i + 1], skip_special_tokens=True)) for i in range(len(token_ids))]
    # What a prefix has in common with the whole: half a character decodes to a replacement character.
    lengths = [_common_length(prefixes[-1], prefix) for prefix in prefixes]
    result = []
    for end in char_ends:
        result.append(next((i for i, length in enumerate(lengths) if length >= end), len(token_ids) - 1))
    return result


def _common_length(a: str, b: str) -> int:
    """Characters that two texts share at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
