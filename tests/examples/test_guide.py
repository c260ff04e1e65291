"""The guide names fields, metrics and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import hf_rlx
from hf_rlx.trainers import ppo_config

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "examples" / "guide"
PAGES = sorted(GUIDE.glob("*.md"))
CONFIGS = [getattr(hf_rlx, name) for name in dir(hf_rlx) if name.endswith("Config")]


def rows(text: str, heading: str) -> list[str]:
    """First cells of the table under a heading."""
    part = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return re.findall(r"^\| (`[^|]+) \|", part.group(1), re.M) if part else []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    """Every relative link of a page is a file."""
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if not link.startswith("http") and not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_fields_are_fields(page):
    """Every field in a table of fields, or of switches, is one of some configuration."""
    known = {name for config in CONFIGS for name in config.__dataclass_fields__} | set(ppo_config.RENAMED)
    text = page.read_text(encoding="utf-8")
    named = [
        name
        for heading in ("Fields that matter", "The switches")
        for cell in rows(text, heading)
        for name in re.findall(r"`(\w+)`", cell)
    ]
    assert not [name for name in named if name not in known]
    assert named or page.stem not in ("grpo", "ppo", "preference", "reward_models")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_metrics_are_logged(page):
    """Every metric in a table of what to watch stands in some trainer's table of metrics."""
    documented = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "hf_rlx" / "trainers").glob("*.py"))
    cells = rows(page.read_text(encoding="utf-8"), "What to watch")
    for name in (name for cell in cells for name in re.findall(r"`([\w/]+)`", cell)):
        head, _, last = name.rpartition("/")
        assert name in documented or (f"{head}/" in documented and f"/{last}" in documented), name


def test_every_name_of_the_table_of_old_ppo_is_understood():
    """What the migration page calls the same is a field of `PPOConfig`, or an old name that it takes."""
    text = (GUIDE / "migrate_from_trl.md").read_text(encoding="utf-8")
    row = re.search(r"^\| (`missing_eos_penalty`.*?) \| the same \|", text, re.M).group(1)
    known = hf_rlx.PPOConfig.__dataclass_fields__.keys() | ppo_config.RENAMED.keys()
    assert set(re.findall(r"`(\w+)`", row)) <= known


@pytest.mark.parametrize("path", sorted((ROOT / "examples/configs/accelerate").glob("*.yaml")), ids=lambda p: p.stem)
def test_accelerate_reads_the_file(path):
    """Every key is one that accelerate's own configuration has; FSDP is version 2, the only one that is carried."""
    from accelerate.commands.config.config_args import ClusterConfig

    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    config = ClusterConfig.from_yaml_file(str(path))
    assert set(values) <= set(vars(config)) | {"compute_environment"}
    assert config.num_processes == 2
    assert values.get("fsdp_config", {"fsdp_version": 2})["fsdp_version"] == 2
