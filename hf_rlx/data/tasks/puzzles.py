"""Puzzles with exact rules: Countdown and Nim, and any puzzle by its name."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable
from typing import Any, Literal

from datasets import Dataset

from hf_rlx.data.tasks.base import Task, is_held_out, prompt_of
from hf_rlx.data.tasks.generated import reasoning_gym_task

_TRIES = 400  # draws for each row that is asked for, before a family counts as too small


def puzzle_task(
    name: str, n_train: int = 500, n_test: int = 128, seed: int = 0, conversational: bool = True, **options: Any
) -> Task:
    """A puzzle by name. Score it with `hf_rlx.verifiers.PuzzleVerifier(name)`.

    Args:
        name: `"countdown"`, `"nim"`, or a task of reasoning-gym; `"reasoning_gym/countdown"` is that package's.
        n_train: training rows.
        n_test: held-out rows, none of them in any training set of the same seed; for Countdown and Nim, of any seed.
        seed: of the generator.
        conversational: prompts as message lists; else plain text.
        options: further arguments of `countdown_task`, `nim_task` or `reasoning_gym_task`.

    Raises:
        ImportError: reasoning-gym is needed and not installed; the message names the command.
        ValueError: the name is unknown, or there are not that many different puzzles.
    """
    own: dict[str, Callable[..., Task]] = {"countdown": countdown_task, "nim": nim_task}
    if name in own:
        return own[name](n_train, n_test, seed, conversational, **options)
    return reasoning_gym_task(name.removeprefix("reasoning_gym/"), n_train, n_test, seed, conversational, **options)


# Countdown


def countdown_task(
    n_train: int = 500,
    n_test: int = 128,
    seed: int = 0,
    conversational: bool = True,
    *,
    numbers: tuple[int, int] = (3, 4),
    largest: int = 20,
    largest_target: int = 100,
    every_number: bool = True,
    max_completion_length: int = 512,
) -> Task:
    """Reach a target from given numbers with + - * / and parentheses; every instance has a solution.

    Rows: `prompt`, `answer` (one solution of several), `numbers` (list of integers) and `target`. Score it with
    `hf_rlx.verifiers.CountdownVerifier(every_number=every_number)`. Which side an instance is on depends on its
    numbers, in any order, and its target, not on the seed: nothing held out was ever trained on.

    Args:
        n_train, n_test: rows.
        seed: chooses which instances are drawn.
        conversational: prompts as message lists; else plain text.
        numbers: how many are given, (fewest, most).
        largest: given numbers are 1 to this.
        largest_target: targets are 1 to this, and never one of the given numbers.
        every_number: what the prompt asks for: each number exactly once; else each at most once.
        max_completion_length: tokens for a completion, with room for a chain of thought.

    Raises:
        ValueError: ranges without any instance, or with too few.
    """
    if not 2 <= numbers[0] <= numbers[1] <= 8 or largest < 1 or largest_target < 1:
        raise ValueError(
            f"countdown gives 2 to 8 numbers of at least 1, not {numbers} up to {largest}, target {largest_target}"
        )
    often = "exactly once" if every_number else "at most once"
    instruction = (
        f"Write an expression that has the target as its value. Use each given number {often}, and nothing else but "
        "+, -, *, / and parentheses. Finish with a line that says 'Answer:' and then just the expression."
    )

    def draw(rng: random.Random) -> tuple[str, dict[str, Any]] | None:
        given = [rng.randint(1, largest) for _ in range(rng.randint(*numbers))]
        target, solution = _expression(rng, given)
        if not 1 <= target <= largest_target or target in given:
            return None
        question = f"Numbers: {', '.join(map(str, given))}\nTarget: {target}"
        row = {
            "prompt": prompt_of(instruction, question, conversational),
            "answer": solution,
            "numbers": given,
            "target": target,
        }
        return f"{sorted(given)} {target}", row

    train, test = _drawn(draw, n_train, n_test, seed, "countdown")
    return Task("countdown", train, test, max_completion_length, "Reach a target from given numbers by arithmetic.")


def _expression(rng: random.Random, given: list[int]) -> tuple[int, str]:
    """A random expression over all the numbers whose parts are all positive integers, with its value."""
    parts = [(number, str(number)) for number in given]
    while len(parts) > 1:
        (a, left), (b, right) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        if a < b:
            (a, left), (b, right) = (b, right), (a, left)
        signs = ["+", "*", *("-" * (a > b)), *("/" * (a % b == 0))]
        sign = rng.choice(signs)
        value = {"+": a + b, "*": a * b, "-": a - b, "/": a // b}[sign]
        parts.append((value, f"({left} {sign} {right})" if parts else f"{left} {sign} {right}"))
    return parts[0]


# Nim


def nim_task(
    n_train: int = 500,
    n_test: int = 128,
    seed: int = 0,
    conversational: bool = True,
    *,
    piles: tuple[int, int] = (3, 5),
    largest: int = 12,
    play: Literal["game", "move"] = "game",
    max_completion_length: int = 512,
) -> Task:
    """Nim from a position that the model, who moves first, can win.

    Rows: `prompt`, `answer` (a winning line of moves, or one winning move) and `state` (the piles as text). Score it
    with `hf_rlx.verifiers.NimVerifier(play)`. Which side a position is on depends on its piles in any order.

    Args:
        n_train, n_test: rows.
        seed: chooses which positions are drawn.
        conversational: prompts as message lists; else plain text.
        piles: how many, (fewest, most).
        largest: piles have 1 to this many objects.
        play: "game": all the model's moves are asked for at once, against an opponent whose rule the prompt tells;
            "move": one winning move.
        max_completion_length: tokens for a completion, with room for a chain of thought.

    Raises:
        ValueError: an unknown `play`, or ranges without any position or with too few.
    """
    if not 1 <= piles[0] <= piles[1] <= 20 or not 1 <= largest <= 9999:
        raise ValueError(f"nim has 1 to 20 piles of 1 to 9999 objects, not {piles} of up to {largest}")
    if play not in ("game", "move"):
        raise ValueError(f"play must be 'game' or 'move', not {play!r}")

    def draw(rng: random.Random) -> tuple[str, dict[str, Any]] | None:
        state = [rng.randint(1, largest) for _ in range(rng.randint(*piles))]
        if not functools.reduce(operator.xor, state):
            return None
        text = " ".join(map(str, state))
        line = _winning_line(state)
        row = {
            "prompt": prompt_of(_NIM + _NIM_ASKS[play], f"Piles: {text}", conversational),
            "answer": line[0] if play == "move" else " ".join(line),
            "state": text,
        }
        return f"nim {sorted(state)}", row

    train, test = _drawn(draw, n_train, n_test, seed, "nim")
    return Task("nim", train, test, max_completion_length, "Win Nim against a perfect opponent.")


_NIM = (
    "Two players take turns; each takes one or more objects from one pile, and who takes the last object of all wins. "
    "You move first. Write a move as pile:count; 2:3 takes 3 objects from the second pile. "
)
_NIM_ASKS = {
    "move": "Find a move after which you can always win. Finish with a line that says 'Moves:' and then that move.",
    "game": (
        "The opponent plays like this: where it can make the bitwise exclusive or of the pile sizes zero, it does, in "
        "the first pile where that is possible; else it takes one object from the first of the largest piles. Empty "
        "piles keep their place. Finish with a line that says 'Moves:' and then just your moves of the whole game, "
        "with spaces between."
    ),
}


def _winning_line(piles: list[int]) -> list[str]:
    """The winner's moves where both sides play as the prompt says."""
    piles, moves = list(piles), []
    while any(piles):
        total = functools.reduce(operator.xor, piles)
        pile = next(i for i, size in enumerate(piles) if size ^ total < size)
        moves.append(f"{pile + 1}:{piles[pile] - (piles[pile] ^ total)}")
        piles[pile] ^= total
        if any(piles):
            piles[piles.index(max(piles))] -= 1
    return moves


def _drawn(
    draw: Callable[[random.Random], tuple[str, dict[str, Any]] | None], n_train: int, n_test: int, seed: int, name: str
) -> tuple[Dataset, Dataset]:
    """Different puzzles for both sides.

    Args:
        draw: (key by which two puzzles are the same, row), or None for a draw that is no puzzle.
        n_train, n_test: rows; the first ones do not depend on how many are asked for.
        seed: of the draws.
        name: for errors.
    """
    if n_train < 1 or n_test < 1:
        raise ValueError(f"n_train and n_test must be at least 1, not {n_train} and {n_test}.")
    rng = random.Random(seed)
    wanted = {False: n_train, True: n_test}
    rows: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    seen: set[str] = set()
    for _ in range(_TRIES * (n_train + n_test)):
        if all(len(rows[side]) == wanted[side] for side in rows):
            return Dataset.from_list(rows[False]), Dataset.from_list(rows[True])
        if (drawn := draw(rng)) is None or drawn[0] in seen:
            continue
        side = is_held_out(drawn[0])
        seen.add(drawn[0])
        if len(rows[side]) < wanted[side]:
            rows[side].append(drawn[1])
    raise ValueError(
        f"{name}: {len(rows[False])} training and {len(rows[True])} held-out puzzles were found, {n_train} and "
        f"{n_test} were asked for; ask for fewer, or for larger numbers"
    )
