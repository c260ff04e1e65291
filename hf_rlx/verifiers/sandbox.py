"""Boxes for code that nobody has read, at a level that is probed and never lowered silently.

    level    what holds the code                                                      needs
    strong   bubblewrap: own user, processes, network and files; seccomp; limits      user namespaces, bubblewrap
    medium   Landlock: reads the interpreter, writes one folder; seccomp; limits      Linux 5.13, no privilege
    unsafe   limits only; `allow_unsafe_execution=True` in Python code                nothing

A level counts as there when a program that tries to break out of it was run in it and got nowhere: containers differ
in what they allow, and a version number does not tell. Without a level there is `SandboxUnavailable`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from hf_rlx.verifiers import landlock, seccomp
from hf_rlx.verifiers.box_layout import PACKAGES, Layout, Limits, python_layout
from hf_rlx.verifiers.boxes import Box, BoxFailureError, BoxKind, CandidateError, Ended, Nursery, new_id
from hf_rlx.verifiers.wire import ProtocolError, decode

Level = Literal["strong", "medium", "unsafe"]
Wanted = Literal["auto", "strong", "medium"]

_log = logging.getLogger(__name__)
_probe_lock = threading.Lock()
_probed: dict[str, str] = {}

_PROBE = '''
import os, socket, threading

def tries(secret, outside, port, victim):
    """What worked of the things that must not, and what did not of the things that must."""
    wrong = []

    def refused(name, act):
        try:
            act()
        except OSError:
            return
        wrong.append(name)

    def fork():
        if os.fork() == 0:
            os._exit(0)

    refused("read a file of the host", lambda: open(secret).read())
    refused("wrote a file of the host", lambda: open(outside, "w"))
    refused("wrote into the root folder", lambda: open("/hf_rlx_probe", "w"))
    refused("reached a TCP port of the host", lambda: socket.create_connection(("127.0.0.1", port), timeout=1))
    refused("may signal a process of the host", lambda: os.kill(victim, 0))
    refused("started a process", fork)
    if hasattr(os, "unshare"):
        refused("made a user namespace", lambda: os.unshare(0x10000000))
    done = []
    thread = threading.Thread(target=done.append, args=(1,))
    thread.start()
    thread.join(5)
    if done != [1]:
        wrong.append("no thread runs")
    with open(os.path.join(os.environ["TMPDIR"], "own"), "w") as file:
        file.write("x")
    return wrong
'''

_ADVICE = """To get a level: install bubblewrap (`apt-get install bubblewrap`) where user namespaces are allowed,
or use a kernel with seccomp and Landlock (Linux 5.13 or newer, `landlock` in /sys/kernel/security/lsm). Where Ubuntu's
AppArmor blocks it ("setting up uid map: Permission denied"), allow it: a file /etc/apparmor.d/bwrap that says
`abi <abi/4.0>, include <tunables/global> profile bwrap /usr/bin/bwrap flags=(unconfined) { userns, }`, then
`systemctl reload apparmor`. To run code of a model with nothing around it: allow_unsafe_execution=True in Python."""


class SandboxUnavailable(RuntimeError):  # noqa: N818 - it says what is the case
    """No box of the wanted level can be had here. Names what was probed, with what result, and how to get one."""

    stops_run = True


@dataclass(frozen=True)
class Job:
    """A box with a job in it, and until when it may take.

    Attributes:
        box: where it runs. ident: the id of the last message. deadline: on `time.monotonic`'s clock.
    """

    box: Box
    ident: str
    deadline: float


def _kind_of(level: Level, layout: Layout, limits: Limits, landlock_abi: int | None) -> BoxKind | str:
    """What boxes of this level are like, or why there are none here."""
    if seccomp.known_machine() is None:
        return "boxes need Linux on 64-bit x86_64 or aarch64"
    if level == "strong":
        program = shutil.which("bwrap")
        return BoxKind(level, layout, limits, program) if program else "bubblewrap (bwrap) is not on the PATH"
    try:
        version = landlock.abi()
    except OSError as error:
        return f"no Landlock: {error}"
    return BoxKind(level, layout, limits, abi=min(version, landlock_abi or version))


def _break_out(kind: BoxKind) -> str:
    """Run the probe in a box: "" when it is tight, else what is wrong with it."""
    try:
        nursery = Nursery(kind, warm=0)
    except BoxFailureError as error:
        return str(error)
    listener = socket.create_server(("127.0.0.1", 0))
    box = None
    try:
        with tempfile.TemporaryDirectory() as folder, listener:
            os.chmod(folder, 0o755)
            secret = Path(folder, "secret")
            secret.write_text("secret", encoding="utf-8")
            arguments = [str(secret), str(Path(folder, "made")), listener.getsockname()[1], os.getpid()]
            box = nursery.take()
            job = _called(box, kind, _PROBE, 10.0)
            wrong = decode(call(job, "tries", arguments))
            return "; ".join(map(str, wrong))
    except (BoxFailureError, CandidateError, ProtocolError) as error:
        return str(error)
    finally:
        if box is not None:
            box.kill()
        nursery.close()


def _called(box: Box, kind: BoxKind, code: str, seconds: float) -> Job:
    """Load code as a module in a box.

    Raises:
        CandidateError: it raises, exits, or does not end in time.
    """
    ident, deadline = new_id(), time.monotonic() + seconds
    content = {"mode": "call", "id": ident, "code": code, "path": list(kind.layout.path)}
    _value(box.ask(content, ident, deadline))
    return Job(box, ident, deadline)


class CandidateRaisedError(CandidateError):
    """The code raised an exception, whose type's name is `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__("a value that is no plain data" if kind == "_Refused" else f"raised {kind}")
        self.kind = kind


def _value(message: dict[str, Any]) -> Any:
    if "e" in message:
        raise CandidateRaisedError(str(message["e"])[:80])
    if "v" not in message:
        raise CandidateError("answer off the protocol: no value")
    return message["v"]


def call(job: Job, name: str, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Call a function of the code in a box; its value as undecoded JSON.

    Raises:
        CandidateError: it raises, ends, is late, or answers with what is no value.
        ValueError: arguments that are no plain values.
    """
    ident = new_id()
    return _value(job.box.ask((ident, name, list(args), dict(kwargs or {})), ident, job.deadline))


class Sandbox:
    """Boxes of the best level that there is, or of the one that is named.

    Args:
        level: "auto" takes "strong", else "medium", else raises; a named level is that or an error.
        packages: what candidates may import beside the standard library, if it is installed.
        limits: of a job.
        warm: boxes started ahead, so that a verdict does not wait for one.
        read: more files and folders of the host that the boxes may read and execute.
        allow_unsafe_execution: run code with nothing but limits around it where no level is to be had.
        landlock_abi: use no newer Landlock than this; None uses the kernel's.

    Attributes:
        level: what it is. findings: what probing found wrong, by level.

    Raises:
        SandboxUnavailable: no such level here.
        ValueError: an unknown level.
    """

    def __init__(
        self,
        level: Wanted = "auto",
        *,
        packages: Sequence[str] = PACKAGES,
        limits: Limits | None = None,
        warm: int = 4,
        read: Sequence[str] = (),
        allow_unsafe_execution: bool = False,
        landlock_abi: int | None = None,
    ) -> None:
        if level not in get_args(Wanted):
            raise ValueError(f"level must be one of {list(get_args(Wanted))}, not {level!r}")
        self.warm = warm
        self.findings: dict[str, str] = {}
        self._kind = self._probe(level, python_layout(packages).with_paths(read), limits or Limits(), landlock_abi)
        if self._kind is None and allow_unsafe_execution and sys.platform == "linux":
            self._kind = BoxKind("unsafe", python_layout(packages), limits or Limits())
            warnings.warn(
                "code of the model runs on this machine without a sandbox (allow_unsafe_execution=True): it can read "
                "and write what you can",
                stacklevel=2,
            )
        if self._kind is None:
            found = "; ".join(f"{name}: {what}" for name, what in self.findings.items())
            raise SandboxUnavailable(f"no sandbox of level {level!r} here. Probed: {found}.\n{_ADVICE}")
        self.level: str = self._kind.level
        _log.info("sandbox level: %s%s", self.level, f" ({self.findings})" if self.findings else "")
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._nursery: Nursery | None = None
        self._inherited: list[Nursery] = []  # of the process that this one was forked from; kept, never used

    def _probe(self, level: Wanted, layout: Layout, limits: Limits, landlock_abi: int | None) -> BoxKind | None:
        """The first wanted level that holds; what was wrong with the others goes to `findings`."""
        wanted: tuple[Level, ...] = ("strong", "medium") if level == "auto" else (level,)
        for name in wanted:
            kind = _kind_of(name, layout, limits, landlock_abi)
            if isinstance(kind, BoxKind):
                with _probe_lock:
                    key = repr((kind, os.getpid()))
                    if key not in _probed:
                        _probed[key] = _break_out(kind)
                    found = _probed[key]
                if not found:
                    return kind
            else:
                found = kind
            self.findings[name] = found
        return None

    def __getstate__(self) -> dict[str, Any]:
        """Without the process, which a copy starts anew."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_nursery", "_inherited")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _nursery=None, _inherited=[], _owner=os.getpid())

    def _living(self) -> Nursery:
        if self._owner != os.getpid():  # after a fork: the lock may be held by a thread that is not here
            self._inherited += [self._nursery] if self._nursery else []
            self._lock, self._nursery, self._owner = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._nursery is None or not self._nursery.alive:
                if self._nursery is not None:
                    self._nursery.close()
                assert self._kind is not None
                self._nursery = Nursery(self._kind, self.warm)
            return self._nursery

    @property
    def kind(self) -> BoxKind:
        """Level, layout and limits of the boxes."""
        assert self._kind is not None
        return self._kind

    @contextlib.contextmanager
    def load(self, code: str, seconds: float) -> Iterator[Job]:
        """Code loaded as a module in a box of its own, for `call`; the box ends with the block.

        Args:
            code: Python source.
            seconds: wall time from now for all that happens in the box.

        Raises:
            CandidateError: loading raises, exits, or is late. BoxFailureError: no box starts.
        """
        nursery = self._living()
        box = nursery.take()
        try:
            yield _called(box, self.kind, code, seconds)
        finally:
            box.kill()

    @contextlib.contextmanager
    def open(self, content: dict[str, Any], seconds: float, ident: str = "") -> Iterator[Job]:
        """A box that was given a job (see `box_child.py`), not yet waited for; `path` is filled in.

        Raises:
            BoxFailureError: no box starts.
        """
        nursery = self._living()
        box = nursery.take()
        try:
            box.send(self._filled(content))
            yield Job(box, ident, time.monotonic() + seconds)
        finally:
            box.kill()

    def _filled(self, content: dict[str, Any]) -> dict[str, Any]:
        return {"path": list(self.kind.layout.path), **content}

    def run_program(self, code: str, stdin: str, seconds: float) -> Ended:
        """Run code as a program and return how it ended and what it printed.

        Raises:
            CandidateError: late, or too much output. BoxFailureError: no box starts.
        """
        content = {"mode": "program", "code": code, "stdin": stdin.encode("utf-8", "surrogatepass")}
        with self.open(content, seconds) as job:
            start = time.monotonic()
            return replace(job.box.finish(job.deadline), seconds=time.monotonic() - start)

    @contextlib.contextmanager
    def folder(self) -> Iterator[Folder]:
        """A folder that several commands write, one after the other; removed at the end."""
        nursery = self._living()
        with nursery.work_folder() as name:
            yield Folder(self, nursery, name)

    def close(self) -> None:
        """End every box and the process that keeps them; a later job starts them again. Idempotent."""
        if self._owner == os.getpid():
            with self._lock:
                if self._nursery is not None:
                    self._nursery.close()
                    self._nursery = None


@dataclass(frozen=True)
class Folder:
    """Commands in boxes that share one folder. Nothing outside of boxes opens a file in it."""

    sandbox: Sandbox
    nursery: Nursery
    name: str

    def run(
        self,
        argv: Sequence[str],
        seconds: float,
        files: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
    ) -> Ended:
        """Write files into the folder, then run a program in it, which must be readable in the box (`read`).

        Raises:
            CandidateError: late, or too much output. BoxFailureError: no box starts.
        """
        where = "/work" if self.sandbox.level == "strong" else os.path.join(self.nursery.base, self.name)
        box = self.nursery.start(self.name)
        try:
            box.wait_ready()
            content = {"mode": "exec", "argv": list(argv), "files": files or {}, "env": env or {}, "cwd": where}
            box.send(self.sandbox._filled(content))
            return box.finish(time.monotonic() + seconds)
        finally:
            box.kill()
