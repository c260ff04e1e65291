"""The card of a merged policy: what the run said, without the adapter, and a snippet that loads it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from hf_rlx import SharedModel
from hf_rlx.cards import RunFacts, Score
from hf_rlx.models.export import merge
from tests import tiny


def test_it_keeps_what_the_run_said_and_loads(tmp_path, monkeypatch):
    """Method, rewards, held-out table, steps; of a run that trained a reward model nothing of its numbers."""
    model = SharedModel.from_pretrained("tiny", peft_config=tiny.lora())
    tiny.randomise_lora(model.model, scale=0.3)
    model.add_role("reward", tiny.lora())
    run = tmp_path / "run"
    model.save_pretrained(run)
    score = Score.from_counts(3, 4)
    facts = RunFacts("grpo", "tiny", adapter=True, rewards=["exact"], steps=7, before=score, after=score)
    facts.save(run)
    text = (merge(run, tmp_path / "merged") / "README.md").read_text()
    for part in ("# merged\n", "A fine-tune of `tiny_arith`, trained with GRPO", "- Rewards: `exact`", "- Steps: 7"):
        assert part in text
    for part in ("| accuracy | 0.750 (", "library_name: transformers", "- merged\n", "saved in float32"):
        assert part in text
    for part in ("LoRA", "## Roles", str(tmp_path), "base_model:"):
        assert part not in text

    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], found)
    ids = torch.tensor([[1, 20, 30, 40]])
    with torch.no_grad(), model.rollout_mode():
        torch.testing.assert_close(found["model"](ids).logits, model.model(ids).logits, atol=1e-4, rtol=1e-4)

    dataclasses.replace(facts, pipeline_tag="text-classification", tags=["reward-model"]).save(run)
    text = (merge(run, tmp_path / "of-a-reward-run") / "README.md").read_text()
    assert "pipeline_tag: text-generation" in text
    assert "0.750" not in text
    assert "reward-model" not in text
