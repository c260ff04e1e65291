"""Plots: a real PNG from whatever part of the curve exists."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path

import pytest

from hf_rlx.cards import Score, plot_run

CURVE = [
    {
        "step": step,
        "reward": 0.45 + 0.5 * (1 - math.exp(-step / 25)) + 0.06 * math.sin(7.3 * step),
        "kl": 0.08 * (1 - math.exp(-step / 40)),
    }
    for step in range(1, 121)
]
for step, right in ((0, 110), (30, 198), (60, 226), (90, 240), (120, 243)):
    score = Score.from_counts(right, 256)
    CURVE.append({"step": step, "accuracy": score.accuracy, "low": score.low, "high": score.high})


def size(path: Path) -> tuple[int, int]:
    """Width and height in pixels, from the PNG's header."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def test_full_plot(tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = plot_run(CURVE, tmp_path / "new" / "training.png")
    assert path.stat().st_size > 10_000
    assert size(path) == (1935, 495)  # three panels of 4.3 by 3.3 inches at 150 dots
    assert [p.name for p in path.parent.iterdir()] == ["training.png"]


def test_only_panels_with_data(tmp_path: Path):
    pytest.importorskip("matplotlib")
    curve = [{"step": 1, "reward": 0.5, "kl": math.nan, "accuracy": None}, {"step": 2, "reward": 1.0}]
    assert size(plot_run(curve, tmp_path / "a.png")) == (645, 495)
    assert size(plot_run([{"step": 5, "accuracy": 0.5}], tmp_path / "b.png")) == (645, 495)


def test_pyplot_is_left_alone(tmp_path: Path):
    matplotlib = pytest.importorskip("matplotlib")
    before = matplotlib.rcParams._get_backend_or_none()
    plot_run(CURVE, tmp_path / "a.png")
    assert matplotlib.rcParams._get_backend_or_none() == before


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_run([], tmp_path / "a.png")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_run([{"step": 1, "reward": math.inf}], tmp_path / "a.png")
    with pytest.raises(ValueError, match="needs a step"):
        plot_run([{"reward": 1.0}], tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "hf_rlx\[plots\]"'):
        plot_run(CURVE, tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []
