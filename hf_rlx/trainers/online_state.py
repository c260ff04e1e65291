"""What an online trainer adds to a checkpoint: the window, the controller, and what watches over the run."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from hf_rlx.trainers.windows import MiniBatch
from hf_rlx.types import Group

if TYPE_CHECKING:
    from hf_rlx.trainers.online import OnlineTrainer


def state_of(trainer: OnlineTrainer) -> dict[str, Any]:
    """Micro-batches that are sampled and not yet trained on, and all that the next rollout follows from."""
    unique = list({id(batch): batch for batch in trainer._window}.values())  # passes over a window share its batches
    places = {id(batch): place for place, batch in enumerate(unique)}
    return {
        "batches": [batch.state_dict() for batch in unique],
        "window": [places[id(batch)] for batch in trainer._window],
        "kl_controller": trainer.kl_controller.state_dict(),
        "kl_seen": list(trainer._kl_seen),
        "num_tokens": trainer._num_tokens,
        "halved": trainer.halving.on,
        "max_rows": getattr(trainer.sampler, "max_rows", None),
        "last_group": trainer._last_group and [trainer._last_group.prompt_ids, list(trainer._last_group.response_ids)],
        "tables": trainer.tables.state_dict(),
        "alerts": trainer.alerts.state_dict(),
        "scorer": trainer.scorer.state_dict(),
    }


def restore(trainer: OnlineTrainer, state: dict[str, Any]) -> None:
    """Put back what `state_of` gave."""
    device = trainer.args.device
    unique = [MiniBatch.from_state(batch, device) for batch in state["batches"]]
    trainer._window = deque(unique[place] for place in state["window"])
    trainer.kl_controller.load_state_dict(state["kl_controller"])
    trainer._kl_seen = [kl.to(device) for kl in state["kl_seen"]]
    trainer._num_tokens, trainer.halving.on = state["num_tokens"], state["halved"]
    if state["last_group"] is not None:
        prompt, responses = state["last_group"]
        trainer._last_group = Group(prompt, tuple(responses))
    if state["max_rows"] is not None:
        trainer.sampler.max_rows = min(state["max_rows"], trainer.args.max_rollout_rows)  # type: ignore[attr-defined]
    trainer.tables.load_state_dict(state["tables"])
    trainer.alerts.load_state_dict(state["alerts"])
    trainer.scorer.load_state_dict(state["scorer"])
