"""The packed row's attention on a CPU: torch's flash kernel on slices of the row, joined by their log-normalisers.

A response token attends to its prompt and to its own response so far. Both parts run without a mask, without padding
and without a copy of the prompt's keys for every response: all responses of a group are the queries of one call
against the prompt, then each response runs causally on itself. With lse = log sum exp(scores) of a part,

    lse = log(exp(lse_prompt) + exp(lse_own)),   out = exp(lse_prompt - lse) out_prompt + exp(lse_own - lse) out_own.

The kernel's backward recomputes the probabilities as exp(scores - lse); given the joined `lse` and `out`, each part's
backward is its share of the exact gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Row positions a kernel call must have on average to be worth its own cost.
MIN_TOKENS_PER_CALL = 16


class Segment(NamedTuple):
    """Where one group stands in a packed row: half-open ranges of row positions.

    prompt: of the prompt. responses: of every response that is not empty; they follow the prompt without a gap.
    """

    prompt: tuple[int, int]
    responses: tuple[tuple[int, int], ...]

    @property
    def tail(self) -> tuple[int, int]:
        """The range of all responses."""
        return self.prompt[1], self.responses[-1][1] if self.responses else self.prompt[1]


class _Part(NamedTuple):
    """One kernel call: `queries` attend to `keys`, both ranges of row positions."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool


def _parts(segments: tuple[Segment, ...]) -> Iterator[tuple[_Part, ...]]:
    """The kernel calls, group by group: the prompt, then the responses on the prompt and each on itself."""
    for segment in segments:
        yield (_Part(segment.prompt, segment.prompt, True),)
        if segment.responses:
            yield (
                _Part(segment.tail, segment.prompt, False),
                *(_Part(response, response, True) for response in segment.responses),
            )


def _rows(states: Tensor, span: tuple[int, int]) -> Tensor:
    return states[..., span[0] : span[1], :]


def _call(q: Tensor, k: Tensor, v: Tensor, part: _Part, scale: float) -> tuple[Tensor, Tensor]:
    """Output (kv heads, repeats, t, D) and log-normaliser (kv heads, repeats, t) of one part."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _rows(q, part.queries), _rows(k, part.keys), _rows(v, part.keys), 0.0, part.causal, scale=scale
    )


class _SegmentAttention(torch.autograd.Function):
    """(heads, T, D) queries, (kv heads, T, D) keys and values -> (T, heads, D)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], scale: float
    ) -> Tensor:
        q, k, v = _by_key_head(query, key, value)
        out = query.new_empty(query.shape[1], *q.shape[:2], q.shape[3])  # (T, kv heads, repeats, D)
        lse = query.new_empty(*q.shape[:3], dtype=torch.float64 if query.dtype == torch.float64 else torch.float32)
        joined = out.permute(1, 2, 0, 3)
        for first, *own in _parts(segments):
            start, end = first.queries
            part_out, part_lse = _call(q, k, v, first, scale)
            if own:
                own_out, own_lse = torch.empty_like(part_out), torch.empty_like(part_lse)
                for part in own:
                    a, b = part.queries[0] - start, part.queries[1] - start
                    own_out[..., a:b, :], own_lse[..., a:b] = _call(q, k, v, part, scale)
                total = torch.logaddexp(part_lse, own_lse)
                part_out.mul_(torch.exp(part_lse - total)[..., None])
                part_out.addcmul_(own_out, torch.exp(own_lse - total).to(own_out.dtype)[..., None])
                part_lse = total
            joined[..., start:end, :], lse[..., start:end] = part_out, part_lse
        ctx.segments, ctx.scale = segments, scale
        ctx.save_for_backward(query, key, value, out, lse)
        return out.flatten(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        q, k, v = _by_key_head(query, key, value)
        joined = out.permute(1, 2, 0, 3)
        grad = grads[0].unflatten(1, q.shape[:2]).permute(1, 2, 0, 3)
        length, _, dim = grads[0].shape
        grad_q = query.new_empty(length, *q.shape[:2], dim).permute(1, 2, 0, 3)
        grad_k = key.new_zeros(length, key.shape[0], dim).transpose(0, 1)
        grad_v = key.new_zeros(length, key.shape[0], dim).transpose(0, 1)
        for first, *own in _parts(ctx.segments):
            for part in (first, *own):
                a, b = part.queries
                dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    _rows(grad, part.queries),
                    _rows(q, part.queries),
                    _rows(k, part.keys),
                    _rows(v, part.keys),
                    _rows(joined, part.queries),
                    lse[..., a:b],
                    0.0,
                    part.causal,
                    scale=ctx.scale,
                )
                if part is first:
                    grad_q[..., a:b, :] = dq
                else:
                    grad_q[..., a:b, :] += dq
                _rows(grad_k, part.keys).add_(dk.sum(1))
                _rows(grad_v, part.keys).add_(dv.sum(1))
        return grad_q.flatten(0, 1), grad_k, grad_v, None, None


def _by_key_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views (kv heads, repeats, T, D); the query heads of one key-value head share its keys."""
    repeats = query.shape[0] // key.shape[0]
    q = query.unflatten(0, (key.shape[0], repeats))
    return q, key[:, None].expand(-1, repeats, -1, -1), value[:, None].expand(-1, repeats, -1, -1)


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], scaling: float | None = None
) -> Tensor:
    """Attention of one packed row on a CPU.

    Args:
        query: (1, heads, T, D). key, value: (1, key-value heads, T, D).
        segments: the groups, which fill the row in this order.
        scaling: factor on the scores, default 1 / sqrt(D).

    Returns:
        (1, T, heads, D).
    """
    if torch.is_autocast_enabled("cpu"):  # as autocast has it for torch's own attention
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _SegmentAttention.apply(query[0], key[0], value[0], segments, scale)[None]


def takes(query: Tensor, value: Tensor, segments: tuple[Segment, ...], window: int | None, dropout: float) -> bool:
    """Whether `segment_attention` can run this, on a CPU without a sliding window or dropout and with one head size,
    and gains by it: many short responses are faster as one padded block than as a kernel call each."""
    able = query.device.type == "cpu" and window is None and dropout == 0 and query.shape[-1] == value.shape[-1]
    calls = sum(2 + len(segment.responses) for segment in segments)
    return able and query.shape[2] >= MIN_TOKENS_PER_CALL * calls
