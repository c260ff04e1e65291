"""PPO through its trainer: where rewards stand, and what they are worth to each token."""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset

from hf_rlx.models import critic
from hf_rlx.models.roles import CRITIC, POLICY, REFERENCE
from hf_rlx.trainers.ppo import PPOTrainer
from hf_rlx.types import Group
from tests.trainers.ppo_tools import WatchedPPO, ppo, ppo_config
from tests.trainers.tools import EOS, digest, lora, move, rows

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


def test_texts_keep_their_scores_however_they_are_dealt(tmp_path):
    """Of prompt 0 one text is kept, of prompt 1 two, which therefore come first: the last advantage of each is still
    its own score minus V."""
    texts = [[A, B, EOS], [EOS], [B, EOS], [A, A, B]]
    worth = {(A, B, EOS): None, (EOS,): 3.0, (B, EOS): 0.5, (A, A, B): -2.0}
    args = ppo_config(tmp_path, per_device_train_batch_size=4, num_generations=2, max_completion_length=3, beta=0.0)
    args.shuffle_dataset = args.whiten_advantages = False
    trainer = ppo(args, lambda completion_ids, **_: [worth[tuple(c)] for c in completion_ids], count=2, texts=texts)
    trainer.train()
    ((batch,),) = [batches for _, batches in trainer.windows]
    assert batch.places == [(1, 0), (1, 1), (0, 1)]
    last = batch.returns[range(3), batch.mask.sum(1) - 1]
    assert last.tolist() == [0.5, -2.0, 3.0]
    rollouts = trainer.windows[0][0]
    assert rollouts[0].advantages[1, 0] == 3.0
    assert not rollouts[0].advantages[0].any()


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


def test_two_steps_by_hand(tmp_path):
    """trl#2577: a b b EOS in the steps a (0.2) and bb (0.8), lambda 1, V 0: to the first step's token 1.0 is still to
    come, to those of the second 0.8, to EOS nothing."""

    def steps(completions, **_):
        return [[(1, 0.2), (3, 0.8)] for _ in completions]

    texts = [[A, B, B, EOS]]
    _, (batch,) = window(tmp_path, [0.0], texts, value=0.0, lam=1.0, step_reward_funcs=steps, max_completion_length=4)
    torch.testing.assert_close(batch.returns, torch.tensor([[1.0, 0.8, 0.8, 0.0]]))


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


def test_texts_without_a_token_leave_loss_and_denominators(tmp_path):
    """Every other prompt gets none at all, as a server may say; they are scored and reported, and not learned from."""
    texts = [[70, 71, EOS], []] * 8
    trainer = ppo(ppo_config(tmp_path), lambda completions, **_: [float(len(c)) for c in completions], texts=texts)
    trainer.train()
    assert [int(batch.mask.sum()) for batch in trainer.batches] == [8 * 3]
    assert float(trainer.batches[0].normalizer) == 24
    assert trainer.state.log_history[0]["completions/kept_fraction"] == 0.5
    assert trainer.state.log_history[0]["reward"] == 1.0


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


def test_texts_end_at_a_stop_string(tmp_path):
    """The bundled model answers sums; with `stop_strings=["1"]` a text that has a 1 has it last (trl#3250)."""
    seen: list[str] = []

    def length(completions, **_):
        seen.extend(completions)
        return [float(len(text)) for text in completions]

    args = ppo_config(tmp_path, stop_strings=["1"], max_completion_length=8)
    prompts = Dataset.from_list([{"prompt": f"{n}+{n + 1}="} for n in range(50, 66)])
    PPOTrainer("tiny", length, args, train_dataset=prompts, peft_config=lora()).train()
    with_one = [text for text in seen if "1" in text]
    assert len(with_one) >= 8
    assert all(text.index("1") == len(text) - 1 for text in with_one)


def test_a_subclass_that_shapes_rewards_is_heard(tmp_path):
    """What it adds to the totals stands on the last token of every text (trl#3270): 0 + 0.5, and no KL."""

    class Shaped(WatchedPPO):
        def shape_rewards(self, rollouts):
            super().shape_rewards(rollouts)
            for rollout in rollouts:
                rollout.total = rollout.total + 0.5

    args = ppo_config(tmp_path, per_device_train_batch_size=4, beta=0.0, max_completion_length=3)
    trainer = ppo(args, lambda completions, **_: [0.0] * len(completions), count=4, texts=TEXTS, kind=Shaped)
    trainer.train()
    assert trainer.state.log_history[0]["reward/shaped"] == pytest.approx(0.5)
    batch = trainer.windows[0][1][0]
    last = batch.returns.gather(1, batch.mask.sum(1, keepdim=True) - 1)
    torch.testing.assert_close(last, torch.full((4, 1), 0.5))
