"""Families that cannot run packed rows end in padded batches, with one log line, and with right numbers."""

import logging

import pytest
import torch

from hf_rlx.models.attention import PackingUnsupportedError
from hf_rlx.models.plan import ForwardPlan, verify_plan
from hf_rlx.models.shared import SharedModel
from hf_rlx.types import Group
from tests import tiny

# family -> (model_type in the log line, reason in it)
PADDED = {
    "falcon_h1": ("falcon_h1", "recurrent state"),
    "mamba": ("mamba", "recurrent state"),
    "qwen3_next": ("qwen3_next", "recurrent state"),
    "bloom": ("bloom", "does not go through transformers' AttentionInterface"),
    "gemma2": ("gemma2", "soft-capped attention scores"),
    "stablelm": ("stablelm", "log-probs differ from the padded forward"),
    "qwen2_moe_window": ("qwen2_moe", "its sliding window of 100 tokens does not reach the attention function"),
    "phimoe_window": ("phimoe", "its sliding window of 100 tokens does not reach the attention function"),
}


def log_lines(caplog):
    return [r.getMessage() for r in caplog.records if r.name.startswith("hf_rlx")]


@pytest.mark.parametrize("family", PADDED)
def test_family_falls_back(family, caplog):
    model = SharedModel.build(tiny.causal_lm(family))
    groups = tiny.ragged_groups()
    with caplog.at_level(logging.INFO):
        scores = model(groups, want_entropy=True)
        model(groups)
    (line,) = log_lines(caplog)
    model_type, reason = PADDED[family]
    assert line.startswith(f"{model_type}: padded batches, log-probs from hidden states (")
    assert reason in line
    assert (model.plan.packed, model.plan.chunked, model.plan.verified) == (False, True, True)
    tiny.weighted(scores.per_token_logps).backward()
    actual = tiny.gradients(model)
    model.zero_grad()
    logps, entropies = tiny.naive(model.causal_lm, groups)
    tiny.weighted(logps).backward()
    torch.testing.assert_close(scores.per_token_logps, logps, atol=2e-5, rtol=0)
    torch.testing.assert_close(scores.entropies, entropies, atol=2e-5, rtol=0)
    # Recurrences run in chunks of the padded length, hence 1e-3 and not 1e-4.
    tiny.assert_gradients_close(actual, tiny.gradients(model), rtol=1e-3)


def test_packing_false_is_padded_and_right(caplog):
    model = SharedModel.build(tiny.causal_lm(), packing=False)
    groups = tiny.ragged_groups()
    with caplog.at_level(logging.INFO):
        scores = model(groups)
    assert log_lines(caplog) == ["llama: padded batches, log-probs from hidden states (switched off)"]
    assert model.causal_lm.config._attn_implementation == "sdpa"
    torch.testing.assert_close(scores.per_token_logps, tiny.naive(model.causal_lm, groups)[0], atol=1e-5, rtol=0)


def test_packed_families_log_nothing(caplog):
    with caplog.at_level(logging.INFO):
        SharedModel.build(tiny.causal_lm())(tiny.ragged_groups())
    assert log_lines(caplog) == []


def test_padding_id_outside_the_vocabulary():
    """Some published configurations have pad_token_id = -1, which no embedding can look up."""
    model = SharedModel.build(tiny.causal_lm(), packing=False)
    model.config.pad_token_id = -1
    groups = tiny.ragged_groups()
    torch.testing.assert_close(
        model(groups).per_token_logps, tiny.naive(model.causal_lm, groups)[0], atol=1e-5, rtol=0
    )


def test_unknown_transform_of_the_logits_reads_the_models_own_logits(caplog):
    """Falcon-H1 multiplies its logits by `lm_head_multiplier`, which no transform here knows: it is found out."""
    model = SharedModel.build(tiny.causal_lm("falcon_h1", lm_head_multiplier=0.5))
    groups = tiny.ragged_groups()
    with caplog.at_level(logging.INFO):
        scores = model(groups)
    (line,) = log_lines(caplog)
    assert line.startswith("falcon_h1: padded batches, log-probs from the model's logits (log-probs differ")
    assert not model.plan.chunked
    torch.testing.assert_close(scores.per_token_logps, tiny.naive(model.causal_lm, groups)[0], atol=2e-5, rtol=0)
    model.add_role("critic")
    with pytest.raises(PackingUnsupportedError, match="a critic needs the hidden states"):
        model(groups, want_values=True)


# --- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mistral", "starcoder2", "phi3", "qwen2_moe_window", "phimoe_window"])
def test_a_window_longer_than_the_first_batch(family):
    """The first batch (at most 19 tokens a branch) is shorter than the window of 24, later ones are longer.

    Families that hand their window to the attention function run packed; the others put it into the mask only, so
    that nothing would be wrong on the first batch and everything later: they must not run packed.
    """
    model = SharedModel.build(tiny.causal_lm(family, sliding_window=24))
    model(tiny.ragged_groups())
    assert model.plan.packed == (family not in PADDED)
    prompt, *responses = tiny.tokens(40, 30, 5)
    groups = [Group.from_lists(prompt, responses), Group.from_lists(*[tiny.tokens(10)[0], tiny.tokens(30, 2)])]
    with torch.no_grad():
        logps = model(groups).per_token_logps
        expected = tiny.naive(model.causal_lm, groups)[0]
        unlimited = tiny.naive(tiny.causal_lm(family, sliding_window=1000), groups)[0]
    torch.testing.assert_close(logps, expected, atol=1e-5, rtol=0)
    assert (expected - unlimited).abs().max() > 0.01  # the window shows


# --- the probe -------------------------------------------------------------------------------------------------------


def test_a_leak_between_siblings_is_found_where_values_agree(monkeypatch):
    """A tree whose responses see one another by a hair: the log-probs pass any loose tolerance, the leak does not."""
    model = tiny.causal_lm()
    model.set_attn_implementation("hf_rlx_tree")
    from hf_rlx.models import forward
    from hf_rlx.models import plan as plans

    original = forward.hidden_states

    def leaking(model, batch, at):
        hidden = original(model, batch)
        return (hidden if batch.layout is None else hidden + 0.02 * hidden.mean(0)).index_select(0, at)

    monkeypatch.setattr(forward, "hidden_states", leaking)
    monkeypatch.setitem(plans._TOLERANCE, torch.float32, 1.0)
    plan = verify_plan(model, tiny.ragged_groups(), ForwardPlan(), torch.device("cpu"))
    assert not plan.packed
    assert "when its sibling changes" in plan.reason


@pytest.mark.parametrize(
    "groups",
    [
        [Group.from_lists([3], [[4]])],
        [Group.from_lists([3, 4, 5], [[]])],
        [Group.from_lists([3, 4], [[5, 6, 7]]), Group.from_lists([5], [[], [6]])],
    ],
)
def test_small_first_batches_decide_too(groups):
    """K = 1, empty and one-token responses: the probe makes up a sibling, and the plan is packed."""
    model = SharedModel.build(tiny.causal_lm())
    logps = model(groups).per_token_logps
    assert model.plan == ForwardPlan(packed=True, chunked=True, reason=None, verified=True)
    torch.testing.assert_close(logps, tiny.naive(model.causal_lm, groups)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("error", [ValueError("no such shape"), RuntimeError("boom"), KeyError("layout")])
def test_an_attention_that_raises_falls_back(monkeypatch, error):
    from hf_rlx.models import attention

    def broken(*args, **kwargs):
        raise error

    monkeypatch.setattr(attention, "tree_attention", broken)
    model = SharedModel.build(tiny.causal_lm())
    groups = tiny.ragged_groups()
    logps = model(groups).per_token_logps
    assert model.plan.reason.startswith(type(error).__name__)
    torch.testing.assert_close(logps, tiny.naive(model.causal_lm, groups)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias", "head_mask"])
def test_arguments_without_a_packed_form_are_refused(name):
    from hf_rlx.models.attention import tree_attention_forward
    from hf_rlx.models.packing import pack_groups

    layout = pack_groups(tiny.ragged_groups()).layout
    states = torch.zeros(1, 1, layout.slot_of_token.numel(), 4)
    with pytest.raises(PackingUnsupportedError, match=name):
        tree_attention_forward(None, states, states, states, None, layout=layout, **{name: 1.0})


def test_models_that_are_no_causal_language_models_are_refused():
    """BERT with `is_decoder=False` sees later tokens: its log-probs of earlier ones change, so it is refused on the
    first forward; T5 and bare modules at construction."""
    from transformers import BertConfig, BertLMHeadModel, T5Config, T5ForConditionalGeneration

    from hf_rlx import SharedModel

    small = {"vocab_size": tiny.VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    for decoder in (True, False):
        torch.manual_seed(0)
        bert = BertLMHeadModel(BertConfig(**small, intermediate_size=32, is_decoder=decoder, initializer_range=1.0))
        shared = SharedModel.build(bert.eval())
        with torch.no_grad():
            if decoder:
                assert torch.isfinite(shared(tiny.ragged_groups()).per_token_logps).all()
            else:
                with pytest.raises(ValueError, match="no causal language model"):
                    shared(tiny.ragged_groups())
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="encoder-decoder"):
        SharedModel.build(t5)
    with pytest.raises(ValueError, match="got Linear"):
        SharedModel.build(torch.nn.Linear(2, 2))
