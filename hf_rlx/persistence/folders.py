"""Checkpoint folders that are whole or not there.

    .tmp-checkpoint-8/     written here, every file hashed into manifest.json, everything flushed to disk
    checkpoint-8/          one rename later
    .old-checkpoint-4/     on its way out: renamed first, so that a half-deleted one is never taken for a checkpoint

A checkpoint is good when every file of its manifest is there with the size and the sha256 that it was written with.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_STAGED, _OLD = ".tmp-", ".old-"
WEIGHTS_STAGED = ".hf_rlx-"  # where `SharedModel.save_pretrained` writes first
_ESSENTIAL = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)$")
_SPARE = 2**20  # bytes beside the tensors: tokenizer, JSON


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message names the file and what to do."""


class DiskFullError(OSError):
    """A checkpoint was not written for want of space; the message has the bytes needed and free."""


def staging(target: Path) -> Path:
    """Where `target` is written before it is renamed."""
    return target.parent / f"{_STAGED}{target.name}"


def begin(target: Path, needed: int) -> Path:
    """Make an empty staging folder for `target`; returns it.

    Args:
        needed: bytes that will be written at least.

    Raises:
        DiskFullError: there is not that much space; nothing was written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = staging(target)
    _remove(folder)
    free = shutil.disk_usage(target.parent).free
    if free < needed + _SPARE:
        raise full(target, needed + _SPARE, free)
    folder.mkdir()
    return folder


def full(target: Path, needed: int, free: int) -> DiskFullError:
    """The error for a full disk."""
    more = " (there may be no inodes or no quota left)" if free > needed else ""
    return DiskFullError(
        errno.ENOSPC,
        f"no space for {target}: it needs {needed:,} bytes and {free:,} are free{more}; earlier checkpoints are "
        "untouched. Free some space or lower save_total_limit, then resume",
    )


def out_of_space(error: BaseException) -> bool:
    """Whether a failed write was one of a full disk, by its code or by its text (safetensors gives the text only)."""
    while error is not None:
        codes = (errno.ENOSPC, errno.EDQUOT)
        if (isinstance(error, OSError) and error.errno in codes) or any(os.strerror(c) in str(error) for c in codes):
            return True
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return False


def abort(target: Path) -> None:
    """Remove what was staged for `target`."""
    shutil.rmtree(staging(target), ignore_errors=True)


def commit(target: Path, facts: dict[str, Any]) -> None:
    """Hash, flush and rename the staged folder to `target`; one of that name makes room first.

    Args:
        facts: go into the manifest beside the files, e.g. step and versions.
    """
    folder = staging(target)
    files = {}
    for path in _files(folder):
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    manifest = {"format": 1, **facts, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for path in _files(folder):
        _flush(path)
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        _flush(path)
    old = target.parent / f"{_OLD}{target.name}"
    if target.exists():
        _remove(old)
        os.rename(target, old)
    os.rename(folder, target)
    _flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def clean(run: Path) -> None:
    """Clear what a killed run left: staged folders go; one that was making room for a successor that never came is
    put back."""
    for path in sorted(run.glob(f"{_OLD}checkpoint-*")):
        target = run / path.name.removeprefix(_OLD)
        if not target.exists() and problem(path) is None:
            os.rename(path, target)
        else:
            _remove(path)
    for path in [*run.glob(f"{_STAGED}checkpoint-*"), *run.glob(f"{WEIGHTS_STAGED}*")]:
        logger.warning("removed %s, which a run that was killed left half written", path)
        _remove(path)


def checkpoints(run: Path) -> list[Path]:
    """Folders named `checkpoint-<step>`, the newest first."""
    if not run.is_dir():
        return []
    found = [(int(match[1]), path) for path in run.iterdir() if (match := _NAME.match(path.name)) and path.is_dir()]
    return [path for _, path in sorted(found, reverse=True)]


def prune(run: Path, limit: int | None, keep: Iterable[Path | str | None] = ()) -> None:
    """Delete checkpoints, the lowest steps first, until `limit` are left; those in `keep` (the one just written,
    the best one) stay and count. One that cannot be deleted is told and left."""
    if limit is None or limit <= 0:
        return
    kept = {Path(path).name for path in keep if path is not None}
    found = checkpoints(run)
    spare = [path for path in found if path.name not in kept]
    for path in spare[::-1][: max(0, len(found) - limit)]:
        old = run / f"{_OLD}{path.name}"
        try:
            _remove(old)
            os.rename(path, old)
            _remove(old)
        except OSError as error:
            logger.warning("%s is over save_total_limit but cannot be deleted: %s", path, error)


def problem(folder: Path) -> CheckpointError | FileNotFoundError | None:
    """What is wrong with a checkpoint, or None: a `FileNotFoundError` for a file that was written and is gone."""
    try:
        items = _listed(folder)
    except FileNotFoundError:
        return CheckpointError(f"{folder} has no {MANIFEST}: it is half written, or not written by hf_rlx")
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
        return CheckpointError(f"{folder / MANIFEST} cannot be read ({error})")
    try:
        for path, _, _ in items:
            if not path.is_file():
                return FileNotFoundError(f"{path} is missing from the checkpoint")
        for path, size, _ in items:
            if path.stat().st_size != size:
                return CheckpointError(f"{path} has {path.stat().st_size:,} bytes, but {size:,} were written")
        for path, _, digest in items:
            if _digest(path) != digest:
                return CheckpointError(f"{path} is damaged: its sha256 is not the one it was written with")
    except OSError as error:
        return CheckpointError(f"{folder} cannot be read: {error}")
    return None


def _listed(folder: Path) -> list[tuple[Path, int, str]]:
    """The files of a manifest with their sizes and digests; ValueError for one that this version did not write."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if manifest["format"] != 1 or _ESSENTIAL not in manifest["files"]:
        raise ValueError("not a list of checkpoint files in format 1")
    for name in manifest["files"]:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"it names a file outside the folder: {name[:80]}")
    return [(folder / name, int(fact["bytes"]), str(fact["sha256"])) for name, fact in manifest["files"].items()]


def find(run: Path, wanted: str | Path | bool) -> Path:
    """The checkpoint to resume from, verified.

    Args:
        run: the run's folder.
        wanted: a folder, or True for the newest good one in `run`; damaged ones are skipped with a warning.

    Raises:
        ValueError: `run` holds no checkpoint.
        FileNotFoundError: the folder, or a file that the manifest lists, is missing.
        CheckpointError: the one asked for, or every one, is damaged.
    """
    if wanted is not True:
        folder = Path(str(wanted))
        inside = checkpoints(folder)
        if inside:
            raise ValueError(f"{folder} is a run, not a checkpoint; resume from {inside[0]}, or from True")
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no checkpoint {folder}")
        fault = problem(folder)
        if fault is None:
            return folder
        others = [p for p in checkpoints(folder.parent) if p != folder and problem(p) is None]
        hint = f"; {others[0]} is whole: resume from it" if others else "; its weights may still load with model="
        raise type(fault)(f"{fault}{hint}")
    found = checkpoints(run)
    if not found:
        raise ValueError(f"no checkpoint found in {run}; start without resume_from_checkpoint")
    for folder in found:
        fault = problem(folder)
        if fault is None:
            return folder
        if isinstance(fault, FileNotFoundError):
            raise FileNotFoundError(f"{fault}; put it back, or delete {folder} to resume from the one before")
        logger.warning("skipped %s: %s", folder.name, fault)
    raise CheckpointError(f"none of the {len(found)} checkpoints in {run} is whole; see the warnings above")


def _remove(path: Path) -> None:
    """Whatever stands there, if anything; a link itself, not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """fsync a file or a folder, so that a power cut after the rename finds what was renamed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some mounted drives cannot flush folders; files they can.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
