"""What a box holds: the interpreter, the packages that candidates may import, an environment of our own. No more."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo")
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
PACKAGES = ("numpy", "sympy", "mpmath")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
# gmpy2 beside them is listed but cannot be read in a box without a mount namespace, which breaks their import.
_PURE_PYTHON = {"MPMATH_NOGMPY": "1", "SYMPY_GROUND_TYPES": "python"}


@dataclass(frozen=True)
class Limits:
    """What one job in a box may use.

    Args:
        memory_mb: address space in MiB (RLIMIT_AS); 512 carries NumPy and SymPy.
        cpu: seconds of CPU time (RLIMIT_CPU); the parent's wall-clock limit comes on top of it.
        file_mb: MiB of one file; scratch_mb: MiB of all files together.
        open_files: file descriptors.
        threads: threads, where they can be counted by box (a user id or a namespace of its own).
        output: bytes that a program may print, and that one reply may have.
    """

    memory_mb: int = 512
    cpu: int = 60
    file_mb: int = 16
    scratch_mb: int = 64
    open_files: int = 64
    threads: int = 64
    output: int = 1 << 20

    def rlimits(self, counted: bool) -> dict[str, int]:
        """Names in `resource` and values, as every box starts with them; `counted`: threads are counted by box."""
        # One byte of core file: 0 would still run a handler that /proc/sys/kernel/core_pattern pipes to.
        limits = {"RLIMIT_AS": self.memory_mb << 20, "RLIMIT_CPU": self.cpu, "RLIMIT_CORE": 1}
        limits |= {"RLIMIT_FSIZE": self.file_mb << 20, "RLIMIT_NOFILE": self.open_files}
        return limits | ({"RLIMIT_NPROC": self.threads} if counted else {})


@dataclass(frozen=True)
class Layout:
    """The files of a box, as paths of the host, and how to start the interpreter in it.

    Attributes:
        python: the interpreter, links resolved.
        read: files and folders that are there, readable and executable.
        listed: folders that may only be listed, where there is no mount namespace to leave the rest out.
        path: `sys.path` of candidates.
        env: the whole environment.
    """

    python: str
    read: tuple[str, ...]
    listed: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    def with_paths(self, paths: Sequence[str]) -> Layout:
        """The same with more files and folders to read, e.g. a proof assistant's."""
        return Layout(self.python, (*self.read, *paths), self.listed, self.path, self.env)


def _package_files(name: str) -> list[str]:
    """What an importable package needs: itself, and the shared libraries beside it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return []
    origin = Path(spec.origin)
    if spec.submodule_search_locations is None:
        return [str(origin)]
    libraries = origin.parent.parent / f"{name}.libs"
    return [str(origin.parent), *([str(libraries)] if libraries.exists() else [])]


def python_layout(packages: Sequence[str] = PACKAGES) -> Layout:
    """This interpreter with its standard library and some packages, those that are not installed left out.

    Raises:
        RuntimeError: the interpreter does not know where it is (`sys.executable` is empty).
    """
    if not sys.executable:
        raise RuntimeError("sys.executable is empty, so no interpreter can be started in a box")
    python = os.path.realpath(sys.executable)
    library = Path(sysconfig.get_path("stdlib"))
    base = [python, str(library), sysconfig.get_path("platstdlib", vars={"platbase": sys.base_prefix})]
    own = [p for p in Path(sys.base_prefix, "lib").glob("lib*.so*") if Path("/usr/lib") not in p.resolve().parents]
    base += [str(p) for p in own]  # libpython, and Conda's libraries
    found = [file for name in packages for file in _package_files(name)]
    homes = sorted({str(Path(file).parent) for file in found})
    system = [p for p in (*_SYSTEM, *_SYSTEM_FILES) if os.path.exists(p)]
    standard = [str(library.parent / f"python{sys.version_info[0]}{sys.version_info[1]}.zip"), str(library)]
    env = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    env |= dict.fromkeys(_ONE_THREAD, "1") | _PURE_PYTHON
    path = (*standard, str(library / "lib-dynload"), *homes)
    read = tuple(dict.fromkeys([*system, *base, *found]))
    return Layout(python, tuple(p for p in read if os.path.exists(p)), tuple(homes), path, env)


def outermost(paths: Sequence[str]) -> list[str]:
    """The paths with links resolved, without those that lie in another of them."""
    kept: list[str] = []
    for path in sorted({os.path.realpath(p) for p in paths}):
        if not kept or not f"{path}/".startswith(f"{kept[-1]}/"):
            kept.append(path)
    return kept


def bubblewrap_files(layout: Layout) -> list[str]:
    """The arguments that put a layout's files into a box, from what the host's links say now.

    A mount costs a box about a sixth of a millisecond: what lies in another mount gets none, and a link to it is one.
    A link inside of a mount comes with it, and only what it leads to may be missing.
    """
    real = {path: os.path.realpath(path) for path in layout.read}
    plain = {path for path in layout.read if real[path] == path}
    command: list[str] = []
    for path in sorted(real):  # a folder before what lies in it
        target = real[path]
        there = target in plain - {path} or _within(target, plain)
        if _within(path, real.keys() - {path}):
            command += [] if there else ["--ro-bind", target, target]
        elif there:
            command += ["--symlink", target, path]
        else:
            command += ["--ro-bind", target, path]
    return command


def _within(path: str, folders: Collection[str]) -> bool:
    return any(path.startswith(f"{folder}/") for folder in folders)


def bubblewrap_arguments(
    bwrap: str, layout: Layout, limits: Limits, files: Sequence[str], filter_fd: int, work: str | None
) -> list[str]:
    """bubblewrap's command line up to the program: everything unshared, dropped, sized and read-only.

    Args:
        bwrap: path of the program.
        layout: its environment is set.
        limits: `scratch_mb` sizes the folder that the program starts in, /tmp wherever possible.
        files: from `bubblewrap_files`.
        filter_fd: descriptor with the seccomp filter.
        work: a folder of the host to bind writable at /work, for jobs of several boxes.
    """
    command = [bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    # Files of the layout that lie in /tmp would stand in the candidate's own folder, where it may write beside them.
    scratch = "/scratch" if any(path.startswith("/tmp/") for path in layout.read) else "/tmp"
    for name, value in {**layout.env, "HOME": scratch, "TMPDIR": scratch}.items():
        command += ["--setenv", name, value]
    command += ["--hostname", "box", "--dir", "/dev", "--size", str(16 << 20), "--tmpfs", "/dev/shm"]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--size", str(limits.scratch_mb << 20), "--tmpfs", scratch]
    command += files
    if work is not None:
        command += ["--bind", work, "/work"]
    return [*command, "--remount-ro", "/", "--chdir", scratch, "--seccomp", str(filter_fd)]
