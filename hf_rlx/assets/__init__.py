"""Files that ship inside the wheel: the bundled character model."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def tiny_arith_path() -> Path:
    """Folder of the bundled 0.9 M-parameter character model (model, tokenizer and the record of its making).

    Both `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` take it, offline.

    Raises:
        FileNotFoundError: when the package was installed without its data files, or sits in a zip archive.
    """
    folder = Path(str(files(__name__).joinpath("tiny_arith")))
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"The bundled model is missing from {folder}. Reinstall hf_rlx from its wheel or a checkout, "
            "or make the model again with `python examples/make_tiny_arith.py`."
        )
    return folder
