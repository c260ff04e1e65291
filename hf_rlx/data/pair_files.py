"""Rows of preference data from and to files: JSON lines, JSON, CSV, parquet, `datasets` folders. Knows no torch."""

from __future__ import annotations

import csv
import difflib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any

_TEXT = re.compile(
    r"(prompt|chosen|rejected|completion|response|prediction|answer|output|conversation|instruction|question)(_[ab01])?",
    re.I,
)
_DATASET = re.compile(r"\w[\w.-]*/\w[\w.-]*")
FORMATS = (".jsonl", ".json", ".csv", ".parquet")


class ColumnError(ValueError):
    """Columns cannot be renamed as asked for."""


def read_rows(
    source: str | Path, split: str | None = None, renames: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """All rows of a file, a folder or a dataset on the Hub.

    Args:
        source: a file by its ending: .jsonl (also .ndjson), .json (a list of rows), .csv, .parquet; a folder of
            `save_to_disk` or with data files; or the name of a dataset on the Hub.
        split: of a folder or a Hub dataset; None: the only one, or "train".
        renames: column of the source -> what it is called in the rows. What a cell of a CSV file stands for goes by
            the new name: `chosen` is text, even where it is `42`.

    Raises:
        FileNotFoundError: no such file, and no name of a dataset either.
        ColumnError: there is no column to rename, or there is one of the new name already.
        ValueError: another ending, a file that cannot be read as such (names the line), no rows, no such split.
    """
    path = Path(source)
    if path.is_file():
        if split is not None:
            raise ValueError(f"{path} is a file and has no split {split!r}; leave it out")
        rows = _read_file(path, renames or {})
    elif path.is_dir() or (_DATASET.fullmatch(str(source)) and path.suffix not in FORMATS):
        rows = _read_dataset(str(source), path.is_dir(), split)
    else:
        raise FileNotFoundError(f"{source} does not exist")
    if not rows:
        raise ValueError(f"{source} has no rows")
    return _renamed(rows, renames, str(source)) if renames else rows


def _renamed(rows: list[dict[str, Any]], renames: Mapping[str, str], source: str) -> list[dict[str, Any]]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for old, new in renames.items():
        if old not in columns:
            near = difflib.get_close_matches(old, columns, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ColumnError(f"{source} has no column {old!r}{hint}; it has {columns}")
        if new in columns and new not in renames:
            raise ColumnError(f"{source} has a column {new!r} already; rename that one too, or drop it")
    return [{renames.get(name, name): value for name, value in row.items()} for row in rows]


def _read_file(path: Path, renames: Mapping[str, str]) -> list[dict[str, Any]]:
    try:
        return _rows_of(path, renames)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8 text (byte {error.start}: {error.reason})") from error
    except RecursionError as error:
        raise ValueError(f"{path}: lists or objects too deep inside one another") from error


def _rows_of(path: Path, renames: Mapping[str, str]) -> list[dict[str, Any]]:
    ending = path.suffix.lower()
    if ending == ".parquet":
        import pyarrow.parquet

        try:
            return list(pyarrow.parquet.read_table(path).to_pylist())
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path}: no parquet file ({error})") from error
    if ending == ".csv":
        return _read_csv(path, renames)
    if ending in (".jsonl", ".ndjson"):
        with path.open(encoding="utf-8-sig") as file:
            return [_json(line, f"{path}, line {n}") for n, line in enumerate(file, start=1) if line.strip()]
    if ending == ".json":
        rows = _json(path.read_text(encoding="utf-8-sig"), str(path), list)
        odd = next((i for i, row in enumerate(rows) if not isinstance(row, dict)), None)
        if odd is not None:
            raise ValueError(f"{path}: row {odd} is a {type(rows[odd]).__name__}; a row is an object")
        return list(rows)
    raise ValueError(f"{path} ends with {ending or 'nothing'!r}; files end with {', '.join(FORMATS)}")


def _json(text: str, where: str, kind: type = dict) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        hint = "; one object a line belongs in a .jsonl file" if kind is list else ""
        raise ValueError(f"{where}: no JSON ({error.msg}, column {error.colno}){hint}") from error
    if not isinstance(value, kind):
        raise ValueError(f"{where}: a {type(value).__name__}, not {'an object' if kind is dict else 'a list of rows'}")
    return value


def _read_csv(path: Path, renames: Mapping[str, str]) -> list[dict[str, Any]]:
    limit = csv.field_size_limit(sys.maxsize)  # long conversations are beyond the 128 KiB of the default
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            names = list(reader.fieldnames or ())
            if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
                raise ValueError(f"{path} has two columns called {twice[0]!r}; rename one of them")
            rows = []
            for row in reader:
                if None in row or None in row.values():
                    raise ValueError(f"{path}, line {reader.line_num}: another number of cells than of columns")
                rows.append({name: _cell(renames.get(name, name), text) for name, text in row.items()})
    finally:
        csv.field_size_limit(limit)
    return rows


def _cell(column: str, text: str) -> Any:
    """What a cell stands for. A text stays a text, whatever is in it, but for messages; empty: None."""
    if _TEXT.fullmatch(column):
        messages = _messages(text)
        return text if messages is None else messages
    if text == "":
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False}.get(text, text)


def _messages(text: str) -> Any:
    """The messages that a text is as JSON, or None."""
    if not text.lstrip().startswith("[{"):
        return None
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return None
    return found if all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in found) else None


def _read_dataset(name: str, folder: bool, split: str | None) -> list[dict[str, Any]]:
    from datasets import DatasetDict, load_dataset, load_from_disk

    saved = folder and any((Path(name) / known).exists() for known in ("state.json", "dataset_dict.json"))
    found: Any = load_from_disk(name) if saved else load_dataset(name)
    if isinstance(found, DatasetDict):
        wanted = split or ("train" if "train" in found else next(iter(found)) if len(found) == 1 else None)
        if wanted is None or wanted not in found:
            asked = "" if split is None else f" and no {split!r}"
            raise ValueError(f"{name} has the splits {', '.join(found)}{asked}; name one of them as the split")
        found = found[wanted]
    return list(found)


def write_rows(rows: Iterable[dict[str, Any]], path: str | Path) -> Path:
    """Write rows so that `datasets.load_dataset` reads them; the file appears whole or not at all.

    Args:
        rows: preference data; a column that only some have is None in the others.
        path: its ending says how: .jsonl, .json (a list), .csv (lists and messages as JSON), .parquet.

    Returns:
        the path.

    Raises:
        ValueError: another ending, or no rows, of which no reader could tell the columns.
    """
    path = Path(path)
    check_ending(path)
    found = even(rows)
    if not found:
        raise ValueError(f"no rows are left to write to {path}")
    _whole(path, lambda staged: _write(found, staged, path.suffix.lower()))
    return path


def check_ending(path: Path) -> None:
    """Raise a ValueError where `write_rows` could not write such a file."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path} ends with {path.suffix or 'nothing'!r}; give one of {', '.join(FORMATS)}")


def write_whole(path: Path, text: str) -> None:
    """Write a text; the file appears whole or not at all."""
    _whole(path, lambda staged: staged.write_text(text, encoding="utf-8"))


def _whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` make a file beside `path`, then rename it onto it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, staged = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(Path(staged))
        os.chmod(staged, 0o644)  # mkstemp makes private files; data are for everyone who may read the folder
        os.replace(staged, path)
    except BaseException:
        os.unlink(staged)
        raise


def _write(rows: Sequence[dict[str, Any]], path: Path, ending: str) -> None:
    if ending == ".parquet":
        import pyarrow.parquet

        try:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
            raise ValueError(f"a column holds values of several kinds ({error}); write .jsonl instead") from error
        return
    with path.open("w", encoding="utf-8", newline="\n") as file:
        if ending == ".json":
            json.dump(list(rows), file, ensure_ascii=False, indent=1, default=_plain)
        elif ending == ".jsonl":
            file.writelines(json.dumps(row, ensure_ascii=False, default=_plain) + "\n" for row in rows)
        else:
            writer = csv.DictWriter(file, list(rows[0]))  # ends lines with CR LF, so that both are quoted in cells
            writer.writeheader()
            writer.writerows({name: _as_cell(value) for name, value in row.items()} for row in rows)


def _as_cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False, default=_plain) if isinstance(value, list | dict | bool) else value


def _plain(value: Any) -> Any:
    """What JSON has no kind for: numbers and arrays of NumPy as theirs, dates and decimals as text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, date | time | Decimal):
        return str(value)
    raise ValueError(f"a column holds a {type(value).__name__}, which JSON and CSV lack; write .parquet, or drop it")


def even(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, all with the same columns in the same order; None where one had none, or NaN, which JSON lacks."""
    found = list(rows)
    columns = dict.fromkeys(name for row in found for name in row)
    return [{name: None if row.get(name) != row.get(name) else row.get(name) for name in columns} for row in found]
