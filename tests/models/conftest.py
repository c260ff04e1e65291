"""One thread: for models of this size a second one only waits for the first."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(_seeded):
    torch.set_num_threads(1)
