"""Reward functions in worker processes of their own, which a deadline can kill.

A thread that hangs can be left behind, but one that holds the interpreter lock (`9**9**9`, a runaway regular
expression) stops every thread, and a crash in native code ends the process. An `Isolated` function runs in a fresh
interpreter instead. It gets there by pickle (dill: by name where it can be imported, by value, with the globals that
it refers to, where it is defined in a script or notebook), as it is when the object is made. This module imports no
torch, so a worker has none unless the function brings it.

    parent                                     worker
    call(args, kwargs)  -- number, seed, arguments, pickled, by pipe -> function(*args, **kwargs)
                        <- number, value or error, what was logged --
    over the deadline:  SIGKILL to the worker's process group; the next call gets a new worker
    end of the pipe:    the worker died: one more try with a new one
    no reply, or one to another call:  killed, and counted as dead

Before a call `random`, numpy and torch are seeded, so that a worker's replacement gives the same rewards. What the
function prints goes where the parent's output goes. Isolation is no sandbox: the function has the rights of this
process, and what it returns or raises is unpickled here, which runs code that it chooses.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import enum
import inspect
import os
import pickle
import queue
import reprlib
import signal
import subprocess
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from multiprocessing.connection import Connection, Pipe
from types import SimpleNamespace
from typing import Any, Literal

from hf_rlx.rollout.seeding import Seeder

_START = 120.0  # seconds that a worker has to import what the function needs; not a part of a call's time
_GRACE = 5.0  # seconds for a killed process to go
_TRACE = 4000  # characters of a worker's traceback that are kept
_NUMBER = 8  # bytes of a call's number, ahead of message and reply
_HISTORY = 100  # entries of the trainer's log that a worker gets with a call
_READY = b"ready"
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG in linux/prctl.h


class Log(enum.Enum):
    """Stands in a call's arguments for the callbacks `log_extra` and `log_metric`, which the worker has itself."""

    EXTRA = "log_extra"
    METRIC = "log_metric"


@dataclass
class Shown:
    """Stands in a reply for a value that cannot be pickled: the name of its type, and its shortened repr."""

    kind: str
    text: str


@dataclass
class Reply:
    """What came of a call.

    Attributes:
        value: what the function returned; if it cannot be pickled (a generator), an object that only looks like it.
        error: what it raised, with the worker's traceback as a note; None otherwise.
        extra, metrics: what it gave to `log_extra` (column -> values) and `log_metric` ((name, value) pairs).
        deaths: workers that died in this call, or whose reply could not be used.
        lost: "late": killed at the deadline. "died": both tries ended with the worker's death.
        how: how the last of them died.
    """

    value: Any = None
    error: BaseException | None = None
    extra: dict[str, list] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)
    deaths: int = 0
    lost: Literal["", "late", "died"] = ""
    how: str = ""


class Isolated:
    """A function in a worker process, which starts with the first call and ends with `close` or this process.

    Calls may come from any thread; they run one at a time.

    Args:
        function: what to call.
        name: for errors.
        timeout: seconds a call may run; None is no limit.

    Raises:
        ValueError: the function cannot be pickled, or the system is not a POSIX one.
    """

    def __init__(self, function: Callable[..., Any], name: str, timeout: float | None = None) -> None:
        if os.name != "posix":
            raise ValueError("isolate_rewards needs process groups, which this system has not; leave it off")
        self.timeout = timeout
        self._shipped = _ship(function, name)
        self._busy = threading.Lock()  # held during a call
        self._guard = threading.Lock()  # held while the worker is exchanged
        self._closed = False
        self._number = 0  # of the call
        self._worker: subprocess.Popen | None = None
        self._pipe: Connection | None = None
        self._end: Callable[[], int | None] = lambda: None

    def call(self, args: list[Any], kwargs: dict[str, Any], seed: int | None = None) -> Reply:
        """Call the function. A worker that dies is replaced and asked once more; faults are told by the reply.

        `seed` in [0, 2^32): of the global generators of `random`, numpy and torch in the call; None leaves them.
        """
        try:
            message = pickle.dumps((seed, args, kwargs), pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            error.add_note("the arguments of a reward function must be picklable with isolate_rewards")
            return Reply(error=error)
        with self._busy:
            how = ""
            for deaths in range(2):
                reply, how = self._ask(message)
                if reply is not None:
                    reply.deaths = deaths
                    return reply
            return Reply(deaths=2, lost="died", how=how)

    def close(self) -> None:
        """Kill the worker; a call that runs now is answered as one whose worker died."""
        with self._guard:
            self._closed = True
            if self._worker is not None:
                _kill(self._worker)
        if self._busy.acquire(timeout=_GRACE):  # the caller's thread, not this one, reads from the pipe
            self._stop()
            self._busy.release()

    def _ask(self, message: bytes) -> tuple[Reply | None, str]:
        """One try; (None, how it died) where the worker did not live to answer."""
        try:
            pipe = self._start()
            if isinstance(pipe, Reply):
                return pipe, ""
            self._number += 1
            number = self._number.to_bytes(_NUMBER, "little")
            pipe.send_bytes(number + message)
            if not pipe.poll(self.timeout):
                self._stop()
                return Reply(lost="late"), ""
            answer = pipe.recv_bytes()
        except (EOFError, OSError):
            return None, self._stop()
        except BaseException:  # Ctrl-C: the answer to this call must not become that to the next
            self._stop()
            raise
        if answer[:_NUMBER] != number:  # e.g. of a process that the function forked and let return
            self._stop()
            return None, "its reply was not to this call"
        try:
            return _unpacked(answer[_NUMBER:]), ""
        except Exception as error:
            self._stop()
            return None, f"its reply cannot be read: {type(error).__name__}: {text_of(error)}"

    def _start(self) -> Connection | Reply:
        """The pipe to a worker that has loaded the function; or its error where it could not."""
        if self._pipe is not None:
            return self._pipe
        with self._guard:
            if self._closed:
                raise EOFError("closed")
            self._pipe, theirs = Pipe()
            paths = [os.path.abspath(path) for path in sys.path]  # "" is the working directory, which may change
            code = f"import sys; sys.path[:] = {paths!r}; from {__name__} import work; "
            code += f"work({theirs.fileno()}, {os.getpid()})"
            self._worker = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a process group to kill, and no Ctrl-C from the terminal
            )
            theirs.close()
            self._end = weakref.finalize(self, _finish, self._worker, self._pipe, os.getpid())
        self._pipe.send_bytes(self._shipped)
        if not self._pipe.poll(_START):
            raise EOFError(f"not ready after {_START:g} s")
        answer = self._pipe.recv_bytes()
        if answer == _READY:
            return self._pipe
        self._stop()
        return _unpacked(answer)

    def _stop(self) -> str:
        """End the worker, if there is one; says how it ended."""
        with self._guard:
            if self._worker is None:
                return "closed"
            code = self._end()
            self._worker, self._pipe = None, None
        if code is None:
            return "it did not end"
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


class Crew:
    """Several workers of one function, of which calls from several threads take a free one each.

    Args:
        members: at least one, with one time limit.
    """

    def __init__(self, members: list[Isolated]) -> None:
        self.timeout = members[0].timeout
        self._members = members
        self._free: queue.SimpleQueue[Isolated] = queue.SimpleQueue()
        for member in members:
            self._free.put(member)

    def call(self, args: list[Any], kwargs: dict[str, Any], seed: int | None = None) -> Reply:
        """See `Isolated.call`; waits while all are busy."""
        member = self._free.get()
        try:
            return member.call(args, kwargs, seed)
        finally:
            self._free.put(member)

    def close(self) -> None:
        """Close all."""
        for member in self._members:
            member.close()


def plain_state(state: Any) -> Any:
    """What a worker gets as `trainer_state`: of a dataclass (transformers' TrainerState) a namespace with its fields
    that are numbers, texts or None and the last 100 entries of its `log_history`; else the object where it can be
    pickled, None where not."""
    if is_dataclass(state) and not isinstance(state, type):
        values = {f.name: getattr(state, f.name) for f in fields(state)}
        plain = {name: value for name, value in values.items() if isinstance(value, str | int | float | None)}
        return SimpleNamespace(**plain, log_history=list(values.get("log_history") or [])[-_HISTORY:])
    try:
        pickle.dumps(state)
    except Exception:
        return None
    return state


def text_of(error: BaseException) -> str:
    """The text of somebody else's exception, whose `__str__` may be broken itself."""
    try:
        return str(error)
    except Exception:
        return "(its message cannot be read)"


def _ship(function: Callable[..., Any], name: str) -> bytes:
    import dill

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dill.PicklingWarning)
            return dill.dumps(function, recurse=True)  # without `recurse`: all globals of the script, models too
    except Exception as error:
        raise ValueError(
            f"the reward function {name!r} cannot be sent to a worker process (isolate_rewards): {text_of(error)}. "
            "Define it in a module, or let it refer to nothing that cannot be pickled"
        ) from error


def _kill(worker: subprocess.Popen) -> None:
    """The worker and what it started. Not yet waited for, so that its number cannot be another process's."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)


def _finish(worker: subprocess.Popen, pipe: Connection, owner: int) -> int | None:
    """Kill, collect, and close the pipe; the exit code. Nothing in a fork of the process that owns the worker."""
    if os.getpid() != owner:
        return None
    _kill(worker)
    pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(_GRACE)
    return worker.returncode


def _unpacked(answer: bytes) -> Reply:
    """The reply of a worker; an error whose class this process lacks becomes one of the same name."""
    value, fault, extra, metrics = pickle.loads(answer)
    if fault is None:
        if isinstance(value, Shown):
            value = type(value.kind, (), {"__repr__": lambda self, text=value.text: text})()
        return Reply(value, None, extra, metrics)
    name, text, ordinary, trace, pickled = fault
    error: Any = None
    if pickled is not None:
        try:
            error = pickle.loads(pickled)
        except Exception as own:
            trace += f"\n(the exception itself could not be read: {text_of(own)})"
    if not isinstance(error, BaseException):
        error = type(name, (Exception if ordinary else BaseException,), {})(text)
    error.add_note(f"in its worker process:\n{trace}")
    return Reply(None, error, extra, metrics)


# The worker's side.


def work(fd: int, parent: int) -> None:
    """Load the function that comes first through the pipe `fd`, then answer calls until the pipe or `parent` ends."""
    _end_with(parent)
    pipe, own, seeder = Connection(fd), os.getpid(), Seeder()
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        shipped = pipe.recv_bytes()
        try:
            import dill

            function = dill.loads(shipped)
        except BaseException as error:
            error.add_note("while the worker process loaded the function")
            pipe.send_bytes(_packed(None, _fault(error), {}, []))
            return
        pipe.send_bytes(_READY)
        while True:
            message = pipe.recv_bytes()
            reply = _answer(function, message[_NUMBER:], seeder)
            if os.getpid() != own:  # a fork by the function, which came back like its parent
                os._exit(0)
            pipe.send_bytes(message[:_NUMBER] + reply)


def _answer(function: Callable[..., Any], message: bytes, seeder: Seeder) -> bytes:
    extra: dict[str, list] = {}
    metrics: list[tuple[str, float]] = []
    callbacks: dict[Log, Callable[..., None]] = {
        Log.EXTRA: lambda column, values: extra.setdefault(column, []).extend(values),
        Log.METRIC: lambda name, value: metrics.append((name, float(value))),
    }

    def own(argument: Any) -> Any:
        return callbacks[argument] if isinstance(argument, Log) else argument

    try:
        seed, args, kwargs = pickle.loads(message)
        seeder.seed(seed)
        value = function(*map(own, args), **{name: own(argument) for name, argument in kwargs.items()})
        value = asyncio.run(value) if inspect.iscoroutine(value) else value
        return _packed(value, None, extra, metrics)
    except BaseException as error:  # SystemExit too is an answer
        return _packed(None, _fault(error), {}, [])
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def _packed(value: Any, fault: tuple | None, extra: dict[str, list], metrics: list[tuple[str, float]]) -> bytes:
    try:
        return pickle.dumps((value, fault, extra, metrics), pickle.HIGHEST_PROTOCOL)
    except Exception:
        if isinstance(value, list | tuple):
            raise
        # A generator, dict.values(): no list of rewards anyway, and to be refused as where nothing is isolated.
        value = Shown(type(value).__name__, reprlib.repr(value))
        return pickle.dumps((value, fault, extra, metrics), pickle.HIGHEST_PROTOCOL)


def _fault(error: BaseException) -> tuple[str, str, bool, str, bytes | None]:
    """An exception as (class name, text, whether it is an ordinary one, traceback, pickle if it can be)."""
    trace = "".join(traceback.format_exception(error))[-_TRACE:]
    try:
        pickled = pickle.dumps(error)
    except Exception:  # a class of the script: by name and text only
        pickled = None
    return type(error).__name__, text_of(error), isinstance(error, Exception), trace, pickled


def _end_with(parent: int) -> None:
    """Die when the parent does, also in a call that never returns (Linux; elsewhere the end of the pipe must do)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL)
    if os.getppid() != parent:  # it went before
        os._exit(1)
