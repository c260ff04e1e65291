"""Reward models from pairs and ranked lists (InstructGPT, 2203.02155 section 3.5; Bradley and Terry 1952).

How this departs from InstructGPT and from TRL 1.16 (reasons in `hf_rlx.trainers.differences`):
- the score is read at the last real token by the answer's own length, EOS included, also where pad is EOS;
- prompt and answers are one packed row: a prompt is computed once for all K answers (InstructGPT: one batch element);
- a reward model can be an adapter and a head on the policy's own base (role `reward`), from the policy's weights;
- a longer row is cut, EOS kept, and not dropped; what a chat template writes behind the last EOS is left out;
- the loss is divided by the rows of the whole optimizer step and all processes; rows of identical answers leave it;
- ties count 1/2 in accuracies.

| metric (evaluation: see `reward_report.py`) | unit | what it is |
|---|---|---|
| loss | nats | mean over rows, with the centring term; of an ensemble the mean over its members |
| accuracy | share | pairs in the right order, a tie 1/2 |
| margin | score | mean difference of the better and the worse answer of a pair |
| mean_reward, min_reward, max_reward, std_reward | score | of the answers |
| rows/without_pair | count | rows of identical answers or ties only, which teach nothing |
| rows/cut, rows/special_tokens_neutralised | count | rows cut to max_length; special tokens made plain text |
| num_tokens | tokens | of every answer with its prompt |
| step_time, update/tokens_per_second, time/<stage> | s, 1/s, share | throughput |
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback

from hf_rlx.cards.facts import Score
from hf_rlx.data.pair_encoding import RankedGroup
from hf_rlx.functional import bradley_terry, plackett_luce, ranked_all_pairs
from hf_rlx.functional.statistics import RunningMoments
from hf_rlx.models.classifier import SCORE
from hf_rlx.models.dropout import disable_dropout
from hf_rlx.models.reward_role import NORMALIZERS, combined
from hf_rlx.models.roles import REWARD
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.checks import check_arguments
from hf_rlx.trainers.config import BaseConfig, described, strict
from hf_rlx.trainers.pair_batches import PairBatch
from hf_rlx.trainers.preference import PreferenceConfig, PreferenceTrainer
from hf_rlx.trainers.preflight import before_loading, data_checks
from hf_rlx.trainers.reward_model import adapter_facts, add_reward_roles, reward_base
from hf_rlx.trainers.reward_report import TEMPERATURES, RewardReport, ScoredRow, fit_temperature, reward_report

logger = logging.getLogger(__name__)

LOSSES = ("bradley_terry", "all_pairs", "plackett_luce")
_CALIBRATION_ROWS = 512  # of the training data, where no evaluation data are there to take statistics of


@strict
@dataclass
class RewardConfig(PreferenceConfig):
    """Configuration of `RewardTrainer`; names and defaults are TRL 1.16's."""

    learning_rate: float = described(1e-4, "Step size; made for adapters, about ten times that of full weights.")
    center_rewards_coefficient: float | None = described(
        None, "Weight of the squared sum of a pair's scores, which keeps their mean near 0; 0.01 is usual."
    )
    loss_type: Literal["bradley_terry", "all_pairs", "plackett_luce"] = described(
        "bradley_terry",
        '"bradley_terry": pairs, with the `margin` column; for lists "all_pairs" (InstructGPT eq. 1, the mean over a '
        'prompt\'s pairs) or "plackett_luce" (the likelihood of the ranking; lists with ties by all_pairs).',
    )
    ensemble_size: int = described(1, "Reward adapters, each with a head of its own; roles reward, reward_1, ...")
    uncertainty_penalty: float = described(
        1.0, "Standard deviations of the ensemble's scores that its score is lowered by."
    )
    normalizer: Literal["none", "batch", "running"] = described(
        "none",
        "How rewards are normalised when a policy trains on them (see `RoleReward`); the first moments are taken of "
        "held-out answers when training ends.",
    )
    fit_temperature: bool = described(
        False, "Fit a temperature on eval_dataset when training ends; rewards are divided by it."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (("loss_type", LOSSES), ("normalizer", NORMALIZERS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if (
            isinstance(self.ensemble_size, bool)
            or self.ensemble_size < 1
            or self.ensemble_size != int(self.ensemble_size)
        ):
            raise ValueError(f"ensemble_size must be a whole number of at least 1, got {self.ensemble_size!r}")
        for name in ("uncertainty_penalty", "center_rewards_coefficient"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and at least 0, got {value!r}")
        if self.center_rewards_coefficient and self.loss_type != "bradley_terry":
            raise ValueError("center_rewards_coefficient is defined for pairs; use loss_type='bradley_terry' with it")


class RewardTrainer(PreferenceTrainer):
    """Trains a reward model: a role on a `SharedModel`, or a stand-alone sequence classifier.

    Args:
        model: see the table in `hf_rlx.trainers.reward_model`.
        args, train_dataset, eval_dataset, processing_class, callbacks, optimizers, optimizer_cls_and_kwargs,
            quantization_config: TRL's, see `PreferenceTrainer`.
        data_collator, compute_metrics, preprocess_logits_for_metrics: not carried; refused.
        peft_config: of the reward adapter; None: like the policy's, from its weights.

    Example:
        >>> model = SharedModel.from_pretrained("tiny", peft_config=LoraConfig(target_modules="all-linear"))
        >>> RewardTrainer(model, RewardConfig("runs/rm"), train_dataset=pairs, eval_dataset=held_out).train()
        >>> PPOTrainer(model, model.reward_function(), PPOConfig("runs/ppo"), train_dataset=prompts).train()
    """

    args: RewardConfig
    method = "reward"

    def __init__(
        self,
        model: Any,
        args: RewardConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        for name, value, instead in (
            ("data_collator", data_collator, "rows become packed groups; change the dataset instead"),
            ("compute_metrics", compute_metrics, "trainer.report() has scores, intervals, calibration and lengths"),
            ("preprocess_logits_for_metrics", preprocess_logits_for_metrics, "scores are read by trainer.report()"),
        ):
            if value is not None:
                raise ValueError(f"{name} is not carried by hf_rlx: {instead}")
        args = RewardConfig("reward_output") if args is None else args
        check_arguments(model, args, RewardConfig, processing_class, peft_config)
        before_loading(self, args, peft_config, *data_checks(self.check_dataset, train_dataset, eval_dataset))
        self._peft_config = peft_config
        self.last_report: RewardReport | None = None
        shared = reward_base(model, args, quantization_config, peft_config)
        super().__init__(
            shared,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )

    def prepare_roles(self, shared: SharedModel, args: BaseConfig) -> None:
        """The members of the ensemble, and how their scores are read."""
        assert isinstance(args, RewardConfig)
        members = [REWARD, *(f"{REWARD}_{i}" for i in range(1, args.ensemble_size))]
        there = shared.roles[REWARD].facts.get("members", []) if REWARD in shared.roles else []
        if len(there) > len(members):
            raise ValueError(
                f"the model has an ensemble of {len(there)} reward adapters, all of which its score is of; set "
                f"ensemble_size={len(there)}"
            )
        add_reward_roles(shared, members, self._peft_config)
        if args.disable_dropout:
            disable_dropout(shared)
        self.train_roles = tuple(members)
        facts = shared.roles[REWARD].facts
        longest = args.longest_row(shared.context_length)  # as `encode` cuts rows
        facts.update(max_length=longest, chat_template_kwargs=args.chat_template_kwargs)
        facts.update(special_tokens_in_messages=args.special_tokens_in_messages, normalizer=args.normalizer)
        if len(members) > 1:
            facts.update(members=members, uncertainty_penalty=args.uncertainty_penalty)

    @property
    def reward_role(self) -> str:
        """The role whose scores are reported and saved; of an ensemble the first member."""
        return self.train_roles[0]

    def _set_tokens(self) -> None:
        """Also a pad token that is not EOS, for a classifier that transformers is to read with its own forward: that
        takes the last token that is not pad for the end. Without one in the vocabulary it has none, which transformers
        refuses to batch."""
        super()._set_tokens()
        if self.shared.roles[REWARD].head != SCORE:
            return
        tokenizer, config = self.tokenizer, self.shared.config.get_text_config()
        if tokenizer.pad_token_id == tokenizer.eos_token_id:
            others = [
                t for t in (tokenizer.unk_token, *tokenizer.all_special_tokens) if t and t != tokenizer.eos_token
            ]
            tokenizer.pad_token = next((t for t in others if t != tokenizer.bos_token), others[0] if others else None)
        config.pad_token_id = tokenizer.pad_token_id

    def check_row(self, row: RankedGroup) -> None:
        """Lists need a loss for lists, and margins are of pairs."""
        if self.args.loss_type == "bradley_terry" and row.num_responses != 2:
            raise ValueError(
                f"has {row.num_responses} answers, but loss_type='bradley_terry' compares two; use 'all_pairs'"
            )
        if row.margin is not None and self.args.loss_type != "bradley_terry":
            raise ValueError("has a margin, which loss_type='bradley_terry' reads only; use it, or drop the column")

    # Training.

    def pair_loss(self, model: nn.Module, batch: PairBatch, role: str) -> Tensor:
        """The mean loss of the micro-batch's rows times their share of the optimizer step's."""
        scores: Tensor = model(batch.groups, score=role)
        rows = scores.split([row.num_responses for row in batch.rows])
        table = pad_sequence(list(rows), batch_first=True)
        ranks = pad_sequence([torch.tensor(row.ranks) for row in batch.rows], batch_first=True).to(scores.device)
        real = pad_sequence([torch.ones_like(row, dtype=torch.bool) for row in rows], batch_first=True)
        order = ranks.masked_fill(~real, torch.inf).argsort(dim=1, stable=True)
        best_first = table.gather(1, order)
        share = len(batch.rows) / batch.normalizer
        if self.args.loss_type == "bradley_terry":
            margins = None
            if any(row.margin is not None for row in batch.rows):
                margins = torch.tensor([row.margin or 0.0 for row in batch.rows], device=scores.device)
            chosen, rejected = best_first[:, 0], best_first[:, 1]
            pair = bradley_terry(chosen, rejected, margins, self.args.center_rewards_coefficient or 0.0)
            self._record(batch, scores.detach(), pair.accuracy, pair.mean_margin, len(batch.rows))
            return pair.loss * share
        listed = ranked_all_pairs(table, ranks, real)
        loss = listed.loss
        if self.args.loss_type == "plackett_luce":
            strict_order = torch.tensor([len(set(row.ranks)) == len(row.ranks) for row in batch.rows])
            strict_order = strict_order.to(scores.device)
            whole, tied = plackett_luce(best_first, real & strict_order[:, None]), listed
            if not bool(strict_order.all()):
                tied = ranked_all_pairs(table, ranks, real & ~strict_order[:, None])
            count = strict_order.sum()
            # `real` is True on the first K of a row, sorted or not.
            rest = len(batch.rows) - count
            loss = (whole.loss * count + (tied.loss * rest if rest else 0.0)) / len(batch.rows)
        above = (ranks[:, :, None] < ranks[:, None, :]) & real[:, :, None] & real[:, None, :]
        differences = (table[:, :, None] - table[:, None, :]).detach()[above]
        self._record(batch, scores.detach(), listed.accuracy, differences.mean(), differences.numel())
        return loss * share

    def zero_loss(self, model: nn.Module, role: str) -> Tensor:
        """See `PreferenceTrainer`."""
        return model(self.dummy_groups(), score=role).sum() * 0

    def _record(self, batch: PairBatch, scores: Tensor, accuracy: Tensor, margin: Tensor, pairs: int) -> None:
        store = self.metrics["train"]
        store.add("accuracy", accuracy, pairs)
        store.add("margin", margin, pairs)
        store.add("mean_reward", scores.mean(), scores.numel())
        store.add("min_reward", scores.min(), reduce="min")
        store.add("max_reward", scores.max(), reduce="max")
        if scores.numel() > 1:
            store.add("std_reward", scores.std(correction=0), scores.numel())

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """See `BaseTrainer`; then `calibrate`, where `normalizer` or `fit_temperature` ask for it.

        Raises:
            ValueError: `fit_temperature` without an eval_dataset; see `BaseTrainer` for others.
        """
        self._check_held_out(self.eval_dataset)
        result = super().train(*args, **kwargs)
        if self.args.normalizer != "none" or self.args.fit_temperature:
            self.calibrate()
        return result

    def begin_run(self) -> None:
        """See `BaseTrainer`; what was fitted to the scores before is not of those to come."""
        super().begin_run()
        for name in ("temperature", "moments"):
            self.shared.roles[self.reward_role].facts.pop(name, None)

    # Evaluation.

    def examine(self, rows: list[RankedGroup]) -> list[ScoredRow]:
        """Scores as they are, of an ensemble combined; neither tempered nor normalised."""
        groups = [group for row in rows for group in row.groups]

        def run(most: int | None) -> Tensor:
            found = combined(self.shared, groups, self.reward_role, most)
            return torch.stack([found.score.float(), found.spread.float()]).cpu()

        scores, spreads = self.forward_limit.run(run, groups)
        counts = [row.num_responses for row in rows]
        return [
            ScoredRow(s.tolist(), row.lengths, list(row.ranks), row.margin, tuple(d.tolist()))
            for row, s, d in zip(rows, scores.split(counts), spreads.split(counts), strict=True)
        ]

    def summarise(self, found: list[Any], prefix: str) -> dict[str, float]:
        """The report's numbers; the report itself is kept, and written beside the run's checkpoints."""
        self.last_report = reward_report([ScoredRow(*row) for row in found])
        return self.last_report.keep(self.args, prefix, self.state.global_step)

    def report(self, dataset: Any = None) -> RewardReport:
        """`evaluate`, and its report with the reliability table; of several datasets that of the last.

        Raises:
            ValueError: there is no dataset.
        """
        self.evaluate(dataset)
        assert self.last_report is not None
        return self.last_report

    def calibrate(self, dataset: Any = None) -> dict[str, Any]:
        """Fit what is saved with the role: the temperature and the normaliser's first moments.

        Args:
            dataset: held-out rows; None: `eval_dataset`, or without one (for the moments only) training rows.

        Returns:
            The role's facts.

        Raises:
            ValueError: a temperature is asked for and there are no held-out rows.
        """
        held_out: Any = self.eval_dataset if dataset is None else dataset
        if isinstance(held_out, dict):
            held_out = next(iter(held_out.values()))
        self._check_held_out(held_out)
        if held_out is None:
            held_out = [self.train_dataset[i] for i in range(min(len(self.train_dataset), _CALIBRATION_ROWS))]
        rows = [ScoredRow(*row) for row in self.examine_all(held_out)]
        facts = self.shared.roles[self.reward_role].facts
        if self.args.fit_temperature:
            margins = torch.tensor([row.scores[i] - row.scores[j] for row in rows for i, j in row.pairs()])
            found = fit_temperature(margins)
            if len(margins):
                facts["temperature"] = found
            if not len(margins) or found in TEMPERATURES:
                logger.warning(
                    "the temperature fitted on %d held-out pairs is %g, a bound or nothing: all of them are right, or "
                    "the scores know nothing of them; rewards are divided by it, so give other pairs, or "
                    "reward_function(temperature=1.0)",
                    len(margins),
                    found,
                )
        if self.args.normalizer != "none":
            moments = RunningMoments()
            moments.update([score / facts.get("temperature", 1.0) for row in rows for score in row.scores])
            facts["moments"] = moments.state_dict()
        return facts

    def _check_held_out(self, dataset: Any) -> None:
        if dataset is None and self.args.fit_temperature:
            raise ValueError("fit_temperature=True needs held-out pairs: pass eval_dataset")

    # The run.

    def card_facts(self) -> dict[str, Any]:
        """That it scores and does not write, and how well, by the last report."""
        facts: dict[str, Any] = {"pipeline_tag": "text-classification", "tags": ["reward-model"]}
        found = self.last_report
        if found is None or not found.n_pairs:
            return facts
        score = Score(found.accuracy, found.n_pairs, found.accuracy_low, found.accuracy_high)
        note = (
            f"Accuracy is the share of held-out pairs in the right order ({found.ties} ties count 1/2). Expected "
            f"calibration error {found.ece:.3f}, with the temperature {found.temperature:.2f} "
            f"{found.ece_tempered:.3f}; correlation of score and length {found.length_pearson:.2f}, within a prompt "
            f"{found.length_pearson_within:.2f}."
        )
        return {**facts, "after": score, "notes": [note]}

    def run_facts(self) -> dict[str, Any]:
        """See `BaseTrainer`."""
        names = ("loss_type", "ensemble_size", "center_rewards_coefficient")
        facts = {**super().run_facts(), **{name: getattr(self.args, name) for name in names}}
        return {**facts, "reward_roles": adapter_facts(self.shared, self.train_roles)}


__all__ = ["RewardConfig", "RewardTrainer"]
