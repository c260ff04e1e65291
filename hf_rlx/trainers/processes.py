"""Agreement between the processes of a run: what one of them meets, all act on at the same point."""

from __future__ import annotations

import torch
from accelerate import PartialState
from accelerate.utils import gather_object


def agreed(flag: bool) -> bool:
    """Whether any process says True; every process must call it at the same point."""
    state = PartialState()
    if state.num_processes == 1:
        return flag
    value = torch.tensor(int(flag), device=state.device)
    torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX)
    return bool(value)


def raise_together(error: BaseException | None) -> None:
    """Raise `error` here and, in every other process, an error that names it; a process that failed alone would leave
    the others waiting for it for ever. Every process must call it at the same point, with None where all is well.

    Raises:
        the error, or RuntimeError: what another process met.
    """
    if PartialState().num_processes == 1:
        if error is not None:
            raise error
        return
    told = gather_object([None if error is None else f"{type(error).__name__}: {error}"])
    if error is not None:
        raise error
    for rank, message in enumerate(told):
        if message is not None:
            raise RuntimeError(f"process {rank} failed: {message}")
