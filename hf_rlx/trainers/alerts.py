"""What the curves of a run say when nothing is learned, or the wrong thing, told once and with the way out.

| alert | when |
|---|---|
| unscored, cancelled | nobody scored a completion of a rollout; the weighted rewards cancel one another |
| constant reward (of all prompts) | no group, or no prompt, has a signal, in two logs in a row |
| everything truncated | every completion was cut, in two logs in a row |
| far from the reference, rising KL, negative KL | the KL is large, rises for five logs, or is no KL |
| special tokens in messages | some stood there and became plain text |
| collapse | nearly all completions are the same text, whatever the prompt |
| reward hacking | what is watched falls while the trained reward rises, see `reward_hacking.py` |

At the end a line says which reward functions gave no score, and to how many completions.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from hf_rlx.rollout.collect import Collected
from hf_rlx.trainers.dynamic_sampling import has_signal
from hf_rlx.trainers.metrics import gathered
from hf_rlx.trainers.observe import lost_signal
from hf_rlx.trainers.reward_hacking import HackingWatch
from hf_rlx.types import Rollout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rule:
    """A log is suspicious where `metric` is at least `limit` (`below`: at most; `rising`: and above the log before);
    `patience` such logs in a row are an alert.

    advice: what to do, with `{value}`, `{limit}` (`max_completion_length`) and `{names}` of the reward functions.
    """

    name: str
    metric: str
    limit: float
    advice: str
    patience: int = 2
    below: bool = False
    rising: bool = False


_ALIKE = "all prompts alike"  # no metric: 1 where every rollout since the last log had one reward for everything

RULES = (
    Rule(
        "constant reward",
        "frac_reward_zero_std",
        1.0,
        "all completions of a prompt got the same reward, for every prompt (mean {value}): nothing is learned. Look "
        "at the completions (log_completions=True) and at what {names} says of them; where they are all "
        "right or all wrong, take other prompts, a larger num_generations, or a higher temperature",
    ),
    Rule(
        "constant reward of all prompts",
        _ALIKE,
        1.0,
        "every completion got the same reward, whatever the prompt (mean {value}): there is nothing to learn. Look at "
        "the completions (log_completions=True) and at what {names} says of them",
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
        "rising KL",
        "kl",
        1.0,
        "the KL to the reference has risen for five logs in a row and is {value} nats a token: beta does not hold the "
        "policy. Raise beta, or let it find its own value with kl_target; lower learning_rate or num_iterations; and "
        "see in the completions (log_completions=True) whether the reward is earned",
        patience=5,
        rising=True,
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


_PROMPTS = (8, 32)  # prompts that differ: that an alert of one text needs, that are remembered
_SAME_TEXT = 0.95
_COLLAPSE = (
    "%.0f %% of the completions to the last %d prompts are the same text, %r: the policy has collapsed, and what is "
    "rewarded is no answer. Go back to an earlier checkpoint; raise beta or lower "
    "learning_rate, and look at what the reward function says of this text%s"
)


class Alerts(TrainerCallback):
    """Watches rollouts and logs; every alert is one warning, the first time that it is due.

    The state is plain JSON values, so that a resumed run does not repeat itself.
    """

    def __init__(self) -> None:
        self._names: list[str] = []  # of the reward functions
        self._weights: list[float] = []  # theirs, where they are given
        self._abstained_everywhere: dict[str, list[int]] = {}  # of all processes, from the end of the training on
        self.forget()

    def forget(self) -> None:
        """Begin anew: what an earlier run was like says nothing of this one."""
        self.told: list[str] = []
        self._in_a_row: dict[str, int] = {}
        self._last: dict[str, float] = {}  # of rules that look for a rise
        self._texts: dict[str, list[Any]] = {}  # prompt -> its most common completion, how often, and of how many
        self._alike: bool | None = None  # rollouts since the last log; None where a group can be compared within
        self._explained = False  # a rollout since the last log was told of for its own reason
        self._hacking = HackingWatch()
        self._abstained: dict[str, list[int]] = {}  # name -> completions without a score, and of how many; here

    @property
    def abstained(self) -> dict[str, tuple[int, int]]:
        """Reward functions that left completions without a score: how many, and of how many; while it trains, of this
        process."""
        counts = self._abstained_everywhere or self._abstained
        return {name: (none, count) for name, (none, count) in counts.items() if none}

    def rollout(self, collected: Collected, step: int) -> None:
        """Called with every rollout: was there a signal, and if not, why; and who scored it."""
        self._names = list(collected.scores.names)
        for place, name in enumerate(self._names):
            counts = self._abstained.setdefault(name, [0, 0])
            counts[0] += sum(int(r.rewards[:, place].isnan().sum()) for r in collected.rollouts)
            counts[1] += sum(len(r.rewards) for r in collected.rollouts)
        singles = [r.total for r in collected.rollouts if len(r.total) == 1]
        if len(singles) > 1:
            self._alike = self._alike is not False and not has_signal(torch.cat(singles))
        lost = lost_signal(collected, self._weights)
        if lost is None:
            return
        kind, reason = lost
        self._explained = True
        if kind not in self.told:
            self.told.append(kind)
            logger.warning("step %d: %s", step, reason)

    def texts(self, rollouts: Sequence[Rollout], step: int) -> bool:
        """Called with every rollout: whether the policy says the same whatever it is asked (trl#204), told once. A
        task whose prompts have one answer in common looks like that too."""
        for rollout in rollouts:
            text, count = Counter(c.text for c in rollout.completions).most_common(1)[0]
            prompt = hashlib.sha1(rollout.prompt_text.encode(errors="replace"), usedforsecurity=False).hexdigest()
            self._texts.pop(prompt, None)
            self._texts[prompt] = [text[:200], count, len(rollout.completions)]
        self._texts = dict(list(self._texts.items())[-_PROMPTS[1] :])
        if len(self._texts) < _PROMPTS[0] or "collapse" in self.told:
            return False
        counts: Counter[str] = Counter()
        for text, count, _ in self._texts.values():
            counts[text] += count
        text, most = counts.most_common(1)[0]
        share = most / sum(size for *_, size in self._texts.values())
        if share < _SAME_TEXT:
            return False
        self.told.append("collapse")
        kl = f"; the last KL was {self._last['rising KL']:.3g} nats a token" if "rising KL" in self._last else ""
        logger.warning("step %d: collapse: " + _COLLAPSE, step, 100 * share, len(self._texts), text[:60], kl)
        return True

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Called by the Trainer with every log of its main process."""
        if not logs or not state.is_world_process_zero:
            return
        self._weights = list(getattr(args, "reward_weights", None) or [])
        watched = [name for name, weight in zip(self._names, self._weights, strict=False) if weight == 0]
        if "loss" in logs:
            self.check(logs, state.global_step, args.max_completion_length)
            falls = self._hacking.training(logs, watched)
        else:
            falls = self._hacking.evaluation(logs, state.global_step, watched)
        for fall in falls:
            if fall.name not in self.told:
                self.told.append(fall.name)
                logger.warning("step %d: reward hacking: %s", state.global_step, fall.text)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called by the Trainer: a run that does not go on from a checkpoint counts anew."""
        self._weights = list(getattr(args, "reward_weights", None) or [])
        self._abstained_everywhere = {}
        if not state.global_step:
            self.forget()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Called by the Trainer on every process: say how many completions each reward function left unscored."""
        everywhere: dict[str, list[int]] = {}
        for name, (none, count) in gathered(list(self._abstained.items())):
            kept = everywhere.setdefault(name, [0, 0])
            kept[0], kept[1] = kept[0] + none, kept[1] + count
        self._abstained_everywhere = everywhere
        told = [f"{name} {none:,} of {n:,} ({none / n:.1%})" for name, (none, n) in self.abstained.items()]
        if told and state.is_world_process_zero:
            logger.warning("completions without a score (None, NaN, or a fault), left out: %s", "; ".join(told))

    def check(self, logs: dict[str, Any], step: int, max_completion_length: int) -> list[str]:
        """Update every rule with one training log; warns, and returns the names of the alerts that are new."""
        new = []
        if self._alike is not None:
            logs = {**logs, _ALIKE: float(self._alike)}
        for rule in RULES:
            value = logs.get(rule.metric)
            if value is None:  # this log does not tell
                continue
            beyond = value <= rule.limit if rule.below else value >= rule.limit
            if rule.rising:
                beyond = beyond and value > self._last.get(rule.name, value)
                self._last[rule.name] = value
            suspicious = beyond and not (rule.name.startswith("constant reward") and self._explained)
            self._in_a_row[rule.name] = self._in_a_row.get(rule.name, 0) + 1 if suspicious else 0
            if self._in_a_row[rule.name] < rule.patience or rule.name in self.told:
                continue
            self.told.append(rule.name)
            new.append(rule.name)
            shown = logs.get("reward", value) if rule.name.startswith("constant reward") else value
            names = ", ".join(self._names) or "the reward function"
            advice = rule.advice.format(value=f"{shown:.4g}", limit=max_completion_length, names=names)
            logger.warning("step %d: %s: %s", step, rule.name, advice)
        self._explained, self._alike = False, None
        return new

    def state_dict(self) -> dict[str, Any]:
        """JSON values, for `load_state_dict`."""
        return {
            "told": list(self.told),
            "in_a_row": dict(self._in_a_row),
            "last": dict(self._last),
            "texts": {prompt: list(found) for prompt, found in self._texts.items()},
            "explained": self._explained,
            "alike": self._alike,
            "hacking": self._hacking.state_dict(),
            "abstained": {name: list(counts) for name, counts in self._abstained.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self.told, self._in_a_row = list(state["told"]), dict(state["in_a_row"])
        self._last, self._texts = dict(state.get("last", {})), dict(state.get("texts", {}))
        self._explained, self._alike = bool(state["explained"]), state.get("alike")
        self._abstained = {name: list(counts) for name, counts in state.get("abstained", {}).items()}
        if "hacking" in state:
            self._hacking.load_state_dict(state["hacking"])
