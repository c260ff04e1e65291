"""The few types that cross file borders.

Shape legend, used in every docstring of the package:
P prompts (= groups), K responses a prompt, B = sum of K over the groups (responses), T tokens,
R longest response of a batch, F reward functions, V vocabulary, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Group:
    """One prompt and its K responses: the unit that is packed, scored and forwarded once.

    Args:
        prompt_ids: (T,) token ids of the prompt, no padding, at least one token.
        response_ids: K tensors (T_k,) of response token ids, the EOS included where the response ended
            with one, no padding. A response may be empty only where nothing is read from it.

    Raises:
        ValueError: the prompt is empty, or there is no response.
    """

    prompt_ids: Tensor
    response_ids: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if self.prompt_ids.ndim != 1 or self.prompt_ids.numel() == 0:
            raise ValueError(
                f"a group's prompt must be a 1-D tensor with at least one token, got shape "
                f"{tuple(self.prompt_ids.shape)}; give the prompt a BOS token or some text"
            )
        if not self.response_ids:
            raise ValueError("a group needs at least one response")

    @staticmethod
    def from_lists(prompt_ids: list[int], response_ids: list[list[int]]) -> Group:
        """Build a group from plain token id lists."""
        return Group(
            torch.tensor(prompt_ids, dtype=torch.long),
            tuple(torch.tensor(ids, dtype=torch.long) for ids in response_ids),
        )

    @property
    def num_responses(self) -> int:
        """K."""
        return len(self.response_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed group: the prompt once, then every response."""
        return self.prompt_ids.numel() + sum(ids.numel() for ids in self.response_ids)

    def select(self, indices: list[int]) -> Group:
        """The same prompt with the responses at `indices` only."""
        return Group(self.prompt_ids, tuple(self.response_ids[i] for i in indices))


class TokenScores(NamedTuple):
    """What one forward over groups returns; rows are responses in group order.

    per_token_logps: (B, R) nats, log-probability of each response token, exactly 0 under the mask.
    entropies: (B, R) nats, entropy of the distribution that the token was drawn from, or None.
    values: (B, R) reward, the critic's value before each token, or None.
    mask: (B, R) bool, True on real response tokens (EOS included).
    """

    per_token_logps: Tensor
    entropies: Tensor | None
    values: Tensor | None
    mask: Tensor


@dataclass
class Completion:
    """One sampled response.

    Args:
        token_ids: sampled ids, the ending EOS included.
        logps: nats, log-probability of each sampled token under the sampling weights at the sampling
            temperature, before top-k, top-p, min-p and repetition penalty.
        finished: True when it ended by EOS or a stop string, False when the length limit cut it.
        text: decoded without special tokens.
    """

    token_ids: list[int]
    logps: list[float]
    finished: bool
    text: str = ""


def _nothing() -> Tensor:
    return torch.empty(0)


@dataclass
class Rollout:
    """One prompt, its K sampled completions, and everything that was learned about them.

    Args:
        prompt: what the dataset holds (text or messages).
        prompt_text: the text the model saw, template applied.
        prompt_ids: token ids of that text.
        completions: K completions.
        columns: the other columns of the prompt's dataset row.
        rewards: (K, F) reward of every function, NaN where it abstained; empty until scored.
        total: (K,) weighted sum, NaN where every function abstained; empty until scored.
        advantages: (K,) or (K, R); empty until computed.
        keep: (K,) bool, False where the completion leaves loss and denominators; empty until computed.
    """

    prompt: str | Messages
    prompt_text: str
    prompt_ids: list[int]
    completions: list[Completion]
    columns: dict[str, Any] = field(default_factory=dict)
    rewards: Tensor = field(default_factory=_nothing)
    total: Tensor = field(default_factory=_nothing)
    advantages: Tensor = field(default_factory=_nothing)
    keep: Tensor = field(default_factory=_nothing)

    def group(self) -> Group:
        """The token ids as a `Group`."""
        return Group.from_lists(self.prompt_ids, [c.token_ids for c in self.completions])
