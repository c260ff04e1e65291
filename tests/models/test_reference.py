"""The reference: right at step 0, untouched while the policy moves, and synchronised on request."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_rlx.models.roles import POLICY, REFERENCE
from hf_rlx.models.shared import SharedModel
from tests import tiny

QV = ["q_proj", "v_proj"]


def logps(model):
    with torch.no_grad():
        return model(tiny.ragged_groups()).per_token_logps


def reference_logps(model):
    with model.as_role(REFERENCE):
        return logps(model)


def trained_adapter(**options):
    peft = get_peft_model(tiny.causal_lm(), tiny.lora(**options), adapter_name="sft")
    tiny.randomise_lora(peft)
    return SharedModel(peft)


def move(model):
    with torch.no_grad():
        for _, parameter in model.trainable_parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


MODELS = {
    "adapters_off": lambda: SharedModel.build(tiny.causal_lm(), tiny.lora()),
    "adapter_copy": trained_adapter,
    "model_copy": lambda: SharedModel.build(tiny.causal_lm()),
}


@pytest.mark.parametrize("kind", MODELS)
def test_step_zero_kl_is_exactly_zero_and_the_reference_stays(kind):
    """Row 2 of the reports: a policy that starts from an SFT adapter has that adapter as its reference (trl#1340)."""
    model = MODELS[kind]()
    start = logps(model)
    assert model.prepare_reference() == kind
    assert model.prepare_reference() == kind  # once is enough, twice is the same
    assert torch.equal(reference_logps(model), start)
    assert torch.equal(logps(model), start)
    move(model)
    assert torch.equal(reference_logps(model), start)
    assert (logps(model) - start).abs().max() > 1e-2


def test_adapters_off_is_the_base():
    base = SharedModel.build(tiny.causal_lm())
    model = MODELS["adapters_off"]()
    tiny.randomise_lora(model)
    model.roles[REFERENCE] = type(model.roles[POLICY])(None, trainable=False)
    assert torch.equal(reference_logps(model), logps(base))
    assert (logps(model) - logps(base)).abs().max() > 1e-2


def test_modules_to_save_are_off_too():
    """The policy trains a copy of the vocabulary matrix; with adapters off the original one answers (peft#493)."""
    base = logps(SharedModel.build(tiny.causal_lm()))
    model = SharedModel.build(tiny.causal_lm(), tiny.lora(modules_to_save=["lm_head"]))
    assert any("lm_head" in n for n, _ in model.trainable_parameters())
    assert model.prepare_reference() == "adapters_off"
    move(model)
    assert torch.equal(reference_logps(model), base)
    assert (logps(model) - base).abs().max() > 1e-2


def test_weights_outside_the_adapter_need_a_copy_of_the_model():
    """`bias="lora_only"` trains the base's own biases: with adapters off they would still be the trained ones."""
    model = SharedModel.build(tiny.causal_lm("qwen2"), tiny.lora(target_modules=QV, bias="lora_only"))
    start = logps(model)
    assert model.prepare_reference() == "model_copy"
    move(model)
    assert torch.equal(reference_logps(model), start)


def test_pissa_starts_at_zero_kl():
    """PiSSA moves the principal part of the base's weights into the adapter: off is not the start, a copy is."""
    model = SharedModel.build(tiny.causal_lm(), tiny.lora(init_lora_weights="pissa"))
    base = logps(SharedModel.build(tiny.causal_lm()))
    start = logps(model)
    torch.testing.assert_close(start, base, atol=1e-4, rtol=0)
    assert model.prepare_reference() == "adapter_copy"
    assert torch.equal(reference_logps(model), start)
    assert torch.equal(logps(model), start)


# --- synchronisation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adapter_copy", "model_copy"])
def test_sync_mixes_parameters(kind):
    """Reference 0, policy 1, alpha 0.6 -> 0.6 * 1 + 0.4 * 0 = 0.6; the base's weights stay (trl#3108)."""
    model = MODELS[kind]()
    model.prepare_reference()
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" not in n}
    if kind == "model_copy":
        reference, policy = list(model.frozen_copies[REFERENCE].parameters()), list(model.causal_lm.parameters())
    else:
        reference = [p for n, p in model.named_parameters() if ".reference." in n]
        policy = [p for n, p in model.named_parameters() if ".sft." in n]
    assert len(reference) == len(policy) > 0
    with torch.no_grad():
        for r, p in zip(reference, policy, strict=True):
            r.zero_()
            p.fill_(1.0)
    model.sync_reference(0.6)
    for r, p in zip(reference, policy, strict=True):
        torch.testing.assert_close(r, torch.full_like(r, 0.6))
        assert (p == 1).all()
    if kind == "adapter_copy":
        assert all(torch.equal(dict(model.named_parameters())[n], p) for n, p in frozen.items())


ADAPTERS = {
    "lora": {},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "modules_to_save": {"target_modules": QV, "modules_to_save": ["lm_head"]},
    "dora": {"target_modules": QV, "use_dora": True},
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_sync_of_a_reference_with_adapters_off(adapter):
    """It becomes an adapter first, which starts as "off" does: alpha 0 changes nothing, alpha 1 is the policy, and
    what was trainable before stays so."""
    model = SharedModel.build(tiny.causal_lm(), tiny.lora(**ADAPTERS[adapter]))
    start = logps(model)
    assert model.prepare_reference() == "adapters_off"
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    move(model)
    model.sync_reference(0.0)
    assert model.prepare_reference() == "adapter_copy"
    assert [n for n, p in model.named_parameters() if p.requires_grad] == trainable
    torch.testing.assert_close(reference_logps(model), start, atol=1e-5, rtol=0)
    model.sync_reference(1.0)
    torch.testing.assert_close(reference_logps(model), logps(model), atol=1e-5, rtol=0)
    assert (logps(model) - start).abs().max() > 1e-2


def test_half_way_between_off_and_the_policy():
    """Only B moves from 0, A is shared: after one sync with alpha the reference's product is alpha * B A exactly."""
    model = MODELS["adapters_off"]()
    model.prepare_reference()
    move(model)
    model.sync_reference(0.25)
    named = dict(model.named_parameters())
    pairs = [(n, n.replace(".policy.", ".reference.")) for n in named if "lora_B.policy" in n]
    assert pairs
    for policy, reference in pairs:
        a, a_reference = (n.replace("lora_B", "lora_A") for n in (policy, reference))
        torch.testing.assert_close(
            named[reference] @ named[a_reference], 0.25 * named[policy] @ named[a], atol=1e-6, rtol=1e-5
        )


# --- copies of the model ---------------------------------------------------------------------------------------------


def test_a_copied_reference_moves_with_the_model():
    """It is no parameter of the module (no optimizer sees it, it is not saved), but follows `.to`."""
    model = MODELS["model_copy"]()
    model.prepare_reference()
    names = {n for n, _ in model.named_parameters()}
    assert not any(REFERENCE in n for n in names)
    model.to(torch.float64)
    assert {p.dtype for p in model.frozen_copies[REFERENCE].parameters()} == {torch.float64}
    assert torch.equal(reference_logps(model), logps(model))
    assert not any(p.requires_grad for p in model.frozen_copies[REFERENCE].parameters())


def test_a_deep_copied_shared_model_is_independent():
    model = MODELS["adapters_off"]()
    model.prepare_reference()
    start = logps(model)
    other = copy.deepcopy(model)
    move(other)
    assert torch.equal(logps(model), start)
    assert torch.equal(reference_logps(other), start)
    assert (logps(other) - start).abs().max() > 1e-2


def test_reference_copy_of_rank_pattern_keeps_its_shapes():
    """Ranks that differ by layer are copied with the configuration."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=QV, rank_pattern={"q_proj": 2})
    peft = get_peft_model(tiny.causal_lm(), config, adapter_name="sft")
    tiny.randomise_lora(peft)
    model = SharedModel(peft)
    assert model.prepare_reference() == "adapter_copy"
    assert torch.equal(reference_logps(model), logps(model))
