"""What every trainer inherits: the shared model, checks at construction, saving, logging."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import TrainOutput

from hf_rlx.cards.files import replace_file
from hf_rlx.models import critic, storage
from hf_rlx.models.dropout import disable_dropout
from hf_rlx.models.packing import split_by_tokens
from hf_rlx.models.plan import ForwardPlan
from hf_rlx.models.roles import POLICY
from hf_rlx.models.sharding import takes_whole_tensors
from hf_rlx.models.shared import SharedModel
from hf_rlx.persistence import random_states
from hf_rlx.trainers import checkpointing, model_card, push, zero
from hf_rlx.trainers.checks import check_arguments, check_trainable, name_arguments
from hf_rlx.trainers.config import BaseConfig
from hf_rlx.trainers.fsdp import check_fsdp, fsdp_on, place
from hf_rlx.trainers.given import as_shared_model, tokenizer_of
from hf_rlx.trainers.health import GradientGuard, check_weights
from hf_rlx.trainers.keeper import RunKeeper
from hf_rlx.trainers.memory import ForwardLimit
from hf_rlx.trainers.metrics import MetricStore
from hf_rlx.trainers.preflight import before_loading, ready_to_push
from hf_rlx.trainers.progress import use_one_line
from hf_rlx.trainers.settings import ARGS_FILE, public_args
from hf_rlx.types import Group

logger = logging.getLogger(__name__)


class BaseTrainer(Trainer):
    """`transformers.Trainer` around a `SharedModel`.

    Args:
        model: Hub id, folder, `"tiny"`, `"smollm2"`, `PreTrainedModel`, `PeftModel` or `SharedModel`.
        args: the configuration.
        processing_class: the tokenizer; found by the model's name when omitted.
        quantization_config: e.g. `hf_rlx.four_bit_config()`, for a model given by name.
        peft_config: a fresh policy adapter.
        kwargs: for `transformers.Trainer`.

    Raises:
        ValueError: nothing is trainable; a quantised model without an adapter; several GPUs without a launcher.
    """

    method = "rl"
    train_roles: tuple[str, ...] = (POLICY,)  # the roles whose parameters the optimizer holds; `prepare_roles` may say
    looked_at = False  # `before_loading` has run
    idle = False  # no process learns anything in the optimizer step that is being done
    args: BaseConfig
    processing_class: PreTrainedTokenizerBase

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name_arguments(cls)

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel | SharedModel,
        args: BaseConfig,
        processing_class: PreTrainedTokenizerBase | None = None,
        quantization_config: Any = None,
        peft_config: PeftConfig | None = None,
        **kwargs: Any,
    ) -> None:
        check_arguments(model, args, BaseConfig, processing_class, peft_config)
        before_loading(self, args, peft_config)
        zero.check_zero(args)
        # The seed comes before the adapter's random initialisation (trl#6688).
        torch.manual_seed(args.seed)
        shared = as_shared_model(model, args, quantization_config, peft_config)
        for name in ("forward", "_original_forward"):  # an earlier trainer's autocast; this one has its own precision
            shared.__dict__.pop(name, None)
        if processing_class is None:
            processing_class = tokenizer_of(model, shared)
        if args.disable_dropout:
            disable_dropout(shared)
        critic.put_aside(shared)  # an earlier trainer's; who wants one says so
        self.prepare_roles(shared, args)
        check_trainable(shared, self.train_roles)
        shared.tokenizer = processing_class
        self.metrics = {"train": MetricStore()}
        self.keeper = RunKeeper(self)
        self.cards = model_card.CardNotes()
        self.frozen_weights = checkpointing.frozen_weights(shared)  # before processes may split them
        self.forward_limit = ForwardLimit(args.max_tokens_per_forward)
        self.gradient_guard = GradientGuard(args.max_skipped_steps)
        args.enable_jit_checkpoint = False  # the keeper saves on SIGTERM, and exactly
        super().__init__(
            model=shared,
            args=args,
            processing_class=processing_class,
            # Rows are dictionaries of the dataset's columns, handed on as they are.
            data_collator=_rows,
            **kwargs,
        )
        self.zero = zero.zero_on(self.accelerator, args)
        if self.zero:
            self.is_deepspeed_enabled = False  # the Trainer's own branches; see `trainers/zero.py`
            zero.check_zero(args, shared)
            zero.place(shared, args)
        self.is_fsdp_enabled = fsdp_on(self.accelerator, args)
        if self.is_fsdp_enabled:
            check_fsdp(self.accelerator, shared, args)
            place(self.accelerator, shared, args.device)
        use_one_line(self)
        # First of all: what other callbacks do, or fail in, then comes after the state is marked.
        self.callback_handler.callbacks.insert(0, self.keeper)
        self.model_accepts_loss_kwargs = True  # losses are normalised over the whole optimizer step already

    @property
    def shared(self) -> SharedModel:
        """The model with its roles, without wrappers for several processes."""
        if isinstance(self.model, SharedModel):  # unwrapping looks for compiled parts in all of it
            return self.model
        return self.accelerator.unwrap_model(self.model)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer."""
        return self.processing_class

    def prepare_roles(self, shared: SharedModel, args: BaseConfig) -> None:
        """Hook: add the roles that the algorithm needs; called before the optimizer exists."""

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The Trainer's optimizer, of the roles that train, and a check that it holds all they train (trl#6700)."""
        with self.shared.trains(*self.train_roles):
            optimizer = super().create_optimizer(model)
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            missing = [n for n, p in self.shared.named_parameters() if p.requires_grad and id(p) not in held]
        if missing:
            raise ValueError(
                f"the optimizer misses {len(missing)} trainable parameters, e.g. {missing[0]}; build it after the "
                "trainer, or pass optimizers=(None, None)"
            )
        return optimizer

    def reference_logps(self, groups: list[Group], role: str, temperature: float) -> Tensor:
        """(B, R) log-probs of `groups` in `role`, without gradient, a few rows at a time."""

        def run(most: int | None) -> Tensor:
            parts = []
            # Autocast comes with the forward that accelerate prepared; evaluation mode switches dropout off.
            with torch.no_grad(), self.shared.as_role(role), self.shared.rollout_mode():
                for row in split_by_tokens(groups, most):
                    parts.append(self.shared(row, temperature=temperature).per_token_logps)
            return pad_columns(parts)

        return self.forward_limit.run(run, groups)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: the work of a step is not a function of its input batch."""
        return 0

    # The run: one folder, signals, checkpoints.

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """`transformers.Trainer.train`, safe to stop: SIGTERM and Ctrl-C save within the current micro-step and end
        the process by `TrainingInterrupted`; a fault inside a step saves what was done before it.

        Args:
            resume_from_checkpoint: a folder; or True for the newest good checkpoint in `output_dir` (damaged ones are
                skipped with a warning). The run goes on bit for bit as if it had never stopped.

        Raises:
            CheckpointError, FileNotFoundError, ValueError: the checkpoint is damaged, lacks a file, or belongs to a
                run with other data, batches, seed or number of processes.
            RuntimeError: another run is training in `output_dir`.
            TrainingInterrupted: a signal came; its exit code is 128 + signal.
            NonFiniteError: a weight, loss or gradient is NaN or infinite; nothing was saved over a good checkpoint.
        """
        with self.shared.trains(*self.train_roles), self.keeper.session(resume_from_checkpoint) as folder:
            if folder is None:
                self.begin_run()
            elif checkpointing.finished(self, Path(folder)):
                return TrainOutput(self.state.global_step, 0.0, {})
            wanted = self.args.eval_on_start
            self.args.eval_on_start = wanted and folder is None  # what goes on has been evaluated at its start
            try:
                with zero.engine(self):
                    return super().train(folder, *args, **kwargs)
            finally:
                self.args.eval_on_start = wanted

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scalar, which is a share of the optimizer step's loss, to those that are there."""
        if self.zero:
            wrapped: Any = self.model_wrapped
            wrapped.backward(loss, scale_wrt_gas=False)
        else:
            self.accelerator.backward(loss)

    def begin_run(self) -> None:
        """Forget what an earlier `train()` of this trainer left beside the weights. Subclasses add theirs."""
        self.metrics["train"] = MetricStore()
        self.gradient_guard.skipped = 0

    def run_state(self) -> dict[str, Any]:
        """Everything beside weights and optimizer that the rest of the run follows from, of this process, as plain
        values and tensors that later steps leave alone. Subclasses add theirs."""
        return {
            "rng": random_states.capture(),
            "loss": self._tr_loss.detach().clone(),
            "last_logged": self._globalstep_last_logged,
            "metrics": self.metrics["train"].state_dict(),
            "plan": asdict(self.shared.plan),
            "gradients": self.gradient_guard.state_dict(),
            "forward_limit": self.forward_limit.most,
            "evaluation_pending": self.keeper.evaluation_pending,
        }

    def load_run_state(self, state: dict[str, Any]) -> None:
        """Put back what `run_state` gave."""
        self._tr_loss.copy_(state["loss"])
        self._globalstep_last_logged = state["last_logged"]
        self.metrics["train"].load_state_dict(state["metrics"])
        self.shared.plan = ForwardPlan(**state["plan"])
        self.gradient_guard.load_state_dict(state["gradients"])
        self.forward_limit.most = state["forward_limit"]
        self.keeper.evaluation_pending = state["evaluation_pending"]
        random_states.restore(state["rng"])

    def run_facts(self) -> dict[str, Any]:
        """Settings that must be the same on resume, for the batches to be the same. Subclasses add theirs."""
        names = ("world_size", "per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed")
        facts = {**{name: getattr(self.args, name) for name in names}, "fsdp": self.is_fsdp_enabled}
        return {**facts, "zero": True} if self.zero else facts

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Weights and the whole state of the run, staged and renamed; see `trainers/checkpointing.py`."""
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        self.keeper.save(trial)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.keeper.end_of_step(lambda: super(BaseTrainer, self)._maybe_log_save_evaluate(*args, **kwargs))

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        try:
            return super()._determine_best_metric(metrics, trial)
        except KeyError as error:
            raise ValueError(f"{error.args[0]}; set metric_for_best_model to one of them") from error

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self.keeper.evaluating():
            return super()._evaluate(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpointing.load_optimizer(self, Path(checkpoint))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Loaded with the optimizer."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Called by the loop at the point from which it goes on."""
        if checkpoint is not None:
            position = checkpointing.position_of(self, Path(checkpoint))
            self.load_run_state(position)
            self.keeper.restored(Path(checkpoint), position)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.zero:
            return zero.step(self)
        self.gradient_guard.check(self)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self.zero:
            return zero.step(self) if not self.args.max_grad_norm else grad_norm
        if grad_norm is None:
            self.gradient_guard.check(self)
        norm = super()._get_grad_norm(model, grad_norm)
        if self.idle:  # gradients of 0 would move weights by Adam's momentum
            model.zero_grad()
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the metrics gathered since the last log."""
        if "loss" in logs:  # not an evaluation under whatever prefix, and not the summary of the run
            logs = {**logs, **self.metrics["train"].flush()}
        self.cards.note_evaluation(logs, self.state.global_step)
        super().log(logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Model roles, tokenizer and the configuration as JSON. No pickle, no token (the stock
        `training_args.bin` holds `hub_token` in clear)."""
        if not self.args.should_save:
            return
        weights = self.shared.named_parameters() if state_dict is None else state_dict.items()
        check_weights(weights, f"at step {self.state.global_step}")
        folder = Path(output_dir or str(self.args.output_dir))
        self.shared.save_pretrained(folder, state_dict=state_dict)
        self.tokenizer.save_pretrained(folder)
        replace_file(folder / ARGS_FILE, json.dumps(public_args(self.args), indent=2) + "\n")
        model_card.save_card(self, folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Put the weights of a checkpoint back into the roles that this trainer has."""
        with takes_whole_tensors(self.shared):
            storage.load_into(self.shared, Path(resume_from_checkpoint))
        checkpointing.load_weights(self, Path(resume_from_checkpoint))

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        include: Sequence[str] = (),
        **facts: Any,
    ) -> Any:
        """Save the model and upload it to `hub_model_id`: weights, configuration, tokenizer, card and plot.

        Args:
            commit_message, blocking, token, revision, private: as in `transformers.Trainer`.
            include: patterns of further files below `output_dir`, e.g. `"completions/*"`; not uploaded otherwise.
            facts: fields of `RunFacts` for the card, e.g. `license`; without them a card that is there stays.

        Raises:
            SecretFoundError: a file of the upload holds a secret; nothing was uploaded.
        """
        return push.push_model(self, commit_message, blocking, token, revision, private, include, facts)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository; raises `HubError` where the Hub would not take the upload, with what to do."""
        with ready_to_push(self, token):
            super().init_hf_repo(token, private)

    def create_model_card(  # type: ignore[override]
        self, model_name: str | None = None, dataset_name: Any = None, tags: Any = None, **facts: Any
    ) -> None:
        """Write the card into `output_dir`, from what the trainer knows and what is given: fields of `RunFacts`, or
        the names that TRL and transformers have for them; None is not given."""
        facts |= {"model_name": model_name, "dataset_name": dataset_name, "tags": tags}
        if self.is_world_process_zero():
            model_card.write(self, Path(str(self.args.output_dir)), **facts)

    def card_facts(self) -> dict[str, Any]:
        """Fields of `RunFacts` that this kind of trainer knows by itself."""
        return {}

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        push.push_checkpoint(self, Path(checkpoint_folder))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Not carried: raises NotImplementedError, which names what to call."""
        raise NotImplementedError(
            "predict() has no meaning here: evaluate(eval_dataset=...) samples, scores and reports with intervals; "
            "completions alone come from trainer.shared.generate(...)"
        )

    def _load_best_model(self) -> None:
        if self.state.best_model_checkpoint is not None:
            self._load_from_checkpoint(self.state.best_model_checkpoint)


def pad_columns(parts: list[Tensor]) -> Tensor:
    """Stack (B_i, R_i) tensors to (sum B_i, max R_i), zeros on the right."""
    longest = max(part.shape[1] for part in parts)
    return torch.cat([nn.functional.pad(part, (0, longest - part.shape[1])) for part in parts])


def _rows(features: Any) -> Any:
    return features


__all__ = ["BaseTrainer", "pad_columns"]
