"""What happens to one of two processes ends both or neither: none is left waiting, which a time limit checks."""

from __future__ import annotations

import json
import logging
import time

import pytest
import torch

from hf_rlx.trainers.processes import agreed, raise_together, together
from tests.invariants.ranks import ends_of_logs, log_of, run_both
from tests.invariants.two_processes_faults import FIELDS, flat_later, train_flat_later
from tests.trainers.tools import config, digest, scripted

SCRIPT = "two_processes_faults.py"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What each process saw."""
    folder = tmp_path_factory.mktemp("faults")
    codes = run_both(SCRIPT, folder, limit=60)
    assert codes == [0, 0], ends_of_logs(folder)
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("reward", "RewardError", "reward function 'broken' raised KeyError: 'answer'"),
        ("metric", "ValueError", "a reward function logs the metric 'loss'"),
        ("step reward", "RewardError", "step reward function 'broken_steps' raised KeyError"),
        ("evaluation", "RewardError", "reward function 'broken' raised KeyError"),
        ("fresh prompts", "RewardError", "reward function 'flat_then_broken' raised KeyError"),
        ("collective", "RewardError", "reward function 'flat_then_broken' raised KeyError"),
    ],
)
def test_a_failure_on_one_process_is_told_on_both(both, case, kind, text):
    """The one that failed raises its own error, the other one says who failed and how."""
    first, second = (result["faults"][case] for result in both)
    assert second.startswith(f"{kind}: ")
    assert text in second
    assert first.startswith(f"ProcessError: rank 1: {kind}: ")
    assert text in first


def test_a_vote_of_one_process_counts_on_both(both):
    """agreed: nobody, rank 1 alone, everybody."""
    assert both[0]["agreed"] == both[1]["agreed"] == [False, True, True]


def test_an_uneven_last_window_is_left_out_on_both(both):
    """Ten prompts, windows of 2 x 2: two windows an epoch and eight prompts, the last two prompts in none; two epochs
    make four steps."""
    first, second = (result["uneven"] for result in both)
    assert first["steps"] == second["steps"] == 4
    assert first["train"] == [0, 1, 4, 5] * 2
    assert second["train"] == [2, 3, 6, 7] * 2
    assert first["weights"] == second["weights"]


def test_an_evaluation_set_may_leave_a_process_with_less(both):
    """One row a rollout, so the processes sample 1 and 0, 2 and 1, 2 and 2 times; both log the mean over all rows."""
    first, second = (result["uneven"] for result in both)
    for count, shares in ((1, [[0], []]), (3, [[0, 2], [1]]), (4, [[0, 2], [1, 3]])):
        assert [first[f"eval {count}"][1], second[f"eval {count}"][1]] == shares
        assert first[f"eval {count}"][0] == second[f"eval {count}"][0]


def test_steps_without_a_signal_move_no_weight(both, tmp_path):
    """One process has no gradient then, and Adam leaves the weight alone: no momentum, no decay. So with two, whose
    gradient would be 0."""
    one = train_flat_later(tmp_path, 1)
    assert one[0] == one[1] == one[2]
    for result in both:
        kept = result["flat later"]
        assert len(kept) == 3
        assert kept[0] == kept[1] == kept[2]


def test_steps_without_a_signal_move_no_weight_under_a_gradient_scaler(tmp_path, monkeypatch):
    """The scaler must see gradients, so there the backward is done, and its zeros are dropped before the step."""
    kept: list[str] = []
    for clip in (0.0, 1.0):
        fields = {"max_steps": 2, "per_device_train_batch_size": 16, "max_grad_norm": clip}
        trainer = scripted(config(tmp_path, **{**FIELDS, **fields}), reward=flat_later)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        # As accelerate sets it up for fp16 on a GPU; the forward itself stays in float32.
        monkeypatch.setattr(trainer.accelerator, "scaler", scaler)
        monkeypatch.setattr(trainer.accelerator, "native_amp", True)
        begin, end = trainer.callback_handler.on_train_begin, trainer.callback_handler.on_step_end

        def on_train_begin(*args, begin=begin, trainer=trainer):
            monkeypatch.setattr(trainer.accelerator.state, "_mixed_precision", "fp16")
            return begin(*args)

        def on_step_end(*args, end=end, trainer=trainer):
            kept.append(digest(trainer.shared.named_parameters()))
            return end(*args)

        trainer.callback_handler.on_train_begin, trainer.callback_handler.on_step_end = on_train_begin, on_step_end
        begun = digest(trainer.shared.named_parameters())
        trainer.train()
        monkeypatch.undo()
        assert scaler.get_scale() == 8.0
        assert begun != kept[-1] == kept[-2]


def test_two_processes_resume_to_the_bit(both):
    """Steps 3 and 4 from the checkpoint of step 2, with the logs of all four."""
    for result in both:
        assert result["resumed"]["first"] == result["resumed"]["again"]
    assert both[0]["resumed"] == both[1]["resumed"]


def test_a_process_that_dies_ends_the_other(tmp_path):
    """It cannot tell; the other one's next collective call fails, and it ends with an error."""
    start = time.perf_counter()
    codes = run_both(SCRIPT, tmp_path, "die", limit=60)
    assert codes[1] == 9
    assert codes[0] not in (0, 9), log_of(tmp_path, 0).read_text(encoding="utf-8")[-2000:]
    assert time.perf_counter() - start < 45


def test_a_single_process_raises_by_itself(caplog):
    """Nothing is sent, nothing is logged, and the error is the error."""
    assert (agreed(True), agreed(False)) == (True, False)
    raise_together(None)
    with pytest.raises(KeyError, match="x"):
        raise_together(KeyError("x"))
    for apply in (True, False):
        with pytest.raises(KeyError, match="x"), together(apply):
            raise KeyError("x")
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
