"""The reference's log-probs on disk: read where they are the same, never where they are not."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
from datasets import Dataset

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers import reference_cache
from hf_rlx.trainers.base import BaseTrainer
from hf_rlx.types import Group
from tests.tiny import randomise_lora
from tests.trainers.pair_tools import config, trainer
from tests.trainers.reward_tools import pairs, shared_model
from tests.trainers.tools import lora, tiny_llama, untimed

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"


@pytest.fixture
def forwards(monkeypatch):
    """Counts the groups that go through the reference."""
    seen = []
    original = BaseTrainer.reference_logps

    def counting(self, groups, role, temperature):
        seen.extend([role] * len(groups))
        return original(self, groups, role, temperature)

    monkeypatch.setattr(BaseTrainer, "reference_logps", counting)
    return seen


def run(tmp_path, forwards, model=None, data=None, folder="shared", **fields):
    """Train one step with the cache; how many groups the reference was asked for."""
    forwards.clear()
    args = config(tmp_path / "run", precompute_ref_log_probs=True, ref_cache_dir=str(tmp_path / folder), **fields)
    made = trainer(args, shared_model() if model is None else model, pairs(6) if data is None else data)
    made.train()
    return len(forwards)


def test_the_second_run_reads_the_first_one_s(tmp_path, forwards):
    """Also with another beta, batch and learning rate, which the reference does not depend on."""
    assert run(tmp_path, forwards) == 6
    assert run(tmp_path, forwards) == 0
    assert run(tmp_path, forwards, beta=0.5, per_device_train_batch_size=2, learning_rate=1.0) == 0
    assert run(tmp_path, forwards, folder="another") == 6


def test_the_default_folder_is_the_run_s(tmp_path, forwards):
    for expected in (6, 0):
        forwards.clear()
        trainer(config(tmp_path, precompute_ref_log_probs=True), dataset=pairs(6)).train()
        assert len(forwards) == expected
    assert len(list((tmp_path / "reference_cache").glob("*.safetensors"))) == 1


def test_other_data_model_template_or_length_is_computed(tmp_path, forwards):
    """Each of them is one change against the first run; none finds its file. The reference is a copy of the adapter
    that the policy starts from, so its weights and its scale count too."""
    rows = [
        {"prompt": [{"role": "user", "content": f"{i}+1="}], "chosen": "abc" * 4, "rejected": "ab" * (i + 1)}
        for i in range(6)
    ]
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = TEMPLATE

    def count(model=None, data=rows, template=TEMPLATE, **fields):
        forwards.clear()
        args = config(tmp_path / "run", precompute_ref_log_probs=True, ref_cache_dir=str(tmp_path / "c"), **fields)
        own = copy.deepcopy(tokenizer)
        own.chat_template = template
        trainer(args, shared_model() if model is None else model, data, processing_class=own).train()
        return len(forwards)

    assert count() == 6
    assert count() == 0
    changed = [{**rows[0], "rejected": "b"}, *rows[1:]]
    assert count(data=changed) == 6
    assert count(template=TEMPLATE.replace("{{ m['content'] }}", "{{ m['content'] }}.")) == 6
    assert count(max_length=8) == 6
    other_base = tiny_llama()
    with torch.no_grad():
        other_base.model.layers[1].mlp.down_proj.weight[3, 5] += 1e-3
    shared = shared_model()
    shared.causal_lm.model.layers[1].mlp.down_proj.base_layer.weight.data.copy_(
        other_base.model.layers[1].mlp.down_proj.weight.data
    )
    assert count(shared) == 6
    shared = shared_model()
    randomise_lora(shared.model, "policy", seed=9)
    assert count(shared) == 6
    shared = SharedModel.build(tiny_llama(), lora(lora_alpha=16))
    randomise_lora(shared.model, "policy")
    assert count(shared) == 6
    assert count(data=Dataset.from_list(rows)) == 0


def test_adapters_off_and_copies_do_not_share(tmp_path, forwards):
    """Reference: the base, a copy of all weights that is the base, and a copy of an adapter."""
    counts = [
        run(tmp_path, forwards, shared_model(trained=False)),
        run(tmp_path, forwards, tiny_llama()),
        run(tmp_path, forwards, shared_model(trained=True)),
    ]
    # All weights train: the copy's bits are the base's, and so are its log-probs.
    assert counts == [6, 0, 6]


@pytest.mark.parametrize("how", ["cut", "bit", "empty", "other key"])
def test_a_damaged_file_is_told_and_computed_anew(tmp_path, forwards, caplog, how):
    run(tmp_path, forwards)
    (path,) = (tmp_path / "shared").glob("*.safetensors")
    good, known = path.read_bytes(), reference_cache.load(path.parent, path.stem)
    if how == "cut":
        path.write_bytes(good[: len(good) // 2])
    elif how == "bit":
        path.write_bytes(good[:-3] + bytes([good[-3] ^ 1]) + good[-2:])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        reference_cache.store(path.parent, "f" * 40, known).replace(path)
    with caplog.at_level(logging.WARNING, logger="hf_rlx"):
        assert run(tmp_path, forwards) == 6
    assert "is damaged" in caplog.text
    assert "computed anew" in caplog.text
    again = reference_cache.load(path.parent, path.stem)
    assert all(torch.equal(again[name], values) for name, values in known.items())
    assert run(tmp_path, forwards) == 0


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    """The file is there whole, or not at all."""

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reference_cache.os, "replace", fail)
    with pytest.raises(OSError, match="No space left"):
        reference_cache.store(tmp_path, "a" * 40, {b"0" * 16: torch.ones(3)})
    assert list(tmp_path.iterdir()) == []


def test_what_is_stored_comes_back(tmp_path):
    """Ragged, empty, and by the token ids alone: no group has another one's digest."""
    groups = [Group.from_lists(p, r) for p, r in (([1], [[2], [3]]), ([1, 2], [[3]]), ([1], [[2, 3]]), ([1], [[2]]))]
    names = [reference_cache.digest(group) for group in groups]
    assert len(set(names)) == 4
    logps = {name: torch.randn(n) for name, n in zip(names, (2, 1, 0, 1), strict=True)}
    reference_cache.store(tmp_path, "b" * 40, logps)
    found = reference_cache.load(tmp_path, "b" * 40)
    assert found.keys() == logps.keys()
    assert all(torch.equal(found[name], logps[name]) for name in names)
    assert reference_cache.load(tmp_path, "c" * 40) is None
    reference_cache.store(tmp_path, "d" * 40, {})
    assert reference_cache.load(tmp_path, "d" * 40) == {}


@pytest.mark.parametrize("kind", ["dpo", "ipo"])
def test_precomputed_is_on_the_fly(tmp_path, kind):
    """Loss, gradient norm and every metric of three steps and an evaluation, with a model whose dropout is 0.5."""
    logs = []
    for precomputed in (False, True):
        args = config(tmp_path / str(precomputed), kind, max_steps=3, precompute_ref_log_probs=precomputed)
        made = trainer(args, tiny_llama(attention_dropout=0.5), pairs(10), peft_config=lora(lora_dropout=0.5))
        randomise_lora(made.shared.model, "policy")
        made.train()
        logs.append([*made.state.log_history[:3], made.evaluate(pairs(5, seed=2))])
    for ours, theirs in zip(*logs, strict=True):
        assert untimed(ours) == pytest.approx(untimed(theirs), abs=1e-5, rel=1e-6)
    assert [entry["loss"] for entry in logs[0][:3]] == pytest.approx([e["loss"] for e in logs[1][:3]], abs=1e-6)


def test_evaluation_rows_are_precomputed_too(tmp_path, forwards):
    """Once, for all evaluations of the run and of the next one; the batch size is a field."""
    data = {"a": pairs(3, seed=5), "b": pairs(4, seed=6)}
    for expected in (6 + 3 + 4, 0):
        forwards.clear()
        args = config(
            tmp_path,
            precompute_ref_log_probs=True,
            precompute_ref_batch_size=2,
            eval_strategy="steps",
            eval_steps=1,
            max_steps=3,
        )
        made = trainer(args, dataset=pairs(6), eval_dataset=data)
        made.train()
        assert [role for role in forwards if role == "reference"] == ["reference"] * expected
        assert sum("eval_b_loss" in entry for entry in made.state.log_history) == 3


def test_a_moving_reference_is_not_precomputed(tmp_path):
    with pytest.raises(ValueError, match="precompute_ref_log_probs keeps what sync_ref_model would change"):
        config(tmp_path, precompute_ref_log_probs=True, sync_ref_model=True)
    with pytest.raises(ValueError, match="precompute_ref_batch_size must be a whole number of at least 1"):
        config(tmp_path, precompute_ref_batch_size=0)


def test_the_key_has_the_precision_and_the_configuration():
    """Of one reference: another type, device or configuration is another key; the order of facts is not."""
    shared = shared_model(trained=False)
    shared.prepare_reference()
    facts = reference_cache.reference_facts(shared)
    json.dumps(facts, default=str)
    names = [b"0" * 16]
    key = reference_cache.key_of(names, facts)
    assert reference_cache.key_of(names, dict(reversed(facts.items()))) == key
    assert reference_cache.key_of(names, {**facts, "precision": "bf16"}) != key
    assert reference_cache.key_of([b"1" * 16], facts) != key
    shared.config.rms_norm_eps = 1e-3
    assert reference_cache.key_of(names, reference_cache.reference_facts(shared)) != key
