"""PPO for language models (Schulman et al. 2017, 1707.06347; Ziegler et al. 2019, 1909.08593; InstructGPT).

How this departs from the papers and from TRL 1.9's PPOTrainer (reasons in `hf_rlx.trainers.differences`):
- one base plays policy, reference and critic: the critic is a head on the policy's own forward, or an adapter of its
  own with a forward and backward of its own, which is exactly PPO with separate models;
- any Python reward, or several; a completion without a reward leaves the loss and its denominators;
- the score stands on the last real token, the values of padding are nowhere read;
- advantages are whitened over the whole rollout of all processes, once, with the population's variance;
- denominators are counted over the whole optimizer step and all processes, so no split changes the gradient;
- old log-probs and values are the trainer's own, under the weights that sampled, with dropout off.

| metric | unit | what it is |
|---|---|---|
| loss, policy_loss, value_loss, kl_loss | - | the objective and its parts: value_loss without vf_coef |
| value/explained_variance | share | 1 - Var(return - value) / Var(return), before the update |
| value/mean, returns/mean, /std, advantages/mean, /std | reward | over tokens, before whitening |
| value/clip_fraction, value/grad_norm | share, - | tokens whose value the clip held back; before its clip |
| policy/approx_kl, policy/ratio_mean, /ratio_max | nats, - | policy against the one that sampled: k3 of KL(old, new) |
| clip_ratio/low_mean, high_mean, region_mean | share | tokens whose gradient the clip cut |
| early_stop | share | optimizer steps that were left out because approx_kl was above 1.5 target_kl |
| reward, reward/shaped | reward | the score; score, penalties, steps and KL together |
| rewards/<f>/mean, /std, /abstained, /errors | reward, count | each function by itself |
| kl, kl/k1_token, kl/k1_sequence, kl/k3_sequence | nats | to the reference: k3 and k1 (which may be negative) |
| kl/max_log_ratio, beta | nats, - | largest log-ratio to the reference; weight of the KL |
| entropy | nats | mean entropy of the sampling distribution |
| completions/mean_length, ..., clipped_ratio | tokens, share | lengths; completions that the limit cut |
| completions/kept_fraction | share | completions that something is learned from |
| sampling/..., rollout/..., update/..., time/<stage> | | as in `hf_rlx.trainers.grpo` |
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from hf_rlx.functional import PpoPolicyLossOutput, aggregate, kl_penalty, normalizer_count, ppo_policy_loss, value_loss
from hf_rlx.models import critic
from hf_rlx.models.dropout import disable_dropout
from hf_rlx.models.packing import split_by_tokens
from hf_rlx.models.roles import POLICY
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers import critic_step
from hf_rlx.trainers.base import pad_columns
from hf_rlx.trainers.checks import check_arguments, unknown_argument
from hf_rlx.trainers.config import BaseConfig
from hf_rlx.trainers.experience import fill_in
from hf_rlx.trainers.observe import record_update
from hf_rlx.trainers.online import OnlineTrainer
from hf_rlx.trainers.overrides import Gone
from hf_rlx.trainers.ppo_config import PPOConfig
from hf_rlx.trainers.steps import StepReward, step_scorer_of, token_rewards
from hf_rlx.trainers.windows import MiniBatch
from hf_rlx.types import Rollout, TokenScores

logger = logging.getLogger(__name__)

# Arguments of TRL's PPOTrainer -> what to do here.
_INSTEAD = {
    "reward_model": "pass it as reward_funcs=: a sequence classifier, its name, any function, or a list of them",
    "value_model": "the critic is a head on the policy (the default), PPOConfig(critic_adapter=True), or "
    "PPOConfig(critic_init_from_reward=True); drop value_model",
    "ref_model": "the reference is made from the policy as it starts: adapters off, or a frozen copy; drop ref_model",
    "data_collator": "prompts are rows of the dataset, text or messages, never token ids; drop data_collator",
}


class PPOTrainer(OnlineTrainer):
    """Proximal policy optimization with any Python reward, LoRA or full weights, on one device or several.

    Args:
        model, reward_funcs, args, train_dataset, eval_dataset, processing_class, reward_processing_classes,
            callbacks, optimizers, quantization_config, peft_config: as in `GRPOTrainer`, see `OnlineTrainer`.
        step_reward_funcs: functions like `reward_funcs` that return, per completion, a list of (end of the step in
            characters, reward): each reward stands on the token that ends its step.
        reward_model, value_model, ref_model, data_collator: of TRL's PPOTrainer; refused with what to pass instead.

    Raises:
        ValueError: see `OnlineTrainer` and `hf_rlx.models.critic.prepare`. TypeError: an argument of TRL's.

    A subclass may replace a part: `sample`, `compute_rewards` (by default `shape_rewards`), `compute_advantages`,
    `minibatch_loss`.

    Example:
        >>> trainer = PPOTrainer("tiny", NumberVerifier("whole"), PPOConfig("runs/x"), train_dataset=task.train)
        >>> trainer.train()
    """

    args: PPOConfig
    method = "ppo"
    recalls = True
    # Of the loop that was written by hand for TRL before 0.12.
    step = Gone("train() samples, scores and updates; see examples/guide/migrate_from_trl.md")
    generate = Gone("train() samples by itself; trainer.shared.generate(...) completes prompts")
    log_stats = Gone("train() logs to report_to; a TrainerCallback with on_log sees every metric")

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: PPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        step_reward_funcs: list[StepReward] | None = None,
        **of_trl: Any,
    ) -> None:
        for name, value in of_trl.items():
            if name not in _INSTEAD:
                raise unknown_argument(PPOTrainer, name)
            if value is not None:
                raise TypeError(f"{name} is not an argument here: {_INSTEAD[name]}")
        if reward_funcs is None:
            raise ValueError("reward_funcs is missing: a function (prompts, completions, **columns) -> list of floats")
        args = PPOConfig("ppo_output") if args is None else args
        check_arguments(model, args, PPOConfig, processing_class, peft_config)
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
        self.own_critic = critic.has_own_adapter(self.shared)
        if self.own_critic and (self.is_fsdp_enabled or self.zero):
            where = "FSDP" if self.is_fsdp_enabled else "DeepSpeed"
            raise ValueError(f"a critic with its own adapter under {where} is not carried; leave critic_adapter off")
        if self.zero and args.critic_warmup_steps:
            raise ValueError("critic_warmup_steps under DeepSpeed is not carried: it steps all weights; set it to 0")
        self.step_scorer = step_scorer_of(self, step_reward_funcs)
        self._step_rewards: list[Tensor] = []
        self._moved = [0.0, 0.0]  # summed approx_kl and tokens of the optimizer step that is being done

    # Roles and the optimizer.

    def prepare_roles(self, shared: SharedModel, args: BaseConfig) -> None:
        """Reference and critic."""
        super().prepare_roles(shared, args)
        assert isinstance(args, PPOConfig)
        made = critic.prepare(shared, args.critic_adapter, args.critic_init_from_reward, args.detach_critic)
        logger.info("critic: %s", made)
        if args.disable_dropout:
            disable_dropout(shared)  # its adapter is new
        # What runs outside of DDP's forward must not be counted by it; its gradients are added up in `gradient_ready`.
        own = [name for name, _ in critic.parameters(shared)] if made == "adapter" else []
        shared._ddp_params_and_buffers_to_ignore = own  # type: ignore[assignment]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's optimizer, with the critic in groups of its own."""
        given = self.optimizer is not None
        optimizer = super().create_optimizer(model)
        critic_step.add_groups(optimizer, self.shared, self.args, given)
        return optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Policy and critic each by itself, so that a large value loss does not shrink the policy's step; returns the
        policy's norm. FSDP and DeepSpeed clip both as one."""
        if self.is_fsdp_enabled or self.zero:
            return super()._clip_grad_norm(model)
        self.gradient_guard.check(self)
        ours = [p for _, p in critic.parameters(self.shared)]
        scaler = self.accelerator.scaler  # gradients are still multiplied by its scale
        scale = 1.0 if scaler is None else scaler.get_scale()
        norm = nn.utils.clip_grad_norm_(ours, self.args.max_grad_norm * scale)
        self.metrics["train"].add("value/grad_norm", norm / scale)
        held = {id(p) for p in ours}
        others = [p for p in model.parameters() if id(p) not in held]
        return self.accelerator.clip_grad_norm_(others, self.args.max_grad_norm)

    # The rollout.

    def shape_rewards(self, rollouts: list[Rollout]) -> None:
        """Clip the scores, then subtract penalties: overlong, and of completions that were cut."""
        args = self.args
        if args.reward_clip is not None:
            for rollout in rollouts:
                rollout.total = rollout.total.clamp(-args.reward_clip, args.reward_clip)
        super().shape_rewards(rollouts)
        if args.missing_eos_penalty:
            for rollout in rollouts:
                cut = torch.tensor([not c.finished for c in rollout.completions])
                rollout.total = rollout.total - args.missing_eos_penalty * cut.to(rollout.total.dtype)

    def compute_advantages(self, rollouts: list[Rollout]) -> None:
        """Say which completions are kept, and place step rewards on tokens. The advantages follow in `minibatches`,
        when the values are known."""
        scored = self.step_scorer.score(rollouts, self.metrics["train"], self.state)
        if scored.found:
            self.scorer.unscored = 0  # steps are a signal too
        if scored.extra:
            scored.add_columns(self._scores.extra)
        self._step_rewards = []
        for index, rollout in enumerate(rollouts):
            lengths = torch.tensor([len(c.token_ids) for c in rollout.completions])
            rollout.advantages = torch.zeros(len(lengths), max(int(lengths.max()), 1))
            rollout.keep = ~torch.isnan(rollout.total) & (lengths > 0)
            if scored.steps:
                steps = [function[index] for function in scored.steps]
                self._step_rewards.append(token_rewards(steps, rollout, self.tokenizer))
                rollout.keep |= torch.tensor([any(rows) for rows in zip(*steps, strict=True)])
            if self.args.mask_truncated_completions:
                rollout.keep &= torch.tensor([c.finished for c in rollout.completions])
            self.metrics["train"].add("completions/kept_fraction", rollout.keep.float().mean(), len(rollout.keep))

    def minibatches(self, rollouts: list[Rollout]) -> list[MiniBatch]:
        """See `OnlineTrainer`; with advantages and returns."""
        batches = super().minibatches(rollouts)
        fill_in(self, rollouts, self._step_rewards, batches)
        return batches

    def recall(self, batch: MiniBatch) -> None:
        """Old log-probs and values, from one forward where the critic is a head on the policy."""
        if self.own_critic:
            super().recall(batch)
            batch.old_values = critic_step.old_values(self, batch.groups)
            return

        def run(most: int | None) -> Tensor:
            logps, values = [], []
            with torch.no_grad(), self.shared.as_role(POLICY), self.shared.rollout_mode():
                for row in split_by_tokens(batch.groups, most):
                    scores = self.shared(row, temperature=self.args.temperature, want_values=True)
                    logps.append(scores.per_token_logps)
                    values.append(scores.values)
            return torch.stack([pad_columns(logps), pad_columns(values)])

        batch.old_logps, batch.old_values = self.forward_limit.run(run, batch.groups)

    def passes(self, batches: list[MiniBatch]) -> list[MiniBatch]:
        """Epochs over the window; all but the first in an order that follows from seed, step and epoch, the same on
        every process, minibatch by minibatch."""
        size = self.args.gradient_accumulation_steps
        steps = [batches[start : start + size] for start in range(0, len(batches), size)]
        result = list(batches)
        for epoch in range(1, self.args.num_iterations):
            order = list(range(len(steps)))
            if self.args.shuffle_minibatches:
                seed = (self.args.seed * 1009 + self.state.global_step) * 64 + epoch
                order = torch.randperm(len(steps), generator=torch.Generator().manual_seed(seed)).tolist()
            result += [batch for index in order for batch in steps[index]]
        return result

    # The update.

    @property
    def warming_up(self) -> bool:
        """Whether only the critic learns in the optimizer step that is being done."""
        return self.state.global_step < self.args.critic_warmup_steps

    def loss_count(self, mask: Tensor, rows: int) -> Tensor:
        """Tokens."""
        return normalizer_count(mask, "token_mean").cpu()

    def update(self, model: nn.Module, batch: MiniBatch) -> Tensor:
        """See `OnlineTrainer`; a micro-batch with nothing to learn from is a 0 in the logged parts of the loss."""
        if not batch.groups:
            self._record_parts(batch, value_loss=0.0)
            if not (self.own_critic and self.warming_up):
                self._record_parts(batch, policy_loss=0.0)
                if self.needs_reference_in_loss() and not self.args.kl_in_reward:
                    self._record_parts(batch, kl_loss=0.0)
        return super().update(model, batch)

    def forward_backward(self, model: nn.Module, batch: MiniBatch) -> Tensor:
        """See `OnlineTrainer`; then the critic's own forward and backward where it has an adapter."""
        if not self.own_critic:
            return super().forward_backward(model, batch)
        loss = torch.zeros((), device=self.args.device)
        if not self.warming_up:
            loss = super().forward_backward(model, batch)
        value = critic_step.forward_backward(self, batch)
        if batch.groups:
            self._record_parts(batch, value_loss=value)
        return loss + self.args.vf_coef * value * self.accelerator.num_processes

    def minibatch_loss(self, model: nn.Module, batch: MiniBatch) -> Tensor:
        """Clipped policy loss, entropy bonus, KL and, where the critic is a head on the policy, the value loss; as a
        share of the optimizer step's loss."""
        args = self.args
        wanted = {"want_entropy": True, "entropy_grad": args.entropy_coef != 0, "want_values": not self.own_critic}
        if not batch.groups:
            scores = model(self.dummy_groups(), temperature=args.temperature, **wanted)
            nothing = scores.per_token_logps.sum() * 0
            return nothing if scores.values is None else nothing + scores.values.sum() * 0
        scores = model(batch.groups, temperature=args.temperature, **wanted)
        out = ppo_policy_loss(
            scores.per_token_logps,
            batch.old_logps,
            batch.advantages,
            batch.mask,
            clip_low=args.cliprange,
            clip_high=args.clip_high,
            normalizer=batch.normalizer,
            dual_clip=args.dual_clip,
            is_weights=batch.is_weights,
        )
        self._record(out, batch, scores)
        loss = out.loss
        if args.entropy_coef:
            loss = loss - args.entropy_coef * aggregate(scores.entropies, batch.mask, "token_mean", batch.normalizer)
        if batch.ref_logps is not None:
            kl = kl_penalty(scores.per_token_logps, batch.ref_logps, batch.mask, args.kl_form, batch.old_logps)
            kl_loss = self.kl_controller.coef * aggregate(kl, batch.mask, "token_mean", batch.normalizer)
            self._record_parts(batch, kl_loss=kl_loss)
            loss = loss + kl_loss
        if scores.values is not None:
            value = self.value_loss(scores.values, batch)
            self._record_parts(batch, value_loss=value)
            # The head alone learns in the warm-up: `gradient_ready` drops the rest.
            loss = loss + args.vf_coef * value
        return loss

    def value_loss(self, values: Tensor, batch: MiniBatch) -> Tensor:
        """The critic's share of the optimizer step's loss, without vf_coef; (B, R) `values` carry gradient."""
        assert batch.returns is not None
        out = value_loss(
            values,
            batch.old_values,
            batch.returns,
            batch.mask,
            clip_range=self.args.cliprange_value,
            aggregation="token_mean",
            normalizer=batch.normalizer,
        )
        self.metrics["train"].add("value/clip_fraction", out.clip_fraction, int(batch.mask.sum()))
        return out.loss

    def gradient_ready(self) -> None:
        """Add up the gradients of a critic of its own; leave the policy where it is in the warm-up; end the window's
        updates where the policy has moved too far from the one that sampled."""
        if self.own_critic:
            critic_step.add_up_gradients(self.shared, self.accelerator.num_processes)
        if self.warming_up:
            critic_step.drop_policy_gradients(self.shared)
        if self.args.target_kl is not None:
            self._stop_early(self.args.target_kl)

    def _stop_early(self, target: float) -> None:
        """Leave this optimizer step and the rest of the window out where its approx_kl is above 1.5 `target`."""
        pair = torch.tensor(self._moved, dtype=torch.float32, device=self.args.device)
        moved, tokens = self.accelerator.reduce(pair, "sum").tolist()
        self._moved = [0.0, 0.0]
        if not tokens:
            return
        stop = moved / tokens > 1.5 * target
        left = len(self._window) // self.args.gradient_accumulation_steps
        self.metrics["train"].add("early_stop", float(stop), 1 + left if stop else 1)
        if stop:
            logger.info("step %d: approx_kl %.3g ends this rollout", self.state.global_step + 1, moved / tokens)
            self.idle = True  # without a gradient the optimizer moves nothing, by momentum neither
            empty = torch.zeros(0, 1, device=self.args.device)
            nothing = MiniBatch(
                [], empty[:, 0], empty.bool(), empty, rows=0, normalizer=torch.ones_like(empty.sum()), idle=True
            )
            self._window = deque([nothing] * len(self._window))

    def recorded(self) -> Any:
        """See `OnlineTrainer`."""
        return *super().recorded(), list(self._moved)

    def restore_recorded(self, before: Any) -> None:
        """See `OnlineTrainer`."""
        super().restore_recorded(before[:2])
        self._moved = list(before[2])

    def get_train_dataloader(self) -> DataLoader:
        """See `OnlineTrainer`; a run begins, or goes on, at the start of an optimizer step."""
        self._moved = [0.0, 0.0]
        return super().get_train_dataloader()

    def run_facts(self) -> dict[str, Any]:
        """See `BaseTrainer`."""
        return {**super().run_facts(), "critic": "adapter" if self.own_critic else "head"}

    def _record_parts(self, batch: MiniBatch, **parts: float | Tensor) -> None:
        """Shares of one optimizer step's loss; their mean over micro-steps and processes, scaled back to a step."""
        shares = self.args.gradient_accumulation_steps * self.accelerator.num_processes * batch.parts
        for name, part in parts.items():
            self.metrics["train"].add(name, part * shares, 1 / batch.parts)

    def _record(self, out: PpoPolicyLossOutput, batch: MiniBatch, scores: TokenScores) -> None:
        store, tokens = self.metrics["train"], int(batch.mask.sum())
        record_update(store, batch, scores)
        self._record_parts(batch, policy_loss=out.loss)
        store.add("policy/approx_kl", out.approx_kl, tokens)
        store.add("policy/ratio_mean", out.ratio_mean, tokens)
        store.add("policy/ratio_max", out.ratio_max, reduce="max")
        store.add("clip_ratio/low_mean", out.clip_low_fraction, tokens)
        store.add("clip_ratio/high_mean", out.clip_high_fraction, tokens)
        store.add("clip_ratio/region_mean", out.clip_fraction, tokens)
        self._moved[0] += float(out.approx_kl) * tokens
        self._moved[1] += tokens
