"""`hf-rlx verify`: the confusion table, the disagreements, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_rlx.cli import main
from hf_rlx.selfcheck import read_options, read_rows, self_check, verifier_named, with_gold
from hf_rlx.verifiers.sandbox import SandboxUnavailable

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k"
ROWS = [
    {"completion": "\\boxed{4}", "gold": "4", "expected": True},
    {"prediction": "\\boxed{5}", "answer": "4", "right": False},
    {"completion": "\\boxed{5}", "gold": "4", "label": True},  # the file is wrong
    {"completion": "\\boxed{4}", "gold": "see figure", "expected": 1},  # no verdict
    {"completion": [{"role": "assistant", "content": "4"}], "gold": "4", "expected": "either"},
]


def jsonl(path: Path, rows: list[dict]) -> str:
    """The rows as a file; its name."""
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    return str(path)


def test_table_and_disagreements(tmp_path: Path, capsys):
    """Two of the four rows that have an expected verdict agree."""
    file = jsonl(tmp_path / "cases.jsonl", ROWS)
    assert main(["verify", file]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[:5] == [
        "expected        right     wrong      open",
        "is right            1         0         1",
        "is wrong            1         1         0",
        "is failed           1         0         0",
        "agreement  2 of 4 (50.00 %)",
    ]
    assert "line 3: expected right, wrong (different)" in printed
    assert "line 4: expected right, failed (the gold answer cannot be read" in printed
    assert "slowest:" in printed
    assert main(["verify", file, "--strict"]) == 1
    assert main(["verify", file, "--show", "1"]) == 0
    assert "1 more disagreements; --show 2 lists all" in capsys.readouterr().out
    assert main(["verify", jsonl(tmp_path / "good.jsonl", ROWS[:2]), "--strict"]) == 0


def test_the_number_verifier_and_where_the_answer_stands(tmp_path: Path, capsys):
    file = jsonl(tmp_path / "cases.jsonl", [{"completion": "#### 4 and 5", "gold": 5, "expected": True}])
    assert main(["verify", file, "--verifier", "number", "--strict"]) == 0  # the last number
    assert main(["verify", file, "--verifier", "number", "--extract", "hash", "--strict"]) == 1


def test_gold_from_another_file(tmp_path: Path):
    rows = read_rows(Path(jsonl(tmp_path / "a.jsonl", [{"prompt": "2+2?", "completion": "A: 4", "label": True}])))
    gold = tmp_path / "b.jsonl"
    jsonl(gold, [{"question": "2+2?", "answer": "It is <<2+2=4>>4.\n#### 4"}])
    report = self_check(with_gold(rows, gold, "prompt=question"), verifier_named("math"))
    assert not report.disagreements
    with pytest.raises(ValueError, match="line 1 has no partner"):
        with_gold([{"prompt": "3+3?"}], gold, "prompt=question")
    with pytest.raises(ValueError, match=r"b\.jsonl:1 has no field 'prompt'"):
        with_gold(rows, gold, "prompt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}\n', "line 1 has none of the fields completion"),
        ("[1]\n", ":1 is no JSON object"),
        ('\n{"completion": "4", "gold": 4}\n{\n', ":3 is no JSON"),
        ('\n\n{"completion": "4"}\n', "line 3 has none of the fields gold, answer, solution, final; rename"),
        (
            '{"completion": "4", "gold": 4, "label": "maybe"}\n',
            "line 1: label is 'maybe', which is no verdict; write true",
        ),
        ('{"completion": "4", "gold": 4, "label": 0.5}\n', "line 1: label is 0.5"),
        ('{"completion": 4, "gold": 4}\n', "line 1: a completion must be text"),
    ],
)
def test_bad_files(content: str, message: str, tmp_path: Path, capsys):
    (tmp_path / "bad.jsonl").write_text(content)
    assert main(["verify", str(tmp_path / "bad.jsonl")]) == 2
    assert message in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "missing.jsonl")]) == 2


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_rows_is_an_error(content: str, tmp_path: Path, capsys):
    file = tmp_path / "empty.csv"
    file.write_text(content)
    assert main(["verify", str(file), "--strict"]) == 1
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", f"hf-rlx verify: error: {file} has no rows\n")


NIM = {"completion": "Moves: 1:1", "state": "1", "expected": True}
ADD = "def add(a, b):\n    return a + b\n"
EACH: dict[str, tuple[list[str], list[dict]]] = {
    "countdown": (
        [],
        [
            {"completion": "1 + 2 + 3", "numbers": [1, 2, 3], "target": 6, "expected": 1},
            {"completion": "6", "numbers": [1, 2, 3], "target": 6, "expected": 0},
        ],
    ),
    "nim": ([], [NIM, {**NIM, "completion": "Moves: 1:2", "expected": False}]),
    "regex": (
        ["pattern=\\d+", "fullmatch=true"],
        [{"completion": "42", "expected": True}, {"completion": "x", "expected": False}],
    ),
    "tags": (
        ['tags=["a"]'],
        [
            {"completion": "<a>1</a>", "expected": True},
            {"prompt": "q <a>", "completion": "1</a>", "expected": True},
            {"completion": "1</a>", "expected": False},
        ],
    ),
    "json": (
        ['schema={"type": "integer"}'],
        [{"completion": "1", "expected": True}, {"completion": "1.5", "expected": False}],
    ),
}


@pytest.mark.parametrize("name", EACH)
def test_each_verifier_by_name(name: str, tmp_path: Path, capsys):
    """All expected verdicts agree; with them turned round, none does."""
    options, rows = EACH[name]
    flags = [word for option in options for word in ("--option", option)]
    file = jsonl(tmp_path / "rows.jsonl", rows)
    assert main(["verify", file, "--verifier", name, "--strict", *flags]) == 0
    assert f"agreement  {len(rows)} of {len(rows)}" in capsys.readouterr().out
    file = jsonl(tmp_path / "rows.jsonl", [{**row, "expected": not row["expected"]} for row in rows])
    assert main(["verify", file, "--verifier", name, *flags]) == 0
    assert f"agreement  0 of {len(rows)}" in capsys.readouterr().out


def test_reasoning_gym_by_task(tmp_path: Path):
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("gcd", size=1, seed=0)[0]
    rows = [
        {"completion": f"Answer: {entry['answer']}", "metadata": json.dumps(entry), "expected": True},
        {"completion": "Answer: -1", "metadata": json.dumps(entry), "expected": False},
    ]
    file = jsonl(tmp_path / "rows.jsonl", rows)
    command = ["verify", file, "--verifier", "reasoning_gym", "--strict", "--option", "task_name=gcd"]
    assert main(command) == 0


def test_code_and_where_there_is_no_box(tmp_path: Path, capsys, monkeypatch):
    tests = [{"call": "add", "args": [1, 2], "expected": 3}]
    rows = [
        {"completion": ADD, "tests": tests, "expected": True},
        {"completion": ADD.replace("+", "-"), "tests": tests, "expected": False},
    ]
    file = jsonl(tmp_path / "rows.jsonl", rows)
    assert main(["verify", file, "--verifier", "code", "--strict", "--option", "time_limit=5"]) == 0

    def none_here(*args, **options):
        raise SandboxUnavailable("no box of any level")

    monkeypatch.setattr("hf_rlx.verifiers.code.Sandbox", none_here)
    assert main(["verify", file, "--verifier", "code"]) == 2
    assert "no box of any level" in capsys.readouterr().err


def test_a_prover_that_is_not_here(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    file = jsonl(tmp_path / "rows.jsonl", [{"completion": "x", "statement": "True"}])
    assert main(["verify", file, "--verifier", "coq"]) == 2
    assert "CoqVerifier needs coqc and coqchk on the PATH" in capsys.readouterr().err
    assert main(["verify", file, "--verifier", "lean"]) == 2
    assert "LeanVerifier needs lean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--verifier", "nim", "--option", "play"], "--option takes key=value, not 'play'"),
        (
            ["--verifier", "nim", "--option", "plays=game"],
            "the verifier nim has no option 'plays'; it has play, graded",
        ),
        (["--verifier", "nim", "--option", "play=chess"], "play must be one of"),
        (["--verifier", "nim"], "line 2: 'x' is no state of Nim"),
        (["--verifier", "countdown"], "line 1 has no field 'numbers', which the verifier countdown reads: numbers"),
        (["--verifier", "nim", "--option", "column=piles"], "line 1 has no field 'piles'"),
        (["--verifier", "regex"], "the verifier regex needs --option pattern=..."),
        (["--verifier", "regex", "--option", "pattern=("], "refuses its options"),
        (["--verifier", "nim", "--out", "/nowhere/there.jsonl"], "is no state"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], message: str, tmp_path: Path, capsys):
    file = jsonl(tmp_path / "rows.jsonl", [NIM, {**NIM, "state": "x"}])
    assert main(["verify", file, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_disagreements_in_a_file(tmp_path: Path):
    """The third and the fourth of the rows, as they stood, with our verdict."""
    out = tmp_path / "out.jsonl"
    assert main(["verify", jsonl(tmp_path / "cases.jsonl", ROWS), "--out", str(out)]) == 0
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["line"], row["verdict"]) for row in written] == [(3, "wrong"), (4, "failed")]
    assert written[0].items() >= {**ROWS[2], "reason": "different"}.items()


def test_options_are_json_or_text():
    found = read_options(["a=1", "b=[1, 2]", "c=x=y", "pattern=42", "time-limit=2.5"])
    assert found == {"a": 1, "b": [1, 2], "c": "x=y", "pattern": "42", "time_limit": 2.5}


def test_help_names_the_columns(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["verify", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "countdown      numbers, target" in printed
    assert "exit status: 0; with --strict 1" in printed


@pytest.mark.skipif(not SHARED.exists(), reason="the collected answers lie beside the checkout, not in it")
def test_real_model_answers():
    """1,642 solutions of four models with their labels: none is judged otherwise."""
    rows = with_gold(read_rows(SHARED / "real_model_outcomes.jsonl"), SHARED / "test.jsonl", "prompt=question")
    report = self_check(rows, verifier_named("math"))
    assert len(report.items) == 1642
    assert report.disagreements == []
