"""Levels: probed, named, refused; boxes: limits kept, nothing left. Attacks stand in a file of their own."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import pickle
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hf_rlx.verifiers import box_child, landlock, sandbox, seccomp
from hf_rlx.verifiers.box_layout import Layout, Limits, bubblewrap_arguments, bubblewrap_files
from hf_rlx.verifiers.boxes import BoxFailureError, CandidateError
from hf_rlx.verifiers.sandbox import CandidateRaisedError, Sandbox, SandboxUnavailable, call
from hf_rlx.verifiers.wire import decode

ROOT = Path(__file__).resolve().parents[2]
MACHINE = seccomp.known_machine()
EVERY_LEVEL = pytest.mark.parametrize("level", ["strong", "medium"])


def have(level: str, **options) -> Sandbox:
    """A sandbox of the level, or a skip that says why there is none."""
    try:
        return Sandbox(level, warm=1, **options)
    except SandboxUnavailable as error:
        pytest.skip(str(error)[:300])


# --- levels ----------------------------------------------------------------------------------------------------------


@EVERY_LEVEL
def test_a_level_is_probed_and_logged(level, caplog):
    with caplog.at_level(logging.INFO, logger="hf_rlx.verifiers.sandbox"):
        box = have(level)
    assert box.level == level
    assert [r.getMessage() for r in caplog.records] == [f"sandbox level: {level}"]


def test_auto_takes_the_best(monkeypatch, tmp_path):
    """strong where bubblewrap is; without it on the PATH medium, and the reason is kept; nothing when named."""
    have("medium")
    if have("strong").level == "strong":
        assert Sandbox("auto").level == "strong"
    monkeypatch.setenv("PATH", str(tmp_path))
    box = Sandbox("auto")
    assert box.level == "medium"
    assert box.findings == {"strong": "bubblewrap (bwrap) is not on the PATH"}
    with pytest.raises(SandboxUnavailable, match=r"bwrap.* is not on the PATH"):
        Sandbox("strong")


def test_without_any_level(monkeypatch, tmp_path):
    """No bubblewrap and no Landlock: refused with both findings and the ways out; the override warns and says so."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def missing():
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(landlock, "abi", missing)
    with pytest.raises(SandboxUnavailable, match=r"(?s)strong: .*medium: no Landlock.*apt-get install bubblewrap"):
        Sandbox("auto")
    assert SandboxUnavailable.stops_run
    with pytest.warns(UserWarning, match="without a sandbox"):
        box = Sandbox("auto", allow_unsafe_execution=True)
    assert box.level == "unsafe"
    assert box.run_program("print(6 * 7)", "", 5).out == b"42\n"
    box.close()


def test_another_system_has_no_boxes(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="boxes need Linux"):
        Sandbox("auto", allow_unsafe_execution=True)


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="'auto', 'strong', 'medium'"):
        Sandbox("unsafe")


@EVERY_LEVEL
def test_a_level_that_leaks_is_refused(level, monkeypatch):
    """The probe runs in the box: with the filter or with Landlock off, what got through is named."""
    have(level)
    monkeypatch.setattr(sandbox, "_probed", {})
    monkeypatch.setattr(sandbox, "_PROBE", "def tries(*world): return ['started a process']")
    with pytest.raises(SandboxUnavailable, match=f"{level}: started a process"):
        Sandbox(level)


def poorer(answers: str, numbers: str, body: str) -> subprocess.CompletedProcess:
    """Run code in a process for which some system calls answer with an error, as in a container that refuses them."""
    code = f"""
        import errno
        from hf_rlx.verifiers import seccomp
        machine = seccomp.known_machine()
        seccomp.forbid_new_privileges()
        seccomp.install(seccomp.refusing(machine, {answers}, {numbers}))
        from hf_rlx.verifiers.sandbox import Sandbox, SandboxUnavailable
        from hf_rlx.verifiers.code import CodeVerifier
    """
    source = textwrap.dedent(code) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=60)


NO_NAMESPACES = "{'unshare': errno.EPERM, 'clone': errno.EPERM, 'clone3': errno.ENOSYS, 'mount': errno.EPERM}"
NO_LANDLOCK = "{444: errno.ENOSYS, 445: errno.ENOSYS, 446: errno.ENOSYS}"


def test_namespaces_refused():
    """As in Docker's default profile: bubblewrap does not start, medium carries the verdicts."""
    have("medium")
    done = poorer(
        NO_NAMESPACES,
        "{}",
        """
        verifier = CodeVerifier(workers=1)
        tests = [{"call": "f", "args": [2], "expected": 3}]
        print(verifier.level, verifier(["", ""], ["def f(x): return x + 1", "def f(x): return x"], tests=[tests] * 2))
        print(verifier.sandbox.findings["strong"])
        verifier.close()
        """,
    )
    assert done.stdout.startswith("medium [1.0, 0.0]\n"), done
    assert "the box did not start" in done.stdout or "not on the PATH" in done.stdout


def test_namespaces_and_landlock_refused():
    done = poorer(
        NO_NAMESPACES,
        NO_LANDLOCK,
        """
        try:
            Sandbox("auto")
        except SandboxUnavailable as error:
            print("refused:", error)
        """,
    )
    assert done.stdout.startswith("refused: no sandbox of level 'auto' here. Probed: strong: "), done
    assert "medium: no Landlock" in done.stdout


def test_an_old_landlock_is_enough():
    """ABI 1 judges neither truncation nor signals nor sockets: the filter does."""
    box = have("medium", landlock_abi=1)
    assert (box.kind.abi, box.level) == (1, "medium")
    code = "import os\nfor act in (lambda: os.truncate(os.__file__, 0), lambda: os.kill(os.getppid(), 0)):\n"
    code += " try: act(); print('BREACH')\n except OSError: print('ok')\n"
    assert box.run_program(code, "", 5).out == b"ok\nok\n"
    box.close()


# --- the filter ------------------------------------------------------------------------------------------------------


def evaluate(program: bytes, machine: str, number: int, args: tuple[int, ...] = ()) -> int | str:
    """What the kernel would answer: 0 for allowed, an errno, or "kill". Classic BPF, as far as the filter uses it."""
    audit = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    data = struct.pack("=IIQ6Q", number, audit, 0, *args, *[0] * (6 - len(args)))
    steps = [struct.unpack_from("=HBBI", program, 8 * i) for i in range(len(program) // 8)]
    value, at = 0, 0
    while True:
        code, yes, no, k = steps[at]
        at += 1
        if code == 0x20:
            value = struct.unpack_from("=I", data, k)[0]
        elif code == 0x54:
            value &= k
        elif code == 0x06:
            return "kill" if k == 0x80000000 else 0 if k == 0x7FFF0000 else k & 0xFFFF
        else:
            taken = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
            at += yes if taken else no


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
@pytest.mark.parametrize("alone", [True, False])
def test_what_the_filter_answers(machine, column, alone):
    """clone: 0x3D0F00 is what glibc gives for a thread, 0x1200011 for a fork; 0x10000000 is CLONE_NEWUSER."""
    program = seccomp.build_filter(machine, alone=alone, pid=77)

    def ask(name: str, *args: int) -> int | str:
        number = seccomp.NUMBERS[name][column]
        assert number is not None
        return evaluate(program, machine, number, args)

    assert ask("clone", 0x3D0F00) == 0
    assert ask("clone", 0x1200011) == errno.EAGAIN
    assert ask("clone", 0x3D0F00 | 0x10000000) == errno.EPERM
    assert ask("clone3") == ask("openat2") == errno.ENOSYS
    refused = ("unshare", "ptrace", "bpf", "io_uring_setup", "userfaultfd", "keyctl", "memfd_create", "pidfd_open")
    assert {ask(name) for name in refused} == {errno.EPERM}
    assert ask("prctl", 1) == errno.EPERM
    assert ask("prctl", 15) == 0
    assert ask("fcntl", 3, 8) == ask("fcntl", 3, 10) == ask("ioctl", 0, 0x5412) == errno.EPERM
    assert ask("fcntl", 3, 3) == ask("ioctl", 0, 0x5401) == 0
    shared = 0 if alone else errno.EPERM
    assert ask("kill", 78, 9) == ask("tgkill", 78, 78, 9) == ask("chown" if column == 0 else "fchownat") == shared
    assert ask("kill", 77, 9) == ask("tgkill", 77, 77, 6) == 0
    assert ask("prlimit64", 0) == ask("prlimit64", 77) == 0
    assert ask("prlimit64", 78) == ask("truncate") == ask("tkill") == shared
    assert ask("openat", 0, 0, os.O_RDONLY | os.O_TRUNC) == shared
    assert ask("openat", 0, 0, os.O_WRONLY | os.O_TRUNC) == ask("openat", 0, 0, os.O_RDONLY) == 0
    assert ask("socket", 1) == ask("socket", 2) == (0 if alone else errno.EACCES)
    assert ask("socket", 16) == (errno.EAFNOSUPPORT if alone else errno.EACCES)
    read, newer, x32 = (0 if column == 0 else 63), 463, 0x40000000
    assert evaluate(program, machine, read) == 0
    assert evaluate(program, machine, newer) == evaluate(program, machine, x32) == errno.ENOSYS
    assert evaluate(program, "aarch64" if machine == "x86_64" else "x86_64", read) == "kill"


def test_numbers_are_the_kernels():
    """Where the headers are, the table agrees with them."""
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.is_file():
        pytest.skip("no kernel headers")
    lines = [line.split() for line in header.read_text(encoding="utf-8").splitlines()]
    real = {w[1].removeprefix("__NR_"): int(w[2]) for w in lines if len(w) == 3 and w[1].startswith("__NR_")}
    assert not {name: (n[0], real.get(name)) for name, n in seccomp.NUMBERS.items() if n[0] != real.get(name)}


# --- boxes -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["strong", "medium"])
def box(request):
    """A sandbox of the level."""
    found = have(request.param)
    yield found
    found.close()


def test_what_is_in_a_box(box, monkeypatch):
    """No variable of this process; a user of its own where this one is root; its folder is empty and writable."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = "import os\nprint(os.getuid(), sorted(os.environ), os.listdir('.'), open('x', 'w').write('1'))"
    uid, names = box.run_program(code, "", 5).out.decode().split(" ", 1)
    assert "HF_TOKEN" not in names
    assert names.endswith("[] 1\n")
    assert int(uid) == os.getuid() or (os.getuid() == 0 and int(uid) >= 61184)


def test_a_program_prints_reads_and_ends(box):
    ended = box.run_program("import sys\nprint(input()[::-1])\nsys.exit(int(input()))", "añb\n3\n", 5)
    assert (ended.out.decode(), ended.code) == ("bña\n", 3)
    assert "ZeroDivisionError" in box.run_program("1 / 0", "", 5).err.decode()


def test_limits_are_kept(box):
    """Wall time within +0.3 s, output of one mebibyte, memory, from another thread than the main one too."""

    def late(seconds: float, found: list) -> None:
        start = time.monotonic()
        with pytest.raises(CandidateError, match="time-out"):
            box.run_program("while True: pass", "", seconds)
        found.append(time.monotonic() - start)

    found: list[float] = []
    threads = [threading.Thread(target=late, args=(0.3, found)) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(found) == 3
    assert max(found) < 0.6 + 0.3  # three at a time on two cores: starting a box is not in the limit
    with pytest.raises(CandidateError, match="more output than allowed"):
        box.run_program("while True: print('x' * 1000)", "", 5)
    with pytest.raises(CandidateError, match="more output than allowed"):
        box.run_program("import sys\nwhile True: print('x' * 1000, file=sys.stderr)", "", 5)
    assert box.run_program("bytearray(1 << 30)", "", 5).err.decode().strip().endswith("MemoryError")


def test_calls_and_their_faults(box):
    code = "def f(x): return {1: (x, {2.5}), 'k': [None, True, float('inf')]}\nclass A:\n def g(self, n=1): return n\n"
    code += "def bad(): raise KeyError\ndef end(): raise SystemExit\n"
    with box.load(code, 5) as job:
        assert decode(call(job, "f", ["é\n"])) == {1: ("é\n", {2.5}), "k": [None, True, float("inf")]}
        assert decode(call(job, "A.g", [], {"n": 4})) == 4
        with pytest.raises(CandidateRaisedError, match="raised KeyError"):
            call(job, "bad")
        assert decode(call(job, "A.g")) == 1
        with pytest.raises(CandidateRaisedError, match="raised KeyError"):
            call(job, "none")
        with pytest.raises(CandidateRaisedError, match="SystemExit"):
            call(job, "end")
        with pytest.raises(CandidateError, match="ended without an answer"):
            call(job, "f", [1])


def test_what_is_left_after_close(box):
    """No process of the nursery's session, and not its folder."""
    box.run_program("pass", "", 5)
    nursery = box._living()
    base, group = nursery.base, nursery.process.pid
    assert os.path.isdir(base)
    box.close()
    box.close()
    assert not os.path.exists(base)
    assert not [p for p in Path("/proc").glob("[0-9]*") if _session(p) == group]
    assert box.run_program("print(1)", "", 5).out == b"1\n"


def _session(process: Path) -> int:
    try:
        return int((process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[3])
    except OSError:
        return -1


@EVERY_LEVEL
@pytest.mark.parametrize("sign", ["SIGTERM", "SIGKILL"])
def test_nothing_outlives_the_parent(level, sign):
    """A trainer that is killed in the middle of a verdict: its boxes and the nursery are gone within two seconds."""
    have(level)
    code = f"""
        from hf_rlx.verifiers.sandbox import Sandbox
        box = Sandbox({level!r}, warm=3)
        nursery = box._living()
        print(nursery.process.pid, nursery.base, flush=True)
        box.run_program("while True: pass", "", 60)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        pid, base = trainer.stdout.readline().split()
        deadline = time.monotonic() + 10
        while len(_below(int(pid))) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
        family = [int(pid), *_below(int(pid))]
        assert len(family) > 4
        trainer.send_signal(signal.Signals[sign])
        trainer.wait(10)
    deadline = time.monotonic() + 2
    while any(map(_runs, family)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [p for p in family if _runs(p)]
    assert not os.path.exists(base)


def _below(process: int) -> list[int]:
    """Children, their children, ... of a process."""
    try:
        text = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="utf-8")
    except OSError:
        return []
    return [p for child in map(int, text.split()) for p in (child, *_below(child))]


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_dead_nursery_is_replaced(box):
    nursery = box._living()
    box.run_program("pass", "", 5)
    nursery.process.kill()
    nursery.process.wait()
    assert box.run_program("print(2)", "", 5).out == b"2\n"
    assert box._living() is not nursery
    with pytest.raises(BoxFailureError):
        nursery.start()


def test_copies_and_forks_have_boxes_of_their_own(box):
    """A pickled copy and a forked child start their own nursery; the child leaves the parent's alone."""
    assert box.run_program("print(1)", "", 5).out == b"1\n"
    copy = pickle.loads(pickle.dumps(box))
    assert copy.run_program("print(2)", "", 5).out == b"2\n"
    copy.close()
    code = f"""
        import os
        from hf_rlx.verifiers.sandbox import Sandbox
        box = Sandbox({box.level!r}, warm=1)
        box.run_program("pass", "", 5)
        first = box._living().process.pid
        child = os.fork()
        if child == 0:
            fine = box.run_program("print(3)", "", 5).out == b"3\\n" and box._living().process.pid != first
            box.close()
            os._exit(0 if fine else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), box.run_program("print(4)", "", 5).out)
        print(box._living().process.pid == first)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "0 b'4\\n'\nTrue\n", done


def test_commands_share_a_folder_and_nothing_else(box):
    """The first command's file is there for the second; links out of it lead nowhere; then the folder is gone."""
    program = os.path.realpath(sys.executable)
    with box.folder() as folder:
        first = folder.run([program, "-S", "-c", "open('a', 'w').write(open('b').read() * 2)"], 5, {"b": "x"})
        assert (first.code, first.err) == (0, b"")
        second = folder.run(
            [program, "-S", "-c", "print(open('a').read(), __import__('os').environ['T'])"], 5, {}, {"T": "1"}
        )
        assert second.out == b"xx 1\n"
        path = Path(folder.nursery.base, folder.name)
    with box.folder() as folder:
        assert folder.run([program, "-S", "-c", "import os; print(os.listdir())"], 5).out == b"[]\n"
    assert not path.exists() or not list(path.iterdir())


def test_an_interpreter_in_tmp_is_not_in_the_candidates_folder():
    """A checkout in /tmp has its packages there: then another folder is the one to write in."""
    for path, scratch in (("/tmp/venv/lib/numpy", "/scratch"), ("/usr/lib/numpy", "/tmp")):
        command = bubblewrap_arguments("bwrap", Layout("/usr/bin/python3", (path,)), Limits(), [], 4, None)
        assert command[command.index("--chdir") + 1] == scratch
        assert command[command.index("HOME") + 1] == scratch
        assert command[command.index("--size", command.index("/dev/shm")) + 3] == scratch


@given(st.text(alphabet=st.characters(exclude_categories=())))
@example('"\\\x00\x1f\x7f\u0080\uffff\U00010000\U0010ffff\ud800 plain')
def test_strings_are_quoted_as_json_reads_them(text):
    """The box writes strings without the module `json`: in ASCII, and read back they are what `json` makes of them."""
    quoted = box_child._encode(text)
    assert quoted.isascii()
    assert "\n" not in quoted
    assert json.loads(quoted) == json.loads(json.dumps(text))


def test_a_link_into_a_mount_is_no_mount_of_its_own(tmp_path):
    """A folder, a folder inside it, a link of the same folder to a file in it, and a link to a file elsewhere: one
    mount for the first three, one for the last, whose target is not in the box."""
    folder, outside = tmp_path / "lib", tmp_path / "other"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.so").write_text("")
    outside.write_text("")
    inside, away = tmp_path / "a.so.1", tmp_path / "b.so"
    inside.symlink_to(folder / "a.so")
    away.symlink_to(outside)
    read = tuple(map(str, (folder, folder / "inner", inside, away)))
    files = bubblewrap_files(Layout("/usr/bin/python3", read))
    assert files == [
        *("--symlink", str(folder / "a.so"), str(inside)),
        *("--ro-bind", str(outside), str(away)),
        *("--ro-bind", str(folder), str(folder)),
    ]


def test_links_inside_of_a_mount_come_with_it(tmp_path):
    """They lie there already, so none is made; what one leads to and is not in the box gets a mount at its own place.
    A link to a folder elsewhere is that folder, under the link's name."""
    folder, outside = tmp_path / "lib", tmp_path / "other"
    for place in (folder / "inner", outside):
        place.mkdir(parents=True)
        (place / "a").write_text("found")
    links = {"file": "inner/a", "folder": "inner", "away": "../other"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    (tmp_path / "other_lib").symlink_to(outside)
    read = tuple(map(str, (folder, *(folder / name for name in links), tmp_path / "other_lib")))
    assert bubblewrap_files(Layout("/usr/bin/python3", read)) == [
        *("--ro-bind", str(folder), str(folder)),
        *("--ro-bind", str(outside), str(outside)),
        *("--ro-bind", str(outside), str(tmp_path / "other_lib")),
    ]
    box = have("strong", packages=(), read=list(read))
    with contextlib.closing(box):
        places = [folder / "file", folder / "folder" / "a", folder / "away" / "a", tmp_path / "other_lib" / "a"]
        ended = box.run_program(f"print(*(open(p).read() for p in {[*map(str, places)]}))", "", 10.0)
    assert ended.out == b"found found found found\n", ended.err
