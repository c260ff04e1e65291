"""`hf_rlx.doctor()`: everything that a run needs, looked at before it costs hours.

Nothing is trained and no weights are loaded. The checks are those of the trainers, so what passes here starts there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from hf_rlx.data.demonstrations import check_demonstrations, encode_demonstration
from hf_rlx.data.formats import check_container, check_prompts
from hf_rlx.data.pair_checks import check_preferences
from hf_rlx.data.pair_encoding import RankedGroup, encode_preference
from hf_rlx.data.steps import check_step_rows
from hf_rlx.data.tokenize import is_conversational
from hf_rlx.models.blueprint import config_of
from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.storage import has_adapter
from hf_rlx.preflight import hub, machine, packages, tokens
from hf_rlx.preflight.report import Finding, Report
from hf_rlx.rollout.collect import score_request
from hf_rlx.rollout.reward_models import RewardError
from hf_rlx.rollout.scoring import RewardScorer
from hf_rlx.rollout.signatures import columns_of, functions_of, is_function, signature_problem
from hf_rlx.trainers.online_config import OnlineConfig
from hf_rlx.trainers.pair_batches import PairSampler
from hf_rlx.trainers.preference_config import PreferenceConfig
from hf_rlx.trainers.preflight import check_steps, context_without_room, row_notes, spread, try_prompts
from hf_rlx.trainers.prm import PRMConfig
from hf_rlx.trainers.sft import SFTConfig
from hf_rlx.trainers.windows import WindowSampler
from hf_rlx.types import Completion

Kind = Literal["prompts", "pairs", "demonstrations", "steps"]

_CHECKS: dict[Kind, Callable[[Any, str], Any]] = {
    "prompts": check_prompts,
    "pairs": check_preferences,
    "demonstrations": check_demonstrations,
    "steps": check_step_rows,
}
_TRIED = ("The answer is 42.", "")  # completions that reward functions are tried on
_SECONDS = 60.0  # that a reward function may take for them


def doctor(
    model: Any = None,
    dataset: Any = None,
    reward_funcs: Any = None,
    args: Any = None,
    push_to_hub: bool | str | None = None,
) -> Report:
    """Look at the machine, the packages and, as far as given, the model, the data, the rewards and the Hub.

    Args:
        model: a name or folder (configuration and tokenizer are loaded, no weights), or a model in memory.
        dataset: what it would be trained on; or a dictionary of splits, of which "train" or the first counts.
        reward_funcs: of the trainer. Functions are called once, on the first row and two made-up completions.
        args: the trainer's configuration; it says which kind of data is meant, and how much a step takes.
        push_to_hub: ask the Hub whether it would take an upload; a text names the repository. None: as `args` says.
            Otherwise the network is not used, but for a model or rewards that are named by a Hub id.

    Returns:
        a line for everything, with what was found, a verdict and the fix; `print` it.

    Example:
        >>> report = hf_rlx.doctor("tiny", rows, my_reward, GRPOConfig("runs/x"))
        >>> report.ok, report.problems
    """
    report = Report()
    for part in (
        lambda: machine.device_findings(args),
        packages.version_findings,
        lambda: packages.clash_findings(args),
        lambda: [machine.disk_finding(getattr(args, "output_dir", None) or ".")],
        lambda: [machine.sandbox_finding()],
    ):
        report.add(_guarded("machine", part))
    tokenizer: list[PreTrainedTokenizerBase] = []
    rows = _first_split(dataset)
    if model is not None:
        report.add(_guarded("model", lambda: _model(model, args, rows, tokenizer)))
    known = tokenizer[0] if tokenizer else None
    if rows is not None:
        report.add(_guarded("dataset", lambda: _dataset(rows, args, reward_funcs, known)))
    if reward_funcs is not None:
        report.add(_guarded("reward", lambda: _rewards(reward_funcs, rows, args, known)))
    push = bool(push_to_hub) if push_to_hub is not None else bool(getattr(args, "push_to_hub", False))
    repo = push_to_hub if isinstance(push_to_hub, str) else getattr(args, "hub_model_id", None)
    report.add(_guarded("Hub", lambda: hub.hub_findings(push, repo, getattr(args, "hub_token", None))))
    return report


def _guarded(what: str, part: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of a part; where it fails itself, that is a finding too."""
    try:
        yield from part()
    except Exception as error:
        found = f"cannot be looked at: {type(error).__name__}: {error}"
        yield Finding(what, found, "problem", "see the message; the rest of the report holds")


def _split_message(message: str) -> tuple[str, str]:
    """What was found and the fix, of a message that has both."""
    for mark in (". If so: ", ". If ", "; ", ": "):
        found, there, fix = message.partition(mark)
        if there:
            return found, (f"if {fix}" if mark == ". If " else fix)
    return message, ""


# Model and tokenizer.


def _model(model: Any, args: Any, rows: Any, tokenizer: list[PreTrainedTokenizerBase]) -> Iterator[Finding]:
    """The findings; what was found of a tokenizer is appended to `tokenizer`."""
    named = isinstance(model, str | os.PathLike)
    end_tokens: Any = None
    if named:
        name = str(model)
        try:
            tokenizer.append(load_tokenizer(name))
        except (OSError, ValueError) as error:
            fix = "check the name; a gated model needs `hf auth login`, and HF_HUB_OFFLINE=1 needs it in the cache"
            yield Finding("model", f"{name}: no tokenizer to be loaded: {_first_line(error)}", "problem", fix)
            return
        yield from _configuration(name, str(tokenizer[0].name_or_path), args)
    else:
        count = sum(parameter.numel() for parameter in model.parameters())
        learn = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        found = f"{type(model).__name__}, {_millions(count)} parameters, {_millions(learn)} of them trainable"
        fix = "pass peft_config, or load the adapter with is_trainable=True"
        yield Finding("model", found) if learn else Finding("model", found, "problem", fix)
        end_tokens = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        known = getattr(model, "tokenizer", None)
        source = getattr(model.config, "name_or_path", "") or getattr(model.config, "_name_or_path", "")
        if known is not None:
            tokenizer.append(known)
        elif source:
            tokenizer.append(load_tokenizer(source))
    if tokenizer:
        yield from tokens.tokenizer_findings(tokenizer[0], _has_messages(rows), end_tokens)


def _configuration(name: str, source: str, args: Any) -> Iterator[Finding]:
    adapted = has_adapter(Path(source))
    if adapted:
        yield Finding("model", f"{name}: a folder with an adapter, which trains on")
    try:
        config, _ = config_of(source, trust_remote_code=getattr(args, "trust_remote_code", False))
    except (OSError, ValueError) as error:
        found = f"{name}: its configuration cannot be read here: {_first_line(error)}"
        fix = "pip install -U transformers, trust_remote_code=True where the repository carries code, or another model"
        away = isinstance(error, OSError)
        yield Finding("model", found, "note" if away else "problem", "load it once to see" if away else fix)
        return
    if adapted:
        yield from _context(config, args)
        return
    if getattr(config, "is_encoder_decoder", False):
        yield Finding("model", f"{name}: an encoder-decoder model", "problem", "take a decoder-only model")
        return
    try:
        with torch.device("meta"):
            count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    except ValueError as error:
        found = f"{name}: {config.model_type} predicts no tokens: {_first_line(error)}"
        yield Finding("model", found, "problem", "take a causal language model")
        return
    found = f"{name}: {config.model_type}, {_millions(count)} parameters"
    device = machine.device_of(args)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else machine.available_memory()
    half = getattr(args, "bf16", False) or getattr(args, "fp16", False)
    needed = count * (2 if half else 4)
    found += f", {needed / machine.GIB:.2f} GiB of weights in {16 if half else 32} bits"
    fix = "quantization_config=hf_rlx.four_bit_config() with a peft_config takes about a quarter, or a smaller model"
    if free is not None and needed > free:
        yield Finding("model", f"{found}, and {free / machine.GIB:.2f} GiB are free", "problem", fix)
    else:
        yield Finding("model", found)
    yield from _context(config, args)


def _context(config: Any, args: Any) -> Iterator[Finding]:
    context = context_without_room(config, args)
    if context is not None:
        found = f"{context} tokens, and max_completion_length={args.max_completion_length} leaves none for a prompt"
        yield Finding("context", found, "problem", "lower max_completion_length")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


# Data.


def _first_split(dataset: Any) -> Any:
    """One dataset of a dictionary of splits."""
    if not isinstance(dataset, dict) or not dataset:
        return dataset
    if all(isinstance(v, list) and v and not isinstance(v[0], dict) for v in dataset.values()):
        return dataset  # columns, which is told
    return dataset.get("train", next(iter(dataset.values())))


def _has_messages(rows: Any) -> bool:
    return _has_rows(rows) and any(is_conversational(value) for value in rows[0].values())


def _has_rows(rows: Any) -> bool:
    """Whether it is a dataset with a first row; what else it is, is told with the dataset."""
    try:
        check_container(rows, "dataset")
    except ValueError:
        return False
    return isinstance(rows[0], dict)


def kind_of(rows: Any, args: Any = None, reward_funcs: Any = None) -> Kind:
    """Which kind of data is meant: by the configuration, the rewards, or the columns."""
    if isinstance(args, SFTConfig):
        return "demonstrations"
    if isinstance(args, PRMConfig):
        return "steps"
    if hasattr(args, "sampling_params") or reward_funcs is not None:
        return "prompts"
    if isinstance(args, PreferenceConfig):
        return "pairs"
    every = set(getattr(rows, "column_names", None) or (rows[0] if len(rows) else ()))
    if {"completions", "labels"} <= every:
        return "steps"
    if {"chosen", "rejected"} & every or "responses" in every:
        return "pairs"
    if "completion" in every or ("prompt" not in every and {"messages", "text"} & every):
        return "demonstrations"
    return "prompts"


def _dataset(rows: Any, args: Any, reward_funcs: Any, tokenizer: Any) -> Iterator[Finding]:
    try:
        check_container(rows, "dataset")
        kind = kind_of(rows, args, reward_funcs)
        if kind == "steps" and isinstance(args, PRMConfig):
            check_step_rows(rows, "dataset", args.step_separator, args.ratings)
        else:
            _CHECKS[kind](rows, "dataset")
    except ValueError as error:
        yield Finding("dataset", *_as_problem(error))
        return
    columns = list(getattr(rows, "column_names", None) or rows[0])
    yield Finding("dataset", f"{len(rows)} rows of {kind}, columns {', '.join(columns)}")
    if args is not None:
        try:
            check_steps(args)
        except ValueError as error:
            yield Finding("steps", *_as_problem(error))
            return
        yield from _sizes(rows, args, kind)
    if tokenizer is None:
        return
    try:
        if kind == "prompts":
            yield _prompt_lengths(rows, args, tokenizer)
        elif kind != "steps":
            yield from _row_lengths(rows, args, kind, tokenizer)
    except (ValueError, TypeError, TemplateError) as error:
        yield Finding("tokens", *_as_problem(error))


def _as_problem(error: Exception) -> tuple[str, Literal["problem"], str]:
    found, fix = _split_message(str(error))
    return found, "problem", fix


def _sizes(rows: Any, args: Any, kind: Kind) -> Iterator[Finding]:
    """Rows against those of a rollout or an optimizer step, by the samplers that a run deals with."""
    try:
        if kind == "prompts" and isinstance(args, OnlineConfig):
            repeats = int(args.steps_per_generation or 1) * args.num_iterations
            windows = WindowSampler(len(rows), args.prompts_per_window, repeats, 0, False, 0, args.world_size)
            each = args.prompts_per_window * args.world_size
            found = (
                f"{windows.windows} rollouts an epoch, of {each} prompts and {each * args.num_generations} completions"
            )
            yield Finding("steps", found)
        elif isinstance(args, PreferenceConfig) and kind != "prompts":
            micro_steps = args.gradient_accumulation_steps
            batch = args.per_device_train_batch_size
            dealt = PairSampler(len(rows), batch, micro_steps, 0, False, 0, args.world_size, args.dataloader_drop_last)
            found = f"{dealt.step_rows} rows an optimizer step"
            if len(rows) < dealt.step_rows:
                fix = "lower per_device_train_batch_size or gradient_accumulation_steps, or add rows"
                yield Finding("steps", f"{found}, and there are {len(rows)}: every step is all of them", "note", fix)
            else:
                yield Finding("steps", f"{found}, {-(-len(rows) // dealt.step_rows)} steps an epoch")
    except ValueError as error:
        yield Finding("steps", *_as_problem(error))


def _prompt_lengths(rows: Any, args: Any, tokenizer: Any) -> Finding:
    config = args if hasattr(args, "sampling_params") else OnlineConfig(output_dir=None, use_cpu=True)
    counts = try_prompts(rows, tokenizer, config, None)
    found = f"{min(counts)} to {max(counts)} tokens in {len(counts)} prompts looked at"
    return Finding("tokens", found)


def _row_lengths(rows: Any, args: Any, kind: Kind, tokenizer: Any) -> Iterator[Finding]:
    longest = args.max_length if isinstance(args, PreferenceConfig) else None
    options: dict[str, Any] = {"max_length": longest}
    if isinstance(args, PreferenceConfig):
        options |= {
            "chat_template_kwargs": args.chat_template_kwargs,
            "special_tokens": args.special_tokens_in_messages,
        }
    encode = encode_demonstration if kind == "demonstrations" else encode_preference
    encoded: list[RankedGroup] = [encode(rows[index], index, tokenizer, **options) for index in spread(len(rows))]
    counts = [sum(group.num_tokens for group in row.groups) for row in encoded]
    yield Finding("tokens", f"{min(counts)} to {max(counts)} a row in {len(counts)} rows looked at")
    for told in row_notes(encoded, lambda row: float(kind == "demonstrations" or row.num_pairs > 0), longest):
        found, _, fix = told.partition("; ") if "; " in told else told.partition(". ")
        yield Finding("rows", found, "problem" if "teaches" in told else "note", fix)


# Rewards.


def _rewards(reward_funcs: Any, rows: Any, args: Any, tokenizer: Any) -> Iterator[Finding]:
    entries = reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
    if not entries:
        yield Finding("reward", "reward_funcs is empty", "problem", "pass at least one function")
    for entry in entries:
        if not is_function(entry):
            if isinstance(entry, str) or hasattr(entry, "config") or callable(entry):
                yield Finding("reward", f"{_name(entry)}: a model, which is not tried here")
            else:
                fix = "pass a function (prompts, completions, **columns) -> list of floats"
                yield Finding("reward", f"{entry!r} is no function and no model's name", "problem", fix)
            continue
        try:
            (function,) = functions_of(entry)
        except ImportError as error:
            yield Finding("reward", str(error), "problem", 'write "package.module:function", or pass the function')
            continue
        yield _one_reward(function, rows, args, tokenizer)


def _name(entry: Any) -> str:
    return entry if isinstance(entry, str) else str(getattr(entry, "__name__", type(entry).__name__))


def _one_reward(function: Any, rows: Any, args: Any, tokenizer: Any) -> Finding:
    what = f"reward {_name(function)}"
    usable = _has_rows(rows)
    row: dict[str, Any] = dict(rows[0]) if usable else {"prompt": "1+1="}
    problem = signature_problem(function, columns_of(rows) if usable else [])
    if problem is not None and isinstance(function, type):
        return Finding(what, *_as_problem(RewardError(problem)))
    if problem is not None:
        if not usable:
            return Finding(what, problem, "note", "give dataset= to see whether it has them")
        return Finding(what, problem, "problem", "rename the parameter or the column, or give it a default")
    completions = []
    for text in _TRIED:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"]) if tokenizer is not None else [1]
        completions.append(Completion(ids or [getattr(tokenizer, "eos_token_id", None) or 0], [0.0], True, text))
    seconds = getattr(args, "reward_timeout", None) or _SECONDS
    with RewardScorer(function, timeout=seconds) as scorer:
        try:
            scorer.submit(score_request(row.get("prompt", "1+1="), completions, row))
            result = scorer.gather()
        except RewardError as error:
            fix = _reward_fix(str(error))
            return Finding(what, " ".join(str(error).split()), "problem", fix)
        is_async = scorer.functions[0].kind == "async"
    values: Sequence[Any] = [None if value != value else round(value, 4) for value in result.rewards[:, 0].tolist()]
    how = "async, " if is_async else ""
    found = f"{how}of {_TRIED[0]!r} and an empty answer to row 0: {values[0]} and {values[1]}"
    if not any(value is not None for value in values):
        return Finding(what, f"{found}: it abstained from both", "note", "see that it scores what the model may say")
    return Finding(what, found)


def _reward_fix(message: str) -> str:
    if "did not return within" in message:
        return "make it faster, or set reward_timeout and on_reward_error='skip'"
    if " raised " in message:
        return "correct it for such completions, or set on_reward_error='skip', which lets them abstain"
    return "return a list with one number, or None, for each completion"


__all__ = ["Report", "doctor", "kind_of"]
