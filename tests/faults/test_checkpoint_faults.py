"""Checkpoints under attack: killed, cut, flipped, deleted, a full disk, a second run, signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import TrainerCallback

from hf_rlx.persistence import folders, lock
from hf_rlx.persistence.folders import CheckpointError, DiskFullError
from hf_rlx.persistence.interrupts import TrainingInterrupted
from hf_rlx.persistence.state import load_state, save_state
from hf_rlx.trainers import checkpointing
from tests.invariants.test_resume import make, result
from tests.trainers.tools import rows, tiny_llama

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of four steps with a checkpoint at 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    make(folder, max_steps=4, save_steps=2).train()
    return folder


@pytest.fixture
def run(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def resume(folder, wanted=True, **fields):
    trainer = make(folder, **{"max_steps": 5, "save_steps": 2, **fields})
    trainer.train(resume_from_checkpoint=wanted)
    return trainer


FILES = ["adapter_model.safetensors", "optimizer.safetensors", "rank-0.json", "scheduler.json", "trainer_state.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["cut", "flip"])
def test_a_damaged_newest_checkpoint_is_skipped(run, caplog, name, how):
    """Half of a file, or one bit of it: the run goes on from checkpoint-2 and names the file."""
    path = run / "checkpoint-4" / name
    data = bytearray(path.read_bytes())
    if how == "cut":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)
    began = []
    trainer = make(run, max_steps=5, save_steps=2)
    sample = trainer.sample
    trainer.sample = lambda rows: began.append(trainer.state.global_step) or sample(rows)
    trainer.train(resume_from_checkpoint=True)
    assert "skipped checkpoint-4" in caplog.text
    assert name in caplog.text
    assert began == [4]  # from step 2 on, the window in the checkpoint served steps 3 and 4
    assert trainer.state.global_step == 5


def test_a_half_written_folder_is_skipped(run, caplog):
    (run / "checkpoint-4" / "manifest.json").unlink()
    assert resume(run).state.global_step == 5
    assert "has no manifest.json: it is half written" in caplog.text


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_an_error(run, name):
    """Not a silent fresh optimizer, as in transformers."""
    (run / "checkpoint-4" / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{name} is missing .* delete .*checkpoint-4 to resume from the one"):
        resume(run)


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error(run):
    path = run / "checkpoint-4" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"optimizer.safetensors has .* bytes.*checkpoint-2 is whole: resume"):
        resume(run, str(run / "checkpoint-4"))
    for folder in ("checkpoint-2", "checkpoint-4"):
        (run / folder / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        resume(run)


def test_no_checkpoint_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint found .* start without resume_from_checkpoint"):
        resume(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        resume(tmp_path, str(tmp_path / "checkpoint-9"))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 1}, "seed: 42 -> 1"),
        ({"data_seed": 1}, "data_seed: None -> 1"),
        ({"per_device_train_batch_size": 8}, "per_device_train_batch_size: 4 -> 8"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps: 2 -> 4"),
        ({"num_generations": 2}, "num_generations: 4 -> 2"),
        ({"num_iterations": 1}, "num_iterations: 2 -> 1"),
        ({"dataset": rows(7)}, "train_dataset: 6 rows of"),
        ({"dataset": rows(6).map(lambda row: {"number": row["number"] + (row["number"] == 3)})}, "train_dataset: 6"),
    ],
)
def test_another_run_is_refused(run, change, told):
    with pytest.raises(ValueError, match="belongs to another run") as caught:
        resume(run, **change)
    assert told in str(caught.value)
    assert str(caught.value).count("->") == 1 + str(caught.value).count("Then -> now")


def test_other_processes_are_refused(run):
    facts = json.loads((run / "checkpoint-4" / "run.json").read_text())
    assert facts["world_size"] == 1
    (run / "checkpoint-4" / "run.json").write_text(json.dumps({**facts, "world_size": 2}))
    trainer = make(run)
    with pytest.raises(ValueError, match="world_size: 2 -> 1"):
        checkpointing.check_resume(trainer, run / "checkpoint-4")


def test_what_may_change_is_told(run, caplog):
    """A lower learning rate after a divergence is a reason to resume: it is allowed, and said."""
    assert resume(run, temperature=0.9, max_steps=6).state.global_step == 6
    assert "resuming with other settings than before: max_steps: 4 -> 6; temperature: 1.0 -> 0.9" in caplog.text
    assert "save_steps" not in caplog.text


def test_without_optimizer_there_is_nothing_to_resume(tmp_path):
    make(tmp_path, max_steps=1, save_only_model=True).train()
    with pytest.raises(ValueError, match="save_only_model=True: there is no optimizer state"):
        resume(tmp_path)


def test_twenty_kills_while_saving(tmp_path):
    """SIGKILL at random moments of a save: every time the newest whole checkpoint is found and resumed from."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/faults/kill_while_saving.py"), str(tmp_path / "run"), "20"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "resumable after 20 kills" in done.stdout


def test_leftovers_of_a_kill_are_cleared(run):
    """Staged folders go; a checkpoint that was making room for its successor comes back."""
    (run / ".tmp-checkpoint-6").mkdir()
    (run / ".tmp-checkpoint-6" / "adapter_model.safetensors").write_bytes(b"half")
    os.rename(run / "checkpoint-4", run / ".old-checkpoint-4")
    shutil.copytree(run / "checkpoint-2", run / ".old-checkpoint-2")
    folders.clean(run)
    assert sorted(p.name for p in run.iterdir() if "checkpoint" in p.name) == ["checkpoint-2", "checkpoint-4"]


def test_old_checkpoints_go_last(tmp_path):
    """Two are kept; at no moment are there fewer than that, the best one included."""
    trainer = make(tmp_path, max_steps=6, save_total_limit=2)
    seen = []
    commit = folders.commit

    def watched(target, facts):
        commit(target, facts)
        seen.append(sorted(p.name for p in tmp_path.glob("checkpoint-*")))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "commit", watched)
        trainer.train()
    assert seen[-1] == ["checkpoint-4", "checkpoint-5", "checkpoint-6"]
    assert [p.name for p in folders.checkpoints(tmp_path)] == ["checkpoint-6", "checkpoint-5"]
    for step in range(1, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
    folders.prune(tmp_path, 2, [tmp_path / "checkpoint-2"])
    assert [p.name for p in folders.checkpoints(tmp_path)] == ["checkpoint-6", "checkpoint-2"]


def test_a_full_disk_is_told_before_anything_is_written(run, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1234))
    with pytest.raises(DiskFullError, match=r"it needs [\d,]+ bytes and 1,234 are free; earlier checkpoints are unt"):
        resume(run, save_steps=1)
    assert [p.name for p in folders.checkpoints(run)] == ["checkpoint-4", "checkpoint-2"]
    assert folders.problem(run / "checkpoint-4") is None


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), SafetensorError("IoError: No space left on device (os error 28)")],
)
def test_a_disk_that_fills_while_writing(run, monkeypatch, error):
    """Safetensors raises its own error, which has the text only."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(checkpointing, "save_state", fail)
    with pytest.raises(DiskFullError, match=r"bytes and .* are free") as caught:
        resume(run, save_steps=1)
    assert caught.value.errno == 28
    assert not list(run.glob(".tmp-*"))
    assert folders.problem(run / "checkpoint-4") is None


def test_any_other_fault_while_writing_leaves_nothing_behind(run, monkeypatch):
    monkeypatch.setattr(checkpointing, "_write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        resume(run, save_steps=1)
    assert not list(run.glob(".tmp-*"))
    assert [p.name for p in folders.checkpoints(run)] == ["checkpoint-4", "checkpoint-2"]


def test_a_second_run_in_the_folder_is_refused(tmp_path):
    """From another process, and from another trainer of this one; free again afterwards."""
    code = f"""
import sys, time
from pathlib import Path
from hf_rlx.persistence import lock
with lock.hold(Path({str(tmp_path)!r})):
    print("held", flush=True)
    sys.stdin.readline()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    with other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RuntimeError, match=r"another run is training in .* choose another output_dir"):
            make(tmp_path, max_steps=1).train()
        other.stdin.write("\n")
        other.stdin.flush()
        other.wait(timeout=20)
    with lock.hold(tmp_path), pytest.raises(RuntimeError, match="another run"):
        make(tmp_path, max_steps=1).train()
    make(tmp_path, max_steps=1).train()


def at_update(trainer, number, act):
    """Call `act` in the middle of the update number `number` (from 1)."""
    loss, count = trainer.minibatch_loss, [0]

    def counted(model, batch):
        count[0] += 1
        if count[0] == number:
            act()
        return loss(model, batch)

    trainer.minibatch_loss = counted
    return count


@pytest.mark.parametrize("number", [5, 6])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_within_the_micro_step(tmp_path, caplog, signum, number):
    """Two micro-steps a step. Micro-step 5 opens step 3: what is saved is step 2, with the gradient of 5 done again on
    resume; 6 closes step 3. Either way the run that goes on is the one that never stopped."""
    expected = make(tmp_path / "whole", save_strategy="no")
    expected.train()
    trainer = make(tmp_path / "run", save_steps=100)
    count = at_update(trainer, number, lambda: os.kill(os.getpid(), signum))
    before = signal.getsignal(signum)
    with pytest.raises(TrainingInterrupted) as caught:
        trainer.train()
    assert caught.value.code == 128 + signum
    assert count[0] == number
    assert signal.getsignal(signum) is before
    step = 2 if number == 5 else 3
    assert f"stopped by {signal.Signals(signum).name} after step {step}" in caplog.text
    assert "trainer.train(resume_from_checkpoint=True)" in caplog.text
    assert [p.name for p in folders.checkpoints(tmp_path / "run")] == [f"checkpoint-{step}"]
    resumed = make(tmp_path / "run", save_steps=100)
    resumed.train(resume_from_checkpoint=True)
    assert result(resumed) == result(expected)


def test_a_signal_ends_a_rollout(tmp_path):
    """Sampling takes most of the time: it is left at the next token, and the step that it was for is done again."""
    trainer = make(tmp_path, save_steps=100)
    generate, calls = trainer.sampler.generate, []

    def second_is_interrupted(*args):
        *head, on_step = args

        def step(sampled):
            calls.append(sampled)
            if trainer.state.global_step == 4 and len(calls) > 1:
                signal.raise_signal(signal.SIGTERM)
            on_step(sampled)

        calls.clear()
        return generate(*head, step)

    trainer.sampler.generate = second_is_interrupted
    with pytest.raises(TrainingInterrupted):
        trainer.train()
    assert len(calls) == 2
    assert [p.name for p in folders.checkpoints(tmp_path)] == ["checkpoint-4"]


def test_a_second_signal_stops_at_once(tmp_path):
    trainer = make(tmp_path)

    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    at_update(trainer, 3, twice)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert [p.name for p in folders.checkpoints(tmp_path)] == ["checkpoint-1"]


def test_a_script_ends_cleanly(tmp_path):
    """Exit code 143, no traceback, and what to do next."""
    code = f"""
import os, signal
from pathlib import Path
from tests.faults.test_checkpoint_faults import at_update
from tests.invariants.test_resume import make
trainer = make(Path({str(tmp_path)!r}), save_steps=100)
at_update(trainer, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
trainer.train()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 143, done.stderr[-1000:]
    assert "Traceback" not in done.stderr
    assert "stopped by SIGTERM after step 2" in done.stderr
    assert (tmp_path / "checkpoint-2" / "manifest.json").is_file()


def test_training_in_a_thread_leaves_signals_alone(tmp_path):
    """Python delivers signals to the main thread only: there is nothing to catch in another one."""
    before, failed = signal.getsignal(signal.SIGINT), []

    def work():
        try:
            make(tmp_path, max_steps=1).train()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not failed
    assert not thread.is_alive()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_fault_in_a_step_saves_what_was_done(tmp_path, caplog):
    """Any error inside a step: weights are those of the step before, and a checkpoint says so."""
    trainer = make(tmp_path, save_steps=100)

    def fail():
        raise KeyError("x")

    at_update(trainer, 6, fail)
    with pytest.raises(KeyError):
        trainer.train()
    assert [p.name for p in folders.checkpoints(tmp_path)] == ["checkpoint-2"]
    assert "stopped by KeyError after step 2" in caplog.text


class At(TrainerCallback):
    """Calls something at one event of the loop."""

    def __init__(self, event, act):
        def called(*_, **__):
            act()  # what a callback returns would become the control

        setattr(self, event, called)


def fail():
    raise KeyError("x")


def test_a_resume_that_fails_early_leaves_the_checkpoint_alone(run):
    """A callback that raises before the run's state is back: what is in memory is not the state of step 4."""
    before = (run / "checkpoint-4" / "manifest.json").read_bytes()
    trainer = make(run, max_steps=6)
    trainer.add_callback(At("on_train_begin", fail))
    with pytest.raises(KeyError):
        trainer.train(resume_from_checkpoint=True)
    assert (run / "checkpoint-4" / "manifest.json").read_bytes() == before


def test_a_callback_that_fails_after_a_step_costs_nothing(tmp_path):
    """Whether it stands before or after the trainer's own: the step is done, and saved."""
    trainer = make(tmp_path, save_steps=100)
    count = []
    trainer.add_callback(At("on_step_end", lambda: count.append(1) or (len(count) == 3 and fail())))
    with pytest.raises(KeyError):
        trainer.train()
    assert [p.name for p in folders.checkpoints(tmp_path)] == ["checkpoint-3"]


def test_the_checkpoint_just_written_is_never_deleted(run):
    """Nor because a damaged one has a higher number."""
    (run / "checkpoint-4" / "optimizer.json").write_text("{")
    trainer = make(run, max_steps=3, save_steps=1, save_total_limit=1)
    trainer.train(resume_from_checkpoint=True)
    assert folders.find(run, str(run / "checkpoint-3")).name == "checkpoint-3"


def test_an_old_checkpoint_that_cannot_be_deleted_is_told(run, monkeypatch, caplog):
    def refuse(path):
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(folders, "_remove", refuse)
    folders.prune(run, 1, [run / "checkpoint-4"])
    assert "checkpoint-2 is over save_total_limit but cannot be deleted" in caplog.text


def test_a_finished_run_trains_no_further(run, caplog):
    """Asked again after its end, as a queue does: no step, the same weights, the state of the end."""
    before = {p.name for p in folders.checkpoints(run)}
    trainer = make(run, max_steps=4)
    out = trainer.train(resume_from_checkpoint=True)
    assert out.global_step == trainer.state.global_step == 4
    assert {p.name for p in folders.checkpoints(run)} == before
    assert "has done 4 of 4 steps: nothing is left to train" in caplog.text
    again = make(run.parent / "again", max_steps=4, save_strategy="no")
    again.train()
    assert result(trainer)[0] == result(again)[0]


def test_another_base_is_refused(run):
    model = tiny_llama()
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    trainer = make(run, max_steps=6, model=model)
    with pytest.raises(ValueError, match="frozen_weights: "):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(("change", "told"), [({"optim": "sgd"}, "optimizer: ['adamw_torch")])
def test_another_optimizer_is_refused(run, change, told):
    with pytest.raises(ValueError, match="belongs to another run") as caught:
        resume(run, **change)
    assert told in str(caught.value)


def test_a_signal_at_the_very_end_is_not_lost(tmp_path):
    """The run is complete and saved, but the script must not go on to push and clean up for minutes."""
    trainer = make(tmp_path, max_steps=2)
    trainer.add_callback(At("on_train_end", lambda: signal.raise_signal(signal.SIGTERM)))
    with pytest.raises(TrainingInterrupted):
        trainer.train()
    assert trainer.keeper.interrupts.requested is None  # evaluate() in the next cell works


def test_a_child_that_was_forked_while_training_obeys_signals(tmp_path):
    """As the workers of a multiprocessing.Pool in a reward function do, which `terminate` ends by SIGTERM."""
    codes = []

    def fork():
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(write, b"x")  # a signal before this would be lost in the fork
            signal.pause()
            os._exit(0)
        assert os.read(read, 1) == b"x"
        os.kill(pid, signal.SIGTERM)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    trainer = make(tmp_path, max_steps=1)
    at_update(trainer, 1, fork)
    trainer.train()
    assert codes == [-signal.SIGTERM]


def test_an_evaluation_that_was_interrupted_is_done_on_resume(tmp_path):
    """Logs and weights are those of the run that never stopped; the signal comes while step 4 is evaluated."""
    fields = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 100, "eval_dataset": rows(3)}
    expected = make(tmp_path / "whole", **fields)
    expected.train()
    trainer = make(tmp_path / "run", **fields)
    generate = trainer.sampler.generate

    def interrupted(*args):
        if trainer.keeper.evaluation_pending and trainer.state.global_step == 4:
            signal.raise_signal(signal.SIGTERM)
        return generate(*args)

    trainer.sampler.generate = interrupted
    with pytest.raises(TrainingInterrupted):
        trainer.train()
    resumed = make(tmp_path / "run", **fields)
    resumed.train(resume_from_checkpoint=True)
    assert result(resumed) == result(expected)


@pytest.mark.parametrize("step", [3, 4, 5])
def test_the_last_step_of_an_epoch_waits_for_its_log(tmp_path, step):
    """Four steps an epoch, logged and evaluated at its end: the checkpoint of step 4 has both."""
    fields = {"logging_strategy": "epoch", "eval_strategy": "epoch", "save_steps": 1, "eval_dataset": rows(3)}
    expected = make(tmp_path / "whole", **fields)
    expected.train()
    shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", tmp_path / "run" / f"checkpoint-{step}")
    resumed = make(tmp_path / "run", **fields)
    resumed.train(resume_from_checkpoint=True)
    assert result(resumed) == result(expected)


def test_a_commit_flushes_before_it_renames_and_deletes_last(run, monkeypatch):
    """Every file and folder before the rename, the parent after it; what was there goes at the very end."""
    events = []
    flush, rename, rmtree = folders._flush, os.rename, shutil.rmtree
    monkeypatch.setattr(folders, "_flush", lambda p: events.append(("flush", p)) or flush(p))
    monkeypatch.setattr(os, "rename", lambda a, b: events.append(("rename", Path(b))) or rename(a, b))

    def delete(path, **kwargs):
        events.append(("delete", Path(path)))
        rmtree(path, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", delete)
    target = run / "checkpoint-4"
    folder = folders.begin(target, 10)
    (folder / "role").mkdir()
    for name in ("trainer_state.json", "role/head.safetensors"):
        (folder / name).write_text("x")
    folders.commit(target, {"step": 4})
    flushed = {"trainer_state.json", "role/head.safetensors", "manifest.json", "role", "."}
    before = [p.relative_to(folder).as_posix() for kind, p in events[: len(flushed)] if kind == "flush"]
    assert set(before) == flushed
    assert events[len(flushed) :] == [
        ("rename", run / ".old-checkpoint-4"),
        ("rename", target),
        ("flush", run),
        ("delete", run / ".old-checkpoint-4"),
    ]
    assert folders.problem(target) is None


@pytest.mark.parametrize(
    "manifest",
    [
        {"format": 1, "files": {}},
        {"format": 99, "files": {"trainer_state.json": {"bytes": 1, "sha256": "x"}}},
        {"format": 1, "files": {"trainer_state.json": {"bytes": float("inf"), "sha256": "x"}}},
        {"format": 1, "files": {"trainer_state.json": {}, "../../x": {"bytes": 1, "sha256": "x"}}},
        [],
    ],
)
def test_a_manifest_that_promises_nothing_is_damage(run, caplog, manifest):
    (run / "checkpoint-4" / "manifest.json").write_text(json.dumps(manifest))
    assert resume(run).state.global_step == 5
    assert "skipped checkpoint-4" in caplog.text


def test_a_run_is_not_a_checkpoint(run):
    with pytest.raises(ValueError, match=r"is a run, not a checkpoint; resume from .*checkpoint-4"):
        resume(run, str(run))


def test_every_part_of_the_state_comes_back(tmp_path):
    """Each field away from its default, through the files, into a new trainer."""
    trainer = make(tmp_path, max_steps=3, log_completions=True)
    trainer.train()
    trainer.gradient_guard.skipped, trainer.scorer.unscored, trainer.halving.on = 1, 2, True
    trainer.forward_limit.most, trainer.sampler.max_rows, trainer.kl_controller.coef = 77, 8, 0.125
    trainer.tables._rows = {"train": [{"step": 3, "prompt": "p", "reward": None}]}
    trainer.alerts.load_state_dict({**trainer.alerts.state_dict()})
    expected = trainer.run_state()
    save_state(tmp_path, "x", expected)
    other = make(tmp_path / "other", max_steps=1)
    other.train()
    other.load_run_state(load_state(tmp_path, "x"))
    save_state(tmp_path, "y", other.run_state())
    first, second = ((tmp_path / f"{n}.json").read_text() for n in "xy")
    assert first == second
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()
    assert json.loads(first)["kl_controller"] == {"coef": 0.125}
