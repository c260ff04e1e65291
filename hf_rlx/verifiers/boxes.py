"""The trainer's side of boxes: the nursery process, boxes started ahead, and the pipes of one box.

A `Box` is used once, from one thread, through four pipes of its own. Nothing here waits without a deadline, reads
without a limit, or opens a file that a box could have touched.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hf_rlx.verifiers.box_layout import Layout, Limits
from hf_rlx.verifiers.wire import SIZE, ProtocolError, parse_line

_START = 20.0  # seconds a box or the nursery may take to start; not a part of any job's time
_ERRORS_KEPT = 4096
_FIRST_UID, _UIDS = 61184, 4000  # the range that systemd keeps for users without a name
_HERE = Path(__file__).parent


class BoxFailureError(Exception):
    """The box, not what runs in it, failed: it did not start, or the nursery died."""


class CandidateError(Exception):
    """What runs in the box is at fault: over a limit, dead, or off the protocol. The text is the reason."""


@cache
def _payload() -> bytes:
    """The box's program, compiled, in a frame."""
    source = (_HERE / "box_child.py").read_text(encoding="utf-8")
    return _frame_of(compile(source, "<box>", "exec", dont_inherit=True, optimize=2))


def _frame_of(content: Any) -> bytes:
    data = marshal.dumps(content)
    return len(data).to_bytes(4, "big") + data


@dataclass(frozen=True)
class BoxKind:
    """What the boxes of one nursery are like: `level` is "strong", "medium" or "unsafe"; `abi` is Landlock's."""

    level: str
    layout: Layout
    limits: Limits
    bwrap: str = ""
    abi: int = 0


@dataclass(frozen=True)
class Ended:
    """A program's end: exit code (negative: signal), what it printed, the start of what it complained, and how long
    it took since it was given its job."""

    code: int
    out: bytes
    err: bytes
    seconds: float = 0.0


@dataclass
class Box:
    """One box. `kill` it in any case.

    Attributes:
        ident: its number at the nursery.
        control, reply, out, err, status: our ends of its pipes.
        outgoing: what is to be sent. line, printed, complained, answer: what came from the other four.
        ended: the pipes that are at their end. complaints: bytes on the error stream.
    """

    ident: int
    nursery: Nursery
    control: int
    reply: int
    out: int
    err: int
    status: int
    outgoing: bytearray = field(default_factory=bytearray)
    line: bytearray = field(default_factory=bytearray)
    printed: bytearray = field(default_factory=bytearray)
    complained: bytearray = field(default_factory=bytearray)
    answer: bytearray = field(default_factory=bytearray)
    ended: set[int] = field(default_factory=set)
    complaints: int = 0

    def wait_ready(self) -> None:
        """Wait until the box takes a job.

        Raises:
            BoxFailureError: it ended before, or takes too long.
        """
        try:
            ready = self.read_line(time.monotonic() + _START)
        except CandidateError as error:
            self._pump(time.monotonic() + 0.5, lambda: bool(self.answer))
            complaint = self.complained.decode(errors="replace").strip()[-300:]
            raise BoxFailureError(f"the box did not start ({complaint or error})") from error
        if ready != b"ready":
            raise BoxFailureError(f"the box started with {ready[:80]!r}")

    def send(self, content: Any) -> None:
        """Put a frame on its way; it goes out while the next line is awaited."""
        self.outgoing += _frame_of(content)

    def read_line(self, deadline: float) -> bytes:
        """The next line of the box.

        Raises:
            CandidateError: none by the deadline, the box is at its end, or it prints or says too much.
        """
        if not self._pump(deadline, lambda: b"\n" in self.line):
            raise CandidateError("ended without an answer" if self.reply in self.ended else "time-out")
        line, _, rest = bytes(self.line).partition(b"\n")
        self.line = bytearray(rest)
        return line

    def ask(self, content: Any, ident: str, deadline: float) -> dict[str, Any]:
        """Send a frame and return the message that answers it.

        Raises:
            CandidateError: as `read_line`, and for an answer that is none, is not to this, or comes with more.
        """
        self.send(content)
        return self.read_message(ident, deadline)

    def read_message(self, ident: str, deadline: float) -> dict[str, Any]:
        """The next message, which must carry the id that was sent last and be alone.

        Raises:
            CandidateError: as `ask`.
        """
        try:
            message = parse_line(self.read_line(deadline))
        except ProtocolError as error:
            raise CandidateError(f"answer off the protocol: {error}") from error
        if message.get("id") != ident or self.line:
            raise CandidateError("answer off the protocol: not to what was asked")
        return message

    def finish(self, deadline: float) -> Ended:
        """Wait for the program's end.

        Raises:
            CandidateError: not by the deadline, or more output than allowed. BoxFailureError: the nursery died.
        """
        if not self._pump(deadline, lambda: self.status in self.ended):
            raise CandidateError("time-out")
        self._pump(time.monotonic(), lambda: False)  # what is left in the pipes of the dead
        if not self.answer:
            raise BoxFailureError("the nursery died")
        return Ended(int(self.answer), bytes(self.printed), bytes(self.complained))

    def kill(self) -> None:
        """End it, with all that runs in it, and close the pipes. Idempotent."""
        if self.control < 0:
            return
        self.nursery.tell({"do": "kill", "id": self.ident})
        self.__del__()

    def __del__(self) -> None:
        if self.control < 0:
            return
        for descriptor in (self.control, self.reply, self.out, self.err, self.status):
            os.close(descriptor)
        self.control = -1

    def _pump(self, deadline: float, done: Any) -> bool:
        """Move bytes until `done()`, which is then True, or the deadline or every pipe's end, which is False."""
        buffers = {self.reply: self.line, self.out: self.printed, self.err: self.complained, self.status: self.answer}
        poller = select.poll()
        for descriptor in buffers.keys() - self.ended:
            poller.register(descriptor, select.POLLIN)
        feeding = False
        while not done():
            if bool(self.outgoing) != feeding:
                feeding = not feeding
                (poller.register(self.control, select.POLLOUT) if feeding else poller.unregister(self.control))
            left = deadline - time.monotonic()
            events = poller.poll(max(0, left * 1000))
            if not events and left <= 0:
                return False
            for descriptor, _ in events:
                if descriptor == self.control:
                    self._feed()
                elif not self._drain(descriptor, buffers[descriptor]):
                    poller.unregister(descriptor)
                    self.ended.add(descriptor)
            if self.reply in self.ended and self.status in self.ended:
                return done()
        return True

    def _feed(self) -> None:
        try:
            sent = os.write(self.control, self.outgoing[: 1 << 16])
            del self.outgoing[:sent]
        except BlockingIOError:
            return
        except BrokenPipeError:  # nobody reads there any more, which shows on the other pipes
            self.outgoing.clear()

    def _drain(self, descriptor: int, buffer: bytearray) -> bool:
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return True
        if descriptor == self.err:
            self.complaints += len(data)
            buffer += data[: max(0, _ERRORS_KEPT - len(buffer))]
        else:
            buffer += data
        if max(len(self.printed), self.complaints) > self.nursery.kind.limits.output:
            raise CandidateError("more output than allowed")
        if len(self.line) > SIZE + 1024:
            raise CandidateError("an answer larger than allowed")
        return bool(data)


def _bootstrap() -> str:
    """Python code that runs the nursery without the packages' `__init__`, which import what it does not need."""
    folders = {"hf_rlx": str(_HERE.parent), "hf_rlx.verifiers": str(_HERE)}
    return (
        "import sys, types\n"
        f"for name, folder in {folders!r}.items():\n"
        "    module = types.ModuleType(name)\n    module.__path__ = [folder]\n    sys.modules[name] = module\n"
        "from hf_rlx.verifiers.box_nursery import main\nmain()"
    )


class Nursery:
    """The nursery process, and its boxes. Every method may be called from any thread.

    Args:
        kind: of its boxes.
        warm: boxes that are started ahead.

    Raises:
        BoxFailureError: the process does not start.
    """

    def __init__(self, kind: BoxKind, warm: int) -> None:
        self.kind = kind
        self.warm = warm
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._next = 0
        self._ready: deque[Box] = deque()
        self.base = tempfile.mkdtemp(prefix="hf_rlx-")
        os.chmod(self.base, 0o755)
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings: dict[str, Any] = {"level": kind.level, "layout": asdict(kind.layout), "limits": asdict(kind.limits)}
        settings |= {"base": self.base, "bwrap": kind.bwrap, "abi": kind.abi, "first_uid": _FIRST_UID}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _bootstrap()],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                cwd="/",
            )
        self.link.settimeout(_START)
        try:
            self.link.send(json.dumps(settings).encode())
            answer = self.link.recv(1 << 16)
        except OSError:
            answer = b""
        if not answer:
            self.process.kill()
            complaint = self.process.communicate()[1].decode(errors="replace").strip()
            shutil.rmtree(self.base, ignore_errors=True)
            self.link.close()
            raise BoxFailureError(f"the nursery did not start: {complaint[-300:]}")
        told = json.loads(answer)
        self.drops: bool = told["drops"]
        self.notes: list[str] = told["notes"]
        self._finalizer = weakref.finalize(self, _end, self.process, self.link, self.base, self.owner)

    @property
    def alive(self) -> bool:
        """The process runs, and is this process's own: a fork of the trainer has none."""
        return self.owner == os.getpid() and self.process.poll() is None and self._finalizer.alive

    def tell(self, message: dict[str, Any], descriptors: list[int] | None = None) -> bool:
        """Send a message; False when the nursery is gone."""
        if self.owner != os.getpid():
            return False
        try:
            socket.send_fds(self.link, [json.dumps(message).encode()], descriptors or [])
        except OSError:
            return False
        return True

    def start(self, work: str = "") -> Box:
        """Start a box and do not wait for it.

        Args:
            work: name of a folder that boxes of this nursery share, one after the other; "" for none.

        Raises:
            BoxFailureError: the nursery is gone.
        """
        with self._lock:
            ident = self._next
            self._next += 1
        control, reply, out, err, status = (os.pipe() for _ in range(5))
        theirs = [control[0], reply[1], out[1], err[1], status[1]]
        ours = [control[1], reply[0], out[0], err[0], status[0]]
        for descriptor in ours:
            os.set_blocking(descriptor, False)
        uid = _FIRST_UID + (int(work.rpartition("-")[2]) if work else ident) % _UIDS
        told = self.tell({"do": "start", "id": ident, "uid": uid, "work": work}, theirs)
        for descriptor in theirs:
            os.close(descriptor)
        box = Box(ident, self, ours[0], ours[1], ours[2], ours[3], ours[4])
        if not told:
            box.kill()
            raise BoxFailureError("the nursery is gone")
        box.outgoing += _payload()
        with contextlib.suppress(CandidateError):  # a box that is dead already shows it when it is used
            box._pump(time.monotonic(), lambda: not box.outgoing)
        return box

    def take(self) -> Box:
        """A box that is ready, preferably one that was started ahead.

        Raises:
            BoxFailureError: none starts.
        """
        with self._lock:
            box = self._ready.popleft() if self._ready else None
        if box is not None:
            self._refill()
            try:
                box.wait_ready()
                return box
            except BoxFailureError:  # one of them died while it waited; a new one tells whether others do
                box.kill()
        box = self.start()
        self._refill()
        try:
            box.wait_ready()
        except BaseException:
            box.kill()
            raise
        return box

    def _refill(self) -> None:
        while self.warm > len(self._ready):
            box = self.start()
            with self._lock:
                self._ready.append(box)

    @contextlib.contextmanager
    def work_folder(self) -> Iterator[str]:
        """A name for `start(work=...)`, whose folder is removed at the end."""
        with self._lock:
            name = f"work-{self._next}"
            self._next += 1
        try:
            yield name
        finally:
            self.tell({"do": "forget", "work": name})

    def close(self) -> None:
        """End the process and every box, and wait for that. Idempotent."""
        with self._lock:
            boxes = list(self._ready)
            self._ready.clear()
        for box in boxes:
            box.kill()
        self._finalizer()


def _end(process: subprocess.Popen, link: socket.socket, base: str, owner: int) -> None:
    """Close the link, on which the nursery kills its boxes and ends; in the process that started it only."""
    if owner != os.getpid():
        return
    link.close()
    try:
        process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()  # its boxes die with it
        process.communicate()
    shutil.rmtree(base, ignore_errors=True)


def new_id() -> str:
    """An id that nobody guesses."""
    return secrets.token_hex(8)
