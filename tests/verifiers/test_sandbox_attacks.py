"""Programs that try to leave their box or to be paid without being right, on every level that this machine has.

What they must not reach is looked at from outside: files, a listener, a process, what is left. The programs of
`shared/cases` beside the checkout run too where they are.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_rlx.verifiers import CodeVerifier
from hf_rlx.verifiers.boxes import CandidateError
from hf_rlx.verifiers.sandbox import Sandbox, SandboxUnavailable

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases"
LIMIT = 0.5


def cases(name: str) -> list:
    """The programs of a file as test parameters; one that is skipped where the file is not."""
    path = CASES / name
    if not path.is_file():
        return [pytest.param("", id="absent", marks=pytest.mark.skip(reason=f"no {name}"))]
    return [pytest.param(case["code"], id=case["id"]) for case in json.loads(path.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module", params=["strong", "medium"])
def sandbox(request):
    """A sandbox of the level, for the whole file."""
    try:
        box = Sandbox(request.param, warm=2)
    except SandboxUnavailable as error:
        pytest.skip(str(error)[:300])
    yield box
    box.close()


@pytest.fixture
def world(tmp_path):
    """What an attack aims at: a folder with a secret, a home, a listening port, another process."""
    victim = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    listener = socket.create_server(("127.0.0.1", 0))
    secret, home = tmp_path / "canary", tmp_path / "home"
    secret.mkdir()
    home.mkdir()
    (secret / "secret.txt").write_text("CANARYSECRET", encoding="utf-8")
    (home / "thesis.txt").write_text("years of work", encoding="utf-8")
    yield {"CANARY": str(secret), "HOME": str(home), "PORT": str(listener.getsockname()[1]), "VICTIM": str(victim.pid)}
    victim.kill()
    victim.wait()
    listener.close()


def run(sandbox: Sandbox, code: str, world: dict[str, str]) -> str:
    """What the program printed within its limits; "" for one that was stopped."""
    for name, value in world.items():
        code = code.replace(f"@{name}@", value)
    start = time.monotonic()
    try:
        printed = sandbox.run_program(code, "", LIMIT).out.decode(errors="replace")
    except CandidateError:
        printed = ""
    assert time.monotonic() - start < LIMIT + 0.3
    assert len(printed) <= 1 << 20
    return printed


SIGNS = ("CANARYSECRET", "READ ", "WROTE", "CONNECTED", "KILLED", "PTRACE 0", "UNSHARE 0", "FORKED 1", "FORKED 3",
         "DAEMONISED", "THREADS 400", "years of work", "BREACH")  # fmt: skip


def contained(printed: str, world: dict[str, str]) -> None:
    """Nothing of the world was read, written, reached, killed or left behind."""
    assert not [line for line in printed.splitlines() if line.startswith(SIGNS)], printed[:500]
    assert "SURFACE [" not in printed or "SURFACE []" in printed
    assert "FORKED 0" in printed or "FORKED" not in printed
    assert os.listdir(world["CANARY"]) == ["secret.txt"]
    assert os.listdir(world["HOME"]) == ["thesis.txt"]
    os.kill(int(world["VICTIM"]), 0)
    assert Path(f"/proc/{world['VICTIM']}/stat").read_text(encoding="utf-8").split()[2] != "Z"
    assert not [name for name in os.listdir("/dev/shm") if "hfrlx" in name]
    assert not Path("/usr/local/hfrlx_pwned.txt").exists()


@pytest.mark.parametrize("code", cases("sandbox_attacks.json"))
def test_known_attacks_are_contained(sandbox, world, code):
    contained(run(sandbox, code, world), world)


FURTHER = {
    "vfork, clone and clone3 by number": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number, args in ((57, ()), (56, (17, 0, 0, 0, 0)), (435, (ctypes.create_string_buffer(88), 88))):
    got = libc.syscall(number, *args)
    if got == 0: libc._exit(0)
    if got > 0: print("BREACH forked by", number)
""",
    "subprocess, spawn and a shell": """
import os, subprocess
for act in (lambda: subprocess.run(["/bin/sh", "-c", "true"]), lambda: os.posix_spawn("/bin/true", ["true"], {})):
    try: act(); print("BREACH started")
    except OSError: pass
if os.system("true") == 0: print("BREACH shell")
""",
    "a file of the host's users": """
for path in ("/etc/passwd", "/etc/hostname", "/proc/1/environ", "/proc/1/cmdline", "/var/log/dpkg.log"):
    try: print("BREACH read", path, open(path).read()[:20])
    except OSError: pass
""",
    "modes, owners, times and links of files": """
import os
for name, act in (("chmod", lambda: os.chmod("@CANARY@/secret.txt", 0o777)),
                  ("chown", lambda: os.chown("@CANARY@/secret.txt", 1, 1)),
                  ("utime", lambda: os.utime("@CANARY@/secret.txt", (1, 1))),
                  ("truncate", lambda: os.truncate("@CANARY@/secret.txt", 0)),
                  ("hidden truncate", lambda: os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)),
                  ("rename", lambda: os.rename("@CANARY@/secret.txt", "@CANARY@/x")),
                  ("link", lambda: os.link("@CANARY@/secret.txt", "link")),
                  ("setxattr", lambda: os.setxattr(os.__file__, "user.x", b"1"))):
    try: act(); print("BREACH", name)
    except OSError: pass
os.symlink("@CANARY@/secret.txt", "soft")
try: print("BREACH", open("soft").read())
except OSError: pass
""",
    "UDP, raw, netlink and abstract sockets": """
import socket
for family, kind, to in ((2, 2, ("127.0.0.1", @PORT@)), (2, 3, None), (16, 3, None), (40, 1, None), (38, 5, None)):
    try:
        s = socket.socket(family, kind)
        if to is None: print("BREACH socket", family, kind)
        elif s.connect(to) is None and s.send(b"x"): print("sent into its own network")
    except OSError: pass
""",
    "every signal call at a process of the host": """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
me = os.getpid()
for number, args in ((62, (@VICTIM@, 9)), (200, (@VICTIM@, 9)), (234, (@VICTIM@, @VICTIM@, 9)), (424, (3, 9, 0, 0)),
                     (434, (@VICTIM@, 0)), (129, (@VICTIM@, 9, ctypes.create_string_buffer(128)))):
    if libc.syscall(number, *args) >= 0: print("BREACH", number)
for target in (-1, 0, -@VICTIM@):
    try: os.kill(target, 0); print("reached its own group")
    except OSError: pass
""",
    "signals by file ownership": """
import fcntl, os, signal
r, w = os.pipe()
for command, value in ((fcntl.F_SETOWN, @VICTIM@), (10, 9)):
    try: fcntl.fcntl(r, command, value); print("BREACH", command)
    except OSError: pass
""",
    "limits and priorities of others": """
import os, resource
for name, act in (("prlimit", lambda: resource.prlimit(@VICTIM@, resource.RLIMIT_NOFILE, (1, 1))),
                  ("affinity", lambda: os.sched_setaffinity(@VICTIM@, {0})),
                  ("priority", lambda: os.setpriority(os.PRIO_PROCESS, @VICTIM@, 19)),
                  ("limit", lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)))):
    try: act(); print("BREACH", name)
    except (OSError, ValueError): pass
""",
    "outliving the parent": """
import ctypes
if ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0: print("BREACH parent-death signal cleared")
""",
    "memory": """
try:
    x = bytearray(3 << 30)
    print("BREACH")
except MemoryError: pass
""",
    "memory in files without a name": """
import os
n = 0
try:
    for i in range(400):
        fd = os.memfd_create(str(i)); n += os.write(fd, bytes(1 << 20))
except OSError: pass
if n: print("BREACH", n)
""",
    "disk": """
import os
n = 0
try:
    for i in range(2000):
        with open(os.environ["TMPDIR"] + "/" + str(i), "wb") as f: n += f.write(bytes(1 << 20))
except OSError: pass
if n > 200 << 20: print("BREACH", n)
""",
    "a deep tree of folders": """
import os
for i in range(3000):
    try: os.mkdir("d"); os.chdir("d")
    except OSError: break
""",
    "many small threads": """
import threading, time
threading.stack_size(32768)
n = 0
try:
    for i in range(5000): threading.Thread(target=time.sleep, args=(5,), daemon=True).start(); n += 1
except RuntimeError: pass
if n > 4000: print("BREACH", n)
""",
    "shared memory and queues of the host": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number, args in ((29, (1, 4096, 0o1666)), (64, (1, 1, 0o1666)), (68, (1, 0o1666)),
                     (240, (b"hfrlx", 0o102, 0o666, 0))):
    if libc.syscall(number, *args) >= 0: print("BREACH", number)
""",
    "names of the host": """
import ctypes, os, socket
print("BREACH" if socket.gethostname() == "@NODE@" and "@LEVEL@" == "strong" else "")
if any("TOKEN" in k or "KEY" in k or k == "HFRLX_SECRET" for k in os.environ): print("BREACH", dict(os.environ))
""",
    "a call of the 32-bit world": """
import ctypes, mmap
code = bytes.fromhex("b802000000cd80c3")  # mov eax, 2 (fork of i386); int 0x80; ret
m = mmap.mmap(-1, 4096, prot=7); m.write(code)
got = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()
print("BREACH" if got >= 0 else "")
""",
    "writing code that others run": """
import os, sys
for folder in sys.path + ["/usr/lib", os.path.dirname(sys.executable)]:
    try: open(os.path.join(folder, "sitecustomize.py"), "w"); print("BREACH", folder)
    except OSError: pass
""",
}


@pytest.mark.parametrize("name", FURTHER)
def test_further_attacks_are_contained(sandbox, world, name, monkeypatch):
    monkeypatch.setenv("HFRLX_SECRET", "x")
    before = {p: os.stat(p).st_mtime_ns for p in (os.__file__, world["CANARY"] + "/secret.txt")}
    names = {**world, "NODE": socket.gethostname(), "LEVEL": sandbox.level}
    contained(run(sandbox, FURTHER[name], names), world)
    assert before == {p: os.stat(p).st_mtime_ns for p in before}
    assert os.path.getsize(os.__file__) > 0


@pytest.fixture(scope="module")
def verifier(sandbox):
    """Pays `add` that passes four calls."""
    return CodeVerifier(sandbox=sandbox, time_limit=LIMIT, canary_every=10**9)


CALLS = [{"call": "add", "args": [a, b], "expected": a + b} for a, b in ((1, 2), (-5, 3), (0, 0), (10**12, 1))]
ASSERTS = [f"assert add({a}, {b}) == {a + b}" for a, b in ((1, 2), (-5, 3), (0, 0), (10**12, 1))]
HACKS = {
    "an object equal to everything": "class E:\n def __eq__(s, o): return True\n def __ne__(s, o): return False\n"
    "def add(a, b): return E()",
    "an integer that says it is equal": "class I(int):\n def __eq__(s, o): return True\n __hash__ = int.__hash__\n"
    "def add(a, b): return I(a - b - 1)",
    "a float that compares as it likes": "class F(float):\n def __eq__(s, o): return True\n"
    " def __float__(s): return 3.0\ndef add(a, b): return F(a - b - 1)",
    "the reply written by hand": "import os, sys\ndef add(a, b):\n"
    " f = sys._getframe(1)\n ident = f.f_locals.get('ident')\n"
    ' os.write(3, (\'{"id":"%s","v":"passed"}\\n\' % ident).encode())\n return 0',
    "replies in advance": "import os, sys\nident = sys._getframe(1).f_locals['ident']\n"
    'os.write(3, (\'{"id":"%s","v":null}\\n\' % ident).encode() * 2)\ndef add(a, b): return 0',
    "passed as a value": "def add(a, b): return 'passed'",
    "an exception that means success": "def add(a, b): raise SystemExit(0)",
    "an exception class of the box": "class _Refused(Exception): pass\ndef add(a, b): raise _Refused('passed')",
    "an assertion of its own": "def add(a, b): raise AssertionError",
    "the encoder replaced": "import sys\nf = sys._getframe(1)\nf.f_globals['_encode'] = lambda v: '3'\n"
    "def add(a, b): return 0",
    "deep nesting": "def add(a, b):\n x = []\n for i in range(100000): x = [x]\n return x",
    "a list in itself": "def add(a, b):\n x = []\n x.append(x)\n return x",
    "colliding numbers": "def add(a, b): return set(i * (2**61 - 1) for i in range(1, 40000))",
    "infinity": "def add(a, b): return float('inf')",
    "a string of digits": "def add(a, b): return str(a + b)",
    "a list of the sum": "def add(a, b): return [a + b]",
    "a coroutine": "async def add(a, b): return a + b",
    "a generator": "def add(a, b): yield a + b",
    "the function deleted": "def add(a, b): return a + b\ndel add",
    "true for one": "def add(a, b): return True",
    "sleeping for ever": "import time\ndef add(a, b): time.sleep(100)",
    "a kill of itself": "import os\ndef add(a, b): os.kill(os.getpid(), 9)",
    "the process replaced": "import os, sys\ndef add(a, b): os.execv(sys.executable, ['python', '-c', 'print(3)'])",
    "the end of an iteration": "def add(a, b): raise StopIteration",
    "an end of its own": "E = type('StopIteration', (Exception,), {})\ndef add(a, b): raise E",
    "an exception named like a function": "E = type('__import__', (Exception,), {})\ndef add(a, b): raise E",
    "names that tests lack": "def add(a, b): return undefined",
    "as deep as may be": "def add(a, b):\n x = a + b\n for i in range(38): x = [x]\n return x",
    "as many bits as may be": "def add(a, b): return 2**3999",
    "an array of one": "import numpy\ndef add(a, b): return numpy.array([a + b])",
    "a class of NumPy's": "class N:\n __module__ = 'numpy'\n def item(self): return -1\ndef add(a, b): return N()",
    "a request for a call": "import os, sys\ndef add(a, b):\n ident = sys._getframe(1).f_locals['ident']\n"
    ' line = \'{"id":"%s","fn":"add","a":[1,2],"k":{"d":[]}}\\n\' % ident\n os.write(3, line.encode())',
    "its next job taken": "import os, sys\nos.read(sys._getframe(1).f_locals['control'], 1000)\n"
    "def add(a, b): return 7",
    "a reply a microsecond": "import os, sys, threading\nf = sys._getframe(1)\ndef spam():\n while True:\n"
    '  os.write(3, (\'{"id":"%s","v":3}\\n\' % f.f_locals[\'ident\']).encode())\n'
    "threading.Thread(target=spam, daemon=True).start()\ndef add(a, b): return 7",
    "builtins deleted": "import builtins\nfor n in list(vars(builtins)):\n"
    " if n not in ('Exception', 'BaseException', 'delattr'): delattr(builtins, n)\ndef add(a, b): return 7",
    "tests read from memory": "import gc\ndef add(a, b):\n for o in gc.get_objects():\n"
    "  if isinstance(o, dict) and 'expected' in o: return o['expected']\n  "
    "if isinstance(o, str) and 'assert add' in o: return int(o.split('==')[1])\n return 0",
}


@pytest.mark.parametrize("name", HACKS)
@pytest.mark.parametrize("tests", [CALLS, ASSERTS], ids=["calls", "asserts"])
def test_hacks_are_not_paid(verifier, name, tests):
    verdict = verifier.judge(HACKS[name], tests)
    assert (verdict.outcome, verdict.reward) == ("wrong", 0.0), verdict


@pytest.mark.parametrize("raised", ["StopIteration", "StopAsyncIteration", "GeneratorExit", "KeyboardInterrupt"])
def test_tests_that_iterate_do_not_end_early(verifier, raised):
    """In `all(map(f, ...))` a StopIteration of f ends the map, and `all` of nothing is true."""
    tests = ["assert all(map(lambda a: add(a, 1) == a + 1, [1, 2, 3]))"]
    assert verifier.judge(f"def add(a, b): raise {raised}", tests).outcome == "wrong"
    assert verifier.judge("def add(a, b): return a + b", tests).outcome == "right"
    if raised == "StopIteration":  # tests that ask for it get it
        tests = ["try:\n    add(1, 2)\n    assert False\nexcept StopIteration:\n    pass"]
        assert verifier.judge("def add(a, b): raise StopIteration", tests).outcome == "right"


def test_a_value_too_large_to_pass_on_is_the_candidates(verifier):
    """Tests that hand a result back to the candidate: what it returned is too deep by then, no fault of theirs."""
    tests = ["assert add(add(1, 1), 1) == 3"]
    deep = "def add(a, b):\n x = 0\n for i in range(39): x = [x]\n return x"
    assert verifier.judge(deep, tests).outcome == "wrong"


PRINTED = {
    "both outputs": "print('3')\nprint('10')",
    "several guesses": "a, b = map(int, input().split())\nprint(a + b, a - b)",
    "to the other stream": "import sys\na, b = map(int, input().split())\nprint(a + b, file=sys.stderr)",
    "a carriage return": "a, b = map(int, input().split())\nprint('9\\r' + str(a + b))",
    "a terminal's codes": "a, b = map(int, input().split())\nprint('9\\x1b[1D' + str(a + b))",
    "a zero byte": "a, b = map(int, input().split())\nprint(str(a + b) + '\\x00')",
    "a backspace": "a, b = map(int, input().split())\nprint('9\\b' + str(a + b))",
    "digits of another script": "a, b = map(int, input().split())\nprint(chr(0xff10 + a + b))",
    "right, then a kill": "import os\na, b = map(int, input().split())\nprint(a + b, flush=True)\n"
    "os.kill(os.getpid(), 9)",
    "right, then an error": "a, b = map(int, input().split())\nprint(a + b)\nraise SystemExit(1)",
    "the reply's descriptor": "import os\nos.write(3, b'3\\n')",
}


@pytest.mark.parametrize("name", PRINTED)
def test_prints_that_are_not_the_output(verifier, name):
    tests = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "5 5\n", "stdout": "10\n"}]
    assert verifier.judge(PRINTED[name], tests).outcome == "wrong"


@pytest.mark.parametrize("code", cases("verifier_attacks.json"))
@pytest.mark.parametrize("tests", [CALLS, ASSERTS], ids=["calls", "asserts"])
def test_known_hacks_are_not_paid(verifier, code, tests):
    right = code.strip() == "def add(a,b):\n    return a+b"
    assert verifier.judge(code, tests).reward == float(right)


@pytest.mark.parametrize("code", cases("sandbox_attacks.json"))
def test_attacks_score_nothing(verifier, world, code):
    """As the module that ought to define `add`."""
    for name, value in world.items():
        code = code.replace(f"@{name}@", value)
    assert verifier.judge(code, CALLS).reward == 0.0


def test_nothing_is_left(sandbox, world):
    """After a program that ignores every signal, no process of its group and no folder of it is there."""
    code = "import signal\nfor s in (1, 2, 3, 14, 15, 24): signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    with pytest.raises(CandidateError, match="time-out"):
        sandbox.run_program(code, "", 0.5)
    nursery = sandbox._living().process.pid
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        children = Path(f"/proc/{nursery}/task/{nursery}/children").read_text(encoding="utf-8").split()
        busy = [c for c in children if Path(f"/proc/{c}/wchan").exists() and _cpu_ticks(c) > 20]
        if not busy:
            break
        time.sleep(0.02)
    assert not busy


def _cpu_ticks(process: str) -> int:
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])
