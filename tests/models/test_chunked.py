"""Log-probs and entropies in chunks over the vocabulary matrix equal the plain log-softmax, value and gradient."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_rlx.models.forward import LogitTransform, head_logps
from hf_rlx.models.shared import SharedModel
from tests import tiny

N, H, V = 13, 6, 32

TRANSFORMS = {
    "plain": LogitTransform(),
    "scaled": LogitTransform(scale=0.25),
    "soft-capped": LogitTransform(softcap=3.0),
    "scaled and soft-capped": LogitTransform(scale=1.5, softcap=3.0),
}


def make_head(kind):
    if kind == "lora":
        model = SharedModel.build(
            tiny.causal_lm(hidden_size=H, num_attention_heads=1, num_key_value_heads=1, vocab_size=V),
            tiny.lora(target_modules=["lm_head"]),
        )
        tiny.randomise_lora(model)
        return model.causal_lm.get_output_embeddings()
    head = nn.Linear(H, V, bias="bias" in kind)
    return head.requires_grad_("frozen" not in kind)


def example():
    generator = torch.Generator().manual_seed(5)
    hidden = (3 * torch.randn(N, H, generator=generator)).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    return hidden, targets


def plain(hidden, head, targets, transform, temperature):
    """The definition, in one piece."""
    z = head(hidden) * transform.scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    logps = torch.log_softmax(z / temperature, dim=-1)
    return logps.gather(-1, targets[:, None])[:, 0], -(logps.exp() * logps).sum(-1)


def gradients_of(loss, hidden, head):
    parameters = [p for p in head.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, [hidden, *parameters])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("kind", ["frozen", "frozen, bias", "trainable", "trainable, bias", "lora"])
def test_value_and_gradient(kind, transform, temperature):
    """Chunks of one row, of three, and of all; without and with the entropy."""
    head = make_head(kind)
    hidden, targets = example()
    logps, entropies = plain(hidden, head, targets, transform, temperature)
    expected = gradients_of(tiny.weighted(logps), hidden, head)
    for rows in (1, 3, 2 * N):
        options = {"transform": transform, "temperature": temperature, "chunk_elements": rows * V}
        ours, none = head_logps(hidden, head, targets, **options)
        assert none is None
        torch.testing.assert_close(ours, logps, atol=1e-5, rtol=0)
        torch.testing.assert_close(gradients_of(tiny.weighted(ours), hidden, head), expected, atol=1e-5, rtol=1e-4)
        ours, entropy = head_logps(hidden, head, targets, want_entropy=True, **options)
        torch.testing.assert_close(entropy, entropies, atol=1e-5, rtol=0)
        assert not entropy.requires_grad
        torch.testing.assert_close(gradients_of(tiny.weighted(ours), hidden, head), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("kind", ["frozen", "trainable, bias", "lora"])
def test_entropy_gradient(kind, transform):
    head = make_head(kind)
    hidden, targets = example()

    def loss(logps, entropies):
        return tiny.weighted(logps) + 0.3 * tiny.weighted(entropies.flip(0))

    expected = gradients_of(loss(*plain(hidden, head, targets, transform, 0.7)), hidden, head)
    for rows in (1, 3, 2 * N):
        options = {"transform": transform, "temperature": 0.7, "chunk_elements": rows * V}
        ours = head_logps(hidden, head, targets, want_entropy=True, entropy_grad=True, **options)
        torch.testing.assert_close(gradients_of(loss(*ours), hidden, head), expected, atol=1e-5, rtol=1e-4)


class _Largest(TorchDispatchMode):
    """Numbers in the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("kind", ["frozen", "trainable"])
def test_no_tensor_is_larger_than_a_chunk(kind, entropy_grad):
    """200 rows x 64 tokens = 12 800 logits, 4 rows x 64 = 256 at a time; the hidden states' own 200 x 4 = 800 are
    the largest tensor there is, in forward and backward. The definition in one piece makes one of 12 800."""
    head = nn.Linear(4, 64, bias=False).requires_grad_(kind == "trainable")
    hidden = torch.randn(200, 4, requires_grad=True)
    targets = torch.randint(0, 64, (200,))
    with _Largest() as chunked:
        logps, entropy = head_logps(
            hidden,
            head,
            targets,
            transform=LogitTransform(),
            want_entropy=True,
            entropy_grad=entropy_grad,
            chunk_elements=4 * 64,
        )
        (logps.sum() + (entropy.sum() if entropy_grad else 0)).backward()
    assert chunked.numel == 800
    with _Largest() as whole:
        plain(hidden, head, targets, LogitTransform(), 1.0)[0].sum().backward()
    assert whole.numel == 12800


@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("kind", ["frozen, bias", "trainable, bias"])
def test_a_banned_token_leaves_the_entropy_finite(kind, entropy_grad):
    """Logits 0, 0, -inf: entropy log 2 = 0.693147 and log-prob -log 2; gradients of both are finite."""
    head = nn.Linear(2, 3)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.tensor([0.0, 0.0, -torch.inf]))
    head.requires_grad_("frozen" not in kind)
    hidden = torch.ones(1, 2, requires_grad=True)
    logps, entropy = head_logps(
        hidden, head, torch.tensor([1]), transform=LogitTransform(), want_entropy=True, entropy_grad=entropy_grad
    )
    assert entropy.item() == pytest.approx(0.693147, abs=1e-6)
    assert logps.item() == pytest.approx(-0.693147, abs=1e-6)
    loss = logps.sum() + (entropy.sum() if entropy_grad else 0)
    assert all(g.isfinite().all() for g in gradients_of(loss, hidden, head))


def test_transform_is_read_from_the_configuration():
    assert LogitTransform.of(tiny.config("llama")) == LogitTransform(1.0, None)
    assert LogitTransform.of(tiny.config("cohere")) == LogitTransform(0.25, None)
    assert LogitTransform.of(tiny.config("granite")) == LogitTransform(0.25, None)
    assert LogitTransform.of(tiny.config("gemma2")) == LogitTransform(1.0, 15.0)


def test_no_rows():
    for kind in ("frozen", "trainable"):
        hidden = torch.zeros(0, H, requires_grad=True)
        logps, entropy = head_logps(
            hidden, make_head(kind), torch.zeros(0, dtype=torch.long), transform=LogitTransform(), want_entropy=True
        )
        assert logps.shape == entropy.shape == (0,)
        logps.sum().backward()
