"""Iterative DPO: rounds of sampling from the current policy, scoring, pairing and training on the pairs.

    for each of num_rounds:
        sample      K completions for each of P prompts, with the weights as they are now
        score       reward functions, as in GRPO: callables, verifiers, models, the role `reward`, a judge
        pair        best and worst, all pairs with a margin, or ranked lists; saved below output_dir/pairs
        train       S optimizer steps of DPO's loss (`loss_type` and all of `DPOConfig`) on the round's pairs
        evaluate    greedy answers to held-out prompts, scored by the same functions
        reference   stays ("fixed"), becomes the policy ("previous"), or moves towards it ("average")

Where it stands to the papers:
- best against worst of several answers of the current policy, ties left out: iterative DPO as in Xu et al. 2312.16682
  (scores of a reward model) and Yuan et al. 2401.10020 (the policy judges itself: pass a judge as reward function).
- right against wrong answers, with a likelihood term on the chosen one: Pang et al. 2404.19733. Here
  `reference="previous", rpo_alpha=1.0, pair_strategy="all"`; of many pairs of a prompt `max_pairs_per_prompt` takes
  those of the largest difference, of equal ones the first.
- Pang et al. begin every iteration with the model before it, which is also its reference ("previous"). Here optimizer
  state and learning-rate schedule go through all rounds, and the default reference is the policy that training began
  with, which bounds how far all rounds together may go. "average" is TR-DPO's soft update (2404.09656), once a round.
- only pairs of the current round are trained on; a set of human preferences is no part of it (train DPO on it first).
- answers are trained on token by token as they were sampled: one that the limit cut has no EOS at its end, and nothing
  is tokenized again. All pairs of a prompt are one packed group, the prompt and every answer computed once.
- the loss is a mean over pairs, as of `DPOTrainer`. A round has the same number of optimizer steps whatever its pairs
  are: `epochs_per_round` passes over them are dealt evenly over the steps, so that the schedule is known beforehand.

Prompts without a signal (fewer than two scored answers, all scores equal or within the margin) give no pair and are
counted. A round without any pair is told of, and its steps change nothing; where that is the first round, it is an
error. A run goes on in the middle of a round exactly: its pairs are a part of the checkpoint. One that was stopped
while a round was being sampled samples it again, with the same weights and seed.

| metric, beside those of `hf_rlx.trainers.pair_logps` | unit | what it is |
|---|---|---|
| round | - | number of the round, from 0; in every training log, one of which is at the end of each round |
| pairs/count, pairs/prompts | count | pairs of the rounds since the last log, and prompts that gave some |
| pairs/prompts_without | count | prompts that gave none; the round's JSON says why |
| pairs/score_gap | score | mean difference of the scores of a pair (of a list: highest less lowest) |
| reward, reward_std, frac_reward_zero_std, rewards/..., completions/... | | of the completions, as GRPO logs them |
| rollout/tokens_per_second, time/rollout, time/rewards | 1/s, share | throughput of the sampling |
| eval_reward, eval_rewards/<function>/mean | reward | held out, one greedy answer a prompt |
| eval_accuracy/<function>, _low, _high, _n | share | of functions that say 0 or 1 only, with a 95 % Wilson interval |
| eval_round | count | rounds that the evaluated policy has been through; 0 before the first |
logps/..._change, rewards/... and kl/chosen are against the reference, which moves unless it is "fixed". The warning
about falling chosen answers adds the rounds up (`hf_rlx.trainers.round_watch`). num_tokens counts sampling too.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import IntervalStrategy

from hf_rlx.data.formats import check_all_prompts, check_prompts
from hf_rlx.data.pair_encoding import RankedGroup
from hf_rlx.rollout.generate import Generator
from hf_rlx.trainers.alerts import Alerts
from hf_rlx.trainers.base import BaseTrainer
from hf_rlx.trainers.checks import check_arguments
from hf_rlx.trainers.dpo import dpo_objective
from hf_rlx.trainers.evaluate import evaluate_rollouts
from hf_rlx.trainers.iterative_config import IterativeDPOConfig
from hf_rlx.trainers.pair_batches import PairBatch
from hf_rlx.trainers.pair_logps import Objective, Pairs
from hf_rlx.trainers.preference import PreferenceTrainer
from hf_rlx.trainers.preflight import before_loading, prompt_checks, try_prompts
from hf_rlx.trainers.references import ReferenceLogps
from hf_rlx.trainers.round_making import make_round
from hf_rlx.trainers.round_watch import RoundWatch
from hf_rlx.trainers.rounds import Round, RoundPlan, RoundRow
from hf_rlx.trainers.scorers import make_scorer
from hf_rlx.trainers.tables import CompletionTables

logger = logging.getLogger(__name__)

_ADVICE = (
    "Set rpo_alpha=1.0 (a likelihood term on chosen answers), lower learning_rate, raise beta, or hold the policy "
    'near where it started with reference="fixed"'
)


class _EndOfRound(TrainerCallback):
    """Logs at the end of every round, and evaluates there where no strategy says when."""

    def __init__(self, steps: int, evaluate: bool) -> None:
        self.steps, self.evaluate = steps, evaluate

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called by the Trainer."""
        if state.global_step % self.steps == 0:
            control.should_log |= args.logging_strategy != IntervalStrategy.NO
            control.should_evaluate |= self.evaluate


class IterativeDPOTrainer(PreferenceTrainer):
    """Rounds of sampling, scoring, pairing, and DPO on the pairs. See the head of this file.

    Args:
        model: see `BaseTrainer`; with a `peft_config`, a `PeftModel` or an adapter's folder the adapter trains.
        reward_funcs, reward_processing_classes: see `OnlineTrainer`.
        args: None: `IterativeDPOConfig("iterative_dpo_output")`.
        train_dataset: rows with a `prompt` (text or messages) and columns for the reward functions; None: to evaluate
            only. eval_dataset: the same, or a dictionary of them.
        processing_class, callbacks, optimizers, quantization_config, peft_config, optimizer_cls_and_kwargs: see
            `PreferenceTrainer`. There is no ref_model: the reference is made from the policy.

    Raises:
        ValueError: see `BaseTrainer`, `RewardScorer` and `RoundPlan`; a dataset without a `prompt` column.

    Example:
        >>> trainer = IterativeDPOTrainer("tiny", verifier, IterativeDPOConfig("runs/x", num_rounds=2), prompts)
        >>> trainer.train()
        >>> datasets.load_dataset("runs/x/pairs", split="train")
    """

    args: IterativeDPOConfig
    watch: RoundWatch
    method = "iterative_dpo"

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: IterativeDPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        optimizer_cls_and_kwargs: Any = None,
    ) -> None:
        if reward_funcs is None:
            raise ValueError("reward_funcs is missing: a function (prompts, completions, **columns) -> list of floats")
        args = IterativeDPOConfig("iterative_dpo_output") if args is None else args
        check_arguments(model, args, IterativeDPOConfig, processing_class, peft_config)
        before_loading(self, args, peft_config, *prompt_checks(train_dataset, eval_dataset, reward_funcs))
        self.plan = None if train_dataset is None else RoundPlan.of(args, len(train_dataset))
        if self.plan is not None:
            _settle_steps(args, self.plan.steps)
        self.reference = ReferenceLogps(self)
        self.watch = RoundWatch(_ADVICE, args.reference_share)
        super().__init__(
            model,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        check_all_prompts(train_dataset, eval_dataset, self.room_for_prompt())
        self.scorer = make_scorer(self, reward_funcs, reward_processing_classes)
        self.sampler: Any = Generator(self.shared, self.tokenizer, args.max_rollout_rows)
        self.tables = CompletionTables(
            Path(str(args.output_dir)) / "completions",
            args.num_completions_to_print,
            args.log_unique_prompts,
            quiet=bool(args.disable_tqdm),
        )
        self.alerts = Alerts()
        self.add_callback(self.alerts)
        self._evaluates = (
            args.evaluate_rounds and eval_dataset is not None and args.eval_strategy == IntervalStrategy.NO
        )
        if self.plan is not None:
            self.add_callback(_EndOfRound(self.plan.steps, self._evaluates))
        self.round: Round | None = None  # that is being trained on
        self._dealt: deque[PairBatch] = deque()  # micro-batches of the optimizer step that is being done
        self._evaluated: str | None = None  # prefix of the evaluation that is being done
        self._begun = False

    # What it learns from.

    def pair_objective(self, pairs: Pairs) -> Objective:
        """DPO's."""
        return dpo_objective(self.args, pairs)

    def pairs(self, model: nn.Module | None, rows: list[RankedGroup]) -> Pairs:
        """The pairs that the round made of each prompt's answers."""
        places, start = [], 0
        for row in rows:
            assert isinstance(row, RoundRow)
            places += [(start + better, start + worse) for better, worse in row.pairs]
            start += row.num_responses
        found = super().pairs(model, rows)
        chosen = torch.tensor(places, dtype=torch.long, device=found.better.device).reshape(-1, 2)
        return replace(found, better=chosen[:, 0], worse=chosen[:, 1])

    def weight_of(self, row: RankedGroup) -> float:
        """Pairs of the row."""
        return float(row.num_pairs)

    def check_dataset(self, dataset: Any, name: str) -> None:
        """Datasets hold prompts."""
        check_prompts(dataset, name)

    # The loop.

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """See `BaseTrainer`. Held-out prompts have a metric whatever is answered: there is nothing to look for in them
        beforehand, as there is in pairs."""
        return BaseTrainer.train(self, *args, **kwargs)

    def get_train_dataloader(self) -> DataLoader:
        """One entry a micro-step: what it trains on is made by the round. An epoch of the loader is a round."""
        if self.plan is None:
            raise ValueError("train() needs a train_dataset with a `prompt` column")
        try_prompts(self.train_dataset, self.tokenizer, self.args, self.room_for_prompt())
        self.round, self._step_started = None, None
        self._dealt.clear()
        self.halving.end_step()
        steps: Any = range(self.plan.steps * self.args.gradient_accumulation_steps)
        # A generator of its own: a loader draws a seed at every epoch, from torch's global state if it has none.
        return DataLoader(steps, batch_size=1, collate_fn=list, generator=torch.Generator().manual_seed(0))

    def num_examples(self, dataloader: DataLoader) -> int:
        """Prompts of a round."""
        return 0 if self.plan is None else self.plan.prompts

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], None]:
        """The loader's entries: on resume the loop asks for them before the round is put back."""
        return list(islice(epoch_iterator, num_batches)), None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One micro-step; the first of a round makes its pairs."""
        if not self._dealt:
            if self._step_started is None:
                self._step_started, self._logged_step = time.perf_counter(), self.state.global_step
            self._deal()
        return super().training_step(model, self._dealt.popleft())

    def _deal(self) -> None:
        """The micro-batches of the optimizer step that begins now."""
        assert self.plan is not None
        number, step = divmod(self.state.global_step, self.plan.steps)
        if self.round is None or self.round.number != number:
            if number == 0 and self._evaluates:
                self.evaluate()
            self.round = make_round(self, number)
            self.keeper.mark()  # a checkpoint before the step is over need not sample again
        shares = iter(self.round.shares(step, self.plan, self.args))
        batches, _ = super().get_batch_samples(shares, self.args.gradient_accumulation_steps, self.args.device)
        self._dealt.extend(batches)

    def room_for_prompt(self) -> int | None:
        """Tokens that a prompt may have so that a whole completion fits the model's context; None: unlimited."""
        context = self.shared.context_length
        return None if context is None else context - self.args.max_completion_length

    # Evaluation.

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Sample and score held-out prompts with the policy as it is; logs and returns the metrics, `eval_round` among
        them.

        Raises:
            ValueError: there is no evaluation dataset, or a row of it cannot be used.
        """
        start = time.perf_counter()
        self.scorer.trainer_state = self.state
        if isinstance(eval_dataset, str):
            eval_dataset = cast("Any", self.eval_dataset)[eval_dataset]
        self._evaluated = metric_key_prefix
        try:
            metrics = evaluate_rollouts(cast("Any", self), eval_dataset, metric_key_prefix)
        finally:
            self._evaluated = None
        if self._step_started is not None:  # not a part of the training step
            self._step_started += time.perf_counter() - start
        return {**metrics, f"{metric_key_prefix}_round": self._rounds_done()}

    def _rounds_done(self) -> float:
        return 0.0 if self.plan is None else float(self.state.global_step // self.plan.steps)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the round."""
        if "loss" in logs:
            logs["round"] = float(0 if self.round is None else self.round.number)
        elif self._evaluated is not None:
            logs[f"{self._evaluated}_round"] = self._rounds_done()
        super().log(logs, start_time)
        if "loss" in logs and self.args.log_completions:
            self.tables.write("train", self.state.global_step)

    # The run.

    def begin_run(self) -> None:
        """See `BaseTrainer`."""
        super().begin_run()
        self.scorer.unscored = 0
        if self._begun and not self.args.keep_reference:  # a second run begins with the policy that the first one left
            self.shared.prepare_reference(anew=True)
        self._begun = True

    def run_state(self) -> dict[str, Any]:
        """See `BaseTrainer`; with the round's pairs while it is being trained on."""
        steps = 1 if self.plan is None else self.plan.steps
        running = self.round is not None and self.round.number == self.state.global_step // steps
        return {
            **super().run_state(),
            "round": self.round.state_dict() if running and self.round is not None else None,
            "max_rows": getattr(self.sampler, "max_rows", None),
            "tables": self.tables.state_dict(),
            "alerts": self.alerts.state_dict(),
            "scorer": self.scorer.state_dict(),
        }

    def load_run_state(self, state: dict[str, Any]) -> None:
        """See `BaseTrainer`."""
        super().load_run_state(state)
        self.round = None if state["round"] is None else Round.from_state(state["round"])
        self._dealt.clear()
        if state["max_rows"] is not None:
            self.sampler.max_rows = min(state["max_rows"], self.args.max_rollout_rows)
        self.tables.load_state_dict(state["tables"])
        self.alerts.load_state_dict(state["alerts"])
        self.scorer.load_state_dict(state["scorer"])

    def run_facts(self) -> dict[str, Any]:
        """See `BaseTrainer`. More rounds may be asked for than before; what one is may not change."""
        args, plan = self.args, self.plan
        names = ["beta", "label_smoothing", "ld_alpha", "num_generations", "temperature", "pair_strategy"]
        names += ["pair_margin", "max_pairs_per_prompt", "mask_truncated_completions", "reference"]
        settings = {name: getattr(args, name) for name in names}
        settings["losses"] = [list(term) for term in args.weighted_losses()]
        shape = {} if plan is None else {"prompts": plan.prompts, "steps": plan.steps, "epochs": plan.epochs}
        return {**super().run_facts(), **settings, "round": shape}


def _settle_steps(args: IterativeDPOConfig, steps: int) -> None:
    """A reference that moves does so at the end of every round."""
    default = IterativeDPOConfig.__dataclass_fields__["ref_model_sync_steps"].default
    settled = vars(args).get("_settled_steps")  # by a trainer on other data that had this configuration before
    if args.ref_model_sync_steps not in (default, steps, settled):
        raise ValueError(
            f"ref_model_sync_steps={args.ref_model_sync_steps} has no part here: the reference moves at the end of a "
            f"round, which has {steps} steps; leave it out"
        )
    if args.sync_ref_model:
        args.ref_model_sync_steps = steps
        vars(args)["_settled_steps"] = steps


__all__ = ["IterativeDPOConfig", "IterativeDPOTrainer"]
