"""PPOConfig: TRL's old names, the recipe, and what is refused."""

from __future__ import annotations

import dataclasses
import inspect
import logging

import pytest
from transformers import HfArgumentParser

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.trainers.grpo import GRPOConfig
from hf_rlx.trainers.online_config import OnlineConfig
from hf_rlx.trainers.ppo import PPOTrainer
from hf_rlx.trainers.ppo_config import RENAMED, REPLACED, WITHOUT_EFFECT, PPOConfig
from tests.trainers.ppo_tools import ppo, ppo_config, some
from tests.trainers.tools import lora, rows, tiny_llama

# Fields beside those that every online trainer has, arguments, and log keys: a change here is a change of contract.
FIELDS = """
    bootstrap_truncated cliprange cliprange_high cliprange_value critic_adapter critic_init_from_reward
    critic_learning_rate critic_warmup_steps detach_critic dual_clip entropy_coef gamma kl_estimator kl_in_reward lam
    missing_eos_penalty num_mini_batches reward_clip shuffle_minibatches target_kl total_episodes vf_coef
    whiten_advantages whiten_rewards
"""
ARGUMENTS = """
    model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks optimizers
    quantization_config peft_config step_reward_funcs of_trl
"""
KEYS = """
    loss policy_loss value_loss grad_norm learning_rate epoch num_tokens step_time beta entropy reward reward/shaped
    rewards/some/mean rewards/some/std rewards/some/abstained rewards/some/errors rewards/unscored
    value/explained_variance value/mean value/clip_fraction value/grad_norm returns/mean returns/std advantages/mean
    advantages/std policy/approx_kl policy/ratio_mean policy/ratio_max clip_ratio/low_mean clip_ratio/high_mean
    clip_ratio/region_mean early_stop kl kl/k1_token kl/k1_sequence kl/k3_sequence kl/max_log_ratio
    completions/mean_length completions/max_length completions/clipped_ratio completions/kept_fraction
    rollout/tokens_per_second update/tokens_per_second time/rollout time/old_logps time/reference time/update
"""
VALUES = {"beta": 0.3, "kl_target": 4.0, "kl_horizon": 5000.0, "reward_clip": 2.0, "run_name": "name"}


@pytest.mark.parametrize("old", RENAMED)
def test_a_name_of_trl_is_understood_with_one_note(old, caplog):
    caplog.set_level(logging.WARNING)
    ours = RENAMED[old]
    value = VALUES.get(ours, 3)
    args = PPOConfig("x", use_cpu=True, **{old: value})
    assert getattr(args, ours) == value
    assert [r.message for r in caplog.records] == [f"{old} is called {ours} here"]
    with pytest.raises(TypeError, match=f"both `{old}` and `{ours}` were given"):
        PPOConfig("x", use_cpu=True, **{old: value, ours: value})


@pytest.mark.parametrize("old", [*WITHOUT_EFFECT, "stop_token"])
def test_a_name_of_trl_without_effect_says_why(old, caplog):
    caplog.set_level(logging.WARNING)
    PPOConfig("x", use_cpu=True, **{old: "eos"})
    (record,) = caplog.records
    assert record.message.startswith(f"{old}='eos' has no effect: ")


@pytest.mark.parametrize("old", REPLACED)
def test_a_name_of_trl_that_is_refused_says_what_to_write(old):
    with pytest.raises(TypeError, match=f"PPOConfig has no field `{old}`; use "):
        PPOConfig("x", use_cpu=True, **{old: 1})


def test_names_that_trl_and_we_share_are_fields():
    """A configuration written for TRL 1.9 as far as its values differ from the defaults."""
    args = PPOConfig(
        "x",
        use_cpu=True,
        learning_rate=3e-6,
        per_device_train_batch_size=64,
        gradient_accumulation_steps=1,
        num_ppo_epochs=2,
        num_mini_batches=2,
        total_episodes=512,
        response_length=53,
        temperature=0.7,
        missing_eos_penalty=1.0,
        stop_token="eos",
        whiten_rewards=True,
        kl_coef=0.1,
        kl_estimator="k3",
        cliprange=0.1,
        cliprange_value=0.3,
        vf_coef=0.2,
        gamma=0.99,
        lam=0.9,
    )
    # 512 episodes are 4 rollouts of 128, each of 2 minibatches x 2 epochs.
    assert (args.generation_batch_size, args.optimizer_steps_per_window, args.max_steps) == (128, 2, 16)
    assert args.recipe == (
        "PPO: 2 epochs of 2 minibatches; GAE gamma 0.99 lambda 0.9, whitened; clip 0.1/0.1, value clip 0.3, vf_coef "
        "0.2, entropy_coef 0.0; KL beta 0.1 (fixed) k3 in the reward; critic: a head on the policy's hidden states, "
        "detached; cut completions lose 1.0"
    )


def test_a_command_line_of_trl_is_understood():
    line = ["--output_dir", "x", "--use_cpu", "--num_ppo_epochs", "2", "--kl_coef", "0.1", "--response_length", "53"]
    (args,) = HfArgumentParser(PPOConfig).parse_args_into_dataclasses([*line, "--kl_estimator", "k3"])
    assert (args.num_iterations, args.beta, args.max_completion_length, args.kl_estimator) == (2, 0.1, 53, "k3")
    assert "--kl_coef" not in HfArgumentParser(GRPOConfig).format_help()


def test_the_default_recipe():
    """The numbers of TRL's last PPOTrainer."""
    assert PPOConfig("x", use_cpu=True).recipe == (
        "PPO: 4 epochs of 1 minibatches; GAE gamma 1.0 lambda 0.95, whitened; clip 0.2/0.2, value clip 0.2, vf_coef "
        "0.1, entropy_coef 0.0; KL beta 0.05 (fixed) k1 in the reward; critic: a head on the policy's hidden states, "
        "detached; cut completions have ended"
    )
    args = PPOConfig("x", use_cpu=True)
    assert (args.learning_rate, args.temperature, args.max_completion_length) == (3e-6, 1.0, 512)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"beta": 0.0}, "KL none"),
        ({"kl_target": 6.0}, "adaptive to 6.0 nats a sequence"),
        ({"kl_in_reward": False}, "k3 in the loss"),
        ({"critic_init_from_reward": True}, "an adapter of its own from the reward model"),
        ({"critic_warmup_steps": 3}, "3 steps alone first"),
        ({"cliprange_high": 0.3, "cliprange_value": None}, "clip 0.2/0.3, value clip none"),
        ({"bootstrap_truncated": True}, "cut completions go on at the critic's value"),
        ({"mask_truncated_completions": True}, "cut completions are left out"),
        ({"detach_critic": False, "whiten_advantages": False}, "lambda 0.95; clip"),
    ],
)
def test_the_recipe_says_what_is_on(fields, said):
    assert said in PPOConfig("x", use_cpu=True, **fields).recipe


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_mini_batches": 2, "steps_per_generation": 3}, "give num_mini_batches, or steps_per_generation"),
        ({"num_mini_batches": 2, "generation_batch_size": 16}, "give num_mini_batches, or steps_per_generation"),
        ({"total_episodes": 64, "max_steps": 4}, "give total_episodes or max_steps, not both"),
        ({"kl_estimator": "k2"}, r"must be one of \('k1', 'k3'\) with kl_in_reward=True, got 'k2'"),
        ({"kl_estimator": "k1", "kl_in_reward": False}, "expected gradient of k1 in the loss is 0"),
        ({"bootstrap_truncated": True, "missing_eos_penalty": 1.0}, "missing_eos_penalty that it is worth less"),
        ({"bootstrap_truncated": True, "mask_truncated_completions": True}, "mask_truncated_completions that it is"),
        ({"dynamic_sampling": True}, "set num_generations to 2 or more"),
        ({"num_generations": 0}, "num_generations must be finite and at least 1"),
        ({"num_mini_batches": 0}, "num_mini_batches must be finite and at least 1"),
        ({"num_mini_batches": 1.5}, "num_mini_batches must be a whole number"),
        ({"gamma": 1.5}, "gamma must be at least 0 and at most 1, got 1.5"),
        ({"lam": -0.1}, "lam must be at least 0"),
        ({"cliprange": -0.1}, "cliprange must be finite and at least 0"),
        ({"cliprange_value": 0.0}, "cliprange_value must be finite and above 0"),
        ({"dual_clip": 1.0}, "dual_clip must be finite and above 1"),
        ({"vf_coef": float("nan")}, "vf_coef must be finite"),
        ({"target_kl": 0.0}, "target_kl must be finite and above 0"),
        ({"critic_warmup_steps": -1}, "critic_warmup_steps must be finite and at least 0"),
        ({"missing_eos_penalty": -1.0}, "missing_eos_penalty must be finite and at least 0"),
        ({"kl_target": 6.0, "kl_horizon": 4.0}, "horizon"),
    ],
)
def test_values_that_cannot_work_are_refused(tmp_path, fields, message):
    """The horizon is checked when the controller is made, as the episodes of a step are known then."""

    def make():
        args = PPOConfig(str(tmp_path), use_cpu=True, report_to="none", **fields)
        given = {"train_dataset": rows(16), "processing_class": load_tokenizer("tiny"), "peft_config": lora()}
        return PPOTrainer(tiny_llama(), some, args, **given)

    with pytest.raises(ValueError, match=message):
        make()


def test_a_typo_names_the_nearest_field():
    with pytest.raises(TypeError, match=r"PPOConfig has no field `clip_range`; did you mean `cliprange`\?"):
        PPOConfig("x", clip_range=0.1)


@pytest.mark.parametrize("name", ["reward_model", "value_model", "ref_model", "data_collator"])
def test_arguments_of_trl_s_trainer_point_to_ours(tmp_path, name):
    with pytest.raises(TypeError, match=f"{name} is not an argument here: "):
        PPOTrainer(tiny_llama(), some, ppo_config(tmp_path), **{name: tiny_llama()})
    with pytest.raises(TypeError, match="no argument 'reward'"):
        PPOTrainer(tiny_llama(), some, ppo_config(tmp_path), reward=some)
    with pytest.raises(ValueError, match="reward_funcs is missing"):
        PPOTrainer(tiny_llama(), None, ppo_config(tmp_path), **{name: None})


def test_the_contract(tmp_path):
    """Names of fields and arguments, and the log of a step; its loss is the sum of its parts."""
    ours, everyone = ({f.name for f in dataclasses.fields(c)} for c in (PPOConfig, OnlineConfig))
    assert ours - everyone == set(FIELDS.split())
    assert list(inspect.signature(PPOTrainer.__init__).parameters)[1:] == ARGUMENTS.split()
    trainer = ppo(ppo_config(tmp_path, target_kl=1.0, max_steps=2, num_iterations=2, logging_steps=2))
    trainer.train()
    log = trainer.state.log_history[0]
    assert not set(KEYS.split()) - log.keys()
    assert log["loss"] == pytest.approx(log["policy_loss"] + 0.1 * log["value_loss"], abs=1e-6)
