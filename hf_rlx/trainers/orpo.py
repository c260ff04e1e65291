"""Odds ratio preference optimisation (Hong et al., 2403.07691): fine-tuning and preference in one stage.

    a, b = log-prob per token of the chosen and the rejected answer;  odds(x) = e^x / (1 - e^x)
    loss = nll(chosen) - beta log sigmoid(log(odds(a) / odds(b)))                        beta: the paper's lambda

How this departs from the paper and from TRL 1.16 (`trl.experimental.orpo`):
- the likelihood term is of the answer alone, per token and then the mean over pairs, so that beta means the same
  whatever the prompt's length; `nll_on_prompt=True` adds the prompt's tokens, as TRL and the paper's repository do
  (each prompt is then computed once an answer);
- an answer of probability 1 has infinite odds: log-probs per token are held at -1e-7, where others give NaN;
- the loss is the mean over the pairs of the whole optimizer step and all processes; identical answers and ties leave
  it and are counted; ranked lists give all their pairs; cuts as in `DPOTrainer`.
A column `margin` is not read.

Metrics: see `hf_rlx.trainers.pair_logps`, without kl/chosen; logps/chosen_change is since a row was first seen.
Rewards are beta times log-probs per token, as TRL has them.

| metric | unit | what it is |
|---|---|---|
| nll_loss | nats | the likelihood term |
| log_odds_ratio | nats | log sigmoid of the log odds ratio, without beta (TRL's name) |
| log_odds_chosen | nats | the log odds ratio |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_rlx.data.pair_encoding import RankedGroup
from hf_rlx.functional import orpo
from hf_rlx.functional.masked import masked_mean
from hf_rlx.trainers.checks import check_arguments
from hf_rlx.trainers.config import described, strict
from hf_rlx.trainers.pair_config import PairConfig, check_number, refuse_arguments
from hf_rlx.trainers.pair_logps import Objective, Pairs, scored
from hf_rlx.trainers.pair_watch import PairWatch
from hf_rlx.trainers.preference import PreferenceTrainer
from hf_rlx.types import Group

_ADVICE = "Lower beta, so that the likelihood term weighs more, or learning_rate"


@strict
@dataclass
class ORPOConfig(PairConfig):
    """Configuration of `ORPOTrainer`; names and defaults are TRL 1.16's."""

    beta: float = described(0.1, "Weight of the odds-ratio term; the paper's lambda.")
    nll_on_prompt: bool = described(False, "Also the prompt's tokens in the likelihood term.")
    generate_during_eval: bool = described(False, "Not carried: trainer.shared.generate(...) samples")
    padding_value: int | None = described(None, "No effect: packed rows have no padding.")
    is_encoder_decoder: bool | None = described(None, "Not carried: models are decoders; leave it out")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta", self.beta, at_least=0)


class ORPOTrainer(PreferenceTrainer):
    """Trains the policy to give chosen answers, and less so rejected ones, without a reference.

    Args:
        model: see `BaseTrainer`; a base model will do, there is no stage before. With a `peft_config`, a `PeftModel`
            or an adapter's folder the adapter trains.
        args, train_dataset, eval_dataset, processing_class, callbacks, optimizers, peft_config, quantization_config,
            optimizer_cls_and_kwargs: in the order of TRL's; see `PreferenceTrainer`.
        data_collator, model_init, preprocess_logits_for_metrics, compute_metrics: not carried; refused.

    Example:
        >>> ORPOTrainer("tiny", ORPOConfig("runs/orpo"), train_dataset=pairs, peft_config=LoraConfig()).train()
    """

    args: ORPOConfig
    method = "orpo"

    def __init__(
        self,
        model: Any,
        args: ORPOConfig | None = None,
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
        args = ORPOConfig("orpo_output") if args is None else args
        check_arguments(model, args, ORPOConfig, processing_class, peft_config)
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
        """Likelihood and odds ratio, and what is logged of them."""
        beta = self.args.beta
        chosen, rejected = pairs.means()
        nll = -chosen
        if pairs.prompts is not None:
            both = (pairs.mask | pairs.prompts)[pairs.better]
            nll = -masked_mean(pairs.logps[pairs.better], both, dim=1)
        out = orpo(chosen, rejected, nll, beta)
        more = {
            "nll_loss": nll,
            "log_odds_ratio": -out.odds_ratio_loss,
            "log_odds_chosen": out.log_odds_ratio,
        }
        pair_loss = nll.detach() + beta * out.odds_ratio_loss
        return Objective(out.loss, pairs.table(pair_loss, beta * chosen, beta * rejected, **more))

    def pairs(self, model: nn.Module | None, rows: list[RankedGroup]) -> Pairs:
        """See `PreferenceTrainer`; with `nll_on_prompt` the prompts are scored too."""
        if not self.args.nll_on_prompt:
            return super().pairs(model, rows)
        given = [group for row in rows for group in row.groups]
        scores = scored(self, model, [part for group in given for part in _with_prompt(group)])
        asked = [group.prompt_ids.numel() - 1 for group in given for _ in group.response_ids]
        width = scores.mask.shape[1]
        asked_of = torch.tensor(asked, device=scores.mask.device)[:, None]
        prompts = scores.mask & (torch.arange(width, device=scores.mask.device)[None] < asked_of)
        found = Pairs.of(rows, scores._replace(mask=scores.mask & ~prompts))
        return Pairs(found.logps, found.mask, found.entropies, found.better, found.worse, prompts=prompts)

    def weight_of(self, row: RankedGroup) -> float:
        """Pairs of the row."""
        return float(row.num_pairs)

    def run_facts(self) -> dict[str, Any]:
        """See `BaseTrainer`."""
        return {**super().run_facts(), "beta": self.args.beta, "nll_on_prompt": self.args.nll_on_prompt}


def _with_prompt(group: Group) -> list[Group]:
    """A group for each answer, in which all tokens but the first are scored: the prompt's, then the answer's."""
    rest: Tensor = group.prompt_ids[1:]
    return [Group(group.prompt_ids[:1], (torch.cat([rest, ids]),)) for ids in group.response_ids]


__all__ = ["ORPOConfig", "ORPOTrainer"]
