"""Votes on two responses to pairs."""

from __future__ import annotations

import pytest

from hf_rlx.data.pairs import from_judgements


def vote(a, b, verdict, **more):
    return {"prompt": "q", "response_a": a, "response_b": b, "verdict": verdict, **more}


def sides(made):
    return [(pair["chosen"], pair["rejected"], round(pair["score_chosen"], 6)) for pair in made]


def test_a_vote_is_a_pair():
    made = from_judgements([vote("a", "b", "B", topic="x")])
    assert made == [
        {"prompt": "q", "chosen": "b", "rejected": "a", "score_chosen": 1.0, "score_rejected": 0.0, "topic": "x"}
    ]


@pytest.mark.parametrize(
    ("verdict", "winner"),
    [("A", "a"), ("[[B]]", "b"), ("model_a", "a"), (0, "a"), (1, "b"), (" b ", "b"), ("tie", None), ("[[C]]", None)],
)
def test_verdicts_have_many_names(verdict, winner):
    made = from_judgements([vote("a", "b", verdict)])
    assert [pair["chosen"] for pair in made] == ([winner] if winner else [])


def test_no_verdict_is_not_a_tie():
    made = from_judgements([vote("a", "b", None), vote("c", "d", "tie")])
    assert made.left_out == {"no verdict": [0], "all scores equal": [1]}


def test_agreeing_orders_are_one_vote():
    """Shown (a, b) it said A and shown (b, a) B: a both times."""
    made = from_judgements([vote("a", "b", "A"), vote("b", "a", "B")])
    assert sides(made) == [("a", "b", 1.0)]
    assert made.notes == {"comparisons": 1, "votes seen in both orders": 1}


def test_disagreeing_orders_are_a_tie():
    """A both times: it went by the position. A tie in one order and a winner in the other is no agreement either."""
    rows = [vote("a", "b", "A"), vote("b", "a", "A"), vote("c", "d", "A"), vote("d", "c", "tie")]
    made = from_judgements(rows)
    assert made == []
    assert made.left_out == {"all scores equal": [0, 2]}
    assert made.notes["of these inconsistent, counted as ties"] == 2


def test_the_swapped_verdict_can_stand_in_the_same_row():
    """`verdict_swapped` is of (b, a): B is a there."""
    assert sides(from_judgements([vote("a", "b", "A", verdict_swapped="B")])) == [("a", "b", 1.0)]
    assert from_judgements([vote("a", "b", "A", verdict_swapped="A")]) == []


def test_several_judges_vote():
    """x is consistent for a, y inconsistent (half), z for a in one order: (1 + 0.5 + 1) / 3."""
    rows = [
        vote("a", "b", "A", judge="x"),
        vote("b", "a", "B", judge="x"),
        vote("a", "b", "A", judge="y"),
        vote("b", "a", "A", judge="y"),
        vote("a", "b", "A", judge="z"),
    ]
    made = from_judgements(rows)
    assert sides(made) == [("a", "b", round(2.5 / 3, 6))]
    found = made.agreement["verdicts"]
    assert (found.annotators, found.units) == (3, 1)
    assert found.percent == pytest.approx(1 / 3)  # x and z of the three pairs of judges


def test_votes_in_a_list_and_the_margin():
    """Three of four for a: shares 0.75 and 0.25, 0.5 apart."""
    rows = [vote("a", "b", ["A", "A", "B", "A"])]
    assert sides(from_judgements(rows, margin=0.4)) == [("a", "b", 0.75)]
    assert from_judgements(rows, margin=0.5).left_out == {"difference within the margin": [0]}


def test_a_tournament_can_be_ranked():
    """a beats b and c, c beats b: shares a 1, b 0, c 1/2."""
    rows = [vote("a", "b", "A"), vote("a", "c", "A"), vote("b", "c", "B")]
    (ranked,) = from_judgements(rows, "ranked")
    assert (ranked["responses"], ranked["scores"]) == (["a", "c", "b"], [1.0, 0.5, 0.0])
    assert sides(from_judgements(rows, "best_worst")) == [("a", "b", 1.0)]
    assert len(from_judgements(rows)) == 3


def test_other_prompts_are_other_comparisons():
    rows = [vote("a", "b", "A"), {**vote("b", "a", "A"), "prompt": "r"}]
    assert sides(from_judgements(rows)) == [("a", "b", 1.0), ("b", "a", 1.0)]


def test_empty_and_equal_responses_are_left_out():
    made = from_judgements([vote("", "b", "B"), vote("a", "a", "A")])
    assert made.left_out == {"empty responses": [0], "identical responses": [1]}


def test_columns_of_known_datasets_are_read():
    chat = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": text}] for text in "ab"]
    (pair,) = from_judgements([{"conversation_a": chat[0], "conversation_b": chat[1], "winner": "model_b"}])
    assert pair["chosen"] == chat[1]
    safe = {"prompt": "q", "response_0": "a", "response_1": "b", "better_response_id": 1}
    assert sides(from_judgements([safe])) == [("b", "a", 1.0)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": "q", "verdict": "A"}, "row 0 has no two responses, called response_a and response_b"),
        ({"response_a": "a", "response_b": "b"}, "row 0 has no `verdict`"),
        (vote("a", "b", "left"), "row 0 has 'left' as `verdict`; give A, B or tie"),
        (vote("a", "b", True), "row 0 has True as `verdict`"),
        (vote("a", 3, "A"), "row 0 has 3 as `response_b`"),
        (3, "row 0 is a int"),
    ],
)
def test_a_bad_vote_is_named(bad, message):
    with pytest.raises(ValueError, match=message):
        from_judgements([bad])
