"""Does a completion have the right shape? 1.0 or 0.0, by a regular expression."""

from __future__ import annotations

import re
from typing import Any

from hf_rlx.verifiers.text import Completion, completion_text, message_text

_OPEN_TAG_AT_END = re.compile(r"<[A-Za-z][\w-]*>\s*\Z")


class RegexVerifier:
    """Reward function: 1.0 when the pattern is found in the completion, else 0.0.

    Chat templates of reasoning models often end the prompt with an opened tag, so the completion holds only the
    rest: `...</think>42`. A pattern for the whole shape then never matches, however good the model. With
    `prefill_aware=True` the tag is put back before judging.

    Args:
        pattern: regular expression, or one already compiled. Text patterns get `re.DOTALL`, so `.` spans lines.
        fullmatch: the pattern must cover the whole text, spaces at its ends aside; else it may match anywhere.
        prefill_aware: judge the tag that the prompt left open (`<think>` at the very end of a text prompt, or of a
            last assistant message that the model continues) together with the completion.
        prefill: what the chat template opened. Message prompts do not show it, so it has to be named, e.g.
            `"<think>\\n"`; put in front of completions that do not start with it. Only with `prefill_aware`.
        name: name under which the scores are logged.

    Raises:
        ValueError: when `prefill` is given without `prefill_aware`.
        re.error: when the pattern does not compile.
    """

    def __init__(
        self,
        pattern: str | re.Pattern[str],
        fullmatch: bool = False,
        *,
        prefill_aware: bool = False,
        prefill: str | None = None,
        name: str = "format",
    ) -> None:
        if prefill is not None and not prefill_aware:
            raise ValueError("prefill is only read with prefill_aware=True.")
        self.pattern = re.compile(pattern, re.DOTALL) if isinstance(pattern, str) else pattern
        self.fullmatch = fullmatch
        self.prefill_aware = prefill_aware
        self.prefill = prefill
        self.__name__ = name

    def judged_text(self, prompt: Completion, completion: Completion) -> str:
        """The text the pattern is tried on: the completion, after the opened tag where one is known."""
        text = completion_text(completion)
        if not self.prefill_aware:
            return text
        opened = self.prefill or ""
        if isinstance(prompt, str):
            end = prompt
        elif prompt and prompt[-1].get("role") == "assistant":
            end = message_text(prompt[-1])
        else:
            end = ""
        if found := _OPEN_TAG_AT_END.search(end):
            opened = found.group()
        # A model that opens the tag once more itself is judged as it stands, not with two tags.
        return text if text.lstrip().startswith(opened.strip()) else opened + text

    def __call__(self, prompts: list[Completion], completions: list[Completion], **columns: Any) -> list[float]:
        """One score per completion, 1.0 or 0.0.

        Args:
            prompts: strings or message lists; read only with `prefill_aware`.
            completions: strings, or message lists whose last assistant message is judged.
            columns: not read.
        """
        match = self.pattern.fullmatch if self.fullmatch else self.pattern.search
        texts = (self.judged_text(p, c) for p, c in zip(prompts, completions, strict=True))
        return [float(match(text.strip() if self.fullmatch else text) is not None) for text in texts]
