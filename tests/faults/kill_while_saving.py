"""Children that are killed while they save, one after the other, in one folder; run by test_checkpoint_faults.py.

Arguments: folder, kills. Forks after the imports, so that a child costs only its training.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from hf_rlx.persistence import folders
from tests.invariants.test_resume import make


def child(folder: Path, ready: int) -> None:
    """Go on from the newest checkpoint and save at every step, each file a little slower than the disk is."""
    flush, write = folders._flush, folders.begin

    def slow(path: Path) -> None:
        time.sleep(0.002)
        flush(path)

    def begin(target: Path, needed: int) -> Path:
        os.write(ready, b"s")
        return write(target, needed)

    folders._flush, folders.begin = slow, begin
    trainer = make(folder, max_steps=1000, lr_scheduler_type="constant", save_total_limit=2)
    trainer.train(resume_from_checkpoint=bool(folders.checkpoints(folder)))


def main() -> None:
    """After every kill the newest checkpoint must be found whole."""
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    dice, steps = random.Random(5), [0]
    for _ in range(kills):
        read, ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            try:
                child(folder, ready)
            finally:
                os._exit(3)
        os.close(ready)
        for _ in range(dice.randint(2, 4)):  # a save or two pass, then one is hit somewhere
            assert os.read(read, 1) == b"s", "the child ended by itself"
        time.sleep(dice.random() * 0.12)
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        os.close(read)
        found = folders.find(folder, True)
        steps.append(int(found.name.rsplit("-", 1)[1]))
    assert steps == sorted(steps), steps
    assert steps[-1] > kills
    print("resumable after", len(steps) - 1, "kills, at step", steps[-1])


if __name__ == "__main__":
    main()
