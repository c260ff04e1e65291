"""Proofs: honest ones accepted, cheats refused, and what the prover could not tell is nobody's reward."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import pytest

from hf_rlx.verifiers import CoqVerifier, LeanVerifier
from hf_rlx.verifiers.boxes import BoxFailureError, CandidateError, Ended
from hf_rlx.verifiers.proof import ProverUnavailable, _BoxedWorkplace, lean_axioms
from hf_rlx.verifiers.sandbox import SandboxUnavailable
from hf_rlx.verifiers.verdict import Verdict, VerifierBrokenError

# --- Coq -------------------------------------------------------------------------------------------------------------

needs_coq = pytest.mark.skipif(shutil.which("coqc") is None, reason="no coqc (Debian: apt-get install coq)")
CLASSIC = "Coq.Logic.Classical_Prop.classic"
PLUS = "forall n m : nat, n + m = m + n"


@pytest.fixture(scope="module", params=["strong", "medium"])
def coq(request) -> Iterator[CoqVerifier]:
    """A verifier of the level that allows one axiom."""
    try:
        found = CoqVerifier(level=request.param, axioms=[CLASSIC], time_limit=20.0, check_every=4)
    except SandboxUnavailable as error:
        pytest.skip(str(error)[:300])
    yield found
    found.close()


INDUCTION = """
Theorem answer : forall n m : nat, n + m = m + n.
Proof. induction n; simpl; intros; [rewrite <- plus_n_O | rewrite IHn, plus_n_Sm]; reflexivity. Qed.
"""
HONEST = {
    "by induction": (INDUCTION, PLUS, ""),
    "in a block": (f"By induction:\n```coq\n{INDUCTION}```", PLUS, ""),
    "with a lemma and a library": (
        "Require Import Arith.\nLemma l : forall n, n + 0 = n. Proof. auto with arith. Qed.\n"
        "Definition answer : forall n m : nat, n + m = m + n := Nat.add_comm.",
        PLUS,
        "",
    ),
    "from the allowed axiom": (
        "Require Import Classical_Prop.\nDefinition answer : forall P : Prop, P \\/ ~ P := classic.",
        "forall P : Prop, P \\/ ~ P",
        "",
    ),
}

FALSE = "1 = 2"
CHEATS = {
    "C01 Admitted": ("Theorem answer : 1 = 2. Admitted.", FALSE),
    "C02 an axiom": ("Axiom cheat : False.\nTheorem answer : 1 = 2. destruct cheat. Qed.", FALSE),
    "C03 a notation": (
        'Notation "n + m" := 0 (at level 50, left associativity).\nTheorem answer : forall n m : nat, n + m = m + n.\n'
        "Proof. reflexivity. Qed.\nPrint Assumptions answer.",
        PLUS,
    ),
    "C04 no guard": (
        "Unset Guard Checking.\nFixpoint loop (n : nat) : False := loop n.\n"
        "Theorem answer : 1 = 2. destruct (loop 0). Qed.",
        FALSE,
    ),
    "C05 another theorem": ("Theorem answer : 1 = 2. Abort.\nTheorem answer : 1 = 1. reflexivity. Qed.", FALSE),
    "C06 a section's variable": (
        "Section S.\nVariable cheat : False.\nTheorem answer : 1 = 2. destruct cheat. Qed.\nEnd S.",
        FALSE,
    ),
    "C07 prints it itself": (
        "Axiom cheat : 1 = 2.\nDefinition answer := cheat.\n"
        "Theorem closed : True. exact I. Qed.\nPrint Assumptions closed.",
        FALSE,
    ),
    "no universes": (
        "Unset Universe Checking.\nDefinition T := Type.\nAxiom p : 1 = 2.\nDefinition answer : 1 = 2 := p.",
        FALSE,
    ),
    "no positivity": (
        "Unset Positivity Checking.\nInductive bad := B (f : bad -> False).\n"
        "Definition no (b : bad) : False := match b with B f => f b end.\n"
        "Theorem answer : 1 = 2. destruct (no (B no)). Qed.",
        FALSE,
    ),
    "a coercion and an instance": (
        "Definition f (n : nat) : Prop := True.\nCoercion f : nat >-> Sortclass.\n#[export] Set Printing All.\n"
        "Theorem answer : 1 = 1. reflexivity. Qed.",
        FALSE,
    ),
    "an allowed axiom's name": (
        "Module Classical_Prop. Axiom classic : 1 = 2. End Classical_Prop.\n"
        "Definition answer : 1 = 2 := Classical_Prop.classic.",
        FALSE,
    ),
    "an allowed axiom's name and type": (
        "Module Coq. Module Logic. Module Classical_Prop. Axiom classic : forall P : Prop, P \\/ ~ P.\n"
        "End Classical_Prop. End Logic. End Coq.\n"
        "Definition answer := Coq.Logic.Classical_Prop.classic.",
        "forall P : Prop, P \\/ ~ P",
    ),
    "nat of its own": (
        "Inductive nat := O.\nTheorem answer : forall n m : nat, n = m. intros [] []; reflexivity. Qed.",
        "forall n m : nat, n = m",
    ),
    "a set of all sets": (
        "Unset Universe Checking.\nInductive V : Type := sup (A : Type) (f : A -> V).\n"
        "Definition mem (x y : V) : Prop := match y with sup A f => exists a, f a = x end.\n"
        "Lemma no : forall v, mem v v -> False.\n"
        "Proof. induction v as [A f IH]. intros [a e]. assert (H : mem (f a) (sup A f)) by (exists a; reflexivity).\n"
        "rewrite <- e in H. exact (IH a H). Qed.\n"
        "Theorem answer : 1 = 2. Proof. destruct (no (sup V (fun x => x))). eexists. reflexivity. Qed.",
        FALSE,
    ),
    "no guard for all who come after": (
        "Global Unset Guard Checking.\nFixpoint loop (n : nat) : False := loop n.\n"
        "Theorem answer : 1 = 2. destruct (loop 0). Qed.",
        FALSE,
    ),
    "no guard for one": (
        "#[bypass_check(guard)] Fixpoint loop (n : nat) : False := loop n.\n"
        "Theorem answer : 1 = 2. destruct (loop 0). Qed.",
        FALSE,
    ),
    "a narrow page": (
        "Global Set Printing Depth 1.\nGlobal Set Printing Width 1.\nAxiom a : 1 = 2.\nDefinition answer := a.",
        FALSE,
    ),
    "a module that is only declared": (
        "Module Type T. Axiom a : 1 = 2. End T.\nDeclare Module M : T.\nDefinition answer : 1 = 2 := M.a.",
        FALSE,
    ),
    "an argument that nobody gives": ("Class C := c : 1 = 2.\nDefinition answer `{C} : 1 = 2 := c.", FALSE),
    "a proof in a proof": (
        "Set Nested Proofs Allowed.\nTheorem answer : 1 = 2. Theorem b : 1 = 2. Admitted. exact b. Qed.",
        FALSE,
    ),
    "files written beside": (
        'Require Extraction.\nExtraction "check.vo" plus.\nRedirect "check" Print nat.\nAxiom a : 1 = 2.\n'
        "Definition answer := a.",
        FALSE,
    ),
    "nothing": ("Theorem other : 1 = 1. reflexivity. Qed.", FALSE),
    "no Coq": ("I believe that it holds.", FALSE),
}


@needs_coq
@pytest.mark.parametrize("name", HONEST)
def test_honest_proofs_are_accepted(coq, name):
    text, statement, header = HONEST[name]
    assert coq.judge(text, statement, "answer", header) == Verdict("right", "proved")


@needs_coq
@pytest.mark.parametrize("name", CHEATS)
def test_cheats_are_refused(coq, name):
    verdict = coq.judge(*CHEATS[name])
    assert (verdict.outcome, verdict.reward) == ("wrong", 0.0), verdict


@needs_coq
def test_files_are_written_in_the_box_only(coq, tmp_path):
    """C08: `Redirect` and `Extraction` write any path that they may; a proof that does is none the better for it."""
    tmp_path.chmod(0o777)
    for act in (
        f'Redirect "{tmp_path}/made" Print nat.',
        f'Require Extraction.\nExtraction "{tmp_path}/made.ml" Nat.add.',
    ):
        coq.judge(f"{act}\n{INDUCTION}", PLUS)
        assert list(tmp_path.iterdir()) == []


@needs_coq
def test_late_is_none_and_ends_no_run(coq):
    """C09: a proof by computation that does not end. All late: None each, and the verifier is not called broken."""
    quick = CoqVerifier(level=coq.level, time_limit=1.0)
    endless = "Fixpoint f (n : nat) : nat := match n with O => 1 | S m => f m + f m end.\n"
    endless += "Theorem answer : f 60 = 0. vm_compute. Qed."
    reasons: dict[str, list] = {}
    assert quick([""] * 2, [endless] * 2, statement=["True"] * 2, log_extra=reasons.__setitem__) == [None] * 2
    assert reasons == {"coq/level": [coq.level] * 2, "coq/reason": ["time-out"] * 2}
    quick.close()


@needs_coq
def test_a_candidate_that_fills_its_folder_is_wrong_and_the_statement_is_not(coq, monkeypatch):
    """Where nothing compiles after the candidate, the statement alone still does, in a folder of its own."""
    full = []

    def compiles(place, name, source, seconds, real=_BoxedWorkplace.compile):
        if name == "candidate":
            full.append(place.folder)
        elif place.folder in full:
            return Ended(1, b"", b"No space left on device")
        return real(place, name, source, seconds)

    monkeypatch.setattr(_BoxedWorkplace, "compile", compiles)
    monkeypatch.setattr(coq, "_statements", {})
    assert coq.judge("Theorem answer : 1 = 1. reflexivity. Qed.", "1 = 2").outcome == "wrong"
    assert coq._statements == {("", "1 = 2"): ""}


@needs_coq
def test_a_statement_that_is_none_is_the_datasets_fault(coq):
    verdict = coq.judge(INDUCTION, "forall n, n +")
    assert (verdict.outcome, verdict.reason[:10]) == ("failed", "statement:")
    assert coq.judge(INDUCTION, PLUS, "1x").outcome == "failed"
    assert coq([""] * 4, [INDUCTION] * 4, statement=["forall n, n +"] * 4, theorem=[None] * 4) == [None] * 4


@needs_coq
def test_rewards_and_names(coq):
    """The theorem's name and the header come from the dataset; the header's library serves both files."""
    named = "Lemma z : (3 <= 3)%Z. Proof. apply Z.le_refl. Qed."
    rewards = coq(
        [""] * 2,
        [
            [{"role": "assistant", "content": named}],
            [{"role": "assistant", "content": "Lemma z : True. exact I. Qed."}],
        ],
        statement=["(3 <= 3)%Z"] * 2,
        theorem=["z"] * 2,
        header=["Require Import ZArith."] * 2,
    )
    assert rewards == [1.0, 0.0]
    with pytest.raises(ValueError, match="reads the column 'statement'"):
        coq([""], [""])


def test_without_coq(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProverUnavailable, match="apt-get install coq"):
        CoqVerifier()
    with pytest.raises(ProverUnavailable, match="needs lean"):
        LeanVerifier()


# --- Lean ------------------------------------------------------------------------------------------------------------


class Recorded:
    """Plays a Lean that says what was recorded: exit code and output by file, `{name}` for our theorem's name."""

    def __init__(self, **said: tuple[int, str] | Exception) -> None:
        self.said = said
        self.sources: dict[str, str] = {}

    @contextlib.contextmanager
    def open(self) -> Iterator[Recorded]:
        """One verdict."""
        yield self

    def compile(self, name: str, source: str, seconds: float) -> Ended:
        """Exit code 0 and no output, unless something is recorded for the file."""
        self.sources[name] = source
        said = self.said.get(name.removeprefix("HfRlx"), (0, ""))
        if isinstance(said, Exception):
            raise said
        ours = source.split("#print axioms ")[-1].strip()
        return Ended(said[0], said[1].replace("{name}", ours).encode(), b"")


NONE = "'{name}' does not depend on any axioms\n"
LEAN = "theorem answer : 1 + 1 = 2 := rfl"


def judged(proof: str = LEAN, **said) -> Verdict:
    """The verdict with what Lean says; without axioms unless told."""
    return LeanVerifier(prover=Recorded(**{"Check": (0, NONE), **said})).judge(proof, "1 + 1 = 2")


@pytest.mark.parametrize(
    "said",
    [
        NONE,
        "'{name}' depends on axioms: [propext]\n",
        "'{name}' depends on axioms: [propext, Classical.choice, Quot.sound]\n",
        "'{name}' depends on axioms: [propext,\n Classical.choice,\n Quot.sound]\n",
    ],
)
def test_lean_proofs_from_the_standard_axioms(said):
    assert judged(Check=(0, said)) == Verdict("right", "proved")


@pytest.mark.parametrize(
    "said",
    [
        "'{name}' depends on axioms: [sorryAx]\n",
        "'{name}' depends on axioms: [propext, Lean.ofReduceBool]\n",
        "'{name}' depends on axioms: [Classical.choice2]\n",
        "'{name}' depends on axioms: [«x]\n'{name}' depends on axioms: [propext»]\n",
        "'{name}' depends on axioms: [x]\n'{name}' does not depend on any axioms\n",
        "'{name}' depends on axioms: [«propext\n»]\n",
        "'answer' does not depend on any axioms\n",
        "",
    ],
)
def test_lean_proofs_from_anything_else(said):
    """A name with a line end in it can look like a second answer; two answers, or a quoted name, are none."""
    assert judged(Check=(0, said)).outcome == "wrong"


@pytest.mark.parametrize(
    "proof",
    [
        "theorem answer : 1 + 1 = 2 := by sorry",
        "axiom cheat : False\ntheorem answer : 1 + 1 = 2 := cheat.elim",
        "theorem answer : 1 + 1 = 2 := by native_decide",
        "set_option debug.skipKernelTC true\ntheorem answer : 1 + 1 = 2 := rfl",
        'macro "foo" : tactic => `(tactic| rfl)\ntheorem answer : 1 + 1 = 2 := rfl',
        "elab_rules : command | `(#print axioms $x) => pure ()\ntheorem answer : 1 + 1 = 2 := rfl",
        'notation "1" => 2\ntheorem answer : 1 + 1 = 2 := rfl',
        "#eval IO.println 1\ntheorem answer : 1 + 1 = 2 := rfl",
        "theorem answer : 1 + 1 = 2 := by run_tac pure ()",
        "/- /- -/ -/ @[implemented_by f] def g := 1",
        "/- -- -/ macro",  # a line comment inside a comment does not hide its end
        "def a := '\"' macro def b := '\"'",  # two characters, no string
        'def a := "/-" macro def b := "-/"',
        'def a := s!"{by run_tac pure ()}"',
        'def a := r"\\" macro def b := r"\\"',
        "def «/-» := 1 macro def «-/» := 1",
        "def f := do let x <--5; pure x macro",
        "example : p \\/-q := by macro -/",
        "@[command_elab foo] def f := 1",
        "@[simp, tactic foo] def f := 1",
        "attribute [init f] g",
        "open Lean in example := 1",
        "simproc f (x) := 1",
    ],
)
def test_words_that_no_proof_needs(proof):
    assert judged(proof).reason.startswith("not allowed in a proof: ")


def test_words_in_comments_and_strings_are_none():
    fine = '-- no sorry here\n/- nor an /- axiom -/ macro -/\ntheorem answer : "sorry" = "sorry" := rfl'
    assert judged(fine).outcome == "right"
    assert judged('local notation "x" => 2\n' + LEAN).outcome == "right"
    assert judged("/-- Not an axiom. ---/\n".replace("---", "-") + "-- ---- macro\n" + LEAN).outcome == "right"


def test_what_lean_says_otherwise():
    assert judged(Candidate=(1, "error: type mismatch")).reason == "does not compile: error: type mismatch"
    assert judged(Candidate=(0, "warning: declaration uses 'sorry'")).outcome == "wrong"
    assert judged(Check=(1, "error: type mismatch")).reason.startswith("not a proof of the statement")
    assert judged(Goal=(1, "error: unknown identifier")).outcome == "failed"
    assert judged(Candidate=CandidateError("time-out")) == Verdict("failed", "time-out")
    assert judged(Candidate=CandidateError("more output than allowed")).outcome == "wrong"
    assert judged(Candidate=BoxFailureError("no box")) == Verdict("failed", "no box")


def test_lean_files():
    """The statement is compiled without the candidate; our theorem's name is another one each time."""
    recorded = Recorded(Check=(0, NONE))
    verifier = LeanVerifier(prover=recorded)
    assert verifier.judge(f"```lean\n{LEAN}\n```", "1 + 1 = 2", "answer", "import Mathlib").outcome == "right"
    assert recorded.sources["HfRlxGoal"] == "import Mathlib\ndef HfRlxGoal : Prop := 1 + 1 = 2\n"
    assert recorded.sources["HfRlxCandidate"] == f"import Mathlib\n{LEAN}\n\n"
    first = recorded.sources["HfRlxCheck"]
    assert first.startswith("import HfRlxGoal\nimport HfRlxCandidate\ntheorem checked_")
    verifier.judge(LEAN, "1 + 1 = 2")
    assert recorded.sources["HfRlxCheck"] != first


def test_late_lean_proofs_do_not_count_as_failures():
    late = LeanVerifier(prover=Recorded(Candidate=CandidateError("time-out")))
    assert late([""] * 4, [LEAN] * 4, statement=["True"] * 4) == [None] * 4
    broken = LeanVerifier(prover=Recorded(Candidate=BoxFailureError("no box")))
    with pytest.raises(VerifierBrokenError, match="could not judge 4 of 4"):
        broken([""] * 4, [LEAN] * 4, statement=["True"] * 4)
    with pytest.raises(ValueError, match="time_limit"):
        LeanVerifier(prover=Recorded(), time_limit=0)


def test_axioms_are_read_exactly():
    assert lean_axioms("'t' does not depend on any axioms\n", "t") == ()
    assert lean_axioms("x\n'a.t' depends on axioms: [A.b, c']", "a.t") == ("A.b", "c'")
    assert lean_axioms("'t' depends on axioms: []", "t") is None
    assert lean_axioms("'t' depends on axioms: [a]\nmore", "t") is None


@pytest.mark.skipif(shutil.which("lean") is None, reason="no Lean toolchain on the PATH")
def test_a_real_lean():
    verifier = LeanVerifier(time_limit=60)
    assert verifier.judge(LEAN, "1 + 1 = 2") == Verdict("right", "proved")
    assert verifier.judge(LEAN, "1 + 1 = 3").outcome == "wrong"
    verifier.close()
