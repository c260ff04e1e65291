"""Reward functions that ask for a column which is not there: what the message offers instead."""

from __future__ import annotations

from hf_rlx.rollout.signatures import signature_problem


def needing(name):
    """A function with that parameter."""
    return eval(f"lambda completions, {name}: []")


def test_only_columns_are_suggested():
    """`solution` is like `completions`, which every function gets anyhow; columns are listed, a near one is named, and
    so is an argument that is merely misspelt."""
    problem = signature_problem(needing("solution"), ["answer", "topic"])
    assert (
        "'solution', which no dataset column gives; the columns are answer, topic; always given are prompts" in problem
    )
    assert "did you mean" not in problem
    assert "(did you mean 'solutions'?)" in signature_problem(needing("solution"), ["answer", "solutions"])
    assert "(did you mean 'completion_ids'?)" in signature_problem(needing("completion_id"), ["answer"])
    assert "there are none besides the prompt" in signature_problem(needing("solution"), [])
    assert signature_problem(needing("answer"), ["answer"]) is None
