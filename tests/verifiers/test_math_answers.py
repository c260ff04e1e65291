"""Where the final answer stands, and when there is none."""

from __future__ import annotations

import time

import pytest

from hf_rlx.verifiers import MathVerifier
from hf_rlx.verifiers.answers import boxes, joint_boxes, last_boxed


@pytest.mark.parametrize(
    ("text", "gold", "reward"),
    [
        # boxes
        (r"First \boxed{6}, no: \boxed{7}", "7", 1.0),
        (r"First \boxed{6}, no: \boxed{7}", "6", 0.0),
        (r"\boxed{6}\boxed{7}", "7", 0.0),
        (r"$\boxed{6}$, $\boxed{7}$ and $\boxed{8}$", "8", 0.0),
        (r"$\boxed{6}$ or $\boxed{7}$", "7, 6", 1.0),
        ("\\boxed{7}\n\n\\boxed{7}", "7", 1.0),
        (r"\boxed{\boxed{7}}", "7", 1.0),
        (r"\boxed{7} \boxed{ \boxed{ 8", "7", 1.0),
        (r"\boxed{\{1,\ 2\}}", "1,2", 1.0),
        (r"\fbox{7}", "7", 1.0),
        (r"\boxed{}", "7", 0.0),
        (r"I know it is 7. \boxed{8}", "7", 0.0),
        # thinking, tags
        (r"<think>\boxed{7}</think>The answer is 8", "7", 0.0),
        (r"<think>\boxed{7}</think>The answer is 8", "8", 1.0),
        ("so <answer> 7 </answer>", "7", 1.0),
        (r"<answer>\boxed{7}</answer> and 9", "7", 1.0),
        # after a mark
        ("3 + 4 = 7\n#### 7", "7", 1.0),
        ("#### \\$1,250", "1250", 1.0),
        ("#### 7 or 8", "7", 0.0),
        ("The answer is 7.", "7", 1.0),
        ("**Final Answer:** 7", "7", 1.0),
        ("The final answer to both questions is: 7 dollars per day.", "7", 1.0),
        ("Answer:\n7", "7", 1.0),
        ("A: She needs 7 eggs", "7", 1.0),
        ("The answer is $\\frac{7}{2}$.", "3.5", 1.0),
        ("The answer is $7$ because $3+4=7$.", "7", 1.0),
        ("The answer is $7$ eggs.", "7", 1.0),
        ("The answer is $x=2$ and $x=-3$.", "-3, 2", 1.0),
        ("The answer is (C).", r"\text{(C)}", 1.0),
        ("The answer is C", "B", 0.0),
        ("The answer is not 7", "7", 0.0),
        ("The answer is 7 squared", "7", 0.0),
        ("The answer is pi/7", "7", 0.0),
        # nothing but text
        ("Adding 60 + 90 = 150 and so on we end with **73**", "73", 1.0),
        ("In total 7 animals", "7", 1.0),
        ("That is 50 percent.", "0.5", 1.0),
        ("which gives $x = \\frac{\\pi}{7}$.", r"\frac{\pi}{7}", 1.0),
        ("which gives $x = \\frac{\\pi}{7}$.", "7", 0.0),
        ("We get 7 pi", "7", 0.0),
        ("We get 2 * 7", "7", 0.0),
        ("so sqrt(7)", "7", 0.0),
        ("6 apples and 7 pears", "7", 0.0),
        ("Thus $x=6$ or $x=7$", "7", 0.0),
        ("it costs 7 million", "7", 0.0),
        ("I do not know.", "0", 0.0),
        ("", "0", 0.0),
    ],
)
def test_auto(text: str, gold: str, reward: float):
    assert MathVerifier().judge(text, gold).reward == reward


@pytest.mark.parametrize(
    ("extract", "found", "not_found"),
    [
        ("boxed", r"\boxed{7}", "the answer is 7"),
        ("hash", "#### 7", r"\boxed{7}"),
        ("answer_line", "Answer: 7", r"\boxed{7}"),
        ("tag", "<answer>7</answer>", "Answer: 7"),
        ("last", "so we end with 7", "nothing"),
        ("whole", "7", "it is 7"),
    ],
)
def test_one_place_only(extract, found: str, not_found: str):
    verifier = MathVerifier(extract)
    assert verifier.judge(found, 7).reward == 1.0
    assert verifier.judge(not_found, 7).reward == 0.0


def test_boxes():
    text = r"a \boxed{1} b \boxed{\frac{\boxed{2}}{3}} \boxed{4"
    assert [content for _, _, content in boxes(text)] == ["1", r"\frac{\boxed{2}}{3}"]
    assert last_boxed(r"\boxed{\boxed{2}}") == "2"
    assert last_boxed("none") is None
    assert joint_boxes(r"\boxed{1} far from it \boxed{2}, \boxed{3}") == "2 , 3"
    assert joint_boxes("none") is None


@pytest.mark.parametrize("extract", ["auto", "boxed", "hash", "answer_line", "tag", "last", "whole"])
def test_hostile_lengths_are_quick(extract):
    """Each within the 2.5 s that a verdict may take, all of them together."""
    verifier = MathVerifier(extract)
    hostile = ["9" * 200_000, "1," * 50_000, "\\boxed{" * 30_000, "\\boxed{1}" * 20_000, "answer is " * 20_000]
    hostile += ["$" * 50_000, "$1$," * 20_000, "#### " * 20_000, "<answer>" * 20_000, "{" * 50_000, "1 and " * 30_000]
    hostile += ["answer" + " a" * 50_000, "\\text{" * 20_000, "A: " * 20_000, "\\(" * 20_000, "-" * 50_000]
    start = time.perf_counter()
    for text in hostile:
        verifier.judge(text, "1")
        verifier.judge(f"\\boxed{{{text}}}", "1")
    assert time.perf_counter() - start < 2.5 * 2
