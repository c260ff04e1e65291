"""Several reward functions as one: a weighted sum, a gate, a product. Each part is called for every row and logged.

Trainers add the functions of `reward_funcs` up by weight themselves. These are for what a sum cannot say (a gate, a
product), for sums inside them, and for evaluation and search, which take one function.

None ("no verdict") is never a zero. A weighted sum leaves such a part out of the row's sum; a gate or a product is
None where a part is missing that decides.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_rlx.verifiers.text import Completion

RewardFunction = Callable[..., Sequence[float | None]]
"""`f(prompts=..., completions=..., **columns)`, one number or None a completion."""

Scores = list[float | None]


class _Parts:
    """Named reward functions, called together and logged one by one."""

    def __init__(self, functions: Mapping[str, RewardFunction] | Sequence[RewardFunction]) -> None:
        if isinstance(functions, Mapping):
            self.functions = dict(functions)
        else:
            names = [_name(function) for function in functions]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"two parts are called {twice[0]!r}; pass a dictionary {{name: function}}")
            self.functions = dict(zip(names, functions, strict=True))
        if not self.functions:
            raise ValueError("there is nothing to combine")
        for name, function in self.functions.items():
            if not callable(function):
                raise ValueError(f"the part {name!r} is no function: {function!r}")
            if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
                raise ValueError(f"the part {name!r} is asynchronous; give such a function to the trainer directly")

    def scores(
        self, owner: str, prompts: list[Completion], completions: list[Completion], given: dict
    ) -> list[Scores]:
        """The scores of each part, in the order of the parts; logs them as `<owner>/<part>`.

        Raises:
            ValueError: a part gives another number of scores, or one that is not finite.
        """
        found = []
        for name, function in self.functions.items():
            scores = [
                None if score is None else float(score)
                for score in function(prompts=prompts, completions=completions, **given)
            ]
            if len(scores) != len(completions):
                raise ValueError(f"{owner}: {name!r} gives {len(scores)} scores for {len(completions)} completions")
            if wrong := [score for score in scores if score is not None and not math.isfinite(score)]:
                raise ValueError(f"{owner}: {name!r} gives the score {wrong[0]}; None means no verdict")
            _log(f"{owner}/{name}", scores, given)
            found.append(scores)
        return found


def _name(function: RewardFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _log(name: str, scores: Scores, given: dict[str, Any]) -> None:
    """The column of scores, and their mean where there is one."""
    if (log_extra := given.get("log_extra")) is not None:
        log_extra(name, list(scores))
    known = [score for score in scores if score is not None]
    if (log_metric := given.get("log_metric")) is not None and known:
        log_metric(name, sum(known) / len(known))


class Weighted:
    """Reward function: the sum of weight times score.

    A part that is None for a row leaves that row's sum (with `average`, its weight too); a row where all are None is
    None.

    Args:
        functions: the parts, by name, or as a sequence, named as they name themselves (`__name__`).
        weights: one for each part, in order; 1 each by default. A negative one makes a penalty of a score.
        average: divide by the sum of the weights of the parts that a row has, so that a missing part does not lower
            it. Weights must then be positive.
        name: name under which the parts are logged, as `<name>/<part>`.

    Raises:
        ValueError: no part, two of one name, one that is no plain function, or weights that do not fit.

    >>> from hf_rlx.verifiers import NumberVerifier, RegexVerifier, Weighted
    >>> parts = [NumberVerifier(), RegexVerifier("^Answer: ")]
    >>> Weighted(parts, [1.0, 0.25])(["?", "?"], ["Answer: 4", "4"], answer=[4, 4])
    [1.25, 1.0]
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFunction] | Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        *,
        average: bool = False,
        name: str = "weighted",
    ) -> None:
        self._parts = _Parts(functions)
        self.weights = [1.0] * len(self._parts.functions) if weights is None else [float(w) for w in weights]
        if len(self.weights) != len(self._parts.functions):
            raise ValueError(f"{len(self.weights)} weights for {len(self._parts.functions)} parts")
        if not all(map(math.isfinite, self.weights)) or (average and min(self.weights) <= 0):
            raise ValueError(f"weights must be finite, and positive for an average, not {self.weights}")
        self.average = average
        self.__name__ = name

    def __call__(self, prompts: list[Completion], completions: list[Completion], **columns: Any) -> Scores:
        """One score a completion, or None where no part has one.

        Args:
            prompts, completions: handed to every part.
            columns: dataset columns and what trainers pass, handed to every part.

        Raises:
            ValueError: a part gives a wrong number of scores, or one that is not finite.
        """
        parts = self._parts.scores(self.__name__, prompts, completions, columns)
        totals: Scores = []
        for row in zip(*parts, strict=True):
            known = [(w, s) for w, s in zip(self.weights, row, strict=True) if s is not None]
            scale = sum(w for w, _ in known) if self.average else 1.0
            totals.append(sum(w * s for w, s in known) / scale if known else None)
        return totals


class Gate:
    """Reward function: a reward that counts only where a condition holds, e.g. correctness behind a format.

    None of the condition is None. Where the gate is shut the reward does not matter, and may be None.

    Args:
        condition: its score must reach `threshold` for the gate to open.
        reward: what an open gate pays.
        threshold: of the condition.
        shut: what a shut gate pays.
        name: name under which the two are logged, as `<name>/<part>`.

    Raises:
        ValueError: a part is no plain function, or both have one name.

    >>> from hf_rlx.verifiers import Gate, NumberVerifier, RegexVerifier
    >>> Gate(RegexVerifier("^Answer: "), NumberVerifier())(["?", "?"], ["Answer: 4", "4"], answer=[4, 4])
    [1.0, 0.0]
    """

    def __init__(
        self,
        condition: RewardFunction,
        reward: RewardFunction,
        *,
        threshold: float = 1.0,
        shut: float = 0.0,
        name: str = "gate",
    ) -> None:
        self._parts = _Parts([condition, reward])
        self.threshold = threshold
        self.shut = shut
        self.__name__ = name

    def __call__(self, prompts: list[Completion], completions: list[Completion], **columns: Any) -> Scores:
        """One score a completion, or None where the condition is None, or the gate is open and the reward is None.

        Args:
            prompts, completions: handed to both.
            columns: dataset columns and what trainers pass, handed to both.

        Raises:
            ValueError: a part gives a wrong number of scores, or one that is not finite.
        """
        conditions, rewards = self._parts.scores(self.__name__, prompts, completions, columns)
        return [
            None if condition is None else reward if condition >= self.threshold else self.shut
            for condition, reward in zip(conditions, rewards, strict=True)
        ]


class Product:
    """Reward function: the product of scores that are 0 or more. Nothing is paid where any of them is 0.

    A zero decides whatever the others are; else a part that is None makes the row None. Negative scores are refused:
    two penalties would multiply to a reward.

    Args:
        functions: the parts, by name, or as a sequence, named as they name themselves (`__name__`).
        name: name under which the parts are logged, as `<name>/<part>`.

    Raises:
        ValueError: no part, two of one name, or one that is no plain function.

    >>> from hf_rlx.verifiers import NumberVerifier, Product, RegexVerifier
    >>> Product([NumberVerifier(), RegexVerifier("^Answer: ")])(["?", "?"], ["Answer: 4", "4"], answer=[4, 4])
    [1.0, 0.0]
    """

    def __init__(
        self, functions: Mapping[str, RewardFunction] | Sequence[RewardFunction], *, name: str = "product"
    ) -> None:
        self._parts = _Parts(functions)
        self.__name__ = name

    def __call__(self, prompts: list[Completion], completions: list[Completion], **columns: Any) -> Scores:
        """One score a completion, or None where no part is 0 and one is None.

        Args:
            prompts, completions: handed to every part.
            columns: dataset columns and what trainers pass, handed to every part.

        Raises:
            ValueError: a part gives a wrong number of scores, or one that is negative or not finite.
        """
        parts = self._parts.scores(self.__name__, prompts, completions, columns)
        for name, scores in zip(self._parts.functions, parts, strict=True):
            if negative := [score for score in scores if score is not None and score < 0]:
                raise ValueError(f"{self.__name__}: {name!r} gives {negative[0]}; a product takes scores of 0 or more")
        return [self._product(row) for row in zip(*parts, strict=True)]

    @staticmethod
    def _product(row: tuple[float | None, ...]) -> float | None:
        if 0.0 in row:
            return 0.0
        known = [score for score in row if score is not None]
        return math.prod(known) if len(known) == len(row) else None
