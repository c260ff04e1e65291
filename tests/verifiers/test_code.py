"""Code verdicts: formats of tests, extraction, right programs paid and wrong ones not, failures never mixed in."""

from __future__ import annotations

import ast
import json
import pickle
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_rlx.verifiers import CodeVerifier, code
from hf_rlx.verifiers.boxes import BoxFailureError, CandidateError
from hf_rlx.verifiers.code_tests import complete_program, extract_code, parse_tests
from hf_rlx.verifiers.sandbox import Sandbox, SandboxUnavailable
from hf_rlx.verifiers.verdict import Verdict, VerifierBrokenError
from hf_rlx.verifiers.wire import HASHED, ProtocolError, decode, equal, parse_line, same_text

HUMANEVAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "humaneval" / "HumanEval.jsonl"


@pytest.fixture(scope="module", params=["strong", "medium"])
def verifier(request):
    """A verifier of the level, for the whole file."""
    try:
        box = Sandbox(request.param, warm=3)
    except SandboxUnavailable as error:
        pytest.skip(str(error)[:300])
    yield CodeVerifier(sandbox=box, time_limit=5.0, workers=2)
    box.close()


@pytest.fixture(scope="module")
def any_verifier():
    """A verifier of whatever level there is."""
    try:
        found = CodeVerifier(workers=2)
    except SandboxUnavailable as error:
        pytest.skip(str(error)[:300])
    yield found
    found.close()


ADD = [{"call": "add", "args": [a, b], "expected": a + b} for a, b in ((1, 2), (-5, 3))]
PLUS = "def add(a, b):\n    return a + b\n"

# --- right programs --------------------------------------------------------------------------------------------------

RIGHT = {
    "numpy": "import numpy as np\ndef add(a, b): return np.array([a, b]).sum()",
    "sympy": "import sympy\ndef add(a, b): return int(sympy.simplify(sympy.Integer(a) + b))",
    "threads": "import threading\ndef add(a, b):\n out = []\n t = threading.Thread(target=lambda: out.append(a + b))\n"
    " t.start(); t.join()\n return out[0]",
    "a pool of threads": "from concurrent.futures import ThreadPoolExecutor\ndef add(a, b):\n"
    " with ThreadPoolExecutor(4) as p: return sum(p.map(int, [a, b]))",
    "asyncio": "import asyncio\nasync def f(a, b):\n await asyncio.sleep(0.001)\n return a + b\n"
    "def add(a, b): return asyncio.run(f(a, b))",
    "recursion": "import sys\nsys.setrecursionlimit(20000)\ndef deep(n): return 0 if n == 0 else 1 + deep(n - 1)\n"
    "def add(a, b): return a + b + deep(9000) - 9000",
    "dataclasses and typing": "from dataclasses import dataclass\nfrom typing import List\n@dataclass\nclass P:\n"
    " x: int\n y: int\ndef add(a: int, b: int) -> int: return P(a, b).x + P(a, b).y",
    "prints": "def add(a, b):\n print('debug', a, b)\n return a + b",
    "a main guard": PLUS + "if __name__ == '__main__':\n add(input())",
    "files": "import os, tempfile\ndef add(a, b):\n with tempfile.TemporaryFile('w+') as f:\n"
    "  f.write(f'{a} {b}'); f.seek(0); return sum(map(int, f.read().split()))",
    "the standard library": "import datetime, decimal, fractions, hashlib, heapq, random, re\n"
    "def add(a, b): random.seed(1); hashlib.md5(b'').hexdigest(); return int(re.sub('x', '', f'{a + b}x'))",
    "an enum's value": "import enum\ndef add(a, b): return enum.IntEnum('E', {'X': a + b}).X",
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_paid(verifier, name):
    assert verifier.judge(RIGHT[name], ADD) == Verdict("right", "all tests passed")
    assert verifier.judge(RIGHT[name], ["assert add(1, 2) == 3", "assert add(-5, 3) == -2"]).outcome == "right"


def test_programs_that_read_and_print(verifier):
    tests = [{"stdin": "3\n1 2 3\n", "stdout": "6\n"}, {"stdin": "1\n5", "stdout": "5"}]
    assert verifier.judge("input()\nprint(sum(map(int, input().split())))", tests).outcome == "right"
    read_all = "import sys\nn, *rest = sys.stdin.read().split()\nsys.stdout.write(str(sum(map(int, rest))))"
    assert verifier.judge(read_all, tests).outcome == "right"
    guarded = (
        "import sys\ndef main():\n data = sys.stdin.buffer.readlines()\n print(eval(data[1].replace(b' ', b'+')))\n"
    )
    assert verifier.judge(guarded + "if __name__ == '__main__':\n main()\n exit()", tests).outcome == "right"
    threaded = "import threading, sys\nsys.setrecursionlimit(10**6)\nthreading.stack_size(64 << 20)\n"
    threaded += (
        "def main():\n input(); print(sum(map(int, input().split())))\nt = threading.Thread(target=main)\nt.start()"
    )
    assert verifier.judge(threaded, tests).outcome == "right"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise ValueError('x')", "exit code 1: ValueError: x"),
        ("print('ok', end='')\nraise SystemExit(3)", "exit code 3: "),
        ("print('ok')\nprint('rubbish')", "wrong output"),
        ("pass", "wrong output"),
        ("import os; os.write(1, b'ok'); os.kill(os.getpid(), 11)", "exit code"),
    ],
)
def test_wrong_programs_that_print(any_verifier, program, reason):
    """The whole output counts, and so does the end: an exception after the right output is no right answer."""
    verdict = any_verifier.judge(program, [{"stdin": "", "stdout": "ok"}])
    assert verdict.outcome == "wrong"
    assert verdict.reason.startswith(reason)
    assert any_verifier.judge("raise ValueError", [{"stdin": "", "stdout": ""}]).outcome == "wrong"


@pytest.mark.parametrize(
    ("printed", "expected", "tolerance", "same"),
    [
        ("1 \n2\n\n", "1\n2", None, True),
        ("1\r\n2", "1\n2\n", None, True),
        ("1", "1\n2", None, False),
        ("1\n2\n3", "1\n2", None, False),
        ("\n1", "1", None, False),
        ("1  2", "1 2", None, False),
        ("0.3333", "0.33333", None, False),
        ("0.33333 x", "0.33334 x", 1e-4, True),
        ("0.333", "0.4", 1e-4, False),
        ("nan", "0.4", 1e-4, False),
        ("100000001", "100000000", 1e-4, False),  # both are integers
        ("100000001.0", "100000000", 1e-4, True),
        ("1_0", "10", 1e-4, False),
        ("\N{FULLWIDTH DIGIT ONE}", "1", 1e-4, False),
    ],
)
def test_printed_text(printed, expected, tolerance, same):
    assert same_text(printed, expected, tolerance) is same


# --- formats ---------------------------------------------------------------------------------------------------------

CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(x, 0) == 7\n"
FORMATS = {
    "calls": ADD,
    "calls as JSON": json.dumps(ADD),
    "with the Nones of Arrow": [{**test, "kwargs": None, "stdin": None, "stdout": None} for test in ADD],
    "by name": [{"call": "add", "kwargs": {"a": 1, "b": 2}, "expected": 3}],
    "MBPP": ["assert add(1, 2) == 3", "assert add(-5, 3) == -2"],
    "one text": "assert add(1, 2) == 3\nassert add('a', 'b') == 'ab'",
    "MBPP with setup": {"asserts": ["assert math.isclose(add(0.1, 0.2), 0.3)"], "setup": "import math"},
    "HumanEval": {"test": CHECK.replace("x", "7"), "entry_point": "add"},
    "HumanEval with a prompt": {"test": CHECK, "entry_point": "add", "prompt": "x = 7\n\ndef add(a, b):"},
    "APPS": {"inputs": [[1, 2], [-5, 3]], "outputs": [3, -2], "fn_name": "add"},
    "an exception that is expected": "try:\n    add(1, None)\nexcept TypeError:\n    pass\nassert add(1, 2) == 3",
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(any_verifier, name):
    assert any_verifier.judge(PLUS, FORMATS[name]).outcome == "right"
    assert any_verifier.judge(PLUS.replace("+", "-"), FORMATS[name]).outcome == "wrong"


def test_more_formats(any_verifier):
    cls = "class Solution:\n def two(self, n): return [n, n]"
    assert any_verifier.judge(cls, [{"call": "Solution.two", "args": [3], "expected": [3, 3]}]).outcome == "right"
    apps = {"inputs": ["1 2\n", "2 2\n"], "outputs": ["3\n", "4\n"], "fn_name": None}
    assert any_verifier.judge("print(sum(map(int, input().split())))", apps).outcome == "right"
    assert any_verifier.judge("print(3)", apps).outcome == "wrong"


BROKEN = {
    "no test": ([], "at least one test"),
    "no format": ({"x": 1}, r"no known format; the keys are \['x'\]"),
    "no expected value": ([{"call": "f"}], "'call' and 'expected'"),
    "not JSON": ("[1,", "look like JSON"),
    "no syntax": (["assert add("], "does not parse"),
    "nothing called": (["assert 1 == 1"], "call no function"),
    "a name that is nowhere": ({"test": "def check(c):\n    nowhere(c)", "entry_point": "add"}, "NameError"),
    "never called": ({"test": "def check(candidate):\n    pass", "entry_point": "add"}, "call no candidate"),
    "objects as arguments": (["class X: pass\nassert add(X(), 1) == 1"], "_Refused"),
    "None": (None, "must be a list"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tests_are_nobodys_fault(any_verifier, name):
    cell, reason = BROKEN[name]
    verdict = any_verifier.judge(PLUS, cell)
    assert (verdict.outcome, verdict.reward) == ("failed", None)
    assert re.search(reason, verdict.reason)


def test_rows_with_broken_tests_stop_no_run(any_verifier, caplog):
    """A group shares its row, so one such row is a whole batch; it is not tried twice either."""
    any_verifier._until_canary = 100
    assert any_verifier([""] * 4, [PLUS] * 4, tests=[["assert"]] * 4) == [None] * 4
    assert any_verifier([""] * 4, [PLUS] * 4, tests=[["assert missing.add(1, add(1, 1)) == 3"]] * 4) == [0.0] * 4
    assert (
        any_verifier([""] * 4, [PLUS] * 4, tests=[["import missing_module\nassert add(1, 1) == 2"]] * 4) == [None] * 4
    )
    assert "one more try" not in caplog.text


def test_an_exception_of_the_candidate_is_not_the_tests(any_verifier):
    for kind in ("NameError", "ImportError", "SyntaxError", "Exception", "KeyboardInterrupt"):
        verdict = any_verifier.judge(f"def add(a, b): raise {kind}", FORMATS["MBPP"])
        assert verdict.outcome == "wrong", (kind, verdict)


# --- extraction ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = 1", "x = 1"),
        ("    return 1\n", "    return 1\n"),
        ("Sure:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\nagain:\n```\nx = 1\n\n```", "x = 1\n\n"),
        ("```python\nx = 1\n```\n```python\nx = 2\n```", None),
        ("```bash\npip install x\n```\n```python\nx = 1\n```\n```text\n1\n```", "x = 1\n"),
        ("```bash\nls\n```", None),
        ("```python\nx = 1\n", "x = 1\n\n"),
        ("def f():\n    return 1\n```\nThis works.", "def f():\n    return 1\n"),
        ("~~~python\nx = '```'\n~~~", "x = '```'\n"),
        ("<think>\n```python\nx = 0\n```\n</think>\n```python\nx = 1\n```", "x = 1\n"),
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"),
    ],
)
def test_the_program_in_a_completion(text, found):
    assert extract_code(text) == found


def test_a_body_continues_its_prompt_and_a_function_stands_alone():
    tests = parse_tests({"test": CHECK, "entry_point": "add", "prompt": "import math\ndef add(a, b):\n"})
    assert complete_program("    return a + b", tests) == "import math\ndef add(a, b):\n    return a + b"
    assert complete_program("def add(a, b):\n  return 1", tests) == (
        "import math\ndef add(a, b):\n    pass\n\ndef add(a, b):\n  return 1"
    )


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b'{"v":[1,-2.5,"a",null,true]}', [1, -2.5, "a", None, True]),
        (b'{"v":{"t":[1,{"s":[2]}]}}', (1, {2})),
        (b'{"v":{"d":[[1,2],["a",[]]]}}', {1: 2, "a": []}),
        (b'{"v":{"f":"-inf"}}', float("-inf")),
    ],
)
def test_values_of_the_vocabulary(line, value):
    assert decode(parse_line(line)["v"]) == value


@pytest.mark.parametrize(
    "line",
    [
        b'{"v":NaN}',
        b'{"v":1e999}',
        b'{"v":' + b"9" * 1301 + b"}",
        b'{"v":' + b"[" * 42 + b"]" * 42 + b"}",
        b'{"v":' + b"[" * 100_000,
        b'{"v":{"f":"nan"}}',
        b'{"v":{"x":[1]}}',
        b'{"v":{"t":[1],"s":[1]}}',
        b'{"v":{"s":[[1]]}}',
        b'{"v":{"d":[1]}}',
        b'{"v":"' + b"a" * (1 << 20) + b'"}',
        b'{"v":{"s":[' + b",".join(b"%d" % (2**61 + i) for i in range(HASHED + 1)) + b"]}}",
        b"[1]",
        b"\xff",
        b"",
    ],
    ids=lambda line: line[:16].decode(errors="replace"),
)
def test_what_is_no_value(line):
    with pytest.raises(ProtocolError):
        decode(parse_line(line)["v"])


def test_colliding_numbers_cost_little():
    """As many multiples of the hash modulus as are let in: each is compared with all before it, once."""
    start = time.monotonic()
    decode({"s": [i * (2**61 - 1) for i in range(1, HASHED + 1)]})
    assert time.monotonic() - start < 2
    assert len(decode({"s": list(range(50_000))})) == 50_000


@pytest.mark.parametrize(
    ("value", "expected", "tolerance", "same"),
    [
        (2, 2.0, None, True),
        (True, 1, None, False),
        (1, True, None, False),
        ([1], (1,), None, False),
        ([1, [2.0]], [1, [2]], None, True),
        ({1: [2]}, {1: [3]}, None, False),
        ({1, 2}, {2, 1}, None, True),
        (float("nan"), float("nan"), 1e-6, False),
        (0.1 + 0.2, 0.3, None, False),
        ([0.1 + 0.2], [0.3], 1e-9, True),
        (10**400, 1.0, 1e-9, False),
        ("1", 1, 1e-9, False),
        ([1, 2], [1], None, False),
    ],
)
def test_equality(value, expected, tolerance, same):
    assert equal(value, expected, tolerance) is same


# --- the reward function ---------------------------------------------------------------------------------------------


def test_rewards_reasons_and_level(any_verifier):
    """Right, wrong, no single block, late, and a row without tests, as messages and as text."""
    logged, metrics = {}, {}
    completions = [
        [{"role": "assistant", "content": f"```python\n{PLUS}```"}],
        [{"role": "assistant", "content": "def add(a, b): return 3"}],
        [{"role": "assistant", "content": "```python\nx = 1\n```\nor\n```python\nx = 2\n```"}],
        [{"role": "assistant", "content": PLUS}],
    ]
    rewards = any_verifier(
        [""] * 4, completions, tests=[ADD, ADD, ADD, []], log_extra=logged.__setitem__, log_metric=metrics.__setitem__
    )
    assert rewards == [1.0, 0.0, 0.0, None]
    assert logged["code/level"] == [any_verifier.level] * 4
    assert logged["code/reason"][:3] == ["all tests passed", "test 1: wrong value", "no single block of Python code"]
    assert metrics == {"code/failed": 1.0}
    assert any_verifier.__name__ == "code"
    with pytest.raises(ValueError, match="reads the column 'tests'"):
        any_verifier([""], [PLUS])


def test_a_time_limit_covers_all_tests_and_any_thread(any_verifier):
    """0.3 s for sleeps of 0.2 s each: late at the second, within 0.3 s more; also from a thread."""
    quick = CodeVerifier(sandbox=any_verifier.sandbox, time_limit=0.3)
    found = []

    def judge() -> None:
        start = time.monotonic()
        verdict = quick.judge("import time\ndef add(a, b):\n time.sleep(0.2)\n return a + b", ADD)
        found.append((verdict, time.monotonic() - start))

    thread = threading.Thread(target=judge)
    thread.start()
    thread.join()
    judge()
    assert [verdict for verdict, _ in found] == [Verdict("wrong", "time-out")] * 2
    assert all(seconds < 0.6 for _, seconds in found), found
    with pytest.raises(ValueError, match="time_limit"):
        CodeVerifier(sandbox=any_verifier.sandbox, time_limit=0)


def test_two_hundred_hanging_programs(any_verifier):
    """All are wrong, all within their limit, and afterwards only boxes that wait are there."""
    quick = CodeVerifier(sandbox=any_verifier.sandbox, time_limit=0.1, workers=8, canary_every=10**9)
    quick._until_canary = 10**9
    hangs = ["import time\ntime.sleep(100)", "def add(a, b):\n while True: pass"]
    start = time.monotonic()
    rewards = quick([""] * 200, [hangs[i % 2] for i in range(200)], tests=[ADD] * 200)
    assert rewards == [0.0] * 200
    assert time.monotonic() - start < 60
    nursery = any_verifier.sandbox._living()
    deadline = time.monotonic() + 5
    while len(_children(nursery.process.pid)) > nursery.warm and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(_children(nursery.process.pid)) <= nursery.warm


def _children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text(encoding="utf-8").split()


def test_a_float_tolerance_is_only_used_when_asked(any_verifier):
    third = [{"call": "f", "args": [], "expected": 0.333333}]
    assert any_verifier.judge("def f(): return 1 / 3", third).outcome == "wrong"
    near = CodeVerifier(sandbox=any_verifier.sandbox, float_tolerance=1e-5)
    assert near.judge("def f(): return 1 / 3", third).outcome == "right"
    assert near.judge("def f(): return 0.3", third).outcome == "wrong"


def test_failures_are_tried_again_and_then_none(any_verifier, monkeypatch):
    """The first box that does not start costs nothing; two give None; a batch of them stops the run."""
    tries = []

    def fails(times: int):
        def attempt(self, program, tests, real=CodeVerifier._attempt):
            tries.append(program)
            return Verdict("failed", "no box") if len(tries) <= times else real(self, program, tests)

        return attempt

    monkeypatch.setattr(CodeVerifier, "_attempt", fails(1))
    assert any_verifier.judge(PLUS, ADD).outcome == "right"
    assert len(tries) == 2
    tries.clear()
    monkeypatch.setattr(CodeVerifier, "_attempt", fails(100))
    assert any_verifier.judge(PLUS, ADD) == Verdict("failed", "no box")
    any_verifier._until_canary = 100
    assert any_verifier([""], [PLUS], tests=[ADD]) == [None]
    with pytest.raises(VerifierBrokenError, match="could not judge 4 of 4"):
        any_verifier([""] * 4, [PLUS] * 4, tests=[ADD] * 4)


def test_a_dead_box_is_a_failure_and_a_dead_candidate_is_wrong(any_verifier, monkeypatch):
    assert any_verifier.judge("import os\nos.abort()", ADD).outcome == "wrong"

    def refuses(*_: object) -> None:
        raise BoxFailureError("nothing starts")

    monkeypatch.setattr(Sandbox, "load", refuses)
    assert any_verifier.judge(PLUS, ADD) == Verdict("failed", "nothing starts")


@pytest.mark.parametrize("broken", ["always right", "always wrong", "never there"])
def test_canaries_stop_a_run(any_verifier, monkeypatch, broken):
    """A comparison that always or never holds, and boxes that do not start: seen before any reward is given."""
    verifier = CodeVerifier(sandbox=any_verifier.sandbox, canary_every=3)
    assert verifier([""], [PLUS], tests=[ADD]) == [1.0]
    if broken == "never there":
        monkeypatch.setattr(CodeVerifier, "_attempt", lambda *_: Verdict("failed", "no box"))
    else:
        monkeypatch.setattr(code, "equal", lambda *_: broken == "always right")
    monkeypatch.setattr(verifier, "_until_canary", 2)
    if broken != "never there":
        assert verifier([""] * 2, [PLUS] * 2, tests=[ADD] * 2) == [float(broken == "always right")] * 2
    verifier._until_canary = 0
    with pytest.raises(VerifierBrokenError, match="known to be"):
        verifier([""], [PLUS], tests=[ADD])


def test_unsafe_rewards_are_stamped(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("hf_rlx.verifiers.landlock.abi", lambda: (_ for _ in ()).throw(OSError("none")))
    with pytest.raises(SandboxUnavailable):
        CodeVerifier()
    with pytest.warns(UserWarning, match="without a sandbox"):
        verifier = CodeVerifier(allow_unsafe_execution=True, workers=1)
    logged: dict[str, list] = {}
    assert verifier([""], [PLUS], tests=[ADD], log_extra=logged.__setitem__) == [1.0]
    assert logged == {"code/level": ["unsafe"], "code/reason": ["unsafe: all tests passed"]}
    verifier.close()


def test_copies_work(any_verifier):
    copy = pickle.loads(pickle.dumps(any_verifier))
    assert copy.judge(PLUS, ADD).outcome == "right"
    copy.sandbox.close()


def test_a_lost_candidate_ends_the_tests_at_once(any_verifier):
    """The tests catch every exception and go on; a candidate that is gone is no exception that they can catch."""
    tests = "for i in range(3):\n    try:\n        add(1, 2)\n    except BaseException:\n        pass\n"
    assert any_verifier.judge("import os\ndef add(a, b): os._exit(0)", tests).outcome == "wrong"
    assert issubclass(CandidateError, Exception)


# --- HumanEval -------------------------------------------------------------------------------------------------------

SWAPS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}  # fmt: skip

# Which mutation fails HumanEval's own tests, run by Python itself without any box: the first one that does. Rows not
# named: 0. The seven rows without an operator or constant (-1) return their value in a tuple.
MUTATION = {
    16: -1, 17: 3, 19: 10, 22: -1, 23: -1, 27: -1, 29: -1, 34: -1, 35: 1, 38: -1, 40: 3, 64: 1, 69: 2, 71: 1, 79: 2,
    88: 2, 89: 1, 93: 1, 108: 2, 113: 1, 115: 1, 129: 3, 137: 4, 144: 2, 147: 1, 154: 1,
}  # fmt: skip


def mutations(program: str, entry_point: str) -> Iterator[str]:
    """Copies of a program with one operator or constant of the function's body changed, in order of `ast.walk`."""
    tree = ast.parse(program)
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == entry_point]
    for node in [n for f in functions for part in f.body[1:] or f.body for n in ast.walk(part)]:
        if isinstance(node, ast.Compare):
            old, node.ops[0] = node.ops[0], SWAPS[type(node.ops[0])]()
            yield ast.unparse(tree)
            node.ops[0] = old
        elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPS:
            before, node.op = node.op, SWAPS[type(node.op)]()
            yield ast.unparse(tree)
            node.op = before
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | str):
            value = node.value
            node.value = not value if isinstance(value, bool) else value + (1 if isinstance(value, int) else "x")
            yield ast.unparse(tree)
            node.value = value


def wrapped(program: str, entry_point: str) -> str:
    """The program with what the function returns put into a tuple."""
    tree = ast.parse(program)
    for f in tree.body:
        if isinstance(f, ast.FunctionDef) and f.name == entry_point:
            for node in ast.walk(f):
                if isinstance(node, ast.Return) and node.value is not None:
                    node.value = ast.Tuple([node.value], ast.Load())
    return ast.unparse(ast.fix_missing_locations(tree))


@pytest.mark.skipif(not HUMANEVAL.is_file(), reason="no HumanEval beside the checkout")
def test_humaneval(verifier):
    """164 reference solutions are right; the same with one operator or constant changed are wrong."""
    every = 1 if verifier.level == "strong" else 4  # the judging is the same; the boxes had their tests
    rows = [json.loads(line) for line in HUMANEVAL.read_text(encoding="utf-8").splitlines()]
    tests = [{key: row[key] for key in ("test", "entry_point", "prompt")} for row in rows]
    right = [row["canonical_solution"] for row in rows]
    mutants = []
    for number, row in enumerate(rows):
        program, name, which = row["prompt"] + row["canonical_solution"], row["entry_point"], MUTATION.get(number, 0)
        found = wrapped(program, name) if which < 0 else list(mutations(program, name))[which]
        mutants.append(f"```python\n{found}\n```")
    assert len(rows) == 164
    reasons: dict[str, list] = {}
    asked = [*right[::every], *mutants[::every]]
    half = len(asked) // 2
    rewards = verifier([""] * 2 * half, asked, tests=tests[::every] * 2, log_extra=reasons.__setitem__)
    assert [i * every for i in range(half) if rewards[i] != 1.0] == [], reasons["code/reason"]
    assert [i * every for i in range(half) if rewards[half + i] != 0.0] == [], reasons["code/reason"]
