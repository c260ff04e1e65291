"""Nim, a game with exact rules: piles of objects, take any number from one pile, who takes the last object wins.

A state is written as its piles (`3 4 5`), a move as `pile:count` with piles counted from 1 (`2:3` takes three objects
from the second pile). The player to move wins with perfect play where the exclusive or of the piles is not zero
(Bouton, "Nim, a game with a complete mathematical theory", 1901), so the opponent is optimal by a rule of two lines,
and it is deterministic: a whole game can be planned in one completion.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hf_rlx.verifiers.answers import after_thinking, last_tag
from hf_rlx.verifiers.text import Completion, column_of, message_text
from hf_rlx.verifiers.verdict import JudgedRows, Verdict

Play = Literal["game", "move"]
Move = tuple[int, int]
"""(index of the pile from 0, objects taken from it)."""

_MOVES = re.compile(r"[0-9]{1,4}:[0-9]{1,4}(?:(?:[ \t]*,[ \t]*|[ \t]+)[0-9]{1,4}:[0-9]{1,4})*")
_LINE = re.compile(r"\b(?:moves?|answer)[ \t*]*:[ \t*]*(?P<tail>[^\n]*)", re.IGNORECASE)
_STATE = re.compile(r"[0-9]{1,4}(?: [0-9]{1,4}){0,19}")
_LONGEST = 2000  # characters of a list of moves


@dataclass(frozen=True)
class Nim:
    """One state; the player to move is not part of it.

    Args:
        piles: objects in each pile, 0 or more; at most 20 piles of at most 9999.
    """

    piles: tuple[int, ...]

    @classmethod
    def read(cls, text: str) -> Nim:
        """The state that a text such as `3 4 5` describes.

        Raises:
            ValueError: it describes none.
        """
        if not _STATE.fullmatch(text):
            raise ValueError(f"{text!r} is no state of Nim; write the piles with one space between, e.g. '3 4 5'")
        return cls(tuple(map(int, text.split(" "))))

    def __str__(self) -> str:
        return " ".join(map(str, self.piles))

    @property
    def over(self) -> bool:
        """Nothing is left; the player who took the last object has won."""
        return not any(self.piles)

    @property
    def winning(self) -> bool:
        """Whether the player to move wins with perfect play."""
        return functools.reduce(operator.xor, self.piles, 0) != 0

    def legal_moves(self) -> list[Move]:
        """Every move, by pile and then by count."""
        return [(pile, count) for pile, size in enumerate(self.piles) for count in range(1, size + 1)]

    def play(self, move: Move) -> Nim:
        """The state after a move.

        Raises:
            ValueError: the move is not legal here.
        """
        pile, count = move
        if not 0 <= pile < len(self.piles):
            raise ValueError(f"there is no pile {pile + 1}")
        if not 1 <= count <= self.piles[pile]:
            raise ValueError(f"{count} objects cannot be taken from pile {pile + 1}, which has {self.piles[pile]}")
        return Nim((*self.piles[:pile], self.piles[pile] - count, *self.piles[pile + 1 :]))

    def best_move(self) -> Move:
        """The optimal opponent's move: in the first pile where one wins, the one that wins; in a lost position one
        object from the first of the largest piles.

        Raises:
            ValueError: the game is over.
        """
        if self.over:
            raise ValueError("the game is over")
        total = functools.reduce(operator.xor, self.piles)
        if total:
            pile = next(i for i, size in enumerate(self.piles) if size ^ total < size)
            return pile, self.piles[pile] - (self.piles[pile] ^ total)
        return self.piles.index(max(self.piles)), 1


def read_moves(text: str) -> list[Move] | None:
    """Moves stated in one turn of the model, None where it states none.

    After the last `</think>`: the last `<answer>...</answer>`, else the line after the last `Moves:` (or `Move:`,
    `Answer:`), else all of it; that must be moves and nothing else, `2:3 1:1` or `2:3, 1:1`.
    """
    text = after_thinking(text)
    if (inside := last_tag(text)) is not None:
        text = inside
    elif lines := list(_LINE.finditer(text)):
        text = lines[-1]["tail"]
    text = text.strip().removesuffix(".").removeprefix("**").removesuffix("**").strip()
    if len(text) > _LONGEST or not _MOVES.fullmatch(text):
        return None
    pairs = (word.split(":") for word in re.split(r"[ \t,]+", text))
    return [(int(pile) - 1, int(count)) for pile, count in pairs]


class NimVerifier(JudgedRows):
    """Reward function: 1.0 for winning play from the row's state, against an opponent that plays perfectly.

    The model moves first. `play="game"`: its moves are replayed, the opponent answers each by `Nim.best_move`, and the
    model must take the last object; every move must be legal and none may follow the end. The moves may stand in one
    completion (the opponent's rule is known) or in several assistant messages of a conversation, of which each adds
    its moves; what other messages say the opponent did does not count. `play="move"`: one move, right when it is legal
    and leaves the opponent a lost position.

    Args:
        play: "game" or "move".
        graded: pay `legal` for legal play to the end of the game (or one legal move) that does not win. Off by
            default: partial credit is what a policy learns to collect.
        legal: that credit, in 0..1.
        column: dataset column with the state as text.
        name: name under which scores are logged.

    Raises:
        ValueError: an unknown `play`, or `legal` outside 0..1.

    >>> NimVerifier()(["Take the last one."], ["Moves: 1:1"], state=["1"])
    [1.0]
    """

    def __init__(
        self,
        play: Play = "game",
        *,
        graded: bool = False,
        legal: float = 0.1,
        column: str = "state",
        name: str = "nim",
    ) -> None:
        if play not in get_args(Play):
            raise ValueError(f"play must be one of {list(get_args(Play))}, not {play!r}")
        if not 0 <= legal <= 1:
            raise ValueError(f"legal must be in 0..1, not {legal}")
        self.play: Play = play
        self.graded = graded
        self.legal = legal
        self.column = column
        self.__name__ = name

    def _verdicts(self, completions: Sequence[Completion], columns: dict[str, Any]) -> list[Verdict]:
        states = column_of(columns, self.column, len(completions), self.__name__)
        return [self.judge(completion, state) for completion, state in zip(completions, states, strict=True)]

    def _more_metrics(self, verdicts: list[Verdict]) -> dict[str, float]:
        legal = sum(v.outcome == "right" or v.credit is not None for v in verdicts)
        return {"legal": legal / len(verdicts)} if verdicts else {}

    def judge(self, completion: Completion, state: str | None) -> Verdict:
        """The verdict on one completion; the state as in the column.

        Raises:
            ValueError: the state is not None and no state.
        """
        if state is None:
            return Verdict("failed", "the row holds no state", excused=True)
        game = Nim.read(state)
        moves: list[Move] = []
        for turn in _turns(completion):
            if (found := read_moves(turn)) is None:
                return Verdict("wrong", "no moves found")
            moves += found
        if not moves:
            return Verdict("wrong", "no moves found")
        try:
            return self._one_move(game, moves) if self.play == "move" else _replay(game, moves, self.legal)
        except ValueError as error:
            return Verdict("wrong", f"illegal: {error}")

    def _one_move(self, game: Nim, moves: list[Move]) -> Verdict:
        if len(moves) > 1:
            return Verdict("wrong", f"{len(moves)} moves where one was asked for")
        after = game.play(moves[0])
        if after.winning:
            return Verdict("wrong", "the opponent wins from there", self.legal)
        return Verdict("right", "the opponent is lost")


def _replay(game: Nim, moves: list[Move], legal: float) -> Verdict:
    """The whole game; `legal` is the credit for one that is lost.

    Raises:
        ValueError: a move is illegal, or comes after the end.
    """
    for number, move in enumerate(moves, start=1):
        game = game.play(move)
        last = number == len(moves)
        if game.over:
            if not last:
                raise ValueError(f"{len(moves) - number} moves after the end of the game")
            return Verdict("right", "the last object is the model's")
        game = game.play(game.best_move())
        if game.over:
            if not last:
                raise ValueError(f"{len(moves) - number} moves after the end of the game")
            return Verdict("wrong", "the last object is the opponent's", legal)
    return Verdict("wrong", f"the game is not over: {game}")


def _turns(completion: Completion) -> list[str]:
    """The model's turns: a text is one, a message list has one for each assistant message with any text."""
    if isinstance(completion, str):
        return [completion]
    texts = [message_text(message) for message in completion if message.get("role") == "assistant"]
    return [text for text in texts if text.strip()]
