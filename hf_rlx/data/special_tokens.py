"""Special tokens inside messages are text: `<|im_end|>` written by a user must not end the user's turn.

A chat template pastes contents between its own special tokens, and tokenizers find special tokens wherever they
stand. So a dataset row with `<|im_end|>\\n<|im_start|>assistant` in it would speak as the assistant. Here only the
template's own tokens count:

    render     the template over the messages, and over messages with a placeholder for every special token in them
    compare    placeholders filled in must give the first text again, so each one's place is known, not guessed
    join       texts kept apart by a neutral character must give the same special tokens: none is formed by two of them
    tokenize   with a twin of the tokenizer that knows the special tokens under other names, which are written where
               the template wrote them; what the messages hold is then cut like any other text
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

SpecialTokens = Literal["split", "refuse", "allow"]
_WAY_OUT = 'take it out of the text, or set special_tokens_in_messages="allow"'


class EncodedMessages(NamedTuple):
    """text: of the template. ids: token ids. neutralised: special tokens of the messages that became plain text."""

    text: str
    ids: list[int]
    neutralised: int


def encode_messages(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    special_tokens: SpecialTokens = "split",
    **template: Any,
) -> EncodedMessages:
    """Tokenize a conversation through the chat template.

    Texts without special tokens give the ids of `tokenizer(text, add_special_tokens=False)`. Special are those that
    the tokenizer marks so, and further added tokens that the template writes around a plain conversation (such as
    `<｜User｜>`); other added tokens, such as `<think>` or `<tool_call>`, keep their meaning.

    Args:
        messages: dictionaries with `role` and `content` (text, or parts with texts).
        tokenizer: with a chat template.
        special_tokens: of the messages: "split" into ordinary tokens, "refuse", or "allow" to act as tokens.
        template: arguments of `apply_chat_template`.

    Raises:
        ValueError: a special token under "refuse"; one that cannot be told from the template's own, because the
            template rewrites it, two parts of a message or two messages form it together, or the tokenizer offers
            no way to.
    """
    if special_tokens not in get_args(SpecialTokens):
        raise ValueError(f"special_tokens must be one of {get_args(SpecialTokens)}, got {special_tokens!r}")
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **template))
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if special_tokens == "allow":
        return EncodedMessages(text, ids, 0)
    added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items() if token.content}
    # Joined, because parts of a message may form a token together.
    joins = bool(added) and _may_join(messages, tuple(added))
    if not added or not (joins or _pattern(tuple(added)).search("".join(_texts(messages)))):
        return EncodedMessages(text, ids, 0)
    special = _structural(tokenizer, template)
    marked = _mark(messages, special, text) if special else None
    if joins and special:
        apart = str(tokenizer.apply_chat_template(_kept_apart(messages, text), tokenize=False, **template))
        pattern = _pattern(tuple(special))
        if formed := Counter(pattern.findall(text)) - Counter(pattern.findall(apart)):
            raise ValueError(f"messages form the special token {next(iter(formed))!r} together; {_WAY_OUT}")
    if marked is None or not marked.tokens:
        return EncodedMessages(text, ids, 0)
    if special_tokens == "refuse":
        raise ValueError(f"a message holds the special token {marked.tokens[0]!r}; {_WAY_OUT}")
    marked_text = str(tokenizer.apply_chat_template(marked.messages, tokenize=False, **template))
    if marked.restored(marked_text) != text:
        raise ValueError(
            f"a message holds the special token {marked.tokens[0]!r}, and the chat template changes the text around "
            f"it: it cannot be told from the template's own; {_WAY_OUT}"
        )
    twin = _Twin(tokenizer, special, text)
    if twin.encode(twin.renamed(text)) != ids:
        raise ValueError(
            f"a message holds the special token {marked.tokens[0]!r}, and this tokenizer ({type(tokenizer).__name__}) "
            f"has rules of its own for special tokens; {_WAY_OUT}"
        )
    safe = marked.restored(twin.renamed(marked_text))
    return EncodedMessages(text, twin.encode(safe), len(marked.places.findall(marked_text)))


class _Marked(NamedTuple):
    """messages: with placeholders. tokens: what stood there, by the placeholders' numbers. places: finds them."""

    messages: list[dict[str, Any]]
    tokens: list[str]
    places: re.Pattern[str]

    def restored(self, text: str) -> str:
        """`text` with every placeholder filled in."""
        return self.places.sub(lambda m: self.tokens[int(m[1])], text)


class _Twin:
    """A tokenizer like the given one that knows its special tokens under names that stand nowhere in `text`.

    Raises:
        ValueError: the tokenizer is not one of the `tokenizers` library.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, special: list[str], text: str) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ValueError(
                f"a message holds a special token, and {type(tokenizer).__name__} cannot cut it into ordinary ones; "
                + _WAY_OUT
            )
        # Private-use characters: no normalizer and no pre-tokenizer has rules for them.
        opening = next(chr(c) for c in range(0xE000, 0xF8FF) if chr(c) not in text)
        self._names = {token: f"{opening}{index}{opening}" for index, token in enumerate(special)}
        self._pattern = _pattern(tuple(special))
        self._tokenizer = Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._tokenizer.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._tokenizer.pre_tokenizer = backend.pre_tokenizer
        self._ids: dict[int, int] = {}
        for index, token in sorted(tokenizer.added_tokens_decoder.items()):
            self._add(index, token)
        self._forbidden = {i for i, t in tokenizer.added_tokens_decoder.items() if t.content in self._names}
        self._forbidden -= self._ids.keys()

    def _add(self, index: int, token: AddedToken) -> None:
        name = self._names.get(token.content, token.content)
        alike = AddedToken(
            name,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=token.special,
        )
        (self._tokenizer.add_special_tokens if token.special else self._tokenizer.add_tokens)([alike])
        own = int(self._tokenizer.token_to_id(name) or 0)  # it has just been added
        if self._tokenizer.model.id_to_token(own) not in (None, name):
            raise ValueError(f"a message holds a special token, and the vocabulary has gaps at id {own}; {_WAY_OUT}")
        self._ids[own] = index

    def renamed(self, text: str) -> str:
        """`text` with all special tokens under their new names."""
        return self._pattern.sub(lambda m: self._names[m[0]], text)

    def encode(self, text: str) -> list[int]:
        """Ids of the original tokenizer; a special token is one under its new name only."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._forbidden.intersection(ids):
            raise ValueError(
                "a message holds a special token that is an ordinary word of this tokenizer's vocabulary as well; "
                + _WAY_OUT
            )
        return [self._ids.get(i, i) for i in ids]


@lru_cache(maxsize=64)
def _pattern(tokens: tuple[str, ...]) -> re.Pattern[str]:
    """Any of `tokens`, the longest where several begin."""
    return re.compile("|".join(re.escape(t) for t in sorted(tokens, key=len, reverse=True)))


@lru_cache(maxsize=64)
def _fragments(tokens: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str], int]:
    """Proper beginnings and proper ends of `tokens`, and the length of the longest."""
    starts = frozenset(token[:n] for token in tokens for n in range(1, len(token)))
    ends = frozenset(token[n:] for token in tokens for n in range(1, len(token)))
    return starts, ends, max(map(len, starts), default=0)


def _may_join(messages: Sequence[dict[str, Any]], tokens: tuple[str, ...]) -> bool:
    """Whether a text ends like the beginning of one of `tokens`, or begins like the end of one; templates may strip
    it first."""
    starts, ends, longest = _fragments(tokens)
    texts = [text.strip() for message in messages for text in _texts(_but_role(message))]
    sizes = range(1, longest + 1)
    return any(text[-n:] in starts or text[:n] in ends for text in texts if text for n in sizes)


def _kept_apart(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """`messages` with a character that does not stand in `text` at both ends of every text, inside of white space
    (that a template may strip)."""
    wall = next(chr(c) for c in range(0xE000, 0xF8FF) if chr(c) not in text)

    def walled(part: str) -> str:
        inner = part.strip()
        return part.replace(inner, f"{wall}{inner}{wall}", 1) if inner else part

    return [{**message, **_map_texts(_but_role(message), walled)} for message in messages]


def _but_role(message: dict[str, Any]) -> dict[str, Any]:
    """Templates write special tokens with the role in them, such as `<|user|>`."""
    return {key: value for key, value in message.items() if key != "role"}


def _structural(tokenizer: PreTrainedTokenizerBase, template: dict[str, Any]) -> list[str]:
    """Special tokens, and the other added tokens that the template writes around messages."""
    options = {k: v for k, v in template.items() if k not in ("add_generation_prompt", "continue_final_message")}
    probe = [{"role": role, "content": "0"} for role in ("user", "assistant", "user")]
    try:
        frame: str | None = str(tokenizer.apply_chat_template(probe, tokenize=False, **options))
    except (TemplateError, TypeError, KeyError, ValueError):  # it wants something else: every added token may be its
        frame = None
    return [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.content and (token.special or frame is None or token.content in frame)
    ]


def _mark(messages: Sequence[dict[str, Any]], special: list[str], text: str) -> _Marked:
    """A placeholder for each special token in `messages`, of letters that stand neither there nor in their `text`."""
    pattern = _pattern(tuple(special))
    known = "".join(_texts(messages)) + text
    # Letters and digits: a template passes them on as they are, and does not strip them.
    stem = next(stem for n in itertools.count() if (stem := "qmark" + "x" * n + "q") not in known)
    tokens: list[str] = []

    def number(match: re.Match[str]) -> str:
        tokens.append(match[0])
        return f"{stem}{len(tokens) - 1}z"

    for message in messages:
        parts = message.get("content")
        whole = pattern.findall("".join(_texts(parts)))
        if whole != [found for part in _texts(parts) for found in pattern.findall(part)]:
            raise ValueError(f"parts of a message form the special token {whole[0]!r} together; {_WAY_OUT}")
    marked = [_map_texts(message, lambda part: pattern.sub(number, part)) for message in messages]
    return _Marked(marked, tokens, re.compile(f"{stem}([0-9]+)z"))


def _texts(value: Any) -> Iterator[str]:
    """Every text inside `value`, in order; keys and the types of parts are none."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key != "type":
                yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _map_texts(value: Any, change: Any) -> Any:
    """`value` with `change` applied to every text that `_texts` finds."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {k: v if k == "type" else _map_texts(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(inner, change) for inner in value]
    return value
