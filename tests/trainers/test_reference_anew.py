"""A second trainer on one shared model starts with a KL of 0: its reference is the policy that it starts from."""

import pytest

from hf_rlx import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, SharedModel
from hf_rlx.data.tasks import arithmetic_task
from hf_rlx.verifiers import NumberVerifier
from tests import tiny
from tests.trainers import pair_tools
from tests.trainers.reward_tools import shared_model


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


@pytest.mark.parametrize("trained_start", [False, True])
@pytest.mark.parametrize("kind", ["dpo", "ipo"])
def test_the_reference_of_a_second_trainer_on_pairs_is_made_anew(tmp_path, kind, trained_start):
    """The KL to the reference is 0 in the first step of both trainers; with `keep_reference` that of a third one
    goes on from where the second ended."""
    shared = shared_model(trained=trained_start)

    def gaps(folder, **fields):
        made = pair_tools.trainer(pair_tools.config(folder, kind, max_steps=3, learning_rate=1e-2, **fields), shared)
        made.train()
        return [abs(e["kl/chosen"]) for e in made.state.log_history if "kl/chosen" in e]

    for folder in ("first", "second"):
        found = gaps(tmp_path / folder)
        assert found[0] == pytest.approx(0, abs=1e-6)
        assert found[-1] > 1e-4
    assert gaps(tmp_path / "third", keep_reference=True)[0] > 1e-4
