"""What the commands that train have in common: their flags, out of a trainer's configuration, and the order of a run.

flags over the file of --config over defaults -> configuration -> data -> rewards -> trainer -> train, save, push
"""

from __future__ import annotations

import argparse
import logging
import shlex
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from hf_rlx.cli import UsageError
from hf_rlx.cli.data import DataKind, located
from hf_rlx.cli.flags import Flag, add_flags, config_flags
from hf_rlx.cli.options import DATA, MODEL, REWARD, RUN, defaults
from hf_rlx.cli.settings import ALIASES, add_config, resolve
from hf_rlx.cli.words import FlagWords, in_flags

_AUTO, _NEVER = ("auto", "true", "yes"), ("false", "no")


@dataclass(frozen=True)
class Recipe:
    """One command that trains.

    name: of the command. config, trainer: `"module:Class"`. data: what its rows are. rewards: whether it takes
    reward functions. adapter_rate: learning rate where an adapter trains and none is given; None: the configuration's
    own. further: flags that it has alone, of which `arguments` are passed to the trainer by name.
    """

    name: str
    config: str
    trainer: str
    data: DataKind
    rewards: bool = False
    adapter_rate: float | None = None
    further: tuple[Flag, ...] = ()
    arguments: tuple[str, ...] = field(default=())


@cache
def fields_of(recipe: Recipe) -> tuple[Flag, ...]:
    """Flags of the configuration's fields."""
    fields = [flag for flag in config_flags(recipe.config, recipe.name) if flag.name not in ALIASES]
    if recipe.rewards:
        told = "True here where rows are held out: the card then has the base's score"
        fields = [replace(f, default=told) if f.name == "eval_on_start" else f for f in fields]
    if recipe.adapter_rate is not None:
        told = f"{recipe.adapter_rate:g} here where an adapter trains"
        fields = [replace(f, default=f"{f.default}, {told}") if f.name == "learning_rate" else f for f in fields]
    return tuple(fields)


def flags_of(recipe: Recipe) -> tuple[Flag, ...]:
    """All flags of a command."""
    rewards = REWARD if recipe.rewards else ()
    return (*MODEL, *DATA, *rewards, *RUN, *recipe.further, *fields_of(recipe))


def add_arguments(parser: argparse.ArgumentParser, recipe: Recipe) -> None:
    """Add the flags of a command that trains."""
    rewards = " [--reward R ...]" if recipe.rewards else ""
    parser.usage = f"hf-rlx {recipe.name} --model M --dataset D{rewards} [--config FILE] [--FIELD VALUE ...]"
    parser.epilog = (
        "Every field of the configuration is a flag, written with - or _. exit status: 0 done; 1 an error; 2 a wrong "
        "setting; 130 or 143 stopped by Ctrl-C or SIGTERM, after saving a checkpoint: --resume auto goes on"
    )
    add_config(parser)
    add_flags(parser, flags_of(recipe))
    for alias in (name for name, meant in ALIASES.items() if any(f.name == meant for f in flags_of(recipe))):
        flag = next(f for f in flags_of(recipe) if f.name == ALIASES[alias])
        Flag(alias, flag.kinds, "", "No effect of its own: " + flag.name, flag.group).add_to(parser)


def run(args: argparse.Namespace, recipe: Recipe) -> int:
    """Train, or with `--dry-run` say what would be done; the exit status.

    Raises:
        UsageError: of the settings. Errors of the data, the model and the training as they come.
    """
    given = resolve(args, flags_of(recipe))
    names = {flag.name for flag in fields_of(recipe)}
    fields = {name: value for name, value in given.items() if name in names}
    options = defaults({name: value for name, value in given.items() if name not in names})
    for name in ("model", "dataset"):
        if not options[name]:
            raise UsageError(f"--{name} is missing; give it, or `{name}:` in the file of --config")
    check_adapter(options)
    options["resume"] = _resume(options["resume"])
    fields.setdefault("output_dir", f"runs/{recipe.name}")
    beside = None if args.config is None else Path(args.config).parent
    for name in ("dataset", "eval_dataset"):
        options[name] = located(options[name], beside)
    from hf_rlx.cli.session import Session

    with messages({flag.name for flag in flags_of(recipe)}):
        session = Session(recipe, options, fields, beside)
        if options["dry_run"]:
            from hf_rlx.cli.preview import preview

            print(preview(session, whole=options["verbose"]))
            return 0
        return session.train(resume_line(recipe.name, args.words))


def check_adapter(options: dict[str, Any]) -> None:
    """Refuse settings of an adapter that none can have.

    Raises:
        UsageError: names the flag.
    """
    if not options["lora"]:
        return
    if options["lora_r"] < 1:
        raise UsageError(
            f"--lora-r must be at least 1, got {options['lora_r']}; --no-lora trains all weights without an adapter"
        )
    if options["lora_alpha"] < 1:
        raise UsageError(f"--lora-alpha must be at least 1, got {options['lora_alpha']}")
    if not 0 <= options["lora_dropout"] < 1:
        raise UsageError(f"--lora-dropout must be 0 or more and below 1, got {options['lora_dropout']:g}")


def resume_line(command: str, words: Sequence[str]) -> str:
    """The command line that goes on where this one stopped, without tokens: what is printed may be kept.

    Args:
        command: of `hf-rlx`. words: behind it.
    """
    from hf_rlx.secrets import is_secret_name, mask_text

    kept: list[str] = []
    skip = False
    for word in words:
        if skip and not word.startswith("-"):
            skip = False
            continue
        skip = False
        name = word.partition("=")[0].replace("_", "-")
        secret = name.startswith("--") and is_secret_name(name[2:].replace("-", "_"))
        if secret or name in ("--resume", "--resume-from-checkpoint"):
            skip = "=" not in word
            continue
        kept.append(mask_text(word))
    return shlex.join(["hf-rlx", command, *kept, "--resume", "auto"])


def _resume(value: Any) -> str | bool | None:
    """A checkpoint's folder, True for the newest, None for a new run."""
    if value is None or value is False or str(value).lower() in _NEVER:
        return None
    return True if value is True or str(value).lower() in _AUTO else str(value)


@contextmanager
def messages(fields: Collection[str]) -> Iterator[None]:
    """hf_rlx says on stderr what it decided (recipe, reference, packed or padded forward), in the words of a command
    line; so do errors.

    Args:
        fields: see `in_flags`.

    Raises:
        ValueError: that of the block, as a new one where its message changes.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    handler.addFilter(FlagWords(fields))
    logger = logging.getLogger("hf_rlx")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    except ValueError as error:
        told = in_flags(str(error), fields)
        if type(error).__name__ not in ("ValueError", "PreflightError") or told == str(error):
            raise
        raise ValueError(told) from error
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
