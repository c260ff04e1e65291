"""What the log of a run says: the held-out table, how metrics began and ended, and the curve to draw.

Everything goes by the names of the metrics, not by the trainer: a trainer that logs under the names of another one has
the same card. `log_history` is that of `transformers.TrainerState`: one dictionary a log, with its `step`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from hf_rlx.cards.facts import Course, Measure, Score

Log = dict[str, Any]
LONGEST_CURVE = 1000  # training logs that are kept of a curve


class _Line(NamedTuple):
    """metric: its name in the log, behind the prefix. name: for people. hub: the Hub's name of it."""

    metric: str
    name: str
    hub: str | None = None


# Names that start a held-out table: a share of right answers, with `_low` and `_high`.
_SCORES = (
    _Line("accuracy", "pairwise accuracy", "accuracy"),  # of a reward model
    _Line("rewards/accuracies", "accuracy of the implicit reward", "accuracy"),  # of DPO and its relatives
)
_HELD_OUT = (
    _Line("reward", "mean reward", "reward"),
    _Line("accuracy_majority", "accuracy of always saying the more frequent label"),
    _Line("accuracy_good", "accuracy on good steps"),
    _Line("accuracy_bad", "accuracy on bad steps"),
    _Line("perplexity", "perplexity", "perplexity"),
    _Line("loss", "loss, nats"),
    _Line("margin", "margin of the scores"),
    _Line("first_error_f1", "F1 of finding the first wrong step"),
    _Line("auc_min", "AUC of solutions by their worst step"),
    _Line("ece", "expected calibration error"),
    _Line("temperature", "temperature, fitted"),
    _Line("ece_tempered", "calibration error with that temperature, cross-fitted"),
    _Line("length_pearson", "correlation of score and length"),
    _Line("length_pearson_within", "correlation of score and length within a prompt"),
    _Line("accuracy_chosen_shorter", "accuracy where the better answer is the shorter"),
    _Line("rewards/margins", "margin of the implicit rewards"),
    _Line("logps/chosen", "log-prob of chosen answers, nats"),
    _Line("logps/rejected", "log-prob of rejected answers, nats"),
    _Line("logps/chosen_change", "change of the log-prob of chosen answers, nats"),
    _Line("logps/rejected_change", "change of the log-prob of rejected answers, nats"),
    _Line("kl/chosen", "KL to the reference on chosen answers, nats a token"),
    _Line("completions/mean_length", "mean length, tokens"),
    _Line("completions/clipped_ratio", "share cut at the limit"),
)
_COURSE = (
    _Line("reward", "reward"),
    _Line("kl", "KL to the reference, nats a token"),
    _Line("completions/mean_length", "length, tokens"),
    _Line("completions/clipped_ratio", "share cut at the limit"),
    _Line("frac_reward_zero_std", "share of groups without a signal"),
    _Line("entropy", "entropy, nats a token"),
    _Line("value/explained_variance", "explained variance of the critic"),
    _Line("accuracy", "accuracy"),
    _Line("margin", "margin of the scores"),
    _Line("rewards/accuracies", "accuracy of the implicit reward"),
    _Line("rewards/margins", "margin of the implicit rewards"),
    _Line("logps/chosen", "log-prob of chosen answers, nats"),
    _Line("logps/rejected", "log-prob of rejected answers, nats"),
    _Line("kl/chosen", "KL to the reference on chosen answers, nats a token"),
    _Line("lengths/chosen", "length of chosen answers, tokens"),
    _Line("lengths/rejected", "length of rejected answers, tokens"),
    _Line("loss", "loss"),
)
# Metric of a log -> column of the curve.
_TRAINING = {
    "reward": "reward",
    "kl": "kl",
    "completions/mean_length": "length",
    "rewards/margins": "margin",
    "margin": "margin",
    "logps/chosen": "chosen",
    "logps/rejected": "rejected",
    "value/explained_variance": "explained_variance",
    "rewards/accuracies": "train_accuracy",
    "accuracy": "train_accuracy",
    "loss": "loss",
}
_EVALUATION = {"reward": "eval_reward", "loss": "eval_loss"}


class HeldOut(NamedTuple):
    """The first lines of the table are scores with intervals. step: after which `after` was measured; None: no
    evaluation."""

    scores: list[Measure]
    measures: list[Measure]
    step: int | None


def held_out(
    log_history: Sequence[Log],
    rewards: Sequence[str] = (),
    dataset: str | None = None,
    best_step: int | None = None,
    verdicts: Collection[str] | None = None,
) -> HeldOut:
    """Before and after training, of one held-out set.

    Args:
        log_history: see above. rewards: names of the reward functions.
        dataset: name of the set, where the run has several.
        best_step: the step whose weights the run ends with; None: the last.
        verdicts: those of `rewards` that say right or wrong, whose mean is an accuracy; a graded one may happen to
            give 0 and 1 only, and is logged as an accuracy then. None: all that are logged so.

    Returns:
        `before` is taken of an evaluation at step 0 only: without one it is not known.
    """
    prefix = f"eval_{dataset}_" if dataset else "eval_"
    logs = [log for log in log_history if any(key.startswith(prefix) for key in log) and "step" in log]
    if best_step is not None:
        logs = [log for log in logs if log["step"] in (0, best_step)]
    first = _joined(log for log in logs if log["step"] == 0)
    last_step = max((log["step"] for log in logs), default=None)
    if not last_step:  # nothing was measured after a step
        last_step = None
    last = _joined(log for log in logs if log["step"] == last_step)
    over_steps = f"{prefix}n_steps" in {**first, **last}
    ours = [_Line("accuracy", "accuracy over steps", "accuracy")] if over_steps else _SCORES
    judges = _judges(rewards, verdicts)
    lines = [_Line(f"accuracy/{name}", f"accuracy by `{name}`", "accuracy") for name in judges]
    scores = [m for line in (*lines, *ours) if (m := _measure(line, prefix, first, last, dataset))]
    scores = [m for m in scores if (m.after_interval or m.before_interval) is not None]
    # Of a single reward of 0 and 1 the mean is the accuracy.
    total = _HELD_OUT[0] if len(rewards) < 2 else _HELD_OUT[0]._replace(name="mean total reward")
    mean = [] if scores and len(rewards) == 1 else [total]
    judged = {measure.name for measure in scores}  # of these the mean is the accuracy, too
    others = [name for name in rewards if len(rewards) > 1 and f"accuracy by `{name}`" not in judged]
    means = [_Line(f"rewards/{name}/mean", f"mean of `{name}`") for name in others]
    found = [_measure(line, prefix, first, last, dataset) for line in (*mean, *means, *_HELD_OUT[1:])]
    return HeldOut(scores, [measure for measure in found if measure is not None], last_step)


def score_pair(measure: Measure) -> tuple[Score | None, Score | None]:
    """A line with intervals as scores before and after."""
    n = measure.n or 0
    ends = ((measure.before, measure.before_interval), (measure.after, measure.after_interval))
    before, after = (None if v is None or i is None or not n else Score(v, n, *i) for v, i in ends)
    return before, after


def course(log_history: Sequence[Log]) -> list[Course]:
    """First and last finite value of what a reader of curves looks at, over the training logs."""
    logs = [log for log in log_history if _is_training(log)]
    found = []
    for line in _COURSE:
        points = [(int(log["step"]), value) for log in logs if (value := _number(log.get(line.metric))) is not None]
        if points:
            found.append(Course(line.name, points[0][1], points[0][0], points[-1][1], points[-1][0]))
    return found


def curve(
    log_history: Sequence[Log],
    rewards: Sequence[str] = (),
    dataset: str | None = None,
    verdicts: Collection[str] | None = None,
) -> list[Log]:
    """One row a step with the columns of `plots.plot_run`; of a long run about a thousand training logs.

    Args:
        log_history, rewards, dataset, verdicts: see `held_out`; the accuracy is that of the first reward function
            that has one.
    """
    prefix = f"eval_{dataset}_" if dataset else "eval_"
    candidates = [*(f"accuracy/{name}" for name in _judges(rewards, verdicts)), *(line.metric for line in _SCORES)]
    score = next((name for name in candidates if any(f"{prefix}{name}_low" in log for log in log_history)), None)
    columns = {f"{prefix}{metric}": column for metric, column in _EVALUATION.items()}
    if score is not None:
        columns |= {f"{prefix}{score}": "accuracy", f"{prefix}{score}_low": "low", f"{prefix}{score}_high": "high"}
    every = max(1, math.ceil(sum(map(_is_training, log_history)) / LONGEST_CURVE))
    rows: dict[int, Log] = {}
    seen = 0
    for log in log_history:
        wanted = dict(columns)
        if _is_training(log):
            seen += 1
            wanted = _TRAINING if seen % every == 0 or seen == 1 else {}
        found = {column: value for name, column in wanted.items() if (value := _number(log.get(name))) is not None}
        if found and "step" in log:
            rows.setdefault(int(log["step"]), {"step": float(log["step"])}).update(found)
    return [rows[step] for step in sorted(rows)]


def seconds(log_history: Sequence[Log]) -> float | None:
    """Wall-clock seconds of the training, where it has ended."""
    return next((_number(log["train_runtime"]) for log in reversed(log_history) if "train_runtime" in log), None)


def _judges(rewards: Sequence[str], verdicts: Collection[str] | None) -> list[str]:
    return [name for name in rewards if verdicts is None or name in verdicts]


def _measure(line: _Line, prefix: str, first: Log, last: Log, dataset: str | None) -> Measure | None:
    name = f"{prefix}{line.metric}"
    before, after = _number(first.get(name)), _number(last.get(name))
    if before is None and after is None:
        return None
    intervals = []
    # The mean of a reward of 0 and 1 has the interval of its accuracy.
    accuracy = name.replace("rewards/", "accuracy/").removesuffix("/mean") if name.endswith("/mean") else name
    for log in (first, last):
        known = accuracy if f"{accuracy}_low" in log else name
        ends = [_number(log.get(f"{known}_{end}")) for end in ("low", "high")]
        intervals.append((ends[0], ends[1]) if None not in ends else None)
    source = last if after is not None else first
    counts = (f"{accuracy}_n", f"{name}_n", f"{prefix}n_pairs", f"{prefix}n_steps")
    count = next((found for key in counts if (found := _number(source.get(key))) is not None), None)
    return Measure(
        line.name,
        before,
        after,
        intervals[0],  # type: ignore[arg-type]
        intervals[1],  # type: ignore[arg-type]
        None if count is None else int(count),
        line.hub,
        dataset,
    )


def _is_training(log: Log) -> bool:
    """A log of training steps: no evaluation, and not the summary at the end."""
    return "step" in log and "train_runtime" not in log and not any(key.startswith("eval_") for key in log)


def _joined(logs: Iterable[Log]) -> Log:
    return {key: value for log in logs for key, value in log.items()}


def _number(value: Any) -> float | None:
    """`value` as a finite float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
