"""Proofs as answers, checked by two files: the model's, and ours, which states the theorem and prints its axioms.

A proof assistant's exit code says that a file compiled, not that it proves the theorem: `Admitted`, an axiom, another
statement under the same notation all compile. So the statement is elaborated where nothing of the model's is loaded,
the model's theorem must have that very type, and only the line that our own file prints about its axioms counts.

Three outcomes: right; wrong; None when the prover ran out of time, which says nothing about the proof, or failed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hf_rlx.verifiers.box_layout import Limits
from hf_rlx.verifiers.boxes import BoxFailureError, CandidateError, Ended
from hf_rlx.verifiers.code_tests import extract_code
from hf_rlx.verifiers.sandbox import Sandbox, Wanted
from hf_rlx.verifiers.text import Completion, column_of, completion_text
from hf_rlx.verifiers.verdict import JudgedRows, Verdict

LATE = "time-out"
_NAME = re.compile(r"[A-Za-z_][\w']*(?:\.[A-Za-z_][\w']*)*")


class ProverUnavailable(RuntimeError):  # noqa: N818 - it says what is the case
    """The proof assistant is not installed here; the message says what was looked for."""

    stops_run = True


class Workplace(Protocol):
    """Where the files of one verdict are compiled, one after the other."""

    def compile(self, name: str, source: str, seconds: float) -> Ended:
        """Compile a file that may refer to those before it.

        Raises:
            CandidateError: late, or too much output. BoxFailureError: it could not be run at all.
        """
        ...


@dataclass
class BoxedProver:
    """A command-line proof assistant in boxes.

    Args:
        sandbox: with what it needs to read. command: name -> the command that compiles that file. suffix: of files.
        env: its environment beside the box's.
    """

    sandbox: Sandbox
    command: Callable[[str], list[str]]
    suffix: str
    env: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def open(self) -> Iterator[_BoxedWorkplace]:
        """A folder for one verdict."""
        with self.sandbox.folder() as folder:
            yield _BoxedWorkplace(self, folder)


@dataclass
class _BoxedWorkplace:
    prover: BoxedProver
    folder: Any

    def compile(self, name: str, source: str, seconds: float) -> Ended:
        files = {f"{name}{self.prover.suffix}": source}
        return self.folder.run(self.prover.command(name), seconds, files, self.prover.env)

    def run(self, argv: Sequence[str], seconds: float) -> Ended:
        return self.folder.run(argv, seconds, {}, self.prover.env)


class _ProofVerifier(JudgedRows):
    """What Coq's and Lean's verifiers share: columns, retry, outcomes. Subclasses say how one proof is judged.

    `self.column` holds the statement, the optional column `theorem` the name that the completion must prove it under
    ("answer" without), the optional `header` what both files start with. `<name>/level` is logged beside the reason.
    """

    tags: tuple[str, ...] = ()

    def __init__(self, prover: Any, time_limit: float, column: str, name: str, max_failed: float, level: str) -> None:
        if not time_limit > 0:
            raise ValueError(f"time_limit must be positive, not {time_limit}")
        self.prover = prover
        self.time_limit = time_limit
        self.column = column
        self.max_failed = max_failed
        self.level = level
        self.__name__ = name

    def _verdicts(self, completions: Sequence[Completion], columns: dict[str, Any]) -> list[Verdict]:
        n = len(completions)
        statements = column_of(columns, self.column, n, self.__name__)
        names = columns.get("theorem") or ["answer"] * n
        headers = columns.get("header") or [""] * n
        texts = [completion_text(completion) for completion in completions]
        rows = zip(texts, statements, names, headers, strict=True)
        return [self.judge(text, statement, name or "answer", header) for text, statement, name, header in rows]

    def judge(self, text: str, statement: str, theorem: str = "answer", header: str | None = "") -> Verdict:
        """The verdict on one completion.

        Args:
            text: the completion, whose single fenced block (or whole text) is the file with the proof.
            statement: what is to be proved, as a type. theorem: the name it is proved under.
            header: imports and options that both files start with; the dataset's, not the model's.
        """
        proof = extract_code(text, self.tags)
        if proof is None or not proof.strip():
            return Verdict("wrong", "no single block of code")
        if not _NAME.fullmatch(theorem):
            return Verdict("failed", f"{theorem!r} is no name of a theorem", excused=True)
        verdict = self._attempt(proof, statement, theorem, header or "")
        if verdict.outcome == "failed" and not verdict.excused:
            verdict = self._attempt(proof, statement, theorem, header or "")
        return verdict

    def _attempt(self, proof: str, statement: str, theorem: str, header: str) -> Verdict:
        try:
            with self.prover.open() as place:
                return self._check(place, proof, statement, theorem, header)
        except CandidateError as error:
            return Verdict("failed", LATE, excused=True) if str(error) == LATE else Verdict("wrong", str(error))
        except BoxFailureError as error:
            return Verdict("failed", str(error))

    def _check(self, place: Any, proof: str, statement: str, theorem: str, header: str) -> Verdict:
        raise NotImplementedError


def _complaint(ended: Ended) -> str:
    text = (ended.err + b"\n" + ended.out).decode(errors="replace")
    return " ".join(text.split())[:200]


class CoqVerifier(_ProofVerifier):
    """Reward function: 1.0 when a completion proves the row's statement in Coq from no axiom but the allowed ones.

    Args:
        axioms: absolute names of axioms that proofs may use, e.g. "Coq.Logic.Classical_Prop.classic".
        time_limit: seconds for each of the files; over it the reward is None.
        check_every: of accepted proofs, each so-manieth is re-checked by coqchk's independent kernel; 0 for none.
        level: of the sandbox. memory_mb: address space of coqc.
        column: dataset column with the statement.
        name: under which rewards are logged.
        max_failed: share of a batch that the verifier may fail on before it counts as broken.

    Raises:
        ProverUnavailable: no coqc on the PATH. SandboxUnavailable: no box of the wanted level here.

    >>> CoqVerifier()(["Prove it."], ["Theorem answer : True. Proof. exact I. Qed."], statement=["True"])
    [1.0]
    """

    tags = ("", "coq", "v", "rocq")

    def __init__(
        self,
        *,
        axioms: Sequence[str] = (),
        time_limit: float = 20.0,
        check_every: int = 10,
        level: Wanted = "auto",
        memory_mb: int = 2048,
        column: str = "statement",
        name: str = "coq",
        max_failed: float = 0.25,
    ) -> None:
        coqc, coqchk = shutil.which("coqc"), shutil.which("coqchk")
        if coqc is None or coqchk is None:
            raise ProverUnavailable("CoqVerifier needs coqc and coqchk on the PATH (Debian: apt-get install coq)")
        where = subprocess.run([coqc, "-where"], capture_output=True, text=True, check=True).stdout.strip()
        read = [p for p in (coqc, coqchk, where, "/etc/ocamlfind.conf") if os.path.exists(p)]
        limits = Limits(memory_mb=memory_mb, cpu=int(time_limit) + 2)
        self.sandbox = Sandbox(level, packages=(), limits=limits, warm=0, read=read)
        self.axioms = tuple(axioms)
        self.check_every = check_every
        self._coqchk = coqchk
        self._accepted = 0
        self._statements: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()

        def command(name: str) -> list[str]:
            return [coqc, "-q", "-w", "none", "-R", ".", "HfRlx", f"{name}.v"]

        prover = BoxedProver(self.sandbox, command, ".v")
        super().__init__(prover, time_limit, column, name, max_failed, self.sandbox.level)

    def close(self) -> None:
        """End the boxes. Idempotent."""
        self.sandbox.close()

    def _check(self, place: Any, proof: str, statement: str, theorem: str, header: str) -> Verdict:
        compiled = place.compile("candidate", f"{header}\n{proof}\n", self.time_limit)
        if compiled.code != 0:
            return Verdict("wrong", f"does not compile: {_complaint(compiled)}")
        # The statement stands before the candidate is loaded, whose notations and coercions therefore do not touch it.
        libraries = "".join(f"Require {name.rpartition('.')[0]}.\n" for name in self.axioms)
        ours = f"{libraries}{header}\nDefinition goal : Type := ({statement}).\nRequire HfRlx.candidate.\n"
        ours += f"Definition checked : goal := HfRlx.candidate.{theorem}.\n"
        checked = place.compile("check", f"{ours}Print Assumptions checked.\n", self.time_limit)
        if checked.code != 0:
            if problem := self._statement_problem(statement, header):
                return Verdict("failed", f"statement: {problem}", excused=True)
            return Verdict("wrong", f"not a proof of the statement: {_complaint(checked)}")
        printed = checked.out.decode(errors="replace").strip()
        if printed != "Closed under the global context" and (reason := self._refused(place, printed, ours)):
            return Verdict("wrong", reason)
        return self._rechecked(place)

    def _statement_problem(self, statement: str, header: str) -> str:
        """What is wrong with the statement itself, which is the dataset's fault; "" for nothing. Asked in a folder
        of its own: the candidate may have filled the other one."""
        with self._lock:
            known = self._statements.get((header, statement))
        if known is None:
            source = f"{header}\nDefinition goal : Type := ({statement}).\n"
            with self.prover.open() as place:
                ended = place.compile("statement", source, self.time_limit)
            known = "" if ended.code == 0 else _complaint(ended)
            with self._lock:
                self._statements[header, statement] = known
        return known

    def _refused(self, place: Any, printed: str, ours: str) -> str:
        """Why what `Print Assumptions` printed is not acceptable; "" when every line names an allowed axiom."""
        head, _, body = printed.partition("\n")
        names = []
        for line in body.split("\n"):
            found = re.match(rf"({_NAME.pattern})(?: :|$)", line)
            if found:
                names.append(found[1])
            elif not line.startswith(" "):
                return f"rests on: {line[:120]}"
        if head != "Axioms:" or not names:
            return f"rests on: {printed[:120]}"
        lines: list[str] = []
        for printed_name in names:
            allowed = [a for a in self.axioms if a.rpartition(".")[2] == printed_name.rpartition(".")[2]]
            if not allowed:
                return f"rests on the axiom {printed_name}"
            lines.append(f"Definition same{len(lines)} : {printed_name} = {allowed[0]} := eq_refl.")
        # The same last name proves nothing: the candidate may have an axiom of that name. Being convertible does,
        # where every name means what it meant when it was printed.
        ended = place.compile("axioms", ours + "\n".join(lines) + "\n", self.time_limit)
        return "" if ended.code == 0 else f"an axiom that only has an allowed one's name: {_complaint(ended)}"

    def _rechecked(self, place: Any) -> Verdict:
        with self._lock:
            self._accepted += 1
            due = self.check_every > 0 and self._accepted % self.check_every == 1 % self.check_every
        if due:
            argv = [self._coqchk, "-silent", "-R", ".", "HfRlx", "-norec", "HfRlx.candidate", "-norec", "HfRlx.check"]
            ended = place.run(argv, self.time_limit)
            if ended.code != 0:
                return Verdict("wrong", f"coqchk refuses: {_complaint(ended)}")
        return Verdict("right", "proved")


LEAN_AXIOMS = ("propext", "Classical.choice", "Quot.sound")
_LEAN_REFUSED = re.compile(
    r"\b(sorry|admit|axiom|native_decide|unsafe|implemented_by|extern|csimp|macro|macro_rules|syntax|elab|elab_rules|"
    r"declare_syntax_cat|run_cmd|run_tac|run_elab|run_meta|initialize|builtin_initialize|skipKernelTC|import|"
    r"(?<!local )notation|(?<!local )(?:infixl?|infixr|prefix|postfix)|Lean|\w*_elab\w*|\w*_parser\w*|d?simproc\w*|"
    r"builtin_\w+|declare_\w+|register_\w+|delab\w*|app_unexpander)\b|#eval|#exit"
    r"|(?:@|attribute\s{0,9})\[[^\]]{0,200}\b(?:tactic|init)\b"
)
# Where only Lean's own reader knows what is a comment or a string: next to other signs, in «names», in characters.
_LEAN_TRICKY = re.compile(r"«|'\\?\"|[^\s/-]--|\S/-|/--?/|-/-|--/")
_LEAN_CODE = re.compile(r'--[^\n]*|/-|(?<![^\s(\[{,:=⟨])"(?:\\.|[^"\\])*+"?|"', re.DOTALL)
_LEAN_COMMENT = re.compile(r"/-|-/")


def lean_axioms(output: str, theorem: str) -> tuple[str, ...] | None:
    """The axioms that Lean's `#print axioms theorem` lists; None when the output is not exactly such an answer.

    Names may contain anything between « and », line ends too, so one answer must be there, stand at the end, and hold
    plain names only.
    """
    start = f"'{theorem}' "
    if output.count(start) != 1:
        return None
    answer = output[output.index(start) + len(start) :].strip()
    if answer == "does not depend on any axioms":
        return ()
    found = re.fullmatch(r"depends on axioms: \[((?:[A-Za-z_][\w.']*,\s+)*[A-Za-z_][\w.']*)\]", answer)
    return tuple(re.split(r",\s+", found[1])) if found else None


def _without_comments(source: str) -> str:
    """Lean source without comments, nested ones too, and without what stands in strings; all of it where a reader
    less exact than Lean's could take code for either, so that nothing hides there. Linear in the length."""
    if _LEAN_TRICKY.search(source):
        return source
    kept: list[str] = []
    at = depth = 0
    while found := (_LEAN_COMMENT if depth else _LEAN_CODE).search(source, at):
        if found[0] == '"':  # of r"..." or s!"...{code}..."
            return source
        if not depth:
            kept.append(source[at : found.start()])
        depth += {"/-": 1, "-/": -1}.get(found[0], 0)
        at = found.end()
    if not depth:
        kept.append(source[at:])
    return " ".join(kept)


class LeanVerifier(_ProofVerifier):
    """Reward function: 1.0 when a completion proves the row's statement in Lean 4 from the three standard axioms.

    Three files: the statement, the completion, and ours, which has a random name that the completion cannot know.
    Lean's files extend its language, so those that do (macros, elaborators, notation that is not local, code run at
    compile time) are refused by their words, as `sorry`, axioms, `native_decide` and `debug.skipKernelTC` are.

    Args:
        axioms: names that proofs may rest on, compared exactly.
        time_limit: seconds for each of the files; over it the reward is None. A cold Mathlib needs minutes.
        project: a Lake project, already built, whose packages proofs may import; None for Lean alone.
        prover: what compiles instead of the `lean` on the PATH, e.g. an adapter to a REPL: an object whose `open()` is
            a context manager that gives a `Workplace`. It has to isolate by itself.
        level: of the sandbox. memory_mb: address space of Lean.
        column: dataset column with the statement; `header` may hold imports.
        name: under which rewards are logged.
        max_failed: share of a batch that the verifier may fail on before it counts as broken.

    Raises:
        ProverUnavailable: no lean on the PATH and no prover given. SandboxUnavailable: no box of the wanted level.

    >>> LeanVerifier()(["Prove it."], ["theorem answer : 1 + 1 = 2 := rfl"], statement=["1 + 1 = 2"])
    [1.0]
    """

    tags = ("", "lean", "lean4")

    def __init__(
        self,
        *,
        axioms: Sequence[str] = LEAN_AXIOMS,
        time_limit: float = 120.0,
        project: str | None = None,
        prover: Any = None,
        level: Wanted = "auto",
        memory_mb: int = 8192,
        column: str = "statement",
        name: str = "lean",
        max_failed: float = 0.25,
    ) -> None:
        self.axioms = frozenset(axioms)
        place = "prover"
        if prover is None:
            prover = _lean(project, Limits(memory_mb=memory_mb, cpu=4 * int(time_limit), threads=64), level)
            place = prover.sandbox.level
        super().__init__(prover, time_limit, column, name, max_failed, place)

    def _check(self, place: Workplace, proof: str, statement: str, theorem: str, header: str) -> Verdict:
        if found := _LEAN_REFUSED.search(_without_comments(proof)):
            return Verdict("wrong", f"not allowed in a proof: {found[0]}")
        goal = place.compile("HfRlxGoal", f"{header}\ndef HfRlxGoal : Prop := {statement}\n", self.time_limit)
        if goal.code != 0:
            return Verdict("failed", f"statement: {_complaint(goal)}", excused=True)
        compiled = place.compile("HfRlxCandidate", f"{header}\n{proof}\n", self.time_limit)
        said = (compiled.out + compiled.err).decode(errors="replace")
        if compiled.code != 0 or "declaration uses 'sorry'" in said or "declaration uses `sorry`" in said:
            return Verdict("wrong", f"does not compile: {_complaint(compiled)}")
        ours = f"checked_{secrets.token_hex(8)}"
        source = f"import HfRlxGoal\nimport HfRlxCandidate\ntheorem {ours} : _root_.HfRlxGoal := {theorem}\n"
        checked = place.compile("HfRlxCheck", f"{source}#print axioms {ours}\n", self.time_limit)
        if checked.code != 0:
            return Verdict("wrong", f"not a proof of the statement: {_complaint(checked)}")
        used = lean_axioms(checked.out.decode(errors="replace"), ours)
        if used is None:
            return Verdict("wrong", "the axioms are not told apart")
        if other := [name for name in used if name not in self.axioms]:
            return Verdict("wrong", f"rests on the axiom {other[0]}")
        return Verdict("right", "proved")

    def close(self) -> None:
        """End the boxes. Idempotent."""
        if isinstance(self.prover, BoxedProver):
            self.prover.sandbox.close()


def _lean(project: str | None, limits: Limits, level: Wanted) -> BoxedProver:
    """Lean on the PATH, or a Lake project's, in boxes."""
    lake, lean = shutil.which("lake"), shutil.which("lean")
    if lean is None or (project is not None and lake is None):
        raise ProverUnavailable(
            "LeanVerifier needs lean (and lake, for a project) on the PATH; see https://lean-lang.org/install"
        )

    def ask(*command: str) -> str:
        return subprocess.run(command, cwd=project, capture_output=True, text=True, check=True).stdout.strip()

    packages = [] if project is None else ask(str(lake), "env", "printenv", "LEAN_PATH").split(":")
    prefix = Path(ask(lean, "--print-prefix"))
    program = str(prefix / "bin" / "lean")  # elan's proxy starts a process, which no box allows
    read = [str(prefix), *(os.path.abspath(os.path.join(project or ".", p)) for p in packages)]
    sandbox = Sandbox(level, packages=(), limits=limits, warm=0, read=[p for p in read if os.path.exists(p)])

    def command(name: str) -> list[str]:
        return [program, "-j1", "-o", f"{name}.olean", f"{name}.lean"]

    return BoxedProver(sandbox, command, ".lean", {"LEAN_PATH": ":".join([".", *read[1:]])})
