"""One picture of a run: reward, KL and held-out accuracy against the step."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, float | None]

_BLUE, _ORANGE, _GREEN, _GREY = "#3b6fb6", "#d9822b", "#2f8f5b", "#5f6b76"


def plot_run(curve: Sequence[Row], path: str | Path) -> Path:
    """Draw a run to a PNG, one panel for each of reward, KL and held-out accuracy that the curve has.

    Args:
        curve: one dict a log. `step` is required; `reward` (the batch mean), `kl` (nats per token), `accuracy`
            (held-out, in 0..1) and its interval `low`, `high` are drawn where they are present and finite.
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
    panels = [(key, draw) for key, draw in _PANELS.items() if _points(rows, key)[0]]
    if not panels:
        raise ValueError(f"nothing to draw: no finite {', '.join(_PANELS)} in {len(rows)} rows.")
    # A figure with its own canvas, not pyplot: the user's backend and open figures are left alone.
    figure = Figure(
        figsize=(4.3 * len(panels), 3.3), dpi=150, layout=ConstrainedLayoutEngine(wspace=0.06), facecolor="white"
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (_, draw) in zip(grid, panels, strict=True):
        draw(axes, rows)
        _tidy(axes)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)
    return path


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
    axes.set_title("training reward")
    if len(values) < 20:
        axes.plot(steps, values, color=_BLUE, linewidth=1.6, marker="o", markersize=3.5)
        return
    axes.plot(steps, values, color=_BLUE, linewidth=0.8, alpha=0.35, label="batch mean")
    axes.plot(steps, _smooth(values), color=_BLUE, linewidth=2.0, label="moving average")
    axes.legend(loc="lower right", frameon=False, fontsize=8)


def _draw_kl(axes: Any, rows: Sequence[Row]) -> None:
    steps, values = _points(rows, "kl")
    axes.set_title("KL to the reference (nats per token)")
    axes.plot(steps, values, color=_ORANGE, linewidth=1.6)
    axes.axhline(0.0, color=_GREY, linewidth=0.8, alpha=0.5)


def _draw_accuracy(axes: Any, rows: Sequence[Row]) -> None:
    steps, values = _points(rows, "accuracy")
    axes.set_title("held-out accuracy")
    band_steps, low, high = _points(rows, "low", "high")
    if band_steps:
        axes.fill_between(band_steps, low, high, color=_GREEN, alpha=0.18, linewidth=0, label="95 % interval")
    axes.plot(steps, values, color=_GREEN, linewidth=2.0, marker="o", markersize=4)
    # First and last values in words: what most readers look for.
    for i in {0, len(steps) - 1}:
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
    if band_steps:
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


_PANELS = {"reward": _draw_reward, "accuracy": _draw_accuracy, "kl": _draw_kl}
