"""Simple preference optimisation (Meng et al., 2405.14734): DPO without a reference, on log-probs per token.

    loss = -log sigmoid(beta (log p(chosen) / |chosen| - log p(rejected) / |rejected|) - gamma)

gamma, the margin that rewards should have, is given as `gamma_beta_ratio` = gamma / beta, as in the paper's
repository: beta 2.0 and ratio 0.5 make gamma 1.0. A gamma that is copied into a ratio, or the other way round, still
trains: with beta 0.1 and gamma 0.5, TRL's CPO defaults, the ratio is 5, a margin of 5 nats a token.

How this departs from the paper and from TRL 1.16 (`CPOTrainer` with loss_type="simpo"):
- the pair is one packed group, and there is no likelihood term unless asked for (`cpo_alpha`, 1.0 by default in TRL);
  it is a mean over pairs of log-probs per token;
- the loss is the mean over the pairs of the whole optimizer step and all processes; identical answers and ties leave
  it and are counted; ranked lists give all their pairs; cuts as in `DPOTrainer`.
A column `margin` is not read. Nothing holds the policy near where it started: watch logps/chosen_change, which is
since a row was first seen, and lower the learning rate where it falls (the paper's is 3e-7 to 1e-6 on all weights).

Metrics: see `hf_rlx.trainers.pair_logps`, without kl/chosen. Rewards are beta times log-probs per token;
nll_loss is minus the chosen answer's log-prob per token, in the loss by `cpo_alpha`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from hf_rlx.data.pair_encoding import RankedGroup
from hf_rlx.functional import simpo
from hf_rlx.trainers.checks import check_arguments
from hf_rlx.trainers.config import described, strict
from hf_rlx.trainers.pair_config import PairConfig, check_number, refuse_arguments
from hf_rlx.trainers.pair_logps import Objective, Pairs
from hf_rlx.trainers.pair_watch import PairWatch
from hf_rlx.trainers.preference import PreferenceTrainer

_ADVICE = "Lower learning_rate or gamma_beta_ratio, or train with ORPO, or with DPO and rpo_alpha"


@strict
@dataclass
class SimPOConfig(PairConfig):
    """Configuration of `SimPOTrainer`; defaults are those that the paper's repository recommends."""

    beta: float = described(2.0, "Reward per nat of log-prob per token; 2.0 to 10.")
    gamma_beta_ratio: float = described(0.5, "The margin gamma, in nats per token: gamma / beta. 0 to 1.")
    simpo_gamma: float | None = described(
        None, "The margin gamma itself, in rewards, as TRL names it; in place of gamma_beta_ratio."
    )
    label_smoothing: float = described(0.0, "Share of labels that are taken to be flipped, in [0, 0.5].")
    cpo_alpha: float = described(0.0, "Weight of the chosen answer's negative log-prob per token (CPO-SimPO).")
    loss_type: str = described("simpo", "Not carried: this is SimPO; DPOTrainer and IPOTrainer have the others")
    alpha: float = described(0.0, "Not carried: AlphaPO is another reward; leave alpha out")
    generate_during_eval: bool = described(False, "Not carried: trainer.shared.generate(...) samples")
    is_encoder_decoder: bool | None = described(None, "Not carried: models are decoders; leave it out")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta", self.beta, above=0)
        check_number("gamma_beta_ratio", self.gamma_beta_ratio, at_least=0)
        check_number("cpo_alpha", self.cpo_alpha, at_least=0)
        check_number("label_smoothing", self.label_smoothing, at_least=0)
        if self.label_smoothing > 0.5:
            raise ValueError(f"label_smoothing must be at most 0.5, got {self.label_smoothing!r}")
        if self.simpo_gamma is not None:
            check_number("simpo_gamma", self.simpo_gamma, at_least=0)

    @property
    def target_margin(self) -> float:
        """gamma, in rewards."""
        return self.gamma_beta_ratio * self.beta if self.simpo_gamma is None else self.simpo_gamma


class SimPOTrainer(PreferenceTrainer):
    """Trains the policy on pairs, without a reference.

    Args:
        model: see `BaseTrainer`; with a `peft_config`, a `PeftModel` or an adapter's folder the adapter trains.
        args, train_dataset, eval_dataset, processing_class, callbacks, optimizers, peft_config, quantization_config,
            optimizer_cls_and_kwargs: in the order of TRL's `CPOTrainer`; see `PreferenceTrainer`.
        data_collator, model_init, preprocess_logits_for_metrics, compute_metrics: not carried; refused.

    Example:
        >>> SimPOTrainer("tiny", SimPOConfig("runs/simpo"), train_dataset=pairs, peft_config=LoraConfig()).train()
    """

    args: SimPOConfig
    method = "simpo"

    def __init__(
        self,
        model: Any,
        args: SimPOConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Any = None,
        peft_config: Any = None,
        compute_metrics: Any = None,
        quantization_config: Any = None,
        optimizer_cls_and_kwargs: Any = None,
    ) -> None:
        refuse_arguments(
            data_collator=data_collator,
            model_init=model_init,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            compute_metrics=compute_metrics,
        )
        args = SimPOConfig("simpo_output") if args is None else args
        check_arguments(model, args, SimPOConfig, processing_class, peft_config)
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
        """The logistic loss of the margin beyond gamma, and what is logged of it."""
        args = self.args
        chosen, rejected = pairs.means()
        out = simpo(chosen, rejected, args.beta, args.target_margin, args.label_smoothing)
        rewards = (out.chosen_reward, out.rejected_reward)
        if not args.cpo_alpha:
            return Objective(out.loss, pairs.table(out.pair_loss, *rewards, nll_loss=-chosen))
        pair_loss = out.pair_loss - args.cpo_alpha * chosen.detach()
        return Objective(out.loss - args.cpo_alpha * chosen.mean(), pairs.table(pair_loss, *rewards, nll_loss=-chosen))

    def weight_of(self, row: RankedGroup) -> float:
        """Pairs of the row."""
        return float(row.num_pairs)

    def run_facts(self) -> dict[str, Any]:
        """See `BaseTrainer`."""
        names = ("beta", "target_margin", "label_smoothing", "cpo_alpha")
        return {**super().run_facts(), **{name: getattr(self.args, name) for name in names}}


__all__ = ["SimPOConfig", "SimPOTrainer"]
