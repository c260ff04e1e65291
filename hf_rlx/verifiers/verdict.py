"""Three outcomes that are never mixed: right, wrong, and "we could not tell", which is our own failure.

A wrong answer, a crash and a time-out of the candidate are the candidate's: 0. A box that did not start, a worker that
died twice: nobody's, so the completion gets no reward (None) and leaves its group; too many of them end the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

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
    """

    outcome: Outcome
    reason: str = ""

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
        max_failed: share of "failed" over which the verifier counts as broken; a single one never does.
        log_extra, log_metric: what trainers pass to reward functions.

    Raises:
        VerifierBrokenError: more than `max_failed` of the verdicts are failures of the verifier's own.
    """
    failed = [v.reason for v in verdicts if v.outcome == "failed"]
    if len(failed) > max(1.0, max_failed * len(verdicts)):
        raise VerifierBrokenError(
            f"{name} could not judge {len(failed)} of {len(verdicts)} completions, e.g. {failed[0]!r}; no reward is "
            "better than a random one, so the run stops here"
        )
    if log_extra is not None:
        log_extra(f"{name}/reason", [v.reason for v in verdicts])
    if log_metric is not None:
        log_metric(f"{name}/failed", float(len(failed)))
    return [v.reward for v in verdicts]
