"""Sums, gates and products of reward functions: values, None, and what is logged."""

from __future__ import annotations

import math
import pickle
import re

import pytest

from hf_rlx.verifiers.combine import Gate, Product, Weighted
from hf_rlx.verifiers.format import RegexVerifier
from hf_rlx.verifiers.numbers import NumberVerifier


class Fixed:
    """A reward function that gives what it is told, and remembers what it was called with."""

    def __init__(self, name: str, *scores: float | None) -> None:
        self.__name__ = name
        self.scores = list(scores)
        self.given: dict = {}

    def __call__(self, prompts, completions, **given) -> list[float | None]:
        self.given = {"prompts": prompts, "completions": completions, **given}
        return self.scores


def call(function, n: int, **columns):
    return function(prompts=["p"] * n, completions=["c"] * n, **columns)


def test_weighted():
    """2a - 0.5b: 2 - 0.5, 2 * 1, -0.5 * 1, none."""
    a, b = Fixed("a", 1.0, 1.0, None, None), Fixed("b", 1.0, None, 1.0, None)
    assert call(Weighted([a, b], [2.0, -0.5]), 4) == [1.5, 2.0, -0.5, None]
    assert call(Weighted([a, b]), 4) == [2.0, 1.0, 1.0, None]


def test_weighted_average():
    """Weights 3 and 1: (3 * 1 + 1 * 0) / 4; then only the part that is there."""
    a, b = Fixed("a", 1.0, 1.0, None, None), Fixed("b", 0.0, None, 0.0, None)
    assert call(Weighted([a, b], [3, 1], average=True), 4) == [0.75, 1.0, 0.0, None]


def test_gate():
    """Open at 0.5: the reward, None too. Shut: `shut`, whatever the reward. Condition None: None."""
    condition = Fixed("condition", 0.5, 1.0, 0.4, 0.0, None)
    reward = Fixed("reward", -3.0, None, 1.0, None, 1.0)
    assert call(Gate(condition, reward, threshold=0.5, shut=-1.0), 5) == [-3.0, None, -1.0, -1.0, None]
    assert call(Gate(condition, reward), 5) == [0.0, None, 0.0, 0.0, None]


def test_product():
    """0.5 * 0.5; a zero decides even beside None; else None stays None."""
    a, b = Fixed("a", 0.5, 0.0, None, None, 1), Fixed("b", 0.5, None, 0.0, 1.0, True)
    assert call(Product([a, b]), 5) == [0.25, 0.0, 0.0, None, 1.0]


def test_two_penalties_do_not_multiply_to_a_reward():
    with pytest.raises(ValueError, match=r"'b' gives -1\.0; a product takes scores of 0 or more"):
        call(Product([Fixed("a", 1.0), Fixed("b", -1.0)]), 1)


def test_parts_are_logged_by_themselves_and_get_everything():
    """Means leave None out: a has 1.0 and 0.0; b has nothing to take a mean of."""
    columns: dict[str, list] = {}
    metrics: dict[str, float] = {}
    a, b = Fixed("a", 1.0, None, 0.0), Fixed("b", None, None, None)
    total = Weighted({"first": a, "b": b}, name="sum")
    outer = Gate(Fixed("shape", 1, 1, 1), total)
    scores = call(outer, 3, answer=[1, 2, 3], log_extra=columns.__setitem__, log_metric=metrics.__setitem__)
    assert scores == [1.0, None, 0.0]
    assert columns == {
        "sum/first": [1.0, None, 0.0],
        "sum/b": [None, None, None],
        "gate/shape": [1.0, 1.0, 1.0],
        "gate/sum": [1.0, None, 0.0],
    }
    assert metrics == {"sum/first": 0.5, "gate/shape": 1.0, "gate/sum": 0.5}
    assert a.given["answer"] == [1, 2, 3]
    assert a.given["prompts"] == ["p"] * 3


def test_with_verifiers():
    """Correctness behind a format: right and well formed, right only, well formed only."""
    shaped = Gate(RegexVerifier(r"Answer: \d+", fullmatch=True), NumberVerifier("answer_line"), name="shaped")
    texts = ["Answer: 42", "well, Answer: 42", "Answer: 41"]
    assert shaped(prompts=[""] * 3, completions=texts, answer=["42"] * 3) == [1.0, 0.0, 0.0]
    assert shaped.__name__ == "shaped"
    again = pickle.loads(pickle.dumps(shaped))
    assert again(prompts=[""], completions=texts[:1], answer=["42"]) == [1.0]


async def later(prompts, completions, **columns) -> list[float]:
    """A reward function of the kind that only a trainer can await."""
    return [1.0]


@pytest.mark.parametrize("combined", [Weighted, Product, lambda parts: Gate(parts[0], parts[-1])])
def test_wrong_scores_stop(combined):
    for scores, message in (
        ((1.0,), "'b' gives 1 scores for 2 completions"),
        ((1.0, math.nan), "'b' gives the score nan"),
        ((1.0, math.inf), "'b' gives the score inf"),
    ):
        with pytest.raises(ValueError, match=message):
            call(combined([Fixed("a", 1.0, 1.0), Fixed("b", *scores)]), 2)


def test_arguments():
    a = Fixed("a", 1.0)
    for make, message in (
        (lambda: Weighted([]), "nothing to combine"),
        (lambda: Product([a, a]), "two parts are called 'a'"),
        (lambda: Gate(a, a), "two parts are called 'a'"),
        (lambda: Weighted([a, later]), "'later' is asynchronous"),
        (lambda: Weighted({"x": 3}), "'x' is no function"),  # type: ignore[dict-item]
        (lambda: Weighted([a], [1.0, 2.0]), "2 weights for 1 parts"),
        (lambda: Weighted([a], [math.nan]), "weights must be finite"),
        (lambda: Weighted([a], [-1.0], average=True), "positive for an average"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make()
