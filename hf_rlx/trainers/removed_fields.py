"""Names that configurations of TRL and transformers had, and what to write instead, by what a configuration has."""

from __future__ import annotations

from collections.abc import Collection

# The text for configurations that have the field in front of it; None: for all others.
Choice = tuple[str | None, str]

_CHUNKED = "nothing: log-probs are computed in chunks anyway"
_SHORTER: tuple[Choice, ...] = (
    ("max_completion_length", "max_completion_length"),
    ("max_length", "max_length (prompt and answer together)"),
)
_PACKED = "nothing: rows are packed without padding"
_PRECISION = "nothing: bf16 and fp16 say the precision"
_VISIBLE = "nothing: the device is found; CUDA_VISIBLE_DEVICES chooses a GPU"

_CHOICES: dict[str, str | tuple[Choice, ...]] = {
    # lengths
    "max_prompt_length": (
        ("max_completion_length", "filter long prompts out of the dataset; prompts are never cut"),
        ("max_length", "max_length (prompt and answer together; a prompt that is too long loses its beginning)"),
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
    "force_use_ref_model": "the argument ref_model of the trainer",
    "ref_model_init_kwargs": "the argument ref_model of the trainer: a model that is loaded",
    "model_adapter_name": "the argument model of the trainer: a PeftModel whose active adapter trains",
    "ref_adapter_name": "nothing: the reference is a frozen copy of the adapter that the policy starts from",
    "base_model_attribute_name": "nothing: the base is found",
    # vLLM
    "vllm_device": "CUDA_VISIBLE_DEVICES of the vLLM server",
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
    "group_by_length": "nothing: packed rows have no padding to save",
    "include_inputs_for_metrics": "nothing: evaluate() has the metrics",
    "include_tokens_per_second": "nothing: update/tokens_per_second is logged",
}

# Fields that some configurations have, for those that lack them.
_OF_OTHERS: dict[str, str | tuple[Choice, ...]] = {
    "max_completion_length": (("max_length", "max_length (prompt and answer together)"),),
    "max_length": (("max_completion_length", "max_completion_length; prompts are never cut"),),
    "num_generations": (("max_length", "nothing: this trainer samples nothing"),),
    "reward_weights": (("max_length", "nothing: this trainer has no reward functions"),),
    "kl_coef": (("beta", "beta"),),
    "cliprange": (("epsilon", "epsilon"),),
    "num_ppo_epochs": (("num_iterations", "num_iterations"),),
    "simpo_gamma": (("max_length", "SimPOConfig, which has it"),),
    "rpo_alpha": (("max_length", "DPOConfig, which has it"),),
}

REMOVED_FIELDS = frozenset(_CHOICES)
"""Names that no configuration of GRPO or DPO has any more."""


def replacement(name: str, known: Collection[str]) -> str | None:
    """What to write for a field that a configuration does not have; None: the name says nothing.

    Args:
        name: of the field. known: fields of the configuration.
    """
    choices = _CHOICES.get(name, _OF_OTHERS.get(name))
    if choices is None or isinstance(choices, str):
        return choices
    return next((text for needed, text in choices if needed is None or needed in known), None)


__all__ = ["REMOVED_FIELDS", "replacement"]
