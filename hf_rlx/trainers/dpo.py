"""Direct preference optimisation (Rafailov et al., 2305.18290).

    h = (log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected))
    loss = -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)                         e: label_smoothing

How this departs from the paper and from TRL 1.16's DPOTrainer (reasons in `hf_rlx.trainers.differences`):
- the pair is one packed group: the prompt is computed once, chosen and rejected beside it;
- the reference is a role of the policy's own base: adapters off, or a frozen copy of what the policy starts as;
- label smoothing acts in the sigmoid loss (cDPO), which TRL ignores there; in "robust" as in TRL;
- the loss is the mean over the pairs of the whole optimizer step and all processes; identical answers and ties leave
  it and are counted; the likelihood term (`rpo_alpha`, "sft") is a mean over pairs of log-probs per token;
- a longer row is cut so that each answer keeps its share and its EOS, and none is dropped;
- ranked lists give all their pairs, in one forward.
A column `margin` is not read.

Metrics: see `hf_rlx.trainers.pair_logps`. rewards/chosen and rewards/rejected are beta times the log-ratios to the
reference, also for losses that use them per token. Not logged: logits and token accuracies, as no logits are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from hf_rlx.data.pair_encoding import RankedGroup
from hf_rlx.functional import dpo_hinge, dpo_robust, dpo_sigmoid, ipo
from hf_rlx.trainers.checks import check_arguments
from hf_rlx.trainers.config import described, strict
from hf_rlx.trainers.pair_config import ReferencedConfig, check_number, refuse_arguments
from hf_rlx.trainers.pair_logps import Objective, Pairs
from hf_rlx.trainers.pair_watch import PairWatch
from hf_rlx.trainers.preference import PreferenceTrainer
from hf_rlx.trainers.references import ReferenceLogps

LOSSES = ("sigmoid", "hinge", "robust", "ipo", "sigmoid_norm", "sft")
_ADVICE = (
    "Set rpo_alpha=1.0 (a likelihood term on chosen answers), lower learning_rate, raise beta, or train with ORPO"
)


@strict
@dataclass
class DPOConfig(ReferencedConfig):
    """Configuration of `DPOTrainer`; names and defaults are TRL 1.16's."""

    beta: float = described(0.1, "Reward per nat of log-ratio; the larger, the nearer the policy stays.")
    loss_type: list[str] | str = described(
        ["sigmoid"],
        'One or several of "sigmoid" (DPO), "hinge" (SLiC), "robust" (unbiased under flipped labels), "ipo" (means '
        'per token), "sigmoid_norm" (DPO on means per token), "sft" (likelihood of the chosen answer).',
    )
    loss_weights: list[float] | None = described(None, "One weight for each of loss_type; None: 1 each.")
    label_smoothing: float = described(
        0.0, 'Share of labels that are taken to be flipped: in "sigmoid" and "sigmoid_norm" (cDPO) and in "robust".'
    )
    rpo_alpha: float | None = described(
        None, "Weight of the chosen answer's negative log-prob per token, added to the loss (2404.19733); None: 0."
    )
    ld_alpha: float | None = described(
        None, "Weight of an answer's tokens behind the length of the shorter one (LD-DPO), in [0, 1]; None: 1."
    )
    f_divergence_type: str = described(
        "reverse_kl", "Not carried: the losses here are those of the reverse KL; leave f_divergence_type out"
    )
    f_alpha_divergence_coef: float = described(
        0.5, "Not carried: it belongs to f_divergence_type; leave f_alpha_divergence_coef out"
    )
    use_weighting: bool = described(False, "Not carried: leave use_weighting out; loss_type='robust' is for noise")
    discopop_tau: float = described(0.05, "Not carried: it belongs to loss_type='discopop'; leave discopop_tau out")

    def __post_init__(self) -> None:
        super().__post_init__()
        losses = [self.loss_type] if isinstance(self.loss_type, str) else list(self.loss_type)
        unknown = [name for name in losses if name not in LOSSES]
        if unknown or not losses:
            raise ValueError(
                f"loss_type must be of {', '.join(LOSSES)}; got {unknown or losses!r}. Of TRL's others none is "
                'carried; nearest are "robust" for noisy labels and rpo_alpha against falling chosen log-probs'
            )
        self.loss_type = losses
        if self.loss_weights is not None and len(self.loss_weights) != len(losses):
            raise ValueError(f"loss_weights has {len(self.loss_weights)} entries for {len(losses)} of loss_type")
        for weight in self.loss_weights or []:
            check_number("loss_weights", weight)
        check_number("beta", self.beta, above=0)
        check_number("label_smoothing", self.label_smoothing, at_least=0)
        if self.label_smoothing > 0.5 or (self.label_smoothing == 0.5 and "robust" in losses):
            raise ValueError(f"label_smoothing must be at most 0.5 (robust: below), got {self.label_smoothing!r}")
        unread = set(losses) - {"sigmoid", "sigmoid_norm", "robust"}
        if self.label_smoothing and unread == set(losses):
            raise ValueError(f"label_smoothing has no part in loss_type={losses}; use sigmoid or robust, or set it 0")
        if self.rpo_alpha is not None:
            check_number("rpo_alpha", self.rpo_alpha, at_least=0)
        if self.ld_alpha is not None:
            check_number("ld_alpha", self.ld_alpha, at_least=0)
            if self.ld_alpha > 1:
                raise ValueError(f"ld_alpha must be at most 1, got {self.ld_alpha!r}")

    def weighted_losses(self) -> list[tuple[str, float]]:
        """Name and weight of every term of the loss."""
        losses: Sequence[str] = [self.loss_type] if isinstance(self.loss_type, str) else self.loss_type
        terms = list(zip(losses, self.loss_weights or [1.0] * len(losses), strict=True))
        return [*terms, ("sft", self.rpo_alpha)] if self.rpo_alpha else terms


class DPOTrainer(PreferenceTrainer):
    """Trains the policy on pairs, held near a reference.

    Args:
        model: see `BaseTrainer`; with a `peft_config`, a `PeftModel` or an adapter's folder the adapter trains.
        ref_model: None: the policy as it starts. Otherwise see `hf_rlx.trainers.references`.
        args, train_dataset, eval_dataset, processing_class, callbacks, optimizers, quantization_config, peft_config,
            optimizer_cls_and_kwargs: TRL's, see `PreferenceTrainer`.
        data_collator, compute_metrics, preprocess_logits_for_metrics: not carried; refused.

    Example:
        >>> trainer = DPOTrainer("tiny", args=DPOConfig("runs/dpo"), train_dataset=pairs, peft_config=LoraConfig())
        >>> trainer.train()
    """

    args: DPOConfig
    method = "dpo"

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: DPOConfig | None = None,
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
        args = DPOConfig("dpo_output") if args is None else args
        check_arguments(model, args, DPOConfig, processing_class, peft_config)
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
        """See `dpo_objective`."""
        return dpo_objective(self.args, pairs)

    def weight_of(self, row: RankedGroup) -> float:
        """Pairs of the row."""
        return float(row.num_pairs)

    def run_facts(self) -> dict[str, Any]:
        """See `BaseTrainer`."""
        names = ("beta", "label_smoothing", "ld_alpha")
        settings = {name: getattr(self.args, name) for name in names}
        settings["losses"] = [list(term) for term in self.args.weighted_losses()]
        return {**super().run_facts(), **settings}


def dpo_objective(args: DPOConfig, pairs: Pairs) -> Objective:
    """The weighted sum of the losses of `loss_type` over n pairs, and what is logged of it."""
    chosen, rejected = pairs.sums(ld_alpha=args.ld_alpha)
    assert pairs.reference is not None
    ref_chosen, ref_rejected = pairs.sums(pairs.reference, ld_alpha=args.ld_alpha)
    m, n = (length.clamp(min=1) for length in pairs.lengths())
    policy_and_reference = (chosen, rejected, ref_chosen, ref_rejected)
    terms: list[tuple[Tensor, Tensor, float]] = []
    for name, weight in args.weighted_losses():
        if name == "sft":
            nll = -pairs.means()[0]
            terms.append((nll.mean(), nll.detach(), weight))
            continue
        if name == "sigmoid":
            out = dpo_sigmoid(*policy_and_reference, args.beta, args.label_smoothing)
        elif name == "sigmoid_norm":
            per_token = (chosen / m, rejected / n, ref_chosen / m, ref_rejected / n)
            out = dpo_sigmoid(*per_token, args.beta, args.label_smoothing)
        elif name == "robust":
            out = dpo_robust(*policy_and_reference, args.beta, args.label_smoothing)
        elif name == "hinge":
            out = dpo_hinge(*policy_and_reference, args.beta)
        else:
            out = ipo(*policy_and_reference, m, n, args.beta)
        terms.append((out.loss, out.pair_loss, weight))
    loss = torch.stack([weight * mean for mean, _, weight in terms]).sum()
    pair_loss = torch.stack([weight * each for _, each, weight in terms]).sum(0)
    rewards = (args.beta * (chosen - ref_chosen), args.beta * (rejected - ref_rejected))
    more = {"nll_loss": -pairs.means()[0]} if any(name == "sft" for name, _ in args.weighted_losses()) else {}
    return Objective(loss, pairs.table(pair_loss, *rewards, **more))


__all__ = ["LOSSES", "DPOConfig", "DPOTrainer", "dpo_objective"]
