"""The process reward trainer: its loss by hand, what moves, what it learns, and what it refuses."""

from __future__ import annotations

import inspect
import logging
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForTokenClassification

from hf_rlx import PPOTrainer
from hf_rlx.data.steps import StepGroup
from hf_rlx.models.classifier import from_causal_lm
from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.grpo import GRPOTrainer
from hf_rlx.trainers.pair_batches import PairBatch
from hf_rlx.trainers.prm import PRMConfig, PRMTrainer
from hf_rlx.trainers.step_labels import label_calculations
from hf_rlx.types import Group
from tests.trainers.ppo_tools import ppo_config
from tests.trainers.prm_tools import config, solutions, trainer
from tests.trainers.reward_tools import shared_model
from tests.trainers.tools import config as grpo_config
from tests.trainers.tools import digest, lora, rows, tiny_llama


def row(labels, ends=None, prompt=(1,)):
    """A solution with steps of two tokens."""
    ids = [69 + i for i in range(2 * len(labels))]
    ends = tuple(2 * i + 1 for i in range(len(labels))) if ends is None else ends
    return StepGroup((Group.from_lists(list(prompt), [ids]),), (0.0,), ends=ends, labels=tuple(map(float, labels)))


def loss_of(prm, batch, scores):
    """The loss where the model says these scores, in the order of the steps that are asked for."""
    asked = []

    def model(groups, score, ends):
        asked.append((groups, ends))
        return torch.tensor(scores[: sum(map(len, ends))], requires_grad=True)

    return prm.pair_loss(model, batch, "step_reward"), asked[0]


def batch(*rows, normalizer=None):
    steps = sum(not math.isnan(label) for r in rows for label in r.labels)
    return PairBatch(list(rows), torch.tensor(float(normalizer or steps)), dealt=len(rows))


# --- the loss --------------------------------------------------------------------------------------------------------


def test_the_loss_by_hand(tmp_path):
    """Scores 1, -2, 3 at labels 1, 0, 0 (log-odds that a step is right): log(1 + e^-1) + log(1 + e^-2) + log(1 + e^3),
    over three steps. Two of three on the right side."""
    prm = trainer(config(tmp_path))
    loss, (_, ends) = loss_of(prm, batch(row([1, 0]), row([0], prompt=(2,))), [1.0, -2.0, 3.0])
    assert ends == [[1, 3], [1]]
    wanted = (math.log1p(math.exp(-1)) + math.log1p(math.exp(-2)) + math.log1p(math.exp(3))) / 3
    assert loss.item() == pytest.approx(wanted, rel=1e-6)
    logged = prm.metrics["train"].flush()
    assert logged["accuracy"] == pytest.approx(2 / 3)
    assert logged["steps"] == 3
    assert logged["mean_probability_good"] == pytest.approx(1 / (1 + math.exp(-1)))


def test_a_share_of_roll_outs_is_a_soft_label(tmp_path):
    """-(0.25 log s(1) + 0.75 log s(-1))."""
    loss, _ = loss_of(trainer(config(tmp_path)), batch(row([0.25])), [1.0])
    assert loss.item() == pytest.approx(0.25 * math.log1p(math.exp(-1)) + 0.75 * math.log1p(math.exp(1)), rel=1e-6)


def test_a_micro_batch_is_a_share_of_the_step(tmp_path):
    """Two of eight labelled steps of the optimizer step: a quarter of their mean."""
    loss, _ = loss_of(trainer(config(tmp_path)), batch(row([1, 1]), normalizer=8), [0.0, 0.0])
    assert loss.item() == pytest.approx(math.log(2) / 4, rel=1e-6)


def test_labels_that_are_not_known_are_not_asked_for(tmp_path):
    prm = trainer(config(tmp_path))
    unknown = row([1, math.nan, 0])
    _, (_, ends) = loss_of(prm, batch(unknown), [0.0, 0.0])
    assert ends == [[1, 5]]
    assert prm.weight_of(unknown) == 2
    assert prm.weight_of(row([math.nan])) == 0


@pytest.mark.parametrize(
    ("fields", "labels", "expected"),
    [
        ({}, [1, 0, 1], [1, 0, 1]),
        ({"train_on_last_step_only": True}, [1, 0, 1], [None, None, 1]),
        ({"first_error_only": True}, [1, 0, 1], [1, 0, None]),
        ({"first_error_only": True}, [1, 1, 1], [1, 1, 1]),
        ({"first_error_only": True}, [1, 0.3, 0.9], [1, 0.3, None]),
        ({"ratings": True}, [1, 0, 0], [1, 0, None]),  # PRM800K's are labelled up to the first error
        ({"ratings": True, "first_error_only": False}, [1, 0, 0], [1, 0, 0]),
    ],
)
def test_which_steps_are_trained_on(tmp_path, fields, labels, expected):
    one = Dataset.from_list([{"prompt": "1=", "completions": ["a"], "labels": [1]}])
    prm = trainer(config(tmp_path, **fields), dataset=one)
    found = prm.targets(row(labels))
    assert [None if math.isnan(label) else label for label in found] == pytest.approx(expected)


def test_the_last_step_is_not_the_last_that_was_left(tmp_path):
    """Three steps, of which the last was cut off: its label is not another step's."""
    prm = trainer(config(tmp_path, train_on_last_step_only=True))
    assert prm.weight_of(row([1, 0, 1], ends=(1, 3))) == 0
    assert prm.weight_of(row([1, 0, 1])) == 1


def test_solutions_of_a_prompt_share_it(tmp_path):
    """Rows 0 and 2 have one prompt: one group of two responses; scores go back to the labels of their own rows."""
    prm = trainer(config(tmp_path))
    given = batch(row([1]), row([0, 0], prompt=(2,)), row([0, 1]))
    loss, (groups, ends) = loss_of(prm, given, [5.0, -5.0, 5.0, -5.0, -5.0])
    assert [(g.prompt_ids.tolist(), g.num_responses) for g in groups] == [([1], 2), ([2], 1)]
    assert ends == [[1], [1, 3], [1, 3]]
    assert loss.item() == pytest.approx(math.log1p(math.exp(-5)), rel=1e-4)  # every score on its label's side


def gradient(folder, **fields):
    """Of the optimizer step over all 16 solutions."""
    packing = fields.pop("packing", True)
    prm = trainer(config(folder, learning_rate=0.0, max_grad_norm=0.0, **fields), shared_model(packing=packing))
    found = {}

    def keep(model, grad_norm=None):
        found.update({n: p.grad.clone() for n, p in prm.shared.named_parameters() if p.grad is not None})
        return torch.tensor(0.0)

    prm._get_grad_norm = prm._clip_grad_norm = keep
    prm.train()
    return found


SPLITS = {
    "one by one": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16},
    "fours": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
    "parts": {"per_device_train_batch_size": 16, "max_tokens_per_update": 30},
    "padded": {"per_device_train_batch_size": 16, "packing": False},
    "recomputed": {"per_device_train_batch_size": 16, "gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return gradient(tmp_path_factory.mktemp("whole"), per_device_train_batch_size=16)


@pytest.mark.parametrize("split", SPLITS)
def test_the_split_of_a_step_and_the_layout_do_not_matter(whole, tmp_path, split):
    found = gradient(tmp_path, **SPLITS[split])
    assert found.keys() == whole.keys()
    largest = max(g.norm().item() for g in whole.values())
    for name, wanted in whole.items():
        assert (found[name] - wanted).norm().item() <= 2e-5 * largest, name
    assert largest > 1e-3


# --- what moves ------------------------------------------------------------------------------------------------------


def test_only_the_step_reward_role_moves(tmp_path):
    """Policy, base and another role keep their bits; every weight of the role moves."""
    shared = shared_model()
    shared.add_role("reward", lora())
    before = {n: p.detach().clone() for n, p in shared.named_parameters()}
    prm = trainer(config(tmp_path, max_steps=3), shared)
    held = {id(p) for group in prm.create_optimizer().param_groups for p in group["params"]}
    assert {n for n, p in shared.named_parameters() if id(p) in held} == {
        n for n, _ in shared.trainable_parameters("step_reward")
    }
    prm.train()
    for name, parameter in shared.named_parameters():
        moved = not torch.equal(before.get(name, parameter + 1), parameter)
        assert moved == ("step_reward" in name), name


def test_a_causal_lm_with_a_config_gets_a_policy_beside(tmp_path):
    prm = trainer(config(tmp_path), tiny_llama(), peft_config=lora())
    assert {"policy", "step_reward"} <= set(prm.shared.model.peft_config)
    assert prm.shared.roles["step_reward"].facts == {
        "step_separator": "\n",
        "max_length": 64,  # the model's context
        "max_completion_length": None,
        "chat_template_kwargs": None,
        "special_tokens_in_messages": "split",
        "id2label": {"0": "bad", "1": "good"},
    }


def test_a_step_without_any_label_moves_nothing(tmp_path):
    nothing = Dataset.from_list([{"prompt": "1=", "completions": ["a", "b"], "labels": [None, None]}] * 4)
    prm = trainer(config(tmp_path), dataset=nothing)
    before = digest(prm.shared.named_parameters())
    prm.train()
    assert digest(prm.shared.named_parameters()) == before
    assert prm.state.log_history[0]["rows/without_pair"] == 4


# --- learning and evaluation -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    """A role that has learned that a step with an x in it is wrong."""
    folder = tmp_path_factory.mktemp("learned")
    args = config(folder, max_steps=50, per_device_train_batch_size=16, learning_rate=1e-2, logging_steps=10)
    prm = trainer(args, dataset=solutions(128), eval_dataset=solutions(48, seed=1))
    prm.train()
    return prm


def test_it_learns_which_steps_are_wrong(learned):
    """Good steps above bad ones after 50 steps (OpenRLHF#510), on solutions that were not seen."""
    report = learned.report()
    assert report.accuracy > 0.9
    assert report.accuracy_low < report.accuracy <= report.accuracy_high
    assert report.first_error_f1 > 0.8
    assert report.auc_min > 0.9
    assert report.n_solutions == 48
    assert report.n_erroneous + report.n_correct == 48
    steps = learned.shared.step_reward_function()
    (good, bad), (clean,) = steps(["1+1="] * 2, ["abc\nabx", "de"])
    assert good[1] > 0.5 > bad[1]
    assert clean[1] > 0.5


def test_evaluation_is_logged_and_written(learned):
    metrics = learned.evaluate()
    logged = next(e for e in reversed(learned.state.log_history) if "eval_accuracy" in e)
    assert metrics["eval_accuracy"] == logged["eval_accuracy"]
    assert {"eval_ece", "eval_first_error_f1", "eval_auc_prod", "eval_loss", "eval_n_steps"} <= metrics.keys()
    reports = sorted(path.name for path in Path(learned.args.output_dir, "reports").iterdir())
    assert reports == ["eval_000050.json", "eval_000050.txt"]


def test_saved_and_loaded_it_gives_the_same_scores(learned, tmp_path):
    learned.save_model(str(tmp_path))
    again = SharedModel.from_pretrained(tmp_path, base=tiny_llama())
    texts = ["abc\nabx", "d\n\nxe"]
    for value in ("probability", "log_odds"):
        found = again.step_reward_function(value=value)(["1+1="] * 2, texts)
        wanted = learned.shared.step_reward_function(value=value)(["1+1="] * 2, texts)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0, atol=1e-6)
    prm = trainer(config(tmp_path / "again"), again, eval_dataset=learned.eval_dataset)
    assert prm.evaluate()["eval_loss"] == pytest.approx(learned.evaluate()["eval_loss"], abs=1e-6)


def test_the_batch_of_evaluation_does_not_matter(learned):
    before = learned.evaluate()
    learned.args.per_device_eval_batch_size = 1
    after = learned.evaluate()
    assert after["eval_loss"] == pytest.approx(before["eval_loss"], abs=1e-6)


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_a_policy_trains_on_its_step_rewards(learned, tmp_path, kind):
    """On the same base: the role gives every step's probability, and keeps its bits."""
    shared = learned.shared
    role = digest((n, p) for n, p in shared.named_parameters() if "step_reward" in n)
    steps = shared.step_reward_function()
    made = PPOTrainer if kind == "ppo" else GRPOTrainer
    args = ppo_config(tmp_path) if kind == "ppo" else grpo_config(tmp_path)
    policy = made(
        shared,
        lambda completions, **_: [float(len(c)) for c in completions],
        args,
        train_dataset=rows(64),
        processing_class=load_tokenizer("tiny"),
        step_reward_funcs=[steps],
    )
    policy.train()
    log = policy.state.log_history[0]
    assert 0 < log["rewards/step_reward/mean"] < 1
    assert log["steps/step_reward/mean"] >= 1
    assert "step_reward_model/step_reward/probability" in log
    assert digest((n, p) for n, p in shared.named_parameters() if "step_reward" in n) == role


# --- labels from calculations ----------------------------------------------------------------------------------------


def test_labels_from_calculations(tmp_path):
    """1 + 1 = 2 is right, 2 * 3 = 7 is not, and a sentence says nothing; the rows can be trained on."""
    found = label_calculations(
        ["a?", [{"role": "user", "content": "b?"}], "c?"],
        ["1 + 1 = 2\nso 2 * 3 = 7\n\nDone.", [{"role": "assistant", "content": "10/3 = 3.33"}], "\n"],
    )
    assert found == [
        {"prompt": "a?", "completions": ["1 + 1 = 2", "so 2 * 3 = 7", "Done."], "labels": [True, False, None]},
        {"prompt": [{"role": "user", "content": "b?"}], "completions": ["10/3 = 3.33"], "labels": [False]},
    ]
    assert label_calculations(["?"], ["10/3 = 3.33"], rounding=True)[0]["labels"] == [True]
    assert label_calculations(["?"], ["Done. 1+1=2. So."], ". ", unchecked=True)[0]["labels"] == [True, True, True]
    assert label_calculations(["?"], ["1+1=2, 1+1=3"])[0]["labels"] == [False]  # one wrong calculation
    with pytest.raises(ValueError, match="2 prompts for 1 solutions"):
        label_calculations(["a", "b"], ["c"])
    trainer(config(tmp_path), dataset=Dataset.from_list(found[:1] * 4)).train()


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step_separator": ""}, "step_separator must be some text"),
        ({"step_separator": None}, "step_separator must be some text"),
        ({"max_completion_length": 0}, "max_completion_length must be"),
        ({"neutral": "none"}, "neutral must be one of .'good', 'bad', 'drop'"),
        ({"max_length": 1}, "max_length must be a whole number of at least 2"),
    ],
)
def test_bad_settings_are_named(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **fields)


def test_bad_arguments_are_named(tmp_path):
    args = config(tmp_path)
    with pytest.raises(ValueError, match=r"has no adapter: pass peft_config=LoraConfig\(...\)"):
        trainer(args, tiny_llama())
    with pytest.raises(ValueError, match="has no adapter: pass peft_config"):
        trainer(args, "tiny")
    with pytest.raises(ValueError, match="LlamaForTokenClassification is a whole model with a head"):
        trainer(args, LlamaForTokenClassification(tiny_llama().config), peft_config=lora())
    with pytest.raises(ValueError, match="LlamaForSequenceClassification is a whole model with a head"):
        trainer(args, from_causal_lm(tiny_llama()), peft_config=lora())
    shared = trainer(args).shared
    with pytest.raises(ValueError, match="has a process reward model already, and a peft_config was given"):
        trainer(args, shared, peft_config=lora())
    with pytest.raises(ValueError, match=r"compute_metrics is not carried by hf_rlx: trainer\.report"):
        trainer(args, compute_metrics=len)
    with pytest.raises(ValueError, match="model_init is not carried"):
        trainer(args, model_init=len)
    with pytest.raises(ValueError, match="train_dataset: row 1 has 1 `labels` for 2 steps"):
        trainer(args, dataset=[solutions(1)[0], {"prompt": "1", "completions": ["a", "b"], "labels": [True]}])
    with pytest.raises(ValueError, match="eval_dataset x: row 0 has '' as step 0"):
        trainer(args, eval_dataset={"x": [{"prompt": "1", "completions": [""], "labels": [True]}]})


def test_a_separator_inside_steps_is_told(tmp_path, caplog):
    inside = Dataset.from_list([{"prompt": "1=", "completions": ["a\nb", "c"], "labels": [True, True]}] * 2)
    with caplog.at_level(logging.WARNING, logger="hf_rlx"):
        trainer(config(tmp_path), dataset=inside)
    assert "train_dataset: 2 steps have the step_separator '\\n' inside" in caplog.text


def test_a_role_that_is_there_trains_on(tmp_path):
    first = trainer(config(tmp_path, max_steps=2))
    first.train()
    before = digest(first.shared.heads.named_parameters())
    second = trainer(config(tmp_path / "more", step_separator=";"), first.shared)
    assert digest(second.shared.heads.named_parameters()) == before
    assert second.shared.roles["step_reward"].facts["step_separator"] == ";"


def test_the_contract():
    """TRL's names."""
    args = PRMConfig("x", use_cpu=True)
    assert (args.step_separator, args.max_length, args.max_completion_length) == ("\n", 1024, None)
    assert (args.train_on_last_step_only, args.disable_dropout) == (False, True)
    assert list(inspect.signature(PRMTrainer).parameters)[:12] == [
        *("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "model_init"),
        *("compute_metrics", "callbacks", "optimizers", "preprocess_logits_for_metrics", "peft_config"),
    ]
