"""Scripts written for TRL, the import changed: arguments, fields, overrides are understood or refused by name."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from datasets import Dataset
from transformers import HfArgumentParser

import hf_rlx
from hf_rlx import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    IPOConfig,
    IterativeDPOConfig,
    IterativeDPOTrainer,
    PPOConfig,
    PPOTrainer,
    PRMConfig,
    PRMTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from hf_rlx.models.loading import load_tokenizer
from hf_rlx.trainers.card_arguments import card_facts_of
from tests.trainers.tools import QUIET, constant, lora, rows, tiny_llama

PAIRS = Dataset.from_list([{"prompt": "a", "chosen": "bc", "rejected": "d"}] * 4)


def online(kind, folder):
    """A trainer of a subclass of GRPOTrainer or PPOTrainer, one step of four completions."""
    config = PPOConfig if issubclass(kind, PPOTrainer) else GRPOConfig
    args = config(str(folder), **QUIET, num_generations=2, max_completion_length=4, beta=0.0)
    return kind(tiny_llama(), constant, args, rows(4), processing_class=load_tokenizer("tiny"), peft_config=lora())


# Cards.


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (
            {"dataset_name": "me/d", "finetuned_from": "me/base", "tags": "x", "model_name": "m", "license": "mit"},
            {
                "dataset_id": "me/d",
                "dataset": "me/d",
                "base_model": "me/base",
                "tags": ["x"],
                "model_name": "m",
                "license": "mit",
            },
        ),
        ({"dataset": ["GSM8K"], "dataset_tags": "gsm8k"}, {"dataset": "GSM8K", "dataset_id": "gsm8k"}),
        ({"tasks": "text-generation", "language": None}, {"pipeline_tag": "text-generation"}),
    ],
)
def test_arguments_of_a_card(given, facts):
    assert card_facts_of(given) == facts


def test_arguments_that_a_card_has_no_place_for():
    with pytest.raises(TypeError, match=r"no place for 'language', 'dataset_args'; .* Known are .*finetuned_from"):
        card_facts_of({"language": "en", "dataset_args": "plain"})
    with pytest.raises(TypeError, match="did you mean 'license'"):
        card_facts_of({"licence": "mit"})
    with pytest.raises(ValueError, match=r"dataset_name=.*: the card names one"):
        card_facts_of({"dataset_name": ["me/a", "me/b"]})
    with pytest.raises(ValueError, match="dataset_name='me/a', but dataset_id is 'me/b' already"):
        card_facts_of({"dataset_id": "me/b", "dataset_name": "me/a"})


def test_a_card_by_the_names_of_trl(tmp_path, monkeypatch):
    """A reward model's own tag stays beside those given; what has no place stops before anything is done."""
    args = RewardConfig(str(tmp_path / "run"), **QUIET)
    trainer = RewardTrainer(
        tiny_llama(), args, train_dataset=PAIRS, processing_class=load_tokenizer("tiny"), peft_config=lora()
    )
    trainer.create_model_card(model_name="Judge", dataset_name="me/d", tags=["x"])
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert [part for part in ("# Judge", "- me/d\n", "- x\n", "- reward-model\n") if part not in card] == []
    monkeypatch.setattr(trainer, "save_model", lambda **_: pytest.fail("it was saved"))
    with pytest.raises(TypeError, match="no place for 'language'"):
        trainer.push_to_hub(language="en")


# Models given by name.


@pytest.mark.parametrize("adapter", [False, True])
def test_loading_arguments_reach_a_reward_model(tmp_path, adapter):
    args = RewardConfig(str(tmp_path), **QUIET, model_init_kwargs={"dtype": "bfloat16"})
    trainer = RewardTrainer("tiny", args, train_dataset=PAIRS, peft_config=lora() if adapter else None)
    assert trainer.shared.causal_lm.model.embed_tokens.weight.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="model_init_kwargs works with a model name"):
        DPOTrainer(tiny_llama(), args=DPOConfig(str(tmp_path), **QUIET, model_init_kwargs={"dtype": "bfloat16"}))


def test_loading_arguments_reach_a_process_reward_model(tmp_path):
    data = Dataset.from_list([{"prompt": "a", "completions": ["b", "c"], "labels": [True, False]}] * 4)
    args = PRMConfig(str(tmp_path), **QUIET, model_init_kwargs={"dtype": "bfloat16"})
    trainer = PRMTrainer("tiny", args, train_dataset=data, peft_config=lora())
    assert trainer.shared.causal_lm.model.embed_tokens.weight.dtype == torch.bfloat16


# Configurations.


@pytest.mark.parametrize(
    "config", [GRPOConfig, PPOConfig, DPOConfig, IterativeDPOConfig, SFTConfig, RewardConfig, PRMConfig]
)
def test_dictionaries_on_a_command_line(tmp_path, config):
    """As JSON, also for parsers of transformers and TRL."""
    fields = {"model_init_kwargs": {"dtype": "float32"}, "chat_template_kwargs": {"a": 1}}
    if "generation_kwargs" in config.__dataclass_fields__:
        fields["generation_kwargs"] = {"repetition_penalty": 1.0}
    words = [word for name, value in fields.items() for word in (f"--{name}", json.dumps(value))]
    (args,) = HfArgumentParser(config).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--use_cpu", *words]
    )
    assert {name: getattr(args, name) for name in fields} == fields
    with pytest.raises(ValueError, match="model_init_kwargs must be a dictionary, or one as JSON text; got 'x'"):
        config(str(tmp_path), use_cpu=True, model_init_kwargs="x")


SFT_DEFAULTS = {
    "dataset_text_field": "text",
    "truncation_mode": "keep_start",
    "padding_free": False,
    "completion_only_loss": True,
    "dataset_kwargs": None,
    "assistant_only_loss": False,
    "packing_strategy": "bfd",
    "eval_packing": None,
    "loss_type": "nll",
    "router_aux_loss_coef": None,
}
SFT_OTHERS = {
    "dataset_text_field": "content",
    "truncation_mode": "keep_end",
    "completion_only_loss": False,
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "assistant_only_loss": True,
    "packing_strategy": "wrapped",
    "eval_packing": False,
    "loss_type": "dft",
    "router_aux_loss_coef": 0.1,
}


def test_sft_takes_trl_s_defaults_and_refuses_the_rest(tmp_path):
    args = SFTConfig(str(tmp_path), use_cpu=True, **SFT_DEFAULTS)
    for name, value in SFT_OTHERS.items():
        with pytest.raises(ValueError, match=f"{name}=.* is not carried by hf_rlx: "):
            SFTConfig(str(tmp_path), use_cpu=True, **{name: value})
    for name in ("data_collator", "compute_loss_func", "compute_metrics", "formatting_func"):
        with pytest.raises(ValueError, match=f"{name} is not carried by hf_rlx: "):
            SFTTrainer(tiny_llama(), args, **{name: print})
    with pytest.raises(ValueError, match="neftune_noise_alpha are not carried: embeddings get no noise"):
        SFTConfig(str(tmp_path), use_cpu=True, neftune_noise_alpha=1.0)


def test_sft_has_trl_s_order_of_arguments(tmp_path):
    data = Dataset.from_list([{"prompt": "a", "completion": "b"}] * 4)
    args = SFTConfig(str(tmp_path), **QUIET)
    trainer = SFTTrainer(tiny_llama(), args, None, data, None, load_tokenizer("tiny"))
    assert trainer.train_dataset is data
    trainer = SFTTrainer(tiny_llama(), args, processing_class=load_tokenizer("tiny"))
    with pytest.raises(ValueError, match=r"^train\(\) needs a train_dataset$"):
        trainer.train()


def test_a_removed_field_at_its_default_is_passed_over(tmp_path, caplog):
    """1 is not True: a value that is no default of TRL's is refused."""
    caplog.set_level(logging.INFO, logger="hf_rlx.trainers.config")
    DPOConfig(
        str(tmp_path), use_cpu=True, label_pad_token_id=-100, generate_during_eval=False, is_encoder_decoder=None
    )
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        f"DPOConfig has no field {name}"
        for name in ("label_pad_token_id", "generate_during_eval", "is_encoder_decoder")
    ]
    with pytest.raises(TypeError, match="no field `label_pad_token_id`"):
        DPOConfig(str(tmp_path), use_cpu=True, label_pad_token_id=0)
    with pytest.raises(TypeError, match="no field `save_safetensors`"):
        DPOConfig(str(tmp_path), use_cpu=True, save_safetensors=1)


def test_every_wrong_name_is_told_at_once(tmp_path):
    with pytest.raises(TypeError) as caught:
        PPOConfig(str(tmp_path), batch_size=8, early_stopping=True, lerning_rate=1.0, ppo_epochs=2)
    assert str(caught.value) == (
        "PPOConfig has no field `batch_size`; use per_device_train_batch_size and steps_per_generation: their product "
        "is a process's rollout\n"
        "- and no field `early_stopping`; use target_kl=..., which ends the updates on a rollout\n"
        "- and no field `lerning_rate`; did you mean `learning_rate`?"
    )


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("loss_type", 'DPOConfig, which has it; IPOTrainer is its "ipo"'),
        ("ld_alpha", "DPOConfig, which has it"),
        ("f_alpha_divergence_coef", "nothing: it belongs to f_divergence_type"),
        ("use_weighting", 'DPOConfig with loss_type="robust"'),
    ],
)
def test_fields_of_dpo_in_ipo(tmp_path, name, instead):
    with pytest.raises(TypeError, match=f"IPOConfig has no field `{name}`; use {instead}"):
        IPOConfig(str(tmp_path), **{name: 0.3})


@pytest.mark.parametrize(
    "name",
    [
        "use_score_scaling",
        "use_score_norm",
        "push_to_hub_if_best_reward",
        "ratio_threshold",
        "compare_steps",
        "tracker_kwargs",
        "project_kwargs",
        "accelerator_kwargs",
        "is_peft_model",
        "global_batch_size",
    ],
)
def test_fields_of_the_old_ppo(tmp_path, name):
    with pytest.raises(TypeError, match=f"PPOConfig has no field `{name}`; use "):
        PPOConfig(str(tmp_path), **{name: 1})


# Subclasses.


@pytest.mark.parametrize("kind", [GRPOTrainer, PPOTrainer])
def test_compute_rewards_alone_is_overridden(tmp_path, kind):
    """trl#2576: the totals that it sets are what is trained on; it stands in the place of `shape_rewards`."""

    class Mine(kind):
        def compute_rewards(self, rollouts):
            for rollout in rollouts:
                rollout.total = torch.arange(len(rollout.total), dtype=torch.float32)

        def compute_advantages(self, rollouts):
            seen.extend(rollout.total.tolist() for rollout in rollouts)
            super().compute_advantages(rollouts)

    seen = []
    online(Mine, tmp_path).train()
    assert seen == [[0.0, 1.0]] * 2


def test_compute_rewards_that_returns_something_is_refused(tmp_path):
    class Mine(GRPOTrainer):
        def compute_rewards(self, rollouts):
            return [1.0]

    with pytest.raises(TypeError, match="compute_rewards returns nothing: it changes `total`"):
        online(Mine, tmp_path).train()


@pytest.mark.parametrize("kind", [GRPOTrainer, PPOTrainer])
@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("_calculate_rewards", r"override compute_rewards\(self, rollouts\)"),
        ("_generate_and_score_completions", r"override sample\(self, rows\)"),
        ("_get_per_token_logps", r"override minibatch_loss\(self, model, batch\)"),
        ("compute_loss", r"override minibatch_loss\(self, model, batch\)"),
        ("prediction_step", r"override evaluate\(self"),
    ],
)
def test_an_override_that_is_never_called_is_refused(tmp_path, kind, name, instead):
    """By a mixin too; not where the hook is overridden as well, which may call it."""
    mixin = type("Mixin", (), {name: lambda self, *args: None})
    mine = type("Mine", (mixin, kind), {})
    with pytest.raises(TypeError, match=rf"^Mixin\.{name} would never be called: {instead}"):
        mine("tiny", constant)
    if "minibatch_loss" in instead:
        right = type("Right", (mine,), {"minibatch_loss": kind.minibatch_loss})
        assert online(right, tmp_path)


def test_an_override_with_other_arguments_is_refused():
    class Mine(PPOTrainer):
        def compute_rewards(self, scores, logprobs, ref_logprobs, masks):
            return scores

    with pytest.raises(TypeError, match=r"Mine\.compute_rewards has other arguments than here: .*self, rollouts\)"):
        Mine("tiny", constant)


@pytest.mark.parametrize(
    ("kind", "name", "hook"),
    [
        (DPOTrainer, "dpo_loss", r"override pair_objective\(self, pairs\)"),
        (DPOTrainer, "get_batch_loss_metrics", r"override pair_objective\(self, pairs\)"),
        (DPOTrainer, "concatenated_forward", r"override pair_objective\(self, pairs\)"),
        (IterativeDPOTrainer, "compute_rewards", "use the argument reward_funcs instead"),
        (SFTTrainer, "compute_loss", r"override pair_loss\(self, model, batch, role\)"),
        (RewardTrainer, "compute_loss", r"override pair_loss\(self, model, batch, role\)"),
    ],
)
def test_an_override_of_trainers_on_rows_is_refused(kind, name, hook):
    mine = type("Mine", (kind,), {name: lambda self, *args: None})
    with pytest.raises(TypeError, match=rf"^Mine\.{name} would never be called: {hook}"):
        mine("tiny")


# The PPO of TRL 0.8 to 0.11.


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("AutoModelForCausalLMWithValueHead", "the model itself"),
        ("create_reference_model", "nothing: trainers make the reference"),
        ("LengthSampler", "max_completion_length"),
        ("RLOOTrainer", "GRPOTrainer"),
        ("RLOOConfig", "GRPOConfig"),
        ("OnlineDPOConfig", "IterativeDPOConfig"),
        ("KTOTrainer", "DPOTrainer"),
        ("CPOConfig", "SimPOConfig"),
        ("ModelConfig", "`from trl import ModelConfig`"),
        ("TrlParser", "`from trl import TrlParser`"),
    ],
)
def test_names_that_are_elsewhere(name, instead):
    with pytest.raises(ImportError, match=f"^hf_rlx has no {name}; use {instead}"):
        getattr(hf_rlx, name)
    with pytest.raises(AttributeError, match="has no attribute 'Trainr'"):
        hf_rlx.Trainr  # noqa: B018


def test_the_loop_by_hand_says_what_replaces_it(tmp_path):
    trainer = online(PPOTrainer, tmp_path)
    for name in ("step", "generate", "log_stats"):
        assert not hasattr(trainer, name)
        with pytest.raises(AttributeError, match=rf"^PPOTrainer has no {name}\(\): train\(\) "):
            getattr(trainer, name)
    with pytest.raises(
        TypeError, match=r"the model comes first, not a hf_rlx\.PPOConfig: PPOTrainer\(model, reward_f"
    ):
        PPOTrainer(PPOConfig(str(tmp_path), use_cpu=True), tiny_llama(), None, load_tokenizer("tiny"))
    with pytest.raises(TypeError, match=r"the model comes first, .*DPOTrainer\(model, args=config, train_dataset"):
        DPOTrainer(DPOConfig(str(tmp_path), use_cpu=True))
