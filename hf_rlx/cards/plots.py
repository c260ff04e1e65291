"""One picture of a run: its curves against the step."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

Row = dict[str, float | None]

_BLUE, _ORANGE, _GREEN, _GREY, _RED = "#3b6fb6", "#d9822b", "#2f8f5b", "#5f6b76", "#b6423b"
_ACROSS = 3  # panels side by side


def plot_run(curve: Sequence[Row], path: str | Path) -> Path:
    """Draw a run to a PNG, one panel for each of the groups below that the curve has.

    | panel | columns |
    |---|---|
    | reward | reward (batch mean), eval_reward (held-out mean) |
    | accuracy | accuracy (held-out, in 0..1) with its interval low, high; train_accuracy |
    | KL | kl (nats per token) |
    | length | length (tokens of a completion) |
    | margin | margin (of scores or implicit rewards) |
    | log-probs | chosen, rejected (nats) |
    | critic | explained_variance (share) |
    | loss | loss, eval_loss: only where there is none of reward, margin and accuracy |

    Args:
        curve: one dict a log. `step` is required; other columns are drawn where they are present and finite.
        path: where the PNG goes; replaced at once when it exists.

    Returns:
        The path written.

    Raises:
        ImportError: when matplotlib is not installed; the message names the command.
        ValueError: when the curve has no finite point to draw, or a row has no step.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError('Plots need matplotlib: pip install "hf_rlx[plots]"') from error

    if any(row.get("step") is None for row in curve):
        raise ValueError("every row of the curve needs a step.")
    rows = sorted(curve, key=lambda row: row["step"] or 0)
    panels = panels_of(rows)
    if not panels:
        raise ValueError(f"nothing to draw: no finite {', '.join(_PANELS)} in {len(rows)} rows.")
    across = min(len(panels), _ACROSS)
    down = -(-len(panels) // across)
    # A figure with its own canvas, not pyplot: the user's backend and open figures are left alone.
    figure = Figure(
        figsize=(4.3 * across, 3.3 * down),
        dpi=150,
        layout=ConstrainedLayoutEngine(wspace=0.06, hspace=0.06 if down > 1 else None),
        facecolor="white",
    )
    FigureCanvasAgg(figure)
    places = figure.subplots(down, across, squeeze=False).flatten()
    for axes, name in zip(places, panels, strict=False):
        _PANELS[name][1](axes, rows)
        _tidy(axes)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)
    return path


def panels_of(curve: Sequence[Row], points: int = 1) -> list[str]:
    """The panels that `plot_run` draws of a curve.

    Args:
        curve: as there. points: that one line of a panel has at least.
    """
    found = [
        name for name, (columns, _) in _PANELS.items() if any(len(_points(curve, c)[0]) >= points for c in columns)
    ]
    return [name for name in found if name != "loss"] or found


def _points(rows: Sequence[Row], *keys: str) -> tuple[list[float], ...]:
    """Steps and the columns `keys`, of the rows in which all of these are finite numbers."""
    wanted = ("step", *keys)
    kept = []
    for row in rows:
        values = [row.get(key) for key in wanted]
        if all(value is not None and math.isfinite(value) for value in values):
            kept.append([float(value) for value in values if value is not None])
    return tuple(list(column) for column in zip(*kept, strict=True)) if kept else ([],) * len(wanted)


def _smooth(values: list[float]) -> list[float]:
    """Centred moving average over about a tenth of the run; windows shrink symmetrically at the ends."""
    half = max(1, len(values) // 20)
    means = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        window = values[i - reach : i + reach + 1]
        means.append(sum(window) / len(window))
    return means


def _draw_reward(axes: Any, rows: Sequence[Row]) -> None:
    steps, values = _points(rows, "reward")
    held_out_steps, held_out = _points(rows, "eval_reward")
    axes.set_title("training reward" if not held_out else "reward" if steps else "held-out reward")
    if 0 < len(values) < 20:
        label = "batch mean" if held_out else None
        axes.plot(steps, values, color=_BLUE, linewidth=1.6, marker="o", markersize=3.5, label=label)
    elif values:
        axes.plot(steps, values, color=_BLUE, linewidth=0.8, alpha=0.35, label="batch mean")
        axes.plot(steps, _smooth(values), color=_BLUE, linewidth=2.0, label="moving average")
    if held_out:
        axes.plot(held_out_steps, held_out, color=_GREEN, linewidth=2.0, marker="o", markersize=4, label="held-out")
    if len(values) >= 20 or (values and held_out):
        axes.legend(loc="lower right", frameon=False, fontsize=8)


def _draw_lines(axes: Any, rows: Sequence[Row], title: str, lines: Sequence[tuple[str, str, str]], zero: bool) -> None:
    """lines: column, colour and label of each. zero: with a thin line at 0."""
    axes.set_title(title)
    drawn = 0
    for column, colour, label in lines:
        steps, values = _points(rows, column)
        if values:
            marker = {"marker": "o", "markersize": 3.5} if len(values) < 20 and len(lines) > 1 else {}
            axes.plot(steps, values, color=colour, linewidth=1.6, label=label, **marker)
            drawn += 1
    if zero:
        axes.axhline(0.0, color=_GREY, linewidth=0.8, alpha=0.5)
    if drawn > 1:
        axes.legend(loc="best", frameon=False, fontsize=8)


def _draw_accuracy(axes: Any, rows: Sequence[Row]) -> None:
    steps, values = _points(rows, "accuracy")
    axes.set_title("held-out accuracy" if values else "training accuracy")
    band_steps, low, high = _points(rows, "low", "high")
    train_steps, train = _points(rows, "train_accuracy")
    if train:
        axes.plot(train_steps, train, color=_BLUE, linewidth=0.8, alpha=0.5, label="training")
    if band_steps:
        axes.fill_between(band_steps, low, high, color=_GREEN, alpha=0.18, linewidth=0, label="95 % interval")
    axes.plot(steps, values, color=_GREEN, linewidth=2.0, marker="o", markersize=4)
    # First and last values in words: what most readers look for.
    for i in {0, len(steps) - 1} if steps else ():
        is_first = i == 0 and len(steps) > 1
        under_the_line = is_first and values[1] > values[0]
        axes.annotate(
            f"{values[i]:.2f}",
            (steps[i], values[i]),
            xytext=(6 if is_first else 0, -13 if under_the_line else 8),
            textcoords="offset points",
            ha="left" if is_first else "right",
            fontsize=9,
            color=_GREEN,
            fontweight="bold",
        )
    axes.set_ylim(0.0, 1.08)
    if band_steps or (train and values):
        axes.legend(loc="lower right", frameon=False, fontsize=8)


def _tidy(axes: Any) -> None:
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.margins(x=0.03)
    axes.grid(True, color=_GREY, alpha=0.15, linewidth=0.8)
    axes.title.set_fontsize(10)
    axes.tick_params(labelsize=8, colors=_GREY)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_GREY)


def _lines(title: str, *lines: tuple[str, str, str], zero: bool = False) -> Any:
    return partial(_draw_lines, title=title, lines=lines, zero=zero)


# Name -> columns, and what draws them.
_PANELS: dict[str, tuple[tuple[str, ...], Any]] = {
    "reward": (("reward", "eval_reward"), _draw_reward),
    "accuracy": (("accuracy", "train_accuracy"), _draw_accuracy),
    "kl": (("kl",), _lines("KL to the reference (nats per token)", ("kl", _ORANGE, "KL"), zero=True)),
    "length": (("length",), _lines("mean length (tokens)", ("length", _GREY, "length"))),
    "margin": (("margin",), _lines("margin", ("margin", _BLUE, "margin"), zero=True)),
    "log-probs": (
        ("chosen", "rejected"),
        _lines("log-probs of answers (nats)", ("chosen", _GREEN, "chosen"), ("rejected", _RED, "rejected")),
    ),
    "critic": (
        ("explained_variance",),
        _lines("explained variance of the critic", ("explained_variance", _BLUE, "share"), zero=True),
    ),
    "loss": (
        ("loss", "eval_loss"),
        _lines("loss (nats)", ("loss", _BLUE, "training"), ("eval_loss", _GREEN, "held-out")),
    ),
}
