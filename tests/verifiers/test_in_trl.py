"""The verifiers as reward functions of TRL's own trainer: one step, with columns, logging and rows without gold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset

from hf_rlx.verifiers import CountdownVerifier, Gate, MathVerifier, NumberVerifier, RegexVerifier, TagVerifier
from tests import tiny

trl = pytest.importorskip("trl")


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
def test_one_step(tmp_path: Path):
    """Untrained text is worth 0 to all but the pattern that every word matches; the row without gold scores None."""
    tokenizer = tiny.word_tokenizer()
    model = tiny.causal_lm("llama")
    args = trl.GRPOConfig(
        str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=4,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # an old name, and the only one in older releases
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    rewards = [
        MathVerifier("whole"),
        NumberVerifier("whole"),
        RegexVerifier(r"(t\d+)"),
        TagVerifier(),
        CountdownVerifier(),
        Gate(RegexVerifier("no such word"), NumberVerifier("whole"), name="gated"),
    ]
    rows = {"prompt": ["t5 t6", "t7 t8"], "answer": ["4", None], "numbers": [[1, 2], None], "target": [3, None]}
    trainer = trl.GRPOTrainer(model, rewards, args, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["rewards/format/mean"] == 1.0
    for name in ("math", "number_whole", "tags", "countdown", "gated"):
        assert logged[f"rewards/{name}/mean"] == 0.0
    assert torch.isfinite(torch.tensor(trainer.state.log_history[-1]["train_loss"]))
