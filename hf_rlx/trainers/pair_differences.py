"""Where DPO, IPO, SimPO, ORPO and supervised fine-tuning differ from TRL 1.16 on purpose; a part of
`hf_rlx.trainers.differences`."""

from __future__ import annotations

from typing import Any

_PARITY = "tests/parity/test_dpo.py::"
_TRAINERS = "tests/trainers/test_dpo.py::"
_SFT = "tests/trainers/test_sft.py::"
_KEYS = "tests/parity/test_log_keys.py::"
_DEFAULTS = "tests/parity/test_contract.py::test_defaults_are_trl_s_but_for_the_table"

# Behaviour -> what TRL does, what we do, why, the test that proves it.
PAIR_DIFFERENCES: dict[str, tuple[Any, Any, str, str]] = {
    "SFTConfig.shuffle_dataset": (
        False,
        True,
        "rows in a random order, every epoch its own, as everywhere",
        _DEFAULTS,
    ),
    "SFTConfig.packing": (
        False,
        True,
        "rows are whole and no token sees another row, so packing changes no number and saves the padding",
        _DEFAULTS,
    ),
    "SFT: loss of messages": (
        "over the whole conversation, or with assistant_only_loss over all turns of the assistant",
        "over the assistant's last turn; each turn may be a row of its own",
        "an answer is learned in the words in which the policy will be asked for it",
        _SFT + "test_messages_learn_the_last_turn",
    ),
    "SFT: fields that are not carried": (
        "dft loss, packing strategies, dataset_text_field, dataset_kwargs, completion_only_loss=False, "
        "assistant_only_loss; data_collator, formatting_func, compute_loss_func",
        "their defaults pass; anything else is refused by name, never ignored",
        "few ideas, each tested",
        "tests/trainers/test_from_trl.py::test_sft_takes_trl_s_defaults_and_refuses_the_rest",
    ),
    "SFT: log keys": (
        "mean_token_accuracy",
        "not logged; loss, entropy, num_tokens as there, and eval_perplexity",
        "no logits are kept: the vocabulary is gone over in chunks",
        _KEYS + "test_sft",
    ),
    "DPO, IPO, SimPO, ORPO: log keys": (
        "logits/chosen, logits/rejected; of DPO mean_token_accuracy",
        "not logged; rewards/..., logps/..., entropy, num_tokens as there, nll_loss of SimPO and ORPO, and lengths, "
        "changes and intervals",
        "no logits are kept: the vocabulary is gone over in chunks; log-probs say what a mean of logits would",
        _KEYS + "test_pairs",
    ),
    "GRPO: evaluation's log keys": (
        "eval_loss; eval_reward_std and eval_frac_reward_zero_std always",
        "no eval_loss; the other two where num_generations_eval is above 1; intervals and accuracies beside",
        "the loss of a policy gradient says nothing about how good the policy is, and one completion has no spread",
        _KEYS + "test_evaluation_of_grpo",
    ),
    "DPO: label smoothing": (
        'loss_type="sigmoid" ignores label_smoothing',
        'it is applied (cDPO), also in "sigmoid_norm"; refused where no loss reads it',
        "a setting that changes nothing is a wrong result later",
        _PARITY + "test_label_smoothing_acts_in_the_sigmoid_loss",
    ),
    "DPO: likelihood term": (
        '"sft" is the mean over the chosen tokens of the micro-batch',
        "the mean over pairs of the mean over a chosen answer's tokens; also as rpo_alpha",
        "its weight beside the pair loss must not depend on the other answers' lengths, nor on how a step was split",
        _PARITY + "test_the_likelihood_term_weighs_pairs_alike",
    ),
    "DPO: accumulation": (
        "the mean over each micro-batch, averaged",
        "the mean over all pairs of the optimizer step and of all processes",
        "the gradient must not depend on how a step was split",
        _TRAINERS + "test_the_split_of_a_step_and_the_layout_do_not_matter",
    ),
    "DPO: identical answers": (
        "a pair of loss log 2 and no gradient, in the mean",
        "out of loss and denominator, counted",
        "they dilute the step with nothing",
        _PARITY + "test_identical_answers_leave_the_mean",
    ),
    "DPO: accuracy": (
        "a tie is wrong",
        "a tie counts 1/2; evaluation has an interval and the number of ties",
        "a policy that is its reference is at 1/2, not at 0",
        _PARITY + "test_ties_count_half",
    ),
    "DPO: long rows": (
        "a prompt that fills max_length loses its row; otherwise answers are cut, their EOS with it",
        "prompt and answers are cut, each answer keeps its share and its EOS, and the rows are counted",
        "an answer without its end teaches not to end; and long rows are data too",
        _PARITY + "test_long_prompts_keep_their_rows",
    ),
    "DPO: ref_model": (
        "always a second model in memory",
        "a model with the base's bits is adapters off, and not kept; another of the family is a frozen second model",
        "half the memory for the same numbers",
        _TRAINERS + "test_a_ref_model_of_the_same_base_is_not_kept",
    ),
    "DPO: precomputed reference": (
        "one log-prob an answer, in the cache of the data set",
        "one a token, in the run's folder or ref_cache_dir; found by token ids, weights and settings, and checked",
        "the KL is logged all the same, and no log-prob is taken for another row's",
        "tests/trainers/test_reference_cache.py::test_other_data_model_template_or_length_is_computed",
    ),
    "DPO: losses that are not carried": (
        "exo_pair, nca_pair, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down, discopop; other divergences; "
        "WPO weighting",
        "refused by name, never ignored",
        "few ideas, each tested",
        _TRAINERS + "test_bad_settings_are_named",
    ),
    "SimPO: margin": (
        'CPOTrainer with loss_type="simpo": beta 0.1, simpo_gamma 0.5, and a likelihood term of weight 1',
        "SimPOTrainer: beta 2.0, gamma_beta_ratio 0.5 (simpo_gamma 1.0), no likelihood term unless cpo_alpha is set",
        "the paper's; TRL's defaults ask for a margin of 5 nats a token",
        _TRAINERS + "test_simpo_s_gamma_is_a_margin",
    ),
    "ORPO: likelihood term": (
        "over prompt and chosen answer, the mean over the micro-batch's tokens",
        "over the chosen answer, the mean over pairs of the mean over tokens; field nll_on_prompt",
        "the weight of the odds ratio must not depend on the prompt's length",
        _TRAINERS + "test_orpo_s_likelihood_on_the_prompt_is_asked_for",
    ),
    "SimPO, ORPO: max_completion_length": (
        "read for encoder-decoders only; decoders ignore it",
        "cuts answers, their EOS kept, in all trainers on pairs; so does max_prompt_length prompts",
        "a setting that changes nothing is a wrong result later",
        "tests/trainers/test_dpo_settings.py::test_answers_are_cut_to_their_own_length",
    ),
    "ORPO: probability 1": (
        "the loss is NaN",
        "log-probs per token are held at -1e-7, without odds gradient above",
        "a certain answer must not end the run",
        _TRAINERS + "test_extreme_log_ratios_stay_finite",
    ),
}

__all__ = ["PAIR_DIFFERENCES"]
