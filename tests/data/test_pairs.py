"""Judged responses to pairs and lists. Responses are letters, so that who stands where can be read off."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from datasets import Dataset

from hf_rlx.data.pairs import build_pairs, from_outcomes, from_rankings, from_ratings


def row(responses, scores, **more):
    return {"prompt": "q", "responses": list(responses), "scores": scores, **more}


def sides(made):
    """(chosen, rejected) of each pair."""
    return [(pair["chosen"], pair["rejected"]) for pair in made]


# --- strategies ------------------------------------------------------------------------------------------------------


def test_best_against_worst():
    made = build_pairs([row("abc", [0.5, 0.9, 0.1], source="x")])
    assert made == [
        {
            "prompt": "q",
            "chosen": "b",
            "rejected": "c",
            "score_chosen": 0.9,
            "score_rejected": 0.1,
            "source": "x",
        }
    ]
    assert (made.rows_in, made.left_out, made.notes) == (1, {}, {})


def test_of_equal_ones_the_first_is_taken():
    """b and d are best, a and c worst."""
    assert sides(build_pairs([row("abcd", [0, 1, 0, 1])])) == [("b", "a")]


def test_all_pairs_in_the_order_of_the_responses():
    """0-1: a over b; 0-2: c over a; 0-3: a over d; 1-2: c over b; 1-3: a tie; 2-3: c over d."""
    made = build_pairs([row("abcd", [2, 1, 3, 1])], "all")
    assert sides(made) == [("a", "b"), ("c", "a"), ("a", "d"), ("c", "b"), ("c", "d")]


def test_of_all_pairs_the_widest_can_be_kept():
    """Differences 1, 1, 1, 2, 2: the two of 2."""
    assert sides(build_pairs([row("abcd", [2, 1, 3, 1])], "all", max_pairs=2)) == [("c", "b"), ("c", "d")]


def test_ranked_lists_are_best_first():
    made = build_pairs([row("abcd", [2, 1, 3, 2], source="x")], "ranked")
    assert made == [{"prompt": "q", "responses": ["c", "a", "d", "b"], "scores": [3, 2, 2, 1], "source": "x"}]


@pytest.mark.parametrize(("margin", "expected"), [(0.99, [("c", "a"), ("b", "a"), ("c", "b")]), (1, [("c", "a")])])
def test_the_difference_must_be_above_the_margin(margin, expected):
    """Scores 1, 2, 3: differences 1, 2, 1. A difference of the margin itself is not above it."""
    made = build_pairs([row("abc", [1, 2, 3])], "all", margin)
    assert sorted(sides(made)) == sorted(expected)
    assert sides(build_pairs([row("abc", [1, 2, 3])], "best_worst", 1.9)) == [("c", "a")]
    assert build_pairs([row("abc", [1, 2, 3])], "ranked", 2) == []


def test_response_columns_follow_their_responses():
    rows = [row("abc", [1, 3, 2], model=["x", "y", "z"])]
    (pair,) = build_pairs(rows, response_columns=["model"])
    assert (pair["model_chosen"], pair["model_rejected"]) == ("y", "x")
    assert "model" not in pair
    (ranked,) = build_pairs(rows, "ranked", response_columns=["model"])
    assert ranked["model"] == ["y", "z", "x"]


def test_messages_and_rows_without_a_prompt():
    good, bad = ([{"role": "assistant", "content": text}] for text in "ab")
    made = build_pairs([{"responses": [bad, good], "scores": [0, 1]}])
    assert made == [{"chosen": good, "rejected": bad, "score_chosen": 1.0, "score_rejected": 0.0}]


def test_datasets_arrays_and_booleans_are_read():
    rows = Dataset.from_list([row("ab", [True, False])])
    assert sides(build_pairs(rows)) == [("a", "b")]
    assert sides(build_pairs([row("ab", np.array([0.0, 2.0]))])) == [("b", "a")]


def test_the_same_rows_give_the_same_pairs():
    rows = [row("abcdef", [3, 1, 2, 3, 1, 2]) for _ in range(3)]
    assert build_pairs(rows, "all", max_pairs=3) == build_pairs(rows, "all", max_pairs=3)


# --- what gives no pair ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["best_worst", "all", "ranked"])
def test_what_gives_nothing_is_counted(strategy):
    """0: equal scores, 1: one scored response, 2: within the margin, 3: the same text twice, 4: one that is empty."""
    rows = [
        row("ab", [1, 1]),
        row("ab", [1, None]),
        row("ab", [1, 1.5]),
        row(["a", "a"], [2, 0]),
        row(["a", ""], [2, 0]),
        row("ab", [2, 0]),
    ]
    made = build_pairs(rows, strategy, 0.5)
    assert len(made) == 1
    assert made.rows_in == 6
    assert made.left_out == {
        "all scores equal": [0],
        "fewer than two scored responses": [1, 4],
        "difference within the margin": [2],
        "identical responses": [3],
    }
    assert made.notes == {"responses without a score": 1, "empty responses": 1}


def test_unscored_responses_are_left_out():
    assert sides(build_pairs([row("abc", [None, 1, 2])])) == [("c", "b")]


def test_at_both_ends_two_different_responses_are_taken():
    """a is the best, and both a and b are the worst: a over b, and never a over a."""
    assert sides(build_pairs([row(["a", "a", "b"], [1, 0, 0])])) == [("a", "b")]
    assert build_pairs([row(["a", "a", "b"], [1, 0, 0.5])]).left_out == {"identical responses": [0]}


def test_infinite_scores_are_scores():
    assert sides(build_pairs([row("abc", [-math.inf, 0, math.inf])])) == [("c", "a")]
    assert build_pairs([row("ab", [math.inf, math.inf])]).left_out == {"all scores equal": [0]}


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row("ab", [1, math.nan]), r"row 1 has NaN as `scores\[1\]`; give a number, or None"),
        (row("ab", [1, "2"]), r"row 1 has '2' as `scores\[1\]`; give a number"),
        (row("ab", [1]), "row 1 has 1 `scores` for 2 `responses`; give one each"),
        ({"prompt": "q", "scores": [1]}, "row 1 has no `responses`"),
        ({"prompt": "q", "responses": ["a"]}, "row 1 has no `scores`"),
        (row(["a", 7], [1, 2]), r"row 1 has 7 as `responses\[1\]`; give it text or messages"),
        ({"prompt": "q", "responses": "ab", "scores": [1, 2]}, "row 1 has 'ab' as `responses`; give a list"),
        ("text", "row 1 is a str; rows are dictionaries"),
    ],
)
def test_a_bad_row_is_named(bad, message):
    with pytest.raises(ValueError, match=message):
        build_pairs([row("ab", [1, 2]), bad])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "best"}, "strategy is one of best_worst, all, ranked, got 'best'"),
        ({"margin": -0.1}, "margin must be a number of at least 0"),
        ({"margin": math.nan}, "margin must be a number of at least 0"),
        ({"max_pairs": 0}, "max_pairs must be at least 1"),
        ({"max_pairs": 1.5}, "max_pairs must be at least 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_pairs([], **options)


def test_response_columns_need_one_entry_each():
    with pytest.raises(ValueError, match="row 0 has 1 entries in `model` for 2 `responses`"):
        build_pairs([row("ab", [1, 2], model=["x"])], response_columns=["model"])


# --- rankings --------------------------------------------------------------------------------------------------------


def ranking(responses, **columns):
    return {"prompt": "q", "responses": list(responses), **columns}


def test_ranks_lower_is_better():
    (pair,) = from_rankings([ranking("abc", ranks=[2, 1, 3])])
    assert pair == {"prompt": "q", "chosen": "b", "rejected": "c", "score_chosen": -1.0, "score_rejected": -3.0}


def test_an_order_of_indices_is_best_first():
    """Best is response 2, then 0; response 1 is not ranked."""
    assert sides(from_rankings([ranking("abc", ranking=[2, 0])], "all")) == [("c", "a")]


def test_equal_ranks_are_ties():
    assert sides(from_rankings([ranking("abc", ranks=[1, 1, 2])], "all")) == [("a", "c"), ("b", "c")]


def test_ranked_lists_keep_ranks():
    made = from_rankings([ranking("abc", ranks=[2, 1, 3], source="x")], "ranked")
    assert made == [{"prompt": "q", "responses": ["b", "a", "c"], "source": "x", "ranks": [1.0, 2.0, 3.0]}]


def test_several_rankings_count_by_their_mean():
    """Mean ranks a 1.5, b 1.5, c 3. The preferences a-b, a-c, b-c are (1, -1), (1, 1), (1, 1): two of three agree."""
    made = from_rankings([ranking("abc", ranks=[[1, 2, 3], [2, 1, 3]])], "all")
    assert sides(made) == [("a", "c"), ("b", "c")]
    assert made.agreement["preferences"].percent == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"ranks": [1]}, "row 0 has 1 `ranks` for 2 `responses`; give one each"),
        ({"ranking": [0, 2]}, r"row 0 has the ranking \[0, 2\]; give each index of a response, 0 to 1, once"),
        ({"ranking": [1, 1]}, "row 0 has the ranking"),
        ({"ranks": [1, math.nan]}, "row 0 has NaN as"),
        ({}, "row 0 has no `ranks`"),
    ],
)
def test_a_bad_ranking_is_named(columns, message):
    with pytest.raises(ValueError, match=message):
        from_rankings([ranking("ab", **columns)])


# --- ratings ---------------------------------------------------------------------------------------------------------


def test_the_mean_rating_decides():
    """a: 3, b: (4 + 5) / 2 = 4.5, c: 4 by one alone."""
    rows = [ranking("abc", ratings=[[2, 4], [4, 5], [None, 4]])]
    (pair,) = from_ratings(rows)
    assert (pair["chosen"], pair["score_chosen"], pair["rejected"], pair["score_rejected"]) == ("b", 4.5, "a", 3.0)
    assert "ratings" not in pair


def test_standardised_ratings_weigh_annotators_alike():
    """x gives 1, 2, 3 (mean 2, deviation s = sqrt(2/3)), y 10, 0, 5 (mean 5, deviation 5 sqrt(2/3)).

    Raw means a 5.5, b 1, c 4: a over b. Standardised a (-1/s + 1/s) / 2 = 0, b (0 - 1/s) / 2, c (1/s + 0) / 2: c over
    b by 1/s = sqrt(3/2).
    """
    rows = [ranking("abc", ratings=[{"x": 1, "y": 10}, {"x": 2, "y": 0}, {"x": 3, "y": 5}])]
    assert sides(from_ratings(rows)) == [("a", "b")]
    (pair,) = from_ratings(rows, standardise=True)
    assert (pair["chosen"], pair["rejected"]) == ("c", "b")
    assert pair["score_chosen"] - pair["score_rejected"] == pytest.approx(math.sqrt(1.5))


def test_one_who_rates_all_alike_says_nothing():
    """x always gives 3: counts as 0. y prefers b: +1 against -1, halved."""
    rows = [ranking("ab", ratings=[[3, 1], [3, 2]], annotators=["x", "y"])]
    (pair,) = from_ratings(rows, standardise=True)
    assert (pair["chosen"], pair["score_chosen"], pair["score_rejected"]) == ("b", 0.5, -0.5)


def test_names_tell_annotators_apart():
    """The two rows' first raters are different people: of three each response has two."""
    rows = [
        ranking("ab", ratings=[[1, 2], [3, 4]], annotators=["x", "y"]),
        ranking("cd", ratings=[[1, 2], [3, 4]], annotators=["z", "x"]),
    ]
    made = from_ratings(rows)
    assert made.agreement["ratings"].annotators == 3
    assert made.agreement["preferences"].percent == 1.0


def test_one_rating_a_row_is_grouped_by_prompt():
    rows = [
        {"prompt": p, "response": r, "rating": n, "annotator": a}
        for p, r, n, a in [("p", "a", 1, "x"), ("q", "c", 2, "x"), ("p", "b", 3, "x"), ("p", "a", 2, "y")]
    ]
    made = from_ratings(rows)
    assert made == [{"prompt": "p", "chosen": "b", "rejected": "a", "score_chosen": 3.0, "score_rejected": 1.5}]
    assert made.left_out == {"fewer than two scored responses": [1]}


@pytest.mark.parametrize(
    ("ratings", "message"),
    [
        ([[1, 2]], "row 0 has 1 `ratings` for 2 `responses`"),
        ([[1], ["good"]], "row 0 has 'good' as the rating of response 1 by 0; give a number"),
        ([[1], [math.nan]], "row 0 has NaN as the rating of response 1 by 0"),
    ],
)
def test_a_bad_rating_is_named(ratings, message):
    with pytest.raises(ValueError, match=message):
        from_ratings([ranking("ab", ratings=ratings)])


def test_a_second_rating_by_the_same_annotator_is_refused():
    rows = [{"prompt": "p", "response": "a", "rating": n} for n in (1, 2)]
    with pytest.raises(ValueError, match="row 1 is a second rating of one response by the annotator 0"):
        from_ratings(rows)


# --- verifier outcomes -----------------------------------------------------------------------------------------------


def outcome(prompt, completion, label, **more):
    return {"prompt": prompt, "completion": completion, "label": label, **more}


def test_right_against_wrong():
    """p: one right of two wrong ones gives the first wrong one, or both; q has no wrong one, r one completion."""
    rows = [
        outcome("p", "a", False, model="x", level=1),
        outcome("q", "d", True, model="x", level=1),
        outcome("p", "b", True, model="y", level=1),
        outcome("p", "c", False, model="z", level=1),
        outcome("q", "e", True, model="y", level=1),
        outcome("r", "f", True, model="y", level=1),
    ]
    made = from_outcomes(rows)
    assert made == [
        {
            "prompt": "p",
            "chosen": "b",
            "rejected": "a",
            "score_chosen": 1.0,
            "score_rejected": 0.0,
            "model_chosen": "y",
            "model_rejected": "x",
            "level": 1,
        }
    ]
    assert made.left_out == {"all scores equal": [1], "fewer than two scored responses": [5]}
    assert (made.rows_in, made.notes) == (6, {"prompts": 3})
    assert sides(from_outcomes(rows, "all")) == [("b", "a"), ("b", "c")]


def test_rewards_words_and_open_outcomes():
    rows = [outcome("p", t, n) for t, n in [("a", None), ("b", "wrong"), ("c", "Right"), ("d", 0.5)]]
    assert sides(from_outcomes(rows, "all")) == [("c", "b"), ("d", "b"), ("c", "d")]


def test_completions_can_be_grouped_by_an_id():
    rows = [outcome("p", "a", 1, task=1), outcome("p", "b", 0, task=2)]
    assert len(from_outcomes(rows)) == 1
    assert from_outcomes(rows, by="task").left_out == {"fewer than two scored responses": [0, 1]}


@pytest.mark.parametrize(
    ("bad", "options", "message"),
    [
        ({"prompt": "p", "text": "a"}, {}, "row 0 has no completion, called completion, response"),
        ({"prompt": "p", "completion": "a"}, {}, "row 0 has no label, called label, reward"),
        (outcome("p", "a", "maybe"), {}, "row 0 has 'maybe' as `label`; give true or false"),
        (outcome("p", "a", math.nan), {}, "row 0 has NaN as `label`"),
        (outcome("p", 7, True), {}, "row 0 has 7 as `completion`"),
        (outcome("p", "a", True), {"by": "id"}, "row 0 has no `id`"),
        ([], {}, "row 0 is a list; rows are dictionaries"),
    ],
)
def test_a_bad_outcome_is_named(bad, options, message):
    with pytest.raises(ValueError, match=message):
        from_outcomes([bad], **options)


def test_one_id_for_two_prompts_is_refused():
    with pytest.raises(ValueError, match="row 1 has another prompt than row 0 but the same `id`"):
        from_outcomes([outcome("p", "a", 1, id=3), outcome("q", "b", 0, id=3)], by="id")


# --- without torch ---------------------------------------------------------------------------------------------------


def test_the_tools_load_no_torch_and_the_encoding_can_be_had():
    code = (
        "import sys, hf_rlx.data.pairs as pairs\n"
        "assert not {'torch', 'transformers', 'datasets'} & sys.modules.keys()\n"
        "assert pairs.encode_preference.__module__ == 'hf_rlx.data.pair_encoding'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
