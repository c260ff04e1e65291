"""Identity preference optimisation (Azar et al., 2310.12036).

    h = (log p(chosen) - log p_ref(chosen)) / |chosen| - (log p(rejected) - log p_ref(rejected)) / |rejected|
    loss = (h - 1 / (2 beta))^2

The margin has a target, where DPO's grows without end on pairs that are always right.

How this departs from the paper and from TRL 1.16 (`DPOTrainer` with loss_type="ipo"):
- log-ratios are per-token means, as TRL has them and the paper's authors confirmed to it; the paper's text, and the
  DPO repository, read as sums: `normalize=False`;
- beta then means another thing: the target 1 / (2 beta) is nats *per token*, 5 at TRL's 0.1, out of reach, so the
  gradient hardly changes over training; scan 0.5 to 1. With sums 0.1 is usual;
- the loss is the mean over the pairs of the whole optimizer step and all processes; identical answers and ties leave
  it and are counted; ranked lists give all their pairs; cuts and reference as in `DPOTrainer`.

Metrics: see `hf_rlx.trainers.pair_logps`. Rewards are beta times the log-ratios that the loss has: per token, or sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from hf_rlx.data.pairs import RankedGroup
from hf_rlx.functional import ipo
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.checks import check_arguments
from hf_rlx.trainers.config import BaseConfig, described, strict
from hf_rlx.trainers.pair_batches import PairBatch
from hf_rlx.trainers.pair_config import ReferencedConfig, check_number, refuse_arguments
from hf_rlx.trainers.pair_logps import (
    Objective,
    Pairs,
    examine_pairs,
    no_loss,
    scored_pairs,
    summarise_pairs,
    train_on_pairs,
)
from hf_rlx.trainers.pair_watch import PairWatch
from hf_rlx.trainers.preference import PreferenceTrainer
from hf_rlx.trainers.reference_sync import SyncReference
from hf_rlx.trainers.references import ReferenceLogps, prepare_reference

_ADVICE = "Lower learning_rate, raise beta (a smaller target), or train with ORPO or with DPO and rpo_alpha"


@strict
@dataclass
class IPOConfig(ReferencedConfig):
    """Configuration of `IPOTrainer`; names and defaults are those of TRL's DPO."""

    beta: float = described(
        0.1,
        "The margin's target is 1 / (2 beta) nats: per token, where 0.5 to 1 is in reach; normalize=False: summed.",
    )
    normalize: bool = described(True, "Per-token means of the log-ratios; False: sums.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta", self.beta, above=0)


class IPOTrainer(PreferenceTrainer):
    """Trains the policy on pairs towards a margin over the reference.

    Args:
        as in `DPOTrainer`; args: an `IPOConfig`.

    Example:
        >>> args = IPOConfig("runs/ipo", beta=0.5)
        >>> IPOTrainer("tiny", args=args, train_dataset=pairs, peft_config=LoraConfig()).train()
    """

    args: IPOConfig
    method = "ipo"

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: IPOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None,
    ) -> None:
        refuse_arguments(
            data_collator=data_collator,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        args = IPOConfig("ipo_output") if args is None else args
        check_arguments(model, args, IPOConfig, processing_class, peft_config)
        self.reference = ReferenceLogps(self, ref_model)
        self.watch = PairWatch(_ADVICE)
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
        self.add_callback(self.watch)
        if args.sync_ref_model:
            self.add_callback(SyncReference(self.shared, args.ref_model_mixup_alpha, args.ref_model_sync_steps))

    def prepare_roles(self, shared: SharedModel, args: BaseConfig) -> None:
        """The reference."""
        assert isinstance(args, IPOConfig)
        prepare_reference(shared, self.reference.ref_model, args)

    # The loss.

    def objective(self, pairs: Pairs) -> Objective:
        """The squared distance to the target, and what is logged of it."""
        assert pairs.reference is not None
        out = ipo(
            *pairs.sums(),
            *pairs.sums(pairs.reference),
            *pairs.lengths(),
            beta=self.args.beta,
            normalize=self.args.normalize,
        )
        return Objective(out.loss, pairs.table(out.pair_loss, out.chosen_reward, out.rejected_reward))

    def pairs(self, model: nn.Module | None, rows: list[RankedGroup]) -> Pairs:
        """The pairs of `rows` with log-probs of policy and reference; without gradient where `model` is None."""
        return scored_pairs(self, model, rows, self.reference)

    def pair_loss(self, model: nn.Module, batch: PairBatch, role: str) -> Tensor:
        """See `PreferenceTrainer`."""
        return train_on_pairs(self, model, batch)

    def zero_loss(self, model: nn.Module, role: str) -> Tensor:
        """See `PreferenceTrainer`."""
        return no_loss(model, self.dummy_groups())

    def weight_of(self, row: RankedGroup) -> float:
        """Pairs of the row."""
        return float(row.num_pairs)

    # Evaluation.

    def examine(self, rows: list[RankedGroup]) -> list[Any]:
        """See `PreferenceTrainer`."""
        return examine_pairs(self, rows)

    def summarise(self, found: list[Any], prefix: str) -> dict[str, float]:
        """See `PreferenceTrainer`."""
        return summarise_pairs(self, found, prefix)

    def examine_all(self, dataset: Any) -> list[Any]:
        """See `PreferenceTrainer`; with the reference's log-probs at hand where they are precomputed."""
        if self.args.precompute_ref_log_probs:
            self.reference.precompute(dataset)
        return super().examine_all(dataset)

    # The run.

    def get_train_dataloader(self) -> Any:
        """See `PreferenceTrainer`; the reference's log-probs come first where they are precomputed."""
        if self.args.precompute_ref_log_probs:
            self.reference.precompute(self.train_dataset)
        return super().get_train_dataloader()

    def begin_run(self) -> None:
        """See `BaseTrainer`."""
        super().begin_run()
        self.watch.reset()

    def run_state(self) -> dict[str, Any]:
        """See `BaseTrainer`."""
        return {**super().run_state(), "watch": self.watch.state_dict()}

    def load_run_state(self, state: dict[str, Any]) -> None:
        """See `BaseTrainer`."""
        super().load_run_state(state)
        self.watch.load_state_dict(state["watch"])

    def run_facts(self) -> dict[str, Any]:
        """See `BaseTrainer`."""
        settings = {"beta": self.args.beta, "normalize": self.args.normalize}
        return {**super().run_facts(), **self.reference.run_facts(), **settings}


__all__ = ["IPOConfig", "IPOTrainer"]
