"""A run of rounds that stopped and went on is the run that never stopped: weights bit for bit, every log, and the
pairs on the disk."""

from __future__ import annotations

import shutil

import pyarrow.parquet as pq
import pytest
import torch

from tests.trainers.iterative_tools import config, trainer
from tests.trainers.reward_tools import shared_model
from tests.trainers.tools import digest, rows, tiny_llama, untimed

ROUNDS, STEPS = 3, 2
CASES = {
    "best and worst": {"rpo_alpha": 0.1},
    "all, previous": {"pair_strategy": "all", "reference": "previous", "epochs_per_round": 2, "prompts_per_round": 3},
    "ranked, average": {"pair_strategy": "ranked", "reference": "average"},
    "fresh adapter, previous": {"reference": "previous"},
    "full, previous": {"reference": "previous"},
}


def letters(completion_ids, **_):
    """Share of even ids; reads torch's global random state too."""
    noise = float(torch.rand(())) * 1e-3
    return [sum(i % 2 == 0 for i in ids) / len(ids) + noise * k for k, ids in enumerate(completion_ids)]


def make(folder, case, reward=letters, **changes):
    """Six prompts a round in two steps of three micro-batches, out of eight. Logs every third step and at the end of
    each round; dropout draws from the global random state; held-out prompts are sampled after every round."""
    fields = {
        "num_rounds": ROUNDS,
        "prompts_per_round": 6,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 3,
        "max_completion_length": 5,
        "logging_steps": 3,
        "save_strategy": "steps",
        "save_steps": 1,
        "lr_scheduler_type": "linear",
        "disable_dropout": False,
        **CASES[case],
        **changes,
    }
    model = tiny_llama(attention_dropout=0.2) if "full" in case else shared_model(trained="fresh" not in case)
    data = {"train_dataset": rows(8), "eval_dataset": rows(2)}
    return trainer(config(folder, **fields), reward, model, **data)


def result(made, folder):
    """Weights, logs, what is remembered, and the pairs of every round."""
    logs = [untimed(entry) for entry in made.state.log_history if "train_loss" not in entry]
    tables = [pq.read_table(path).to_pylist() for path in sorted(folder.glob("pairs/*/train.parquet"))]
    counts = [path.read_text() for path in sorted(folder.glob("pairs/*/round.json"))]
    return logs, tables, counts, repr(made.watch.state_dict()), digest(made.shared.named_parameters())


@pytest.fixture(scope="module", params=CASES)
def whole(request, tmp_path_factory):
    """The run without a stop, with a checkpoint at every step."""
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    made = make(folder, request.param)
    made.train()
    assert made.state.global_step == ROUNDS * STEPS
    return folder, request.param, result(made, folder)


def resumed(whole, tmp_path, step):
    """The run gone on with from a checkpoint, and how often it sampled."""
    folder, case, _ = whole
    shutil.copytree(folder / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    for number in range((step + STEPS - 1) // STEPS):  # what the run before has written
        shutil.copytree(folder / f"pairs/round_{number:03d}", tmp_path / f"pairs/round_{number:03d}")
    made = make(tmp_path, case)
    asked = []
    generate = made.sampler.generate
    made.sampler.generate = lambda prompts, *a, **k: asked.append(len(prompts)) or generate(prompts, *a, **k)
    made.train(resume_from_checkpoint=True)
    return made, [count for count in asked if count != 2]  # evaluation has two prompts


@pytest.mark.parametrize("step", range(1, ROUNDS * STEPS))
def test_resume_is_exact_at_every_step(whole, tmp_path, step):
    """In the middle of a round nothing of it is sampled again."""
    made, sampled = resumed(whole, tmp_path, step)
    found = result(made, tmp_path)
    for ours, expected in zip(found, whole[2], strict=True):
        assert ours == expected
    assert len(sampled) == ROUNDS - 1 - (step - 1) // STEPS


def test_a_stop_while_a_round_is_sampled(tmp_path):
    """The third call for the second round fails: the checkpoint of the first round's end goes on, and samples anew."""
    whole = make(tmp_path / "a", "all, previous", save_strategy="no")
    whole.train()
    calls = []

    def fails(completion_ids, **_):
        calls.append(1)
        if len(calls) == 2 + 3 + 2 + 3:  # held out, round 0, held out, round 1
            raise RuntimeError("no connection")
        return letters(completion_ids)

    with pytest.raises(Exception, match="no connection"):
        make(tmp_path / "b", "all, previous", fails, save_steps=500, on_reward_error="raise").train()
    made = make(tmp_path / "b", "all, previous", save_steps=500)
    made.train(resume_from_checkpoint=True)
    assert digest(made.shared.named_parameters()) == digest(whole.shared.named_parameters())


def test_a_stop_between_micro_batches_keeps_the_pairs(tmp_path):
    """The second round has been sampled, its first micro-batch is done, the second one fails: the checkpoint has the
    pairs, the run goes on without sampling them, and is exact."""
    whole = make(tmp_path / "a", "best and worst", save_strategy="no")
    whole.train()
    broken = make(tmp_path / "b", "best and worst", save_steps=500)
    calls = []
    step = broken.forward_backward

    def fails(*args):
        calls.append(1)
        if len(calls) == 8:
            raise RuntimeError("a fault")
        return step(*args)

    broken.forward_backward = fails
    with pytest.raises(RuntimeError, match="a fault"):
        broken.train()
    assert [path.name for path in sorted((tmp_path / "b").glob("checkpoint-*"))] == ["checkpoint-2"]
    made = make(tmp_path / "b", "best and worst", save_steps=500)
    asked = []
    generate = made.sampler.generate
    made.sampler.generate = lambda prompts, *a, **k: asked.append(len(prompts)) or generate(prompts, *a, **k)
    made.train(resume_from_checkpoint=True)
    assert digest(made.shared.named_parameters()) == digest(whole.shared.named_parameters())
    assert asked.count(6) == 1  # the third round's


def test_another_run_s_checkpoint_is_refused(tmp_path):
    """What a round is may not change; how many there are may."""
    make(tmp_path, "best and worst", num_rounds=1).train()
    for changes, message in (
        ({"reference": "previous"}, "reference: 'fixed' -> 'previous'"),
        ({"pair_strategy": "all"}, "pair_strategy: 'best_worst' -> 'all'"),
        ({"prompts_per_round": 3}, "round: "),
        ({"beta": 0.2}, "beta: 0.1 -> 0.2"),
    ):
        with pytest.raises(ValueError, match=f"belongs to another run.*{message}"):
            make(tmp_path, "best and worst", **changes).train(resume_from_checkpoint=True)
    more = make(tmp_path, "best and worst", num_rounds=2)
    more.train(resume_from_checkpoint=True)
    assert more.state.global_step == 2 * STEPS
