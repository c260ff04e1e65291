"""Preference rows to groups. In the bundled tokenizer every character is a token: bos 1, eos 2, a..z 69..94."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from hf_rlx.data.pair_encoding import EncodedAnswers, check_preferences, encode_answers, encode_preference, fit
from hf_rlx.data.tokenize import encode_prompt
from hf_rlx.models.loading import load_tokenizer
from tests.tiny import word_tokenizer

BOS, EOS, A, B, C, D = 1, 2, 69, 70, 71, 72
NO_TEXT = {"content": None}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny")


def encoded(row, tokenizer, **options):
    """(prompt ids, answers' ids) of a row that shares its prompt."""
    found = encode_preference(row, 7, tokenizer, **options)
    assert found.row == 7
    (group,) = found.groups
    return group.prompt_ids.tolist(), [ids.tolist() for ids in group.response_ids]


def says(*turns):
    """Messages, user and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


# --- what is what ----------------------------------------------------------------------------------------------------


def test_an_explicit_prompt_is_shared_and_answers_end_with_eos(tokenizer):
    found = encoded({"prompt": "ab", "chosen": "c", "rejected": "dd"}, tokenizer)
    assert found == ([BOS, A, B], [[C, EOS], [D, D, EOS]])


def test_eos_is_written_once(tokenizer):
    """TRL's rows may carry it already."""
    found = encoded({"prompt": "ab", "chosen": "c<eos>", "rejected": "d"}, tokenizer)
    assert found == ([BOS, A, B], [[C, EOS], [D, EOS]])


def test_answers_that_begin_alike_keep_their_beginning(tokenizer):
    """The prompt is what was given, though both branches go on with "c"."""
    found = encoded({"prompt": "ab", "chosen": "cc", "rejected": "cd"}, tokenizer)
    assert found == ([BOS, A, B], [[C, C, EOS], [C, D, EOS]])


def test_an_implicit_prompt_is_what_both_have_in_common(tokenizer):
    assert encoded({"chosen": "abc", "rejected": "abd"}, tokenizer) == ([BOS, A, B], [[C, EOS], [D, EOS]])


def test_an_implicit_prompt_leaves_each_answer_a_token(tokenizer):
    """ "ab" is the beginning of "abc": common are bos, a, b; "ab" keeps its EOS. Equal texts keep theirs, and tie."""
    assert encoded({"chosen": "ab", "rejected": "abc"}, tokenizer) == ([BOS, A, B], [[EOS], [C, EOS]])
    assert encoded({"chosen": "ab", "rejected": "ab"}, tokenizer) == ([BOS, A, B], [[EOS], [EOS]])


def test_texts_without_anything_in_common_are_groups_of_their_own():
    """A tokenizer without BOS, and no shared word: K groups of one answer, in order."""
    found = encode_preference({"chosen": "t3 t4", "rejected": "t5 t6 t7"}, 0, word_tokenizer())
    assert [g.prompt_ids.tolist() for g in found.groups] == [[3], [5]]
    assert [g.response_ids[0].tolist() for g in found.groups] == [[4, EOS], [6, 7, EOS]]
    assert found.ranks == (0.0, 1.0)


@pytest.mark.parametrize(
    ("row", "ranks"),
    [
        ({"ranks": [2, 1, 2]}, (2.0, 1.0, 2.0)),
        ({"scores": [0.5, 9.0, 0.5]}, (1.0, 0.0, 1.0)),
        ({"scores": [3, 2, 1]}, (0.0, 1.0, 2.0)),
    ],
)
def test_ranked_lists(tokenizer, row, ranks):
    """Ranks: lower is better; of scores the rank is the number of different higher ones."""
    found = encode_preference({"prompt": "a", "responses": ["b", "c", "dd"], **row}, 0, tokenizer)
    assert [ids.tolist() for ids in found.groups[0].response_ids] == [[B, EOS], [C, EOS], [D, D, EOS]]
    assert found.ranks == ranks
    assert found.num_pairs == len({(i, j) for i in range(3) for j in range(i) if ranks[i] != ranks[j]})
    assert found.lengths == [2, 2, 3]


def test_identical_answers_are_a_tie(tokenizer):
    found = encode_preference({"prompt": "a", "chosen": "b", "rejected": "b"}, 0, tokenizer)
    assert (found.ranks, found.num_pairs) == ((0.0, 0.0), 0)


def test_the_margin_is_kept(tokenizer):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert encode_preference({**row, "margin": 2}, 0, tokenizer).margin == 2.0
    assert encode_preference({**row, "margin": None}, 0, tokenizer).margin is None


def test_tokenized_rows(tokenizer):
    found = encoded({"chosen_ids": [BOS, A, B, EOS], "rejected_ids": [BOS, A, C, EOS]}, tokenizer)
    assert found == ([BOS, A], [[B, EOS], [C, EOS]])
    for odd in (1.5, "1", -1):
        with pytest.raises(ValueError, match=f"row 0 has the token id {odd!r}"):
            encode_preference({"chosen_ids": [BOS, odd], "rejected_ids": [BOS]}, 0, tokenizer)


# --- messages --------------------------------------------------------------------------------------------------------


def test_messages_with_an_explicit_prompt(tokenizer):
    row = {"prompt": says("ab"), "chosen": says("", "c")[1:], "rejected": says("", "dd")[1:]}
    assert encoded(row, tokenizer) == ([BOS, A, B], [[C, EOS], [D, D, EOS]])


def test_messages_with_an_implicit_prompt(tokenizer):
    row = {"chosen": says("ab", "c"), "rejected": says("ab", "dd")}
    assert encoded(row, tokenizer) == ([BOS, A, B], [[C, EOS], [D, D, EOS]])


def test_a_text_behind_messages_is_the_assistant_s(tokenizer):
    row = {"prompt": says("ab"), "chosen": "c", "rejected": "dd"}
    assert encoded(row, tokenizer) == ([BOS, A, B], [[C, EOS], [D, D, EOS]])


def test_the_prompt_is_the_one_that_a_policy_gets(tokenizer):
    """Token for token, so that a reward model reads in RL what it was trained on."""
    row = {"prompt": says("ab", "c", "a"), "chosen": "b", "rejected": "d"}
    assert encoded(row, tokenizer)[0] == encode_prompt(row["prompt"], tokenizer).ids


def test_what_a_template_writes_behind_eos_is_left_out(tokenizer):
    """A policy's answer ends with EOS; the line break that ChatML writes behind it is nobody's."""
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<' + m['role'][0] + '>' + m['content'] + '<eos>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    prompt, answers = encoded({"prompt": says("b"), "chosen": "c", "rejected": "dd"}, tokenizer)
    assert tokenizer.decode(prompt) == "<u>b<eos>\n<a>"
    assert answers == [[C, EOS], [D, D, EOS]]


def test_template_arguments_and_tools_reach_the_template():
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = "{{ sign }}{{ tools[0]['name'] }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    row = {"prompt": says("a"), "chosen": "b", "rejected": "c", "tools": '[{"name": "d"}]'}
    assert encoded(row, tokenizer, chat_template_kwargs={"sign": "c"}) == ([C, D, A], [[B], [C]])
    row["chat_template_kwargs"] = {"sign": "a"}
    assert encoded(row, tokenizer, chat_template_kwargs={"sign": "c"})[0] == [A, D, A]


def test_an_answer_that_calls_a_tool_needs_no_content():
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] or m['tool_calls'][0]['function']['name'] }}{% endfor %}"
    )
    calls = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "d"}}]}
    rows = [{"prompt": says("a"), "chosen": [calls | more], "rejected": says("", "c")[1:]} for more in ({}, NO_TEXT)]
    check_preferences(rows, "train_dataset")
    assert [encoded(row, tokenizer) for row in rows] == [([A], [[D], [C]])] * 2
    assert encoded({"chosen": [*says("a"), calls], "rejected": says("a", "c")}, tokenizer) == ([A], [[D], [C]])
    with pytest.raises(ValueError, match="row 0 has `tools` that are no JSON"):
        encode_preference(rows[0] | {"tools": "{"}, 0, tokenizer)


def test_special_tokens_inside_messages_are_text(tokenizer):
    """`<eos>` in an answer is five characters and does not end it."""
    row = {"prompt": says("a"), "chosen": "b<eos>c", "rejected": "d"}
    found = encode_preference(row, 0, tokenizer)
    assert found.neutralised == 1
    (ids, _) = found.groups[0].response_ids
    assert ids.tolist().count(EOS) == 1
    assert ids[-1] == EOS
    allowed = encode_preference(row, 0, tokenizer, special_tokens="allow")
    assert allowed.groups[0].response_ids[0].tolist() == [B, EOS, C, EOS]


# --- borders ---------------------------------------------------------------------------------------------------------


def merging(bos: bool) -> PreTrainedTokenizerFast:
    """Characters a, b, c and the merge "ab", as byte-pair encodings have them."""
    vocabulary = {"<eos>": 0, "a": 1, "b": 2, "c": 3, "ab": 4, "<bos>": 5}
    backend = Tokenizer(BPE(vocabulary, [("a", "b")], unk_token="<eos>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", bos_token="<bos>")
    if bos:
        tokenizer.chat_template = None
    return tokenizer


def test_a_prompt_that_merges_with_one_answer_is_cut_before_the_merge():
    """ "ca" + "b" is c, ab; "ca" + "c" is c, a, c: common to both and the prompt is c."""
    found = encoded({"prompt": "ca", "chosen": "b", "rejected": "c"}, merging(False))
    assert found == ([3], [[4, 0], [1, 3, 0]])


def test_a_prompt_that_merges_whole_is_tokenized_by_itself():
    """ "a" + "b" is the one token ab: with nothing in common the prompt stays a, as a policy sees it."""
    assert encoded({"prompt": "a", "chosen": "b", "rejected": "c"}, merging(False)) == ([1], [[2, 0], [3, 0]])


# --- length ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "prompt", "answers", "cut"),
    [
        (None, [1, 10, 11, 12], [[20, 21, 22, 2], [30, 2]], 0),
        (8, [1, 10, 11, 12], [[20, 21, 22, 2], [30, 2]], 0),
        # 7: the prompt leaves 3 tokens for answers.
        (7, [1, 10, 11, 12], [[20, 21, 2], [30, 2]], 1),
        # 5: half of it, 2, for answers; the prompt keeps 3: bos and its end.
        (5, [1, 11, 12], [[20, 2], [30, 2]], 2),
        # 2: one token each, EOS; the prompt's last.
        (2, [12], [[2], [2]], 3),
    ],
)
def test_truncation_keeps_eos_and_something_of_everything(limit, prompt, answers, cut):
    long = EncodedAnswers([1, 10, 11, 12], [[20, 21, 22, 2], [30, 2]])
    found = fit(long, limit, bos=1)
    assert (found.prompt, found.answers, found.cut) == (prompt, answers, cut)
    assert limit is None or all(len(found.prompt) + len(ids) <= limit for ids in found.answers)


def test_a_long_prompt_does_not_eat_the_answers(tokenizer):
    """12 + 1 prompt tokens, limit 8: half for the answers as far as they need it."""
    row = {"prompt": "abcdabcdabcd", "chosen": "abcdabcd", "rejected": "c"}
    prompt, answers = encoded(row, tokenizer, max_length=8)
    assert answers == [[A, B, C, EOS], [C, EOS]]
    assert prompt == [BOS, B, C, D]


def test_an_unfinished_answer_has_no_eos(tokenizer):
    found = encode_answers("a", ["b", "c<eos>"], tokenizer, finished=[False, False])
    assert found.answers == [[B], [C]]


# --- faults ----------------------------------------------------------------------------------------------------------

GOOD = {"prompt": "a", "chosen": "b", "rejected": "c"}
LISTED = {"prompt": "a", "responses": ["b", "c"], "ranks": [0, 1]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**GOOD, "chosen": None}, r"row 1 has None as `chosen`; give it text or messages, or drop it"),
        ({**GOOD, "rejected": ""}, r"row 1 has '' as `rejected`"),
        ({**GOOD, "prompt": ""}, r"row 1 has the prompt ''"),
        ({**GOOD, "prompt": None}, r"row 1 has the prompt None"),
        ({**GOOD, "chosen": 3}, r"row 1 has 3 as `chosen`; give it text or messages \(numbers become text by"),
        ({**GOOD, "chosen": [{"role": "assistant"}]}, r"row 1 has a message 0 without `content`.* of `chosen`"),
        ({**GOOD, "chosen": "x\ud800"}, r"row 1 holds half a character"),
        ({**GOOD, "chosen": says("", "b")[1:]}, r"row 1 mixes plain text and messages among its answers"),
        (
            {**GOOD, "chosen": says("", "b")[1:], "rejected": says("", "c")[1:]},
            r"row 1 has a plain-text prompt and messages as answers; write the prompt as",
        ),
        ({**GOOD, "margin": float("nan")}, r"row 1 has the margin nan"),
        ({**GOOD, "margin": "big"}, r"row 1 has the margin 'big'"),
        ({**LISTED, "responses": ["b"]}, r"row 1 has 1 as `responses`; give a list of at least two"),
        ({**LISTED, "responses": "bc"}, r"row 1 has 'bc' as `responses`"),
        ({**LISTED, "ranks": [0]}, r"row 1 has 1 `ranks` for 2 `responses`; give one each"),
        ({**LISTED, "ranks": [0, float("nan")]}, r"row 1 has the `ranks` \[0, nan\]"),
        ({**LISTED, "responses": ["b", None]}, r"row 1 has None as `responses\[1\]`"),
        ({"chosen_ids": [1], "rejected_ids": []}, r"row 1 has an empty `rejected_ids`"),
        ("text", r"row 1 is a str; rows are dictionaries"),
    ],
)
def test_a_bad_row_is_named(row, message):
    good = next((r for r in (GOOD, LISTED) if isinstance(row, dict) and r.keys() & row.keys() >= {"prompt"}), GOOD)
    with pytest.raises(ValueError, match=f"train: {message}"):
        check_preferences([good, row], "train")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"question": "a", "accepted": "b", "rejected": "c"},
            r"no column `chosen`; it has \['question', 'accepted', 'rejected'\].*rename_columns\({'accepted': 'cho",
        ),
        ({"prompt": "a", "chosen": "b", "rejcted": "c"}, r"no column `rejected`.*{'rejcted': 'rejected'}"),
        ({"prompt": "a", "responses": ["b", "c"], "ranking": [0, 1]}, r"no column `ranks`.*{'ranking': 'ranks'}"),
        ({"prompt": "a", "answers": ["b", "c"], "ranks": [0, 1]}, r"no column `responses`.*{'answers': 'responses'}"),
        ({"prompt": "a", "completion": "b", "label": True}, r"one completion and a label are no pairs"),
        ({"images": [], **GOOD}, r"pictures"),
    ],
)
def test_missing_columns_are_named_with_the_rename(row, message):
    with pytest.raises(ValueError, match=message):
        check_preferences(Dataset.from_list([row]), "train_dataset")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "is empty"),
        ({"train": [GOOD]}, 'dataset\\["train"\\]'),
        ("hub/name", "load it first"),
        (iter([GOOD]), "streaming"),
    ],
)
def test_a_dataset_that_is_none(dataset, message):
    with pytest.raises(ValueError, match=message):
        check_preferences(dataset, "train_dataset")


def test_faults_of_encoding_name_the_row(tokenizer):
    row = {"prompt": says("a"), "chosen": "b", "rejected": "c"}
    with pytest.raises(ValueError, match="row 5 has messages, but the tokenizer has no chat template"):
        encode_preference(row, 5, word_tokenizer())
    with pytest.raises(ValueError, match="row 5 needs max_length >= 2"):
        encode_preference(GOOD, 5, tokenizer, max_length=1)
    with pytest.raises(ValueError, match="row 5 a message holds the special token '<eos>'"):
        encode_preference({**row, "chosen": "<eos>"}, 5, tokenizer, special_tokens="refuse")


def test_groups_are_long_tensors(tokenizer):
    group = encode_preference(GOOD, 0, tokenizer).groups[0]
    assert group.prompt_ids.dtype == torch.long


@pytest.mark.parametrize(("ids", "foreign"), [([1, 5, 6000, 2], 6000), ([-1, 5], -1)])
def test_foreign_token_ids_are_named(ids, foreign):
    with pytest.raises(ValueError, match=f"row 4 has the token id {foreign}, but the tokenizer has 64 tokens"):
        encode_preference({"chosen_ids": [3, 4], "rejected_ids": ids}, 4, word_tokenizer())
