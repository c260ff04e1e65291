"""What users and scripts rely on, pinned: names, fields, argument order, log keys.

A change here is a change of contract: make it on purpose, and say so in the release notes.
"""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from datasets import Dataset
from transformers import TrainingArguments

import hf_rlx
import hf_rlx.functional
from hf_rlx import GRPOConfig, GRPOTrainer
from hf_rlx.trainers.grpo import PRESETS

NAMES = """
    Completion DIFFERS_FROM_TRL DPOConfig DPOTrainer GRPOConfig GRPOTrainer Generator Group IPOConfig IPOTrainer
    HubError IterativeDPOConfig IterativeDPOTrainer push_pairs
    ORPOConfig ORPOTrainer PPOConfig PPOTrainer PRMConfig PRMTrainer RewardConfig RewardError RewardReport RewardScorer
    RewardTrainer Rollout SFTConfig SFTTrainer SamplingParams SharedModel SimPOConfig SimPOTrainer StepReport
    TokenScores __version__ doctor evaluate_on_policy four_bit_config label_calculations load_causal_lm load_tokenizer
"""
FUNCTIONS = """
    AdaptiveKLController Aggregation CalibrationError CombinedRewards Correlation FixedKLController GaeOutput
    GroupAdvantages GroupStd GrpoLossOutput ImportanceMode ImportanceWeights Interval KLEstimates KLEstimator
    MajorityVote OrpoOutput PairRewardOutput PairedDifference PairwiseAccuracy PolicyDiagnostics
    PolicyLossOutput PositionSwap PpoPolicyLossOutput PreferenceLossOutput RankedOutput RatioLevel
    RunningMoments SequenceLogprobs ShapedReward StepLossOutput UctScores ValueLossOutput WeightedVote
    WhitenOutput aggregate aggregation_weights average_ranks best_of_n bradley_terry calibration_error
    combine_rewards dapo_loss dpo_hinge dpo_robust dpo_sigmoid entropy_from_logits expected_best_of_n
    explained_variance gae grpo_advantages grpo_loss gspo_loss importance_weights ipo kl_estimators kl_penalty
    log1mexp maj_at_k majority_vote masked_mean masked_sum masked_whiten mcnemar_exact normalizer_count orpo
    paired_bootstrap pairwise_accuracy pass_at_k plackett_luce policy_diagnostics policy_loss position_swap
    ppo_policy_loss prm_hard_loss prm_soft_loss ranked_all_pairs reward_length_correlation rloo_advantages
    rloo_loss selected_logprobs sequence_logprobs shaped_reward simpo smoothed_logistic soft_bradley_terry
    soft_overlong step_advantages step_aggregate step_scores token_logprobs uct value_loss weighted_best_of_n
    wilson_interval win_rate
"""

# Fields of GRPOConfig that neither transformers nor TRL 1.16 has.
OUR_FIELDS = """
    advantage_eps dynamic_sampling dynamic_sampling_rounds eval_temperature isolate_rewards keep_zero_variance
    kl_estimator kl_horizon kl_in_reward kl_target max_reward_failures max_rollout_rows max_skipped_steps
    max_tokens_per_forward max_tokens_per_update max_unscored_rollouts on_reward_error packing reward_concurrency
    reward_timeout scale_ddof soft_overlong_cache special_tokens_in_messages stop_strings
"""
ARGUMENTS = """
    model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks optimizers
    quantization_config peft_config tools rollout_func environment_factory step_reward_funcs
"""
# TRL's keys that a step without tools, images and vLLM has.
TRL_KEYS = """
    loss grad_norm learning_rate epoch reward reward_std frac_reward_zero_std rewards/digits/mean rewards/digits/std
    kl entropy policy_loss num_tokens step_time clip_ratio/low_mean clip_ratio/low_min clip_ratio/high_mean
    clip_ratio/high_max clip_ratio/region_mean completions/mean_length completions/min_length completions/max_length
    completions/mean_terminated_length completions/min_terminated_length completions/max_terminated_length
    completions/clipped_ratio
"""
OUR_KEYS = """
    kl_loss beta groups/kept_fraction advantages/abs_mean kl/k1_token kl/k1_sequence kl/k3_sequence kl/max_log_ratio
    sampling/sampling_logp_difference/mean sampling/sampling_logp_difference/max rollout/tokens_per_second
    update/tokens_per_second rewards/digits/abstained rewards/digits/errors rewards/unscored
    time/rollout time/update time/reference
"""


def test_names_of_the_package():
    assert set(hf_rlx.__all__) == set(NAMES.split())
    assert all(getattr(hf_rlx, name) is not None for name in hf_rlx.__all__)
    with pytest.raises(AttributeError, match="no attribute 'GRPO'"):
        hf_rlx.GRPO  # noqa: B018


def test_names_of_the_functional_floor():
    assert set(hf_rlx.functional.__all__) == set(FUNCTIONS.split())


def test_fields_of_the_grpo_configuration():
    """What is not transformers' is TRL's (the contract test in parity) or in this list."""
    trl = pytest.importorskip("trl")
    known = {f.name for c in (TrainingArguments, trl.GRPOConfig) for f in dataclasses.fields(c)}
    assert {f.name for f in dataclasses.fields(GRPOConfig)} - known == set(OUR_FIELDS.split())


def test_presets():
    assert set(PRESETS) == {"grpo", "dapo", "dr_grpo", "gspo", "rloo", "trl"}


def test_constructor_arguments():
    assert list(inspect.signature(GRPOTrainer.__init__).parameters)[1:] == ARGUMENTS.split()


def test_log_keys_of_two_training_steps(tmp_path):
    """Also: the parts of the loss are per optimizer step, as the loss is, whatever `logging_steps`. The second step is
    off policy: at ratio 1 the policy's part is minus the mean of the advantages, which is 0."""

    def digits(completions, **_):
        return [float(sum(c.isdigit() for c in text)) / 4 + ("7" in text) for text in completions]

    args = GRPOConfig(
        str(tmp_path),
        use_cpu=True,
        max_steps=2,
        logging_steps=2,
        learning_rate=1e-3,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_iterations=2,
        max_completion_length=6,
        disable_tqdm=True,
        save_strategy="no",
    )
    rows = Dataset.from_dict({"prompt": [f"{a}+{a}=" for a in range(20, 60)]})
    trainer = GRPOTrainer("tiny", digits, args, train_dataset=rows)
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["step"] == 2
    assert not set((TRL_KEYS + OUR_KEYS).split()) - logs.keys()
    assert logs["loss"] == pytest.approx(logs["policy_loss"] + logs["kl_loss"], abs=1e-6)
    assert abs(logs["policy_loss"]) > 1e-3
    assert logs["kl_loss"] > 1e-4
