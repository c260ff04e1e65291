"""State on disk comes back exactly, and nothing but plain values gets there."""

from __future__ import annotations

import json
import math
import random
import warnings

import numpy as np
import pytest
import torch

from hf_rlx.persistence import random_states
from hf_rlx.persistence.state import load_state, save_state, size_of


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)) if a.is_floating_point() else torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b or (math.isnan(a) and math.isnan(b))


STATE = {
    "numbers": [1, -2.5, 0.1 + 0.2, float("inf"), float("nan"), True, None, "text \U0001f600 \udc00 {}"],
    "tuple": (1, (2, [3])),
    "keys": {0: "zero", (1, "a"): 2, None: 3},
    "reserved": {"__tensor__": "not one"},
    "tensors": [
        torch.tensor([1.5, float("nan")]),
        torch.tensor(3, dtype=torch.int64),
        torch.zeros(0, 4, dtype=torch.bfloat16),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor([True, False]),
        torch.tensor([0, 255], dtype=torch.uint8),
    ],
}


def test_everything_comes_back_with_its_type(tmp_path):
    save_state(tmp_path, "x", STATE)
    same(load_state(tmp_path, "x"), STATE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.json", "x.safetensors"]


def test_tensors_that_share_memory_are_kept_apart(tmp_path):
    """As the codes of 8-bit optimizers do; safetensors alone refuses them."""
    code = torch.arange(4.0)
    save_state(tmp_path, "x", {"a": code, "b": code, "c": code[1:]})
    same(load_state(tmp_path, "x"), {"a": code, "b": code, "c": code[1:]})
    assert size_of({"a": code, "b": [code[1:]]}) == 28


def test_without_tensors_there_is_one_file(tmp_path):
    save_state(tmp_path, "x", [1])
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    assert load_state(tmp_path, "x") == [1]


@pytest.mark.parametrize("value", [{1, 2}, object(), b"bytes", len])
def test_other_types_are_refused_by_place(tmp_path, value):
    with pytest.raises(TypeError, match=rf"opt.state\[3\] is a {type(value).__name__}"):
        save_state(tmp_path, "opt", {"state": [0, 1, 2, value]})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1),
    ],
)
def test_optimizers_go_on_as_they_were(tmp_path, make):
    """Two steps, save, two more; and the same from what was saved: the same weights."""

    def steps(optimizer, weight, count):
        for i in range(count):
            weight.grad = torch.full_like(weight, 0.1 * (i + 1)) * weight.detach().sign()
            optimizer.step()

    weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))
    optimizer = make([weight])
    steps(optimizer, weight, 2)
    save_state(tmp_path, "optimizer", optimizer.state_dict())
    copy = torch.nn.Parameter(weight.detach().clone())
    other = make([copy])
    other.load_state_dict(load_state(tmp_path, "optimizer"))
    steps(optimizer, weight, 2)
    steps(other, copy, 2)
    assert torch.equal(weight, copy)


def test_eight_bit_optimizers_go_on_as_they_were(tmp_path):
    """bitsandbytes keeps uint8 moments and their codes; on a CPU their kernels may be missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bnb = pytest.importorskip("bitsandbytes")
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 8192).reshape(2, -1))
    optimizer = bnb.optim.AdamW8bit([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    try:
        optimizer.step()
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"bitsandbytes has no CPU kernel: {error}")
    save_state(tmp_path, "optimizer", optimizer.state_dict())
    copy = torch.nn.Parameter(weight.detach().clone())
    other = bnb.optim.AdamW8bit([copy], lr=0.1)
    other.load_state_dict(load_state(tmp_path, "optimizer"))
    for w, o in ((weight, optimizer), (copy, other)):
        w.grad = torch.full_like(w, 0.5)
        o.step()
    assert torch.equal(weight, copy)


def test_random_states_come_back(tmp_path):
    """Python, NumPy (with its spare normal number) and torch draw the same again, through the files."""
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    np.random.randn()  # leaves a cached second number
    random.gauss(0, 1)
    save_state(tmp_path, "rng", random_states.capture())

    def draw():
        return random.random(), random.gauss(0, 1), np.random.randn(3).tolist(), torch.rand(3).tolist()

    first = draw()
    assert draw() != first
    random_states.restore(load_state(tmp_path, "rng"))
    assert draw() == first


def test_another_number_of_gpus_is_told():
    state = {**random_states.capture(), "cuda": [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)}
    with pytest.raises(ValueError, match="resume on the same number"):
        random_states.restore(state)


def test_the_files_are_what_they_say(tmp_path):
    """JSON that any reader understands, no code: a hostile checkpoint can at most have wrong numbers."""
    save_state(tmp_path, "x", {"a": torch.ones(2)})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": {"__tensor__": "t0"}}
