"""Packed linear layers: PEFT's numbers and gradients, and PEFT itself for whatever is not plain LoRA."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_rlx.models import fast_linear
from hf_rlx.models.fast_linear import FastLoraLinear, packed_for_sampling, use_fast_lora
from hf_rlx.models.shared import SharedModel
from tests import tiny

pytestmark = pytest.mark.skipif(not fast_linear.available(), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def _any_size(monkeypatch):
    monkeypatch.setattr(fast_linear, "MIN_ELEMENTS", 0)


class Net(nn.Module):
    """A linear layer with a bias, and one without."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 6, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def nets(**changes):
    """PEFT's own model with an adapter that does something, and a copy with the fast layers."""
    torch.manual_seed(1)
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": ["up", "down"], **changes})
    peft = get_peft_model(Net(), config)
    tiny.randomise_lora(peft, scale=0.5)
    fast = copy.deepcopy(peft)
    use_fast_lora(fast)
    return peft, fast


def layers(model):
    return [m for m in model.modules() if isinstance(m, FastLoraLinear)]


def results(model, x):
    """Output, gradient of the input, gradients of the parameters, of a loss that weighs every number differently."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    tiny.weighted(out).backward()
    return out.detach(), x.grad, tiny.gradients(model)


@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 12), (1, 12)], ids=str)
def test_equals_peft_with_gradients(shape):
    peft, fast = nets()
    assert len(layers(fast)) == 2
    assert not layers(peft)
    x = torch.randn(shape)
    (out, grad, grads), (fast_out, fast_grad, fast_grads) = results(peft, x), results(fast, x)
    grads |= {"output": out, "input": grad}
    tiny.assert_gradients_close(fast_grads | {"output": fast_out, "input": fast_grad}, grads, 1e-6)


def test_the_fast_product_is_what_runs(monkeypatch):
    """With a packed product that returns twice its value, a fast layer's base part is doubled: 2 W x, not W x."""
    _, fast = nets()
    layer = layers(fast)[1]
    x = torch.randn(3, 20)
    with torch.no_grad():
        added = layer(x) - x @ layer.get_base_layer().weight.T
        product = fast_linear.packed_linear
        monkeypatch.setattr(fast_linear, "packed_linear", lambda *args: 2 * product(*args))
        torch.testing.assert_close(layer(x), 2 * (x @ layer.get_base_layer().weight.T) + added)


def test_adapters_off_is_the_base():
    peft, fast = nets()
    x = torch.randn(4, 12)
    with torch.no_grad(), fast.disable_adapter():
        torch.testing.assert_close(fast(x), base_output(peft, x))


def base_output(peft, x):
    net = peft.get_base_model()
    return net.down.base_layer(torch.tanh(net.up.base_layer(x)))


@pytest.mark.parametrize(
    "changes",
    [{"use_dora": True}, {"lora_dropout": 0.5}, {"lora_bias": True, "target_modules": ["up"]}, {"use_rslora": True}],
    ids=lambda c: next(iter(c)),
)
def test_other_adapters(changes):
    """DoRA, dropout in training and a bias in B are PEFT's business; rsLoRA only scales otherwise."""
    peft, fast = nets(**changes)
    x = torch.randn(4, 12)
    outputs = []
    for model in (peft, fast):
        model.train()
        torch.manual_seed(3)
        outputs.append(results(model, x))
    torch.testing.assert_close(outputs[1][0], outputs[0][0])
    tiny.assert_gradients_close(outputs[1][2], outputs[0][2], 1e-6)


def test_two_active_adapters_and_merged_weights():
    peft, fast = nets()
    x = torch.randn(4, 12)
    for model in (peft, fast):
        model.add_adapter("second", LoraConfig(r=2, target_modules=["up", "down"]))
        tiny.randomise_lora(model, scale=0.4, seed=5)
        model.base_model.set_adapter(["default", "second"])
    with torch.no_grad():
        expected = peft(x)
        torch.testing.assert_close(fast(x), expected)
        fast.merge_adapter()
        torch.testing.assert_close(fast(x), expected)


def test_a_changed_matrix_counts_at_once():
    _, fast = nets()
    layer, x = layers(fast)[1], torch.randn(3, 20)
    with torch.no_grad(), fast.disable_adapter():
        before = layer(x)
        layer.get_base_layer().weight.mul_(3.0)
        torch.testing.assert_close(layer(x), 3 * before)
    x.requires_grad_()
    layer(x).sum().backward()
    grad = x.grad.clone()
    x.grad = None
    with torch.no_grad():
        layer.get_base_layer().weight.mul_(0.0)
        layer.lora_B["default"].weight.mul_(0.0)
    layer(x).sum().backward()
    assert grad.abs().max() > 0.1
    assert x.grad.abs().max() == 0


def test_a_copy_has_its_own():
    _, fast = nets()
    x = torch.randn(3, 12)
    before = fast(x).detach()
    other = copy.deepcopy(fast)
    with torch.no_grad():
        other.get_base_model().up.base_layer.weight.zero_()
    torch.testing.assert_close(fast(x).detach(), before)
    assert (other(x) - before).abs().max() > 1e-3


def test_half_precision_and_autocast_are_pefts():
    peft, fast = nets()
    x = torch.randn(4, 12)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(fast(x), peft(x))
        assert torch.equal(fast.bfloat16()(x.bfloat16()), peft.bfloat16()(x.bfloat16()))


def test_activation_checkpointing():
    """Recomputed in the backward, the packed row's gradients are those of PEFT's layers without recomputation."""
    groups = tiny.ragged_groups()
    grads = []
    for fast in (False, True):
        model = SharedModel.build(tiny.causal_lm(), tiny.lora())
        tiny.randomise_lora(model)
        if fast:
            use_fast_lora(model)
            model.activation_checkpointing_enable()
            assert len(layers(model)) == 14
        model.train()
        tiny.weighted(model(groups).per_token_logps).backward()
        grads.append(tiny.gradients(model))
    tiny.assert_gradients_close(grads[1], grads[0], 1e-5)


# --- sampling --------------------------------------------------------------------------------------------------------


def test_sampling_copies_equal_the_model():
    """A whole model with an adapter, vocabulary head included, on several row counts; adapters off as well."""
    model = get_peft_model(tiny.causal_lm(), tiny.lora())
    tiny.randomise_lora(model)
    for ids in (torch.tensor([[3, 4, 5]]), torch.randint(3, 60, (7, 2))):
        for switch in (model.disable_adapter, torch.no_grad):
            with torch.no_grad(), switch():
                expected = model(input_ids=ids).logits
                with packed_for_sampling(model, 8):
                    assert sum("forward" in vars(m) for m in model.modules()) == 15  # 7 a layer, and the head
                    torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_layers_that_share_an_input():
    """q, k and v come from one product with the same input, and from their own input where they get another one."""
    model = get_peft_model(tiny.causal_lm("qwen2"), tiny.lora())  # its q, k and v have biases, its o has none
    tiny.randomise_lora(model)
    attention = model.get_base_model().model.layers[0].self_attn
    x, y = torch.randn(2, 1, 32), torch.randn(2, 1, 32)
    calls = [("q_proj", x), ("k_proj", x), ("v_proj", x), ("q_proj", x), ("v_proj", y), ("k_proj", y), ("q_proj", x)]
    with torch.no_grad():
        expected = [getattr(attention, name)(states) for name, states in calls]
        with packed_for_sampling(model, 8):
            actual = [getattr(attention, name)(states) for name, states in calls]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_sampling_copies_leave_no_trace():
    model = get_peft_model(tiny.causal_lm(), tiny.lora())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ZeroDivisionError), packed_for_sampling(model, 8):
        raise ZeroDivisionError
    assert not any("forward" in vars(m) for m in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_sampling_leaves_other_adapters_alone():
    """DoRA layers are not packed: their output is not W + BA."""
    peft, _ = nets(use_dora=True)
    x = torch.randn(4, 12)
    with torch.no_grad():
        expected = peft(x)
        with packed_for_sampling(peft, 8):
            assert torch.equal(peft(x), expected)


def test_a_hooked_layer_is_not_packed():
    """A hook on the base layer must still run."""
    peft, _ = nets()
    seen = []
    peft.get_base_model().up.base_layer.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad(), packed_for_sampling(peft, 8):
        peft(torch.randn(2, 12))
    assert seen == [1]
