"""What is remembered of a run on pairs: first sights, and the warning about falling chosen answers."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import TrainerState

from hf_rlx.trainers.pair_watch import FirstSeen, PairWatch


def logs(changes, margins=None, logp=-50.0, prefix=""):
    """One log for each change; margins grow by default."""
    margins = range(len(changes)) if margins is None else margins
    names = ("logps/chosen_change", "rewards/margins", "logps/chosen")
    values = zip(changes, margins, [logp] * len(changes), strict=True)
    return [dict(zip([prefix + name for name in names], entry, strict=True)) for entry in values]


def told(entries, prefix=""):
    """The places of the logs that were told of, and the last text."""
    watch = PairWatch("Do this.")
    found = [watch.check(entry, prefix) for entry in entries]
    return [place for place, text in enumerate(found) if text], next((text for text in found if text), "")


@pytest.mark.parametrize(
    ("changes", "margins", "logp", "expected"),
    [
        ([0, -1, -2, -3, -4, -5, -6], None, -50.0, [5]),  # three logs (mean -4) against the three before (-1)
        ([0, -1, -2, -3, -4], None, -50.0, []),  # too early to tell
        ([0, 1, 2, 3, 4, 5, 6], None, -50.0, []),  # chosen answers become likelier
        ([-6, -6, -6, -4, -4, -4], None, -50.0, []),  # they recover
        ([0, -1, -2, -3, -4, -5], [5, 4, 3, 2, 1, 0], -50.0, []),  # the margin falls too: the rate is too high
        ([0, -0.1, -0.2, -0.3, -0.4, -0.5], None, -1.0, []),  # less than a nat
        ([0, -1, -2, -3, -4, -5], None, -500.0, []),  # 4 nats of 500 are less than 2 %
        ([0, -5, -8, -12, -15, -18], None, -500.0, [5]),
        ([float("nan")] * 6, None, -50.0, []),
    ],
)
def test_when_falling_chosen_answers_are_told(changes, margins, logp, expected):
    assert told(logs(changes, margins, logp))[0] == expected


def test_what_is_said():
    _, text = told(logs([0, -1, -2, -3, -4, -5], prefix="eval_"), "eval_")
    assert "chosen answers are 4 nats less likely than at the start (in evaluation, eval_logps/chosen_change)" in text
    assert "the margin grows (1 to 4)" in text
    assert text.endswith("Do this.")


def test_every_data_set_has_its_window_and_the_warning_comes_once(caplog):
    """Training and evaluation logs alternate; the first of them to have six tells."""
    watch, state = PairWatch("Do this."), TrainerState()
    state.is_world_process_zero = True
    for train, held_out in zip(
        logs([0, -1, -2, -3, -4, -5, -6]), logs([0, -1, -2, -3, -4, -5, -6], prefix="eval_x_"), strict=True
    ):
        watch.on_log(None, state, None, logs=train)
        watch.on_log(None, state, None, logs=held_out)
        watch.on_log(None, state, None, logs={"train_runtime": 1.0})
    assert watch.told == [""]
    assert caplog.text.count("Do this.") == 1


def test_the_state_goes_on_where_it_was():
    """After four of six logs; nothing is told twice."""
    entries = logs([0, -1, -2, -3, -4, -5, -6])
    first = PairWatch("")
    for entry in entries[:4]:
        assert first.check(entry) is None
    second = PairWatch("")
    second.load_state_dict(first.state_dict())
    assert second.check(entries[4]) is None
    assert second.check(entries[5]) is not None
    third = PairWatch("")
    saved = second.state_dict()
    json.dumps({name: saved[name] for name in ("told", "logs")})
    third.load_state_dict(saved)
    assert third.check(entries[6]) is None


def test_first_sight_is_a_whole_step():
    """A row that is seen twice in one optimizer step (its micro-batch was done again) is still new."""
    seen = FirstSeen()

    def change(rows, values, step):
        found = seen.change("train", 4, rows, torch.tensor([[v, 2 * v] for v in values]), step)
        return [[None if x != x else x for x in entry] for entry in found.tolist()]

    assert change([2, 0], [-5.0, -3.0], 0) == [[None, None], [None, None]]
    assert change([2], [-5.0], 0) == [[None, None]]
    assert change([0, 3], [-4.0, -1.0], 1) == [[-1.0, -2.0], [None, None]]
    assert change([3, 2], [-2.0, -5.5], 5) == [[-1.0, -2.0], [-0.5, -1.0]]
    other = FirstSeen()
    other.load_state_dict(seen.state_dict())
    assert other.change("train", 4, [3], torch.tensor([[-3.0, -3.0]]), 6).tolist() == [[-2.0, -1.0]]
    assert torch.isnan(other.change("eval", 4, [3], torch.tensor([[-3.0, -3.0]]), 6)).all()


def test_other_processes_first_sights_are_taken_over(monkeypatch):
    """The earlier of two counts."""
    seen = FirstSeen()
    seen.change("train", 3, [1], torch.tensor([[-5.0, -6.0]]), 4)
    others = [(0, [2.0, -1.0, -1.0]), (1, [3.0, -2.0, -2.0]), (1, [9.0, -9.0, -9.0])]
    monkeypatch.setattr("hf_rlx.trainers.pair_watch.gathered", lambda news: [*news, *others])
    seen.share()
    found = seen.change("train", 3, [0, 1, 2], torch.zeros(3, 2), 10)
    assert found[:2].tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert torch.isnan(found[2]).all()
