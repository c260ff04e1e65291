"""From a micro-batch of pairs to a loss and what is logged of it: the parts that DPO, IPO, SimPO and ORPO share.

| metric (of evaluation: `eval_` in front) | unit | what it is |
|---|---|---|
| loss | nats (IPO: squared) | mean over the pairs of the optimizer step |
| rewards/chosen, rewards/rejected | - | implicit rewards; each trainer says of what |
| rewards/margins, rewards/accuracies | -, share | their difference; how often it is positive, a tie 1/2 |
| rewards/accuracies_low, _high; n_pairs, n_ties | share, count | evaluation only: 95 % Wilson interval; counts |
| logps/chosen, logps/rejected | nats | summed log-probs of the answers, EOS included |
| logps/chosen_change, logps/rejected_change | nats | since the reference; without one since the row was first seen |
| kl/chosen | nats a token | k3 to the reference on chosen answers: a distance, the policy did not sample them |
| entropy | nats a token | of the policy at the answers' tokens |
| lengths/chosen, lengths/rejected | tokens | of the answers, EOS included |
| rows/without_pair | count | rows of identical answers or ties only, which leave the loss |
| rows/cut, rows/special_tokens_neutralised | count | rows cut to max_length; special tokens made plain text |
| num_tokens, step_time, update/tokens_per_second, time/<stage> | count, s, 1/s, share | throughput |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from hf_rlx.data.pair_encoding import RankedGroup
from hf_rlx.functional import kl_penalty, wilson_interval
from hf_rlx.functional.masked import masked_sum
from hf_rlx.models.packing import split_by_tokens
from hf_rlx.models.roles import POLICY
from hf_rlx.trainers.base import BaseTrainer, pad_columns
from hf_rlx.trainers.metrics import MetricStore
from hf_rlx.trainers.pair_batches import PairBatch
from hf_rlx.types import Group, TokenScores

if TYPE_CHECKING:
    from hf_rlx.trainers.preference import PreferenceTrainer

# Per-token columns of a table, and the column of tokens that each is averaged by.
_BY_TOKENS = {"kl/chosen": "_chosen_tokens", "entropy": "_tokens"}
Table = dict[str, Tensor]


class Objective(NamedTuple):
    """What a loss says of n pairs: `loss`, a scalar with gradient, their mean; `table`, metric name to (n,) values."""

    loss: Tensor
    table: Table


@dataclass(frozen=True)
class Pairs:
    """n pairs of answers among the B answers of a micro-batch.

    Args:
        logps: (B, R) nats, log-prob of each answer token, with gradient in training.
        mask: (B, R) bool, True on answer tokens, EOS included.
        entropies: (B, R) nats, without gradient.
        better, worse: (n,) which of the B answers make a pair.
        reference: (B, R) nats, the reference's log-probs; None without one.
        prompts: (B, R) bool, True on prompt tokens where those are scored in front of the answer; None where not.
    """

    logps: Tensor
    mask: Tensor
    entropies: Tensor
    better: Tensor
    worse: Tensor
    reference: Tensor | None = None
    prompts: Tensor | None = None

    def __len__(self) -> int:
        return self.better.numel()

    @staticmethod
    def of(rows: Sequence[RankedGroup], scores: TokenScores, reference: Tensor | None = None) -> Pairs:
        """The pairs of `rows`, whose answers were scored in their order; of a ranked list all its pairs."""
        assert scores.entropies is not None
        found = torch.tensor(_places(rows), dtype=torch.long, device=scores.per_token_logps.device).reshape(-1, 2)
        return Pairs(scores.per_token_logps, scores.mask, scores.entropies, found[:, 0], found[:, 1], reference)

    def sums(self, values: Tensor | None = None, ld_alpha: float | None = None) -> tuple[Tensor, Tensor]:
        """(n,) summed over each pair's chosen and rejected answer; of the policy's log-probs, or of (B, R) `values`.

        ld_alpha: weight of the tokens of the longer answer behind the length of the shorter one (LD-DPO, 2409.06411);
            None: 1.
        """
        values = self.logps if values is None else values
        if ld_alpha is None:
            total = masked_sum(values, self.mask, dim=1)
            return total[self.better], total[self.worse]
        place = self.mask.cumsum(dim=1)
        shared = torch.minimum(*self.lengths())[:, None]

        def weighted(answers: Tensor) -> Tensor:
            mask, seen = self.mask[answers], place[answers] <= shared
            head = masked_sum(values[answers], mask & seen, dim=1)
            return head + ld_alpha * masked_sum(values[answers], mask & ~seen, dim=1)

        return weighted(self.better), weighted(self.worse)

    def lengths(self) -> tuple[Tensor, Tensor]:
        """(n,) tokens of each pair's chosen and rejected answer."""
        length = self.mask.sum(dim=1)
        return length[self.better], length[self.worse]

    def means(self) -> tuple[Tensor, Tensor]:
        """(n,) log-prob per token of each pair's chosen and rejected answer, nats."""
        (chosen, rejected), (m, n) = self.sums(), self.lengths()
        return chosen / m.clamp(min=1), rejected / n.clamp(min=1)

    def table(self, pair_loss: Tensor, chosen_reward: Tensor, rejected_reward: Tensor, **more: Tensor) -> Table:
        """The columns of the metrics above, (n,) each, without gradient; NaN where there is nothing to say.

        Args:
            pair_loss, chosen_reward, rejected_reward: (n,). more: further (n,) columns.
        """
        with torch.no_grad():
            margin = chosen_reward - rejected_reward
            chosen, rejected = self.sums()
            m, n = self.lengths()
            entropy_m, entropy_n = self.sums(self.entropies)
            columns = {
                "loss": pair_loss,
                "rewards/chosen": chosen_reward,
                "rewards/rejected": rejected_reward,
                "rewards/margins": margin,
                "rewards/accuracies": (margin > 0).float() + 0.5 * (margin == 0).float(),
                "logps/chosen": chosen,
                "logps/rejected": rejected,
                "lengths/chosen": m,
                "lengths/rejected": n,
                "entropy": (entropy_m + entropy_n) / (m + n).clamp(min=1),
                "_tokens": m + n,
                **more,
            }
            if self.reference is not None:
                before = self.sums(self.reference)
                k3 = self.sums(kl_penalty(self.logps, self.reference, self.mask, "k3"))[0]
                columns["logps/chosen_change"] = chosen - before[0]
                columns["logps/rejected_change"] = rejected - before[1]
                columns |= {"kl/chosen": k3 / m.clamp(min=1), "_chosen_tokens": m}
            return {name: values.detach() for name, values in columns.items()}


def _places(rows: Sequence[RankedGroup]) -> list[tuple[int, int]]:
    """Places, among the answers of all rows, of the better and the worse answer of every pair."""
    found, start = [], 0
    for row in rows:
        places = range(row.num_responses)
        found += [(start + i, start + j) for i in places for j in places if row.ranks[i] < row.ranks[j]]
        start += row.num_responses
    return found


def averaged(table: Table) -> dict[str, tuple[float, float]]:
    """Mean and weight (pairs, or tokens) of every public column; NaN entries are left out."""
    means = {}
    for name, values in table.items():
        if name.startswith("_"):
            continue
        known = ~torch.isnan(values)
        weights = table[_BY_TOKENS[name]].double() if name in _BY_TOKENS else torch.ones_like(values.double())
        weight = float(weights[known].sum())
        means[name] = (float((values.double() * weights)[known].sum()) / weight if weight else math.nan, weight)
    return means


# Training and evaluation.


def scored_pairs(
    trainer: BaseTrainer,
    model: nn.Module | None,
    rows: list[RankedGroup],
    reference: Callable[[list[Group]], Tensor] | None = None,
) -> Pairs:
    """The pairs of `rows` with the policy's log-probs.

    Args:
        model: what is called, with gradient, so that several processes add theirs up; None: no gradient, and in parts.
        reference: groups -> (B, R) log-probs; called first, as no adapter may be switched before the backward.
    """
    groups = [group for row in rows for group in row.groups]
    ref = None if reference is None else reference(groups)
    return Pairs.of(rows, scored(trainer, model, groups), ref)


def scored(trainer: BaseTrainer, model: nn.Module | None, groups: list[Group]) -> TokenScores:
    """The policy's log-probs and entropies, (B, R) each; `model` as in `scored_pairs`."""
    if model is None:
        return scores_without_gradient(trainer, groups)
    scores: TokenScores = model(groups, want_entropy=True)
    return scores


def train_on_pairs(trainer: PreferenceTrainer, model: nn.Module, batch: PairBatch) -> Tensor:
    """The loss of one micro-batch, its pairs' share of the optimizer step's; what there is to log is recorded."""
    pairs = trainer.pairs(model, batch.rows)
    objective = trainer.pair_objective(pairs)
    table = objective.table
    if pairs.reference is None and trainer.watch is not None:
        found = _row_means(batch.rows, table)
        indices = [row.row for row in batch.rows]
        step = trainer.state.global_step
        changes = trainer.watch.first_seen.change("train", len(trainer.train_dataset), indices, found, step)
        table |= _changes(batch.rows, changes, table["loss"].device)
    record(trainer.metrics["train"], table)
    return objective.loss * (len(pairs) / batch.normalizer)


def record(store: MetricStore, table: Table) -> None:
    """Add the columns of a table, but for the loss, which the Trainer logs."""
    for name, (mean, weight) in averaged(table).items():
        if name != "loss":
            store.add(name, mean, weight)


def no_loss(model: nn.Module, groups: list[Group]) -> Tensor:
    """0, with a backward that reaches every parameter of the policy: see `PreferenceTrainer.zero_loss`."""
    scores: TokenScores = model(groups)
    return scores.per_token_logps.sum() * 0


def examine_pairs(trainer: PreferenceTrainer, rows: list[RankedGroup]) -> list[list[dict[str, float]]]:
    """The columns of every row's pairs, without gradient; a row without a pair has none."""
    paired = [row for row in rows if row.num_pairs]
    if not paired:
        return [[] for _ in rows]
    with torch.no_grad():
        table = trainer.pair_objective(trainer.pairs(None, paired)).table
    columns = {name: values.tolist() for name, values in table.items()}
    every = iter(dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    return [[next(every) for _ in range(row.num_pairs)] for row in rows]


def summarise_pairs(trainer: PreferenceTrainer, found: list[list[dict[str, float]]]) -> dict[str, float]:
    """The metrics of all rows of a data set, without prefix."""
    entries = [entry for row in found for entry in row]
    counts = {"n_pairs": float(len(entries)), "rows/without_pair": float(sum(not row for row in found))}
    if not entries:
        return counts
    table = {name: torch.tensor([entry[name] for entry in entries], dtype=torch.float64) for name in entries[0]}
    if "logps/chosen_change" not in table and trainer.watch is not None:
        kept = [(index, row) for index, row in enumerate(found) if row]
        names = ("logps/chosen", "logps/rejected")
        now = torch.tensor([[sum(e[n] for e in row) / len(row) for n in names] for _, row in kept])
        indices, step = [index for index, _ in kept], trainer.state.global_step
        changes = trainer.watch.first_seen.change(trainer.watch.held_out, len(found), indices, now, step)
        table |= {f"{name}_change": changes[:, place] for place, name in enumerate(names)}
    metrics = {name: mean for name, (mean, weight) in averaged(table).items() if weight}
    wins = float(table["rewards/accuracies"].sum())
    low, high = wilson_interval(wins, len(entries))
    ties = float((table["rewards/margins"] == 0).sum())
    return metrics | {"rewards/accuracies_low": low, "rewards/accuracies_high": high, "n_ties": ties} | counts


def _row_means(rows: list[RankedGroup], table: Table) -> Tensor:
    """(rows, 2) mean log-probs of each row's chosen and rejected answers."""
    both = torch.stack([table["logps/chosen"], table["logps/rejected"]], dim=1)
    return torch.stack([part.mean(0) for part in both.split([row.num_pairs for row in rows])])


def _changes(rows: list[RankedGroup], changes: Tensor, device: torch.device) -> Table:
    """The changes of rows as columns of their pairs."""
    every = changes.repeat_interleave(torch.tensor([row.num_pairs for row in rows]), dim=0).to(device).float()
    return {"logps/chosen_change": every[:, 0], "logps/rejected_change": every[:, 1]}


def scores_without_gradient(trainer: BaseTrainer, groups: list[Group], role: str = POLICY) -> TokenScores:
    """Log-probs and entropies of `groups` in `role`, (B, R) each, a few rows at a time."""

    def run(most: int | None) -> Tensor:
        parts = []
        # Before training the model has no autocast of its own yet.
        with (
            torch.no_grad(),
            trainer.accelerator.autocast(),
            trainer.shared.as_role(role),
            trainer.shared.rollout_mode(),
        ):
            for few in split_by_tokens(groups, most):
                parts.append(trainer.shared(few, want_entropy=True))
        masks = pad_columns([part.mask.float() for part in parts])
        return torch.stack([*(pad_columns([part[i] for part in parts]) for i in (0, 1)), masks])

    logps, entropies, mask = trainer.forward_limit.run(run, groups)
    return TokenScores(logps, entropies, None, mask.bool())


__all__ = [
    "Objective",
    "Pairs",
    "averaged",
    "examine_pairs",
    "no_loss",
    "record",
    "scored",
    "scored_pairs",
    "scores_without_gradient",
    "summarise_pairs",
    "train_on_pairs",
]
