"""Does a completion have the right shape? 1.0 or 0.0, by a regular expression, by tags, or as JSON."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

from hf_rlx.verifiers.answers import after_thinking, last_tag
from hf_rlx.verifiers.json_schema import JsonError, Schema, read_json
from hf_rlx.verifiers.patterns import bounded, fault, is_cheap, spec
from hf_rlx.verifiers.text import Completion, column_of, completion_text, message_text
from hf_rlx.verifiers.verdict import Verdict, settle

_log = logging.getLogger(__name__)

JsonPlace = Literal["whole", "after_thinking", "tag"]

_OPEN_TAG_AT_END = re.compile(r"<[A-Za-z][\w-]*>\s*\Z")


def opened_tag(prompt: Completion) -> str:
    """The tag that a prompt leaves open at its very end, with the spaces behind it; "" where it leaves none.

    Args:
        prompt: a text, or messages of which the last may be the model's own, which it continues.
    """
    if isinstance(prompt, str):
        end = prompt
    elif prompt and prompt[-1].get("role") == "assistant":
        end = message_text(prompt[-1])
    else:
        return ""
    found = _OPEN_TAG_AT_END.search(end)
    return found.group() if found else ""


_MATCHED = {True: Verdict("right", "found"), False: Verdict("wrong", "not found")}


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
        timeout: seconds that the pattern may take on one completion. Whatever may take long runs in a process that is
            killed then, and the completion scores 0: it is the candidate's text that the pattern cannot decide on. One
            warning names the pattern, for one that blows up on ordinary text is a mistake in the pattern.
        name: name under which the scores are logged.

    Raises:
        ValueError: when `prefill` is given without `prefill_aware`, or the timeout is not positive.
        re.error: when the pattern does not compile.

    >>> RegexVerifier("Answer: [0-9]+$")(["?", "?"], ["Answer: 42", "42"])
    [1.0, 0.0]
    """

    def __init__(
        self,
        pattern: str | re.Pattern[str],
        fullmatch: bool = False,
        *,
        prefill_aware: bool = False,
        prefill: str | None = None,
        timeout: float = 1.0,
        name: str = "format",
    ) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, not {timeout}")
        if prefill is not None and not prefill_aware:
            raise ValueError("prefill is only read with prefill_aware=True.")
        self.pattern = re.compile(pattern, re.DOTALL) if isinstance(pattern, str) else pattern
        self.fullmatch = fullmatch
        self.prefill_aware = prefill_aware
        self.prefill = prefill
        self.timeout = timeout
        self.__name__ = name
        self._warned = False

    def judged_text(self, prompt: Completion, completion: Completion) -> str:
        """The text the pattern is tried on: the completion, after the opened tag where one is known."""
        text = completion_text(completion)
        if not self.prefill_aware:
            return text
        opened = opened_tag(prompt) or self.prefill or ""
        # A model that opens the tag once more itself is judged as it stands, not with two tags.
        return text if text.lstrip().startswith(opened.strip()) else opened + text

    def __call__(self, prompts: list[Completion], completions: list[Completion], **columns: Any) -> list[float | None]:
        """One score per completion: 1.0, 0.0, or None where the process that matches was lost twice.

        Args:
            prompts: strings or message lists; read only with `prefill_aware`.
            completions: strings, or message lists whose last assistant message is judged.
            columns: `log_extra` gets the column `<name>/reason`, `log_metric` `<name>/failed`; the rest is not read.

        Raises:
            VerifierBrokenError: more than a quarter of the completions have no score.
            WorkersBrokenError: the process that matches cannot start.
        """
        texts = [self.judged_text(p, c) for p, c in zip(prompts, completions, strict=True)]
        if self.fullmatch:
            texts = [text.strip() for text in texts]
        kind = "fullmatch" if self.fullmatch else "search"
        found = bounded(kind, spec(self.pattern), texts, self.timeout, is_cheap(self.pattern, texts))
        verdicts = [lost or _MATCHED[match] for match, lost in found]
        late = sum(lost is not None and lost.outcome == "wrong" for _, lost in found)
        if late and not self._warned:
            self._warned = True
            _log.warning(
                "%s: the pattern %r was not decided within %g s on %d of %d completions, which score 0",
                *(self.__name__, self.pattern.pattern, self.timeout, late, len(texts)),
            )
        return settle(self.__name__, verdicts, 0.25, columns.get("log_extra"), columns.get("log_metric"))


class TagVerifier:
    """Reward function: 1.0 for a completion that is the named tags, in order, and nothing else; else 0.0.

    With the tags `("think", "answer")`: `<think>...</think> <answer>...</answer>`. Each stands once, holds something
    other than spaces and no tag of these names, and only spaces stand around them. A tag of these names anywhere else,
    also inside code or quoted in the thinking, makes the text ambiguous to whatever reads the answer, so it is wrong.
    Names are read as written, so `<Think>` is text. Linear in the length of the completion.

    Args:
        tags: names, in order.
        tail: what follows the last tag is the answer and must not be empty, as in `<think>...</think> 42`; else
            nothing may follow.
        prefill_aware: judge the first of the tags together with the completion where the prompt left it open; a
            completion that opens it once more is then wrong.
        prefill: what the chat template opened, where prompts are messages and do not show it, e.g. `"<think>\\n"`; put
            in front of completions that do not start with it. Only with `prefill_aware`.
        name: name under which the scores are logged.

    Raises:
        ValueError: no tag, a repeated one, a name that is none, or `prefill` without `prefill_aware`.

    >>> TagVerifier()(["?"], ["<think>Hm.</think> <answer>42</answer>"])
    [1.0]
    """

    def __init__(
        self,
        tags: Sequence[str] = ("think", "answer"),
        *,
        tail: bool = False,
        prefill_aware: bool = True,
        prefill: str | None = None,
        name: str = "tags",
    ) -> None:
        if isinstance(tags, str) or not tags or len(set(tags)) < len(tags):
            raise ValueError(f"tags must be one or more different names, not {tags!r}")
        if wrong := [tag for tag in tags if not re.fullmatch(r"[A-Za-z][\w-]*", tag)]:
            raise ValueError(f"{wrong[0]!r} is no name of a tag; write it without <>")
        if prefill is not None and not prefill_aware:
            raise ValueError("prefill is only read with prefill_aware=True.")
        self.tags = list(tags)
        self.tail = tail
        self.prefill_aware = prefill_aware
        self.prefill = prefill
        self._tag = re.compile("<(/?(?:" + "|".join(map(re.escape, self.tags)) + "))>")
        self._wanted = [mark for tag in self.tags for mark in (tag, "/" + tag)]
        self.__name__ = name

    def __call__(self, prompts: list[Completion], completions: list[Completion], **columns: Any) -> list[float]:
        """One score per completion, 1.0 or 0.0.

        Args:
            prompts: strings or message lists; read only with `prefill_aware`.
            completions: strings, or message lists whose last assistant message is judged.
            columns: not read.
        """
        texts = [completion_text(completion) for completion in completions]
        if self.prefill_aware:
            texts = [self._whole(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
        return [float(self._fits(text)) for text in texts]

    def _whole(self, prompt: Completion, text: str) -> str:
        first = f"<{self.tags[0]}>"
        if opened_tag(prompt).strip() == first:
            return first + text
        opened = self.prefill or ""
        return text if text.lstrip().startswith(opened.strip()) else opened + text

    def _fits(self, text: str) -> bool:
        # [before, name, between, name, ..., after]
        pieces = self._tag.split(text)
        if pieces[1::2] != self._wanted:
            return False
        between = [bool(piece.strip()) for piece in pieces[::2]]
        filled = [False, True] * len(self.tags) + [self.tail]
        return between == filled


class JsonVerifier:
    """Reward function: 1.0 for a completion that is one JSON value which fits a schema, else 0.0.

    The value stands bare or in one Markdown fence (three backticks, with or without `json`), with nothing but spaces
    around. It is read strictly, see `read_json`: no NaN, no repeated key, no text behind it. A schema with a `pattern`
    is checked in a process that is killed after `timeout` seconds; the completion is wrong then.

    Args:
        schema: a JSON Schema, of the part that `Schema` documents; None: any value.
        column: dataset column with each row's schema, as JSON text or a dictionary, instead of one for all.
        place: "whole" completion; "after_thinking": what follows the last `</think>`; "tag": the last
            `<answer>...</answer>`.
        timeout: see above.
        name: name under which the scores are logged.

    Raises:
        ValueError: an unknown place, both a schema and a column, or a schema that `Schema` refuses.

    >>> JsonVerifier({"type": "integer"})(["?", "?"], ["42", "4.2"])
    [1.0, 0.0]
    """

    def __init__(
        self,
        schema: dict[str, Any] | bool | None = None,
        *,
        column: str | None = None,
        place: JsonPlace = "whole",
        timeout: float = 1.0,
        name: str = "json",
    ) -> None:
        if place not in get_args(JsonPlace):
            raise ValueError(f"place must be one of {list(get_args(JsonPlace))}, not {place!r}")
        if schema is not None and column is not None:
            raise ValueError("pass a schema or the column of schemas, not both")
        self.schema = Schema(True if schema is None else schema)
        self.column = column
        self.place: JsonPlace = place
        self.timeout = timeout
        self.__name__ = name

    def __call__(self, prompts: list[Completion], completions: list[Completion], **columns: Any) -> list[float | None]:
        """One score per completion: 1.0, 0.0, or None where the row's schema is None or checking it failed.

        Args:
            prompts: not read; part of the reward-function contract.
            completions: strings, or message lists whose last assistant message is judged.
            columns: dataset columns, and `log_extra`, which gets the column `<name>/reason`.

        Raises:
            ValueError: the column is missing or of another length, or holds a schema that `Schema` refuses.
        """
        schemas: list[Schema | None] = [self.schema] * len(completions)
        if self.column is not None:
            cells = column_of(columns, self.column, len(completions), self.__name__)
            schemas = [None if cell is None else _schema_of(cell) for cell in cells]
        faults = [
            "no schema" if schema is None else self._fault(completion_text(completion), schema)
            for completion, schema in zip(completions, schemas, strict=True)
        ]
        if (log_extra := columns.get("log_extra")) is not None:
            log_extra(f"{self.__name__}/reason", faults)
        return [None if s is None or why is None else float(not why) for s, why in zip(schemas, faults, strict=True)]

    def _fault(self, text: str, schema: Schema) -> str | None:
        """Why the text is wrong, "" where it is right; None where nobody can tell."""
        if self.place == "after_thinking":
            text = after_thinking(text)
        elif self.place == "tag":
            if (inside := last_tag(text)) is None:
                return "no <answer>"
            text = inside
        text = text.strip(" \t\r\n")
        if fenced := _FENCE.fullmatch(text):
            text = fenced[1]
        if not schema.has_pattern:
            return fault(text, schema)
        [(found, lost)] = bounded("schema", schema.schema, [text], self.timeout)
        if lost is None:
            return str(found)
        return None if lost.outcome == "failed" else lost.reason


_FENCE = re.compile(r"```(?:json|JSON)?[ \t]*\r?\n(.*)\n[ \t]*```", re.DOTALL)


def _schema_of(cell: Any) -> Schema:
    """The schema in a dataset's cell.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(cell, str):
        return Schema(cell)
    try:
        return Schema(read_json(cell))
    except JsonError as error:
        raise ValueError(f"the schema of a row is no JSON: {error}") from error
