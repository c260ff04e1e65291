"""The settings of a run: flags over the file of `--config` over defaults."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_rlx.cli import UsageError
from hf_rlx.cli.flags import Flag

# Names that scripts of TRL give to the same things.
ALIASES = {
    "model_name_or_path": "model",
    "dataset_name": "dataset",
    "dataset_train_split": "train_split",
    "dataset_test_split": "eval_split",
    "reward_funcs": "reward",
    "use_peft": "lora",
    "resume_from_checkpoint": "resume",
}
CONFIG_HELP = (
    "YAML file with any of these settings under the same names, e.g. `max_steps: 100`; flags win over it, and an "
    "unknown name is an error"
)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add `--config` to a parser."""
    parser.add_argument("--config", metavar="FILE", default=None, help=CONFIG_HELP)


def resolve(args: argparse.Namespace, flags: Sequence[Flag]) -> dict[str, Any]:
    """What is set, by the command line or the file.

    Args:
        args: with `config`, and what was given of `flags` and of their aliases, as text.
        flags: all that can be set.

    Returns:
        values by name; what is set nowhere is not in it.

    Raises:
        UsageError: there is no such file; an unknown name in it, with the nearest known one; a value of a wrong kind.
        OSError: the file cannot be read.
    """
    known = {flag.name: flag for flag in flags}
    values = {} if args.config is None else read_file(Path(args.config), known)
    given = vars(args)
    for name, flag in known.items():
        aliases = [alias for alias, meant in ALIASES.items() if meant == name and alias in given]
        for source in (*aliases, name):
            if source in given:
                option = "--" + source.replace("_", "-")
                values[name] = flag.read(given[source], option)
    return values


def read_file(path: Path, known: dict[str, Flag]) -> dict[str, Any]:
    """The settings of a YAML file.

    Args:
        path: of the file. known: flags by name.

    Raises:
        UsageError, OSError: see `resolve`.
    """
    import yaml

    if not path.exists() or path.is_dir():
        raise UsageError(f"--config: {missing(path)}")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_loader())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no YAML file: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds a {type(content).__name__}; it must have lines like `max_steps: 100`")
    values: dict[str, Any] = {}
    for key, value in content.items():
        written = str(key).replace("-", "_")
        name = ALIASES.get(written, written) if written not in known else written
        if name not in known:
            raise UsageError(f"{path}: {_unknown(str(key), value, known)}")
        if name in values:
            raise UsageError(f"{path}: {key} is set twice")
        values[name] = known[name].read(value, f"{path}: {key}")
    return values


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?` where one of `known` is like `name`, else nothing."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def missing(path: Path) -> str:
    """What to say of a file that is not there, with those beside it that have a like name."""
    if path.is_dir():
        return f"{path} is a folder; name a file in it"
    beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    hint = f"; did you mean {path.parent / near[0]}?" if near else f" (looked for in {path.parent.resolve()})"
    return f"there is no file {path}{hint}"


def _unknown(key: str, value: Any, known: dict[str, Flag]) -> str:
    if key == "env" and isinstance(value, dict):
        names = " ".join(f"{name}=..." for name in value)  # values may be tokens
        return f"environment variables are not read from here; set them before the command: export {names}"
    if isinstance(value, dict):
        inside = [str(name) for name in value if str(name).replace("-", "_") in known]
        if inside:
            return f"{key!r} is a section; write its names at the beginning of a line: {', '.join(inside)}"
    from hf_rlx.trainers.removed_fields import replacement

    if (instead := replacement(key, known)) is not None:
        return f"there is no setting {key!r}; use {instead}"
    return f"unknown setting {key!r}{nearest(key, list(known))}"


def _loader() -> Any:
    """YAML's safe loader, which refuses a name that stands twice."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: Any, node: Any) -> Any:
        keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice} is set twice", node.start_mark)
        return yaml.SafeLoader.construct_mapping(loader, node, deep=True)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return Loader
