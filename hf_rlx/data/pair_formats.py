"""The forms in which preference data go round, from one to another. Knows no torch.

| form | prompt | answers |
|---|---|---|
| explicit | a column of its own | without it |
| implicit | none | begin with it |
| text | a text | texts |
| messages | [{"role": "user", ...}] | [{"role": "assistant", ...}] |
| hh | none | "\\n\\nHuman: ...\\n\\nAssistant: ...", as Anthropic's helpful and harmless pairs |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

from hf_rlx.data.pair_building import (
    IDENTICAL,
    TIED,
    WITHIN,
    Pairs,
    answer_key,
    check_options,
    is_empty,
    score_of,
)
from hf_rlx.data.pair_checks import check_row
from hf_rlx.data.pair_filters import answers_of, common_start, difference_of, text_of

Form = Literal["explicit", "implicit", "text", "messages", "hh"]

NO_PROMPT = "no prompt in common"
REVERSED = "chosen scores below rejected"
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_SCORES = {
    "score_chosen": ("chosen_score", "chosen_rating", "chosen-rating"),
    "score_rejected": ("rejected_score", "rejected_rating", "rejected-rating"),
}


def convert(rows: Iterable[dict[str, Any]], form: Form) -> Pairs:
    """Pairs or ranked lists in another form; further columns are kept.

    Args:
        rows: of any form in the table at the head of this file.
        form:
            "explicit": prompt and answers apart, text or messages as they are. Of texts the prompt is what they have
            in common up to a white space, of "\\n\\nHuman:" texts and of messages the turns in common.
            "implicit": the prompt in front of every answer.
            "text", "messages": explicit, all text or all messages; text is one user message and one answer.
            "hh": implicit.

    Returns:
        the rows; `left_out` has those whose answers have no prompt in common.

    Raises:
        ValueError: an unknown form; a row, by its index, that this form cannot hold.
    """
    if form not in get_args(Form):
        raise ValueError(f"the form is one of {', '.join(get_args(Form))}, got {form!r}")
    made = Pairs()
    for index, row in enumerate(rows):
        made.rows_in += 1
        answers = answers_of(row, index)
        try:
            apart = _explicit(row.get("prompt"), answers)
            if apart is None and form != "implicit":
                made.leave_out(NO_PROMPT, index)
                continue
            made.append(_with(row, *_formed(apart, answers, form)))
        except ValueError as error:
            raise ValueError(f"row {index} {error}") from error
    return made


def _formed(apart: tuple[Any, list[Any]] | None, answers: list[Any], form: Form) -> tuple[Any, list[Any]]:
    """(prompt or None, answers) in `form`."""
    if apart is None:
        return None, answers
    prompt, answers = apart
    if form == "explicit":
        return prompt, answers
    if form == "implicit":
        return None, _implicit(prompt, answers)
    before, turns = _as_messages(prompt, answers)
    if form == "messages":
        return before, turns
    if form == "text":
        if isinstance(prompt, str):
            return prompt, [answer if isinstance(answer, str) else _only(answer, "assistant") for answer in answers]
        return _only(before, "user"), [_only(turn, "assistant") for turn in turns]
    return None, [_to_hh([*before, *turn]) for turn in turns]


def _with(row: dict[str, Any], prompt: Any, answers: list[Any]) -> dict[str, Any]:
    """`row` with another prompt (None: no column) and other answers."""
    new = {} if prompt is None else {"prompt": prompt}
    new |= {"responses": answers} if "responses" in row else {"chosen": answers[0], "rejected": answers[1]}
    return new | {n: v for n, v in row.items() if n not in new and not (n == "prompt" and prompt is None)}


def _explicit(prompt: Any, answers: list[Any]) -> tuple[Any, list[Any]] | None:
    """Prompt and answers apart; None where the answers have no prompt in common."""
    if prompt is not None:
        return prompt, answers
    if all(isinstance(answer, list) for answer in answers):
        shared = _leading(answers)
        return (answers[0][:shared], [answer[shared:] for answer in answers]) if shared else None
    if not all(isinstance(answer, str) for answer in answers):
        raise ValueError("mixes plain text and messages among its answers; make them alike")
    if all(_TURN.search(answer) for answer in answers):
        return _explicit_hh(answers)
    shared = common_start(answers)
    # A word is not cut in two, and the blank in front of it goes with the answer, as tokenizers have it.
    blanks = [i for i in range(1, shared) if answers[0][i].isspace()]
    cut = blanks[-1] if blanks else min(shared, *(len(answer) - 1 for answer in answers))
    return (answers[0][:cut], [answer[cut:] for answer in answers]) if cut > 0 else None


def _explicit_hh(answers: list[str]) -> tuple[str, list[str]] | None:
    """The prompt ends with the "Assistant:" in front of the first turn that differs."""
    turns = [_TURN.split(answer) for answer in answers]  # what stands before, who, text, who, text, ...
    if len({split[0] for split in turns}) > 1:
        return None
    said = [list(zip(split[1::2], split[2::2], strict=True)) for split in turns]
    shared = _leading(said)
    while shared and any(turn[shared][0] != "Assistant" for turn in said):
        shared -= 1
    if not shared:
        return None
    prompt = turns[0][0] + _written(said[0][:shared]) + "\n\nAssistant:"
    rest = [turn[shared][1] + _written(turn[shared + 1 :]) for turn in said]
    return (prompt, rest) if all(text.strip() for text in rest) else None


def _written(turns: Sequence[tuple[str, str]]) -> str:
    return "".join(f"\n\n{who}:{text}" for who, text in turns)


def _leading(answers: Sequence[Sequence[Any]]) -> int:
    """Entries that all begin with, leaving each at least one."""
    return max(min(common_start(answers), min(map(len, answers)) - 1), 0)


def _implicit(prompt: Any, answers: list[Any]) -> list[Any]:
    kinds = {type(value) for value in (prompt, *answers)}
    if len(kinds) > 1:
        raise ValueError('mixes plain text and messages; convert to the form "messages" first')
    return [prompt + answer for answer in answers]


def _as_messages(prompt: Any, answers: list[Any]) -> tuple[list[Any], list[list[Any]]]:
    if isinstance(prompt, str) and _TURN.search(prompt):
        given = [answer for answer in answers if isinstance(answer, str)]
        if len(given) == len(answers):
            whole = [_from_hh(prompt + answer) for answer in given]
            asked = len(_from_hh(prompt.removesuffix("\n\nAssistant:")))
            return whole[0][:asked], [messages[asked:] for messages in whole]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return before, [[{"role": "assistant", "content": a}] if isinstance(a, str) else list(a) for a in answers]


def _from_hh(text: str) -> list[dict[str, str]]:
    system, *rest = _TURN.split(text)
    turns = zip(rest[::2], rest[1::2], strict=True)
    messages = [{"role": _ROLES[who], "content": said.strip()} for who, said in turns]
    return [{"role": "system", "content": system.strip()}, *messages] if system.strip() else messages


def _to_hh(messages: list[dict[str, Any]]) -> str:
    who = {role: name for name, role in _ROLES.items()}
    text = ""
    for place, message in enumerate(messages):
        said = text_of([message])
        if message["role"] == "system" and not place:
            text = said
        elif message["role"] in who:
            text += f"\n\n{who[message['role']]}: {said}"
        else:
            raise ValueError(f"has a message of {message['role']!r}; the form hh holds users and assistants")
    return text


def _only(messages: list[dict[str, Any]], role: str) -> str:
    if len(messages) != 1 or messages[0]["role"] != role:
        raise ValueError(
            f"has the messages of {', '.join(str(m['role']) for m in messages)} where plain text holds one of "
            f'{role}; use the form "messages", or "hh"'
        )
    return text_of(messages)


def tidy_pair(row: dict[str, Any]) -> dict[str, Any]:
    """A row of prompt, chosen and rejected as trainers read it.

    Conversations in full beside their prompt, as in HuggingFaceH4/ultrafeedback_binarized, lose the prompt's messages,
    and a prompt in text beside messages becomes the messages that the answers share. Scores go under `score_chosen`
    and `score_rejected`.

    Args:
        row: with chosen and rejected.
    """
    new = dict(row)
    for name, others in _SCORES.items():
        found = next((other for other in others if other in new and name not in new), None)
        if found is not None:
            new[name] = new.pop(found)
    prompt = row.get("prompt")
    answers: list[Any] = [row.get("chosen"), row.get("rejected")]
    if not prompt or not all(isinstance(answer, list) and answer for answer in answers):
        return new
    shared = _leading(answers)
    if isinstance(prompt, list):
        if shared < len(prompt) or answers[0][: len(prompt)] != prompt:
            return new
        shared = len(prompt)
    before = answers[0][:shared] if shared else [{"role": "user", "content": prompt}]
    return new | {"prompt": before, "chosen": answers[0][shared:], "rejected": answers[1][shared:]}


def from_ultrafeedback(rows: Iterable[dict[str, Any]], score: Literal["ratings", "overall"] = "ratings") -> Pairs:
    """Rows of prompt, responses, scores and models out of UltraFeedback's.

    Args:
        rows: instruction, completions: [{"response", "model", "overall_score", "annotations": {aspect: {"Rating"}}}].
        score: "ratings": the mean of the aspects' ratings; "overall": overall_score, which is wrong in some rows of
            the first release.

    Returns:
        for `build_pairs(..., response_columns=["models"])`; a completion without a rating has the score None.

    Raises:
        ValueError: names the row: no completions, a rating that is neither a number nor "N/A".
    """
    if score not in ("ratings", "overall"):
        raise ValueError(f"score is one of ratings, overall, got {score!r}")
    made = Pairs()
    for index, row in enumerate(rows):
        made.rows_in += 1
        given: Any = row.get("completions") if isinstance(row, dict) else None
        listed = isinstance(given, list) and all(isinstance(entry, dict) for entry in given)
        if not listed or "instruction" not in row:
            raise ValueError(f"row {index} has no `instruction` and `completions`, a list of dictionaries")
        try:
            scores = [_mean_rating(entry, score) for entry in given]
        except ValueError as error:
            raise ValueError(f"row {index} {error}") from error
        more = {n: v for n, v in row.items() if n not in ("instruction", "completions", "models")}
        answers = [entry.get("response") for entry in given]
        models = [entry.get("model") for entry in given]
        made.append({"prompt": row["instruction"], "responses": answers, "scores": scores, "models": models, **more})
        made.note("empty responses", sum(map(is_empty, answers)))
    return made


def _mean_rating(entry: dict[str, Any], score: str) -> float | None:
    if score == "overall":
        return _rating(entry.get("overall_score"), "overall_score")
    aspects = entry.get("annotations") or {}
    ratings = [_rating((aspect or {}).get("Rating"), name) for name, aspect in aspects.items()]
    known = [rating for rating in ratings if rating is not None]
    return sum(known) / len(known) if known else None


def _rating(value: Any, name: str) -> float | None:
    if isinstance(value, str):
        if value.strip() in ("", "N/A"):
            return None
        try:
            value = float(value)
        except ValueError as error:
            raise ValueError(f"has the rating {value!r} of {name}; give a number, or N/A") from error
    return score_of(value, f"the rating of {name}")


def from_pairs(rows: Iterable[dict[str, Any]], margin: float = 0.0) -> Pairs:
    """Rows that are pairs already, without those of which nothing can be learnt.

    Args:
        rows: (prompt,) chosen, rejected; see `tidy_pair`. margin: score units; the scores, where there are any, must
            differ by more. A `margin` column counts where there are no scores.

    Returns:
        the rows; `left_out` has those with an empty or the same answer twice, with equal scores, or a lower score of
        the chosen one.

    Raises:
        ValueError: a margin below 0; names the row: a column is missing, neither text nor messages; a margin above 0
            without scores.
    """
    check_options("all", margin)
    made = Pairs()
    for index, given in enumerate(rows):
        made.rows_in += 1
        if not isinstance(given, dict):
            raise ValueError(f"row {index} is a {type(given).__name__}; rows are dictionaries of chosen, rejected")
        row = tidy_pair(given)
        answers = answers_of(row, index)
        if any(is_empty(answer) for answer in answers):
            made.leave_out("empty responses", index)
            continue
        try:
            check_row({name: value for name, value in row.items() if value is not None or name != "prompt"})
        except ValueError as error:
            raise ValueError(f"row {index} {error}") from error
        reason = IDENTICAL if answer_key(answers[0]) == answer_key(answers[1]) else _too_close(row, index, margin)
        if reason is None:
            made.append(row)
        else:
            made.leave_out(reason, index)
    return made


def _too_close(row: dict[str, Any], index: int, margin: float) -> str | None:
    """Why the scores make no pair; None: they do, or there are none."""
    scored = row.get("score_chosen") is not None and row.get("score_rejected") is not None
    if not scored and not margin:
        return None
    difference = difference_of(row, index)
    if difference > margin:
        return None
    if not scored or difference > 0:
        return WITHIN
    return REVERSED if difference < 0 else TIED
