"""A second trainer on one shared model starts with a KL of 0: its reference is the policy that it starts from."""

import pytest

from hf_rlx import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, SharedModel
from hf_rlx.data.tasks import arithmetic_task
from hf_rlx.verifiers import NumberVerifier
from tests import tiny


def trained(trainer_class, config_class, shared, folder):
    args = config_class(
        str(folder),
        per_device_train_batch_size=16,
        num_generations=4,
        num_iterations=1,
        max_completion_length=4,
        learning_rate=1e-2,
        beta=0.1,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = trainer_class(shared, NumberVerifier("whole"), args, train_dataset=arithmetic_task(32, 1).train)
    trainer.train()
    return [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]


@pytest.mark.parametrize(
    ("trainer", "config"), [(GRPOTrainer, GRPOConfig), (PPOTrainer, PPOConfig)], ids=["grpo", "ppo"]
)
@pytest.mark.parametrize("second_adapter", [False, True])
def test_the_reference_is_made_anew(tmp_path, trainer, config, second_adapter):
    """GRPO, then GRPO or PPO on the same object: 0 in the first step, more in the second. With a policy that starts
    trained the first reference is a copy of the adapter, which then takes the new weights."""
    shared = SharedModel.from_pretrained("tiny", peft_config=tiny.lora(target_modules="all-linear"))
    if second_adapter:
        tiny.randomise_lora(shared, scale=0.01)
    first = trained(GRPOTrainer, GRPOConfig, shared, tmp_path / "a")
    second = trained(trainer, config, shared, tmp_path / "b")
    for kl in (first, second):
        assert kl[0] == pytest.approx(0, abs=1e-6)
        assert kl[1] > 1e-5
