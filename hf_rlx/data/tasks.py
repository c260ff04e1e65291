"""Tasks: a training set and a held-out set whose answers a verifier can check.

A task holds data only. What scores it is a reward function from `hf_rlx.verifiers`, named in each function's
docstring: data and verifiers are packages on one floor and do not import one another.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from datasets import Dataset


@dataclass(frozen=True)
class Task:
    """Prompts with checkable answers, split so that no held-out prompt is trained on.

    Attributes:
        name: short identifier, e.g. `"arithmetic"`; safe in a file name or a metric name.
        train: rows with the columns `prompt` and `answer`, plus whatever the task's verifier reads.
        test: held-out rows with the same columns; shares no prompt with `train`.
        max_completion_length: tokens a correct completion needs at most, with room to spare.
        description: one sentence for people, used in logs and model cards.
    """

    name: str
    train: Dataset
    test: Dataset
    max_completion_length: int
    description: str

    def __post_init__(self) -> None:
        for split, rows in (("train", self.train), ("test", self.test)):
            missing = {"prompt", "answer"} - set(rows.column_names)
            if missing:
                raise ValueError(
                    f"Task {self.name!r}: the {split} split has the columns {rows.column_names} "
                    f"but lacks {sorted(missing)}."
                )
        trained = {_prompt_key(prompt) for prompt in self.train["prompt"]}
        shared = sum(_prompt_key(prompt) in trained for prompt in self.test["prompt"])
        if shared:
            raise ValueError(f"Task {self.name!r}: {shared} held-out prompts also stand in the training split.")


def _prompt_key(prompt: Any) -> str:
    """Text by which two prompts count as the same one; works for strings and for message lists."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)


# ---------------------------------------------------------------------------------------------------------------
# the bundled model's own task


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
            if (zlib.crc32(pair.encode()) % 10 == 0) != held_out:
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


# ---------------------------------------------------------------------------------------------------------------
# word problems from a file


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
            rows[question] = {"prompt": _prompt(instruction, question, conversational), "answer": answer}
    train, test = _split(list(rows.values()), n_train, n_test, seed, f"{path}")
    return Task(
        name="svamp",
        train=train,
        test=test,
        max_completion_length=200,
        description="SVAMP word problems with one arithmetic step.",
    )


# ---------------------------------------------------------------------------------------------------------------
# generated tasks of the reasoning-gym package


def reasoning_gym_task(
    name: str,
    n_train: int = 500,
    n_test: int = 128,
    seed: int = 0,
    conversational: bool = True,
    max_completion_length: int = 256,
    shots: int = 0,
    instruction: str | None = None,
    **dataset_kwargs: Any,
) -> Task:
    """A generated task of reasoning-gym, e.g. `"leg_counting"` or `"countdown"`.

    Rows: `prompt`, `answer` (text, or None where the package gives none; often one right answer of several, so do
    not compare with it) and `metadata` (JSON text of the package's entry, which its scorer reads). Score it with
    `hf_rlx.verifiers.ReasoningGymVerifier(name, **dataset_kwargs)`.

    Args:
        name: name under which reasoning-gym registers the dataset.
        n_train: training rows.
        n_test: held-out rows.
        seed: seed of the generator.
        conversational: prompts as message lists; else plain text.
        max_completion_length: tokens for a completion, with room for a short chain of thought.
        shots: solved examples before every question, answered with the bare answer, the same ones for all; they
            are in neither split. A packed forward computes this long prompt once for all completions.
        instruction: what stands before every question; None: to end with a line `Answer:`, or, with `shots`, to
            reply with just the answer.
        dataset_kwargs: configuration of the dataset, such as its difficulty.

    Raises:
        ImportError: when reasoning-gym is not installed; the message names the command.
        ValueError: when the name is unknown, or the generator repeats itself too often to give that many
            different questions.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError('reasoning_gym_task needs reasoning-gym: pip install "hf_rlx[tasks]"') from error

    if instruction is None:
        instruction = "Solve the problem. Finish with a line that says 'Answer:' and then just the answer."
        instruction = "Reply with just the answer." if shots else instruction
    # Small generators repeat themselves; a surplus leaves enough rows after repeated questions are dropped.
    surplus = 3 * (n_train + n_test + shots)
    dataset = reasoning_gym.create_dataset(name, seed=seed, size=surplus, **dataset_kwargs)
    rows: dict[str, dict[str, Any]] = {}
    for index in range(surplus):
        if len(rows) == n_train + n_test + shots:
            break
        entry = dataset[index]
        rows[entry["question"]] = {
            "prompt": _prompt(instruction, entry["question"], conversational),
            "answer": entry["answer"],
            "metadata": json.dumps(_tagged(entry)),
        }
    solved, unsolved = list(rows.values())[:shots], list(rows.values())[shots:]
    if shots:
        unsolved = [{**row, "prompt": _with_shots(solved, row["prompt"])} for row in unsolved]
    train, test = _split(unsolved, n_train, n_test, seed, f"reasoning-gym's {name}")
    return Task(
        name=name,
        train=train,
        test=test,
        max_completion_length=max_completion_length,
        description=f"Generated by reasoning-gym: {name.replace('_', ' ')}.",
    )


def _tagged(value: Any) -> Any:
    """`value` for JSON without loss: tuples and keys that are no text carry a tag.

    Some scorers compare with `==`, for which a tuple that came back as a list is a wrong answer.
    """
    if isinstance(value, tuple):
        return {"__tuple__": [_tagged(item) for item in value]}
    if isinstance(value, list):
        return [_tagged(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _tagged(item) for key, item in value.items()}
        return {"__items__": [[_tagged(key), _tagged(item)] for key, item in value.items()]}
    return value


def _prompt(instruction: str, question: str, conversational: bool) -> str | list[dict[str, str]]:
    """One user turn, as messages or as text that ends where the completion starts."""
    text = f"{instruction}\n\n{question}"
    return [{"role": "user", "content": text}] if conversational else text + "\n"


def _with_shots(solved: list[dict[str, Any]], prompt: Any) -> Any:
    """The solved rows as earlier turns (or earlier lines) of `prompt`."""
    if isinstance(prompt, str):
        return "\n".join([row["prompt"] + str(row["answer"]) + "\n" for row in solved] + [prompt])
    turns: list[dict[str, str]] = []
    for row in solved:
        turns += [*row["prompt"], {"role": "assistant", "content": str(row["answer"])}]
    return turns + prompt


def _split(rows: list[dict[str, Any]], n_train: int, n_test: int, seed: int, source: str) -> tuple[Dataset, Dataset]:
    if n_train < 1 or n_test < 1:
        raise ValueError(f"n_train and n_test must be at least 1, not {n_train} and {n_test}.")
    if len(rows) < n_train + n_test:
        raise ValueError(f"{source} has {len(rows)} different questions; {n_train} + {n_test} were asked for.")
    random.Random(seed).shuffle(rows)
    return Dataset.from_list(rows[:n_train]), Dataset.from_list(rows[n_train : n_train + n_test])
