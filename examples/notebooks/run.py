"""Makes the notebooks from their scripts and runs them, so that what is stored is what they do.

    pip install -e ".[test]" -c constraints.txt
    python examples/notebooks/run.py                          # all three, a minute or two on a CPU
    python examples/notebooks/run.py grpo_with_your_reward    # one of them

A script in jupytext's percent format is the source; the notebook beside it is written here and nowhere else. It runs
on the CPU with the bundled model, offline, in a kernel of this interpreter and in a folder that is deleted afterwards.
Lines for IPython alone (`%pip`) are stored and not run: what they install is there. Of the output everything is kept
but what was written to the error stream, which is shown here, and what differs between machines: paths and memory.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRIPTS = sorted(path for path in HERE.glob("*.py") if path != Path(__file__).resolve())
_KEPT_METADATA = ("accelerator", "colab", "jupytext", "kernelspec", "language_info")
# Output of a progress bar, or of a terminal, that overwrites itself.
_OVERWRITTEN = re.compile(r"[^\n]*\r")


def make(script: Path) -> Any:
    """The notebook of a script, without output. Cells are numbered, so that making it twice gives the same file."""
    notebook = jupytext.read(script)
    notebook.metadata = {name: value for name, value in notebook.metadata.items() if name in _KEPT_METADATA}
    notebook.metadata["jupytext"] = {"formats": "ipynb,py:percent"}
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02}"
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    nbformat.validate(notebook)
    return notebook


def execute(notebook: Any, folder: Path, steps: int | None = None, timeout: int = 600) -> Any:
    """A copy of a notebook with its output.

    Args:
        notebook: see `make`. folder: where its cells run. steps: of each training; None: as it says itself.
        timeout: seconds of a cell.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    running = nbformat.from_dict(notebook)
    sources = [cell.source for cell in running.cells]
    for cell in running.cells:
        if cell.cell_type == "code":
            cell.source = "\n".join(line for line in cell.source.splitlines() if not line.startswith("%"))
    with tempfile.TemporaryDirectory() as private:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        environment |= {"IPYTHONDIR": private, "TQDM_DISABLE": "1"}
        environment.pop("MPLBACKEND", None)  # the notebook's own
        environment.pop("HF_RLX_NOTEBOOK_STEPS", None)
        if steps is not None:
            environment["HF_RLX_NOTEBOOK_STEPS"] = str(steps)
        # No folders of kernels: only the one of this interpreter, whatever is installed for the user.
        kernels = KernelSpecManager(kernel_dirs=[])
        manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=kernels)
        manager.connection_file = str(Path(private) / "kernel.json")
        if os.name != "nt":
            manager.transport = "ipc"  # files in the private folder in place of open ports
        options = {"timeout": timeout, "record_timing": False, "resources": {"metadata": {"path": str(folder)}}}
        NotebookClient(running, km=manager, **options).execute(env=environment, cleanup_kc=True)
    for cell, source in zip(running.cells, sources, strict=True):
        cell.source = source
    return running


def clean(notebook: Any, folder: Path) -> str:
    """Take out of the output what does not belong into a repository.

    Args:
        notebook: changed in place. folder: in which it ran; it becomes `.`.

    Returns:
        what was written to the error stream.
    """
    errors = []
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        kept: list[Any] = []
        for output in cell.outputs:
            if output.output_type == "stream":
                if output.name == "stderr":
                    errors.append(output.text)
                    continue
                output.text = _OVERWRITTEN.sub("", _without(output.text, folder))
                if kept and kept[-1].output_type == "stream":
                    kept[-1].text += output.text
                    continue
            elif "data" in output:
                output.data = {k: _without(v, folder) if k.startswith("text/") else v for k, v in output.data.items()}
            kept.append(output)
        cell.outputs = kept
    notebook.metadata["language_info"] = {"name": "python"}
    return "".join(errors)


def _without(text: str, folder: Path) -> str:
    """Without the folder and this machine's memory."""
    text = text.replace(str(folder.resolve()), ".").replace(str(folder), ".")
    text = re.sub(r"^(ok +(?:device|memory|output_dir) +).*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"fits in the [\d.]+ of this machine", "fits in this machine", text)


def main() -> None:
    """Make, run and write the notebooks that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [script.stem for script in SCRIPTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(names)}; default: all")
    parser.add_argument("--steps", type=int, help="of each training, for a quick look; nothing is written then")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in names]:
        parser.error(f"there is no notebook {unknown[0]!r}; there are {', '.join(names)}")
    for name in args.names or names:
        with tempfile.TemporaryDirectory() as scratch:
            notebook = execute(make(HERE / f"{name}.py"), Path(scratch), args.steps)
            print(clean(notebook, Path(scratch)), end="", file=sys.stderr)
        if args.steps is None:
            target = HERE / f"{name}.ipynb"
            nbformat.write(notebook, target)
            print(f"{target}: {target.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
