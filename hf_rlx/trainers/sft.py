"""Supervised fine-tuning on demonstrations: the first stage of InstructGPT (2203.02155 section 3.5).

How this departs from TRL 1.16's SFTTrainer:
- the loss is the mean over the answers' tokens of the whole optimizer step and all processes, so no split of the
  batch changes the gradient; of `messages` the last turn alone is learned;
- rows are packed one behind the other without padding, and no token sees another row;
- a longer row is cut, its end-of-sequence kept.

| metric | unit | what it is |
|---|---|---|
| loss, eval_loss | nats | mean negative log-prob of an answer's token, EOS included |
| eval_perplexity | - | exp of it |
| entropy | nats | mean entropy of the model's distribution at the answers' tokens |
| rows/cut, rows/special_tokens_neutralised | count | rows cut to `max_length`; special tokens that became plain text |
| update/tokens_per_second, step_time, num_tokens, time/update | 1/s, s, count, share | throughput |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback

from hf_rlx.data.demonstrations import check_demonstrations, encode_demonstration
from hf_rlx.data.pair_encoding import RankedGroup
from hf_rlx.functional.masked import masked_mean, masked_sum
from hf_rlx.models.roles import POLICY
from hf_rlx.trainers.checks import check_arguments
from hf_rlx.trainers.config import described, strict
from hf_rlx.trainers.pair_batches import PairBatch
from hf_rlx.trainers.pair_config import refuse_arguments
from hf_rlx.trainers.preference import PreferenceConfig, PreferenceTrainer


@strict
@dataclass
class SFTConfig(PreferenceConfig):
    """Configuration of `SFTTrainer`; names and defaults are TRL 1.16's where both have them."""

    learning_rate: float = described(2e-5, "Step size; for LoRA about ten times that of full weights, e.g. 2e-4.")
    truncation_mode: str = described(
        "keep_start", "Not carried: an answer is cut at its end and a prompt at its beginning; leave it out"
    )
    dataset_text_field: str = described(
        "text", 'Not carried: dataset.rename_column(..., "text") gives the column its name'
    )
    dataset_kwargs: dict[str, Any] | None = described(None, "Not carried: rows are tokenized as they are used")
    packing_strategy: str = described("bfd", "Not carried: rows are packed whole, no token sees another row")
    eval_packing: bool | None = described(None, "Not carried: rows are packed as `packing` says")
    padding_free: bool = described(False, "No effect: packed rows have no padding.")
    completion_only_loss: bool | None = described(
        None, "True or None: of prompt and completion, the completion alone is learned; False is not carried."
    )
    assistant_only_loss: bool = described(
        False, "Not carried: of messages, the assistant's last turn is learned; each turn may be a row of its own"
    )
    loss_type: str = described("nll", 'Not carried: the loss is "nll", the mean negative log-prob of a token')
    router_aux_loss_coef: float | None = described(
        None, "Not carried: routers train through the log-probs alone; leave router_aux_loss_coef out"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.completion_only_loss not in (None, True):
            raise ValueError(
                f"completion_only_loss={self.completion_only_loss!r} is not carried by hf_rlx: with prompt and "
                'completion, the completion alone is learned; a column "text" is learned whole'
            )


class SFTTrainer(PreferenceTrainer):
    """Trains the policy to repeat demonstrations.

    Args:
        model: see `BaseTrainer`; with a `peft_config` or a `SharedModel` the policy's adapter trains.
        args, train_dataset, eval_dataset, processing_class, callbacks, optimizers, optimizer_cls_and_kwargs,
            quantization_config, peft_config: in TRL's order; see `PreferenceTrainer`; rows as in
            `hf_rlx.data.demonstrations`.
        data_collator, compute_loss_func, compute_metrics, preprocess_logits_for_metrics, formatting_func: not
            carried; refused.

    Example:
        >>> rows = Dataset.from_list([{"prompt": "2+2=", "completion": "4"}])
        >>> SFTTrainer("tiny", SFTConfig("runs/sft"), train_dataset=rows).train()
    """

    args: SFTConfig
    method = "sft"

    def __init__(
        self,
        model: Any,
        args: SFTConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_loss_func: Any = None,
        compute_metrics: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        preprocess_logits_for_metrics: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
        formatting_func: Any = None,
    ) -> None:
        refuse_arguments(
            data_collator=data_collator,
            compute_loss_func=compute_loss_func,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            formatting_func=formatting_func,
        )
        args = SFTConfig("sft_output") if args is None else args
        check_arguments(model, args, SFTConfig, processing_class, peft_config)
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

    def check_dataset(self, dataset: Any, name: str) -> None:
        """See `PreferenceTrainer`."""
        check_demonstrations(dataset, name)

    def encode_row(self, row: dict[str, Any], index: int, **options: Any) -> RankedGroup:
        """See `PreferenceTrainer`."""
        return encode_demonstration(row, index, self.tokenizer, **options)

    def weight_of(self, row: RankedGroup) -> float:
        """Tokens of the answer."""
        return float(sum(row.lengths))

    def pair_loss(self, model: nn.Module, batch: PairBatch, role: str) -> Tensor:
        """Minus the sum of the answers' log-probs, over the optimizer step's answer tokens."""
        scores = model(batch.groups, want_entropy=True)
        self.metrics["train"].add("entropy", masked_mean(scores.entropies, scores.mask), int(scores.mask.sum()))
        return -masked_sum(scores.per_token_logps, scores.mask) / batch.normalizer

    def examine(self, rows: list[RankedGroup]) -> list[tuple[float, int]]:
        """Summed log-prob (nats) and tokens of every row's answer."""
        groups = [row.groups[0] for row in rows]
        logps = self.reference_logps(groups, POLICY, 1.0)
        return [(float(row_logps.sum()), sum(row.lengths)) for row, row_logps in zip(rows, logps, strict=True)]

    def summarise(self, found: list[Any], prefix: str) -> dict[str, float]:
        """Loss and perplexity over all tokens."""
        loss = -sum(total for total, _ in found) / max(sum(count for _, count in found), 1)
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


__all__ = ["SFTConfig", "SFTTrainer"]
