"""The reasoning-gym verifier: finding the answer, and not paying for garbage."""

from __future__ import annotations

import json

import pytest

from hf_rlx.verifiers import ReasoningGymVerifier
from hf_rlx.verifiers.reasoning_gym import final_answer
from hf_rlx.verifiers.verdict import VerifierBrokenError

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


def test_reasons_rows_of_other_tasks_and_code():
    """An answer that would stop the process when evaluated is wrong at once."""
    pytest.importorskip("reasoning_gym")
    logged: dict[str, object] = {}
    columns = {"metadata": [json.dumps(ENTRY), json.dumps(ENTRY), None, None]}
    completions = ["9**9**9**9", "1 + 2", "1 + 2", "1 + 2"]
    scores = ReasoningGymVerifier("countdown")(
        [], completions, log_extra=logged.__setitem__, log_metric=logged.__setitem__, **columns
    )
    assert scores == [0.0, 1.0, None, None]
    assert logged["countdown/failed"] == 2.0
    assert logged["countdown/reason"][1:] == ["the target", "the row holds no task", "the row holds no task"]


def test_a_scorer_that_cannot_judge_stops():
    """Three rows whose own answer makes the scorer raise."""
    pytest.importorskip("reasoning_gym")
    broken = [json.dumps({"answer": "two", "metadata": {}})] * 3
    with pytest.raises(VerifierBrokenError, match="could not judge 3 of 3"):
        ReasoningGymVerifier("prime_factorization")([], ["2"] * 3, metadata=broken)
