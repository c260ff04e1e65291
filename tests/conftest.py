"""Offline, quiet, deterministic tests; small models built from configurations."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", os.environ.get("HF_RLX_TEST_GPUS", ""))

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from the same random state and on few threads."""
    torch.manual_seed(0)
    torch.set_num_threads(min(2, os.cpu_count() or 1))
