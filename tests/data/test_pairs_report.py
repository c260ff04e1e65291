"""All steps in one call, and the report."""

from __future__ import annotations

import json

import pytest

from hf_rlx.data.pairs import kind_of, prepare_pairs


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ("prompt chosen rejected", "pairs"),
        ("prompt responses scores", "scores"),
        ("prompt responses ranks", "rankings"),
        ("prompt responses ranking", "rankings"),
        ("prompt responses ratings", "ratings"),
        ("prompt response rating annotator", "ratings"),
        ("prompt completion label", "outcomes"),
        ("prompt response reward", "outcomes"),
        ("prompt response_a response_b verdict", "judge"),
        ("conversation_a conversation_b winner", "judge"),
        ("instruction completions", "ultrafeedback"),
    ],
)
def test_the_kind_is_told_by_the_columns(columns, kind):
    assert kind_of(dict.fromkeys(columns.split(), 1)) == kind


def test_an_unknown_kind_lists_what_is_known():
    with pytest.raises(ValueError, match=r"row 0 has the columns \['text'\].*pairs \(chosen, rejected\), scores"):
        kind_of({"text": "a"})
    with pytest.raises(ValueError, match="row 0 is a str"):
        kind_of("a")


def outcomes():
    """p: two right, one wrong; q: right only; r: as p, of other length."""
    answers = {
        "p": [("aaaa", True), ("bb", True), ("c", False)],
        "q": [("a", True)],
        "r": [("a", True), ("bb", False)],
    }
    return [{"prompt": p, "completion": t, "label": n} for p, given in answers.items() for t, n in given]


def test_the_report_says_what_happened():
    """All pairs: p aaaa over c, bb over c; r a over bb. Two longer, one shorter, differences 3, 1, -1: mean 1.

    Scores 1, 0, 1, 0, 1, 0 and lengths 4, 1, 2, 1, 1, 2: cross 1.5, squares 1.5 and 27 - 121/6 = 41/6, so that Pearson
    is 1.5 / sqrt(10.25). Places 5, 2, 5, 2, 5, 2 and 6, 2, 4.5, 2, 2, 4.5: cross 6, squares 13.5 and 15.
    """
    rows, report = prepare_pairs(outcomes(), strategy="all", dedupe="exact")
    assert (len(rows), report.kind, report.rows_in, report.rows_out) == (3, "outcomes", 6, 3)
    assert report.text(rows=True).splitlines() == [
        "6 rows (outcomes) -> 3 pairs",
        "all, margin 0: 6 -> 3",
        "  3 prompts",
        "  1 left out: fewer than two scored responses (rows 3)",
        "repeats and contradictions, exact texts: 3 -> 3",
        "length: chosen is the longer answer in 66.7% of 3 pairs (2 longer, 1 shorter, 0 equal)",
        "  chosen minus rejected: +1.0 characters on average",
        "  correlation of score and length: Pearson 0.469, Spearman 0.422",
        "  to balance: 1 pair to drop",
    ]


def test_steps_follow_one_another():
    rows, report = prepare_pairs(outcomes(), strategy="all", balance=True, forms=["messages"], count_tokens=len)
    assert len(rows) == 2
    assert rows[1]["chosen"] == [{"role": "assistant", "content": "a"}]
    assert [(step.rows_in, step.rows_out) for step in report.steps] == [(6, 3), (3, 2), (2, 2)]
    assert report.balance.to_balance == 0
    assert report.balance.mean_difference_tokens == report.balance.mean_difference


def test_the_report_is_json():
    """One pair of one length: nothing to correlate, which is null."""
    _, report = prepare_pairs([{"prompt": "q", "chosen": "a", "rejected": "b"}])
    found = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert (found["kind"], found["rows_in"], found["rows_out"]) == ("pairs", 1, 1)
    assert found["length_balance"]["pearson"] is None
    assert found["length_balance"]["share_longer"] == 0.0


def test_annotators_are_reported():
    """Two annotators rate two responses: each prefers the second, and their ratings differ by one throughout.

    Interval alpha of (1, 2), (3, 4): observed (2 + 2) / 4 = 1, expected 2 (1 + 4 + 9 + 1 + 4 + 1) / 12 = 10/3: 0.7.
    """
    _, report = prepare_pairs([{"prompt": "q", "responses": ["a", "b"], "ratings": [[1, 2], [3, 4]]}])
    text = report.text()
    assert "agreement on ratings: 2 annotators, 2 judged by two or more" in text
    assert "Krippendorff's alpha (interval) 0.700" in text
    assert "agreement on preferences: 2 annotators, 1 judged by two or more\n  the same: 100.0%" in text


def test_lists_are_named_lists():
    _, report = prepare_pairs([{"prompt": "q", "responses": ["a", "b"], "scores": [1, 2]}], strategy="ranked")
    assert report.text().splitlines()[0] == "1 row (scores) -> 1 ranked list"


def test_ultrafeedback_and_judges_go_the_same_way():
    feedback = {
        "instruction": "q",
        "completions": [{"response": t, "annotations": {"x": {"Rating": n}}} for t, n in [("a", "1"), ("b", "5")]],
    }
    rows, _ = prepare_pairs([feedback])
    assert (rows[0]["chosen"], rows[0]["rejected"]) == ("b", "a")
    rows, report = prepare_pairs([{"prompt": "q", "response_a": "a", "response_b": "b", "verdict": "B"}])
    assert rows[0]["chosen"] == "b"
    assert report.steps[0].name == "all, margin 0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "votes"}, "the kind is one of auto, pairs"),
        ({"standardise": True}, "standardise is for ratings, but the rows are pairs"),
        ({"by": "id"}, "by is for outcomes, but the rows are pairs"),
        ({"strategy": "ranked"}, "the rows are pairs; lists are made of"),
        ({"kind": "scores"}, "row 0 has no `responses`"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        prepare_pairs([{"prompt": "q", "chosen": "a", "rejected": "b"}], **options)


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="there are no rows"):
        prepare_pairs([])


def test_no_pairs_have_no_lengths():
    """All rows left out: nothing is said of a mean over none."""
    made, report = prepare_pairs([{"prompt": "q", "chosen": "a", "rejected": "a"}])
    assert made == []
    assert report.text() == "1 row (pairs) -> 0 pairs\nchecked, margin 0: 1 -> 0\n  1 left out: identical responses"
