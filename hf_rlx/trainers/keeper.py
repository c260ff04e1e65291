"""Keeps a run's folder while it trains: the lock, signals, checkpoints, and the last one before a stop."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback
from transformers.trainer_utils import SaveStrategy

from hf_rlx.persistence import folders, lock
from hf_rlx.persistence.interrupts import Interrupts, TrainingInterrupted
from hf_rlx.trainers import checkpointing
from hf_rlx.trainers.health import NonFiniteError, check_weights
from hf_rlx.trainers.processes import agreed, together

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
        self.last_saved: Path | None = None
        self._state: dict[str, Any] | None = None  # of the run, at the start of the step that is being done
        self._savable = False  # whether the weights are those of the state: not from the optimizer's step to its end
        self._held: bool | None = None  # a save that waits for the end of the epoch
        self.evaluation_pending = False
        self.seconds_before = 0.0  # wall clock of the run until this leg of it began
        self._began: float | None = None  # of this leg, while it trains
        self._leg = 0.0  # seconds of this leg, once it is over

    @property
    def seconds(self) -> float:
        """Wall clock of the run so far, over all its legs; of an earlier one up to the checkpoint that went on."""
        return self.seconds_before + (self._leg if self._began is None else time.perf_counter() - self._began)

    @contextmanager
    def session(self, resume: str | Path | bool | None) -> Iterator[str | None]:
        """Around a whole training: locked folder, signals as requests; gives the verified folder to resume from.

        Raises:
            see `BaseTrainer.train`.
        """
        run = Path(str(self.trainer.args.output_dir))
        self._state, self._savable, self.saved_step, self.last_saved = None, False, 0, None
        self._held, self.evaluation_pending = None, False
        self.seconds_before, self._began, self._leg = 0.0, time.perf_counter(), 0.0
        with ExitStack() as stack:
            stack.callback(self._end_leg)
            folder = self._open(run, resume, stack)
            stack.enter_context(self.interrupts)
            try:
                yield folder
                self.stop_if_asked()  # everything is saved by now, but a script must not go on
            except (Exception, TrainingInterrupted) as error:
                self._save_before_stop(error)
                raise

    def _open(self, run: Path, resume: str | Path | bool | None, stack: ExitStack) -> str | None:
        """Lock and clear the run's folder and find the checkpoint to resume from: one process does, all agree."""
        chosen: list[str | None] = [None]
        with together():
            if self.trainer.args.should_save:
                stack.enter_context(lock.hold(run))
                folders.clean(run)
                if not resume and (old := folders.checkpoints(run)):
                    logger.warning(
                        "%s has checkpoints of an earlier run (%s); this run begins anew and writes its own beside "
                        "them, and resume_from_checkpoint=True takes the one of most steps: delete them, or choose "
                        "another output_dir",
                        run,
                        ", ".join(sorted(path.name for path in old)),
                    )
            if resume and self.trainer.is_world_process_zero():
                chosen = [str(folders.find(run, resume))]
        if self.trainer.accelerator.num_processes > 1:
            broadcast_object_list(chosen)
        folder = chosen[0]
        if folder is not None:
            with together():
                checkpointing.check_resume(self.trainer, Path(folder))
            logger.info("resuming from %s", folder)
        return folder

    def _end_leg(self) -> None:
        self._leg, self._began = self.seconds - self.seconds_before, None

    def restored(self, folder: Path, position: dict[str, Any]) -> None:
        """The state of a checkpoint, `position`, is in place: from here on there is something to save."""
        self.seconds_before = position.get("seconds", 0.0)  # not there: written by an earlier version
        self.saved_step, self.last_saved, self._savable = self.trainer.state.global_step, folder, True
        if self.evaluation_pending:  # the run was stopped in it
            metrics = self.trainer._evaluate(None, None)
            self.trainer._determine_best_metric(metrics, None)
        self.mark()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around an evaluation of the loop: a checkpoint that is written inside says that it is still to be done."""
        self.evaluation_pending = True
        yield
        self.evaluation_pending = False

    def end_of_step(self, log_save_evaluate: Callable[[], None]) -> None:
        """Around what the loop does after a step, and once more after an epoch.

        A checkpoint of an epoch's last step waits for what is logged and evaluated at the epoch's end: a run that goes
        on from it begins with the next epoch.
        """
        trainer, args = self.trainer, self.trainer.args
        by_epoch = "epoch" in (args.logging_strategy, args.eval_strategy, args.save_strategy)
        last = by_epoch and float(trainer.state.epoch or 0.5).is_integer()
        if last and self._held is None:
            self._held, trainer.control.should_save = trainer.control.should_save, False
            log_save_evaluate()
            return
        trainer.control.should_save |= bool(self._held)
        self._held = None
        log_save_evaluate()
        self.stop_if_asked()

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
        checkpointing.save(trainer, target, {**(self._state or trainer.run_state()), "seconds": self.seconds})
        self.saved_step, self.last_saved = trainer.state.global_step, target
        if trainer.args.push_to_hub:
            try:
                trainer._push_from_checkpoint(str(target))
            except Exception as error:
                logger.error("%s is saved, but its upload failed: %s: %s", target, type(error).__name__, error)
        if trainer.args.should_save:
            folders.prune(run, trainer.args.save_total_limit, [target, trainer.state.best_model_checkpoint])

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

    def _save_before_stop(self, error: BaseException) -> None:
        """Keep the work since the last checkpoint when training stops in the middle."""
        trainer = self.trainer
        step = trainer.state.global_step
        what = signal.Signals(error.signum).name if isinstance(error, TrainingInterrupted) else type(error).__name__
        told = f"training was stopped by {what} after step {step}"
        # Processes that do not all stop here must not wait for one another.
        together_here = (
            isinstance(error, TrainingInterrupted)
            or getattr(error, "on_all", False)
            or trainer.accelerator.num_processes == 1
        )
        wanted = trainer.args.save_strategy != SaveStrategy.NO and step > self.saved_step
        if (
            wanted
            and together_here
            and self._savable
            and not isinstance(error, NonFiniteError | folders.DiskFullError)
        ):
            try:
                self.save()
            except Exception as fault:
                logger.error("%s; saving failed: %s: %s", told, type(fault).__name__, fault)
        if not trainer.args.should_save:
            return
        if self.last_saved is None:
            if step or isinstance(error, TrainingInterrupted):  # else nothing is lost, and the error says it all
                logger.warning("%s; this run has saved no checkpoint", told)
        elif trainer.args.save_only_model:
            logger.warning("%s; the newest weights are in %s (save_only_model: no resuming)", told, self.last_saved)
        else:
            hint = "go on with trainer.train(resume_from_checkpoint=True)"
            logger.warning("%s; the newest checkpoint is %s: %s", told, self.last_saved, hint)

    # Called by the loop.

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remember the state, and look at the weights before anything is spent on them."""
        check_weights(self.trainer.shared.trainable_parameters(), f"after step {state.global_step}")
        self.mark()
        self._savable = True

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Weights change now."""
        self._savable = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Weights and step counter belong together again."""
        self._state, self._savable = None, True
