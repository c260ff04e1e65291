"""One readable line a log in the console. Trackers and `log_history` get every metric."""

from __future__ import annotations

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
    ("grad_norm", "grad {:.2f}"),
    ("step_time", "{:.1f} s a step"),
)


def one_line(logs: dict[str, Any], step: int) -> str | None:
    """The metrics that a person follows, of one log; None for a log without any of them."""
    prefix = next((k.removesuffix("_reward") for k in logs if k.endswith("_reward")), None)
    if prefix is not None:
        parts = [f"{prefix}: reward {logs[f'{prefix}_reward']:.3f}"]
        start = f"{prefix}_accuracy/"
        for name in [k.removeprefix(start) for k in logs if k.startswith(start) and f"{k}_low" in logs]:
            low, high, n = (logs[f"{start}{name}_{end}"] for end in ("low", "high", "n"))
            parts.append(f"{name} {logs[start + name]:.3f} ({low:.3f} to {high:.3f}, n={n:.0f})")
    else:
        parts = [text.format(logs[key]) for key, text in _TRAIN if isinstance(logs.get(key), int | float)]
        if "loss" not in logs and "reward" not in logs:
            return f"finished in {logs['train_runtime']:.0f} s" if "train_runtime" in logs else None
    return f"step {step:>4}  " + "  ".join(parts)


class OneLineProgress(ProgressCallback):
    """The Trainer's progress bar, with one short line a log in place of the whole dictionary."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Called by the Trainer."""
        line = one_line(logs or {}, state.global_step)
        if state.is_world_process_zero and line is not None:
            tqdm.write(line)


class OneLinePrinter(PrinterCallback):
    """The same lines without a bar."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Called by the Trainer."""
        line = one_line(logs or {}, state.global_step)
        if state.is_world_process_zero and line is not None:
            print(line)


def use_one_line(trainer: Trainer) -> None:
    """Put the one-line callbacks where the Trainer has its plain ones; a notebook's table is left alone."""
    for plain, ours in ((ProgressCallback, OneLineProgress), (PrinterCallback, OneLinePrinter)):
        if trainer.pop_callback(plain) is not None:
            trainer.add_callback(ours)
