"""Whether what is meant falls while the reward that is trained on rises: the policy earns it in another way (reward
over-optimisation, Gao et al. 2022, 2210.10760).

| watched | fell where |
|---|---|
| reward functions of weight 0, in training | the second half of the logs is below the first, beyond their scatter |
| the same, on held-out prompts | the 95 % interval is below that of the best evaluation before |
| the held-out reward itself | the same |

Two stretches of training logs are compared, all of them and the later half, so that a fall after a long rise counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

FEWEST = 10  # training logs of a stretch
MOST = 40  # that are kept: beyond it two neighbours become one
BEYOND = 4.0  # standard errors between the halves
SMALLEST = 0.05  # share of its size that a reward must have fallen by
_ADVICE = (
    "the policy earns its reward in a way that may not be meant. Read the completions of the highest reward "
    "(log_completions=True), mend the reward function or give `{name}` a weight, hold the policy nearer (a "
    "larger beta), and go back to an earlier checkpoint"
)
_HELD_OUT = (
    "what is learned does not hold on other prompts. Read the completions of the highest reward "
    "(log_completions=True), hold the policy nearer (a larger beta), take more prompts, and go back to an earlier "
    "checkpoint"
)


class Fall(NamedTuple):
    """name: of the alert, one for each reward that is watched. text: what happened and what to do."""

    name: str
    text: str


class HackingWatch:
    """Keeps the course of the trained reward and of those that are watched. The state is plain JSON values."""

    def __init__(self) -> None:
        self._training: dict[str, list[list[float]]] = {}  # name -> [trained reward, watched one] of each log
        self._suspected: dict[str, int] = {}  # name -> training logs in a row that show a fall
        self._held_out: dict[str, list[list[float | None]]] = {}  # -> [step, value, half interval, trained reward]
        self._stretch: list[float] = []  # trained rewards since the last evaluation
        self._evaluated: list[float | None] = [None, None]  # its step, and the mean of the stretch before it

    def training(self, logs: dict[str, Any], watched: Sequence[str]) -> list[Fall]:
        """Take in one training log.

        Args:
            logs: with `reward` and `rewards/<name>/mean`. watched: names of the functions of weight 0.
        """
        reward = _finite(logs.get("reward"))
        if reward is None:
            return []
        self._stretch.append(reward)
        for evaluated in self._held_out.values():  # before the first step nothing was rewarded yet
            evaluated[-1][3] = reward if evaluated[-1][3] is None else evaluated[-1][3]
        found = []
        for name in watched:
            value = _finite(logs.get(f"rewards/{name}/mean"))
            if value is None:
                continue
            course = self._training.setdefault(name, [])
            course.append([reward, value])
            fall = _fall(course) or _fall(course[len(course) // 2 :])
            if len(course) >= MOST:  # an even number
                course[:] = [
                    [(a + b) / 2 for a, b in zip(*two, strict=True)]
                    for two in zip(course[::2], course[1::2], strict=True)
                ]
            self._suspected[name] = self._suspected.get(name, 0) + 1 if fall else 0
            if fall and self._suspected[name] >= 2:
                text = (
                    f"`{name}`, which has no weight, fell from {fall[2]:.4g} to {fall[3]:.4g} while the reward rose "
                    f"from {fall[0]:.4g} to {fall[1]:.4g} (means of halves of the logs): {_ADVICE.format(name=name)}"
                )
                found.append(Fall(f"reward hacking: `{name}` fell while the reward rose", text))
        return found

    def evaluation(self, logs: dict[str, Any], step: int, watched: Sequence[str]) -> list[Fall]:
        """Take in the log of an evaluation: `<prefix>_reward` with its `_low`, `_high` and `_n`, and
        `<prefix>_rewards/<name>/mean`. Every function's is kept: before the first rollout nobody knows their weights.
        """
        # Not of `<prefix>_accuracy/<name>`, whose function may be called `format_reward`.
        prefixes = [k.removesuffix("_reward_n") for k in logs if k.endswith("_reward_n") and "/" not in k]
        if not prefixes:
            return []
        if self._evaluated[0] != step:  # several held-out sets are logged one after the other
            self._evaluated = [float(step), sum(self._stretch) / len(self._stretch) if self._stretch else None]
            self._stretch = []
        trained = self._evaluated[1]
        found = []
        for prefix in prefixes:
            starts = f"{prefix}_rewards/"
            means = (key for key in logs if key.startswith(starts) and key.endswith("/mean"))
            for name in (None, *(key.removeprefix(starts).removesuffix("/mean") for key in means)):
                measured = _measured(logs, prefix, name)
                if measured is None:
                    continue
                evaluated = self._held_out.setdefault(f"{prefix}/{name or ''}", [])
                fall = _fell_behind(evaluated, measured, trained)
                evaluated.append([float(step), *measured, trained])
                if fall is None or (name is not None and name not in watched):
                    continue
                what = f"the held-out reward ({prefix})" if name is None else f"`{name}` on held-out rows ({prefix})"
                text = (
                    f"{what} fell from {fall[1]:.4g} (step {fall[0]:.0f}) to {measured[0]:.4g} while the reward in "
                    f"training rose from {fall[3]:.4g} to {trained:.4g}: "
                    f"{_HELD_OUT if name is None else _ADVICE.format(name=name)}"
                )
                found.append(Fall(f"reward hacking: {what} fell while the reward in training rose", text))
        return found

    def state_dict(self) -> dict[str, Any]:
        """JSON values, for `load_state_dict`."""
        return {
            "training": {name: [list(pair) for pair in course] for name, course in self._training.items()},
            "suspected": dict(self._suspected),
            "held_out": {name: [list(entry) for entry in course] for name, course in self._held_out.items()},
            "stretch": list(self._stretch),
            "evaluated": list(self._evaluated),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self._training = {name: [list(pair) for pair in course] for name, course in state["training"].items()}
        self._suspected, self._stretch = dict(state["suspected"]), list(state["stretch"])
        self._held_out = {name: [list(entry) for entry in course] for name, course in state["held_out"].items()}
        self._evaluated = list(state.get("evaluated", [None, None]))


def _fall(course: Sequence[Sequence[float]]) -> tuple[float, float, float, float] | None:
    """Means of the halves, (trained, trained later, watched, watched later), where the first rose and the other fell
    by more than the scatter of the logs explains; else None."""
    if len(course) < FEWEST:
        return None
    half = len(course) // 2
    rewards, watched = zip(*course, strict=True)
    rise, fall = _change(rewards[:half], rewards[-half:]), _change(watched[:half], watched[-half:])
    before, after = sum(watched[:half]) / half, sum(watched[-half:]) / half
    if rise < BEYOND or fall > -BEYOND or before - after < SMALLEST * max(abs(before), abs(after)):
        return None
    return sum(rewards[:half]) / half, sum(rewards[-half:]) / half, before, after


def _change(first: Sequence[float], last: Sequence[float]) -> float:
    """Difference of the means over its standard error; infinite where neither scatters and they differ."""
    means = [sum(values) / len(values) for values in (first, last)]
    pairs = zip((first, last), means, strict=True)
    spread = [sum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values) for values, mean in pairs]
    error = math.sqrt(sum(spread))
    difference = means[1] - means[0]
    return difference / error if error > 0 else math.copysign(math.inf, difference) if difference else 0.0


def _measured(logs: dict[str, Any], prefix: str, name: str | None) -> tuple[float, float] | None:
    """Value and half of its 95 % interval of the total (None) or of one function; of the latter, where no interval is
    logged, by its standard deviation and the number of prompts."""
    key = f"{prefix}_reward" if name is None else f"{prefix}_rewards/{name}/mean"
    value, low, high = (_finite(logs.get(key + end)) for end in ("", "_low", "_high"))
    if value is None or (name is None and (low is None or high is None)):
        return None
    if low is not None and high is not None:
        return value, (high - low) / 2
    spread, count = _finite(logs.get(f"{prefix}_rewards/{name}/std")), _finite(logs.get(f"{prefix}_reward_n"))
    return None if spread is None or not count else (value, 1.96 * spread / math.sqrt(count))


def _fell_behind(
    course: Sequence[Sequence[float | None]], measured: tuple[float, float], trained: float | None
) -> tuple[float, float, float, float] | None:
    """The best evaluation before, where the intervals lie apart and the trained reward was lower then."""
    earlier = [entry for entry in course if entry[3] is not None]
    if not earlier or trained is None:
        return None
    best: Any = max(earlier, key=lambda entry: entry[1] or 0.0)
    apart = best[1] - best[2] > measured[0] + measured[1]
    return tuple(best) if apart and trained > best[3] else None


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


__all__ = ["Fall", "HackingWatch"]
