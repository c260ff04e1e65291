"""Shaping: penalties and small rewards for how a completion is written. None of them knows what is right.

Each is a weak signal that a policy can satisfy alone, so put it beside a verifier with a small weight, or use it as
the condition of a gate (`hf_rlx.verifiers.combine`).
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence
from typing import Any, Literal

from hf_rlx.verifiers.patterns import bounded, is_cheap, spec
from hf_rlx.verifiers.text import Completion, column_of, completion_text

_LIMIT = 1.0  # seconds for the expression of what a script verifier ignores

Unit = Literal["tokens", "words", "characters"]


def _units(unit: Unit, completions: list[Completion], columns: dict[str, Any], name: str) -> list[Sequence[Any]]:
    """Each completion as tokens, words or characters.

    Raises:
        ValueError: tokens are asked for and `completion_ids` is missing or of another length.
    """
    if unit == "tokens":
        return list(column_of(columns, "completion_ids", len(completions), name))
    texts = [completion_text(completion) for completion in completions]
    return [text.split() for text in texts] if unit == "words" else list(texts)


def _check_unit(unit: str) -> None:
    if unit not in ("tokens", "words", "characters"):
        raise ValueError(f"unit must be 'tokens', 'words' or 'characters', not {unit!r}")


class _Counted:
    """Base of penalties that follow from a completion's tokens, words or characters; what differs is `_penalty`."""

    __name__: str
    unit: Unit

    def __call__(self, prompts: list[Completion], completions: list[Completion], **columns: Any) -> list[float]:
        """One penalty a completion, in -1..0.

        Args:
            prompts: not read; part of the reward-function contract.
            completions: plain strings, or message lists whose last assistant message is judged.
            columns: `completion_ids` is read where tokens are counted.

        Raises:
            ValueError: `completion_ids` is missing or of another length.
        """
        return [self._penalty(units) for units in _units(self.unit, completions, columns, self.__name__)]

    def _penalty(self, units: Sequence[Any]) -> float:
        raise NotImplementedError(f"{type(self).__name__} does not say how it counts")


class LengthPenalty(_Counted):
    """Reward function: 0 up to a length, falling in a line to -1 at a second one, and -1 beyond.

    The soft overlong punishment of DAPO (Yu et al. 2025, arXiv 2503.14476, eq. 13), whose `L_max` is `hard` and whose
    `L_cache` is `hard - soft`. Unlike a reward for being short it leaves every completion below `soft` alone.

    Args:
        soft: the longest completion without a penalty.
        hard: the shortest one with the full penalty, which is 1.
        unit: "tokens" reads `completion_ids`, which trainers pass; "words" and "characters" read the text.
        name: name under which scores are logged.

    Raises:
        ValueError: not 0 <= soft < hard, or an unknown unit.

    >>> LengthPenalty(1, 3, unit="words")(["?", "?"], ["a", "a b"])
    [0.0, -0.5]
    """

    def __init__(self, soft: int, hard: int, *, unit: Unit = "tokens", name: str = "length") -> None:
        if not 0 <= soft < hard:
            raise ValueError(f"0 <= soft < hard is needed, not {soft} and {hard}")
        _check_unit(unit)
        self.soft, self.hard, self.unit = soft, hard, unit
        self.__name__ = name

    def _penalty(self, units: Sequence[Any]) -> float:
        over = max(0, len(units) - self.soft) / (self.hard - self.soft)
        return 0.0 - min(1.0, over)


class RepetitionPenalty(_Counted):
    """Reward function: minus the share of n-grams that repeat an earlier one, in -1..0.

    `-(1 - different / all)` over the n-grams of a completion (Yeo et al. 2025, "Demystifying Long Chain-of-Thought
    Reasoning", arXiv 2502.03373, appendix C.2); 0 for a completion of fewer than n units. It is the measure of the
    whole completion: a loop at the end of a long text weighs little, and right answers repeat themselves too (a list,
    a table), so keep the weight small.

    Args:
        n: units in an n-gram.
        unit: "tokens" reads `completion_ids`, as in the paper; "words" are lower-cased and split at spaces, which
            languages without spaces do not have.
        name: name under which scores are logged.

    Raises:
        ValueError: n below 1, or an unknown unit.

    >>> RepetitionPenalty(1, unit="words")(["?", "?"], ["a b", "a a"])
    [0.0, -0.5]
    """

    def __init__(self, n: int = 3, *, unit: Unit = "tokens", name: str = "repetition") -> None:
        if n < 1:
            raise ValueError(f"n must be at least 1, not {n}")
        _check_unit(unit)
        self.n, self.unit = n, unit
        self.__name__ = name

    def _penalty(self, units: Sequence[Any]) -> float:
        if self.unit == "words":
            units = [word.lower() for word in units]
        total = len(units) - self.n + 1
        if total < 1:
            return 0.0
        different = len({tuple(units[i : i + self.n]) for i in range(total)})
        return (different - total) / total


class EosRequired:
    """Reward function: 1.0 for a completion that the model ended itself, 0.0 for one that was cut off.

    Reward functions see no flag for it, but trainers (ours and TRL's) pass `completion_ids`, which end with the
    end-of-sequence token exactly where the model wrote it; the prompt is no part of them. The text shows nothing:
    special tokens are left out of it.

    Args:
        eos_token_id: the token that ends a completion, or several: a chat model often has two
            (`tokenizer.eos_token_id` and those of `model.generation_config.eos_token_id`).
        name: name under which scores are logged.

    Raises:
        ValueError: no token.

    >>> EosRequired(2)(["?", "?"], ["a", "a"], completion_ids=[[5, 2], [5, 5]])
    [1.0, 0.0]
    """

    def __init__(self, eos_token_id: int | Sequence[int], *, name: str = "ended") -> None:
        self.eos = {eos_token_id} if isinstance(eos_token_id, int) else set(eos_token_id)
        if not self.eos:
            raise ValueError("EosRequired needs the id of at least one end-of-sequence token")
        self.__name__ = name

    def __call__(self, prompts: list[Completion], completions: list[Completion], **columns: Any) -> list[float]:
        """One score a completion, 1.0 or 0.0.

        Args:
            prompts: not read; part of the reward-function contract.
            completions: not read.
            columns: `completion_ids`, token ids of each completion, without padding.

        Raises:
            ValueError: `completion_ids` is missing or of another length.
        """
        ids = column_of(columns, "completion_ids", len(completions), self.__name__)
        return [float(len(row) > 0 and int(row[-1]) in self.eos) for row in ids]


class ScriptVerifier:
    """Reward function: the share of a completion's letters that belong to given scripts, in 0..1.

    The language consistency reward of DeepSeek-R1 (arXiv 2501.12948, section 2.3.2) counts words of a language; this
    counts letters of a script, which needs no model and cannot be argued with. Its limits: it tells English from
    Chinese or Russian, not English from French; letters in formulas, code and names count like all others (`ignore`
    takes them out, and then hides what a policy writes there); few wrong words in a long text cost little.

    Letters are Unicode's category L after compatibility normalisation (NFKC, so full-width Latin is Latin), and a
    letter belongs to a script when its Unicode name starts with it: "LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW",
    "DEVANAGARI", "HANGUL", "HIRAGANA", "KATAKANA", "CJK", ...

    Args:
        scripts: one, or several that count alike, as `("HIRAGANA", "KATAKANA", "CJK")` for Japanese.
        threshold: None pays the share; else 1.0 from this share on and 0.0 below.
        no_letters: score of a completion without letters (`42`); None, no verdict, by default.
        ignore: regular expression of what is not counted, e.g. "(?s)```.*?```" for blocks of code. A completion on
            which it takes more than a second scores 0.
        name: name under which scores are logged.

    Raises:
        ValueError: a script that no letter has, or a threshold outside 0..1.
        re.error: `ignore` does not compile.

    >>> ScriptVerifier("LATIN")(["?", "?"], ["abc", "漢字"])
    [1.0, 0.0]
    """

    def __init__(
        self,
        scripts: str | Sequence[str] = "LATIN",
        *,
        threshold: float | None = None,
        no_letters: float | None = None,
        ignore: str | re.Pattern[str] | None = None,
        name: str = "language",
    ) -> None:
        self.scripts = tuple(s.upper() for s in ([scripts] if isinstance(scripts, str) else scripts))
        if unknown := set(self.scripts) - _known_scripts():
            raise ValueError(f"no letter belongs to the scripts {sorted(unknown)}")
        if not self.scripts or not (threshold is None or 0 <= threshold <= 1):
            raise ValueError(f"needs at least one script, and a threshold in 0..1, not {threshold}")
        self.threshold = threshold
        self.no_letters = no_letters
        self.ignore = re.compile(ignore) if ignore is not None else None
        self.__name__ = name

    def __call__(self, prompts: list[Completion], completions: list[Completion], **columns: Any) -> list[float | None]:
        """One score a completion, or `no_letters`.

        Args:
            prompts: not read; part of the reward-function contract.
            completions: plain strings, or message lists whose last assistant message is judged.
            columns: not read.
        """
        texts = [completion_text(completion) for completion in completions]
        if self.ignore is None:
            return [self._score(text) for text in texts]
        kept = bounded("sub", spec(self.ignore), texts, _LIMIT, is_cheap(self.ignore, texts))
        return [self._score(text) if lost is None else lost.reward for text, lost in kept]

    def _score(self, text: str) -> float | None:
        found = [script for char in unicodedata.normalize("NFKC", text) if (script := _script(char))]
        if not found:
            return self.no_letters
        share = sum(script in self.scripts for script in found) / len(found)
        return share if self.threshold is None else float(share >= self.threshold)


@functools.lru_cache(maxsize=1 << 16)
def _script(char: str) -> str:
    """First word of a letter's name, which is its script; "" for what is no letter."""
    if not unicodedata.category(char).startswith("L"):
        return ""
    return re.split(r"[ -]", unicodedata.name(char, "UNNAMED"), maxsplit=1)[0]


@functools.cache
def _known_scripts() -> frozenset[str]:
    return frozenset(_script.__wrapped__(chr(code)) for code in range(0x30000)) - {"", "UNNAMED"}
