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

from transformers import TrainerCallback

from hf_rlx.data.pair_encoding import RankedGroup
from hf_rlx.functional import ipo
from hf_rlx.trainers.checks import check_arguments
from hf_rlx.trainers.config import described, strict
from hf_rlx.trainers.pair_config import ReferencedConfig, check_number, refuse_arguments
from hf_rlx.trainers.pair_logps import Objective, Pairs
from hf_rlx.trainers.pair_watch import PairWatch
from hf_rlx.trainers.preference import PreferenceTrainer
from hf_rlx.trainers.references import ReferenceLogps

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

    def pair_objective(self, pairs: Pairs) -> Objective:
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

    def weight_of(self, row: RankedGroup) -> float:
        """Pairs of the row."""
        return float(row.num_pairs)

    def run_facts(self) -> dict[str, Any]:
        """See `BaseTrainer`."""
        settings = {"beta": self.args.beta, "normalize": self.args.normalize}
        return {**super().run_facts(), **settings}


__all__ = ["IPOConfig", "IPOTrainer"]
