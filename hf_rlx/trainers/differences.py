"""Where hf_rlx differs from TRL 1.16 on purpose, why, and which test proves it.

Everything else is meant to be the same: constructor arguments and their order, configuration fields and defaults,
dataset columns, the reward-function signature, log keys. `tests/parity/` holds both lists: a default that differs and
stands in no entry fails there, and so does an entry that is no longer true.

Keys are `"<Config>.<field>"` for a default (it holds for every configuration that inherits from `<Config>`), or a few
words for a behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hf_rlx.trainers.pair_differences import PAIR_DIFFERENCES


@dataclass(frozen=True)
class Difference:
    """One deliberate difference.

    Args:
        trl: TRL's default value, or what TRL does.
        ours: our default value, or what we do.
        reason: why.
        test: pytest node id of the proof, from the repository's root.
    """

    trl: Any
    ours: Any
    reason: str
    test: str


_HERE = "tests/parity/test_differences.py::"
_REWARD = "tests/parity/test_reward.py::"
_DEFAULTS = "tests/parity/test_contract.py::test_defaults_are_trl_s_but_for_the_table"


def _default(trl: Any, ours: Any, reason: str, test: str = _DEFAULTS) -> Difference:
    return Difference(trl, ours, reason, test)


def _behaviour(trl: str, ours: str, reason: str, test: str) -> Difference:
    return Difference(trl, ours, reason, test if test.startswith("tests/") else _HERE + test)


_TABLE: dict[str, Difference] = {
    # Defaults. `GRPOConfig.preset("trl")` sets those of the algorithm back.
    "GRPOConfig.loss_type": _default("dapo", "grpo", "plain GRPO is what the paper defines (DeepSeekMath eq. 3)"),
    "GRPOConfig.beta": _default(0.0, 0.04, "the paper's; 0 keeps no reference at all"),
    "GRPOConfig.use_bias_correction_kl": _default(
        True, False, "the paper's plain k3; with the ratio on it the gradient is the reverse KL's also off policy"
    ),
    "GRPOConfig.vllm_importance_sampling_mode": _default(
        "sequence_mask",
        "token_truncate",
        "a sequence's summed ratio grows with its length, so sequence_mask silently drops long completions",
    ),
    "GRPOConfig.vllm_importance_sampling_clip_max": _default(3.0, 2.0, "the threshold documented for token_truncate"),
    "OnlineConfig.disable_dropout": _default(
        False, True, "old, new and reference log-probs must be one function of the weights; DPO has it on in TRL too"
    ),
    "BaseConfig.fp16": _default(
        False, None, "None: chosen from the device", _HERE + "test_precision_is_chosen_from_the_device"
    ),
    "BaseConfig.gradient_checkpointing": _default(
        True, None, "None: on GPUs only; on a CPU memory is not what is short, and it costs a second forward"
    ),
    "BaseConfig.logging_nan_inf_filter": _default(True, False, "a NaN loss must show; the filter logs it as 0"),
    # Numbers.
    "advantage scale": _behaviour(
        "(r - mean) / (sample std + 1e-4)",
        "(r - mean) / (population std + 1e-6); fields scale_ddof and advantage_eps",
        "the paper's worked example [1, 0, 0, 1] gives [1, -1, -1, 1] with the population's",
        "test_advantages_use_the_population_std",
    ),
    "groups without a signal": _behaviour(
        "advantage about 0 by the eps, the rows stay in the denominators and under the KL",
        "found by max - min, advantage exactly 0, out of loss and denominators; field keep_zero_variance",
        "they dilute the step with nothing: three quarters and more of the update on an easy task",
        "test_flat_groups_leave_loss_and_denominators",
    ),
    "completions without a reward": _behaviour(
        "advantage 0, the row stays in the denominators and under the KL",
        "out of loss and denominators, under every preset",
        "an abstention is no reward of 0",
        "test_unscored_completions_leave_the_denominators",
    ),
    "mask_truncated_completions": _behaviour(
        "the row's mask is 0 but loss_type grpo counts it in the mean over rows",
        "the row is out of loss and denominators",
        "a row that says nothing must not shrink the step",
        "test_truncated_completions_leave_the_denominators",
    ),
    "masks": _behaviour(
        "multiply: NaN under the mask makes the loss NaN",
        "select: what stands under the mask is never read",
        "NaN * 0 is NaN",
        "test_nan_under_the_mask_is_harmless",
    ),
    "log-ratio clamp": _behaviour(
        "none: exp overflows float32 from 89 nats on",
        "policy log-ratios are clamped to +-20 before the exponential (gradient 0 outside)",
        "one token off by 100 nats makes the loss infinite and the run worthless",
        "test_a_log_ratio_of_100_nats_stays_finite",
    ),
    "k3 clamp": _behaviour(
        "none",
        "the log-ratio to the reference is clamped to +-20 inside k3",
        "as above; k1, which is logged and may enter the reward, is never clamped",
        "test_a_reference_100_nats_away_stays_finite",
    ),
    "bnpo": _behaviour(
        "token mean of each micro-batch, averaged over gradient accumulation",
        "the same as dapo: token mean over the optimizer step",
        "the gradient must not depend on how a step was split",
        "test_bnpo_does_not_depend_on_the_split",
    ),
    "dapo over several optimizer steps": _behaviour(
        "each step is divided by the window's tokens / its steps",
        "each step is divided by its own tokens",
        "a token mean is over the tokens that are there",
        "test_dapo_divides_by_the_step_s_own_tokens",
    ),
    "entropy bonus": _behaviour(
        "token mean of the micro-batch whatever the loss_type",
        "averaged as the loss is, over the optimizer step",
        "one denominator: the split changes nothing, and the coefficient means the same beside the policy term",
        "test_the_entropy_bonus_is_averaged_as_the_loss",
    ),
    "special tokens in messages": _behaviour(
        "special tokens written in a message act as tokens",
        "they are split into ordinary text and counted; special_tokens_in_messages says otherwise",
        "a dataset row could end the user's turn and speak as the assistant",
        "test_special_tokens_in_messages_are_text",
    ),
    "dropout": _behaviour(
        "disable_dropout reaches nn.Dropout modules",
        "it reaches attention dropout and adapters too",
        "attention dropout is a plain number on the module in most models",
        "test_attention_dropout_is_switched_off",
    ),
    "sequence ratios": _behaviour(
        'importance_sampling_level="sequence" goes with every loss_type',
        'with loss_type="grpo" only',
        "one ratio a completion under a token mean weighs completions by their length",
        "test_sequence_ratios_need_completion_means",
    ),
    "metric kl": _behaviour(
        "multiplied with the ratio where use_bias_correction_kl is on",
        "plain k3, comparable between runs",
        "the logged distance must not depend on how the loss estimates its gradient",
        "test_the_logged_kl_is_plain_k3",
    ),
    "metric reward_std": _behaviour(
        "over all completions of the batch",
        "within a group, averaged",
        "it is what the group baseline learns from; between prompts the spread is their difficulty",
        "test_reward_std_is_within_a_group",
    ),
    # The loop.
    "precision": _behaviour(
        "bf16 unless fp16 is set, whatever the device",
        "bf16 from compute capability 8.0 on, else fp16, float32 on CPU",
        "a T4 only emulates bfloat16, and crawls",
        "test_precision_is_chosen_from_the_device",
    ),
    "adapters on a 4-bit base": _behaviour(
        "cast to bfloat16",
        "float32",
        "under fp16 the gradient scaler has no bfloat16 kernel, and small updates are lost in 8 bits of mantissa",
        "test_adapters_on_a_4_bit_base_stay_float32",
    ),
    "evaluation": _behaviour(
        "num_generations completions at the training temperature",
        "one greedy completion; fields num_generations_eval and eval_temperature",
        "accuracy of what would be used, at an eighth of the cost",
        "test_evaluation_is_one_greedy_completion",
    ),
    "groups and processes": _behaviour(
        "the batch of all processes is a multiple of num_generations; a group may be split",
        "that of each process is; groups stay whole",
        "no gather for a baseline, and the prompt is computed once",
        "test_each_process_holds_whole_groups",
    ),
    "groups and micro-batches": _behaviour(
        "completions of a window are shuffled over its micro-batches",
        "a group stays in one micro-batch wherever the sizes allow it",
        "its prompt is then computed once for all its completions",
        "test_groups_stay_whole_in_micro_batches",
    ),
    "generation window": _behaviour(
        "steps_per_generation below gradient_accumulation_steps samples several times a step",
        "rounded up to the accumulation",
        "the weights are the same within a step, so one rollout does",
        "test_a_window_is_at_least_one_optimizer_step",
    ),
    "long prompts": _behaviour(
        "go to the model whatever its context length",
        "refused where a whole completion does not fit after them",
        "beyond its context a model samples noise",
        "test_a_prompt_without_room_is_refused",
    ),
    "streaming datasets": _behaviour(
        "accepted",
        "refused, with what to do",
        "windows, resuming and the epoch's order need rows by index",
        "test_streaming_datasets_are_refused",
    ),
    "features that are not carried": _behaviour(
        "tools, rollout_func, environment_factory; loss types cispo, sapo, luspo, vespo; adaptive entropy; "
        "continuous batching",
        "refused by name, never ignored",
        "few ideas, each used everywhere; verifiers plug into TRL's trainer for the rest",
        "test_what_is_not_carried_is_refused",
    ),
    "contradicting arguments": _behaviour(
        "model_init_kwargs or quantization_config with a model in memory: ignored with a warning",
        "refused",
        "a setting that changes nothing is a wrong result later",
        "test_contradicting_arguments_are_refused",
    ),
    "sync_ref_model with an adapter": _behaviour(
        "refused",
        "the reference is a second, frozen adapter",
        "LoRA is the usual way here",
        "test_the_reference_adapter_moves_with_the_policy",
    ),
    "checkpoints": _behaviour(
        "written in place, optimizer and random states as pickles; the highest number is resumed from, whole or not",
        "staged, hashed, renamed, no pickle; the newest whole one is resumed from, a missing file is an error",
        "a run that was killed while saving must go on by itself",
        "tests/faults/test_checkpoint_faults.py::test_twenty_kills_while_saving",
    ),
    "resuming": _behaviour(
        "exact between generation windows only; other data or batches are not noticed",
        "exact at every optimizer step: the window is in the checkpoint; another run's checkpoint is refused",
        "an interrupted run is the usual run on a free notebook",
        "tests/invariants/test_resume.py::test_resume_is_exact_at_every_step",
    ),
    "signals": _behaviour(
        "SIGTERM ends the run at once, with nothing saved",
        "SIGTERM and Ctrl-C save within the current micro-step",
        "as above",
        "tests/faults/test_checkpoint_faults.py::test_a_signal_saves_within_the_micro_step",
    ),
    "reward functions that raise": _behaviour(
        "the run ends, and the work since the last checkpoint is lost",
        "the completion abstains and is counted; over max_reward_failures a checkpoint is written and the run stops; "
        'on_reward_error="raise" stops at the first',
        "one bad row of a data set must not end a night's run, a broken function must",
        "tests/faults/test_reward_faults.py::test_a_fault_here_and_there_is_counted_and_the_run_goes_on",
    ),
    "NaN": _behaviour(
        "training goes on and the weights are saved",
        "the run stops in the step where it arises, by the name of the weight or input, and saves nothing",
        "a night's work over a good checkpoint",
        "tests/faults/test_number_faults.py::test_bad_weights_are_never_saved",
    ),
    "saved settings": _behaviour(
        "training_args.bin, a pickle that holds the Hub token",
        "training_args.json, without secrets",
        "a folder that is pushed or shared must not carry code or a token",
        "test_a_saved_run_has_no_pickle_and_no_token",
    ),
    "calls of reward functions": _behaviour(
        "once a batch, on the main thread, after all of it was sampled",
        "once a group (K rows), in a worker thread while other groups decode; after an exception once a row",
        "scoring hides behind sampling, and an error names its completion; what must run on the main thread says "
        "runs_on_main_thread = True",
        "test_reward_functions_are_called_by_group_in_threads",
    ),
    "reward models": _behaviour(
        "the score at the last token that is not the pad token",
        "at the last attended token",
        "with pad = eos the former reads the token before EOS",
        "tests/rollout/test_reward_models.py::test_the_score_is_read_at_eos_also_when_pad_is_eos",
    ),
    # Reward models that are trained here.
    "reward training: where the score is read": _behaviour(
        "at the last token that is not the pad token; with pad = eos that is the one before the EOS",
        "at the answer's last token by its own length, EOS included",
        "the EOS that was appended is what tells a finished answer",
        _REWARD + "test_the_score_is_read_at_eos_where_pad_is_eos",
    ),
    "reward training: max_length": _behaviour(
        "rows with a longer answer are dropped",
        "prompt and answers are cut, EOS kept, and counted",
        "long rows are data too, and dropping them teaches that long answers do not occur",
        _REWARD + "test_long_rows_are_cut_and_not_dropped",
    ),
    "reward training: the end of a message": _behaviour(
        "with all that the chat template writes behind it, such as ChatML's line break",
        "up to the template's last EOS",
        "a policy stops at EOS, and its answers must be scored at the token that was trained",
        _REWARD + "test_the_score_of_a_message_is_read_at_its_eos",
    ),
    "reward training: accumulation": _behaviour(
        "the mean over each micro-batch, averaged",
        "the mean over all rows of the optimizer step and of all processes",
        "the gradient must not depend on how a step was split",
        _REWARD + "test_an_uneven_micro_batch_weighs_by_its_rows",
    ),
    "reward training: accuracy": _behaviour(
        "a tie is wrong",
        "a tie counts 1/2; evaluation has an interval and the number of ties",
        "a scorer that knows nothing is at 1/2, and ties do occur in bfloat16",
        _REWARD + "test_a_tie_counts_half",
    ),
    "reward training: identical answers": _behaviour(
        "a pair of loss log 2 and no gradient, in the mean",
        "out of loss and denominator, counted",
        "they dilute the step with nothing",
        "tests/trainers/test_reward.py::test_rows_without_a_pair_change_nothing",
    ),
    "reward training: peft_config with a language model": _behaviour(
        "an adapter on a sequence classifier",
        'the role "reward" beside a fresh policy adapter; with task_type="SEQ_CLS" as TRL',
        "the same base then trains the policy",
        "tests/trainers/test_reward.py::test_a_causal_lm_with_a_config_gets_a_policy_beside",
    ),
    "reward training: the head of an adapter": _behaviour(
        "saved only with the task type SEQ_CLS or modules_to_save",
        "always trained and saved",
        "without it the loaded model's scores are random",
        "tests/trainers/test_reward_classifier.py::test_saved_and_loaded_by_transformers_it_gives_the_same_score",
    ),
    # PPO, against TRL 1.9, the last to have it.
    "PPO: models": _behaviour(
        "policy, reference, reward model and value model, each a whole network",
        "roles on one base: an adapter, adapters off, a head; critic_adapter gives the critic an adapter of its own",
        "a third of the memory; with the adapter the gradients are those of separate models",
        "tests/trainers/test_ppo_exact.py::test_one_base_is_separate_models",
    ),
    "PPO: value gradient": _behaviour(
        "the value model is a network of its own",
        "the critic's head reads the policy's hidden states and sends no gradient into them; field detach_critic",
        "a value loss grows with the square of the rewards' scale and would drown the policy's gradient",
        "tests/trainers/test_ppo_update.py::test_the_value_gradient_stops_at_the_head_unless_asked",
    ),
    "PPO: rewards": _behaviour(
        "one sequence classifier, of token ids",
        "reward_funcs as in GRPO: functions, models, names, a list of them; completions may be left unscored",
        "most rewards are rules",
        "tests/trainers/test_ppo_config.py::test_arguments_of_trl_s_trainer_point_to_ours",
    ),
    "PPO: place of the score": _behaviour(
        "one position after the last token, where the value of padding is read",
        "on the last real token",
        "the advantage must not depend on how far a row is padded",
        "tests/trainers/test_ppo.py::test_scores_stand_on_the_last_real_token",
    ),
    "PPO: whitening": _behaviour(
        "over this process's batch, sample variance",
        "over the rollout of all processes, population variance; 0 where all are equal",
        "one device with accumulation and several devices give one curve; a single token is no division by 0",
        "tests/trainers/test_ppo.py::test_advantages_are_whitened_over_the_window",
    ),
    "PPO: gradient norm": _behaviour(
        "policy and value model are clipped as one",
        "each by itself",
        "a large value loss would shrink the policy's step",
        "tests/trainers/test_ppo_update.py::test_policy_and_critic_are_clipped_apart",
    ),
    "PPO: approx_kl": _behaviour(
        "half the squared log-ratio, averaged over padding too",
        "k3 of KL(old, new) over real tokens",
        "padding dilutes it; k3 is unbiased and never negative",
        "tests/trainers/test_ppo_update.py::test_approx_kl_is_k3_over_real_tokens",
    ),
    "PPO: num_mini_batches": _behaviour(
        "divides a rollout of per_device_train_batch_size x gradient_accumulation_steps",
        "multiplies it: so many optimizer steps of that size an epoch",
        "a micro-step stays what was asked for",
        "tests/trainers/test_ppo_config.py::test_names_that_trl_and_we_share_are_fields",
    ),
    "PPO: defaults": _behaviour(
        "temperature 0.7, response_length 53",
        "temperature 1.0, max_completion_length 512, as for GRPO",
        "one set of sampling defaults; a policy gradient wants the policy's own distribution",
        "tests/trainers/test_ppo_config.py::test_the_default_recipe",
    ),
    "PPO: evaluation": _behaviour(
        "evaluate() fails, eval settings are ignored",
        "as in GRPO",
        "a reward that rises in training must rise on held-out prompts",
        "tests/trainers/test_ppo_roles.py::test_evaluation_and_several_responses_a_prompt",
    ),
}

_TABLE |= {name: Difference(*entry) for name, entry in PAIR_DIFFERENCES.items()}
DIFFERS_FROM_TRL: MappingProxyType[str, Difference] = MappingProxyType(_TABLE)

__all__ = ["DIFFERS_FROM_TRL", "Difference"]
