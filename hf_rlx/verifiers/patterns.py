"""Regular expressions that others wrote, on text that the model wrote: bounded in time.

`(a+)+b` on forty times "a" does not end, and Python's engine cannot be interrupted: it holds the whole process. So
whatever may take long runs in a process that is killed at its limit (`workers`). A whole batch is one job, a fork of a
few milliseconds; only when that is late does each text get a job and a limit of its own.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hf_rlx.verifiers.json_schema import JsonError, Schema, read_json
from hf_rlx.verifiers.verdict import Verdict
from hf_rlx.verifiers.workers import Outcome, WorkerPool

_CHEAP = 1_000_000  # steps that a match in this process may take at the very most, some ten milliseconds
_STARVED = 0.1  # share of its limit in processor time below which a late job was not given a chance
_REPEAT = re.compile(r"[*+?{][?+]?")
_POOL: list[WorkerPool] = []
_GUARD = threading.Lock()


def bounded(
    kind: str, what: Any, texts: Sequence[str], timeout: float, here: bool = False
) -> list[tuple[Any, Verdict | None]]:
    """For each text (result, None), or (None, verdict) where there is none: late is the text's fault, "wrong".

    Args:
        kind: "search" and "fullmatch" give whether the pattern is found, "sub" the text with what it matches as
            spaces, "schema" why the text is no JSON that fits, "" where it is.
        what: (pattern, flags), or a JSON schema.
        texts: what it is tried on. timeout: seconds for each of them.
        here: no need for another process.

    Raises:
        WorkersBrokenError: the process for it cannot start.
    """
    if here or not texts:
        return [(found, None) for found in _done(kind, what, texts)]
    pool = _pool()
    outcome = pool.run([kind, what, list(texts)], timeout)
    if not outcome.lost:
        return [(found, None) for found in outcome.value]
    if len(texts) == 1:
        return [_told(outcome, timeout)]
    with ThreadPoolExecutor(min(len(texts), 8), "patterns") as threads:  # they wait, children compute
        return list(threads.map(lambda text: _told(pool.run([kind, what, [text]], timeout), timeout), texts))


def is_cheap(pattern: re.Pattern[str], texts: Sequence[str]) -> bool:
    """Whether matching is sure to take no time worth a process.

    Without groups, repeats cannot stand in one another, so each can at most end anywhere, and a match start anywhere.
    """
    source = pattern.pattern
    if "(" in source:
        return False
    ends = 1 + source.count("|") + len(_REPEAT.findall(source))
    return sum((len(text) + 1) ** ends for text in texts) <= _CHEAP


def spec(pattern: re.Pattern[str]) -> tuple[str, int]:
    """The pattern as a job holds it."""
    return pattern.pattern, pattern.flags


def _told(outcome: Outcome, timeout: float) -> tuple[Any, Verdict | None]:
    if not outcome.lost:
        return outcome.value[0], None
    if outcome.lost == "late" and outcome.cpu >= _STARVED * timeout:
        return None, Verdict("wrong", f"not decided in {timeout:g} s")
    if outcome.lost == "crashed":
        return None, Verdict("wrong", f"matching crashed ({outcome.how})")
    return None, Verdict("failed", f"matching was not given a chance ({outcome.how})")


def _pool() -> WorkerPool:
    with _GUARD:
        if not _POOL:
            _POOL.append(WorkerPool(f"{__name__}:work"))
        return _POOL[0]


def work(job: list[Any]) -> list[Any]:
    """What a worker does: (kind, what, texts), see `bounded`."""
    return list(_done(*job))


def _done(kind: str, what: Any, texts: Sequence[str]) -> list[Any]:
    if kind == "schema":
        schema = Schema(what)
        return [fault(text, schema) for text in texts]
    pattern = re.compile(*what)
    if kind == "sub":
        return [pattern.sub(" ", text) for text in texts]
    match: Callable[[str], Any] = pattern.fullmatch if kind == "fullmatch" else pattern.search
    return [match(text) is not None for text in texts]


def fault(text: str, schema: Schema) -> str:
    """Why a text is no JSON that fits the schema, "" where it is."""
    try:
        schema.check(read_json(text))
    except JsonError as error:
        return str(error)
    return ""
