"""The rows of a run: tasks, local files, saved datasets, the Hub."""

from __future__ import annotations

import csv
import json
import logging
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_rlx.cli import UsageError
from hf_rlx.cli.options import options_of
from hf_rlx.cli.settings import nearest

logger = logging.getLogger(__name__)

DataKind = Literal["prompts", "pairs", "demonstrations", "steps"]
TASKS = ("arithmetic", "spoken_arithmetic", "countdown", "nim", "reasoning_gym", "svamp")
_TABLES = {".csv": ",", ".tsv": "\t"}
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_NUMBERS = ("margin",)  # columns that are numbers, where everything else in a CSV file is text


@dataclass
class Data:
    """What is trained on and what is held out.

    name: of the data, for people. hub_id: where it is on the Hub. reward: specification of the task's own verifier.
    max_completion_length: tokens that an answer of a task needs.
    """

    name: str
    train: Any
    held_out: Any = None
    hub_id: str | None = None
    reward: dict[str, Any] | None = None
    max_completion_length: int | None = None


def load_data(options: dict[str, Any], kind: DataKind, seed: int) -> Data:
    """The rows that the options of `DataOptions` name.

    Args:
        options: by name. kind: what the command needs. seed: of `eval_fraction`.

    Raises:
        UsageError: options that contradict each other. ValueError, OSError: no such data.
    """
    data = _source(options["dataset"], options["dataset_config"], options["train_split"], kind)
    held_out = [name for name in ("eval_split", "eval_dataset", "eval_fraction") if options[name] is not None]
    if len(held_out) > 1:
        raise UsageError(f"--{held_out[0]} and --{held_out[1]} both say what is held out; give one".replace("_", "-"))
    if options["eval_dataset"] is not None:
        split = options["train_split"]
        data.held_out = _source(options["eval_dataset"], options["dataset_config"], split, kind).train
    elif options["eval_split"] is not None:
        path = _local(options["dataset"])
        if path is not None and path.is_file():
            raise UsageError(f"--eval-split: {path} is one file; hold out with --eval-dataset or --eval-fraction")
        if data.held_out is None:  # a task has its held-out side already, under whatever name
            held = _source(options["dataset"], options["dataset_config"], options["eval_split"], kind)
            data.held_out = held.train
    elif options["eval_fraction"] is not None:
        data.train, data.held_out = _divided(data.train, options["eval_fraction"], seed)
    renames = renames_of(options["columns"])
    if renames:
        data.train = _renamed(data.train, renames, "the training rows")
        data.held_out = None if data.held_out is None else _renamed(data.held_out, renames, "the held-out rows")
    return data


def located(name: str | None, beside: Path | None) -> str | None:
    """A relative path that does not exist, as one beside the configuration file where that does; else as it is.

    Args:
        name: of a dataset or file. beside: folder of the configuration file.
    """
    if name is None or beside is None or Path(name).expanduser().exists() or not (beside / name).exists():
        return name
    return str(beside / name)


def read_rows_of(path: Path) -> Any:
    """A local file as a dataset; text stays text, so that an answer `42` is no number.

    Args:
        path: JSON Lines, a JSON list, CSV or TSV with a header, or parquet. A CSV file may have semicolons or tabs
            for commas, as spreadsheets write it.

    Raises:
        ValueError: names the file and the line. OSError: it cannot be read.
    """
    from datasets import Dataset

    from hf_rlx.data.pair_files import read_rows

    suffix = path.suffix.lower()
    try:
        rows = _table(path, _delimiter(path, suffix)) if suffix in _TABLES else read_rows(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); save it as such (spreadsheets: CSV UTF-8)") from None
    if not rows:
        raise ValueError(f"{path} has no rows")
    # A table has the columns of its first row: one that only later rows have would be lost.
    columns = dict.fromkeys(name for row in rows for name in row)
    try:
        return Dataset.from_list([{name: row.get(name) for name in columns} for row in rows])
    except (TypeError, ValueError, OverflowError) as error:  # pyarrow's are ValueErrors or TypeErrors
        raise ValueError(f"{path}: the rows do not fit together in one table: {error}") from error


def _source(name: str, config: str | None, split: str, kind: DataKind) -> Data:
    path = _local(name)
    if path is not None:
        return Data(path.stem, _from_path(path, config, split))
    head = name.partition(":")[0].replace("-", "_").removesuffix("_task")
    if head in TASKS:
        return _task(head, options_of(name)[1], kind)
    suffix = Path(name).suffix.lower()
    if suffix in _SUFFIXES or name.startswith((".", "/", "~")):
        raise FileNotFoundError(f"there is no file or folder {name}")
    if "/" not in name:
        hint = nearest(head, TASKS)
        if hint:
            raise UsageError(f"--dataset: no file, folder or task is called {name!r}{hint}")
    return Data(name, _load(name, config, split), hub_id=name)


def _local(name: str) -> Path | None:
    """The file or folder of that name."""
    path = Path(name).expanduser()
    return path if path.exists() else None


def _from_path(path: Path, config: str | None, split: str) -> Any:
    if path.is_file():
        if path.suffix.lower() not in _SUFFIXES:
            raise ValueError(f"{path} is none of {', '.join(_SUFFIXES)}")
        return read_rows_of(path)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        from datasets import load_from_disk

        return _split_of(load_from_disk(str(path)), split, str(path))
    named = [path / f"{split}{suffix}" for suffix in _SUFFIXES]
    found = next((file for file in named if file.is_file()), None)
    return read_rows_of(found) if found is not None else _load(str(path), config, split)


def _load(name: str, config: str | None, split: str) -> Any:
    """From the Hub, or a folder of files that `datasets` knows how to read."""
    from datasets import DownloadMode, load_dataset
    from datasets.exceptions import DatasetNotFoundError

    from hf_rlx.cli.names import check_dataset

    if not Path(name).exists():
        check_dataset(name, f"--dataset also takes a file, a folder or a task: {', '.join(TASKS)}")
    try:
        return load_dataset(name, config, split=split, download_mode=DownloadMode.REUSE_DATASET_IF_EXISTS)
    except DatasetNotFoundError as error:
        raise ValueError(
            f"no file, folder, task or Hub dataset is called {name!r} ({error}); tasks: {', '.join(TASKS)}"
        ) from error


def held_out_splits(name: str, used: str) -> list[str]:
    """Splits of a local dataset that could be held out.

    Args:
        name: of a folder or file, or anything else, which has none. used: the split that is trained on.
    """
    path = _local(name)
    if path is None or path.is_file():
        return []
    there = path / "dataset_dict.json"
    found = json.loads(there.read_text(encoding="utf-8"))["splits"] if there.is_file() else []
    found += [file.stem for file in sorted(path.iterdir()) if file.suffix.lower() in _SUFFIXES]
    return [split for split in found if split != used and split in ("test", "validation", "valid", "eval", "dev")]


def _split_of(found: Any, split: str, name: str) -> Any:
    if not isinstance(found, dict):
        return found
    if split not in found:
        raise ValueError(f"{name} has no split {split!r}; it has {', '.join(found)}")
    return found[split]


# Tasks.


def _task(name: str, options: dict[str, Any], kind: DataKind) -> Data:
    from hf_rlx.data import tasks

    if kind in ("pairs", "steps"):
        rows = "chosen and rejected answers" if kind == "pairs" else "solutions in steps and their labels"
        raise UsageError(
            f"the task {name} has prompts and answers, and this command needs rows with {rows}; give a file or Hub id"
        )
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    if name == "reasoning_gym" and "name" not in options and "task_name" not in options:
        raise UsageError("the task reasoning_gym needs the name of one: reasoning_gym:task_name=leg_counting")
    if name == "svamp" and "path" not in options:
        raise UsageError("the task svamp needs its file: svamp:path=FILE")
    if "task_name" in options:
        options["name"] = options.pop("task_name")
    make: Callable[..., tasks.Task] = getattr(tasks, f"{name}_task")
    try:
        task = make(**options)
    except TypeError as error:
        raise UsageError(f"the task {name} refuses its options: {error}") from error
    train, test = task.train, task.test
    if kind == "demonstrations":
        train, test = _demonstrations(train), _demonstrations(test)
    return Data(
        task.name.replace("_", " "),
        train,
        test,
        reward=_verifier_of(name, options),
        max_completion_length=task.max_completion_length,
    )


def _verifier_of(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The verifier that the task's docstring names."""
    known: dict[str, dict[str, Any]] = {
        "arithmetic": {"name": "number", "extract": "whole"},
        "spoken_arithmetic": {"name": "number", "extract": "last"},
        "countdown": {"name": "countdown", "every_number": options.get("every_number", True)},
        "nim": {"name": "nim"},
        "svamp": {"name": "number", "extract": "answer_line"},
    }
    if name != "reasoning_gym":
        return known[name]
    own = ("name", "n_train", "n_test", "seed", "conversational", "max_completion_length", "shots", "instruction")
    of_dataset = {key: value for key, value in options.items() if key not in own}
    return {"name": "reasoning_gym", "task_name": options["name"], **of_dataset}


def _demonstrations(rows: Any) -> Any:
    """A task's right answers as completions."""
    from datasets import Dataset

    def shown(row: dict[str, Any]) -> dict[str, Any]:
        answer, plain = str(row["answer"]), isinstance(row["prompt"], str)
        completion = answer if plain else [{"role": "assistant", "content": answer}]
        return {"prompt": row["prompt"], "completion": completion}

    return Dataset.from_list([shown(row) for row in rows])


# Files.


def _delimiter(path: Path, suffix: str) -> str:
    """Between the cells of a table: the suffix's own, or another that the header has where it lacks that one."""
    own = _TABLES[suffix]
    with path.open(encoding="utf-8-sig", newline="") as lines:
        header = lines.readline()
    if own in header:
        return own
    other = next((each for each in (";", "\t", ",", "|") if each in header), own)
    if other != own:
        name = {"\t": "tabs"}.get(other, repr(other))
        logger.info("%s: the cells of its header lie between %s, and so it is read", path, name)
    return other


def check_delimiter(path: Path) -> None:
    """Refuse a CSV file with other cells than by comma, where only those are read.

    Raises:
        ValueError: with the line that writes it anew.
    """
    if path.suffix.lower() != ".csv" or not path.is_file() or (found := _delimiter(path, ".csv")) == ",":
        return
    read = f"pandas.read_csv({str(path)!r}, sep={found!r}, dtype=str, keep_default_na=False)"
    raise ValueError(
        f"{path} has {found!r} between its cells, not commas; write it anew: import pandas; "
        f"{read}.to_csv('new.csv', index=False)"
    )


def _table(path: Path, delimiter: str) -> list[dict[str, Any]]:
    """Rows of a CSV file: text, but for margins (numbers) and columns that are JSON lists throughout (messages)."""
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
        if not reader.fieldnames:
            raise ValueError(f"{path} has no header line")
        names = list(reader.fieldnames)
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"{path} has two columns called {twice[0]!r}; rename one of them")
        rows = []
        limit = csv.field_size_limit(sys.maxsize)  # long conversations are beyond the 128 KiB of the default
        try:
            for row in reader:
                if None in row or None in row.values():
                    many = "more" if None in row else "fewer"
                    raise ValueError(f"{path}, line {reader.line_num} has {many} cells than the header")
                rows.append(dict(row))
        except csv.Error as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from error
        finally:
            csv.field_size_limit(limit)
    for column in reader.fieldnames:
        cells = [row[column] for row in rows]
        values = _numbers(cells, column, path) if column in _NUMBERS else _lists(cells)
        for row, value in zip(rows, values, strict=True):
            row[column] = value
    return rows


def _numbers(cells: list[str], column: str, path: Path) -> list[Any]:
    try:
        return [float(cell) if cell.strip() else None for cell in cells]
    except ValueError as error:
        raise ValueError(f"{path}: the column {column} must hold numbers: {error}") from error


def _lists(cells: list[str]) -> list[Any]:
    """Cells as lists where every one is a JSON list, else as they are."""
    if not cells or not all(cell.lstrip().startswith("[") for cell in cells):
        return list(cells)
    try:
        values = [json.loads(cell) for cell in cells]
    except json.JSONDecodeError:
        return list(cells)
    return values


# Changes.


def _divided(rows: Any, share: float, seed: int) -> tuple[Any, Any]:
    if not 0 < share < 1:
        raise UsageError(f"--eval-fraction must lie between 0 and 1, got {share}")
    count = round(share * len(rows))
    if not 0 < count < len(rows):
        raise UsageError(f"--eval-fraction {share:g} of {len(rows)} rows leaves nothing on one side")
    parts = rows.train_test_split(test_size=count, seed=seed, keep_in_memory=True)
    return parts["train"], parts["test"]


def renames_of(columns: Any) -> dict[str, str]:
    """{old: new} out of words `new=old`, also several with commas, or a section `new: old`.

    Raises:
        UsageError: a word has no `=`: most likely the end of a name with a space.
    """
    if not columns:
        return {}
    if isinstance(columns, dict):
        return {str(old): str(new) for new, old in columns.items()}
    pairs = [word.partition("=") for entry in columns for word in entry.split(",")]
    for place, (new, equals, old) in enumerate(pairs):
        if new and not equals and place and all(pairs[0]):
            words = " ".join(entry for entry in columns).split()
            raise UsageError(
                f"--columns takes new=old, not {new!r}; quote a name with a space: --columns {_quoted(words)}"
            )
        if not (new and equals and old):
            raise UsageError(f"--columns takes new=old, not {new + equals + old!r}")
    return {old.strip(): new.strip() for new, _, old in pairs}


def _quoted(words: list[str]) -> str:
    """Words of a command line, those without `=` put to the name before them."""
    joined: list[str] = []
    for word in words:
        if "=" in word or not joined:
            joined.append(word)
        else:
            joined[-1] += f" {word}"
    return shlex.join(joined)


def _renamed(rows: Any, renames: dict[str, str], what: str) -> Any:
    columns = list(rows.column_names)
    wanted = list(renames.values())
    if any(old not in columns for old in renames) and all(new in columns for new in wanted):
        right = shlex.join(f"{old}={new}" for old, new in renames.items())
        raise UsageError(
            f"--columns is written new=old, and {what} have {', '.join(wanted)} and not {', '.join(renames)}: the "
            f"other way round, --columns {right}"
        )
    for old, new in renames.items():
        if old not in columns:
            whole = [column for column in columns if old.lower() in column.lower().split()]
            near = f"; did you mean {whole[0]!r}?" if whole else nearest(old, columns)
            raise UsageError(f"--columns: {what} have no column {old!r}{near}; they have {columns}")
        if new in columns and new not in renames:
            raise UsageError(f"--columns: {what} have a column {new!r} already; rename that one too, or drop it")
    return rows.rename_columns(renames)
