"""One round of iterative DPO: which prompts it samples for, the pairs of their answers, and how steps share them.

| file below `<output_dir>/pairs` | what |
|---|---|
| round_000/train.parquet | prompt, chosen, rejected, score_chosen, score_rejected; "ranked": responses, scores |
| round_000/round.json | what the round counted: prompts, pairs, prompts without a pair and why |

`datasets.load_dataset` reads a round's folder, or `pairs` with all rounds; every trainer on pairs takes the rows. Each
file is written whole or not at all, and the second says that the first is there.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from hf_rlx.data.pair_encoding import EncodedAnswers, RankedGroup, fit
from hf_rlx.data.pairs import build_pairs
from hf_rlx.rollout.collect import score_request
from hf_rlx.trainers.iterative_config import IterativeDPOConfig
from hf_rlx.trainers.tables import as_table
from hf_rlx.types import Group, Rollout

PAIRS_FILE, COUNTS_FILE = "train.parquet", "round.json"
_DIGITS = 6  # of a score: of two that float32 tells apart by rounding only, none is better


@dataclass(frozen=True)
class RoundPlan:
    """The shape of every round of a run.

    Args:
        prompts: P, that it samples for, over all processes. steps: S, optimizer steps.
        epochs: passes over its pairs.
    """

    prompts: int
    steps: int
    epochs: float

    @staticmethod
    def of(args: IterativeDPOConfig, rows: int) -> RoundPlan:
        """The plan for a dataset of so many rows.

        Raises:
            ValueError: more prompts a round than rows, or fewer than processes.
        """
        prompts = rows if args.prompts_per_round is None else args.prompts_per_round
        if prompts > rows:
            raise ValueError(
                f"prompts_per_round is {prompts}, but train_dataset has {rows} prompts; lower it, or leave it out"
            )
        if prompts < args.world_size:
            raise ValueError(f"{args.world_size} processes share {prompts} prompts a round; raise prompts_per_round")
        if args.steps_per_round is not None:
            return RoundPlan(prompts, args.steps_per_round, args.steps_per_round * args.rows_per_step / prompts)
        epochs = 1.0 if args.epochs_per_round is None else float(args.epochs_per_round)
        return RoundPlan(prompts, math.ceil(epochs * prompts / args.rows_per_step), epochs)

    def indices(self, number: int, rows: int, seed: int, shuffle: bool) -> list[int]:
        """Dataset indices of the prompts of round `number`: the rounds go through the data one after the other, and
        through every pass of it in an order of its own."""
        orders: dict[int, list[int]] = {}
        found = []
        for place in range(number * self.prompts, (number + 1) * self.prompts):
            epoch, offset = divmod(place, rows)
            if epoch not in orders:
                orders[epoch] = permuted(rows, seed + epoch) if shuffle else list(range(rows))
            found.append(orders[epoch][offset])
        return found


def permuted(count: int, seed: int) -> list[int]:
    """0 .. count - 1 in an order that follows from the seed."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(frozen=True)
class RoundRow(RankedGroup):
    """The answers of one prompt that make its pairs, as they were sampled: token by token.

    Args:
        pairs: (better, worse) places among the answers; all that the loss looks at.
    """

    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def num_pairs(self) -> int:
        """Pairs of the row."""
        return len(self.pairs)


@dataclass(frozen=True)
class Outcome:
    """What became of one prompt of a round.

    Args:
        place: of the prompt in the round. row: its pairs to train on; None: it has none, for `reason`.
        saved: rows for the round's file.
        scores: of the completions that have one. empty: scored completions that say nothing.
    """

    place: int
    row: RoundRow | None
    saved: list[dict[str, Any]]
    scores: list[float]
    reason: str | None = None
    empty: int = 0


def outcome_of(
    rollout: Rollout, place: int, args: IterativeDPOConfig, max_length: int | None, bos: int | None
) -> Outcome:
    """The pairs of one prompt's completions.

    Args:
        rollout: K completions with their rewards. place: of the prompt in its round.
        max_length: tokens of prompt and answer together; longer ones are cut, see `fit`. bos: kept in front.
    """
    scores: list[float | None] = [_score(total) for total in rollout.total.tolist()]
    if args.mask_truncated_completions:
        scores = [s if c.finished else None for s, c in zip(scores, rollout.completions, strict=True)]
    known = [score for score in scores if score is not None]
    noise = 2 * 10.0**-_DIGITS * max([1.0, *map(abs, known)])
    request = score_request(rollout.prompt, rollout.completions, {})
    row = {"prompt": rollout.prompt, "responses": list(request.completions), "scores": scores}
    made = build_pairs(
        [row | {"place": list(range(len(scores)))}],
        args.pair_strategy,
        max(float(args.pair_margin), noise),
        max_pairs=args.max_pairs_per_prompt,
        response_columns=("place",),
    )
    reason = next(iter(made.left_out), None)
    empty = made.notes.get("empty responses", 0)
    if reason is not None:
        return Outcome(place, None, [], known, reason, empty)
    if args.pair_strategy == "ranked":
        (listed,) = made
        order, values = listed["place"], listed["scores"]
        n = range(len(order))
        pairs = [(order[i], order[j]) for i in n for j in n if values[i] - values[j] > noise]
        used = order
    else:
        pairs = [(pair["place_chosen"], pair["place_rejected"]) for pair in made]
        used = list(dict.fromkeys(answer for pair in pairs for answer in pair))
    saved = [{name: value for name, value in each.items() if not name.startswith("place")} for each in made]
    encoded = _encoded(rollout, used, pairs, place, max_length, bos)
    if not encoded.pairs:  # what the cut left is the same
        return Outcome(place, None, [], known, "identical responses", empty)
    return Outcome(place, encoded, saved, known, None, empty)


def _score(total: float) -> float | None:
    return None if math.isnan(total) else float(f"{total:.{_DIGITS}g}")


def _encoded(
    rollout: Rollout,
    used: list[int],
    pairs: list[tuple[int, int]],
    place: int,
    max_length: int | None,
    bos: int | None,
) -> RoundRow:
    """The answers `used`, which are those that stand in `pairs`, once each, behind their prompt."""
    given = EncodedAnswers(rollout.prompt_ids, [rollout.completions[i].token_ids for i in used])
    encoded = fit(given, max_length, bos)
    at = {answer: i for i, answer in enumerate(used)}
    found = [(at[better], at[worse]) for better, worse in pairs]
    kept = tuple((i, j) for i, j in found if encoded.answers[i] != encoded.answers[j])
    # Of the ranks only their number is read: `pairs` says who is better.
    return RoundRow(encoded.groups(), (0.0,) * len(used), row=place, cut=encoded.cut, pairs=kept)


class Round:
    """The pairs of one round, the same in all processes.

    Args:
        number: of the round, from 0. rows: P' <= P prompts that have a pair, in the round's order.
    """

    def __init__(self, number: int, rows: Sequence[RoundRow]) -> None:
        self.number, self.rows = number, list(rows)

    def shares(self, step: int, plan: RoundPlan, args: IterativeDPOConfig) -> list[list[RankedGroup]]:
        """This process's micro-batches of an optimizer step; every pair comes `plan.epochs` times in a round.

        Args:
            step: in the round, from 0.
        """
        total = max(1, round(len(self.rows) * plan.epochs)) if self.rows else 0
        span = range(total * step // plan.steps, total * (step + 1) // plan.steps)
        seed = args.data_seed if args.data_seed is not None else args.seed
        orders: dict[int, list[int]] = {}
        rows = []
        for place in span:
            epoch, offset = divmod(place, len(self.rows))
            if epoch not in orders:
                mixed = (seed * 1009 + self.number) * 1009 + epoch
                count = len(self.rows)
                orders[epoch] = permuted(count, mixed) if args.shuffle_dataset else list(range(count))
            rows.append(self.rows[orders[epoch][offset]])
        parts = args.gradient_accumulation_steps * args.world_size
        mine: list[list[RankedGroup]] = []
        for part in range(args.process_index, parts, args.world_size):
            mine.append([*rows[len(rows) * part // parts : len(rows) * (part + 1) // parts]])
        return mine

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, for a checkpoint."""
        rows = [
            {
                "lengths": [[g.prompt_ids.numel(), *(ids.numel() for ids in g.response_ids)] for g in row.groups],
                "pairs": [list(pair) for pair in row.pairs],
                "place": row.row,
                "cut": row.cut,
            }
            for row in self.rows
        ]
        parts = [ids for row in self.rows for g in row.groups for ids in (g.prompt_ids, *g.response_ids)]
        tokens = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)
        return {"number": self.number, "rows": rows, "tokens": tokens}

    @staticmethod
    def from_state(state: dict[str, Any]) -> Round:
        """What `state_dict` was taken of."""
        rows, tokens = [], state["tokens"]
        lengths = [length for row in state["rows"] for group in row["lengths"] for length in group]
        parts = iter(tokens.split(lengths))
        for row in state["rows"]:
            groups = tuple(Group(next(parts), tuple(next(parts) for _ in group[1:])) for group in row["lengths"])
            ranks = (0.0,) * sum(group.num_responses for group in groups)
            pairs = tuple((int(i), int(j)) for i, j in row["pairs"])
            rows.append(RoundRow(groups, ranks, row=int(row["place"]), cut=int(row["cut"]), pairs=pairs))
        return Round(int(state["number"]), rows)


def counts_of(outcomes: Sequence[Outcome], num_generations: int) -> dict[str, Any]:
    """What a round counted, over all processes; `num_generations` is K."""
    scores = [score for outcome in outcomes for score in outcome.scores]
    rows = [outcome.row for outcome in outcomes if outcome.row is not None]
    return {
        "prompts": len(outcomes),
        "completions": len(outcomes) * num_generations,
        "scored": len(scores),
        "reward_mean": sum(scores) / len(scores) if scores else None,
        "prompts_with_pairs": len(rows),
        "pairs": sum(row.num_pairs for row in rows),
        "prompts_without_pairs": dict(Counter(o.reason for o in outcomes if o.reason is not None)),
        "empty_completions": sum(outcome.empty for outcome in outcomes),
    }


def folder_of(run: Path, number: int) -> Path:
    """Where the pairs of a round lie."""
    return run / "pairs" / f"round_{number:03d}"


def write_round(run: Path, number: int, saved: list[dict[str, Any]], counts: dict[str, Any]) -> None:
    """Write a round's two files; see the head of this file. Without a row there is no table.

    Args:
        run: the run's folder. saved: rows of pairs or lists. counts: plain values.
    """
    folder = folder_of(run, number)
    folder.mkdir(parents=True, exist_ok=True)
    for name in (COUNTS_FILE, PAIRS_FILE):  # of an earlier attempt: the counts must not speak of other pairs
        (folder / name).unlink(missing_ok=True)
    if saved:
        staged = folder / f".{PAIRS_FILE}"
        pq.write_table(as_table(saved), staged)
        _put(staged, folder / PAIRS_FILE)
    staged = folder / f".{COUNTS_FILE}"
    staged.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    _put(staged, folder / COUNTS_FILE)


def _put(staged: Path, target: Path) -> None:
    with staged.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(staged, target)


__all__ = ["Outcome", "Round", "RoundPlan", "RoundRow", "counts_of", "folder_of", "outcome_of", "write_round"]
