"""`hf-rlx pipeline ppo`: the synthetic task, and three stages that raise a reward that the policy never sees."""

from __future__ import annotations

import json
import math

import pytest
import torch

from hf_rlx import Group, SharedModel
from hf_rlx.cli import main
from hf_rlx.pipeline import PPOPipeline, annotated, demonstrations, true_reward
from tests.trainers.tools import digest

ROWS = [{"prompt": "17+25=", "answer": "42"}, {"prompt": "9-4=", "answer": "5"}]


def test_true_reward():
    """1 - last digit / 9 within ten of the sum: 42 -> 7/9, 40 -> 1, 49 -> 0, 52 -> 7/9, 53 is eleven off; no number
    and more than digits are worth nothing; -5 is ten off 5."""
    texts = ["42", "40", "49", "52", "53", "", "4 2", "forty"]
    expected = [7 / 9, 1, 0, 7 / 9, 0, 0, 0, 0]
    assert true_reward(texts, ["42"] * 8) == pytest.approx(expected)
    assert true_reward(["-5"], ["5"]) == pytest.approx([4 / 9])


def test_a_seed_is_a_run(tmp_path):
    """The first adapter too, which is made before any trainer; another seed, another one."""
    made = [digest(PPOPipeline(output=tmp_path, seed=seed).shared.named_parameters()) for seed in (0, 0, 1)]
    assert made[0] == made[1] != made[2]


def test_demonstrations_slip_as_often_as_asked():
    """No slip: the sums; always: off by 1 to 4; in between the share, to 5 standard deviations."""
    right = [row["completion"] for row in demonstrations(ROWS, 0.0, 0)]
    assert right == ["42", "5"]
    many = ROWS * 1000
    gaps = [int(d["completion"]) - int(r["answer"]) for d, r in zip(demonstrations(many, 1.0, 0), many, strict=True)]
    assert set(gaps) == {-4, -3, -2, -1, 1, 2, 3, 4}
    slips = sum(d["completion"] != r["answer"] for d, r in zip(demonstrations(many, 0.3, 1), many, strict=True))
    assert abs(slips / 2000 - 0.3) < 5 * math.sqrt(0.21 / 2000)


def test_annotators_rank_by_the_true_reward_with_noise():
    """40 (worth 1) against 46 (1/3) at temperature 1/3: sigma(2) = 0.881 of the rankings put 40 first."""
    rows, answers = ROWS[:1] * 4000, [["46", "40", "46", ""]] * 4000
    ranked = annotated(rows, answers, 1 / 3, 0)
    assert ranked[0]["responses"] == ["46", "40"]  # each text once, the empty one left out
    first = sum(row["ranks"] == [1, 0] for row in ranked) / len(ranked)
    assert abs(first - 1 / (1 + math.exp(-2))) < 0.025
    assert len(annotated(ROWS, [["42", "42"], ["5", "6"]], 0.1, 0)) == 1  # nothing to compare in the first


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_pipeline_raises_the_true_reward(tmp_path, capsys):
    """SFT leaves it at about 0.5, PPO against the learned proxy lifts it well beyond the interval; the saved folder
    has every role and scores the same."""
    folder = tmp_path / "run"
    command = ["pipeline", "ppo", "--output", str(folder), "--quiet", "--reward-steps", "80", "--ppo-steps", "40"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "true reward" in printed
    assert "proxy" in printed
    facts = json.loads((folder / "pipeline.json").read_text(encoding="utf-8"))
    base, sft, ppo = facts["stages"]
    assert [stage["name"] for stage in facts["stages"]] == ["base", "SFT", "PPO"]
    assert ppo["true_reward"] - ppo["half_width"] > sft["true_reward"] + sft["half_width"]
    assert ppo["proxy"] > sft["proxy"]
    assert facts["reward_model"]["accuracy"] > 0.7
    assert base["questions"] == 400
    again = SharedModel.from_pretrained(folder)
    assert {"policy", "reward", "critic"} <= again.roles.keys()
    group = Group.from_lists([1, 20, 21], [[22, 2], [23, 2]])
    assert torch.isfinite(again.score([group])).all()


def test_wrong_arguments(capsys):
    with pytest.raises(SystemExit):
        main(["pipeline", "ppo", "--ppo-steps", "0"])
    assert "--ppo-steps must be at least 1, got 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["pipeline", "dpo"])
    assert "invalid choice: 'dpo'" in capsys.readouterr().err


def test_stages_are_methods(tmp_path):
    """One object, one base: a policy adapter at the start, and what each stage asks of the task."""
    pipeline = PPOPipeline(output=tmp_path, quiet=True)
    assert set(pipeline.shared.roles) == {"policy"}
    prompts = {row["prompt"] for row in pipeline.shown + pipeline.compared + pipeline.prompts}
    assert len(prompts) == 2400  # no prompt serves two stages
    assert not prompts & {row["prompt"] for row in pipeline.held_out}
