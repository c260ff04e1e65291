"""Calls that may never return, in processes that a deadline kills.

One process, the zygote, imports what the work needs once, then forks a child for every job: a child costs a few
milliseconds and starts warm. The zygote is a fresh interpreter, so neither torch nor the caller's threads are forked,
and it has one thread that only waits, so it is always there to kill.

    caller (any thread)              zygote                       child
    socket + limit       ------->    fork                 ----->  reads the job, answers on the socket, exits
                                     SIGKILL at the limit ----->
    answer or obituary   <-------    tells how the child ended

Nobody uses a signal handler or an alarm. When the caller's process ends in any way, the zygote sees its socket closed
or its parent gone, and kills its children; children die with the zygote.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

_START = 120.0  # seconds to import; not a part of a job's time
_GRACE = 5.0  # seconds for a killed process to go
_LATE = 1.0  # seconds after the limit in which the zygote must have told
_TICK = 0.5  # seconds between looks at the parent
_HEADER = struct.Struct("d")
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG in linux/prctl.h
# The work needs no more of the environment, tokens least of all.
_KEPT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "LANG", "LC_ALL", "TMPDIR")


class WorkersBrokenError(RuntimeError):
    """The zygote cannot start: an import fails, or the work fails its own test."""

    stops_run = True


@dataclass(frozen=True)
class Outcome:
    """What came of a job.

    Args:
        value: what the work returned; None where it did not.
        lost: "late": killed at its limit. "crashed": the child died in native code or of too much memory. "broken":
            not the job's fault (twice over): killed from outside, or the zygote died.
        how: how it ended, for messages.
        cpu: seconds of processor time that a lost job had; 0.0 where nobody knows.
    """

    value: Any = None
    lost: Literal["", "late", "crashed", "broken"] = ""
    how: str = ""
    cpu: float = 0.0


class WorkerPool:
    """Runs `work(job) -> reply`, both JSON, in killable processes. Usable from any thread, and after a fork.

    Args:
        work: "module:function", imported by the zygote.
        warm: "module:function" called once before the first job; what it raises breaks the pool.
        memory: bytes of address space that a child may have.
        slots: children at a time; a job that waits for one has not started its limit. None: one a processor, at
            least 2.
        paths: folders to import from, before `sys.path`.

    Raises:
        ValueError: the system is not a POSIX one.
    """

    def __init__(
        self,
        work: str,
        warm: str | None = None,
        *,
        memory: int = 2 << 30,
        slots: int | None = None,
        paths: Sequence[str] = (),
    ) -> None:
        if not hasattr(os, "fork"):
            raise ValueError("killable workers need fork, which this system has not")
        self._spec = {"work": work, "warm": warm, "memory": memory}
        self._paths = [os.path.abspath(path) for path in [*paths, *sys.path]]  # "" is the working directory
        self._slots = slots or max(2, os.cpu_count() or 1)
        self._renew()
        _POOLS.add(self)

    def _renew(self) -> None:
        self._free = threading.BoundedSemaphore(self._slots)
        self._guard = threading.Lock()
        self._zygote: _Zygote | None = None

    def start(self) -> None:
        """Start the zygote without waiting for its imports; else the first job does."""
        with self._guard:
            if self._zygote is None:
                self._zygote = _Zygote(self._spec, self._paths)
                weakref.finalize(self, self._zygote.stop)

    def run(self, job: Any, timeout: float) -> Outcome:
        """The outcome of one job after at most `timeout` seconds of its own, and a little for killing it.

        Raises:
            WorkersBrokenError: the zygote does not start.
        """
        message = json.dumps(job).encode() + b"\n"
        outcome = Outcome(lost="broken")
        with self._free:
            for _ in range(2):
                self.start()
                zygote = self._zygote
                assert zygote is not None
                outcome, sound = zygote.ask(message, timeout)
                if not sound:
                    self._drop(zygote)
                if outcome.lost != "broken":
                    break
        return outcome

    def close(self) -> None:
        """Kill all processes; a later job starts new ones."""
        if self._zygote is not None:
            self._drop(self._zygote)

    def _drop(self, zygote: _Zygote) -> None:
        with self._guard:
            if self._zygote is zygote:
                self._zygote = None
        zygote.stop()


_POOLS: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked process must neither use nor keep open its parent's zygote."""
    for pool in list(_POOLS):
        if pool._zygote is not None:
            pool._zygote.control.close()
        pool._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


class _Zygote:
    """The caller's side of one zygote process."""

    def __init__(self, spec: dict[str, Any], paths: list[str]) -> None:
        self.owner = os.getpid()
        self.control, theirs = socket.socketpair()
        self._ready = threading.Lock()
        self._is_ready = False
        self._fault = ""
        code = f"import sys; sys.path[:] = {paths!r}; from {__name__} import serve; "
        code += f"serve({theirs.fileno()}, {self.owner}, {spec!r})"
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=kept | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},  # the same order in every run
            start_new_session=True,  # a process group to kill, and no Ctrl-C from the terminal
        )
        theirs.close()

    def wait_ready(self) -> bool:
        """Whether the zygote has imported its work; False where it died first.

        Raises:
            WorkersBrokenError: the import or the warm-up failed.
        """
        with self._ready:
            if not self._is_ready and not self._fault:
                self.control.settimeout(_START)
                try:
                    line = _line(self.control, time.monotonic() + _START)
                except OSError:
                    line = b""
                if not line:
                    return False
                self._fault = json.loads(line)["fault"]
                self._is_ready = not self._fault
            if self._fault:
                raise WorkersBrokenError(f"the worker process cannot do its work: {self._fault}")
            return True

    def ask(self, message: bytes, timeout: float) -> tuple[Outcome, bool]:
        """The outcome of one job, and whether the zygote is in order."""
        try:
            if not self.wait_ready():
                return Outcome(lost="broken", how="it died while it started"), False
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    socket.send_fds(self.control, [_HEADER.pack(timeout)], [theirs.fileno()])
                deadline = time.monotonic() + timeout + _LATE
                ours.settimeout(timeout + _LATE)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its obituary can still be read
                    ours.sendall(message)
                answer = _line(ours, deadline)
        except OSError as error:
            return Outcome(lost="broken", how=str(error)), False
        if not answer:
            return Outcome(lost="broken", how="no answer"), False
        kind, value, cpu = json.loads(answer)
        return Outcome(value) if kind == "done" else Outcome(None, kind, value, cpu), True

    def stop(self) -> None:
        """Kill the zygote and its children. Nothing in a fork of the process that owns them."""
        if os.getpid() != self.owner or self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE)


def _line(sock: socket.socket, deadline: float) -> bytes:
    """Bytes up to a newline; b"" at the end of the stream or the deadline."""
    found = bytearray()
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return b""
        sock.settimeout(left)
        try:
            chunk = sock.recv(1 << 16)
        except TimeoutError:
            return b""
        if not chunk:
            return b""
        found += chunk
        if b"\n" in chunk:
            return bytes(found.split(b"\n", 1)[0]) + b"\n"


# The zygote's side.


@dataclass
class _Child:
    pid: int
    conn: socket.socket
    deadline: float
    alive: int  # the read end of a pipe that only the child holds open
    late: bool = False


def _resolved(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def serve(control_fd: int, parent: int, spec: dict[str, Any]) -> None:
    """The zygote: import the work, then fork a child for every socket that comes, until the parent is gone."""
    control = socket.socket(fileno=control_fd)
    fault = ""
    try:
        work = _resolved(spec["work"])
        if spec["warm"]:
            _resolved(spec["warm"])()
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):  # the parent is gone: the loop sees it
        control.sendall(json.dumps({"fault": fault}).encode() + b"\n")
    if fault:
        return
    gc.collect()
    gc.freeze()  # children copy fewer pages
    children: dict[int, _Child] = {}
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    try:
        while os.getppid() == parent:
            now = time.monotonic()
            until = min([c.deadline for c in children.values() if not c.late] + [now + _TICK])
            for fd, _ in waiting.poll(max(0, math.ceil((until - now) * 1000))):
                if fd != control.fileno():
                    waiting.unregister(fd)
                    _bury(children.pop(fd))
                    continue
                header, fds, _, _ = socket.recv_fds(control, _HEADER.size, 1)
                if not header or not fds:
                    return
                child = _fork(socket.socket(fileno=fds[0]), _HEADER.unpack(header)[0], work, control, spec["memory"])
                children[child.alive] = child
                waiting.register(child.alive, select.POLLIN | select.POLLHUP)
            for child in children.values():
                if not child.late and time.monotonic() >= child.deadline:
                    child.late = True
                    os.kill(child.pid, signal.SIGKILL)  # not yet waited for, so the number is still its own
    finally:
        for child in children.values():
            os.kill(child.pid, signal.SIGKILL)


def _fork(conn: socket.socket, limit: float, work: Any, control: socket.socket, memory: int) -> _Child:
    alive, held = os.pipe()
    zygote = os.getpid()
    pid = os.fork()
    if pid == 0:
        _run(conn, limit, work, control, memory, zygote)
    os.close(held)
    return _Child(pid, conn, time.monotonic() + limit, alive)


def _run(conn: socket.socket, limit: float, work: Any, control: socket.socket, memory: int, zygote: int) -> NoReturn:
    """The child: one job, one answer, no way back into the zygote's code."""
    try:
        _confine(limit, memory, zygote)
        control.close()
        job = json.loads(_line(conn, time.monotonic() + limit))
        conn.settimeout(limit)
        conn.sendall(json.dumps(["done", work(job), 0.0]).encode() + b"\n")
        os._exit(0)
    except BaseException as error:  # MemoryError and SystemExit too are this job's end, not the zygote's
        conn.sendall(json.dumps(["crashed", f"{type(error).__name__}: {str(error)[:200]}", 0.0]).encode() + b"\n")
    finally:
        os._exit(1)


def _confine(limit: float, memory: int, zygote: int) -> None:
    import resource  # not on every system

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    if os.getppid() != zygote:
        os._exit(1)
    seconds = math.ceil(limit) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _bury(child: _Child) -> None:
    """Collect a child that has ended and tell how; a caller that has its answer is gone and does not hear it."""
    _, status, usage = os.wait4(child.pid, 0)
    os.close(child.alive)
    code = os.waitstatus_to_exitcode(status)
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    kind = "late" if child.late or code == -signal.SIGXCPU else "broken" if code == -signal.SIGKILL else "crashed"
    with contextlib.suppress(OSError), child.conn:
        child.conn.settimeout(0)
        child.conn.sendall(json.dumps([kind, how, usage.ru_utime + usage.ru_stime]).encode() + b"\n")
