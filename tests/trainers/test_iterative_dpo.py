"""Rounds by hand: plans, pairs, shares, references, what is saved and told."""

from __future__ import annotations

import json
import logging

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, load_dataset
from transformers import TrainerState

from hf_rlx.trainers.dpo import DPOConfig, DPOTrainer
from hf_rlx.trainers.iterative_dpo import IterativeDPOConfig, IterativeDPOTrainer
from hf_rlx.trainers.round_watch import RoundWatch
from hf_rlx.trainers.rounds import Round, RoundPlan, RoundRow, outcome_of
from hf_rlx.types import Completion, Group, Rollout
from tests.trainers.iterative_tools import Scripted, config, trainer
from tests.trainers.pair_tools import config as pair_config
from tests.trainers.pair_tools import trainer as pair_trainer
from tests.trainers.reward_tools import shared_model
from tests.trainers.tools import EOS, digest, lora, rows, tiny_llama

A, B, C = 69, 70, 71  # ids of a, b, c
NAN = float("nan")


def rollout(totals, answers=None, cut=(), prompt="1+1="):
    """A prompt [1, 5] with answers a, aa, aaa, ...; those in `cut` did not end."""
    answers = [[A] * (k + 1) for k in range(len(totals))] if answers is None else answers
    completions = [
        Completion(ids if k in cut else [*ids, EOS], [0.0] * len(ids), k not in cut, "".join(chr(i + 28) for i in ids))
        for k, ids in enumerate(answers)
    ]
    return Rollout(prompt, prompt, [1, 5], completions, total=torch.tensor(totals))


def outcome(tmp_path, made, max_length=None, **fields):
    return outcome_of(made, 3, config(tmp_path, **fields), max_length, 1)


def answers_of(row):
    return [ids.tolist() for group in row.groups for ids in group.response_ids]


# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompts_per_round": 10}, (10, 3, 1.0)),  # ten rows by four: three steps
        ({"prompts_per_round": None}, (20, 5, 1.0)),
        ({"prompts_per_round": 10, "epochs_per_round": 1.5}, (10, 4, 1.5)),  # 15 rows
        ({"prompts_per_round": 10, "steps_per_round": 2}, (10, 2, 0.8)),  # eight of ten rows
        ({"prompts_per_round": 10, "gradient_accumulation_steps": 3}, (10, 1, 1.0)),
    ],
)
def test_the_shape_of_a_round(tmp_path, fields, expected):
    plan = RoundPlan.of(config(tmp_path, **fields), 20)
    assert (plan.prompts, plan.steps, plan.epochs) == expected


def test_rounds_go_through_the_data():
    """Five prompts, two a round: every five in a row are all of them; shuffled by the seed of the pass."""
    plan = RoundPlan(2, 1, 1.0)
    assert [plan.indices(r, 5, 0, False) for r in range(4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]
    shuffled = [i for r in range(5) for i in plan.indices(r, 5, 7, True)]
    assert sorted(shuffled[:5]) == sorted(shuffled[5:]) == [0, 1, 2, 3, 4]
    assert shuffled[:5] != shuffled[5:]
    assert shuffled != [i for r in range(5) for i in plan.indices(r, 5, 8, True)]


def test_one_configuration_serves_trainers_on_other_data(tmp_path):
    """A moving reference moves at the end of a round, whose steps follow from the data: of 16 prompts four, of 8 two.
    A number of the user's own is refused whenever it comes."""
    args = config(tmp_path, prompts_per_round=None, reference="previous")
    assert trainer(args).args.ref_model_sync_steps == 4
    assert trainer(args, train_dataset=rows(8)).args.ref_model_sync_steps == 2
    args.ref_model_sync_steps = 3
    with pytest.raises(ValueError, match="ref_model_sync_steps=3 has no part here"):
        trainer(args)


def numbered(count):
    return [RoundRow((Group.from_lists([1], [[A], [B]]),), (0.0, 0.0), row=i, pairs=((0, 1),)) for i in range(count)]


def test_pairs_are_dealt_evenly(tmp_path):
    """Seven prompts gave five pairs; two passes in four steps: 10 rows as 2, 3, 2, 3, in two micro-batches each."""
    args = config(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=2)
    made, plan = Round(1, numbered(5)), RoundPlan(7, 4, 2.0)
    steps = [[[row.row for row in part] for part in made.shares(s, plan, args)] for s in range(4)]
    assert [[len(part) for part in step] for step in steps] == [[1, 1], [1, 2], [1, 1], [1, 2]]
    dealt = [row for step in steps for part in step for row in part]
    assert sorted(dealt[:5]) == sorted(dealt[5:]) == [0, 1, 2, 3, 4]
    assert dealt[:5] != dealt[5:]
    assert steps == [[[row.row for row in part] for part in made.shares(s, plan, args)] for s in range(4)]
    assert Round(1, []).shares(0, plan, args) == [[], []]


def test_a_round_is_restored_from_its_state():
    row = RoundRow(
        (Group.from_lists([1, 5], [[A, EOS], [B], [C, C]]),), (0.0,) * 3, row=4, cut=1, pairs=((0, 2), (1, 2))
    )
    apart = RoundRow((Group.from_lists([7], [[A]]), Group.from_lists([8], [[B, B]])), (0.0,) * 2, pairs=((1, 0),))
    made = Round.from_state(Round(3, [row, apart]).state_dict())
    assert made.number == 3
    assert [answers_of(r) for r in made.rows] == [[[A, EOS], [B], [C, C]], [[A], [B, B]]]
    assert [[g.prompt_ids.tolist() for g in r.groups] for r in made.rows] == [[[1, 5]], [[7], [8]]]
    assert [(r.row, r.cut, r.pairs, r.num_pairs) for r in made.rows] == [
        (4, 1, ((0, 2), (1, 2)), 2),
        (0, 0, ((1, 0),), 1),
    ]


# --- pairs -----------------------------------------------------------------------------------------------------------


def test_best_against_worst(tmp_path):
    """0.2, 0.9, 0.1 and no score: aa against aaa, as sampled, behind the prompt once."""
    found = outcome(tmp_path, rollout([0.2, 0.9, 0.1, NAN]))
    assert found.saved == [
        {"prompt": "1+1=", "chosen": "aa", "rejected": "aaa", "score_chosen": 0.9, "score_rejected": 0.1}
    ]
    assert answers_of(found.row) == [[A, A, EOS], [A, A, A, EOS]]
    assert (found.row.pairs, found.row.row) == (((0, 1),), 3)
    assert found.scores == [0.2, 0.9, 0.1]


def test_all_pairs_with_a_margin_share_their_answers(tmp_path):
    """0.2, 0.9, 0.1 by more than 0.15: aa over a and aa over aaa; three answers, two pairs."""
    found = outcome(tmp_path, rollout([0.2, 0.9, 0.1, NAN]), pair_strategy="all", pair_margin=0.15)
    assert [(row["chosen"], row["rejected"]) for row in found.saved] == [("aa", "a"), ("aa", "aaa")]
    assert len(found.row.groups) == 1
    assert found.row.pairs == ((0, 1), (0, 2))
    one = outcome(tmp_path, rollout([0.2, 0.9, 0.1, NAN]), pair_strategy="all", max_pairs_per_prompt=1)
    assert [(row["chosen"], row["rejected"]) for row in one.saved] == [("aa", "aaa")]


def test_a_ranked_list_gives_all_its_pairs(tmp_path):
    """0.2, 0.9, 0.2: aa over both others, which tie."""
    found = outcome(tmp_path, rollout([0.2, 0.9, 0.2]), pair_strategy="ranked")
    assert found.saved == [{"prompt": "1+1=", "responses": ["aa", "a", "aaa"], "scores": [0.9, 0.2, 0.2]}]
    assert found.row.pairs == ((0, 1), (0, 2))


@pytest.mark.parametrize(
    ("totals", "fields", "reason"),
    [
        ([0.1] * 4, {}, "all scores equal"),
        ([0.1, 0.1 + 1e-8, 0.1, 0.1 - 1e-8], {}, "all scores equal"),  # a model's rounding is no preference
        ([NAN, 0.3, NAN, NAN], {}, "fewer than two scored responses"),
        ([0.1, 0.3, 0.2, 0.2], {"pair_margin": 0.5}, "difference within the margin"),
        ([0.1, 0.3, 0.2, 0.2], {"mask_truncated_completions": True}, "fewer than two scored responses"),
    ],
)
@pytest.mark.parametrize("strategy", ["best_worst", "all", "ranked"])
def test_prompts_without_a_signal_say_why(tmp_path, totals, fields, reason, strategy):
    found = outcome(tmp_path, rollout(totals, cut=(1, 2, 3)), pair_strategy=strategy, **fields)
    assert (found.row, found.saved, found.reason) == (None, [], reason)


def test_the_same_answer_twice_is_no_pair(tmp_path):
    """A judge may score it twice differently."""
    found = outcome(tmp_path, rollout([0.1, 0.9], answers=[[A], [A]]))
    assert (found.row, found.reason) == (None, "identical responses")


def test_an_answer_that_was_cut_has_no_end(tmp_path):
    found = outcome(tmp_path, rollout([0.2, 0.9], cut=(1,)))
    assert answers_of(found.row) == [[A, A], [A, EOS]]


def test_long_rows_are_cut(tmp_path):
    """Two prompt tokens and seven: at most six together, the last one kept."""
    found = outcome(tmp_path, rollout([0.2, 0.9], answers=[[A], [B] * 6]), max_length=6)
    assert answers_of(found.row) == [[B, B, B, EOS], [A, EOS]]
    assert found.row.cut == 1


def test_an_answer_that_says_nothing_is_counted_and_left_out(tmp_path):
    """The Hub's rows cannot be empty."""
    found = outcome(tmp_path, rollout([0.2, 0.9, 0.1], answers=[[A], [B], []]))
    assert [(row["chosen"], row["rejected"]) for row in found.saved] == [("b", "a")]
    assert found.empty == 1


def test_messages_stay_messages(tmp_path):
    prompt = [{"role": "user", "content": "hi"}]
    found = outcome(tmp_path, rollout([0.2, 0.9], prompt=prompt))
    assert found.saved[0]["prompt"] == prompt
    assert found.saved[0]["chosen"] == [{"role": "assistant", "content": "aa"}]


# --- runs ------------------------------------------------------------------------------------------------------------


def scripted(tmp_path, **changes):
    """A trainer whose completions do not depend on the weights."""
    kwargs = {
        name: changes.pop(name)
        for name in ("reward", "model", "eval_dataset", "train_dataset", "callbacks")
        if name in changes
    }
    made = trainer(config(tmp_path, **changes), **kwargs)
    made.sampler = Scripted(made.tokenizer)
    return made


def logs_of(made):
    return [entry for entry in made.state.log_history if "loss" in entry]


def test_a_run_of_two_rounds(tmp_path):
    """Of the prompts 0 .. 7 the first round's 1 has equal rewards (see `by_ids`), so that seven are left; 8 .. 15 the
    same with 9. Both are on disk, as the logs say, and epochs are rounds."""
    made = scripted(tmp_path, shuffle_dataset=False)
    made.train()
    assert made.state.global_step == 4
    logs = logs_of(made)
    assert [entry["round"] for entry in logs] == [0, 0, 1, 1]
    assert [entry["epoch"] for entry in logs] == [0.5, 1.0, 1.5, 2.0]
    for number, entry in enumerate(logs[::2]):
        folder = tmp_path / "pairs" / f"round_{number:03d}"
        counts = json.loads((folder / "round.json").read_text())
        assert (counts["prompts"], counts["completions"]) == (8, 32)
        assert counts["scored"] == 31
        assert counts["prompts_with_pairs"] == counts["pairs"] == entry["pairs/count"] == entry["pairs/prompts"] == 7
        assert counts["prompts_without_pairs"] == {"all scores equal": 1}
        assert entry["pairs/prompts_without"] == 1
        assert counts["reward_mean"] == pytest.approx(entry["reward"], abs=1e-5)
        table = load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
        assert table.column_names == ["prompt", "chosen", "rejected", "score_chosen", "score_rejected"]
        gaps = [row["score_chosen"] - row["score_rejected"] for row in table]
        assert min(gaps) > 0
        assert entry["pairs/score_gap"] == pytest.approx(sum(gaps) / 7)
    both = load_dataset(str(tmp_path / "pairs"), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(both) == 14
    assert {entry["pairs/prompts"] for entry in logs if "pairs/prompts" in entry} == {7}
    assert not list((tmp_path / "pairs").rglob(".*"))


@pytest.mark.parametrize("strategy", ["best_worst", "ranked"])
def test_the_file_is_what_was_trained_on(tmp_path, strategy):
    """`DPOTrainer` on the round's file takes the same steps: the same weights, bit for bit."""
    fields = {"per_device_train_batch_size": 8, "shuffle_dataset": False, "learning_rate": 1e-2}
    made = scripted(tmp_path / "a", num_rounds=1, pair_strategy=strategy, **fields)
    made.train()
    table = load_dataset(str(tmp_path / "a/pairs/round_000"), split="train", cache_dir=str(tmp_path / "cache"))
    args = pair_config(tmp_path / "b", max_steps=1, **fields)
    plain = pair_trainer(args, shared_model(), table)
    plain.train()
    assert digest(made.shared.named_parameters()) == digest(plain.shared.named_parameters())


def test_all_pairs_of_a_prompt_are_its_pairs_one_by_one(tmp_path):
    """Loss and gradient of the packed answers are those of every pair by itself."""
    packed = scripted(
        tmp_path / "a",
        num_rounds=1,
        shuffle_dataset=False,
        pair_strategy="all",
        steps_per_round=1,
        per_device_train_batch_size=8,
    )
    packed.train()
    table = load_dataset(str(tmp_path / "a/pairs/round_000"), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(table) > 8
    args = pair_config(
        tmp_path / "b", per_device_train_batch_size=64, shuffle_dataset=False, learning_rate=1e-2, max_steps=1
    )
    plain = pair_trainer(args, shared_model(), table)
    plain.train()
    ours, theirs = logs_of(packed)[0], plain.state.log_history[0]
    for name in ("loss", "grad_norm", "logps/chosen", "kl/chosen", "rewards/margins", "lengths/rejected"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


def test_every_round_draws_anew(tmp_path):
    """The same prompts and, at a learning rate of 0, the same weights: other completions in every round, and the same
    ones in a second run."""
    found = []
    for name in ("a", "b"):
        args = config(tmp_path / name, prompts_per_round=None, learning_rate=0.0, shuffle_dataset=False)
        trainer(args, train_dataset=rows(8)).train()
        files = sorted((tmp_path / name / "pairs").glob("*/train.parquet"))
        found.append([pq.read_table(path).to_pylist() for path in files])
    assert found[0] == found[1]
    first, second = ([row["chosen"] for row in table] for table in found[0])
    assert not set(first) & set(second)


REFERENCES = {
    "fixed": {"reference": "fixed"},
    "previous": {"reference": "previous"},
    "average": {"reference": "average", "ref_model_mixup_alpha": 0.5},
}


@pytest.mark.parametrize("kind", ["adapter", "fresh adapter", "all weights"])
def test_where_the_reference_stands(tmp_path, kind):
    """KL at the first step of each of three rounds, before the weights of that step change: 0 where the reference is
    the policy of the round's beginning; with the fixed one 0 in the first round only; an average lies between."""
    models = {"adapter": shared_model, "fresh adapter": lambda: shared_model(trained=False), "all weights": tiny_llama}
    found = {}
    for name, fields in REFERENCES.items():
        made = scripted(tmp_path / name, model=models[kind](), num_rounds=3, **fields)
        made.train()
        found[name] = [entry["kl/chosen"] for entry in logs_of(made)[::2]]
    assert [kls[0] for kls in found.values()] == pytest.approx([0, 0, 0], abs=1e-6)
    for later in (1, 2):
        assert found["previous"][later] == pytest.approx(0, abs=1e-6)
        assert 1e-4 < found["average"][later] < found["fixed"][later]


def test_an_earlier_trainer_s_reference_is_made_anew(tmp_path):
    shared = shared_model(trained=False)
    scripted(tmp_path / "a", model=shared).train()
    made = scripted(tmp_path / "b", model=shared)
    made.train()
    assert logs_of(made)[0]["kl/chosen"] == pytest.approx(0, abs=1e-6)
    made.train()  # a run of its own
    assert logs_of(made)[0]["kl/chosen"] == pytest.approx(0, abs=1e-6)


def flat_in(rounds, made):
    """A reward that tells nothing in some rounds."""

    def reward(completion_ids, trainer_state, **_):
        number = trainer_state.global_step // made[0].plan.steps
        return [0.5 if number in rounds else sum(ids) % 7 / 7 for ids in completion_ids]

    return reward


def test_a_first_round_without_pairs_is_an_error(tmp_path):
    made = []
    made.append(scripted(tmp_path, reward=flat_in({0}, made)))
    with pytest.raises(
        ValueError, match=r"round 0 has no pair: of 8 prompts with 4 completions .*all scores equal: 8"
    ):
        made[0].train()
    counts = json.loads((tmp_path / "pairs/round_000/round.json").read_text())
    assert counts["pairs"] == 0
    assert not (tmp_path / "pairs/round_000/train.parquet").exists()


def test_a_later_round_without_pairs_is_told_and_changes_nothing(tmp_path, caplog):
    """Three rounds, the second flat: its two steps leave the weights alone (Adam's momentum too)."""
    caplog.set_level(logging.WARNING)
    made = []
    made.append(scripted(tmp_path, reward=flat_in({1}, made), num_rounds=3, save_strategy="steps", save_steps=1))
    made[0].train()
    assert caplog.text.count("round 1 has no pair: of 8 prompts") == 1
    weights = [(tmp_path / f"checkpoint-{s}/adapter_model.safetensors").read_bytes() for s in range(1, 7)]
    assert [weights[i] == weights[i + 1] for i in range(5)] == [False, True, True, False, False]
    assert [entry.get("pairs/count") for entry in logs_of(made[0])][::2] == [8, 0, 8]


# --- evaluation ------------------------------------------------------------------------------------------------------


def short(completion_ids, **_):
    """1 for at most three tokens."""
    return [float(len(ids) <= 3) for ids in completion_ids]


def held_out():
    return Dataset.from_dict({"prompt": ["3+4=", "5+6=", "7+8="]})


def test_rounds_are_evaluated_before_the_first_and_after_each(tmp_path):
    made = scripted(tmp_path, eval_dataset=held_out(), reward=short)
    made.train()
    found = [entry for entry in made.state.log_history if "eval_reward" in entry]
    assert [(entry["step"], entry["eval_round"]) for entry in found] == [(0, 0), (2, 1), (4, 2)]
    assert found[0]["eval_accuracy/short_n"] == 3
    assert found[0]["eval_accuracy/short_low"] <= found[0]["eval_reward"] <= found[0]["eval_accuracy/short_high"]
    for fields in ({"evaluate_rounds": False}, {"eval_strategy": "epoch"}):
        made = scripted(tmp_path / "b", eval_dataset=held_out(), reward=short, **fields)
        made.train()
        steps = [entry["step"] for entry in made.state.log_history if "eval_reward" in entry]
        assert steps == ([] if "evaluate_rounds" in fields else [2, 4])


def test_the_best_round_is_kept_by_its_reward(tmp_path):
    """The metric is the held-out reward, the higher the better; no row needs a pair for that."""
    fields = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    made = scripted(tmp_path, eval_dataset=held_out(), reward=short, **fields)
    made.train()
    found = {e["step"]: e["eval_reward"] for e in made.state.log_history if "eval_reward" in e}
    assert list(found) == [2, 4]
    assert made.state.best_metric == max(found.values())
    assert made.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{max(found, key=found.__getitem__)}")


def test_an_earlier_reference_may_be_kept(tmp_path):
    shared = shared_model(trained=False)
    scripted(tmp_path / "a", model=shared).train()
    made = scripted(tmp_path / "b", model=shared, keep_reference=True)
    made.train()
    assert logs_of(made)[0]["kl/chosen"] > 1e-4


def test_evaluation_by_itself(tmp_path):
    """Without training data, of one set and of named ones."""
    made = IterativeDPOTrainer("tiny", short, config(tmp_path), peft_config=lora())
    metrics = made.evaluate(held_out())
    assert metrics["eval_round"] == 0
    assert 0 <= metrics["eval_reward"] <= 1
    named = made.evaluate({"a": held_out(), "b": held_out()}, metric_key_prefix="test")
    assert named["test_a_reward"] == named["test_b_reward"] == metrics["eval_reward"]
    with pytest.raises(ValueError, match=r"evaluate\(\) needs an eval_dataset"):
        made.evaluate()
    with pytest.raises(ValueError, match=r"train\(\) needs a train_dataset"):
        made.train()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_rounds": 0}, "num_rounds must be finite and at least 1"),
        ({"num_generations": 1}, "num_generations must be finite and at least 2"),
        ({"prompts_per_round": 2.5}, "prompts_per_round must be a whole number"),
        ({"epochs_per_round": 1, "steps_per_round": 2}, "epochs_per_round and steps_per_round say the same"),
        ({"pair_strategy": "best"}, "pair_strategy must be one of best_worst, all, ranked"),
        ({"pair_margin": -1}, "pair_margin must be finite and at least 0"),
        ({"max_pairs_per_prompt": 2}, 'max_pairs_per_prompt is for pair_strategy="all"'),
        ({"reference": "last"}, "reference must be one of fixed, previous, average"),
        ({"ref_model_mixup_alpha": 0.3}, 'ref_model_mixup_alpha is for reference="average"'),
        ({"sync_ref_model": True}, 'said here by reference="average"'),
        ({"precompute_ref_log_probs": True}, "precompute_ref_log_probs needs the pairs before training"),
        ({"max_prompt_length": 5}, "filter the dataset instead"),
        ({"num_train_epochs": 7}, "num_rounds counts rounds"),
        ({"temperature": 0}, "needs a temperature above 0"),
        ({"top_p": 0}, "top_p must be"),
        ({"max_completion_length": None}, "max_completion_length must be a number"),
        ({"loss_type": "bce"}, "loss_type must be of"),
        ({"on_reward_error": "stop"}, "on_reward_error must be one of raise, skip"),
    ],
)
def test_a_configuration_is_checked(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **fields)


def test_the_dataset_must_fit(tmp_path):
    with pytest.raises(ValueError, match="prompts_per_round is 99, but train_dataset has 16 prompts"):
        trainer(config(tmp_path, prompts_per_round=99))
    with pytest.raises(ValueError, match="ref_model_sync_steps=3 has no part here"):
        trainer(config(tmp_path, ref_model_sync_steps=3))
    with pytest.raises(ValueError, match="no column `prompt`"):
        trainer(config(tmp_path), train_dataset=Dataset.from_dict({"question": ["a"]}))
    with pytest.raises(TypeError, match=r"args must be a hf_rlx\.IterativeDPOConfig"):
        trainer(DPOConfig(str(tmp_path), use_cpu=True))


def test_it_is_one_trainer(tmp_path):
    """DPO's fields and loss, on the loop of every trainer on pairs."""
    assert issubclass(IterativeDPOConfig, DPOConfig)
    assert not issubclass(IterativeDPOTrainer, DPOTrainer)  # depth two
    made = scripted(tmp_path, loss_type=["hinge", "sft"], loss_weights=[1.0, 0.5], num_rounds=1)
    made.train()
    assert logs_of(made)[0]["nll_loss"] > 0


# --- the warning across rounds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "told"), [(1.0, True), (0.0, False)])
def test_falling_chosen_answers_are_told_of_across_rounds(tmp_path, share, told, caplog):
    """Three rounds of two logs, against a reference that each round makes anew: changes 0, -2 in every round are 0,
    -2, -2, -4, -4, -6 since the start (mean -1.33, then -4.67), and the margins grow likewise. Against a fixed one
    they only go up and down: means -0.67 and -1.33."""
    caplog.set_level(logging.WARNING)
    watch, state = RoundWatch("Do this.", share), TrainerState()
    state.is_world_process_zero = True
    restored = RoundWatch("Do this.", share)
    for number in range(3):
        for change in (0.0, -2.0):
            entry = {"loss": 1.0, "round": float(number), "logps/chosen_change": change, "logps/chosen": -50.0}
            entry |= {"logps/rejected_change": 2 * change, "rewards/margins": -change}
            restored.load_state_dict(watch.state_dict())
            watch = restored
            watch.on_log(None, state, None, entry)
    assert ("4.667 nats less likely than at the start" in caplog.text) == told
