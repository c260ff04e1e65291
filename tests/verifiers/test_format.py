"""Format rewards, with and without a tag that the chat template has already opened."""

from __future__ import annotations

import re
import time

import pytest

from hf_rlx.verifiers.format import JsonVerifier, RegexVerifier, TagVerifier
from hf_rlx.verifiers.json_schema import JsonError, Schema, read_json

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


# tags

TAGGED = "<think>a</think> <answer>42</answer>"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (TAGGED, 1.0),
        ("\n<think>a\nb</think>\n\n<answer>\n42\n</answer>\n", 1.0),
        ("<think>1 < 2 <b>x</b></think><answer>42</answer>", 1.0),  # other tags are text
        ("<think>a</think>", 0.0),
        ("<answer>42</answer>", 0.0),
        ("<answer>42</answer><think>a</think>", 0.0),  # order
        ("<think>a<answer>42</answer></think>", 0.0),  # nested
        ("<think>a<think>b</think></think><answer>42</answer>", 0.0),
        (TAGGED + "<answer>43</answer>", 0.0),  # repeated
        ("<think>a</think><answer>41</answer><think>b</think><answer>42</answer>", 0.0),
        ("<think><think>a</think><answer>42</answer>", 0.0),  # opened twice
        ("<think>a</think><answer>42", 0.0),  # cut off
        ("<think>a</think><answer>42</answer", 0.0),
        ("<think>a</think>x<answer>42</answer>", 0.0),  # between
        ("x" + TAGGED, 0.0),
        (TAGGED + " 42", 0.0),  # the answer outside
        ("<think> \n</think><answer>42</answer>", 0.0),  # empty
        ("<think>a</think><answer></answer>", 0.0),
        ("<think>write </answer> then</think><answer>42</answer>", 0.0),  # quoted
        ("<Think>a</Think><Answer>42</Answer>", 0.0),
        ("<think >a</think><answer>42</answer>", 0.0),
        ("< think>a</think><answer>42</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tags(text: str, score: float):
    assert TagVerifier()([""], [text]) == [score]
    assert TagVerifier()([[{"role": "user", "content": "q"}]], [[{"role": "assistant", "content": text}]]) == [score]


def test_tags_with_an_answer_behind_them():
    think = TagVerifier(["think"], tail=True)
    texts = ["<think>a</think> 42", "<think>a</think>", "<think>a</think> 42 <think>b</think> 1", "42"]
    assert think([""] * 4, texts) == [1.0, 0.0, 0.0, 0.0]


def test_tags_that_the_template_opened():
    """The prompt ends with the opened tag: what counts is both together, so opening it again is twice. A tag of
    another name at the end of the prompt is no part of it."""
    rest = "a</think><answer>42</answer>"
    verify = TagVerifier()
    assert verify(["q <think>\n", "q <think>\n", "q <role>", "q"], [rest, TAGGED, TAGGED, rest]) == [
        1.0,
        0.0,
        1.0,
        0.0,
    ]
    opened = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>"}]
    assert verify([opened], [[{"role": "assistant", "content": rest}]]) == [1.0]
    named = TagVerifier(prefill="<think>\n")
    assert named([opened[:1]] * 2, [rest, TAGGED]) == [1.0, 1.0]
    assert TagVerifier(prefill_aware=False)(["q <think>\n"], [rest]) == [0.0]


def test_tags_take_no_time_and_no_nonsense():
    start = time.perf_counter()
    assert TagVerifier()(["", ""], ["<think>" * 100_000, "<" * 300_000]) == [0.0, 0.0]
    assert time.perf_counter() - start < 2
    for wrong in ((), ("a", "a"), ("<a>",), "think"):
        with pytest.raises(ValueError, match="tag"):
            TagVerifier(wrong)
    with pytest.raises(ValueError, match="prefill_aware"):
        TagVerifier(prefill="<think>", prefill_aware=False)


# JSON


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        ' \n{"a": 1}\n',
        '```json\n{"a": 1}\n```',
        '```\n{"a": 1}\n```',
    ],
)
def test_json_bare_or_fenced(text: str):
    assert JsonVerifier({"type": "object"})([""], [text]) == [1.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1} {"a": 2}', "no JSON"),
        ('{"a": 1}, as you asked', "no JSON"),
        ('Here: {"a": 1}', "no JSON"),
        ('```json\n{"a": 1}\n``` done', "no JSON"),
        ("```json\n1\n```\n```json\n2\n```", "no JSON"),
        ('```python\n{"a": 1}\n```', "no JSON"),
        ('{"a": 1', "no JSON"),
        ("{'a': 1}", "no JSON"),
        ('{"a": 1,}', "no JSON"),
        ('{"a": 1 /* one */}', "no JSON"),
        ('{"a": 01}', "no JSON"),
        ('{"a": "\n"}', "no JSON"),
        ("\u00a0{}", "no JSON"),
        ("", "no JSON"),
        ('{"a": NaN}', "NaN is no JSON"),
        ('{"a": -Infinity}', "-Infinity is no JSON"),
        ('{"a": 1e999}', "beyond the range"),
        ('{"a": 1' + "0" * 400 + "}", "401 digits"),
        ('{"a": 1, "a": 1}', "'a' is repeated"),
        ('{"b": {"a": 1, "\\u0061": 2}}', "'a' is repeated"),
        ("[" * 65 + "]" * 65, "more than 64 levels"),
        ("[" * 100_000, "more than 64 levels"),
        ('"' + "x" * 200_000 + '"', "200002 characters"),
    ],
)
def test_json_that_is_none(text: str, reason: str):
    logged: dict[str, list] = {}
    assert JsonVerifier()([""], [text], log_extra=logged.__setitem__) == [0.0]
    assert reason in logged["json/reason"][0]


def test_json_deep_enough_and_brackets_in_strings():
    """64 levels are allowed, and brackets within strings are none."""
    assert read_json("[" * 64 + "]" * 64)
    assert read_json('["' + "[" * 100 + '", "\\"[[", 1]') == ["[" * 100, '"[[', 1]


def test_json_places():
    text = 'hm {"a": 1}</think>\n{"a": 2}'
    schema = {"properties": {"a": {"const": 2}}}
    assert JsonVerifier(schema)([""], [text]) == [0.0]
    assert JsonVerifier(schema, place="after_thinking")([""], [text]) == [1.0]
    tagged = '<answer>{"a": 1}</answer> no: <answer>\n{"a": 2}\n</answer> so'
    assert JsonVerifier(schema, place="tag")(["", ""], [tagged, text]) == [1.0, 0.0]


def test_json_schema_of_each_row():
    verify = JsonVerifier(column="schema", name="call")
    schemas = [{"type": "array"}, '{"type": "object"}', None]
    assert verify([""] * 3, ["[]", "[]", "[]"], schema=schemas) == [1.0, 0.0, None]
    with pytest.raises(ValueError, match="'typ' is not known"):
        verify([""], ["[]"], schema=[{"typ": "array"}])
    with pytest.raises(ValueError, match="no JSON"):
        verify([""], ["[]"], schema=["{"])
    with pytest.raises(ValueError, match="reads the column 'schema'"):
        verify([""], ["[]"])
    with pytest.raises(ValueError, match="not both"):
        JsonVerifier({}, column="schema")
    with pytest.raises(ValueError, match="place must be"):
        JsonVerifier(place="middle")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (True, ["1", "null"], []),
        (False, [], ["1", "null"]),
        ({"type": "integer"}, ["1", "1.0", "-3"], ["1.5", "true", '"1"', "null"]),
        ({"type": "number"}, ["1", "1.5e3"], ["false", '"1"']),
        ({"type": ["string", "null"]}, ['"a"', "null"], ["1", "[]"]),
        ({"type": "boolean"}, ["true"], ["1", "0"]),
        ({"const": 1}, ["1", "1.0"], ["true", '"1"']),
        ({"enum": [[1, {"a": False}], "x"]}, ['[1.0, {"a": false}]', '"x"'], ['[1, {"a": 0}]', "1"]),
        ({"minimum": 1, "exclusiveMaximum": 3}, ["1", "2.9", '"a"'], ["0.9", "3"]),
        ({"multipleOf": 0.1}, ["0.3", "7"], ["0.35"]),
        ({"minLength": 2, "maxLength": 3, "pattern": "^a"}, ['"aé"', "5"], ['"a"', '"aaaa"', '"ba"']),
        ({"items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, ["[1]", "{}"], ["[]", "[1, 2, 3]", '["a"]']),
        ({"prefixItems": [{"const": 1}], "items": False}, ["[]", "[1]"], ["[2]", "[1, 1]"]),
        (
            {"uniqueItems": True},
            ["[1, true]", '[{"a": 1}, {"a": 2}]'],
            ["[1, 1.0]", '[{"a": 1, "b": 2}, {"b": 2, "a": 1}]'],
        ),
        (
            {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
            ['{"a": 1}', "3"],
            ["{}", '{"a": 1, "b": 2}', '{"a": "1"}'],
        ),
        (
            {"additionalProperties": {"type": "null"}, "maxProperties": 1},
            ['{"x": null}'],
            ['{"x": 1}', '{"x": null, "y": null}'],
        ),
        ({"anyOf": [{"type": "null"}, {"minimum": 3}]}, ["null", "3", '"a"'], ["2"]),
        ({"oneOf": [{"minimum": 3}, {"maximum": 5}]}, ["2", "6"], ["4"]),
        ({"allOf": [{"minimum": 3}, {"maximum": 5}], "not": {"const": 4}}, ["3", "5"], ["2", "4"]),
        (
            {
                "$ref": "#/$defs/tree",
                "$defs": {
                    "tree": {
                        "type": "object",
                        "required": ["value"],
                        "additionalProperties": False,
                        "properties": {"value": {}, "left": {"$ref": "#/$defs/tree"}},
                    }
                },
            },
            ['{"value": 1}', '{"value": 1, "left": {"value": 2}}'],
            ['{"value": 1, "left": {}}', '{"value": 1, "left": {"value": 2, "left": 3}}'],
        ),
    ],
)
def test_schema(schema, good: list[str], bad: list[str]):
    """Expected verdicts are the standard's (JSON Schema 2020-12, validation); `0.3` as a multiple of `0.1` in
    decimals."""
    verify = JsonVerifier(schema)
    assert verify([""] * len(good), good) == [1.0] * len(good)
    assert verify([""] * len(bad), bad) == [0.0] * len(bad)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"requird": ["a"]}, "#/requird: 'requird' is not known"),
        ({"properties": {"a": {"format": "date"}}}, "#/properties/a/format"),
        ({"type": "int"}, "#/type cannot be 'int'"),
        ({"minLength": -1}, "#/minLength cannot be -1"),
        ({"pattern": "("}, "#/pattern"),
        ({"anyOf": []}, "#/anyOf"),
        ({"items": [{}]}, "#/items"),
        ({"$ref": "https://example.com/schema"}, "is not in"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}},
            "without end",
        ),
        ([], "neither an object"),
    ],
)
def test_schemas_that_are_refused(schema, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        Schema(schema)


def test_a_fault_is_located():
    schema = Schema({"properties": {"a": {"items": {"properties": {"b": {"type": "integer"}}}}}})
    with pytest.raises(JsonError, match=re.escape('$.a[1].b: does not meet type "integer"')):
        schema.check({"a": [{"b": 1}, {"b": "2"}]})


def test_json_attacks_on_time():
    """Each of these took quadratic or exponential time in a plain version: an unclosed string full of escapes, many
    repeated keys, a chain of levels each of which two branches look into, long keys in front of many values."""
    start = time.perf_counter()
    verify = JsonVerifier()
    assert verify([""], ['"' + '\\"' * 90_000]) == [0.0]
    assert verify([""], ["{" + ",".join(f'"{i}":0,"{i}":0' for i in range(9_000)) + "}"]) == [0.0]
    branch = {"properties": {"next": {"$ref": "#/$defs/n"}, "end": {"const": 1}}}
    two = Schema({"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [branch, {**branch, "minProperties": 1}]}}})
    with pytest.raises(JsonError):
        two.check(read_json('{"next":' * 60 + '{"end": 2}' + "}" * 60))
    long = '{"' + "k" * 90_000 + '": [' + ",".join("1" * 50_000) + "]}"
    Schema({"additionalProperties": {"items": {"type": "integer"}}}).check(read_json(long))
    assert time.perf_counter() - start < 5
