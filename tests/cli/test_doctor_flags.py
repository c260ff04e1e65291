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
