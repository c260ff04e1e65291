"""The device and its precision, memory, disk, and the box for code that nobody has read."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hf_rlx.models.loading import mixed_precision_for
from hf_rlx.preflight.report import Finding

GIB = 1024**3
# Control groups, version 2 and 1: limit, what is taken, and what of that is cached files, which are given back.
_CONTAINERS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_LAUNCHED = ("LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION")  # set by launchers
_PRECISIONS = {"bf16": "bfloat16 autocast", "fp16": "float16 autocast", "no": "float32"}


def gpus_without_launcher(count: int) -> str | None:
    """What is wrong where one process sees several GPUs; None: nothing.

    Args:
        count: GPUs that `transformers.Trainer` would wrap the model for.
    """
    if count <= 1:
        return None
    return (
        f"{count} GPUs are visible without a launcher, and DataParallel breaks generation and adapters; "
        "set CUDA_VISIBLE_DEVICES=0 before torch is imported, or start with `accelerate launch`"
    )


def device_of(args: Any = None) -> torch.device:
    """Where a run with this configuration (None: any) would train."""
    if args is not None and getattr(args, "use_cpu", False):
        return torch.device("cpu")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_findings(args: Any = None) -> Iterator[Finding]:
    """Device, precision and free memory.

    Args:
        args: the configuration; None: what a configuration would choose.
    """
    device = device_of(args)
    if device.type != "cuda":
        yield Finding("device", f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads")
        if torch.cuda.is_available():
            yield Finding("GPU", "there is one, but use_cpu=True", "note", "leave use_cpu out to train on it")
    else:
        major, minor = torch.cuda.get_device_capability(device)
        yield Finding("device", f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}")
    count = args.n_gpu if args is not None else 0 if _launched() else torch.cuda.device_count()
    if (problem := gpus_without_launcher(count)) is not None and device.type == "cuda":
        found, _, fix = problem.partition("; ")
        yield Finding("GPUs", found, "problem", fix)
    yield precision_finding(args)
    yield from memory_findings(device)


def _launched() -> bool:
    return any(name in os.environ for name in _LAUNCHED)


def precision_finding(args: Any = None) -> Finding:
    """The precision that is chosen, and why."""
    device = device_of(args)
    best = mixed_precision_for(device)
    chosen = best if args is None else "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    found = _PRECISIONS[chosen]
    if device.type != "cuda":
        if chosen == "bf16":
            slow = "CPUs without AMX or AVX512-BF16 emulate it, and crawl"
            return Finding("precision", f"{found}, as bf16=True says; {slow}", "note", "leave bf16 out: float32")
        return Finding("precision", f"{found}: the run is on a CPU")
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    if best == "bf16":
        if chosen == "bf16":
            return Finding("precision", f"{found}: compute capability {capability} has it (from 8.0 on)")
        return Finding("precision", f"{found}, though the GPU has bfloat16", "note", "leave bf16 and fp16 out")
    if chosen == "no":
        return Finding("precision", f"{found}, which is slow on this GPU", "note", "leave bf16 and fp16 out: float16")
    found += f": compute capability {capability} has no bfloat16 (from 8.0 on); adapters stay float32"
    if torch.cuda.is_bf16_supported():
        found += ". torch.cuda.is_bf16_supported() says True, which is emulation"
    return Finding("precision", found)


def memory_findings(device: torch.device) -> Iterator[Finding]:
    """Free memory of the GPU and of the machine."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found = f"{free / GIB:.2f} of {total / GIB:.2f} GiB free"
        if free < total / 2:
            fix = "something holds the rest: restart the notebook's kernel, or see nvidia-smi"
            yield Finding("GPU memory", found, "problem" if free < 0.1 * total else "note", fix)
        else:
            yield Finding("GPU memory", found)
    here = available_memory()
    if here is None:
        return
    verdict: Any = "ok" if here >= 2 * GIB else "note"
    fix = "" if verdict == "ok" else "close other programs; loading a model needs its weights twice for a moment"
    yield Finding("memory", f"{here / GIB:.2f} GiB available", verdict, fix)


def available_memory() -> int | None:
    """Bytes that programs may still take, the limit of a container included; None: not known here."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:  # not Linux
        return None
    for folder, most, used, cache in _CONTAINERS:
        limit, taken = _number(f"{folder}/{most}"), _number(f"{folder}/{used}")
        if limit is not None and taken is not None:
            found.append(max(limit - taken + _counted(f"{folder}/memory.stat", cache), 0))
    return min(found, default=None)


def _counted(file: str, name: str) -> int:
    """The number behind a name in a file of such lines; 0 where it is not there."""
    try:
        lines = Path(file).read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def _number(file: str) -> int | None:
    try:
        text = Path(file).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def disk_finding(output_dir: str | os.PathLike[str], needed: int = 0) -> Finding:
    """Whether the folder of a run can be written, and what is free there.

    Args:
        output_dir: need not exist.
        needed: bytes of one checkpoint, where they are known.
    """
    folder = Path(output_dir).absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        return Finding("output_dir", f"{there} is a file", "problem", "name another folder as output_dir")
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding("output_dir", f"{there} may not be written", "problem", "name another folder as output_dir")
    free = shutil.disk_usage(there).free
    found = f"{free / GIB:.2f} GiB free at {there}"
    if needed:
        found += f", a checkpoint takes about {needed / GIB:.2f}"
    fix = "free some, set save_total_limit, or name another output_dir"
    if free < max(2 * needed, GIB // 10):  # an old checkpoint is deleted after the new one is there
        return Finding("output_dir", found, "problem", fix)
    return Finding("output_dir", found, "note", fix) if free < GIB else Finding("output_dir", found)


def sandbox_finding() -> Finding:
    """The level of the boxes for code of a model (see `hf_rlx.verifiers.sandbox`), probed by breaking out."""
    from hf_rlx.verifiers.sandbox import Sandbox, SandboxUnavailable

    what = "sandbox for code rewards"
    try:
        box = Sandbox(warm=0)
    except SandboxUnavailable as error:
        found, _, fix = str(error).partition("\n")
        return Finding(what, found, "note", fix)
    return Finding(what, f"level {box.level}" + "".join(f"; {name}: {why}" for name, why in box.findings.items()))
