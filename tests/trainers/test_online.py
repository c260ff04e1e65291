"""The loop: windows, logs, dynamic sampling, callbacks, constructor checks."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import TrainerCallback

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.base import BaseTrainer
from hf_rlx.trainers.grpo import GRPOConfig, GRPOTrainer
from hf_rlx.trainers.online import OnlineTrainer
from tests.trainers.tools import by_ids, config, digest, lora, rows, scripted, tiny_llama


def make(folder, **kwargs):
    given = {"model": tiny_llama(), "processing_class": load_tokenizer("tiny"), "train_dataset": rows(16), **kwargs}
    return GRPOTrainer(reward_funcs=by_ids, args=given.pop("args", None) or config(folder), **given)


# Construction.


def test_an_adapter_that_was_loaded_frozen_is_refused(tmp_path):
    """trl: 0 trainable parameters, and loss and gradient norm look alive (row 1)."""
    get_peft_model(tiny_llama(), lora()).save_pretrained(tmp_path)
    frozen = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    with pytest.raises(
        ValueError, match=r"no parameter is trainable: the adapter 'default' was loaded frozen; load it"
    ):
        make(tmp_path, model=frozen)


def test_a_model_without_trainable_weights_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"no parameter is trainable: set requires_grad on the model, or pass peft_co"
    ):
        make(tmp_path, model=tiny_llama().requires_grad_(False))


def test_a_quantised_model_needs_an_adapter(tmp_path, monkeypatch):
    monkeypatch.setattr(SharedModel, "quantization_method", property(lambda self: "bitsandbytes"), raising=False)
    with pytest.raises(ValueError, match="a quantised model needs an adapter to train; pass peft_config"):
        make(tmp_path)


def test_an_optimizer_that_misses_parameters_is_refused(tmp_path):
    """Built from the model before the adapter existed (trl#6700)."""
    model = tiny_llama()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make(tmp_path, model=model, peft_config=lora(), optimizers=(early, None))
    with pytest.raises(ValueError, match=r"the optimizer misses \d+ trainable parameters, e\.g\. .*lora_A"):
        trainer.train()


def test_an_optimizer_of_the_right_parameters_is_used(tmp_path):
    model = SharedModel.build(tiny_llama(), lora())
    mine = torch.optim.SGD([p for _, p in model.trainable_parameters()], lr=0.5)
    trainer = make(tmp_path, model=model, optimizers=(mine, None))
    before = digest(model.trainable_parameters())
    trainer.train()
    assert digest(model.trainable_parameters()) != before


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"processing_class": None}, "made in memory: no name to find its tokenizer by; pass processing_class="),
        ({"quantization_config": object()}, "quantization_config works with a model name"),
        ({"args": {"model_init_kwargs": {"dtype": "float32"}}}, "model_init_kwargs works with a model name"),
        ({"train_dataset": Dataset.from_dict({"question": ["a"]})}, r"has no column `prompt`; it has \['question'\]"),
        ({"train_dataset": Dataset.from_dict({"prompt": []})}, "train_dataset is empty"),
        ({"eval_dataset": {"a": Dataset.from_dict({"text": ["a"]})}}, "eval_dataset a has no column `prompt`"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(tmp_path, kwargs, message):
    kwargs = dict(kwargs)
    kwargs["args"] = config(tmp_path, **kwargs.get("args", {}))
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **kwargs)


def test_a_shared_model_brings_its_own_adapter(tmp_path):
    with pytest.raises(ValueError, match="both a SharedModel and a peft_config were given; drop peft_config"):
        make(tmp_path, model=SharedModel.build(tiny_llama(), lora()), peft_config=lora())


def test_reward_funcs_are_needed(tmp_path):
    with pytest.raises(ValueError, match=r"reward_funcs is missing: a function \(prompts, completions"):
        GRPOTrainer(tiny_llama(), args=config(tmp_path))


def test_training_needs_a_dataset(tmp_path):
    with pytest.raises(ValueError, match=r"train\(\) needs a train_dataset with a `prompt` column"):
        make(tmp_path, train_dataset=None).train()


def test_too_few_prompts_are_an_error_before_training(tmp_path):
    """TRL trains 0 steps and reports success."""
    with pytest.raises(ValueError, match="has 3 prompts but a rollout needs 4"):
        make(tmp_path, train_dataset=rows(3)).train()


def test_model_init_kwargs_reach_the_model(tmp_path):
    trainer = make(
        tmp_path, model="tiny", processing_class=None, args=config(tmp_path, model_init_kwargs={"dtype": "float64"})
    )
    assert trainer.shared.dtype == torch.float64
    assert trainer.tokenizer.decode([20]) == "0"


def test_the_base_classes_say_what_is_missing(tmp_path):
    trainer = OnlineTrainer(
        tiny_llama(), by_ids, config(tmp_path), train_dataset=rows(8), processing_class=load_tokenizer("tiny")
    )
    assert isinstance(trainer, BaseTrainer)
    with pytest.raises(NotImplementedError, match="OnlineTrainer does not say how advantages are computed"):
        trainer.train()


# The loop.


def test_epochs_and_the_last_incomplete_window(tmp_path):
    """18 prompts are 4 windows of 4; two epochs are 8 steps, and every epoch has its own order."""
    seen = []

    def note(prompts, completion_ids, number, **_):
        seen.append(number[0])
        return by_ids(completion_ids, number)

    trainer = scripted(config(tmp_path, max_steps=-1, num_train_epochs=2), reward=note, count=18)
    trainer.train()
    assert trainer.state.global_step == 8
    assert trainer.state.epoch == 2.0
    assert len(seen) == 32
    assert len(set(seen[:16])) == len(set(seen[16:])) == 16
    assert seen[:16] != seen[16:]
    assert [e["epoch"] for e in trainer.state.log_history[:4]] == [0.25, 0.5, 0.75, 1.0]


def test_a_window_serves_its_micro_steps_and_passes(tmp_path):
    """4 micro-steps, 2 of them an optimizer step, 2 passes: 4 optimizer steps a rollout."""
    args = config(
        tmp_path,
        per_device_train_batch_size=4,
        steps_per_generation=4,
        gradient_accumulation_steps=2,
        num_iterations=2,
        max_steps=8,
    )
    trainer = scripted(args)
    trainer.train()
    assert trainer.sampler.calls == [4, 4]


def test_logs_are_means_over_the_steps_between(tmp_path):
    """The log of two steps is the mean of two logs; `loss` is its parts' sum; `num_tokens` is cumulative."""
    logs = {}
    for every in (1, 2):
        args = config(
            tmp_path,
            max_steps=4,
            logging_steps=every,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            beta=0.2,
        )
        trainer = scripted(args, drift=0.3)
        trainer.train()
        logs[every] = trainer.state.log_history[:-1]
    assert len(logs[2]) == 2
    for name in ("loss", "policy_loss", "kl_loss", "frac_reward_zero_std"):
        for index, entry in enumerate(logs[2]):
            pair = [e[name] for e in logs[1][2 * index : 2 * index + 2]]
            assert entry[name] == pytest.approx(sum(pair) / 2, abs=1e-6), name
    for entry in logs[1] + logs[2]:
        assert entry["policy_loss"] + entry["kl_loss"] == pytest.approx(entry["loss"], abs=1e-6)
    assert [e["num_tokens"] for e in logs[2]] == [e["num_tokens"] for e in logs[1]][1::2]


def test_num_tokens_counts_prompts_and_completions(tmp_path):
    trainer = scripted(config(tmp_path, shuffle_dataset=False))
    trainer.train()
    prompts = [list(trainer.tokenizer(trainer.train_dataset[i]["prompt"])["input_ids"]) for i in range(4)]
    groups = trainer.sampler.generate(prompts, 4, None)
    expected = sum(4 * len(p) for p in prompts) + sum(len(c.token_ids) for g in groups for c in g)
    assert trainer.state.log_history[0]["num_tokens"] == expected


def test_step_time_is_the_steps_own(tmp_path):
    """Neither the time before training nor that of an evaluation is in it."""
    import time

    class Slow(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            time.sleep(0.5)

    trainer = scripted(config(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=1), eval_dataset=rows(2))
    trainer.add_callback(Slow())
    time.sleep(0.5)
    trainer.train()
    assert all(0 < e["step_time"] < 0.5 for e in trainer.state.log_history if "step_time" in e)


def test_reward_functions_see_the_state_of_the_run(tmp_path):
    """`trainer_state` is TRL's argument for schedules; train() makes a new state object."""
    seen = []

    def scheduled(completion_ids, number, trainer_state, **_):
        seen.append((trainer_state.global_step, trainer_state.max_steps))
        return by_ids(completion_ids, number)

    trainer = scripted(config(tmp_path, max_steps=3), reward=scheduled, eval_dataset=rows(1))
    trainer.train()
    trainer.evaluate()
    assert seen == [(s, 3) for s in (0, 1, 2) for _ in range(4)] + [(3, 3)]


def test_callbacks_can_stop_training(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    trainer = scripted(config(tmp_path, max_steps=50), callbacks=[Stop()])
    trainer.train()
    assert trainer.state.global_step == 2


def test_completions_are_written_at_every_log(tmp_path):
    """Prompt, completion, rewards and the columns that a reward function logged."""

    def noted(completion_ids, number, log_extra, log_metric, **_):
        log_extra("first", [ids[0] for ids in completion_ids])
        log_metric("longest", max(map(len, completion_ids)))
        return by_ids(completion_ids, number)

    trainer = scripted(config(tmp_path, max_steps=2, log_completions=True), reward=noted)
    trainer.train()
    written = sorted(p.name for p in (tmp_path / "completions").iterdir())
    assert written == ["train_000001.parquet", "train_000002.parquet"]
    table = pq.read_table(tmp_path / "completions" / written[0]).to_pylist()
    assert len(table) == 16
    for row in table:
        assert row["completion"][:1] == trainer.tokenizer.decode([int(row["first"])])
    assert trainer.state.log_history[0]["longest"] <= 6


def test_a_prompt_that_leaves_no_room_is_named(tmp_path):
    """Prompts are never cut."""
    long = Dataset.from_dict({"prompt": ["1+" * 40] * 8, "number": [0] * 8})
    trainer = make(tmp_path, train_dataset=long)
    with pytest.raises(ValueError, match=r"a prompt of 81? tokens leaves no room for 6 new ones"):
        trainer.train()


# Dynamic sampling.


def test_flat_groups_are_replaced_by_fresh_prompts(tmp_path):
    """Three prompts in four are flat; after some rounds no group is, and every column belongs to its new row."""

    def mostly_flat(completion_ids, number, log_extra, **_):
        log_extra("number", list(number))
        if number[0] % 4:
            return [1.0] * len(completion_ids)
        return [float(i) for i in range(len(completion_ids))]

    args = config(
        tmp_path, dynamic_sampling=True, dynamic_sampling_rounds=15, shuffle_dataset=False, log_completions=True
    )
    trainer = scripted(args, reward=mostly_flat)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["dynamic_sampling/first_round_flat"] == 0.75
    assert log["frac_reward_zero_std"] == 0
    assert log["groups/kept_fraction"] == 1
    assert trainer.sampler.calls[:2] == [4, 3]
    assert len(trainer.sampler.calls) == 1 + log["dynamic_sampling/rounds"] <= 16
    for row in pq.read_table(tmp_path / "completions" / "train_000001.parquet").to_pylist():
        assert row["prompt"].startswith(f"{int(row['number'])}+")
        assert int(row["number"]) % 4 == 0


def test_dynamic_sampling_gives_up_after_its_rounds(tmp_path):
    """Groups that stay flat leave the loss; faults of all rounds are counted."""

    def flat(completion_ids, **_):
        return [None] + [1.0] * (len(completion_ids) - 1)

    trainer = scripted(config(tmp_path, dynamic_sampling=True, dynamic_sampling_rounds=2, beta=0.0), reward=flat)
    trainer.train()
    log = trainer.state.log_history[0]
    assert trainer.sampler.calls == [4, 4, 4]
    assert log["dynamic_sampling/rounds"] == 2
    assert log["loss"] == 0
    assert log["rewards/flat/abstained"] == 12


def test_without_flat_groups_nothing_is_replaced(tmp_path):
    trainer = scripted(config(tmp_path, dynamic_sampling=True), reward=lambda completions, **_: [1, 2, 3, 4])
    trainer.train()
    assert trainer.sampler.calls == [4]
    assert trainer.state.log_history[0]["dynamic_sampling/rounds"] == 0


# The reference.


def test_the_reference_follows_the_policy_when_asked(tmp_path):
    """alpha = 1 every step: the KL of the second step is 0 again; without it, it is not."""
    kls = {}
    for synced in (False, True):
        args = config(
            tmp_path,
            max_steps=2,
            sync_ref_model=synced,
            ref_model_mixup_alpha=1.0,
            ref_model_sync_steps=1,
            learning_rate=0.1,
        )
        trainer = scripted(args)
        trainer.train()
        kls[synced] = [e["kl/max_log_ratio"] for e in trainer.state.log_history[:2]]
    assert kls[False][0] == kls[True][0] == 0
    assert kls[False][1] > 1e-3
    assert kls[True][1] < 1e-5


def test_beta_zero_has_no_reference(tmp_path):
    trainer = scripted(config(tmp_path, beta=0.0))
    assert "reference" not in trainer.shared.roles
    trainer.train()
    assert "kl" not in trainer.state.log_history[0]


def test_the_bundled_model_by_name(tmp_path):
    """The call of the README."""
    trainer = GRPOTrainer(
        "tiny",
        by_ids,
        config(tmp_path),
        train_dataset=rows(16),
        peft_config=LoraConfig(r=16, target_modules="all-linear"),
    )
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0


def test_default_arguments(tmp_path, monkeypatch):
    """`args=None` is the plain recipe."""
    monkeypatch.chdir(tmp_path)
    trainer = GRPOTrainer("tiny", by_ids, train_dataset=rows(16))
    assert isinstance(trainer.args, GRPOConfig)
    assert (trainer.args.beta, trainer.args.loss_type, trainer.args.num_generations) == (0.04, "grpo", 8)
