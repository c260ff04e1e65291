"""What the benchmarks share: a process for each side, a clock, memory, and the machine's rates."""

from __future__ import annotations

import copy
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, TrainerCallback


class Clock(TrainerCallback):
    """Wall time of every optimizer step, and of named stages inside it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._stages: dict[str, float] = {}
        self._start = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._stages, self._start = {}, time.perf_counter()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """For trainers that never say that a step begins."""
        self.begin()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """A step begins."""
        self.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """A step has ended."""
        self.steps.append({"step": time.perf_counter() - self._start, **self._stages})
        self.begin()

    def note(self, name: str, value: float) -> None:
        """Add to a stage."""
        self._stages[name] = self._stages.get(name, 0.0) + value

    def wrap(self, owner: Any, method: str, name: Callable[[], str] | str) -> None:
        """Count the seconds of a method under `name`."""
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            stage, start = name if isinstance(name, str) else name(), time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.note(stage, time.perf_counter() - start)

        setattr(owner, method, timed)


def lora() -> LoraConfig:
    """The adapter of both sides."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def classifier_of(policy: Any, tokenizer: Any) -> Any:
    """A sequence classifier with one label, of a causal language model's size and weights."""
    config = copy.deepcopy(policy.config)
    config.num_labels, config.pad_token_id = 1, tokenizer.pad_token_id
    made = AutoModelForSequenceClassification.from_config(config).float()
    made.model.load_state_dict(policy.model.state_dict())
    return made


def reset_peak() -> None:
    """Forget the peak of memory that loading the model had, where the system allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("note: the peak includes loading", file=sys.stderr)


def memory_gib(field: str = "VmHWM") -> float:
    """The process's peak (or, with "VmRSS", its present) resident memory, in GiB."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found.group(1)) / 2**20 if found else float("nan")


def work(sides: Mapping[str, Callable[[Any, str], dict[str, Any]]], args: Any) -> None:
    """Run the side `args.worker` in this process and write what it measured to `args.result`."""
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        result = sides[args.worker](args, folder)
    Path(args.result).write_text(json.dumps(result))


def measure(script: str, side: str, options: Mapping[str, Any], python: str = sys.executable) -> dict[str, Any]:
    """Run one side of `script` in a fresh process: medians over its steps, and its peak memory.

    Args:
        side: what `--worker` gets. options: further arguments; True is a flag, False and None leave one out.
        python: interpreter; another environment's finds this repository on its path.

    Raises:
        RuntimeError: the process failed; with the end of its errors.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [python, script, f"--worker={side}", f"--result={result}"]
        for name, value in options.items():
            flag = f"--{name.replace('_', '-')}"
            command += [flag] if value is True else [] if value in (False, None) else [f"{flag}={value}"]
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
        if python != sys.executable:
            environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        raw = json.loads(result.read_text())
    names = sorted({name for step in raw["steps"] for name in step})
    summary = {name: statistics.median(step.get(name, 0.0) for step in raw["steps"]) for name in names}
    return {**summary, "peak": raw["peak"]}


def machine(threads: int) -> tuple[float, float]:
    """Rates of this machine: float32 matrix products in GFLOP/s, reads of memory in GB/s."""
    torch.set_num_threads(threads)
    a, b = torch.randn(2048, 2048), torch.randn(2**26)

    def best(product: Callable[[], Any]) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            product()
            times.append(time.perf_counter() - start)
        return min(times)

    return 2 * 2048**3 / best(lambda: a @ a) / 1e9, b.numel() * 4 / best(lambda: b.sum()) / 1e9
