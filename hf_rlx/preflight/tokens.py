"""What a tokenizer must have for a run: an end, padding, and a chat template where there are messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateError

from hf_rlx.preflight.report import Finding


def tokenizer_findings(tokenizer: Any, conversational: bool = False, end_tokens: Any = None) -> Iterator[Finding]:
    """EOS, pad and chat template.

    Args:
        tokenizer: of the policy. conversational: whether the data are messages.
        end_tokens: ids that end a completion beside the tokenizer's EOS: `generation_config.eos_token_id`.
    """
    ends = {tokenizer.eos_token_id, *(end_tokens if isinstance(end_tokens, list) else [end_tokens])} - {None}
    if not ends:
        fix = 'set tokenizer.eos_token = "..." to the token that ends an answer'
        yield Finding("EOS", "none: completions would never end", "problem", fix)
    else:
        yield Finding("EOS", " ".join(repr(tokenizer.convert_ids_to_tokens(end)) for end in sorted(ends)))
    if tokenizer.pad_token_id is None:
        yield Finding("pad", "none; EOS stands in, which changes nothing: masks come from lengths")
    elif tokenizer.pad_token_id == tokenizer.eos_token_id:
        yield Finding("pad", "the same as EOS, which is fine: masks come from lengths, and EOS stays in the loss")
    else:
        yield Finding("pad", repr(tokenizer.pad_token))
    yield _template(tokenizer, conversational, ends)


def _template(tokenizer: Any, conversational: bool, ends: set[int]) -> Finding:
    what = "chat template"
    if tokenizer.chat_template is None:
        if not conversational:
            return Finding(what, "none; the data are plain text, so none is needed")
        fix = "take the model's instruct version, set tokenizer.chat_template, or give prompts as plain text"
        return Finding(what, "none, but the data are messages", "problem", fix)
    if not conversational:
        return Finding(what, "there is one, and the data are plain text, which does without")
    turn = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "@@"}]
    try:
        text = tokenizer.apply_chat_template(turn, tokenize=False)
    except (TemplateError, ValueError, TypeError) as error:
        return Finding(what, f"refuses a question and an answer: {error}", "problem", "correct the template")
    behind = text.rpartition("@@")[2]
    tokens = list(tokenizer(behind, add_special_tokens=False)["input_ids"]) if behind else []
    special = [token for token in tokens if token in tokenizer.all_special_ids]
    if special and not ends & set(special):
        end = tokenizer.convert_ids_to_tokens(special[0])
        fix = f"set tokenizer.eos_token = {end!r}, or stop_strings=[{end!r}]"
        return Finding(what, f"ends an answer with {end!r}, which is no EOS: completions would not end", "note", fix)
    return Finding(what, "there is one")


__all__ = ["tokenizer_findings"]
