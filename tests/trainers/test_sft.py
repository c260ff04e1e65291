"""Supervised fine-tuning: the mean over answer tokens, however a step is split, and what rows it takes."""

from __future__ import annotations

import math

import pytest
import torch
from datasets import Dataset

from hf_rlx.data.demonstrations import check_demonstrations, encode_demonstration
from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.sft import SFTConfig, SFTTrainer
from tests import tiny

ROWS = Dataset.from_list(
    [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in ((1, 2), (30, 41), (99, 1), (7, 7), (12, 3))]
)


def trainer(tmp_path, shared=None, rows=ROWS, **fields):
    torch.manual_seed(0)
    shared = shared or SharedModel.from_pretrained("tiny", peft_config=tiny.lora(target_modules="all-linear"))
    args = SFTConfig(
        str(tmp_path),
        **{
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
            "max_steps": 1,
            **fields,
        },
    )
    return SFTTrainer(shared, args, train_dataset=rows, processing_class=load_tokenizer("tiny"))


def step_gradient(tmp_path, **fields):
    """The loss and the policy's gradient of one optimizer step over all five rows."""
    sft = trainer(tmp_path, shuffle_dataset=False, max_grad_norm=0.0, learning_rate=0.0, **fields)
    found = {}
    step = sft._get_grad_norm

    def keep(model, grad_norm=None):
        found.update({n: p.grad.clone() for n, p in sft.shared.named_parameters() if p.grad is not None})
        return step(model, grad_norm)

    sft._get_grad_norm = keep
    sft._clip_grad_norm = lambda model: keep(model)
    result = sft.train()
    return result.training_loss, found


def test_tools_reach_the_template():
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = "{{ tools[0]['name'] }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (group,) = encode_demonstration({"messages": turns, "tools": '[{"name": "d"}]'}, 0, tokenizer).groups
    assert tokenizer.decode(group.prompt_ids) == "da"


# --- the loss --------------------------------------------------------------------------------------------------------


def test_loss_is_the_mean_over_answer_tokens(tmp_path):
    """The model's own logits give the same: prompt tokens are not learned, EOS is."""
    loss, _ = step_gradient(tmp_path, per_device_train_batch_size=5)
    shared = SharedModel.from_pretrained("tiny")
    tokenizer = load_tokenizer("tiny")
    total, count = 0.0, 0
    for row in ROWS:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = [*tokenizer(row["prompt"] + row["completion"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logps = shared.causal_lm(torch.tensor([ids])).logits[0].log_softmax(-1)
        total -= sum(float(logps[t - 1, ids[t]]) for t in range(len(prompt), len(ids)))
        count += len(ids) - len(prompt)
    assert loss == pytest.approx(total / count, rel=1e-5)  # a fresh adapter adds nothing


@pytest.mark.parametrize(("batch", "steps"), [(1, 5), (2, 3), (3, 2)])
def test_no_split_changes_the_gradient(tmp_path, batch, steps):
    """Five rows of 2 to 4 answer tokens: micro-batches of one, two and three add up to the batch of five."""
    whole_loss, whole = step_gradient(tmp_path / "whole", per_device_train_batch_size=5)
    loss, parts = step_gradient(
        tmp_path / "parts", per_device_train_batch_size=batch, gradient_accumulation_steps=steps
    )
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    assert whole.keys() == parts.keys()
    assert any(g.abs().max() > 0 for g in whole.values())
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-6)


def test_it_learns_and_evaluates(tmp_path):
    """Answers in a form that the base never gives: from 12 nats a token to below 2 in 30 steps."""
    rows = Dataset.from_list([{"prompt": f"{a}+{b}=", "completion": "7"} for a in range(8) for b in range(8)])
    sft = trainer(tmp_path, rows=rows, per_device_train_batch_size=16, learning_rate=3e-3, max_steps=30)
    before = sft.evaluate(rows)
    assert before["eval_perplexity"] == pytest.approx(math.exp(before["eval_loss"]))
    sft.train()
    assert sft.evaluate(rows)["eval_loss"] < min(0.5, before["eval_loss"] / 3)
    assert "entropy" in sft.state.log_history[-3] or any("entropy" in h for h in sft.state.log_history)


def test_resume_is_exact(tmp_path):
    """Stopped after two of four steps and gone on: the same weights to the bit."""
    fields = {"per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 1e-3}
    whole = trainer(tmp_path / "a", **fields)
    whole.train()
    first = trainer(tmp_path / "b", **{**fields, "save_strategy": "steps", "save_steps": 2})
    first.train()
    second = trainer(tmp_path / "b", **{**fields, "save_strategy": "steps", "save_steps": 2})
    second.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    expected = dict(whole.shared.named_parameters())
    for name, parameter in second.shared.named_parameters():
        assert torch.equal(parameter, expected[name]), name


# --- rows ------------------------------------------------------------------------------------------------------------


def encoded(row, **options):
    tokenizer = tiny.word_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}t1{{ ' ' }}{{ m['content'] }}{{ ' ' }}{{ eos_token }}{{ ' ' }}{% endfor %}"
        "{% if add_generation_prompt %}t1 {% endif %}"
    )
    group = encode_demonstration(row, 0, tokenizer, **options).groups[0]
    return group.prompt_ids.tolist(), group.response_ids[0].tolist()


def test_prompt_and_completion_text():
    tokenizer = load_tokenizer("tiny")
    group = encode_demonstration({"prompt": "1+2=", "completion": "3"}, 0, tokenizer).groups[0]
    assert group.prompt_ids.tolist() == tokenizer("1+2=")["input_ids"]
    assert group.response_ids[0].tolist() == [*tokenizer("3", add_special_tokens=False)["input_ids"], 2]


def test_plain_text_learns_every_token_but_the_first():
    tokenizer = load_tokenizer("tiny")
    group = encode_demonstration({"text": "1+2=3"}, 0, tokenizer).groups[0]
    ids = tokenizer("1+2=3")["input_ids"]
    assert group.prompt_ids.tolist() == ids[:1]
    assert group.response_ids[0].tolist() == [*ids[1:], tokenizer.eos_token_id]


def test_messages_learn_the_last_turn():
    turns = [
        {"role": "user", "content": "t5 t6"},
        {"role": "assistant", "content": "t7"},
        {"role": "user", "content": "t8"},
        {"role": "assistant", "content": "t9"},
    ]
    whole = encoded({"messages": turns})
    assert whole == encoded({"prompt": turns[:3], "completion": turns[3:]})
    assert len(whole[1]) < len(whole[0])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"question": "a", "answer": "b"}],
            r"columns \['question', 'answer'\]; it needs prompt and completion.*"
            r"rename_columns\(\{'answer': 'completion', 'question': 'prompt'\}\)",
        ),
        ([{"prompt": "a", "completion": ""}], "row 0 has '' as `completion`; give it text or messages, or drop it"),
        ([{"prompt": "a", "completion": "b"}, {"prompt": None, "completion": "b"}], "row 1 has None as `prompt`"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "row 0 ends with a message of 'user'"),
        ([{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}], "row 0 has a plain-text prompt"),
    ],
)
def test_bad_rows_are_named(rows, message):
    with pytest.raises(ValueError, match=message):
        check_demonstrations(rows, "train_dataset")


def test_a_single_token_has_nothing_to_learn():
    tokenizer = tiny.word_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="row 3 has a single token"):
        encode_demonstration({"text": "t5"}, 3, tokenizer)
