"""Offline, quiet, deterministic tests; small models built from configurations."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start
os.environ.setdefault("CUDA_VISIBLE_DEVICES", os.environ.get("HF_RLX_TEST_GPUS", ""))

import pytest
import torch


def pytest_collection_finish():
    """Every `train()` collects garbage once: what the imports made need not be looked through each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from the same random state, on one thread: the models are too small for a second one, which
    on a busy machine waits longer than it computes."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
