"""Which prompts a rollout window gets, and how its completions are dealt to micro-steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from hf_rlx.types import Group, Rollout

if TYPE_CHECKING:
    from hf_rlx.trainers.online_config import OnlineConfig


class WindowSampler(Sampler[list[int]]):
    """Dataset indices of the prompts of one rollout window, once per micro-step that the window serves.

    The Trainer asks for a batch at every micro-step; all micro-steps of a window get the same prompts, and only
    the first one samples. Processes get disjoint prompts. A last incomplete window is left out.

    Args:
        num_rows: of the dataset.
        prompts: P, prompts a window and process.
        repeats: micro-steps a window serves (steps_per_generation x num_iterations).
        seed, shuffle: order of the prompts; every epoch its own.
        rank, world_size: of this process.
    """

    def __init__(
        self, num_rows: int, prompts: int, repeats: int, seed: int, shuffle: bool, rank: int = 0, world_size: int = 1
    ) -> None:
        self.num_rows, self.prompts, self.repeats = num_rows, prompts, repeats
        self.seed, self.shuffle, self.rank, self.world_size = seed, shuffle, rank, world_size
        self.epoch = 0
        if self.windows == 0:
            raise ValueError(
                f"the dataset has {num_rows} prompts but a rollout needs {prompts * world_size}; add some, or lower "
                "per_device_train_batch_size, steps_per_generation or gradient_accumulation_steps"
            )

    @property
    def windows(self) -> int:
        """Complete windows in one epoch."""
        return self.num_rows // (self.prompts * self.world_size)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's order."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.windows * self.repeats

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.num_rows))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.num_rows, generator=generator).tolist()
        size = self.prompts * self.world_size
        for window in range(self.windows):
            start = window * size + self.rank * self.prompts
            for _ in range(self.repeats):
                yield order[start : start + self.prompts]


@dataclass
class MiniBatch:
    """What one micro-step trains on: the kept completions of some groups.

    Args:
        groups: packed together; B responses in all. Empty when nothing in this share has a signal.
        advantages: (B,) or (B, R). mask: (B, R) bool, True on response tokens.
        old_logps: (B, R) nats, the policy that sampled; None: this forward itself (on-policy).
        ref_logps: (B, R) nats, the reference; None without KL.
        sampler_logps: (B, R) nats, as the sampler reported them; NaN where it did not.
        is_weights: (B, R) importance weights; None: 1.
        normalizer: denominator of the loss over the whole optimizer step and all processes.
        rows: completions that this share was dealt, dropped ones included.
        idle: no process has a signal in this optimizer step.
        parts: into how many a micro-step was cut, as more tokens at a time do not fit or do not pay; 1: not at all.
        places: (group, completion) of each row in its window, for filling in what is known of them.
        old_values: (B, R) reward, the critic's at the weights that sampled; None without a critic.
        returns: (B, R) reward, the critic's targets.
    """

    groups: list[Group]
    advantages: Tensor
    mask: Tensor
    sampler_logps: Tensor
    rows: int
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None
    is_weights: Tensor | None = None
    normalizer: Tensor | None = None
    idle: bool = False
    parts: int = 1
    places: list[tuple[int, int]] = field(default_factory=list)
    old_values: Tensor | None = None
    returns: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, for a checkpoint; without `places`, as all is filled in by then."""
        state = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "places"}
        return {**state, "groups": [[g.prompt_ids, list(g.response_ids)] for g in self.groups]}

    @staticmethod
    def from_state(state: dict[str, Any], device: torch.device) -> MiniBatch:
        """What `state_dict` was taken of, on `device`."""
        moved: dict[str, Any] = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in state.items()}
        moved["groups"] = [Group(prompt, tuple(responses)) for prompt, responses in state["groups"]]
        return MiniBatch(**moved)

    def halves(self) -> list[MiniBatch]:
        """Two micro-batches that add up to this one: whole groups where there are several, else the completions of
        the one group. Itself where it has a single completion."""
        rows = [g.num_responses for g in self.groups]
        if sum(rows) < 2:
            return [self]
        if len(rows) > 1:
            cut = min(range(1, len(rows)), key=lambda i: abs(2 * sum(rows[:i]) - sum(rows)))
            groups, at = [self.groups[:cut], self.groups[cut:]], sum(rows[:cut])
        else:
            at, all_rows = rows[0] // 2, list(range(rows[0]))
            groups = [[self.groups[0].select(all_rows[:at])], [self.groups[0].select(all_rows[at:])]]
        spans = [slice(0, at), slice(at, None)]
        return [self._cut(g, span, 2) for g, span in zip(groups, spans, strict=True)]

    def split(self, max_tokens: int | None) -> list[MiniBatch]:
        """Micro-batches of whole groups of at most so many packed tokens that add up to this one; None: itself."""
        if max_tokens is None or len(self.groups) < 2:
            return [self]
        ends: list[int] = []  # of each part, as group numbers
        used = 0
        for number, group in enumerate(self.groups):
            if number and used + group.num_tokens > max_tokens:
                ends.append(number)
                used = 0
            used += group.num_tokens
        if not ends:
            return [self]
        rows = [0]
        for group in self.groups:
            rows.append(rows[-1] + group.num_responses)
        borders = list(zip([0, *ends], [*ends, len(self.groups)], strict=True))
        return [self._cut(self.groups[a:b], slice(rows[a], rows[b]), len(borders)) for a, b in borders]

    def _cut(self, groups: list[Group], span: slice, parts: int) -> MiniBatch:
        """The rows of `span`, one of so many parts, with columns up to the longest of them."""
        longest = max(int(self.mask[span].sum(dim=1).max()), 1)

        def cut(value: Tensor | None) -> Tensor | None:
            return value if value is None else value[span, :longest] if value.ndim == 2 else value[span]

        tensors = ["advantages", "mask", "sampler_logps", "old_logps", "ref_logps", "is_weights"]
        tensors += ["old_values", "returns"]
        changed: dict[str, Any] = {name: cut(getattr(self, name)) for name in tensors}
        rows = sum(g.num_responses for g in groups)
        return replace(self, groups=groups, rows=rows, parts=parts * self.parts, places=self.places[span], **changed)


def deal(rollouts: Sequence[Rollout], steps: int, micro_steps: int) -> list[list[list[tuple[int, list[int]]]]]:
    """Deal the completions of a window to optimizer steps and, in each, its kept ones evenly to micro-steps.

    Args:
        rollouts: P groups of K completions with `keep` set. steps: optimizer steps of one pass. micro_steps: of
            each.

    Returns:
        [step][micro-step] -> list of (group index, kept completion indices). Groups stay whole wherever the
        numbers allow it: their prompt is then computed once.
    """
    flat = [(p, k) for p, rollout in enumerate(rollouts) for k in range(len(rollout.completions))]
    per_step = len(flat) // steps
    result = []
    for step in range(steps):
        kept = [(p, k) for p, k in flat[step * per_step : (step + 1) * per_step] if _keeps(rollouts[p], k)]
        members: dict[int, list[int]] = {}
        for p, k in kept:
            members.setdefault(p, []).append(k)
        largest = -(-per_step // micro_steps)
        if all(len(ks) <= largest for ks in members.values()):
            shares = _balanced(members, micro_steps, largest) or _balanced(members, micro_steps, largest, True)
        else:
            shares = None
        if shares is None:  # a group is larger than a micro-step: cut the list of completions
            size = -(-len(kept) // micro_steps) if kept else 0
            cuts = [kept[i * size : (i + 1) * size] for i in range(micro_steps)]
            shares = []
            for cut in cuts:
                share: dict[int, list[int]] = {}
                for p, k in cut:
                    share.setdefault(p, []).append(k)
                shares.append(list(share.items()))
        result.append(shares)
    return result


def _keeps(rollout: Rollout, index: int) -> bool:
    return not rollout.keep.numel() or bool(rollout.keep[index])


def _balanced(
    members: dict[int, list[int]], micro_steps: int, largest: int, first_fit: bool = False
) -> list[list[tuple[int, list[int]]]] | None:
    """Whole groups, the largest first, to the micro-step with the fewest completions so far (`first_fit`: to the
    first with room, which fits more); None where one would overflow."""
    shares: list[list[tuple[int, list[int]]]] = [[] for _ in range(micro_steps)]
    load = [0] * micro_steps
    for p, ks in sorted(members.items(), key=lambda item: -len(item[1])):
        room = [i for i in range(micro_steps) if load[i] + len(ks) <= largest]
        if not room:
            return None
        target = room[0] if first_fit else min(room, key=lambda i: load[i])
        shares[target].append((p, ks))
        load[target] += len(ks)
    return shares


class WindowLoader(DataLoader):
    """A `DataLoader` that hands the epoch to its `WindowSampler`."""

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer at the start of every epoch."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def window_loader(
    dataset: Any, args: OnlineConfig, prompts: int, repeats: int, collate: Callable[[Any], Any]
) -> WindowLoader:
    """The loader of a run: this process's share of every window, `repeats` times each."""
    seed = args.data_seed if args.data_seed is not None else args.seed
    place = (args.process_index, args.world_size)
    sampler = WindowSampler(len(dataset), prompts, repeats, seed, args.shuffle_dataset, *place)
    # A generator of its own: a loader draws a seed at every epoch, from torch's global state if it has none.
    generator = torch.Generator().manual_seed(args.seed)
    return WindowLoader(dataset, batch_sampler=sampler, collate_fn=collate, generator=generator)


def row_of(advantages: Tensor, index: int, length: int) -> Tensor:
    """Completion `index`'s advantage: a scalar, or its tokens' (R,) cut or padded to `length`."""
    if not advantages.numel():
        raise ValueError("advantages were not computed")
    row = advantages[index]
    if row.ndim == 0:
        return row
    return torch.nn.functional.pad(row[:length], (0, max(0, length - row.numel())))
