"""Evaluation of an online trainer."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from hf_rlx.functional import wilson_interval
from tests.trainers.tools import ScriptedSampler, by_ids, config, rows, scripted


def right_or_wrong(completions, number, **_):
    """Right on even numbers."""
    return [float(n % 2 == 0) for n in number]


def graded(completions, **_):
    return [0.5] * len(completions)


def test_one_greedy_completion_a_prompt(tmp_path):
    """Row 65: evaluation batch 1 and three prompts are three records, neither repeated nor refused."""
    args = config(tmp_path, per_device_eval_batch_size=1)
    trainer = scripted(args, reward=[right_or_wrong, graded], eval_dataset=rows(3))
    trainer.sampler = trainer.make_sampler()
    metrics, again = trainer.evaluate(), trainer.evaluate()
    assert {k: v for k, v in metrics.items() if "second" not in k and "time" not in k} == {
        k: v for k, v in again.items() if "second" not in k and "time" not in k
    }
    table = pq.read_table(tmp_path / "completions" / "eval_000000.parquet").to_pylist()
    assert [r["prompt"] for r in table] == ["0+0=", "1+1=", "2+2="]
    low, high = wilson_interval(2, 3)
    assert metrics["eval_accuracy/right_or_wrong"] == pytest.approx(2 / 3)
    assert metrics["eval_accuracy/right_or_wrong_low"] == pytest.approx(low)
    assert metrics["eval_accuracy/right_or_wrong_high"] == pytest.approx(high)
    assert metrics["eval_accuracy/right_or_wrong_n"] == 3
    assert "eval_accuracy/graded" not in metrics
    assert metrics["eval_rewards/graded/mean"] == 0.5
    assert metrics["eval_reward"] == pytest.approx(0.5 + 2 / 3)
    # Totals 1.5, 0.5 and 1.5: variance 1/3 (n - 1), standard error 1/3.
    assert metrics["eval_reward_low"] == pytest.approx(0.5 + 2 / 3 - 1.96 / 3)
    assert metrics["eval_reward_high"] == pytest.approx(0.5 + 2 / 3 + 1.96 / 3)
    assert metrics["eval_reward_n"] == 3
    # Of several functions each has one, here with the same scatter as the total; the other has none.
    name = "eval_rewards/right_or_wrong/mean"
    assert [metrics[f"{name}_{end}"] for end in ("low", "high")] == pytest.approx([2 / 3 - 1.96 / 3, 2 / 3 + 1.96 / 3])
    assert [metrics[f"eval_rewards/graded/mean_{end}"] for end in ("low", "high", "n")] == [0.5, 0.5, 3]
    assert metrics["eval_completions/mean_length"] > 0
    assert metrics["eval_samples_per_second"] > 0


def test_the_interval_of_a_reward_is_over_prompts_and_there_at_weight_0_too(tmp_path):
    """`numbered` gives 0, 2 and 4, and nothing to the first completion of each prompt: mean 2, deviation 2 (n - 1),
    standard error 2 / sqrt(3). Of a single function the total has it."""

    def numbered(completions, number, **_):
        return [None if place % 2 == 0 else 2.0 * n for place, n in enumerate(number)]

    args = config(tmp_path, num_generations_eval=2, reward_weights=[1.0, 0.0])
    metrics = scripted(args, reward=[graded, numbered], eval_dataset=rows(3)).evaluate()
    half = 1.96 * 2 / 3**0.5
    ends = [metrics[f"eval_rewards/numbered/mean_{end}"] for end in ("low", "high", "n")]
    assert ends == pytest.approx([2 - half, 2 + half, 3])
    alone = scripted(config(tmp_path / "alone"), reward=graded, eval_dataset=rows(3)).evaluate()
    assert not [key for key in alone if key.startswith("eval_rewards/graded/mean_")]


@pytest.mark.parametrize("weights", [None, [2.0, 0.0], [-1.0, 0.0]])
def test_the_interval_of_a_share_stays_between_nothing_and_its_weight(tmp_path, weights):
    """All five answers are right: a mean without scatter would be said to be known exactly; Wilson's interval of 5 of
    5 ends at 0.566. Where the weight is not positive, the total is no share."""

    def always(completions, **_):
        return [1.0] * len(completions)

    functions = [always] if weights is None else [always, graded]
    trainer = scripted(config(tmp_path, reward_weights=weights), reward=functions, eval_dataset=rows(5))
    metrics = trainer.evaluate()
    weight = 1.0 if weights is None else weights[0]
    low, high = wilson_interval(5, 5) if weight > 0 else (1.0, 1.0)
    assert low == 1.0 or low == pytest.approx(0.566, abs=1e-3)
    ends = [metrics[f"eval_reward{end}"] for end in ("", "_low", "_high")]
    assert ends == pytest.approx([weight, weight * low, weight * high])


def test_several_sampled_completions_when_asked_for(tmp_path):
    trainer = scripted(config(tmp_path, num_generations_eval=5), reward=right_or_wrong, eval_dataset=rows(3))
    assert trainer.evaluate()["eval_accuracy/right_or_wrong_n"] == 15


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 0.0),
        ({"num_generations_eval": 2}, 0.8),
        ({"eval_temperature": 0.3}, 0.3),
        ({"eval_temperature": 0.0, "num_generations_eval": 2}, 0.0),
    ],
)
def test_temperature_of_evaluation(tmp_path, fields, expected):
    """Greedy for one completion a prompt, else the training temperature, unless it is given."""
    trainer = scripted(config(tmp_path, temperature=0.8, **fields), eval_dataset=rows(2))
    seen = []
    original = trainer.sampler.generate
    trainer.sampler.generate = lambda ids, k, params, *rest: (
        seen.append(params.temperature) or original(ids, k, params, *rest)
    )
    trainer.evaluate()
    assert seen == [expected]


def test_a_dictionary_of_datasets(tmp_path):
    trainer = scripted(config(tmp_path), reward=right_or_wrong, eval_dataset={"a": rows(2), "b": rows(5)})
    metrics = trainer.evaluate()
    assert metrics["eval_a_accuracy/right_or_wrong"] == 0.5
    assert metrics["eval_b_accuracy/right_or_wrong"] == 0.6
    assert metrics["eval_a_accuracy/right_or_wrong_n"] == 2
    tables = {p.name: pq.read_table(p).num_rows for p in (tmp_path / "completions").iterdir()}
    assert tables == {"eval_a_000000.parquet": 2, "eval_b_000000.parquet": 5}


def test_another_dataset_and_prefix(tmp_path):
    """A test set after training; its log holds nothing of training's."""
    trainer = scripted(config(tmp_path, max_steps=3, logging_steps=2), eval_dataset=rows(2))
    trainer.train()
    metrics = trainer.evaluate(rows(4), metric_key_prefix="test")
    assert set(metrics) == {k for k in metrics if k.startswith("test_")}
    entry = trainer.state.log_history[-1]
    assert {k for k in entry if not k.startswith("test_")} <= {"epoch", "step"}


def test_evaluation_needs_a_dataset(tmp_path):
    with pytest.raises(ValueError, match=r"evaluate\(\) needs an eval_dataset"):
        scripted(config(tmp_path)).evaluate()


def test_large_sets_are_sampled_in_batches(tmp_path):
    """`max_rollout_rows` bounds what decodes side by side."""
    trainer = scripted(config(tmp_path, max_rollout_rows=4, num_generations_eval=2), eval_dataset=rows(7))
    trainer.evaluate()
    assert trainer.sampler.calls == [2, 2, 2, 1]


class Together(ScriptedSampler):
    """A sampler that all processes must call equally often, and that has a copy of the weights."""

    collective = True
    version: int | None = None


@pytest.mark.parametrize(
    ("sampler", "rank", "expected"),
    [(Together, 0, [2, 1]), (Together, 1, [2, 0]), (ScriptedSampler, 0, [2, 1]), (ScriptedSampler, 1, [2])],
)
def test_every_process_calls_a_collective_sampler_equally_often(tmp_path, monkeypatch, sampler, rank, expected):
    """Five rows on two processes are 3 and 2; in batches of 2 that is 2 calls and 1."""
    trainer = scripted(config(tmp_path, max_rollout_rows=2), eval_dataset=rows(5))
    trainer.sampler = sampler(trainer.tokenizer)
    trainer.state.global_step = 7
    monkeypatch.setattr(type(trainer.args), "world_size", property(lambda self: 2))
    monkeypatch.setattr(type(trainer.args), "process_index", property(lambda self: rank))
    metrics = trainer.evaluate()
    assert trainer.sampler.calls == expected
    assert metrics["eval_reward"] > 0
    assert getattr(trainer.sampler, "version", 7) == 7


def test_abstained_rows_leave_the_accuracy(tmp_path):
    def sometimes(completions, number, **_):
        return [None if n == 1 else 1.0 for n in number]

    trainer = scripted(config(tmp_path), reward=sometimes, eval_dataset=rows(3))
    metrics = trainer.evaluate()
    assert metrics["eval_accuracy/sometimes_n"] == 2
    assert metrics["eval_rewards/sometimes/abstained"] == 1


def test_evaluation_at_steps_and_at_the_start(tmp_path):
    args = config(tmp_path, max_steps=4, eval_strategy="steps", eval_steps=2, eval_on_start=True)
    trainer = scripted(args, reward=by_ids, eval_dataset=rows(2))
    trainer.train()
    assert [e["step"] for e in trainer.state.log_history if "eval_reward" in e] == [0, 2, 4]
