"""Killable workers: limits that hold, answers that are right, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hf_rlx.verifiers.workers import WorkerPool, WorkersBrokenError

ROOT = Path(__file__).resolve().parents[2]
WORK = """
import os, re, signal, sys, time
def work(job):
    if job == "sleep":
        time.sleep(60)
    if job == "hold":  # the interpreter lock, in one C call
        re.match(r"(a+)+$", "a" * 60 + "b")
    if job == "ignore":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGXCPU):
            signal.signal(number, signal.SIG_IGN)
        while True:
            pass
    if job == "abort":
        os.abort()
    if job == "exit":
        sys.exit(3)
    if job == "raise":
        raise ValueError("no such thing")
    if job == "memory":
        return len(bytearray(1 << 40))
    if job == "write":
        os.write(os.open(__file__ + ".written", os.O_CREAT | os.O_WRONLY), b"x")
    if job == "lost":
        os.kill(os.getpid(), signal.SIGKILL)
    if job == "zygote":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if job == "secret":
        return os.environ.get("HF_TOKEN")
    if job == "parent":
        return os.getppid()
    if job == "pid":
        return os.getpid()
    return job
def bad_warm():
    raise AssertionError("1 is not 2")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to import the work from."""
    (tmp_path / "some_work.py").write_text(WORK)
    return tmp_path


@pytest.fixture
def pool(folder: Path):
    found = WorkerPool("some_work:work", paths=[str(folder)], slots=4)
    assert found.run("warm", 5.0).value == "warm"
    yield found
    found.close()


def processes(parent: int) -> list[int]:
    """Living children and grandchildren, zombies included."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True).stdout
    parents = dict(map(int, line.split()) for line in listed.splitlines()[1:])
    children = [pid for pid, of in parents.items() if of == parent]
    return children + [pid for child in children for pid, of in parents.items() if of == child]


def gone(pid: int) -> bool:
    """Whether a process has ended, waited for up to five seconds."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        status = Path(f"/proc/{pid}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            return True
        time.sleep(0.02)
    return False


def test_answers_are_the_works_own(pool: WorkerPool):
    for job in ("text", 7, [1, {"a": None}], "x" * 300_000):
        assert pool.run(job, 5.0).value == job
    assert pool.run("pid", 5.0).value != pool.run("pid", 5.0).value


@pytest.mark.parametrize("job", ["sleep", "hold", "ignore"])
def test_what_hangs_is_killed_at_its_limit(pool: WorkerPool, job: str):
    start = time.perf_counter()
    outcome = pool.run(job, 0.4)
    assert 0.4 <= time.perf_counter() - start < 0.4 + 0.5
    assert (outcome.lost, outcome.how) == ("late", "by SIGKILL")
    assert outcome.cpu < 0.2 or job != "sleep"


@pytest.mark.parametrize(
    ("job", "how"),
    [
        ("abort", "by SIGABRT"),
        ("exit", "SystemExit: 3"),
        ("raise", "ValueError: no such thing"),
        ("memory", "MemoryError: "),
        ("write", "OSError: [Errno 27] File too large"),
    ],
)
def test_a_crash_is_the_jobs_own_end(pool: WorkerPool, job: str, how: str):
    outcome = pool.run(job, 5.0)
    assert (outcome.lost, outcome.how) == ("crashed", how)
    assert pool.run("next", 5.0).value == "next"


@pytest.mark.parametrize("job", ["lost", "zygote"])
def test_what_is_killed_from_outside_is_tried_twice(pool: WorkerPool, job: str):
    assert pool.run(job, 2.0).lost == "broken"
    assert pool.run("next", 5.0).value == "next"


def test_a_zygote_that_died_is_replaced(pool: WorkerPool):
    assert pool._zygote is not None
    os.killpg(pool._zygote.process.pid, signal.SIGKILL)
    assert pool.run("next", 5.0).value == "next"


def test_a_zygote_that_stopped_is_replaced(pool: WorkerPool):
    """Its callers wait a second more than their limit, twice, and get no verdict; later ones are served."""
    assert pool._zygote is not None
    os.kill(pool._zygote.process.pid, signal.SIGSTOP)
    start = time.perf_counter()
    assert pool.run("next", 0.2).value == "next"
    assert time.perf_counter() - start < 4


def test_work_that_cannot_be_imported_or_fails_its_test_is_told(folder: Path):
    with pytest.raises(WorkersBrokenError, match="No module named 'nothing'"):
        WorkerPool("nothing:work").run("a", 1.0)
    broken = WorkerPool("some_work:work", "some_work:bad_warm", paths=[str(folder)])
    for _ in range(2):
        with pytest.raises(WorkersBrokenError, match="AssertionError: 1 is not 2"):
            broken.run("a", 1.0)
    broken.close()


def test_secrets_stay_here(folder: Path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 20)
    pool = WorkerPool("some_work:work", paths=[str(folder)])
    assert pool.run("secret", 5.0).value is None
    pool.close()


def test_two_hundred_hanging_jobs_leave_nothing_behind(folder: Path):
    """From 50 threads, 25 children at a time, mixed with jobs that return; each job keeps its own limit."""
    pool = WorkerPool("some_work:work", paths=[str(folder)], slots=25)
    assert pool.run("warm", 5.0).value == "warm"
    assert pool._zygote is not None
    zygote = pool._zygote.process.pid
    jobs = ["sleep", "sleep", "sleep", "hold"] * 50
    start = time.perf_counter()
    with ThreadPoolExecutor(50) as threads:
        hanging = [threads.submit(pool.run, job, 0.3) for job in jobs]
        fine = [threads.submit(pool.run, n, 10.0) for n in range(20)]
        assert [f.result().lost for f in hanging] == ["late"] * 200
        assert [f.result().value for f in fine] == list(range(20))
    # 8 rounds of 0.3 s, and what 50 spinning children on few processors take to be forked and buried.
    assert time.perf_counter() - start < 20
    time.sleep(0.1)
    assert processes(os.getpid()).count(zygote) == 1
    assert not [p for p in processes(zygote) if not gone(p)]
    pool.close()
    assert gone(zygote)


def test_a_forked_process_has_workers_of_its_own(pool: WorkerPool):
    """It neither uses nor ends its parent's."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            assert pool._zygote is None
            os.write(write, str(pool.run("parent", 5.0).value).encode())
            pool.close()
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    assert pool._zygote is not None
    assert int(os.read(read, 20)) != pool._zygote.process.pid == pool.run("parent", 5.0).value
    os.close(read)


def test_a_thread_that_ends_takes_no_worker_with_it(folder: Path):
    """The zygote belongs to the process, not to the thread that asked first."""
    pool = WorkerPool("some_work:work", paths=[str(folder)])
    thread = threading.Thread(target=pool.run, args=("first", 5.0))
    thread.start()
    thread.join()
    assert pool._zygote is not None
    before = pool._zygote
    assert pool.run("second", 5.0).value == "second"
    assert pool._zygote is before
    pool.close()


TRAINER = """
import ctypes, os, signal, sys, threading, time
from hf_rlx.verifiers.workers import WorkerPool
pool = WorkerPool("some_work:work", paths=[sys.argv[1]])
pool.run("warm", 30.0)
if sys.argv[2] == "handled":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print(pool._zygote.process.pid, flush=True)
for _ in range(2):
    threading.Thread(target=pool.run, args=("sleep", 40.0), daemon=True).start()
time.sleep(0.3)
if sys.argv[2] == "leaked" and ctypes.CDLL(None).fork() == 0:  # Python does not see this fork
    time.sleep(8)
    os._exit(0)
print("busy", flush=True)
if sys.argv[2] == "end":
    sys.exit(0)
time.sleep(40)
"""


@pytest.mark.parametrize("how", ["end", "handled", "leaked", "SIGTERM", "SIGKILL"])
def test_the_end_of_the_process_is_the_end_of_all(folder: Path, how: str):
    """Whether it returns, handles SIGTERM, dies of it, or is killed: no worker outlives it.
    "leaked": not even when another process holds the socket to the zygote open."""
    mode = how if how in ("end", "handled", "leaked") else "unhandled"
    with subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(folder), mode], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        zygote = int(process.stdout.readline())
        assert process.stdout.readline() == "busy\n"
        if how != "end":
            children = processes(zygote)
            assert len(children) == 2
            process.send_signal(signal.SIGKILL if how in ("leaked", "SIGKILL") else signal.SIGTERM)
        else:
            children = []
        code = process.wait(10)
    assert code == {"end": 0, "handled": 0, "SIGTERM": -signal.SIGTERM}.get(how, -signal.SIGKILL)
    assert all(gone(pid) for pid in [zygote, *children])
