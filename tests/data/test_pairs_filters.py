"""Repeats, contradictions, margins and length."""

from __future__ import annotations

import math

import pytest

from hf_rlx.data.pairs import balance_lengths, deduplicate, filter_margin, length_balance


def pair(chosen, rejected, prompt="q", **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def says(text):
    return [{"role": "assistant", "content": text}]


# --- repeats and contradictions --------------------------------------------------------------------------------------


def test_repeats_lose_all_but_the_first():
    rows = [pair("a", "b", n=0), pair("a", "b", n=1), pair("a", "b", prompt="r", n=2), pair("a", "c", n=3)]
    made = deduplicate(rows)
    assert [row["n"] for row in made] == [0, 2, 3]
    assert made.left_out == {"duplicate of an earlier row": [1]}


def test_white_space_may_be_looked_past():
    rows = [pair("a  b", "c"), pair(" a\nb", "c"), pair(says("a b"), says("c")), pair(says("a  b "), says("c"))]
    assert len(deduplicate(rows)) == 4
    assert deduplicate(rows, "whitespace").left_out == {"duplicate of an earlier row": [1, 3]}


def test_swapped_sides_contradict():
    """Rows 0, 1 and 3 are about a and b, in both directions: who is right is unknown."""
    rows = [pair("a", "b"), pair("b", "a"), pair("a", "c"), pair("a", "b")]
    made = deduplicate(rows)
    assert made == [pair("a", "c")]
    assert made.left_out == {"contradicts another row": [0, 1, 3]}


def test_both_can_be_kept_and_are_counted():
    rows = [pair("a", "b"), pair("b", "a"), pair("a", "b")]
    made = deduplicate(rows, contradictions="keep")
    assert len(made) == 2
    assert made.notes == {"contradictory rows kept": 2}
    made = deduplicate(rows, contradictions="keep", duplicates="keep")
    assert len(made) == 3
    assert made.notes == {"contradictory rows kept": 3, "duplicates kept": 1}


def test_lists_repeat_and_contradict_too():
    """0 and 1 say a over b in two ways; 2 says c over d, and 3 the opposite."""
    rows = [
        {"prompt": "q", "responses": ["a", "b"], "ranks": [1, 2]},
        {"prompt": "q", "responses": ["b", "a"], "scores": [0.0, 1.0]},
        {"prompt": "q", "responses": ["c", "d"], "ranks": [1, 2]},
        {"prompt": "q", "responses": ["d", "c", "e"], "ranks": [1, 2, 3]},
    ]
    made = deduplicate(rows)
    assert made == rows[:1]
    assert made.left_out == {"duplicate of an earlier row": [1], "contradicts another row": [2, 3]}


def test_bad_options_and_rows_are_refused():
    with pytest.raises(ValueError, match="same is one of exact, whitespace, got 'fuzzy'"):
        deduplicate([], "fuzzy")
    with pytest.raises(ValueError, match="contradictions is one of drop, keep"):
        deduplicate([], contradictions="both")
    with pytest.raises(ValueError, match="row 1 has neither `chosen` and `rejected` nor `responses`"):
        deduplicate([pair("a", "b"), {"prompt": "q"}])
    with pytest.raises(ValueError, match="row 0 has 1 `scores` for 2 `responses`"):
        deduplicate([{"responses": ["a", "b"], "scores": [1.0, None]}])


# --- margin ----------------------------------------------------------------------------------------------------------


def test_near_ties_are_left_out():
    """Differences 0.5, 1 (by a margin column), 2 (of a list), -1."""
    rows = [
        pair("a", "b", score_chosen=1.0, score_rejected=0.5),
        pair("a", "b", margin=1),
        {"responses": ["a", "b", "c"], "ranks": [1, 3, 2]},
        pair("a", "b", score_chosen=0, score_rejected=1),
    ]
    made = filter_margin(rows, 0.5)
    assert made == rows[1:3]
    assert made.left_out == {"difference within the margin": [0, 3]}


def test_a_margin_needs_scores():
    with pytest.raises(ValueError, match="row 0 has no scores to hold against the margin; give score_chosen"):
        filter_margin([pair("a", "b")], 0.5)
    with pytest.raises(ValueError, match="row 0 has NaN as `score_chosen`"):
        filter_margin([pair("a", "b", score_chosen=math.nan, score_rejected=1)], 0.5)
    with pytest.raises(ValueError, match="margin must be a number of at least 0"):
        filter_margin([], -1)


# --- length ----------------------------------------------------------------------------------------------------------


def test_the_balance_of_lengths():
    """Lengths (3, 1), (2, 1), (1, 4), (2, 2): two of four longer, one shorter, differences 2, 1, -3, 0: mean 0.

    Words (1, 1), (2, 1), (1, 1), (1, 1): 1 on average 1/4. Choices 1, 0, 1, 0, ... against lengths 3, 1, 2, 1, 1, 4,
    2, 2: both sides sum to 8, so that the correlation is 0.
    """
    rows = [pair("aaa", "b"), pair("a ", "b"), pair("a", "bbbb"), pair("aa", "bb")]
    found = length_balance(rows, count_tokens=lambda text: text.count(" ") + 1)
    assert (found.pairs, found.longer, found.shorter, found.to_balance) == (4, 2, 1, 1)
    assert (found.share_longer, found.mean_difference, found.mean_difference_tokens) == (0.5, 0.0, 0.25)
    assert found.pearson == pytest.approx(0.0)
    assert not found.scored


def test_scores_correlate_with_length():
    """Scores 3, 1, 2, 0 of lengths 4, 2, 9, 1.

    Means 1.5 and 4: cross 1.5 * 0 + 0.5 * 2 + 0.5 * 5 + 1.5 * 3 = 8, squares 5 and 0 + 4 + 25 + 9 = 38. Places 4, 2,
    3, 1 of 3, 2, 4, 1: the squared differences sum to 2, 1 - 6 * 2 / (4 * 15) = 0.8.
    """
    rows = [
        pair("a" * 4, "bb", score_chosen=3, score_rejected=1),
        pair("a" * 9, "b", score_chosen=2, score_rejected=0),
    ]
    found = length_balance(rows)
    assert found.scored
    assert found.pearson == pytest.approx(8 / math.sqrt(5 * 38))
    assert found.spearman == pytest.approx(0.8)


def test_parts_of_messages_without_text_count_as_nothing():
    """As `datasets` fills them in: three characters against one."""
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "abc"}]
    row = {"prompt": "q", "chosen": [{"role": "assistant", "content": parts}]}
    assert length_balance([row | {"rejected": [{"role": "assistant", "content": "a"}]}]).mean_difference == 2


def test_lists_count_as_their_pairs_and_implicit_prompts_do_not_count():
    """c over a over b, lengths 1, 2, 3: (c, a) 1 - 2, (c, b) 1 - 3, (a, b) 2 - 3."""
    ranked = {"prompt": "q", "responses": ["aa", "bbb", "c"], "ranks": [2, 3, 1]}
    found = length_balance([ranked])
    assert (found.pairs, found.longer, found.shorter, found.mean_difference) == (3, 0, 3, -4 / 3)
    implicit = [{"chosen": "a long prompt: yes", "rejected": "a long prompt: no"}]
    assert length_balance(implicit).mean_difference == 1
    assert math.isnan(length_balance([]).share_longer)


def test_balancing_drops_from_the_larger_side():
    """Four longer, one shorter, one equal: three of the longer ones go, always the same ones for one seed."""
    rows = [pair("aa", "b", n=n) for n in range(4)] + [pair("a", "bb", n=4), pair("a", "b", n=5)]
    made = balance_lengths(rows, seed=1)
    assert len(made) == 3
    assert [row["n"] for row in made][1:] == [4, 5]
    assert len(made.left_out["dropped to balance lengths"]) == 3
    assert made == balance_lengths(rows, seed=1)
    assert {balance_lengths(rows, seed=s)[0]["n"] for s in range(20)} == {0, 1, 2, 3}
    assert length_balance(made).to_balance == 0


def test_lists_cannot_be_balanced():
    with pytest.raises(ValueError, match="row 0 is a ranked list; balance pairs"):
        balance_lengths([{"responses": ["a", "b"], "ranks": [1, 2]}])
