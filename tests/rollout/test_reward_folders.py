"""Reward models by folder, and frozen moments in evaluation."""

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.rollout.reward_models import prepare
from hf_rlx.trainers.grpo import GRPOTrainer
from tests.trainers.reward_tools import config, shared_model, trainer
from tests.trainers.tools import config as grpo_config
from tests.trainers.tools import rows


def test_a_folder_of_the_reward_trainer_scores_as_the_trainer(tmp_path):
    """EOS, temperature and tokenizer included."""
    rewards = trainer(config(tmp_path), "tiny")
    rewards.train()
    rewards.save_model(str(tmp_path / "rm"))
    (function,) = prepare(str(tmp_path / "rm"), device="cpu")
    assert function.name == "rm"
    assert abs(function.call(["1+1="], ["2"])[0] - rewards.shared.reward_function()(["1+1="], ["2"])[0]) < 1e-6


def test_evaluation_leaves_running_moments_alone(tmp_path):
    """16 completions of training count, those of the evaluation do not."""
    shared = shared_model()
    shared.add_role("reward")
    tokenizer = load_tokenizer("tiny")
    reward = shared.reward_function(tokenizer=tokenizer, normalizer="running")
    args = grpo_config(tmp_path)
    data = {"train_dataset": rows(8), "eval_dataset": rows(4)}
    grpo = GRPOTrainer(shared, reward, args, processing_class=tokenizer, **data)
    grpo.train()
    grpo.evaluate()
    assert shared.roles["reward"].facts["moments"]["count"] == 16
