"""How long verdicts take: a boxed program at both levels, boxes a second, and the overhead of a math verdict.

pip install "hf_rlx"             # and bubblewrap, for the level "strong"
python examples/benchmarks/verifiers.py
"""

from __future__ import annotations

import statistics
import time
from contextlib import closing

from hf_rlx.verifiers import CodeVerifier, MathVerifier
from hf_rlx.verifiers.sandbox import SandboxUnavailable

GOOD = "def add(a, b): return a + b"
TESTS = [{"call": "add", "args": [1, 2], "expected": 3}]


def boxes(level: str, runs: int = 600) -> str:
    """Warm verdicts one after the other with a pause before each, then a batch of them."""
    with closing(CodeVerifier(level)) as verifier:
        for _ in range(20):
            verifier.judge(GOOD, TESTS)
        seconds = []
        for _ in range(100):
            time.sleep(0.03)  # the next box is made meanwhile
            start = time.perf_counter()
            verifier.judge(GOOD, TESTS)
            seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        rewards = verifier(prompts=[""] * runs, completions=[GOOD] * runs, tests=[TESTS] * runs)
        rate = runs / (time.perf_counter() - start)
    if rewards != [1.0] * runs:
        raise RuntimeError(f"{level}: {runs - rewards.count(1.0)} of {runs} right programs were not rewarded")
    ordered = sorted(seconds)
    warm, slow = 1e3 * statistics.median(ordered), 1e3 * ordered[90]
    return f"{level:8} warm verdict {warm:.1f} ms (p90 {slow:.1f}), {rate:.0f} a second"


def math(runs: int = 2000) -> str:
    """Plain answers, which need no algebra."""
    answers = [f"The answer is \\boxed{{{n}}}." for n in range(runs)]
    verifier = MathVerifier()
    verifier(prompts=[""], completions=answers[:1], answer=["0"])
    start = time.perf_counter()
    rewards = verifier(prompts=[""] * runs, completions=answers, answer=[str(n) for n in range(runs)])
    seconds = time.perf_counter() - start
    if rewards != [1.0] * runs:
        raise RuntimeError(f"{runs - rewards.count(1.0)} of {runs} right answers were not rewarded")
    return f"math     {1e3 * seconds / runs:.3f} ms a verdict"


def main() -> None:
    """Print a line each."""
    print(math())
    for level in ("strong", "medium"):
        try:
            print(boxes(level), flush=True)
        except SandboxUnavailable as error:
            print(f"{level}: {error}")


if __name__ == "__main__":
    main()
