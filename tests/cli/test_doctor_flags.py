"""`hf-rlx doctor METHOD` with the line of a run."""

from __future__ import annotations

import pytest

from hf_rlx.cli import main

SMALL = ["--model", "tiny", "--dataset", "arithmetic:n_train=32,n_test=4"]


def test_the_flags_of_a_method_count(tmp_path, capsys):
    """An answer of 128 tokens leaves no room in the bundled model's context of 128; 8 do."""
    words = ["doctor", "grpo", *SMALL, "--output-dir", str(tmp_path), "--num_generations", "4", "--no-lora"]
    assert main([*words, "--max-completion-length", "8"]) == 0
    capsys.readouterr()
    assert main([*words, "--max-completion-length=128"]) == 1
    assert "128" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--num-generations", "4"], "is a setting of a method; name it first: hf-rlx doctor METHOD"),
        (["dpo", "--num-generations", "4"], "--num-generations is no setting of dpo"),
        (["grpo", "--num-generatoins", "4"], "unknown flag --num-generatoins"),
        (["grpo", "--num-generations", "6"], "must be a multiple of num_generations"),
        (["grpo", "--lora-r", "0"], "--lora-r must be at least 1"),
    ],
)
def test_flags_that_do_not_fit(capsys, words, told):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", *words])
    assert told in capsys.readouterr().err


def test_the_doctor_speaks_in_flags(tmp_path, capsys):
    """Columns are renamed by a flag, and evaluations without rows are told with those that hold some out."""
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"question": "a", "accepted": "b", "rejected": "c"}\n' * 4, encoding="utf-8")
    words = ["doctor", "dpo", "--model", "tiny", "--dataset", str(file), "--output-dir", str(tmp_path / "run")]
    assert main(words) == 1
    told = capsys.readouterr().out
    assert "--columns chosen=accepted prompt=question" in told
    assert "dataset.rename" not in told
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--eval-strategy", "epoch"])
    assert "nothing is held out; give --eval-dataset FILE or --eval-fraction 0.1" in capsys.readouterr().err


def test_a_task_has_its_own_length_as_in_the_run(tmp_path, capsys):
    """The bundled model has a context of 128 tokens, and arithmetic asks for 8 of an answer, not for GRPO's 512."""
    words = ["doctor", "grpo", "--model", "tiny", "--dataset", "arithmetic:n_train=64", "--output-dir", str(tmp_path)]
    assert main(words) == 0
    assert "leaves none for a prompt" not in capsys.readouterr().out
