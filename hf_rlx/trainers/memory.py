"""Out of memory: micro-batches are halved, once, and the step is done again; rollouts get fewer rows, once."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from hf_rlx.types import Group

if TYPE_CHECKING:
    from hf_rlx.trainers.online import OnlineTrainer
    from hf_rlx.trainers.preference import PreferenceTrainer

logger = logging.getLogger(__name__)
T = TypeVar("T")


class Halvable(Protocol):
    """A micro-batch that can be cut in two that add up to it."""

    @property
    def groups(self) -> Sequence[Group]:
        """What is forwarded."""

    @property
    def mask(self) -> Tensor:
        """(B, R), one row a response."""

    def halves(self) -> list[Any]:
        """Itself where it cannot be cut."""


def out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the machine, refused memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


class Halving:
    """Runs the updates of one trainer; from the first that runs out of memory on, in two halves each.

    The loss is a sum over completions with a denominator that is fixed beforehand, so halves add up to the same
    gradient. With several processes it does not help: one that does a step again would leave the others waiting.
    """

    def __init__(self, trainer: OnlineTrainer | PreferenceTrainer) -> None:
        self.trainer = trainer
        self.on = False
        self._done: list[Any] = []  # of the optimizer step that is being done

    def run(self, model: nn.Module, batch: Halvable) -> Tensor:
        """Forward and backward of a micro-batch; returns its loss.

        Raises:
            torch.OutOfMemoryError: a half does not fit either; the message has the numbers.
        """
        trainer: Any = self.trainer
        if self.on:
            return self._in_halves(model, batch)
        before = trainer.recorded()
        try:
            loss = trainer.forward_backward(model, batch)
            self._done.append(batch)
            return loss
        except Exception as error:
            if trainer.accelerator.num_processes > 1 or not out_of_memory(error):
                raise
        # Outside the handler: the error's traceback holds the activations.
        self.on = True
        logger.warning(
            "out of memory in step %d%s: from here on every micro-batch is done in two halves, which gives the same "
            "gradient; a lower per_device_train_batch_size with more gradient_accumulation_steps is faster",
            trainer.state.global_step + 1,
            _numbers(),
        )
        _release()
        # The failed backward may have reached some parameters: the gradient of the step is made anew.
        model.zero_grad()
        for earlier in self._done:
            self._in_halves(model, earlier)
        trainer.restore_recorded(before)
        return self._in_halves(model, batch)

    def end_step(self) -> None:
        """The optimizer step has its gradient."""
        self._done.clear()

    def _in_halves(self, model: nn.Module, batch: Halvable) -> Tensor:
        try:
            trainer: Any = self.trainer
            return torch.stack([trainer.forward_backward(model, half) for half in batch.halves()]).sum()
        except Exception as error:
            if not out_of_memory(error):
                raise
            tokens = sum(g.num_tokens for g in batch.groups)
            raise torch.OutOfMemoryError(
                f"out of memory in step {self.trainer.state.global_step + 1}, also with half of a micro-batch of "
                f"{len(batch.mask)} completions and {tokens} tokens{_numbers()}; lower per_device_train_batch_size or "
                "max_completion_length, or train an adapter (peft_config)"
            ) from error


class ForwardLimit:
    """The tokens of one forward without gradient; halved, once, where they do not fit.

    Args:
        most: tokens; None: all at once.
    """

    def __init__(self, most: int | None) -> None:
        self.most = most
        self._halved = False

    def run(self, work: Callable[[int | None], Tensor], groups: Sequence[Group]) -> Tensor:
        """`work(limit)` over `groups`.

        Raises:
            torch.OutOfMemoryError: half of them do not fit either.
        """
        largest = max((g.num_tokens for g in groups), default=0)
        tokens = sum(g.num_tokens for g in groups)
        try:
            return work(self.most)
        except Exception as error:
            if not out_of_memory(error):
                raise
            if self._halved or min(tokens, self.most or tokens) <= largest:
                raise torch.OutOfMemoryError(
                    f"out of memory in a forward of at most {max(largest, min(tokens, self.most or tokens))} tokens"
                    f"{_numbers()}; lower max_tokens_per_forward, num_generations or max_completion_length"
                ) from error
        self._halved = True
        self.most = min(tokens, self.most or tokens) // 2
        logger.warning("out of memory%s: from here on forwards without gradient have %d tokens", _numbers(), self.most)
        _release()
        return work(self.most)


def with_fewer_rows(sampler: Any, group: int, work: Callable[[], T]) -> T:
    """Do `work`, a rollout; where it runs out of memory, once more with half of the sampler's rows.

    Args:
        group: completions a prompt; they always decode together.
    """
    rows = int(getattr(sampler, "max_rows", 0))
    try:
        return work()
    except Exception as error:
        if rows <= group or not out_of_memory(error):
            raise
    logger.warning("out of memory in a rollout%s: from here on at most %d rows decode together", _numbers(), rows // 2)
    _release()
    sampler.max_rows = rows // 2
    try:
        return work()
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(
            f"out of memory in a rollout, also with {rows // 2} rows{_numbers()}; lower max_rollout_rows, "
            "num_generations or max_completion_length"
        ) from error


def _release() -> None:
    """Give back what the failed attempt still holds."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _numbers() -> str:
    """What the device says about its memory."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return ""
    free, total = (n / 2**30 for n in torch.cuda.mem_get_info())
    return f" ({free:.1f} of {total:.1f} GiB free, {torch.cuda.max_memory_allocated() / 2**30:.1f} allocated at most)"
