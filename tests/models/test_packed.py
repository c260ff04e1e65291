"""A packed row gives what the model's own forward gives: values, entropies, gradients, family by family.

The truth is `tiny.naive`: every response forwarded alone behind its prompt by transformers' own code. The groups
are ragged (K = 3, 1, 2, 2; an empty and a one-token response; a one-token prompt) and all stand in one row.
"""

import pytest
import torch

from hf_rlx.models.dropout import disable_dropout
from hf_rlx.models.loading import four_bit_config
from hf_rlx.models.packing import pack_groups, pad_groups, split_by_tokens
from hf_rlx.models.shared import SharedModel
from hf_rlx.types import Group
from tests import tiny

PACKED = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "mistral_window",
    "gemma",
    "gemma3_text",
    "gpt2",
    "phi",
    "phi3",
    "opt",
    "granite",
    "cohere",
    "gpt_neox",
    "olmo2",
    "starcoder2",
    "qwen3_moe",
]


def lora_for(family):
    # "all-linear" of a mixture means its experts' raw parameters too, which know no dropout.
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if "moe" in family else "all-linear"
    return tiny.lora(fan_in_fan_out=family == "gpt2", lora_dropout=0.1, target_modules=targets)


def gradients_of(model, scores):
    model.zero_grad()
    tiny.weighted(scores).backward()
    return tiny.gradients(model)


# --- the row ---------------------------------------------------------------------------------------------------------


def test_layout_of_one_group():
    """Prompt 10 11, responses (20 21), (), (30): the prompt stands once, positions restart at 2 for every response.

    Row: 10 11 20 21 30. 20 and 30 are predicted by the prompt's last token (1), 21 by 20 (2). Last tokens: 21 at 3,
    the prompt's own last one (1) for the empty response, 30 at 4.
    """
    batch = pack_groups([Group.from_lists([10, 11], [[20, 21], [], [30]])])
    assert batch.input_ids.tolist() == [[10, 11, 20, 21, 30]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.predict_index.tolist() == [1, 2, 1]
    assert batch.targets.tolist() == [20, 21, 30]
    assert batch.last_index.tolist() == [3, 1, 4]
    assert batch.completion_mask.tolist() == [[True, True], [False, False], [True, False]]
    assert batch.num_tokens == 5


def test_layout_padded():
    """The same group, padded: rows 10 11 20 21 / 10 11 _ _ / 10 11 30 _ of 4, flat index = 4 * row + column."""
    batch = pad_groups([Group.from_lists([10, 11], [[20, 21], [], [30]])], pad_token_id=9)
    assert batch.input_ids.tolist() == [[10, 11, 20, 21], [10, 11, 9, 9], [10, 11, 30, 9]]
    assert batch.predict_index.tolist() == [1, 2, 9]
    assert batch.last_index.tolist() == [3, 5, 10]
    assert batch.attention_mask.tolist() == [[True] * 4, [True, True, False, False], [True, True, True, False]]


def test_mask_comes_from_lengths_where_pad_equals_eos():
    """Pad = EOS = 2: the real EOS that ends [5, 6, 2] stays in the mask (trl#4970, trl#6357)."""
    group = Group.from_lists([3], [[5, 6, 2], [4, 4, 4, 4]])
    for batch in (pack_groups([group]), pad_groups([group], pad_token_id=2)):
        assert batch.completion_mask.tolist() == [[True, True, True, False], [True] * 4]
        assert batch.targets.tolist() == [5, 6, 2, 4, 4, 4, 4]


def test_split_by_tokens():
    """Tokens 5, 4, 9, 2 under a budget of 9: (5 + 4), (9), (2); a group over the budget stands alone."""
    groups = [Group.from_lists([1] * (n - 1), [[1]]) for n in (5, 4, 9, 2)]
    assert [[g.num_tokens for g in row] for row in split_by_tokens(groups, 9)] == [[5, 4], [9], [2]]
    assert [[g.num_tokens for g in row] for row in split_by_tokens(groups, 3)] == [[5], [4], [9], [2]]
    assert [[g.num_tokens for g in row] for row in split_by_tokens(groups, None)] == [[5, 4, 9, 2]]


@pytest.mark.parametrize("lay_out", [pack_groups, pad_groups])
def test_no_groups_are_refused(lay_out):
    with pytest.raises(ValueError, match="no groups"):
        lay_out([])


# --- families --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", PACKED)
def test_lora_values_and_gradients(family):
    model = SharedModel.build(tiny.causal_lm(family), lora_for(family))
    tiny.randomise_lora(model)
    disable_dropout(model)
    model.train()
    groups = tiny.ragged_groups()
    scores = model(groups, want_entropy=True)
    assert (model.plan.packed, model.plan.chunked, model.plan.verified) == (True, True, True)
    actual = gradients_of(model, scores.per_token_logps)
    logps, entropies = tiny.naive(model.causal_lm, groups)
    torch.testing.assert_close(scores.per_token_logps, logps, atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.entropies, entropies, atol=1e-5, rtol=0)
    assert (scores.per_token_logps[~scores.mask] == 0).all()
    assert scores.mask.sum(1).tolist() == [9, 0, 1, 5, 3, 12, 2, 6]
    tiny.assert_gradients_close(actual, gradients_of(model, logps), rtol=1e-4)
    assert all("lora_" in name for name in actual)


@pytest.mark.parametrize("family", PACKED)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_full_weight_gradients(family, checkpointing):
    """All weights train, tied and untied heads, in training mode, with and without activation checkpointing."""
    model = SharedModel.build(tiny.causal_lm(family))
    disable_dropout(model)
    model.train()
    groups = tiny.ragged_groups()
    expected = gradients_of(model, tiny.naive(model.causal_lm, groups)[0])
    if checkpointing:
        model.activation_checkpointing_enable()
        assert model.causal_lm.is_gradient_checkpointing
    scores = model(groups)
    assert model.plan.packed
    tiny.assert_gradients_close(gradients_of(model, scores.per_token_logps), expected, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral_window", "gpt2", "gemma3_text", "qwen3_moe"])
def test_lora_gradients_with_checkpointing(family):
    """Two packed rows stay in the graph at once: each recomputes with the layout that its forward had."""
    model = SharedModel.build(tiny.causal_lm(family), lora_for(family))
    tiny.randomise_lora(model)
    disable_dropout(model)
    model.train()
    groups = tiny.ragged_groups()
    first, second = groups[:3], groups[3:]
    expected_loss = tiny.weighted(tiny.naive(model.causal_lm, first)[0])
    expected_loss = expected_loss + tiny.weighted(tiny.naive(model.causal_lm, second)[0])
    expected_loss.backward()
    expected = tiny.gradients(model)
    model.zero_grad()
    model.activation_checkpointing_enable()
    loss = tiny.weighted(model(first).per_token_logps) + tiny.weighted(model(second).per_token_logps)
    loss.backward()
    assert model.plan.packed
    tiny.assert_gradients_close(tiny.gradients(model), expected, rtol=1e-4)


def test_checkpointing_recomputes():
    """A decoder layer runs twice: once in the forward, once in the backward."""
    model = SharedModel.build(tiny.causal_lm(), tiny.lora())
    model.train()
    model.activation_checkpointing_enable()
    groups = tiny.ragged_groups()
    model(groups)  # decides the plan
    calls = []
    model.causal_lm.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    loss = model(groups).per_token_logps.sum()
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_bfloat16_autocast(family):
    """bf16 keeps 8 bits, so a log-prob of size 5 is good to a few hundredths whichever way it is computed.

    What can be asked: the packed row is as near to float32 as the padded forward under the same autocast (within
    a factor of 2), and its LoRA gradients point the same way (cosine over 0.99).
    """
    model = SharedModel.build(tiny.causal_lm(family), lora_for(family))
    tiny.randomise_lora(model)
    disable_dropout(model)
    groups = tiny.ragged_groups()
    exact = tiny.naive(model.causal_lm, groups)[0]
    expected = gradients_of(model, exact)
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(groups)
        padded = tiny.naive(model.causal_lm, groups)[0]
    assert model.plan.packed
    assert scores.per_token_logps.dtype == torch.float32
    ours, theirs = (scores.per_token_logps - exact).abs(), (padded - exact).abs()
    assert 0 < ours.max() < 0.3
    assert ours.mean() <= 2 * theirs.mean()
    actual = gradients_of(model, scores.per_token_logps)
    flat = [torch.cat([g[name].flatten() for name in expected]) for g in (actual, expected)]
    assert torch.cosine_similarity(*flat, dim=0) > 0.99


# --- what a row must not do ------------------------------------------------------------------------------------------


def test_a_sibling_and_another_group_change_nothing():
    """Other responses and other groups may hold anything: the one looked at stays the same to the last digits."""
    model = SharedModel.build(tiny.causal_lm())
    mine = Group.from_lists([3, 4, 5], [[6, 7, 8, 9], [10, 11]])
    changed = Group.from_lists([3, 4, 5], [[6, 7, 8, 9], [50, 51, 52]])
    other, longer = Group.from_lists([20], [[21]]), Group.from_lists([30, 31, 32, 33], [[34, 35, 36, 37, 38, 39]])
    with torch.no_grad():
        first = model([other, mine]).per_token_logps[1, :4]
        second = model([longer, changed]).per_token_logps[1, :4]
    torch.testing.assert_close(first, second, atol=1e-6, rtol=0)


def test_the_prompt_is_computed_once():
    """K = 8 behind a prompt of 20: the decoder sees 20 + 8 * 3 = 44 tokens, not 8 * 23 = 184."""
    model = SharedModel.build(tiny.causal_lm())
    prompt, *responses = tiny.tokens(20, *[3] * 8)
    group = Group.from_lists(prompt, responses)
    model([group])  # decides the plan
    seen = []
    model.causal_lm.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[:2]))
    model([group])
    assert seen == [(1, 44)]


@pytest.mark.parametrize("packing", [True, False])
def test_empty_responses_only(packing):
    model = SharedModel.build(tiny.causal_lm(), tiny.lora(), packing=packing)
    scores = model([Group.from_lists([3, 4], [[], []])], want_entropy=True)
    assert scores.per_token_logps.tolist() == [[0.0], [0.0]]
    assert scores.entropies.tolist() == [[0.0], [0.0]]
    assert not scores.mask.any()


def test_step_zero_ratio_is_one_at_any_temperature():
    """Old and new log-probs come from one function with one temperature (trl#3169): T = 0.7 divides the logits."""
    model = SharedModel.build(tiny.causal_lm())
    groups = tiny.ragged_groups()
    with torch.no_grad():
        scores = model(groups, temperature=0.7, want_entropy=True)
        logps, entropies = tiny.naive(model.causal_lm, groups, temperature=0.7)
    torch.testing.assert_close(scores.per_token_logps, logps, atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.entropies, entropies, atol=1e-5, rtol=0)


# --- 4-bit weights ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quantized_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny.causal_lm("llama", hidden_size=64, intermediate_size=128, scale=4.0).save_pretrained(folder)
    return folder


def qlora(folder):
    model = SharedModel.from_pretrained(
        folder, peft_config=tiny.lora(), quantization_config=four_bit_config(torch.float32)
    )
    tiny.randomise_lora(model)
    return model


def test_four_bit_values_and_gradients(quantized_folder):
    """The same quantised weights, packed against one by one."""
    import bitsandbytes

    model = qlora(quantized_folder)
    assert any(isinstance(m, bitsandbytes.nn.Linear4bit) for m in model.modules())
    groups = tiny.ragged_groups()
    scores = model(groups)
    assert model.plan.packed
    logps, _ = tiny.naive(model.causal_lm, groups)
    torch.testing.assert_close(scores.per_token_logps, logps, atol=1e-5, rtol=0)
    actual = gradients_of(model, scores.per_token_logps)
    tiny.assert_gradients_close(actual, gradients_of(model, logps), rtol=1e-4)


def test_four_bit_trains_a_step(quantized_folder):
    """One step of gradient descent on one response raises its log-prob and leaves the 4-bit weights alone."""
    model = qlora(quantized_folder)
    frozen = {n: p.clone() for n, p in model.named_parameters() if "lora_" not in n}
    group = [Group.from_lists([3, 4, 5], [[6, 7, 8, 9]])]
    parameters = [p for _, p in model.trainable_parameters()]
    assert parameters
    before = model(group).per_token_logps.sum()
    (-before).backward()
    torch.optim.SGD(parameters, lr=0.01).step()
    assert model(group).per_token_logps.sum() > before + 0.01
    after = dict(model.named_parameters())
    assert all(torch.equal(after[n], p) for n, p in frozen.items())
