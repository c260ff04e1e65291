"""DPO and its relatives: that each setting does what it says, and what TRL's scripts may pass."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from hf_rlx.models.loading import four_bit_config, load_tokenizer
from hf_rlx.trainers.dpo import LOSSES
from tests.tiny import causal_lm, randomise_lora, word_tokenizer
from tests.trainers.pair_tools import KINDS, config, given_pairs, trainer
from tests.trainers.reward_tools import pairs
from tests.trainers.tools import digest, lora, tiny_llama


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("dpo", {"beta": 0.1}, 0.437488),
        ("dpo", {"beta": 0.1, "loss_type": "hinge"}, 0.4),
        ("dpo", {"beta": 0.1, "loss_type": "ipo"}, 1.0),
        ("ipo", {"beta": 0.1}, 1.0),
        ("ipo", {"beta": 0.1, "normalize": False}, 1.0),
        ("dpo", {"beta": 0.1, "label_smoothing": 0.1}, 0.497488),
        ("dpo", {"beta": 0.1, "label_smoothing": 0.1, "loss_type": "robust"}, 0.362488),
    ],
)
def test_the_loss_that_is_named_is_used(tmp_path, kind, fields, expected):
    """A margin of 6 nats between answers of one token. -log sigma(0.6) = 0.437488; 1 - 0.6; (6 - 5)^2. With a tenth of
    the labels flipped 0.9 x 0.437488 + 0.1 x 1.037488 = 0.497488; robust: (0.9 x 0.437488 - 0.1 x 1.037488) / 0.8 =
    0.362488."""
    made = trainer(config(tmp_path, kind, **fields))
    loss = made.pair_objective(given_pairs([[-1.0], [-7.0]], [[-1.0], [-1.0]])).loss
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [*(("dpo", {"loss_type": loss}) for loss in LOSSES), ("ipo", {}), ("simpo", {}), ("orpo", {})],
)
def test_the_gradient_reaches_the_model(tmp_path, kind, fields):
    """The first step, whose policy is still its reference."""
    made = trainer(config(tmp_path, kind, **fields), tiny_llama(), peft_config=lora())
    made.train()
    assert made.state.log_history[0]["grad_norm"] > 1e-5


@pytest.mark.parametrize("kind", ["simpo", "orpo", "ipo"])
def test_a_mean_has_the_tokens_of_its_sum(tmp_path, kind):
    """EOS is in both: log-probs and lengths are those of the answer's tokens with EOS, from the model's own logits."""
    rows = [{"prompt": "1=", "chosen": "abc", "rejected": "d"}]
    made = trainer(config(tmp_path, kind, beta=1.0), tiny_llama(), rows)
    encoded = made.encode(list(enumerate(rows)))
    table = made.pair_objective(made.pairs(None, encoded)).table
    (group,) = encoded[0].groups
    means = []
    for ids in group.response_ids:
        assert ids[-1] == made.tokenizer.eos_token_id
        row = torch.cat([group.prompt_ids, ids])
        with torch.no_grad():
            logits = made.shared.causal_lm(input_ids=row[None]).logits[0, :-1]
        logps = torch.log_softmax(logits, -1).gather(1, row[1:, None])[:, 0]
        means.append(float(logps[-ids.numel() :].mean()))
    assert [table["lengths/chosen"].item(), table["lengths/rejected"].item()] == [4, 2]
    found = [float(table[f"logps/{side}"] / table[f"lengths/{side}"]) for side in ("chosen", "rejected")]
    assert found == pytest.approx(means, abs=1e-5)
    if kind != "ipo":  # whose reward is over the reference
        rewards = [float(table[f"rewards/{side}"]) for side in ("chosen", "rejected")]
        assert rewards == pytest.approx(means, abs=1e-5)


def test_the_prompt_has_no_gradient_in_orpo(tmp_path):
    """Without `nll_on_prompt` the log-probs of prompt tokens are not even computed: "15", "3" and their EOS are
    3 + 2. With it the prompt's ten tokens behind BOS are scored in front of each answer."""
    rows = [{"prompt": "1+2+3+4+5=", "chosen": "15", "rejected": "3"}]
    for nll_on_prompt, scored in ((False, 3 + 2), (True, 2 * 10 + 3 + 2)):
        made = trainer(config(tmp_path, "orpo", nll_on_prompt=nll_on_prompt), tiny_llama(), rows)
        found = made.pairs(None, made.encode(list(enumerate(rows))))
        total = found.mask.sum() + (0 if found.prompts is None else found.prompts.sum())
        assert int(total) == scored


def test_the_reference_runs_once_a_micro_batch(tmp_path):
    """However many parts it is trained on in: here four of one row. The next micro-batch is computed anew."""
    made = trainer(config(tmp_path, max_tokens_per_update=1, max_steps=2))
    calls, inner = [], made.reference_logps
    made.reference_logps = lambda groups, *rest: calls.append(len(groups)) or inner(groups, *rest)
    made.train()
    assert calls == [4, 4]


# --- lengths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_cut_to_their_own_length(tmp_path, kind):
    """At most three tokens: "abcdef" is a, b, EOS. "abx" and "aby" become one answer and leave the loss."""
    rows = [
        {"prompt": "12=", "chosen": "abcdef", "rejected": "g"},
        {"prompt": "12=", "chosen": "abx", "rejected": "aby"},
        {"prompt": "12=", "chosen": "ab", "rejected": "cd"},
    ]
    made = trainer(config(tmp_path, kind, max_completion_length=3), dataset=rows)
    first, second, third = made.encode(list(enumerate(rows)))
    assert [ids.tolist() for ids in first.groups[0].response_ids] == [[69, 70, 2], [75, 2]]
    assert [row.cut for row in (first, second, third)] == [1, 2, 0]
    assert [row.num_pairs for row in (first, second, third)] == [1, 0, 1]
    made.train()
    log = made.state.log_history[0]
    assert (log["rows/cut"], log["rows/without_pair"]) == (1, 1)  # of the rows that are left one was cut


def test_prompts_are_cut_to_their_own_length(tmp_path):
    """At most three tokens: BOS and the end. A prompt that fits is left."""
    rows = [{"prompt": "abcd", "chosen": "a", "rejected": "b"}, {"prompt": "cd", "chosen": "a", "rejected": "b"}]
    made = trainer(config(tmp_path, max_prompt_length=3), dataset=rows)
    first, second = made.encode(list(enumerate(rows)))
    assert first.groups[0].prompt_ids.tolist() == second.groups[0].prompt_ids.tolist() == [1, 71, 72]
    assert (first.cut, second.cut) == (1, 0)
    made = trainer(config(tmp_path, max_prompt_length=1), dataset=rows)
    assert made.encode([(0, rows[0])])[0].groups[0].prompt_ids.tolist() == [72]


def test_ranked_lists_are_cut_too(tmp_path):
    """Of four answers two become the same: ranks 0 and 3 are then 1.5 both, a tie; five pairs of six are left."""
    rows = [{"prompt": "1", "responses": ["abx", "c", "d", "aby"], "ranks": [0, 1, 2, 3]}]
    made = trainer(config(tmp_path, max_completion_length=3), dataset=rows)
    (row,) = made.encode(list(enumerate(rows)))
    assert row.ranks == (1.5, 1, 2, 1.5)
    assert row.num_pairs == 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_completion_length": 0}, "max_completion_length must be finite and at least 1"),
        ({"max_prompt_length": 0}, "max_prompt_length must be a whole number of at least 1 or None, got 0"),
        ({"max_prompt_length": 2.5}, "max_prompt_length must be a whole number of at least 1 or None, got 2.5"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_lengths_are_named(tmp_path, kind, fields, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, kind, **fields)


def test_a_tokenizer_without_bos_has_whole_numbers_only(tmp_path):
    """Nothing is invented in front of the prompt."""
    tokenizer = word_tokenizer()
    tokenizer.bos_token = None
    assert tokenizer.bos_token_id is None
    rows = [{"prompt": "t10 ", "chosen": "t11", "rejected": "t12"}]
    made = trainer(config(tmp_path), causal_lm("llama"), rows, processing_class=tokenizer)
    (group,) = made.encode(list(enumerate(rows)))[0].groups
    assert group.prompt_ids.tolist() == [10]
    assert [ids.tolist() for ids in group.response_ids] == [[11, 2], [12, 2]]


def test_a_tokenizer_larger_than_the_model_is_named(tmp_path):
    """Instead of an index error in torch, which on a GPU ends the process."""
    rows = [{"prompt": "t10 ", "chosen": "t11", "rejected": word} for word in ("t12", "t64")]
    dpo = trainer(config(tmp_path), causal_lm("llama"), rows, processing_class=word_tokenizer(65))
    with pytest.raises(ValueError, match="row 1 has the token id 64, but the model embeds 64 tokens only"):
        dpo.train()


# --- what TRL's scripts pass -----------------------------------------------------------------------------------------


def test_names_of_trl_s_cpo_are_simpo_s(tmp_path):
    """A CPO script with loss_type="simpo" and no likelihood term; other losses and rewards are refused by name."""
    args = config(tmp_path, "simpo", loss_type="simpo", cpo_alpha=0.0, beta=2.5, simpo_gamma=1.25, alpha=0.0)
    assert (args.beta, args.target_margin) == (2.5, 1.25)
    for fields, message in (
        ({"loss_type": "hinge"}, "loss_type='hinge' is not carried by hf_rlx: this is SimPO"),
        ({"alpha": 0.5}, "alpha=0.5 is not carried by hf_rlx: AlphaPO"),
        ({"cpo_alpha": -1.0}, "cpo_alpha must be a finite number of at least 0"),
        ({"generate_during_eval": True}, "generate_during_eval=True is not carried"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True is not carried"),
    ):
        with pytest.raises(ValueError, match=message):
            config(tmp_path, "simpo", **fields)


def test_simpo_with_a_likelihood_term_by_hand(tmp_path):
    """Means -1 and -1.5, beta 2, gamma 1: log 2, and 0.5 x 1 nat. A chosen token: -2 x 0.5 - 0.5 = -1.5."""
    found = given_pairs([[-1.0], [-1.5]])
    objective = trainer(config(tmp_path, "simpo", cpo_alpha=0.5)).pair_objective(found)
    objective.loss.backward()
    assert objective.loss.item() == pytest.approx(math.log(2) + 0.5, abs=1e-6)
    assert objective.table["loss"].tolist() == pytest.approx([math.log(2) + 0.5], abs=1e-6)
    assert objective.table["nll_loss"].tolist() == [1.0]
    assert found.logps.grad[:, 0].tolist() == pytest.approx([-1.5, 1.0], abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_fields_that_are_not_carried_are_refused(tmp_path, kind):
    """None of them is read anywhere, so none may be set."""
    named = [f for f in dataclasses.fields(KINDS[kind][0]) if f.metadata.get("help", "").startswith("Not carried")]
    assert named
    for spec in named:
        with pytest.raises(ValueError, match=f"{spec.name}=.* is not carried by hf_rlx: "):
            config(tmp_path, kind, **{spec.name: "something else"})


@pytest.mark.parametrize("kind", ["ipo", "simpo", "orpo"])
def test_models_of_every_kind_are_taken(tmp_path, kind):
    """All weights, a fresh adapter, a folder of a trained adapter, and a 4-bit base: what trains moves, the rest does
    not. (DPO: `test_dpo.py`.)"""
    base = str(tmp_path / "base")
    tiny_llama().save_pretrained(base)
    tuned = get_peft_model(LlamaForCausalLM.from_pretrained(base), lora())
    randomise_lora(tuned)
    tuned.save_pretrained(str(tmp_path / "adapter"))
    four_bit = {"peft_config": lora(), "quantization_config": four_bit_config(torch.float32)}
    cases = [
        (tiny_llama(), {}),
        (tiny_llama(), {"peft_config": lora()}),
        (str(tmp_path / "adapter"), {}),
        ("tiny", four_bit),
    ]
    for model, kwargs in cases:
        made = trainer(config(tmp_path / "run", kind, max_steps=2), model, **kwargs)

        def bits(trains, made=made):
            with made.shared.trains("policy"):
                return digest((n, p) for n, p in made.shared.named_parameters() if p.requires_grad == trains)

        before = bits(True), bits(False)
        made.train()
        assert bits(True) != before[0]
        assert bits(False) == before[1]


def test_adapters_on_fused_experts_start_as_their_reference(tmp_path):
    """LoRA on raw parameters, where no second adapter can be added: loss log 2 at the start, margins 0."""
    config_of = LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    tokenizer = load_tokenizer("tiny")
    model = causal_lm("qwen3_moe", vocab_size=len(tokenizer))
    made = trainer(config(tmp_path), model, pairs(4), peft_config=config_of)
    made.train()
    assert made.state.log_history[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
