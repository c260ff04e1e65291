"""The short forward of Llama-like decoders: the model's own numbers and gradients, for less memory, or not at all."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_rlx.models import lean_blocks
from hf_rlx.models.fast_linear import Product, tensors_of
from hf_rlx.models.forward import hidden_states
from hf_rlx.models.lean_blocks import Norm, lean_hidden_states
from hf_rlx.models.packing import pack_groups, pad_groups
from hf_rlx.models.shared import SharedModel
from hf_rlx.types import Group
from tests import tiny

LEAN = ["llama", "qwen2", "qwen3", "mistral", "mistral_window"]
OTHERS = ["gemma", "gemma3_text", "gpt2", "phi", "phi3", "opt", "cohere", "gpt_neox", "olmo2", "qwen3_moe"]


def shared(family="llama", lora=None, **changes):
    """A tiny model with an adapter that does something, its layers ready for packed rows."""
    targets = ["q_proj", "v_proj"] if "moe" in family else "all-linear"
    config = lora or tiny.lora(fan_in_fan_out=family == "gpt2", target_modules=targets)
    model = SharedModel.build(tiny.causal_lm(family, **changes), config)
    tiny.randomise_lora(model)
    return model


def batch(lean=True, groups=None):
    return pack_groups(groups or tiny.ragged_groups(), lean=lean)


def results(model, lean, at=None):
    """Hidden states, and the gradients of a loss that weighs every number differently."""
    model.zero_grad()
    hidden = hidden_states(model.causal_lm, batch(lean), at)
    tiny.weighted(hidden).backward()
    return hidden.detach(), tiny.gradients(model)


# --- the functions ---------------------------------------------------------------------------------------------------


def matrices(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [matrix.requires_grad_() for matrix in made]


def product(inputs, outputs, seed, bias=False, rank=2):
    weight, a, b, beta = matrices((outputs, inputs), (rank, inputs), (outputs, rank), (outputs,), seed=seed)
    return Product(weight, beta if bias else None, a, b, 1.5)


def rebuilt(products, tensors):
    """The products with `tensors`, four each, for their own."""
    return tuple(
        p._replace(**dict(zip(p._fields, tensors[4 * i : 4 * i + 4], strict=False))) for i, p in enumerate(products)
    )


def differentiated(function, *inputs):
    assert torch.autograd.gradcheck(function, inputs, atol=1e-7)


def test_gradient_of_normed_products():
    """Finite differences in float64: of the input, the norm's weight, and each product's W, bias, A and B."""
    products = (product(6, 4, 1, bias=True), product(6, 3, 2))

    def run(hidden, weight, *tensors):
        made = rebuilt(products, tensors)
        return lean_blocks._NormedProducts.apply(hidden, weight, Norm(weight, 1e-3), made, *tensors)

    differentiated(run, *matrices((5, 6), (6,)), *tensors_of(products))


def test_gradient_of_an_added_product():
    products = (product(4, 6, 3, bias=True),)

    def run(x, hidden, *tensors):
        return lean_blocks._AddedProduct.apply(x, hidden, *rebuilt(products, tensors), *tensors)

    differentiated(run, *matrices((5, 4), (5, 6)), *tensors_of(products))


def test_gradient_of_the_feed_forward_part():
    products = (product(6, 7, 1), product(6, 7, 2, bias=True), product(7, 6, 3))

    def run(hidden, weight, *tensors):
        made = rebuilt(products, tensors)
        return lean_blocks._FeedForward.apply(hidden, weight, Norm(weight, 1e-3), made, *tensors)

    differentiated(run, *matrices((5, 6), (6,)), *tensors_of(products))


def test_gradient_of_the_rotation():
    x, cos, sin = matrices((5, 2, 4), (5, 1, 4), (5, 1, 4))
    differentiated(lambda x: lean_blocks._Rotate.apply(x, cos.detach(), sin.detach()), x)


def test_rotation_by_a_right_angle():
    """D = 2 and an angle of 90 degrees: (x, y) -> (-y, x), as complex numbers i (x + iy). sin comes as (-1, 1)."""
    turned = lean_blocks._Rotate.apply(
        torch.tensor([[[3.0, 5.0]]]), torch.zeros(1, 1, 2), torch.tensor([[[-1.0, 1.0]]])
    )
    assert turned.tolist() == [[[-5.0, 3.0]]]


def test_norm_by_hand():
    """x = (3, 4), eps = 0, w = (2, 1): the mean square is 12.5, so y = (6, 4) / sqrt(12.5)."""
    made = Norm(torch.tensor([2.0, 1.0]), 0.0).forward(torch.tensor([[3.0, 4.0]]))
    torch.testing.assert_close(made, torch.tensor([[6.0, 4.0]]) / 12.5**0.5)


# --- the whole -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", LEAN)
def test_equals_the_models_own_forward_with_gradients(family):
    model = shared(family)
    assert lean_hidden_states(model.causal_lm, batch()) is not None
    (own, own_grads), (lean, lean_grads) = results(model, False), results(model, True)
    torch.testing.assert_close(lean, own, atol=2e-5, rtol=1e-5)
    tiny.assert_gradients_close(lean_grads, own_grads, 2e-5)


@pytest.mark.parametrize("targets", [["q_proj"], ["v_proj", "down_proj"], ["gate_proj", "o_proj"]], ids="-".join)
def test_layers_without_an_adapter(targets):
    model = shared(lora=tiny.lora(target_modules=targets))
    (own, own_grads), (lean, lean_grads) = results(model, False), results(model, True)
    torch.testing.assert_close(lean, own, atol=2e-5, rtol=1e-5)
    tiny.assert_gradients_close(lean_grads, own_grads, 2e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_full_weights(family):
    """Without an adapter: base weights, biases, norms and embeddings have the gradients of the model's own forward."""
    model = SharedModel.build(tiny.causal_lm(family))
    assert lean_hidden_states(model.causal_lm, batch()) is not None
    (own, own_grads), (lean, lean_grads) = results(model, False), results(model, True)
    torch.testing.assert_close(lean, own, atol=2e-5, rtol=1e-5)
    assert any("input_layernorm" in name for name in own_grads)
    assert any("embed" in name for name in own_grads)
    tiny.assert_gradients_close(lean_grads, own_grads, 2e-5)


def test_adapters_off():
    model = shared()
    model.prepare_reference()
    with torch.no_grad(), model.as_role("reference"):
        lean = lean_hidden_states(model.causal_lm, batch())
        torch.testing.assert_close(lean, hidden_states(model.causal_lm, batch(False)), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("lean", [True, False])
def test_chosen_rows(lean):
    """Rows in any order and twice, as the prompt's last token predicts every response's first one."""
    model, at = shared(), torch.tensor([7, 3, 7, 0])
    whole, _ = results(model, lean)
    chosen, grads = results(model, lean, at)
    torch.testing.assert_close(chosen, whole[at], atol=1e-6, rtol=1e-6)
    model.zero_grad()
    tiny.weighted(hidden_states(model.causal_lm, batch(lean)).index_select(0, at)).backward()
    tiny.assert_gradients_close(grads, tiny.gradients(model), 1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    model = shared()
    _, expected = results(model, True)
    model.causal_lm.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.causal_lm.enable_input_require_grads()
    model.train()
    kept = kept_numbers(model, True)
    _, grads = results(model, True)
    tiny.assert_gradients_close(grads, expected, 1e-5)
    assert kept < kept_numbers(shared(), True) / 3


def kept_numbers(model, lean):
    """How many numbers one forward keeps for its backward, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = {}

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    long = [Group.from_lists(*(lambda a, b: (a, [b]))(*tiny.tokens(40, 60)))]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        alive = hidden_states(model.causal_lm, batch(lean, long))
    assert alive.requires_grad
    return sum(found.values())


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_counts_what_it_keeps(family):
    """100 tokens, also on the meta device: all but the rotation, the last norm and the padding of the kernel's."""
    model = shared(family)
    counted = lean_blocks.lean_kept(model.causal_lm)
    assert 100 * counted == pytest.approx(kept_numbers(model, True), rel=0.08)
    assert lean_blocks.lean_kept(model.to("meta").causal_lm) == counted
    assert lean_blocks.lean_kept(shared("gemma").causal_lm) is None
    assert lean_blocks.lean_kept(shared("granite").causal_lm) is None


def test_keeps_fewer_numbers():
    model = shared(intermediate_size=96)
    assert kept_numbers(model, True) < 2 / 3 * kept_numbers(model, False)


# --- and where not ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_run_their_own_forward(family):
    model = shared(family)
    assert lean_hidden_states(model.causal_lm, batch()) is None
    assert hidden_states(model.causal_lm, batch()).shape[1] == 32


def test_a_family_with_the_names_of_llama_and_another_arithmetic_is_found_out():
    """Granite scales its residuals, its embeddings and its scores: packed all the same, by its own forward."""
    model = shared("granite")
    groups = tiny.ragged_groups()
    lean = lean_hidden_states(model.causal_lm, batch())
    assert lean is not None
    assert (lean - hidden_states(model.causal_lm, batch(False))).abs().max() > 0.1
    logps = model(groups).per_token_logps
    assert (model.plan.packed, model.plan.chunked, model.plan.lean) == (True, True, False)
    torch.testing.assert_close(logps, tiny.naive(model.causal_lm, groups)[0], atol=1e-5, rtol=0)


def hook(model):
    model.causal_lm.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def dropout(model):
    model.train()


def quantised(model):
    model.causal_lm.model.layers[0].self_attn.q_proj.base_layer.weight.data = torch.zeros(32, 32, dtype=torch.int8)


CHANGES = {
    "hook": hook,
    "another activation": lambda m: setattr(m.causal_lm.model.layers[0].mlp, "act_fn", nn.GELU()),
    "float64": lambda m: m.double(),
    "bfloat16": lambda m: m.bfloat16(),
    "quantised": quantised,
    "fewer layers": lambda m: setattr(m.causal_lm.model.config, "num_hidden_layers", 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_it_is_not_made_for(change):
    model = shared()
    assert lean_hidden_states(model.causal_lm, batch()) is not None
    CHANGES[change](model)
    assert lean_hidden_states(model.causal_lm, batch()) is None


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"lora_dropout": 0.5}], ids=str)
def test_other_adapters(changes):
    model = shared(lora=tiny.lora(**changes))
    model.train()
    assert lean_hidden_states(model.causal_lm, batch()) is None


def test_attention_dropout_in_training_only():
    model = shared(attention_dropout=0.5)
    assert lean_hidden_states(model.causal_lm, batch()) is not None
    model.train()
    assert lean_hidden_states(model.causal_lm, batch()) is None


def test_autocast_and_padded_rows():
    model = shared()
    with torch.autocast("cpu", torch.bfloat16):
        assert lean_hidden_states(model.causal_lm, batch()) is None
    assert lean_hidden_states(model.causal_lm, replace(pad_groups(tiny.ragged_groups()), lean=True)) is None


def test_the_plan_says_so_and_training_goes_through_it(monkeypatch):
    """With a rotation that also doubles the queries, the log-probs change where the plan is lean, and the check of the
    first micro-batch turns to the model's own forward."""
    model, groups = shared(), tiny.ragged_groups()
    truth = tiny.naive(model.causal_lm, groups)[0]
    torch.testing.assert_close(model(groups).per_token_logps, truth, atol=1e-5, rtol=0)
    assert model.plan.lean
    rotate = lean_blocks._Rotate.apply
    monkeypatch.setattr(lean_blocks._Rotate, "apply", lambda x, cos, sin: 2 * rotate(x, cos, sin))
    assert (model(groups).per_token_logps - truth).abs().max() > 0.1
    model.plan = replace(model.plan, verified=False)
    torch.testing.assert_close(model(groups).per_token_logps, truth, atol=1e-5, rtol=0)
    assert not model.plan.lean
