"""The mathematical verifier always answers in time: cheap refusals, killed workers, any thread, any arithmetic."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hf_rlx.verifiers import MathVerifier
from hf_rlx.verifiers import math as math_module
from hf_rlx.verifiers.verdict import VerifierBrokenError

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT.parent / "shared" / "cases" / "math_cases.json"
LIMIT = 2.5  # seconds a verdict may take
HANGS = "x^{500}-x^{7}+3x-1>0"  # SymPy looks for 500 roots of it
REFUSED = [
    ("8^8^8^8", "a tower of powers"),
    ("7^{7^{7^{7}}}", "a tower of powers"),
    (r"\frac{3^{(3^{(3^{(3^3)})}-4)}-5}{16}", "a tower of powers"),
    ("6^{6^{6}}", "more than 1000 digits"),
    ("9^{9^{9}}", "more than 1000 digits"),
    ("((9!)!)!", "a factorial of more than 1000"),
    ("2000!", "a factorial of more than 1000"),
    (r"\binom{900000000}{400000000}", "a binomial of more than 1000"),
    ("10^{2000}", "more than 1000 digits"),
    ("1e999999999", "more than 1000 digits"),
    ("3" * 1500, "more than 1000 digits"),
    ("3" * 100_000, "100000 characters"),
    ("+".join("1" * 3000), "5999 characters"),
    ("(" * 60 + "1" + ")" * 60, "nested too deeply"),
    (r"\frac{" * 60 + "1" + "}{2}" * 60, "nested too deeply"),
    ("(x+1)^{99999}", "an exponent of more than 10000"),
    ("2^{9^{942}}", "more than 1000 digits"),  # an exponent that is no float
    # Without a bracket, but too deep for Python's stack.
    ("1*" * 999 + "1", "nested too deeply"),
    ("-" * 1900 + "1", "nested too deeply"),
    ("5" + "%" * 1900, "nested too deeply"),
    (r"\ln " * 480 + "2", "nested too deeply"),
    ("x^" * 900 + "2", "nested too deeply"),
]


@pytest.mark.parametrize(("answer", "reason"), REFUSED, ids=[a[:20] for a, _ in REFUSED])
def test_cheap_refusals(answer: str, reason: str, monkeypatch):
    """No worker is asked; a tenth of a second is a hundred times what it takes."""
    monkeypatch.setattr("hf_rlx.verifiers.workers.WorkerPool.run", None)
    start = time.perf_counter()
    verdict = MathVerifier().judge(f"$\\boxed{{{answer}}}$", "1")
    assert time.perf_counter() - start < 0.1
    assert verdict.outcome == "wrong"
    assert reason in verdict.reason


def test_what_nobody_foresaw_costs_a_verdict_and_often_the_run(monkeypatch):
    """One answer that makes the comparison raise scores None; a batch of them ends the run."""

    def raises(*_: object) -> None:
        raise OverflowError("unforeseen")

    verifier = MathVerifier()
    monkeypatch.setattr(math_module, "agree", raises)
    assert verifier([""], [r"\boxed{3}"], answer=["2"]) == [None]
    with pytest.raises(VerifierBrokenError, match="unforeseen"):
        verifier([""] * 4, [r"\boxed{3}"] * 4, answer=["2"] * 4)


def test_a_gold_answer_too_deep_to_walk_gives_no_verdict():
    verdict = MathVerifier().verify("1*" * 999 + "1", "1")
    assert (verdict.outcome, verdict.excused) == ("failed", True)


def test_what_hangs_is_wrong_within_its_limit_and_the_next_answer_is_judged():
    verifier = MathVerifier(timeout=1.0)
    assert verifier.verify(r"\sqrt8", r"2\sqrt2").reward == 1.0  # the worker has started
    start = time.perf_counter()
    verdict = verifier.verify("x>2", HANGS)
    assert time.perf_counter() - start < 1.5
    # On a machine that gives the child no processor time the verifier says so instead.
    assert verdict.reason == "not decided in 1 s" or verdict.outcome == "failed"
    assert verifier.verify(r"\sqrt8", r"2\sqrt2").reward == 1.0


def test_a_hanging_answer_is_judged_once(monkeypatch):
    """A group of equal answers costs one time-out."""
    calls = []
    run = math_module.WorkerPool.run
    monkeypatch.setattr(math_module.WorkerPool, "run", lambda *args: calls.append(1) or run(*args))
    verifier = MathVerifier(timeout=0.5)
    assert verifier.verify("x>2", HANGS).reward == verifier.verify("x>2", HANGS).reward
    assert len(calls) <= 2  # one, and one more where the child got no processor time


def test_any_thread_and_many_at_once():
    """SymPy's own users lose their time limit off the main thread; here nothing depends on the thread."""
    verifier = MathVerifier()
    found: list[float | None] = []

    def ask(n: int) -> None:
        found.extend(verifier.verify(rf"\sqrt{{{4 * n}}}", a).reward for a in (rf"2\sqrt{{{n}}}", rf"3\sqrt{{{n}}}"))

    threads = [threading.Thread(target=ask, args=(n,)) for n in (2, 3, 5, 6, 7, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0.0] * 6 + [1.0] * 6


def test_ordinary_verdicts_take_less_than_a_millisecond():
    """The median, on a completion of ordinary length whose answer is a number; about 0.1 ms."""
    verifier = MathVerifier()
    text = "She had 48 clips and sold half of them, 48/2 = 24.\n" * 20
    taken = []
    for n in range(200):
        start = time.perf_counter()
        assert verifier.judge(f"{text}The answer is $\\boxed{{{n}}}$.", "-1").reward == 0.0
        taken.append(time.perf_counter() - start)
    assert statistics.median(taken) < 1e-3


CHECK = """
import sys
from hf_rlx.verifiers import MathVerifier
from hf_rlx.verifiers.workers import WorkerPool

def rewards(pairs):
    return [verifier.verify(*pair).reward for pair in pairs]

pool = WorkerPool("kind:work", paths=[sys.argv[1]])
verifier = MathVerifier()
right = [(r"\\sqrt8", r"2\\sqrt2"), ("(x+1)^2", "x^2+2x+1"), (r"\\frac{1}{\\sqrt2}", r"\\frac{\\sqrt2}{2}")]
wrong = [("1", "((20!)!)!"), ("1", r"\\binom{1000000000}{500000000}"), (r"\\pi", "3.14159"), ("2", r"\\sqrt{5}")]
print(pool.run(None, 5.0).value, rewards(right), rewards(wrong))
"""


@pytest.mark.parametrize("kind", ["python", "gmpy"])
def test_with_and_without_gmpy2(kind: str, tmp_path: Path, monkeypatch):
    """SymPy computes with gmpy2 where it is installed, which aborts the process or ignores signals on huge numbers."""
    if kind == "gmpy" and importlib.util.find_spec("gmpy2") is None:
        pytest.skip("gmpy2 is not installed")
    (tmp_path / "kind.py").write_text("import sympy.external.gmpy as g\ndef work(job): return g.GROUND_TYPES\n")
    (tmp_path / "sitecustomize.py").write_text(f"import os; os.environ['SYMPY_GROUND_TYPES'] = {kind!r}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    expected = f"{'gmpy' if kind == 'gmpy' else 'python'} [1.0, 1.0, 1.0] [0.0, 0.0, 0.0, 0.0]"
    assert done.stdout.strip() == expected, done.stderr[-500:]


@pytest.mark.skipif(not CASES.exists(), reason="the collected cases lie beside the checkout, not in it")
@pytest.mark.parametrize("where", ["main thread", "another thread"])
def test_collected_cases(where: str):
    """No verdict is another than noted, and none comes late. "either" and "policy": see the file."""
    cases = json.loads(CASES.read_text(encoding="utf-8"))["cases"]
    verifier = MathVerifier()
    verifier.verify(r"\sqrt8", r"2\sqrt2")
    wrong = []

    def judge() -> None:
        for case in cases:
            start = time.perf_counter()
            reward = verifier.judge(case["prediction"], case["gold"]).reward
            if time.perf_counter() - start > LIMIT:
                wrong.append((case["id"], "late"))
            expected = {"either": reward, "policy": 0.0}.get(case["right"], case["right"])
            if reward != expected:
                wrong.append((case["id"], reward))

    if where == "main thread":
        judge()
    else:
        thread = threading.Thread(target=judge)
        thread.start()
        thread.join()
    assert not wrong
