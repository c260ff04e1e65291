"""Where the short forward of Llama-like decoders must not run: what names, short probes and evaluation do not show."""

from types import MethodType

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from hf_rlx.models.forward import hidden_states
from hf_rlx.models.lean_blocks import lean_hidden_states, lean_kept
from hf_rlx.models.packing import pack_groups
from hf_rlx.models.shared import SharedModel
from hf_rlx.types import Group
from tests import tiny


def of_class(class_name, **changes):
    """A tiny random model of a family, its weights eight times as wide as usual."""
    config = getattr(transformers, class_name)(**{**tiny._COMMON, "head_dim": 8, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model


def long_groups():
    """One prompt of 90 tokens with responses of 60 and 40."""
    prompt, *responses = tiny.tokens(90, 60, 40)
    return [Group.from_lists(prompt, responses)]


def runs_lean(model):
    return lean_hidden_states(model.causal_lm, pack_groups(tiny.ragged_groups(), lean=True)) is not None


@torch.no_grad()
def assert_true_numbers(model, groups):
    torch.testing.assert_close(
        model(groups).per_token_logps, tiny.naive(model.causal_lm, groups)[0], atol=1e-4, rtol=0
    )


# --- found out by the plan -------------------------------------------------------------------------------------------


def test_a_window_that_the_layers_ignore():
    """Llama's attention reads no window, whatever its configuration says; no token of the first row is 100 away from
    another one, 150 of the second are."""
    model = SharedModel.build(tiny.causal_lm("llama", sliding_window=100))
    assert_true_numbers(model, tiny.ragged_groups())
    assert not model.plan.lean
    assert_true_numbers(model, long_groups())


@pytest.mark.parametrize("window", [5, 100])
def test_mistral_hands_on_its_window(window):
    model = SharedModel.build(tiny.causal_lm("mistral", sliding_window=window))
    assert_true_numbers(model, tiny.ragged_groups())
    assert model.plan.lean
    assert_true_numbers(model, long_groups())


def test_scores_that_grow_far_from_the_start():
    """Ministral 3 multiplies its queries by 1 + 0.5 log(1 + floor(position / 80)): 1 up to position 79."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 80}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
    model = SharedModel.build(of_class("Ministral3Config", sliding_window=None, rope_parameters=rope))
    assert not runs_lean(model)
    assert_true_numbers(model, tiny.ragged_groups())
    assert_true_numbers(model, long_groups())


@pytest.mark.parametrize("first", [([3], [[]]), ([3] * 9, [[3] * 4])], ids=["one token", "one token again and again"])
def test_a_first_micro_batch_that_shows_nothing(first):
    """Without a rotation (SmolLM3) positions do not count; among equal tokens they do not either."""
    model = SharedModel.build(of_class("SmolLM3Config", no_rope_layers=[0, 0]))
    model([Group.from_lists(*first)])
    assert not model.plan.lean
    assert_true_numbers(model, long_groups())


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"lora_bias": True, "target_modules": ["q_proj"]}], ids=str)
def test_the_reference_of_an_adapter_that_has_no_short_forward(changes):
    """Granite is no Llama. With DoRA on, its own forward runs at the check; off, the layers look like plain ones."""
    model = SharedModel.build(tiny.causal_lm("granite", attention_bias=True), tiny.lora(**changes))
    model.prepare_reference()
    groups = tiny.ragged_groups()
    model(groups)
    with torch.no_grad(), model.as_role("reference"):
        logps = model(groups).per_token_logps
        truth = tiny.naive(model.causal_lm, groups)[0]
    torch.testing.assert_close(logps, truth, atol=1e-5, rtol=0)


# --- one arithmetic for policy and reference -------------------------------------------------------------------------


ADAPTERS = [
    {},
    {"use_dora": True},
    {"lora_bias": True, "target_modules": ["q_proj"]},
    {"lora_dropout": 0.1},
    {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "up_proj", "lm_head"]},
]


@pytest.mark.parametrize("changes", ADAPTERS, ids=str)
@pytest.mark.parametrize("size", [32, 128])
def test_kl_starts_at_exactly_zero(changes, size):
    """B starts at 0, so the policy is the reference; dropout in front of A = 0 B does not show either."""
    base = tiny.causal_lm(hidden_size=size, intermediate_size=160, attention_bias=True)
    model = SharedModel.build(base, tiny.lora(**changes))
    model.prepare_reference()
    model.train()
    groups = tiny.ragged_groups() + long_groups()
    policy = model(groups).per_token_logps
    with torch.no_grad(), model.as_role("reference"):
        assert torch.equal(model(groups).per_token_logps, policy.detach())


# --- found out at the call -------------------------------------------------------------------------------------------


def test_dropout_of_the_residuals_in_training():
    """SeedOss drops from what attention and feed-forward part add."""
    model = SharedModel.build(of_class("SeedOssConfig", attention_dropout=0.0, residual_dropout=0.5))
    assert runs_lean(model)
    model.train()
    assert not runs_lean(model)


@pytest.mark.parametrize(
    "name", ["", "layers.1", "layers.1.self_attn", "layers.1.mlp", "layers.1.input_layernorm", "norm"]
)
def test_a_forward_of_the_modules_own(name):
    model = SharedModel.build(tiny.causal_lm())
    module = model.causal_lm.model.get_submodule(name)
    module.forward = MethodType(type(module).forward, module)
    assert not runs_lean(model)


def test_a_hook_on_the_activation():
    model = SharedModel.build(tiny.causal_lm())
    model.causal_lm.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_: None)
    assert not runs_lean(model)


def test_no_estimate_of_what_does_not_run():
    assert lean_kept(SharedModel.build(tiny.causal_lm(), tiny.lora()).causal_lm) is not None
    assert lean_kept(SharedModel.build(tiny.causal_lm(), tiny.lora(use_dora=True)).causal_lm) is None


# --- backward --------------------------------------------------------------------------------------------------------


def test_a_backward_inside_autocast_of_a_forward_outside():
    """float32 went forward, so float32 goes back."""
    model = SharedModel.build(tiny.causal_lm(), tiny.lora())
    tiny.randomise_lora(model)
    found = []
    for autocast in (False, True):
        model.zero_grad()
        loss = tiny.weighted(hidden_states(model.causal_lm, pack_groups(tiny.ragged_groups(), lean=True)))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss.backward()
        found.append(tiny.gradients(model))
    tiny.assert_gradients_close(found[1], found[0], 1e-6)
