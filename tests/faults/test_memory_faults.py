"""Out of memory: halves give the same run, a half that does not fit saves and stops, a rollout gets fewer rows."""

from __future__ import annotations

import pytest
import torch

from hf_rlx.persistence import folders
from hf_rlx.trainers.memory import out_of_memory
from hf_rlx.trainers.windows import MiniBatch
from hf_rlx.types import Group
from tests.invariants.test_resume import make, result


def fail_from(trainer, number, responses, error=None):
    """From the micro-step `number` on, a backward of more than `responses` completions fails half-way: after the
    gradient of some parameters is there."""
    backward, loss, state = trainer.accelerator.backward, trainer.minibatch_loss, {"steps": 0, "failed": 0, "rows": []}

    def counted(model, batch):
        state["rows"].append(len(batch.mask))
        return loss(model, batch)

    def failing(value, **kwargs):
        state["steps"] += 1
        backward(value, **kwargs)
        if state["steps"] >= number and state["rows"][-1] > responses:
            state["failed"] += 1
            raise error or torch.OutOfMemoryError("no memory")

    trainer.minibatch_loss, trainer.accelerator.backward = counted, failing
    return state


def close(a, b):
    """Logged numbers, up to the order of float32 sums."""
    assert [e.keys() for e in a] == [e.keys() for e in b]
    for x, y in zip(a, b, strict=True):
        for name in x:
            assert x[name] == pytest.approx(y[name], rel=2e-4, abs=1e-6), name


@pytest.mark.parametrize("number", [5, 6])
def test_halves_give_the_same_run(tmp_path, caplog, number):
    """In the first and in the second micro-step of step 3, after the backward has put its gradient there: neither is
    counted twice, in the gradient or in the metrics."""
    expected = make(tmp_path / "a", save_strategy="no", logging_steps=1, disable_dropout=True)
    expected.train()
    trainer = make(tmp_path / "b", save_strategy="no", logging_steps=1, disable_dropout=True)
    state = fail_from(trainer, number, responses=2)
    trainer.train()
    assert state["failed"] == 1
    assert max(state["rows"][number:]) == 2
    assert caplog.text.count("out of memory in step 3") == 1
    logs = [[e for e in t.state.log_history if "loss" in e] for t in (expected, trainer)]
    drop = ("time", "second", "clip_ratio/low_min", "clip_ratio/high_max")
    close(*[[{k: v for k, v in e.items() if not any(d in k for d in drop)} for e in log] for log in logs])
    for (name, a), (_, b) in zip(
        expected.shared.trainable_parameters(), trainer.shared.trainable_parameters(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=name)


def test_halves_that_do_not_fit_save_and_stop(tmp_path, caplog):
    trainer = make(tmp_path, save_steps=100)
    fail_from(trainer, 5, responses=0)
    with pytest.raises(torch.OutOfMemoryError, match=r"step 3, also with half of a micro-batch of 4 completions"):
        trainer.train()
    assert [p.name for p in folders.checkpoints(tmp_path)] == ["checkpoint-2"]
    resumed = make(tmp_path, save_steps=100)
    resumed.train(resume_from_checkpoint=True)
    whole = make(tmp_path / "whole", save_strategy="no")
    whole.train()
    assert result(resumed) == result(whole)


def test_the_choice_of_halves_survives_a_resume(tmp_path):
    trainer = make(tmp_path, max_steps=4)
    fail_from(trainer, 5, responses=2)
    trainer.train()
    resumed = make(tmp_path, max_steps=6)
    state = fail_from(resumed, 1, responses=2)
    resumed.train(resume_from_checkpoint=True)
    assert state["failed"] == 0


def test_a_rollout_gets_fewer_rows(tmp_path, caplog):
    """16 rows do not fit, 8 do: the same completions, since every row has random numbers of its own."""
    expected = make(tmp_path / "a", save_strategy="no", max_rollout_rows=8)
    expected.train()
    trainer = make(tmp_path / "b", save_strategy="no", max_rollout_rows=16)
    generate = trainer.sampler.generate

    def limited(*args):
        if trainer.sampler.max_rows > 8:
            raise torch.OutOfMemoryError("no memory")
        return generate(*args)

    trainer.sampler.generate = limited
    trainer.train()
    assert result(trainer) == result(expected)
    assert caplog.text.count("at most 8 rows decode together") == 1


def test_a_group_that_does_not_fit_stops(tmp_path):
    """Completions of one prompt always decode together: four rows cannot become two."""
    trainer = make(tmp_path, save_strategy="no", max_rollout_rows=4)
    calls = []

    def never(*args):
        calls.append(1)
        raise torch.OutOfMemoryError("no memory")

    trainer.sampler.generate = never
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert len(calls) == 1


def test_other_errors_are_not_memory(tmp_path):
    assert out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("shape mismatch"))
    trainer = make(tmp_path, save_strategy="no")
    fail_from(trainer, 5, responses=0, error=RuntimeError("shape mismatch"))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        trainer.train()


def batch_of(*counts):
    groups = [Group.from_lists([1, 2], [[7] * (i + 1) for i in range(n)]) for n in counts]
    lengths = torch.tensor([i + 1 for n in counts for i in range(n)])
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    values = torch.arange(mask.numel()).reshape(mask.shape).float()
    return MiniBatch(groups, torch.arange(len(mask)).float(), mask, values, len(mask), ref_logps=values + 1)


def test_halves_keep_groups_whole():
    """Groups of 3, 1 and 2 completions: 3 against 1 + 2. Columns are cut to the longest of the half."""
    first, second = batch_of(3, 1, 2).halves()
    assert [g.num_responses for g in first.groups] == [3]
    assert [g.num_responses for g in second.groups] == [1, 2]
    assert first.mask.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert second.mask.tolist() == [[True, False], [True, False], [True, True]]
    assert second.advantages.tolist() == [3, 4, 5]
    assert second.sampler_logps.tolist() == [[9, 10], [12, 13], [15, 16]]
    assert second.ref_logps.tolist() == [[10, 11], [13, 14], [16, 17]]
    assert (first.rows, second.rows, first.parts, second.parts) == (3, 3, 2, 2)
    assert first.old_logps is None


def test_one_group_is_cut_between_completions():
    first, second = batch_of(3).halves()
    assert [len(ids) for ids in first.groups[0].response_ids] == [1]
    assert [len(ids) for ids in second.groups[0].response_ids] == [2, 3]
    alone = batch_of(1)
    assert alone.halves() == [alone]
