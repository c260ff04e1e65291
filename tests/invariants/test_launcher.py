"""accelerate's configuration files in `examples/` start two processes that train; on CPUs here."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "examples" / "configs" / "accelerate").glob("*.yaml"))
# What a file needs beside itself, and the facts of the run that prove it was heeded.
FLAGS = {"ddp": [], "fsdp2": ["--fsdp"], "deepspeed_zero2": []}
FACTS = {
    "ddp": {"fsdp": False, "zero": False},
    "fsdp2": {"fsdp": True, "zero": False},
    "deepspeed_zero2": {"fsdp": False, "zero": True},
}


def test_every_file_is_tried():
    assert {path.stem for path in FILES} == set(FLAGS) == set(FACTS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_starts_two_processes_that_train(path, tmp_path):
    """`accelerate launch --config_file ...` as in the file's first line; the checkpoint says how it ran."""
    if "deepspeed" in path.stem and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = tmp_path / "run"
    # The file names GPUs; the variable has both processes on the CPU all the same.
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    flags = "--model tiny --dataset arithmetic --max-steps 2 --save-steps 2 --eval-strategy no"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)),
            *("--main_process_port", str(port), "-m", "hf_rlx.cli", "grpo", "--output-dir", str(run)),
            *("--per-device-train-batch-size", "8", *flags.split(), *FLAGS[path.stem]),
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    facts = json.loads((run / "checkpoint-2" / "run.json").read_text(encoding="utf-8"))
    assert facts["world_size"] == 2
    assert {"fsdp": facts["fsdp"], "zero": facts.get("zero", False)} == FACTS[path.stem]
    assert (run / "adapter_model.safetensors").is_file()
