"""The loop of every algorithm that learns from its own samples.

    collect(rows):  sample     generate K completions a prompt; finished groups are scored meanwhile
                    shape      `compute_rewards`: overlong penalty, KL in the reward
                    advantages the algorithm's own
                    deal       kept completions to micro-steps, with log-probs of what sampled and of the reference
    update(batch):  one packed forward and backward per micro-step

PPO and GRPO differ in `compute_advantages` (PPO's are complete after `minibatches`, which knows the old values) and
`minibatch_loss`. Groups stay whole on one process, so no baseline needs a gather.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from hf_rlx.data.formats import check_all_prompts, naming_rows
from hf_rlx.functional import AdaptiveKLController, FixedKLController, soft_overlong
from hf_rlx.models import reference
from hf_rlx.models.roles import POLICY
from hf_rlx.models.sharding import whole_weights
from hf_rlx.models.shared import SharedModel
from hf_rlx.rollout.collect import Collected, Sampler, collect, is_collective, mark_weights
from hf_rlx.rollout.generate import Generator
from hf_rlx.trainers import online_state
from hf_rlx.trainers.alerts import Alerts
from hf_rlx.trainers.base import BaseTrainer
from hf_rlx.trainers.config import BaseConfig
from hf_rlx.trainers.dynamic_sampling import replace_flat_groups
from hf_rlx.trainers.evaluate import evaluate_rollouts
from hf_rlx.trainers.health import loss_fault
from hf_rlx.trainers.memory import Halving, with_fewer_rows
from hf_rlx.trainers.metrics import gathered
from hf_rlx.trainers.minibatches import make_minibatches
from hf_rlx.trainers.observe import UpdateBar, record_rollouts
from hf_rlx.trainers.online_config import OnlineConfig
from hf_rlx.trainers.preflight import before_loading, prompt_checks, try_prompts
from hf_rlx.trainers.processes import raise_together, together
from hf_rlx.trainers.reference_sync import SyncReference
from hf_rlx.trainers.scorers import make_scorer
from hf_rlx.trainers.tables import CompletionTables
from hf_rlx.trainers.windows import MiniBatch, window_loader
from hf_rlx.types import Group, Rollout

logger = logging.getLogger(__name__)


class OnlineTrainer(BaseTrainer):
    """Collect, shape, compare, update. Subclasses say how advantages and the loss are computed.

    Args:
        model, args, processing_class, quantization_config, peft_config: see `BaseTrainer`.
        reward_funcs: one or a list of: functions `(prompts, completions, **columns) -> list[float | None]`, async
            functions, sequence classifiers, Hub ids, or "package.module:function".
        train_dataset: rows with a `prompt` (text or messages) and columns for the reward functions.
        eval_dataset: the same, or a dictionary of them.
        reward_processing_classes: tokenizers of reward models.
        callbacks, optimizers: as in `transformers.Trainer`.

    Raises:
        ValueError: see `BaseTrainer` and `RewardScorer`; a dataset without a `prompt` column or with too few rows.
    """

    args: OnlineConfig
    train_dataset: Any
    recalls = False  # whether `recall` is called also where every update is on-policy

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: OnlineConfig,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        before_loading(self, args, peft_config, *prompt_checks(train_dataset, eval_dataset, reward_funcs))
        super().__init__(
            model,
            args,
            processing_class=processing_class,
            quantization_config=quantization_config,
            peft_config=peft_config,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        check_all_prompts(train_dataset, eval_dataset, self.room_for_prompt())
        if self.shared.roles[POLICY].adapter is not None and 0 < args.learning_rate <= 1e-6:
            logger.warning(
                "learning_rate=%g is made for full weights and hardly moves an adapter; try 1e-5 to 1e-4",
                args.learning_rate,
            )
        self.scorer = make_scorer(self, reward_funcs, reward_processing_classes)
        self.sampler = self.make_sampler()
        self.halving = Halving(self)
        self._window: deque[MiniBatch] = deque()
        self._kl_seen: list[Tensor] = []
        self._num_tokens = 0
        self.kl_controller = self.make_kl_controller()
        self._step_started: float | None = None
        self._logged_step = 0
        self._last_group: Group | None = None
        self.alerts = Alerts()
        self.add_callback(self.alerts)
        self.tables = CompletionTables(
            Path(str(args.output_dir)) / "completions",
            args.num_completions_to_print,
            args.log_unique_prompts,
            quiet=bool(args.disable_tqdm),
        )
        self._bar = UpdateBar(disable=args.disable_tqdm or not self.is_world_process_zero())
        if args.sync_ref_model:
            self.add_callback(SyncReference(self.shared, args.ref_model_mixup_alpha, args.ref_model_sync_steps))

    # The loop.

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One micro-step; the first of a window samples it. Returns this micro-step's share of the loss."""
        model.train()
        if self._step_started is None:
            self._step_started, self._logged_step = time.perf_counter(), self.state.global_step
        if not self._window:
            with whole_weights(self.shared):  # one gathering a window
                self._window.extend(self.collect(inputs))
            self._bar.start(len(self._window))
            self.keeper.mark()  # a checkpoint before the step is over need not sample again
        batch = self._window.popleft()
        self.idle = batch.idle
        with self.metrics["train"].stage("update"), self.shared.as_role(POLICY):
            loss = self.update(model, batch)
        self._bar.advance(done=not self._window)
        if self.accelerator.sync_gradients:
            self.halving.end_step()
            self.gradient_ready()
        else:
            self.keeper.stop_if_asked()
        return loss

    def collect(self, rows: list[dict[str, Any]]) -> list[MiniBatch]:
        """Rollouts for `rows`, as the micro-batches of all passes over them."""
        rollouts = self.sample(rows)
        if self.compute_rewards(rollouts) is not None:  # type: ignore[func-returns-value]
            raise TypeError("compute_rewards returns nothing: it changes `total` of every rollout")
        self.compute_advantages(rollouts)
        batches = self.minibatches(rollouts)
        self.tables.add("train", self.state.global_step, rollouts, self._scores)
        return self.passes(batches)

    def passes(self, batches: list[MiniBatch]) -> list[MiniBatch]:
        """The micro-batches of one pass over a window, `num_iterations` times."""
        return batches * self.args.num_iterations

    def update(self, model: nn.Module, batch: MiniBatch) -> Tensor:
        """Forward and backward of one micro-batch, inside the policy's role; in halves where memory is too small.

        Raises:
            NonFiniteError: of the loss. torch.OutOfMemoryError: halves do not fit either.
        """
        alone = self.accelerator.num_processes == 1
        # A step that any process learns from needs a backward on all of them, and the gradient scaler one always.
        if not batch.groups and (alone or batch.idle) and self.accelerator.scaler is None:
            return torch.zeros((), device=self.args.device)
        # Where several processes reduce gradients together, each must run as many backwards as the others.
        parts = batch.split(self.args.max_tokens_per_update) if alone else [batch]
        return torch.stack([self.halving.run(model, part) for part in parts]).sum()

    def forward_backward(self, model: nn.Module, batch: MiniBatch) -> Tensor:
        """The loss of one micro-batch and its backward; returns the loss, scaled for DDP."""
        store, start = self.metrics["train"], time.perf_counter()
        loss = self.minibatch_loss(model, batch)
        if self.accelerator.scaler is None:  # a scaler drops such a step by itself
            raise_together(loss_fault(loss, self.shared, batch, self.state.global_step))
        # The loss is a share of one sum over all processes; DDP averages gradients, hence the factor.
        loss = loss * self.accelerator.num_processes
        self.backward(loss)
        seconds = max(time.perf_counter() - start, 1e-9)
        store.add("update/tokens_per_second", int(batch.mask.sum()) / seconds, seconds)
        return loss.detach()

    def gradient_ready(self) -> None:
        """Hook: all micro-steps of an optimizer step have run their backward, on every process."""

    def compute_advantages(self, rollouts: list[Rollout]) -> None:
        """Set `advantages` and `keep` of every rollout from its `total`."""
        raise NotImplementedError(f"{type(self).__name__} does not say how advantages are computed")

    def minibatch_loss(self, model: nn.Module, batch: MiniBatch) -> Tensor:
        """The loss of one micro-batch: a scalar, already divided by the optimizer step's normalizer."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its loss is")

    def loss_count(self, mask: Tensor, rows: int) -> Tensor:
        """What a micro-batch adds to the loss's denominator: kept `mask` (B, R), and the rows that it was dealt."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its loss is divided by")

    # The parts.

    def make_sampler(self) -> Sampler:
        """The built-in generator, or vLLM."""
        if not self.args.use_vllm:
            return Generator(self.shared, self.tokenizer, self.args.max_rollout_rows)
        from hf_rlx.rollout.vllm import VllmGenerator

        return VllmGenerator(
            self.shared,
            self.tokenizer,
            self.accelerator,
            self.args.sampling_params(),
            self.args.vllm_options(),
            self.args.generation_kwargs,
        )

    def prepare_roles(self, shared: SharedModel, args: BaseConfig) -> None:
        """A reference, unless nothing is held near it."""
        if isinstance(args, OnlineConfig) and args.beta > 0:
            logger.info("reference: %s", reference.IN_WORDS[shared.prepare_reference(anew=True)])

    def sample(self, rows: list[dict[str, Any]]) -> list[Rollout]:
        """Generate and score; with `dynamic_sampling`, replace groups without signal by fresh prompts."""
        self._update_beta()
        with together(apply=not is_collective(self.sampler)):
            collected = self.rollout(rows, round_index=0)
            self.alerts.rollout(collected, self.state.global_step)
            if self.args.dynamic_sampling:
                collected = replace_flat_groups(self, collected)
        with together():
            self.scorer.note_rollout(collected.scores.total)
            self.alerts.texts(collected.rollouts, self.state.global_step)
            self._num_tokens += record_rollouts(self, collected)
        for function in self.scorer.functions:
            if hasattr(function.call, "share"):  # running moments, the same on all processes before they are saved
                function.call.share(gathered)
        self._scores = collected.scores
        return collected.rollouts

    def rollout(self, rows: list[dict[str, Any]], round_index: int, **changes: Any) -> Collected:
        """One rollout with the current weights; the seed follows from run seed, step, process and round."""
        args = self.args
        self.scorer.trainer_state = self.state  # train() makes a new one
        mark_weights(self.sampler, self.state.global_step)
        seed = ((args.seed * 1009 + self.state.global_step) * 64 + self.accelerator.process_index) * 16 + round_index

        with together(apply=is_collective(self.sampler)), naming_rows(self.train_dataset, "train_dataset"):
            return with_fewer_rows(
                self.sampler,
                args.num_generations,
                lambda: collect(
                    rows,
                    self.sampler,
                    self.scorer,
                    self.tokenizer,
                    args.sampling_params(seed=seed, **changes),
                    args.num_generations,
                    chat_template_kwargs=args.chat_template_kwargs,
                    special_tokens=args.special_tokens_in_messages,
                    max_prompt_tokens=self.room_for_prompt(),
                    progress=not args.disable_tqdm and self.is_world_process_zero(),
                    poll=self.keeper.stop_if_alone,
                ),
            )

    def compute_rewards(self, rollouts: list[Rollout]) -> None:
        """Hook: set `total` (K,) of every rollout, which has the weighed sum of its `rewards` (K, functions); NaN: not
        scored. By default `shape_rewards`."""
        self.shape_rewards(rollouts)

    def shape_rewards(self, rollouts: list[Rollout]) -> None:
        """Add what is not a reward function's business: DAPO's soft overlong penalty (2503.14476 eq. 13)."""
        if self.args.soft_overlong_cache is None:
            return
        for rollout in rollouts:
            lengths = torch.tensor([len(c.token_ids) for c in rollout.completions])
            penalty = soft_overlong(lengths, self.args.max_completion_length, self.args.soft_overlong_cache)
            rollout.total = rollout.total + penalty
            self.metrics["train"].add("rewards/soft_overlong/mean", penalty.mean(), len(lengths))

    def minibatches(self, rollouts: list[Rollout]) -> list[MiniBatch]:
        """Deal kept completions to micro-steps; add old and reference log-probs and the normalizers."""
        self._last_group = rollouts[0].group()
        return make_minibatches(self, rollouts)

    def recall(self, batch: MiniBatch) -> None:
        """Set what the weights that sampled say of a micro-batch: `old_logps`."""
        batch.old_logps = self.reference_logps(batch.groups, POLICY, self.args.temperature)

    def room_for_prompt(self) -> int | None:
        """Tokens that a prompt may have so that a whole completion fits the model's context; None: unlimited."""
        context = self.shared.context_length
        return None if context is None else context - self.args.max_completion_length

    def needs_reference_in_loss(self) -> bool:
        """Whether the loss itself has a KL term."""
        return self.args.beta > 0

    def dummy_groups(self) -> list[Group]:
        """A small forward: every process must run a backward in a step that DDP synchronises. Of real tokens,
        because the first forward of all decides whether this model can run packed rows."""
        group = self._last_group or Group.from_lists([0], [[0]])
        return [Group(group.prompt_ids[-48:], tuple(ids[:24] for ids in group.response_ids[:2]))]

    def recorded(self) -> tuple[dict, int]:
        """What updates have recorded so far, for `restore_recorded`."""
        return self.metrics["train"].state_dict(), len(self._kl_seen)

    def restore_recorded(self, before: tuple[dict, int]) -> None:
        """Forget what was recorded since `recorded`: the update is done again."""
        self.metrics["train"].load_state_dict(before[0])
        del self._kl_seen[before[1] :]

    def note_kl(self, sequence_kl: Tensor) -> None:
        """Remember summed k1 (nats a sequence) for the adaptive controller."""
        if self.args.kl_target is not None:
            self._kl_seen.append(sequence_kl.detach())

    def _update_beta(self) -> None:
        """Move beta by the sequence KL seen since the last window, over all processes."""
        if self.args.kl_target is None:
            return
        seen = torch.cat(self._kl_seen) if self._kl_seen else torch.zeros(0)
        self._kl_seen = []
        pair = torch.tensor([float(seen.sum()), float(seen.numel())], device=self.args.device)
        total, count = self.accelerator.reduce(pair, "sum").tolist()
        if count:  # the KL is known of the completions that were trained on; the episodes are all that were sampled
            self.kl_controller.update(total / count, int(self.args.generation_batch_size or count))

    # The run.

    def make_kl_controller(self) -> AdaptiveKLController | FixedKLController:
        """A fixed beta, or one that moves towards `kl_target`."""
        args = self.args
        if args.kl_target is None:
            return FixedKLController(args.beta)
        return AdaptiveKLController(args.beta, args.kl_target, args.kl_horizon, args.generation_batch_size)

    def begin_run(self) -> None:
        """See `BaseTrainer`."""
        super().begin_run()
        self.kl_controller = self.make_kl_controller()
        self._kl_seen, self._num_tokens, self.scorer.unscored = [], 0, 0

    def run_state(self) -> dict[str, Any]:
        """See `BaseTrainer`; with the window: micro-batches that are sampled and not yet trained on."""
        return {**super().run_state(), **online_state.state_of(self)}

    def load_run_state(self, state: dict[str, Any]) -> None:
        """See `BaseTrainer`."""
        super().load_run_state(state)
        online_state.restore(self, state)

    def run_facts(self) -> dict[str, Any]:
        """See `BaseTrainer`."""
        names = ("num_generations", "steps_per_generation", "num_iterations", "shuffle_dataset")
        return {**super().run_facts(), **{name: getattr(self.args, name) for name in names}}

    # What the Trainer asks for.

    def get_train_dataloader(self) -> DataLoader:
        """Prompts, window by window; not sharded by accelerate: the sampler gives each process its own."""
        args = self.args
        if self.train_dataset is None:
            raise ValueError("train() needs a train_dataset with a `prompt` column")
        try_prompts(self.train_dataset, self.tokenizer, args, self.room_for_prompt())
        self._window.clear()  # of a run that stopped in the middle of it
        self.halving.end_step()
        self._step_started = None
        repeats = int(args.steps_per_generation or 1) * args.num_iterations
        return window_loader(self.train_dataset, args, args.prompts_per_window, repeats, self.data_collator)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Sample and score `eval_dataset`; logs rewards, lengths, and accuracies with intervals."""
        start = time.perf_counter()
        self.scorer.trainer_state = self.state
        with whole_weights(self.shared):
            metrics = evaluate_rollouts(self, eval_dataset, metric_key_prefix)
        if self._step_started is not None:  # not a part of the training step
            self._step_started += time.perf_counter() - start
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add throughput and the coefficient of the KL."""
        if "loss" in logs:
            now, step = time.perf_counter(), self.state.global_step
            logs["step_time"] = (now - (self._step_started or now)) / max(step - self._logged_step, 1)
            self._step_started, self._logged_step = now, step
            tokens = torch.tensor(self._num_tokens, device=self.args.device)
            logs["num_tokens"] = int(self.accelerator.reduce(tokens, "sum"))
            logs["beta"] = self.kl_controller.coef
            if self.args.log_completions:
                self.tables.write("train", self.state.global_step)
        super().log(logs, start_time)
