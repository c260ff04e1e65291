"""What every trainer looks at before it spends anything: cheap, and all problems in one message.

before_loading   at construction, before a model is loaded: data, reward signatures, machine, packages
ready_to_push    around the creation of the repository: login, permission, how the server takes files
try_prompts      when training starts: a few rows, tokenized
try_rows
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import HfHubHTTPError

from hf_rlx.data.formats import PromptError, check_prompts
from hf_rlx.hub import shareable_cause
from hf_rlx.models.blueprint import config_of
from hf_rlx.preflight import hub
from hf_rlx.preflight.machine import gpus_without_launcher
from hf_rlx.preflight.packages import optimizer_clash, torchao_clash
from hf_rlx.rollout.collect import check_lengths, encode_rows
from hf_rlx.rollout.reward_models import RewardError
from hf_rlx.rollout.signatures import check_signatures

if TYPE_CHECKING:
    from hf_rlx.trainers.base import BaseTrainer
    from hf_rlx.trainers.preference import PreferenceTrainer

logger = logging.getLogger(__name__)

Check = Callable[[], None]
SAMPLED = 16  # rows that are tokenized when training starts


class PreflightError(ValueError):
    """Several problems at once.

    Attributes:
        problems: what each check raised.
    """

    def __init__(self, problems: Sequence[Exception]) -> None:
        listed = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, start=1))
        super().__init__(f"{len(problems)} problems:\n{listed}")
        self.problems = list(problems)


def run_checks(checks: Sequence[Check]) -> None:
    """Run them all.

    Raises:
        PreflightError: several failed. ValueError, RewardError: what the only one that failed raised.
    """
    problems: list[Exception] = []
    for check in checks:
        try:
            check()
        except (ValueError, RewardError) as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise PreflightError(problems)


# Whose package is called as they are.
_TRACKERS = ("wandb", "trackio", "mlflow", "comet_ml", "clearml", "swanlab", "neptune")


def before_loading(trainer: BaseTrainer, args: Any, peft_config: Any, *checks: Check) -> None:
    """Look at everything that needs no model; the first call of a trainer does it.

    Args:
        trainer: that is being made. args, peft_config: of it. checks: of its data.

    Raises:
        see `run_checks`.
    """
    if trainer.looked_at:
        return
    trainer.looked_at = True
    run_checks([*checks, lambda: check_machine(args, peft_config), lambda: check_output_dir(args)])


def check_machine(args: Any, peft_config: Any = None) -> None:
    """Refuse several GPUs without a launcher, an optimizer that the device cannot run, a tracker that is not
    installed, and a torchao that PEFT makes no adapter beside.

    Raises:
        ValueError: the first of them.
    """
    problem = gpus_without_launcher(getattr(args, "n_gpu", 0)) or optimizer_clash(args) or missing_tracker(args)
    if problem is None and peft_config is not None:
        problem = torchao_clash()
    if problem is not None:
        raise ValueError(problem)


def missing_tracker(args: Any) -> str | None:
    """What to say of a tracker whose package is not installed; transformers says it after the model is loaded."""
    for name in getattr(args, "report_to", None) or ():
        if name in _TRACKERS and find_spec(name) is None:
            return f"report_to={name!r} needs a package: pip install {name}; or set report_to='none'"
    return None


def check_room(model: Any, args: Any) -> None:
    """Refuse a max_completion_length that leaves no token for a prompt in the model's context.

    Args:
        model: as a trainer takes it; one whose configuration cannot be read is left to the loader.

    Raises:
        ValueError: with both numbers.
    """
    try:
        config, _ = config_of(model, **(args.model_init_kwargs or {}))
    except (OSError, ValueError) as error:
        logger.debug("no configuration to look at: %s", error)
        return
    context = context_without_room(config, args)
    if context is not None:
        raise ValueError(
            f"max_completion_length={args.max_completion_length} leaves no token for a prompt in the model's context "
            f"of {context}; lower it"
        )


def context_without_room(config: Any, args: Any) -> int | None:
    """The context of a model of this configuration, in tokens, where `max_completion_length` leaves no token of it for
    a prompt; else None."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = getattr(args, "max_completion_length", None)
    return context if context is not None and longest is not None and longest >= context else None


def check_output_dir(args: Any) -> None:
    """Refuse a folder that cannot be written.

    Raises:
        ValueError: names it.
    """
    folder = Path(str(args.output_dir)).absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if args.should_save and not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        what = "may not be written" if there.is_dir() else "is a file"
        raise ValueError(f"output_dir={str(args.output_dir)!r}: {there} {what}; name another folder")


def data_checks(check: Callable[[Any, str], None], train_dataset: Any, eval_dataset: Any) -> list[Check]:
    """`check(dataset, name)` for the training data and each of the evaluation's, for `before_loading`; what is wrong
    with several of them alike is told once."""
    named = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
    datasets = {"train_dataset": train_dataset}
    datasets |= {f"eval_dataset {name}".strip(): dataset for name, dataset in named.items()}
    return [functools.partial(_told_once, check, datasets, name) for name in datasets]


def _told_once(check: Callable[[Any, str], None], datasets: dict[str, Any], name: str) -> None:
    try:
        check(datasets[name], name)
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        alike = [
            other for other in datasets if other == name or _says(check, datasets[other], other) == _body(error, name)
        ]
        if alike[0] != name:
            return  # told of that one
        same = f". The same holds for {' and '.join(alike[1:])}" if len(alike) > 1 else ""
        raise ValueError(f"{error}{same}") from error


def _body(error: ValueError, name: str) -> str:
    return str(error).removeprefix(name)


def _says(check: Callable[[Any, str], None], dataset: Any, name: str) -> str | None:
    """What a check has against a dataset, without its name."""
    try:
        check(dataset, name)
    except ValueError as error:
        return _body(error, name)
    return None


def prompt_checks(train_dataset: Any, eval_dataset: Any, reward_funcs: Any) -> list[Check]:
    """That prompts can be used, and reward functions be called with the columns beside them."""
    named = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
    datasets = [("train_dataset", train_dataset)]
    datasets += [(f"eval_dataset {name}".strip(), dataset) for name, dataset in named.items()]
    checks = data_checks(check_prompts, train_dataset, eval_dataset)
    return [*checks, functools.partial(check_signatures, reward_funcs, datasets)]


@contextmanager
def ready_to_push(trainer: BaseTrainer, token: str | None) -> Iterator[None]:
    """Around the creation of the repository: a Hub that will not take the upload is told before hours of training.

    Raises:
        HubError: why, and what to do.
    """
    if not trainer.is_world_process_zero():
        yield
        return
    args = trainer.args
    used = token if token is not None else args.hub_token
    hub.check_login(used)
    try:
        yield
    except HfHubHTTPError as error:
        repo = args.hub_model_id or Path(str(args.output_dir)).absolute().name
        raise hub.refused(error, repo, used) from shareable_cause(error, used)
    hub.check_repository(str(trainer.hub_model_id), used)


def check_steps(args: Any) -> None:
    """Refuse a run without an optimizer step, and say where none would change a weight.

    Raises:
        ValueError: names the field.
    """
    if args.max_steps == 0:
        raise ValueError(
            "max_steps=0: there would be no optimizer step; give at least 1, or leave it out: num_train_epochs counts"
        )
    if args.max_steps < 0 and args.num_train_epochs <= 0:
        raise ValueError(
            f"num_train_epochs={args.num_train_epochs:g} and no max_steps: there would be no optimizer step; set one"
        )
    if args.learning_rate == 0:
        logger.warning("learning_rate=0: no weight will change; leave it out, or set one above 0")


def spread(count: int, most: int = SAMPLED) -> list[int]:
    """Up to `most` indices of `count` rows, evenly over all of them."""
    taken = min(count, most)
    return [index * count // taken for index in range(taken)]


def try_prompts(dataset: Any, tokenizer: Any, args: Any, room: int | None) -> list[int]:
    """Look at the number of steps, and tokenize a few prompts as a rollout would; returns their tokens.

    Args:
        dataset: with a `prompt`. tokenizer: of the policy. args: an `OnlineConfig`.
        room: tokens that a prompt may have; None: any number.

    Raises:
        ValueError: no step, or no room for any prompt. PromptError: of the first that cannot be used, with its row.
    """
    check_steps(args)
    if room is not None and room < 1:
        most = args.sampling_params().max_completion_length
        raise ValueError(
            f"max_completion_length={most} leaves no token for a prompt in the model's context of {room + most}; "
            "lower it"
        )
    counts = []
    for index in spread(len(dataset)):
        row = dataset[index]
        try:
            prompts = encode_rows([row], tokenizer, args.chat_template_kwargs or {}, args.special_tokens_in_messages)
            check_lengths([row], prompts, room, args.sampling_params())
        except PromptError as error:
            raise PromptError(f"train_dataset: row {index}: {error}", error.prompt) from error
        counts.append(len(prompts[0].ids))
    return counts


def try_rows(trainer: PreferenceTrainer) -> None:
    """Tokenize a few rows as training would, and say where nothing can be learned from any of them.

    Raises:
        ValueError: no step; or a row cannot be used, which is named.
    """
    dataset, args = trainer.train_dataset, trainer.args
    check_steps(args)
    rows = trainer.encode([(index, dataset[index]) for index in spread(len(dataset))])
    needed = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    if len(dataset) < needed:
        logger.warning(
            "train_dataset has %d rows, fewer than the %d of one optimizer step: every step is the whole dataset; "
            "lower per_device_train_batch_size or gradient_accumulation_steps, or add rows",
            len(dataset),
            needed,
        )
    for told in row_notes(rows, trainer.weight_of, args.max_length):
        logger.warning("train_dataset: %s", told)


def row_notes(rows: Sequence[Any], weight_of: Callable[[Any], float], max_length: int | None) -> Iterator[str]:
    """What is suspicious about tokenized rows, all of them alike.

    Args:
        rows: `RankedGroup`s. weight_of: what a row adds to the loss's denominator. max_length: that they were cut to.
    """
    if rows and not any(weight_of(row) for row in rows):
        yield (
            f"none of the {len(rows)} rows looked at teaches anything: answers of a row that are the same or all tie, "
            "or steps without a label. Look at how the rows were made"
        )
    if rows and all(row.cut > 0 for row in rows):
        yield (
            f"all of the {len(rows)} rows looked at are longer than max_length={max_length} (or the model's context) "
            "and are cut; raise max_length, or shorten the data"
        )


__all__ = [
    "PreflightError",
    "before_loading",
    "check_machine",
    "check_output_dir",
    "check_room",
    "check_steps",
    "context_without_room",
    "data_checks",
    "prompt_checks",
    "ready_to_push",
    "row_notes",
    "run_checks",
    "spread",
    "try_prompts",
    "try_rows",
]
