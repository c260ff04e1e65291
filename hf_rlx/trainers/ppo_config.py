"""`PPOConfig`: the recipe of InstructGPT as fields, and the names that TRL 1.9's PPOConfig had for them."""

from __future__ import annotations

import copy
import functools
import logging
import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from hf_rlx.trainers.config import C, described, refuse_unknown, strict
from hf_rlx.trainers.online_config import OnlineConfig
from hf_rlx.trainers.ranges import check_ranges

logger = logging.getLogger(__name__)

# TRL's name -> ours, where the value means the same.
RENAMED = {
    "num_ppo_epochs": "num_iterations",
    "ppo_epochs": "num_iterations",
    "response_length": "max_completion_length",
    "kl_coef": "beta",
    "init_kl_coef": "beta",
    "target": "kl_target",
    "horizon": "kl_horizon",
    "score_clip": "reward_clip",
    "exp_name": "run_name",
}
# TRL's name -> why nothing follows from it here.
WITHOUT_EFFECT = {
    "local_rollout_forward_batch_size": "max_rollout_rows bounds rollouts, max_tokens_per_forward the forwards after",
    "dataset_num_proc": "prompts are tokenized as they are drawn",
    "ds3_gather_for_generation": "it is about DeepSpeed ZeRO-3, which is not carried",
}
# TRL's name -> what to write instead.
REPLACED = {
    "stop_token_id": 'stop_strings=["..."], or the eos_token of tokenizer and generation_config',
    "num_sample_generations": "log_completions=True, which writes and prints the completions of every log",
    "reward_model_path": "the argument reward_funcs of PPOTrainer: a model, its name, or a function",
    "sft_model_path": "the argument model of PPOTrainer; the reference is made from it",
    "model_adapter_name": "the argument model of PPOTrainer: a PeftModel whose active adapter is the policy",
    "ref_adapter_name": "nothing: the reference is a frozen copy of the adapter that the policy starts from",
    "adap_kl_ctrl": "kl_target=6.0 for an adaptive beta; without kl_target beta is fixed",
    "kl_penalty": 'kl_estimator="k1" (or "k3")',
    "batch_size": "per_device_train_batch_size and steps_per_generation: their product is a process's rollout",
    "mini_batch_size": "per_device_train_batch_size and gradient_accumulation_steps",
    "world_size": "nothing: it is that of the launcher",
    "micro_batch_size": "per_device_train_batch_size",
    "local_batch_size": "per_device_train_batch_size and steps_per_generation",
    "local_mini_batch_size": "per_device_train_batch_size and gradient_accumulation_steps",
    "num_total_batches": "max_steps",
}


def accepts_old_names(cls: C) -> C:
    """Class decorator of a configuration, above `strict`: names of TRL's PPOConfig are understood, each with one note
    in the log, or refused with what to write instead. `HfArgumentParser` takes them on a command line too.

    Raises (from the constructor):
        TypeError: a name that is refused, or both an old name and the field that it stands for.
    """
    original: Any = cls.__init__  # type: ignore[misc]

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(cls, kwargs, {*taken, *WITHOUT_EFFECT, *RENAMED, "stop_token"}, **REPLACED)
        for name in list(kwargs):
            if name in WITHOUT_EFFECT:
                logger.warning("%s=%r has no effect: %s", name, kwargs.pop(name), WITHOUT_EFFECT[name])
            elif name in RENAMED:
                ours = RENAMED[name]
                if ours in kwargs:
                    raise TypeError(f"both `{name}` and `{ours}` were given; `{name}` is TRL's name of `{ours}`")
                kwargs[ours] = kwargs.pop(name)
                logger.warning("%s is called %s here", name, ours)
            elif name == "stop_token":
                if kwargs[name] not in (None, "eos"):
                    raise TypeError(f'stop_token={kwargs[name]!r} is not "eos"; use stop_strings=["..."]')
                logger.warning("stop_token=%r has no effect: completions always end at EOS", kwargs.pop(name))
        original(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[misc]
    known: dict[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]
    taken = {name for name, spec in known.items() if spec.init}
    for old, ours in RENAMED.items():
        field = copy.copy(known[ours])  # another configuration has the same one
        aliases = [*field.metadata.get("aliases", []), f"--{old}"]
        field.metadata = MappingProxyType({**field.metadata, "aliases": aliases})
        known[ours] = field
    return cls


@accepts_old_names
@strict
@dataclass
class PPOConfig(OnlineConfig):
    """Configuration of `PPOTrainer`. The defaults are those of TRL's last PPOTrainer, which are InstructGPT's but for
    the learning rate; the names of its configuration are understood."""

    smallest_group: ClassVar[int] = 1

    learning_rate: float = described(3e-6, "Step size; for LoRA about ten times that of full weights, e.g. 3e-5.")
    num_generations: int = described(1, "K, completions a prompt; the critic is the baseline, so one is enough.")
    num_iterations: int = described(4, "Epochs over each rollout (TRL: num_ppo_epochs).")
    num_mini_batches: int | None = described(
        None,
        "Optimizer steps of one epoch over a rollout: sets steps_per_generation to so many times "
        "gradient_accumulation_steps, which makes the rollout as much larger; None: as steps_per_generation says.",
    )
    total_episodes: int | None = described(None, "Completions of the whole run; sets max_steps. None: as max_steps.")
    shuffle_minibatches: bool = described(True, "Another order of the minibatches in every epoch but the first.")
    # Rewards and advantages.
    reward_clip: float | None = described(None, "Cut the score of a completion to +-this, before penalties.")
    missing_eos_penalty: float | None = described(None, "Subtracted from the score of a completion that was cut.")
    whiten_rewards: bool = described(False, "Scale token rewards to variance 1 over the rollout, the mean kept.")
    gamma: float = described(1.0, "Discount per token.")
    lam: float = described(0.95, "Lambda of generalised advantage estimation; 1: the whole return, 0: one step.")
    bootstrap_truncated: bool = described(
        False, "A completion that the limit cut goes on at the critic's value instead of ending with 0."
    )
    whiten_advantages: bool = described(True, "Mean 0 and variance 1 over all tokens of the rollout, all processes.")
    # The losses.
    cliprange: float = described(0.2, "Lower clip of the ratio; the upper one too unless cliprange_high is set.")
    cliprange_high: float | None = described(None, "Upper clip of the ratio.")
    dual_clip: float | None = described(None, "Bound of the loss where the advantage is negative, e.g. 3 (above 1).")
    cliprange_value: float | None = described(
        0.2, "Reward units that a value may move from its old one; None: no clip, which often trains better."
    )
    vf_coef: float = described(0.1, "Weight of the value loss, which has its factor 1/2 inside.")
    entropy_coef: float = described(0.0, "Bonus on the mean entropy of the tokens.")
    target_kl: float | None = described(
        None, "Nats a token between the policy and the one that sampled; 1.5 times that ends the rollout's updates."
    )
    # KL to the reference.
    beta: float = described(0.05, "Weight of the KL to the reference (TRL: kl_coef); 0: no reference at all.")
    kl_in_reward: bool = described(True, "The KL is a part of each token's reward; False: a term of the loss.")
    kl_estimator: Literal["k1", "k2", "k3", "k3_ratio"] | None = described(
        None, 'In the reward "k1" or "k3", in the loss "k2", "k3" or "k3_ratio"; None: k1 or k3.'
    )
    # The critic.
    critic_adapter: bool = described(
        False,
        "The critic has an adapter of its own, with a forward and backward of its own: twice the work of an update, "
        "and it can learn any value. False: a linear head on the policy's forward, which explains a part.",
    )
    critic_init_from_reward: bool = described(
        False,
        "The critic is an adapter of its own, copied with its head from the role `reward`: its values are scores "
        "without a normaliser, so leave the reward function's off with it.",
    )
    detach_critic: bool = described(
        True,
        "No gradient of the value loss reaches the policy through the head: it grows with the square of the rewards' "
        "scale, and policy gradients stay what they are without a critic. False: the trunk learns to tell values too.",
    )
    critic_learning_rate: float | None = described(
        None,
        "Step size of the critic. None: learning_rate for its adapter; for its head, which is linear and starts at 0, "
        "100 times that, up to 1e-3.",
    )
    critic_warmup_steps: int = described(0, "First optimizer steps, in which only the critic learns.")

    def __post_init__(self) -> None:
        check_ranges(self)  # also by the base, but then a wrong number of minibatches is one of steps
        if self.num_mini_batches is not None:
            steps = self.num_mini_batches * self.gradient_accumulation_steps
            if self.steps_per_generation not in (None, steps) or self.generation_batch_size is not None:
                raise ValueError(
                    "give num_mini_batches, or steps_per_generation, or generation_batch_size: each of them says how "
                    "large a rollout is"
                )
            self.steps_per_generation = steps
        super().__post_init__()
        if self.total_episodes is not None:
            if self.max_steps > 0:
                raise ValueError("give total_episodes or max_steps, not both")
            rollouts = math.ceil(self.total_episodes / int(self.generation_batch_size or 1))
            self.max_steps = rollouts * self.optimizer_steps_per_window * self.num_iterations
        self._check_kl()
        if self.bootstrap_truncated and (self.missing_eos_penalty or self.mask_truncated_completions):
            other = "missing_eos_penalty" if self.missing_eos_penalty else "mask_truncated_completions"
            raise ValueError(
                f"bootstrap_truncated says that a cut completion goes on, {other} that it is worth less or nothing; "
                "choose one"
            )
        if self.dynamic_sampling and self.num_generations < 2:
            raise ValueError(
                "dynamic_sampling looks for prompts whose completions differ in reward: set num_generations to 2 or "
                "more, or leave it off"
            )

    def _check_kl(self) -> None:
        allowed = ("k1", "k3") if self.kl_in_reward else ("k2", "k3", "k3_ratio")
        if self.kl_estimator is not None and self.kl_estimator not in allowed:
            why = "" if self.kl_in_reward else "; the expected gradient of k1 in the loss is 0"
            raise ValueError(
                f"kl_estimator must be one of {allowed} with kl_in_reward={self.kl_in_reward}, got "
                f"{self.kl_estimator!r}{why if self.kl_estimator == 'k1' else ''}"
            )

    @property
    def kl_form(self) -> Literal["k1", "k2", "k3", "k3_ratio"]:
        """The estimator that is on."""
        return self.kl_estimator or ("k1" if self.kl_in_reward else "k3")

    @property
    def clip_high(self) -> float:
        """The upper clip."""
        return self.cliprange if self.cliprange_high is None else self.cliprange_high

    @property
    def own_critic(self) -> bool:
        """Whether the critic has an adapter of its own."""
        return self.critic_adapter or self.critic_init_from_reward

    @property
    def recipe(self) -> str:
        """One line that says which variant is on."""
        kl = "none"
        if self.beta > 0:
            moves = "fixed" if self.kl_target is None else f"adaptive to {self.kl_target} nats a sequence"
            kl = f"beta {self.beta} ({moves}) {self.kl_form} in the {'reward' if self.kl_in_reward else 'loss'}"
        critic = "a head on the policy's hidden states" + (", detached" if self.detach_critic else "")
        if self.own_critic:
            critic = "an adapter of its own" + (" from the reward model" if self.critic_init_from_reward else "")
        cut = "have ended"
        if self.bootstrap_truncated:
            cut = "go on at the critic's value"
        elif self.mask_truncated_completions:
            cut = "are left out"
        elif self.missing_eos_penalty:
            cut = f"lose {self.missing_eos_penalty}"
        value_clip = "none" if self.cliprange_value is None else self.cliprange_value
        warm = f", {self.critic_warmup_steps} steps alone first" if self.critic_warmup_steps else ""
        return (
            f"PPO: {self.num_iterations} epochs of {self.optimizer_steps_per_window} minibatches; GAE gamma "
            f"{self.gamma} lambda {self.lam}{', whitened' if self.whiten_advantages else ''}; clip "
            f"{self.cliprange}/{self.clip_high}, value clip {value_clip}, vf_coef {self.vf_coef}, entropy_coef "
            f"{self.entropy_coef}; KL {kl}; critic: {critic}{warm}; cut completions {cut}"
        )
