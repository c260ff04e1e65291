"""What scores a completion: functions, dotted paths and sequence classifiers, all made callable in one way.

`reward_jobs.py` decides when and in which thread a reward function runs, this file what it is and how it is called:
`prepare` turns what the user passed as `reward_funcs` into `RewardFunction`s, and a `RewardCall` is one call.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import importlib
import inspect
import itertools
import logging
import math
import os
import re
import reprlib
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from hf_rlx.models.hub import holds_reward
from hf_rlx.models.reward_role import RoleReward
from hf_rlx.models.shared import SharedModel
from hf_rlx.rollout.classifier import ModelReward, name_of
from hf_rlx.rollout.isolation import Crew, Isolated, Log, plain_state

logger = logging.getLogger(__name__)

LARGEST_REWARD = 1e30  # beyond it squares overflow float32, and the gradient of the whole group is silently 0
_OURS = str(Path(__file__).resolve().parents[1]) + os.sep
_STANDARD = str(Path(os.__file__).resolve().parent) + os.sep
_LINE = re.compile(r'^  File "(.+?)", line (\d+), in (\S+)', re.MULTILINE)  # of a traceback
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What every call has, whatever the dataset's columns."""
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class RewardError(RuntimeError):
    """A reward function failed or returned something that is no reward; the message names the function, the prompt
    and the completion. Where the function raised, its exception is the `__cause__`."""


class RewardTimeoutError(RewardError, TimeoutError):
    """A reward function ran past its time limit."""


class RewardWorkerError(RewardError):
    """The worker process of an isolated reward function died, and so did the one that replaced it."""


@dataclass
class RewardFunction:
    """One reward function, ready to be called."""

    name: str  # what errors and log keys call it
    call: Callable[..., Any]
    kind: Literal["sync", "async", "main"]  # runs in a worker thread, in the event loop, in the thread that gathers
    noun: str = "reward function"  # for errors
    worker: Isolated | Crew | None = None  # runs `call` in a process
    _parameters: list[inspect.Parameter] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            self._parameters = list(inspect.signature(self.call).parameters.values())
        except (TypeError, ValueError):  # some builtins tell no signature
            self._parameters = None

    @property
    def title(self) -> str:
        """The function as an error message calls it."""
        return f"{self.noun} {self.name!r}"

    def bind(self, given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments: what the signature accepts of `given`, all of it with `**kwargs`.

        Raises:
            RewardError: a required parameter is not among `given`; names it and what there is.
        """
        if self._parameters is None:
            return [], dict(given)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter in self._parameters:
            if parameter.kind is parameter.VAR_KEYWORD:
                kwargs = given | kwargs
            elif parameter.name in given and parameter.kind is parameter.POSITIONAL_ONLY:
                args.append(given[parameter.name])
            elif parameter.name in given and parameter.kind is not parameter.VAR_POSITIONAL:
                kwargs[parameter.name] = given[parameter.name]
            elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
                raise RewardError(f"{self.title} requires the parameter {_not_given(parameter.name, given)}")
        return args, kwargs

    def where(self, lists: dict[str, list], row: int) -> str:
        """One row of the prompts and completions, for the end of an error message."""
        prompt, completion = _shortened(lists["prompts"][row]), _shortened(lists["completions"][row])
        return f"\nprompt: {prompt}\ncompletion at index {row} of {len(lists['prompts'])}: {completion}"

    def too_late(self, timeout: float | None) -> RewardTimeoutError:
        """The error of a call that ran past its limit in seconds."""
        return RewardTimeoutError(f"{self.title} did not return within {timeout:g} s")


class RewardCall:
    """One call of a reward function on some rows (indices of a batch), with what it logs.

    `seed`: of an isolated function's random numbers; None leaves them.
    """

    def __init__(
        self, func: RewardFunction, lists: dict[str, list], rows: Sequence[int], state: Any, seed: int | None = None
    ) -> None:
        self.func, self.lists, self.rows, self.seed = func, lists, rows, seed
        self.extra: dict[str, list] = {}
        self.metrics: list[tuple[str, float]] = []
        self.deaths = 0  # of worker processes
        # Copies, since a function may change what it gets.
        given: dict[str, Any] = {key: [_copied(values[i]) for i in rows] for key, values in lists.items()}
        if func.worker is None:
            given["trainer_state"] = state
            given["log_extra"] = lambda column, values: self.extra.setdefault(column, []).extend(values)
            given["log_metric"] = lambda name, value: self.metrics.append((name, float(value)))
        else:
            given |= {"trainer_state": plain_state(state), "log_extra": Log.EXTRA, "log_metric": Log.METRIC}
        self.args, self.kwargs = func.bind(given)

    def run(self) -> tuple[Any, BaseException | None]:
        """Exceptions of every kind are answers: one that ended the thread would be lost."""
        try:
            if self.func.worker is not None:
                return self._run_in(self.func.worker)
            value = self.func.call(*self.args, **self.kwargs)
            # A plain function may return the call of an async one.
            return (asyncio.run(value) if inspect.iscoroutine(value) else value), None
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C during a reward model
            return None, error

    def _run_in(self, worker: Isolated | Crew) -> tuple[Any, BaseException | None]:
        reply = worker.call(self.args, self.kwargs, self.seed)
        self.extra, self.metrics, self.deaths = reply.extra, reply.metrics, reply.deaths
        if reply.lost == "late":
            return None, self.func.too_late(worker.timeout)
        if reply.lost == "died":
            what = f"{self.func.title} ended its worker process, and that which replaced it"
            return None, RewardWorkerError(f"{what} ({reply.how})")
        return reply.value, reply.error

    async def run_here(self) -> tuple[Any, BaseException | None]:
        """The call on the thread that awaits it: its value and its error."""
        return self.run()

    async def run_async(self) -> tuple[Any, BaseException | None]:
        """The call of an async function: its value and its error."""
        try:
            return await self.func.call(*self.args, **self.kwargs), None
        except BaseException as error:  # SystemExit would end the event loop
            return None, error

    def entries(self, value: Any, what: str = "rewards") -> list[Any]:
        """One entry per row, from the list, tensor or array that the call returned.

        Raises:
            RewardError: something else, or another number of them, or of values in `log_extra`.
        """
        count = len(self.rows)
        array = isinstance(value, torch.Tensor | np.ndarray)
        if value.ndim == 0 if array else isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise self.wrong(f"returned {_typed(value)}; expected a list of {count} {what}")
        items = value.tolist() if array else list(value)
        if len(items) != count:
            raise self.wrong(f"returned {len(items)} {what}; expected {count}{self._of_what()}")
        for column, logged in self.extra.items():
            if len(logged) != count:
                raise self.wrong(f"logged {len(logged)} values for {column!r}; expected {count}")
        return items

    def _of_what(self) -> str:
        """What one call is made for."""
        first, *others = (self.lists["prompts"][row] for row in self.rows)
        whose = "one prompt" if all(prompt == first for prompt in others) else "several prompts"
        return f", one each (it is called for the {len(self.rows)} completions of {whose} at a time)" if others else ""

    def wrong(self, what: str, index: int = 0) -> RewardError:
        """The error that says `what` the function did, about the row at `index` of this call."""
        return RewardError(f"{self.func.title} {what}{self.func.where(self.lists, self.rows[index])}")


def _not_given(name: str, given: dict[str, Any]) -> str:
    """A parameter that nothing gives, with what there is. A column may be meant by a name that is only alike; one of
    the other arguments where it is misspelt."""
    columns = [column for column in given if column not in GIVEN]
    near = difflib.get_close_matches(name, columns, n=1) or difflib.get_close_matches(name, GIVEN, n=1, cutoff=0.85)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    there = f"the columns are {', '.join(sorted(columns))}" if columns else "there are none besides the prompt"
    return f"{name!r}, which no dataset column gives{hint}; {there}; always given are {', '.join(GIVEN)}"


def raised_at(error: BaseException) -> str:
    """Where a reward function raised: `file:line, in name` of the innermost line that is neither this package's nor of
    an installed one; else of the innermost that is not this package's; empty where there is none.

    Args:
        error: as it was caught; of a worker process with its traceback as a note, see `Reply`.
    """
    lines = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    for note in getattr(error, "__notes__", ()):
        lines += _LINE.findall(note)
    foreign = [line for line in lines if not line[0].startswith(_OURS)]
    own = [line for line in foreign if not line[0].startswith((_STANDARD, "<frozen")) and not _is_installed(line[0])]
    found = (own or foreign)[-1:]
    return "".join(f"{_short(file)}:{number}, in {name}" for file, number, name in found)


def _is_installed(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _short(file: str) -> str:
    """The path from where the program runs, where it is below."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


class Numbers:
    """What reward functions return: a number per row; None and NaN abstain."""

    def read(self, call: RewardCall, value: Any) -> list[float | None]:
        """One number, NaN or None per row.

        Raises:
            RewardError: as `RewardCall.entries`; an entry of another type.
        """
        items = call.entries(value)
        for index, item in enumerate(items):
            if isinstance(item, np.generic | np.ndarray | torch.Tensor) and item.ndim == 0:
                items[index] = item = item.item()
            if item is not None and not isinstance(item, Real):
                raise call.wrong(f"returned {_typed(item)}; expected a number or None", index)
        return [None if item is None else as_float(item) for item in items]

    def fault(self, entry: float, completion: Any) -> tuple[str, str] | None:
        """See `fault_of`."""
        return fault_of(entry, f"returned {'NaN' if math.isnan(entry) else entry}")


def fault_of(number: float, told: str) -> tuple[str, str] | None:
    """Why a number is no reward, as (kind, error text that begins with `told`): NaN, or out of range."""
    if math.isnan(number):
        return "NaN", told
    if abs(number) > LARGEST_REWARD:
        return "out of range", f"{told}; a reward must be finite and at most {LARGEST_REWARD:g} in size"
    return None


def prepare(
    reward_funcs: Any,
    names: Sequence[str] | None = None,
    processing_classes: Any = None,
    model_init_kwargs: dict[str, Any] | None = None,
    device: torch.device | str | None = None,
    noun: str = "reward function",
    taken: Sequence[str] = (),
) -> list[RewardFunction]:
    """Turn the `reward_funcs` argument of a trainer into reward functions.

    Args:
        reward_funcs: one, or a list of: a callable; an async callable; a sequence classifier; a string (`resolve`).
        names: one per function; by default the function's `__name__`, an object's class, a model's last path part.
            A name that occurs twice gets the suffix `_2`, and a warning is logged.
        processing_classes: tokenizers of the models, one per function (None for the others); a model without one
            loads the tokenizer of its own id.
        model_init_kwargs: passed to `from_pretrained` for models given as a string.
        device: where models are moved to (`ModelReward.to`); None leaves them where they are.
        noun: what errors call a function, before its name.
        taken: names that others have already.

    Raises:
        ValueError: no function, an entry is None or not callable, or lengths differ.
        ImportError: a string can be neither imported nor loaded.
    """
    funcs = list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    if not funcs:
        raise ValueError("reward_funcs is empty: pass at least one reward function")
    tokenizers = processing_classes if isinstance(processing_classes, list | tuple) else [processing_classes]
    if processing_classes is None:
        tokenizers = [None] * len(funcs)
    for what, given in (("reward_processing_classes", tokenizers), ("names", names)):
        if given is not None and len(given) != len(funcs):
            raise ValueError(f"{what} has {len(given)} entries for {len(funcs)} reward functions")
    prepared: list[RewardFunction] = []
    for index, (func, tokenizer) in enumerate(zip(funcs, tokenizers, strict=True)):
        if isinstance(func, str):
            func = resolve(func, model_init_kwargs)
        name = names[index] if names is not None else name_of(func)
        if isinstance(func, nn.Module) and hasattr(func, "config"):
            func = ModelReward(func, tokenizer)
        if isinstance(func, ModelReward | RoleReward) and device is not None:
            func.to(device)
        if not callable(func):
            raise ValueError(f"reward_funcs[{index}] is {func!r}; expected a function, a model, or the name of one")
        free = _free(name, [*taken, *(other.name for other in prepared)])
        prepared.append(RewardFunction(free, func, _kind_of(func), noun))
    return prepared


def resolve(text: str, model_init_kwargs: dict[str, Any] | None = None) -> Any:
    """Find what a string in `reward_funcs` names.

    An existing local folder is a model. `"package.module:function"`, and a name made only of identifiers and dots
    (`"package.module.function"`), is imported. Everything else (`"org/name"`, `"gpt2"`) is a model of the Hub, loaded
    with `AutoModelForSequenceClassification` and `num_labels=1`.

    Raises:
        ImportError: the path or the model does not exist; the message holds the name.
    """
    if not Path(text).is_dir() and (":" in text or _DOTTED.fullmatch(text)):
        module, _, attribute = text.partition(":") if ":" in text else text.rpartition(".")
        try:
            found = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ImportError(f"cannot import the reward function {text!r}: {error}") from error
        if not callable(found):
            raise ImportError(f"the reward function {text!r} is {found!r}, which is not callable")
        return found
    from transformers import AutoModelForSequenceClassification

    try:
        if holds_reward(text, model_init_kwargs or {}):
            shared = SharedModel.from_pretrained(text, **(model_init_kwargs or {}))
            return shared.reward_function(name=Path(text).name)
        return AutoModelForSequenceClassification.from_pretrained(text, num_labels=1, **(model_init_kwargs or {}))
    except (OSError, ValueError) as error:
        hint = 'to import a function write "package.module:function"'
        raise ImportError(f"cannot load {text!r} as a reward model (folder or Hub id); {hint}. {error}") from error


def _copied(value: Any) -> Any:
    """Lists and dictionaries copied at every depth; what they hold, and anything else, as it is."""
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value


def _shortened(text: str | list) -> str:
    """Both ends of a text or conversation, about 200 characters, quoted."""
    if isinstance(text, list):
        text = " | ".join(f"{m.get('role')}: {m.get('content')}" if isinstance(m, dict) else str(m) for m in text)
    return repr(text if len(text) <= 200 else f"{text[:100]} ... {text[-100:]}")


def as_float(number: Real) -> float:
    """A float; infinite where the number is too large for one."""
    try:
        return float(number)
    except OverflowError:  # an integer with hundreds of digits
        return math.inf


def _typed(value: Any) -> str:
    return f"{reprlib.repr(value)} of type {type(value).__name__}"


def _free(name: str, used: Sequence[str]) -> str:
    if name not in used:
        return name
    free = next(f"{name}_{i}" for i in itertools.count(2) if f"{name}_{i}" not in used)
    logger.warning("two reward functions are called %r: the later is logged as %r", name, free)
    return free


def _kind_of(func: Any) -> Literal["sync", "async", "main"]:
    if isinstance(func, nn.Module) or getattr(func, "runs_on_main_thread", False):
        return "main"
    while isinstance(func, functools.partial):
        func = func.func
    # An object carries the `async` on its class's __call__, which iscoroutinefunction(object) does not look at.
    is_async = inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__)
    return "async" if is_async else "sync"
