"""Which prompts a window gets, and how its completions are dealt."""

from __future__ import annotations

import random

import pytest
import torch

from hf_rlx.trainers.windows import WindowSampler, deal, row_of
from hf_rlx.types import Completion, Rollout


def windows(rank=0, world_size=1, epoch=0, **changes):
    sampler = WindowSampler(
        **{"num_rows": 26, "prompts": 3, "repeats": 4, "seed": 5, "shuffle": True, **changes},
        rank=rank,
        world_size=world_size,
    )
    sampler.set_epoch(epoch)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    return batches


def test_every_window_comes_once_per_micro_step():
    batches = windows()
    assert len(batches) == 8 * 4  # 26 rows hold 8 windows of 3
    for start in range(0, len(batches), 4):
        assert batches[start] == batches[start + 1] == batches[start + 2] == batches[start + 3]
    first = [tuple(b) for b in batches[::4]]
    assert len({row for window in first for row in window}) == 24


def test_processes_get_disjoint_prompts():
    ranks = [windows(rank, 2) for rank in range(2)]
    seen = [{row for batch in batches for row in batch} for batches in ranks]
    assert seen[0].isdisjoint(seen[1])
    assert len(seen[0]) == len(seen[1]) == 12
    # Together they are the windows of one process with twice the prompts.
    together = [a + b for a, b in zip(*ranks, strict=True)]
    assert together == windows(prompts=6)


def test_epochs_differ_and_repeat():
    assert windows(epoch=0) != windows(epoch=1)
    assert windows(epoch=1) == windows(epoch=1)
    assert windows(seed=6) != windows()
    assert windows(shuffle=False, epoch=1)[0] == [0, 1, 2]


def test_too_few_rows_are_an_error():
    with pytest.raises(ValueError, match=r"has 5 prompts but a rollout needs 6; add some, or lower per_device"):
        WindowSampler(5, 3, 1, 0, True, world_size=2)


def rollouts(keeps):
    return [
        Rollout("p", "p", [1], [Completion([1], [0.0], True)] * len(keep), keep=torch.tensor(keep)) for keep in keeps
    ]


def flat(shares):
    return sorted((p, k) for share in shares for p, ks in share for k in ks)


def test_deal_hands_out_every_kept_completion_once():
    """Random windows: nothing twice, nothing lost, and no micro-step above its even share."""
    dice = random.Random(0)
    for _ in range(300):
        groups, size = dice.randint(1, 6), dice.choice([2, 3, 4, 8])
        divisors = [d for d in range(1, groups * size + 1) if groups * size % d == 0]
        steps = dice.choice(divisors)
        micro_steps = dice.choice([d for d in divisors if (groups * size // steps) % d == 0])
        keeps = [[dice.random() < 0.7 for _ in range(size)] for _ in range(groups)]
        dealt = deal(rollouts(keeps), steps, micro_steps)
        assert len(dealt) == steps
        assert all(len(step) == micro_steps for step in dealt)
        everything = sorted(item for step in dealt for item in flat(step))
        assert everything == [(p, k) for p in range(groups) for k in range(size) if keeps[p][k]]
        per_step = groups * size // steps
        for number, step in enumerate(dealt):
            assert all(number * per_step <= p * size + k < (number + 1) * per_step for p, k in flat(step))
            for share in step:
                assert sum(len(ks) for _, ks in share) <= per_step // micro_steps
                assert len({p for p, _ in share}) == len(share)


def test_deal_keeps_groups_whole_where_they_fit():
    dealt = deal(rollouts([[True] * 4] * 4), 1, 2)
    assert dealt == [[[(0, [0, 1, 2, 3]), (2, [0, 1, 2, 3])], [(1, [0, 1, 2, 3]), (3, [0, 1, 2, 3])]]]
    # 52 kept of 7 x 8 in two micro-steps of 28: the least loaded one first would have to cut a group.
    sizes = (7, 8, 8, 7, 8, 7, 7)
    dealt = deal(rollouts([[True] * n + [False] * (8 - n) for n in sizes]), 1, 2)
    assert sorted(len(ks) for share in dealt[0] for _, ks in share) == sorted(sizes)
    assert [sum(len(ks) for _, ks in share) for share in dealt[0]] == [24, 28]


def test_deal_balances_loads():
    """Flat groups leave; what is left is spread over the micro-steps."""
    dealt = deal(rollouts([[True] * 4, [False] * 4, [True] * 4, [False] * 4]), 1, 2)
    assert [sum(len(ks) for _, ks in share) for share in dealt[0]] == [4, 4]


def test_deal_cuts_groups_larger_than_a_micro_step():
    dealt = deal(rollouts([[True] * 8]), 1, 4)
    assert dealt == [[[(0, [0, 1])], [(0, [2, 3])], [(0, [4, 5])], [(0, [6, 7])]]]
    across = deal(rollouts([[True] * 4] * 3), 2, 1)
    assert across == [[[(0, [0, 1, 2, 3]), (1, [0, 1])]], [[(2, [0, 1, 2, 3]), (1, [2, 3])]]]


def test_deal_gives_empty_shares_when_nothing_is_kept():
    assert deal(rollouts([[False] * 4] * 2), 1, 2) == [[[], []]]
    assert [len(share) for share in deal(rollouts([[True, False, False, False]]), 1, 4)[0]] == [1, 0, 0, 0]


def test_row_of_cuts_and_pads_token_advantages():
    tokens = torch.tensor([[1.0, 2.0, 3.0]])
    assert row_of(tokens, 0, 2).tolist() == [1, 2]
    assert row_of(tokens, 0, 5).tolist() == [1, 2, 3, 0, 0]
    assert row_of(torch.tensor([4.0]), 0, 5).tolist() == 4
    with pytest.raises(ValueError, match="advantages were not computed"):
        row_of(torch.empty(0), 0, 1)
