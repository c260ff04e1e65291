"""Dynamic sampling where all processes must call the sampler equally often."""

from __future__ import annotations

import pytest

from tests.trainers.tools import ScriptedSampler, config, scripted


class Together(ScriptedSampler):
    """A sampler that is a collective, as vLLM's client is."""

    collective = True


def flat(completions, **_):
    """No signal at all."""
    return [0.5] * len(completions)


def graded(completions, **_):
    """Signal everywhere."""
    return [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("sampler", "reward", "others", "expected"),
    [
        (Together, graded, [2, 1], [4, 0, 0]),  # two rounds of the other process, one call with no prompt in each
        (Together, graded, [0], [4]),
        (Together, flat, [2, 0], [4, 4, 4]),  # this one is not done when the other is; 2 rounds at most
        (ScriptedSampler, graded, [], [4]),  # nobody is asked
        (ScriptedSampler, flat, [], [4, 4, 4]),
    ],
)
def test_rounds_are_those_of_the_slowest_process(tmp_path, monkeypatch, sampler, reward, others, expected):
    """Four groups a process; `others`: flat groups of the other one before each round."""
    trainer = scripted(config(tmp_path, dynamic_sampling=True, dynamic_sampling_rounds=2), reward=reward)
    trainer.sampler = sampler(trainer.tokenizer)
    told = iter(others)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", property(lambda self: 2))
    monkeypatch.setattr("hf_rlx.trainers.dynamic_sampling.gather_object", lambda local: [*local, next(told)])
    rollouts = trainer.sample([trainer.train_dataset[i] for i in range(4)])
    assert trainer.sampler.calls == expected
    assert len(rollouts) == 4
    metrics = trainer.metrics["train"].flush()
    assert metrics["dynamic_sampling/rounds"] == len(expected) - 1
    assert metrics["reward"] == (0.5 if reward is flat else 2.5)
    assert list(told) == []
