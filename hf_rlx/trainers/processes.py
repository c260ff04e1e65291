"""Agreement between the processes of a run: what one of them meets, all act on at the same point.

A process that stops alone leaves the others in their next collective call, for as long as the group's timeout (half
an hour). So they tell one another of a failure where it is likely, and all of them stop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

logger = logging.getLogger(__name__)


class ProcessError(RuntimeError):
    """Another process failed; the message says which one and how."""

    on_all = True


def agreed(flag: bool) -> bool:
    """Whether any process says True; every process must call it at the same point."""
    state = PartialState()
    if state.num_processes == 1:
        return flag
    value = torch.tensor(int(flag), device=state.device)
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
    return bool(value)


def raise_together(error: BaseException | None) -> None:
    """Raise `error` here and, in every other process, an error that names it. Every process must call it at the same
    point, with None where all is well.

    Raises:
        `error` itself where it was met.
        ProcessError: in the others, e.g. "rank 1: RewardError: reward function f raised ...".
    """
    state = PartialState()
    if state.num_processes == 1:
        if error is not None:
            raise error
        return
    told = gather_object([None if error is None else f"rank {state.process_index}: {type(error).__name__}: {error}"])
    failures = [message for message in told if message is not None]
    if error is not None:
        error.on_all = True  # type: ignore[attr-defined]
        logger.error("%s; all %d processes stop", failures[0], len(told))
        raise error
    if failures:
        raise ProcessError("; ".join(failures))


@contextmanager
def together(apply: bool = True) -> Iterator[None]:
    """A block that every process runs; where one of them raises in it, all do at its end.

    The block must hold no collective call that a failing process would miss. `apply` False: an ordinary block.
    """
    if not apply:
        yield
        return
    fault: Exception | None = None
    try:
        yield
    except Exception as error:
        fault = error
    raise_together(fault)
