"""What a run prints: one short line a log, no bars in a file, and what comes after a stop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_rlx.cli import main
from hf_rlx.trainers import progress
from hf_rlx.trainers.progress import TimeLeft, how_sampled, one_line

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "examples" / "configs"
QUICK = ["--use-cpu", "--report-to", "none", "--lora-r", "2", "--logging-steps", "1"]


def test_lines_of_trainers_on_given_answers():
    """A policy's metrics and a reward model's; held-out ones with their interval; the time left at the end."""
    logs = {"loss": 0.5, "rewards/accuracies": 0.75, "rewards/margins": 0.125, "rewards/chosen": 9.0, "epoch": 1.0}
    assert one_line(logs, 3, left="8 s left") == "step    3  loss 0.5000  accuracy 0.75  margin 0.125  8 s left"
    logs = {"loss": 0.5, "accuracy": 0.25, "mean_reward": 1.0, "min_reward": 0.0, "grad_norm": 2.0}
    assert one_line(logs, 3) == "step    3  loss 0.5000  accuracy 0.25  grad 2.00"
    held = {"eval_loss": 0.25, "eval_accuracy": 0.5, "eval_accuracy_low": 0.25, "eval_accuracy_high": 0.75}
    assert one_line({**held, "eval_mean_reward": 1.0}, 4) == (
        "step    4  eval: loss 0.2500  accuracy 0.500 (0.250 to 0.750)"
    )
    graded = {"eval_reward": 0.25, "eval_reward_low": 0.125, "eval_reward_high": 0.375, "eval_reward_n": 8.0}
    assert one_line(graded, 3) == "step    3  eval: reward 0.250 (0.125 to 0.375, n=8)"
    assert one_line({"eval_reward": 0.25}, 3, "greedy answers") == "step    3  eval: reward 0.250  greedy answers"


@pytest.mark.parametrize(
    ("temperature", "answers", "words"),
    [(None, None, "greedy answers"), (None, 4, "sampled at temperature 0.7"), (1.0, 1, "sampled at temperature 1")],
)
def test_how_answers_are_sampled(temperature, answers, words):
    """As `evaluate_rollouts` decides: greedy where one answer a prompt is asked for and no temperature."""
    args = SimpleNamespace(eval_temperature=temperature, num_generations_eval=answers, temperature=0.7)
    assert how_sampled(args) == words
    assert how_sampled(SimpleNamespace()) == ""


def test_time_left(monkeypatch):
    """Two steps of 10 took 20 s: 80 s are left; of 100, 980 s or 16 min; of 1000, 9980 s or 2.8 h."""
    now = iter([100.0, 120.0, 120.0, 120.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    left = TimeLeft()
    assert left.words(1, 10) == ""
    left.begin(5)
    left.begin(6)
    assert left.words(7, 15) == "80 s left"
    assert left.words(7, 105) == "16 min left"
    assert left.words(7, 1005) == "2.8 h left"
    assert left.words(15, 15) == ""


def test_a_log_file_has_lines_and_no_bars(tmp_path):
    """As a user starts it with both streams into a file: no carriage return, no percent bar, no dictionary. The base
    is scored at step 0."""
    words = ["grpo", "--config", str(CONFIGS / "grpo.yaml"), "--output-dir", str(tmp_path / "run"), *QUICK]
    words += ["--max-steps", "2", "--per-device-train-batch-size", "8", "--dataset", "arithmetic:n_train=16,n_test=8"]
    done = subprocess.run(
        [sys.executable, "-m", "hf_rlx.cli", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-800:]
    told = done.stdout + done.stderr
    for sign in ("\r", "it/s", "completion/s", "%|", "{'"):
        assert sign not in told, sign
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["0", "1", "2", "2"]
    assert "sampled at temperature 1" in lines[0]
    assert "loss" in lines[-2]
    assert "prompt ┃ completion" in done.stdout  # tables stay


def test_trainers_on_given_answers_print_lines(tmp_path, capsys):
    """In the place of the Trainer's dictionaries."""
    words = ["dpo", "--config", str(CONFIGS / "dpo.yaml"), "--output-dir", str(tmp_path), *QUICK, "--max-steps", "2"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "{'" not in out
    assert re.search(r"^step    1  .*loss 0\.69\d\d  accuracy 0\.50  margin -?0\.000 .* s left$", out, re.M)
    assert re.search(r"^step    2  eval: loss \d\.\d{4}  accuracy 0\.\d{3} \(0\.\d{3} to 0\.\d{3}\)", out, re.M)


FAILING = """
CALLS = []

def reward(completions, **kwargs):
    CALLS.append(1)
    if len(CALLS) > 2:
        raise KeyError("oops")
    return [float(len(c)) for c in completions]
"""


def test_a_reward_that_fails_names_the_command_that_goes_on(tmp_path, capsys):
    """The whole line with `--resume auto`, and no Python call."""
    (tmp_path / "failing.py").write_text(FAILING, encoding="utf-8")
    words = ["--model", "tiny", "--dataset", "arithmetic:n_train=16,n_test=4", "--max-steps", "3", *QUICK]
    words += ["--reward", f"{tmp_path / 'failing.py'}:reward", "--output-dir", str(tmp_path / "run")]
    words += ["--eval-strategy", "no", "--save-steps", "1"]
    assert main(["grpo", *words]) == 1
    told = capsys.readouterr().err
    assert f"saved {tmp_path / 'run' / 'checkpoint-2'}. Go on with:\n  hf-rlx grpo --model tiny" in told
    assert told.count("--resume auto") == 1
    assert "resume_from_checkpoint" not in told
    assert "raised KeyError: 'oops'" in told


def test_resuming_what_is_done(tmp_path, capsys):
    """At and below the checkpoint's step: nothing is left, and what to raise; above it, it goes on."""
    words = ["sft", "--config", str(CONFIGS / "sft.yaml"), "--output-dir", str(tmp_path), *QUICK, "--resume", "auto"]
    assert main([*words, "--max-steps", "2"]) == 0
    assert "nothing was left" not in capsys.readouterr().out
    for steps in ("2", "1"):
        assert main([*words, "--max-steps", steps]) == 0
        assert (
            "nothing was left to train: the checkpoint has 2 steps; to train on, repeat the command with more than "
            f"--max-steps {steps}\n" in capsys.readouterr().out
        )
    assert main([*words, "--max-steps", "3"]) == 0
    assert "3 steps done" in capsys.readouterr().out


# The base's score.

GRPO = ["grpo", "--model", "tiny", "--dataset", "arithmetic:n_train=16,n_test=8", "--max-steps", "1", *QUICK]


def evaluations(out: str) -> list[str]:
    """The steps of the evaluation lines."""
    return [line.split()[1] for line in out.splitlines() if line.startswith("step ") and "eval: " in line]


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ([], ["0", "1"]),
        (["--no-eval-on-start"], ["1"]),
        (["--eval-on-start", "false"], ["1"]),
        (["--eval-strategy", "no"], []),
    ],
)
def test_the_base_is_scored_where_rows_are_held_out(tmp_path, capsys, words, steps):
    assert main([*GRPO, "--output-dir", str(tmp_path), *words]) == 0
    assert evaluations(capsys.readouterr().out) == steps


def test_the_file_and_a_resumed_run_leave_the_base_alone(tmp_path, capsys):
    """`eval_on_start: false` in the YAML counts; a run that goes on has its base's score already."""
    (tmp_path / "no.yaml").write_text("eval_on_start: false\n", encoding="utf-8")
    assert main([*GRPO, "--config", str(tmp_path / "no.yaml"), "--output-dir", str(tmp_path / "a")]) == 0
    assert evaluations(capsys.readouterr().out) == ["1"]
    assert main([*GRPO, "--output-dir", str(tmp_path / "a"), "--resume", "auto", "--max-steps", "2"]) == 0
    assert evaluations(capsys.readouterr().out) == ["2"]


def test_rounds_score_their_base_once(tmp_path, capsys):
    """Rounds are evaluated before the first and after each; with `--no-evaluate-rounds` the base is scored too."""
    words = ["iterative-dpo", *GRPO[1:5], "--num-rounds", "1", "--prompts-per-round", "4", "--num-generations", "4"]
    words += ["--per-device-train-batch-size", "4", "--epochs-per-round", "1", *QUICK]
    assert main([*words, "--output-dir", str(tmp_path / "a")]) == 0
    assert evaluations(capsys.readouterr().out) == ["0", "1"]
    assert main([*words, "--no-evaluate-rounds", "--output-dir", str(tmp_path / "b")]) == 0
    assert evaluations(capsys.readouterr().out) == ["0", "1"]


def test_columns_of_one_name_are_told_apart(tmp_path):
    """A function called `reward` beside another: the sum is called `total`."""
    from hf_rlx.trainers.tables import render

    row = {"reward": 1.0, "rewards/reward": 0.5, "rewards/short": 0.5, "prompt": "p", "completion": "c", "tokens": 1}
    table = render([{**row, "finished": True}], "title", 1)
    assert [str(column.header) for column in table.columns] == [
        *("total", "reward", "short", "prompt", "completion", "tokens")
    ]
