"""PPO through its trainer: where rewards stand, what is learned from them, and when nothing is."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from peft import LoraConfig

from hf_rlx.models import critic
from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.roles import CRITIC, POLICY, REFERENCE
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.grpo import GRPOTrainer
from hf_rlx.trainers.ppo import PPOTrainer
from hf_rlx.types import Group
from tests.trainers.ppo_tools import WatchedPPO, ppo, ppo_config, some
from tests.trainers.tools import EOS, KeepGradients, config, digest, lora, move, rows, tiny_llama

A, B = 69, 70
# Ended after three tokens, cut after three, ended at once, ended after two.
TEXTS = [[A, B, EOS], [A, A, B], [EOS], [B, EOS]]
SCORES = [1.0, 1.0, -1.0, 0.5]


def told(scores):
    """A reward function that says these scores, by the number of the prompt."""
    return lambda completions, number, **_: [scores[n] for n in number]


def window(tmp_path, scores=SCORES, texts=TEXTS, value=0.25, drift=0.0, **fields):
    """The micro-batches of one window of `texts` with a critic that says `value` everywhere; K texts a prompt."""
    size = {"per_device_train_batch_size": len(texts), "max_completion_length": 3}
    quiet = {"gamma": 1.0, "lam": 0.5, "whiten_advantages": False, "beta": 0.0, "shuffle_dataset": False}
    steps = fields.pop("step_reward_funcs", None)
    args = ppo_config(tmp_path, **{**size, **quiet, **fields})
    trainer = ppo(args, told(scores), count=len(texts), texts=texts, step_reward_funcs=steps)
    if drift:
        move(trainer.shared, drift)
    with torch.no_grad():
        trainer.shared.heads[CRITIC].linear.weight.zero_()
        trainer.shared.heads[CRITIC].linear.bias.fill_(value)
    trainer.train()
    return trainer, trainer.windows[0][1]


def table(batch, name):
    """(B, R) numbers, rows in the order of the texts."""
    value = getattr(batch, name)
    order = sorted(range(len(batch.places)), key=lambda i: batch.places[i])
    return value[order]


# --- rewards and advantages ------------------------------------------------------------------------------------------


def test_scores_stand_on_the_last_real_token(tmp_path):
    """V = 1/4 everywhere, gamma 1, lambda 1/2. Inside a text delta = V - V = 0; at its last token, the EOS or the one
    before the cut, delta = score - V: 3/4, 3/4, -5/4, 1/4, halved at every token before. A return is A + V. Padding
    behind the shorter texts moves nothing (TRL's score one position later depends on it)."""
    trainer, (batch,) = window(tmp_path)
    expected = [[3 / 16, 3 / 8, 3 / 4], [3 / 16, 3 / 8, 3 / 4], [-5 / 4, 0, 0], [1 / 8, 1 / 4, 0]]
    torch.testing.assert_close(table(batch, "advantages"), torch.tensor(expected))
    returns = [[7 / 16, 5 / 8, 1], [7 / 16, 5 / 8, 1], [-1, 0, 0], [3 / 8, 1 / 2, 0]]
    torch.testing.assert_close(table(batch, "returns"), torch.tensor(returns))
    log = trainer.state.log_history[0]
    assert log["reward/shaped"] == pytest.approx(sum(SCORES) / 4)
    assert log["returns/mean"] == pytest.approx(sum(sum(row) for row in returns) / 9)
    assert log["value/mean"] == 0.25
    # R - V has the variance of R where V is constant.
    assert log["value/explained_variance"] == pytest.approx(0.0, abs=1e-6)


def test_a_cut_text_goes_on_at_the_critic_s_value(tmp_path):
    """As above, but behind the cut text stands V = 1/4: its last delta is 1 + 1/4 - 1/4 = 1. Others end with 0."""
    _, (batch,) = window(tmp_path, bootstrap_truncated=True)
    expected = [[3 / 16, 3 / 8, 3 / 4], [1 / 4, 1 / 2, 1], [-5 / 4, 0, 0], [1 / 8, 1 / 4, 0]]
    torch.testing.assert_close(table(batch, "advantages"), torch.tensor(expected))
    torch.testing.assert_close(table(batch, "returns")[1], torch.tensor([1 / 2, 3 / 4, 5 / 4]))


def test_bootstrapping_reads_the_state_after_the_last_token(tmp_path):
    """The critic of the cut text with one more token says there, before that token, what was bootstrapped with: with
    lambda 1 and no rewards the return of every token is gamma^n times it."""
    args = ppo_config(tmp_path, per_device_train_batch_size=2, max_completion_length=3, bootstrap_truncated=True)
    args.beta, args.lam, args.gamma, args.whiten_advantages = 0.0, 1.0, 0.5, False
    trainer = ppo(args, told([0.0, 0.0]), count=2, texts=[[A, B, A], [A, EOS]], drift=0.1)
    prompt = list(trainer.tokenizer(rows(2)[0]["prompt"])["input_ids"])
    args.shuffle_dataset = False
    with torch.no_grad(), trainer.shared.as_role(POLICY):
        after = critic.values(trainer.shared, [Group.from_lists(prompt, [[A, B, A, A]])])[0, 3].item()
    assert abs(after) > 1e-3
    trainer.train()
    (batch,) = trainer.windows[0][1]
    torch.testing.assert_close(table(batch, "returns")[0], torch.tensor([after / 8, after / 4, after / 2]))
    torch.testing.assert_close(table(batch, "returns")[1], torch.zeros(3))


def test_penalties_and_clips_of_scores(tmp_path):
    """Clipped to 0.6 first, then 0.5 off for the cut text: its score is 0.1, so that delta = 0.1 - 0.25 = -0.15."""
    trainer, (batch,) = window(tmp_path, reward_clip=0.6, missing_eos_penalty=0.5)
    last = [table(batch, "advantages")[i, n].item() for i, n in enumerate((2, 2, 0, 1))]
    assert last == pytest.approx([0.35, -0.15, -0.85, 0.25])
    assert trainer.state.log_history[0]["reward"] == pytest.approx(sum(SCORES) / 4)  # what the function said


def test_step_rewards_stand_where_steps_end(tmp_path):
    """Text 1, a a b: 2 at its first character, -1 at its last; text 0 a b: 3 at its second. V = 0, gamma = lambda = 1:
    returns are sums of what is still to come. Text 3 has no score, but it has a step, so it is kept."""

    def steps(completions, number, **_):
        return [{0: [(2, 3.0)], 1: [(1, 2.0), (3, -1.0)], 2: [], 3: [(1, 0.5)]}[n] for n in number]

    scores = [1.0, 1.0, -1.0, None]
    trainer, (batch,) = window(tmp_path, scores, value=0.0, lam=1.0, step_reward_funcs=[steps])
    expected = [[4, 4, 1], [2, 0, 0], [-1, 0, 0], [0.5, 0, 0]]
    torch.testing.assert_close(table(batch, "returns"), torch.tensor(expected))
    assert trainer.state.log_history[0]["rewards/steps/mean"] == pytest.approx(4.5 / 4)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_kl_is_a_part_of_every_token_s_reward(tmp_path, estimator):
    """V = 0, gamma = 1, lambda = 0: A_t = r_t = -beta kl_t, plus the score at the end."""
    trainer, (batch,) = window(
        tmp_path, value=0.0, drift=0.2, lam=0.0, beta=0.3, kl_estimator=estimator, learning_rate=0.0
    )
    groups = batch.groups
    d = trainer.reference_logps(groups, POLICY, 1.0) - trainer.reference_logps(groups, REFERENCE, 1.0)
    kl = d if estimator == "k1" else torch.exp(-d) - 1 + d
    expected = -0.3 * kl
    for index, (p, _) in enumerate(batch.places):
        expected[index, len(TEXTS[p]) - 1] += SCORES[p]
    assert d.abs().max() > 0.01
    torch.testing.assert_close(batch.advantages, expected * batch.mask, atol=1e-6, rtol=1e-5)
    assert batch.ref_logps is None
    log = trainer.state.log_history[0]
    assert log["kl/k1_sequence"] == pytest.approx(d.sum(1).mean().item(), abs=1e-6)
    assert log["kl/k1_token"] == pytest.approx(d[batch.mask].mean().item(), abs=1e-6)


def test_advantages_are_whitened_over_the_window(tmp_path):
    """Sixteen texts in two optimizer steps of two micro-batches: mean 0 and population variance 1 over all tokens of
    the window, not of a part; returns are as they were."""
    fields = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_mini_batches": 2}
    trainer = ppo(ppo_config(tmp_path, **fields), drift=0.1)
    trainer.train()
    batches = [b for b in trainer.windows[0][1] if b.groups]
    assert len(batches) == 4
    tokens = torch.cat([b.advantages[b.mask] for b in batches]).double()
    assert tokens.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert tokens.square().mean().item() == pytest.approx(1.0, abs=1e-5)
    assert any(abs(b.advantages[b.mask].mean()) > 0.05 for b in batches)
    values = torch.cat([(b.returns - b.old_values)[b.mask] for b in batches])
    log = trainer.state.log_history[0]
    torch.testing.assert_close(tokens, (values.double() - values.mean()) / values.std(correction=0), atol=1e-4, rtol=0)
    assert log["advantages/std"] == pytest.approx(values.std(correction=0).item(), rel=1e-4)


def test_whitened_rewards_keep_their_mean(tmp_path):
    """Token rewards 0 0 1 | 0 0 1 | -1 | 0 0.5: mean 1/6, mean of squares 13/36, variance 1/3; with V = 0 and lambda 0
    the advantage is (r - 1/6) / sqrt(1/3) + 1/6."""
    _, (batch,) = window(tmp_path, value=0.0, lam=0.0, whiten_rewards=True)
    rewards = torch.tensor([[0, 0, 1.0], [0, 0, 1.0], [-1.0, 0, 0], [0, 0.5, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 0], [1, 1, 0]]).bool()
    expected = torch.where(mask, (rewards - 1 / 6) / math.sqrt(1 / 3) + 1 / 6, 0.0)
    torch.testing.assert_close(table(batch, "advantages"), expected, atol=1e-5, rtol=0)


# --- abstained and constant rewards ----------------------------------------------------------------------------------


def test_unscored_and_masked_texts_leave_loss_and_denominators(tmp_path):
    """Without the cut text and the unscored one, 1 + 2 of 9 tokens are left: A = -5/4 | 1/8, 1/4, and the loss of an
    on-policy step is -mean(A) = 0.875 / 3, the value loss (1.25^2 + 0.125^2 + 0.25^2) / 6."""
    trainer, (batch,) = window(tmp_path, [None, 1.0, -1.0, 0.5], mask_truncated_completions=True)
    assert sorted(batch.places) == [(2, 0), (3, 0)]
    assert batch.normalizer == 3
    log = trainer.state.log_history[0]
    assert log["policy_loss"] == pytest.approx(0.875 / 3)
    assert log["value_loss"] == pytest.approx((1.25**2 + 0.125**2 + 0.25**2) / 6)
    assert log["completions/kept_fraction"] == 0.5


def test_no_reward_at_all_moves_nothing(tmp_path):
    trainer = ppo(
        ppo_config(tmp_path, max_steps=2, weight_decay=0.1, num_iterations=2), lambda completions, **_: [None]
    )
    before = digest(trainer.shared.named_parameters())
    trainer.train()
    assert digest(trainer.shared.named_parameters()) == before
    assert trainer.state.log_history[0]["loss"] == 0


def test_a_constant_reward_moves_the_critic_only(tmp_path):
    """With gamma = lambda = 1 and V = 0 every token's advantage is the same: exactly 0 once whitened. The critic
    learns what to expect."""
    trainer = ppo(
        ppo_config(tmp_path, lam=1.0, beta=0.0, max_grad_norm=0.0), lambda completions, **_: [0.7] * len(completions)
    )
    policy = [(n, p) for n, p in trainer.shared.trainable_parameters() if "heads" not in n]
    before, head = digest(policy), trainer.shared.heads[CRITIC].linear.bias.item()
    trainer.train()
    assert digest(policy) == before
    assert head == 0.0 != trainer.shared.heads[CRITIC].linear.bias.item()
    assert trainer.state.log_history[0]["value_loss"] == pytest.approx(0.7**2 / 2)


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
    """e = log new - log old; mean of exp(e) - 1 - e over what is not padding, which texts of one token have most of."""
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
    assert trainer.state.log_history[0]["kl/k1_sequence"] > 1e-3
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
    """The first update runs out of memory: done again in halves it gives the same gradient."""
    grads = []
    for fails in (False, True):
        keep = KeepGradients()
        trainer = ppo(ppo_config(tmp_path, max_grad_norm=0.0, critic_adapter=True), drift=0.1, callbacks=[keep])
        if fails:
            original, calls = trainer.minibatch_loss, []

            def once(model, batch, original=original, calls=calls):
                calls.append(1)
                if len(calls) == 1:
                    raise torch.OutOfMemoryError("no memory")
                return original(model, batch)

            trainer.minibatch_loss = once
        trainer.train()
        grads.append((keep.steps[0], trainer.state.log_history[0]))
    for name, grad in grads[0][0].items():
        torch.testing.assert_close(grads[1][0][name], grad, atol=1e-7, rtol=1e-4)
    for name in ("loss", "policy_loss", "value_loss"):
        assert grads[1][1][name] == pytest.approx(grads[0][1][name], abs=1e-6)
