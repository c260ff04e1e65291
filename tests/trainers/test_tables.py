"""Completions on disk and in the console."""

from __future__ import annotations

import math

import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from hf_rlx.rollout.scoring import ScoreResult
from hf_rlx.trainers.tables import CompletionTables, best_and_worst, render
from hf_rlx.types import Completion, Rollout


def scored(rewards, texts=None, prompt="p", extra=None):
    texts = texts or [f"text {i}" for i in range(len(rewards))]
    total = torch.tensor([math.nan if r is None else r for r in rewards])
    completions = [Completion([1] * (i + 1), [0.0] * (i + 1), i % 2 == 0, t) for i, t in enumerate(texts)]
    rollout = Rollout(prompt, f"<{prompt}>", [1], completions, {}, total[:, None], total)
    return [rollout], ScoreResult(total[:, None], total, ["f"], extra or {}, {})


def test_the_file_holds_every_completion(tmp_path):
    tables = CompletionTables(tmp_path / "completions", None, False, quiet=True)
    tables.add("train", 7, *scored([1.0, None], extra={"note": ["a", None]}))
    path = tables.write("train", 7)
    assert path == tmp_path / "completions" / "train_000007.parquet"
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    first, second = pq.read_table(path).to_pylist()
    assert first == {
        "step": 7,
        "prompt": "<p>",
        "completion": "text 0",
        "reward": 1.0,
        "tokens": 1,
        "finished": True,
        "rewards/f": 1.0,
        "note": "a",
    }
    assert (second["reward"], second["rewards/f"], second["finished"], second["note"]) == (None, None, False, None)


def test_nothing_is_written_twice_and_an_old_step_is_let_go(tmp_path):
    tables = CompletionTables(tmp_path, None, False, quiet=True)
    assert tables.write("train", 1) is None
    tables.add("train", 1, *scored([1.0]))
    tables.add("train", 1, *scored([2.0]))
    tables.add("eval", 1, *scored([9.0]))
    assert pq.read_table(tables.write("train", 1)).num_rows == 2
    assert tables.write("train", 1) is None
    tables.add("train", 2, *scored([1.0]))
    tables.add("train", 3, *scored([5.0]))
    assert [r["reward"] for r in pq.read_table(tables.write("train", 3)).to_pylist()] == [5.0]
    assert pq.read_table(tables.write("eval", 3)).num_rows == 1


def test_advantages_where_there_are_any(tmp_path):
    """One a completion; or one a token, of which the mean over the completion's own 1 and 2 tokens is written."""
    tables = CompletionTables(tmp_path, None, False, quiet=True)
    for advantages in (torch.tensor([0.5, -0.5]), torch.tensor([[1.0, 99.0, 99.0], [2.0, 4.0, 99.0]])):
        (rollout,), scores = scored([1.0, 0.0])
        rollout.advantages = advantages
        tables.add("train", 1, [rollout], scores)
    assert pq.read_table(tables.write("train", 1))["advantage"].to_pylist() == [0.5, -0.5, 1.0, 3.0]


def test_the_reward_is_the_one_before_penalties(tmp_path):
    tables = CompletionTables(tmp_path, None, False, quiet=True)
    (rollout,), scores = scored([1.0, 0.5])
    rollout.total = rollout.total - 10
    tables.add("train", 1, [rollout], scores)
    assert pq.read_table(tables.write("train", 1))["reward"].to_pylist() == [1.0, 0.5]


def test_extra_columns_of_any_kind(tmp_path):
    """A column that only later rows have, several types in one, an integer beyond 64 bits, half of a surrogate pair,
    and a name that is taken."""
    tables = CompletionTables(tmp_path, None, False, quiet=True)
    tables.add("train", 1, *scored([1.0]))
    extra = {
        "late": ["x"],
        "mixed": [1],
        "numbers": [1],
        "flag": [True],
        "huge": [2**70],
        "text": ["a\ud800"],
        "prompt": ["hint"],
    }
    tables.add("train", 1, *scored([1.0], extra=extra))
    tables.add("train", 1, *scored([1.0], extra={"mixed": ["one"], "numbers": [2.5], "flag": [None]}))
    got = pq.read_table(tables.write("train", 1)).to_pydict()
    assert {name: got[name] for name in ("late", "mixed", "numbers", "flag", "huge", "text", "prompt")} == {
        "late": [None, "x", None],
        "mixed": [None, "1", "one"],
        "numbers": [None, 1.0, 2.5],
        "flag": [None, True, None],
        "huge": [None, str(2**70), None],
        "text": [None, "a?", None],
        "prompt": ["<p>"] * 3,
    }
    assert got["extra/prompt"] == [None, "hint", None]


def test_a_mode_with_a_slash_is_a_file_name(tmp_path):
    tables = CompletionTables(tmp_path, None, False, quiet=True)
    tables.add("eval_org/set", 1, *scored([1.0]))
    assert tables.write("eval_org/set", 1) == tmp_path / "eval_org_set_000001.parquet"


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    """Whole or not at all."""
    tables = CompletionTables(tmp_path, None, False, quiet=True)
    tables.add("train", 1, *scored([1.0]))
    path = tables.write("train", 1)

    def full(table, where):
        where.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("hf_rlx.trainers.tables.pq.write_table", full)
    tables.add("train", 1, *scored([2.0]))
    with pytest.raises(OSError, match="disk full"):
        tables.write("train", 1)
    assert [r["reward"] for r in pq.read_table(path).to_pylist()] == [1.0]


def test_best_and_worst_alternate():
    ranked = [{"reward": r} for r in (0.2, None, 1.0, 0.5, -1.0)]
    assert [r["reward"] for r in best_and_worst(ranked, 4)] == [1.0, None, 0.5, -1.0]
    assert len(best_and_worst(ranked, 99)) == 5


def shown(table) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    text = console.export_text()
    console.file.close()
    return text


def test_markup_in_texts_is_not_interpreted(tmp_path):
    """`[red]` is what a model wrote, and an unclosed tag must not raise."""
    tables = CompletionTables(tmp_path, None, False, quiet=True)
    texts = ["[red]hot[/red]", "[/nonsense]", ":smile:"]
    tables.add("train", 1, *scored([1.0, 0.0, 0.5], texts, prompt="[bold]p"))
    text = shown(render(tables._rows["train"], "title", 6))
    for piece in [*texts, "<[bold]p>"]:
        assert piece in text
    assert "2 (cut)" in text


def test_the_printed_table_is_bounded(tmp_path, capsys):
    tables = CompletionTables(tmp_path, 2, False, quiet=False)
    tables.add("train", 1, *scored([0.0, 1.0, 0.5], ["x" * 5000, "good", "middle"]))
    tables.write("train", 1)
    printed = capsys.readouterr().out
    assert "good" in printed
    assert "middle" not in printed
    assert printed.count("x") < 600


def test_one_row_a_prompt(tmp_path):
    tables = CompletionTables(tmp_path, None, True, quiet=True)
    tables.add("train", 1, *scored([0.25, 1.0]))
    text = shown(render(tables._rows["train"], "title", 6, unique_prompts=True))
    assert ("0.25" in text) != ("text 1" in text)


def test_a_conversation_is_shown_by_its_last_question(tmp_path, capsys):
    """The file keeps the whole rendered text; the table has the last user message, and long ones lose their middle."""
    tables = CompletionTables(tmp_path, None, False, quiet=False)
    rollouts, scores = scored([1.0])
    question = "how " + "very " * 60 + "late is it?"
    messages = [
        {"role": "system", "content": "you are a clock"},
        {"role": "user", "content": [{"type": "text", "text": question}]},
        {"role": "assistant", "content": "It is"},
    ]
    whole = f"<system>you are a clock<user>{question}<assistant>It is"
    rollouts[0].prompt, rollouts[0].prompt_text = messages, whole
    tables.add("train", 1, rollouts, scores)
    kept = CompletionTables(tmp_path, None, False, quiet=False)
    kept.load_state_dict(tables.state_dict())
    path = kept.write("train", 1)
    (row,) = pq.read_table(path).to_pylist()
    assert row["prompt"] == whole
    assert set(row) == {"step", "prompt", "completion", "reward", "tokens", "finished", "rewards/f"}
    printed = capsys.readouterr().out
    assert "clock" not in printed
    assert "how very" in printed
    assert "late is it?" in printed
    assert printed.count("very") < 45
    assert max(len(line) for line in printed.splitlines()) == 120
