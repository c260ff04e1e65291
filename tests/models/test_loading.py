"""What is no decoder, no type of weights, or no whole file is refused by name when a model is loaded."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_rlx.models.loading import dtype_of, load_causal_lm
from tests import tiny


@pytest.mark.parametrize("is_decoder", [False, True])
def test_an_encoder_is_refused_unless_it_is_made_a_decoder(tmp_path, is_decoder):
    """BERT with a language head sees both ways: its log-probs of a token know that token."""
    config = AutoConfig.for_model(
        "bert",
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        is_decoder=is_decoder,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    if is_decoder:
        assert load_causal_lm(tmp_path).config.is_decoder
        return
    with pytest.raises(ValueError, match=r"is an encoder \(bert\), whose attention sees what comes after"):
        load_causal_lm(tmp_path)


def test_a_file_that_ends_early_is_named(tmp_path):
    tiny.causal_lm("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"a file of weights of {tmp_path} is damaged"):
        load_causal_lm(tmp_path)


def test_types_by_name():
    assert dtype_of("bfloat16") is dtype_of(torch.bfloat16) is torch.bfloat16
    assert dtype_of("auto") == "auto"
    for wrong in ("flaot32", "int8", "nn"):
        with pytest.raises(ValueError, match=f"float16 or auto, not of '{wrong}'"):
            dtype_of(wrong)
