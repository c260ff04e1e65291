"""Scorers of reasoning-gym, kept from what a model can write.

The package's scorers trust the answer. Measured with version 0.1.25: nine of them evaluate it as Python (`eval`, or
SymPy's `parse_expr`, which is `eval`), so an answer can run any code or, as `9**9**9**9`, stop the process for good;
three raise on answers that are merely odd; and four pay answers that are wrong: `puzzle24` takes any numbers that
make 24, `game_of_life_halting` any text, `coin_flip` 0 for a small probability, `complex_arithmetic` "nan". So:

- expressions (`countdown`, `puzzle24`) are judged by `hf_rlx.verifiers.countdown`, exactly;
- formulas (integrals, polynomials) may hold elementary functions only, and are scored in a process that is killed at
  its limit; an integral sign is no answer to an integral;
- where a scorer accepts Python lists, they are read as literals;
- `nan` and `inf` are no answers;
- an answer that makes a scorer raise is wrong, unless the task's own answer does so too.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import threading
from fractions import Fraction
from typing import Any

from hf_rlx.verifiers.countdown import CountdownVerifier, ExpressionError, parse_expression
from hf_rlx.verifiers.numbers import parse_number
from hf_rlx.verifiers.verdict import Verdict
from hf_rlx.verifiers.workers import WorkerPool

MAX_LENGTH = 20_000
"""Characters of an answer; a longer one is wrong."""

FORMULAS = frozenset({"simple_integration", "intermediate_integration", "polynomial_multiplication"})
"""Tasks whose scorer hands the answer to SymPy."""

LITERALS = frozenset({"binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion"})
"""Tasks whose scorer evaluates the answer as a Python literal."""

OWN = frozenset({"countdown", "puzzle24", "game_of_life_halting", "coin_flip"})
"""Tasks whose right answers are told from wrong ones here."""

_LIMIT = 3.0  # seconds for a formula
_MAX_FORMULA = 1000
_FUNCTIONS = "sin|cos|tan|sec|csc|cot|sinh|cosh|tanh|asin|acos|atan|exp|log|ln|sqrt|Abs"
# A letter is a variable, and never called; a number is not called either, nor indexed, nor asked for an attribute.
_FORMULA = re.compile(
    rf"(?:(?:{_FUNCTIONS})\(|(?:pi|[A-Za-z])(?![A-Za-z0-9_(.])|[0-9]+(?:\.[0-9]+)?(?![\w(.])|[-+*/^() ])*"
)
# Powers that SymPy would work on until its limit: one on top of another, or of four digits.
_HUGE = re.compile(r"(?:\*\*|\^)[ (]*(?:-?[0-9]{4}|[\w.]+[ )]*(?:\*\*|\^))")
_NOT_FINITE = re.compile(r"(?<![a-z])(?:nan|inf|infinity)j?(?![a-z])", re.IGNORECASE)
_EVALUATES = re.compile(r"(?<![\w.])(?:eval|exec|compile|__import__)\(|\b(?:parse_expr|sympify)\(")


class GymScorer:
    """Scores answers to one task of reasoning-gym.

    Args:
        name: of the task.
        settings: its configuration.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: the name is unknown, or its scorer evaluates answers in a way that is not known here.
    """

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.name = name
        self.settings = settings
        self.dataset = _dataset(name, settings)
        source = inspect.getsource(type(self.dataset).score_answer)
        if _EVALUATES.search(source) and name not in FORMULAS | LITERALS | OWN:
            raise ValueError(f"the scorer of {name!r} evaluates answers as code, so a model could run any")

    def judge(self, answer: str, entry: dict[str, Any]) -> tuple[Verdict, float]:
        """The verdict on an answer, and the package's own score, in 0..1: 1.0 exactly where it is right.

        Args:
            answer: taken from a completion, without the words around it.
            entry: of the dataset, as reasoning-gym made it.

        Raises:
            WorkersBrokenError: the process for formulas cannot start.
        """
        if len(answer) > MAX_LENGTH:
            return Verdict("wrong", f"refused: {len(answer)} characters"), 0.0
        if _NOT_FINITE.search(answer) and not _NOT_FINITE.search(str(entry["answer"])):
            return Verdict("wrong", "refused: not a finite number"), 0.0
        if self.name in OWN:
            verdict = _OWN[self.name](answer, entry)
            if verdict.outcome == "right":
                return verdict, 1.0
            return verdict, self._partial(answer, entry)
        if self.name in FORMULAS:
            return self._formula(answer, entry)
        try:
            score = float(self.dataset.score_answer(answer=answer, entry=entry))
        except Exception as error:
            return self._raised(error, entry), 0.0
        return _by_score(score), score

    def _raised(self, error: Exception, entry: dict[str, Any]) -> Verdict:
        """Whose fault it is: nobody's answer gets a score where the task's own does not."""
        told = f"the scorer raised {type(error).__name__}: {str(error)[:80]}"
        try:
            self.dataset.score_answer(answer=entry["answer"], entry=entry)
        except Exception:
            return Verdict("failed", told)
        return Verdict("wrong", told)

    def _partial(self, answer: str, entry: dict[str, Any]) -> float:
        """The package's partial credit for an expression that is wrong; 0 where reading it could do harm."""
        if self.name not in ("countdown", "puzzle24"):
            return 0.0
        try:
            parse_expression(answer, signs=True)
        except ExpressionError:
            answer = "x"  # no expression either, and harmless
        score = float(self.dataset.score_answer(answer=answer, entry=entry))
        return score if score < 1.0 else 0.0

    def _formula(self, answer: str, entry: dict[str, Any]) -> tuple[Verdict, float]:
        answer = answer.strip().strip("$").strip()
        if len(answer) > _MAX_FORMULA or _HUGE.search(answer) or not _FORMULA.fullmatch(answer):
            return Verdict("wrong", "refused: no formula of elementary functions, or too large"), 0.0
        job = {"name": self.name, "settings": self.settings, "answer": answer, "entry": entry}
        outcome = _pool().run(job, _LIMIT)
        if outcome.lost == "broken" or (outcome.lost == "late" and outcome.cpu < 0.2 * _LIMIT):
            return Verdict("failed", f"the scorer's process was lost ({outcome.how})"), 0.0
        if outcome.lost:
            return Verdict("wrong", f"the scorer did not end ({outcome.how})"), 0.0
        return _by_score(outcome.value), outcome.value


def _by_score(score: float) -> Verdict:
    return Verdict("right", "score 1") if score == 1.0 else Verdict("wrong", f"score {score:.3g}")


def _dataset(name: str, settings: dict[str, Any]) -> Any:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(name, **settings)
    if name in LITERALS:  # the name in the scorer's module hides the builtin
        sys.modules[type(dataset).__module__].eval = ast.literal_eval  # type: ignore[attr-defined]
    return dataset


def _expression(answer: str, entry: dict[str, Any], target: int | None = None) -> Verdict:
    metadata = entry["metadata"]
    wanted = metadata["target"] if target is None else target
    return CountdownVerifier(signs=True).judge(answer, metadata["numbers"], wanted)


def _text(answer: str, entry: dict[str, Any]) -> Verdict:
    same = answer.strip().casefold() == str(entry["answer"]).casefold()
    return Verdict("right", "the answer") if same else Verdict("wrong", "another answer")


def _probability(answer: str, entry: dict[str, Any]) -> Verdict:
    """Exact, or rounded to three digits or more."""
    rational = entry["metadata"]["rational"]
    true, said = Fraction(rational["numerator"], rational["denominator"]), parse_number(answer)
    if said is None:
        return Verdict("wrong", "no number")
    return Verdict("right", "equal") if abs(said - true) <= true / 1000 else Verdict("wrong", "another number")


_OWN: dict[str, Any] = {
    "countdown": _expression,
    "puzzle24": functools.partial(_expression, target=24),
    "game_of_life_halting": _text,
    "coin_flip": _probability,
}

_GUARD = threading.Lock()
_POOL: list[WorkerPool] = []


def _pool() -> WorkerPool:
    with _GUARD:
        if not _POOL:
            _POOL.append(WorkerPool(f"{__name__}:work", f"{__name__}:warm"))
        return _POOL[0]


def warm() -> None:
    """What every job needs."""
    for name in FORMULAS:
        _dataset(name, {})


def work(job: dict[str, Any]) -> float:
    """The score of one formula; runs in a worker process. 0 for one that makes the scorer raise."""
    return float(_dataset(job["name"], job["settings"]).score_answer(answer=job["answer"], entry=job["entry"]))
