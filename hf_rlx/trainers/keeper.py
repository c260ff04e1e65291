"""Keeps a run's folder while it trains: the lock, signals, checkpoints, and the last one before a stop."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from hf_rlx.persistence import folders, lock
from hf_rlx.persistence.interrupts import Interrupts, TrainingInterrupted
from hf_rlx.trainers import checkpointing
from hf_rlx.trainers.health import NonFiniteError, check_weights
from hf_rlx.trainers.processes import agreed

if TYPE_CHECKING:
    from hf_rlx.trainers.base import BaseTrainer

logger = logging.getLogger(__name__)


class RunKeeper(TrainerCallback):
    """Of one trainer; a callback, so that the loop tells it where optimizer steps begin and end.

    A checkpoint can be written in the middle of an optimizer step: weights and optimizer are then as they were at its
    start, and so is the state that goes with them, kept in `mark`.
    """

    def __init__(self, trainer: BaseTrainer) -> None:
        self.trainer = trainer
        self.interrupts = Interrupts()
        self.saved_step = 0
        self._state: dict[str, Any] | None = None  # of the run, at the start of the step that is being done
        self._savable = True  # False from the optimizer's step to the end of the step

    @contextmanager
    def session(self, resume: str | Path | bool | None) -> Iterator[str | None]:
        """Around a whole training: locked folder, signals as requests; gives the verified folder to resume from.

        Raises:
            see `BaseTrainer.train`.
        """
        run = Path(str(self.trainer.args.output_dir))
        with ExitStack() as stack:
            if self.trainer.args.should_save:
                stack.enter_context(lock.hold(run))
                folders.clean(run)
            stack.enter_context(self.interrupts)
            folder = None
            if resume:
                folder = folders.find(run, resume)
                checkpointing.check_resume(self.trainer, folder)
                logger.info("resuming from %s", folder)
            self._state, self._savable, self.saved_step = None, True, 0
            try:
                yield None if folder is None else str(folder)
            except (Exception, TrainingInterrupted) as error:
                self._save_before_stop(run, error)
                raise

    def mark(self) -> None:
        """From here on a checkpoint written in the middle of this optimizer step goes on from this moment."""
        self._state = self.trainer.run_state()

    def save(self, trial: Any = None) -> None:
        """Write a checkpoint, then delete old ones.

        Raises:
            NonFiniteError: of weights that are not finite. DiskFullError: see `checkpointing.save`.
        """
        trainer = self.trainer
        check_weights(trainer.shared.named_parameters(), f"at step {trainer.state.global_step}")
        run = Path(trainer._get_output_dir(trial=trial))
        target = run / f"checkpoint-{trainer.state.global_step}"
        checkpointing.best_checkpoint(trainer, run)
        checkpointing.save(trainer, target, self._state or trainer.run_state())
        self.saved_step = trainer.state.global_step
        if trainer.args.push_to_hub:
            trainer._push_from_checkpoint(str(target))
        if trainer.args.should_save:
            folders.prune(run, trainer.args.save_total_limit, [trainer.state.best_model_checkpoint])

    def stop_if_asked(self) -> None:
        """A point at which training may stop; every process calls it at the same ones.

        Raises:
            TrainingInterrupted: a process has had a signal.
        """
        if agreed(self.interrupts.requested is not None):
            raise TrainingInterrupted(self.interrupts.requested or signal.SIGTERM)

    def stop_if_alone(self) -> None:
        """A point inside a rollout: only a single process may stop there, others would wait for it."""
        if self.trainer.accelerator.num_processes == 1:
            self.interrupts.check()

    def _save_before_stop(self, run: Path, error: BaseException) -> None:
        """Keep the work since the last checkpoint when training stops in the middle."""
        trainer, interrupted = self.trainer, isinstance(error, TrainingInterrupted)
        step = trainer.state.global_step
        what = (
            f"{signal.Signals(error.signum).name}" if isinstance(error, TrainingInterrupted) else type(error).__name__
        )
        told = f"training was stopped by {what} after step {step}"
        wanted = trainer.args.save_strategy != SaveStrategy.NO and step > self.saved_step
        # Processes that do not all stop here must not wait for one another.
        together = interrupted or trainer.accelerator.num_processes == 1
        if wanted and together and self._savable and not isinstance(error, NonFiniteError | folders.DiskFullError):
            try:
                self.save()
            except (OSError, ArithmeticError) as fault:
                logger.error("%s; saving failed: %s", told, fault)
        if not trainer.args.should_save:
            return
        found = folders.checkpoints(run)
        if found:
            logger.warning(
                "%s; the newest checkpoint is %s: go on with trainer.train(resume_from_checkpoint=True)",
                told,
                found[0],
            )
        else:
            logger.warning("%s; there is no checkpoint to resume from", told)

    # Called by the loop.

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remember the state, and look at the weights before anything is spent on them."""
        check_weights(self.trainer.shared.trainable_parameters(), f"after step {state.global_step}")
        self.mark()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Weights change now."""
        self._savable = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Weights and step counter belong together again."""
        self._state, self._savable = None, True
