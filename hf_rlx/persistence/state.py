"""Nested Python state as JSON beside safetensors: no pickle, so a checkpoint from a stranger runs no code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_TENSOR, _TUPLE, _PAIRS = "__tensor__", "__tuple__", "__pairs__"


def save_state(folder: Path, name: str, state: Any) -> None:
    """Write `state` as `<name>.json` and, where it holds tensors, `<name>.safetensors`.

    Args:
        state: None, bool, int, float (NaN and infinity included), str, Tensor, and lists, tuples and dictionaries of
            such; keys of a dictionary may be any plain value. Types come back exactly, tensors on the CPU.

    Raises:
        TypeError: a value of another type; the message says where it stands.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_encode(state, name, tensors), separators=(",", ":"))
    if tensors:
        save_file(tensors, folder / f"{name}.safetensors", metadata={"format": "pt"})
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def load_state(folder: Path, name: str) -> Any:
    """What `save_state` wrote.

    Raises:
        FileNotFoundError: there is no such state.
    """
    value = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    file = folder / f"{name}.safetensors"
    return _decode(value, load_file(file) if file.is_file() else {})


def size_of(state: Any) -> int:
    """Bytes of the tensors in a nested state."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(map(size_of, state.values()))
    return sum(map(size_of, state)) if isinstance(state, list | tuple) else 0


def _encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        key = f"t{len(tensors)}"
        # A copy of its own: safetensors refuses tensors that share memory, as the codes of 8-bit optimizers do.
        tensors[key] = value.detach().to("cpu", copy=True).contiguous()
        return {_TENSOR: key}
    if isinstance(value, list):
        return [_encode(v, f"{where}[{i}]", tensors) for i, v in enumerate(value)]
    if isinstance(value, tuple):
        return {_TUPLE: [_encode(v, f"{where}[{i}]", tensors) for i, v in enumerate(value)]}
    if isinstance(value, dict):
        if all(isinstance(k, str) and not k.startswith("__") for k in value):
            return {k: _encode(v, f"{where}.{k}", tensors) for k, v in value.items()}
        return {
            _PAIRS: [[_encode(k, where, tensors), _encode(v, f"{where}[{k!r}]", tensors)] for k, v in value.items()]
        }
    if isinstance(value, np.generic):
        return _encode(value.item(), where, tensors)
    if isinstance(value, torch.Size):
        return _encode(list(value), where, tensors)
    raise TypeError(f"{where} is a {type(value).__name__}, which a checkpoint cannot hold; make it numbers or tensors")


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TENSOR}:
        return tensors[value[_TENSOR]]
    if value.keys() == {_TUPLE}:
        return tuple(_decode(v, tensors) for v in value[_TUPLE])
    if value.keys() == {_PAIRS}:
        return {_decode(k, tensors): _decode(v, tensors) for k, v in value[_PAIRS]}
    return {k: _decode(v, tensors) for k, v in value.items()}
