"""DPO and its relatives on small models: numbers by hand, gradients, what is logged, and that they learn."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from hf_rlx.models.loading import four_bit_config, load_tokenizer
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.pair_batches import PairBatch
from tests.tiny import randomise_lora
from tests.trainers.pair_tools import KINDS, config, given_pairs, row, trainer
from tests.trainers.reward_tools import lists, pairs, shared_model
from tests.trainers.tools import KeepGradients, digest, lora, move, relative_gap, tiny_llama

# Two pairs of ragged answers: sums -3, -4; -1.5, -1. The reference's: -2, -4.5; -1, -2.
POLICY = [[-1.0, -2.0], [-1.0, -1.0, -2.0], [-1.5], [-0.5, -0.5]]
REFERENCE = [[-1.0, -1.0], [-1.5, -1.5, -1.5], [-1.0], [-1.0, -1.0]]
HAND = ["dpo", "ipo", "simpo", "orpo"]


def by_hand(tmp_path, kind="dpo", policy=POLICY, reference=REFERENCE, **fields):
    """Loss, gradient by token, and averages of the table, of given log-probs."""
    made = trainer(config(tmp_path, kind, **fields))
    found = given_pairs(policy, reference if kind in ("dpo", "ipo") else None)
    objective = made.pair_objective(found)
    (grad,) = torch.autograd.grad(objective.loss, [found.logps])
    return float(objective.loss.detach()), grad, {k: v.tolist() for k, v in objective.table.items()}


# --- hand-derived numbers --------------------------------------------------------------------------------------------


def test_dpo_by_hand(tmp_path):
    """h = (-3 + 2) - (-4 + 4.5) = -1.5 and (-1.5 + 1) - (-1 + 2) = -1.5; beta 0.5: -log sigma(-0.75) = 1.136871. Every
    token of a chosen answer has the gradient -0.5 sigma(0.75) / 2 = -0.169795, every rejected one the opposite."""
    loss, grad, table = by_hand(tmp_path, beta=0.5)
    assert loss == pytest.approx(1.136871, abs=1e-6)
    expected = [[-0.169795, -0.169795, 0], [0.169795] * 3, [-0.169795, 0, 0], [0.169795, 0.169795, 0]]
    torch.testing.assert_close(grad, torch.tensor(expected), atol=1e-6, rtol=0)
    assert table["rewards/chosen"] == [-0.5, -0.25]
    assert table["rewards/rejected"] == [0.25, 0.5]
    assert table["rewards/margins"] == [-0.75, -0.75]
    assert table["rewards/accuracies"] == [0, 0]
    assert table["logps/chosen"] == [-3, -1.5]
    assert table["logps/chosen_change"] == [-1, -0.5]
    assert table["logps/rejected_change"] == [0.5, 1]
    # k3 of the chosen tokens: d = 0 and -1, e - 1 - 1 = 0.718282 over two tokens; d = -0.5: e^0.5 - 1.5 = 0.148721.
    assert table["kl/chosen"] == pytest.approx([0.359141, 0.148721], abs=1e-6)
    assert table["lengths/rejected"] == [3, 2]


def test_smoothing_and_the_other_losses_by_hand(tmp_path):
    """At beta h = -0.75: -log sigma = 1.136871, of the opposite 0.386871. Smoothed by 0.2: 0.8 x 1.136871 + 0.2 x
    0.386871 = 0.986871. Robust: (0.8 x 1.136871 - 0.2 x 0.386871) / 0.6 = 1.386871. Hinge: 1.75. Means per token:
    h = -0.5 - 0.5 / 3 = -0.666667 and -0.5 - 0.5 = -1; IPO at beta 0.5 (target 1): 2.777778 and 4, mean 3.388889;
    sigmoid_norm: -log sigma(-0.333333) = 0.873639 and of -0.5 = 0.974077, mean 0.923858. Likelihood: 1.5."""
    for fields, expected in (
        ({"label_smoothing": 0.2}, 0.986871),
        ({"loss_type": "robust", "label_smoothing": 0.2}, 1.386871),
        ({"loss_type": ["hinge"]}, 1.75),
        ({"loss_type": ["ipo"]}, 3.388889),
        ({"loss_type": ["sigmoid_norm"]}, 0.923858),
        ({"loss_type": ["sft"]}, 1.5),
        ({"rpo_alpha": 0.5}, 1.136871 + 0.75),
        ({"loss_type": ["hinge", "sft"], "loss_weights": [2.0, 0.1]}, 3.5 + 0.15),
    ):
        loss, _, table = by_hand(tmp_path, beta=0.5, **fields)
        assert loss == pytest.approx(expected, abs=1e-6), fields
        assert sum(table["loss"]) / 2 == pytest.approx(expected, abs=1e-6), fields


def test_length_desensitised_by_hand(tmp_path):
    """alpha 0.5: of the first pair the rejected answer's third token counts half, policy -3, reference -3.75: h = -1 -
    0.75 = -1.75. Of the second its second token: -0.75 and -1.5: h = -0.5 - 0.75 = -1.25. Losses at beta 0.5: 1.223445
    and 1.053701, mean 1.138573."""
    loss, grad, _ = by_hand(tmp_path, beta=0.5, ld_alpha=0.5)
    assert loss == pytest.approx(1.138573, abs=1e-6)
    assert float(grad[1, 2] / grad[1, 1]) == pytest.approx(0.5)
    assert by_hand(tmp_path, beta=0.5, ld_alpha=1.0)[0] == pytest.approx(1.136871, abs=1e-6)


def test_ipo_by_hand(tmp_path):
    """Per token: as above 3.388889; a token of a chosen answer of two has the gradient 2 (h - 1) / 2 pairs / 2 tokens
    = (-0.666667 - 1) / 2 = -0.833333. Sums: h = -1.5 twice, (-2.5)^2 = 6.25. Rewards are what the loss has."""
    loss, grad, table = by_hand(tmp_path, "ipo", beta=0.5)
    assert loss == pytest.approx(3.388889, abs=1e-6)
    assert float(grad[0, 0]) == pytest.approx(-0.833333, abs=1e-6)
    assert table["rewards/chosen"] == pytest.approx([-0.25, -0.25])
    loss, _, table = by_hand(tmp_path, "ipo", beta=0.5, normalize=False)
    assert loss == pytest.approx(6.25, abs=1e-6)
    assert table["rewards/chosen"] == pytest.approx([-0.5, -0.25])


def test_simpo_by_hand(tmp_path):
    """Means -1.5, -1.333333 and -1.5, -0.5. beta 2, gamma 1: z = -1.333333 and -3; losses 1.567296 and 3.048587, mean
    2.307942. A chosen token of the first pair: -2 sigma(1.333333) / 2 pairs / 2 tokens = -0.395696."""
    loss, grad, table = by_hand(tmp_path, "simpo")
    assert loss == pytest.approx(2.307942, abs=1e-6)
    assert float(grad[0, 0]) == pytest.approx(-0.395696, abs=1e-6)
    assert table["rewards/chosen"] == [-3, -3]
    assert "kl/chosen" not in table
    assert by_hand(tmp_path, "simpo", simpo_gamma=1.0, gamma_beta_ratio=7.0)[0] == pytest.approx(loss)


def test_simpo_s_gamma_is_a_margin(tmp_path):
    """Means -1.0 and -1.5, beta 2, gamma 1: log 2. The ratio is gamma / beta: 0.5 by default."""
    args = config(tmp_path, "simpo")
    assert (args.beta, args.gamma_beta_ratio, args.target_margin) == (2.0, 0.5, 1.0)
    made = trainer(args)
    loss = made.pair_objective(given_pairs([[-1.0], [-1.5]])).loss
    assert loss.item() == pytest.approx(math.log(2), abs=1e-6)


def test_orpo_by_hand(tmp_path):
    """Means a = -1.5, b = -1.333333 and -1.5, -0.5. log odds: -1.247518 and -1.027355, -1.247518 and 0.432752 (log p -
    log(1 - p)); their differences -0.220162 and -1.680270; -log sigma: 0.809275 and 1.851129. nll 1.5 both: loss 1.5 +
    0.1 x 1.330202 = 1.633020. A chosen token of the second pair (length 1): (-1 - 0.1 sigma(1.680270) / (1 -
    e^-1.5)) / 2 = (-1 - 0.1 x 0.842940 / 0.776870) / 2 = -0.554252."""
    loss, grad, table = by_hand(tmp_path, "orpo")
    assert loss == pytest.approx(1.633020, abs=1e-6)
    assert float(grad[2, 0]) == pytest.approx(-0.554252, abs=1e-6)
    assert table["log_odds_chosen"] == pytest.approx([-0.220162, -1.680270], abs=1e-6)
    assert table["log_odds_ratio"] == pytest.approx([-0.809275, -1.851129], abs=1e-6)
    assert table["nll_loss"] == [1.5, 1.5]


def test_orpo_s_ratio_of_half_and_one(tmp_path):
    """Means -0.5 and -1.0: 0.320300 for the ratio term."""
    _, _, table = by_hand(tmp_path, "orpo", [[-0.5], [-1.0]])
    assert table["log_odds_ratio"] == pytest.approx([-0.320300], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_log_ratios_stay_finite(tmp_path, kind):
    """100 nats either way, and certainty."""
    policy = [[-100.0], [0.0], [-1e-9], [-100.0]]
    loss, grad, _ = by_hand(tmp_path, kind, policy, [[0.0], [-100.0], [-100.0], [0.0]])
    assert math.isfinite(loss)
    assert torch.isfinite(grad).all()


# --- the model's gradient --------------------------------------------------------------------------------------------


def first_gradient(made, rows):
    """Loss and gradient of rows as one batch."""
    made.shared.zero_grad()
    with made.shared.as_role("policy"):
        loss = made.pair_loss(made.model, PairBatch(rows, torch.tensor(float(len(rows)))), "policy")
        loss.backward()
    return float(loss.detach()), {n: p.grad.clone() for n, p in made.shared.named_parameters() if p.grad is not None}


def test_the_same_answer_twice_is_ln_2_and_no_gradient(tmp_path):
    """Such rows are left out before; here they are let in."""
    made = trainer(config(tmp_path), shared_model(trained=False))
    move(made.shared, 0.3)
    same = row(3, 3)
    same.groups[0].response_ids[1].copy_(same.groups[0].response_ids[0])
    loss, grads = first_gradient(made, [same])
    assert loss == pytest.approx(math.log(2), abs=1e-6)
    assert max(float(g.abs().max()) for g in grads.values()) < 1e-7


@pytest.mark.parametrize("nll_on_prompt", [False, True])
def test_orpo_s_likelihood_on_the_prompt_is_asked_for(tmp_path, nll_on_prompt):
    """With beta 0 the loss is the mean negative log-prob of the answer's tokens, or of the prompt's (but the first)
    and the answer's, from the model's own logits."""
    made = trainer(config(tmp_path, "orpo", beta=0.0, nll_on_prompt=nll_on_prompt), tiny_llama(), pairs(3))
    rows = made.encode(list(enumerate(pairs(3))))
    loss, grads = first_gradient(made, rows)
    expected = []
    for each in rows:
        (group,) = each.groups
        ids = torch.cat([group.prompt_ids, group.response_ids[0]])
        with torch.no_grad():
            logits = made.shared.causal_lm(input_ids=ids[None]).logits[0, :-1]
        logps = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        start = 0 if nll_on_prompt else len(group.prompt_ids) - 1
        expected.append(-float(logps[start:].mean()))
    assert loss == pytest.approx(sum(expected) / 3, abs=1e-5)
    assert grads


def test_orpo_s_other_numbers_do_not_see_the_prompt(tmp_path):
    """Answers, lengths, entropies and odds are the same with `nll_on_prompt`, only the likelihood term is not."""
    tables = []
    for nll_on_prompt in (False, True):
        made = trainer(config(tmp_path, "orpo", nll_on_prompt=nll_on_prompt), shared_model(), pairs(3))
        rows = made.encode(list(enumerate(pairs(3))))
        with torch.no_grad():
            tables.append({k: v.tolist() for k, v in made.pair_objective(made.pairs(None, rows)).table.items()})
    for name, values in tables[0].items():
        same = tables[1][name] == pytest.approx(values, abs=1e-4)
        assert same == (name not in ("nll_loss", "loss")), name


def gradients(tmp_path, kind, model=None, data=None, **fields):
    """Gradients and losses of every optimizer step over six rows, in steps of four and then two."""
    keep = KeepGradients()
    args = config(tmp_path, kind, optim="sgd", max_steps=-1, num_train_epochs=1, max_grad_norm=0.0, **fields)
    made = trainer(args, model, pairs(6) if data is None else data, callbacks=[keep])
    made.train()
    return keep.steps, [entry for entry in made.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", KINDS)
def test_the_split_of_a_step_and_the_layout_do_not_matter(tmp_path, kind):
    """Accumulation, parts of a micro-batch, padded batches and checkpointing: one gradient, and the same metrics."""
    whole, logs = gradients(tmp_path, kind)
    for fields in (
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"max_tokens_per_update": 1},
        {"model": shared_model(packing=False)},
        {"gradient_checkpointing": True},
    ):
        parts, other = gradients(tmp_path, kind, **fields)
        assert len(parts) == len(whole) == 2
        for ours, theirs in zip(parts, whole, strict=True):
            assert relative_gap(ours, theirs) < 2e-5
        names = ("loss", "rewards/margins", "rewards/chosen", "logps/chosen", "entropy", "kl/chosen", "num_tokens")
        for ours, theirs in zip(other, logs, strict=True):
            assert {n: ours.get(n) for n in names} == pytest.approx({n: theirs.get(n) for n in names}, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_ranked_lists_give_all_their_pairs(tmp_path, kind):
    """A list of three, best last, is its three pairs; ties give none. The mean is over pairs."""
    texts = ["aaaa", "bb", "c"]
    listed = [{"prompt": "1=", "responses": texts, "ranks": [2, 1, 0]}]
    each = [{"prompt": "1=", "chosen": texts[i], "rejected": texts[j]} for i, j in ((1, 0), (2, 0), (2, 1))]
    listed.append({"prompt": "1=", "responses": ["d", "e"], "ranks": [1, 1]})
    fields = {"shuffle_dataset": False, "per_device_train_batch_size": 8}
    (ours,), logs = gradients(tmp_path, kind, data=Dataset.from_list(listed), **fields)
    (theirs,), other = gradients(tmp_path, kind, data=Dataset.from_list(each), **fields)
    assert relative_gap(ours, theirs) < 2e-5
    assert logs[0]["loss"] == pytest.approx(other[0]["loss"], abs=1e-6)
    assert logs[0]["rows/without_pair"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_pair_change_nothing(tmp_path, kind):
    """Identical answers leave loss and denominator, and are counted."""
    fields = {"shuffle_dataset": False, "per_device_train_batch_size": 8}
    plain, logs = gradients(tmp_path, kind, data=pairs(4), **fields)
    same = {"prompt": "1=", "chosen": "a", "rejected": "a"}
    ties, other = gradients(tmp_path, kind, data=Dataset.from_list([same, *pairs(4), same]), **fields)
    assert relative_gap(ties[0], plain[0]) < 2e-6
    assert other[0]["loss"] == pytest.approx(logs[0]["loss"], abs=1e-6)
    assert other[0]["rows/without_pair"] == 2


def test_answers_without_a_token_in_common(tmp_path):
    """Rows that are tokenized already and share no first token: each answer's first token is its prompt."""
    rows = [
        {"chosen_ids": [5, 69, 2], "rejected_ids": [7, 70, 71, 2]},
        {"chosen_ids": [1, 69], "rejected_ids": [1, 70]},
    ]
    made = trainer(config(tmp_path), tiny_llama(), rows)
    encoded = made.encode(list(enumerate(rows)))
    assert [len(each.groups) for each in encoded] == [2, 1]
    table = made.pair_objective(made.pairs(None, encoded)).table

    def logp(ids):
        with torch.no_grad():
            logits = made.shared.causal_lm(input_ids=torch.tensor([ids])).logits[0, :-1]
        return float(torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[1:, None]).sum())

    assert table["logps/chosen"].tolist() == pytest.approx([logp(row["chosen_ids"]) for row in rows], abs=1e-4)
    assert table["logps/rejected"].tolist() == pytest.approx([logp(row["rejected_ids"]) for row in rows], abs=1e-4)
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_messages_are_trained_on_and_long_ones_cut(tmp_path, kind):
    """Through the chat template, up to EOS; rows over max_length are cut and counted, none is lost."""
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '<eos>\n' }}{% endfor %}"
    rows = [
        {"chosen": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2" * n}],
         "rejected": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "33"}]}
        for n in (1, 3, 20, 4)
    ]  # fmt: skip
    made = trainer(config(tmp_path, kind, max_length=16), dataset=rows, processing_class=tokenizer)
    for each in made.encode(list(enumerate(rows))):
        (group,) = each.groups
        assert all(ids[-1] == 2 and len(group.prompt_ids) + len(ids) <= 16 for ids in group.response_ids)
    made.train()
    log = made.state.log_history[0]
    assert (log["rows/cut"], log["rows/without_pair"]) == (1, 0)


# --- the optimum -----------------------------------------------------------------------------------------------------


def test_the_optimum_is_the_reference_tilted_by_the_reward(tmp_path):
    """Five tokens, answers of one token, rewards log w for w = 1 ... 5, labels as often as Bradley and Terry say: "i
    over j" w_i times, "j over i" w_j times. The optimum is softmax(log p_ref + r / beta), beta 0.5."""
    torch.manual_seed(4)
    fields = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    made_of = LlamaConfig(vocab_size=5, num_key_value_heads=2, initializer_range=0.4, pad_token_id=0, **fields)
    model = LlamaForCausalLM(made_of)
    weights = [1, 2, 3, 4, 5]
    rows = [
        {"chosen_ids": [1, i], "rejected_ids": [1, j]}
        for i in range(5)
        for j in range(5)
        if i != j
        for _ in range(weights[i])
    ]
    args = config(
        tmp_path,
        beta=0.5,
        per_device_train_batch_size=len(rows),
        max_tokens_per_update=10_000,
        max_steps=120,
        logging_steps=50,
        learning_rate=0.04,
        lr_scheduler_type="cosine",
    )
    made = trainer(args, model, rows)
    made.train()

    def probabilities(role):
        with torch.no_grad(), made.shared.as_role(role):
            return made.shared._active(input_ids=torch.tensor([[1]])).logits[0, 0].double().log_softmax(-1)

    expected = (probabilities("reference") + torch.tensor(weights).double().log() / 0.5).softmax(-1)
    found = probabilities("policy").exp()
    assert (found - expected).abs().max() < 1e-2
    assert (found - probabilities("reference").exp()).abs().max() > 0.1


# --- roles and references --------------------------------------------------------------------------------------------


def margin(made):
    """Mean implicit margin over eight pairs."""
    return made.evaluate(pairs(8, seed=3))["eval_rewards/margins"]


def test_every_kind_of_model_trains(tmp_path):
    """Plain, with a fresh adapter, with an adapter that was trained, as a folder of such an adapter, by name, and as a
    `SharedModel`: the policy starts as its reference and leaves it; nothing else moves."""
    base = str(tmp_path / "base")
    tiny_llama().save_pretrained(base)
    tuned = get_peft_model(LlamaForCausalLM.from_pretrained(base), lora())
    randomise_lora(tuned)
    tuned.save_pretrained(str(tmp_path / "adapter"))
    cases = {
        "plain": (tiny_llama(), None, "model_copy"),
        "fresh": (tiny_llama(), lora(), "adapters_off"),
        "trained": (tuned, None, "adapter_copy"),
        "folder": (str(tmp_path / "adapter"), None, "adapter_copy"),
        "name": ("tiny", lora(), "adapters_off"),
        "shared": (shared_model(), None, "adapter_copy"),
    }
    for name, (model, peft_config, kind) in cases.items():
        made = trainer(config(tmp_path / "run", max_steps=3), model, peft_config=peft_config)
        assert made.shared.prepare_reference() == kind, name
        start = made.evaluate(pairs(8, seed=3))
        assert abs(start["eval_rewards/margins"]) < 1e-6, name
        assert start["eval_loss"] == pytest.approx(math.log(2), abs=1e-6), name
        frozen = digest((n, p) for n, p in made.shared.named_parameters() if not p.requires_grad)
        made.train()
        assert abs(margin(made)) > 1e-4, name
        assert digest((n, p) for n, p in made.shared.named_parameters() if not p.requires_grad) == frozen, name


def test_a_4_bit_base_trains(tmp_path):
    """The bundled model in 4 bits, its reference precomputed: the base keeps its bits and the margin grows."""
    made = trainer(
        config(tmp_path, max_steps=8, precompute_ref_log_probs=True),
        "tiny",
        peft_config=lora(),
        quantization_config=four_bit_config(torch.float32),
    )
    base = digest((n, p) for n, p in made.shared.named_parameters() if not p.requires_grad)
    made.train()
    assert digest((n, p) for n, p in made.shared.named_parameters() if not p.requires_grad) == base
    assert margin(made) > 0.01


def test_a_ref_model_of_the_same_base_is_not_kept(tmp_path):
    """Bit for bit the policy's base: adapters off, also under an adapter that was trained before."""
    made = trainer(config(tmp_path), shared_model(), ref_model=tiny_llama())
    assert made.shared.prepare_reference() == "adapters_off"
    assert not made.shared.frozen_copies
    assert abs(margin(made)) > 1e-4


@pytest.mark.parametrize("adapter", [False, True])
def test_another_ref_model_is_a_frozen_second_model(tmp_path, adapter):
    """Its log-probs are the reference's, packed or not, and it does not move."""
    other = LlamaForCausalLM(tiny_llama().config)
    before = digest(other.named_parameters())
    made = trainer(
        config(tmp_path, max_steps=2), tiny_llama(), ref_model=other, peft_config=lora() if adapter else None
    )
    rows = made.encode(list(enumerate(pairs(3))))
    groups = [group for each in rows for group in each.groups]
    found = made.reference(groups)
    alone = SharedModel.build(LlamaForCausalLM(tiny_llama().config), packing=False)
    alone.causal_lm.load_state_dict(other.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(found, alone(groups).per_token_logps, atol=2e-5, rtol=1e-5)
    made.train()
    assert digest(other.named_parameters()) == before


def test_wrong_reference_models_are_refused(tmp_path):
    model = tiny_llama()
    cases = [
        (model, model, ValueError, "ref_model is the model that trains"),
        (tiny_llama(), shared_model(), ValueError, r"is a SharedModel; call merge_and_unload\(\) on it, or leave ref"),
        (tiny_llama(), get_peft_model(tiny_llama(), lora()), ValueError, "is a PeftModelForCausalLM|is a PeftModel"),
        (tiny_llama(), TrainingArguments("unused", use_cpu=True), TypeError, "give the configuration by name: args="),
        (tiny_llama(), torch.nn.Linear(2, 2), TypeError, "ref_model must be a causal language model or its name"),
        (tiny_llama(), tiny_llama(vocab_size=50), ValueError, "is a llama of 50 tokens, the policy a llama of 101"),
    ]
    for policy, reference, kind, message in cases:
        with pytest.raises(kind, match=message):
            trainer(config(tmp_path), policy, ref_model=reference)
    other = LlamaForCausalLM(tiny_llama().config)
    with pytest.raises(ValueError, match="sync_ref_model moves a reference that is the policy's own"):
        trainer(config(tmp_path, sync_ref_model=True), tiny_llama(), ref_model=other)


def test_a_moving_reference_follows_the_policy(tmp_path):
    """alpha 1 every two steps: after four steps the margin is 0 again, after five it is not."""
    for steps, at_rest in ((4, True), (5, False)):
        fields = {"sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 2}
        made = trainer(config(tmp_path, max_steps=steps, **fields))
        made.train()
        assert (abs(margin(made)) < 1e-5) == at_rest


# --- what is logged --------------------------------------------------------------------------------------------------

KEYS = """
    loss grad_norm learning_rate epoch num_tokens rewards/chosen rewards/rejected rewards/margins rewards/accuracies
    logps/chosen logps/rejected entropy lengths/chosen lengths/rejected rows/without_pair rows/cut
    rows/special_tokens_neutralised step_time time/update update/tokens_per_second
"""
CHANGES = "logps/chosen_change logps/rejected_change"
MORE = {
    "dpo": f"kl/chosen {CHANGES}",
    "ipo": f"kl/chosen {CHANGES}",
    "simpo": "",
    "orpo": "nll_loss log_odds_ratio log_odds_chosen",
}
EVAL = """
    loss rewards/accuracies rewards/accuracies_low rewards/accuracies_high rewards/margins n_pairs n_ties
    rows/without_pair logps/chosen runtime samples_per_second
"""


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_logs_and_evaluation(tmp_path, kind):
    same = {"prompt": "1=", "chosen": "a", "rejected": "a"}
    made = trainer(config(tmp_path, kind), eval_dataset=Dataset.from_list([*pairs(5, seed=1), same]))
    made.train()
    assert set(f"{KEYS} {MORE[kind]}".split()) <= made.state.log_history[0].keys()
    metrics = made.evaluate()
    assert {f"eval_{name}" for name in f"{EVAL} {MORE[kind]}".split()} <= metrics.keys()
    assert metrics["eval_n_pairs"] == 5
    assert metrics["eval_rows/without_pair"] == 1
    low, share, high = (metrics[f"eval_rewards/accuracies{end}"] for end in ("_low", "", "_high"))
    assert 0 <= low <= share <= high <= 1
    kept = {"keep_reference": True} if made.reference is not None else {}
    again = trainer(config(tmp_path, kind, per_device_eval_batch_size=1, **kept), made.shared)
    again.reference = made.reference
    assert again.evaluate(made.eval_dataset)["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("kind", ["simpo", "orpo"])
def test_without_a_reference_changes_are_since_first_sight(tmp_path, kind):
    """Four rows in one batch, twice: nothing to say in the first epoch, in the second the difference of both. In
    evaluation since the first one."""
    made = trainer(config(tmp_path, kind, max_steps=2), dataset=pairs(4), eval_dataset=pairs(3, seed=1))
    before = made.evaluate()
    made.train()
    first, second = made.state.log_history[:2]
    for name in ("logps/chosen", "logps/rejected"):
        assert f"{name}_change" not in first
        assert second[f"{name}_change"] == pytest.approx(second[name] - first[name], abs=1e-4)
    assert "eval_logps/chosen_change" not in before
    after = made.evaluate()
    assert after["eval_logps/chosen_change"] == pytest.approx(
        after["eval_logps/chosen"] - before["eval_logps/chosen"], abs=1e-4
    )
    # Other rows, more of them, under the same prefix.
    assert "eval_logps/chosen_change" not in made.evaluate(pairs(7, seed=2))


def test_evaluation_during_training_tells_the_change(tmp_path):
    fields = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "max_steps": 2}
    made = trainer(config(tmp_path, "simpo", **fields), eval_dataset={"x": pairs(3, seed=1)})
    made.train()
    found = [e for e in made.state.log_history if "eval_x_loss" in e]
    assert [("eval_x_logps/chosen_change" in e) for e in found] == [False, True, True]
    change = found[2]["eval_x_logps/chosen"] - found[0]["eval_x_logps/chosen"]
    assert found[2]["eval_x_logps/chosen_change"] == pytest.approx(change, abs=1e-4)


# --- it learns, and warns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_that_shorter_is_better(tmp_path, kind):
    """Held-out pairs, 30 steps of the bundled model: the interval of the accuracy lies above one half, and the loss
    has fallen. ORPO makes chosen answers likelier first of all; SimPO, with its beta of 2, wants smaller steps."""
    fields = {"beta": 0.5} if kind in ("dpo", "ipo") else {}
    rate = 3e-3 if kind == "simpo" else 1e-2
    args = config(tmp_path, kind, per_device_train_batch_size=8, max_steps=30, learning_rate=rate, **fields)
    made = trainer(args, "tiny", pairs(64), eval_dataset=pairs(40, seed=1), peft_config=lora(r=8))
    before = made.evaluate()
    made.train()
    after = made.evaluate()
    assert after["eval_rewards/accuracies_low"] > 0.5
    assert after["eval_loss"] < before["eval_loss"]
    if kind == "orpo":
        assert after["eval_logps/chosen"] > before["eval_logps/chosen"] + 1
    if kind in ("dpo", "ipo"):
        assert after["eval_rewards/margins"] > 0.1


def test_falling_chosen_answers_are_told_once(tmp_path, caplog):
    """One letter, six times or twelve: what makes the twelve unlikely makes the six unlikely. With a likelihood term
    they become likelier, and nothing is said."""
    rows = [{"prompt": f"{i}=", "chosen": "abcdefgh"[i] * 6, "rejected": "abcdefgh"[i] * 12} for i in range(8)]
    for fields, told in (({}, True), ({"rpo_alpha": 2.0}, False)):
        caplog.clear()
        args = config(tmp_path, per_device_train_batch_size=8, max_steps=12, learning_rate=1e-2, **fields)
        made = trainer(args, tiny_llama(), rows, peft_config=lora())
        with caplog.at_level(logging.WARNING, logger="hf_rlx"):
            made.train()
        warnings = [r.getMessage() for r in caplog.records if "nats less likely than at the start" in r.getMessage()]
        assert len(warnings) == told
        if told:
            assert "rpo_alpha=1.0" in warnings[0]
            assert "in training" in warnings[0]


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("dpo", {"loss_type": ["exo_pair"]}, r"loss_type must be of sigmoid, hinge, robust, ipo.*got \['exo_pair'\]"),
        ("dpo", {"loss_type": "simpo"}, r"got \['simpo'\]"),
        ("dpo", {"loss_type": []}, "loss_type must be of"),
        ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "has 1 entries for 2 of loss_type"),
        ("dpo", {"loss_weights": [float("nan")]}, "loss_weights must be a finite number"),
        ("dpo", {"beta": 0.0}, "beta must be a finite number above 0, got 0.0"),
        ("dpo", {"label_smoothing": 0.6}, "label_smoothing must be at most 0.5"),
        ("dpo", {"label_smoothing": 0.5, "loss_type": "robust"}, r"at most 0.5 \(robust: below\)"),
        ("dpo", {"label_smoothing": -0.1}, "label_smoothing must be a finite number of at least 0"),
        ("dpo", {"label_smoothing": 0.1, "loss_type": "hinge"}, "label_smoothing has no part in loss_type="),
        ("dpo", {"rpo_alpha": -1.0}, "rpo_alpha must be a finite number of at least 0"),
        ("dpo", {"ld_alpha": 1.5}, "ld_alpha must be at most 1"),
        ("dpo", {"f_divergence_type": "js_divergence"}, "f_divergence_type='js_divergence' is not carried by hf_rlx"),
        ("dpo", {"use_weighting": True}, "use_weighting=True is not carried"),
        ("dpo", {"discopop_tau": 0.1}, "discopop_tau=0.1 is not carried"),
        ("dpo", {"truncation_mode": "keep_end"}, "truncation_mode='keep_end' is not carried.*each answer keeps"),
        ("dpo", {"router_aux_loss_coef": 0.1}, "router_aux_loss_coef=0.1 is not carried"),
        ("dpo", {"ref_model_mixup_alpha": 1.5}, "ref_model_mixup_alpha must be at least 0 and at most 1"),
        ("ipo", {"beta": -0.1}, "beta must be"),
        ("simpo", {"beta": 0.0}, "beta must be a finite number above 0"),
        ("simpo", {"gamma_beta_ratio": -1.0}, "gamma_beta_ratio must be a finite number of at least 0"),
        ("simpo", {"simpo_gamma": float("inf")}, "simpo_gamma must be a finite number"),
        ("simpo", {"label_smoothing": 0.7}, "label_smoothing must be at most 0.5"),
        ("orpo", {"beta": float("nan")}, "beta must be"),
        ("orpo", {"generate_during_eval": True}, "generate_during_eval=True is not carried"),
        ("orpo", {"is_encoder_decoder": True}, "is_encoder_decoder=True is not carried"),
    ],
)
def test_bad_settings_are_named(tmp_path, kind, fields, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, kind, **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_arguments_are_named(tmp_path, kind):
    args = config(tmp_path, kind)
    with pytest.raises(ValueError, match="row 1 has None as `rejected`"):
        trainer(args, dataset=[pairs(1)[0], {"prompt": "a", "chosen": "b", "rejected": None}])
    with pytest.raises(ValueError, match="has no column `rejected`"):
        trainer(args, dataset=Dataset.from_dict({"prompt": ["a"], "chosen": ["b"]}))
    with pytest.raises(ValueError, match="compute_metrics is not carried by hf_rlx: evaluate"):
        trainer(args, compute_metrics=len)
    with pytest.raises(ValueError, match="data_collator is not carried"):
        trainer(args, data_collator=len)
    with pytest.raises(TypeError, match=r"args must be a hf_rlx.\w+Config, got dict; write"):
        KINDS[kind][1](tiny_llama(), args={"output_dir": "x"})
    with pytest.raises(ValueError, match="needs an eval_dataset"):
        trainer(args).evaluate()
    with pytest.raises(TypeError, match="has no field `betta`; did you mean `beta`"):
        config(tmp_path, kind, betta=1)
    frozen = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules="all-linear", inference_mode=True))
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter is trainable"):
        trainer(args, frozen)


def test_lists_and_streams_are_checked(tmp_path):
    """Lists train; a streaming data set cannot be dealt."""
    made = trainer(config(tmp_path), dataset=lists(6))
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    with pytest.raises(ValueError, match=r"streaming|IterableDataset"):
        trainer(config(tmp_path), dataset=pairs(4).to_iterable_dataset())


@pytest.mark.parametrize("kind", ["simpo", "orpo"])
def test_a_model_init_is_refused(tmp_path, kind):
    with pytest.raises(ValueError, match="model_init is not carried by hf_rlx: pass the model"):
        trainer(config(tmp_path, kind), model_init=tiny_llama)


def test_out_of_memory_is_done_in_halves(tmp_path, monkeypatch, caplog):
    """With the same gradient and the same metrics, those since first sight too."""
    import hf_rlx.trainers.memory
    import hf_rlx.trainers.preference

    plain, logs = gradients(tmp_path, "simpo")
    original = hf_rlx.trainers.preference.train_on_pairs

    def hungry(made, model, batch):
        if len(batch.rows) > 2:
            raise torch.OutOfMemoryError("no room")
        return original(made, model, batch)

    monkeypatch.setattr(hf_rlx.trainers.preference, "train_on_pairs", hungry)
    monkeypatch.setattr(hf_rlx.trainers.memory, "_release", lambda: None)
    with caplog.at_level(logging.WARNING, logger="hf_rlx"):
        halved, other = gradients(tmp_path, "simpo")
    assert "done in two halves" in caplog.text
    assert all(relative_gap(a, b) < 2e-5 for a, b in zip(halved, plain, strict=True))
    assert [e["loss"] for e in other] == pytest.approx([e["loss"] for e in logs], abs=1e-6)


def test_the_tokenizer_is_needed_for_a_model_in_memory(tmp_path):
    with pytest.raises(ValueError, match="pass processing_class="):
        KINDS["dpo"][1](tiny_llama(), args=config(tmp_path), train_dataset=pairs(4))
    made = KINDS["dpo"][1]("tiny", args=config(tmp_path), train_dataset=pairs(4), peft_config=lora())
    assert made.tokenizer.eos_token == load_tokenizer("tiny").eos_token
