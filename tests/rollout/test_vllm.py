"""VllmGenerator against a stand-in for `vllm` and for TRL's engine: what is passed, when, and how answers map."""

import builtins
import inspect
import math
import sys
import types

import pytest

from hf_rlx.models.shared import SharedModel
from hf_rlx.rollout.sampling import SamplingParams
from hf_rlx.rollout.vllm import VllmGenerator
from tests import tiny


class FakeEngine:
    """Records every call; answers each request with prepared ids and log-probs."""

    answers: tuple = ([], [])

    def __init__(self, **kwargs):
        self.options = kwargs
        self.calls = []
        for name, value in kwargs.items():
            setattr(self, name, value)

    def sync_weights(self):
        self.calls.append("sync")

    def generate(self, prompts, images, num_generations, profiler=None):
        self.calls.append(("generate", prompts, images, num_generations, self.temperature, self.max_completion_length))
        ids, logps = self.answers
        return prompts, ids, logps, None


@pytest.fixture
def engine(monkeypatch):
    trl_module = types.ModuleType("trl.generation.vllm_generation")
    trl_module.VLLMGeneration = FakeEngine
    generation = types.ModuleType("trl.generation")
    generation.vllm_generation = trl_module
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "trl.generation", generation)
    monkeypatch.setitem(sys.modules, "trl.generation.vllm_generation", trl_module)
    monkeypatch.setattr(FakeEngine, "answers", ([], []))
    return FakeEngine


def make(params=None, **options):
    model = SharedModel.build(tiny.causal_lm(), tiny.lora())
    params = params or SamplingParams(4, temperature=0.7, top_k=5, stop_strings=("t9",))
    return VllmGenerator(
        model, tiny.word_tokenizer(), "the accelerator", params, {"mode": "server", **options}
    ), params


def test_construction(engine):
    generator, _ = make(server_port=8001)
    options = generator.engine.options
    assert options.pop("model").__class__.__name__ == "PeftModel"  # without our heads, which vLLM does not know
    assert options.pop("processing_class") is generator.tokenizer
    assert options == {
        "accelerator": "the accelerator",
        "mode": "server",
        "server_port": 8001,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 5,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_completion_length": 4,
        "logprobs": 0,
        "generation_kwargs": {"stop": ["t9"]},
    }


def test_the_real_class_has_these_parameters(monkeypatch):
    """The stand-in proves nothing about names, so TRL's signature is read, which works without vLLM."""
    real = pytest.importorskip("trl.generation.vllm_generation").VLLMGeneration
    known = set(inspect.signature(real.__init__).parameters)
    assert {
        "model",
        "accelerator",
        "processing_class",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "max_completion_length",
        "logprobs",
        "generation_kwargs",
        "mode",
    } <= known
    assert list(inspect.signature(real.generate).parameters)[1:4] == ["prompts", "images", "num_generations"]


def test_weights_go_first_and_answers_map(engine):
    """Two prompts, K = 2, limit 4. Ends: EOS (2); cut at 4 without an end; shorter than the limit without EOS (vLLM
    strips it for some stops), finished; the stop string t9 exactly at the limit, finished."""
    generator, params = make()
    engine.answers = (
        [[5, 2], [5, 6, 7, 8], [7], [5, 6, 7, 9]],
        [[[-1.0], [-0.5]], [[-1.0], [None], [-2.0], [-3.0]], [[]], [[-1.0], [-1.0], [-1.0], [-4.0]]],
    )
    groups, steps = [], []
    result = generator.generate(
        [[3], [4, 4]], 2, params, lambda index, completions: groups.append((index, completions)), steps.append
    )
    assert generator.engine.calls == ["sync", ("generate", [[3], [3], [4, 4], [4, 4]], None, 2, 0.7, 4)]
    flat = [c for group in result for c in group]
    assert [c.token_ids for c in flat] == engine.answers[0]
    assert [c.finished for c in flat] == [True, False, True, True]
    assert [c.text for c in flat] == ["t5", "t5 t6 t7 t8", "t7", "t5 t6 t7 t9"]
    assert flat[0].logps == [-1.0, -0.5]
    assert flat[1].logps[0] == -1.0
    assert math.isnan(flat[1].logps[1])
    assert math.isnan(flat[2].logps[0])
    assert [index for index, _ in groups] == [0, 1]
    assert all(completions is result[index] for index, completions in groups)
    assert steps == [6, 5]


def test_every_rollout_pushes_the_weights(engine):
    generator, params = make()
    for _ in range(3):
        generator.generate([], 2, params)
    assert [c for c in generator.engine.calls if c == "sync"] == ["sync"] * 3


def test_each_call_has_its_own_settings(engine):
    """Evaluation is greedy and longer; the next training rollout is as before."""
    generator, params = make()
    generator.generate([], 1, SamplingParams(9, temperature=0.0, min_p=0.2))
    assert generator.engine.min_p == 0.2
    assert generator.engine.generation_kwargs == {}
    generator.generate([], 1, params)
    assert [c[4:] for c in generator.engine.calls if c != "sync"] == [(0.0, 9), (0.7, 4)]
    assert generator.engine.generation_kwargs == {"stop": ["t9"]}


@pytest.mark.parametrize("missing", ["vllm", "trl.generation.vllm_generation"])
def test_a_missing_package_names_the_ways_out(engine, monkeypatch, missing):
    monkeypatch.delitem(sys.modules, missing)
    real = builtins.__import__

    def absent(name, *args, **kwargs):
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ImportError, match=r"pip install vllm trl.*use_vllm=False"):
        make()
