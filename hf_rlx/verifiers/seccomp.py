"""The system calls that code in a box may not make: a seccomp filter in classic BPF, assembled here without a library.

The filter is a deny-list (interpreters need hundreds of calls) whose main rule is: no new processes. Threads go on
working, and fork bombs, daemons and memory multiplied by forks end with one rule that needs no privilege.

    call                                        answer
    fork, vfork, clone without CLONE_THREAD     EAGAIN, what a full process table answers
    clone3, openat2, calls of newer kernels     ENOSYS, so that libraries take the older call, which can be judged
    namespaces, mounts, tracing, modules, ...   EPERM
    a foreign architecture                      the process is killed

Without namespaces (`alone=False`) the box shares process ids, sockets and files' owners with the host, so further
calls go: signals to others, sockets, and what changes files without opening them, which Landlock does not judge.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEWEST = 450  # last call number that was looked at; the numbers above 424 are the same everywhere
_X32 = 0x40000000

_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E020080  # the second: every namespace flag of clone
_TRUNCATE = 0o1000
_OWNER_COMMANDS = (8, 10, 15)  # fcntl F_SETOWN, F_SETSIG, F_SETOWN_EX: they aim signals at other processes
_OWNER_REQUESTS = (0x8901, 0x8902, 0x5412, 0x541C)  # ioctl FIOSETOWN, SIOCSPGRP, TIOCSTI, TIOCLINUX
_PRCTL = (1, 35, 0x59616D61)  # PR_SET_PDEATHSIG, PR_SET_MM, PR_SET_PTRACER

# name: (x86_64, aarch64); None where the architecture has no such call.
NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "clone3": (435, 435), "openat2": (437, 437),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "move_mount": (429, 429), "open_tree": (428, 428), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None),
    "syslog": (103, 116), "lookup_dcookie": (212, 18), "fanotify_init": (300, 262), "vhangup": (153, 58),
    "modify_ldt": (154, None), "personality": (135, 92), "seccomp": (317, 277), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "move_pages": (279, 239), "migrate_pages": (256, 238), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "semget": (64, 190), "semctl": (66, 191), "semop": (65, 193), "msgget": (68, 186), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "prctl": (157, 167), "fcntl": (72, 25), "ioctl": (16, 29),
    "socket": (41, 198), "tkill": (200, 130), "kill": (62, 129), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "prlimit64": (302, 261),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274), "setpriority": (141, 140), "ioprio_set": (251, 30), "chmod": (90, None),
    "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None), "lchown": (94, None), "fchown": (93, 55),
    "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "truncate": (76, 45),
    "open": (2, None), "openat": (257, 56), "creat": (85, None),
}  # fmt: skip

_NO_PROCESS = ("fork", "vfork")
_UNKNOWN = ("clone3", "openat2")
_JUDGED = ("clone", "prctl", "fcntl", "ioctl", "socket")  # by their arguments
_SHARED_ONLY = (
    "tkill", "kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "prlimit64", "sched_setparam",
    "sched_setscheduler", "sched_setaffinity", "sched_setattr", "setpriority", "ioprio_set", "chmod", "fchmod",
    "fchmodat", "chown", "lchown", "fchown", "fchownat", "utime", "utimes", "futimesat", "utimensat", "setxattr",
    "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr", "truncate", "open", "openat", "creat",
)  # fmt: skip
_SHARED_REFUSED = tuple(
    n for n in _SHARED_ONLY if n not in ("open", "openat", "creat", "prlimit64") and "kill" not in n and "rt_" not in n
)
_LOCAL_SOCKETS = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6, which a network namespace of one's own makes harmless

Program = list[tuple[int, int, int, int]]
"""Instructions as `struct sock_filter` has them: code, jump if true, jump if false (both in instructions), k."""


@dataclass(frozen=True)
class _Call:
    """Offsets within `struct seccomp_data` of the low half of an argument; both architectures are little-endian."""

    index: int

    @property
    def load(self) -> tuple[int, int, int, int]:
        return (_LOAD, 0, 0, _ARGUMENTS + 8 * self.index)


def _answer(error: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, _ERRNO | error if error else _ALLOW)


def _only(argument: int, values: Sequence[int], error: int) -> Program:
    """Allowed when the argument is one of the values, else the error."""
    tests: Program = [(_JUMP_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_Call(argument).load, *tests, _answer(error), _answer(0)]


def _except(argument: int, values: Sequence[int], error: int) -> Program:
    """The error when the argument is one of the values, else allowed."""
    tests: Program = [(_JUMP_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_Call(argument).load, *tests, _answer(0), _answer(error)]


def _threads_only() -> Program:
    """clone: with CLONE_THREAD and no namespace flag, or EPERM for such a flag, or EAGAIN."""
    return [
        _Call(0).load,
        (_JUMP_BITS, 0, 1, _CLONE_NEW),
        _answer(errno.EPERM),
        (_JUMP_BITS, 1, 0, _CLONE_THREAD),
        _answer(errno.EAGAIN),
        _answer(0),
    ]


def _no_hidden_truncation(flags: int) -> Program:
    """open: O_TRUNC on a file opened for reading empties it, and older Landlock judges that as reading."""
    return [
        _Call(flags).load,
        (_JUMP_BITS, 0, 3, _TRUNCATE),
        (_AND, 0, 0, 3),
        (_JUMP_EQUAL, 0, 1, os.O_RDONLY),
        _answer(errno.EPERM),
        _answer(0),
    ]


def _rules(alone: bool, pid: int) -> dict[str, Program]:
    """What each call gets, by name."""
    refused = [n for n in NUMBERS if n not in _NO_PROCESS + _UNKNOWN + _JUDGED + _SHARED_ONLY]
    rules = {name: [_answer(errno.EPERM)] for name in refused}
    rules |= {name: [_answer(errno.EAGAIN)] for name in _NO_PROCESS}
    rules |= {name: [_answer(errno.ENOSYS)] for name in _UNKNOWN}
    rules["clone"] = _threads_only()
    rules["prctl"] = _except(0, _PRCTL, errno.EPERM)
    rules["fcntl"] = _except(1, _OWNER_COMMANDS, errno.EPERM)
    rules["ioctl"] = _except(1, _OWNER_REQUESTS, errno.EPERM)
    rules["socket"] = _only(0, _LOCAL_SOCKETS, errno.EAFNOSUPPORT) if alone else [_answer(errno.EACCES)]
    if alone:
        return rules
    rules |= {name: [_answer(errno.EPERM)] for name in ("tkill", *_SHARED_REFUSED)}
    rules |= {
        name: _only(0, [pid], errno.EPERM) for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
    }
    rules["prlimit64"] = _only(0, [0, pid], errno.EPERM)
    rules["open"], rules["openat"] = _no_hidden_truncation(1), _no_hidden_truncation(2)
    return rules


def _assemble(rules: dict[str, Program], machine: str, newest: int | None) -> bytes:
    """The rules as the kernel reads them: every call not named is allowed, if it is not newer than `newest`."""
    column = list(_AUDIT).index(machine)
    program: Program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _AUDIT[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _X32 if newest is None else newest + 1),
        _answer(errno.ENOSYS),
    ]
    for name, body in rules.items():
        number = NUMBERS[name][column]
        if number is not None:
            program += [(_JUMP_EQUAL, 0, len(body), number), *body]
    program.append(_answer(0))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def known_machine() -> str | None:
    """This machine's name when its call numbers are known and this is a 64-bit process on Linux, else None."""
    if sys.platform != "linux":
        return None
    machine = {"arm64": "aarch64", "amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    return machine if machine in _AUDIT and struct.calcsize("P") == 8 else None


def build_filter(machine: str, *, alone: bool, pid: int = 0) -> bytes:
    """The box's filter, an array of `struct sock_filter`.

    Args:
        machine: "x86_64" or "aarch64".
        alone: the process has namespaces of its own (processes, network, mounts).
        pid: of the process itself, the only one that it may signal; read only with `alone=False`.

    Raises:
        KeyError: for another machine.
    """
    _ = _AUDIT[machine]
    return _assemble(_rules(alone, pid), machine, _NEWEST)


def refusing(machine: str, answers: dict[str, int], numbers: dict[int, int] | None = None) -> bytes:
    """A filter that answers the named calls with an errno and allows the rest, to play a poorer kernel in tests.

    Args:
        machine: "x86_64" or "aarch64".
        answers: name in `NUMBERS` -> errno; `clone` is refused for its namespace flags only.
        numbers: call number -> errno, for calls that `NUMBERS` does not name.
    """
    rules = {name: [_answer(code)] for name, code in answers.items()}
    if "clone" in answers:
        rules["clone"] = [_Call(0).load, (_JUMP_BITS, 0, 1, _CLONE_NEW), _answer(answers["clone"]), _answer(0)]
    code = _assemble(rules, machine, None)
    end, steps = code[-8:], b""
    for number, error in (numbers or {}).items():
        steps += struct.pack("=HBBI", _JUMP_EQUAL, 0, 1, number) + struct.pack("=HBBI", *_answer(error))
    return code[:-8] + steps + end


def forbid_new_privileges() -> None:
    """No program that this process starts gains privileges (PR_SET_NO_NEW_PRIVS); a filter and Landlock need it.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")


def install(code: bytes) -> None:
    """Put this thread, and all that it starts, under a filter for ever. `forbid_new_privileges` comes first.

    Raises:
        OSError: the kernel knows no seccomp filters, or refuses this one.
    """
    buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(22, 2, ctypes.c_char_p(head), 0, 0) != 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "PR_SET_SECCOMP")
