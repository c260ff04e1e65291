"""One batch through TRL 1.16's RewardTrainer and through ours: the same classifier, rows, loss and gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForSequenceClassification

from hf_rlx.models.classifier import from_causal_lm
from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.pair_batches import PairBatch
from hf_rlx.types import Group
from tests.trainers.reward_tools import config, trainer
from tests.trainers.tools import relative_gap, tiny_llama

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")

ROWS = [
    {"prompt": "1+2=", "chosen": "3", "rejected": "12"},
    {"prompt": "12+345=", "chosen": "357", "rejected": "9876543"},
    {"prompt": "x", "chosen": "abcd", "rejected": "b"},
]
MESSAGES = [
    {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "chosen": [{"role": "assistant", "content": row["chosen"]}],
        "rejected": [{"role": "assistant", "content": row["rejected"]}],
    }
    for row in ROWS
]
IMPLICIT = [{"chosen": r["prompt"] + r["chosen"], "rejected": r["prompt"] + r["rejected"]} for r in ROWS]


def classifier(**changes) -> LlamaForSequenceClassification:
    """Always the same weights."""
    torch.manual_seed(5)
    return from_causal_lm(tiny_llama(**changes))


def theirs(tmp_path, rows, model=None, tokenizer=None, **fields):
    """TRL's trainer on `rows`."""
    options = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    args = trl.RewardConfig(str(tmp_path / "trl"), per_device_train_batch_size=8, **{**options, **fields})
    return trl.RewardTrainer(
        classifier() if model is None else model,
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer or load_tokenizer("tiny"),
    )


def their_loss(other):
    """Loss and gradient of all rows as one batch."""
    batch = other.data_collator([other.train_dataset[i] for i in range(len(other.train_dataset))])
    other.model.train()
    loss = other.compute_loss(other.model, batch)
    other.model.zero_grad()
    loss.backward()
    return float(loss.detach()), {n: p.grad.clone() for n, p in other.model.named_parameters()}


def our_loss(ours):
    """Loss and gradient of all rows as one batch."""
    rows = ours.encode(list(enumerate(ours.train_dataset)))
    model = ours.shared
    model.zero_grad()
    with model.as_role("reward"):
        loss = ours.pair_loss(model, PairBatch(rows, torch.tensor(float(len(rows)))), "reward")
        loss.backward()
    return float(loss.detach()), {n.removeprefix("model."): p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["text", "messages", "implicit", "margins", "centred", "tokenized"])
def test_loss_and_gradient_are_trl_s(tmp_path, kind):
    """To 1e-6, and token for token the same sequences."""
    rows = {"messages": MESSAGES, "implicit": IMPLICIT}.get(kind, ROWS)
    fields = {"center_rewards_coefficient": 0.1} if kind == "centred" else {}
    if kind == "margins":
        rows = [{**row, "margin": 0.5 * i} for i, row in enumerate(rows)]
    if kind == "tokenized":
        rows = [{"chosen_ids": [1, 69, 70 + i, 2], "rejected_ids": [1, 69, 2]} for i in range(3)]
    other = theirs(tmp_path, rows, **fields)
    expected, their_grads = their_loss(other)
    ours = trainer(config(tmp_path, **fields), classifier(), rows)
    found, our_grads = our_loss(ours)
    assert found == pytest.approx(expected, abs=1e-6)
    assert relative_gap(our_grads, their_grads) < 1e-5
    encoded = [row.groups[0] for row in ours.encode(list(enumerate(rows)))]
    for group, theirs_row in zip(encoded, other.train_dataset, strict=True):
        for ids, name in zip(group.response_ids, ("chosen_ids", "rejected_ids"), strict=True):
            assert torch.cat([group.prompt_ids, ids]).tolist() == theirs_row[name]


# --- the differences -------------------------------------------------------------------------------------------------


def test_the_score_is_read_at_eos_where_pad_is_eos(tmp_path):
    """TRL's loss does not change when the appended EOS is taken away; ours does."""
    tokenizer = load_tokenizer("tiny")
    tokenizer.pad_token = tokenizer.eos_token
    with_eos = [{"chosen_ids": [1, 69, 70, 2], "rejected_ids": [1, 69, 71, 72, 2]}]
    without = [{"chosen_ids": [1, 69, 70], "rejected_ids": [1, 69, 71, 72]}]
    losses = [
        their_loss(theirs(tmp_path, rows, classifier(pad_token_id=2), tokenizer))[0] for rows in (with_eos, without)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    ours = [
        our_loss(
            trainer(config(tmp_path), classifier(pad_token_id=2), rows, processing_class=copy.deepcopy(tokenizer))
        )[0]
        for rows in (with_eos, without)
    ]
    assert abs(ours[0] - ours[1]) > 1e-4


def test_long_rows_are_cut_and_not_dropped(tmp_path):
    """max_length 8: of TRL's three rows two are left, ours are three of at most eight tokens that end with EOS."""
    other = theirs(tmp_path, ROWS, max_length=8)
    assert len(other.train_dataset) == 2
    ours = trainer(config(tmp_path, max_length=8), classifier(), ROWS)
    rows = ours.encode(list(enumerate(ROWS)))
    assert [row.cut for row in rows] == [0, 2, 0]
    for row in rows:
        (group,) = row.groups
        assert all(len(group.prompt_ids) + len(ids) <= 8 and ids[-1] == 2 for ids in group.response_ids)


def test_the_score_of_a_message_is_read_at_its_eos(tmp_path):
    """A template in the way of ChatML: TRL's sequences end with a line break, ours with EOS."""
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '<eos>\n' }}{% endfor %}"
    other = theirs(tmp_path, MESSAGES, tokenizer=tokenizer)
    assert other.train_dataset[0]["chosen_ids"][-2:] == [2, 99]
    ours = trainer(config(tmp_path), classifier(), MESSAGES, processing_class=tokenizer)
    (row,) = ours.encode([(0, MESSAGES[0])])
    assert all(ids[-1] == 2 for ids in row.groups[0].response_ids)


def test_an_uneven_micro_batch_weighs_by_its_rows(tmp_path):
    """Three rows in micro-batches of two and one: TRL's loss is the mean of both means, ours that of three rows."""
    fields = {"gradient_accumulation_steps": 2, "max_steps": 1, "shuffle_dataset": False}
    ours = trainer(config(tmp_path, **fields, per_device_train_batch_size=2), classifier(), ROWS)
    ours.train()
    single = [our_loss(trainer(config(tmp_path), classifier(), [row]))[0] for row in ROWS]
    assert ours.state.log_history[0]["loss"] == pytest.approx(sum(single) / 3, abs=1e-6)
    other = trl.RewardTrainer(
        classifier(),
        trl.RewardConfig(
            str(tmp_path / "trl"),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=1,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            train_sampling_strategy="sequential",
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=load_tokenizer("tiny"),
    )
    other.train()
    mean_of_means = ((single[0] + single[1]) / 2 + single[2]) / 2
    assert other.state.log_history[0]["loss"] == pytest.approx(mean_of_means, abs=1e-5)
    assert abs(mean_of_means - sum(single) / 3) > 1e-3


def test_a_tie_counts_half(tmp_path):
    """A head of zeros: TRL logs an accuracy of 0, ours of 1/2."""
    model = classifier()
    with torch.no_grad():
        model.score.weight.zero_()
    other = theirs(tmp_path, ROWS, copy.deepcopy(model))
    their_loss(other)
    assert other._metrics["train"]["accuracy"] == [0.0]
    ours = trainer(config(tmp_path), model, ROWS)
    our_loss(ours)
    assert ours.metrics["train"].flush()["accuracy"] == 0.5


def test_a_trl_classifier_is_scored_as_trl_scores_it(tmp_path):
    """What TRL has saved loads here, with the same score where pad is not EOS."""
    other = theirs(tmp_path, ROWS)
    other.save_model(str(tmp_path / "saved"))
    shared = SharedModel.from_pretrained(tmp_path / "saved")
    ids = other.train_dataset[0]["chosen_ids"]
    with torch.no_grad():
        expected = other.model(input_ids=torch.tensor([ids])).logits[:, 0]
    found = shared.score([Group.from_lists(ids[:3], [ids[3:]])])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
