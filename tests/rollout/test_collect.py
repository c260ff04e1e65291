"""collect(): prompts in, rollouts out, rows in the order of the dataset whatever finished first."""

import threading
import time

import pytest
import torch

from hf_rlx.rollout.collect import collect
from hf_rlx.rollout.sampling import SamplingParams
from hf_rlx.rollout.scoring import RewardScorer
from hf_rlx.types import Completion
from tests import tiny

PARAMS = SamplingParams(8)


class Sampler:
    """Answers prompt i, completion k with the token 10 * (i + 1) + k, and finishes the groups in `order`."""

    def __init__(self, order=None):
        self.order = order
        self.prompts = None

    def generate(self, prompt_ids, num_generations, params, on_group=None, on_step=None):
        self.prompts = prompt_ids
        groups = [
            [Completion([10 * (i + 1) + k], [-1.0], True, f"t{10 * (i + 1) + k}") for k in range(num_generations)]
            for i in range(len(prompt_ids))
        ]
        for index in self.order or range(len(groups)):
            on_step(num_generations)
            on_group(index, groups[index])
        return groups


def run(rows, func, sampler=None, tokenizer=None, k=2, **options):
    with RewardScorer(func) as scorer:
        return collect(rows, sampler or Sampler(), scorer, tokenizer or tiny.word_tokenizer(), PARAMS, k, **options)


def token_reward(completion_ids, log_extra, log_metric, **kwargs):
    """The token id itself, so that a swapped row shows; the same in an extra column."""
    log_extra("token", [ids[0] for ids in completion_ids])
    log_metric("mean", sum(ids[0] for ids in completion_ids) / len(completion_ids))
    return [float(ids[0]) for ids in completion_ids]


ROWS = [{"prompt": f"t{i + 3} t4", "answer": str(i), "level": i} for i in range(3)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [2, 1, 0]])
def test_rows_come_in_prompt_order(order):
    """Group 2 may finish first: rewards are 10 11 / 20 21 / 30 31 all the same."""
    collected = run(ROWS, token_reward, Sampler(order))
    assert [r.rewards.tolist() for r in collected.rollouts] == [[[10], [11]], [[20], [21]], [[30], [31]]]
    assert [r.total.tolist() for r in collected.rollouts] == [[10, 11], [20, 21], [30, 31]]
    assert collected.scores.extra["token"] == [10, 11, 20, 21, 30, 31]
    assert collected.scores.total.tolist() == [10, 11, 20, 21, 30, 31]
    assert collected.scores.names == ["token_reward"]
    assert [r.prompt for r in collected.rollouts] == [row["prompt"] for row in ROWS]
    assert [[c.token_ids for c in r.completions] for r in collected.rollouts] == [
        [[10], [11]],
        [[20], [21]],
        [[30], [31]],
    ]
    assert collected.tokens == 6
    assert collected.generation_seconds >= 0
    assert collected.waiting_seconds >= 0


def test_plain_prompts_and_columns():
    seen = {}

    def reward(prompts, completions, completion_ids, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, ids=completion_ids)
        return [0.0] * len(prompts)

    rows = [{"prompt": "t3 t4", "answer": "7", "level": 1, "completion": "the old one"}]
    (rollout,) = run(rows, reward).rollouts
    assert seen["prompts"] == ["t3 t4", "t3 t4"]
    assert seen["completions"] == ["t10", "t11"]
    assert seen["ids"] == [[10], [11]]
    assert (seen["answer"], seen["level"]) == (["7", "7"], [1, 1])
    assert "completion" not in seen
    assert rollout.columns == {"answer": "7", "level": 1, "completion": "the old one"}
    assert (rollout.prompt_text, rollout.prompt_ids) == ("t3 t4", [3, 4])
    group = rollout.group()
    assert group.prompt_ids.tolist() == [3, 4]
    assert [ids.tolist() for ids in group.response_ids] == [[10], [11]]


TEMPLATE = (
    "{% for m in messages %}t{{ 30 + loop.index }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}t40{% if think %} t41{% endif %}{% endif %}"
)


def chat_tokenizer():
    tokenizer = tiny.word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_conversational_prompts():
    """Functions get the messages, and completions as messages; the model gets the template with its prompt open."""
    seen = {}

    def reward(prompts, completions, **kwargs):
        seen.update(prompts=prompts, completions=completions)
        return [0.0] * len(prompts)

    messages = [{"role": "system", "content": "t5"}, {"role": "user", "content": "t6"}]
    (rollout,) = run([{"prompt": messages}], reward, tokenizer=chat_tokenizer()).rollouts
    assert rollout.prompt_text == "t31 t5 t32 t6 t40"
    assert rollout.prompt_ids == [31, 5, 32, 6, 40]
    assert rollout.prompt == messages
    assert seen["prompts"] == [messages, messages]
    assert seen["completions"] == [
        [{"role": "assistant", "content": "t10"}],
        [{"role": "assistant", "content": "t11"}],
    ]


def test_template_arguments():
    """Those of the call go to every row; a row's own column wins."""
    message = [{"role": "user", "content": "t6"}]
    rows = [
        {"prompt": message},
        {"prompt": message, "chat_template_kwargs": {"think": False}},
        {"prompt": message, "chat_template_kwargs": None},
    ]
    collected = run(rows, token_reward, tokenizer=chat_tokenizer(), chat_template_kwargs={"think": True})
    assert [r.prompt_text for r in collected.rollouts] == ["t31 t6 t40 t41", "t31 t6 t40", "t31 t6 t40 t41"]


def test_a_prefilled_answer_is_continued():
    """The template must not close the assistant's turn, nor open another one (trl#6966)."""
    messages = [{"role": "user", "content": "t6"}, {"role": "assistant", "content": "t7"}]
    (rollout,) = run([{"prompt": messages}], token_reward, tokenizer=chat_tokenizer()).rollouts
    assert rollout.prompt_text == "t31 t6 t32 t7"


def test_a_long_prompt_is_refused():
    rows = [{"prompt": "t3"}, {"prompt": "t3 " * 9}]
    run(rows, token_reward, max_prompt_tokens=9)
    with pytest.raises(ValueError, match=r"a prompt of 9 tokens leaves no room for 8 new ones.*t3 t3"):
        run(rows, token_reward, max_prompt_tokens=8)


def test_scoring_overlaps_generation():
    """The first group is scored before the sampler has finished the second: a sampler that waits for it gets on."""
    scored = threading.Event()

    def reward(completion_ids, **kwargs):
        scored.set()
        return [0.0] * len(completion_ids)

    class Waiting(Sampler):
        def generate(self, prompt_ids, num_generations, params, on_group=None, on_step=None):
            groups = [[Completion([5], [-1.0], True, "t5")] for _ in prompt_ids]
            on_group(1, groups[1])
            assert scored.wait(20), "the first group was not scored while the second was generated"
            on_group(0, groups[0])
            return groups

    assert len(run(ROWS[:2], reward, Waiting(), k=1).rollouts) == 2


def test_an_empty_share_is_an_empty_rollout():
    """A process that only keeps the others company."""
    collected = run([], token_reward)
    assert collected.rollouts == []
    assert collected.scores.rewards.shape == (0, 1)
    assert collected.scores.total.shape == (0,)
    assert collected.scores.metrics["rewards/token_reward/abstained"] == 0


def test_a_slow_scorer_is_not_silent(capfd):
    """The bar says after 1 s that one of two prompts still waits."""

    def slow(completion_ids, **kwargs):
        time.sleep(1.5 if completion_ids[0][0] == 20 else 0)
        return [0.0] * len(completion_ids)

    run(ROWS[:2], slow, progress=True)
    assert "1 prompts wait for rewards, 1 s" in capfd.readouterr().err


def test_with_the_real_generator():
    """End to end: rewards belong to the completions that they were given for."""
    from hf_rlx.models.shared import SharedModel
    from hf_rlx.rollout.generate import Generator

    tokenizer = tiny.word_tokenizer()
    generator = Generator(SharedModel.build(tiny.causal_lm()), tokenizer, max_rows=4)
    generator.eos = frozenset(range(3, 20))
    collected = run(
        [{"prompt": "t5 t6 t7 t8"}, {"prompt": "t9"}, {"prompt": "t4 t4"}],
        lambda completion_ids, **kwargs: [float(sum(ids)) for ids in completion_ids],
        generator,
        tokenizer,
        progress=True,
    )
    for rollout in collected.rollouts:
        assert rollout.total.tolist() == [sum(c.token_ids) for c in rollout.completions]
    assert collected.tokens == sum(len(c.token_ids) for r in collected.rollouts for c in r.completions)
    assert torch.equal(collected.scores.total, torch.cat([r.total for r in collected.rollouts]))
