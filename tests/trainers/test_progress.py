"""The console's one line a log."""

from __future__ import annotations

from transformers import PrinterCallback, ProgressCallback

from hf_rlx.trainers.progress import OneLineProgress, one_line, use_one_line


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
