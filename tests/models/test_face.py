"""`trainer.model`, used as the transformers or PEFT model that it stands for."""

from __future__ import annotations

import pytest
import torch
import transformers

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.grpo import GRPOTrainer
from tests import tiny
from tests.trainers import tools

IDS = torch.tensor([[1, 5, 9, 11]])


def test_forward_of_the_transformers_model():
    """Tokens by name give what the model inside gives: logits, and the loss of labels."""
    model = SharedModel.build(tiny.causal_lm(), tiny.lora()).eval()
    out = model(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS)
    expected = model.model(input_ids=IDS, labels=IDS)
    torch.testing.assert_close(out.logits, expected.logits)
    assert out.loss.item() == pytest.approx(expected.loss.item())
    for args, kwargs in (((IDS,), {}), ((), {"labels": IDS}), (([],), {"input_ids": IDS}), ((), {})):
        with pytest.raises(TypeError, match="takes groups, or input_ids by name"):
            model(*args, **kwargs)


def test_counts(capsys):
    """As PEFT prints them; of a model whose weights all train, everything."""
    adapted = SharedModel.build(tiny.causal_lm(), tiny.lora())
    assert adapted.get_nb_trainable_parameters() == adapted.model.get_nb_trainable_parameters()
    adapted.model.print_trainable_parameters()
    expected = capsys.readouterr().out
    adapted.print_trainable_parameters()
    assert capsys.readouterr().out == expected
    assert list(adapted.peft_config) == ["policy"]
    base = tiny.causal_lm()
    whole = SharedModel.build(base)
    assert whole.num_parameters() == base.num_parameters()
    assert whole.get_nb_trainable_parameters() == (base.num_parameters(), base.num_parameters())
    assert not hasattr(whole, "peft_config")
    assert whole.can_generate()


def test_merging_is_for_what_was_saved():
    """The message has the command."""
    with pytest.raises(AttributeError, match="hf-rlx merge folder merged"):
        SharedModel.build(tiny.causal_lm(), tiny.lora()).merge_and_unload()


def test_a_pipeline_after_a_run(tmp_path):
    """transformers' text generation answers with a trainer's model, greedily as the model inside."""
    args = tools.config(tmp_path)
    trainer = GRPOTrainer(
        "tiny",
        reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
        args=args,
        train_dataset=tools.rows(8),
        peft_config=tools.lora(),
    )
    trainer.train()
    tokenizer = load_tokenizer("tiny")
    pipe = transformers.pipeline("text-generation", model=trainer.model, tokenizer=tokenizer, device="cpu")
    text = pipe("3+4=", max_new_tokens=4, do_sample=False, return_full_text=False)[0]["generated_text"]
    tokens = tokenizer("3+4=", return_tensors="pt")
    ids = trainer.model.model.generate(**tokens, max_new_tokens=4, do_sample=False)
    assert text == tokenizer.decode(ids[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
