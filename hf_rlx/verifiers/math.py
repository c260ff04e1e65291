"""Mathematical answers: right only when shown to be equal, wrong within two seconds otherwise.

An answer goes through four gates. It is read whole or not at all (`latex`); what is too long, too deep or too large to
write down is refused unread; numbers are compared exactly in this process (`exact`, `compare`); only what is left,
roots and formulas, goes to SymPy in a process that is killed at its limit (`symbolic`, `workers`).
"""

from __future__ import annotations

import functools
import importlib.util
import math
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, get_args

from hf_rlx.verifiers.answers import HASH, Place, candidates, joint_boxes, option
from hf_rlx.verifiers.compare import ExactOnly, NeedsAlgebra, Rules, agree
from hf_rlx.verifiers.exact import TooLarge, exact
from hf_rlx.verifiers.latex import read
from hf_rlx.verifiers.latex_tokens import normalise
from hf_rlx.verifiers.latex_tree import Node, NotReadable
from hf_rlx.verifiers.text import Completion, column_of, completion_text, gold_column
from hf_rlx.verifiers.verdict import JudgedRows, Verdict
from hf_rlx.verifiers.workers import Outcome, WorkerPool

MAX_LENGTH = 2000
MAX_DEPTH = 50
MAX_HEIGHT = 150
"""Operations inside one another, `((1*2)*3)*4` has three; with more, walking the tree would exhaust Python's stack."""
MAX_TOWER = 2
_MAX_GOLD = 20_000
_STARVED = 0.1  # share of its limit in processor time below which a late job was not given a chance
_CACHE = 8192
_BRACKET = re.compile(r"\\?[()\[\]{}]")
_WORD = re.compile(r"\\text\{\s*([A-Za-z]{2,})\s*\}")
_BARE_UNIT = re.compile(r"(-?[\d.,/]*\d) +([mgshlLNJWVAKF])")
# Answers in several plain words. Other prose is no gold answer: nobody can tell what would be equal to it.
_PHRASES = {
    "no solution",
    "no solutions",
    "no real solution",
    "no real solutions",
    "does not exist",
    "not possible",
    "infinitely many",
    "infinitely many solutions",
    "cannot be determined",
    "none of the above",
    "all of the above",
}


@dataclass(frozen=True)
class _Read:
    """An answer as it was read.

    Args:
        text: without mark-up and spaces, for comparing as written.
        node: what it says.
        option: the letter that it names, of gold only; else "".
    """

    text: str
    node: Node
    option: str = ""


class MathVerifier(JudgedRows):
    """Reward function: 1.0 when a completion's final answer equals the gold answer, else 0.0.

    Understands integers, decimals, fractions, mixed and recurring numbers, percentages, thousands groups, units,
    number bases, ratios, expressions with roots and functions, equations, inequalities, intervals, sets, tuples,
    matrices, options and words, in LaTeX or plain text. Equal means equal: nothing is rounded unless `decimals` says
    so, a chain `a = b` counts only when both agree with gold, and an answer that offers several values is none.

    Usable from any thread; plugs into `reward_funcs` of our trainers and of TRL's.

    Args:
        extract: where the answer stands.

            - `"auto"`: the first that is there, of: `<answer>` tags, the key `answer` of a JSON object, the last box,
              after `####`, after "the answer is", the last formula or number, a text of a few words as a whole. What
              stands before `</think>` does not count.
            - `"boxed"`: the last `\\boxed{...}`; boxes with nothing but commas or "and" between are one answer.
            - `"hash"`: after the last `####`, to the end of the line.
            - `"answer_line"`: after the last "answer:", "answer is" or "A:", to the end of the sentence.
            - `"tag"`: in the last `<answer>...</answer>`.
            - `"last"`: the last formula or number; lenient, so right only for short answers.
            - `"whole"`: the completion is the answer and nothing else.
        column: dataset column with the gold answers: numbers, or text that is an answer, or a worked solution that
            ends in a box or in `#### 42`. None: `answer`, or `solution` where there is no `answer`.
        timeout: seconds that algebra on one answer may take.
        memory: bytes that it may take.
        units: "optional": 10 is right for 10 cm (10 m never is). "required": the units must be the same.
        bare_percent: 50 is right for 50%. Off, only what has the value 1/2 is.
        decimals: accept what is off by half a unit of this decimal at most, e.g. 2 takes 3.14 for pi.
        positive: variables stand for positive numbers, so sqrt(x^2) is x.
        max_failed: share of answers that our own failures may leave without a verdict before the run stops.
        name: name under which the scores are logged.

    Attributes:
        unparsable_gold: completions so far whose gold answer could not be read. They score None, so a broken row
            neither rewards nor punishes.

    `<name>/unparsable_gold` is logged beside `<name>/failed`.

    Raises:
        ValueError: for an unknown `extract` or `units`, negative `decimals`, or a `timeout` that is not positive.
        ImportError: SymPy is not installed.

    >>> MathVerifier()(["1/4 + 1/4?"], ["It is a half.\\n#### 0.5"], answer=["1/2"])
    [1.0]
    """

    def __init__(
        self,
        extract: Place = "auto",
        column: str | None = None,
        *,
        timeout: float = 2.0,
        memory: int = 2 << 30,
        units: str = "optional",
        bare_percent: bool = False,
        decimals: int | None = None,
        positive: bool = False,
        max_failed: float = 0.25,
        name: str = "math",
    ) -> None:
        if extract not in get_args(Place):
            raise ValueError(f"extract must be one of {list(get_args(Place))}, not {extract!r}.")
        if units not in ("optional", "required"):
            raise ValueError(f'units must be "optional" or "required", not {units!r}.')
        if timeout <= 0 or (decimals is not None and decimals < 0):
            raise ValueError(f"timeout must be positive and decimals not negative, got {timeout} and {decimals}.")
        if importlib.util.find_spec("sympy") is None:
            raise ImportError("MathVerifier needs SymPy: pip install sympy")
        self.extract = extract
        self.column = column
        self.timeout = timeout
        self.memory = memory
        self.rules = Rules(units, bare_percent, decimals, positive)  # type: ignore[arg-type]
        self.max_failed = max_failed
        self.unparsable_gold = 0
        self.__name__ = name
        self._known: dict[tuple[str, str], Verdict] = {}
        _pool(memory).start()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": {}}

    def _verdicts(self, completions: Sequence[Completion], columns: dict[str, Any]) -> list[Verdict]:
        golds = column_of(columns, gold_column(columns, self.column), len(completions), self.__name__)
        pairs = list(zip(map(completion_text, completions), golds, strict=True))
        with ThreadPoolExecutor(max(1, min(len(pairs), 8)), "math") as threads:  # they wait, children compute
            verdicts = [job() if callable(job) else job for job in [self._judge(*pair, threads) for pair in pairs]]
        self.unparsable_gold += _unread(verdicts)
        return verdicts

    def _more_metrics(self, verdicts: list[Verdict]) -> dict[str, float]:
        return {"unparsable_gold": float(_unread(verdicts))}

    def judge(self, completion: str, gold: Any) -> Verdict:
        """The verdict on one completion; gold as in the answer column."""
        found = self._judge(completion, gold)
        return found() if callable(found) else found

    def verify(self, gold: Any, answer: str) -> Verdict:
        """The verdict on a bare answer, which nothing is extracted from."""
        found = self._compare(gold, [answer], None)
        return found() if callable(found) else found

    def _judge(
        self, completion: str, gold: Any, threads: ThreadPoolExecutor | None = None
    ) -> Verdict | Callable[[], Verdict]:
        return self._compare(gold, candidates(completion, self.extract), threads)

    def _compare(
        self, gold: Any, found: list[str], threads: ThreadPoolExecutor | None
    ) -> Verdict | Callable[[], Verdict]:
        """The verdict, or where algebra is needed what waits for it."""
        try:
            decided = self._decided(gold, found)
        except Exception as error:  # what nobody foresaw costs this verdict, and the run where it happens often
            return Verdict("failed", f"{type(error).__name__}: {error}"[:200])
        if isinstance(decided, Verdict):
            return decided
        right, answer = decided
        key = (right.text, answer.text)
        if key in self._known:
            return self._known[key]
        if threads is None:
            return self._algebra(key, right, answer)
        return threads.submit(self._algebra, key, right, answer).result

    def _decided(self, gold: Any, found: list[str]) -> Verdict | tuple[_Read, _Read]:
        """The verdict, or (gold, answer) where it takes algebra."""
        right = _gold(gold)
        if isinstance(right, str):
            return Verdict("failed", f"{_UNREAD}: {right}", excused=True)
        answer = _answer(found, right)
        if isinstance(answer, Verdict):
            return answer
        if right.node == answer.node:  # braces aside as written, so nothing has to be worked out
            return Verdict("right", "equal as written")
        try:
            exact(answer.node)
            same = agree(right.node, answer.node, self.rules, ExactOnly(self.rules))
        except TooLarge as reason:
            return Verdict("wrong", f"refused: {reason}")
        except NeedsAlgebra:
            return right, answer
        return Verdict("right", "equal") if same else Verdict("wrong", "different")

    def _algebra(self, key: tuple[str, str], gold: _Read, answer: _Read) -> Verdict:
        if key not in self._known:
            job = {"gold": gold.node, "answer": answer.node, "rules": asdict(self.rules)}
            outcome = _pool(self.memory).run(job, self.timeout)
            if outcome.lost == "late" and outcome.cpu < _STARVED * self.timeout:
                outcome = _pool(self.memory).run(job, self.timeout)
            verdict = _verdict(outcome, self.timeout)
            if verdict.outcome == "failed":
                return verdict
            if len(self._known) >= _CACHE:
                self._known.clear()
            self._known[key] = verdict
        return self._known[key]


_UNREAD = "the gold answer cannot be read"
_POOLS: dict[int, WorkerPool] = {}
_GUARD = threading.Lock()


def _pool(memory: int) -> WorkerPool:
    """The workers of this process, one pool for all verifiers of the same limit."""
    with _GUARD:
        if memory not in _POOLS:
            _POOLS[memory] = WorkerPool(
                "hf_rlx.verifiers.symbolic:work", "hf_rlx.verifiers.symbolic:warm", memory=memory
            )
        return _POOLS[memory]


def _unread(verdicts: list[Verdict]) -> int:
    """How many have no verdict because of their gold answer. The data's fault, which must not stop a run."""
    return sum(v.reason.startswith(_UNREAD) for v in verdicts)


def _verdict(outcome: Outcome, timeout: float) -> Verdict:
    if outcome.lost == "late":
        if outcome.cpu < _STARVED * timeout:
            return Verdict("failed", f"only {outcome.cpu:.2f} s of processor time in {timeout:g} s")
        return Verdict("wrong", f"not decided in {timeout:g} s")
    if outcome.lost == "crashed":
        return Verdict("wrong", f"the comparison crashed ({outcome.how})")
    if outcome.lost == "broken":
        return Verdict("failed", f"the worker was lost twice ({outcome.how})")
    if "gold" in outcome.value:
        return Verdict("failed", f"{_UNREAD}: {outcome.value['gold']}", excused=True)
    if outcome.value["equal"]:
        return Verdict("right", "equal by algebra")
    return Verdict("wrong", outcome.value.get("reason", "different by algebra"))


def _gold(value: Any) -> _Read | str:
    """The gold answer as read, or why it cannot be."""
    if isinstance(value, bool) or value is None:
        return f"{value!r} is no answer"
    if isinstance(value, Fraction):
        value = f"{value.numerator}/{value.denominator}"
    if isinstance(value, Decimal | float) and not math.isfinite(value):
        return f"{value} is no number"
    if isinstance(value, list | tuple | dict | set):
        return f"a {type(value).__name__} is no answer"
    return _gold_text(str(value))


@functools.lru_cache(maxsize=4096)  # a group's completions share it
def _gold_text(text: str) -> _Read | str:
    if len(text) > _MAX_GOLD:
        return "too long"
    if (content := joint_boxes(text)) is not None:
        text = content
    elif tails := HASH.findall(text):
        text = tails[-1]
    text = normalise(text)
    if bare := _BARE_UNIT.fullmatch(text):
        text = f"{bare[1]} \\text{{{bare[2]}}}"
    letter, rest = option(text) or ("", "")
    text = rest or letter or text
    if _depth(text) > MAX_DEPTH:
        return "nested too deeply"
    try:
        node = read(text)
    except (NotReadable, RecursionError) as error:
        return str(error)
    if _height(node) > MAX_HEIGHT:
        return "nested too deeply"
    if node.kind == "text" and "\\" not in text and " " in node.text and node.text.casefold() not in _PHRASES:
        return "prose"
    return _Read(_plain(text), node, letter)


def _chosen(text: str, gold: _Read) -> str | Verdict:
    """What an answer says beside the option that it names, or the verdict where the option decides."""
    letter, rest = option(text) or ("", "")
    if not letter or not (gold.option or (rest and not re.search(r"[A-J]", gold.text))):
        return text
    if gold.option and letter != gold.option:
        return Verdict("wrong", "another option")
    if not rest or gold.text == gold.option:
        return Verdict("right", "the option")
    return rest


def _answer(found: list[str], gold: _Read) -> _Read | Verdict:
    """The first candidate that can be read; a verdict where it is equal as written, refused, or there is none."""
    reason = "no answer found"
    for text in found:
        if len(text) > MAX_LENGTH + len(gold.text):
            return Verdict("wrong", f"refused: {len(text)} characters")
        text = normalise(text)
        plain = _plain(text)
        worded = _WORD.fullmatch(plain)
        if plain == gold.text or _same_word(worded[1] if worded else plain, gold.text, worded is not None):
            return Verdict("right", "equal as written")
        if gold.node.kind == "mul" and _is_word(gold.text) and plain.isalpha():
            return Verdict("wrong", "another word")
        chosen = _chosen(text, gold)
        if isinstance(chosen, Verdict):
            return chosen
        if chosen != text:
            text, plain = chosen, _plain(chosen)
        if len(text) > MAX_LENGTH:
            return Verdict("wrong", f"refused: {len(text)} characters")
        if _depth(text) > MAX_DEPTH:
            return Verdict("wrong", "refused: nested too deeply")
        try:
            node = read(text)
        except NotReadable as error:
            reason = f"not readable: {error}"
            continue
        except RecursionError:
            return Verdict("wrong", "refused: nested too deeply")
        if _height(node) > MAX_HEIGHT:
            return Verdict("wrong", "refused: nested too deeply")
        if _tower(node) > MAX_TOWER:
            return Verdict("wrong", "refused: a tower of powers")
        return _Read(plain, node)
    return Verdict("wrong", reason)


def _same_word(said: str, gold: str, worded: bool) -> bool:
    """`Red` and, in words' mark-up, any case of it is red; without it small letters are a product of variables."""
    if not gold.isalpha():
        return False
    if worded:
        return said == gold or (len(said) > 2 and said.casefold() == gold.casefold())
    return len(said) > 2 and said == gold.capitalize()


def _is_word(text: str) -> bool:
    """`red` is a word, `abc` and `xyz` are products of variables: letters of a product stand in order."""
    return len(text) > 2 and text.isalpha() and re.search("[aeiou]", text) is not None and list(text) != sorted(text)


def _plain(text: str) -> str:
    """Without spaces, except those that keep two numbers or words apart."""
    return re.sub(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])", "", text)


def _depth(text: str) -> int:
    depth = deepest = 0
    for match in _BRACKET.finditer(text):
        depth += 1 if match.group()[-1] in "([{" else -1
        deepest = max(deepest, depth)
    return deepest


def _height(node: Node) -> int:
    """Levels of the tree, counted without recursion."""
    height, level = 0, [node]
    while level := [part for each in level for part in each.parts]:
        height += 1
    return height


def _tower(node: Node) -> int:
    """How many exponents stand on one another: 2 in a^(b^c)."""
    heights = [_tower(part) for part in node.parts]
    if node.kind == "pow":
        return max(heights[0], heights[1] + 1)
    return max(heights, default=0)
