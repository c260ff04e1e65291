"""What scores a completion: functions, dotted paths and sequence classifiers, all made callable in one way.

`scoring.py` decides when and in which thread a reward function runs, this file what it is: `prepare` turns what the
user passed as `reward_funcs` into `RewardFunction`s, and `ModelReward` lets a reward model be called like a function.
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
import re
import reprlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

logger = logging.getLogger(__name__)

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class RewardError(RuntimeError):
    """A reward function failed or returned something that is no reward; the message names the function, the prompt
    and the completion. Where the function raised, its exception is the `__cause__`."""


class RewardTimeoutError(RewardError, TimeoutError):
    """A reward function ran past its time limit."""


@dataclass
class RewardFunction:
    """One reward function, ready to be called."""

    name: str  # what errors and log keys call it
    call: Callable[..., Any]
    kind: Literal["sync", "async", "main"]  # runs in a worker thread, in the event loop, in the thread that gathers
    _parameters: list[inspect.Parameter] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            self._parameters = list(inspect.signature(self.call).parameters.values())
        except (TypeError, ValueError):  # some builtins tell no signature
            self._parameters = None

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
                near = difflib.get_close_matches(parameter.name, given, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise RewardError(
                    f"reward function {self.name!r} requires the parameter {parameter.name!r}, which no dataset "
                    f"column gives{hint}; available: {', '.join(sorted(given))}"
                )
        return args, kwargs

    def where(self, lists: dict[str, list], row: int) -> str:
        """One row of the prompts and completions, for the end of an error message."""
        prompt, completion = _shortened(lists["prompts"][row]), _shortened(lists["completions"][row])
        return f"\nprompt: {prompt}\ncompletion at index {row} of {len(lists['prompts'])}: {completion}"

    def too_late(self, timeout: float | None) -> RewardTimeoutError:
        """The error of a call that ran past its limit in seconds."""
        return RewardTimeoutError(f"reward function {self.name!r} did not return within {timeout:g} s")


class RewardCall:
    """One call of a reward function on some rows (indices of a batch), with what it logs."""

    def __init__(self, func: RewardFunction, lists: dict[str, list], rows: Sequence[int], state: Any) -> None:
        self.func, self.lists, self.rows = func, lists, rows
        self.extra: dict[str, list] = {}
        self.metrics: list[tuple[str, float]] = []
        # Copies, since a function may change what it gets.
        given: dict[str, Any] = {key: [_copied(values[i]) for i in rows] for key, values in lists.items()}
        given["trainer_state"] = state
        given["log_extra"] = lambda column, values: self.extra.setdefault(column, []).extend(values)
        given["log_metric"] = lambda name, value: self.metrics.append((name, float(value)))
        self.args, self.kwargs = func.bind(given)

    def run(self) -> tuple[Any, BaseException | None]:
        """Exceptions of every kind are answers: one that ended the thread would be lost."""
        try:
            value = self.func.call(*self.args, **self.kwargs)
            # A plain function may return the call of an async one.
            return (asyncio.run(value) if inspect.iscoroutine(value) else value), None
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                raise  # Ctrl-C during a reward model
            return None, error

    async def run_here(self) -> tuple[Any, BaseException | None]:
        """The call on the thread that awaits it: its value and its error."""
        return self.run()

    async def run_async(self) -> tuple[Any, BaseException | None]:
        """The call of an async function: its value and its error."""
        try:
            return await self.func.call(*self.args, **self.kwargs), None
        except BaseException as error:  # SystemExit would end the event loop
            return None, error

    def read(self, value: Any) -> list[float | None]:
        """One number (or None, or NaN) per row, from the list, tensor or array that the call returned.

        Raises:
            RewardError: something else, or another number of them, or of values in `log_extra`.
        """
        count = len(self.rows)
        array = isinstance(value, torch.Tensor | np.ndarray)
        if value.ndim == 0 if array else isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise self._wrong(f"returned {_typed(value)}; expected a list of {count} rewards")
        items = value.tolist() if array else list(value)
        if len(items) != count:
            raise self._wrong(f"returned {len(items)} rewards; expected {count}")
        for column, logged in self.extra.items():
            if len(logged) != count:
                raise self._wrong(f"logged {len(logged)} values for {column!r}; expected {count}")
        for index, item in enumerate(items):
            if isinstance(item, np.generic | np.ndarray | torch.Tensor) and item.ndim == 0:
                items[index] = item = item.item()
            if item is not None and not isinstance(item, Real):
                raise self._wrong(f"returned {_typed(item)}; expected a number or None", index)
        return [None if item is None else _as_float(item) for item in items]

    def _wrong(self, what: str, index: int = 0) -> RewardError:
        where = self.func.where(self.lists, self.rows[index])
        return RewardError(f"reward function {self.func.name!r} {what}{where}")


def prepare(
    reward_funcs: Any,
    names: Sequence[str] | None = None,
    processing_classes: Any = None,
    model_init_kwargs: dict[str, Any] | None = None,
    device: torch.device | str | None = None,
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
        name = names[index] if names is not None else _name_of(func)
        if isinstance(func, nn.Module) and hasattr(func, "config"):
            func = ModelReward(func, tokenizer)
        if isinstance(func, ModelReward) and device is not None:
            func.to(device)
        if not callable(func):
            raise ValueError(f"reward_funcs[{index}] is {func!r}; expected a function, a model, or the name of one")
        prepared.append(RewardFunction(_free(name, prepared), func, _kind_of(func)))
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
        return AutoModelForSequenceClassification.from_pretrained(text, num_labels=1, **(model_init_kwargs or {}))
    except (OSError, ValueError) as error:
        hint = 'to import a function write "package.module:function"'
        raise ImportError(f"cannot load {text!r} as a reward model (folder or Hub id); {hint}. {error}") from error


def _copied(value: Any) -> Any:
    """A list with its dictionaries copied; anything else as it is."""
    return [dict(item) if isinstance(item, dict) else item for item in value] if isinstance(value, list) else value


def _shortened(text: str | list) -> str:
    """Both ends of a text or conversation, about 200 characters, quoted."""
    if isinstance(text, list):
        text = " | ".join(f"{m.get('role')}: {m.get('content')}" if isinstance(m, dict) else str(m) for m in text)
    return repr(text if len(text) <= 200 else f"{text[:100]} ... {text[-100:]}")


def _as_float(number: Real) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer with hundreds of digits
        return math.inf


def _typed(value: Any) -> str:
    return f"{reprlib.repr(value)} of type {type(value).__name__}"


def _name_of(func: Any) -> str:
    while isinstance(func, functools.partial):
        func = func.func
    if isinstance(func, nn.Module):
        path = getattr(getattr(func, "config", None), "_name_or_path", "")
        return str(path).rstrip("/").split("/")[-1] or type(func).__name__
    return str(getattr(func, "__name__", type(func).__name__))


def _free(name: str, taken: list[RewardFunction]) -> str:
    used = [other.name for other in taken]
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


def _tokenizer_of(config: Any, name: str) -> Any:
    from transformers import AutoTokenizer

    if not getattr(config, "_name_or_path", ""):
        raise ValueError(
            f"the reward model {name!r} has no name to load its tokenizer by; pass it in reward_processing_classes"
        )
    return AutoTokenizer.from_pretrained(config._name_or_path)


class ModelReward:
    """A sequence classifier as a reward function: one float32 score per completion.

    The score is read at the last token that the attention mask attends to. transformers' own forward looks for the
    rightmost token that is not the pad token, which with pad == eos skips the EOS the reward model was trained on, so
    the hidden states of the backbone and the `score` head are used directly. A classifier without that pair (encoders
    with a pooled head, for example) answers through its own logits, which must be of shape (batch, 1).

    Args:
        model: a `*ForSequenceClassification` with one label, possibly wrapped by PEFT or `torch.compile`.
        tokenizer: the model's tokenizer; None loads the one of `model.config._name_or_path`.
        batch_size: rows in one forward.
        max_length: tokens; a longer text loses its beginning, since the score is read at its end. None takes the
            model's `max_position_embeddings` or the tokenizer's limit, whichever is lower.
        append_eos: end plain text with EOS (once). For reward models that were trained so; a chat template says
            itself how an answer ends.
        chat_template_kwargs: passed to the tokenizer's chat template.

    Raises:
        ValueError: more than one label, PEFT prompt learning, no tokenizer to be found, or (when called) logits of
            another shape, or a conversation and no chat template.
    """

    runs_on_main_thread = True  # shares device and compute with the policy

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        batch_size: int = 16,
        max_length: int | None = None,
        append_eos: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.model: Any = model
        self.config: Any = model.config
        labels = getattr(self.config, "num_labels", 1)
        if labels != 1:
            raise ValueError(f"a reward model gives one score, but {_name_of(model)!r} has num_labels={labels}")
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ValueError("a reward model with PEFT prompt learning is not supported; LoRA is")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.__name__ = _name_of(model)
        if tokenizer is None:
            tokenizer = _tokenizer_of(self.config, self.__name__)
        self.tokenizer = tokenizer
        self._pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
        self.batch_size = batch_size
        text_config = self.config.get_text_config() if hasattr(self.config, "get_text_config") else self.config
        limits = (getattr(text_config, "max_position_embeddings", None), self.tokenizer.model_max_length)
        self.max_length: int = max_length or min(limit for limit in limits if limit)
        self.append_eos = append_eos
        self.chat_template_kwargs = chat_template_kwargs or {}

    def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float | None]:
        """Score N completions (text, or message lists); None for a row without a single token."""
        rows = [self._encode(prompt, answer) for prompt, answer in zip(prompts, completions, strict=True)]
        scores: list[float | None] = [None] * len(rows)
        # Rows of like length share a forward, so little is spent on padding.
        order = sorted((i for i in range(len(rows)) if rows[i]), key=lambda i: len(rows[i]))
        flags = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad():
                for start in range(0, len(order), self.batch_size):
                    chosen = order[start : start + self.batch_size]
                    for i, score in zip(chosen, self._forward([rows[i] for i in chosen]).tolist(), strict=True):
                        scores[i] = score
        finally:
            for module, training in flags:  # one by one: a part may have been frozen in eval mode
                module.training = training
        return scores

    def to(self, device: torch.device | str) -> None:
        """Move the model, unless it is quantised or accelerate has placed its parts."""
        placed = getattr(self.model, "hf_device_map", None) is not None
        if not placed and getattr(self.model, "quantization_method", None) is None:
            self.model.to(device)

    def _encode(self, prompt: Any, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            text = prompt + (completion if isinstance(completion, str) else completion[-1]["content"])
            eos = self.tokenizer.eos_token
            if self.append_eos and eos and not text.endswith(eos):
                text += eos
        else:
            if not getattr(self.tokenizer, "chat_template", None):
                raise ValueError(f"{self.__name__!r} cannot score conversations: its tokenizer has no chat template")
            answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
            messages = [*prompt, *answer]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **self.chat_template_kwargs)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids[-self.max_length :]

    def _forward(self, rows: list[list[int]]) -> torch.Tensor:
        """Scores (B,) float32 of B non-empty rows of token ids."""
        device = next(self.model.parameters()).device
        width = max(len(row) for row in rows)
        ids = torch.tensor([row + [self._pad_id] * (width - len(row)) for row in rows], device=device)
        last = torch.tensor([len(row) - 1 for row in rows], device=device)
        mask = (torch.arange(width, device=device) <= last[:, None]).long()
        inner: Any = getattr(self.model, "_orig_mod", self.model)
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()  # PEFT has put its layers inside
        head, backbone = getattr(inner, "score", None), getattr(inner, "base_model", None)
        if isinstance(head, nn.Module) and isinstance(backbone, nn.Module) and backbone is not inner:
            hidden = backbone(input_ids=ids, attention_mask=mask).last_hidden_state  # (B, T, hidden)
            logits = head(hidden[torch.arange(len(rows), device=hidden.device), last.to(hidden.device)])
        else:
            logits = self.model(input_ids=ids, attention_mask=mask).logits
        if logits.shape != (len(rows), 1):
            raise ValueError(
                f"{self.__name__!r} ({type(inner).__name__}) gave logits of shape {tuple(logits.shape)} for "
                f"{len(rows)} texts; expected a *ForSequenceClassification with num_labels=1"
            )
        return logits[:, 0].float()
