"""Fields of iterative DPO: DPO's, and what rounds, sampling, rewards and pairs need. Names and defaults of sampling
and rewards are those of `OnlineConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from hf_rlx.data.pairs import Strategy
from hf_rlx.rollout.sampling import SamplingParams
from hf_rlx.trainers.config import described, strict
from hf_rlx.trainers.dpo import DPOConfig
from hf_rlx.trainers.online_config import choose_reward_as_metric, sampling_params_of
from hf_rlx.trainers.ranges import Range

Reference = Literal["fixed", "previous", "average"]

_COUNT = Range(1, integer=True)
_RANGES = {
    "num_rounds": _COUNT,
    "prompts_per_round": _COUNT,
    "steps_per_round": _COUNT,
    "epochs_per_round": Range(0, above=True),
    "num_generations": Range(2, integer=True),
    "max_pairs_per_prompt": _COUNT,
    "pair_margin": Range(0),
    "max_reward_failures": Range(0, 1),
    "max_unscored_rollouts": _COUNT,
}
_OPTIONAL = (
    "prompts_per_round",
    "steps_per_round",
    "epochs_per_round",
    "max_pairs_per_prompt",
    "max_unscored_rollouts",
)
_TRL_EPOCHS, _SYNC_ALPHA = 3.0, 0.6  # defaults of fields that rounds decide about


@strict
@dataclass
class IterativeDPOConfig(DPOConfig):
    """Configuration of `IterativeDPOTrainer`.

    `per_device_train_batch_size` counts prompts: one pair each, or all pairs of the prompt's answers. An epoch of the
    logs is a round. `max_steps`, where given, ends the run instead of `num_rounds`.
    """

    # Rounds.
    num_rounds: int = described(3, "Rounds of sampling, scoring, pairing and training.")
    prompts_per_round: int | None = described(
        None, "Prompts that a round samples for, over all processes: the next ones of the data's order. None: all."
    )
    epochs_per_round: float | None = described(
        None, "Passes over a round's pairs; None: 1, or as steps_per_round says."
    )
    steps_per_round: int | None = described(
        None,
        "Optimizer steps of a round; None: as many as epochs_per_round passes take where every prompt gives a pair. "
        "Where some give none, the pairs there are are dealt evenly over the same steps.",
    )
    evaluate_rounds: bool = described(
        True, "Evaluate on eval_dataset before the first round and after every one, unless eval_strategy says when."
    )
    # Pairs.
    pair_strategy: Strategy = described(
        "best_worst",
        '"best_worst": one pair a prompt; "all": every pair whose scores differ by more than pair_margin; "ranked": '
        "the ranked list of a prompt's answers, with all its pairs.",
    )
    pair_margin: float = described(
        0.0, "The scores of a pair (of a list the highest and lowest) must differ by more than this, in score units."
    )
    max_pairs_per_prompt: int | None = described(None, 'For "all": at most so many, of the largest difference.')
    mask_truncated_completions: bool = described(False, "Leave completions that the length limit cut out of pairs.")
    # Reference.
    reference: Reference = described(
        "fixed",
        'What the policy is held near: "fixed": as training began; "previous": as the round began; "average": after '
        "every round moved towards the policy by ref_model_mixup_alpha.",
    )
    ref_model_mixup_alpha: float = described(0.6, 'Share of the policy in the moved reference of "average".')
    ref_model_sync_steps: int = described(512, "Set to the steps of a round: leave it out.")
    # Sampling.
    num_generations: int = described(8, "K, completions a prompt.")
    num_generations_eval: int | None = described(None, "Completions a prompt in evaluation; None: 1.")
    max_completion_length: int = described(512, "Tokens a completion, EOS included.")
    max_rollout_rows: int = described(64, "Completions that decode side by side at most.")
    temperature: float = described(1.0, "Sampling temperature.")
    top_p: float = described(1.0, "Nucleus sampling.")
    top_k: int = described(0, "Top-k sampling; 0: all tokens.")
    min_p: float | None = described(None, "Drop tokens below this share of the most probable one.")
    repetition_penalty: float = described(1.0, "Penalty on repeated tokens.")
    stop_strings: list[str] | None = described(None, "A completion ends with the token that completes one of these.")
    generation_kwargs: dict[str, Any] | None = described(None, "Sampling options that win over the fields here.")
    eval_temperature: float | None = described(
        None, "Temperature in evaluation; None: greedy for one completion a prompt, else the training temperature."
    )
    # Rewards.
    reward_weights: list[float] | None = described(
        None, "Weight of each reward function; None: 1 each; 0: logged, not trained on."
    )
    reward_timeout: float | None = described(None, "Seconds that one call of a reward function may take.")
    on_reward_error: Literal["raise", "skip"] = described(
        "skip", '"skip": the completion abstains, counted and told once, up to max_reward_failures; "raise": stop.'
    )
    max_reward_failures: float = described(
        0.25, "Share of a round's completions on which a reward function may fail before the run stops."
    )
    max_unscored_rollouts: int | None = described(
        3, "Rounds in a row in which nothing was scored after which the run stops; None: never."
    )
    isolate_rewards: bool = described(False, "Run reward functions in a worker process, which a deadline can kill.")
    reward_concurrency: int = described(1, "Prompts for which one reward function may be called at once.")
    # Completions.
    log_completions: bool = described(False, "A table of completions at every log, not only at evaluation.")
    num_completions_to_print: int | None = described(None, "Rows of the printed table; None: 6.")
    log_unique_prompts: bool = described(False, "One row a prompt in the table.")

    def __post_init__(self) -> None:
        self._check_rounds()
        choose_reward_as_metric(self)
        super().__post_init__()
        params = self.sampling_params()  # refuses bad values now rather than at the first rollout
        if params.temperature == 0:
            raise ValueError("training needs a temperature above 0: greedy completions of one prompt are all the same")
        # Where generation_kwargs win, length limits follow what the sampler does.
        self.temperature, self.max_completion_length = params.temperature, params.max_completion_length

    def _check_rounds(self) -> None:
        """Values of the fields above; and the fields that rounds decide about."""
        for name, allowed in _RANGES.items():
            value = getattr(self, name)
            problem = None if value is None and name in _OPTIONAL else allowed.problem(value)
            if problem is not None:
                raise ValueError(f"{name} {problem}")
        for name, choices in (
            ("pair_strategy", get_args(Strategy)),
            ("reference", get_args(Reference)),
            ("on_reward_error", ("raise", "skip")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if self.epochs_per_round is not None and self.steps_per_round is not None:
            raise ValueError("epochs_per_round and steps_per_round say the same; give one of them")
        if self.max_pairs_per_prompt is not None and self.pair_strategy != "all":
            raise ValueError(f'max_pairs_per_prompt is for pair_strategy="all", not {self.pair_strategy!r}')
        if self.num_train_epochs not in (_TRL_EPOCHS, self.num_rounds):
            raise ValueError(
                f"num_train_epochs={self.num_train_epochs!r} has no part here: num_rounds counts rounds, and "
                "epochs_per_round the passes over a round's pairs"
            )
        self.num_train_epochs = float(self.num_rounds)
        if self.precompute_ref_log_probs:
            raise ValueError("precompute_ref_log_probs needs the pairs before training; every round makes its own")
        if self.max_prompt_length is not None:
            raise ValueError(
                "max_prompt_length would cut prompts that were answered whole; filter the dataset instead"
            )
        self._settle_reference()

    def _settle_reference(self) -> None:
        """`reference` in terms of the fields by which a reference moves."""
        moves = self.reference != "fixed"
        if self.sync_ref_model and not moves:
            raise ValueError('sync_ref_model is said here by reference="average" (or "previous"); leave it out')
        if self.reference != "average" and self.ref_model_mixup_alpha not in (_SYNC_ALPHA, 1.0):
            raise ValueError(f'ref_model_mixup_alpha is for reference="average", not {self.reference!r}')
        self.sync_ref_model = moves
        if self.reference == "previous":
            self.ref_model_mixup_alpha = 1.0

    @property
    def reference_share(self) -> float:
        """Share of the policy that goes into the reference after a round: 0 for a fixed one, 1 for the previous."""
        return float(self.ref_model_mixup_alpha) if self.sync_ref_model else 0.0

    @property
    def rows_per_step(self) -> int:
        """Prompts of an optimizer step over all processes, at most."""
        return int(self.per_device_train_batch_size * self.gradient_accumulation_steps * self.world_size)

    def sampling_params(self, seed: int = 0, **changes: Any) -> SamplingParams:
        """The sampling settings; `generation_kwargs` win over fields, `changes` over both."""
        return sampling_params_of(self, seed, **changes)


__all__ = ["IterativeDPOConfig", "Reference"]
