"""Prompts to ids, and characters to tokens for tokenizers that cut text in awkward places."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_rlx.data.formats import PromptError
from hf_rlx.data.tokenize import char_to_token, encode_prompt, is_conversational
from tests import tiny

TEMPLATE = "<bos> {% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}t9{% endif %}"


def byte_bpe(merges):
    """A byte-level BPE with these merges only; characters are written as GPT-2 writes bytes ("Ċ" is a newline)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<eos>", *alphabet, *("".join(m) for m in merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def sentencepiece_like():
    """Words with "▁" for the space before them; decoding drops the very first space."""
    words = ["<eos>", "<unk>", "▁Step", "▁one", ".", "▁two", "▁"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", left=1, right=0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_plain_text():
    assert encode_prompt("t5 t6", tiny.word_tokenizer()) == ("t5 t6", [5, 6], False, 0)


def test_the_template_writes_special_tokens_itself():
    """A tokenizer that adds BOS must not add a second one behind a template that has it."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny.word_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.chat_template = TEMPLATE
    assert encode_prompt("t5", tokenizer).ids == [1, 5]
    encoded = encode_prompt([{"role": "user", "content": "t5"}], tokenizer)
    assert encoded == ("<bos> t5 t9", [1, 5, 9], True, 0)


def test_prefilled_answers_are_continued():
    tokenizer = tiny.word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    messages = [{"role": "user", "content": "t5"}, {"role": "assistant", "content": "t7"}]
    assert encode_prompt(messages, tokenizer).text == "<bos> t5 t7"
    assert encode_prompt(messages, tokenizer).ids == [1, 5, 7]


def test_a_tokenizer_without_bos():
    """No BOS is invented, and no None stands among the ids (trl#1073)."""
    tokenizer = tiny.word_tokenizer(bos_token=None)
    tokenizer.chat_template = "{{ bos_token }}" + TEMPLATE.removeprefix("<bos> ")
    assert tokenizer.bos_token_id is None
    assert encode_prompt("t5 t6", tokenizer).ids == [5, 6]
    assert encode_prompt([{"role": "user", "content": "t5"}], tokenizer).ids == [5, 9]


def test_messages_that_the_template_cannot_render_are_named():
    """The template's own words, and the prompt for whoever wants to say which row it was."""
    tokenizer = tiny.word_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    prompt = [{"role": "user", "content": "t5"}]
    with pytest.raises(PromptError, match="roles must alternate") as caught:
        encode_prompt(prompt, tokenizer)
    assert caught.value.prompt is prompt


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (3, "got int: '3'"),
        (None, "got NoneType"),
        ([], r"got list: '\[\]'"),
        ([{"content": "t5"}], "with `role` and `content`"),
        ("", "the prompt '' has no tokens"),
        ([{"role": "user", "content": "t5"}], "the tokenizer has no chat template"),
    ],
)
def test_refusals(prompt, message):
    with pytest.raises(ValueError, match=message):
        encode_prompt(prompt, tiny.word_tokenizer())


def test_is_conversational():
    assert is_conversational([{"role": "user", "content": "a"}])
    assert not is_conversational("a")
    assert not is_conversational([])
    assert not is_conversational(["a"])
    assert not is_conversational([{"role": "user"}])


# --- characters to tokens --------------------------------------------------------------------------------------------


def test_a_marker_that_merges_with_its_neighbour():
    """ "a\\n\\nb\\n" is a, \\n\\n (one token), b, \\n: the step that ends before the blank line ends in token 0, the
    line break at character 2 lies inside token 1, the end of the text is token 3 (OpenRLHF#683)."""
    tokenizer = byte_bpe([("Ċ", "Ċ")])
    ids = tokenizer("a\n\nb\n")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["a", "ĊĊ", "b", "Ċ"]
    assert char_to_token(tokenizer, ids, [1, 2, 3, 4, 5]) == [0, 1, 1, 2, 3]


def test_a_character_of_several_tokens_ends_with_the_last():
    """ "é!" is two bytes and one: after the first byte nothing of "é" is there yet; "😀" has four."""
    tokenizer = byte_bpe([])
    ids = tokenizer("é!")["input_ids"]
    assert len(ids) == 3
    assert char_to_token(tokenizer, ids, [1, 2]) == [1, 2]
    ids = tokenizer("a😀b")["input_ids"]
    assert len(ids) == 6
    assert char_to_token(tokenizer, ids, [1, 2, 3]) == [0, 4, 5]


def test_the_first_space_is_dropped():
    """ "Step one. two" decodes without the space before Step: ends 4, 8, 9, 13 are tokens 0, 1, 2, 3."""
    tokenizer = sentencepiece_like()
    ids = [2, 3, 4, 5]
    assert tokenizer.decode(ids) == "Step one. two"
    assert char_to_token(tokenizer, ids, [4, 8, 9, 13]) == [0, 1, 2, 3]


def test_special_tokens_have_no_characters():
    """EOS ends the response but no step: the last character stands in the token before it."""
    tokenizer = byte_bpe([("a", "b")])
    ids = [*tokenizer("abc")["input_ids"], tokenizer.eos_token_id]
    assert len(ids) == 3
    assert char_to_token(tokenizer, ids, [1, 2, 3]) == [0, 0, 1]


def test_added_tokens_and_ends_past_the_text():
    tokenizer = byte_bpe([])
    tokenizer.add_tokens([AddedToken("<step>", special=False, normalized=False)])
    ids = tokenizer("a<step>b")["input_ids"]
    assert len(ids) == 3
    assert char_to_token(tokenizer, ids, [1, 7, 8, 99]) == [0, 1, 2, 2]
    assert char_to_token(tokenizer, [], [1]) == []
    assert char_to_token(tokenizer, ids, []) == []
