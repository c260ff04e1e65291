"""Countdown and Nim: exact rules, and what a policy would try against them; puzzles by name."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import time
from fractions import Fraction

import pytest

from hf_rlx.verifiers.countdown import CountdownVerifier, ExpressionError, parse_expression, stated_expression
from hf_rlx.verifiers.nim import Nim, NimVerifier, read_moves
from hf_rlx.verifiers.puzzles import PuzzleVerifier

# Countdown: expressions


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("7", 7, (7,)),
        ("1+2*3", 7, (1, 2, 3)),
        ("(1 + 2) * 3", 9, (1, 2, 3)),
        ("8-3-2", 3, (8, 3, 2)),  # from the left
        ("8/4/2", 1, (8, 4, 2)),
        ("8/(3-8/3)", 24, (8, 3, 8, 3)),  # 8 / (1/3), where floats give 23.999999999999996
        ("1/3", Fraction(1, 3), (1, 3)),
        ("12", 12, (12,)),  # not a 1 and a 2
        ("007", 7, (7,)),
        ("((((5))))", 5, (5,)),
        ("\t3 -\t5 ", -2, (3, 5)),
    ],
)
def test_expressions(text: str, value, numbers: tuple[int, ...]):
    said = parse_expression(text)
    assert (said.value, said.numbers) == (value, numbers)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a number is missing before 'the end'"),
        ("1+", "a number is missing before 'the end'"),
        ("-1", "a number is missing before '-'"),  # no signs
        ("+1", "a number is missing"),
        ("3--1", "a number is missing before '-'"),
        ("2*-1", "a number is missing"),
        ("2**3", "a number is missing before '*'"),  # no powers
        ("7//2", "a number is missing before '/'"),
        ("2^3", "'^3' is no"),
        ("7%4", "'%4' is no"),
        ("1 2", "an operator is missing before '2'"),
        ("2(3)", "an operator is missing before '('"),
        ("(2)(3)", "an operator is missing before '('"),
        ("(1+2", "a parenthesis is not closed"),
        ("1+2)", "an operator is missing before ')'"),
        ("()", "a number is missing before ')'"),
        ("[1+2]", "'[1+2]' is no"),
        ("1/0", "division by zero"),
        ("5/(3-3)", "division by zero"),
        ("0/0", "division by zero"),
        ("1.5+2", "'.5+2' is no"),
        ("1e3", "'e3' is no"),
        ("0x10", "'x10' is no"),
        ("1_0", "'_0' is no"),
        ("3!", "'!' is no"),
        ("sqrt(4)", "'sqrt(4)' is no"),
        ("1+2#+3", "'#+3' is no"),  # comments
        ("1+2\n+3", "'+3' is no"),  # more lines
        ("__import__('os').getpid()", "is no number"),
        ("٣+4", "is no number"),  # digits of other alphabets
        ("\N{SUPERSCRIPT TWO}+1", "is no number"),
        ("\N{FULLWIDTH DIGIT ONE}+1", "is no number"),
        ("1\N{NO-BREAK SPACE}+1", "is no number"),
        ("9999999999+1", "is no number"),  # ten digits
        ("(" * 31 + "1" + ")" * 31, "more than 30 parentheses"),
        ("1" + "+1" * 150, "301 characters"),
    ],
)
def test_what_is_no_expression(text: str, message: str):
    with pytest.raises(ExpressionError) as found:
        parse_expression(text)
    assert message in str(found.value)


def test_one_minus_before_an_operand_where_signs_are_allowed():
    for text, value in (("-3 + 5", 2), ("2*-3", -6), ("-(1-3)", 2), ("-2*3", -6), ("3--1", 4)):
        assert parse_expression(text, signs=True).value == value
    for text in ("--3", "+3", "3---1", "-"):
        with pytest.raises(ExpressionError, match="a number is missing"):
            parse_expression(text, signs=True)
    assert CountdownVerifier(signs=True).judge("-3 + 5", [3, 5], 2).outcome == "right"
    assert CountdownVerifier().judge("-3 + 5", [3, 5], 2).outcome == "wrong"


def test_expressions_agree_with_pythons_own():
    """300 random ones of this grammar, evaluated by Python with every number as a Fraction."""
    rng = random.Random(0)

    def expression(depth: int) -> str:
        if depth == 0 or rng.random() < 0.3:
            return str(rng.randint(0, 20))
        text = f"{expression(depth - 1)} {rng.choice('+-*/')} {expression(depth - 1)}"
        return f"({text})" if rng.random() < 0.5 else text

    for _ in range(300):
        text = expression(4)
        try:
            expected = eval(_fractions(text), {"Fraction": Fraction})
        except ZeroDivisionError:
            expected = None
        if expected is None:
            with pytest.raises(ExpressionError, match="division by zero"):
                parse_expression(text)
        else:
            assert parse_expression(text).value == expected, text


def _fractions(text: str) -> str:
    return re.sub(r"\d+", lambda match: f"Fraction({match.group()})", text)


# Countdown: answers


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("1+2", "1+2"),
        ("I think 3*4. Then\nAnswer: 1+2", "1+2"),
        ("**Answer:** 1 + 2.", "1 + 2"),
        ("Answer: **1 + 2**", "1 + 2"),
        ("Answer: 3\nno, answer: 1+2\n", "1+2"),
        ("Answer: 4</think>1+2", "1+2"),
        ("<answer>3</answer> hm <answer> 1+2 </answer> ok", "1+2"),
        (r"so $\boxed{(8 \div 2) \times 3 \cdot 1}$", "(8 / 2) * 3 * 1"),
        ("3 \N{MULTIPLICATION SIGN} 4 ÷ 2 \N{MINUS SIGN} 1", "3 * 4 / 2 - 1"),
        ("$1+2$", "1+2"),
        ("2**3", "2**3"),
        ("", ""),
    ],
)
def test_stated_expression(completion: str, text: str):
    assert stated_expression(completion) == text


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("(6 - 2) * 6 * 1", "the target"),
        ("6*(6-2)*1 = 24", "the target"),
        ("1*6*(6-2) = 25", "24 is said to be 25"),
        ("1*6*(6-2) = 4*6", "24 is said to be 4*6"),
        ("6*(6-2)", "1 is not used"),
        ("6*6-12*1", "12 is not given, or not that often"),  # 1 and 2 do not make 12
        ("6*6-6-6*1", "6 is not given, or not that often"),  # twice only
        ("24", "24 is not given, or not that often"),
        ("6+6+2+1", "the value is 15"),
        ("6*(6-2)*1 or 7", "'or 7' is no number"),
        ("I cannot", "is no number"),
        ("6*(6-2)*1 # 5", "'# 5' is no number"),
        ("Answer: 6*(6-2)*1\nAnswer: 1", "2 is not used"),  # the last answer is the answer
        ("6/(1-1)", "division by zero"),
        ("(" * 10_000, "10000 characters"),
        ("9" * 100_000, "characters"),
    ],
)
def test_countdown(completion: str, reason: str):
    """From 1, 2, 6, 6 make 24: 6 * (6 - 2) * 1."""
    verdict = CountdownVerifier().judge(completion, [1, 2, 6, 6], 24)
    assert reason in verdict.reason
    assert verdict.outcome == ("right" if reason == "the target" else "wrong")


def test_countdown_at_most_once():
    verify = CountdownVerifier(every_number=False)
    columns = {"numbers": [[1, 2, 6, 6]] * 4, "target": [24] * 4}
    texts = ["6*(6-2)", "6*(6-2)*1", "6*(6-2)*1*1", "24"]
    assert verify([], texts, **columns) == [1.0, 1.0, 0.0, 0.0]


def test_countdown_as_a_reward_function():
    """Messages, reasons, and rows of another task, which have no verdict and stop nothing."""
    logged: dict[str, object] = {}
    messages = [[{"role": "assistant", "content": "Answer: 3-1"}]] * 3
    verify = CountdownVerifier()
    columns = {"numbers": [[1, 3], None, None], "target": [2, None, None]}
    scores = verify(["p"] * 3, messages, log_extra=logged.__setitem__, log_metric=logged.__setitem__, **columns)
    assert scores == [1.0, None, None]
    assert logged == {
        "countdown/reason": ["the target", "the row holds no puzzle", "the row holds no puzzle"],
        "countdown/failed": 2.0,
    }
    with pytest.raises(ValueError, match="reads the column 'target'"):
        verify([], ["1"], numbers=[[1]])


def test_countdown_against_all_small_expressions():
    """Every way to write three of the numbers 2, 3, 4 with two operators: right exactly when it uses each once and
    Python's Fractions give 10."""
    verify = CountdownVerifier()
    right = 0
    for a, b, c in itertools.product((2, 3, 4), repeat=3):
        for p, q in itertools.product("+-*/", repeat=2):
            for text in (f"({a}{p}{b}){q}{c}", f"{a}{p}({b}{q}{c})"):
                try:
                    value = eval(_fractions(text), {"Fraction": Fraction})
                except ZeroDivisionError:
                    value = None
                expected = value == 10 and sorted((a, b, c)) == [2, 3, 4]
                assert (verify.judge(text, [2, 3, 4], 10).outcome == "right") == expected, text
                right += expected
    assert right == 6  # 2*3+4, 3*2+4, 4+2*3, 4+3*2, 3*4-2, 4*3-2


# Nim: rules


@functools.cache
def wins(piles: tuple[int, ...]) -> bool:
    """By the rules alone: a position is won where some move leads to a lost one."""
    game = Nim(piles)
    return any(not wins(game.play(move).piles) for move in game.legal_moves())


def test_optimal_play_is_optimal():
    """All 5^3 positions of three piles up to 4: the exclusive or against the search, and the opponent's move."""
    for piles in itertools.product(range(5), repeat=3):
        game = Nim(piles)
        assert game.winning == wins(piles)
        if not game.over:
            move = game.best_move()
            assert move in game.legal_moves()
            assert wins(game.play(move).piles) != wins(piles) or not wins(piles)


def test_rules():
    game = Nim.read("3 0 5")
    assert str(game) == "3 0 5"
    assert game.legal_moves() == [(0, 1), (0, 2), (0, 3), (2, 1), (2, 2), (2, 3), (2, 4), (2, 5)]
    assert game.play((2, 2)) == Nim((3, 0, 3))
    assert game.best_move() == (2, 2)  # 3 xor 5 = 6; 3 ^ 6 = 5 is no fewer, 5 ^ 6 = 3 is
    assert Nim((2, 2)).best_move() == (0, 1)  # lost: one from the first of the largest
    assert Nim((0, 0)).over
    assert not Nim((0, 0)).winning
    for move in ((0, 4), (0, 0), (0, -1), (1, 1), (3, 1), (-1, 1)):
        with pytest.raises(ValueError, match="pile"):
            game.play(move)
    with pytest.raises(ValueError, match="over"):
        Nim((0,)).best_move()
    for text in ("", "3,4", "3  4", "-1 2", "a", "٣ 4", "1 " * 20 + "1", "12345"):
        with pytest.raises(ValueError, match="no state of Nim"):
            Nim.read(text)


@pytest.mark.parametrize(
    ("text", "moves"),
    [
        ("2:3", [(1, 3)]),
        ("hm, 1:1 is bad.\nMoves: 2:3 1:1", [(1, 3), (0, 1)]),
        ("**Moves:** 2:3, 1:1.", [(1, 3), (0, 1)]),
        ("Moves: 9:9</think><answer>2:3</answer>", [(1, 3)]),
        ("Move: 1:1\nAnswer: 2:3", [(1, 3)]),
        ("0:1", [(-1, 1)]),  # read, and then illegal
        ("", None),
        ("I take 3", None),
        ("Moves: 2:3 or 1:1", None),
        ("Moves: 2:-3", None),
        ("Moves: 2:3\n1:1", [(1, 3)]),
        ("Moves: 12345:1", None),
        ("Moves: ٢:3", None),
        ("Moves: " + "1:1 " * 1000, None),
    ],
)
def test_read_moves(text: str, moves):
    assert read_moves(text) == moves


# Nim: play


@pytest.mark.parametrize(
    ("moves", "reason"),
    [
        # 1 2 3 is lost; 1 2 4 is won by 3:1 alone (1 xor 2 = 3). Then 1 2 3: the opponent takes one from the third
        # pile, 1 2 2; 1:1 leaves 0 2 2; opponent 0 1 2; 3:1 leaves 0 1 1; opponent 0 0 1; 3:1 takes the last.
        ("3:1 1:1 3:1 3:1", "the last object is the model's"),
        ("3:1 1:1 3:1", "the game is not over: 0 0 1"),
        ("3:1 1:1 3:1 3:1 1:1", "illegal: 1 moves after the end of the game"),
        ("3:1 1:1 1:1", "illegal: 1 objects cannot be taken from pile 1, which has 0"),
        ("3:1 1:1 2:1", "the last object is the opponent's"),  # 0 0 2 is left
        ("3:9", "illegal: 9 objects cannot be taken from pile 3, which has 4"),
        ("4:1", "illegal: there is no pile 4"),
        ("0:1", "illegal: there is no pile 0"),
        ("1:0", "illegal: 0 objects"),
        # 3:4 leaves 1 2: the opponent makes it 1 1, and takes the last after 1:1.
        ("3:4 1:1", "the last object is the opponent's"),
        ("3:4 1:1 2:1", "illegal: 1 moves after the end"),
        ("nothing", "no moves found"),
    ],
)
def test_a_game(moves: str, reason: str):
    verdict = NimVerifier().judge(moves, "1 2 4")
    assert reason in verdict.reason
    assert verdict.outcome == ("right" if "the model's" in reason else "wrong")


def test_one_move():
    """From 1 2 4 only 3:1 wins."""
    verify = NimVerifier("move")
    moves = [f"{pile}:{count}" for pile, size in ((1, 1), (2, 2), (3, 4)) for count in range(1, size + 1)]
    scores = verify([], moves, state=["1 2 4"] * len(moves))
    assert [move for move, score in zip(moves, scores, strict=True) if score] == ["3:1"]
    assert verify.judge("3:1 1:1", "1 2 4").reason == "2 moves where one was asked for"


def test_a_conversation():
    """What anybody says of the opponent's moves does not count; the model's turns do."""
    turns = ["Moves: 3:1", "I take 1:1", "<answer>1:1</answer>", "3:1", "3:1"]

    def talk(*said: str):
        return [
            m for text in said for m in ({"role": "assistant", "content": text}, {"role": "user", "content": "9:9"})
        ]

    verify = NimVerifier()
    assert verify([], [talk(turns[0], *turns[2:])], state=["1 2 4"]) == [1.0]
    assert verify.judge(talk(*turns[:2], *turns[3:]), "1 2 4").reason == "no moves found"
    assert verify.judge(talk(), "1 2 4").reason == "no moves found"
    assert verify.judge([{"role": "user", "content": "3:1 1:1 3:1 3:1"}], "1 2 4").reason == "no moves found"


def test_partial_credit_is_asked_for():
    """Legal to the end and lost, not to the end, illegal, won; and a row without a game."""
    texts = ["3:4 1:1", "3:1", "4:1", "3:1 1:1 3:1 3:1", "1:1"]
    states = ["1 2 4"] * 4 + [None]
    metrics: dict[str, float] = {}
    assert NimVerifier()([], texts, state=states, log_metric=metrics.__setitem__) == [0.0, 0.0, 0.0, 1.0, None]
    assert metrics == {"nim/failed": 1.0, "nim/legal": 0.4}
    assert NimVerifier(graded=True, legal=0.2)([], texts, state=states) == [0.2, 0.0, 0.0, 1.0, None]
    with pytest.raises(ValueError, match="no state of Nim"):
        NimVerifier()([], ["1:1"], state=["1;2"])
    with pytest.raises(ValueError, match="play must be"):
        NimVerifier("blitz")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="legal must be"):
        NimVerifier(legal=2.0)


# by name


def test_own_puzzles_by_name():
    countdown = PuzzleVerifier("countdown", every_number=False)
    assert countdown.__name__ == "countdown"
    logged: dict[str, list] = {}
    assert countdown([], ["3-1"], numbers=[[1, 3, 9]], target=[2], log_extra=logged.__setitem__) == [1.0]
    assert logged == {"countdown/reason": ["the target"]}
    nim = PuzzleVerifier("nim", play="move", graded=True)
    assert nim(prompts=[], completions=["3:1", "1:1"], state=["1 2 4"] * 2) == [1.0, 0.1]
    with pytest.raises(ValueError, match="no partial credit"):
        PuzzleVerifier("countdown", graded=True)
    with pytest.raises(TypeError, match="unexpected"):
        PuzzleVerifier("nim", size=3)


def test_other_names_are_reasoning_gyms():
    pytest.importorskip("reasoning_gym")
    entry = {"answer": "1 + 2", "metadata": {"numbers": [1, 2], "target": 3}}
    verify = PuzzleVerifier("reasoning_gym/countdown")
    assert verify([], ["Answer: 1 + 2", "Answer: 2 - 1"], metadata=[json.dumps(entry)] * 2) == [1.0, 0.0]
    assert PuzzleVerifier("leg_counting").__name__ == "leg_counting"
    with pytest.raises(ValueError, match="not registered"):
        PuzzleVerifier("no_such_puzzle")


def test_nothing_takes_long():
    start = time.perf_counter()
    long = [
        "(" * 200_000,
        "1+" * 100_000,
        "Answer:" * 30_000,
        "<answer>" * 30_000,
        "\\boxed{" * 30_000,
        "1:1 " * 50_000,
    ]
    assert CountdownVerifier()([], long, numbers=[[1]] * 6, target=[1] * 6) == [0.0] * 6
    assert NimVerifier()([], long, state=["1"] * 6) == [0.0] * 6
    assert time.perf_counter() - start < 4
