"""One readable line a log in the console. Trackers and `log_history` get every metric."""

from __future__ import annotations

import time
from typing import Any

from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer

_TRAIN = (
    ("reward", "reward {:.3f}"),
    ("kl", "kl {:.4f}"),
    ("entropy", "entropy {:.2f}"),
    ("completions/mean_length", "length {:.1f}"),
    ("completions/clipped_ratio", "cut {:.0%}"),
    ("frac_reward_zero_std", "no signal {:.0%}"),
    ("loss", "loss {:.4f}"),
    ("rewards/accuracies", "accuracy {:.2f}"),
    ("accuracy", "accuracy {:.2f}"),
    ("rewards/margins", "margin {:.3f}"),
    ("margin", "margin {:.3f}"),
    ("grad_norm", "grad {:.2f}"),
    ("step_time", "{:.1f} s a step"),
)


# Held-out rows of trainers on given answers; a policy's and a reward model's metrics have different names.
_HELD_OUT = (
    ("loss", "loss {:.4f}"),
    ("rewards/accuracies", "accuracy {:.3f}"),
    ("accuracy", "accuracy {:.3f}"),
    ("rewards/margins", "margin {:.3f}"),
    ("margin", "margin {:.3f}"),
)


def one_line(logs: dict[str, Any], step: int, how: str = "", left: str = "") -> str | None:
    """The metrics that a person follows, of one log; None for a log without any of them.

    Args:
        logs: by name. step: that they are of.
        how: how the answers of an evaluation came about, such as "greedy answers".
        left: the time until the end, in words.
    """
    if "train_runtime" in logs:
        return f"finished in {logs['train_runtime']:.0f} s"
    if "loss" in logs or "reward" in logs:
        parts = _shown(logs, _TRAIN)
        if (means := _each_reward(logs)) and "reward" in logs:
            parts[0] += f" ({means})"
        return f"step {step:>4}  " + "  ".join([*parts, *([left] if left else [])])
    prefix = _prefix(logs, "_loss")
    if prefix is not None:
        held_out = {key.removeprefix(f"{prefix}_"): value for key, value in logs.items()}
        return f"step {step:>4}  {prefix}: " + "  ".join(_shown(held_out, _HELD_OUT))
    prefix = _prefix(logs, "_reward")
    if prefix is None:
        return None
    parts = [f"{prefix}: reward {logs[f'{prefix}_reward']:.3f}"]
    start = f"{prefix}_accuracy/"
    for name in [k.removeprefix(start) for k in logs if k.startswith(start) and f"{k}_low" in logs]:
        low, high, n = (logs[f"{start}{name}_{end}"] for end in ("low", "high", "n"))
        parts.append(f"{name} {logs[start + name]:.3f} ({low:.3f} to {high:.3f}, n={n:.0f})")
    if len(parts) == 1 and f"{prefix}_reward_low" in logs:  # no verdicts: the mean's own interval
        low, high, n = (logs[f"{prefix}_reward_{end}"] for end in ("low", "high", "n"))
        parts[0] += f" ({low:.3f} to {high:.3f}, n={n:.0f})"
    return f"step {step:>4}  " + "  ".join([*parts, *([how] if how else [])])


def _prefix(logs: dict[str, Any], ending: str) -> str | None:
    """Of an evaluation; a function's own metrics have its name behind a slash, whatever that ends in."""
    return next((key.removesuffix(ending) for key in logs if key.endswith(ending) and "/" not in key), None)


def _each_reward(logs: dict[str, Any]) -> str:
    """The mean of each reward function where there are several, weight 0 or not."""
    start, end = "rewards/", "/mean"
    names = [key.removeprefix(start).removesuffix(end) for key in logs if key.startswith(start) and key.endswith(end)]
    return ", ".join(f"{name} {logs[start + name + end]:.3f}" for name in names) if len(names) > 1 else ""


def _shown(logs: dict[str, Any], table: tuple[tuple[str, str], ...]) -> list[str]:
    """The metrics of a table that are there, each with its interval where it has one."""
    parts = []
    for key, text in table:
        if isinstance(logs.get(key), int | float):
            low, high = logs.get(f"{key}_low"), logs.get(f"{key}_high")
            parts.append(text.format(logs[key]) + ("" if low is None else f" ({low:.3f} to {high:.3f})"))
    return parts


def how_sampled(args: Any) -> str:
    """How an evaluation of a trainer that samples draws its answers, in words; nothing for other trainers."""
    return in_words(eval_temperature(args)) if hasattr(args, "eval_temperature") else ""


def eval_temperature(args: Any) -> float:
    """At which held-out prompts are answered, of a configuration that samples: that of training where each has several
    answers, else 0, the most probable one."""
    if args.eval_temperature is not None:
        return float(args.eval_temperature)
    return 0.0 if (args.num_generations_eval or 1) == 1 else float(args.temperature)


def in_words(temperature: float) -> str:
    """A sampling temperature, for a line of the console."""
    return f"sampled at temperature {temperature:g}" if temperature else "greedy answers"


class TimeLeft:
    """The time until a run's end, by its speed since it began. `begin` is called before each step."""

    def __init__(self) -> None:
        self._begun: tuple[float, int] | None = None

    def begin(self, step: int, first: bool = False) -> None:
        """Remember when a run began. `step`: that it has done. `first`: forget an earlier run."""
        if first:
            self._begun = None
        elif self._begun is None:
            self._begun = time.perf_counter(), step

    def words(self, step: int, steps: int) -> str:
        """Such as `3 min left`; nothing before the first step and after the last.

        Args:
            step: done. steps: of the whole run.
        """
        if self._begun is None or step <= self._begun[1] or step >= steps:
            return ""
        start, first = self._begun
        seconds = (time.perf_counter() - start) / (step - first) * (steps - step)
        if seconds < 90:
            return f"{seconds:.0f} s left"
        return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"


def going_on(state: Any) -> str | None:
    """The line of a run that does not begin anew, where this process is the one that prints; else None.

    Args:
        state: a `TrainerState`, as training begins.
    """
    if not state.is_world_process_zero or not 0 < state.global_step < state.max_steps:
        return None
    return f"going on after step {state.global_step} of {state.max_steps}"


def _line(left: TimeLeft, args: Any, state: Any, logs: dict[str, Any] | None) -> str | None:
    """The line of a log, where this process is the one that prints."""
    if not state.is_world_process_zero:
        return None
    return one_line(logs or {}, state.global_step, how_sampled(args), left.words(state.global_step, state.max_steps))


class OneLineProgress(ProgressCallback):
    """The Trainer's progress bar, with one short line a log in place of the whole dictionary."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.left = TimeLeft()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer."""
        super().on_train_begin(args, state, control, **kwargs)
        self.left.begin(state.global_step, first=True)
        if (line := going_on(state)) is not None:
            tqdm.write(line)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer."""
        self.left.begin(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Called by the Trainer."""
        line = _line(self.left, args, state, logs)
        if line is not None:
            tqdm.write(line)


class OneLinePrinter(PrinterCallback):
    """The same lines without a bar."""

    def __init__(self) -> None:
        super().__init__()
        self.left = TimeLeft()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer."""
        self.left.begin(state.global_step, first=True)
        if (line := going_on(state)) is not None:
            print(line, flush=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer."""
        self.left.begin(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Called by the Trainer."""
        line = _line(self.left, args, state, logs)
        if line is not None:
            print(line, flush=True)  # a file is written block by block otherwise


def use_one_line(trainer: Trainer) -> None:
    """Put the one-line callbacks where the Trainer has its plain ones; a notebook's table is left alone."""
    for plain, ours in ((ProgressCallback, OneLineProgress), (PrinterCallback, OneLinePrinter)):
        if trainer.pop_callback(plain) is not None:
            trainer.add_callback(ours)
