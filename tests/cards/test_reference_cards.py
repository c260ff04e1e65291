"""The cards of the reference runs are cards that the Hub would take."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, ModelCardData, metadata_load

CARDS = sorted((Path(__file__).resolve().parents[2] / "model_cards").glob("*/README.md"))


def test_there_are_reference_cards():
    assert CARDS


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.parent.name)
def test_a_reference_card_is_valid(path: Path):
    data = metadata_load(path)
    assert ModelCardData(**data, ignore_metadata_errors=False).to_dict() == data
    text = ModelCard.load(path).text
    assert {"hf_rlx", "library_name"} <= {*data["tags"], *data.keys()}
    assert "base_model" in data or "for `tiny_arith`" in text  # the bundled model is not on the Hub
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert [name for name in images if not (path.parent / name).is_file()] == []
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(code, str(path), "exec")
    for result in ModelCard.load(path).data.eval_results or []:
        shown = [float(number) for number in re.findall(r"(?<![\w.])-?\d+\.\d+(?![\w.])", text)]
        assert any(abs(number - result.metric_value) <= 5e-4 for number in shown), result
