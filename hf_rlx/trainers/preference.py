"""The loop of every trainer that learns from given pairs or ranked lists: reward models, DPO and its relatives.

    deal      rows to micro-steps, and count those with a pair over the whole optimizer step and all processes
    update    one packed forward and backward per micro-step and role; the loss is a sum divided by that count
    evaluate  every held-out row once, all processes together

DPO and its relatives say what the loss of pairs is (`pair_objective`); others what that of a micro-batch is
(`pair_loss`), what is looked at in evaluation (`examine`) and how it is summed up (`summarise`).
Rows without a pair (identical answers, ties only) leave the loss and its denominator, and are counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from hf_rlx.data.pair_encoding import RankedGroup, check_preferences, encode_preference
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.base import BaseTrainer
from hf_rlx.trainers.best_metric import check_best_metric
from hf_rlx.trainers.checkpointing import fingerprint
from hf_rlx.trainers.config import BaseConfig
from hf_rlx.trainers.health import loss_fault
from hf_rlx.trainers.memory import Halving
from hf_rlx.trainers.metrics import gathered
from hf_rlx.trainers.pair_batches import PairBatch, check_known, pair_loader, shortened
from hf_rlx.trainers.pair_config import PairConfig
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
from hf_rlx.trainers.preference_config import PreferenceConfig, set_tokens
from hf_rlx.trainers.preflight import before_loading, data_checks, try_rows
from hf_rlx.trainers.processes import raise_together, together
from hf_rlx.trainers.references import ReferenceLogps, prepare_reference, sync_reference
from hf_rlx.types import Group

logger = logging.getLogger(__name__)


class PreferenceTrainer(BaseTrainer):
    """Rows to groups, groups to one loss. See the module's docstring.

    Args:
        model, args, processing_class, quantization_config, peft_config: see `BaseTrainer`.
        train_dataset: rows as in `hf_rlx.data.pair_encoding`. eval_dataset: the same, or a dictionary of them.
        callbacks, optimizers, optimizer_cls_and_kwargs: as in `transformers.Trainer`.

    Raises:
        ValueError: data that could not be trained on; names the row and the fix.
    """

    args: PreferenceConfig
    train_dataset: Any
    # Set by trainers on pairs before this constructor.
    reference: ReferenceLogps | None = None
    watch: PairWatch | None = None

    def __init__(
        self,
        model: Any,
        args: PreferenceConfig,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: Any = None,
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        before_loading(self, args, peft_config, *data_checks(self.check_dataset, train_dataset, eval_dataset))
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
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        self._set_tokens()
        self.halving = Halving(self)
        self._num_tokens = 0
        self._step_started: float | None = None
        self._logged_step = 0
        self._last_group: Group | None = None
        if self.watch is not None:
            self.add_callback(self.watch)
        if self.reference is not None:
            sync_reference(self)

    def prepare_roles(self, shared: SharedModel, args: BaseConfig) -> None:
        """The reference of trainers that have one."""
        if self.reference is not None:
            prepare_reference(shared, self.reference.ref_model, args)

    # What subclasses say.

    def pair_objective(self, pairs: Pairs) -> Objective:
        """The loss of n pairs, and what is logged of it."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its loss is")

    def pairs(self, model: nn.Module | None, rows: list[RankedGroup]) -> Pairs:
        """The pairs of `rows` with the log-probs that the loss reads; `model` None: without gradient."""
        return scored_pairs(self, model, rows, self.reference)

    def pair_loss(self, model: nn.Module, batch: PairBatch, role: str) -> Tensor:
        """The loss of one micro-batch in `role`: a scalar, already divided by the optimizer step's normalizer."""
        return train_on_pairs(self, model, batch)

    def zero_loss(self, model: nn.Module, role: str) -> Tensor:
        """A loss of 0 whose backward reaches the parameters of `role`: several processes must run one together."""
        return no_loss(model, self.dummy_groups())

    def examine(self, rows: list[RankedGroup]) -> list[Any]:
        """What evaluation keeps of each row, as plain values; without gradient."""
        return examine_pairs(self, rows)

    def summarise(self, found: list[Any], prefix: str) -> dict[str, float]:
        """Metrics, without prefix, of what `examine` kept of all rows of a dataset, in their order."""
        return summarise_pairs(self, found)

    def check_dataset(self, dataset: Any, name: str) -> None:
        """Refuse a dataset (None: nothing) without the columns and rows that are needed; `name` is for messages."""
        check_preferences(dataset, name)

    def encode_row(self, row: dict[str, Any], index: int, **options: Any) -> RankedGroup:
        """Tokenize one row; options as in `encode_preference`."""
        return encode_preference(row, index, self.tokenizer, **options)

    def weight_of(self, row: RankedGroup) -> float:
        """What a row adds to the loss's denominator; 0: it is left out and counted."""
        return float(row.num_pairs > 0)

    def check_row(self, row: RankedGroup) -> None:
        """Refuse a row that the loss cannot use; the message reads on from "row 3 ..."."""

    # The loop.

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """See `BaseTrainer`.

        Raises:
            ValueError: no evaluation row has a metric for `metric_for_best_model`; see `BaseTrainer` for others.
        """
        check_best_metric(self)
        return super().train(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[list[RankedGroup]], num_batches: int, device: torch.device
    ) -> tuple[list[PairBatch], None]:
        """The micro-batches of one optimizer step, and what its loss is divided by."""
        with together():
            dealt = list(islice(epoch_iterator, num_batches))
        kept = [[row for row in rows if self.weight_of(row)] for rows in dealt]
        count = torch.tensor(float(sum(self.weight_of(row) for rows in kept for row in rows)), device=device)
        total = self.accelerator.reduce(count, "sum")
        idle = not bool(total)
        batches = [
            PairBatch(rows, total.clamp(min=1), idle, len(all_rows))
            for rows, all_rows in zip(kept, dealt, strict=True)
        ]
        return batches, None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One micro-step; returns its share of the loss."""
        batch: PairBatch = inputs
        model.train()
        if self._step_started is None:
            self._step_started, self._logged_step = time.perf_counter(), self.state.global_step
        self.idle = batch.idle
        store = self.metrics["train"]
        store.add("rows/without_pair", batch.dealt - len(batch.rows), reduce="sum")
        store.add("rows/cut", sum(row.cut > 0 for row in batch.rows), reduce="sum")
        store.add("rows/special_tokens_neutralised", sum(row.neutralised for row in batch.rows), reduce="sum")
        if batch.groups:
            self._last_group = batch.groups[0]
        with store.stage("update"):
            loss = self.update(model, batch)
        self._num_tokens += _tokens(batch.rows)
        if self.accelerator.sync_gradients:
            self.halving.end_step()
        else:
            self.keeper.stop_if_asked()
        return loss

    def update(self, model: nn.Module, batch: PairBatch) -> Tensor:
        """Forward and backward of one micro-batch; in halves where memory is too small.

        Raises:
            NonFiniteError: of the loss. torch.OutOfMemoryError: halves do not fit either.
        """
        alone = self.accelerator.num_processes == 1
        # A step that any process learns from needs a backward on all of them, and the gradient scaler one always.
        if not batch.rows and (alone or batch.idle) and self.accelerator.scaler is None:
            return torch.zeros((), device=self.args.device)
        # Where several processes reduce gradients together, each must run as many backwards as the others.
        parts = batch.split(self.args.max_tokens_per_update) if alone else [batch]
        reference = self.reference if len(parts) > 1 else None
        with nullcontext() if reference is None else reference.ahead(batch.groups):
            return torch.stack([self.halving.run(model, part) for part in parts]).sum()

    def forward_backward(self, model: nn.Module, batch: PairBatch) -> Tensor:
        """The losses of one micro-batch and their backwards, role by role; returns their mean, scaled for DDP."""
        store, start = self.metrics["train"], time.perf_counter()
        losses = []
        for role in self.train_roles:
            with self.shared.as_role(role):
                loss = self.pair_loss(model, batch, role) if batch.rows else self.zero_loss(model, role)
                if self.accelerator.scaler is None:  # a scaler drops such a step by itself
                    raise_together(loss_fault(loss, self.shared, batch, self.state.global_step))
                # The loss is a share of one sum over all processes; DDP averages gradients, hence the factor.
                loss = loss * self.accelerator.num_processes
                self.backward(loss)
            losses.append(loss.detach())
        seconds = max(time.perf_counter() - start, 1e-9)
        store.add("update/tokens_per_second", _tokens(batch.rows) / seconds, seconds)
        return torch.stack(losses).mean()

    def dummy_groups(self) -> list[Group]:
        """A small forward, of real tokens: the first forward of all decides whether this model can run packed rows."""
        group = self._last_group or Group.from_lists([0], [[0]])
        return [Group(group.prompt_ids[-48:], tuple(ids[:24] for ids in group.response_ids[:2]))]

    def recorded(self) -> dict:
        """What updates have recorded so far, for `restore_recorded`."""
        return self.metrics["train"].state_dict()

    def restore_recorded(self, before: dict) -> None:
        """Forget what was recorded since `recorded`: the update is done again."""
        self.metrics["train"].load_state_dict(before)

    # Data.

    def encode(self, rows: list[tuple[int, dict[str, Any]]]) -> list[RankedGroup]:
        """Tokenize rows of a dataset, given with their index."""
        longest = self.args.longest_row(self.shared.context_length)
        encoded = []
        for index, row in rows:
            group = self.encode_row(
                row,
                index,
                max_length=longest,
                chat_template_kwargs=self.args.chat_template_kwargs,
                special_tokens=self.args.special_tokens_in_messages,
            )
            if isinstance(self.args, PairConfig):
                most = (self.args.max_prompt_length, self.args.max_completion_length)
                group = shortened(group, *most, self.tokenizer.bos_token_id)
            try:
                check_known(group, self.shared)
                self.check_row(group)
            except ValueError as error:
                raise ValueError(f"row {index} {error}") from error
            encoded.append(group)
        return encoded

    def _set_tokens(self) -> None:
        """EOS, pad and chat template as the configuration has them."""
        set_tokens(self.args, self.tokenizer)

    def get_train_dataloader(self) -> DataLoader:
        """Rows, micro-batch by micro-batch; not sharded by accelerate: the sampler gives each process its own."""
        if self.train_dataset is None:
            raise ValueError("train() needs a train_dataset")
        self.halving.end_step()
        try_rows(self)
        if self.reference is not None:
            self.reference.precompute(self.train_dataset)
        self._step_started = None
        return pair_loader(self.train_dataset, self.args, self.encode)

    # Evaluation.

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Every row of `eval_dataset` once, over all processes; logs and returns the metrics.

        Raises:
            ValueError: there is no evaluation dataset, or a row of it cannot be used.
        """
        dataset: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            named: Any = self.eval_dataset
            dataset = named[dataset]
        if dataset is None:
            raise ValueError("evaluate() needs an eval_dataset, here or in the constructor")
        if isinstance(dataset, dict):
            parts = [self.evaluate(part, None, f"{metric_key_prefix}_{name}") for name, part in dataset.items()]
            return {name: value for part in parts for name, value in part.items()}
        if eval_dataset is not None:
            self.check_dataset(dataset, "eval_dataset")
        start = time.perf_counter()
        metrics = self.summarise(self.examine_all(dataset), metric_key_prefix)
        seconds = time.perf_counter() - start
        metrics |= {"runtime": seconds, "samples_per_second": len(dataset) / seconds}
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        if self._step_started is not None:  # not a part of the training step
            self._step_started += seconds
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def examine_all(self, dataset: Any) -> list[Any]:
        """`examine` over a dataset, shared among the processes; every one gets all of it, in the rows' order."""
        if self.reference is not None:
            self.reference.precompute(dataset)
        elif self.watch is not None:
            self.watch.held_out = str(fingerprint(dataset))
        found: list[tuple[int, Any]] = []
        mine = range(self.args.process_index, len(dataset), self.args.world_size)
        batch = self.args.per_device_eval_batch_size
        with together():
            for start in range(0, len(mine), batch):
                rows = self.encode([(index, dataset[index]) for index in mine[start : start + batch]])
                found += zip((row.row for row in rows), self.examine(rows), strict=True)
        return [value for _, value in sorted(gathered(found), key=lambda pair: pair[0])]

    # The run.

    def begin_run(self) -> None:
        """See `BaseTrainer`."""
        super().begin_run()
        self._num_tokens = 0
        if self.watch is not None:
            self.watch.begin_run()
        if self.reference is not None:
            self.reference.forget()

    def run_state(self) -> dict[str, Any]:
        """See `BaseTrainer`."""
        last = self._last_group
        return {
            **super().run_state(),
            "num_tokens": self._num_tokens,
            "halved": self.halving.on,
            "last_group": last and [last.prompt_ids, list(last.response_ids)],
            "watch": self.watch and self.watch.state_dict(),
        }

    def load_run_state(self, state: dict[str, Any]) -> None:
        """See `BaseTrainer`."""
        super().load_run_state(state)
        self._num_tokens, self.halving.on = state["num_tokens"], state["halved"]
        if state["last_group"] is not None:
            prompt, responses = state["last_group"]
            self._last_group = Group(prompt, tuple(responses))
        if self.watch is not None:
            self.watch.load_state_dict(state["watch"])

    def run_facts(self) -> dict[str, Any]:
        """See `BaseTrainer`."""
        names = ("shuffle_dataset", "max_length", "chat_template_kwargs", "dataloader_drop_last")
        facts = {**super().run_facts(), **{name: getattr(self.args, name) for name in names}}
        for name in ("max_prompt_length", "max_completion_length"):
            facts[name] = getattr(self.args, name, None)
        return facts if self.reference is None else {**facts, **self.reference.run_facts()}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add throughput."""
        if "loss" in logs:
            now, step = time.perf_counter(), self.state.global_step
            logs["step_time"] = (now - (self._step_started or now)) / max(step - self._logged_step, 1)
            self._step_started, self._logged_step = now, step
            tokens = torch.tensor(self._num_tokens, device=self.args.device)
            logs["num_tokens"] = int(self.accelerator.reduce(tokens, "sum"))
        super().log(logs, start_time)


def _tokens(rows: list[RankedGroup]) -> int:
    """Tokens of every answer with its prompt in front, as TRL counts them."""
    groups = [group for row in rows for group in row.groups]
    return sum(g.num_responses * g.prompt_ids.numel() + sum(ids.numel() for ids in g.response_ids) for g in groups)


__all__ = ["PreferenceConfig", "PreferenceTrainer"]
