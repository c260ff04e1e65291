"""Two processes over gloo train on pairs as one process does, the uneven last batch included."""

from __future__ import annotations

import pytest
import torch

from tests.invariants.ranks import ends_of_logs, run_both
from tests.invariants.two_processes_pairs import CASES, train
from tests.trainers.tools import relative_gap, untimed

LIMIT = 240  # seconds; a process that waits for a backward of the other one would wait for ever
NAMES = """
    loss rewards/chosen rewards/margins rewards/accuracies logps/chosen logps/chosen_change entropy kl/chosen
    num_tokens rows/without_pair
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What rank 0 and rank 1 saw."""
    folder = tmp_path_factory.mktemp("pair_processes")
    codes = run_both("two_processes_pairs.py", folder, limit=LIMIT)
    assert codes == [0, 0], ends_of_logs(folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_the_run_of_one(both, tmp_path, case):
    """Every step's gradient and metrics and the evaluation, also where a process has no row, or no pair; and both
    processes end in the same weights and log the same."""
    one, (first, second) = train(case, tmp_path, 1), (both[0][case], both[1][case])
    for rank in (first, second):
        assert len(rank["gradients"]) == len(one["gradients"])
        for ours, theirs in zip(rank["gradients"], one["gradients"], strict=True):
            assert relative_gap(ours, theirs) < 2e-5
    for ours, theirs in zip(first["log"], one["log"], strict=True):
        # Precomputed log-probs round as their batches do, and a margin of 0 becomes one of 1e-8: no tie any more.
        names = [
            n for n in NAMES.split() if n != "rewards/accuracies" or "precompute_ref_log_probs" not in CASES[case]
        ]
        expected = {name: theirs[name] for name in names if name in theirs}
        assert {name: ours[name] for name in names if name in ours} == pytest.approx(expected, abs=2e-5)
    assert first["weights"] == second["weights"]
    assert [untimed(e) for e in first["log"]] == [untimed(e) for e in second["log"]]
    assert untimed(first["eval"]) == untimed(second["eval"])
    assert first["eval"]["eval_n_pairs"] == 5
    for name, value in untimed(one["eval"]).items():
        assert first["eval"][name] == pytest.approx(value, abs=1e-4, rel=1e-4), name
