"""Dropout off means: training mode gives what evaluation mode gives."""

import pytest
import torch

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
