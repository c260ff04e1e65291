"""The process that starts, ends and buries boxes. One a sandbox; it never sees code that is to be judged.

Why not the trainer itself: starting children from a large threaded process is slow and, with work between fork and
exec, unsafe; "die with my parent" means the *thread* that started a child; and what a killed box leaves behind can
only be collected by a subreaper. The nursery is small, has one thread, collects orphans, and ends with the trainer.

    trainer -> nursery   {"do": "start", "id", "uid", "work"} and five descriptors: control, reply, out, err, status
                         {"do": "kill", "id"}; {"do": "forget", "work"}
    nursery -> trainer   the exit code as text into the box's status pipe; once, at start, what can be done here
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from typing import Any

from hf_rlx.verifiers import landlock, seccomp
from hf_rlx.verifiers.box_layout import DEVICES, Layout, Limits, bubblewrap_arguments, bubblewrap_files, outermost

_NEW_MOUNTS, _PRIVATE, _BIND, _NO_SUID, _NO_DEV = 0x20000, (1 << 18) | (1 << 14), 4096 | (1 << 14), 2, 4
_SUBREAPER, _PARENT_DEATH, _DROP_BOUND = 36, 1, 24
_libc = ctypes.CDLL(None, use_errno=True)

BOOT = (
    "import marshal,posix\n"
    "def run(source,names): exec(source,names)\n"
    "def read(n):\n"
    " data=b''\n"
    " while len(data)<n:\n"
    "  part=posix.read(0,n-len(data))\n"
    "  if not part: posix._exit(121)\n"
    "  data+=part\n"
    " return data\n"
    "exec(marshal.loads(read(int.from_bytes(read(4),'big'))),{'__name__':'__main__','run':run})"
)


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    payload = None if data is None else data.encode()
    _checked(_libc.mount(*texts, ctypes.c_ulong(flags), payload), f"mount {target}")


def drop_user(uid: int) -> None:
    """Become another user and group for good, without further groups.

    Raises:
        OSError: not permitted, or the id is not mapped in this user namespace.
    """
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def limit(limits: dict[str, int]) -> None:
    """Soft and hard limits at once, so that a process over one is killed and cannot raise it."""
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def drop_capabilities() -> None:
    """Give up every capability, also those that root's programs would get back, but keep the user."""
    for number in range(64):
        if _libc.prctl(_DROP_BOUND, number, 0, 0, 0) != 0:
            break
    head = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _checked(_libc.capset(head, (ctypes.c_uint32 * 6)()), "capset")


def _reachable(paths: list[str], uid: int) -> list[str]:
    """Those of the paths that another user cannot get at."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(OSError):
            drop_user(uid)
            missing = [p for p in paths if not os.access(p, os.R_OK | (os.X_OK if os.path.isdir(p) else 0))]
            os.write(write_end, json.dumps(missing).encode())
            code = 0
        os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise OSError(f"no process here may become user {uid}")
    return json.loads(text)


def _uncover(paths: list[str]) -> None:
    """In this mount namespace, replace every folder that bars others from these paths by one that holds them only."""
    barred: dict[str, list[str]] = {}
    for path in paths:
        parents = [str(parent) for parent in _parents(path)]
        first = next((p for p in parents if not os.stat(p).st_mode & 0o001), None)
        if first is None:
            raise OSError(f"{path} itself is not readable for others")
        barred.setdefault(first, []).append(path)
    for folder, inside in barred.items():
        held = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in sorted(inside)}
        _mount("none", folder, "tmpfs", _NO_SUID | _NO_DEV, "mode=0755,size=1m")
        for path, descriptor in held.items():
            if not os.path.exists(path):  # else it lies in a folder that was bound before
                os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
                if os.path.isdir(f"/proc/self/fd/{descriptor}"):
                    os.mkdir(path, 0o755)
                else:
                    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
                _mount(f"/proc/self/fd/{descriptor}", path, None, _BIND)
            os.close(descriptor)


def _parents(path: str) -> list[str]:
    parts = path.strip("/").split("/")[:-1]
    return ["/" + "/".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _overfull(folder: str, size: int, files: int = 4096) -> bool:
    """More bytes or entries beneath a folder than allowed; looks at no more entries than that."""
    folders = [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    files -= 1
                    size -= entry.stat(follow_symlinks=False).st_blocks * 512
                    if files < 0 or size < 0:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError:  # gone meanwhile, or closed to us by the box
            continue
    return False


class Nursery:
    """The loop. `settings` is what `boxes.Boxes` sends: level, layout, limits, base folder, bwrap, first uid."""

    def __init__(self, link: socket.socket, settings: dict[str, Any]) -> None:
        self.link = link
        self.level: str = settings["level"]
        self.layout = Layout(**settings["layout"])
        self.limits = Limits(**settings["limits"])
        self.base: str = settings["base"]
        self.bwrap: str = settings["bwrap"]
        self.first_uid: int = settings["first_uid"]
        self.abi: int = settings["abi"]
        self.files = bubblewrap_files(self.layout)
        self.readable = outermost(self.layout.read)
        self.machine = seccomp.known_machine() or ""
        self.filter = b""
        if self.level == "strong":
            self.filter = seccomp.build_filter(self.machine, alone=True)
        self.drops = False  # boxes run as a user of their own
        self.mounts = False  # this process has a mount namespace of its own
        self.running: dict[int, tuple[int, int, str]] = {}  # process id -> box, status descriptor, own folder
        self.notes: list[str] = []

    def prepare(self) -> None:
        """As root: an own mount namespace, a sized scratch folder, and the interpreter in reach of other users."""
        if os.getuid() != 0 or self.level == "unsafe":
            return
        try:
            _checked(_libc.unshare(_NEW_MOUNTS), "unshare")
            _mount("none", "/", None, _PRIVATE)
            self.mounts = True
        except OSError as error:
            self.notes.append(f"no mount namespace of its own ({error})")
        try:
            needed = [os.path.realpath(p) for p in self.layout.read] + ([self.bwrap] if self.bwrap else [])
            barred = _reachable([*needed, self.base], self.first_uid)
            if barred and self.mounts:
                _uncover(barred)
                barred = _reachable([*needed, self.base], self.first_uid)
            self.drops = not barred
            if barred:
                self.notes.append(f"user kept: others cannot reach {barred[0]}")
        except OSError as error:
            self.notes.append(f"user kept: {error}")

    def serve(self) -> None:
        """Take requests until the trainer is gone; then kill what runs and clear the base folder."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        parent = os.getppid()
        poller = select.poll()
        poller.register(self.link, select.POLLIN)
        poller.register(wake_read, select.POLLIN)
        try:
            while os.getppid() == parent:
                for descriptor, _ in poller.poll(250):
                    if descriptor == wake_read:
                        with contextlib.suppress(BlockingIOError):
                            os.read(wake_read, 4096)
                    elif not self.request():
                        return
                self.bury()
                self.watch()
        finally:
            self.end()

    def request(self) -> bool:
        """Do what one message says; False at the end of the link."""
        data, descriptors, _, _ = socket.recv_fds(self.link, 4096, 5)
        if not data:
            return False
        message = json.loads(data)
        if message["do"] == "start":
            self.start(message, descriptors)
        elif message["do"] == "kill":
            self.kill(message["id"])
        else:
            self.remove(os.path.join(self.base, message["work"]))
        return True

    def start(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Fork a box. What goes wrong in it before it runs stands on its error stream, with exit code 125."""
        control, reply, out, err, status = descriptors
        uid, work = message["uid"], message["work"]
        folder = os.path.join(self.base, work or f"box-{message['id']}")
        if (work or self.level != "strong") and not os.path.isdir(folder):
            self.make(folder, uid if self.drops else os.getuid())
        child = os.fork()
        if child == 0:
            try:
                signal.set_wakeup_fd(-1)
                for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE):
                    signal.signal(number, signal.SIG_DFL)
                os.setsid()
                self.become_box(uid, folder, bool(work), (control, out, err, reply))
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(125)
        for descriptor in (control, reply, out, err):
            os.close(descriptor)
        self.running[child] = (message["id"], status, "" if work or self.level == "strong" else folder)

    def make(self, folder: str, uid: int) -> None:
        """A folder that a box may fill, of limited size where this process can mount; else `watch` keeps the limit."""
        os.mkdir(folder, 0o700)
        if self.mounts:
            size = self.limits.scratch_mb << 20
            _mount("none", folder, "tmpfs", _NO_SUID | _NO_DEV, f"mode=0700,uid={uid},gid={uid},size={size}")
        else:
            os.chown(folder, uid, -1)

    def watch(self) -> None:
        """Kill the boxes whose folder on the host's disk holds too much, in bytes or in files."""
        for box, _, folder in [] if self.mounts else list(self.running.values()):
            if folder and _overfull(folder, self.limits.scratch_mb << 20):
                self.kill(box)

    def become_box(self, uid: int, folder: str, work: bool, descriptors: tuple[int, int, int, int]) -> None:
        """In the child: give up everything, then run the interpreter. Does not return."""
        copies = [os.dup(d) if d < 4 else d for d in descriptors]
        for target, descriptor in enumerate(copies):
            os.dup2(descriptor, target, inheritable=True)
        if self.level == "strong":
            filter_fd, write_end = os.pipe()
            os.write(write_end, self.filter)
            os.dup2(filter_fd, 4)
            os.set_inheritable(4, True)  # also when it was 4 already
        os.closerange(5 if self.level == "strong" else 4, 4096)
        if self.drops:
            drop_user(uid)
        elif self.level == "medium":
            drop_capabilities()
        limit(self.limits.rlimits(self.drops))
        _libc.prctl(_PARENT_DEATH, signal.SIGKILL, 0, 0, 0)
        program = [self.layout.python, "-S", "-s", "-P", "-c", BOOT]
        if self.level == "strong":
            inside = folder if work else None
            head = bubblewrap_arguments(self.bwrap, self.layout, self.limits, self.files, 4, inside)
            os.execve(self.bwrap, head + program, {})
        env = {**self.layout.env, "HOME": folder, "TMPDIR": folder}
        os.chdir(folder)
        if self.level == "medium":
            seccomp.forbid_new_privileges()
            write = [folder, "/dev/null"]
            landlock.restrict([*self.readable, *DEVICES], self.layout.listed, write, self.abi)
            seccomp.install(seccomp.build_filter(self.machine, alone=False, pid=os.getpid()))
        os.execve(program[0], program, env)

    def kill(self, box: int) -> None:
        """SIGKILL to the box's process group, if it still runs."""
        for process, (ident, _, _) in self.running.items():
            if ident == box:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
                    os.killpg(process, signal.SIGKILL)

    def bury(self) -> None:
        """Collect what has ended, orphans too, and tell the exit codes."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            if process in self.running:
                _, descriptor, folder = self.running.pop(process)
                if folder:
                    self.remove(folder)
                with contextlib.suppress(OSError):  # nobody waits for it any more
                    os.write(descriptor, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(descriptor)

    def remove(self, folder: str) -> None:
        """Remove a folder of a box; `rm` walks trees deeper than Python's recursion, and follows no link."""
        if self.mounts:
            _libc.umount2(folder.encode(), 2)  # lazily: it goes with its last user
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            return
        except OSError:
            subprocess.run(["/bin/rm", "-rf", "--one-file-system", folder], check=False, stderr=subprocess.DEVNULL)

    def end(self) -> None:
        """Kill every box, collect it, and leave nothing in the base folder."""
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                os.killpg(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.base):
                self.remove(os.path.join(self.base, name))
            os.rmdir(self.base)


def main() -> None:
    """Read the settings from the socket that descriptor 0 is, say what is possible, serve."""
    link = socket.socket(fileno=os.dup(0))
    settings = json.loads(link.recv(1 << 16))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the link's end is the order to stop
    _libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    sys.setswitchinterval(1)
    nursery = Nursery(link, settings)
    nursery.prepare()
    gc.freeze()  # children then share these pages
    link.send(json.dumps({"drops": nursery.drops, "notes": nursery.notes}).encode())
    nursery.serve()
