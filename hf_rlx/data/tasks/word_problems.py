"""Word problems from a file."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

from hf_rlx.data.tasks.base import Task, prompt_of, split_rows


def svamp_task(
    path: str | Path, n_train: int = 700, n_test: int = 300, seed: int = 0, conversational: bool = True
) -> Task:
    """Word problems with one arithmetic step, from a SVAMP file in JSON lines that you name.

    Each line needs `Body`, `Question` and `Answer`. A question asked of the same body twice is kept once. Score it
    with `hf_rlx.verifiers.NumberVerifier(extract="answer_line")`.

    Args:
        path: the file, one JSON object a line.
        n_train: training rows.
        n_test: held-out rows.
        seed: shuffles before splitting.
        conversational: prompts as message lists; else plain text.

    Raises:
        FileNotFoundError: when `path` is no file.
        ValueError: when a line lacks a key, or the file has too few rows.
    """
    instruction = "Solve the problem. Finish with a line that says 'Answer:' and then just the number."
    rows: dict[str, dict[str, Any]] = {}
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            record = json.loads(line)
            missing = {"Body", "Question", "Answer"} - record.keys()
            if missing:
                raise ValueError(f"{path}, line {number}: lacks {sorted(missing)}.")
            body = record["Body"].strip()
            if body and body[-1].isalnum():  # bodies often end without a full stop
                body += ","
            question = f"{body} {record['Question'].strip()}"
            answer = str(Fraction(str(record["Answer"])))  # 51.0 becomes "51"
            rows[question] = {"prompt": prompt_of(instruction, question, conversational), "answer": answer}
    train, test = split_rows(list(rows.values()), n_train, n_test, seed, f"{path}")
    return Task(
        name="svamp",
        train=train,
        test=test,
        max_completion_length=200,
        description="SVAMP word problems with one arithmetic step.",
    )
