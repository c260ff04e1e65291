"""Text files that are whole or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Write `text` to a new file in the same folder, then rename it onto `path`."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes private files; a card is for everyone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
