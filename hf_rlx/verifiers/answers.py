"""Where the final answer stands in a completion. Nothing here knows which answer is right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from hf_rlx.verifiers.units import MULTIPLIERS, PLAIN_UNITS, changes_value

Place = Literal["auto", "boxed", "hash", "answer_line", "tag", "last", "whole"]

HASH = re.compile(r"####[ \t]*(?P<tail>[^\n]*)")
_TAG = re.compile(r"<(?P<end>/?)answer>", re.IGNORECASE)
_TAIL = 4000  # characters at the end of a completion in which an answer without any mark is looked for
_ANSWER = re.compile(
    r"(?:\banswer\b(?:[ \t]+[a-z']+){0,6}?[ \t*]*(?::|=|\bis\b)|^[ \t*]*(?-i:A)[ \t]*:)[\s:*=]*(?P<tail>[^\n]*)",
    re.IGNORECASE | re.MULTILINE,
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
# Between two boxes that give one answer together.
_JOINT = re.compile(
    r"(?:[\s,;.&$]|\\[\\()\[\],;:! ]|\\q?quad|\\text\s*\{\s*(?:and|or|,)?\s*\}|\band\b|\bor\b){0,40}", re.IGNORECASE
)
_MATHS = re.compile(r"(?<!\\)\$\$?((?:[^$\\]|\\.)+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*|\.\d+")
_RUN = re.compile(r"\S+")
# Between two numbers that are offered side by side: `8 apples and 9`, `5 or maybe 6`.
_OFFERED = re.compile(r"(?: [A-Za-z]+){0,2},? (?:and|or) (?:[A-Za-z]+ )?[$*]*")
_OFFERS = re.compile(r"^[\s,;]*$|\b(?:and|or)\b", re.IGNORECASE)
_DENIED = re.compile(r"\bnot\b|n't\b|\bneither\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?;](?:\s|$)")
_DRESS = "*_`\"'.,;:!?"


def boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, contents) of every `\\boxed{...}` that closes and stands in no other such box, in linear time."""
    found: list[tuple[int, int, str]] = []
    opened: list[tuple[int, int] | None] = []
    for match in _BOX.finditer(text):
        token = match.group()
        if token == "{":
            opened.append(None)
        elif token[-1] == "{" and len(token) > 2:
            opened.append((match.start(), match.end()))
        elif token == "}" and opened and (start := opened.pop()) is not None:
            while found and found[-1][0] > start[0]:
                found.pop()
            found.append((start[0], match.end(), text[start[1] : match.start()]))
    return found


def last_boxed(text: str) -> str | None:
    """Contents of the last box, boxes around boxes opened; None where no box closes."""
    found = boxes(text)
    while found:
        text = found[-1][2]
        found = boxes(text)
        if not found or not text.strip().startswith("\\"):
            return text
    return None


def joint_boxes(text: str) -> str | None:
    """The contents of the last box together with boxes right before it: `\\boxed{1}, \\boxed{2}` is one answer."""
    found = boxes(text)
    if not found:
        return None
    contents = [found[-1][2]]
    for (_, end, content), (start, _, _) in zip(found[-2::-1], found[:0:-1], strict=True):
        if not _JOINT.fullmatch(text, end, start):
            break
        contents.append(content)
    inner = [last_boxed(c) or c for c in dict.fromkeys(reversed(contents))]
    return " , ".join(inner)


def last_tag(text: str) -> str | None:
    """What stands in the last `<answer>...</answer>`; None where there is none. Linear in the length of the text."""
    inside = opened = None
    for match in _TAG.finditer(text):
        if not match["end"]:
            opened = match.end()
        elif opened is not None:
            inside, opened = text[opened : match.start()], None
    return inside


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; all of it where there is none."""
    return text.rpartition("</think>")[2]


def candidates(text: str, place: Place) -> list[str]:
    """What may be the answer, best first: the first of them that can be read is it. Empty where there is none.

    Args:
        text: a completion.
        place: where to look, see `MathVerifier`.
    """
    if place == "whole":
        return [text]
    if place == "auto":
        text = after_thinking(text)
        if (inside := last_tag(text)) is not None:
            text = inside
            return candidates(text, "boxed") or [text, *candidates(text, "last")]
        for each in ("boxed", "hash", "answer_line", "last"):
            if found := candidates(text, each):
                return found
        return []
    if place == "tag":
        inside = last_tag(text)
        return [] if inside is None else [joint_boxes(inside) or inside]
    if place == "boxed":
        content = joint_boxes(text)
        return [] if content is None else [content]
    if place == "last":
        return list(_last(text[-_TAIL:]))
    tails = [match["tail"] for match in (HASH if place == "hash" else _ANSWER).finditer(text)]
    return list(_stated(tails[-1])) if tails and tails[-1].strip() else []


def _stated(tail: str) -> Iterator[str]:
    """Readings of the words after "the answer is"."""
    if (content := joint_boxes(tail)) is not None:
        yield content
        return
    maths = list(_MATHS.finditer(tail))
    if maths and not re.search(r"\d", tail[: maths[0].start()]) and not _DENIED.search(tail[: maths[0].start()]):
        end = _SENTENCE_END.search(tail, maths[-1].end())
        yield tail[maths[0].start() : end.start() if end else None].strip(_DRESS + " ")
        if len(maths) == 1 or not _OFFERS.search(tail[maths[0].end() : maths[1].start()]):
            yield _content(maths[0])
        return
    end = _SENTENCE_END.search(tail)
    sentence = tail[: end.start() if end else None].strip().strip("*_`").strip()
    yield sentence
    if not maths and not _DENIED.search(sentence):
        yield from _only_number(sentence)


def _content(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)


def _only_number(sentence: str) -> Iterator[str]:
    """The one number of a sentence: "she needs 13 eggs"."""
    if len(_NUMBER.findall(sentence)) == 1:
        yield from _last(sentence)


def _last(text: str) -> Iterator[str]:
    """The last formula or number; nothing where it is one of several that are offered, or a part of something."""
    maths = list(_MATHS.finditer(text))
    numbers = list(_NUMBER.finditer(text))
    if maths and (not numbers or numbers[-1].end() <= maths[-1].end()):
        if len(maths) > 1 and _JOINT.fullmatch(text, maths[-2].end(), maths[-1].start()):
            return
        yield _content(maths[-1])
        return
    if not numbers:
        return
    number = numbers[-1]
    if len(numbers) > 1 and _OFFERED.fullmatch(text, numbers[-2].end(), number.start()):
        return
    run = next(m for m in _RUN.finditer(text) if m.start() <= number.start() < m.end())
    before, after = text[: run.start()].rstrip(), text[run.end() :].lstrip(" ")
    if re.search(r"[+*/^\N{MULTIPLICATION SIGN}÷<>≤≥√\\-]$", before) or re.match(
        r"[+*/^\N{MULTIPLICATION SIGN}÷<>≤≥\\=-]", after
    ):
        return
    token = run.group().strip(_DRESS)
    word = re.match(r"[A-Za-z]+", after)
    if word and run.group()[-1] not in ".,;:!?":
        if word.group().lower() in MULTIPLIERS or word.group() in PLAIN_UNITS or word.group().startswith("percent"):
            yield f"{token} {word.group()}"
            return
        if changes_value(word.group()):
            return
    yield token.rpartition("=")[2]
