"""What `--reward` names: verifiers with options, functions of modules and files, the model's reward role, models."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_rlx.cli import UsageError
from hf_rlx.cli.options import options_of
from hf_rlx.cli.settings import nearest

ROLE = "role"
# Names that TRL's own script takes, with what it calls those with that are no functions yet.
_OF_TRL: dict[str, dict[str, Any]] = {
    "accuracy_reward": {},
    "reasoning_accuracy_reward": {},
    "think_format_reward": {},
    "get_soft_overlong_punishment": {"max_completion_len": 1280, "soft_punish_cache": 256},
}
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


def read_rewards(specs: Sequence[Any], beside: Path | None = None) -> list[Any]:
    """Reward functions of their specifications.

    Args:
        specs: texts, or dictionaries with `name` and options of it; see `RewardOptions`.
        beside: folder of the configuration file: a `file.py` that does not exist is looked for there.

    Returns:
        functions; texts where a folder or Hub id of a reward model is named, or `role` (the roles are made with the
        model, see `needs_role`).

    Raises:
        UsageError: nothing is called so. ValueError, ImportError, RuntimeError: a verifier that cannot work here, or a
            file that fails; names the line.
    """
    return [_read_one(spec, beside) for spec in specs]


def role_of(spec: Any) -> str | None:
    """The role that a specification such as `role` or `role:step_reward` names; None: it is another one."""
    if not isinstance(spec, str):
        return None
    head, _, role = spec.partition(":")
    return (role or "reward") if head == ROLE else None


def close(functions: Sequence[Any]) -> None:
    """End the processes that verifiers keep."""
    for function in functions:
        if hasattr(function, "close"):
            function.close()


def _read_one(spec: Any, beside: Path | None) -> Any:
    from hf_rlx.selfcheck import VERIFIERS, verifier_named

    name, options = _named(spec)
    whole = name if isinstance(spec, dict) else str(spec)
    if role_of(whole) is not None:
        return whole
    short, in_text = options_of(name) if name.partition(":")[0] in VERIFIERS else (name, {})
    options = {**in_text, **options}
    if short in VERIFIERS:
        return verifier_named(short, options)
    if name in _OF_TRL:
        return _of_trl(name, options)
    if name.endswith(".py"):
        raise UsageError(f"--reward: which function of {name}? Write {name}:FUNCTION")
    dotted = _DOTTED.fullmatch(name) is not None and not Path(name).is_dir()
    where, colon, attribute = name.rpartition("." if dotted else ":")
    if colon and attribute.isidentifier():
        is_file = where.endswith(".py")
        found = _attribute(_file(where, beside) if is_file else _module(where), attribute, where)
        return _made(found, options, name)
    if options:
        raise UsageError(f"--reward: {name!r} takes no options")
    if "/" in name or Path(name).is_dir():
        return name  # a reward model
    known = [*VERIFIERS, ROLE]
    raise UsageError(
        f"--reward: nothing is called {name!r}{nearest(name, known)}; verifiers are {', '.join(VERIFIERS)}; a "
        f"function is written module:function, module.function or file.py:function; of TRL's there are "
        f"{', '.join(_OF_TRL)}"
    )


def _named(spec: Any) -> tuple[str, dict[str, Any]]:
    """Name and options of a specification."""
    if isinstance(spec, str):
        return spec.strip(), {}
    if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
        raise UsageError(f"--reward: {spec!r} has no name; in YAML write {{name: number, extract: last}}")
    return spec["name"], {str(key): value for key, value in spec.items() if key != "name"}


def _of_trl(name: str, options: dict[str, Any]) -> Callable[..., Any]:
    """A reward function of TRL by the name that its script gives it."""
    if "accuracy" in name and importlib.util.find_spec("math_verify") is None:
        raise UsageError(f"--reward: TRL's {name} needs the package math-verify; run: pip install math-verify")
    found = _attribute(_module("trl.rewards"), name, "trl.rewards")
    if not _OF_TRL[name]:
        return _made(found, options, name)
    try:
        made: Callable[..., Any] = found(**{**_OF_TRL[name], **options})
    except TypeError as error:
        raise UsageError(f"--reward: {name} refuses its options: {error}") from error
    return made


def _made(found: Any, options: dict[str, Any], name: str) -> Callable[..., Any]:
    """A function as it is; an object of a class, with options."""
    if not inspect.isclass(found):
        if options:
            raise UsageError(f"--reward: {name} is a function and takes no options")
        if not callable(found):
            raise UsageError(f"--reward: {name} is a {type(found).__name__}, no function")
        function: Callable[..., Any] = found
        return function
    try:
        made: Any = found(**options)
    except TypeError as error:
        raise UsageError(f"--reward: {name} refuses its options: {error}") from error
    return made


def _module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:  # the command's own folder is where a script's modules are
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name and not name.startswith(f"{error.name}."):
            raise _told(error, name) from error
        raise UsageError(f"--reward: there is no module {name!r} here or among what is installed") from error
    except Exception as error:
        raise _told(error, name) from error


def _file(name: str, beside: Path | None) -> ModuleType:
    path = Path(name).expanduser()
    if not path.is_file() and beside is not None and (beside / path).is_file():
        path = beside / path
    if not path.is_file():
        raise UsageError(f"--reward: there is no file {name}")
    spec = importlib.util.spec_from_file_location(f"hf_rlx_reward_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and pickles look their module up
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # as Python does for a script: its neighbours can be imported
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module.__name__]
        raise _told(error, name) from error
    return module


def _told(error: Exception, name: str) -> ValueError:
    """An error inside a user's module, with the line where it happened."""
    frames = traceback.extract_tb(error.__traceback__)
    line = f", line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else ""
    if isinstance(error, SyntaxError):
        line = f", line {error.lineno} of {Path(error.filename or name).name}"
    return ValueError(f"--reward: {name} cannot be imported: {type(error).__name__}: {error}{line}")


def _attribute(module: ModuleType, name: str, where: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    raise UsageError(f"--reward: {where} has no {name!r}{nearest(name, public)}")
