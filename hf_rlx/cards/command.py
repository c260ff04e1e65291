"""The command that started this process, and texts without the paths of the machine and without its secrets."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from hf_rlx.secrets import is_secret_name, mask_text

_LONGEST = 2000  # characters of a command; beyond it is a program and no command
_FLAG = re.compile(r"(--?[\w.-]+|[A-Za-z_]\w*)=(.*)", re.DOTALL)


def command_line(argv: Sequence[str] | None = None, secrets: Iterable[str | None] = ()) -> str | None:
    """The words that started this process, as they would be typed.

    Paths are relative to the working folder, or where they lie elsewhere their last part; values of flags such as
    `--hub_token`, Hub tokens, logins in URLs and `secrets` are made unreadable.

    Args:
        argv: with the interpreter first, as `sys.orig_argv`, which is the default.
        secrets: further values to hide; None is skipped.

    Returns:
        None where it would say nothing: in a notebook, in an interactive shell, or a program given as text.
    """
    words = list(sys.orig_argv if argv is None else argv)
    if len(words) < 2 or any("ipykernel" in word or word == "-c" for word in words[:4]):
        return None
    if Path(words[1]).parent == Path(words[0]).parent and os.path.isabs(words[1]):
        words = [Path(words[1]).name, *words[2:]]  # a command such as `hf-rlx`, installed beside the interpreter
    else:
        words = [Path(words[0]).name, *words[1:]]
    shown: list[str] = []
    hide = False
    for word in words:
        shown.append("<SECRET>" if hide else _word(word))
        hide = not hide and word.startswith("-") and "=" not in word and _names_secret(word)
    known = [secret for secret in secrets if secret]
    line = shlex.join(_without(word, known) for word in shown)
    return line if len(line) <= _LONGEST else None


def without_local_paths(text: str) -> str:
    """`text` in which no absolute path below this machine's home, working, temporary or Python folders is left: each
    becomes its last part."""
    places = [str(Path.home()), os.getcwd(), tempfile.gettempdir(), sys.prefix, sys.base_prefix]
    places += [str(Path(place).resolve()) for place in places]
    for place in sorted({place for place in places if len(place) > 1}, key=len, reverse=True):
        pattern = re.compile(r"(?<![\w.])" + re.escape(place) + r"(?![\w-])((?:/[^\s'\"`|,;:()\[\]<>]+)*)/?")
        text = pattern.sub(lambda match: _last_part(match.group(0)), text)
    return text


def short_path(text: str) -> str:
    """An absolute path relative to the working folder, or its last part; any other text as it is."""
    if not os.path.isabs(text) or "\n" in text:
        return text
    try:
        return os.path.normpath(Path(text).relative_to(Path.cwd()))
    except ValueError:
        return Path(text).name or text


def _without(word: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        word = word.replace(secret, "<SECRET>")
    return mask_text(word)


def _word(word: str) -> str:
    flag = _FLAG.fullmatch(word)
    if flag is None:
        return short_path(word)
    name, value = flag.groups()
    return f"{name}=<SECRET>" if _names_secret(name) else f"{name}={short_path(value)}"


def _names_secret(flag: str) -> bool:
    return is_secret_name(flag.lstrip("-").replace("-", "_").replace(".", "_"))


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
