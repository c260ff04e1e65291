"""`hf-rlx estimate`: the memory of a run, from its settings alone, and what to change where it does not fit."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hf_rlx.cli import UsageError, module_of
from hf_rlx.cli.flags import Flag, Kinds, add_flags
from hf_rlx.cli.options import DATA, MODEL, REWARD, RUN
from hf_rlx.cli.settings import add_config, resolve
from hf_rlx.cli.training import Recipe, check_adapter, fields_of, flags_of
from hf_rlx.cli.words import in_flags

if TYPE_CHECKING:
    from hf_rlx.cli.session import Session
    from hf_rlx.estimate import Estimate

COMMANDS_THAT_TRAIN = ("grpo", "ppo", "dpo", "ipo", "simpo", "orpo", "iterative-dpo", "sft", "reward", "prm")
_TITLE = "what is asked"
_SETTINGS = "settings of the run"
_HEADINGS = {flag.group for flag in (*MODEL, *DATA, *REWARD, *RUN)}
FLAGS = (
    Flag("algorithm", Kinds.of("str"), "grpo", f"one of: {', '.join(COMMANDS_THAT_TRAIN)}", _TITLE, "NAME"),
    Flag("card", Kinds.of("str | None"), "", "t4, l4, a100, a100-80 or cpu (default: this machine's)", _TITLE, "NAME"),
    Flag("prompt_tokens", Kinds.of("int"), "256", "of the longest prompt", _TITLE),
    Flag("completion_tokens", Kinds.of("int | None"), "", "of the longest answer (default: all allowed)", _TITLE),
    Flag("roles", Kinds.of("int"), "0", "frozen adapters of other roles beside it, e.g. 1 for a reward role", _TITLE),
    Flag("json", Kinds.of("bool"), "", "print the numbers, in bytes, as JSON", _TITLE),
)
# Listed by --help; the other settings are taken too.
_LISTED = {
    *("model", "dtype", "load_in_4bit", "lora", "lora_r", "lora_target_modules"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing", "optim", "beta"),
    *("max_tokens_per_update", "num_generations", "max_completion_length", "max_rollout_rows", "max_length"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx estimate` takes."""
    parser.usage = "hf-rlx estimate --model M [--algorithm A] [--card C] [--config FILE] [--FIELD VALUE ...]"
    parser.description = (
        "Memory of a run at its peak, part by part, without loading a weight; and what to change to take less."
    )
    parser.epilog = (
        "Every setting of the algorithm's own command is taken, also from its file. exit status: 0 it fits; 1 it does "
        "not, or an error; 2 a wrong setting"
    )
    add_config(parser)
    add_flags(parser, (*FLAGS, *_settings()))


def _settings() -> list[Flag]:
    """Every setting of every algorithm, once; listed are those that change the memory, which come first, under
    headings that fit all algorithms."""
    found: dict[str, list[Flag]] = {}
    for name in COMMANDS_THAT_TRAIN:
        for flag in flags_of(_recipe(name)):
            found.setdefault(flag.name, []).append(flag)
    shown = []
    for name, flags in found.items():
        first = flags[0]
        if name not in _LISTED:
            first = dataclasses.replace(first, text="No effect")
        elif len({flag.default for flag in flags}) > 1:
            first = dataclasses.replace(first, default="the algorithm's")
        group = first.group if first.group in _HEADINGS else _SETTINGS
        shown.append(dataclasses.replace(first, group=group))
    return sorted(shown, key=lambda flag: flag.name not in _LISTED)


def run(args: argparse.Namespace) -> int:
    """Estimate and print; 0 where it fits.

    Raises:
        UsageError: of the settings. OSError, ValueError: no such model.
    """
    algorithm = _algorithm(args)
    recipe = _recipe(algorithm)
    known = (*flags_of(recipe), *FLAGS)
    foreign = vars(args).keys() - {flag.name for flag in known} - {"config", "words"}
    if foreign:
        raise UsageError(f"--{min(foreign).replace('_', '-')} is no setting of {algorithm}")
    given = resolve(args, known)
    found = of_settings(recipe, given)
    card = found.device
    if given.get("json"):
        facts = {"parts": found.parts, "phases": found.phases, "total": found.total, "card": card}
        flags = {flag.name for flag in known}
        advice = [{"change": in_flags(a.change, flags), "saving": a.saving} for a in found.advice]
        print(json.dumps({**facts, "fits": found.fits(), "advice": advice}, indent=2))
    else:
        show(found, advice_of(found, recipe))
    return 0 if found.fits() else 1


def of_settings(recipe: Recipe, given: dict[str, Any]) -> Estimate:
    """The estimate of a command that trains.

    Args:
        recipe: of the command. given: settings of it and of `FLAGS`, by name, without defaults.

    Raises:
        UsageError, ValueError, OSError: see `run`.
    """
    import torch

    from hf_rlx.cli.names import check_model
    from hf_rlx.cli.options import defaults
    from hf_rlx.cli.session import make_config

    names = {flag.name for flag in fields_of(recipe)}
    fields = {"output_dir": "unused", **{name: value for name, value in given.items() if name in names}}
    options = defaults({name: value for name, value in given.items() if name not in names})
    if not options["model"]:
        raise UsageError("--model is missing; give it, or `model:` in the file of --config")
    check_adapter(options)
    here = "cuda" if torch.cuda.is_available() and not fields.get("use_cpu") else "cpu"
    card = given.get("card") or here
    if card == "cpu":
        fields["use_cpu"] = True
    elif here == "cpu":
        # A configuration for a GPU is made on a CPU here; the card says what precision it has.
        fields = {name: value for name, value in fields.items() if name not in ("fp16", "bf16", "use_cpu")}
    config = make_config(recipe, options, fields)
    check_model(options["model"], config.model_init_kwargs)
    return _estimated(recipe.name, options, config, card, given, fields.get("gradient_checkpointing"))


def of_session(session: Session, prompt_tokens: int = 256) -> str:
    """A few lines for `--dry-run`: the peak on this machine, and what to change where it does not fit.

    Args:
        session: not trained. prompt_tokens: of the longest prompt.
    """
    from hf_rlx.trainers.config import BaseConfig

    config: BaseConfig = session.config
    card = "cpu" if config.device.type == "cpu" else "cuda"
    sizes = {"prompt_tokens": prompt_tokens}
    found = _estimated(session.recipe.name, session.options, config, card, sizes, None)
    advice = [] if found.fits() else advice_of(found, session.recipe)[:4]
    return "\n".join([verdict(found), *(f"  {each}" for each in advice)])


def advice_of(found: Estimate, recipe: Recipe) -> list[str]:
    """What saves memory, in the flags of a command."""
    fields = {flag.name for flag in flags_of(recipe)}
    return [in_flags(str(each), fields) for each in found.advice]


def verdict(found: Estimate) -> str:
    """One line: the peak, when it is, and whether it fits."""
    from hf_rlx.estimate import GIB, capacity

    room = capacity(found.device)
    when = max(found.phases, key=lambda phase: found.phases[phase])
    what = "this machine" if found.device in ("cpu", "cuda") else found.device
    fits = "fits" if found.fits() else "does NOT fit"
    return f"{found.total / GIB:.2f} GiB at the peak (in the {when}); {fits} in the {room / GIB:.1f} of {what}"


def show(found: Estimate, advice: Sequence[str]) -> None:
    """Print the parts as a table, the verdict, and what saves memory."""
    from rich.console import Console
    from rich.table import Table

    from hf_rlx.estimate import GIB

    table = Table(title=found.what, title_justify="left")
    table.add_column("when")
    table.add_column("part")
    table.add_column("GiB", justify="right")
    for part in found.entries:
        table.add_row(part.phase, part.name, f"{part.bytes / GIB:.3f}")
    table.add_section()
    for phase, size in found.phases.items():
        table.add_row(phase, "with what is always there", f"{size / GIB:.3f}")
    console = Console(soft_wrap=False)
    console.print(table)
    console.print(verdict(found), highlight=False, markup=False, soft_wrap=True)
    if advice:
        print("To take less:" if found.fits() else "To make it fit:")
        for each in advice:
            print(f"  {each}")


def _estimated(
    algorithm: str, options: dict[str, Any], config: Any, card: str, sizes: dict[str, Any], checkpointing: bool | None
) -> Estimate:
    from hf_rlx.cli.session import Session
    from hf_rlx.estimate import estimate

    adapter = Session.adapter(SimpleNamespace(options=options))  # type: ignore[arg-type]
    return estimate(
        options["model"],
        algorithm,
        config,
        adapter,
        bool(options["load_in_4bit"]),
        prompt_tokens=sizes.get("prompt_tokens", 256),
        completion_tokens=sizes.get("completion_tokens"),
        device=card,
        roles=sizes.get("roles", 0),
        gradient_checkpointing=checkpointing,
    )


def _recipe(name: str) -> Recipe:
    recipe: Recipe = module_of(name).RECIPE
    return recipe


def _algorithm(args: argparse.Namespace) -> str:
    """The command whose settings are meant; the file may name it too."""
    name = getattr(args, "algorithm", None)
    if name is None and args.config is not None:
        import yaml

        try:
            content = yaml.safe_load(Path(args.config).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, UnicodeDecodeError):
            content = None  # `resolve` reads it again and says what is wrong
        name = content.get("algorithm") if isinstance(content, dict) else None
    name = str(name or "grpo").replace("_", "-")
    if name not in COMMANDS_THAT_TRAIN:
        from hf_rlx.cli.settings import nearest

        raise UsageError(f"--algorithm {name}: no such algorithm{nearest(name, COMMANDS_THAT_TRAIN)}")
    return name
