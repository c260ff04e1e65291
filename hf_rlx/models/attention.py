"""Attention over a packed row in which K responses share one prompt.

A packed row is a prefix tree: every group's prompt once, then its responses side by side. Prompt tokens see
their own prompt (causal); a response token sees its group's prompt and its own response up to itself, never
another response. The function is registered with transformers' `AttentionInterface`, so it serves every
decoder that goes through that interface, with PEFT layers and 4-bit weights underneath. The layout travels as
a keyword argument of the model call, never as a global: gradient checkpointing then recomputes with the
layout that its forward had.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_rlx.models.cpu_attention import Segment, segment_attention, takes

TREE_ATTENTION = "hf_rlx_tree"

# Keyword arguments that change the attention scores in a way that this function does not reproduce.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")


class PackingUnsupportedError(RuntimeError):
    """The model's attention asks for something that the packed row cannot express."""


@dataclass(frozen=True, eq=False)
class TreeLayout:
    """Where the tokens of a packed row stand in the prefix tree.

    Slots are the cells of two padded blocks, the prompts (P, Tp) and then the responses (B, R), flattened.

    Args:
        token_of_slot: (P * Tp + B * R,) row position held by each slot; 0 in padding slots.
        slot_of_token: (T,) slot of each row position.
        padding: (P * Tp + B * R,) bool, True on padding slots.
        prompt_shape: (P, Tp). response_shape: (B, R).
        group_of_response: (B,) index of the group that a response belongs to.
        prompt_lengths: (P,) tokens.
        uniform_responses: K when every group has the same number of responses, else None.
        segments: the same groups as ranges of row positions.
        windows: sliding windows that attention calls came with; some families put theirs into the mask only.
    """

    token_of_slot: Tensor
    slot_of_token: Tensor
    padding: Tensor
    prompt_shape: tuple[int, int]
    response_shape: tuple[int, int]
    group_of_response: Tensor
    prompt_lengths: Tensor
    uniform_responses: int | None
    segments: tuple[Segment, ...]
    windows: set[int] = field(default_factory=set)
    _masks: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def response_mask(self, window: int | None) -> Tensor:
        """(B, 1, R, Tp + R) bool, True where a response token may attend: its prompt, and itself backwards.

        `window` is a sliding window in tokens (None: unlimited), counted in positions along the branch.
        """
        key = ("response", window)
        if key not in self._masks:
            prompt_slots = torch.arange(self.prompt_shape[1], device=self.padding.device)
            own = torch.arange(self.response_shape[1], device=self.padding.device)
            lengths = self.prompt_lengths[self.group_of_response]
            in_prompt = (prompt_slots[None, :] < lengths[:, None])[:, None, :].expand(-1, len(own), -1)
            causal = (own[None, :] <= own[:, None]).expand(len(lengths), -1, -1)
            if window is not None:
                query_position = lengths[:, None] + own[None, :]
                in_prompt = in_prompt & (query_position[:, :, None] - prompt_slots < window)
                causal = causal & (own[:, None] - own[None, :] < window)
            self._masks[key] = torch.cat([in_prompt, causal], dim=-1)[:, None]
        return self._masks[key]

    def response_bias(self, window: int | None, repeats: int, dtype: torch.dtype) -> Tensor:
        """(B, 1, repeats * R, Tp + R): 0 where a response token may attend, -inf elsewhere, for `repeats` query heads
        a key-value head. One tensor for all layers: the attention keeps its mask for the backward."""
        key = ("bias", window, repeats, dtype)
        if key not in self._masks:
            mask = self.response_mask(window).repeat(1, 1, repeats, 1)
            self._masks[key] = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
        return self._masks[key]

    def prompt_mask(self, window: int) -> Tensor:
        """(1, 1, Tp, Tp) bool, causal within a sliding window; padding needs no mask as it stands last."""
        key = ("prompt", window)
        if key not in self._masks:
            slots = torch.arange(self.prompt_shape[1], device=self.padding.device)
            distance = slots[:, None] - slots[None, :]
            self._masks[key] = ((distance >= 0) & (distance < window))[None, None]
        return self._masks[key]

    @property
    def longest_branch(self) -> int:
        """Upper bound of a branch's length in tokens (prompt and one response)."""
        return self.prompt_shape[1] + self.response_shape[1]


class _RowToSlots(torch.autograd.Function):
    """(T, ...) -> (slots, ...). Every token stands in exactly one slot, so the backward is a gather too,
    which costs far less than the scatter-add that autograd would run."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, layout: TreeLayout) -> Tensor:
        ctx.layout = layout
        return row.index_select(0, layout.token_of_slot)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.layout.slot_of_token), None


class _SlotsToRow(torch.autograd.Function):
    """(slots, ...) -> (T, ...), the inverse of `_RowToSlots`; padding slots get gradient 0."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, layout: TreeLayout) -> Tensor:
        ctx.layout = layout
        return slots.index_select(0, layout.slot_of_token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        layout: TreeLayout = ctx.layout
        grad = grads[0].index_select(0, layout.token_of_slot)
        shape = (-1,) + (1,) * (grad.ndim - 1)
        return grad.masked_fill_(layout.padding.view(shape), 0), None


def _to_blocks(states: Tensor, layout: TreeLayout) -> tuple[Tensor, Tensor]:
    """(1, heads, T, D) -> prompts (P, heads, Tp, D) and responses (B, heads, R, D)."""
    slots = _RowToSlots.apply(states[0].transpose(0, 1), layout)
    num_prompt_slots = layout.prompt_shape[0] * layout.prompt_shape[1]
    prompts, responses = slots.split([num_prompt_slots, slots.shape[0] - num_prompt_slots])
    return (
        prompts.unflatten(0, layout.prompt_shape).transpose(1, 2),
        responses.unflatten(0, layout.response_shape).transpose(1, 2),
    )


def _of_own_prompt(prompts: Tensor, layout: TreeLayout) -> Tensor:
    """(P, heads, Tp, D) -> (B, heads, Tp, D): each response's prompt."""
    if layout.uniform_responses is None:
        return prompts.index_select(0, layout.group_of_response)
    shape = prompts.shape
    return prompts[:, None].expand(-1, layout.uniform_responses, -1, -1, -1).reshape(-1, *shape[1:])


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
) -> Tensor:
    """Attention of one packed row.

    Args:
        query: (1, heads, T, D). key, value: (1, key-value heads, T, D).
        layout: where the T tokens stand.
        scaling: factor on the scores, default 1 / sqrt(D).
        dropout: probability.
        window: sliding window in tokens, or None.

    Returns:
        (1, T, heads, D).
    """
    if window is not None and window >= layout.longest_branch:
        window = None
    if takes(query, value, layout.segments, window, dropout):
        return segment_attention(query, key, value, layout.segments, scaling)
    repeats = query.shape[1] // key.shape[1]
    q_prompt, q_response = _to_blocks(query, layout)
    k_prompt, k_response = _to_blocks(key, layout)
    v_prompt, v_response = _to_blocks(value, layout)

    prompt_mask = None if window is None else layout.prompt_mask(window)
    out_prompt = F.scaled_dot_product_attention(
        q_prompt,
        repeat_kv(k_prompt, repeats),
        repeat_kv(v_prompt, repeats),
        attn_mask=prompt_mask,
        is_causal=prompt_mask is None,
        dropout_p=dropout,
        scale=scaling,
    )
    num_responses, heads, length, dim = q_response.shape
    keys = torch.cat([_of_own_prompt(k_prompt, layout), k_response], dim=2)
    values = torch.cat([_of_own_prompt(v_prompt, layout), v_response], dim=2)
    if repeats > 1:
        # The query heads of one key-value head become further query rows: keys are not repeated.
        q_response = q_response.reshape(num_responses, heads // repeats, repeats * length, dim)
    mask = layout.response_bias(window, repeats, q_response.dtype)
    out_response = F.scaled_dot_product_attention(
        q_response, keys, values, attn_mask=mask, dropout_p=dropout, scale=scaling
    ).reshape(num_responses, heads, length, dim)
    slots = torch.cat([out_prompt.transpose(1, 2).flatten(0, 1), out_response.transpose(1, 2).flatten(0, 1)])
    return _SlotsToRow.apply(slots, layout)[None]


def _one_query(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention of a decoding step: one query a row. The query heads of one key-value head become its query rows, so
    that keys and values are read once and never repeated.

    Args:
        query: (B, heads, 1, D). key, value: (B, key-value heads, T, D). mask: (B, 1, 1, T), or None. scaling: of the
            scores.

    Returns:
        (B, 1, heads, D).
    """
    rows = query.unflatten(1, (key.shape[1], -1)).squeeze(3)
    if mask is not None:
        mask = mask.expand(-1, -1, rows.shape[2], -1)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return out.flatten(1, 2)[:, None]


def tree_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: TreeLayout | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature. Without a `layout` (rollouts, padded batches) it is plain sdpa."""
    if layout is None:
        plain = dropout == 0 and all(kwargs.get(name) is None for name in _UNSUPPORTED)
        if query.shape[2] == 1 and query.device.type == "cpu" and plain:
            return _one_query(query, key, value, attention_mask, scaling), None
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            **kwargs,
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise PackingUnsupportedError(f"attention argument `{name}` has no packed form")
    if sliding_window is not None:
        layout.windows.add(sliding_window)
    return tree_attention(query, key, value, layout, scaling, dropout, sliding_window), None


AttentionInterface.register(TREE_ATTENTION, tree_attention_forward)
AttentionMaskInterface.register(TREE_ATTENTION, sdpa_mask)
