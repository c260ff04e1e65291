"""The reference of a trainer on pairs: which model it is, and its log-probs, computed now or before training.

| ref_model | the policy | what runs as reference |
|---|---|---|
| none | any | the policy as this trainer starts: see `hf_rlx.models.reference` |
| none | with `keep_reference`, a `SharedModel` that has a reference | that one, of an earlier trainer |
| the policy's base, bit for bit | an adapter | adapters off; `ref_model` is not kept |
| another model of that family | any | `ref_model`, frozen: a second model in memory |
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, TrainingArguments

from hf_rlx.models import reference
from hf_rlx.models.loading import load_causal_lm
from hf_rlx.models.plan import initial_plan
from hf_rlx.models.roles import POLICY, REFERENCE, Role, belongs
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers import reference_cache
from hf_rlx.trainers.metrics import gathered
from hf_rlx.trainers.pair_config import ReferencedConfig
from hf_rlx.trainers.processes import agreed, together
from hf_rlx.trainers.reference_sync import SyncReference
from hf_rlx.types import Group

if TYPE_CHECKING:
    from hf_rlx.trainers.preference import PreferenceTrainer

logger = logging.getLogger(__name__)


def prepare_reference(shared: SharedModel, ref_model: Any, args: Any) -> None:
    """Make the role `reference`; see the table at the head of this file.

    Raises:
        ValueError: `ref_model` is the policy itself, has an adapter, is of another family or vocabulary, or would be
            moved by `sync_ref_model`. TypeError: it is no model.
    """
    assert isinstance(args, ReferencedConfig)
    if ref_model is None:
        logger.info("reference: %s", reference.IN_WORDS[shared.prepare_reference(anew=not args.keep_reference)])
        return
    if isinstance(ref_model, str | os.PathLike):
        ref_model = load_causal_lm(os.fspath(ref_model), dtype=shared.dtype)
    _check(shared, ref_model, args)
    adapter = shared.roles[POLICY].adapter
    shared.frozen_copies.pop(REFERENCE, None)
    if adapter is not None and all(belongs(name, adapter) for name in shared.policy_parameters):
        adapters = list(shared.model.peft_config)
        base = reference_cache.base_tensors(shared.causal_lm, adapters)
        given = reference_cache.base_tensors(ref_model)
        if reference_cache.weights_digest(base) == reference_cache.weights_digest(given):
            shared.roles[REFERENCE] = Role(None, trainable=False)
            logger.info("reference: the base with its adapters off; ref_model has the base's weights and is not kept")
            return
    initial_plan(ref_model, packing=shared.plan.packed)
    shared.frozen_copies[REFERENCE] = ref_model.eval()
    shared.roles[REFERENCE] = Role(adapter, trainable=False)
    if shared.quantization_method is None and getattr(ref_model, "quantization_method", None) is None:
        ref_model.to(shared.device)
    logger.info("reference: ref_model, a second model in memory")


def sync_reference(trainer: PreferenceTrainer) -> None:
    """Move the reference of a trainer every few steps, where its configuration says so."""
    args: Any = trainer.args
    if args.sync_ref_model:
        trainer.add_callback(SyncReference(trainer.shared, args.ref_model_mixup_alpha, args.ref_model_sync_steps))


def _check(shared: SharedModel, ref_model: Any, args: ReferencedConfig) -> None:
    leave_out = "leave ref_model out: the reference is made from the policy as it starts"
    if isinstance(ref_model, SharedModel | PeftModel):
        raise ValueError(f"ref_model is a {type(ref_model).__name__}; call merge_and_unload() on it, or {leave_out}")
    if isinstance(ref_model, TrainingArguments):
        raise TypeError(f"ref_model is a {type(ref_model).__name__}; give the configuration by name: args=...")
    if not isinstance(ref_model, PreTrainedModel):
        raise TypeError(f"ref_model must be a causal language model or its name, got {type(ref_model).__name__}")
    mine = {p.data_ptr() for _, p in shared.trainable_parameters(POLICY)}
    if ref_model is shared.causal_lm or any(p.data_ptr() in mine for p in ref_model.parameters()):
        raise ValueError(f"ref_model is the model that trains, so the policy could not leave it; {leave_out}")
    ours, theirs = shared.config.get_text_config(), ref_model.config.get_text_config()
    if (ours.model_type, ours.vocab_size) != (theirs.model_type, theirs.vocab_size):
        raise ValueError(
            f"ref_model is a {theirs.model_type} of {theirs.vocab_size} tokens, the policy a {ours.model_type} of "
            f"{ours.vocab_size}; take one of the same family and vocabulary, or {leave_out}"
        )
    if args.sync_ref_model:
        raise ValueError(f"sync_ref_model moves a reference that is the policy's own; {leave_out}")


class ReferenceLogps:
    """Called with groups, it gives the reference's log-probs of their answers: those that were computed beforehand, or
    computed now, without gradient.

    Args:
        trainer: whose reference, and whose data.
        ref_model: the trainer's argument.
    """

    def __init__(self, trainer: PreferenceTrainer, ref_model: Any = None) -> None:
        self.trainer, self.ref_model = trainer, ref_model
        self.forget()

    def forget(self) -> None:
        """What is at hand may be another reference's: it has to be found on the disk again, or computed."""
        self._known: dict[bytes, Tensor] = {}
        self._ahead: dict[bytes, Tensor] = {}  # of the micro-batch that is being trained on
        self._facts: dict[str, Any] | None = None
        self._done: list[Any] = []  # data sets, kept so that their identity stays theirs

    @property
    def _args(self) -> ReferencedConfig:
        args = self.trainer.args
        assert isinstance(args, ReferencedConfig)
        return args

    def __call__(self, groups: list[Group]) -> Tensor:
        """(B, R) nats, rows in group order, 0 behind each answer's end."""
        known = self._ahead or self._known
        names = [reference_cache.digest(group) for group in groups] if known else []
        if not names or any(name not in known for name in names):
            return self._compute(groups)
        answers = [
            answer
            for name, group in zip(names, groups, strict=True)
            for answer in known[name].split([ids.numel() for ids in group.response_ids])
        ]
        rows = torch.nn.utils.rnn.pad_sequence(answers, batch_first=True)
        return rows.to(self.trainer.args.device)

    @contextmanager
    def ahead(self, groups: list[Group]) -> Iterator[None]:
        """Within, the log-probs of `groups` are at hand: a forward of all is faster than one for each part."""
        if not self._known:
            self._ahead = self._by_digest(groups, self._compute(groups))
        try:
            yield
        finally:
            self._ahead = {}

    def precompute(self, dataset: Any) -> None:
        """With `precompute_ref_log_probs`: have the log-probs of all rows of a data set at hand, from the disk, or
        computed by all processes together and written there. Every process must call it."""
        trainer, args = self.trainer, self._args
        if not args.precompute_ref_log_probs or dataset is None or any(dataset is done for done in self._done):
            return
        with together():
            groups = list(self._groups_of(dataset))
        names = [reference_cache.digest(group) for group in groups]
        key = reference_cache.key_of(names, self._facts_of_model())
        folder = Path(args.ref_cache_dir or Path(str(args.output_dir)) / "reference_cache")
        found = reference_cache.load(folder, key)
        if agreed(found is None or any(name not in found for name in names)):
            logger.info("computing the reference's log-probs of %d rows", len(groups))
            found = self._computed(dict(zip(names, groups, strict=True)))
            with together():
                if args.should_save:
                    reference_cache.store(folder, key, found)
        else:
            logger.info("the reference's log-probs of %d rows are read from %s", len(groups), folder)
        assert found is not None
        self._known |= found
        self._done.append(dataset)
        trainer.keeper.stop_if_asked()

    def run_facts(self) -> dict[str, Any]:
        """What of the reference must be the same on resume."""
        args, shared = self._args, self.trainer.shared
        names = ("precompute_ref_log_probs", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")
        told = "moving" if args.sync_ref_model else reference.kind(shared)  # a move may change its kind
        if self.ref_model is not None and told == "model_copy":
            told = self._facts_of_model()["weights"]
        return {**{name: getattr(args, name) for name in names}, "reference": told}

    def _groups_of(self, dataset: Any) -> Iterable[Group]:
        for start in range(0, len(dataset), 64):
            rows = range(start, min(start + 64, len(dataset)))
            for row in self.trainer.encode([(index, dataset[index]) for index in rows]):
                if row.num_pairs:
                    yield from row.groups

    def _facts_of_model(self) -> dict[str, Any]:
        if self._facts is None:
            accelerator, shared = self.trainer.accelerator, self.trainer.shared
            self._facts = {
                **reference_cache.reference_facts(shared),
                "precision": [accelerator.mixed_precision, str(shared.dtype), shared.device.type],
            }
        return self._facts

    def _computed(self, groups: dict[bytes, Group]) -> dict[bytes, Tensor]:
        """All of them, each process a share."""
        args = self._args
        mine = list(groups.items())[args.process_index :: args.world_size]
        size = args.precompute_ref_batch_size or args.per_device_train_batch_size
        local: list[tuple[bytes, Tensor]] = []
        with together():
            for start in tqdm(range(0, len(mine), size), "reference log-probs", disable=args.disable_tqdm):
                self.trainer.keeper.stop_if_alone()
                part = mine[start : start + size]
                few = [group for _, group in part]
                local += self._by_digest(few, self._compute(few).cpu()).items()
        shared = dict(gathered(local))
        return {name: shared[name] for name in groups}

    @staticmethod
    def _by_digest(groups: list[Group], logps: Tensor) -> dict[bytes, Tensor]:
        """(B, R) log-probs as one tensor a group, answer after answer."""
        rows = iter(logps)
        return {
            reference_cache.digest(group): torch.cat([next(rows)[: ids.numel()] for ids in group.response_ids])
            for group in groups
        }

    def _compute(self, groups: list[Group]) -> Tensor:
        # Before training the model has no autocast of its own yet.
        with self.trainer.accelerator.autocast():
            return self.trainer.reference_logps(groups, REFERENCE, 1.0)


__all__ = ["ReferenceLogps", "prepare_reference", "sync_reference"]
