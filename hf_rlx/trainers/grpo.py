"""GRPO and its relatives (Shao et al. 2024, 2402.03300; DAPO 2503.14476; Dr. GRPO 2503.20783; GSPO 2507.18071; RLOO).

How this departs from the paper and from TRL 1.16 (reasons in `hf_rlx.trainers.differences`):
- groups whose rewards are all equal, and completions without a reward, leave the loss *and* its denominators;
- denominators are counted over the whole optimizer step and all processes, so no split changes the gradient;
- log-ratios are clamped to +-20 before the exponential; dropout is off, unless `disable_dropout=False` keeps it on in
  the update;
- old log-probs are the trainer's own, under the weights that sampled.

The variants are three switches, not classes: advantage (`scale_rewards`), ratio (`importance_sampling_level`) and
averaging (`loss_type`); `GRPOConfig.preset(name)` sets a published recipe in one word.

| metric | unit | what it is |
|---|---|---|
| loss, policy_loss, kl_loss | - | the objective and its parts, kl_loss with beta in it |
| reward, reward_std | reward | mean of the total; standard deviation within a group |
| rewards/<f>/mean, /std, /abstained, /errors | reward, count | each function by itself |
| frac_reward_zero_std | share | groups without a signal |
| groups/kept_fraction, advantages/abs_mean | share, - | what is left to learn from |
| kl, kl/k1_token, kl/k1_sequence, kl/k3_sequence | nats | to the reference: k3 and k1, a token and a sequence |
| kl/max_log_ratio | nats | largest log-ratio to the reference |
| beta, entropy | -, nats | weight of the KL; mean entropy of the sampling distribution |
| clip_ratio/low_mean, high_mean, low_min, high_max, region_mean | share | tokens whose gradient the clip cut |
| prompts/special_tokens_neutralised | count | special tokens inside messages that became plain text |
| completions/mean_length, ..., clipped_ratio | tokens, share | lengths; completions that the limit cut |
| sampling/sampling_logp_difference/mean, /max | nats | sampler against trainer at the same weights |
| rollout/tokens_per_second, update/tokens_per_second | 1/s | throughput |
| time/<stage> | share | where the time went |
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_rlx.functional import (
    Aggregation,
    GroupStd,
    RatioLevel,
    aggregate,
    grpo_advantages,
    grpo_loss,
    kl_estimators,
    normalizer_count,
    rloo_advantages,
)
from hf_rlx.models.roles import POLICY, REFERENCE
from hf_rlx.trainers.checks import check_arguments
from hf_rlx.trainers.config import described, strict
from hf_rlx.trainers.dynamic_sampling import flatten_noise
from hf_rlx.trainers.observe import record_clips, record_update
from hf_rlx.trainers.online import OnlineTrainer
from hf_rlx.trainers.online_config import OnlineConfig
from hf_rlx.trainers.presets import PRESETS
from hf_rlx.trainers.steps import StepReward, step_scorer_of, token_advantages
from hf_rlx.trainers.windows import MiniBatch
from hf_rlx.types import Rollout

logger = logging.getLogger(__name__)

LossType = Literal["grpo", "dapo", "bnpo", "dr_grpo"]
AGGREGATION: dict[LossType, Aggregation] = {
    "grpo": "completion_mean",
    "dapo": "token_mean",
    "bnpo": "token_mean",
    "dr_grpo": "constant",
}
_ELSEWHERE = "use trl.GRPOTrainer for it; hf_rlx verifiers work there as reward_funcs"


@strict
@dataclass
class GRPOConfig(OnlineConfig):
    """Configuration of `GRPOTrainer`, under TRL 1.16's names. The defaults are the paper's recipe."""

    loss_type: LossType = described(
        "grpo", 'Averaging: "grpo" per completion, "dapo"/"bnpo" per token, "dr_grpo" constant.'
    )
    scale_rewards: Literal["group", "batch", "none", "leave_one_out"] = described(
        "group", 'Advantage: "group", "batch" (group mean, batch std), "none" (no std), "leave_one_out" (RLOO).'
    )
    scale_ddof: int = described(0, "0: population standard deviation (the paper's), 1: sample (TRL's).")
    advantage_eps: float = described(1e-6, "Added to the standard deviation.")
    keep_zero_variance: bool = described(False, "Keep groups without signal in the denominators and under the KL.")
    importance_sampling_level: RatioLevel = described(
        "token", 'Ratio: "token", "sequence" (GSPO) or "sequence_sum" (RLOO).'
    )
    epsilon: float = described(0.2, "Lower clip; the upper one too unless epsilon_high is set.")
    epsilon_high: float | None = described(None, "Upper clip (DAPO's clip-higher: 0.28).")
    delta: float | None = described(None, "Upper bound of the unclipped ratio (two-sided clipping).")
    kl_estimator: Literal["k2", "k3"] = described("k3", 'KL in the loss: "k2" or "k3".')
    use_bias_correction_kl: bool = described(False, "Multiply k3 by the ratio: its gradient is then the reverse KL's.")
    kl_in_reward: bool = described(False, "Subtract beta x summed k1 from the reward instead of adding a loss term.")
    entropy_coef: float = described(0.0, "Bonus on the mean entropy of the kept tokens.")
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = described(
        "sum_then_normalize",
        'Or "normalize_then_sum" (GDPO): each function normalised within its group, their sum over the batch.',
    )
    # Fields of TRL that are not carried: any other value than the default is refused.
    router_aux_loss_coef: float | None = described(None, "Not carried.")
    cast_lm_head_to_fp32: bool = described(False, "Not carried: log-sum-exp is float32 anyway.")
    ds3_gather_for_generation: bool = described(True, "Not carried: DeepSpeed ZeRO-3.")
    sapo_temperature_neg: float = described(1.05, "Not carried.")
    sapo_temperature_pos: float = described(1.0, "Not carried.")
    vespo_k_pos: float = described(2.0, "Not carried.")
    vespo_lambda_pos: float = described(3.0, "Not carried.")
    vespo_k_neg: float = described(3.0, "Not carried.")
    vespo_lambda_neg: float = described(2.0, "Not carried.")
    top_entropy_quantile: float = described(1.0, "Not carried.")
    use_adaptive_entropy: bool = described(False, "Not carried.")
    entropy_coef_min: float = described(0.0, "Not carried.")
    entropy_coef_max: float = described(1.0, "Not carried.")
    entropy_coef_delta: float = described(0.005, "Not carried.")
    entropy_target: float = described(0.2, "Not carried.")
    max_tool_calling_iterations: int | None = described(None, "Not carried.")
    off_policy_mask_threshold: float | None = described(None, "Not carried.")
    log_multimodal: bool = described(True, "Not carried.")
    use_transformers_continuous_batching: bool = described(False, "Not carried.")
    transformers_continuous_batching_config: dict[str, Any] | None = described(None, "Not carried.")
    use_transformers_paged: bool = described(False, "Not carried.")
    vllm_importance_sampling_cap: float | None = described(None, "Not carried: vllm_importance_sampling_clip_max.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, spec in type(self).__dataclass_fields__.items():
            if spec.metadata.get("help", "").startswith("Not carried") and getattr(self, name) != spec.default:
                raise ValueError(f"{name}={getattr(self, name)!r} is not carried by hf_rlx; {_ELSEWHERE}")
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        allowed = {
            "loss_type": tuple(AGGREGATION),
            "scale_rewards": ("group", "batch", "none", "leave_one_out"),
            "scale_ddof": (0, 1),
            "importance_sampling_level": ("token", "sequence", "sequence_sum"),
            "kl_estimator": ("k2", "k3"),
            "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"{name} must be one of {values}, got {getattr(self, name)!r}; for others {_ELSEWHERE}"
                )
        if self.use_bias_correction_kl and self.kl_estimator != "k3":
            raise ValueError("use_bias_correction_kl multiplies k3 by the ratio; use kl_estimator='k3' with it")
        if self.importance_sampling_level != "token" and self.loss_type != "grpo":
            raise ValueError(
                f"importance_sampling_level={self.importance_sampling_level!r} has one ratio a completion: "
                f"loss_type={self.loss_type!r} would weigh completions by their length; use loss_type='grpo'"
            )

        shaped = self.kl_in_reward or self.soft_overlong_cache is not None
        if self.multi_objective_aggregation == "normalize_then_sum" and shaped:
            raise ValueError(
                "normalize_then_sum reads the reward functions one by one, soft_overlong_cache and kl_in_reward have "
                "no place in it: write the penalty as a reward function, and leave the KL in the loss"
            )

    @classmethod
    def preset(cls, name: str, output_dir: str | None = None, **fields: Any) -> GRPOConfig:
        """A published recipe, with `fields` on top: "grpo", "dapo", "dr_grpo", "gspo", "rloo", or "trl" (1.16's
        defaults). GSPO's paper makes four optimizer steps a rollout: set `steps_per_generation` to four times
        `gradient_accumulation_steps` for that.

        Raises:
            ValueError: no such recipe.
        """
        if name not in PRESETS:
            raise ValueError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
        recipe = dict(PRESETS[name])
        if name == "dapo":  # DAPO: the last fifth of the allowed length
            recipe["soft_overlong_cache"] = int(fields.get("max_completion_length", 512)) // 5
        return cls(output_dir=output_dir, **{**recipe, **fields})

    @property
    def recipe(self) -> str:
        """One line that says which variant is on."""
        std = {"group": "group", "batch": "batch", "none": "no", "leave_one_out": "no"}[self.scale_rewards]
        kind = "population" if self.scale_ddof == 0 else "sample"
        baseline = "leave-one-out" if self.scale_rewards == "leave_one_out" else "group mean"
        once = self.optimizer_steps_per_window * self.num_iterations == 1
        on_policy = "; on-policy: one update a rollout, so the ratio is 1 and the clip inert" if once else ""
        kl = "none"
        if self.beta > 0:
            ratio = "ratio * " if self.use_bias_correction_kl else ""
            kl = f"beta {self.beta} " + (
                "k1 in the reward" if self.kl_in_reward else f"{ratio}{self.kl_estimator} in the loss"
            )
        return (
            f"GRPO: advantage {baseline}, {std} std"
            + (f" ({kind})" if std != "no" else "")
            + f"; ratio per {self.importance_sampling_level}, clip {self.epsilon}/{self.clip_high}"
            + f"; averaging {AGGREGATION[self.loss_type]}; KL {kl}{on_policy}"
        )

    @property
    def clip_high(self) -> float:
        """The upper clip."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class GRPOTrainer(OnlineTrainer):
    """Group relative policy optimization with any Python reward, LoRA or full weights, on one device or several.

    Args:
        model, reward_funcs, args, train_dataset, eval_dataset, processing_class, reward_processing_classes,
            callbacks, optimizers, quantization_config, peft_config: TRL's, see `OnlineTrainer`.
        tools, rollout_func, environment_factory: not carried; refused.
        step_reward_funcs: functions like `reward_funcs` that return, per completion, a list of
            (end of the step in characters, reward); their advantages reach the tokens up to each step's end
            (process supervision, DeepSeekMath section 4.1.3).

    A subclass may replace a part: `sample`, `compute_rewards` (by default `shape_rewards`), `compute_advantages`,
    `minibatch_loss`.

    Example:
        >>> trainer = GRPOTrainer("tiny", NumberVerifier("whole"), GRPOConfig("runs/x"), train_dataset=task.train)
        >>> trainer.train()
    """

    args: GRPOConfig
    method = "grpo"

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
        step_reward_funcs: list[StepReward] | None = None,
    ) -> None:
        for name, value in (
            ("tools", tools),
            ("rollout_func", rollout_func),
            ("environment_factory", environment_factory),
        ):
            if value:
                raise ValueError(f"{name} is not carried by hf_rlx; {_ELSEWHERE}")
        if reward_funcs is None:
            raise ValueError("reward_funcs is missing: a function (prompts, completions, **columns) -> list of floats")
        args = GRPOConfig("grpo_output") if args is None else args
        check_arguments(model, args, GRPOConfig, processing_class, peft_config)
        logger.info(args.recipe)
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        self.step_scorer = step_scorer_of(self, step_reward_funcs)

    def compute_advantages(self, rollouts: list[Rollout]) -> None:
        """Compare each completion with its group; set `advantages` and `keep`."""
        args = self.args
        total, scale = torch.stack([r.total for r in rollouts]).double(), args.scale_rewards
        if args.multi_objective_aggregation == "normalize_then_sum":
            total, scale = self._normalised_sum(rollouts), "batch"  # GDPO: the sum is scaled over the batch
        total = flatten_noise(total)
        if scale == "leave_one_out":
            result = rloo_advantages(total, keep_zero_variance=args.keep_zero_variance)
        else:
            kinds: dict[tuple[str, int], GroupStd] = {
                ("group", 0): "population",
                ("group", 1): "sample",
                ("batch", 0): "batch",
                ("batch", 1): "batch_sample",
            }
            kind = kinds.get((scale, args.scale_ddof), "none")
            everyone = self._on_all_processes(total) if scale == "batch" else total
            result = grpo_advantages(everyone, kind, args.advantage_eps, args.keep_zero_variance)
        first = self.accelerator.process_index * len(rollouts) if len(result.keep) > len(rollouts) else 0
        scored = self.step_scorer.score(rollouts, self.metrics["train"], self.state)
        if scored.found:
            self.scorer.unscored = 0  # steps are a signal too
        if scored.extra:
            scored.add_columns(self._scores.extra)
        for index, rollout in enumerate(rollouts):
            rollout.advantages = result.advantages[first + index].float()
            rollout.keep = result.keep[first + index].clone()
            if scored.steps:
                extra = token_advantages([s[index] for s in scored.steps], rollout, self.tokenizer, args.advantage_eps)
                rollout.advantages = rollout.advantages[:, None] + extra
                rollout.keep |= (extra != 0).any(dim=1)
            if args.mask_truncated_completions:
                rollout.keep &= torch.tensor([c.finished for c in rollout.completions])
        store = self.metrics["train"]
        store.add("groups/kept_fraction", sum(float(bool(r.keep.any())) for r in rollouts) / len(rollouts))
        store.add("advantages/abs_mean", torch.cat([r.advantages.abs().flatten() for r in rollouts]).mean())

    def _on_all_processes(self, total: Tensor) -> Tensor:
        """(processes x P, K) of (P, K), in float32 as some devices have nothing wider."""
        return self.accelerator.gather(total.float().to(self.args.device)).double().cpu()

    def _normalised_sum(self, rollouts: list[Rollout]) -> Tensor:
        """(P, K) weighted sum of rewards that were each normalised within their group (GDPO, 2601.05242)."""
        rewards = torch.stack([r.rewards for r in rollouts]).double()
        std: GroupStd = "population" if self.args.scale_ddof == 0 else "sample"
        parts = [
            grpo_advantages(rewards[:, :, f], std, self.args.advantage_eps).advantages for f in range(rewards.shape[2])
        ]
        scored = ~torch.isnan(rewards).all(dim=2)
        total = (torch.stack(parts, dim=2) * self.scorer.weights).sum(dim=2)
        return torch.where(scored, total, torch.nan)

    def shape_rewards(self, rollouts: list[Rollout]) -> None:
        """Overlong penalty, and the KL where it belongs to the reward (InstructGPT, 2203.02155 eq. 2)."""
        super().shape_rewards(rollouts)
        if not (self.args.kl_in_reward and self.args.beta > 0):
            return
        groups = [r.group() for r in rollouts]
        with self.metrics["train"].stage("reference"):
            policy = self.reference_logps(groups, POLICY, self.args.temperature)
            reference = self.reference_logps(groups, REFERENCE, self.args.temperature)
        lengths = torch.tensor([len(c.token_ids) for r in rollouts for c in r.completions], device=policy.device)
        mask = torch.arange(policy.shape[1], device=policy.device)[None] < lengths[:, None]
        kl = kl_estimators(policy, reference, mask)
        store = self.metrics["train"]
        store.add("kl", kl.k3_mean, int(mask.sum()))
        store.add("kl/k1_sequence", kl.k1_sequence.mean(), len(mask))
        self.note_kl(kl.k1_sequence)
        for rollout, spent in zip(
            rollouts, kl.k1_sequence.cpu().split([len(r.completions) for r in rollouts]), strict=True
        ):
            rollout.total = rollout.total - self.kl_controller.coef * spent

    def needs_reference_in_loss(self) -> bool:
        """The KL is in the loss unless it is in the reward."""
        return self.args.beta > 0 and not self.args.kl_in_reward

    def loss_count(self, mask: Tensor, rows: int) -> Tensor:
        """Completions, tokens, or (constant averaging) all rows, dropped ones included."""
        aggregation = AGGREGATION[self.args.loss_type]
        return torch.tensor(rows) if aggregation == "constant" else normalizer_count(mask, aggregation).cpu()

    def minibatch_loss(self, model: nn.Module, batch: MiniBatch) -> Tensor:
        """DeepSeekMath eq. 3 with the configured switches, as a share of the optimizer step's loss."""
        args = self.args
        want_entropy = {"want_entropy": True, "entropy_grad": args.entropy_coef != 0}
        if not batch.groups:
            return model(self.dummy_groups(), temperature=args.temperature, **want_entropy).per_token_logps.sum() * 0
        scores = model(batch.groups, temperature=args.temperature, **want_entropy)
        out = grpo_loss(
            scores.per_token_logps,
            batch.old_logps,
            batch.advantages,
            batch.mask,
            ref_logps=batch.ref_logps,
            is_weights=batch.is_weights,
            beta=self.kl_controller.coef if batch.ref_logps is not None else 0.0,
            kl="k3_ratio" if args.use_bias_correction_kl else args.kl_estimator,
            aggregation=AGGREGATION[args.loss_type],
            normalizer=batch.normalizer,
            max_length=args.max_completion_length,
            ratio_level=args.importance_sampling_level,
            clip_low=args.epsilon,
            clip_high=args.clip_high,
            delta=args.delta,
        )
        loss = out.loss
        if args.entropy_coef:
            bonus = aggregate(
                scores.entropies, batch.mask, AGGREGATION[args.loss_type], batch.normalizer, args.max_completion_length
            )
            loss = loss - args.entropy_coef * bonus
        self._record(out, batch, scores)
        return loss

    def update(self, model: nn.Module, batch: MiniBatch) -> Tensor:
        """See `OnlineTrainer`; a micro-batch with nothing to learn from is a 0 in the logged parts of the loss."""
        if not batch.groups:
            self._record_parts(batch, 0.0, 0.0)
        return super().update(model, batch)

    def _record_parts(self, batch: MiniBatch, policy: float | Tensor, kl: float | Tensor) -> None:
        """Shares of one optimizer step's loss; their mean over micro-steps and processes, scaled back to a step."""
        shares = self.args.gradient_accumulation_steps * self.accelerator.num_processes * batch.parts
        self.metrics["train"].add("policy_loss", policy * shares, 1 / batch.parts)
        self.metrics["train"].add("kl_loss", kl * shares, 1 / batch.parts)

    def _record(self, out: Any, batch: MiniBatch, scores: Any) -> None:
        store = self.metrics["train"]
        sequence_kl = record_update(store, batch, scores)
        if sequence_kl is not None:
            self.note_kl(sequence_kl)
        self._record_parts(batch, out.policy_loss, out.kl_loss)
        record_clips(store, batch, out, 1 - self.args.epsilon, 1 + self.args.clip_high)
