"""These models are too small for a second thread: waiting for it costs more than it computes."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(_seeded):
    torch.set_num_threads(1)
