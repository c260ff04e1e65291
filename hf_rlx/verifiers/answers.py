"""Where the final answer stands in a completion. Nothing here knows which answer is right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hf_rlx.verifiers.json_schema import JsonError, read_json
from hf_rlx.verifiers.units import MULTIPLIERS, PLAIN_UNITS, changes_value

Place = Literal["auto", "boxed", "hash", "answer_line", "tag", "last", "whole"]

HASH = re.compile(r"####[ \t]*(?P<tail>[^\n]*)")
_TAG = re.compile(r"<(?P<end>/?)answer>", re.IGNORECASE)
_TAIL = 4000  # characters at the end of a completion in which an answer without any mark is looked for
_ANSWER = re.compile(
    r"(?:\b(?:answer|correct (?:option|choice))\b(?:[ \t]+[a-z']+){0,6}?[ \t*]*(?::|=|\bis\b)"
    r"|^[ \t*]*(?-i:A)[ \t]*:)[\s:*=]*",
    re.IGNORECASE | re.MULTILINE,
)
_COMMAND = re.compile(r"\s*\\")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
# Between two boxes that give one answer together.
_JOINT = re.compile(
    r"(?:[\s,;.&$]|\\[\\()\[\],;:! ]|\\q?quad|\\text\s*\{\s*(?:and|or|,)?\s*\}|\band\b|\bor\b){0,40}", re.IGNORECASE
)
_MATHS = re.compile(r"(?<!\\)\$\$?((?:[^$\\]|\\.)+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*|\.\d+")
_RUN = re.compile(r"\S+")
# Between two numbers that are offered side by side: `8 apples and 9`, `5 or maybe 6`.
_OFFERED = re.compile(r"(?: [A-Za-z]+){0,2},? (?:and|or) (?:[A-Za-z]+ )?[$*]*|[ \t]*")
_LISTED = re.compile(r"[ \t]*[,;][ \t]*")
# In front of a number that is a bound, or one of many, and not the answer.
_BOUND = re.compile(
    r"(?:n't|\b(?:not|than|at least|at most|below|above|under|over|up to|none of|out of|exceeds?|no|nor|nearly|almost|"
    r"beyond))"
    r"[ $*(]*$",
    re.IGNORECASE,
)
_ORDINAL = re.compile(r"(?:st|nd|rd|th)\b")
_OFFERS = re.compile(r"^[\s,;]*$|\b(?:and|or|maybe|perhaps|possibly|alternatively|vs)\b", re.IGNORECASE)
_DENIED = re.compile(r"\bnot\b|n't\b|\bneither\b", re.IGNORECASE)
_VALUE = re.compile(r"[^.!?;\n]{0,80}?(?:\d|\$|\\)|\(?[A-J]\)?(?![A-Za-z'])")
_SHORT = 40
_MARKS = 8  # of a line that are looked at
_REASON = re.compile(r",?\s+(?:because|since)\b|,\s+(?:as|which)\b")
_SENTENCE_END = re.compile(r"[.!?;](?:\s|$)")
_OPTION = re.compile(
    r"(?:\\(?:text|math)(?:bf|rm|it)?\s*\{\s*)?(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s*:?\s*(?=[A-J(]))?"
    r"(?:\(\s*([A-J])\s*\)(?=[\s}]|$)|([A-J])[).:](?=[\s}]|$)|([A-J])(?=\s*\}?\s*$))\s*\}?\s*(?P<rest>.*)",
    re.DOTALL,
)
# What shows that a letter in front names no option, or not the only one.
_NO_REST = re.compile(
    r"^[-+*/^_=<>!,;:)\]|&]|^(?:and|or)\b|\b[A-J]\s*\)|^\\(?!text|frac|dfrac|tfrac|sqrt|pi|\$)|\b(?:or|and) \(?[A-J]\b"
    r"|^[A-J]$|\b[A-J][.:](?:\s|$)|\b(?:not|wrong|incorrect)\b|n't\b"
)
_LETTER = re.compile(r"\(?[A-J]\)?")
_ANOTHER = re.compile(r"\s*[$*(]*([A-J]|-?\d[\d.,/]*)[$*)]*\s*(?:[.?!;](?:\s|$)|$)")
_NEXT_OPTION = re.compile(r"(?<![A-Za-z])[A-J][.)]\s+\S")
_DRESS = "*_`\"'.,;:!?"


@dataclass
class _Box:
    """A box that closes: its start, where its contents start and end, its end, and the boxes in it."""

    start: int
    inside: int
    close: int
    end: int
    within: list[_Box]


def _boxes(text: str) -> list[_Box]:
    """The boxes that stand in no other one, in linear time."""
    found: list[_Box] = []
    opened: list[tuple[int, int] | None] = []
    for match in _BOX.finditer(text):
        token = match.group()
        if token == "{":
            opened.append(None)
        elif token[-1] == "{" and len(token) > 2:
            opened.append((match.start(), match.end()))
        elif token == "}" and opened and (start := opened.pop()) is not None:
            first = len(found)
            while first and found[first - 1].start > start[0]:
                first -= 1
            found[first:] = [_Box(*start, match.start(), match.end(), found[first:])]
    return found


def boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, contents) of every `\\boxed{...}` that closes and stands in no other such box, in linear time."""
    return [(box.start, box.end, text[box.inside : box.close]) for box in _boxes(text)]


def last_boxed(text: str) -> str | None:
    """Contents of the last box, boxes around boxes opened; None where no box closes. Linear in the text's length."""
    if not (found := _boxes(text)):
        return None
    box = found[-1]
    while box.within and _COMMAND.match(text, box.inside):
        box = box.within[-1]
    return text[box.inside : box.close]


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


def json_answer(text: str) -> str | None:
    """What a completion that is a JSON object says under the key `answer`; None for everything else."""
    if not (text.strip().startswith("{") and text.strip().endswith("}") and '"answer"' in text):
        return None
    try:
        said = read_json(text).get("answer")
    except JsonError:
        return None
    return str(said) if isinstance(said, str | int | float) and not isinstance(said, bool) else None


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; all of it where there is none."""
    return text.rpartition("</think>")[2]


def option(text: str) -> tuple[str, str] | None:
    """(letter, what stands behind it) of an answer that names an option: `(B) 12`, `B) 12`, `\\text{(B)}`, `Option B`.

    None for everything else, also where a second option is named or the brackets are a factor's.
    """
    found = _OPTION.fullmatch(text)
    if found is None:
        return None
    letter, rest = next(filter(None, found.group(1, 2, 3))), found["rest"].strip()
    if rest.count("}") > rest.count("{"):
        rest = rest[::-1].replace("}", "", 1)[::-1].strip()
    return None if _NO_REST.search(rest) else (letter, rest)


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
        if (inside := json_answer(text)) is not None:
            return [joint_boxes(inside) or inside]
        short = text.strip().strip(_DRESS).strip()  # an option, a word, a formula, and nothing else
        short = short if len(short) <= _SHORT and "\n" not in short else ""
        for each in ("boxed", "hash", "answer_line", "last"):
            if each == "last" and option(short):
                break
            if found := candidates(text, each):
                return found
        return [short] if short else []
    if place == "tag":
        inside = last_tag(text)
        return [] if inside is None else [joint_boxes(inside) or inside]
    if place == "boxed":
        content = joint_boxes(text)
        return [] if content is None else [content]
    if place == "last":
        return list(_last(text[-_TAIL:]))
    tail = _hash_tail(text) if place == "hash" else _answer_tail(text)
    return list(_stated(tail)) if tail.strip() else []


def _hash_tail(text: str) -> str:
    tails = HASH.findall(text)
    return tails[-1] if tails else ""


def _answer_tail(text: str) -> str:
    """What follows the last "the answer is" to the end of its line.

    Of several in a line ("the answer is 71. No, the answer is 72") the last one that a number, a formula or an option
    follows, else the first.
    """
    marks = [match.end() for match in _ANSWER.finditer(text)]
    if not marks:
        return ""
    end = text.find("\n", marks[-1])
    end = len(text) if end < 0 else end
    same = [at for at in marks[-_MARKS:] if text.rfind("\n", 0, end) < at]
    return text[next((at for at in reversed(same) if _VALUE.match(text, at, end)), same[0]) : end]


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
    if end and _goes_on(sentence, tail, end.end()):
        yield tail
        return
    yield sentence
    if maths or _DENIED.search(sentence):
        return
    yield from _only_number(sentence)
    head, *reason = _REASON.split(sentence, maxsplit=1)
    if reason and not _OFFERS.search(reason[0]):
        yield head
        yield from _only_number(head)


def _goes_on(first: str, tail: str, at: int) -> bool:
    """Whether another answer stands behind the first: `42? 43?`, `C. D.`, `A. Paris B. London`."""
    if (following := _ANOTHER.match(tail, at)) is not None:
        return following[1] not in first
    other = _NEXT_OPTION.search(tail, at) if _LETTER.fullmatch(first) else None
    return other is not None and not _DENIED.search(tail[: other.start()])


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
    if _ORDINAL.match(text, number.end()):
        return
    if len(numbers) > 1 and _OFFERED.fullmatch(text, numbers[-2].end(), number.start()):
        return
    run = next(m for m in _RUN.finditer(text) if m.start() <= number.start() < m.end())
    before, after = text[: run.start()].rstrip(), text[run.end() :].lstrip(" ")
    if _BOUND.search(before[-40:]):
        return
    ends = not after.strip(_DRESS) or after.startswith("\n")  # `On day 5, 30 birds came` lists nothing
    if len(numbers) > 1 and ends and _LISTED.fullmatch(text, numbers[-2].end(), number.start()):
        return
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
