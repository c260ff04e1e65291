"""What a trainer on pairs remembers of its run: log-probs at first sight, and the warning about falling ones."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from hf_rlx.trainers.metrics import gathered

logger = logging.getLogger(__name__)

WINDOW = 3  # logs; the last three are held against the three before
NATS, SHARE = 1.0, 0.02  # how far chosen answers must have fallen: a nat, and 2 % of their log-prob at the start
_CHANGE = "logps/chosen_change"


class FirstSeen:
    """Log-probs of rows as they were when first seen: what they are compared with where there is no reference."""

    def __init__(self) -> None:
        self._first: dict[str, Tensor] = {}  # data set -> (rows, 3): step, chosen, rejected; NaN where not seen
        self._news: list[tuple[int, list[float]]] = []

    def change(self, name: str, count: int, rows: Sequence[int], logps: Tensor, step: int) -> Tensor:
        """(rows, 2) log-probs now less those at first sight, chosen and rejected; NaN at first sight, which is the
        whole optimizer step.

        Args:
            name: of the data set, which has `count` rows. rows: indices in it. logps: (rows, 2), means over a row's
                pairs. step: optimizer steps done.
        """
        first = self._first.setdefault(name, torch.full((count, 3), torch.nan, dtype=torch.float64))
        index, now = torch.tensor(list(rows), dtype=torch.long), logps.detach().double().cpu()
        known = first[index]
        result = torch.where(known[:, :1] < step, now - known[:, 1:], torch.nan)
        for place in torch.nonzero(known[:, 0].isnan())[:, 0].tolist():
            entry = [float(step), *now[place].tolist()]
            first[index[place]] = torch.tensor(entry, dtype=torch.float64)
            if name == "train":
                self._news.append((int(index[place]), entry))
        return result

    def begin_run(self) -> None:
        """Forget all but what was seen before the first optimizer step."""
        self._first = {
            name: first for name, first in self._first.items() if name != "train" and (first[:, 0] == 0).all()
        }
        self._news = []

    def share(self) -> None:
        """Tell the other processes which rows of the training data were seen; every process must call it."""
        told, self._news = gathered(self._news), []
        for row, entry in told:
            first = self._first["train"]
            if not first[row, 0] <= entry[0]:
                first[row] = torch.tensor(entry, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; independent of what is seen later."""
        return {"first": {n: t.clone() for n, t in self._first.items()}, "news": [list(n) for n in self._news]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self._first = {name: tensor.clone() for name, tensor in state["first"].items()}
        self._news = [(int(row), list(entry)) for row, entry in state["news"]]


class PairWatch(TrainerCallback):
    """Warns, once, when chosen answers become less likely while the margin between the answers grows: the loss falls,
    but probability goes to answers that nobody chose (2402.13228 section 3.2). Looks at the logs of training and of
    evaluation, each by itself.

    The state goes into checkpoints, so that a resumed run does not repeat itself.

    Args:
        advice: what to do about it with this loss.
    """

    def __init__(self, advice: str) -> None:
        self.advice = advice
        self.first_seen = FirstSeen()
        self.held_out = ""  # stands for the rows that are being evaluated
        self.begin_run()

    def begin_run(self) -> None:
        """Forget an earlier run; held-out rows that were seen before it stay what later ones are compared with."""
        self.first_seen.begin_run()
        self.told: list[str] = []
        self._logs: dict[str, list[list[float]]] = {}  # prefix -> change, margin, log-prob of the last logs

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Called by the Trainer with every log, in all processes with the same one."""
        logs = logs or {}
        if "loss" in logs:
            self.first_seen.share()
        for name in [name for name in logs if name.endswith(_CHANGE)]:
            told = self.check(logs, name.removesuffix(_CHANGE))
            if told is not None and state.is_world_process_zero:
                logger.warning("step %d: %s", state.global_step, told)

    def check(self, logs: dict[str, Any], prefix: str = "") -> str | None:
        """Take one log into account; returns the warning where it is due for the first time.

        Args:
            prefix: in front of the metrics' names: "" in training, "eval_" in evaluation.
        """
        seen = self._logs.setdefault(prefix, [])
        seen.append([float(logs[prefix + name]) for name in (_CHANGE, "rewards/margins", "logps/chosen")])
        del seen[: -2 * WINDOW]
        if self.told or len(seen) < 2 * WINDOW:
            return None
        (old_change, old_margin, _), (change, margin, logp) = (
            [sum(values) / WINDOW for values in zip(*part, strict=True)] for part in (seen[:WINDOW], seen[WINDOW:])
        )
        limit = max(NATS, SHARE * abs(logp - change))
        if not (change <= -limit and change < old_change and margin > old_margin):  # also where one is NaN
            return None
        self.told.append(prefix)
        where = "in evaluation" if prefix else "in training"
        return (
            f"chosen answers are {-change:.4g} nats less likely than at the start ({where}, {prefix}{_CHANGE}) and "
            f"still falling while the margin grows ({old_margin:.4g} to {margin:.4g}): probability goes to answers "
            f"that nobody chose. {self.advice}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, for `load_state_dict`."""
        logs = {prefix: [list(entry) for entry in entries] for prefix, entries in self._logs.items()}
        return {"told": list(self.told), "logs": logs, "first_seen": self.first_seen.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self.told = list(state["told"])
        self._logs = {prefix: [list(entry) for entry in entries] for prefix, entries in state["logs"].items()}
        self.first_seen.load_state_dict(state["first_seen"])


__all__ = ["FirstSeen", "PairWatch"]
