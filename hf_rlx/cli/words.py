"""Advice that is written for Python, as a command line takes it."""

from __future__ import annotations

import ast
import logging
import re
import shlex
from collections.abc import Collection

_GO_ON = "trainer.train(resume_from_checkpoint=True)"
_WHOLE = {
    "train(resume_from_checkpoint=True)": "--resume auto",
    "resume_from_checkpoint=True": "--resume auto",
    "quantization_config=four_bit_config()": "--load-in-4bit",
    "all weights (peft_config)": "all weights (without --no-lora)",
}
_DTYPE = re.compile(r"""model_init_kwargs=\{["']dtype["']: ["'](\w+)["']\}""")
_FIELD = re.compile(r"""\b([a-z][a-z0-9_]*)=("[^"]*"|'[^']*'|[+-]?\d[\d.e_+-]*\d|\d|True|False|None)(?![\w=])""")
_QUOTES = "\"'"
_DROPS = re.compile(r"to drop all such rows: dataset = dataset\.filter\(lambda row: row\[.+?\]\)")
_RENAMES = re.compile(r"dataset = dataset\.rename_columns?\((.+?)\)(?=$|[\s.;])")


def in_flags(text: str, fields: Collection[str]) -> str:
    """A message with `field=value` as `--field value`, and Python calls as the flags that do the same.

    Args:
        text: of a message. fields: settings that the command takes as flags; other names stay as they are.
    """
    for python, flag in _WHOLE.items():
        text = text.replace(python, flag)
    text = _RENAMES.sub(_columns, text)
    text = _DROPS.sub("mend the file, or take such rows out of it", text)
    text = _DTYPE.sub(r"--dtype \1", text)
    text = _FIELD.sub(lambda found: _flag(found, fields), text)
    return re.sub(
        r"with twice the (\w+)",
        lambda found: f"with twice the --{found[1].replace('_', '-')}" if found[1] in fields else found[0],
        text,
    )


def _flag(found: re.Match[str], fields: Collection[str]) -> str:
    name, value = found.groups()
    if name not in fields:
        return found[0]
    option = name.replace("_", "-")
    if value in ("True", "False"):
        return f"--{option}" if value == "True" else f"--no-{option}"
    return f"--{option} {'none' if value == 'None' else shlex.quote(value.strip(_QUOTES))}"


def _columns(found: re.Match[str]) -> str:
    """`rename_column("old", "new")` or `rename_columns({"old": "new"})` as `--columns new=old`."""
    try:
        value = ast.literal_eval(found[1])
    except (SyntaxError, ValueError):
        return found[0]
    renames = value if isinstance(value, dict) else dict([value])
    return shlex.join(["--columns", *(f"{new}={old}" for old, new in renames.items())])


class FlagWords(logging.Filter):
    """Puts the records of a handler into the words of a command line.

    Args:
        fields: see `in_flags`.
    """

    def __init__(self, fields: Collection[str]) -> None:
        super().__init__()
        self.fields = fields

    def filter(self, record: logging.LogRecord) -> bool:
        """Called by logging; the record is changed, so that handlers after this one say the same. How to go on after a
        stop is not passed on: the command says that itself, with its whole line."""
        message = record.getMessage()
        if _GO_ON in message:
            return False
        if (changed := in_flags(message, self.fields)) != message:
            record.msg, record.args = changed, None
        return True


__all__ = ["FlagWords", "in_flags"]
