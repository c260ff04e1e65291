"""Which rows of preference data a micro-step gets: dealt so that no split of a step changes its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from hf_rlx.data.pair_encoding import RankedGroup
from hf_rlx.models.packing import completion_mask
from hf_rlx.trainers.windows import WindowLoader
from hf_rlx.types import Group


class PairSampler(Sampler[list[int]]):
    """Dataset indices of this process's micro-batches.

    An optimizer step takes the next `batch x micro_steps x world_size` rows of the epoch's order, whatever the three
    factors are. The last step of an epoch has what is left, dealt evenly: no row is repeated to fill a batch, and
    where there are fewer rows than processes a micro-batch is empty.

    Args:
        num_rows: of the dataset. batch: rows a micro-batch. micro_steps: of an optimizer step.
        seed, shuffle: order of the rows; every epoch its own.
        rank, world_size: of this process.
        drop_last: leave an incomplete last step out.
    """

    def __init__(
        self,
        num_rows: int,
        batch: int,
        micro_steps: int,
        seed: int,
        shuffle: bool,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        self.num_rows, self.batch, self.micro_steps = num_rows, batch, micro_steps
        self.seed, self.shuffle, self.rank, self.world_size = seed, shuffle, rank, world_size
        self.drop_last = drop_last
        self.epoch = 0
        if len(self) == 0:
            raise ValueError(
                f"the dataset has {num_rows} rows but an optimizer step needs {self.step_rows}; add some, lower "
                "per_device_train_batch_size or gradient_accumulation_steps, or set dataloader_drop_last=False"
            )

    @property
    def step_rows(self) -> int:
        """Rows of a full optimizer step over all processes."""
        return self.batch * self.micro_steps * self.world_size

    def _parts(self, rows: int) -> int:
        """Micro-steps that an optimizer step of so many rows is dealt to."""
        return -(-rows // (self.batch * self.world_size))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's order."""
        self.epoch = epoch

    def __len__(self) -> int:
        full, rest = divmod(self.num_rows, self.step_rows)
        return full * self.micro_steps + (0 if self.drop_last else self._parts(rest))

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.num_rows))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.num_rows, generator=generator).tolist()
        for start in range(0, self.num_rows, self.step_rows):
            rows = order[start : start + self.step_rows]
            if self.drop_last and len(rows) < self.step_rows:
                return
            shares = self._parts(len(rows)) * self.world_size
            for share in range(self.rank, shares, self.world_size):
                yield rows[len(rows) * share // shares : len(rows) * (share + 1) // shares]


class IndexedRows(Dataset[tuple[int, Any]]):
    """A dataset whose rows know their index, for messages."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.rows[index]


def check_known(row: RankedGroup, model: Any) -> None:
    """Refuse token ids that `model`, a `SharedModel`, does not embed; the message reads on from "row 3 ..."."""
    embeddings: Any = model.causal_lm.get_input_embeddings()
    # Adapters on the embedding wrap it.
    size = getattr(embeddings, "get_base_layer", lambda: embeddings)().weight.shape[0]
    largest = int(torch.cat([ids for group in row.groups for ids in (group.prompt_ids, *group.response_ids)]).max())
    if largest >= size:
        raise ValueError(
            f"has the token id {largest}, but the model embeds {size} tokens only; its tokenizer is larger than the "
            "model: model.resize_token_embeddings(len(tokenizer))"
        )


@dataclass
class PairBatch:
    """What one micro-step trains on.

    Args:
        rows: P rows that have a pair; B responses in all. Empty where this share has none.
        normalizer: scalar, rows with a pair over the whole optimizer step and all processes, at least 1.
        idle: no process has a pair in this optimizer step.
        dealt: rows that this share was dealt; those without a pair (identical answers, ties only) left.
    """

    rows: list[RankedGroup]
    normalizer: Tensor
    idle: bool = False
    dealt: int = 0

    @property
    def groups(self) -> list[Group]:
        """Of all rows, in order."""
        return [group for row in self.rows for group in row.groups]

    @property
    def mask(self) -> Tensor:
        """(B, R) bool, True on response tokens."""
        return completion_mask(self.groups) if self.rows else torch.zeros(0, 1, dtype=torch.bool)

    def halves(self) -> list[PairBatch]:
        """Two micro-batches of whole rows that add up to this one; itself where it has a single row."""
        if len(self.rows) < 2:
            return [self]
        at = len(self.rows) // 2
        return [self._of(self.rows[:at]), self._of(self.rows[at:])]

    def split(self, max_tokens: int | None) -> list[PairBatch]:
        """Micro-batches of whole rows of at most so many packed tokens that add up to this one; None: itself."""
        if max_tokens is None or len(self.rows) < 2:
            return [self]
        parts: list[list[RankedGroup]] = [[]]
        used = 0
        for row in self.rows:
            tokens = sum(group.num_tokens for group in row.groups)
            if parts[-1] and used + tokens > max_tokens:
                parts.append([])
                used = 0
            parts[-1].append(row)
            used += tokens
        return [self] if len(parts) == 1 else [self._of(rows) for rows in parts]

    def _of(self, rows: list[RankedGroup]) -> PairBatch:
        return replace(self, rows=rows, dealt=len(rows))


def shortened(row: RankedGroup, prompt: int | None, answer: int | None, bos: int | None) -> RankedGroup:
    """A row whose prompt and answers have at most so many tokens each (None: any number): the prompt loses its
    beginning but for `bos`, an answer its end but for the last token. Answers that become the same tie."""
    # Where no token is shared, the groups' prompts are their answers' first tokens.
    lost = 0 if prompt is None or len(row.groups) > 1 else row.groups[0].prompt_ids.numel() - prompt
    too_long = sum(answer is not None and length > answer for length in row.lengths)
    if lost <= 0 and not too_long:
        return row
    groups, alike = [], list[tuple[int, ...]]()
    for group in row.groups:
        ids, answers = group.prompt_ids, group.response_ids
        if lost > 0:
            keep = int(ids.numel() - lost > 1 and ids[0].item() == bos)
            ids = torch.cat([ids[:keep], ids[keep + lost :]])
        if answer is not None:
            answers = tuple(a if a.numel() <= answer else torch.cat([a[: answer - 1], a[-1:]]) for a in answers)
        groups.append(Group(ids, answers))
        alike += [(int(ids[0]), *a.tolist()) for a in answers]
    given: dict[tuple[int, ...], list[float]] = {}
    for same, rank in zip(alike, row.ranks, strict=True):
        given.setdefault(same, []).append(rank)
    ranks = tuple((min(given[same]) + max(given[same])) / 2 for same in alike)
    return replace(row, groups=tuple(groups), ranks=ranks, cut=row.cut + too_long + (lost > 0))


def pair_loader(dataset: Any, args: Any, collate: Callable[[list[tuple[int, Any]]], Any]) -> WindowLoader:
    """The loader of a run: this process's micro-batches, tokenized by `collate`."""
    sampler = PairSampler(
        len(dataset),
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        args.data_seed if args.data_seed is not None else args.seed,
        args.shuffle_dataset,
        args.process_index,
        args.world_size,
        args.dataloader_drop_last,
    )
    # A generator of its own: a loader draws a seed at every epoch, from torch's global state if it has none.
    generator = torch.Generator().manual_seed(args.seed)
    return WindowLoader(
        IndexedRows(dataset),
        batch_sampler=sampler,
        collate_fn=collate,
        generator=generator,
        num_workers=args.dataloader_num_workers,
    )
