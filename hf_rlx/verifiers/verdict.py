"""Three outcomes that are never mixed: right, wrong, and "we could not tell", which is our own failure.

A wrong answer, a crash and a time-out of the candidate are the candidate's: 0. A box that did not start, a worker that
died twice: nobody's, so the completion gets no reward (None) and leaves its group; too many of them end the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hf_rlx.verifiers.text import Completion

Outcome = Literal["right", "wrong", "failed"]


class VerifierBrokenError(RuntimeError):
    """The verifier itself does not work: too many failures of its own, or a wrong verdict on a known case. Training
    on would reward noise, so this stops the run whatever `on_reward_error` says."""

    stops_run = True


@dataclass(frozen=True)
class Verdict:
    """One completion's outcome.

    Args:
        outcome: "right", "wrong" (the candidate's fault, time-out and crash included), "failed" (the verifier's own).
        reason: why, in a few words, for tables and cards.
        credit: partial credit, in 0..1, that graded verifiers pay in place of 0 and 1; None where there is none.
        excused: of "failed": the row is to blame or the time ran out, so it says nothing about the verifier.
    """

    outcome: Outcome
    reason: str = ""
    credit: float | None = field(default=None, compare=False)
    excused: bool = field(default=False, compare=False)

    @property
    def reward(self) -> float | None:
        """1.0, 0.0, or None for a failure of the verifier's own."""
        return {"right": 1.0, "wrong": 0.0, "failed": None}[self.outcome]


def settle(
    name: str,
    verdicts: Sequence[Verdict],
    max_failed: float = 0.25,
    log_extra: Callable[[str, list], None] | None = None,
    log_metric: Callable[[str, float], None] | None = None,
) -> list[float | None]:
    """Rewards of a batch of verdicts, with what the trainer's tables and curves should hold about them.

    Args:
        name: of the verifier; columns and metrics are called `<name>/...`.
        verdicts: one a completion.
        max_failed: share of "failed" that are not excused over which the verifier counts as broken; a single one
            never does.
        log_extra, log_metric: what trainers pass to reward functions.

    Raises:
        VerifierBrokenError: more than `max_failed` of the verdicts are failures of the verifier's own.
    """
    broken = [v.reason for v in verdicts if v.outcome == "failed" and not v.excused]
    if len(broken) > max(1.0, max_failed * len(verdicts)):
        raise VerifierBrokenError(
            f"{name} could not judge {len(broken)} of {len(verdicts)} completions, e.g. {broken[0]!r}; no reward is "
            "better than a random one, so the run stops here"
        )
    if log_extra is not None:
        log_extra(f"{name}/reason", [v.reason for v in verdicts])
    if log_metric is not None:
        log_metric(f"{name}/failed", float(sum(v.outcome == "failed" for v in verdicts)))
    return [v.reward for v in verdicts]


class JudgedRows:
    """Base of the verifiers that give a verdict on each completion; what differs is `_verdicts`.

    Attributes:
        max_failed: see `settle`.
        graded: whether partial credit is paid.
        level: of the sandbox, where there is one; logged with every reward as `<name>/level`.
    """

    __name__: str
    max_failed = 0.25
    graded = False
    level: str = ""

    def __call__(
        self,
        prompts: Sequence[Completion],
        completions: Sequence[Completion],
        log_extra: Callable[[str, list], None] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """One reward a completion: 1.0, 0.0 (or partial credit where that is asked for), or None without a verdict.

        Args:
            prompts: not read; part of the reward-function contract.
            completions: plain strings, or message lists whose last assistant message is judged.
            log_extra: gets the column `<name>/reason`, and `<name>/level` where there is a sandbox.
            log_metric: gets `<name>/failed`, completions without a verdict, and what else the class says.
            columns: dataset columns, one value per completion; which are read stands at the class.

        Raises:
            ValueError: a column that is read is missing or of another length.
            VerifierBrokenError: more than `max_failed` of the completions have no verdict for a reason of our own.
        """
        verdicts = self._verdicts(completions, columns)
        if log_extra is not None and self.level:
            log_extra(f"{self.__name__}/level", [self.level] * len(verdicts))
        if log_metric is not None:
            for metric, value in self._more_metrics(verdicts).items():
                log_metric(f"{self.__name__}/{metric}", value)
        rewards = settle(self.__name__, verdicts, self.max_failed, log_extra, log_metric)
        if not self.graded:
            return rewards
        return [r if r is None or v.credit is None else v.credit for r, v in zip(rewards, verdicts, strict=True)]

    def _verdicts(self, completions: Sequence[Completion], columns: dict[str, Any]) -> list[Verdict]:
        """One verdict a completion."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it judges")

    def _more_metrics(self, verdicts: list[Verdict]) -> dict[str, float]:
        """What is logged beside the number of failures."""
        return {}
