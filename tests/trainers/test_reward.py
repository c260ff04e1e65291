"""The reward trainer on a shared base: numbers, gradients, roles, and that it learns."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

import hf_rlx.trainers.memory
from hf_rlx.data.pair_encoding import RankedGroup
from hf_rlx.models.classifier import from_causal_lm
from hf_rlx.models.loading import load_tokenizer
from hf_rlx.trainers.grpo import GRPOTrainer
from hf_rlx.trainers.health import NonFiniteError
from hf_rlx.trainers.pair_batches import PairBatch, PairSampler
from hf_rlx.trainers.reward import RewardConfig, RewardTrainer
from hf_rlx.types import Group
from tests.tiny import randomise_lora
from tests.trainers.reward_tools import config, lists, pairs, shared_model, trainer
from tests.trainers.tools import KeepGradients, digest, lora, relative_gap, rows, tiny_llama
from tests.trainers.tools import config as grpo_config


def row(ranks, margin=None):
    """A row of K one-token answers."""
    group = Group.from_lists([1], [[69 + i, 2] for i in range(len(ranks))])
    return RankedGroup((group,), tuple(float(r) for r in ranks), margin)


def loss_of(tmp_path, scores, rows, normalizer=None, **fields):
    """Loss and its gradient on the scores, from a model that gives these."""
    given = torch.tensor(scores, requires_grad=True)
    rewards = trainer(config(tmp_path, **fields))
    batch = PairBatch(rows, torch.tensor(float(normalizer or len(rows))))
    loss = rewards.pair_loss(lambda groups, score: given, batch, "reward")
    loss.backward()
    return float(loss.detach()), given.grad.tolist(), rewards.metrics["train"].flush()


# --- hand-derived numbers --------------------------------------------------------------------------------------------


def test_bradley_terry_by_hand(tmp_path):
    """Differences 1 and -1: (0.313262 + 1.313262) / 2 = 0.813262. On the better answers the gradient is
    -sigma(-1) / 2 = -0.134471 and -sigma(1) / 2 = -0.365529, on the worse ones the opposite. One of two pairs is
    right; the mean margin is 0."""
    loss, grad, logged = loss_of(tmp_path, [1.0, 0.0, 0.5, 1.5], [row([0, 1]), row([0, 1])])
    assert loss == pytest.approx(0.813262, abs=1e-6)
    assert grad == pytest.approx([-0.134471, 0.134471, -0.365529, 0.365529], abs=1e-6)
    assert logged["accuracy"] == 0.5
    assert logged["margin"] == 0.0
    assert [logged[k] for k in ("mean_reward", "min_reward", "max_reward")] == [0.75, 0.0, 1.5]


def test_a_pair_given_worst_first_is_turned(tmp_path):
    """A list of two whose second answer is better: the difference is 0 - 1."""
    loss, grad, _ = loss_of(tmp_path, [1.0, 0.0], [row([1, 0])])
    assert loss == pytest.approx(1.313262, abs=1e-6)
    assert grad == pytest.approx([0.731059, -0.731059], abs=1e-6)


def test_margin_and_centring_by_hand(tmp_path):
    """Margin 1 on a difference of 1: log 2 = 0.693147; without margin on -1: 1.313262; mean 1.003204. Sums 1 and 2:
    0.1 (1 + 4) / 2 = 0.25."""
    rows = [row([0, 1], margin=1.0), row([0, 1])]
    loss, _, _ = loss_of(tmp_path, [1.0, 0.0, 0.5, 1.5], rows, center_rewards_coefficient=0.1)
    assert loss == pytest.approx(1.253204, abs=1e-6)


def test_all_pairs_by_hand(tmp_path):
    """Scores 2, 1, 0 in the right order: (2 x 0.313262 + 0.126928) / 3 = 0.251150 for that row; a pair with difference
    0: 0.693147; their mean is 0.472149. Ties in a row give no pair: of ranks 0, 1, 1 with scores 2, 1, 0 the mean of
    0.313262 and 0.126928 is 0.220095."""
    fields = {"loss_type": "all_pairs"}
    loss, _, logged = loss_of(tmp_path, [2.0, 1.0, 0.0, 0.5, 0.5], [row([0, 1, 2]), row([0, 1])], **fields)
    assert loss == pytest.approx(0.472149, abs=1e-6)
    assert logged["accuracy"] == 3.5 / 4
    assert loss_of(tmp_path, [2.0, 1.0, 0.0], [row([0, 1, 1])], **fields)[0] == pytest.approx(0.220095, abs=1e-6)


def test_plackett_luce_by_hand(tmp_path):
    """Scores 2, 1, 0 best first: logsumexp(2, 1, 0) - 2 = 0.407606, and 0.313262: 0.720868, whatever the order they
    stand in. A row with ties goes by all pairs: 0.220095, and the mean of both is 0.470481."""
    fields = {"loss_type": "plackett_luce"}
    assert loss_of(tmp_path, [1.0, 2.0, 0.0], [row([1, 0, 2])], **fields)[0] == pytest.approx(0.720868, abs=1e-6)
    # Beside a pair of difference 1 (0.313262) in the same batch: the mean is 0.517065.
    loss, _, _ = loss_of(tmp_path, [1.0, 2.0, 0.0, 1.0, 0.0], [row([1, 0, 2]), row([0, 1])], **fields)
    assert loss == pytest.approx(0.517065, abs=1e-6)
    rows = [row([0, 1, 2]), row([0, 1, 1])]
    loss, _, _ = loss_of(tmp_path, [2.0, 1.0, 0.0, 2.0, 1.0, 0.0], rows, **fields)
    assert loss == pytest.approx(0.470481, abs=1e-6)


def test_a_micro_batch_is_a_share_of_the_step(tmp_path):
    """One of four rows: a quarter of 0.313262."""
    loss, _, _ = loss_of(tmp_path, [1.0, 0.0], [row([0, 1])], normalizer=4)
    assert loss == pytest.approx(0.313262 / 4, abs=1e-6)


# --- one gradient, however it is split -------------------------------------------------------------------------------


def gradients(tmp_path, dataset=None, model=None, **fields):
    """Gradients and losses of every optimizer step over six rows, in steps of four and then two."""
    keep = KeepGradients()
    args = config(tmp_path, optim="sgd", max_steps=-1, num_train_epochs=1, max_grad_norm=0.0, **fields)
    rewards = trainer(args, model, pairs(6) if dataset is None else dataset, callbacks=[keep])
    rewards.train()
    return keep.steps, [entry["loss"] for entry in rewards.state.log_history if "loss" in entry]


@pytest.mark.parametrize("split", [(2, 2), (1, 4)])
@pytest.mark.parametrize("kind", ["pairs", "lists", "centred"])
def test_the_split_of_a_step_does_not_matter(tmp_path, split, kind):
    """Also of the uneven last one, and with ragged lists that hold one to six pairs a row."""
    fields = {"pairs": {}, "lists": {"loss_type": "all_pairs"}, "centred": {"center_rewards_coefficient": 0.1}}[kind]
    dataset = lists(6) if kind == "lists" else pairs(6)
    whole, losses = gradients(tmp_path, dataset, **fields)
    batch, micro_steps = split
    fields |= {"per_device_train_batch_size": batch, "gradient_accumulation_steps": micro_steps}
    parts, other_losses = gradients(tmp_path, dataset, **fields)
    assert len(whole) == len(parts) == 2
    for ours, theirs in zip(parts, whole, strict=True):
        assert relative_gap(ours, theirs) < 2e-6
    assert other_losses == pytest.approx(losses, abs=1e-6)


def test_packed_rows_give_the_gradient_of_padded_ones(tmp_path):
    """And of gradient checkpointing."""
    packed, _ = gradients(tmp_path)
    padded, _ = gradients(tmp_path, model=shared_model(packing=False))
    again, _ = gradients(tmp_path, gradient_checkpointing=True)
    for ours, theirs, third in zip(packed, padded, again, strict=True):
        assert relative_gap(ours, theirs) < 2e-5
        assert relative_gap(third, ours) < 2e-6


def test_rows_without_a_pair_change_nothing(tmp_path):
    """Identical answers and all-tied lists leave loss and denominator; they are counted."""
    plain, losses = gradients(tmp_path, pairs(4), shuffle_dataset=False, per_device_train_batch_size=8)
    same = {"prompt": "1=", "chosen": "a", "rejected": "a"}
    more = Dataset.from_list([same, *pairs(4), same])
    with_ties, other_losses = gradients(tmp_path, more, shuffle_dataset=False, per_device_train_batch_size=8)
    assert relative_gap(with_ties[0], plain[0]) < 2e-6
    assert other_losses == pytest.approx(losses, abs=1e-6)


@pytest.mark.parametrize("loss_type", ["all_pairs", "plackett_luce"])
def test_the_same_answer_twice_in_a_list_is_a_tie(tmp_path, loss_type):
    """b, b, c with ranks 0, 1, 2: both b stand at 1/2, so two pairs remain; b, c, b with 0, 1, 2 contradicts itself:
    all stand at 1, and nothing is learned."""
    rows = [
        {"prompt": "1+1=", "responses": ["b", "b", "c"], "ranks": [0, 1, 2]},
        {"prompt": "1+2=", "responses": ["b", "c", "b"], "ranks": [0, 1, 2]},
    ]
    rewards = trainer(config(tmp_path, loss_type=loss_type), dataset=Dataset.from_list(rows))
    encoded = rewards.encode(list(enumerate(rows)))
    assert [row.ranks for row in encoded] == [(0.5, 0.5, 2.0), (1.0, 1.0, 1.0)]
    assert [row.num_pairs for row in encoded] == [2, 0]
    rewards.train()
    assert rewards.state.log_history[0]["rows/without_pair"] == 1


def test_a_step_without_any_pair_moves_nothing(tmp_path):
    """Though Adam has momentum from the step before."""
    same = {"prompt": "1=", "chosen": "a", "rejected": "a"}
    rewards = trainer(
        config(tmp_path, shuffle_dataset=False, max_steps=2), dataset=Dataset.from_list([*pairs(4), *[same] * 4])
    )
    seen = []

    class Watch(KeepGradients):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            seen.append(digest(rewards.shared.named_parameters()))

    rewards.add_callback(Watch())
    rewards.train()
    assert seen[0] == seen[1]
    last = [entry for entry in rewards.state.log_history if "loss" in entry][-1]
    assert last["loss"] == 0
    assert last["rows/without_pair"] == 4


def test_out_of_memory_is_done_in_halves(tmp_path, monkeypatch, caplog):
    """From the first time on, with the same gradient."""
    plain, losses = gradients(tmp_path)
    original = RewardTrainer.pair_loss

    def hungry(self, model, batch, role):
        if len(batch.rows) > 2:
            raise torch.OutOfMemoryError("no room")
        return original(self, model, batch, role)

    monkeypatch.setattr(RewardTrainer, "pair_loss", hungry)
    monkeypatch.setattr(hf_rlx.trainers.memory, "_release", lambda: None)
    with caplog.at_level(logging.WARNING, logger="hf_rlx"):
        halved, other_losses = gradients(tmp_path)
    assert "done in two halves" in caplog.text
    for ours, theirs in zip(halved, plain, strict=True):
        assert relative_gap(ours, theirs) < 2e-6
    assert other_losses == pytest.approx(losses, abs=1e-6)


@pytest.mark.parametrize("limit", [1, 40])
def test_a_micro_batch_in_parts_has_the_same_gradient(tmp_path, limit):
    """Row by row, or as many as fit 40 tokens; also of an ensemble, and the logged numbers are the same."""
    for fields in ({}, {"ensemble_size": 2}):
        whole, losses = gradients(tmp_path, max_tokens_per_update=10_000, **fields)
        parts, other_losses = gradients(tmp_path, max_tokens_per_update=limit, **fields)
        for ours, theirs in zip(parts, whole, strict=True):
            assert relative_gap(ours, theirs) < 2e-6
        assert other_losses == pytest.approx(losses, abs=1e-6)


def test_parts_hold_whole_rows_up_to_the_limit():
    """Rows of five packed tokens each: one prompt token and two answers of two."""
    batch = PairBatch([row([0, 1]) for _ in range(5)], torch.tensor(5.0))
    assert [len(part.rows) for part in batch.split(10)] == [2, 2, 1]
    assert [len(part.rows) for part in batch.split(3)] == [1] * 5
    assert batch.split(25) == batch.split(None) == [batch]
    assert all(part.normalizer is batch.normalizer for part in batch.split(10))


@pytest.mark.parametrize(
    ("rows", "batch", "micro_steps", "world", "expected"),
    [
        (8, 2, 2, 1, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (6, 2, 2, 1, [[0, 1], [2, 3], [4, 5]]),
        (7, 2, 2, 1, [[0, 1], [2, 3], [4], [5, 6]]),
        (6, 1, 2, 2, [[0], [2], [4]]),
        (5, 1, 2, 2, [[0], [2], []]),
    ],
)
def test_rows_are_dealt_evenly_and_once(rows, batch, micro_steps, world, expected):
    """Rank 0's micro-batches; all ranks together have every row once."""
    samplers = [PairSampler(rows, batch, micro_steps, 0, False, rank, world) for rank in range(world)]
    dealt = [list(sampler) for sampler in samplers]
    assert dealt[0] == expected
    assert sorted(index for share in dealt for micro in share for index in micro) == list(range(rows))
    assert all(len(share) == len(samplers[0]) for share in dealt)


def test_every_epoch_has_its_own_order_and_every_run_the_same():
    """All ranks agree on it: together they have each row once."""

    def order(epoch, seed=0):
        samplers = [PairSampler(8, 2, 2, seed, True, rank, 2) for rank in range(2)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        return [index for sampler in samplers for micro in sampler for index in micro]

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(0) != order(0, seed=7)
    assert sorted(order(1)) == list(range(8))


def test_the_last_step_can_be_dropped():
    assert list(PairSampler(6, 2, 2, 0, False, drop_last=True)) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="has 3 rows but an optimizer step needs 4"):
        PairSampler(3, 2, 2, 0, False, drop_last=True)


# --- roles -----------------------------------------------------------------------------------------------------------


def bits(shared, role):
    """A digest of what a role trains."""
    return digest(shared.trainable_parameters(role))


def test_only_the_reward_role_moves(tmp_path):
    """Bit for bit, base and policy stay; the optimizer holds nothing else; everything is as it was at rest."""
    shared = shared_model()
    flags = {name: p.requires_grad for name, p in shared.named_parameters()}
    rewards = trainer(config(tmp_path, max_steps=3), shared)
    rest = digest((n, p) for n, p in shared.named_parameters() if "reward" not in n.split("."))
    before = bits(shared, "reward")
    rewards.train()
    assert bits(shared, "reward") != before
    assert digest((n, p) for n, p in shared.named_parameters() if "reward" not in n.split(".")) == rest
    held = sum(len(group["params"]) for group in rewards.optimizer.param_groups)
    assert held == len(shared.trainable_parameters("reward"))
    assert {n: p.requires_grad for n, p in shared.named_parameters() if n in flags} == flags
    assert shared.trainable_parameters() == shared.trainable_parameters("policy")


def test_the_policy_trains_on_and_the_reward_role_stays(tmp_path):
    """GRPO on the same object afterwards, rewarded by the role."""
    shared = shared_model()
    trainer(config(tmp_path), shared).train()
    reward, policy = bits(shared, "reward"), bits(shared, "policy")
    grpo = GRPOTrainer(
        shared,
        shared.reward_function(),
        grpo_config(tmp_path / "grpo", learning_rate=0.01),
        train_dataset=rows(8),
        processing_class=load_tokenizer("tiny"),
    )
    grpo.train()
    assert bits(shared, "reward") == reward
    assert bits(shared, "policy") != policy
    assert grpo.state.log_history[0]["rewards/reward/std"] > 0


def test_without_a_config_the_adapter_starts_as_the_policy_s(tmp_path):
    """The reward model starts from what the policy was fine-tuned to: the same adapter, a head of its own."""
    shared = shared_model()
    trainer(config(tmp_path), shared)
    named = dict(shared.named_parameters())
    for name, policy in shared.trainable_parameters("policy"):
        assert torch.equal(named[name.replace(".policy.", ".reward.")], policy), name


def test_with_a_config_the_adapter_is_fresh(tmp_path):
    shared = shared_model()
    trainer(config(tmp_path), shared, peft_config=lora(r=2))
    assert shared.model.peft_config["reward"].r == 2
    fresh = [p for n, p in shared.trainable_parameters("reward") if "lora_B" in n]
    assert fresh
    assert not any(p.any() for p in fresh)


def test_a_causal_lm_with_a_config_gets_a_policy_beside(tmp_path):
    """So that the saved folder goes on to PPO."""
    rewards = trainer(config(tmp_path), tiny_llama(), peft_config=lora())
    rewards.train()
    assert set(rewards.shared.roles) == {"policy", "reward"}


def test_an_sft_adapter_is_the_policy_s(tmp_path):
    """In memory or as a folder; with or without a configuration of the reward adapter's own."""
    sft = get_peft_model(tiny_llama(), lora())
    randomise_lora(sft)
    sft.save_pretrained(str(tmp_path / "sft"))
    rewards = trainer(config(tmp_path), sft, peft_config=lora(r=2))
    assert rewards.shared.roles["policy"].adapter == "default"
    assert rewards.shared.model.peft_config["reward"].r == 2
    tiny_llama().save_pretrained(tmp_path / "base")
    adapter = json.loads((tmp_path / "sft" / "adapter_config.json").read_text())
    adapter["base_model_name_or_path"] = str(tmp_path / "base")
    (tmp_path / "sft" / "adapter_config.json").write_text(json.dumps(adapter))
    rewards = trainer(config(tmp_path), str(tmp_path / "sft"))
    rewards.train()
    rewards.save_model(str(tmp_path / "both"))
    again = trainer(config(tmp_path), str(tmp_path / "both"))
    assert bits(again.shared, "reward") == bits(rewards.shared, "reward")
    with pytest.raises(ValueError, match="has a reward model already, and a peft_config was given; drop peft_config"):
        trainer(config(tmp_path), str(tmp_path / "both"), peft_config=lora())


def test_a_card_is_written_and_a_logged_run_has_trl_s_keys(tmp_path):
    """Also the keys that are ours."""
    rewards = trainer(config(tmp_path, max_steps=2), eval_dataset=pairs(4))
    rewards.train()
    rewards.create_model_card()
    assert (tmp_path / "README.md").read_text()
    assert rewards.card_facts() == {"pipeline_tag": "text-classification", "tags": ["reward-model"]}
    report = rewards.report()
    after = rewards.card_facts()["after"]
    assert (after.accuracy, after.n, after.low) == (report.accuracy, 4, report.accuracy_low)
    keys = "loss grad_norm learning_rate epoch num_tokens accuracy margin mean_reward min_reward max_reward"
    keys += " std_reward rows/without_pair rows/cut rows/special_tokens_neutralised step_time time/update"
    assert set(keys.split()) <= rewards.state.log_history[0].keys()


def test_a_role_that_is_there_trains_on(tmp_path):
    shared = shared_model()
    first = trainer(config(tmp_path), shared)
    first.train()
    before = bits(shared, "reward")
    second = trainer(config(tmp_path), shared)
    assert bits(shared, "reward") == before
    second.train()
    assert bits(shared, "reward") != before


def test_dropout_is_off_in_the_new_adapter_too(tmp_path):
    shared = shared_model()
    trainer(config(tmp_path), shared, peft_config=lora(lora_dropout=0.5))
    assert all(m.p == 0 for m in shared.modules() if isinstance(m, torch.nn.Dropout))


def test_an_ensemble_has_members_of_its_own(tmp_path):
    """Two adapters and two heads that all move; the score is the mean less the penalised deviation."""
    rewards = trainer(config(tmp_path, ensemble_size=2, uncertainty_penalty=0.5), peft_config=lora())
    shared = rewards.shared
    before = [bits(shared, name) for name in ("reward", "reward_1")]
    rewards.train()
    assert all(bits(shared, name) != old for name, old in zip(("reward", "reward_1"), before, strict=True))
    group = Group.from_lists([1, 69], [[70, 2], [71, 72, 2]])
    a, b = shared.score([group], "reward"), shared.score([group], "reward_1")
    assert (a - b).abs().min() > 1e-3
    found = rewards.examine([RankedGroup((group,), (0.0, 1.0))])[0]
    # The population's deviation of two numbers is half their distance.
    assert found.scores == pytest.approx(((a + b) / 2 - 0.25 * (a - b).abs()).tolist(), abs=1e-6)
    assert found.spreads == pytest.approx(((a - b).abs() / 2).tolist(), abs=1e-6)


# --- it learns, and says how well ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shared", "classifier", "lists"])
def test_it_learns_that_shorter_is_better(tmp_path, kind):
    """30 steps: held-out pairs are told apart, and the report says that length is all there is to it."""
    fields = {"per_device_train_batch_size": 8, "max_steps": 30, "learning_rate": 5e-3}
    data = pairs(64)
    if kind == "lists":
        data, fields["loss_type"] = lists(64), "all_pairs"
    model = "tiny" if kind == "classifier" else shared_model(trained=False)
    rewards = trainer(
        config(tmp_path, **fields),
        model,
        data,
        eval_dataset=pairs(40, seed=1),
        peft_config=lora(task_type="SEQ_CLS") if kind == "classifier" else None,
    )
    if kind == "lists":
        rewards.eval_dataset = lists(40, seed=1)
    before = rewards.report()
    rewards.train()
    after = rewards.report()
    assert after.accuracy_low > max(before.accuracy, 0.6)
    assert after.accuracy > 0.85
    assert after.length_pearson_within < -0.5
    assert after.loss < before.loss


def test_evaluation_is_logged_and_written(tmp_path):
    rewards = trainer(
        config(tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=3),
        eval_dataset={"long": pairs(5, shorter=False), "short": pairs(4)},
    )
    rewards.train()
    logged = {k: v for entry in rewards.state.log_history for k, v in entry.items()}
    assert logged["eval_long_n_pairs"] == 5
    assert logged["eval_long_n_chosen_shorter"] == 0
    assert logged["eval_short_n_chosen_shorter"] == 4
    assert (
        0 <= logged["eval_short_accuracy_low"] <= logged["eval_short_accuracy"] <= logged["eval_short_accuracy_high"]
    )
    assert logged["eval_short_loss"] > 0
    written = {path.name for path in (tmp_path / "reports").iterdir()}
    assert {"eval_long_000001.json", "eval_short_000001.txt"} <= written


def test_the_batch_of_evaluation_does_not_matter(tmp_path):
    """Ragged batches of 1, 3 and 8: the same scores to 1e-6."""
    losses = []
    for size in (1, 3, 8):
        rewards = trainer(config(tmp_path, per_device_eval_batch_size=size), shared_model())
        losses.append(rewards.evaluate(pairs(7))["eval_loss"])
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_type": "hinge"}, "loss_type must be one of"),
        ({"normalizer": "max"}, "normalizer must be one of"),
        ({"ensemble_size": 0}, "ensemble_size must be a whole number of at least 1, got 0"),
        ({"uncertainty_penalty": -1.0}, "uncertainty_penalty must be finite and at least 0"),
        ({"center_rewards_coefficient": float("nan")}, "center_rewards_coefficient must be finite"),
        ({"center_rewards_coefficient": 0.1, "loss_type": "all_pairs"}, "defined for pairs"),
        ({"max_length": 1}, "max_length must be a whole number of at least 2"),
        ({"max_length": 2.5}, "max_length must be a whole number"),
        ({"activation_offloading": True}, "activation_offloading=True is not carried by hf_rlx: set gradient_check"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size is not needed"),
    ],
)
def test_bad_settings_are_named(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **fields)


def test_an_unknown_field_has_a_suggestion(tmp_path):
    with pytest.raises(TypeError, match="no field `max_lenght`; did you mean `max_length`"):
        RewardConfig(str(tmp_path), max_lenght=3)


def test_bad_arguments_are_named(tmp_path):
    args = config(tmp_path)
    with pytest.raises(ValueError, match="row 1 has None as `rejected`"):
        trainer(args, dataset=[pairs(1)[0], {"prompt": "a", "chosen": "b", "rejected": None}])
    with pytest.raises(ValueError, match="eval_dataset: row 0 has '' as `chosen`"):
        trainer(args, eval_dataset=[{"chosen": "", "rejected": "a"}])
    with pytest.raises(ValueError, match=r"all weights training cannot be a reward model.*peft_config=LoraConfig"):
        trainer(args, tiny_llama())
    with pytest.raises(ValueError, match="compute_metrics is not carried"):
        trainer(args, compute_metrics=len)
    with pytest.raises(ValueError, match="data_collator is not carried"):
        trainer(args, data_collator=len)
    with pytest.raises(
        TypeError, match=r"args must be a hf_rlx.RewardConfig, got dict; write RewardConfig\(\*\*args\)"
    ):
        trainer({"output_dir": "x"})
    with pytest.raises(ValueError, match="needs an eval_dataset"):
        trainer(args).evaluate()
    with pytest.raises(ValueError, match="eos_token='</s>' is not in the tokenizer's vocabulary"):
        trainer(config(tmp_path, eos_token="</s>"))


def test_lists_need_a_loss_for_lists(tmp_path):
    rewards = trainer(config(tmp_path), dataset=lists(4))
    with pytest.raises(ValueError, match=r"row \d has [34] answers, but loss_type='bradley_terry' compares two; use"):
        rewards.train()
    margins = [{**r, "margin": 1.0} for r in pairs(4)]
    with pytest.raises(ValueError, match="has a margin, which loss_type='bradley_terry' reads only"):
        trainer(config(tmp_path, loss_type="all_pairs"), dataset=margins).train()


def test_an_ensemble_of_a_classifier_is_refused(tmp_path):
    with pytest.raises(ValueError, match="an ensemble needs adapters on a shared base"):
        trainer(config(tmp_path, ensemble_size=2), "tiny")


def test_nothing_is_trained_on_weights_that_are_not_finite(tmp_path):
    """The role's own weights are looked at before every step, and named."""
    rewards = trainer(config(tmp_path))
    with torch.no_grad():
        rewards.shared.heads["reward"].linear.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"heads\.reward\.linear\.weight is not finite"):
        rewards.train()


def test_a_classifier_is_no_policy(tmp_path):
    """It would sample nothing; the message says what it is good for."""

    def letters(completions, **_):
        return [len(text) for text in completions]

    args = grpo_config(tmp_path)
    model = from_causal_lm(tiny_llama())
    with pytest.raises(
        ValueError, match="has no vocabulary head, so it is no policy; load it with AutoModelForCausalLM"
    ):
        GRPOTrainer(model, letters, args, train_dataset=rows(8), processing_class=load_tokenizer("tiny"))


def test_a_temperature_needs_held_out_pairs(tmp_path):
    """Said before anything is trained, not when it ends."""
    rewards = trainer(config(tmp_path, fit_temperature=True))
    with pytest.raises(ValueError, match="fit_temperature=True needs held-out pairs"):
        rewards.train()
    assert rewards.state.global_step == 0


def test_calibration_is_not_that_of_an_earlier_training(tmp_path):
    """A trainer that only evaluates leaves temperature and moments alone; one that trains drops them with the scores
    that they were fitted to."""
    shared = shared_model()
    args = {"fit_temperature": True, "normalizer": "running"}
    trainer(config(tmp_path, **args), shared, eval_dataset=pairs(8, seed=2)).train()
    facts = dict(shared.roles["reward"].facts)
    assert {"temperature", "moments"} <= facts.keys()
    again = trainer(config(tmp_path), shared, eval_dataset=pairs(8, seed=2))
    again.evaluate()
    assert shared.roles["reward"].facts == {**facts, "normalizer": "none"}
    again.train()
    assert not {"temperature", "moments"} & shared.roles["reward"].facts.keys()


def test_a_temperature_at_its_bound_is_told(tmp_path, monkeypatch, caplog):
    """Two pairs that are right: the more certain the better, so the fit stops at 0.01, and rewards are 100 scores. Of
    two alike there is nothing to fit, and no temperature."""
    rewards = trainer(config(tmp_path, fit_temperature=True), eval_dataset=pairs(2))
    found = [([1.0, 0.0], [1, 1], [0.0, 1.0]), ([3.0, 1.0], [1, 1], [0.0, 1.0])]
    monkeypatch.setattr(rewards, "examine_all", lambda dataset: found)
    with caplog.at_level(logging.WARNING):
        assert rewards.calibrate()["temperature"] == 0.01
    assert "the temperature fitted on 2 held-out pairs is 0.01" in caplog.text
    del rewards.shared.roles["reward"].facts["temperature"]
    monkeypatch.setattr(rewards, "examine_all", lambda dataset: [([1.0, 1.0], [1, 1], [0.0, 0.0])])
    assert "temperature" not in rewards.calibrate()
    assert "the temperature fitted on 0 held-out pairs is nan" in caplog.text


def test_an_ensemble_is_trained_as_a_whole(tmp_path):
    """Members that stay behind would go on being averaged in."""
    shared = shared_model()
    trainer(config(tmp_path, ensemble_size=2), shared)
    with pytest.raises(ValueError, match=r"an ensemble of 2 reward adapters.* set ensemble_size=2"):
        trainer(config(tmp_path), shared)
    assert trainer(config(tmp_path, ensemble_size=3), shared).train_roles == ("reward", "reward_1", "reward_2")


@pytest.mark.parametrize("start", ["pissa_niter_2", "olora"])
def test_an_adapter_that_would_rewrite_the_base(tmp_path, start):
    """The policy's log-probs would change with the base that it stands on."""
    with pytest.raises(ValueError, match=f"init_lora_weights='{start}' rewrites the base's weights"):
        trainer(config(tmp_path), peft_config=lora(init_lora_weights=start))


def test_single_token_embeddings_of_one_adapter_only(tmp_path):
    """PEFT would fail at the first save."""
    some = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[70])
    with pytest.raises(ValueError, match="trainable_token_indices must be set in the adapters of policy and reward"):
        trainer(config(tmp_path), peft_config=some)


def test_a_template_from_a_file(tmp_path):
    (tmp_path / "x.jinja").write_text("{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}")
    rewards = trainer(config(tmp_path, chat_template_path=str(tmp_path / "x.jinja")))
    (row,) = rewards.encode([(0, {"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"})])
    assert row.groups[0].prompt_ids.tolist() == [69, 2]


def test_lora_config_of_a_stand_in_head_is_cleaned(tmp_path):
    """TRL's advice modules_to_save=["score"] on a `SharedModel`: the role's head is no module of the base."""
    shared = shared_model()
    trainer(
        config(tmp_path), shared, peft_config=LoraConfig(r=2, target_modules="all-linear", modules_to_save=["score"])
    )
    assert shared.model.peft_config["reward"].modules_to_save is None
