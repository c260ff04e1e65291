"""The bundled model's own task, in its own form and in words."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from datasets import Dataset

from hf_rlx.data.tasks.base import Task, is_held_out


def arithmetic_problems(held_out: bool) -> Iterator[tuple[str, str]]:
    """Every `(prompt, answer)` of the bundled model's task, on one side of a fixed split, in a fixed order.

    The family: `a+b=` for all a, b in 0..99, and `a-b=` for all a >= b, so answers are 0..198. About one pair of
    numbers in ten is held out. The side depends on the unordered pair, so `25+17=`, which has the answer of
    `17+25=`, is never on the other side. The bundled model has seen no held-out problem in its pre-training.

    Args:
        held_out: True for the held-out side, False for the side the bundled model was pre-trained on.
    """
    for a in range(100):
        for b in range(100):
            pair = f"{min(a, b)},{max(a, b)}"
            if is_held_out(pair) != held_out:
                continue
            yield f"{a}+{b}=", str(a + b)
            if a >= b:
                yield f"{a}-{b}=", str(a - b)


def arithmetic_task(n_train: int = 2000, n_test: int = 256, seed: int = 0) -> Task:
    """Addition and subtraction up to two digits, in the exact form that the bundled character model knows.

    Rows: `{"prompt": "17+25=", "answer": "42"}`; the right completion is the bare number and then `<eos>`.
    Score it with `hf_rlx.verifiers.NumberVerifier(extract="whole")`.

    Args:
        n_train: training rows, drawn without repetition from the problems of the model's pre-training.
        n_test: held-out rows, drawn without repetition from problems the model has never seen.
        seed: chooses which rows are drawn, not which side a problem is on.

    Raises:
        ValueError: when more rows are asked for than the family has.
    """
    rng = random.Random(seed)
    splits = []
    for held_out, n, argument in ((False, n_train, "n_train"), (True, n_test, "n_test")):
        pool = list(arithmetic_problems(held_out))
        if not 1 <= n <= len(pool):
            raise ValueError(f"{argument} must be between 1 and {len(pool)}, the number of problems, not {n}.")
        splits.append(Dataset.from_list([{"prompt": p, "answer": a} for p, a in rng.sample(pool, n)]))
    return Task(
        name="arithmetic",
        train=splits[0],
        test=splits[1],
        max_completion_length=8,
        description="Addition and subtraction of numbers up to 99, answered with the bare number.",
    )


def spoken_arithmetic_task(n_train: int = 500, n_test: int = 128, seed: int = 0) -> Task:
    """The problems of `arithmetic_task`, asked in words as messages, for a general language model.

    Score it with `hf_rlx.verifiers.NumberVerifier(extract="last")`.

    Args:
        n_train, n_test, seed: as in `arithmetic_task`.
    """
    written = arithmetic_task(n_train, n_test, seed)

    def spoken(row: dict[str, Any]) -> dict[str, Any]:
        question = f"What is {row['prompt'].rstrip('=')}? Reply with the number only."
        return {"prompt": [{"role": "user", "content": question}], "answer": row["answer"]}

    return Task(
        name="spoken_arithmetic",
        train=Dataset.from_list([spoken(row) for row in written.train]),
        test=Dataset.from_list([spoken(row) for row in written.test]),
        max_completion_length=16,
        description="Addition and subtraction of numbers up to 99, asked in a sentence.",
    )
