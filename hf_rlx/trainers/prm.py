"""Process reward models from step labels (Lightman et al. 2023, 2305.20050; Math-Shepherd, 2312.08935).

How this departs from the papers and from TRL's PRMTrainer, which TRL 1.16 no longer has:
- the model is an adapter and a scalar head on the policy's own base (role `step_reward`), whose score is the log-odds
  that a step is right; TRL trains a token classifier with two classes, the same loss;
- prompt and solution are one packed row, solutions of one prompt in a micro-batch share it;
- labels may be shares of roll-outs, PRM800K's -1, 0 and 1, or not known;
- the loss is the mean over the labelled steps of the whole optimizer step and all processes;
- a long prompt loses its beginning, not the solution its end.

| metric (evaluation: see `prm_report.py`) | unit | what it is |
|---|---|---|
| loss | nats | mean binary cross-entropy over the labelled steps |
| accuracy | share | steps told right from wrong at probability 1/2 |
| mean_probability_good, mean_probability_bad | share | that steps are right, of those that are and are not |
| steps | count | labelled steps that were trained on |
| rows/without_pair | count | rows without a label, or whose labelled steps were all cut off |
| rows/cut, rows/special_tokens_neutralised | count | rows cut to a length; special tokens made plain text |
| num_tokens, step_time, update/tokens_per_second, time/<stage> | tokens, s, 1/s, share | throughput |
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_rlx.cards.facts import Score
from hf_rlx.data.pair_encoding import RankedGroup
from hf_rlx.data.steps import StepGroup, check_step_rows, encode_step_row
from hf_rlx.functional import prm_soft_loss
from hf_rlx.models.dropout import disable_dropout
from hf_rlx.models.roles import STEP_REWARD
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.checks import check_arguments
from hf_rlx.trainers.config import BaseConfig, described, strict
from hf_rlx.trainers.pair_batches import PairBatch
from hf_rlx.trainers.preference import PreferenceConfig, PreferenceTrainer
from hf_rlx.trainers.preflight import before_loading, data_checks
from hf_rlx.trainers.prm_report import ScoredSteps, StepReport, step_report
from hf_rlx.trainers.reward_model import adapter_facts, add_reward_roles, step_reward_base
from hf_rlx.types import Group

logger = logging.getLogger(__name__)

_NEUTRAL = {"good": 1.0, "bad": 0.0, "drop": math.nan}


@strict
@dataclass
class PRMConfig(PreferenceConfig):
    """Configuration of `PRMTrainer`; names are those of TRL's."""

    learning_rate: float = described(1e-4, "Step size; made for adapters, about ten times that of full weights.")
    max_completion_length: int | None = described(
        None, "Tokens of a solution; steps that end behind it are left out. None: what max_length leaves."
    )
    step_separator: str = described("\n", "Text behind every step; a step's score is read at its last token.")
    train_on_last_step_only: bool = described(
        False, "Learn the label of a solution's last step only, as an outcome reward model does; evaluation takes all."
    )
    ratings: bool = described(False, "Labels are PRM800K's -1 (bad), 0 (neutral) and 1 (good), not 0 to 1.")
    neutral: Literal["good", "bad", "drop"] = described("good", "What a rating of 0 counts as (Lightman: good).")
    first_error_only: bool | None = described(
        None,
        "Leave out the steps behind a solution's first wrong one (Lightman et al.), whose labels say little. None: "
        "with ratings only; of labels that roll-outs gave none is left out.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.step_separator, str) or not self.step_separator:
            raise ValueError(
                f'step_separator must be some text, e.g. "\\n", got {self.step_separator!r}: a completion is split '
                "there, and a step's score is read at its last token"
            )
        if self.neutral not in _NEUTRAL:
            raise ValueError(f"neutral must be one of {tuple(_NEUTRAL)}, got {self.neutral!r}")
        most = self.max_completion_length
        if most is not None and (type(most) is not int or most < 1):
            raise ValueError(f"max_completion_length must be a whole number of at least 1 or None, got {most!r}")

    @property
    def up_to_first_error(self) -> bool:
        """Whether labels behind a solution's first wrong step are left out."""
        return self.ratings if self.first_error_only is None else self.first_error_only


class PRMTrainer(PreferenceTrainer):
    """Trains a process reward model: the role `step_reward` on a `SharedModel`.

    Args:
        model: a `SharedModel` or `PeftModel`, the folder of one, or a causal language model (name or in memory) with
            a `peft_config`.
        args, train_dataset, eval_dataset, processing_class, callbacks, optimizers, quantization_config: see
            `PreferenceTrainer`; rows as in `hf_rlx.data.steps`.
        data_collator, model_init, compute_metrics, preprocess_logits_for_metrics: of TRL; refused.
        peft_config: of the step-reward adapter; None: like the policy's, from its weights.

    Example:
        >>> model = SharedModel.from_pretrained("tiny", peft_config=LoraConfig(target_modules="all-linear"))
        >>> PRMTrainer(model, PRMConfig("runs/prm"), train_dataset=solutions, eval_dataset=held_out).train()
        >>> PPOTrainer(model, verifier, PPOConfig("runs/ppo"), step_reward_funcs=model.step_reward_function(), ...)
    """

    args: PRMConfig
    method = "prm"
    train_roles = (STEP_REWARD,)

    def __init__(
        self,
        model: Any,
        args: PRMConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Any = None,
        compute_metrics: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Any = None,
        peft_config: Any = None,
        quantization_config: Any = None,
    ) -> None:
        for name, value, instead in (
            ("data_collator", data_collator, "rows become packed groups; change the dataset instead"),
            ("model_init", model_init, "pass the model, or its name, as model="),
            ("compute_metrics", compute_metrics, "trainer.report() has accuracies, calibration and first errors"),
            ("preprocess_logits_for_metrics", preprocess_logits_for_metrics, "scores are read by trainer.report()"),
        ):
            if value is not None:
                raise ValueError(f"{name} is not carried by hf_rlx: {instead}")
        args = PRMConfig("prm_output") if args is None else args
        check_arguments(model, args, PRMConfig, processing_class, peft_config)
        self._config, self._peft_config = args, peft_config
        self.last_report: StepReport | None = None
        before_loading(self, args, peft_config, *data_checks(self.check_dataset, train_dataset, eval_dataset))
        super().__init__(
            step_reward_base(model, args, quantization_config, peft_config),
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )

    def prepare_roles(self, shared: SharedModel, args: BaseConfig) -> None:
        """The role, and how solutions are tokenized."""
        assert isinstance(args, PRMConfig)
        add_reward_roles(shared, [STEP_REWARD], self._peft_config)
        if args.disable_dropout:
            disable_dropout(shared)
        shared.roles[STEP_REWARD].facts.update(
            step_separator=args.step_separator,
            max_length=args.longest_row(shared.context_length),  # as `encode` cuts rows
            max_completion_length=args.max_completion_length,
            chat_template_kwargs=args.chat_template_kwargs,
            special_tokens_in_messages=args.special_tokens_in_messages,
            id2label={"0": "bad", "1": "good"},
        )

    # Data.

    def check_dataset(self, dataset: Any, name: str) -> None:
        """See `PreferenceTrainer`."""
        inside = check_step_rows(dataset, name, self._config.step_separator, self._config.ratings)
        if inside:
            logger.warning(
                "%s: %d steps have the step_separator %r inside; scoring a completion takes each for several steps. "
                "Choose a separator that stands between steps only, or split them",
                name,
                inside,
                self._config.step_separator,
            )

    def encode_row(self, row: dict[str, Any], index: int, **options: Any) -> RankedGroup:
        """See `PreferenceTrainer`."""
        args = self.args
        return encode_step_row(
            row,
            index,
            self.tokenizer,
            separator=args.step_separator,
            ratings=args.ratings,
            neutral=_NEUTRAL[args.neutral],
            max_completion_length=args.max_completion_length,
            **options,
        )

    def targets(self, row: RankedGroup) -> list[float]:
        """For every step of a row that was not cut off the label to learn, 0 to 1; NaN: none."""
        assert isinstance(row, StepGroup)
        labels = list(row.labels)
        if self.args.train_on_last_step_only:
            labels = [math.nan] * (len(labels) - 1) + labels[-1:]
        if self.args.up_to_first_error:
            wrong = next((place for place, label in enumerate(labels) if label <= 0.5), len(labels))
            labels[wrong + 1 :] = [math.nan] * len(labels[wrong + 1 :])
        return labels[: len(row.ends)]

    def weight_of(self, row: RankedGroup) -> float:
        """Steps that are trained on."""
        return float(sum(not math.isnan(label) for label in self.targets(row)))

    # Training and evaluation.

    def pair_loss(self, model: nn.Module, batch: PairBatch, role: str) -> Tensor:
        """The sum of the steps' cross-entropies, over the optimizer step's labelled steps."""
        groups, rows = _together(batch.rows)
        # (end, label) of each step that is trained on
        steps = [[s for s in zip(row.ends, self.targets(row), strict=True) if not math.isnan(s[1])] for row in rows]
        scores: Tensor = model(groups, score=role, ends=[[end for end, _ in row] for row in steps])
        labels = torch.tensor([label for row in steps for _, label in row], device=scores.device)
        out = prm_soft_loss(scores[None], labels[None])
        store, chances = self.metrics["train"], scores.detach().sigmoid()
        store.add("accuracy", out.accuracy, out.n_steps)
        store.add("steps", out.n_steps, reduce="sum")
        for name, which in (("good", labels > 0.5), ("bad", labels <= 0.5)):
            if bool(which.any()):
                store.add(f"mean_probability_{name}", chances[which].mean(), int(which.sum()))
        return out.loss * (out.n_steps / batch.normalizer)

    def zero_loss(self, model: nn.Module, role: str) -> Tensor:
        """See `PreferenceTrainer`."""
        return model(self.dummy_groups(), score=role).sum() * 0

    def examine(self, rows: list[RankedGroup]) -> list[ScoredSteps]:
        """Log-odds and labels of every step that was not cut off."""
        left = [row for row in rows if isinstance(row, StepGroup) and row.ends]
        scores: list[float] = []
        if left:
            groups, ends = [row.groups[0] for row in left], [row.ends for row in left]
            found = self.forward_limit.run(lambda most: self.shared.score(groups, STEP_REWARD, most, ends), groups)
            scores = found.float().tolist()
        one_by_one = iter(scores)
        result = []
        for row in rows:
            assert isinstance(row, StepGroup)
            whole = len(row.ends) == len(row.labels)
            result.append(ScoredSteps([next(one_by_one) for _ in row.ends], list(row.labels[: len(row.ends)]), whole))
        return result

    def summarise(self, found: list[Any], prefix: str) -> dict[str, float]:
        """The report's numbers; the report itself is kept, and written beside the run's checkpoints."""
        self.last_report = step_report([ScoredSteps(*row) for row in found])
        return self.last_report.keep(self.args, prefix, self.state.global_step)

    def report(self, dataset: Any = None) -> StepReport:
        """`evaluate`, and its report with the reliability table; of several datasets that of the last.

        Raises:
            ValueError: there is no dataset.
        """
        self.evaluate(dataset)
        assert self.last_report is not None
        return self.last_report

    # The run.

    def card_facts(self) -> dict[str, Any]:
        """That it scores steps and does not write, and how well, by the last report."""
        facts: dict[str, Any] = {"pipeline_tag": "token-classification", "tags": ["reward-model", "prm"]}
        found = self.last_report
        if found is None or not found.n_steps:
            return facts
        score = Score(found.accuracy, found.n_steps, found.accuracy_low, found.accuracy_high)
        note = (
            f"Accuracy is the share of {found.n_steps} held-out steps told right from wrong; always saying the more "
            f"frequent label would get {found.accuracy_majority:.3f}. Of the {found.n_good} good steps "
            f"{_share(found.accuracy_good)} are told right, of the {found.n_bad} bad ones "
            f"{_share(found.accuracy_bad)}. Expected calibration error {found.ece:.3f}; first wrong step of a "
            f"solution found: F1 {_share(found.first_error_f1)}."
        )
        return {**facts, "after": score, "notes": [note]}

    def run_facts(self) -> dict[str, Any]:
        """See `BaseTrainer`."""
        names = ("step_separator", "max_completion_length", "train_on_last_step_only", "ratings", "neutral")
        facts = {**super().run_facts(), **{name: getattr(self.args, name) for name in names}}
        facts["first_error_only"] = self.args.up_to_first_error
        return {**facts, "reward_roles": adapter_facts(self.shared, self.train_roles)}


def _share(value: float) -> str:
    return "none" if math.isnan(value) else f"{value:.3f}"


def _together(rows: list[RankedGroup]) -> tuple[list[Group], list[StepGroup]]:
    """Groups of the solutions that have a prompt in common, and the rows in the order of their responses."""
    by_prompt: dict[tuple[int, ...], list[StepGroup]] = {}
    for row in rows:
        assert isinstance(row, StepGroup)
        by_prompt.setdefault(tuple(row.groups[0].prompt_ids.tolist()), []).append(row)
    groups = [
        Group(alike[0].groups[0].prompt_ids, tuple(row.groups[0].response_ids[0] for row in alike))
        for alike in by_prompt.values()
    ]
    return groups, [row for alike in by_prompt.values() for row in alike]


__all__ = ["PRMConfig", "PRMTrainer"]
