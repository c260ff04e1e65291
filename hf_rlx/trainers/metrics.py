"""Metrics between two logs: added where they arise, averaged over steps and processes when logged."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from accelerate.utils import gather_object
from torch import Tensor

Reduce = Literal["mean", "min", "max", "sum"]


class MetricStore:
    """Accumulates named numbers; a name keeps the reduction it was first added with."""

    def __init__(self) -> None:
        self._values: dict[str, list[tuple[float, float]]] = {}
        self._reduce: dict[str, Reduce] = {}
        self._seconds: dict[str, float] = {}

    def add(self, name: str, value: float | Tensor, weight: float = 1.0, reduce: Reduce = "mean") -> None:
        """Add one value; NaN (nothing to report) and weight 0 are left out.

        Args:
            name: log key. value: number or 0-d tensor. weight: of the value in a mean, e.g. tokens.
        """
        number = float(value.detach()) if isinstance(value, Tensor) else float(value)
        self._reduce.setdefault(name, reduce)
        if weight > 0 and not math.isnan(number):
            self._values.setdefault(name, []).append((number, weight))

    def add_spread(self, name: str, values: Tensor) -> None:
        """`name/mean`, `name/min` and `name/max` of a tensor; nothing for an empty one."""
        if values.numel():
            values = values.detach().float()
            self.add(f"{name}/mean", values.mean(), values.numel())
            self.add(f"{name}/min", values.min(), reduce="min")
            self.add(f"{name}/max", values.max(), reduce="max")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage of the step; logged as `time/<name>` in shares of the time measured."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()  # kernels run on: their time would land in the next stage
            self.add_seconds(name, time.perf_counter() - start)

    def add_seconds(self, name: str, seconds: float) -> None:
        """Count seconds to a stage."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self, name: str) -> float:
        """Seconds of a stage since the last flush."""
        return self._seconds.get(name, 0.0)

    def state_dict(self) -> dict:
        """What was added since the last flush, for a checkpoint; independent of what is added later."""
        return {"values": {n: list(v) for n, v in self._values.items()}, "reduce": dict(self._reduce)}

    def load_state_dict(self, state: dict) -> None:
        """Put back what `state_dict` gave. Seconds are not kept: they are the machine's, not the run's."""
        self._values = {n: [(v, w) for v, w in values] for n, values in state["values"].items()}
        self._reduce = dict(state["reduce"])

    def flush(self) -> dict[str, float]:
        """Reduce over everything added since the last flush, on all processes, and start anew.

        Every process must call it at the same point; names may differ between them.
        """
        total = sum(self._seconds.values())
        for name, seconds in self._seconds.items():
            self.add(f"time/{name}", seconds / total if total > 0 else math.nan)
        local = [(name, self._reduce[name], values) for name, values in self._values.items()]
        self._values, self._seconds = {}, {}
        merged: dict[str, tuple[Reduce, list[tuple[float, float]]]] = {}
        for name, reduce, values in gathered(local):
            merged.setdefault(name, (reduce, []))[1].extend(values)
        return {name: _reduced(reduce, values) for name, (reduce, values) in merged.items()}


def gathered(local: list) -> list:
    """The entries of all processes, rank by rank; every process must call it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return gather_object(local)
    return local


def _reduced(reduce: Reduce, values: list[tuple[float, float]]) -> float:
    numbers = [v for v, _ in values]
    if reduce == "min":
        return min(numbers)
    if reduce == "max":
        return max(numbers)
    if reduce == "sum":
        return sum(numbers)
    return sum(v * w for v, w in values) / sum(w for _, w in values)
