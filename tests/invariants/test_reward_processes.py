"""Two processes over gloo train a reward model as one process does, the uneven last batch included."""

from __future__ import annotations

import pytest
import torch

from tests.invariants.ranks import ends_of_logs, run_both
from tests.invariants.two_processes_reward import CASES, train
from tests.trainers.tools import relative_gap, untimed

LIMIT = 120  # seconds; a process that waits for a backward of the other one would wait for ever


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What rank 0 and rank 1 saw."""
    folder = tmp_path_factory.mktemp("reward_processes")
    codes = run_both("two_processes_reward.py", folder, limit=LIMIT)
    assert codes == [0, 0], ends_of_logs(folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_the_gradient_of_one(both, tmp_path, case):
    """Every step of the epoch, also where a process has no row, or no pair."""
    one = train(case, tmp_path, 1)
    for rank in range(2):
        assert len(both[rank][case]["gradients"]) == len(one["gradients"])
        for ours, theirs in zip(both[rank][case]["gradients"], one["gradients"], strict=True):
            assert relative_gap(ours, theirs) < 2e-5
    for ours, theirs in zip(both[0][case]["log"], one["log"], strict=True):
        for name in ("loss", "accuracy", "margin", "mean_reward", "num_tokens", "rows/without_pair"):
            assert ours.get(name) == pytest.approx(theirs.get(name), abs=1e-5), name


@pytest.mark.parametrize("case", CASES)
def test_both_processes_end_in_the_same_weights_and_log_the_same(both, case):
    """Every metric is reduced over processes, in training and evaluation."""
    first, second = both[0][case], both[1][case]
    assert first["weights"] == second["weights"]
    assert [untimed(e) for e in first["log"]] == [untimed(e) for e in second["log"]]
    assert untimed(first["eval"]) == untimed(second["eval"])


def test_evaluation_counts_every_row_once(both, tmp_path):
    """Five rows on two processes: the report of five."""
    one = train("pairs", tmp_path, 1)
    assert both[0]["pairs"]["eval"]["eval_n_pairs"] == 5
    for name, value in untimed(one["eval"]).items():
        assert both[0]["pairs"]["eval"][name] == pytest.approx(value, abs=1e-4), name
