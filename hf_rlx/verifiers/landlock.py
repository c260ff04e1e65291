"""Landlock: a process gives up files, TCP ports and other processes for itself, without any privilege.

Three system calls by ctypes; glibc has no wrappers for them. Works from ABI 1 (Linux 5.13); what newer ABIs can
refuse is refused too. What no ABI judges (owners and modes of files, sockets other than TCP) is left to seccomp.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from functools import cache

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same numbers on every architecture
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_REFER = 1 << 13
_MAKE = sum(1 << bit for bit in (4, 5, 7, 8, 12))  # remove folder, remove file, make folder, file, symbolic link
_FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_FILES_NEWEST, _TCP, _SCOPES = (1 << 16) - 1, 0b11, 0b11


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    """The system call's result.

    Raises:
        OSError: with its errno.
    """
    result = _libc().syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock (system call {number}): {os.strerror(code)}")
    return int(result)


def abi() -> int:
    """The kernel's version of Landlock, from 1 on.

    Raises:
        OSError: ENOSYS without Landlock in the kernel, EOPNOTSUPP when it is switched off at boot.
    """
    return _call(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Allow `rights` on a file or on all beneath a folder; a path that does not exist allows nothing."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor))
        _call(_ADD, ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint32(0))
    finally:
        os.close(descriptor)


def restrict(read: Iterable[str], listed: Iterable[str], write: Iterable[str], version: int) -> None:
    """Leave this process, and all that it starts, only these paths; no TCP (ABI 4) and, from ABI 6 on, no signals to
    and no abstract sockets of processes outside. `seccomp.forbid_new_privileges` comes first.

    Args:
        read: files and folders that may be read and executed.
        listed: folders whose names, and those of the folders beneath, may be listed.
        write: files and folders that may be read and written, but not executed, nor hold devices or sockets.
        version: ABI to use, at most `abi()`.

    Raises:
        OSError: the kernel refuses.
    """
    handled = _FILES.get(version, _FILES_NEWEST)
    fields = [handled]
    if version >= 4:
        fields.append(_TCP)
    if version >= 6:
        fields.append(_SCOPES)
    attributes = ctypes.create_string_buffer(struct.pack(f"={len(fields)}Q", *fields))
    ruleset = _call(_CREATE, attributes, ctypes.c_size_t(8 * len(fields)), ctypes.c_uint32(0))
    try:
        for path in read:
            _allow(ruleset, path, (_EXECUTE | _READ_FILE | _READ_DIR) & handled)
        for path in listed:
            _allow(ruleset, path, _READ_DIR)
        for path in write:
            _allow(ruleset, path, (_WRITE_FILE | _READ_FILE | _READ_DIR | _MAKE | _REFER | _TRUNCATE) & handled)
        _call(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)
