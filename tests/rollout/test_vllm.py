"""VllmGenerator against a stand-in for `vllm` and for TRL's engine: what is passed, when, and how answers map."""

import builtins
import contextlib
import inspect
import math
import sys
import types

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer

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


ALONE = types.SimpleNamespace(num_processes=1)


def make(params=None, generation_kwargs=None, model=None, accelerator=ALONE, **options):
    model = model or SharedModel.build(tiny.causal_lm(), tiny.lora())
    params = params or SamplingParams(4, temperature=0.7, top_k=5, stop_strings=("t9",))
    options = {"mode": "server", **options}
    return VllmGenerator(model, tiny.word_tokenizer(), accelerator, params, options, generation_kwargs), params


def test_construction(engine):
    generator, _ = make(server_port=8001)
    options = generator.engine.options
    assert options.pop("model").__class__.__name__ == "PeftModel"  # without our heads, which vLLM does not know
    assert options.pop("processing_class") is generator.tokenizer
    assert options == {
        "accelerator": ALONE,
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


def syncs(generator) -> int:
    return generator.engine.calls.count("sync")


def test_every_rollout_pushes_the_weights(engine):
    """Unless somebody counts versions."""
    generator, params = make()
    for _ in range(3):
        generator.generate([], 2, params)
    assert syncs(generator) == 3


def test_the_weights_are_pushed_when_they_are_new(engine):
    """By version; and where a checkpoint was loaded at the same step."""
    generator, params = make()
    seen = []
    for version in (0, 0, 1, 1):
        generator.version = version
        generator.generate([], 2, params)
        seen.append(syncs(generator))
    assert seen == [1, 1, 2, 2]
    _, parameter = generator.model.trainable_parameters()[0]
    with torch.no_grad():
        parameter.add_(1.0)
    generator.generate([], 2, params)
    generator.generate([], 2, params)
    assert syncs(generator) == 3


def test_a_sleeping_engine_is_filled_every_time(engine):
    """It forgets its weights, and would fetch them by itself, without our guard over the base."""
    generator, params = make(mode="colocate", enable_sleep_mode=True)
    generator.version = 0
    for _ in range(2):
        generator.generate([], 2, params)
    assert syncs(generator) == 2


class MergingEngine(FakeEngine):
    """Pushes as TRL's client does: merge, read, unmerge; `fails` in between."""

    fails = False

    def sync_weights(self):
        super().sync_weights()
        self.model.merge_adapter()
        self.pushed = {n: p.detach().clone() for n, p in self.model.named_parameters() if "base_layer" in n}
        if self.fails:
            raise ConnectionError("server is gone")
        self.model.unmerge_adapter()


@pytest.mark.parametrize("fails", [False, True])
def test_the_base_stays_bit_identical(engine, monkeypatch, fails):
    """W + BA - BA is not W in float32: without the guard some bits differ, which the first half shows."""

    def made():
        torch.manual_seed(0)
        shared = SharedModel.build(tiny.causal_lm(), tiny.lora())
        with torch.no_grad():
            for _, parameter in shared.trainable_parameters():
                parameter.normal_()
        return shared, {n: p.detach().clone() for n, p in shared.named_parameters()}

    shared, before = made()
    shared.model.merge_adapter()
    shared.model.unmerge_adapter()
    assert any(not torch.equal(p, before[n]) for n, p in shared.named_parameters())

    monkeypatch.setattr(sys.modules["trl.generation.vllm_generation"], "VLLMGeneration", MergingEngine)
    shared, before = made()
    generator, params = make(model=shared)
    monkeypatch.setattr(MergingEngine, "fails", fails)
    with pytest.raises(ConnectionError) if fails else contextlib.nullcontext():
        generator.generate([], 2, params)
    assert all(torch.equal(p, before[n]) for n, p in shared.named_parameters())
    assert any(not torch.equal(p, before[f"model.{n}"]) for n, p in generator.engine.pushed.items())
    assert not any(m.merged for m in shared.modules() if isinstance(m, BaseTunerLayer))


def test_models_that_cannot_be_pushed_are_refused(engine):
    whole = tiny.lora()
    whole.modules_to_save = ["lm_head"]
    with pytest.raises(ValueError, match=r"trains whole modules.*lm_head.*use_vllm=False.*drop modules_to_save"):
        make(model=SharedModel.build(tiny.causal_lm(), whole))
    quantised = SharedModel.build(tiny.causal_lm(), tiny.lora())
    quantised.causal_lm.quantization_method = "bitsandbytes"
    with pytest.raises(ValueError, match=r"quantised base.*use_vllm=False.*bfloat16"):
        make(model=quantised)


def test_the_user_s_options_reach_the_engine(engine):
    """Stop strings and those of fields come with the settings of each call, so evaluation stays greedy."""
    generator, params = make(generation_kwargs={"bad_words": ["x"], "stop": "t9", "temperature": 0.7, "top_k": 5})
    assert generator.engine.generation_kwargs == {"bad_words": ["x"], "stop": ["t9"]}
    generator.generate([], 1, SamplingParams(9, temperature=0.0))
    assert generator.engine.generation_kwargs == {"bad_words": ["x"]}
    assert generator.engine.temperature == 0.0
    generator.generate([], 1, params)
    assert generator.engine.generation_kwargs == {"bad_words": ["x"], "stop": ["t9"]}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"temperature": 0.2}, r"say temperature=0.2, the configuration 0.7; set the configuration's field"),
        ({"max_tokens": 9}, r"say max_completion_length=9, the configuration 4"),
        ({"n": 2}, r"must not hold 'n': .* num_generations"),
        ({"seed": 1}, r"must not hold 'seed'"),
        ({"logprobs": 5}, r"must not hold 'logprobs'"),
    ],
)
def test_options_that_fight_are_refused(engine, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(generation_kwargs=kwargs)


@pytest.mark.parametrize(
    ("prompts", "asked"), [([[3], [4]], [[3], [4], [3]]), ([], [[2], [2], [2]]), ([[3], [4], [5]], [[3], [4], [5]])]
)
def test_processes_ask_for_equally_many(engine, monkeypatch, prompts, asked):
    """Another process has 3 prompts and new weights: this one fills up to 3, and takes part in the push."""
    generator, params = make(accelerator=types.SimpleNamespace(num_processes=2))
    told = []
    monkeypatch.setattr("hf_rlx.rollout.vllm.gather_object", lambda local: told.extend(local) or [*local, (3, True)])
    engine.answers = ([[5, 2]] * 3, [[[-1.0], [-1.0]]] * 3)
    generator.version = 0
    seen = []
    for _ in range(2):
        result = generator.generate(prompts, 1, params, lambda index, _: seen.append(index))
        assert len(result) == len(prompts)
    assert seen == [*range(len(prompts))] * 2
    assert told == [(len(prompts), True), (len(prompts), False)]
    assert generator.engine.calls == ["sync", ("generate", asked, None, 1, 0.7, 4)] * 2
    assert generator.collective


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
