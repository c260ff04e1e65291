"""Fields of every trainer that samples: generation, rewards, evaluation, vLLM. Names and defaults are TRL 1.16's."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from hf_rlx.functional import ImportanceMode
from hf_rlx.rollout.sampling import SamplingParams, from_generation_kwargs
from hf_rlx.trainers.config import BaseConfig, described, strict

logger = logging.getLogger(__name__)


@strict
@dataclass
class OnlineConfig(BaseConfig):
    """Configuration of `OnlineTrainer`; see the help text of each field.

    Of the inherited fields, `per_device_eval_batch_size` has no effect: `max_rollout_rows` bounds every rollout.
    """

    smallest_group: ClassVar[int] = 2  # completions a prompt that the algorithm needs at least

    learning_rate: float = described(1e-6, "Step size; for LoRA about ten times that of full weights, e.g. 1e-5.")
    remove_unused_columns: bool = described(False, "Keep columns: reward functions read them.")
    shuffle_dataset: bool = described(True, "Draw prompts in a random order.")
    # Groups and windows.
    num_generations: int = described(8, "K, completions a prompt.")
    num_generations_eval: int | None = described(None, "Completions a prompt in evaluation; None: 1.")
    generation_batch_size: int | None = described(
        None,
        "Completions of one rollout over all processes; None: per_device_train_batch_size x processes x "
        "steps_per_generation.",
    )
    steps_per_generation: int | None = described(
        None, "Micro-steps that one rollout serves; None: gradient_accumulation_steps (on-policy)."
    )
    num_iterations: int = described(1, "Passes over each rollout.")
    max_rollout_rows: int = described(64, "Completions that decode side by side at most.")
    # Sampling.
    max_completion_length: int = described(512, "Tokens a completion, EOS included.")
    temperature: float = described(1.0, "Sampling temperature; log-probs are taken at the same one.")
    top_p: float = described(1.0, "Nucleus sampling; not corrected for in the loss, best left at 1.")
    top_k: int = described(0, "Top-k sampling; not corrected for in the loss, best left at 0.")
    min_p: float | None = described(None, "Drop tokens below this share of the most probable one.")
    repetition_penalty: float = described(1.0, "Penalty on repeated tokens; not corrected for in the loss.")
    stop_strings: list[str] | None = described(None, "A completion ends with the token that completes one of these.")
    generation_kwargs: dict[str, Any] | None = described(None, "Sampling options that win over the fields here.")
    chat_template_kwargs: dict[str, Any] | None = described(None, "Arguments of the chat template.")
    cache_implementation: str | None = described(None, "No effect: the built-in generator has its own cache.")
    pad_to_multiple_of: int | str | None = described("auto", "No effect: packed rows have no padding.")
    eval_temperature: float | None = described(
        None, "Temperature in evaluation; None: greedy for one completion a prompt, else the training temperature."
    )
    # Rewards.
    reward_weights: list[float] | None = described(
        None, "Weight of each reward function; None: 1 each; 0: logged, not trained on."
    )
    reward_timeout: float | None = described(None, "Seconds that one call of a reward function may take.")
    on_reward_error: Literal["raise", "skip"] = described(
        "skip", '"skip": the completion abstains, counted and told once, up to max_reward_failures; "raise": stop.'
    )
    max_reward_failures: float = described(
        0.25,
        "Share of a rollout's completions on which a reward function may fail (exception, time limit, value out of "
        "range, dead worker) before the run stops. A single lost call never stops it, unless this is 0.",
    )
    max_unscored_rollouts: int | None = described(
        3, "Rollouts in a row in which nothing was scored after which the run stops; None: never."
    )
    isolate_rewards: bool = described(
        False, "Run reward functions in a worker process of their own, which a deadline can kill."
    )
    reward_concurrency: int = described(
        1,
        "Prompts for which one reward function may be called at once, in threads (with isolate_rewards: processes). "
        "Above 1 it must bear that; for functions that wait, e.g. for a server or a test run.",
    )
    mask_truncated_completions: bool = described(False, "Leave cut completions out of loss and denominators.")
    soft_overlong_cache: int | None = described(
        None, "DAPO's soft penalty: over the last so many tokens before the limit the reward falls by up to 1."
    )
    dynamic_sampling: bool = described(False, "Replace groups without signal by fresh prompts (DAPO).")
    dynamic_sampling_rounds: int = described(3, "Rounds of replacement at most.")
    # KL to the reference.
    beta: float = described(0.04, "Weight of the KL to the reference; 0: no reference at all.")
    kl_target: float | None = described(None, "Nats a sequence that an adaptive beta steers to (Ziegler et al. 2019).")
    kl_horizon: float = described(10000.0, "Episodes over which a full error moves an adaptive beta by a fifth.")
    sync_ref_model: bool = described(False, "Move the reference towards the policy every ref_model_sync_steps.")
    ref_model_mixup_alpha: float = described(0.6, "Share of the policy in the moved reference.")
    ref_model_sync_steps: int = described(512, "Optimizer steps between two moves of the reference.")
    # Completions.
    log_completions: bool = described(False, "A table of completions at every log, not only at evaluation.")
    num_completions_to_print: int | None = described(None, "Rows of the printed table; None: 6.")
    log_unique_prompts: bool = described(False, "One row a prompt in the table.")
    log_completions_hub_repo: str | None = described(None, "Not carried: push the parquet files yourself.")
    # vLLM, through TRL's client.
    use_vllm: bool = described(False, "Sample with vLLM.")
    vllm_mode: str = described("colocate", '"colocate" or "server".')
    vllm_model_impl: str = described("vllm", "vLLM's model implementation.")
    vllm_enable_sleep_mode: bool = described(False, "Let vLLM free its memory during updates.")
    vllm_structured_outputs_regex: str | None = described(None, "Regular expression that completions must match.")
    vllm_server_base_url: str | None = described(None, "Server address as one URL.")
    vllm_server_host: str = described("0.0.0.0", "Server host.")
    vllm_server_port: int = described(8000, "Server port.")
    vllm_server_timeout: float = described(240.0, "Seconds to wait for the server.")
    vllm_group_port: int = described(51216, "Port for weight updates.")
    vllm_gpu_memory_utilization: float = described(0.3, "Share of GPU memory for a colocated engine.")
    vllm_max_model_length: int | None = described(None, "Context length of the engine.")
    vllm_tensor_parallel_size: int = described(1, "GPUs a model copy.")
    vllm_importance_sampling_correction: bool = described(True, "Weight tokens by trainer / sampler probability.")
    vllm_importance_sampling_mode: ImportanceMode = described(
        "token_truncate", '"token_truncate", "token_mask", "sequence_truncate" or "sequence_mask".'
    )
    vllm_importance_sampling_clip_max: float | None = described(2.0, "Largest importance weight.")
    vllm_importance_sampling_clip_min: float | None = described(None, "Smallest importance weight.")

    def __post_init__(self) -> None:
        super().__post_init__()
        choose_reward_as_metric(self)
        if self.num_generations < self.smallest_group:
            raise ValueError("num_generations must be at least 2: a group of one has no baseline to compare with")
        if self.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size cannot keep groups whole; lower per_device_train_batch_size yourself"
            )
        accumulation = self.gradient_accumulation_steps
        per_step = self.per_device_train_batch_size * self.world_size
        if self.generation_batch_size is not None:
            if self.steps_per_generation not in (None, self.generation_batch_size / per_step):
                raise ValueError("give generation_batch_size or steps_per_generation, not both")
            if self.generation_batch_size % per_step:
                raise ValueError(
                    f"generation_batch_size ({self.generation_batch_size}) must be a multiple of "
                    f"per_device_train_batch_size x processes ({per_step})"
                )
            self.steps_per_generation = self.generation_batch_size // per_step
        steps = self.steps_per_generation or accumulation
        if steps % accumulation and accumulation % steps:
            raise ValueError(
                f"steps_per_generation ({steps}) must be a multiple of gradient_accumulation_steps ({accumulation}) "
                "or the other way round"
            )
        # Rollouts within one optimizer step use the same weights, so they are drawn together.
        self.steps_per_generation = max(steps, accumulation)
        self.generation_batch_size = per_step * self.steps_per_generation
        local = self.per_device_train_batch_size * self.steps_per_generation
        if local % self.num_generations:
            raise ValueError(
                f"each process samples per_device_train_batch_size x steps_per_generation = {local} completions: it "
                f"must be a multiple of num_generations ({self.num_generations}); groups stay whole on one process"
            )
        for name, spec in type(self).__dataclass_fields__.items():
            if spec.metadata.get("help", "").startswith("No effect") and getattr(self, name) != spec.default:
                logger.warning("%s=%r: %s", name, getattr(self, name), spec.metadata["help"])
        if self.on_reward_error not in ("raise", "skip"):
            raise ValueError(f'on_reward_error must be "raise" or "skip", got {self.on_reward_error!r}')
        if not 0 <= self.max_reward_failures <= 1:
            raise ValueError(f"max_reward_failures is a share between 0 and 1, got {self.max_reward_failures}")
        if self.max_unscored_rollouts is not None and self.max_unscored_rollouts < 1:
            raise ValueError(f"max_unscored_rollouts must be at least 1 or None, got {self.max_unscored_rollouts}")
        if self.kl_target is not None and self.beta == 0:
            raise ValueError("kl_target needs a starting beta above 0")
        if self.log_completions_hub_repo is not None:
            raise ValueError("log_completions_hub_repo is not carried; push the folder `completions/` yourself")
        if self.sync_ref_model and self.beta == 0:
            raise ValueError("sync_ref_model moves the reference, but beta=0 has none; set beta above 0")
        self._check_choices()
        params = self.sampling_params()  # refuses bad values now rather than at the first rollout
        if params.temperature == 0:
            raise ValueError("training needs a temperature above 0: greedy completions of one prompt are all the same")
        if params.filters and self.beta > 0:
            logger.warning(
                "top_k, top_p, min_p or repetition_penalty is on: tokens are drawn from another distribution than the "
                "one whose log-probs the loss and the KL use, so the measured KL may be negative"
            )
        # Where generation_kwargs win, log-probs and length limits follow what the sampler does.
        self.temperature, self.max_completion_length = params.temperature, params.max_completion_length

    def _check_choices(self) -> None:
        modes = get_args(ImportanceMode)
        fine = {
            'vllm_mode must be "colocate" or "server"': self.vllm_mode in ("colocate", "server"),
            f"vllm_importance_sampling_mode must be one of {modes}": self.vllm_importance_sampling_mode in modes,
        }
        for message, holds in fine.items():
            if not holds:
                raise ValueError(f"{message}, got {getattr(self, message.split()[0])!r}")
        cache, limit = self.soft_overlong_cache, self.sampling_params().max_completion_length
        if cache is not None and not 0 <= cache <= limit:
            raise ValueError(f"soft_overlong_cache ({cache}) must lie between 0 and max_completion_length ({limit})")

    @property
    def prompts_per_window(self) -> int:
        """P, prompts that one process samples for in one rollout."""
        return self.per_device_train_batch_size * int(self.steps_per_generation or 1) // self.num_generations

    @property
    def optimizer_steps_per_window(self) -> int:
        """Optimizer steps in one pass over a rollout."""
        return math.ceil(int(self.steps_per_generation or 1) / self.gradient_accumulation_steps)

    def sampling_params(self, seed: int = 0, **changes: Any) -> SamplingParams:
        """The sampling settings; `generation_kwargs` win over fields, `changes` over both."""
        return sampling_params_of(self, seed, others=self.use_vllm, **changes)

    def vllm_options(self) -> dict[str, Any]:
        """Keyword arguments of TRL's vLLM client."""
        return {
            "mode": self.vllm_mode,
            "model_impl": self.vllm_model_impl,
            "enable_sleep_mode": self.vllm_enable_sleep_mode,
            "structured_outputs_regex": self.vllm_structured_outputs_regex,
            "server_base_url": self.vllm_server_base_url,
            "server_host": self.vllm_server_host,
            "server_port": self.vllm_server_port,
            "server_timeout": self.vllm_server_timeout,
            "group_port": self.vllm_group_port,
            "gpu_memory_utilization": self.vllm_gpu_memory_utilization,
            "max_model_length": self.vllm_max_model_length,
            "tensor_parallel_size": self.vllm_tensor_parallel_size,
            "max_num_seqs": self.per_device_train_batch_size * int(self.steps_per_generation or 1),
            "trust_remote_code": self.trust_remote_code,
        }


def choose_reward_as_metric(config: Any) -> None:
    """Evaluation of a trainer that samples has no loss: where the best checkpoint or the scheduler needs a metric, it
    is the reward.

    Args:
        config: changed in place, before `TrainingArguments` looks at it.
    """
    scheduled = config.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
    needed = config.load_best_model_at_end or config.save_strategy == "best" or scheduled
    if needed and config.metric_for_best_model in (None, "loss", "eval_loss"):
        config.metric_for_best_model, config.greater_is_better = "eval_reward", True
    if scheduled:  # the schedulers themselves wait for a minimum
        options: Any = config.lr_scheduler_kwargs or {}
        config.lr_scheduler_kwargs = {"mode": "max" if config.greater_is_better else "min", **options}


def sampling_params_of(config: Any, seed: int = 0, others: bool = False, **changes: Any) -> SamplingParams:
    """The sampling fields of a configuration; `generation_kwargs` win over fields, `changes` over both.

    Args:
        config: with the fields on sampling of `OnlineConfig`. seed: of the draws.
        others: leave out of `generation_kwargs` what only another engine has.

    Raises:
        ValueError: a value out of range, or an option that the built-in generator does not have.
    """
    kwargs: dict[str, Any] = {
        "max_completion_length": config.max_completion_length,
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
        "min_p": config.min_p,
        "repetition_penalty": config.repetition_penalty,
        "stop_strings": tuple(config.stop_strings or ()),
    }
    kwargs |= from_generation_kwargs(config.generation_kwargs, others=others)
    return SamplingParams(seed=seed, **(kwargs | changes))
