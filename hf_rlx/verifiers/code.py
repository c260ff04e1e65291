"""Code as an answer: run it in a box, get values out, compare them outside.

A grader whose verdict comes from the process that runs the candidate pays whoever writes "passed". Here the expected
values never enter a box: the candidate answers calls with plain data, or prints, and the comparison happens here.
Test code that asserts (HumanEval, MBPP) comes from datasets, so it runs in a second box, with stand-ins for the
candidate's functions.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from hf_rlx.verifiers.box_layout import PACKAGES, Limits
from hf_rlx.verifiers.boxes import BoxFailureError, CandidateError, Ended, new_id
from hf_rlx.verifiers.code_tests import AssertTests, CallTest, CodeTests, complete_program, extract_code, parse_tests
from hf_rlx.verifiers.sandbox import CandidateRaisedError, Job, Sandbox, Wanted, call
from hf_rlx.verifiers.text import Completion, column_of, completion_text
from hf_rlx.verifiers.verdict import JudgedRows, Verdict, VerifierBrokenError
from hf_rlx.verifiers.wire import ProtocolError, decode, equal, same_text

_log = logging.getLogger(__name__)

_PLUS, _MINUS = "def add(a, b):\n    return a + b\n", "def add(a, b):\n    return a - b - 1\n"
_CALLS = [{"call": "add", "args": [a, b], "expected": a + b} for a, b in ((1, 2), (-5, 3))]
CANARIES: tuple[tuple[str, Any, bool], ...] = (
    (_PLUS, _CALLS, True),
    (_MINUS, _CALLS, False),
    ("import os\n" + _MINUS + "os._exit(0)\n", _CALLS, False),
    (_PLUS, ["assert add(2, 2) == 4"], True),
    (_MINUS, ["assert add(2, 2) == 4"], False),
    ("print(int(input()) + 1)\n", [{"stdin": "4", "stdout": "5"}], True),
    ("print(int(input()) + 2)\n", [{"stdin": "4", "stdout": "5"}], False),
)
"""Programs, their tests, and whether they are right: known beforehand, so a verdict on them judges the verifier."""


class CodeVerifier(JudgedRows):
    """Reward function: 1.0 when a completion's program passes all tests of its row, else 0.0; None when the verifier
    itself failed twice. Plugs into `reward_funcs` of our trainers and of TRL's; may be called from any thread.

    The program is the completion's fenced block of Python, or the completion itself (`code_tests.extract_code`). The
    formats of the tests stand in `code_tests`. Nothing about a test is in the box that runs the program.

    Args:
        level: "auto", "strong" or "medium", see `sandbox`; never lowered silently.
        time_limit: seconds of wall time for one completion, all its tests together. A late program is wrong.
        memory_mb: address space of a program; 512 carries NumPy and SymPy.
        packages: what programs may import beside the standard library, if it is installed.
        float_tolerance: None compares floats exactly; else absolute or relative, for values and for printed numbers.
            Asserts in test code say themselves what they tolerate.
        column: dataset column with the tests.
        canary_every: verdicts after which programs whose verdict is known are judged; so they are at the start.
        max_failed: share of a batch that the verifier may fail on before it counts as broken.
        workers: completions judged at a time; None is one per CPU.
        allow_unsafe_execution: run programs with limits only where no sandbox is to be had. Every reason that is
            logged then starts with "unsafe".
        name: under which rewards, reasons and the level are logged.
        sandbox: use this one instead, which the caller closes; `level`, `memory_mb`, `packages` are then not read.

    Attributes:
        level: of the sandbox in use.

    Raises:
        SandboxUnavailable: no box of the wanted level here.
        ValueError: a time limit that is not positive.

    >>> tests = [{"call": "add", "args": [1, 2], "expected": 3}]
    >>> verifier = CodeVerifier()
    >>> verifier(["Add."], ["def add(a, b): return a + b"], tests=[tests])
    [1.0]
    >>> verifier.close()
    """

    def __init__(
        self,
        level: Wanted = "auto",
        *,
        time_limit: float = 10.0,
        memory_mb: int = 512,
        packages: Sequence[str] = PACKAGES,
        float_tolerance: float | None = None,
        column: str = "tests",
        canary_every: int = 500,
        max_failed: float = 0.25,
        workers: int | None = None,
        allow_unsafe_execution: bool = False,
        name: str = "code",
        sandbox: Sandbox | None = None,
    ) -> None:
        if not time_limit > 0:
            raise ValueError(f"time_limit must be positive, not {time_limit}")
        self.workers = workers or max(1, os.cpu_count() or 1)
        self.sandbox = sandbox or Sandbox(
            level,
            packages=packages,
            limits=Limits(memory_mb=memory_mb, cpu=int(time_limit) + 2),
            warm=2 * self.workers,
            allow_unsafe_execution=allow_unsafe_execution,
        )
        self.level = self.sandbox.level
        self.time_limit = time_limit
        self.float_tolerance = float_tolerance
        self.column = column
        self.canary_every = canary_every
        self.max_failed = max_failed
        self.__name__ = name
        self._owns = sandbox is None
        self._until_canary = 0
        self._canary_lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Without the lock; the sandbox of a copy starts its own process."""
        return {key: value for key, value in self.__dict__.items() if key != "_canary_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _canary_lock=threading.Lock())

    def _verdicts(self, completions: Sequence[Completion], columns: dict[str, Any]) -> list[Verdict]:
        cells = column_of(columns, self.column, len(completions), self.__name__)
        texts = [completion_text(completion) for completion in completions]
        self._check_canaries(len(texts))
        with ThreadPoolExecutor(max(1, min(self.workers, len(texts)))) as pool:
            verdicts = list(pool.map(self.judge, texts, cells))
        if self.level == "unsafe":
            verdicts = [replace(v, reason=f"unsafe: {v.reason}") for v in verdicts]
        return verdicts

    def judge(self, text: str, cell: Any) -> Verdict:
        """The verdict on one completion; never an exception for what a completion or its tests hold.

        Args:
            text: the completion.
            cell: its tests, as in the dataset.
        """
        try:
            tests = cell if isinstance(cell, CodeTests) else parse_tests(cell)
        except (ValueError, TypeError) as error:
            return _row_fault(str(error))
        code = extract_code(text)
        if code is None:
            return Verdict("wrong", "no single block of Python code")
        if not code.strip():
            return Verdict("wrong", "no code")
        program = complete_program(code, tests)
        verdict = self._attempt(program, tests)
        if verdict.outcome == "failed" and not verdict.excused:
            _log.warning("%s: %s; one more try", self.__name__, verdict.reason)
            verdict = self._attempt(program, tests)
        return verdict

    def close(self) -> None:
        """End the boxes; a later call starts them again. Idempotent."""
        if self._owns:
            self.sandbox.close()

    def _check_canaries(self, upcoming: int) -> None:
        with self._canary_lock:
            if self._until_canary > 0:
                self._until_canary -= upcoming
                return
            for program, cell, right in CANARIES:
                verdict = self.judge(program, cell)
                if verdict.outcome != ("right" if right else "wrong"):
                    raise VerifierBrokenError(
                        f"{self.__name__} judged a program that is known to be {'right' if right else 'wrong'} as "
                        f"{verdict.outcome} ({verdict.reason}); its rewards mean nothing, so the run stops here:\n"
                        f"{program}"
                    )
            self._until_canary = self.canary_every - upcoming

    def _attempt(self, program: str, tests: CodeTests) -> Verdict:
        left = self.time_limit  # of the time in boxes; waiting for one is not the candidate's
        try:
            if tests.calls:
                start = time.monotonic()
                if reason := self._wrong_call(program, tests.calls, left):
                    return Verdict("wrong", reason)
                left -= time.monotonic() - start if tests.programs else 0.0
            for test in tests.programs:
                ended = self.sandbox.run_program(program, test.stdin, max(left, 0.0))
                left -= ended.seconds
                if reason := self._wrong_output(ended, test.stdout):
                    return Verdict("wrong", reason)
            if tests.asserts is not None:
                return self._asserted(program, tests.asserts, left)
        except (CandidateError, ProtocolError) as error:
            return Verdict("wrong", str(error))
        except BoxFailureError as error:
            return Verdict("failed", str(error))
        except ValueError as error:  # arguments that cannot be sent: the row's own
            return _row_fault(str(error))
        return Verdict("right", "all tests passed")

    def _wrong_call(self, program: str, tests: Sequence[CallTest], seconds: float) -> str:
        """Why the first wrong call is wrong; "" when all are right."""
        with self.sandbox.load(program, seconds) as job:
            for number, test in enumerate(tests):
                value = decode(call(job, test.name, test.args, test.kwargs))
                if not equal(value, test.expected, self.float_tolerance):
                    return f"test {number}: wrong value"
        return ""

    def _wrong_output(self, ended: Ended, stdout: str) -> str:
        """Why the end of a program is wrong; "" when it is right."""
        if ended.code != 0:
            complaint = ended.err.decode(errors="replace").strip().rpartition("\n")[2]
            return f"exit code {ended.code}: {complaint}"[:200]
        printed = ended.out.decode("utf-8", errors="replace")
        return "" if same_text(printed, stdout, self.float_tolerance) else "wrong output"

    def _asserted(self, program: str, tests: AssertTests, seconds: float) -> Verdict:
        """Run test code in a box of its own; its calls of the candidate are forwarded, one at a time."""
        content: dict[str, Any] = {"mode": "tests", "id": new_id(), "setup": tests.setup, "tests": list(tests.sources)}
        content |= {"stand_ins": list(tests.stand_ins), "entry_point": tests.entry_point}
        with self.sandbox.open(content, seconds) as asking, self.sandbox.load(program, seconds) as candidate:
            ident, calls = content["id"], 0
            while True:
                message = asking.box.read_message(ident, candidate.deadline)
                if "fn" not in message:
                    return _verdict_of(message.get("v"), calls)
                calls += 1
                ident = new_id()
                asking.box.send((ident, *_forwarded(candidate, message, tests.stand_ins)))


def _forwarded(candidate: Job, message: dict[str, Any], allowed: Sequence[str]) -> tuple[bool, Any]:
    """The value of a call that tests make, or the name of the exception that it raised.

    Raises:
        CandidateError, ProtocolError: the candidate ended, was late, or answered with no plain data.
    """
    if message["fn"] not in allowed:
        raise ProtocolError("the tests call what is no stand-in")
    try:
        value = call(candidate, message["fn"], decode(message["a"]), decode(message["k"]))
    except CandidateRaisedError as error:
        if error.kind == "_Refused":
            raise
        return False, error.kind
    return True, decode(value)


def _row_fault(what: str) -> Verdict:
    """No verdict, because of the tests: the dataset's fault, which must not stop a run."""
    return Verdict("failed", f"tests: {what}"[:200], excused=True)


def _verdict_of(answer: Any, calls: int) -> Verdict:
    """What the box of the tests said at its end, after so many calls of the candidate."""
    if answer == "passed":
        return Verdict("right", "all tests passed") if calls else _row_fault("they call no candidate")
    if answer == "failed":
        return Verdict("wrong", "an assertion failed")
    if isinstance(answer, str) and answer.startswith("broken:"):
        return _row_fault(answer.removeprefix("broken:"))
    return Verdict("wrong", f"tests {answer}"[:200])
