"""Metrics between two logs."""

from __future__ import annotations

import math

import pytest
import torch

from hf_rlx.trainers.metrics import MetricStore


def test_reductions():
    """Weighted mean 0.25, smallest, largest, and a sum; then everything starts anew."""
    store = MetricStore()
    for value, weight in ((1.0, 1.0), (0.0, 3.0)):
        store.add("mean", value, weight)
        store.add("low", value, reduce="min")
        store.add("high", torch.tensor(value), reduce="max")
        store.add("all", value + 1, reduce="sum")
    assert store.flush() == {"mean": 0.25, "low": 0.0, "high": 1.0, "all": 3.0}
    assert store.flush() == {}


def test_nothing_to_report_is_left_out():
    store = MetricStore()
    store.add("nan", math.nan)
    store.add("no weight", 5.0, weight=0)
    store.add("half", math.nan)
    store.add("half", 2.0)
    store.add_spread("empty", torch.zeros(0))
    assert store.flush() == {"half": 2.0}


def test_infinity_is_shown():
    store = MetricStore()
    store.add("x", math.inf)
    assert store.flush() == {"x": math.inf}


def test_spread():
    store = MetricStore()
    store.add_spread("x", torch.tensor([1, 2, 6]))
    store.add_spread("x", torch.tensor([11]))
    assert store.flush() == {"x/mean": 5.0, "x/min": 1.0, "x/max": 11.0}


def test_stages_are_shares_of_the_time_measured():
    store = MetricStore()
    store.add_seconds("a", 3.0)
    store.add_seconds("b", 1.0)
    with pytest.raises(KeyError), store.stage("c"):
        raise KeyError
    assert store.seconds("a") == 3.0
    shares = store.flush()
    assert shares["time/a"] == pytest.approx(0.75, abs=1e-3)
    assert sum(shares.values()) == pytest.approx(1)
    assert "time/c" in shares
    assert store.seconds("a") == 0
