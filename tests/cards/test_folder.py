"""What a folder says of its model, with and without the facts that a trainer left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_rlx.cards import RunFacts, facts_from_folder, write_beside, write_card
from hf_rlx.cards.beside import is_ours
from hf_rlx.cards.folder import kind_of, licence_of, roles_of

LORA = {"peft_type": "LORA", "r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": ["v_proj", "q_proj"]}
RUN = {
    "adapter_config.json": {**LORA, "base_model_name_or_path": "org/base"},
    "training_args.json": {"learning_rate": 1e-4, "beta": 0.1, "output_dir": "/data/x", "seed": 3},
    "run.json": {
        "trainer": "DPOTrainer",
        "world_size": 2,
        "train_dataset": {"rows": 16, "columns": ["chosen"], "sha256": "ab"},
    },
    "trainer_state.json": {
        "global_step": 2,
        "epoch": 0.5,
        "log_history": [
            {"loss": 0.7, "rewards/margins": 0.0, "logps/chosen": -9.0, "step": 1},
            {"loss": 0.5, "rewards/margins": 1.5, "logps/chosen": -9.5, "step": 2},
            {"eval_loss": 0.25, "step": 2},
        ],
    },
}


def put(folder: Path, files: dict[str, dict]) -> Path:
    """Write dictionaries as JSON files below `folder`."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("files", "role", "kind"),
    [
        ({"adapter_config.json": LORA}, None, "adapter"),
        ({"adapter_config.json": LORA, "reward/role.json": {}}, None, "adapter"),
        ({"adapter_config.json": LORA, "reward/role.json": {}}, "reward", "reward"),
        ({"adapter_config.json": LORA, "step_reward/role.json": {}}, "step_reward", "step_reward"),
        ({"adapter_config.json": {**LORA, "task_type": "SEQ_CLS"}}, "reward", "classifier_adapter"),
        ({"config.json": {"architectures": ["LlamaForCausalLM"]}}, None, "model"),
        ({"config.json": {"architectures": ["LlamaForSequenceClassification"]}}, "reward", "classifier"),
        ({"tokenizer.json": {}}, None, None),
    ],
)
def test_kinds(tmp_path: Path, files: dict, role: str | None, kind: str | None):
    assert kind_of(put(tmp_path, files), role) == kind


def test_roles_are_those_that_lie_there(tmp_path: Path):
    facts = {"temperature": 0.5, "normalizer": "running", "members": ["reward", "reward_1"]}
    put(
        tmp_path,
        {
            "adapter_config.json": LORA,
            "critic/role.json": {"own_adapter": False, "head": True, "facts": {}},
            "reward/role.json": {"own_adapter": True, "head": True, "facts": facts},
            "reward/adapter_config.json": {**LORA, "r": 4, "lora_dropout": 0.1, "target_modules": "all-linear"},
        },
    )
    assert roles_of(tmp_path) == {
        "policy": "the folder itself: a LoRA adapter (r 16, alpha 32, on q_proj, v_proj)",
        "critic": "`critic/`: the policy's adapter and a scalar head",
        "reward": "`reward/`: a LoRA adapter (r 4, alpha 32, dropout 0.1, on all-linear) and a scalar head; an "
        "ensemble of 2, scores are divided by 0.5, normalised (running)",
    }
    text = write_card(RunFacts("ppo", base_model="org/base", adapter=True), tmp_path).read_text()
    assert "| critic | `critic/`: the policy's adapter and a scalar head |\n" in text
    assert roles_of(put(tmp_path / "alone", {"adapter_config.json": LORA})) == {}


def test_a_folder_without_facts_has_a_card_of_what_lies_there(tmp_path: Path):
    """A checkpoint of an earlier version: state, settings and adapter."""
    facts = facts_from_folder(put(tmp_path, RUN))
    assert (facts.method, facts.base_model, facts.adapter, facts.steps, facts.epochs) == (
        "dpo",
        "org/base",
        True,
        2,
        0.5,
    )
    assert facts.data == {"training": {"rows": 16, "columns": ["chosen"], "sha256": "ab"}}
    assert facts.hyper_parameters == {"learning_rate": 1e-4, "beta": 0.1, "seed": 3}
    text = write_card(facts, tmp_path).read_text()
    for part in (
        "A LoRA adapter for [org/base](https://huggingface.co/org/base), trained with DPO by `hf_rlx`.",
        "| held out | after training |\n|---|---|\n| loss, nats | 0.250 |\n",
        "| margin of the implicit rewards | 0.000 (step 1) | 1.500 (step 2) |",
        "- Adapter: LoRA adapter (r 16, alpha 32, on q_proj, v_proj)",
        "- Processes: 2",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("trainer", "method"),
    [("IterativeDPOTrainer", "iterative_dpo"), ("SimPOTrainer", "simpo"), ("GRPOTrainer", "grpo")],
)
def test_the_trainer_of_a_checkpoint_names_the_method(tmp_path: Path, trainer: str, method: str):
    assert facts_from_folder(put(tmp_path, {**RUN, "run.json": {"trainer": trainer}})).method == method


def test_what_is_no_model_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nothing is no folder"):
        facts_from_folder(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"holds no model: neither adapter_config\.json nor config\.json"):
        facts_from_folder(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json is damaged"):
        facts_from_folder(tmp_path)


@pytest.mark.parametrize(
    ("card", "found"),
    [
        ("---\nlicense: mit\n---\n", {"license": "mit"}),
        ("---\nlicense: other\nlicense_name: own\n---\n", {"license": "other", "license_name": "own"}),
        ("---\nlicense:\n- a\n---\n", {}),
        ("---\nlicense_name: own\n---\n", {}),
        ("---\n[broken\n---\n", {}),
        ("no metadata", {}),
    ],
)
def test_the_licence_of_a_base(tmp_path: Path, card: str, found: dict):
    assert licence_of(tmp_path) == {}
    (tmp_path / "README.md").write_text(card)
    assert licence_of(tmp_path) == found


def test_a_card_that_was_changed_by_hand_is_known(tmp_path: Path):
    assert is_ours(tmp_path)
    card = write_beside(RunFacts("dpo"), tmp_path)
    assert is_ours(tmp_path)
    card.write_text(card.read_text() + "\nMore.\n")
    assert not is_ours(tmp_path)
    (tmp_path / "card_facts.json").unlink()
    assert not is_ours(tmp_path)


def test_a_plot_of_a_longer_run_before_goes(tmp_path: Path):
    """It would be shown as this run's. What else is called so, and a card written alone, stays."""
    pytest.importorskip("matplotlib")
    curve: list = [{"step": 1.0, "reward": 0.5}, {"step": 2.0, "reward": 0.75}]
    assert "training.png" in write_beside(RunFacts("grpo", curve=curve), tmp_path).read_text()
    assert "training.png" not in write_beside(RunFacts("grpo", curve=curve[:1]), tmp_path).read_text()
    assert not (tmp_path / "training.png").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "training.png").write_bytes(b"mine")
    assert "training.png" in write_beside(RunFacts("grpo"), tmp_path / "other").read_text()
