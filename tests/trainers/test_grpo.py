"""What GRPO computes from rewards, and what it logs; completions are scripted."""

from __future__ import annotations

import math

import pytest
import torch

from hf_rlx.functional import AdaptiveKLController
from hf_rlx.rollout.reward_models import RewardError
from hf_rlx.trainers.grpo import GRPOTrainer
from hf_rlx.types import Completion, Rollout
from tests.trainers.tools import KeepGradients, ScriptedSampler, Watched, config, digest, relative_gap, scripted


def fixed(*values):
    """A reward function that returns these for every group."""

    def reward(completions, **_):
        return list(values)

    return reward


def advantages_of(trainer):
    """Advantages and keep of the first four prompts, as lists."""
    rollouts = trainer.sample([trainer.train_dataset[i] for i in range(4)])
    trainer.shape_rewards(rollouts)
    trainer.compute_advantages(rollouts)
    return [r.advantages for r in rollouts], [r.keep.tolist() for r in rollouts]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # mean 1/2, population deviation 1/2
        ({}, [1.0, -1.0, -1.0, 1.0]),
        # sample deviation sqrt(1/3): 0.5 / 0.57735
        ({"scale_ddof": 1, "advantage_eps": 0.0}, [0.8660254, -0.8660254, -0.8660254, 0.8660254]),
        ({"scale_rewards": "none"}, [0.5, -0.5, -0.5, 0.5]),
        # minus the mean of the three others: 1 - 1/3, 0 - 2/3
        ({"scale_rewards": "leave_one_out"}, [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        # all four groups are alike, so the batch's deviation is the group's
        ({"scale_rewards": "batch"}, [1.0, -1.0, -1.0, 1.0]),
    ],
)
def test_advantages_by_hand(tmp_path, fields, expected):
    advantages, keep = advantages_of(scripted(config(tmp_path, **fields), reward=fixed(1, 0, 0, 1)))
    for row, kept in zip(advantages, keep, strict=True):
        assert row.tolist() == pytest.approx(expected, abs=3e-6)
        assert kept == [True] * 4


def test_abstained_completions_leave_the_loss(tmp_path):
    """[1, None, 0, None]: a group of two, mean 1/2 and deviation 1/2; rows 1 and 3 are not trained on (row 59)."""
    trainer = scripted(config(tmp_path), reward=fixed(1, None, 0, None), kind=Watched)
    advantages, keep = advantages_of(trainer)
    assert advantages[0].tolist() == pytest.approx([1, 0, -1, 0], abs=1e-5)
    assert keep[0] == [True, False, True, False]
    trainer = scripted(config(tmp_path), reward=fixed(1, None, 0, None), kind=Watched)
    trainer.train()
    assert sum(len(b.mask) for b in trainer.batches) == 8
    assert trainer.batches[0].normalizer == 8
    assert trainer.state.log_history[0]["rewards/unscored"] == 8


def test_a_step_without_any_reward_is_a_zero_loss(tmp_path):
    trainer = scripted(config(tmp_path, beta=0.0, max_steps=2), reward=fixed(None, None, None, None))
    before = digest(trainer.shared.named_parameters())
    trainer.train()
    assert [e["loss"] for e in trainer.state.log_history[:2]] == [0, 0]
    assert all(math.isfinite(v) for e in trainer.state.log_history for v in e.values())
    assert "reward" not in trainer.state.log_history[0]
    assert digest(trainer.shared.named_parameters()) == before


def test_equal_rewards_have_no_signal_whatever_rounding_says(tmp_path):
    """Two functions that cancel: each has a spread, their sum has none (row 58)."""
    trainer = scripted(
        config(tmp_path, reward_weights=[1.0, 1.0]), reward=[fixed(0.1, 0.4, 0.1, 0.4), fixed(0.4, 0.1, 0.4, 0.1)]
    )
    advantages, keep = advantages_of(trainer)
    assert all(not a.any() for a in advantages)
    assert not any(any(k) for k in keep)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["frac_reward_zero_std"] == 1
    assert log["rewards/reward/std"] > 0.1
    assert log["groups/kept_fraction"] == 0


def test_kept_groups_without_signal_feel_the_kl_only(tmp_path):
    """`keep_zero_variance=True` is TRL's way: the flat groups stay in the denominator."""
    trainer = scripted(config(tmp_path, keep_zero_variance=True), reward=fixed(1, 1, 1, 1), drift=0.1, kind=Watched)
    trainer.train()
    log = trainer.state.log_history[0]
    assert trainer.batches[0].normalizer == 16
    assert log["policy_loss"] == 0
    assert log["kl_loss"] > 0


def test_reward_weights(tmp_path):
    """2 a - b."""
    trainer = scripted(
        config(tmp_path, reward_weights=[2.0, -1.0]), reward=[fixed(1, 0, 0, 0), fixed(0, 0, 0, 3)], kind=GRPOTrainer
    )
    rollouts = trainer.sample([trainer.train_dataset[0]])
    assert rollouts[0].total.tolist() == [2, 0, 0, -3]
    assert rollouts[0].rewards.tolist() == [[1, 0], [0, 0], [0, 0], [0, 3]]


def test_each_objective_normalised_by_itself(tmp_path):
    """GDPO: a large reward does not drown a small one. Both objectives give +-1, summed (2, 0, 0, -2) and then scaled
    over the batch, whose population deviation is sqrt(2)."""
    trainer = scripted(
        config(tmp_path, multi_objective_aggregation="normalize_then_sum"),
        reward=[fixed(1, 0, 1, 0), fixed(100, 100, 0, 0)],
    )
    advantages, _ = advantages_of(trainer)
    assert advantages[0].tolist() == pytest.approx([2**0.5, 0, 0, -(2**0.5)], abs=1e-4)


def test_truncated_completions_can_be_left_out(tmp_path):
    """They count in the baseline, but not in the loss nor its denominator."""
    kept = {}
    for masked in (False, True):
        trainer = scripted(config(tmp_path, mask_truncated_completions=masked), reward=fixed(0, 1, 2, 3), kind=Watched)
        trainer.train()
        kept[masked] = trainer.batches[0]
        log = trainer.state.log_history[0]
    assert 0 < log["completions/clipped_ratio"] < 1
    assert kept[False].normalizer == 16
    assert kept[True].normalizer == round(16 * (1 - log["completions/clipped_ratio"]))
    for group in kept[True].groups:
        assert all(int(ids[-1]) == 2 for ids in group.response_ids)
    assert set(kept[True].advantages.tolist()) <= set(kept[False].advantages.tolist())


def test_soft_overlong_penalty_is_added(tmp_path):
    """L = 6, C = 4: nothing up to 2 tokens, then a quarter for each further one."""
    trainer = scripted(config(tmp_path, soft_overlong_cache=4), reward=fixed(5, 5, 5, 5))
    rollouts = trainer.sample([trainer.train_dataset[i] for i in range(4)])
    trainer.shape_rewards(rollouts)
    lengths = [len(c.token_ids) for r in rollouts for c in r.completions]
    assert min(lengths) <= 2
    assert max(lengths) == 6
    expected = [5 - max(n - 2, 0) / 4 for n in lengths]
    assert torch.cat([r.total for r in rollouts]).tolist() == pytest.approx(expected)
    trainer.train()
    log = trainer.state.log_history[0]
    assert -1 < log["rewards/soft_overlong/mean"] < 0
    assert log["reward"] == 5  # as the functions gave it


def test_kl_in_the_reward(tmp_path):
    """r - beta x summed k1, no term in the loss; by hand from both forwards."""
    trainer = scripted(
        config(tmp_path, beta=0.5, kl_in_reward=True), reward=fixed(1, 1, 1, 1), drift=0.3, kind=Watched
    )
    rollouts = trainer.sample([trainer.train_dataset[i] for i in range(4)])
    trainer.shape_rewards(rollouts)
    for rollout in rollouts:
        with torch.no_grad():
            policy = trainer.shared([rollout.group()]).per_token_logps.sum(1)
            with trainer.shared.as_role("reference"):
                reference = trainer.shared([rollout.group()]).per_token_logps.sum(1)
        assert (policy - reference).abs().max() > 1e-3
        torch.testing.assert_close(rollout.total, 1 - 0.5 * (policy - reference), rtol=1e-5, atol=1e-5)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["kl_loss"] == 0
    assert log["kl"] > 0
    assert all(b.ref_logps is None for b in trainer.batches)
    assert log["groups/kept_fraction"] == 1  # the KL made a difference between equal rewards


@pytest.mark.parametrize(("drift", "direction"), [(0.0, -1), (1.5, 1)])
@pytest.mark.parametrize("in_reward", [False, True])
def test_adaptive_beta_moves_towards_its_target(tmp_path, drift, direction, in_reward):
    """Below the target beta falls, above it rises: by 0.2 x 16 episodes / horizon at most, and by sequence KL."""
    args = config(
        tmp_path,
        beta=0.1,
        kl_target=0.02,
        kl_horizon=100,
        max_steps=2,
        learning_rate=0.0,
        shuffle_dataset=False,
        kl_in_reward=in_reward,
    )
    trainer = scripted(args, reward=fixed(0, 1, 2, 3), drift=drift)
    trainer.sampler = trainer.make_sampler()  # k1 is positive on average on the policy's own samples only
    trainer.train()
    first, second = trainer.state.log_history[:2]
    assert first["beta"] == 0.1
    sequence = first["kl/k1_sequence"]
    assert (sequence - 0.02) * direction > 0
    error = min(max(sequence / 0.02 - 1, -0.2), 0.2)
    assert second["beta"] == pytest.approx(0.1 * (1 + error * 16 / 100))


def test_adaptive_beta_of_ziegler():
    """target 6, horizon 10000, 64 episodes (rows 46, 47): KL 12 nats a sequence gives 1 + 0.2 x 64 / 10000, KL 3 gives
    1 - 0.2 x 64 / 10000, KL 6.6 gives 1 + 0.1 x 64 / 10000; NaN leaves it."""
    controller = AdaptiveKLController(0.2, 6.0, 10000)
    assert controller.update(12.0, 64) == pytest.approx(0.2 * 1.00128)
    controller.load_state_dict({"coef": 0.2})
    assert controller.update(3.0, 64) == pytest.approx(0.2 * 0.99872)
    controller.load_state_dict({"coef": 0.2})
    assert controller.update(6.6, 64) == pytest.approx(0.2 * 1.00064)
    assert controller.update(math.nan, 64) == pytest.approx(0.2 * 1.00064)


def test_adaptive_beta_counts_episodes_once(tmp_path):
    """Two passes over a rollout show every sequence twice, but it was sampled once."""
    betas = {}
    for passes in (1, 2):
        args = config(
            tmp_path,
            beta=0.1,
            kl_target=0.02,
            kl_horizon=100,
            max_steps=2 * passes,
            num_iterations=passes,
            learning_rate=0.0,
        )
        trainer = scripted(args, reward=fixed(0, 1, 2, 3), drift=1.5)
        trainer.sampler = trainer.make_sampler()
        trainer.train()
        betas[passes] = trainer.kl_controller.coef
    assert betas[1] == betas[2] == pytest.approx(0.1 * (1 + 0.2 * 16 / 100))


def test_a_horizon_shorter_than_a_window_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`horizon` is 10 episodes but one step has 16"):
        scripted(config(tmp_path, kl_target=6.0, kl_horizon=10))


def test_clip_is_inert_in_one_pass_and_acts_in_the_second(tmp_path):
    """Row 71: the ratio is 1 while the policy is the one that sampled; a big step moves it out of the band."""
    once = scripted(config(tmp_path, learning_rate=0.5), reward=fixed(0, 1, 2, 3), kind=Watched)
    once.train()
    assert once.state.log_history[0]["clip_ratio/region_mean"] == 0
    assert once.state.log_history[0]["clip_ratio/high_max"] == 0
    twice = scripted(
        config(tmp_path, learning_rate=0.5, num_iterations=2, max_steps=2), reward=fixed(0, 1, 2, 3), kind=Watched
    )
    twice.train()
    assert twice.sampler.calls == [4]
    first, second = twice.state.log_history[:2]
    assert first["clip_ratio/region_mean"] == 0
    assert second["clip_ratio/region_mean"] > 0.1
    assert second["clip_ratio/high_max"] >= second["clip_ratio/high_mean"] > 0
    assert second["clip_ratio/low_min"] <= second["clip_ratio/low_mean"]
    assert second["clip_ratio/region_mean"] == pytest.approx(
        second["clip_ratio/low_mean"] + second["clip_ratio/high_mean"]
    )


def two_steps(prompts, completions, **_):
    """The middle of every text and its end; worth more in later completions."""
    return [[(1, float(k)), (len(text), 1.0)] if len(text) > 1 else [] for k, text in enumerate(completions)]


def test_step_rewards_by_hand(tmp_path):
    """DeepSeekMath 4.1.3: steps (0, 1), (2, 1) in two completions: mean 1, population deviation sqrt(1/2). A token has
    the sum over the steps that end at or after it: -sqrt(2) + 0 before the first end, 0 after it."""

    def steps(prompts, completions, **_):
        return [[(1, 0.0), (3, 1.0)], [(2, 2.0), (4, 1.0)]]

    trainer = scripted(config(tmp_path), reward=fixed(0, 0), step_reward_funcs=[steps])
    texts = ["abc", "abcd"]
    completions = []
    for text in texts:
        ids = trainer.tokenizer(text, add_special_tokens=False)["input_ids"] + [2]
        completions.append(Completion(ids, [0.0] * len(ids), True, text))
    total = torch.zeros(2)
    rollout = Rollout("p", "p", [1], completions, {}, total[:, None], total)
    trainer.compute_advantages([rollout])
    root = 2**0.5
    expected = [[-root, 0, 0, 0, 0], [root, root, 0, 0, 0]]
    torch.testing.assert_close(rollout.advantages, torch.tensor(expected), atol=1e-4, rtol=0)
    assert rollout.keep.tolist() == [True, True]

    # With outcome rewards (1, 0) on top: +1 and -1 on every token.
    rollout.total = torch.tensor([1.0, 0.0])
    trainer.compute_advantages([rollout])
    outcome = torch.tensor([[1.0], [-1.0]])
    torch.testing.assert_close(rollout.advantages, torch.tensor(expected) + outcome, atol=1e-4, rtol=0)


def test_step_rewards_train(tmp_path):
    """Token advantages reach the loss although every outcome reward is the same."""
    keep = KeepGradients()
    trainer = scripted(
        config(tmp_path, beta=0.0),
        reward=fixed(0, 0, 0, 0),
        step_reward_funcs=[two_steps],
        kind=Watched,
        callbacks=[keep],
    )
    trainer.train()
    assert trainer.batches[0].advantages.ndim == 2
    assert trainer.batches[0].advantages.shape == trainer.batches[0].mask.shape
    assert any(g.any() for g in keep.steps[0].values())


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (lambda prompts, completions, **_: [[]], "returned 1 step lists; expected 4"),
        (lambda prompts, completions, **_: [[(99, 1.0)]] * len(completions), "a step that ends outside its text"),
    ],
)
def test_step_rewards_that_do_not_fit_are_refused(tmp_path, steps, message):
    trainer = scripted(config(tmp_path), step_reward_funcs=[steps])
    with pytest.raises(RewardError, match=message):
        trainer.train()


class Engine(ScriptedSampler):
    """A sampler whose log-probs are off by 0.3: what another engine with other kernels is, only more so."""

    shift = 0.3

    def __init__(self, model, tokenizer, *options):
        super().__init__(tokenizer)
        self.model = model

    def generate(self, prompt_ids, num_generations, params, on_group=None, on_step=None):
        groups = super().generate(prompt_ids, num_generations, params, None, on_step)
        rollouts = [Rollout("", "", ids, group) for ids, group in zip(prompt_ids, groups, strict=True)]
        with torch.no_grad():
            logps = self.model([r.group() for r in rollouts], temperature=params.temperature).per_token_logps
        for row, completion in zip(logps, [c for g in groups for c in g], strict=True):
            completion.logps = [float(x) - self.shift for x in row[: len(completion.token_ids)]]
        groups[0][0].logps[0] = math.nan  # not reported
        for index, group in enumerate(groups):
            on_group(index, group)
        return groups


@pytest.mark.parametrize(("cap", "weight"), [(2.0, math.exp(0.3)), (1.2, 1.2)])
def test_importance_weights_of_another_engine(tmp_path, monkeypatch, cap, weight):
    """x = trainer - sampler = 0.3: every token's policy term is multiplied by min(e^0.3, C), its KL is not; a token
    without a sampler log-prob has weight 1."""
    monkeypatch.setattr("hf_rlx.rollout.vllm.VllmGenerator", Engine)
    keeps = {}
    for corrected in (True, False):
        keeps[corrected] = KeepGradients()
        args = config(
            tmp_path,
            beta=0.0,
            max_grad_norm=0.0,
            use_vllm=True,
            vllm_importance_sampling_correction=corrected,
            vllm_importance_sampling_clip_max=cap,
        )
        trainer = scripted(args, reward=fixed(0, 1, 2, 3), kind=Watched, callbacks=[keeps[corrected]])
        trainer.sampler = trainer.make_sampler()
        assert type(trainer.sampler) is Engine
        trainer.train()
        log, batch = trainer.state.log_history[0], trainer.batches[0]
        if not corrected:
            assert batch.is_weights is None
            continue
        weights = batch.is_weights[batch.mask]
        assert sorted(weights.tolist()) == pytest.approx([1.0] + [weight] * (len(weights) - 1), abs=1e-5)
        assert log["sampling/importance_sampling_ratio/max"] == pytest.approx(weight, abs=1e-5)
        assert log["sampling/importance_sampling_ratio/min"] == pytest.approx(1.0, abs=1e-5)
        assert log["sampling/sampling_logp_difference/mean"] == pytest.approx(0.3, abs=1e-5)
    # One token of weight 1 keeps the gradient from being exactly e^0.3 times the uncorrected one.
    scaled = {n: g * weight for n, g in keeps[False].steps[0].items()}
    assert 0 < relative_gap(keeps[True].steps[0], scaled) < 0.2
    assert relative_gap(keeps[True].steps[0], keeps[False].steps[0]) > 0.15


def test_entropy_bonus_raises_entropy(tmp_path):
    """Alone in the loss, it moves the policy towards uniform."""
    entropies = {}
    for coefficient in (-1.0, 1.0):
        args = config(tmp_path, beta=0.0, entropy_coef=coefficient, max_steps=6, learning_rate=0.01)
        trainer = scripted(args, reward=fixed(0, 1e-3, 0, 0))
        trainer.compute_advantages, original = None, trainer.compute_advantages

        def without_signal(rollouts, original=original):
            original(rollouts)
            for rollout in rollouts:
                rollout.advantages = torch.zeros_like(rollout.advantages)

        trainer.compute_advantages = without_signal
        trainer.train()
        entropies[coefficient] = [e["entropy"] for e in trainer.state.log_history[:6]]
    assert entropies[1.0][-1] > entropies[1.0][0]
    assert entropies[-1.0][-1] < entropies[-1.0][0]


def test_every_documented_metric_is_logged(tmp_path):
    """TRL's names, and ours."""
    trainer = scripted(config(tmp_path, num_iterations=2, max_steps=2), reward=fixed(0, 1, 2, 3))
    trainer.sampler = trainer.make_sampler()
    trainer.train()
    names = """loss grad_norm learning_rate epoch step_time num_tokens beta reward reward_std rewards/reward/mean
        rewards/reward/std rewards/reward/abstained rewards/reward/errors frac_reward_zero_std groups/kept_fraction
        advantages/abs_mean kl kl/k1_token kl/k1_sequence kl/k3_sequence kl/max_log_ratio policy_loss kl_loss entropy
        clip_ratio/low_mean clip_ratio/low_min clip_ratio/high_mean clip_ratio/high_max clip_ratio/region_mean
        completions/mean_length completions/min_length completions/max_length completions/clipped_ratio
        sampling/sampling_logp_difference/mean sampling/sampling_logp_difference/max rollout/tokens_per_second
        update/tokens_per_second time/rollout time/rewards time/reference time/old_logps time/update"""
    assert set(names.split()) <= set(trainer.state.log_history[0])
    assert all(isinstance(v, int | float) for v in trainer.state.log_history[0].values())


def test_rounding_noise_in_a_group_is_no_signal():
    """Scores of 1/3 that differ in the seventh digit are equal rewards: the group becomes exactly flat, NaN stays NaN;
    a group with a real difference is left as it is."""
    from hf_rlx.trainers.dynamic_sampling import flatten_noise

    total = torch.tensor([[1 / 3, 1 / 3 + 2e-7, float("nan")], [0.0, 1e-3, 0.0]], dtype=torch.float64)
    flat = flatten_noise(total)
    assert flat[0, 0] == flat[0, 1]
    assert torch.isnan(flat[0, 2])
    assert torch.equal(flat[1], total[1])
