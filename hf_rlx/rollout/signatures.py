"""Whether reward functions can be called with what a dataset has, asked before anything is sampled."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from hf_rlx.data.formats import check_container
from hf_rlx.rollout.classifier import name_of
from hf_rlx.rollout.reward_models import _DOTTED, GIVEN, RewardError, RewardFunction, resolve

logger = logging.getLogger(__name__)

_HIDDEN = ("prompt", "completion", "completion_ids")  # columns that arguments of every call stand in front of
_ROWS = 256  # of a plain list, that its columns are taken from


def columns_of(dataset: Any) -> list[str]:
    """The columns that reward functions get of a dataset's rows; of a list of rows those that any of the first has."""
    names = getattr(dataset, "column_names", None)
    if names is None:
        first = (dataset[i] for i in range(min(len(dataset), _ROWS)))
        names = list(dict.fromkeys(itertools.chain.from_iterable(row for row in first if isinstance(row, dict))))
    return [name for name in names if name not in _HIDDEN]


def is_function(func: Any) -> bool:
    """Whether an entry of `reward_funcs` is a function, or the dotted name of one; models are none."""
    if isinstance(func, str):
        return not Path(func).is_dir() and (":" in func or _DOTTED.fullmatch(func) is not None)
    return callable(func) and not isinstance(func, nn.Module) and not getattr(func, "runs_on_main_thread", False)


def functions_of(reward_funcs: Any) -> list[Any]:
    """Those entries of a trainer's `reward_funcs` that are functions, dotted names imported.

    Raises:
        ImportError: a name that cannot be imported.
    """
    funcs = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    return [resolve(func) if isinstance(func, str) else func for func in funcs if is_function(func)]


def signature_problem(func: Any, columns: Iterable[str], noun: str = "reward function") -> str | None:
    """Why a function cannot be called with these dataset columns; None: it can. A function without `**kwargs` is
    called with what it takes.

    Args:
        func: a callable. columns: see `columns_of`. noun: what messages call it.
    """
    if inspect.isclass(func):
        return f"{noun} {name_of(func)!r} is a class; pass an instance: {name_of(func)}(...)"
    given = dict.fromkeys([*columns, *GIVEN])
    try:
        RewardFunction(name_of(func), func, "sync", noun).bind(given)
    except RewardError as error:
        return str(error)
    return None


def check_signatures(reward_funcs: Any, datasets: Sequence[tuple[str, Any]], noun: str = "reward function") -> None:
    """Refuse functions that need a column which a dataset does not have.

    Args:
        reward_funcs: of a trainer; models are passed over. datasets: (argument's name, dataset or None) each.
        noun: what messages call a function.

    Raises:
        RewardError: names function, parameter and dataset. ImportError: a name that cannot be imported.
    """
    if reward_funcs is None:
        return
    found = functions_of(reward_funcs)
    for name, dataset in datasets:
        if dataset is None:
            continue
        try:
            check_container(dataset, name)
        except ValueError:  # told by whoever looks at the data
            continue
        columns = columns_of(dataset)
        problems = [problem for func in found if (problem := signature_problem(func, columns, noun)) is not None]
        if problems:
            raise RewardError(f"{name}: " + "; ".join(problems))


__all__ = ["GIVEN", "check_signatures", "columns_of", "functions_of", "is_function", "signature_problem"]
