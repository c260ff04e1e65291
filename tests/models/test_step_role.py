"""The role `step_reward`: read at the ends of steps, one scoring function, saved with its adapter."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch

from hf_rlx.data.steps import encode_steps
from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.packing import pack_groups, pad_groups
from hf_rlx.models.reward_role import token_index
from hf_rlx.models.shared import SharedModel
from hf_rlx.types import Group
from tests import tiny
from tests.trainers.tools import lora, tiny_llama

FACTS = {"step_separator": "\n", "max_length": 40, "max_completion_length": None, "chat_template_kwargs": None}


def with_steps(packing: bool = True, seed: int = 5, **facts) -> SharedModel:
    """A model whose role `step_reward` looks trained."""
    shared = SharedModel.build(tiny_llama(), lora(), packing=packing)
    torch.manual_seed(seed)
    shared.add_role("step_reward", lora(r=2))
    tiny.randomise_lora(shared.model, "step_reward", scale=0.3)
    shared.roles["step_reward"].facts = {**FACTS, **facts}
    return shared


def function(shared, **options):
    return shared.step_reward_function(tokenizer=load_tokenizer("tiny"), **options)


# --- where it is read ------------------------------------------------------------------------------------------------


def test_the_tokens_that_are_read():
    """Prompt 10 11, responses (20 21 22), (), (30 31). Packed: 10 11 20 21 22 30 31, so that 20 is at 2, 22 at 4, 30
    at 5, 31 at 6. Padded, rows of five: 20 at 2, 22 at 4, and in the third row, from 10 on, 30 at 12, 31 at 13."""
    groups = [Group.from_lists([10, 11], [[20, 21, 22], [], [30, 31]])]
    ends = [[0, 2], [], [0, 1]]
    assert token_index(pack_groups(groups), ends).tolist() == [2, 4, 5, 6]
    assert token_index(pad_groups(groups), ends).tolist() == [2, 4, 12, 13]
    assert token_index(pack_groups(groups), [[], [], []]).tolist() == []
    for make in (pack_groups, pad_groups):
        batch = make(groups)
        index = token_index(batch, ends)
        assert batch.input_ids.flatten()[index].tolist() == [20, 22, 30, 31]


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([[0]], "1 lists of step ends for 2 responses"),
        ([[3], []], r"the step ends \[3\] of response 0 must lie inside its 3 tokens"),
        ([[0], [-1]], r"the step ends \[-1\] of response 1 must lie inside its 1 tokens"),
    ],
)
def test_ends_outside_are_refused(ends, message):
    with pytest.raises(ValueError, match=message):
        token_index(pack_groups([Group.from_lists([10], [[20, 21, 22], [30]])]), ends)


def test_the_score_is_the_head_on_the_state_of_that_token():
    """Against the model's own forward of each solution alone: a step's score depends on nothing behind it."""
    shared = with_steps()
    groups, ends = [], []
    for prompt, lengths, row in (([5, 6, 7], (6, 4), ([1, 5], [3])), ([8], (5,), ([0, 2, 4],))):
        groups.append(Group.from_lists(prompt, tiny.tokens(*lengths)))
        ends += row
    found = shared.score(groups, "step_reward", ends=ends)
    wanted = []
    responses = [(g.prompt_ids, ids) for g in groups for ids in g.response_ids]
    with torch.no_grad(), shared.as_role("step_reward"), shared.rollout_mode():
        for (prompt, ids), row in zip(responses, ends, strict=True):
            for end in row:
                whole = torch.cat([prompt, ids[: end + 1]])[None]
                hidden = shared.causal_lm.base_model(input_ids=whole).last_hidden_state[0, -1]
                wanted.append(shared.heads["step_reward"](hidden))
    torch.testing.assert_close(found, torch.stack(wanted), rtol=0, atol=2e-6)
    limited = shared.score(groups, "step_reward", max_tokens=1, ends=ends)  # group by group
    torch.testing.assert_close(limited, found, rtol=0, atol=2e-6)
    padded = with_steps(packing=False).score(groups, "step_reward", ends=ends)
    torch.testing.assert_close(padded, found, rtol=0, atol=2e-6)
    assert found.std() > 0.05


def test_at_the_last_token_it_is_the_score_of_a_response():
    shared = with_steps()
    groups = [Group.from_lists([5], tiny.tokens(4, 2)), Group.from_lists([6, 7], tiny.tokens(3))]
    whole = shared.score(groups, "step_reward")
    torch.testing.assert_close(shared.score(groups, "step_reward", ends=[[3], [1], [2]]), whole)


# --- as a step reward function ---------------------------------------------------------------------------------------

PROMPTS = ["1+1=", "1+1=", "2+2=", "1+1="]
TEXTS = ["ab\nc", "d", "a\n\nbc\nd\n", "ab\nc"]


def test_steps_and_their_probabilities():
    """Ends in characters behind each separator; the probability is sigma of the score at the tokens that training
    reads; the same text has the same score wherever it stands, whatever the policy's tokens were."""
    shared = with_steps()
    tokenizer = load_tokenizer("tiny")
    found = function(shared)(prompts=PROMPTS, completions=TEXTS, completion_ids=[[1], [2], [3], [4]])
    assert [[end for end, _ in row] for row in found] == [[3, 4], [1], [2, 6, 8], [3, 4]]
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[3]), rtol=0, atol=1e-6)
    for prompt, text, row in zip(PROMPTS, TEXTS, found, strict=True):
        encoded = encode_steps(prompt, [step for step in text.split("\n") if step], tokenizer)
        group = Group.from_lists(encoded.prompt, [encoded.ids])
        scores = shared.score([group], "step_reward", ends=[encoded.ends])
        assert [worth for _, worth in row] == pytest.approx(scores.sigmoid().tolist(), abs=1e-6)


def test_what_a_step_is_worth():
    """log sigma(s), s and sigma(s) of the same score."""
    shared = with_steps()
    worth = {
        value: [w for _, w in function(shared, value=value)(PROMPTS[:1], TEXTS[:1])[0]]
        for value in ("probability", "log_probability", "log_odds")
    }
    for chance, log, odds in zip(*worth.values(), strict=True):
        assert chance == pytest.approx(1 / (1 + math.exp(-odds)), abs=1e-6)
        assert log == pytest.approx(math.log(chance), abs=1e-5)


def test_messages_are_the_assistant_s_text():
    shared = with_steps()
    prompt = [{"role": "user", "content": "1+1="}]
    told = function(shared)([prompt], [[{"role": "assistant", "content": "ab\nc"}]])
    assert told == function(shared)([prompt], ["ab\nc"])


def test_completions_without_a_step():
    """None at all, blank lines, and nothing."""
    shared = with_steps()
    assert function(shared)([], []) == []
    assert function(shared)(["1+1="] * 2, ["", "\n \n"]) == [[], []]
    found = function(shared)(["1+1="] * 3, ["", "ab", "\n"])
    assert [len(row) for row in found] == [0, 1, 0]
    assert function(shared).solution_scores(["1+1="] * 2, ["", "ab"])[0] is None
    assert function(shared).solution_scores([], []) == []


def test_steps_beyond_the_limit_have_no_reward():
    """Five tokens of a solution: the third step ends at the sixth."""
    shared = with_steps(max_completion_length=5)
    assert [end for end, _ in function(shared)(["1="], ["a\nb\nc"])[0]] == [2, 4]
    more = function(shared, max_completion_length=6)(["1="], ["a\nb\nc"])
    assert [end for end, _ in more[0]] == [2, 4, 5]


def test_the_separator_is_the_one_of_training():
    shared = with_steps(step_separator=";")
    assert [end for end, _ in function(shared)(["1="], ["a\nb;c"])[0]] == [4, 5]
    assert [end for end, _ in function(shared, step_separator="\n")(["1="], ["a\nb;c"])[0]] == [2, 5]


def test_scores_of_whole_solutions():
    """Of the probabilities p, q: min, product, mean, last."""
    shared = with_steps()
    steps = function(shared)
    p, q = (worth for _, worth in steps(["1="], ["ab\nc"])[0])
    for how, expected in (("min", min(p, q)), ("prod", p * q), ("mean", (p + q) / 2), ("last", q)):
        (found,) = steps.solution_scores(["1="], ["ab\nc"], how=how)
        assert found == pytest.approx(expected, abs=1e-6)
    assert steps.solution_scores(["1="], ["ab\nc"])[0] == pytest.approx(min(p, q), abs=1e-6)


def test_scoring_leaves_the_model_as_it_was():
    shared = with_steps()
    shared.train()
    flags = [(n, p.requires_grad) for n, p in shared.named_parameters()]
    function(shared)(PROMPTS, TEXTS)
    assert [(n, p.requires_grad) for n, p in shared.named_parameters()] == flags
    assert shared.training
    assert list(shared.model.active_adapters) == ["policy"]


def test_bad_calls_are_named():
    shared = SharedModel.build(tiny_llama(), lora())
    with pytest.raises(KeyError, match="no role 'step_reward'"):
        shared.step_reward_function()
    with pytest.raises(ValueError, match="role 'policy' has no head to score with; train it with PRMTrainer"):
        shared.step_reward_function("policy")
    with pytest.raises(ValueError, match=r"value must be one of .'probability', 'log_probability', 'log_odds'"):
        function(with_steps(), value="logits")
    with pytest.raises(ValueError, match="no name to find its tokenizer by; pass tokenizer="):
        with_steps().step_reward_function()
    with pytest.raises(ValueError, match="completion 1 cannot be tokenized"):
        function(with_steps())(["1=", 7], ["a", "b"])


# --- saved -----------------------------------------------------------------------------------------------------------


def test_another_process_gives_the_same_scores(tmp_path):
    """Adapter, head and separator come with the folder."""
    shared = with_steps(step_separator=";")
    shared.save_pretrained(tmp_path / "model")
    tiny_llama().save_pretrained(tmp_path / "base")
    load_tokenizer("tiny").save_pretrained(tmp_path / "model")
    code = (
        "import json, sys\n"
        "from transformers import AutoModelForCausalLM\n"
        "from hf_rlx import SharedModel\n"
        "base = AutoModelForCausalLM.from_pretrained(sys.argv[1] + '/base')\n"
        "shared = SharedModel.from_pretrained(sys.argv[1] + '/model', base=base)\n"
        "print(json.dumps(shared.step_reward_function()(['1+1='] * 2, ['ab;c', 'd;'])))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-800:]
    for found, wanted in zip(
        json.loads(done.stdout.splitlines()[-1]), function(shared)(["1+1="] * 2, ["ab;c", "d;"]), strict=True
    ):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=1e-6)
