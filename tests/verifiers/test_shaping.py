"""Shaping: lengths, repetition, end of sequence and script, each with the values derived by hand."""

from __future__ import annotations

import re

import pytest

from hf_rlx.verifiers.shaping import EosRequired, LengthPenalty, RepetitionPenalty, ScriptVerifier


def test_length_is_dapos_line():
    """soft 6, hard 10: 0 to 6 tokens, then a quarter less for each token, -1 from 10 on (2503.14476, eq. 13 with
    L_max = 10 and L_cache = 4: (10 - 4 - 7) / 4 = -0.25)."""
    ids = [[1] * n for n in (0, 6, 7, 8, 10, 50)]
    assert LengthPenalty(6, 10)([], [""] * 6, completion_ids=ids) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
    words = LengthPenalty(2, 4, unit="words")
    messages = [[{"role": "assistant", "content": "a b c"}]]
    assert words([], ["a b", "a b c", "a  b\nc d e"]) == [0.0, -0.5, -1.0]
    assert words([], messages) == [-0.5]
    assert LengthPenalty(2, 4, unit="characters")([], ["abc"]) == [-0.5]


def test_length_agrees_with_the_trainers_own_penalty():
    from torch import tensor

    from hf_rlx.functional import soft_overlong

    counts = list(range(0, 25, 3))
    own = LengthPenalty(12, 20)([], [""] * len(counts), completion_ids=[[0] * n for n in counts])
    assert own == pytest.approx(soft_overlong(tensor(counts), max_length=20, cache=8).tolist())


def test_repetition():
    """n = 2. 1 2 3 4 has three different bigrams of three: 0. 5 5 5 5 5 has one of four: -3/4. 1 2 1 2 1 has 12 and 21
    of four: -2/4. One token has none: 0. (2502.03373, appendix C.2.)"""
    ids = [[1, 2, 3, 4], [5] * 5, [1, 2, 1, 2, 1], [1], []]
    assert RepetitionPenalty(2)([], [""] * 5, completion_ids=ids) == [0.0, -0.75, -0.5, 0.0, 0.0]
    words = RepetitionPenalty(1, unit="words")
    assert words([], ["The the THE cat", "a b", ""]) == [-0.5, 0.0, 0.0]
    assert RepetitionPenalty(2, unit="characters")([], ["aaaa"]) == [-2 / 3]


def test_eos():
    """Only the last token counts: an end inside (a conversation's earlier turn) is none, nor is one in the text."""
    ids = [[5, 2], [5, 9], [5, 7], [2, 5], [], [2]]
    ended = EosRequired([2, 9])
    assert ended(["<eos>"] * 6, ["<eos>"] * 6, completion_ids=ids) == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert EosRequired(0)([], ["", ""], completion_ids=[[0], [1]]) == [1.0, 0.0]


def test_token_ids_are_needed():
    for verify in (EosRequired(1), LengthPenalty(1, 2), RepetitionPenalty()):
        with pytest.raises(ValueError, match="reads the column 'completion_ids'"):
            verify([], ["a"])
        with pytest.raises(ValueError, match="1 completions but 2 values"):
            verify([], ["a"], completion_ids=[[1], [1]])


@pytest.mark.parametrize(
    ("scripts", "text", "score"),
    [
        ("LATIN", "abc", 1.0),
        ("LATIN", "ab да", 0.5),
        ("CYRILLIC", "ab да", 0.5),
        ("LATIN", "42 + 1 = 43 !?", None),  # no letters, no verdict
        ("LATIN", "", None),
        ("LATIN", "\N{CYRILLIC SMALL LETTER A}pple", 0.8),  # a look-alike is what it is
        ("LATIN", "\N{FULLWIDTH LATIN SMALL LETTER A}\N{MATHEMATICAL BOLD SMALL B}", 1.0),
        ("LATIN", "e\u0301\u0301\u0301 naïve", 1.0),  # marks are no letters
        ("DEVANAGARI", "हिन्दी", 1.0),  # its vowel signs are no letters either
        ("cjk", "你好ab", 0.5),
        (("HIRAGANA", "KATAKANA", "CJK"), "漢字とカナー", 1.0),
        ("HANGUL", "한국어", 1.0),
        ("GREEK", "π r", 0.5),
    ],
)
def test_script(scripts, text: str, score: float | None):
    assert ScriptVerifier(scripts)([], [text, [{"role": "assistant", "content": text}]]) == [score, score]


def test_script_options():
    assert ScriptVerifier(threshold=0.75)([], ["abcд", "abдд", "1"]) == [1.0, 0.0, None]
    assert ScriptVerifier(no_letters=0.0)([], ["1 2 3"]) == [0.0]
    code = ScriptVerifier("CYRILLIC", ignore=r"(?s)```.*?```")
    assert code([], ["жд\n```\nabc\n```\nжд"]) == [1.0]


def test_arguments():
    for make, message in (
        (lambda: LengthPenalty(4, 4), "soft < hard"),
        (lambda: LengthPenalty(-1, 4), "soft < hard"),
        (lambda: LengthPenalty(1, 2, unit="lines"), "unit must be"),  # type: ignore[arg-type]
        (lambda: RepetitionPenalty(0), "at least 1"),
        (lambda: EosRequired([]), "at least one"),
        (lambda: ScriptVerifier("FRENCH"), re.escape("no letter belongs to the scripts ['FRENCH']")),
        (lambda: ScriptVerifier(threshold=2), "threshold in 0..1"),
        (lambda: ScriptVerifier([]), "at least one script"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
