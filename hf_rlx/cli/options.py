"""What commands that train or evaluate take beside the fields of a configuration: model, data, reward, adapter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_rlx.cli.flags import Flag, Kinds, dataclass_flags


def _option(text: str, default: Any = None, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"help": text, "metavar": metavar})


@dataclass
class ModelOptions:
    """The model, and the adapter that trains on it."""

    model: str | None = _option('"tiny" (bundled), "smollm2", a folder (also of an adapter) or a Hub id', None, "NAME")
    model_revision: str | None = _option("branch, tag or commit of a Hub id", None, "NAME")
    dtype: str | None = _option("of the weights: float32, bfloat16, float16 or auto (default: by the device)")
    attn_implementation: str | None = _option("attention of transformers, e.g. sdpa")
    load_in_4bit: bool = _option("QLoRA: the base's weights in 4-bit NF4 (bitsandbytes)", False)
    lora: bool = _option(
        "train a LoRA adapter (default: yes, or the one that the model's folder has); --no-lora: all weights", True
    )
    lora_r: int = _option("rank of the adapter", 16)
    lora_alpha: int = _option("its scale is alpha / r", 32)
    lora_dropout: float = _option("dropout inside the adapter", 0.0)
    lora_target_modules: list[str] | str = _option("modules that get one", "all-linear", "NAME")


@dataclass
class DataOptions:
    """Rows to train on and rows that are held out."""

    dataset: str | None = _option(
        "a .jsonl, .json, .csv or .parquet file, a folder, a Hub id, or a task: arithmetic, spoken_arithmetic, "
        "countdown, nim, reasoning_gym:task_name=NAME, svamp:path=FILE; options follow a colon, e.g. "
        "countdown:n_train=200,conversational=false",
        None,
        "NAME",
    )
    dataset_config: str | None = _option("configuration of a Hub dataset", None, "NAME")
    train_split: str = _option("split that is trained on", "train", "NAME")
    eval_split: str | None = _option("split that is held out; of a task it is its own", None, "NAME")
    eval_dataset: str | None = _option("held-out rows of another file or Hub id", None, "NAME")
    eval_fraction: float | None = _option("hold out this share of the training rows (chosen by seed)")
    columns: list[str] | dict[str, str] | None = _option(
        "rename columns, new=old: prompt=question chosen=good (in YAML a section)", None, "NEW=OLD"
    )


@dataclass
class RewardOptions:
    """What scores an answer."""

    reward: list[Any] | None = _option(
        "one or several of: a verifier (math, number, code, countdown, regex, ...; options follow a colon: "
        "number:extract=last), module:function, file.py:function, role (the model's own reward model), or a folder or "
        "Hub id of a reward model (default: the task's). In YAML also sections: {name: number, extract: last}",
        None,
        "NAME",
    )


@dataclass
class RunOptions:
    """How a run starts."""

    resume: bool | str | None = _option(
        "go on from a checkpoint: its folder, or auto for the newest whole one in output_dir, if there is any",
        None,
        "PATH|auto",
    )
    dry_run: bool = _option(
        "print the settings, the data, its first row as tokens and an estimate of the memory; train and write nothing",
        False,
    )
    verbose: bool = _option("with --dry-run: all settings, also those left at their defaults", False)


MODEL = tuple(dataclass_flags(ModelOptions, "model and adapter"))
DATA = tuple(dataclass_flags(DataOptions, "data"))
REWARD = tuple(dataclass_flags(RewardOptions, "reward"))
RUN = tuple(dataclass_flags(RunOptions, "run"))
REFERENCE = (
    Flag(
        "ref_model",
        Kinds.of("str | None"),
        "",
        "the reference: a folder or Hub id of the policy's family (default: the policy as it starts)",
        "model and adapter",
        "NAME",
    ),
)
PRESET = (
    Flag(
        "preset",
        Kinds.of("str | None"),
        "",
        "a published recipe in one word: grpo, dapo, dr_grpo, gspo, rloo or trl; other flags win over it",
        "run",
        "NAME",
    ),
)


def choose(flags: tuple[Flag, ...], *names: str) -> tuple[Flag, ...]:
    """Some of `flags`, by name."""
    return tuple(flag for flag in flags if flag.name in names)


def defaults(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with the defaults of every option that is not among them."""
    result: dict[str, Any] = {}
    for cls in (ModelOptions, DataOptions, RewardOptions, RunOptions):
        result |= vars(cls())
    return {**result, **values}


def options_of(text: str) -> tuple[str, dict[str, Any]]:
    """A name with options behind a colon: `countdown:n_train=200,conversational=false`, or JSON behind it.

    Values are JSON where they are JSON, else text. A comma inside brackets or quotes separates nothing.

    Raises:
        ValueError: an option has no `=`, or the JSON is none.
    """
    import json

    from hf_rlx.selfcheck import read_options

    name, _, rest = text.partition(":")
    rest = rest.strip()
    if not rest:
        return name.strip(), {}
    if rest.startswith("{"):
        try:
            return name.strip(), dict(json.loads(rest))
        except json.JSONDecodeError as error:
            raise ValueError(f"the options of {name!r} are no JSON: {rest}: {error}") from error
    try:
        return name.strip(), read_options(_split(rest))
    except ValueError as error:
        raise ValueError(f"{text!r}: options are written name:key=value,key=value") from error


def _split(text: str) -> list[str]:
    """At commas outside brackets and quotes."""
    parts, depth, quoted = [""], 0, ""
    for character in text:
        if quoted:
            quoted = "" if character == quoted else quoted
        elif character in "\"'":
            quoted = character
        elif character in "[{(":
            depth += 1
        elif character in ")}]":
            depth -= 1
        if character == "," and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += character
    return parts
