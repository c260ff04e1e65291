"""`hf-rlx doctor`: the machine, the packages and, as far as given, model, data, rewards and the Hub."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_rlx.cli import UsageError, module_of, training
from hf_rlx.cli.flags import Flag, add_flags
from hf_rlx.cli.options import DATA, MODEL, REWARD, choose, defaults
from hf_rlx.cli.settings import add_config, resolve
from hf_rlx.cli.words import in_flags

_OWN = ("output_dir", "push_to_hub")  # flags that the doctor has itself
METHODS = ("sft", "reward", "prm", "grpo", "ppo", "dpo", "ipo", "simpo", "orpo", "iterative-dpo")
_FLAGS = (*choose(MODEL, "model"), *DATA, *REWARD)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx doctor` takes."""
    parser.usage = (
        "hf-rlx doctor [METHOD] [--config FILE] [--model M] [--dataset D] [--reward R ...] [--push-to-hub] "
        "[--FIELD VALUE ...]"
    )
    parser.epilog = (
        "Behind a METHOD every flag of its command is taken, so that the line of a run can be looked at. Nothing is "
        "trained, no weights are loaded, and without --push-to-hub nothing is asked of the Hub but what "
        "names of models and datasets need. exit status: 0; 1 where there is a problem; 2 a wrong setting"
    )
    methods = ", ".join(METHODS)
    help_text = f"what is to be run ({methods}): its settings are then looked at too"
    parser.add_argument("method", nargs="?", choices=METHODS, metavar="METHOD", help=help_text)
    add_config(parser)
    add_flags(parser, (*_FLAGS, *_further()))
    group = parser.add_argument_group("run")
    group.add_argument("--output-dir", dest="folder", default=None, metavar="FOLDER", help="where it would write")
    push = "ask the Hub whether it would take the model"
    group.add_argument("--push-to-hub", dest="push", nargs="?", const=True, default=None, metavar="REPO", help=push)


def _further() -> list[Flag]:
    """Every other setting of every method, once; `hf-rlx METHOD --help` lists them."""
    own = {flag.name for flag in _FLAGS} | {*_OWN}
    found: dict[str, Flag] = {}
    for name in METHODS:
        for flag in training.flags_of(module_of(name).RECIPE):
            if flag.name not in own:
                found.setdefault(flag.name, replace(flag, text="No effect"))
    return list(found.values())


def _check_method(args: argparse.Namespace, known: set[str]) -> None:
    """Raises: UsageError of a flag that the method does not have."""
    foreign = vars(args).keys() - known - {"method", "config", "folder", "push", "words"}
    if not foreign:
        return
    option = f"--{min(foreign).replace('_', '-')}"
    if args.method is None:
        raise UsageError(f"{option} is a setting of a method; name it first: hf-rlx doctor METHOD {option} ...")
    raise UsageError(f"{option} is no setting of {args.method}")


def run(args: argparse.Namespace) -> int:
    """Print the report; the exit status.

    Raises:
        UsageError: of the settings. ValueError, OSError: the data cannot be read.
    """
    recipe = None if args.method is None else module_of(args.method).RECIPE
    flags = _FLAGS if recipe is None else training.flags_of(recipe)
    _check_method(args, {flag.name for flag in flags})
    given = resolve(args, flags)
    names = set() if recipe is None else {flag.name for flag in training.fields_of(recipe)}
    fields = {name: value for name, value in given.items() if name in names}
    options = defaults({name: value for name, value in given.items() if name not in names})
    training.check_adapter(options)
    fields["output_dir"] = args.folder or fields.get("output_dir") or f"runs/{args.method or 'doctor'}"
    words = {flag.name for flag in flags}
    with training.messages(words):
        report = _report(recipe, options, fields, None if args.config is None else Path(args.config).parent, args.push)

    report.findings = [replace(f, found=in_flags(f.found, words), fix=in_flags(f.fix, words)) for f in report.findings]

    from rich.console import Console

    console = Console(soft_wrap=True)
    console.print(report if console.is_terminal else str(report), markup=False, highlight=False)
    return 0 if report.ok else 1


def _report(recipe: Any, options: dict[str, Any], fields: dict[str, Any], beside: Path | None, push: Any) -> Any:
    from hf_rlx.checkup import doctor
    from hf_rlx.cli import rewards
    from hf_rlx.cli.data import load_data, located
    from hf_rlx.cli.names import check_model
    from hf_rlx.cli.session import check_held_out, make_config
    from hf_rlx.preflight.report import Finding
    from hf_rlx.trainers.config import BaseConfig

    config = BaseConfig(fields["output_dir"]) if recipe is None else make_config(recipe, options, fields)
    data = None
    if options["dataset"]:
        places = {name: located(options[name], beside) for name in ("dataset", "eval_dataset")}
        data = load_data({**options, **places}, "prompts" if recipe is None else recipe.data, config.seed)
        check_held_out(config, data, {**options, **places})
        length = data.max_completion_length  # a task's own, as in the run
        samples = recipe is not None and recipe.data == "prompts"
        if samples and length is not None and "max_completion_length" not in fields:
            config = make_config(recipe, options, {**fields, "max_completion_length": length})
    specs = options["reward"] or []
    if not specs and recipe is not None and recipe.rewards and data is not None and data.reward is not None:
        specs = [data.reward]  # the task's own
    functions = rewards.read_rewards(specs, beside)
    model, missing = options["model"], None
    if model:
        try:
            check_model(model, config.model_init_kwargs)
        except FileNotFoundError as error:
            # The client would ask for it file by file and again and again.
            model, missing = None, Finding("model", str(error), "problem", "check the name and the network")
    try:
        tried = [function for function in functions if rewards.role_of(function) is None]
        rows = None if data is None else data.train
        report = doctor(model, rows, tried or None, config, push)
        report.add([] if missing is None else missing)
        return report
    finally:
        rewards.close(functions)
