"""The console's one line a log."""

from __future__ import annotations

import pytest
from transformers import PrinterCallback, ProgressCallback, TrainerState

from hf_rlx.trainers.progress import OneLinePrinter, OneLineProgress, going_on, one_line, use_one_line


def test_a_training_log_shows_what_a_person_follows():
    """Known keys in a fixed order, everything else left to trackers."""
    logs = {"loss": 0.125, "reward": 0.5, "kl": 0.25, "completions/clipped_ratio": 0.5, "time/rollout": 0.9}
    assert one_line(logs, 7) == "step    7  reward 0.500  kl 0.2500  cut 50%  loss 0.1250"


def test_an_evaluation_shows_accuracy_with_its_interval():
    """Any prefix; a graded reward has no accuracy and shows its mean only."""
    logs = {"test_reward": 0.75, "test_accuracy/f": 0.75, "test_accuracy/f_low": 0.5, "test_accuracy/f_high": 0.9}
    assert one_line(logs | {"test_accuracy/f_n": 12.0}, 3) == (
        "step    3  test: reward 0.750  f 0.750 (0.500 to 0.900, n=12)"
    )
    assert one_line({"eval_reward": 0.25}, 3) == "step    3  eval: reward 0.250"


def test_other_logs_are_quiet_or_short():
    """The summary of a run is one sentence; a log without any of it prints nothing."""
    assert one_line({"train_runtime": 61.2, "train_loss": 0.1}, 9) == "finished in 61 s"
    assert one_line({"epoch": 1.0}, 9) is None


class _Callbacks:
    def __init__(self, *kinds):
        self.kinds = list(kinds)

    def pop_callback(self, kind):
        return self.kinds.pop(self.kinds.index(kind)) if kind in self.kinds else None

    def add_callback(self, kind):
        self.kinds.append(kind)


def test_only_plain_callbacks_are_replaced():
    """A bar stays a bar, a printer a printer; a notebook has neither and keeps its table."""
    bar = _Callbacks(ProgressCallback)
    use_one_line(bar)
    assert bar.kinds == [OneLineProgress]
    printer = _Callbacks(PrinterCallback)
    use_one_line(printer)
    assert [kind.__name__ for kind in printer.kinds] == ["OneLinePrinter"]
    notebook = _Callbacks(int)
    use_one_line(notebook)
    assert notebook.kinds == [int]


def test_each_of_several_reward_functions():
    """Their means stand behind the total, those of weight 0 too; of one function the total says it."""
    logs = {"reward": 0.5, "rewards/right/mean": 0.5, "rewards/right/std": 0.1, "loss": 0.125}
    assert one_line(logs, 7) == "step    7  reward 0.500  loss 0.1250"
    logs["rewards/short/mean"] = -2.0
    assert one_line(logs, 7) == "step    7  reward 0.500 (right 0.500, short -2.000)  loss 0.1250"


@pytest.mark.parametrize("kind", [OneLinePrinter, OneLineProgress])
def test_a_resumed_run_says_where_it_goes_on(kind, capsys):
    """One line, of a run that has done steps already; the process that does not print says nothing."""
    state = TrainerState(global_step=4, max_steps=10)
    kind().on_train_begin(None, state, None)
    assert "going on after step 4 of 10\n" in capsys.readouterr().out
    assert going_on(TrainerState(global_step=0, max_steps=10)) is None
    assert going_on(TrainerState(global_step=10, max_steps=10)) is None
    assert going_on(TrainerState(global_step=4, max_steps=10, is_world_process_zero=False)) is None
