"""Two processes over gloo give the gradient of one process on the same prompts, and none waits for the other."""

from __future__ import annotations

import pytest
import torch

from tests.invariants.ranks import ends_of_logs, run_both
from tests.invariants.two_processes import CASES, train
from tests.trainers.tools import relative_gap, untimed

LIMIT = 120  # seconds; a process that waits for a backward of the other one would wait for ever


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What rank 0 and rank 1 saw."""
    folder = tmp_path_factory.mktemp("processes")
    codes = run_both("two_processes.py", folder, limit=LIMIT)
    assert codes == [0, 0], ends_of_logs(folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("case", [c for c in CASES if c != "all flat"])
def test_two_processes_give_the_gradient_of_one(both, tmp_path, case):
    """Also where one process has nothing to learn from, and where a group leaves a micro-step empty."""
    one = train(case, tmp_path, 1)
    assert one["prompts"] == 4
    for rank in range(2):
        assert both[rank][case]["prompts"] == 2
        assert relative_gap(both[rank][case]["gradients"], one["gradients"]) < 2e-6
    ours, whole = both[0][case]["log"][0], one["log"][0]
    for name in (
        "loss",
        "policy_loss",
        "kl_loss",
        "reward",
        "frac_reward_zero_std",
        "num_tokens",
        "groups/kept_fraction",
    ):
        assert ours[name] == pytest.approx(whole[name], abs=1e-6), name


@pytest.mark.parametrize("case", CASES)
def test_both_processes_end_in_the_same_weights_and_log_the_same(both, case):
    """Every metric is reduced over processes, in training and evaluation."""
    first, second = both[0][case], both[1][case]
    assert first["weights"] == second["weights"]
    assert [untimed(e) for e in first["log"]] == [untimed(e) for e in second["log"]]
    assert untimed(first["eval"]) == untimed(second["eval"])


def test_no_signal_anywhere_is_no_gradient(both):
    """As with one process: neither runs a backward, and the optimizer has nothing to step by."""
    for rank in range(2):
        assert both[rank]["all flat"]["gradients"] == {}
        assert both[rank]["all flat"]["log"][0]["loss"] == 0


def test_evaluation_counts_every_row_once(both, tmp_path):
    """Five rows on two processes: the mean over five."""
    one = train("grpo", tmp_path, 1)
    assert both[0]["grpo"]["eval"]["eval_reward"] == pytest.approx(one["eval"]["eval_reward"], abs=1e-6)


@pytest.mark.parametrize(("name", "count"), [("train_000001.parquet", 16), ("eval_000001.parquet", 5)])
def test_completions_of_both_processes_are_in_one_file(both, tmp_path, name, count):
    """The same rows as one process writes, advantages included; only their order is another."""

    def rows_of(result):
        found = [dict(sorted(row.items())) for row in result["grpo"]["tables"][name]]
        for row in found:
            row["advantage"] = round(row.get("advantage", 0.0), 5)
        return sorted(found, key=lambda row: (row["prompt"], row["completion"]))

    one, two = rows_of({"grpo": train("grpo", tmp_path, 1)}), rows_of(both[0])
    assert len(two) == count
    assert one == two
    assert any(row["advantage"] for row in two) == name.startswith("train")
    assert both[1]["grpo"]["tables"] == {}
