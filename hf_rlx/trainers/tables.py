"""Sampled completions with their scores: a table in the console, parquet files on disk.

Reading twenty completions shows a policy that games its reward sooner than any metric does.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from accelerate import PartialState
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from hf_rlx.rollout.scoring import ScoreResult
from hf_rlx.trainers.metrics import gathered
from hf_rlx.types import Rollout

_SHOWN_CHARACTERS = 400
_SHOWN_OF_A_PROMPT = 200
_WIDTH = 120  # of the printed table where no terminal says how wide it is
_LEAST_WIDTH = 24  # of a longer text's column, also beside many rewards
_QUESTION = " question"  # of a row that is kept, and not written: what is printed of a conversation


class CompletionTables:
    """Keeps the completions since the last write, and writes them: those of all processes, rank by rank, in one file.

    Args:
        folder: `<folder>/<mode>_<step>.parquet` is written; `mode` is `train`, or the prefix of an evaluation's
            metrics.
        num_print: rows of the printed table.
        unique_prompts: print one row a prompt.
        quiet: write files but print nothing.
    """

    def __init__(self, folder: str | Path, num_print: int | None, unique_prompts: bool, quiet: bool) -> None:
        self.folder = Path(folder)
        self.num_print = 6 if num_print is None else num_print
        self.unique_prompts = unique_prompts
        self.quiet = quiet
        self._rows: dict[str, list[dict[str, Any]]] = {}

    def add(self, mode: str, step: int, rollouts: list[Rollout], scores: ScoreResult) -> None:
        """Keep one rollout's completions; those of an earlier step that nobody wrote are let go.

        Columns: step, prompt, completion, reward (before penalties), tokens, finished, `rewards/<function>`; advantage
        where it was computed (the mean over a completion's tokens where each has its own); and what `log_extra` got,
        as `extra/<name>` where one of these has the name.
        """
        rows = self._rows.setdefault(mode, [])
        if rows and rows[0]["step"] != step:
            rows.clear()
        position = 0
        for rollout in rollouts:
            for index, completion in enumerate(rollout.completions):
                row: dict[str, Any] = {
                    "step": step,
                    "prompt": rollout.prompt_text,
                    "completion": completion.text,
                    "reward": _number(scores.total[position]),
                    "tokens": len(completion.token_ids),
                    "finished": completion.finished,
                }
                if isinstance(rollout.prompt, list):
                    row[_QUESTION] = last_question(rollout.prompt)
                if rollout.advantages.numel():
                    own = rollout.advantages[index]
                    row["advantage"] = _number(own[: len(completion.token_ids)].mean() if own.ndim else own)
                for column, name in enumerate(scores.names):
                    row[f"rewards/{name}"] = _number(scores.rewards[position, column])
                for name, values in scores.extra.items():
                    row[f"extra/{name}" if name in row else name] = _plain(values[position])
                rows.append(row)
                position += 1

    def state_dict(self) -> dict[str, list]:
        """What was added and not written, for a checkpoint; independent of what is added later."""
        return {mode: list(rows) for mode, rows in self._rows.items()}

    def load_state_dict(self, state: dict[str, list]) -> None:
        """Put back what `state_dict` gave."""
        self._rows = {mode: list(rows) for mode, rows in state.items()}

    def write(self, mode: str, step: int) -> Path | None:
        """Write `mode`'s completions to parquet (whole or not at all) and print the best and worst of them.

        Every process must call it; the first one writes for all. Returns the file's path, None where this process
        wrote none.
        """
        rows = gathered(self._rows.pop(mode, []))
        if not rows or not PartialState().is_main_process:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{re.sub(r'[^-.A-Za-z0-9_]', '_', mode)}_{step:06d}.parquet"
        staged = path.with_suffix(".partial")
        pq.write_table(as_table(rows), staged)
        os.replace(staged, path)
        if not self.quiet:
            console = Console()
            if not console.is_terminal and not console.is_jupyter:
                console.width = max(console.width, _WIDTH)
            console.print(render(rows, f"{mode} completions, step {step}", self.num_print, self.unique_prompts))
        return path


def as_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Columns are the union over all rows, null where a row has none; values of several types become text."""
    names = dict.fromkeys(name for row in rows for name in row if name != _QUESTION)
    return pa.table({name: _column([row.get(name) for row in rows]) for name in names})


def _column(values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) < 2 or kinds == {int, float}:
        try:
            return pa.array(values)
        except (pa.ArrowException, OverflowError, UnicodeError):  # a huge integer, half of a surrogate pair
            pass
    return pa.array([None if v is None else str(v).encode("utf-8", "replace").decode() for v in values], pa.string())


def best_and_worst(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Up to `count` rows, best and worst alternating: best, worst, second best, second worst, ..."""
    ranked = sorted(rows, key=lambda r: -1e300 if r["reward"] is None else r["reward"], reverse=True)
    picked: list[dict[str, Any]] = []
    while ranked and len(picked) < count:
        picked.append(ranked.pop(0 if len(picked) % 2 == 0 else -1))
    return picked


def render(rows: list[dict[str, Any]], title: str, count: int, unique_prompts: bool = False) -> Table:
    """The printed table: of a conversation its last user message. Texts are shown as they are: no markup in them is
    interpreted."""
    if unique_prompts:
        rows = list({r["prompt"]: r for r in reversed(rows)}.values())
    table = Table(title=title, show_lines=True)
    rewards = [name for name in rows[0] if name.startswith("rewards/")]
    table.add_column("reward" if len(rewards) < 2 else "total", justify="right")
    for name in rewards if len(rewards) > 1 else []:
        table.add_column(name.removeprefix("rewards/"), justify="right")
    shown = best_and_worst(rows, count)
    asked = [_both_ends(row.get(_QUESTION, row["prompt"])) for row in shown]
    said = [_shortened(row["completion"]) for row in shown]
    for name, texts, ratio in (("prompt", asked, 2), ("completion", said, 3)):
        least = min(_LEAST_WIDTH, max(len(line) for text in texts for line in [name, *text.splitlines()]))
        table.add_column(name, overflow="fold", ratio=ratio, min_width=least)
    table.add_column("tokens", justify="right")
    for row, question, answer in zip(shown, asked, said, strict=True):
        numbers = [row["reward"]] + ([row[name] for name in rewards] if len(rewards) > 1 else [])
        table.add_row(
            *(Text("-" if n is None else f"{n:.3g}") for n in numbers),
            Text(question),
            Text(answer),
            Text(f"{row['tokens']}{'' if row['finished'] else ' (cut)'}"),
        )
    return table


def last_question(messages: list[dict[str, Any]]) -> str:
    """The text of the last message of a user; of the last message of all where none is a user's."""
    own = [message for message in messages if message.get("role") == "user"]
    content = (own or messages)[-1].get("content")
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if "text" in part)
    return str(content or "")


def _number(value: Tensor) -> float | None:
    return None if value.isnan() else float(value)


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _both_ends(text: str) -> str:
    """Of a prompt: what is asked stands at its end."""
    half = _SHOWN_OF_A_PROMPT // 2
    return text if len(text) <= _SHOWN_OF_A_PROMPT else f"{text[:half]} ... {text[-half:]}"


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + " ..."
