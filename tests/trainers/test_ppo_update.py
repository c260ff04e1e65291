"""PPO's update: on policy first, then clipped; minibatches, warm-up, early stop, step sizes, the KL controller."""

from __future__ import annotations

import pytest
import torch

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.roles import CRITIC, POLICY, REFERENCE
from hf_rlx.models.shared import SharedModel
from tests.trainers.ppo_tools import WatchedPPO, ppo, ppo_config, some
from tests.trainers.test_ppo import SCORES, TEXTS, told
from tests.trainers.tools import KeepGradients, digest, lora, rows, tiny_llama

# --- the update ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
def test_the_first_step_is_on_policy(tmp_path, own):
    """Ratio 1, no KL, no clip; loss = -mean(A) + vf_coef value loss; the critic starts at 0, so returns are scores.
    top_k and temperature shape the sampling only (trl#2358)."""
    trainer = WatchedPPO(
        tiny_llama(attention_dropout=0.5),
        some,
        ppo_config(tmp_path, whiten_advantages=False, critic_adapter=own, temperature=0.7, top_k=2),
        train_dataset=rows(16),
        processing_class=load_tokenizer("tiny"),
        peft_config=lora(lora_dropout=0.5),
    )
    trainer.train()
    (batch,), log = trainer.windows[0][1], trainer.state.log_history[0]
    tokens = batch.advantages[batch.mask]
    torch.testing.assert_close(trainer.outs[0].ratio_mean, torch.tensor(1.0), atol=1e-6, rtol=0)
    assert log["policy/ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert log["policy/approx_kl"] == pytest.approx(0.0, abs=1e-9)
    assert log["kl"] == log["clip_ratio/region_mean"] == log["value/clip_fraction"] == 0
    assert log["policy_loss"] == pytest.approx(-tokens.mean().item(), abs=1e-6)
    assert log["value_loss"] == pytest.approx(batch.returns[batch.mask].square().mean().item() / 2, abs=1e-6)
    assert log["loss"] == pytest.approx(log["policy_loss"] + 0.1 * log["value_loss"], abs=1e-6)
    assert log["value/mean"] == 0


@pytest.mark.parametrize("own", [False, True])
def test_values_of_rollout_and_update_are_one_function(tmp_path, own):
    """Dropout in the adapters is off: an update at the weights that sampled finds the old values again."""
    args = ppo_config(tmp_path, critic_adapter=own, detach_critic=False)
    trainer = ppo(args, drift=0.1, peft_config=lora(lora_dropout=0.5))
    trainer.train()
    (batch,) = trainer.windows[0][1]
    error = (batch.returns - batch.old_values)[batch.mask]
    assert batch.old_values.abs().max() > 1e-2
    assert trainer.state.log_history[0]["value_loss"] == pytest.approx(error.square().mean().item() / 2, rel=1e-5)


def test_every_switch_reaches_what_it_is_about(tmp_path):
    """Two epochs at a large rate, so that the second is far off policy; one field is changed at a time, and the number
    that it is about changes with it, while another stays."""
    base = {"max_steps": 2, "num_iterations": 2, "learning_rate": 0.1, "cliprange_value": 1e-4, "optim": "sgd"}
    base |= {"max_grad_norm": 0.0, "critic_learning_rate": 0.5, "cliprange": 0.01}

    def logs(**fields):
        trainer = ppo(ppo_config(tmp_path, **{**base, **fields}), drift=0.2)
        trainer.train()
        return trainer.state.log_history

    plain = logs()
    for fields, step, changed, same in [
        ({"dual_clip": 1.001}, 1, "policy_loss", "value_loss"),
        ({"cliprange_high": 5.0}, 1, "policy_loss", "value_loss"),
        ({"cliprange_value": None}, 1, "value_loss", "policy_loss"),
        ({"entropy_coef": 0.1}, 0, "loss", "policy_loss"),
        ({"vf_coef": 0.3}, 0, "loss", "value_loss"),
        ({"gamma": 0.5}, 0, "returns/mean", "value/mean"),
        ({"lam": 0.0}, 0, "advantages/std", "value/mean"),
        ({"whiten_advantages": False}, 0, "policy_loss", "advantages/std"),
        ({"kl_in_reward": False}, 0, "reward/shaped", "kl"),
        ({"beta": 0.2}, 0, "reward/shaped", "kl"),
    ]:
        other = logs(**fields)[step]
        assert other[changed] != pytest.approx(plain[step][changed], abs=1e-6), fields
        assert other[same] == pytest.approx(plain[step][same], abs=1e-6), fields


def test_epochs_shuffle_minibatches(tmp_path):
    """Three epochs of four minibatches of two micro-batches: the first in order, every one a permutation, and a
    minibatch's micro-batches stay together; off, always in order."""
    fields = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_mini_batches": 4}
    for shuffled in (True, False):
        args = ppo_config(tmp_path, num_iterations=3, shuffle_minibatches=shuffled, **fields)
        trainer = ppo(args)
        passes = trainer.passes(list(range(8)))
        epochs = [passes[i : i + 8] for i in range(0, 24, 8)]
        assert epochs[0] == list(range(8))
        assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
        assert all(epoch[i + 1] == epoch[i] + 1 for epoch in epochs for i in range(0, 8, 2))
        assert (epochs[1] != epochs[0]) == (epochs[2] != epochs[0]) == shuffled


def watch(trainer, parameters):
    """Digests of the parameters before every micro-step, as a list that training fills."""
    kept, original = [], trainer.training_step

    def watched(*args, **kwargs):
        kept.append(digest(parameters))
        return original(*args, **kwargs)

    trainer.training_step = watched
    return kept


def test_warm_up_trains_the_critic_alone(tmp_path):
    """Two steps of four: policy bit-identical, weight decay and momentum included, value loss falls; then it moves."""
    for own in (False, True):
        trainer = ppo(
            ppo_config(
                tmp_path,
                max_steps=4,
                num_iterations=4,
                critic_warmup_steps=2,
                weight_decay=0.1,
                critic_adapter=own,
                critic_learning_rate=1e-2,
                detach_critic=False,
            ),
            drift=0.02,
        )
        policy = [(n, p) for n, p in trainer.shared.trainable_parameters(POLICY) if "heads" not in n]
        kept = watch(trainer, policy)
        trainer.train()
        kept.append(digest(policy))
        assert kept[0] == kept[1] == kept[2]
        assert kept[2] != kept[3] != kept[4]
        losses = [entry["value_loss"] for entry in trainer.state.log_history[:4]]
        assert losses[0] > losses[1] > losses[2]


def test_early_stop_leaves_the_rest_of_the_window_out(tmp_path):
    """The second of four epochs measures a KL far above 1.5e-6: it and the others step nothing, by momentum and decay
    neither; the next window begins anew."""
    trainer = ppo(
        ppo_config(tmp_path, max_steps=6, num_iterations=4, learning_rate=1e-2, target_kl=1e-6, weight_decay=0.1),
        drift=0.02,
    )
    kept = watch(trainer, list(trainer.shared.named_parameters()))
    trainer.train()
    assert kept[0] != kept[1] == kept[2] == kept[3] == kept[4] != kept[5]
    logs = trainer.state.log_history[:6]
    assert [entry.get("early_stop") for entry in logs] == [0, 1, None, None, 0, 1]
    assert logs[1]["policy/approx_kl"] > 1.5e-6
    assert logs[2]["loss"] == logs[3]["loss"] == 0
    assert len(trainer.outs) == 4


def test_approx_kl_is_k3_over_real_tokens(tmp_path):
    """e = log new - log old: the mean of exp(e) - 1 - e over the 9 tokens, not over 4 x 3 places."""
    args = ppo_config(tmp_path, max_steps=2, num_iterations=2, learning_rate=1e-2, per_device_train_batch_size=4)
    trainer = ppo(args, told(SCORES), count=4, texts=TEXTS, drift=0.02)
    log_ratios = []

    def look(out, batch, scores, original=trainer._record):
        log_ratios.append((scores.per_token_logps.detach() - batch.old_logps)[batch.mask])
        original(out, batch, scores)

    trainer._record = look
    trainer.train()
    (e,) = log_ratios[1:]
    assert len(e) == 9
    expected = (e.exp() - 1 - e).mean().item()
    assert expected > 1e-5
    assert trainer.state.log_history[1]["policy/approx_kl"] == pytest.approx(expected, rel=1e-3)


def test_a_large_target_kl_stops_nothing(tmp_path):
    for target in (None, 1e3):
        trainer = ppo(ppo_config(tmp_path, max_steps=4, num_iterations=4, target_kl=target), drift=0.02)
        trainer.train()
        assert len(trainer.outs) == 4
    assert trainer.state.log_history[3]["early_stop"] == 0


def test_the_value_gradient_stops_at_the_head_unless_asked(tmp_path):
    """The policy's gradient is that of a run without a value loss, to the bit; attached, it is not."""
    grads = {}
    for name, fields in {"none": {"vf_coef": 0.0}, "detached": {}, "attached": {"detach_critic": False}}.items():
        keep = KeepGradients()
        trainer = ppo(ppo_config(tmp_path, max_grad_norm=0.0, **fields), drift=0.1, callbacks=[keep])
        trainer.train()
        grads[name] = keep.steps[0]
    names = [n for n in grads["none"] if "heads" not in n]
    assert all(torch.equal(grads["none"][n], grads["detached"][n]) for n in names)
    assert not all(torch.equal(grads["none"][n], grads["attached"][n]) for n in names)
    assert grads["detached"]["heads.critic.linear.bias"] != 0


def test_policy_and_critic_are_clipped_apart(tmp_path):
    """A value loss a thousand times larger leaves the policy's clipped gradient as it is."""
    norms = []
    for vf_coef in (0.1, 100.0):
        trainer = ppo(ppo_config(tmp_path, vf_coef=vf_coef, max_grad_norm=1e-3), drift=0.1)
        trainer.train()
        log = trainer.state.log_history[0]
        norms.append((log["grad_norm"], log["value/grad_norm"]))
        grads = {n: p.grad for n, p in trainer.shared.named_parameters() if p.grad is not None}
        assert not grads  # the loop has let them go
    assert norms[0][0] == norms[1][0]
    assert norms[1][1] == pytest.approx(1000 * norms[0][1], rel=1e-4)


def test_rates_of_policy_adapter_and_head(tmp_path):
    """None: a head takes 100 learning rates up to 1e-3, and never fewer than one; a number is for the whole critic."""
    found = {}
    for rate, of_critic in ((1e-6, None), (1e-4, None), (1e-2, None), (1e-4, 5e-4)):
        args = ppo_config(
            tmp_path, learning_rate=rate, critic_learning_rate=of_critic, critic_adapter=True, weight_decay=0.5
        )
        trainer = ppo(args)
        optimizer = trainer.create_optimizer()
        names = {id(p): n for n, p in trainer.shared.named_parameters()}
        of = {names[id(p)]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
        adapter = next(v for n, v in of.items() if ".critic." in n and "lora" in n)
        policy = next(v for n, v in of.items() if ".policy." in n)
        found[rate, of_critic] = (policy[0], adapter[0], of["heads.critic.linear.weight"][0])
        assert of["heads.critic.linear.bias"][1] == 0.0
        assert policy[1] == adapter[1] == of["heads.critic.linear.weight"][1] == 0.5
        assert len(of) == sum(len(g["params"]) for g in optimizer.param_groups)  # none twice
        held = {n for n, _ in trainer.shared.trainable_parameters(POLICY)}
        assert not [n for n in held if "critic" in n]
        assert of.keys() == held | {n for n, _ in trainer.shared.trainable_parameters(CRITIC)}
    assert found == {
        (1e-6, None): (1e-6, 1e-6, pytest.approx(1e-4)),
        (1e-4, None): (1e-4, 1e-4, 1e-3),
        (1e-2, None): (1e-2, 1e-2, 1e-2),
        (1e-4, 5e-4): (1e-4, 5e-4, 5e-4),
    }


def test_an_optimizer_of_the_user_must_hold_the_critic(tmp_path):
    shared = SharedModel.build(tiny_llama(), lora())
    optimizer = torch.optim.SGD([p for _, p in shared.trainable_parameters()], lr=0.1)
    trainer = ppo(ppo_config(tmp_path), model=shared, peft_config=None, optimizers=(optimizer, None))
    with pytest.raises(ValueError, match=r"optimizer misses 2 .*heads\.critic\.linear\.weight"):
        trainer.train()


# --- the KL controller -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_reward", [True, False])
def test_the_controller_is_fed_the_sequence_kl_of_the_rollout(tmp_path, in_reward):
    """e = clip(KL / target - 1, +-0.2) with a summed k1 far above the target: beta grows by 1 + 0.2 x 16 / 100 at the
    next window; fixed stays fixed (trl#18, trlx#438)."""
    fields = {"max_steps": 4, "num_iterations": 2, "kl_in_reward": in_reward, "learning_rate": 0.0, "beta": 0.05}
    trainer = ppo(ppo_config(tmp_path, kl_target=1e-4, kl_horizon=100, **fields), drift=0.2)
    trainer.train()
    betas = [entry["beta"] for entry in trainer.state.log_history[:4]]
    groups = [r.group() for r in trainer.windows[-1][0] if r.keep.any()]
    d = trainer.reference_logps(groups, POLICY, 1.0) - trainer.reference_logps(groups, REFERENCE, 1.0)
    # Of the last window, which the next one has not read yet; the rate is 0, so the policy has not moved.
    torch.testing.assert_close(torch.cat(trainer._kl_seen), d.sum(1), atol=1e-6, rtol=1e-4)
    assert d.sum(1).mean() > 1e-3
    assert betas == pytest.approx([0.05, 0.05, 0.05 * 1.032, 0.05 * 1.032])
    fixed = ppo(ppo_config(tmp_path, **fields), drift=0.2)
    fixed.train()
    assert {entry["beta"] for entry in fixed.state.log_history[:4]} == {0.05}


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_ratio"])
def test_a_kl_in_the_loss_pulls_towards_the_reference(tmp_path, estimator):
    """No reward but the KL: its loss is beta times the mean estimate, and it falls."""
    trainer = ppo(
        ppo_config(
            tmp_path,
            kl_in_reward=False,
            kl_estimator=estimator,
            beta=1.0,
            lam=1.0,
            max_steps=8,
            num_iterations=4,
            learning_rate=3e-3,
            num_generations=4,
        ),
        lambda completions, **_: [0.0] * len(completions),
        drift=0.1,
    )
    trainer.train()
    losses = [entry["kl_loss"] for entry in trainer.state.log_history[:8]]
    assert losses[0] > 1e-4
    if estimator == "k3":
        assert losses[0] == pytest.approx(trainer.state.log_history[0]["kl"], rel=1e-4)
    assert min(losses[4:]) < losses[0]
