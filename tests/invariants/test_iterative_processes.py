"""Two processes over gloo go through rounds as one process does: pairs, gradients, logs."""

from __future__ import annotations

import pytest
import torch

from tests.invariants.ranks import ends_of_logs, run_both
from tests.invariants.two_processes_iterative import CASES, train
from tests.trainers.tools import relative_gap, untimed

LIMIT = 240  # seconds; a process that waits for a backward of the other one would wait for ever
NAMES = (
    "loss reward rewards/margins rewards/accuracies logps/chosen kl/chosen num_tokens pairs/count pairs/prompts round"
)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What rank 0 and rank 1 saw."""
    folder = tmp_path_factory.mktemp("iterative_processes")
    codes = run_both("two_processes_iterative.py", folder, limit=LIMIT)
    assert codes == [0, 0], ends_of_logs(folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_the_run_of_one(both, tmp_path, case):
    """Also where a process has no pair of its own prompts: the round's pairs are dealt to all."""
    one, (first, second) = train(case, tmp_path, 1), (both[0][case], both[1][case])
    assert first["pairs"] == second["pairs"] == one["pairs"]
    assert one["pairs"]
    for rank in (first, second):
        assert len(rank["gradients"]) == len(one["gradients"])
        for ours, theirs in zip(rank["gradients"], one["gradients"], strict=True):
            assert relative_gap(ours, theirs) < 2e-5
    for ours, theirs in zip(first["log"], one["log"], strict=True):
        expected = {name: theirs[name] for name in NAMES.split() if name in theirs}
        assert {name: ours[name] for name in NAMES.split() if name in ours} == pytest.approx(expected, abs=2e-5)
    assert first["weights"] == second["weights"]
    assert [untimed(entry) for entry in first["log"]] == [untimed(entry) for entry in second["log"]]
