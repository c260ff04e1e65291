"""The reasoning-gym verifier: finding the answer, and not paying for garbage."""

from __future__ import annotations

import json

import pytest

from hf_rlx.verifiers import ReasoningGymVerifier
from hf_rlx.verifiers.reasoning_gym import final_answer

ENTRY = {"answer": "1 + 2", "metadata": {"numbers": [1, 2], "target": 3}}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42", "42"),
        ("thinking\nAnswer: 42", "42"),
        ("**Answer:** 42", "42"),
        ("answer: 1\nno, ANSWER : 2 ", "2"),
        ("Answer:\n1 2\n3 4\n", "1 2\n3 4"),
        ("<answer>1</answer> or <answer>\n2\n</answer>. Answer: 3", "2"),
        ("", ""),
    ],
)
def test_final_answer(text: str, answer: str):
    assert final_answer(text) == answer


def test_partial_credit_is_off_by_default():
    pytest.importorskip("reasoning_gym")
    completions = ["Answer: 1 + 2", "Answer: 2 - 1", "garbage"]
    columns = {"metadata": [json.dumps(ENTRY)] * 3}
    assert ReasoningGymVerifier("countdown")([], completions, **columns) == [1.0, 0.0, 0.0]
    graded = ReasoningGymVerifier("countdown", graded=True)
    assert graded([], completions, **columns) == [1.0, pytest.approx(0.05), pytest.approx(0.01)]
    assert graded.__name__ == "countdown"


def test_errors():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match="not registered"):
        ReasoningGymVerifier("no_such_task")
    with pytest.raises(ValueError, match="reads the column 'metadata'"):
        ReasoningGymVerifier("countdown")([], ["a"], answer=["1"])
