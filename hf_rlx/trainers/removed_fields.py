"""Names that configurations of TRL and transformers had: what to write instead, by what a configuration has, and with
which value they are passed over."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

# The text for configurations that have the field in front of it; None: for all others.
Choice = tuple[str | None, str]

_CHUNKED = "nothing: log-probs are computed in chunks anyway"
_SHORTER: tuple[Choice, ...] = (
    ("max_completion_length", "max_completion_length"),
    ("max_length", "max_length (prompt and answer together)"),
)
_NO_REFERENCE = "nothing: a reference, where there is one, is made from the model"
_REFERENCE: tuple[Choice, ...] = (
    ("num_rounds", _NO_REFERENCE),
    ("precompute_ref_log_probs", "the argument ref_model of the trainer, a model that is loaded"),
    (None, _NO_REFERENCE),
)
_TOOLS: tuple[Choice, ...] = (
    ("num_generations", 'chat_template_kwargs={"tools": [...]}'),
    ("step_separator", 'chat_template_kwargs={"tools": [...]}'),
    (None, 'a column "tools" of the dataset'),
)
_PACKED = "nothing: rows are packed without padding"
_PRECISION = "nothing: bf16 and fp16 say the precision"
_DROPPED = "nothing: transformers has dropped it"
_VISIBLE = "nothing: the device is found; CUDA_VISIBLE_DEVICES chooses a GPU"

_CHOICES: dict[str, str | tuple[Choice, ...]] = {
    # lengths
    "max_prompt_length": (
        ("max_length", "max_length (prompt and answer together; a prompt that is too long loses its beginning)"),
        ("max_completion_length", "dataset.filter(...) to leave long prompts out; prompts are never cut"),
    ),
    "max_new_tokens": _SHORTER,
    "response_length": _SHORTER,
    "max_target_length": _SHORTER,
    "max_seq_length": (
        ("max_length", "max_length"),
        (None, "max_completion_length for completions; prompts are never cut"),
    ),
    # looking at completions
    "num_sample_generations": (
        ("log_completions", "log_completions"),
        (None, "nothing: this trainer samples nothing"),
    ),
    "generate_during_eval": (
        ("log_completions", "log_completions"),
        (None, "nothing: this trainer samples nothing"),
    ),
    "wandb_log_unique_prompts": (
        ("log_unique_prompts", "log_unique_prompts"),
        (None, "nothing: this trainer samples nothing"),
    ),
    # how things are computed
    "use_liger_loss": _CHUNKED,
    "use_liger_kernel_loss": _CHUNKED,
    "use_logits_to_keep": _CHUNKED,
    "use_num_logits_to_keep": _CHUNKED,
    "label_pad_token_id": _PACKED,
    "truncation_side": "nothing: answers are cut at their end and prompts at their beginning",
    "packing_strategy": _PACKED,
    "eval_packing": _PACKED,
    "is_encoder_decoder": "nothing: decoder-only models train",
    "dataset_kwargs": "nothing: rows are tokenized as they are used",
    "dataset_batch_size": "nothing: rows are tokenized as they are used",
    "dataset_text_field": 'dataset.rename_column(..., "text")',
    "completion_only_loss": "nothing: with prompt and completion, the completion alone is learned",
    "assistant_only_loss": "nothing: of messages, the assistant's last turn is learned",
    "tokenizer": "the argument processing_class of the trainer",
    # references
    "reference_free": "SimPOTrainer or ORPOTrainer, which have no reference",
    "force_use_ref_model": _REFERENCE,
    "ref_model_init_kwargs": _REFERENCE,
    "model_adapter_name": "the argument model of the trainer: a PeftModel whose active adapter trains",
    "ref_adapter_name": "nothing: the reference is a frozen copy of the adapter that the policy starts from",
    "base_model_attribute_name": "nothing: the base is found",
    # vLLM
    "vllm_device": "CUDA_VISIBLE_DEVICES of the vLLM server",
    "vllm_enable_prefix_caching": "nothing: vLLM does it by itself",
    "vllm_sampling_params": (
        ("generation_kwargs", "generation_kwargs"),
        (None, "nothing: this trainer samples nothing"),
    ),
    "vllm_dtype": "nothing: it is the model's",
    "vllm_max_model_len": (("use_vllm", "vllm_max_model_length"), (None, "nothing: this trainer samples nothing")),
    "vllm_guided_decoding_regex": (
        ("use_vllm", "vllm_structured_outputs_regex"),
        (None, "nothing: this trainer samples nothing"),
    ),
    # transformers
    "warmup_ratio": "warmup_steps (a float below 1 is a share)",
    "logging_dir": "the environment variable TENSORBOARD_LOGGING_DIR",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "use_mps_device": "nothing: the device is found",
    "xpu_backend": "ddp_backend",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "adafactor": 'optim="adafactor"',
    "fp16_backend": _PRECISION,
    "half_precision_backend": _PRECISION,
    "fp16_opt_level": _PRECISION,
    "tpu_num_cores": _VISIBLE,
    "overwrite_output_dir": "another output_dir for a fresh run, or train(resume_from_checkpoint=True) to go on",
    "save_safetensors": "nothing: weights are saved as safetensors",
    "push_to_hub_token": "hub_token",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_organization": 'hub_model_id="organization/name"',
    "torchdynamo": "torch_compile_backend",
    "dispatch_batches": 'accelerator_config={"dispatch_batches": ...}',
    "split_batches": 'accelerator_config={"split_batches": ...}',
    "use_ipex": _DROPPED,
    "jit_mode_eval": _DROPPED,
    "past_index": _DROPPED,
    "mp_parameters": _DROPPED,
    "ray_scope": _DROPPED,
    "group_by_length": "nothing: packed rows have no padding to save",
    "include_inputs_for_metrics": "nothing: evaluate() has the metrics",
    "include_tokens_per_second": "nothing: update/tokens_per_second is logged",
}

_NOT_SAMPLED = "nothing: this trainer samples nothing"
_UNREWARDED = "nothing: this trainer has no reward functions"
_UNCLIPPED = "nothing: GRPO and PPO alone clip a ratio"
_AS_TOKENIZED = "nothing: rows are tokenized as they are used"
_BATCH = "per_device_train_batch_size and gradient_accumulation_steps"
_PEFT = "the argument peft_config of the trainer, e.g. peft.LoraConfig(...)"
_BITS = "the argument quantization_config of the trainer, e.g. hf_rlx.four_bit_config()"
_BETA: tuple[Choice, ...] = (("beta", "beta"), (None, "nothing: this trainer holds nothing near a reference"))
_CLIP: tuple[Choice, ...] = (("epsilon", "epsilon"), ("cliprange", "cliprange"), (None, _UNCLIPPED))
_SCALED = "reward_clip, or a reward function that gives scores of about the same size"
_BEST = 'push_to_hub=True, load_best_model_at_end=True and metric_for_best_model="reward"'
_PASSES: tuple[Choice, ...] = (("num_iterations", "num_iterations"), (None, "num_train_epochs"))
# A command line has settings `model`, `dataset` and `reward`, where a script passes arguments.
_MODEL: tuple[Choice, ...] = (("model", "model"), (None, "the argument model of the trainer"))
_DATA: tuple[Choice, ...] = (("dataset", "dataset"), (None, "the argument train_dataset of the trainer"))
_REWARD: tuple[Choice, ...] = (
    ("reward", "reward"),
    ("num_generations", "the argument reward_funcs of the trainer: functions, or models"),
    (None, _UNREWARDED),
)

# Fields that some configurations have, for those that lack them, and names of TRL's older PPOConfig and scripts.
_OF_OTHERS: dict[str, str | tuple[Choice, ...]] = {
    "max_completion_length": (("max_length", "max_length (prompt and answer together)"),),
    "max_length": (("max_completion_length", "max_completion_length; prompts are never cut"),),
    "padding_value": _PACKED,
    "padding_free": _PACKED,
    "truncation_mode": (
        ("max_length", "nothing: answers are cut at their end and prompts at their beginning"),
        (None, "nothing: prompts are never cut"),
    ),
    "dataset_num_proc": _AS_TOKENIZED,
    "chars_per_token": _PACKED,
    "num_of_sequences": _PACKED,
    "tools": _TOOLS,
    # rewards and the pull to the reference
    "reward_weights": (("num_generations", "the argument reward_funcs of the trainer"), (None, _UNREWARDED)),
    "reward_model": _REWARD,
    "reward_model_path": _REWARD,
    "reward_funcs": _REWARD,
    "judge": _REWARD,
    "beta": _BETA,
    "kl_coef": _BETA,
    "init_kl_coef": _BETA,
    "adap_kl_ctrl": (("kl_target", "kl_target for an adaptive beta"), *_BETA),
    "target": (("kl_target", "kl_target"), *_BETA),
    "horizon": (("kl_horizon", "kl_horizon"), *_BETA),
    "kl_penalty": (("kl_estimator", "kl_estimator"), *_BETA),
    # the update
    "cliprange": _CLIP,
    "epsilon": _CLIP,
    "epsilon_high": (("cliprange_high", "cliprange_high"), (None, _UNCLIPPED)),
    "num_ppo_epochs": _PASSES,
    "ppo_epochs": _PASSES,
    "num_iterations": _PASSES,
    "num_mini_batches": _BATCH,
    "mini_batch_size": _BATCH,
    "batch_size": _BATCH,
    "train_batch_size": "per_device_train_batch_size",
    "backward_batch_size": "per_device_train_batch_size",
    "forward_batch_size": "max_tokens_per_forward",
    "local_rollout_forward_batch_size": "max_tokens_per_forward",
    "total_episodes": "max_steps",
    "steps": "max_steps",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "lr": "learning_rate",
    "missing_eos_penalty": (("mask_truncated_completions", "mask_truncated_completions"), (None, _NOT_SAMPLED)),
    "stop_token": (("stop_strings", "stop_strings"), (None, _NOT_SAMPLED)),
    "stop_token_id": (("stop_strings", "stop_strings"), (None, _NOT_SAMPLED)),
    "whiten_rewards": (("scale_rewards", "scale_rewards"), (None, "nothing: it belongs to PPO")),
    "scale_rewards": "nothing: it belongs to GRPO",
    "lam": "nothing: it belongs to PPO, which has a critic",
    "vf_coef": "nothing: it belongs to PPO, which has a critic",
    "world_size": "nothing: it is that of the launcher",
    "optimize_cuda_cache": "nothing: memory is freed by itself",
    "optimize_device_cache": "nothing: memory is freed by itself",
    "early_stopping": (("target_kl", "target_kl=..., which ends the updates on a rollout"), (None, _UNCLIPPED)),
    "use_score_scaling": (("reward_clip", _SCALED), (None, "nothing: it belongs to PPO")),
    "use_score_norm": (("reward_clip", _SCALED), (None, "nothing: it belongs to PPO")),
    "ratio_threshold": (("dual_clip", "dual_clip; policy/ratio_max is logged"), (None, _UNCLIPPED)),
    "compare_steps": "eval_steps",
    "push_to_hub_if_best_reward": _BEST,
    "is_peft_model": "nothing: it is seen from the model",
    "global_batch_size": _BATCH,
    "global_backward_batch_size": _BATCH,
    "tracker_kwargs": "nothing: trackers are set up by their environment variables, and `project`",
    "accelerator_kwargs": "accelerator_config",
    "project_kwargs": "output_dir",
    # names of a run, and what trackers get
    "log_with": "report_to",
    "tracker_project_name": "project",
    "exp_name": "run_name",
    "task_name": "run_name",
    # fields of one algorithm
    "simpo_gamma": "SimPOConfig, which has it",
    "gamma_beta_ratio": "SimPOConfig, which has it",
    "loss_weights": "DPOConfig, which has it",
    "label_smoothing": "DPOConfig, which has it",
    "cpo_alpha": "SimPOConfig, which has it",
    "center_rewards_coefficient": "RewardConfig, which has it",
    "step_separator": "PRMConfig, which has it",
    "rpo_alpha": "DPOConfig, which has it",
    "f_divergence_type": "DPOConfig, which has it",
    "discopop_tau": "DPOConfig, which has it",
    "ld_alpha": "DPOConfig, which has it",
    "f_alpha_divergence_coef": "nothing: it belongs to f_divergence_type, and the losses are the reverse KL's",
    "use_weighting": 'DPOConfig with loss_type="robust" for noisy labels; weights of pairs are not carried',
    "loss_type": (
        ("normalize", 'DPOConfig, which has it; IPOTrainer is its "ipo"'),
        ("gamma_beta_ratio", 'nothing: SimPOTrainer is "simpo"; DPOConfig has it'),
        ("nll_on_prompt", "nothing: it belongs to DPO and GRPO"),
        (None, "nothing: this trainer has one loss"),
    ),
    "precompute_ref_log_probs": "DPOConfig, which has it",
    # arguments of the trainer
    "model_name": _MODEL,
    "model_name_or_path": _MODEL,
    "sft_model_path": _MODEL,
    "dataset_name": _DATA,
    "query_dataset": _DATA,
    "train_dataset": _DATA,
    "processing_class": "the argument processing_class of the trainer",
    "use_peft": _PEFT,
    "peft_config": _PEFT,
    "lora_r": _PEFT,
    "lora_alpha": _PEFT,
    "lora_dropout": _PEFT,
    "lora_target_modules": _PEFT,
    "load_in_4bit": _BITS,
    "load_in_8bit": (("load_in_4bit", "load_in_4bit"), (None, _BITS)),
    "quantization_config": _BITS,
    "torch_dtype": (("dtype", "dtype"), (None, 'model_init_kwargs={"dtype": ...}')),
    "attn_implementation": 'model_init_kwargs={"attn_implementation": ...}',
}

# Fields of trainers that sample.
_SAMPLING = frozenset(
    (
        "num_generations",
        "num_generations_eval",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "generation_kwargs",
        "generation_batch_size",
        "steps_per_generation",
        "stop_strings",
        "cache_implementation",
        "mask_truncated_completions",
        "log_completions",
        "num_completions_to_print",
        "log_unique_prompts",
        "use_vllm",
        "use_transformers_paged",
    )
)

# Values that TRL and transformers had as defaults where nothing else is done here: such a name is passed over.
_AS_HERE: dict[str, tuple[Any, ...]] = {
    "max_prompt_length": (None,),
    "max_target_length": (None,),
    "max_completion_length": (None,),
    "generate_during_eval": (False,),
    "wandb_log_unique_prompts": (False, None),
    "use_liger_loss": (False, None),
    "use_liger_kernel_loss": (False, None),
    "use_logits_to_keep": (False,),
    "use_num_logits_to_keep": (False,),
    "label_pad_token_id": (-100,),
    "packing_strategy": ("bfd",),
    "eval_packing": (None,),
    "is_encoder_decoder": (None, False),
    "is_peft_model": (None, False),
    "dataset_kwargs": (None,),
    "dataset_batch_size": (1000, None),
    "dataset_text_field": ("text",),
    "completion_only_loss": (None, True),
    "assistant_only_loss": (False,),
    "reference_free": (False,),
    "force_use_ref_model": (False,),
    "ref_model_init_kwargs": (None,),
    "model_adapter_name": (None,),
    "ref_adapter_name": (None,),
    "base_model_attribute_name": ("model",),
    "vllm_sampling_params": (None,),
    "vllm_max_model_len": (None,),
    "vllm_guided_decoding_regex": (None,),
    "warmup_ratio": (None, 0.0, 0),
    "logging_dir": (None,),
    "no_cuda": (False,),
    "use_mps_device": (False,),
    "per_gpu_train_batch_size": (None,),
    "per_gpu_eval_batch_size": (None,),
    "adafactor": (False,),
    "tpu_num_cores": (None,),
    "overwrite_output_dir": (False,),
    "save_safetensors": (True,),
    "push_to_hub_token": (None,),
    "push_to_hub_model_id": (None,),
    "push_to_hub_organization": (None,),
    "dispatch_batches": (None,),
    "split_batches": (None, False),
    "use_ipex": (False,),
    "jit_mode_eval": (False,),
    "past_index": (-1,),
    "mp_parameters": ("",),
    "group_by_length": (False,),
    "include_inputs_for_metrics": (False,),
    "include_tokens_per_second": (False,),
    "padding_value": (None,),
    "padding_free": (False,),
    "truncation_mode": ("keep_start",),
    "dataset_num_proc": (None,),
    "tools": (None,),
    "reward_weights": (None,),
    "early_stopping": (False,),
    "use_score_scaling": (False,),
    "use_score_norm": (False,),
    "optimize_cuda_cache": (None, False),
    "optimize_device_cache": (None, False),
    "world_size": (None,),
    "rpo_alpha": (None,),
    "ld_alpha": (None,),
    "loss_weights": (None,),
    "label_smoothing": (0.0, 0),
    "use_weighting": (False,),
    "f_divergence_type": ("reverse_kl",),
    "precompute_ref_log_probs": (False,),
    "center_rewards_coefficient": (None,),
    "router_aux_loss_coef": (None,),
    "peft_config": (None,),
    "quantization_config": (None,),
    "use_peft": (False,),
    "load_in_4bit": (False,),
    "load_in_8bit": (False,),
}

REMOVED_FIELDS = frozenset(_CHOICES)
"""Names that no configuration of GRPO or DPO has any more."""


def replacement(name: str, known: Collection[str]) -> str | None:
    """What to write for a field that a configuration does not have; None: the name says nothing.

    Args:
        name: of the field. known: fields of the configuration.
    """
    if name in _SAMPLING or name.startswith("vllm_"):
        if "num_generations" not in known and "max_length" in known:
            return _NOT_SAMPLED
        if name.startswith(("vllm_", "use_")) and "use_vllm" not in known and "num_generations" in known:
            return "nothing: this trainer samples with the built-in engine"
    choices = _CHOICES.get(name, _OF_OTHERS.get(name))
    if choices is None or isinstance(choices, str):
        return choices
    return next((text for needed, text in choices if needed is None or needed in known), None)


def changes_nothing(name: str, value: Any) -> bool:
    """Whether a field that is no more was given the default that it had, under which the same is done here.

    Args:
        name: of the field. value: as it was given; 1 is not True.
    """
    return any(type(value) is type(same) and value == same for same in _AS_HERE.get(name, ()))


__all__ = ["REMOVED_FIELDS", "changes_nothing", "replacement"]
