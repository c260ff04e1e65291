"""Every golden case, in float64 and in float32, values and gradients.

The numbers come from a slow reference checked by central differences, 50-digit arithmetic and the papers' code.
Null in `expected` is NaN; float32 skips the cases whose numbers do not fit it.
"""

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
CASES: dict[str, list[dict[str, Any]]] = json.loads((HERE / "golden.json").read_text())


def _load_adapters() -> Any:
    # pytest's importlib mode does not put this folder on the path.
    spec = importlib.util.spec_from_file_location("golden_adapters", HERE / "adapters.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


adapters = _load_adapters()


def _plain(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return _plain(x.tolist())
    if isinstance(x, list | tuple):
        return [_plain(y) for y in x]
    return {k: _plain(v) for k, v in x.items()} if isinstance(x, dict) else x


def assert_matches(actual: Any, expected: Any, rtol: float, atol: float, where: str) -> None:
    """Compare decoded JSON: same structure, NaN equals NaN (null), text and truth values exactly."""
    if isinstance(expected, dict):
        assert set(actual) == set(expected), f"{where}: fields {sorted(actual)}, expected {sorted(expected)}"
        for key in expected:
            assert_matches(actual[key], expected[key], rtol, atol, f"{where}.{key}")
    elif isinstance(expected, list):
        assert isinstance(actual, list), f"{where}: {actual!r}"
        assert len(actual) == len(expected), f"{where}: {len(actual)} entries, expected {len(expected)}"
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_matches(a, e, rtol, atol, f"{where}[{i}]")
    elif expected is None:
        assert actual is None or math.isnan(actual), f"{where}: {actual!r}, expected NaN"
    elif expected in ("Infinity", "-Infinity"):
        assert actual == float(expected), f"{where}: {actual!r}, expected {expected}"
    elif isinstance(expected, bool | str):
        assert actual == expected, f"{where}: {actual!r}, expected {expected!r}"
    else:
        close = math.isclose(actual, expected, rel_tol=0.0, abs_tol=atol + rtol * abs(expected))
        assert close, f"{where}: {actual!r}, expected {expected!r}"


def _parameters(skip_fp64_only: bool) -> list[Any]:
    return [
        pytest.param(name, case, id=f"{name}-{i}")
        for name, cases in CASES.items()
        for i, case in enumerate(cases)
        if not (skip_fp64_only and case.get("fp64_only"))
    ]


def test_every_name_has_an_adapter() -> None:
    assert set(adapters.ADAPTERS) == set(CASES)


@pytest.mark.parametrize(("name", "case"), _parameters(skip_fp64_only=False))
def test_float64(name: str, case: dict[str, Any]) -> None:
    actual = _plain(adapters.ADAPTERS[name](case["inputs"], case["settings"]))
    assert_matches(actual, case["expected"], rtol=1e-9, atol=1e-12, where=name)


@pytest.mark.parametrize(("name", "case"), _parameters(skip_fp64_only=True))
def test_float32(name: str, case: dict[str, Any]) -> None:
    with adapters.use_dtype(torch.float32):
        actual = _plain(adapters.ADAPTERS[name](case["inputs"], case["settings"]))
    assert_matches(actual, case["expected"], rtol=1e-3, atol=1e-4, where=name)


def _poison(x: Any, mask: list[list[int]]) -> Any:
    """Put NaN (null) wherever the mask is 0; also into every entry of a vector below such a position."""

    def nan(y: Any) -> Any:
        return [nan(z) for z in y] if isinstance(y, list) else None

    return [
        [y if m else nan(y) for y, m in zip(row, row_mask, strict=True)] for row, row_mask in zip(x, mask, strict=True)
    ]


def _is_matrix_like(x: Any, mask: list[list[int]]) -> bool:
    return isinstance(x, list) and all(
        isinstance(row, list) and len(row) == len(row_mask) for row, row_mask in zip(x, mask, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "case"), [p for p in _parameters(skip_fp64_only=False) if "mask" in p.values[1]["inputs"]]
)
def test_nan_under_the_mask_changes_nothing(name: str, case: dict[str, Any]) -> None:
    mask = case["inputs"]["mask"]
    inputs = {
        key: _poison(x, mask) if key != "mask" and _is_matrix_like(x, mask) else x for key, x in case["inputs"].items()
    }
    actual = _plain(adapters.ADAPTERS[name](inputs, case["settings"]))
    assert_matches(actual, case["expected"], rtol=1e-9, atol=1e-12, where=name)
