"""Versions of what hf_rlx stands on, against those that it supports, and pairs that do not go together."""

from __future__ import annotations

import importlib.util
import platform
import re
import tomllib
import warnings
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hf_rlx.preflight.report import Finding

SHOWN = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes", "huggingface_hub")


@cache
def supported() -> tuple[SpecifierSet, dict[str, SpecifierSet]]:
    """Versions of Python, and of every package that hf_rlx needs here, by name; of a checkout as its pyproject.toml
    says, else as the installed package does."""
    file = Path(__file__).parents[2] / "pyproject.toml"
    python, lines = "", []
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        python, lines = project["requires-python"], project["dependencies"]
    else:
        try:
            known = metadata.metadata("hf_rlx")
            python, lines = known["Requires-Python"] or "", metadata.requires("hf_rlx") or []
        except metadata.PackageNotFoundError:  # a copy of the folder: nobody knows
            lines = []
    needs = [Requirement(line) for line in lines]
    return SpecifierSet(python), {
        _plain(need.name): need.specifier
        for need in needs
        if need.marker is None or need.marker.evaluate({"extra": ""})
    }


def _plain(name: str) -> str:
    return re.sub(r"[-.]+", "_", name).lower()


def version_findings() -> Iterator[Finding]:
    """Python and the packages of `SHOWN`."""
    python, needs = supported()
    here = platform.python_version()
    if python.contains(here, prereleases=True):
        yield Finding("Python", here)
    else:
        yield Finding(
            "Python", f"{here}, but hf_rlx needs {python}", "problem", "make an environment with another one"
        )
    for name in SHOWN:
        wanted = needs.get(name)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            if wanted is not None:
                optional = name == "bitsandbytes"
                found = "not installed: no 4-bit weights, no 8-bit optimizers" if optional else "not installed"
                yield Finding(name, found, "note" if optional else "problem", f'pip install "{name}{wanted}"')
            continue
        if wanted is None or wanted.contains(version, prereleases=True):
            yield Finding(name, version)
            continue
        fix = f'pip install "{name}{wanted}"'
        if name == "torch":
            fix += ", together with its torchvision and torchaudio, and restart"
        yield Finding(name, f"{version}, but hf_rlx supports {wanted}", "problem", fix)


def clash_findings(args: Any = None) -> Iterator[Finding]:
    """Packages that are there and break a run.

    Args:
        args: the configuration; None: any.
    """
    if (problem := torchao_clash()) is not None:
        found, _, fix = problem.partition("; ")
        yield Finding("torchao", found, "problem", fix)
    if (problem := optimizer_clash(args)) is not None:
        found, _, fix = problem.partition("; ")
        yield Finding("optim", found, "problem", fix)
    if importlib.util.find_spec("bitsandbytes") is not None and not torch.cuda.is_available():
        found = "no GPU: 4-bit weights and 8-bit optimizers work on the CPU, slowly"
        yield Finding("bitsandbytes", found, "note")


def torchao_clash() -> str | None:
    """Whether PEFT would refuse to make an adapter, because a torchao is installed that it cannot use (Colab brings
    one): what is wrong and, after "; ", the fix."""
    from peft.import_utils import is_torchao_available

    try:
        is_torchao_available()
    except ImportError as error:
        return (
            f"PEFT makes no adapter beside this torchao: {error}; run `pip uninstall -y torchao` (in a notebook "
            "`%pip uninstall -qy torchao`) and restart, unless you need it: then `pip install -U torchao`"
        )
    return None


def optimizer_clash(args: Any) -> str | None:
    """Whether the optimizer of a configuration runs on this machine: what is wrong and, after "; ", the fix."""
    optim = getattr(args, "optim", None)
    name = str(getattr(optim, "value", optim))  # of an enumeration
    if "torch" in name or not ("8bit" in name or "paged" in name):
        return None
    if importlib.util.find_spec("bitsandbytes") is None:
        return f"optim={name} needs bitsandbytes; pip install bitsandbytes, or leave optim out"
    on_cpu = getattr(args, "use_cpu", False) or not torch.cuda.is_available()
    error = _step_on_cpu("paged" in name) if on_cpu else None
    if error is None:
        return None
    told = f"{type(error).__name__}: {error}".partition("\n")[0]
    return f"optim={name} does not run on this CPU ({told}); leave optim out, or pip install -U bitsandbytes"


def _step_on_cpu(paged: bool) -> Exception | None:
    """What an 8-bit optimizer of bitsandbytes raises on the CPU: older versions have none there."""
    try:
        from bitsandbytes.optim import AdamW8bit

        parameter = torch.nn.Parameter(torch.zeros(4096))  # smaller ones are not kept in 8 bits
        parameter.grad = torch.ones(4096)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            AdamW8bit([parameter], is_paged=paged).step()
    except Exception as error:
        return error
    return None
