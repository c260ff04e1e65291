"""PPO's roles on one base, saved and loaded; evaluation, tables, and what else users see."""

from __future__ import annotations

import logging

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.roles import CRITIC, POLICY
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.grpo import GRPOTrainer
from hf_rlx.trainers.ppo import PPOTrainer
from hf_rlx.trainers.sft import SFTConfig, SFTTrainer
from tests.trainers import pair_tools
from tests.trainers.ppo_tools import WatchedPPO, ppo, ppo_config, some
from tests.trainers.tools import KeepGradients, config, digest, lora, rows, tiny_llama

# --- roles -----------------------------------------------------------------------------------------------------------


def with_reward(seed: int = 5):
    """A model whose role `reward` has been trained."""
    shared = SharedModel.build(tiny_llama(), lora())
    shared.add_role("reward", lora(r=2))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in shared.trainable_parameters("reward"):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return shared


def test_a_critic_that_starts_as_the_reward_model(tmp_path):
    """Adapter and head are copies: the critic's value after a text is the reward model's score of it; they part when
    the critic trains."""
    shared = with_reward()
    trainer = ppo(ppo_config(tmp_path, critic_init_from_reward=True), model=shared, peft_config=None)
    group = trainer.rollout([trainer.train_dataset[0]], 0).rollouts[0].group()
    assert shared.score([group], CRITIC).abs().max() > 1e-3
    assert torch.equal(shared.score([group], CRITIC), shared.score([group], "reward"))
    reward = digest(shared.trainable_parameters("reward"))
    trainer.train()
    assert digest(shared.trainable_parameters("reward")) == reward
    assert not torch.equal(shared.score([group], CRITIC), shared.score([group], "reward"))


def test_a_critic_starts_with_the_temperature_of_the_reward_model(tmp_path):
    """Rewards are scores over the fitted temperature, and so are the values that start as them."""
    shared = with_reward()
    shared.roles["reward"].facts["temperature"] = 4.0
    trainer = ppo(ppo_config(tmp_path, critic_init_from_reward=True), model=shared, peft_config=None)
    group = trainer.rollout([trainer.train_dataset[0]], 0).rollouts[0].group()
    read = shared.reward_function(tokenizer=trainer.tokenizer).read(shared.score([group], "reward"))
    torch.testing.assert_close(shared.score([group], CRITIC), read, atol=1e-6, rtol=0)


def test_a_reward_model_on_the_same_base_scores(tmp_path):
    """Policy, reference, critic and reward model are one base: the reward is that of `SharedModel.score`, and the
    reward model's weights stay."""
    shared = with_reward()
    tokenizer = load_tokenizer("tiny")
    before = digest(shared.trainable_parameters("reward"))
    args = ppo_config(tmp_path, max_steps=2, num_iterations=2, critic_init_from_reward=True)
    trainer = ppo(args, shared.reward_function(tokenizer=tokenizer), model=shared, peft_config=None)
    trainer.train()
    rollouts = trainer.windows[0][0]
    expected = shared.score([r.group() for r in rollouts], "reward")
    torch.testing.assert_close(torch.cat([r.total for r in rollouts]).float(), expected, atol=1e-5, rtol=0)
    assert digest(shared.trainable_parameters("reward")) == before


@pytest.mark.parametrize(
    ("fields", "model", "message"),
    [
        ({"critic_init_from_reward": True}, "adapter", r"role 'reward', but the model has \['policy', 'reference'\]"),
        ({"critic_adapter": True}, "full", r"needs an adapter on the policy too.*pass peft_config=LoraConfig"),
        ({"critic_adapter": True}, "with critic", r"has a critic already, with none, but one is asked for"),
    ],
)
def test_critics_that_cannot_be(tmp_path, fields, model, message):
    shared = SharedModel.build(tiny_llama(), None if model == "full" else lora())
    if model == "with critic":
        shared.add_role(CRITIC)
    with pytest.raises(ValueError, match=message):
        ppo(ppo_config(tmp_path, **fields), model=shared, peft_config=None)


@pytest.mark.parametrize("own", [False, True])
def test_a_saved_critic_comes_back(tmp_path, own):
    """Policy at the root, `critic/` beside it: reloaded, the same values; and PPO goes on with that critic."""
    trainer = ppo(ppo_config(tmp_path / "run", max_steps=2, num_iterations=2, critic_adapter=own), drift=0.05)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "critic" / "head.safetensors").is_file()
    assert (tmp_path / "saved" / "critic" / "adapter_config.json").is_file() == own
    loaded = SharedModel.from_pretrained(tmp_path / "saved", base=tiny_llama())
    group = trainer.windows[0][0][0].group()
    expected = trainer.shared.score([group], CRITIC)
    torch.testing.assert_close(loaded.score([group], CRITIC), expected, atol=1e-6, rtol=0)
    again = ppo(ppo_config(tmp_path / "again", critic_adapter=own), model=loaded, peft_config=None)
    torch.testing.assert_close(again.shared.score([group], CRITIC), expected, atol=1e-6, rtol=0)
    again.train()


@pytest.mark.parametrize(
    "changes",
    [{"modules_to_save": ["lm_head"]}, {"use_dora": True}, {"init_lora_weights": "pissa"}, {"use_rslora": True}],
    ids=lambda c: next(iter(c)),
)
def test_a_critic_beside_an_adapter_of_another_kind(tmp_path, changes):
    """The critic's adapter is set up like the policy's, but holds no copies of layers and starts as nothing: values
    are 0, and the policy's distribution is what it was."""
    shared = SharedModel.build(tiny_llama(), lora(**changes))
    trainer = ppo(ppo_config(tmp_path, critic_adapter=True), model=shared, peft_config=None)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["value/mean"] == 0
    assert log["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert not [n for n, _ in shared.trainable_parameters(CRITIC) if "modules_to_save" in n]
    assert [n for n, _ in shared.trainable_parameters(CRITIC) if "lora" in n]


def test_the_base_is_left_alone_and_every_flag_comes_back(tmp_path):
    trainer = ppo(ppo_config(tmp_path, max_steps=2, num_iterations=2, critic_adapter=True), drift=0.05)
    base = [(n, p) for n, p in trainer.shared.named_parameters() if "lora" not in n and "heads" not in n]
    before, flags = digest(base), {n: p.requires_grad for n, p in trainer.shared.named_parameters()}
    trainer.train()
    assert digest(base) == before
    assert {n: p.requires_grad for n, p in trainer.shared.named_parameters()} == flags


def test_grpo_after_ppo_trains_no_critic(tmp_path):
    """The head that PPO left stays as it is, and the policy trains."""
    trainer = ppo(ppo_config(tmp_path), drift=0.05)
    trainer.train()
    head = digest(trainer.shared.heads.named_parameters())
    then = GRPOTrainer(
        trainer.shared,
        some,
        config(tmp_path),
        train_dataset=rows(16),
        processing_class=load_tokenizer("tiny"),
    )
    assert not [n for n, _ in then.shared.trainable_parameters(POLICY) if "heads" in n]
    then.train()
    assert digest(then.shared.heads.named_parameters()) == head


def test_the_optimizer_holds_no_head_of_another_role(tmp_path):
    """Also one that the user makes need not: the reward model's head is not PPO's to train."""
    trainer = ppo(ppo_config(tmp_path), model=with_reward(), peft_config=None)
    held = {id(p) for group in trainer.create_optimizer().param_groups for p in group["params"]}
    names = {n for n, p in trainer.shared.named_parameters() if id(p) in held}
    assert names == {n for role in (POLICY, CRITIC) for n, _ in trainer.shared.trainable_parameters(role)}
    assert not [n for n in names if "reward" in n]


def test_grpo_s_optimizer_holds_no_head_of_another_role(tmp_path):
    """Heads that were never trained, of a reward and a step-reward role, are not GRPO's to move, not even by weight
    decay."""
    shared = with_reward()
    shared.add_role("step_reward", lora(r=2))
    fields = {"learning_rate": 0.1, "weight_decay": 0.5}
    grpo = GRPOTrainer(
        shared, some, config(tmp_path, **fields), train_dataset=rows(16), processing_class=load_tokenizer("tiny")
    )
    held = {id(p) for group in grpo.create_optimizer().param_groups for p in group["params"]}
    assert {n for n, p in shared.named_parameters() if id(p) in held} == {
        n for n, _ in shared.trainable_parameters(POLICY)
    }
    heads, flags = digest(shared.heads.named_parameters()), {n: p.requires_grad for n, p in shared.named_parameters()}
    grpo.train()
    assert digest(shared.heads.named_parameters()) == heads
    assert {n: p.requires_grad for n, p in shared.named_parameters()} == flags


@pytest.mark.parametrize("kind", ["dpo", "ipo", "simpo", "orpo"])
def test_preference_trainers_after_ppo_train_no_critic(tmp_path, kind):
    """The head that PPO left on the policy's forward is not in their optimizer, and stays as it is."""
    ppo_trainer = ppo(ppo_config(tmp_path), drift=0.05)
    ppo_trainer.train()
    shared = ppo_trainer.shared
    head = digest(shared.heads.named_parameters())
    then = pair_tools.trainer(pair_tools.config(tmp_path / kind, kind, weight_decay=0.5, learning_rate=0.1), shared)
    assert not [n for n, _ in shared.trainable_parameters(POLICY) if "heads" in n]
    then.train()
    assert digest(shared.heads.named_parameters()) == head
    again = PPOTrainer(  # whose critic is there and trains on
        shared, some, ppo_config(tmp_path / "again"), train_dataset=rows(16), processing_class=load_tokenizer("tiny")
    )
    again.train()
    assert digest(shared.heads.named_parameters()) != head


def test_fine_tuning_after_ppo_trains_no_critic(tmp_path):
    trainer = ppo(ppo_config(tmp_path))
    then = SFTTrainer(
        trainer.shared,
        SFTConfig(str(tmp_path), report_to="none", use_cpu=True),
        train_dataset=Dataset.from_list([{"prompt": "1+1=", "completion": "2"}]),
        processing_class=load_tokenizer("tiny"),
    )
    assert not [n for n, _ in then.shared.trainable_parameters(POLICY) if "heads" in n]


# --- the outside -----------------------------------------------------------------------------------------------------


def test_evaluation_and_several_responses_a_prompt(tmp_path, caplog):
    """eval_steps=2 of 4 steps gives two records with `eval_reward` (trl#2808); K = 4 is one forward of the prompt."""
    caplog.set_level(logging.WARNING)
    trainer = PPOTrainer(
        "tiny",
        lambda completions, **_: [float(len(c)) for c in completions],
        ppo_config(tmp_path, max_steps=4, num_generations=4, num_iterations=2, eval_strategy="steps", eval_steps=2),
        train_dataset=rows(64),
        eval_dataset=rows(3),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )
    trainer.train()
    records = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert [entry["step"] for entry in records] == [2, 4]
    assert not [r for r in caplog.records if "constant reward" in r.message]


def test_a_single_response_a_prompt_is_no_constant_reward(tmp_path, caplog):
    """`frac_reward_zero_std` says something about groups only."""
    trainer = ppo(ppo_config(tmp_path, max_steps=4))
    trainer.train()
    assert "nothing is learned" not in caplog.text
    assert "frac_reward_zero_std" not in trainer.state.log_history[0]


def test_a_subclass_may_replace_a_part(tmp_path):
    """`shape_rewards` alone is overridden (trl#2576)."""

    class Bonus(WatchedPPO):
        def shape_rewards(self, rollouts):
            super().shape_rewards(rollouts)
            for rollout in rollouts:
                rollout.total = rollout.total + 10

    args = ppo_config(tmp_path, beta=0.0)
    trainer = Bonus(
        tiny_llama(), some, args, train_dataset=rows(16), processing_class=load_tokenizer("tiny"), peft_config=lora()
    )
    trainer.train()
    assert trainer.state.log_history[0]["reward/shaped"] > 10


def test_completion_tables_have_the_advantages(tmp_path):
    """A completion's is the mean over its tokens; nothing for one that was left out."""
    import pyarrow.parquet as pq

    trainer = ppo(ppo_config(tmp_path, log_completions=True))
    trainer.train()
    (path,) = (tmp_path / "completions").iterdir()
    found = pq.read_table(path).to_pylist()
    assert len(found) == 16
    assert any(row["advantage"] for row in found)
    assert all(row["advantage"] == 0 for row in found if row["reward"] is None)
    assert [row["reward"] for row in found].count(None) == 2


def test_out_of_memory_halves_add_up(tmp_path):
    """The first update runs out of memory behind its loss: done again in halves it gives the same gradient, and what
    the early stop sums up counts every token once."""
    grads, moved = [], []
    for fails in (False, True):
        keep = KeepGradients()
        args = ppo_config(tmp_path, max_grad_norm=0.0, critic_adapter=True, target_kl=1.0)
        trainer = ppo(args, drift=0.1, callbacks=[keep])
        stop = trainer._stop_early
        trainer._stop_early = lambda target, t=trainer, stop=stop: (moved.append(list(t._moved)), stop(target))
        if fails:
            original, calls = trainer.minibatch_loss, []

            def once(model, batch, original=original, calls=calls):
                calls.append(1)
                loss = original(model, batch)
                if len(calls) == 1:
                    raise torch.OutOfMemoryError("no memory")
                return loss

            trainer.minibatch_loss = once
        trainer.train()
        grads.append((keep.steps[0], trainer.state.log_history[0]))
    for name, grad in grads[0][0].items():
        torch.testing.assert_close(grads[1][0][name], grad, atol=1e-7, rtol=1e-4)
    for name in ("loss", "policy_loss", "value_loss"):
        assert grads[1][1][name] == pytest.approx(grads[0][1][name], abs=1e-6)
    assert moved[0][1] == moved[1][1] > 0
