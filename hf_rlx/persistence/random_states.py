"""Every random state that a training run draws from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The states of Python, NumPy, torch and all visible CUDA devices of this process, as plain values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": (version, words, gauss),
        "numpy": (str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss)),
        "numpy_cached": float(cached),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put the states of `capture` back.

    Raises:
        ValueError: they are of another number of CUDA devices.
    """
    random.setstate(state["python"])
    kind, keys, position, has_gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, state["numpy_cached"]))
    torch.set_rng_state(state["torch"])
    devices = state.get("cuda", [])
    if not devices:
        return
    if len(devices) != torch.cuda.device_count():
        raise ValueError(
            f"the checkpoint has random states of {len(devices)} CUDA devices, but {torch.cuda.device_count()} are "
            "visible; resume on the same number, or start a new run from the checkpoint's weights"
        )
    torch.cuda.set_rng_state_all(devices)
