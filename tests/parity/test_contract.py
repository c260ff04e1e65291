"""The contract with the installed TRL: fields, defaults, constructor arguments. A failure names the drift."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from hf_rlx import (
    DIFFERS_FROM_TRL,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

trl = pytest.importorskip("trl")

PAIRS = [
    (GRPOConfig, trl.GRPOConfig),
    (RewardConfig, trl.RewardConfig),
    (DPOConfig, trl.DPOConfig),
    (SFTConfig, trl.SFTConfig),
]
TRAINERS = [
    (GRPOTrainer, trl.GRPOTrainer),
    (RewardTrainer, trl.RewardTrainer),
    (DPOTrainer, trl.DPOTrainer),
    (SFTTrainer, trl.SFTTrainer),
]


def defaults(config: type) -> dict[str, Any]:
    """Every field's default, factories called; required fields give `MISSING`."""
    return {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for f in dataclasses.fields(config)
    }


def entries(config: type) -> dict[str, Any]:
    """The table's entries on defaults of `config`, by field name."""
    owners = {cls.__name__ for cls in config.__mro__}
    pairs = ((key.partition("."), difference) for key, difference in DIFFERS_FROM_TRL.items())
    return {field: difference for (owner, dot, field), difference in pairs if dot and owner in owners}


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda c: c.__module__.split(".")[0])
def test_every_field_of_trl_is_known(ours, theirs):
    """A field that TRL gained must be carried or refused here, never be an unknown name."""
    missing = sorted(defaults(theirs).keys() - defaults(ours).keys())
    assert not missing, f"TRL's {theirs.__name__} has fields that ours lacks: {missing}"


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda c: c.__module__.split(".")[0])
def test_defaults_are_trl_s_but_for_the_table(ours, theirs):
    """The fields whose default differs are those in the table, with the table's two values."""
    mine, other, table = defaults(ours), defaults(theirs), entries(ours)
    differing = {name: (other[name], mine[name]) for name in other if name in mine and other[name] != mine[name]}
    listed = {name: (d.trl, d.ours) for name, d in table.items()}
    drift = {name for name in differing.keys() | listed.keys() if differing.get(name) != listed.get(name)}
    assert not drift, "\n".join(
        f"{name}: TRL and ours are {differing.get(name, 'equal')}, DIFFERS_FROM_TRL says {listed.get(name, 'equal')}"
        for name in sorted(drift)
    )


@pytest.mark.parametrize(("ours", "theirs"), TRAINERS, ids=lambda c: c.__module__.split(".")[0])
def test_constructor_arguments_are_trl_s_then_ours(ours, theirs):
    """Positional calls written for TRL mean the same here."""
    mine = list(inspect.signature(ours.__init__).parameters.values())
    other = list(inspect.signature(theirs.__init__).parameters.values())
    for position, expected in enumerate(other):
        found = mine[position] if position < len(mine) else None
        assert found is not None, f"argument {position} is missing: TRL has {expected.name}"
        assert found.name == expected.name, f"argument {position}: TRL has {expected.name}, ours has {found.name}"
        assert found.kind == expected.kind, expected.name
        assert found.default == expected.default, f"{expected.name}: {expected.default!r} in TRL, {found.default!r}"
    for extra in mine[len(other) :]:
        assert extra.default is not inspect.Parameter.empty, f"{extra.name} is ours alone and has no default"


@pytest.mark.parametrize(("ours", "theirs"), PAIRS[:1], ids=lambda c: c.__module__.split(".")[0])
def test_the_preset_trl_sets_the_algorithm_back(ours, theirs):
    """`preset("trl")` differs from TRL's defaults in what has no bearing on the loss only."""
    kept = {"fp16", "gradient_checkpointing", "logging_nan_inf_filter"}
    preset = ours.preset("trl", output_dir="x", use_cpu=True)
    for name, difference in entries(ours).items():
        if name not in kept:
            assert getattr(preset, name) == difference.trl, name
