"""Configurations refuse what cannot work, by name and with the way out."""

from __future__ import annotations

import dataclasses
import json

import pytest
from transformers import HfArgumentParser

from hf_rlx.trainers.config import REMOVED_FIELDS
from hf_rlx.trainers.dpo import DPOConfig
from hf_rlx.trainers.grpo import PRESETS, GRPOConfig, GRPOTrainer
from hf_rlx.trainers.online_config import OnlineConfig
from hf_rlx.trainers.reward import RewardConfig
from hf_rlx.trainers.settings import public_args
from tests.trainers.tools import config, rows, scripted


def test_precision_is_what_the_device_has():
    """TRL's defaults raise on a CPU box; ours run in float32."""
    args = GRPOConfig("x", use_cpu=True)
    assert (args.bf16, args.fp16) == (False, False)
    assert not args.activation_checkpointing


@pytest.mark.parametrize("kind", [OnlineConfig, GRPOConfig])
def test_a_typo_names_the_nearest_field(kind):
    with pytest.raises(TypeError, match=r"has no field `learing_rate`; did you mean `learning_rate`\?"):
        kind("x", learing_rate=1e-5)
    with pytest.raises(TypeError, match=r"has no field `qqqqqqqqqq`$"):
        kind("x", qqqqqqqqqq=1)


@pytest.mark.parametrize("name", REMOVED_FIELDS)
def test_a_removed_field_names_its_replacement(name):
    with pytest.raises(TypeError, match=f"has no field `{name}` any more; use "):
        GRPOConfig("x", **{name: 1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_transformers_paged", True),
        ("top_entropy_quantile", 0.2),
        ("off_policy_mask_threshold", 0.5),
        ("cast_lm_head_to_fp32", True),
        ("sapo_temperature_pos", 2.0),
    ],
)
def test_fields_that_are_not_carried_point_to_trl(field, value):
    with pytest.raises(ValueError, match=rf"{field}=.* is not carried by hf_rlx; use trl\.GRPOTrainer"):
        GRPOConfig("x", **{field: value})


def test_every_field_that_is_not_carried_is_refused():
    """None of them is read anywhere, so none may be set."""
    named = [f for f in dataclasses.fields(GRPOConfig) if f.metadata.get("help", "").startswith("Not carried")]
    assert len(named) > 15
    for spec in named:
        with pytest.raises(ValueError, match=f"{spec.name}.* is not carried"):
            GRPOConfig("x", use_cpu=True, **{spec.name: "something else"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_generations": 1}, "num_generations must be at least 2: a group of one has no baseline"),
        (
            {"per_device_train_batch_size": 6, "num_generations": 4},
            "= 6 completions: it must be a multiple of num_gen",
        ),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "must be a multiple of gradient_accumulation"),
        ({"generation_batch_size": 12, "per_device_train_batch_size": 8}, "must be a multiple of per_device_train_ba"),
        ({"generation_batch_size": 16, "steps_per_generation": 4}, "generation_batch_size or steps_per_generation"),
        ({"on_reward_error": "ignore"}, 'must be "raise" or "skip"'),
        ({"beta": -0.1}, "beta must be finite and at least 0, got -"),
        ({"beta": 0.0, "kl_target": 6.0}, "kl_target needs a starting beta above 0"),
        ({"beta": 0.0, "sync_ref_model": True}, "sync_ref_model moves the reference, but beta=0 has none"),
        ({"log_completions_hub_repo": "me/x"}, "log_completions_hub_repo is not carried"),
        ({"temperature": -1.0}, "temperature must be finite and at least 0"),
        ({"temperature": 0.0}, "training needs a temperature above 0"),
        ({"generation_kwargs": {"do_sample": False}}, "training needs a temperature above 0"),
        ({"generation_kwargs": {"beams": 4}}, "has no option 'beams'"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ({"max_completion_length": 0}, "max_completion_length must be finite and at least 1"),
        ({"soft_overlong_cache": 600}, r"soft_overlong_cache \(600\) must lie between 0 and max_completion_length"),
        ({"num_iterations": 0}, "num_iterations must be finite and at least 1, got 0"),
        ({"dynamic_sampling_rounds": 0}, "dynamic_sampling_rounds must be at least 1 and at most 15"),
        ({"vllm_mode": "remote"}, 'vllm_mode must be "colocate" or "server"'),
        ({"vllm_importance_sampling_mode": "token"}, "vllm_importance_sampling_mode must be one of"),
        ({"loss_type": "cispo"}, r"loss_type must be one of .* got 'cispo'; for others use trl\.GRPOTrainer"),
        ({"scale_rewards": "std"}, "scale_rewards must be one of"),
        ({"kl_estimator": "k1"}, "kl_estimator must be one of"),
        ({"importance_sampling_level": "sequence", "loss_type": "dapo"}, "weigh completions by their length"),
        ({"beta": float("nan")}, "beta must be finite"),
        ({"epsilon": -1}, "epsilon must be finite and at least 0, got -1"),
        ({"learning_rate": "1e-3"}, "learning_rate must be a number, got str '1e-3'"),
        ({"top_k": 2.5}, "top_k must be a whole number, got 2.5"),
        ({"gradient_accumulation_steps": -1}, "gradient_accumulation_steps must be finite and at least 1"),
        ({"reward_weights": [float("nan")]}, "reward_weights must be a list of finite numbers"),
        ({"reward_weights": [0.0]}, "reward_weights are all 0"),
        ({"stop_strings": "END"}, r"for one string write \['END'\]"),
        ({"ref_model_mixup_alpha": 2.0}, "ref_model_mixup_alpha must be at least 0 and at most 1"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor and neftune_noise_alpha"),
        ({"model_init_kwargs": "[1]"}, "model_init_kwargs must be a dictionary"),
        ({"num_generations": None}, "num_generations must be a number, got NoneType None"),
    ],
)
def test_values_that_cannot_work_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig("x", use_cpu=True, **fields)


def test_windows_follow_from_three_numbers():
    """Window = per_device_train_batch_size x steps_per_generation (default: gradient_accumulation_steps)."""
    args = GRPOConfig("x", use_cpu=True, per_device_train_batch_size=8, gradient_accumulation_steps=4)
    assert (args.steps_per_generation, args.generation_batch_size) == (4, 32)
    assert (args.prompts_per_window, args.optimizer_steps_per_window) == (4, 1)
    args = GRPOConfig("x", use_cpu=True, per_device_train_batch_size=8, generation_batch_size=64)
    assert (args.steps_per_generation, args.prompts_per_window, args.optimizer_steps_per_window) == (8, 8, 8)
    # A window smaller than an optimizer step grows to it: its weights are the same anyway.
    args = GRPOConfig(
        "x", use_cpu=True, per_device_train_batch_size=8, gradient_accumulation_steps=4, steps_per_generation=1
    )
    assert args.steps_per_generation == 4


def test_scale_rewards_takes_trls_booleans():
    assert GRPOConfig("x", use_cpu=True, scale_rewards=True).scale_rewards == "group"
    assert GRPOConfig("x", use_cpu=True, scale_rewards=False).scale_rewards == "none"


def test_generation_kwargs_win_everywhere():
    """Log-probs are taken at the temperature that the sampler used, and Dr. GRPO's constant is the real limit."""
    args = GRPOConfig("x", use_cpu=True, generation_kwargs={"temperature": 0.7, "max_new_tokens": 9, "stop": "."})
    assert (args.temperature, args.max_completion_length) == (0.7, 9)
    params = args.sampling_params()
    assert (params.temperature, params.max_completion_length, params.stop_strings) == (0.7, 9, (".",))
    assert args.sampling_params(temperature=0.0).temperature == 0


def test_a_configuration_can_be_made_from_a_finished_one(tmp_path):
    """`dataclasses.replace`, and the JSON that is saved with the model."""
    args = config(tmp_path, per_device_train_batch_size=8, steps_per_generation=4)
    changed = dataclasses.replace(args, learning_rate=0.5)
    assert (changed.learning_rate, changed.steps_per_generation, changed.generation_batch_size) == (0.5, 4, 32)


def test_public_args_are_json_and_hold_no_secret(tmp_path):
    """Neither at the top nor inside the dictionaries that a user may fill."""
    import torch

    args = config(
        tmp_path,
        hub_token="hf_CANARY_a",
        model_init_kwargs={"dtype": torch.bfloat16, "token": "hf_CANARY_b", "nested": [{"api_key": "hf_CANARY_c"}]},
    )
    text = json.dumps(public_args(args))
    assert "CANARY" not in text
    assert "bfloat16" in text
    assert json.loads(text)["num_generations"] == 4


RECIPES = {
    "grpo": "GRPO: advantage group mean, group std (population); ratio per token, clip 0.2/0.2; averaging "
    "completion_mean; KL beta 0.04 k3 in the loss",
    "dapo": "GRPO: advantage group mean, group std (population); ratio per token, clip 0.2/0.28; averaging "
    "token_mean; KL none",
    "dr_grpo": "GRPO: advantage group mean, no std; ratio per token, clip 0.2/0.2; averaging constant; KL none",
    "gspo": "GRPO: advantage group mean, group std (population); ratio per sequence, clip 0.0003/0.0004; averaging "
    "completion_mean; KL none",
    "rloo": "GRPO: advantage leave-one-out, no std; ratio per sequence_sum, clip 0.2/0.2; averaging completion_mean; "
    "KL beta 0.05 k1 in the reward",
    "trl": "GRPO: advantage group mean, group std (sample); ratio per token, clip 0.2/0.2; averaging token_mean; "
    "KL none",
}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_what_it_is_and_runs(tmp_path, name, caplog):
    args = config(tmp_path, name, max_steps=2)
    assert args.recipe.startswith(RECIPES[name])
    caplog.set_level("INFO", logger="hf_rlx")
    trainer = scripted(args)
    assert args.recipe in caplog.text
    before = {n: p.clone() for n, p in trainer.shared.trainable_parameters()}
    trainer.train()
    assert any(not p.equal(before[n]) for n, p in trainer.shared.trainable_parameters())
    assert abs(trainer.state.log_history[0]["loss"]) < 10


def test_presets_are_the_published_ones():
    assert GRPOConfig.preset("dapo", output_dir="x", use_cpu=True, max_completion_length=100).soft_overlong_cache == 20
    assert GRPOConfig.preset("grpo", output_dir="x", use_cpu=True, beta=0.5).beta == 0.5
    assert GRPOConfig.preset("trl", output_dir="x", use_cpu=True).advantage_eps == 1e-4
    with pytest.raises(ValueError, match="no preset 'ppo'; there are grpo, dapo"):
        GRPOConfig.preset("ppo", output_dir="x")


@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factory"])
def test_arguments_that_are_not_carried_point_to_trl(name):
    with pytest.raises(ValueError, match=f"{name} is not carried by hf_rlx; use trl"):
        GRPOTrainer("tiny", lambda **_: [], **{name: [print]})


def test_normalised_objectives_take_no_shaping():
    """What is added to the total would be lost: the total is not read."""
    for fields in ({"soft_overlong_cache": 2}, {"kl_in_reward": True}):
        with pytest.raises(ValueError, match="normalize_then_sum"):
            GRPOConfig("x", use_cpu=True, multi_objective_aggregation="normalize_then_sum", **fields)


def test_the_recipe_says_when_the_ratio_cannot_move(tmp_path):
    """One update a rollout is on-policy: clip fractions of 0 are then no fault (trl#3120). Two passes are not."""
    assert "on-policy: one update a rollout" in GRPOConfig(str(tmp_path)).recipe
    assert "on-policy" not in GRPOConfig(str(tmp_path), num_iterations=2).recipe


def test_filters_under_a_kl_are_pointed_out(tmp_path, caplog):
    """A truncated sampling distribution makes the measured KL meaningless, even negative (trl#1857)."""
    GRPOConfig(str(tmp_path), top_k=2)
    assert "the measured KL may be negative" in caplog.text


def test_dictionaries_may_come_as_json_text(tmp_path):
    """TRL's fields are `dict | str`, for command lines."""
    args = GRPOConfig(str(tmp_path), generation_kwargs='{"top_k": 3}', chat_template_kwargs='{"a": 1}')
    assert args.sampling_params().top_k == 3
    assert args.chat_template_kwargs == {"a": 1}
    with pytest.raises(ValueError, match="generation_kwargs must be a dictionary, or one as JSON text"):
        GRPOConfig(str(tmp_path), generation_kwargs="top_k=3")


@pytest.mark.parametrize("metric", [None, "loss", "eval_loss"])
@pytest.mark.parametrize(
    "fields",
    [
        {"load_best_model_at_end": True, "save_strategy": "steps"},
        {"save_strategy": "best"},
        {"lr_scheduler_type": "reduce_lr_on_plateau"},
        {"lr_scheduler_type": "greedy", "lr_scheduler_kwargs": '{"factor": 0.5}'},
    ],
)
def test_the_best_is_that_with_the_highest_reward(fields, metric):
    """Evaluation gives no loss. A scheduler that waits for a plateau waits for one from below."""
    args = GRPOConfig("x", use_cpu=True, eval_strategy="steps", metric_for_best_model=metric, **fields)
    assert (args.metric_for_best_model, args.greater_is_better) == ("eval_reward", True)
    expected = {"factor": 0.5, "mode": "max"} if "lr_scheduler_kwargs" in fields else {"mode": "max"}
    assert (args.lr_scheduler_kwargs or {}) == (expected if "lr_scheduler_type" in fields else {})


def test_another_best_metric_stays():
    own = {"metric_for_best_model": "eval_completions/mean_length", "greater_is_better": False}
    args = GRPOConfig("x", use_cpu=True, eval_strategy="steps", lr_scheduler_type="reduce_lr_on_plateau", **own)
    assert {name: getattr(args, name) for name in own} == own
    assert args.lr_scheduler_kwargs == {"mode": "min"}
    assert GRPOConfig("x", use_cpu=True).metric_for_best_model is None


def test_a_run_with_a_plateau_scheduler_evaluates(tmp_path):
    """The first evaluation is where a metric that is not there raises."""
    args = config(tmp_path, eval_strategy="steps", eval_steps=1, lr_scheduler_type="reduce_lr_on_plateau", max_steps=1)
    trainer = scripted(args, count=8, eval_dataset=rows(2))
    trainer.train()
    assert any("eval_reward" in entry for entry in trainer.state.log_history)


@pytest.mark.parametrize("kind", [GRPOConfig, RewardConfig, DPOConfig])
def test_switches_of_a_script_need_no_value(kind):
    """`HfArgumentParser`, which TRL's scripts parse with: `--bf16` is True, and `--fp16 False` still False."""
    flags = "--output_dir x --use_cpu --bf16 --fp16 False --gradient_checkpointing --report_to none"
    (args,) = HfArgumentParser(kind).parse_args_into_dataclasses(flags.split())
    assert (args.bf16, args.fp16, args.activation_checkpointing) == (True, False, True)
    assert HfArgumentParser(GRPOConfig).parse_args(["--output_dir", "x", "--fsdp"]).fsdp is True


def test_a_compiled_model_on_a_cpu_is_refused():
    with pytest.raises(ValueError, match="torch_compile on a CPU is not carried"):
        GRPOConfig("x", torch_compile=True, use_cpu=True)


def test_an_unknown_best_metric_names_those_that_are_there(tmp_path):
    fields = {"metric_for_best_model": "accuracy", "load_best_model_at_end": True}
    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = scripted(config(tmp_path, **fields, **steps), eval_dataset=rows(2))
    with pytest.raises(ValueError, match=r"'eval_accuracy', which is not found.*eval_reward.*set metric_for_best"):
        trainer.train()
