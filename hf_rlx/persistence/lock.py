"""One run a folder: two that write the same checkpoints would delete each other's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

LOCK = ".run.lock"


@contextmanager
def hold(run: Path) -> Iterator[None]:
    """Hold `run`'s lock inside the block. The system lets go of it when the process dies, however it dies.

    Raises:
        RuntimeError: another run holds it.
    """
    if run.exists() and not run.is_dir():
        raise RuntimeError(f"output_dir {run} is a file; choose another folder")
    run.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RuntimeError(
            f"another run is training in {run} and would overwrite this one's checkpoints; wait for it, stop it, or "
            "choose another output_dir"
        ) from error
    except NotImplementedError:
        logger.warning("%s is on a file system without locks: nothing keeps a second run out of it", run)
    try:
        yield
    finally:
        lock.release()
