"""Format rewards, with and without a tag that the chat template has already opened."""

from __future__ import annotations

import re

import pytest

from hf_rlx.verifiers import RegexVerifier

THINK = r"<think>.*?</think>\s*\S.*"


def test_search_and_fullmatch():
    completions = ["<b>1</b>", "so <b>1</b>", "1"]
    assert RegexVerifier("<b>.</b>")(prompts=[""] * 3, completions=completions) == [1.0, 1.0, 0.0]
    assert RegexVerifier("<b>.</b>", fullmatch=True)(prompts=[""] * 3, completions=completions) == [1.0, 0.0, 0.0]


def test_dot_spans_lines_and_compiled_patterns_keep_their_flags():
    text = ["<think>\na\n</think>\n42\n"]
    assert RegexVerifier(THINK, fullmatch=True)(prompts=[""], completions=text) == [1.0]
    assert RegexVerifier(re.compile(THINK), fullmatch=True)(prompts=[""], completions=text) == [0.0]


def test_opened_tag_in_a_text_prompt():
    prompts = ["<|user|>hi<|assistant|><think>\n", "<|user|>hi<|assistant|>"]
    completions = ["a\n</think>\n42", "a\n</think>\n42"]
    assert RegexVerifier(THINK, fullmatch=True)(prompts=prompts, completions=completions) == [0.0, 0.0]
    aware = RegexVerifier(THINK, fullmatch=True, prefill_aware=True)
    assert aware(prompts=prompts, completions=completions) == [1.0, 0.0]
    assert aware.judged_text(prompts[0], completions[0]) == "<think>\na\n</think>\n42"


def test_a_tag_inside_the_prompt_is_not_an_opened_one():
    aware = RegexVerifier(THINK, fullmatch=True, prefill_aware=True)
    assert aware(prompts=["Write <think> before you think."], completions=["a</think>42"]) == [0.0]


def test_opened_tag_in_messages():
    user = {"role": "user", "content": "hi <think>"}
    reply = [{"role": "assistant", "content": "a</think>42"}]
    aware = RegexVerifier(THINK, fullmatch=True, prefill_aware=True)
    assert aware(prompts=[[user]], completions=[reply]) == [0.0]
    assert aware(prompts=[[user, {"role": "assistant", "content": "<think>"}]], completions=[reply]) == [1.0]
    named = RegexVerifier(THINK, fullmatch=True, prefill_aware=True, prefill="<think>\n")
    assert named(prompts=[[user]], completions=[reply]) == [1.0]


def test_a_tag_written_by_the_model_is_not_doubled():
    named = RegexVerifier(r"(?!.*<think>.*<think>)" + THINK, fullmatch=True, prefill_aware=True, prefill="<think>\n")
    assert named(prompts=["hi"], completions=["<think>a</think>42"]) == [1.0]


def test_arguments():
    assert RegexVerifier("a").__name__ == "format"
    assert RegexVerifier("a", name="think").__name__ == "think"
    with pytest.raises(ValueError, match="prefill_aware"):
        RegexVerifier("a", prefill="<think>")
    with pytest.raises(re.error):
        RegexVerifier("(")
