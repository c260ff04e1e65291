"""Starts a script as two processes over gloo, under a time limit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]


def run_both(script: str, folder: Path, *arguments: str, limit: float = 60) -> list[int]:
    """Run `tests/invariants/<script> <folder> <arguments>` as rank 0 and rank 1; returns their exit codes.

    What they print is in `<folder>/log<rank>.txt`.

    Raises:
        subprocess.TimeoutExpired: one is not done after `limit` seconds, which would be a deadlock.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    workers = []
    for rank in range(2):
        with log_of(folder, rank).open("w") as log:
            workers.append(
                subprocess.Popen(
                    [sys.executable, str(ROOT / "tests/invariants" / script), str(folder), *arguments],
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        return [worker.wait(limit) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def log_of(folder: Path, rank: int) -> Path:
    """Where a process's output lies."""
    return folder / f"log{rank}.txt"


def ends_of_logs(folder: Path) -> str:
    """The last lines of both, for a message."""
    return "\n".join(log_of(folder, rank).read_text(encoding="utf-8")[-3000:] for rank in range(2))


def seen_by_both(folder: Path) -> list[dict[str, Any]]:
    """What rank 0 and rank 1 have saved as `<folder>/rank<rank>.pt`."""
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def gap(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest difference of any weight; both have the same names."""
    assert ours.keys() == theirs.keys()
    assert ours
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
