"""Scalar heads that read a value or a score from the shared base's hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ScalarHead(nn.Module):
    """One number per hidden state: the critic's value or the reward model's score.

    Kept in float32 whatever the base runs in: values and scores are small differences.

    Args:
        hidden_size: H.
        zero_init: start at exactly 0 everywhere (a critic that knows nothing disturbs nothing); otherwise
            normal with deviation 1 / sqrt(H + 1) (Stiennon et al. 2020, 2009.01325, appendix B).
    """

    def __init__(self, hidden_size: int, zero_init: bool = True) -> None:
        super().__init__()
        self.detached = False  # True: no gradient reaches the hidden states, only the head trains
        self.linear = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.linear.bias)
        if zero_init:
            nn.init.zeros_(self.linear.weight)
        else:
            nn.init.normal_(self.linear.weight, std=(hidden_size + 1) ** -0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., H) -> (...), float32, in reward units."""
        if self.detached:
            hidden = hidden.detach()
        with torch.autocast(hidden.device.type, enabled=False):
            return self.linear(hidden.float()).squeeze(-1)
