"""`SharedModel.reward_function()`: the trained score, in RL, in another process, normalised and tempered."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.shared import SharedModel
from hf_rlx.rollout.scoring import RewardScorer, ScoreRequest
from tests.tiny import word_tokenizer
from tests.trainers.reward_tools import config, pairs, shared_model, trainer
from tests.trainers.tools import lora, tiny_llama

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, TEXTS = ["1+1=", "1+1=", "3+4="], ["2", "abc", "7"]
MESSAGES = [[{"role": "user", "content": p}] for p in PROMPTS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trained role with temperature and moments, beside the policy of the bundled model."""
    folder = tmp_path_factory.mktemp("reward")
    rewards = trainer(
        config(folder, max_steps=3, fit_temperature=True, normalizer="running", ensemble_size=2),
        "tiny",
        eval_dataset=pairs(8, seed=2),
        peft_config=lora(),
    )
    rewards.train()
    rewards.save_model(str(folder / "saved"))
    return rewards, folder / "saved"


def plain(shared, **options):
    """Without temperature and normaliser."""
    return shared.reward_function(temperature=1.0, normalizer="none", **options)


def test_texts_ids_and_messages_have_one_score(trained):
    """What the trainer scores, what a rollout's ids score and what texts score, to 1e-6."""
    rewards, _ = trained
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "abc"}]
    expected = rewards.examine(rewards.encode(list(enumerate(rows))))[0].scores
    tokenizer = rewards.tokenizer
    ids = [[*tokenizer(text, add_special_tokens=False)["input_ids"], 2] for text in TEXTS]
    for found in (
        plain(rewards.shared)(PROMPTS, TEXTS),
        plain(rewards.shared)(PROMPTS, TEXTS, completion_ids=ids),
        plain(rewards.shared)(MESSAGES, TEXTS),
        plain(rewards.shared)(MESSAGES, [[{"role": "assistant", "content": t}] for t in TEXTS]),
    ):
        assert found[:2] == pytest.approx(expected, abs=1e-6)
    # Twice the prompt in a row is one group; one by one it is the same.
    alone = [plain(rewards.shared)([p], [t])[0] for p, t in zip(PROMPTS, TEXTS, strict=True)]
    assert alone == pytest.approx(plain(rewards.shared)(PROMPTS, TEXTS), abs=1e-5)


@pytest.mark.parametrize("limit", [None, 20, 1024])
def test_a_long_text_is_cut_as_in_training(tmp_path, limit):
    """To max_length, and to the 64 tokens of the model's context in any case: beyond it positions mean nothing."""
    rewards = trainer(config(tmp_path, max_length=limit), shared_model())
    row = {"prompt": "1" * 100, "chosen": "abc", "rejected": "b" * 100}
    expected = rewards.examine(rewards.encode([(0, row)]))[0].scores
    found = plain(rewards.shared)([row["prompt"]] * 2, [row["chosen"], row["rejected"]])
    assert found == pytest.approx(expected, abs=1e-6)


def test_an_answer_that_was_cut_has_no_eos(trained):
    """Ids are scored as they were sampled."""
    rewards, _ = trained
    tokenizer = rewards.tokenizer
    ids = tokenizer("abc", add_special_tokens=False)["input_ids"]
    cut, whole = plain(rewards.shared)(PROMPTS[:2], ["abc", "abc"], completion_ids=[ids, [*ids, 2]])
    assert abs(cut - whole) > 1e-4
    assert plain(rewards.shared)(PROMPTS[:2], ["", "abc"], completion_ids=[[], ids])[0] is None


def test_another_process_gives_the_same_score(trained):
    """Saved, loaded elsewhere: adapters, heads, ensemble, temperature and moments, to 1e-6."""
    rewards, folder = trained
    function = rewards.shared.reward_function()
    with function.frozen():
        expected = function(PROMPTS, TEXTS)
    code = (
        "import json, sys, warnings\n"
        "from hf_rlx import SharedModel\n"
        "function = SharedModel.from_pretrained(sys.argv[1]).reward_function()\n"
        "with function.frozen():\n"
        "    print(json.dumps(function(json.loads(sys.argv[2]), json.loads(sys.argv[3]))))\n"
    )
    command = [sys.executable, "-c", code, str(folder), json.dumps(PROMPTS), json.dumps(TEXTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx(expected, abs=1e-6)


def test_temperature_and_normaliser_by_hand(trained):
    """Raw scores 1, 2, 3 at temperature 2: 0.5, 1, 1.5, by their own mean 1 and deviation 0.408248 -1.224745, 0,
    1.224745. By saved moments of mean 2 and deviation 1 (values 1 and 3): -1.5, -1, -0.5."""
    shared = trained[0].shared
    raw = torch.tensor([1.0, 2.0, 3.0])
    assert shared.reward_function(temperature=2.0, normalizer="none").read(raw).tolist() == [0.5, 1.0, 1.5]
    batch = shared.reward_function(temperature=2.0, normalizer="batch")
    assert batch.read(raw).tolist() == pytest.approx([-1.224745, 0.0, 1.224745], abs=1e-6)
    before = dict(shared.roles["reward"].facts)
    moments = {"count": 2, "mean": 2.0, "m2": 2.0, "low": 1.0, "high": 3.0}
    shared.roles["reward"].facts["moments"] = moments
    try:
        with batch.frozen():
            assert batch.read(raw).tolist() == pytest.approx([-1.5, -1.0, -0.5], abs=1e-6)
        assert batch.read(raw[:1]).tolist() == pytest.approx([-1.5], abs=1e-6)
        running = shared.reward_function(temperature=2.0, normalizer="running")
        with running.frozen():
            assert running.read(raw).tolist() == pytest.approx([-1.5, -1.0, -0.5], abs=1e-6)
        assert shared.roles["reward"].facts["moments"] == moments
        # With 0.5, 1, 1.5 taken in: mean 1.4, squares 2 + 0.5 + 5 x ... of 1, 3, 0.5, 1, 1.5: variance 0.74.
        found = running.read(raw).tolist()
        assert found == pytest.approx([(x - 1.4) / 0.74**0.5 for x in (0.5, 1.0, 1.5)], abs=1e-5)
        assert shared.roles["reward"].facts["moments"]["count"] == 5
    finally:
        shared.roles["reward"].facts.clear()
        shared.roles["reward"].facts.update(before)


def test_abstentions_stay_abstentions(trained):
    """A completion without a token has no score, and the moments know nothing of it."""
    shared = trained[0].shared
    function = shared.reward_function(normalizer="batch", temperature=1.0)
    found = function(["1+1="] * 3, ["", "a", "b"], completion_ids=[[], [69, 2], [70, 2]])
    assert found[0] is None
    assert sorted(found[1:]) == pytest.approx([-1.0, 1.0], abs=1e-4)


def test_it_is_a_reward_function_of_the_scorer(trained):
    """By its own name, on the main thread, with what it logs; also among others."""
    shared = trained[0].shared
    function = plain(shared, name="rm")
    tokenizer = trained[0].tokenizer
    with RewardScorer([function, lambda completions, **_: [0.0] * len(completions)]) as scorer:
        ids = [[*tokenizer(text, add_special_tokens=False)["input_ids"], 2] for text in TEXTS[:2]]
        scorer.submit(ScoreRequest("1+1=", TEXTS[:2], ids, {"answer": 2}))
        result = scorer.gather()
    assert result.names[0] == "rm"
    assert result.rewards[:, 0].tolist() == pytest.approx(function(PROMPTS[:2], TEXTS[:2]), abs=1e-6)
    assert {"reward_model/rm/raw_mean", "reward_model/rm/ensemble_std"} <= result.metrics.keys()


def test_scoring_leaves_the_model_as_it_was(trained):
    shared = trained[0].shared
    shared.train()
    flags = [(m, m.training) for m in shared.modules()], [(p, p.requires_grad) for p in shared.parameters()]
    plain(shared)(PROMPTS, TEXTS)
    assert all(m.training == f for m, f in flags[0])
    assert all(p.requires_grad == f for p, f in flags[1])
    shared.eval()


def test_what_is_left_to_the_role_follows_it(tmp_path):
    """A function that was made before the reward model was trained scores like one made after it."""
    shared = shared_model()
    rewards = trainer(config(tmp_path, fit_temperature=True), shared, eval_dataset=pairs(8, seed=2))
    early = shared.reward_function()
    assert early.temperature == 1.0
    rewards.train()
    assert early.temperature == shared.roles["reward"].facts["temperature"] != 1.0
    assert early(PROMPTS, TEXTS) == shared.reward_function()(PROMPTS, TEXTS)


def test_processes_share_their_moments():
    """Both start with 1, 3; one scores 2, 4 and the other 5, a third nothing: 1, 3, 2, 4, 5 have mean 3 and squares
    4 + 0 + 1 + 1 + 4 = 10 on all of them. What is shared once is not counted again."""
    functions = []
    for _ in range(3):
        shared = shared_model()
        shared.add_role("reward")
        shared.roles["reward"].facts["moments"] = {"count": 2, "mean": 2.0, "m2": 2.0, "low": 1.0, "high": 3.0}
        functions.append(shared.reward_function(tokenizer=load_tokenizer("tiny"), normalizer="running"))
    functions[0].read(torch.tensor([2.0]))
    functions[0].read(torch.tensor([4.0, torch.nan]))
    functions[1].read(torch.tensor([5.0]))
    expected = {"count": 5, "mean": 3.0, "m2": 10.0, "low": 1.0, "high": 5.0}
    for _ in range(2):
        states = [function._since.state_dict() for function in functions]
        for function in functions:
            function.share(lambda own, states=states: states)
            found = function.shared.roles["reward"].facts["moments"]
            assert found == pytest.approx(expected, abs=1e-12)


def test_ids_of_another_vocabulary_are_not_read(caplog):
    """A reward model with a tokenizer of its own reads the policy's text: id 5 is t5 in one and another word in the
    other."""
    shared = shared_model()
    shared.add_role("reward")
    words = shared.reward_function(tokenizer=word_tokenizer(101))
    expected = words(["t3 t4"] * 2, [" t5 t6", " t7"])
    assert words(["t3 t4"] * 2, [" t5 t6", " t7"], completion_ids=[[5, 6, 2], [7, 2]]) == expected
    assert not caplog.records
    for _ in range(2):
        assert words(["t3 t4"] * 2, [" t5 t6", " t7"], completion_ids=[[50, 60, 2], [70, 2]]) == expected
    assert [r.getMessage() for r in caplog.records] == [
        "reward has another tokenizer than the policy: it scores texts, EOS added"
    ]


def test_nothing_to_score():
    shared = shared_model()
    shared.add_role("reward")
    assert shared.reward_function(tokenizer=load_tokenizer("tiny"))([], []) == []


def test_the_tokenizer_that_was_saved_is_found(tmp_path):
    """Also where the base has no name; with the chat template that was trained with."""
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    rewards = trainer(config(tmp_path), processing_class=tokenizer)
    rewards.train()
    rewards.save_model(str(tmp_path / "saved"))
    loaded = SharedModel.from_pretrained(tmp_path / "saved", base=tiny_llama())
    assert loaded.reward_function()(MESSAGES, TEXTS) == pytest.approx(
        rewards.shared.reward_function()(MESSAGES, TEXTS), abs=1e-6
    )


def test_bad_calls_are_named():
    shared = shared_model()
    with pytest.raises(KeyError, match="no role 'reward'"):
        shared.reward_function()
    with pytest.raises(ValueError, match=r"'policy' has no head to score with; train it with RewardTrainer"):
        shared.reward_function("policy")
    shared.add_role("reward")
    with pytest.raises(ValueError, match="made in memory: no name to find its tokenizer by; pass tokenizer="):
        shared.reward_function()
    tokenizer = load_tokenizer("tiny")
    with pytest.raises(ValueError, match="normalizer must be one of"):
        shared.reward_function(tokenizer=tokenizer, normalizer="group")
    with pytest.raises(ValueError, match="temperature must be above 0"):
        shared.reward_function(tokenizer=tokenizer, temperature=0.0)


def test_the_critic_can_start_from_it(trained):
    """The role has an adapter and a head by the names that others look for."""
    shared: SharedModel = trained[0].shared
    assert shared.roles["reward"].adapter == "reward"
    assert shared.heads["reward"].linear.out_features == 1
