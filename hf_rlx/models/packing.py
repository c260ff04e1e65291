"""Groups into tensors: the packed row (a prefix tree) and, for models that cannot use it, the padded batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_rlx.models.attention import TreeLayout
from hf_rlx.models.cpu_attention import Segment
from hf_rlx.types import Group


@dataclass(frozen=True, eq=False)
class Batch:
    """Tensors of one model call, packed or padded, and where to read the result.

    Args:
        input_ids: (1, T) packed, or (B, longest) padded on the right.
        position_ids: same shape; the position along the token's own branch.
        attention_mask: (B, longest) bool, True on real tokens; None when packed.
        layout: the prefix tree; None when padded.
        predict_index: (N,) index into the flattened tokens of the hidden state that predicts each response
            token: the prompt's last token for the first one, then the token before.
        last_index: (B,) index into the flattened tokens of each response's last real token (EOS included),
            of the prompt's last token where the response is empty.
        targets: (N,) the response tokens themselves, response after response.
        completion_mask: (B, R) bool, True on real response tokens; N = its sum.
        lean: whether the packed row may run through `lean_blocks`.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    layout: TreeLayout | None
    predict_index: Tensor
    last_index: Tensor
    targets: Tensor
    completion_mask: Tensor
    lean: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes, padding included."""
        return self.input_ids.numel()

    def to_rows(self, values: Tensor) -> Tensor:
        """(N,) per response token -> (B, R), exactly 0 under the mask, differentiable."""
        rows = torch.zeros(self.completion_mask.shape, dtype=values.dtype, device=values.device)
        return rows.masked_scatter(self.completion_mask, values)


def completion_mask(groups: Sequence[Group], device: torch.device | str = "cpu") -> Tensor:
    """(B, R) bool, True on real response tokens. Built from lengths, never by comparing ids with the pad id:
    where pad equals EOS that drops the real EOS (trl#4970, trl#6357)."""
    lengths = torch.tensor([ids.numel() for g in groups for ids in g.response_ids], device=device)
    return torch.arange(int(lengths.max().clamp(min=1)), device=device)[None, :] < lengths[:, None]


def pack_groups(groups: Sequence[Group], device: torch.device | str = "cpu", lean: bool = False) -> Batch:
    """Lay groups out as one packed row: each prompt once, then its responses.

    Args:
        groups: P groups. device: of the result. lean: of the batch.

    Returns:
        A `Batch` of T = sum of `group.num_tokens` tokens.
    """
    if not groups:
        raise ValueError("no groups to pack")
    longest_prompt = max(g.prompt_ids.numel() for g in groups)
    mask = completion_mask(groups)
    num_responses, longest = mask.shape
    first_response_slot = len(groups) * longest_prompt

    pieces: list[Tensor] = []
    positions: list[Tensor] = []
    slots: list[Tensor] = []
    predict: list[Tensor] = []
    last: list[int] = []
    segments: list[Segment] = []
    offset, response = 0, 0
    for index, group in enumerate(groups):
        prompt_length = group.prompt_ids.numel()
        pieces.append(group.prompt_ids)
        positions.append(torch.arange(prompt_length))
        slots.append(index * longest_prompt + torch.arange(prompt_length))
        prompt_end = offset + prompt_length - 1
        offset += prompt_length
        ranges = []
        for ids in group.response_ids:
            steps = torch.arange(ids.numel())
            pieces.append(ids)
            positions.append(prompt_length + steps)
            slots.append(first_response_slot + response * longest + steps)
            before = offset + steps - 1
            if ids.numel():
                before[0] = prompt_end
            predict.append(before)
            last.append(offset + ids.numel() - 1 if ids.numel() else prompt_end)
            if ids.numel():
                ranges.append((offset, offset + ids.numel()))
            offset += ids.numel()
            response += 1
        segments.append(Segment((prompt_end + 1 - prompt_length, prompt_end + 1), tuple(ranges)))

    slot_of_token = torch.cat(slots)
    num_slots = first_response_slot + num_responses * longest
    token_of_slot = torch.zeros(num_slots, dtype=torch.long)
    token_of_slot[slot_of_token] = torch.arange(offset)
    padding = torch.ones(num_slots, dtype=torch.bool)
    padding[slot_of_token] = False
    counts = {g.num_responses for g in groups}
    layout = TreeLayout(
        token_of_slot=token_of_slot.to(device),
        slot_of_token=slot_of_token.to(device),
        padding=padding.to(device),
        prompt_shape=(len(groups), longest_prompt),
        response_shape=(num_responses, longest),
        group_of_response=torch.tensor([i for i, g in enumerate(groups) for _ in g.response_ids], device=device),
        prompt_lengths=torch.tensor([g.prompt_ids.numel() for g in groups], device=device),
        uniform_responses=counts.pop() if len(counts) == 1 else None,
        segments=tuple(segments),
    )
    return Batch(
        input_ids=torch.cat(pieces)[None].to(device),
        position_ids=torch.cat(positions)[None].to(device),
        attention_mask=None,
        layout=layout,
        predict_index=torch.cat(predict).to(device),
        last_index=torch.tensor(last, device=device),
        targets=torch.cat([ids for g in groups for ids in g.response_ids]).to(device),
        completion_mask=mask.to(device),
        lean=lean,
    )


def pad_groups(groups: Sequence[Group], device: torch.device | str = "cpu", pad_token_id: int = 0) -> Batch:
    """Lay groups out as the usual padded batch: the prompt repeated for every response, padding on the right.

    The fall-back for models that cannot run a packed row, and the reference that the packed row is held to.
    """
    if not groups:
        raise ValueError("no groups to pad")
    rows = [torch.cat([g.prompt_ids, ids]) for g in groups for ids in g.response_ids]
    prompt_lengths = [g.prompt_ids.numel() for g in groups for _ in g.response_ids]
    longest = max(len(row) for row in rows)
    input_ids = torch.full((len(rows), longest), pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    predict, last = [], []
    for index, (row, prompt_length) in enumerate(zip(rows, prompt_lengths, strict=True)):
        input_ids[index, : len(row)] = row
        attention_mask[index, : len(row)] = True
        predict.append(index * longest + torch.arange(prompt_length - 1, len(row) - 1))
        last.append(index * longest + len(row) - 1)
    return Batch(
        input_ids=input_ids.to(device),
        position_ids=torch.arange(longest, device=device).expand(len(rows), -1).contiguous(),
        attention_mask=attention_mask.to(device),
        layout=None,
        predict_index=torch.cat(predict).to(device),
        last_index=torch.tensor(last, device=device),
        targets=torch.cat([ids for g in groups for ids in g.response_ids]).to(device),
        completion_mask=completion_mask(groups).to(device),
    )


def split_by_tokens(groups: Sequence[Group], max_tokens: int | None) -> Iterator[list[Group]]:
    """Consecutive groups whose packed tokens fit `max_tokens` (None: all in one row).

    A single group over the limit stands alone: it is never cut here.
    """
    row: list[Group] = []
    used = 0
    for group in groups:
        if row and max_tokens is not None and used + group.num_tokens > max_tokens:
            yield row
            row, used = [], 0
        row.append(group)
        used += group.num_tokens
    if row:
        yield row
