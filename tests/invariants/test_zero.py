"""DeepSpeed's ZeRO over two gloo processes gives the step of one process, its files, and its resume; and refuses by
name. The runs need DeepSpeed (the extra `deepspeed`) and a C++ compiler, with which it builds its own all-reduce."""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.zero import check_zero
from tests.invariants.ranks import ends_of_logs, gap, run_both, seen_by_both
from tests.invariants.two_processes_zero import CASES, ppo_steps, stage, train, two_trainers_of_one_model
from tests.trainers.tools import config, lora, scripted, tiny_llama

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where both processes have written."""
    folder = tmp_path_factory.mktemp("zero")
    codes = run_both("two_processes_zero.py", folder, limit=240)
    assert codes == [0, 0], ends_of_logs(folder)
    return folder


@pytest.fixture(scope="module")
def both(folder):
    """What each process saw."""
    return seen_by_both(folder)


def same_logs(ours, theirs, names) -> None:
    """Entry by entry, up to the order of sums."""
    for mine, other in zip(ours, theirs, strict=True):
        for name in names:
            assert (name in mine) == (name in other), name
            assert mine.get(name, 0) == pytest.approx(other.get(name, 0), rel=1e-4, abs=1e-6), name


@needs_deepspeed
@pytest.mark.parametrize("case", CASES)
def test_a_step_of_two_processes_is_the_step_of_one(both, tmp_path, case):
    """Weights within 1e-5, and what is logged: gradient norm, KL and evaluation included."""
    one = train(case, tmp_path, 1)
    assert not one["zero"]
    for result in both:
        assert result[case]["zero"]
        assert gap(result[case]["weights"], one["weights"]) < 1e-5
        assert result[case]["eval"]["eval_reward"] == pytest.approx(one["eval"]["eval_reward"], abs=1e-6)
        same_logs(result[case]["log"], one["log"], ("loss", "grad_norm", "kl", "reward", "num_tokens"))
    assert gap(both[0][case]["weights"], both[1][case]["weights"]) == 0


@needs_deepspeed
def test_a_step_moves_the_weights_that_train_and_no_others(both):
    """Adapters by more than the tolerance of the test above, where there is a signal; the base not by a bit."""
    start = {name: p.detach() for name, p in SharedModel.build(tiny_llama(), lora()).named_parameters()}
    moved = {n: float((w - start[n]).abs().max()) for n, w in both[0]["lora"]["weights"].items() if n in start}
    assert all(size == 0 for name, size in moved.items() if "lora_" not in name)
    step, still = both[0]["lora"]["weights"], both[0]["lora, all flat"]["weights"]
    assert max(float((step[n] - still[n]).abs().max()) for n in step if "lora_" in n) > 1e-3


@needs_deepspeed
@pytest.mark.parametrize("case", ["lora", "full"])
def test_resume_is_exact_and_a_trainer_trains_once(both, folder, case):
    """To the bit; the files are safetensors and JSON, and what is saved loads in one process."""
    for result in both:
        first, again = result[f"resumed {case}"]["first"], result[f"resumed {case}"]["again"]
        assert gap(first[0], again[0]) == 0
        assert first[1] == again[1]
        assert "make a new one" in result[f"resumed {case}"]["twice"]
    run = folder / f"run {case}"
    model = SharedModel.from_pretrained(run / "saved", base=None if case == "full" else tiny_llama())
    assert gap({n: p.detach() for n, p in model.named_parameters()}, both[0][f"resumed {case}"]["first"][0]) == 0
    files = {path.name for path in (run / "checkpoint-4").iterdir()}
    assert {"zero-0.safetensors", "zero-1.safetensors", "rank-0.json", "rank-1.json"} <= files
    assert not {name for name in files if name.startswith("optimizer") or name.endswith((".pt", ".bin"))}


@needs_deepspeed
@pytest.mark.parametrize(
    ("case", "alone"),
    [
        ("ppo", ppo_steps),
        ("ppo, early stop", partial(ppo_steps, target_kl=1e-7)),
        ("two trainers", two_trainers_of_one_model),
    ],
)
def test_other_trainers_step_as_one_process(both, tmp_path, case, alone):
    """PPO with its critic as a head; a reward role and then DPO, each with an engine of its own on one model."""
    one = alone(tmp_path, 1)
    for result in both:
        assert gap(result[case]["weights"], one["weights"]) < 1e-5
        same_logs(result[case]["log"], one["log"], ("loss", "grad_norm"))


@needs_deepspeed
def test_bfloat16_computes_in_it_and_keeps_float32_weights(both):
    """Nothing is learned in the first step but by the reward: the KL to the same weights is 0 to the bit."""
    first, second = both[0]["half"]["log"][:2]
    norm, whole = first["grad_norm"], both[0]["float"]["log"][0]["grad_norm"]
    assert 1e-5 < abs(norm / whole - 1) < 0.1  # 8 bits of mantissa
    assert both[0]["half"]["types"] == {torch.float32}
    assert first["kl"] == 0 < second["kl"]
    assert first["sampling/sampling_logp_difference/mean"] < 0.05
    assert both[1]["half"]["log"] == both[0]["half"]["log"]


@needs_deepspeed
def test_a_gradient_that_is_not_finite_is_dropped_on_both(both):
    """One such step is left out; the second in a row ends the run, with max_skipped_steps=1."""
    for result in both:
        assert result["not finite"]["once"] == {"finite": True, "skipped": [0, 1.0, 0]}
        assert result["not finite"]["always"].startswith("NonFiniteError: step 2: the gradient is not finite, 2 steps")


@needs_deepspeed
def test_a_critic_that_steps_by_itself_is_refused(both):
    adapter, warm_up = both[0]["refused"]
    assert "leave critic_adapter off" in adapter
    assert "critic_warmup_steps under DeepSpeed" in warm_up


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"zero_optimization": {"stage": 3}}, "ZeRO-3 is not carried; take a LoRA adapter with stage 2"),
        ({"zero_optimization": {"stage": 3}, "args": {"num_generations": 8}}, "ZeRO-3 .* take FSDP2.* fsdp=True"),
        ({"zero_optimization": {"stage": 0}}, "stage 0 splits nothing"),
        ({}, "stage 0 splits nothing"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"optimizer": {"type": "AdamW"}}, "own 'optimizer' is not carried; leave it out, and set optim"),
        ({"scheduler": {"type": "WarmupLR"}}, "own 'scheduler' is not carried"),
        ({"fp16": {"enabled": True}}, "fp16 under DeepSpeed"),
        ({"args": {"fp16": True}}, "fp16 under DeepSpeed"),
        ({"args": {"torch_compile": True}}, "torch_compile under DeepSpeed"),
        ({"args": {"use_vllm": True}}, "use_vllm=True under DeepSpeed"),
        ({"quantised": True}, "a quantised base under DeepSpeed"),
        ({"mismatches": ["- ds gradient_clipping=2 vs hf max_grad_norm=1"]}, 'max_grad_norm=1.*; say "auto" there'),
    ],
)
def test_what_is_not_carried_is_refused_by_name(settings, text):
    settings = {"zero_optimization": {"stage": 2}, **settings} if settings else {}
    given = {"fp16": False, "torch_compile": False, "use_vllm": False, **settings.pop("args", {})}
    found = SimpleNamespace(mismatches=settings.pop("mismatches", []))
    shared = SimpleNamespace(quantization_method="bitsandbytes" if settings.pop("quantised", False) else None)
    plugin = SimpleNamespace(deepspeed_config=settings)
    with pytest.raises(ValueError, match=text):
        check_zero(SimpleNamespace(deepspeed_plugin=plugin, hf_deepspeed_config=found, **given), shared)


@pytest.fixture
def own_environment():
    """Variables that accelerate sets for DeepSpeed do not reach processes that later tests start."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@needs_deepspeed
def test_without_a_launcher_it_is_refused(tmp_path, own_environment):
    with pytest.raises(ValueError, match="no launcher started this process: use `accelerate launch`"):
        scripted(config(tmp_path, deepspeed=stage(2)))


def test_without_the_package_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr("hf_rlx.trainers.config.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "hf_rlx\[deepspeed\]"'):
        config(tmp_path, deepspeed={"zero_optimization": {"stage": 2}})


def test_without_deepspeed_nothing_is_checked():
    assert check_zero(SimpleNamespace(deepspeed_plugin=None)) is None
