"""Where steps end, in characters and in tokens; and what is said of rows that have none."""

from __future__ import annotations

import math

import pytest
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Replace
from transformers import PreTrainedTokenizerFast

from hf_rlx.data.steps import check_step_rows, encode_step_row, encode_steps, split_steps
from hf_rlx.data.tokenize import encode_prompt
from hf_rlx.models.loading import load_tokenizer
from tests import tiny

# --- characters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "separator", "expected"),
    [
        ("a=1\nb=2", "\n", [("a=1", 4), ("b=2", 7)]),
        ("a=1\nb=2\n", "\n", [("a=1", 4), ("b=2", 8)]),
        ("a\n\nb", "\n", [("a", 2), ("b", 4)]),  # a blank piece is no step
        ("\n\na", "\n", [("a", 3)]),
        ("a\n\nb\nc", "\n\n", [("a", 3), ("b\nc", 6)]),
        ("one step", "\n", [("one step", 8)]),
        ("x. y. ", ". ", [("x", 3), ("y", 6)]),
        ("a  \n  b", "\n", [("a  ", 4), ("  b", 7)]),
        ("", "\n", []),
        (" \n\t\n", "\n", []),
    ],
)
def test_steps_of_a_text(text, separator, expected):
    """A step ends behind its separator, the last one where the text ends: text[:end] is the solution so far."""
    assert split_steps(text, separator) == expected


# --- tokens ----------------------------------------------------------------------------------------------------------


def merging() -> PreTrainedTokenizerFast:
    """Characters, and the merges of two line ends, of a full stop and a line end, and of 1 behind a line end."""
    pieces = ["<eos>", "a", "b", ".", "\n", "1", "?", "\n\n", ".\n", "\n1"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("\n", "\n"), (".", "\n"), ("\n", "1")]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocabulary, merges)), eos_token="<eos>")


@pytest.mark.parametrize(
    ("steps", "separator", "ids", "ends"),
    [
        # In one go "a.\nb" is a .\n b: the token of the separator would be the full stop's.
        (["a.", "b."], "\n", [1, 3, 4, 2, 3, 4], (2, 5)),
        (["a", "b"], "\n\n", [1, 7, 2, 7], (1, 3)),
        # In one go "a\n1" is a \n1: the separator's token would be the next step's.
        (["a", "1b"], "\n", [1, 4, 5, 2, 4], (1, 4)),
        # A step that ends with the separator has it once; a step of one token.
        (["a\n", "b"], "\n", [1, 4, 2, 4], (1, 3)),
        # A line end inside a step or at its beginning is no end of a step.
        (["a\nb", "1"], "\n", [1, 4, 2, 4, 5, 4], (3, 5)),
        (["\na", "b"], "\n", [4, 1, 4, 2, 4], (2, 4)),
        # The separator's text inside a token of the step.
        (["a\n\nb"], "\n", [1, 7, 2, 4], (3,)),
    ],
)
def test_where_steps_end_in_tokens_that_merge(steps, separator, ids, ends):
    """As many ends as steps, each at the last token of its own separator (OpenRLHF#683)."""
    found = encode_steps("?", steps, merging(), separator=separator)
    assert found.prompt == [6]
    assert found.ids == ids
    assert found.ends == ends
    assert not found.cut


def test_where_steps_end_without_tokens_of_a_separator():
    """A tokenizer that splits at white space has none for a line end: the step's own last token is read."""
    found = encode_steps("t9", ["t3 t4", "t5"], tiny.word_tokenizer())
    assert (found.ids, found.ends) == ([3, 4, 5], (1, 2))


def test_where_steps_end_in_characters_as_tokens():
    """The bundled tokenizer: a..z from 69 on, the line end 99. A prompt is that of a policy."""
    tokenizer = load_tokenizer("tiny")
    found = encode_steps("1+1=", ["ab", "c"], tokenizer)
    assert found.prompt == encode_prompt("1+1=", tokenizer).ids
    assert (found.ids, found.ends) == ([69, 70, 99, 71, 99], (2, 4))
    messages = [{"role": "user", "content": "1+1="}]
    assert encode_steps(messages, ["ab"], tokenizer).prompt == encode_prompt(messages, tokenizer).ids


def test_it_is_tokenized_as_trl_s_trainer_does():
    """Each step with the separator's ids behind it; the label at the last of them, -100 before."""
    tokenizer, steps, labels = merging(), ["a.", "b\n1", "1"], [True, False, True]
    separator = tokenizer.encode("\n\n", add_special_tokens=False)
    pieces = [tokenizer(step, add_special_tokens=False)["input_ids"] + separator for step in steps]
    wanted = [[-100] * (len(piece) - 1) + [int(label)] for piece, label in zip(pieces, labels, strict=True)]
    row = encode_step_row({"prompt": "?", "completions": steps, "labels": labels}, 0, tokenizer, separator="\n\n")
    ids = row.groups[0].response_ids[0].tolist()
    found = [-100] * len(ids)
    for end, label in zip(row.ends, row.labels, strict=True):
        found[end] = int(label)
    assert ids == [token for piece in pieces for token in piece]
    assert found == [label for piece in wanted for label in piece]


@pytest.mark.parametrize(
    ("limits", "prompt", "ids", "ends"),
    [
        ({}, 4, 6, (1, 3, 5)),
        ({"max_completion_length": 5}, 4, 5, (1, 3)),  # the last step's end is gone, and its label with it
        ({"max_completion_length": 4}, 4, 4, (1, 3)),
        ({"max_completion_length": 1}, 4, 1, ()),
        ({"max_length": 10}, 4, 6, (1, 3, 5)),
        ({"max_length": 9}, 4, 5, (1, 3)),  # the prompt leaves five
        ({"max_length": 6}, 3, 3, (1,)),  # half of it is the solution's
        ({"max_length": 9, "max_completion_length": 4}, 4, 4, (1, 3)),
    ],
)
def test_what_is_cut(limits, prompt, ids, ends):
    """A prompt of four tokens and a solution of six, in three steps of two: the prompt loses its beginning."""
    found = encode_steps("1?1?", ["a", "b", "a"], merging(), **limits)
    assert found.prompt == [5, 6, 5, 6][4 - prompt :]
    assert found.ids == [1, 4, 2, 4, 1, 4][:ids]
    assert found.ends == ends
    assert found.cut == int(prompt + ids < 10)


def test_bos_stays_in_front_of_a_prompt_that_is_cut():
    tokenizer = load_tokenizer("tiny")
    whole = encode_steps("1+1+1+1+1=", ["ab"], tokenizer)
    if whole.prompt[0] != tokenizer.bos_token_id:
        pytest.skip("the tokenizer adds none")
    found = encode_steps("1+1+1+1+1=", ["ab"], tokenizer, max_length=6)
    assert found.prompt == [whole.prompt[0], *whole.prompt[-2:]]


# --- rows ------------------------------------------------------------------------------------------------------------


def test_labels_of_every_kind():
    """Booleans, 0 and 1, shares, None and NaN; ratings with each meaning of 0."""
    tokenizer = load_tokenizer("tiny")

    def labels(given, **options):
        row = {"prompt": "1=", "completions": ["a"] * len(given), "labels": given}
        return encode_step_row(row, 0, tokenizer, **options).labels

    assert labels([True, False, 1, 0, 0.25]) == (1.0, 0.0, 1.0, 0.0, 0.25)
    assert [math.isnan(label) for label in labels([None, math.nan, 1])] == [True, True, False]
    assert labels([-1, 0, 1], ratings=True) == (0.0, 1.0, 1.0)
    assert labels([-1, 0, 1], ratings=True, neutral=0.0) == (0.0, 0.0, 1.0)
    dropped = labels([-1, 0, 1, None], ratings=True, neutral=math.nan)
    assert [math.isnan(label) for label in dropped] == [False, True, False, True]


GOOD = {"prompt": "1+1=", "completions": ["a", "b"], "labels": [True, False]}
BAD = [
    ({"completions": []}, r"has \[\] as `completions`; give a list of at least one step"),
    ({"completions": ["a", ""]}, "has '' as step 1; give it text, or drop it with its label"),
    ({"completions": ["a", " \n"]}, r"has ' \\n' as step 1"),
    ({"completions": ["a", None]}, "has None as step 1"),
    ({"completions": ["a", 3]}, "has 3 as step 1"),
    ({"completions": "a\nb"}, "has a text as `completions`; split it into its steps"),
    ({"completions": None}, "has None as `completions`"),
    (
        {"completions": [{"role": "assistant", "content": "a"}, "b"]},
        "has messages as step 0; steps are texts of one answer: give the message's `content`",
    ),
    ({"completions": ["a", [{"role": "assistant", "content": "a"}]]}, "has messages as step 1"),
    ({"completions": ["a", "\ud800"]}, r"holds half a character .* of `completions\[1\]`"),
    ({"labels": [True]}, "has 1 `labels` for 2 steps; give one each, None where it is not known"),
    ({"labels": [True, True, True]}, "has 3 `labels` for 2 steps"),
    ({"labels": True}, "has True `labels` for 2 steps"),
    ({"labels": None}, "has None `labels` for 2 steps"),
    ({"labels": ["+", "-"]}, r"has the label '\+' at step 0; give True or False"),
    ({"labels": [1, -1]}, r"has the label -1 at step 1; for ratings of -1, 0 and 1 \(PRM800K\) set ratings=True"),
    ({"labels": [1, 5]}, "has the label 5 at step 1; labels are True or False, or the share of roll-outs"),
    ({"labels": [1, -0.5]}, "has the label -0.5 at step 1"),
    ({"labels": [1, math.inf]}, "has the label inf at step 1"),
    ({"prompt": ""}, "has '' as `prompt`"),
    ({"prompt": None}, "has None as `prompt`"),
    ({"prompt": [{"role": "user"}]}, "has a message 0 without `content`"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_rows_are_named(change, message):
    """By their index, before anything is tokenized, and again where a row is tokenized."""
    with pytest.raises(ValueError, match=f"^train_dataset: row 1 {message}"):
        check_step_rows([GOOD, {**GOOD, **change}], "train_dataset")
    with pytest.raises(ValueError, match=f"^row 7 {message}"):
        encode_step_row({**GOOD, **change}, 7, load_tokenizer("tiny"))


def test_bad_ratings_and_steps_without_tokens():
    with pytest.raises(
        ValueError, match=r"row 0 has the label 0.5 at step 1; with ratings=True labels are -1, 0 or 1"
    ):
        check_step_rows([{**GOOD, "labels": [1, 0.5]}], "x", ratings=True)
    row = {"prompt": "t3", "completions": ["t4", "\u200b"], "labels": [1, 1]}
    with pytest.raises(ValueError, match="row 2 has a step 1 without tokens"):
        encode_step_row(row, 2, stripping())
    with pytest.raises(ValueError, match="row 3 has no tokens in its steps"):
        encode_step_row({**row, "completions": ["\u200b"], "labels": [1]}, 3, stripping())


def stripping() -> PreTrainedTokenizerFast:
    """Words, without zero-width spaces and line ends."""
    tokenizer = tiny.word_tokenizer()
    tokenizer.backend_tokenizer.normalizer = Replace("\u200b", "")
    return tokenizer


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            ["question", "steps", "label"],
            r"rename_columns\({'question': 'prompt', 'steps': 'completions', 'label': 'l",
        ),
        (
            ["prompt", "completion", "labels"],
            r"no column `completions`.*rename_columns\({'completion': 'completions'}",
        ),
        (
            ["prompt", "chosen", "rejected"],
            "no column `completions` and no column `labels`.*train on them with Reward",
        ),
        (["a"], "no column `prompt` and no column `completions` and no column `labels`; it has"),
    ],
)
def test_missing_columns_are_named(columns, message):
    with pytest.raises(ValueError, match=message):
        check_step_rows(Dataset.from_dict({name: ["x"] for name in columns}), "train_dataset")


def test_separators_inside_steps_are_counted():
    """Not one at the end of a step, and not blank lines around it."""
    rows = [GOOD, {**GOOD, "completions": ["a\nb", "c\n"]}, {**GOOD, "completions": ["\na", "b"]}]
    assert check_step_rows(rows, "x") == 1
    assert check_step_rows(rows, "x", separator="\n\n") == 0
    assert check_step_rows(None, "x") == 0
