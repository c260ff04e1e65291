"""Dropout off means: training mode gives what evaluation mode gives."""

import pytest
import torch
import transformers

from hf_rlx.models.dropout import disable_dropout
from hf_rlx.models.shared import SharedModel
from tests import tiny

DROPOUTS = {
    "llama": {"attention_dropout": 0.5},
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "opt": {"dropout": 0.5, "attention_dropout": 0.5},
    "phi": {"attention_dropout": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "gpt_neox": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
}


@pytest.mark.parametrize("family", DROPOUTS)
@pytest.mark.parametrize("packing", [True, False])
def test_dropout_off(family, packing):
    model = SharedModel.build(
        tiny.causal_lm(family, **DROPOUTS[family]),
        tiny.lora(lora_dropout=0.5, fan_in_fan_out=family == "gpt2"),
        packing=packing,
    )
    tiny.randomise_lora(model)
    groups = tiny.ragged_groups()
    with torch.no_grad():
        expected = model.eval()(groups).per_token_logps
        model.train()
        assert (model(groups).per_token_logps - expected).abs().max() > 1e-2
        disable_dropout(model)
        torch.testing.assert_close(model(groups).per_token_logps, expected, atol=1e-5, rtol=0)


READS_ITS_CONFIGURATION = {
    "FalconConfig": {"hidden_dropout": 0.5, "attention_dropout": 0.5, "alibi": False, "num_attention_heads": 4},
    "GPTNeoConfig": {
        "attention_dropout": 0.5,
        "embed_dropout": 0.5,
        "resid_dropout": 0.5,
        "attention_types": [[["global", "local"], 1]],
        "num_layers": 2,
        "num_heads": 4,
    },
    "PersimmonConfig": {"attention_dropout": 0.5, "hidden_dropout": 0.5, "num_attention_heads": 4},
}


@pytest.mark.parametrize("name", READS_ITS_CONFIGURATION)
@pytest.mark.parametrize("attention", ["eager", None])
def test_families_that_read_dropout_in_every_forward(name, attention):
    """Their layers hold the number nowhere but in the configuration; that of the model, which is saved, stays."""
    fields = {"num_hidden_layers": 2, **READS_ITS_CONFIGURATION[name]}
    if "num_layers" in fields:
        del fields["num_hidden_layers"]
    config = getattr(transformers, name)(
        vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=48, max_position_embeddings=256, **fields
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    shared = SharedModel.build(model)
    groups = tiny.ragged_groups()
    with torch.no_grad():
        expected = shared.eval()(groups).per_token_logps
        shared.train()
        assert (shared(groups).per_token_logps - expected).abs().max() > 1e-2
        disable_dropout(shared)
        torch.testing.assert_close(shared(groups).per_token_logps, expected, atol=1e-5, rtol=0)
    assert shared.config.attention_dropout == 0.5


def test_layers_are_not_dropped_either():
    """OPT leaves out whole layers at random in training mode."""
    model = tiny.causal_lm("opt", layerdrop=0.9, dropout=0.0)
    ids = torch.tensor([tiny.tokens(9)[0]])
    with torch.no_grad():
        expected = model.eval()(ids).logits
        disable_dropout(model.train())
        assert all(torch.equal(model(ids).logits, expected) for _ in range(5))
