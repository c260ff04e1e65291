"""Messages that are written for Python, in the words of a command line."""

from __future__ import annotations

import logging

import pytest

from hf_rlx.cli.words import FlagWords, in_flags

FIELDS = {
    *("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "optim", "beta"),
    *("max_completion_length", "max_steps"),
}


@pytest.mark.parametrize(
    ("python", "flags"),
    [
        (
            "per_device_train_batch_size=4 with twice the gradient_accumulation_steps: saves 0.07 GiB",
            "--per-device-train-batch-size 4 with twice the --gradient-accumulation-steps: saves 0.07 GiB",
        ),
        ("max_completion_length=256: shorter answers", "--max-completion-length 256: shorter answers"),
        ("gradient_checkpointing=True, a third slower", "--gradient-checkpointing, a third slower"),
        ("gradient_checkpointing=False", "--no-gradient-checkpointing"),
        ('optim="paged_adamw_8bit"', "--optim paged_adamw_8bit"),
        ("beta=0.04; max_steps=None.", "--beta 0.04; --max-steps none."),
        ("a 4-bit base (quantization_config=four_bit_config())", "a 4-bit base (--load-in-4bit)"),
        ('a 16-bit base (model_init_kwargs={"dtype": "float16"})', "a 16-bit base (--dtype float16)"),
        ('If so: dataset = dataset.rename_column("question", "prompt")', "If so: --columns prompt=question"),
        ("dataset = dataset.rename_columns({'a': 'chosen', 'b': 'rejected'}). x", "--columns chosen=a rejected=b. x"),
        (
            'or drop it. The row: {}; to drop all such rows: dataset = dataset.filter(lambda row: row["chosen"])',
            "or drop it. The row: {}; mend the file, or take such rows out of it",
        ),
        # No setting of the command, and no literal: as they are.
        ("rank=4, number:extract=last, beta=self.beta", "rank=4, number:extract=last, beta=self.beta"),
    ],
)
def test_advice(python, flags):
    assert in_flags(python, FIELDS) == flags


def test_records(caplog):
    """Arguments are filled in first; how Python goes on after a stop is left to the command."""
    record = logging.LogRecord("hf_rlx", logging.INFO, "f", 1, "take max_steps=%d", (5,), None)
    assert FlagWords(FIELDS).filter(record)
    assert record.getMessage() == "take --max-steps 5"
    stop = logging.LogRecord("hf_rlx", 30, "f", 1, "go on with trainer.train(resume_from_checkpoint=True)", None, None)
    assert not FlagWords(FIELDS).filter(stop)
