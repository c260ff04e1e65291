"""Random numbers of a reward function in its worker process: the same in every run, and after a resume."""

from __future__ import annotations

import hashlib
import importlib.machinery
import random
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_LIBRARIES = ("numpy", "torch")  # whose global generators are seeded beside that of `random`


def call_seed(*facts: Any) -> int:
    """A number in [0, 2^32) that follows from plain values (numbers, texts, lists of them) alone."""
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:4], "little")


class Seeder:
    """Seeds `random`, and numpy and torch: those that are imported at once, others as soon as they are.

    A function may import numpy in its own body, which comes after `seed`; so this stands in `sys.meta_path`.
    """

    def __init__(self) -> None:
        self._seed: int | None = None
        sys.meta_path.insert(0, self)

    def seed(self, seed: int | None) -> None:
        """Begin a call: `seed` in [0, 2^32), or None, which leaves all generators as they are."""
        self._seed = seed
        if seed is not None:
            random.seed(seed)
        for name in _LIBRARIES:
            self._seed_library(sys.modules.get(name))

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        """The usual spec of numpy or torch, with a loader that seeds at the end; None for all other modules."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in _LIBRARIES else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        load = loader.exec_module

        def load_and_seed(module: ModuleType) -> None:
            load(module)
            self._seed_library(module)

        loader.exec_module = load_and_seed
        return spec

    def _seed_library(self, module: Any) -> None:
        if module is None or self._seed is None:
            return
        (module.random.seed if module.__name__ == "numpy" else module.manual_seed)(self._seed)
