"""A run on pairs that stopped and went on is the run that never stopped: weights bit for bit and every log."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.trainers.pair_tools import config, trainer
from tests.trainers.reward_tools import pairs, shared_model
from tests.trainers.tools import digest, lora, tiny_llama, untimed

STEPS = 5
CASES = {
    "dpo": ("dpo", {"rpo_alpha": 0.1}),
    "dpo precomputed": ("dpo", {"precompute_ref_log_probs": True}),
    "dpo moving": ("dpo", {"sync_ref_model": True, "ref_model_sync_steps": 2}),
    "dpo full": ("dpo", {}),
    "ipo": ("ipo", {}),
    "simpo": ("simpo", {}),
    "orpo": ("orpo", {"nll_on_prompt": True}),
}


def make(folder, case, **changes):
    """Seven rows in steps of four (two micro-batches) and three: the run crosses an epoch at steps 2 and 4. Logs every
    third step, so most checkpoints fall between two logs; dropout draws from the global random state."""
    kind, fields = CASES[case]
    fields = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "logging_steps": 3,
        "save_strategy": "steps",
        "save_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "disable_dropout": False,
        "eval_strategy": "steps",
        "eval_steps": 2,
        **fields,
        **changes,
    }
    full = case == "dpo full"
    model = tiny_llama(attention_dropout=0.2) if full else shared_model()
    return trainer(config(folder, kind, **fields), model, pairs(7), eval_dataset=pairs(3, seed=1))


def result(made):
    """Weights, logs, and what is remembered."""
    logs = [untimed(entry) for entry in made.state.log_history if "train_loss" not in entry]
    return digest(made.shared.named_parameters()), logs, repr(made.watch.state_dict())


@pytest.fixture(scope="module", params=CASES)
def whole(request, tmp_path_factory):
    """The run without a stop, with a checkpoint at every step."""
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    made = make(folder, request.param)
    made.train()
    return folder, request.param, result(made)


@pytest.mark.parametrize("step", range(1, STEPS))
def test_resume_is_exact_at_every_step(whole, tmp_path, step):
    folder, case, expected = whole
    shutil.copytree(folder / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    made = make(tmp_path, case)
    made.train(resume_from_checkpoint=True)
    assert made.state.global_step == STEPS
    found = result(made)
    assert found[1] == expected[1]
    assert found[0] == expected[0]
    assert found[2] == expected[2]


def test_another_run_s_checkpoint_is_refused(tmp_path):
    """What would change the numbers is named: loss, beta, the reference."""
    make(tmp_path, "dpo", max_steps=1).train()
    for changes, message in (
        ({"beta": 0.2}, "beta: 0.1 -> 0.2"),
        ({"loss_type": "hinge"}, "losses: "),
        ({"sync_ref_model": True}, "sync_ref_model: False -> True"),
        ({"precompute_ref_log_probs": True}, "precompute_ref_log_probs: False -> True"),
    ):
        with pytest.raises(ValueError, match=f"belongs to another run.*{message}"):
            make(tmp_path, "dpo", max_steps=2, **changes).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="trainer: 'DPOTrainer' -> 'IPOTrainer'"):
        make(tmp_path, "ipo", max_steps=2).train(resume_from_checkpoint=True)


def test_another_reference_model_is_refused(tmp_path):
    """The weights of a `ref_model` are part of the run."""

    def run(seed, **kwargs):
        like = tiny_llama().config
        torch.manual_seed(seed)
        other = LlamaForCausalLM(like)
        args = config(tmp_path, save_strategy="steps", save_steps=1, **kwargs)
        return trainer(args, tiny_llama(), ref_model=other, peft_config=lora())

    run(1).train()
    with pytest.raises(ValueError, match="reference: "):
        run(2, max_steps=2).train(resume_from_checkpoint=True)
    run(1, max_steps=2).train(resume_from_checkpoint=True)
