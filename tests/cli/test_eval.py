"""`hf-rlx eval`: accuracy with its interval."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hf_rlx import GRPOConfig
from hf_rlx.cards.facts import Score
from hf_rlx.cli import main
from hf_rlx.cli.data import load_data
from hf_rlx.cli.eval import summary
from hf_rlx.cli.options import defaults

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"


def test_the_bundled_model_on_held_out_sums(tmp_path, monkeypatch, capsys):
    """The share, its Wilson interval and the count in text and JSON agree; nothing else is written."""
    monkeypatch.chdir(tmp_path)
    words = ["--model", "tiny", "--dataset", "arithmetic:n_train=1,n_test=64", "--limit", "32", "--quiet"]
    assert main(["eval", *words, "--output", "out/eval.json"]) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "eval.json").read_text(encoding="utf-8"))
    metrics = found["metrics"]
    right = round(metrics["accuracy/number_whole"] * 32)
    expected = Score.from_counts(right, 32)
    assert metrics["accuracy/number_whole_n"] == 32
    assert (metrics["accuracy/number_whole_low"], metrics["accuracy/number_whole_high"]) == pytest.approx(
        (expected.low, expected.high), abs=1e-6
    )
    assert (
        f"number_whole: {expected.accuracy:.3f} (95 % interval {expected.low:.3f} to {expected.high:.3f})" in printed
    )
    assert f"{right} of 32 right" in printed
    assert (found["model"], found["temperature"]) == ("tiny", 0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_example_runs(capsys):
    """On the first eight rows, sampled."""
    assert main(["eval", "--config", str(CONFIGS / "eval.yaml"), "--limit", "8", "--quiet"]) == 0
    assert " of 8 right" in capsys.readouterr().out


def test_a_reward_that_is_no_verdict_has_a_mean(tmp_path, capsys):
    file = tmp_path / "half_reward.py"
    file.write_text("def half(completions, **kwargs):\n    return [0.5] * len(completions)\n", encoding="utf-8")
    (tmp_path / "rows.csv").write_text("question\n1+1=\n2+2=\n", encoding="utf-8")
    words = ["--model", "tiny", "--dataset", str(tmp_path / "rows.csv"), "--columns", "prompt=question", "--quiet"]
    words += ["--reward", f"{file}:half", "--temperature", "1", "--max-completion-length", "4"]
    assert main(["eval", *words, "--completions", str(tmp_path / "answers")]) == 0
    assert "mean reward 0.5000" in capsys.readouterr().out
    assert list((tmp_path / "answers" / "completions").glob("*.parquet"))


def test_answers_fit_the_context(tmp_path, capsys):
    """The bundled model has 128 positions and a token a character, BOS beside: the longest of the prompts takes 5, so
    123 are left. A length that is given stays as it is."""
    (tmp_path / "score.py").write_text("def one(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    (tmp_path / "rows.csv").write_text("prompt\n1+1=\n2+=\n", encoding="utf-8")
    words = ["--model", "tiny", "--dataset", str(tmp_path / "rows.csv"), "--reward", f"{tmp_path / 'score.py'}:one"]
    assert main(["eval", *words, "--quiet"]) == 0
    told = "note: answers have up to 123 tokens, not 512: the model's context is 128, and the longest prompt takes 5\n"
    assert told in capsys.readouterr().err
    assert main(["eval", *words, "--quiet", "--max-completion-length", "4"]) == 0
    assert "note: " not in capsys.readouterr().err


def test_settings_that_are_missing_or_out_of_range(capsys):
    for message, words in {
        "--dataset is missing": ["--model", "tiny"],
        "--limit must be at least 1, got 0": ["--model", "tiny", "--dataset", "arithmetic", "--limit", "0"],
    }.items():
        with pytest.raises(SystemExit) as stop:
            main(["eval", *words])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


def test_summary():
    """32 of 64: the Wilson interval is 0.381 to 0.619."""
    metrics = {
        "accuracy/f": 0.5,
        "accuracy/f_low": 0.381,
        "accuracy/f_high": 0.619,
        "accuracy/f_n": 64.0,
        "reward": 0.5,
        "completions/clipped_ratio": 0.25,
    }
    assert summary(metrics) == (
        "f: 0.500 (95 % interval 0.381 to 0.619), 32 of 64 right\nmean reward 0.5000, 25.0% cut"
    )


def test_the_rows_that_training_holds_out(tmp_path, capsys):
    """`--eval-fraction` takes the same rows as a training command with the same seed, by default and by number."""
    file = tmp_path / "rows.csv"
    file.write_text("prompt,answer\n" + "".join(f"{i}+1=,{i + 1}\n" for i in range(8)), encoding="utf-8")
    words = ["eval", "--model", "tiny", "--dataset", str(file), "--reward", "number", "--eval-fraction", "0.5"]
    words += ["--quiet", "--max-completion-length", "4", "--completions"]
    for name, seed in (("default", []), ("seven", ["--seed", "7"])):
        folder = tmp_path / name
        assert main([*words, str(folder), *seed]) == 0
        assert " of 4 right\ngreedy answers, mean reward" in capsys.readouterr().out
        (found,) = (folder / "completions").glob("*.parquet")
        prompts = pq.read_table(found)["prompt"].to_pylist()
        training = load_data(defaults({"dataset": str(file), "eval_fraction": 0.5}), "prompts", 7 if seed else 42)
        assert sorted(prompts) == sorted(training.held_out["prompt"])
    assert GRPOConfig("unused").seed == 42


def test_how_the_model_is_loaded_counts(capsys):
    """A type that weights cannot have, and an attention that is not there, are refused, not left out."""
    words = ["eval", "--model", "tiny", "--dataset", "arithmetic:n_train=1,n_test=2", "--quiet"]
    with pytest.raises(SystemExit) as caught:
        main([*words, "--dtype", "flaot32"])
    assert caught.value.code == 2
    assert "--dtype: weights are of float32, bfloat16, float16 or auto, not of 'flaot32'" in capsys.readouterr().err
    assert main([*words, "--attn-implementation", "nope"]) == 1
    assert "nope" in capsys.readouterr().err
    assert main([*words, "--dtype", "bfloat16"]) == 0
