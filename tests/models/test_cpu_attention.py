"""The packed row's attention on a CPU against dense attention with an explicit mask, in float64, with gradients."""

import pytest
import torch

from hf_rlx.models import attention
from hf_rlx.models.cpu_attention import Segment, segment_attention, takes
from hf_rlx.models.packing import pack_groups
from hf_rlx.types import Group
from tests import tiny


def visible(groups):
    """(T, T) bool: position i may attend to position j, written down token by token."""
    owners = []  # (group, response or None for the prompt) of every position
    for index, group in enumerate(groups):
        owners += [(index, None)] * len(group.prompt_ids)
        for number, ids in enumerate(group.response_ids):
            owners += [(index, number)] * len(ids)
    return torch.tensor(
        [
            [j <= i and a[0] == b[0] and (b[1] is None or a[1] == b[1]) for j, b in enumerate(owners)]
            for i, a in enumerate(owners)
        ]
    )


def dense(query, key, value, mask, scale):
    """(1, T, heads, D) by softmax over all positions, masked."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = (query @ key.transpose(2, 3)) * scale
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def states(length, heads, key_heads, dim=8):
    return [
        torch.randn(1, n, length, dim, dtype=torch.float64).requires_grad_() for n in (heads, key_heads, key_heads)
    ]


def run(function, inputs):
    """Output and gradients of a loss that weighs every number differently."""
    out = function(*inputs)
    return [out.detach(), *torch.autograd.grad(tiny.weighted(out), inputs)]


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_equals_dense_attention(heads, key_heads, scale):
    """Ragged groups: an empty response, a one-token response, a one-token prompt, unequal numbers of responses."""
    groups = tiny.ragged_groups()
    layout = pack_groups(groups).layout
    inputs = states(len(layout.slot_of_token), heads, key_heads)
    mask, factor = visible(groups), 8**-0.5 if scale is None else scale
    expected = run(lambda q, k, v: dense(q, k, v, mask, factor), inputs)
    actual = run(lambda q, k, v: segment_attention(q, k, v, layout.segments, scale), inputs)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_a_prompt_without_any_response_token():
    groups = [Group.from_lists([3, 4, 5], [[], []]), Group.from_lists([6, 7], [[8]])]
    layout = pack_groups(groups).layout
    assert layout.segments == (Segment((0, 3), ()), Segment((3, 5), ((5, 6),)))
    inputs = states(6, 2, 2)
    expected = run(lambda q, k, v: dense(q, k, v, visible(groups), 8**-0.5), inputs)
    actual = run(lambda q, k, v: segment_attention(q, k, v, layout.segments), inputs)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_equals_the_form_of_other_devices(monkeypatch):
    """The padded blocks that run on a GPU, or with a sliding window, give the same."""
    groups = tiny.ragged_groups()
    layout = pack_groups(groups).layout
    inputs = states(len(layout.slot_of_token), 6, 2)
    monkeypatch.setattr(attention, "takes", lambda *_: True)
    actual = run(lambda q, k, v: attention.tree_attention(q, k, v, layout), inputs)
    monkeypatch.setattr(attention, "takes", lambda *_: False)
    for ours, theirs in zip(
        actual, run(lambda q, k, v: attention.tree_attention(q, k, v, layout), inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_where_it_runs():
    """16 tokens a call on average: 64 are enough for the 3 calls of one response, 63 are not for the 4 of two."""
    long = pack_groups([Group.from_lists(list(range(3, 43)), [[5] * 24])]).layout.segments
    short = pack_groups([Group.from_lists(list(range(3, 43)), [[5] * 12, [5] * 11])]).layout.segments
    for segments, length, expected in ((long, 64, True), (short, 63, False)):
        states = torch.zeros(1, 2, length, 8)
        assert takes(states, states, segments, None, 0.0) is expected
        assert not takes(states, states, segments, 5, 0.0)
        assert not takes(states, states, segments, None, 0.1)


@pytest.mark.parametrize("masked", [False, True])
def test_a_decoding_step_equals_dense_attention(masked):
    """One query a row, six query heads on two key heads, the first keys masked as behind left padding."""
    query, key, value = torch.randn(3, 6, 1, 8), torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 8)
    mask = torch.ones(3, 1, 1, 5, dtype=torch.bool)
    if masked:
        mask[1, ..., :2] = False
    actual, _ = attention.tree_attention_forward(torch.nn.Module(), query, key, value, mask if masked else None)
    torch.testing.assert_close(actual, dense(query, key, value, mask, 8**-0.5))
