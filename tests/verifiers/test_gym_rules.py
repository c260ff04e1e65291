"""reasoning-gym's scorers against what a model can write: code, loops without end, odd text, and answers that are
wrong and would be paid."""

from __future__ import annotations

import inspect
import re
import time
from pathlib import Path

import pytest

from hf_rlx.verifiers.gym_rules import FORMULAS, LITERALS, OWN, GymScorer, work

reasoning_gym = pytest.importorskip("reasoning_gym")

SETTINGS = {"seed": 7, "size": 4}


def scorer_and_entries(name: str):
    scorer = GymScorer(name, SETTINGS)
    return scorer, [scorer.dataset[index] for index in range(4)]


@pytest.mark.parametrize("name", sorted(FORMULAS | LITERALS | OWN))
def test_answers_run_no_code(name: str, tmp_path: Path):
    """Every spelling of a call that makes a folder: wrong, and no folder. The task's own answers are right (an
    integral that the package itself left open has none)."""
    scorer, entries = scorer_and_entries(name)
    made = tmp_path / "made"
    call = f"__import__('os').mkdir('{made}')"
    for answer in (call, f"[{call}]", f"1 if {call} else 2", f"x.__class__({call})", f"(lambda: {call})()"):
        verdict, score = scorer.judge(answer, entries[0])
        assert verdict.outcome == "wrong"
        assert score < 1.0
    assert not made.exists()
    if name in OWN | LITERALS:
        assert [scorer.judge(e["answer"], e)[0].outcome for e in entries] == ["right"] * 4


def test_the_package_would_have_run_it(tmp_path: Path):
    """What the first test is good for: the bare scorer of a task evaluates the answer."""
    dataset = reasoning_gym.create_dataset("countdown", **SETTINGS)
    dataset.score_answer(answer=f"__import__('os').mkdir('{tmp_path / 'made'}')", entry=dataset[0])
    assert (tmp_path / "made").exists()


def test_every_scorer_that_evaluates_is_known():
    """In the installed version; one of a later version would be refused when it is made."""
    from reasoning_gym.factory import DATASETS

    evaluates = re.compile(r"(?<![\w.])(?:eval|exec)\(|\b(?:parse_expr|sympify)\(")
    found = {n for n, (cls, _) in DATASETS.items() if evaluates.search(inspect.getsource(cls.score_answer))}
    assert found <= FORMULAS | LITERALS | OWN
    assert "countdown" in found


def test_an_unknown_evaluation_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hf_rlx.verifiers.gym_rules.LITERALS", LITERALS - {"n_queens"})
    with pytest.raises(ValueError, match="'n_queens' evaluates answers as code"):
        GymScorer("n_queens", {})


def test_puzzle24_takes_the_given_numbers_only():
    entry = {"answer": "8*(5*1 - 2)", "metadata": {"numbers": [8, 5, 1, 2]}}
    scorer = GymScorer("puzzle24", {})
    answers = ["8*(5*1 - 2)", "6*4*1*1", "2*(5 + 1 + 6)", "8*(5-2)", "8*5-15-1"]
    assert [scorer.judge(a, entry)[0].outcome for a in answers] == ["right"] + ["wrong"] * 4


def test_halting_is_yes_or_no():
    entry = {"answer": "False", "metadata": {}}
    scorer = GymScorer("game_of_life_halting", {})
    answers = ["False", " false\n", "True", "yes", "False or True", ""]
    assert [scorer.judge(a, entry)[0].outcome for a in answers] == ["right"] * 2 + ["wrong"] * 4


def test_probabilities_are_told_apart():
    """13/4096 = 0.003173828125. Three digits are enough, 0 and two digits are not, and a huge exponent is no work."""
    entry = {"answer": "0.003173828125", "metadata": {"rational": {"numerator": 13, "denominator": 4096}}}
    scorer = GymScorer("coin_flip", {})
    answers = ["0.003173828125", "13/4096", "0.003174", "0", "0.0032", "1e-3", "1e-10000000", "1/0", "nan", "13"]
    assert [scorer.judge(a, entry)[0].outcome for a in answers] == ["right"] * 3 + ["wrong"] * 7


def test_what_is_not_finite_is_no_answer():
    scorer, (entry, *_) = scorer_and_entries("complex_arithmetic")
    assert scorer.dataset.score_answer(answer="nan", entry=entry) == 1.0  # the package's own verdict
    assert scorer.judge("nan", entry)[0].outcome == "wrong"
    assert scorer.judge("nanj", entry)[0].outcome == "wrong"
    assert scorer.judge(entry["answer"], entry)[0].outcome == "right"


def test_a_scorer_that_raises():
    """On the answer: wrong. On the task's own answer too: nobody can tell."""
    scorer, (entry, *_) = scorer_and_entries("prime_factorization")
    verdict, score = scorer.judge("2 and 3", entry)
    assert (verdict.outcome, score) == ("wrong", 0.0)
    assert "ValueError" in verdict.reason
    assert scorer.judge("2", {"answer": "two", "metadata": {}})[0].outcome == "failed"


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("x**3/3 + C", "right"),
        ("x^3/3", "wrong"),  # SymPy reads ^ as the exclusive or, and the prompt says **
        ("(x**3 + 1)/3", "right"),  # another constant
        ("$x**3/3 + C$", "right"),
        ("x**3", "wrong"),
        ("x**3/3 or 7", "wrong"),
        ("Integral(x**2, x)", "wrong"),  # restates the question
        ("integrate(x**2, x)", "wrong"),
        ("O(x)", "wrong"),
        ("S(1)", "wrong"),
        ("x.diff", "wrong"),
        ("x[0]", "wrong"),
        ("3(x)", "wrong"),
        ("9**9**9**9", "wrong"),
        ("x**99999", "wrong"),
        ("factorial(99999)", "wrong"),
        ("x" * 2000, "wrong"),
        ("", "wrong"),
    ],
)
def test_formulas(answer: str, outcome: str):
    """The integral of x^2."""
    entry = {"answer": "x**3/3 + C", "metadata": {"integrand": "x**2", "variable": "x"}}
    assert GymScorer("simple_integration", {}).judge(answer, entry)[0].outcome == outcome


def test_a_formula_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hf_rlx.verifiers.gym_rules._LIMIT", 1.0)
    entry = {"answer": "x**3/3 + C", "metadata": {"integrand": "x**2", "variable": "x"}}
    start = time.perf_counter()
    verdict, _ = GymScorer("simple_integration", {}).judge("((x+y+z+a+b)**999 * (x+1)**999)**999", entry)
    assert verdict.outcome in ("wrong", "failed")  # failed: the machine was too busy to tell
    assert time.perf_counter() - start < 30  # with the start of the process


def test_work_is_the_scorer():
    entry = {"answer": "x**3/3 + C", "metadata": {"integrand": "x**2", "variable": "x"}}
    job = {"name": "simple_integration", "settings": {}, "entry": entry}
    assert work({**job, "answer": "x**3/3"}) == 1.0
    assert work({**job, "answer": "x**2"}) == 0.0


def test_long_answers_cost_nothing():
    scorer, (entry, *_) = scorer_and_entries("countdown")
    verdict, _ = scorer.judge("1+" * 20_000, entry)
    assert verdict.reason == "refused: 40000 characters"
