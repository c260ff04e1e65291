"""The warning about falling chosen answers, for a run of rounds."""

from __future__ import annotations

from typing import Any

from transformers import TrainerControl, TrainerState

from hf_rlx.trainers.pair_watch import PairWatch

_CARRIED = ("logps/chosen_change", "logps/rejected_change", "rewards/margins")


class RoundWatch(PairWatch):
    """`PairWatch` where the reference moves between rounds, and log-probs are logged against it: what the logs say is
    added up, so that "since the start" is since the start of training.

    A reference that takes the share s of the policy takes about s of the change with it: 1 for "previous", exactly.
    The pairs of each round are others, so that the sum is an estimate over rounds, not of one set of answers.

    Args:
        advice: see `PairWatch`. share: of the policy that goes into the reference after a round.
    """

    def __init__(self, advice: str, share: float) -> None:
        self.share = share
        super().__init__(advice)

    def begin_run(self) -> None:
        """See `PairWatch`."""
        super().begin_run()
        self.round = 0
        self.carried = dict.fromkeys(_CARRIED, 0.0)  # from the rounds before
        self._last = dict.fromkeys(_CARRIED, 0.0)  # of the newest log

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Called by the Trainer with every log."""
        given = logs or {}
        if "loss" in given and _CARRIED[0] in given:
            number = int(given.get("round", self.round))
            if number != self.round:
                self.round = number
                for name in _CARRIED:
                    self.carried[name] += self.share * self._last[name]
            self._last = {name: float(given[name]) for name in _CARRIED}
            given = {**given, **{name: self._last[name] + self.carried[name] for name in _CARRIED}}
        super().on_log(args, state, control, given, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """See `PairWatch`."""
        ours = {"round": self.round, "carried": dict(self.carried), "last": dict(self._last)}
        return {**super().state_dict(), "rounds": ours}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `PairWatch`."""
        super().load_state_dict(state)
        ours = state["rounds"]
        self.round, self.carried, self._last = int(ours["round"]), dict(ours["carried"]), dict(ours["last"])


__all__ = ["RoundWatch"]
