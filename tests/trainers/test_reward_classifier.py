"""Stand-alone reward models: what is saved is a transformers sequence classifier that gives the same score."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification, get_peft_model
from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2ForSequenceClassification

from hf_rlx.models.classifier import from_causal_lm, load_classifier
from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.pair_batches import PairBatch
from hf_rlx.types import Group
from tests.tiny import causal_lm, config, ragged_groups
from tests.trainers.reward_tools import config as reward_config
from tests.trainers.reward_tools import pairs, trainer
from tests.trainers.tools import lora, relative_gap, tiny_llama

GROUPS = [Group.from_lists([1, 69, 70], [[71, 2], [72, 73, 74, 2]]), Group.from_lists([1, 80], [[81, 82, 2]])]


def one_by_one(model, groups):
    """transformers' own scores, each answer alone, with nothing to mistake for padding."""
    rows = [torch.cat([g.prompt_ids, ids]) for g in groups for ids in g.response_ids]
    with torch.no_grad():
        return torch.cat([model(input_ids=row[None]).logits[:, 0] for row in rows])


def classifier(**changes):
    """A random Llama classifier with pad 0."""
    torch.manual_seed(5)
    model = from_causal_lm(tiny_llama(**changes))
    with torch.no_grad():
        model.score.weight.mul_(5)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma", "phi3", "gpt2", "mistral_window", "qwen3_moe"])
def test_packed_padded_and_transformers_agree(family):
    """One scoring function, whatever the layout; families with the head on other backbones."""
    model = from_causal_lm(causal_lm(family)).eval()
    groups = [g.select([i for i, ids in enumerate(g.response_ids) if ids.numel()]) for g in ragged_groups()]
    expected = one_by_one(model, groups)
    packed, padded = SharedModel(model), SharedModel(model, packing=False)
    torch.testing.assert_close(packed.score(groups), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(padded.score(groups), expected, atol=2e-5, rtol=1e-5)
    assert packed.plan.packed
    assert not padded.plan.packed


def test_a_model_that_cannot_pack_is_padded():
    """ALiBi-like attention past the interface: found by the probe, or by the configuration."""
    model = from_causal_lm(causal_lm("bloom")).eval()
    shared = SharedModel(model)
    torch.testing.assert_close(shared.score(GROUPS_SMALL), one_by_one(model, GROUPS_SMALL), atol=2e-5, rtol=1e-5)
    assert not shared.plan.packed


GROUPS_SMALL = [Group.from_lists([1, 9, 10], [[11, 2], [12, 13, 14, 2]]), Group.from_lists([1, 20], [[21, 22, 2]])]


def test_eos_is_read_where_pad_is_eos():
    """ids [2, 5, 6, 7, eos] and [2, 5, 6, 7] have different scores, though pad is eos; transformers gives the same for
    both. Of mixed lengths each has the score that it has alone."""
    model = classifier(pad_token_id=2)
    shared = SharedModel(model)
    with_eos, without = Group.from_lists([3, 5], [[6, 7, 2]]), Group.from_lists([3, 5], [[6, 7]])
    batch = shared.score([with_eos, without])
    assert abs(float(batch[0] - batch[1])) > 1e-3
    alone = torch.cat([shared.score([with_eos]), shared.score([without])])
    torch.testing.assert_close(batch, alone, atol=1e-6, rtol=0)
    theirs = one_by_one(model, [with_eos, without])
    torch.testing.assert_close(theirs[0], theirs[1], atol=1e-6, rtol=0)


def test_the_score_is_read_at_the_last_token_exactly():
    """Hidden states that hold their own position: the head gives back the index of EOS."""
    shared = SharedModel(classifier())
    backbone = shared.causal_lm.model

    def position(module, args, kwargs, output):
        output.last_hidden_state = kwargs["position_ids"][..., None].float().expand(output.last_hidden_state.shape)
        return output

    shared.score(GROUPS)  # the plan is made with the true hidden states
    handle = backbone.register_forward_hook(position, with_kwargs=True)
    with torch.no_grad():
        shared.causal_lm.score.weight.fill_(1 / 32)
    assert shared.score(GROUPS).tolist() == pytest.approx([4.0, 6.0, 4.0])
    handle.remove()


@pytest.mark.parametrize(
    "kind", ["full by name", "full in memory", "adapter by name", "adapter in memory", "a PeftModel"]
)
def test_saved_and_loaded_by_transformers_it_gives_the_same_score(tmp_path, kind):
    """With the head, without a word about the task type, LoRA not on the head, and one label."""
    model, config = ("tiny" if "name" in kind else classifier()), None
    if kind.startswith("adapter"):
        config = lora(task_type="SEQ_CLS") if "name" in kind else lora()
    if kind == "a PeftModel":
        model = get_peft_model(model, lora(task_type="SEQ_CLS"))
    rewards = trainer(reward_config(tmp_path, max_steps=2), model, peft_config=config)
    names = [name for name, _ in rewards.shared.trainable_parameters("reward")]
    assert any(".score." in name for name in names)
    assert not any("score" in name and "lora" in name for name in names)
    rewards.train()
    expected = rewards.shared.score(GROUPS)
    rewards.save_model(str(tmp_path / "saved"))
    folder = str(tmp_path / "saved")
    nameless = kind in ("adapter in memory", "a PeftModel")
    ours = SharedModel.from_pretrained(folder, base=classifier() if nameless else None)
    torch.testing.assert_close(ours.score(GROUPS), expected, atol=1e-6, rtol=0)
    if kind.startswith("full"):
        theirs = AutoModelForSequenceClassification.from_pretrained(folder)
        assert theirs.config.num_labels == 1
    elif kind == "adapter by name":
        theirs = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
        plain = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
        torch.testing.assert_close(one_by_one(plain, GROUPS), expected, atol=2e-6, rtol=1e-6)
    else:
        return
    torch.testing.assert_close(one_by_one(theirs, GROUPS), expected, atol=2e-6, rtol=1e-6)


def test_a_merged_classifier_is_loaded_with_its_head(tmp_path, caplog):
    """trl#368: merged, saved and loaded by transformers, nothing is newly initialised and the score is the same."""
    rewards = trainer(reward_config(tmp_path, max_steps=2), classifier(), peft_config=lora())
    rewards.train()
    expected = rewards.shared.score(GROUPS)
    rewards.shared.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    with caplog.at_level(logging.WARNING):
        theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    assert "newly initialized" not in caplog.text
    assert theirs.config.num_labels == 1
    torch.testing.assert_close(one_by_one(theirs, GROUPS), expected, atol=2e-6, rtol=1e-5)


def test_transformers_reads_eos_of_what_is_saved_where_pad_was_eos(tmp_path):
    """The saved tokenizer and configuration have another pad token, so transformers' own forward finds the EOS, in a
    padded batch too."""
    tokenizer = load_tokenizer("tiny")
    tokenizer.pad_token = tokenizer.eos_token
    rewards = trainer(reward_config(tmp_path), classifier(pad_token_id=2), processing_class=tokenizer)
    rewards.train()
    rewards.save_model(str(tmp_path / "saved"))
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    saved = load_tokenizer(tmp_path / "saved")
    assert saved.pad_token != saved.eos_token
    assert loaded.config.pad_token_id == saved.pad_token_id
    batch = saved(["ab<eos>", "abcd<eos>"], padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = loaded(**batch).logits[:, 0]
    groups = [Group.from_lists([1, 69, 70], [[2], [71, 72, 2]])]
    torch.testing.assert_close(theirs, rewards.shared.score(groups), atol=2e-6, rtol=1e-6)


def test_the_gradient_is_that_of_transformers_own_forward(tmp_path):
    """All weights, one pair of each row as two padded rows through the classifier itself."""
    model = classifier()
    rewards = trainer(reward_config(tmp_path), model)
    rows = rewards.encode(list(enumerate(pairs(3))))
    with rewards.shared.as_role("reward"):
        loss = rewards.pair_loss(rewards.shared, PairBatch(rows, torch.tensor(3.0)), "reward")
        loss.backward()
    ours = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model.set_attn_implementation("eager")
    texts = [torch.cat([r.groups[0].prompt_ids, r.groups[0].response_ids[k]]) for k in range(2) for r in rows]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=0)
    scores = model(input_ids=ids, attention_mask=(ids != 0).long()).logits[:, 0]
    expected = -torch.nn.functional.logsigmoid(scores[:3] - scores[3:]).mean()
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    assert relative_gap(ours, {n: p.grad for n, p in model.named_parameters()}) < 1e-5


def test_a_classifier_is_made_of_a_language_model_s_backbone():
    """The same hidden states, whatever the checkpoint; the head starts with deviation 1 / sqrt(H + 1)."""
    model = load_classifier("tiny")
    hidden = model.config.hidden_size
    assert float(model.score.weight.detach().std()) == pytest.approx((hidden + 1) ** -0.5, rel=0.35)
    assert model.config.architectures == ["LlamaForSequenceClassification"]


def test_what_cannot_be_a_reward_model_is_refused(tmp_path):
    two = GPT2ForSequenceClassification(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, num_labels=2))
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification has num_labels=2; a reward model is loaded"):
        trainer(reward_config(tmp_path), two)
    from transformers import BertConfig, BertForSequenceClassification

    bert = BertForSequenceClassification(
        BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=1)
    )
    with pytest.raises(ValueError, match=r"no `score` head on a decoder.*decoder-only"):
        trainer(reward_config(tmp_path), bert)
    with pytest.raises(ValueError, match=r"trains without the classifier's head.*SEQ_CLS"):
        trainer(reward_config(tmp_path), get_peft_model(classifier(), lora(target_modules=["q_proj"])))
    with pytest.raises(ValueError, match="both a PeftModel and a peft_config"):
        trainer(reward_config(tmp_path), get_peft_model(classifier(), lora(task_type="SEQ_CLS")), peft_config=lora())


def test_facts_of_a_classifier_are_saved_beside_it(tmp_path):
    rewards = trainer(
        reward_config(tmp_path, normalizer="running", fit_temperature=True), classifier(), eval_dataset=pairs(8)
    )
    rewards.train()
    rewards.save_model(str(tmp_path / "saved"))
    facts = json.loads((tmp_path / "saved" / "role.json").read_text())["facts"]
    assert facts["moments"]["count"] == 16
    assert facts["temperature"] == rewards.shared.roles["reward"].facts["temperature"]
    assert SharedModel.from_pretrained(tmp_path / "saved").roles["reward"].facts == facts


def test_saving_leaves_the_checkpoints_of_a_classifier_beside_it(tmp_path):
    """A checkpoint has its `role.json` at its root, as far below the run's folder as a role's: it is none, neither to
    be cleared away nor to stand in the card; a role that is gone is."""
    fields = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    rewards = trainer(reward_config(tmp_path, **fields), classifier())
    rewards.train()
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / "role.json").write_text('{"own_adapter": false, "head": true}')
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "role.json").write_text('["somebody else\'s"]')
    rewards.save_model()
    assert (tmp_path / "notes" / "role.json").is_file()
    assert sorted(path.parent.name for path in tmp_path.glob("*/model.safetensors")) == [
        "checkpoint-1",
        "checkpoint-2",
    ]
    assert not (tmp_path / "critic").exists()
    assert "## Roles" not in (tmp_path / "README.md").read_text()
    (tmp_path / "notes" / "role.json").write_text("no JSON")
    rewards.shared.save_pretrained(tmp_path)
    assert (tmp_path / "notes" / "role.json").is_file()
    again = trainer(reward_config(tmp_path, **fields), classifier())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert again.state.global_step == 2


def test_the_config_of_a_family_without_classifier_is_refused():
    with pytest.raises(ValueError, match="has no sequence classifier in transformers"):
        from_causal_lm(causal_lm("granite") if config("granite") else None)
