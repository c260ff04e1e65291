"""What the curves of a run say when nothing is learned, told once and with the way out."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from hf_rlx.rollout.collect import Collected
from hf_rlx.trainers.observe import lost_signal

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rule:
    """A log is suspicious where `metric` is at least `limit` (`below`: at most); `patience` such logs in a row are an
    alert.

    advice: what to do, with fields of the log by name and `{limit}` for `max_completion_length`.
    """

    name: str
    metric: str
    limit: float
    advice: str
    patience: int = 2
    below: bool = False


RULES = (
    Rule(
        "constant reward",
        "frac_reward_zero_std",
        1.0,
        "all completions of a prompt got the same reward, for every prompt (mean {value}): nothing is learned. Look "
        "at the completions (log_completions=True) and at what the reward function says of them; where they are all "
        "right or all wrong, take other prompts, a larger num_generations, or a higher temperature",
    ),
    Rule(
        "everything truncated",
        "completions/clipped_ratio",
        1.0,
        "every completion was cut at max_completion_length={limit}: raise it; if the texts are complete, the model "
        "does not end them by EOS: check eos_token of tokenizer and generation_config and the chat template, or set "
        "stop_strings",
    ),
    Rule(
        "far from the reference",
        "kl",
        5.0,
        "the KL to the reference is {value} nats a token: the policy has left the language it started from. Lower "
        "learning_rate or raise beta, and go back to an earlier checkpoint",
    ),
    Rule(
        "negative KL",
        "kl/k1_sequence",
        -1.0,
        "the KL to the reference is {value} nats a sequence, which it cannot be in the mean over the policy's own "
        "samples: tokens come from another distribution than the one whose log-probs are read. Leave top_k, top_p, "
        "min_p, repetition_penalty and generation_kwargs alone; with several passes over a rollout, lower "
        "learning_rate or num_iterations. The other estimate, `kl` (k3), is never negative",
        below=True,
    ),
    Rule(
        "special tokens in messages",
        "prompts/special_tokens_neutralised",
        1.0,
        "{value} special tokens stood inside messages since the last log and were made plain text; if they are meant, "
        'set special_tokens_in_messages="allow"',
        patience=1,
    ),
)


class Alerts(TrainerCallback):
    """Watches rollouts and logs; every alert is one warning, the first time that it is due.

    The state is plain JSON values, so that a resumed run does not repeat itself.
    """

    def __init__(self) -> None:
        self.told: list[str] = []
        self._in_a_row: dict[str, int] = {}
        self._explained = False  # a rollout since the last log was told of for its own reason

    def rollout(self, collected: Collected, step: int) -> None:
        """Called with every rollout: was there a signal, and if not, why."""
        lost = lost_signal(collected)
        if lost is None:
            return
        kind, reason = lost
        self._explained = True
        if kind not in self.told:
            self.told.append(kind)
            logger.warning("step %d: %s", step, reason)

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Called by the Trainer with every log of its main process; those of training count."""
        if not logs or "loss" not in logs or not state.is_world_process_zero:
            return
        self.check(logs, state.global_step, args.max_completion_length)

    def check(self, logs: dict[str, Any], step: int, max_completion_length: int) -> list[str]:
        """Update every rule with one training log; warns, and returns the names of the alerts that are new."""
        new = []
        for rule in RULES:
            value = logs.get(rule.metric)
            if value is None:  # this log does not tell
                continue
            beyond = value <= rule.limit if rule.below else value >= rule.limit
            suspicious = beyond and not (rule.name == "constant reward" and self._explained)
            self._in_a_row[rule.name] = self._in_a_row.get(rule.name, 0) + 1 if suspicious else 0
            if self._in_a_row[rule.name] < rule.patience or rule.name in self.told:
                continue
            self.told.append(rule.name)
            new.append(rule.name)
            shown = logs.get("reward", value) if rule.name == "constant reward" else value
            advice = rule.advice.format(value=f"{shown:.4g}", limit=max_completion_length)
            logger.warning("step %d: %s: %s", step, rule.name, advice)
        self._explained = False
        return new

    def state_dict(self) -> dict[str, Any]:
        """JSON values, for `load_state_dict`."""
        return {"told": list(self.told), "in_a_row": dict(self._in_a_row), "explained": self._explained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self.told, self._in_a_row = list(state["told"]), dict(state["in_a_row"])
        self._explained = bool(state["explained"])
