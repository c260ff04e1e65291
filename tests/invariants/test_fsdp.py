"""FSDP2 over two gloo processes gives the step of one process, its files, and its resume; and refuses by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from peft.utils import load_peft_weights
from safetensors.torch import load_file

from hf_rlx.models.sharding import full_optimizer_state, full_state, load_full_optimizer_state, whole_weights
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.fsdp import check_fsdp
from tests.invariants.ranks import ends_of_logs, gap, run_both, seen_by_both
from tests.invariants.two_processes_fsdp import CASES, train
from tests.trainers.tools import lora, tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where both processes have written."""
    folder = tmp_path_factory.mktemp("fsdp")
    codes = run_both("two_processes_fsdp.py", folder, limit=120)
    assert codes == [0, 0], ends_of_logs(folder)
    return folder


@pytest.fixture(scope="module")
def both(folder):
    """What each process saw."""
    return seen_by_both(folder)


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_two_processes_is_the_step_of_one(both, tmp_path, case):
    """Weights within 1e-5, and what is logged: gradient norm, KL and evaluation included."""
    one = train(case, tmp_path, 1)
    assert not one["sharded"]
    for result in both:
        assert result[case]["sharded"]
        assert result[case]["packed"] == one["packed"] == ("padded" not in case)
        assert result[case]["eval"]["eval_reward"] == pytest.approx(one["eval"]["eval_reward"], abs=1e-6)
    assert gap(both[0][case]["weights"], one["weights"]) < 1e-5
    assert both[1][case]["weights"] == {}
    assert both[0][case]["log"] == both[1][case]["log"]
    for ours, whole in zip(both[0][case]["log"], one["log"], strict=True):
        for name in ("loss", "grad_norm", "kl", "reward", "num_tokens"):
            assert (name in ours) == (name in whole), name
            assert ours.get(name, 0) == pytest.approx(whole.get(name, 0), rel=1e-4, abs=1e-6), name


def test_a_step_moves_the_weights_that_train_and_no_others(both):
    """Adapters by more than the tolerance of the test above; under an adapter the base not by a bit."""
    start = {name: p.detach() for name, p in SharedModel.build(tiny_llama(), lora()).named_parameters()}
    moved = {n: float((w - start[n]).abs().max()) for n, w in both[0]["lora"]["weights"].items() if n in start}
    assert all(size == 0 for name, size in moved.items() if "lora_" not in name)
    step, still = both[0]["lora"]["weights"], both[0]["lora, all flat"]["weights"]
    assert max(float((step[n] - still[n]).abs().max()) for n in step if "lora_" in n) > 1e-3


def test_rollouts_of_different_lengths_are_those_of_ddp(both):
    """The seeds are by process, so DDP on two processes says the same."""
    assert gap(both[0]["sampled"]["weights"], both[0]["sampled, ddp"]["weights"]) < 1e-5
    ours, theirs = both[0]["sampled"]["log"], both[0]["sampled, ddp"]["log"]
    assert [e.get("reward") for e in ours] == [e.get("reward") for e in theirs]


@pytest.mark.parametrize("case", ["lora", "full, tied"])
def test_resume_is_exact_and_files_hold_whole_tensors(both, folder, case):
    """To the bit; the checkpoint and `save_model` are what one process writes."""
    result = both[0][f"resumed {case}"]
    assert gap(result["first"][0], result["again"][0]) == 0
    assert result["first"][1] == result["again"][1]
    saved = folder / f"run {case}" / "saved"
    if case.startswith("full"):
        model = SharedModel.from_pretrained(saved)
        assert "lm_head.weight" not in load_file(saved / "model.safetensors")  # the embedding's second name
    else:
        model = SharedModel.from_pretrained(saved, base=tiny_llama())
        assert all(value.device.type == "cpu" for value in load_peft_weights(str(saved), device="cpu").values())
    assert gap(full_state(model), result["first"][0]) == 0
    optimizer = load_file(folder / f"run {case}" / "checkpoint-4" / "optimizer.safetensors")
    sizes = sorted(t.numel() for s in result["optimizer"]["state"].values() for t in s.values())
    assert sorted(t.numel() for t in optimizer.values()) == sizes


@pytest.mark.parametrize("case", ["lora", "full, tied"])
def test_whole_weights_go_back_in(both, case):
    """Every entry, also of weights whose rows do not divide by two (the vocabulary has 101)."""
    result = both[0][f"resumed {case}"]
    assert gap(result["put back"], {n: w + 1 for n, w in result["first"][0].items()}) == 0


def test_a_share_that_is_not_finite_stops_both(both):
    """Rank 1 holds it, and says which weight; rank 0 hears of it."""
    assert both[1]["nan"].startswith("NonFiniteError: after step 1: ")
    assert "embed_tokens.weight" in both[1]["nan"]
    assert both[0]["nan"].startswith("ProcessError: rank 1: NonFiniteError: after step 1: ")


def test_bfloat16_computes_in_it_and_keeps_float32_weights(both):
    """Nothing is learned in the first step but by the reward: the KL to the same weights is 0 to the bit. The sampler
    runs in bfloat16 as well, so its log-probs are the trainer's up to the rounding of other shapes."""
    first, second = both[0]["half"]["log"][:2]
    assert both[0]["half"]["types"] == {torch.float32}
    assert first["kl"] == 0 < second["kl"]
    assert first["sampling/sampling_logp_difference/mean"] < 0.05
    assert both[1]["half"]["log"] == both[0]["half"]["log"]


def test_weights_are_whole_inside_the_block_only(both):
    """101 rows split in 51 and 50, everything else in halves: 32 entries apart."""
    first, second = both[0]["gathered"], both[1]["gathered"]
    for result in (first, second):
        assert result["before"] == result["after"] < result["inside"]
    assert first["inside"] == second["inside"] == first["before"] + second["before"]


def test_weights_that_one_process_does_not_use_are_reduced_all_the_same(both):
    """Each layer has a gradient of 1 on one process and none on the other: the average is 0.5 on both."""
    for result in both:
        assert all(torch.equal(gradient, torch.full((2, 2), 0.5)) for gradient in result["forked"])


def test_without_fsdp_the_functions_are_the_plain_ones():
    """State by name, optimizer too; the block is nothing."""
    model = SharedModel.build(tiny_llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with whole_weights(model):
        sum(p.square().sum() for p in model.parameters()).backward()
    optimizer.step()
    state = full_optimizer_state(model, optimizer)
    names = {name for name, _ in model.named_parameters()}
    assert state["state"].keys() == full_state(model).keys() == names
    other = SharedModel.build(tiny_llama())
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    load_full_optimizer_state(other, fresh, state)
    back = full_optimizer_state(other, fresh)
    for name in names:
        assert all(torch.equal(back["state"][name][key], value) for key, value in state["state"][name].items())
    assert back["param_groups"][0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"fsdp_version": 1}, "FSDP1 is not carried; use FSDP2"),
        ({"cpu_offload": True}, "cpu_offload=.* not carried"),
        ({"cpu_ram_efficient_loading": True}, "cpu_ram_efficient_loading=True .* every process copies its reference"),
        ({"activation_checkpointing": True}, "use the field gradient_checkpointing"),
        ({"state_dict_type": "SHARDED_STATE_DICT"}, "use FULL_STATE_DICT"),
        ({"mixed_precision": "fp16"}, "fp16 under FSDP"),
        ({"use_vllm": True}, "use_vllm=True under FSDP"),
        ({"torch_compile": True}, "torch_compile under FSDP"),
        ({"quantised": True}, "a quantised base under FSDP"),
    ],
)
def test_what_is_not_carried_is_refused_by_name(monkeypatch, changes, text):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    outside = {name: changes.pop(name, None) for name in ("mixed_precision", "quantised")}
    switches = {name: changes.pop(name, False) for name in ("use_vllm", "torch_compile")}
    plugin = FullyShardedDataParallelPlugin(**{"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT", **changes})
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision=outside["mixed_precision"] or "no"
    )
    shared = SimpleNamespace(quantization_method="bitsandbytes" if outside["quantised"] else None)
    args = SimpleNamespace(**switches)
    with pytest.raises(ValueError, match=text):
        check_fsdp(accelerator, shared, args)
