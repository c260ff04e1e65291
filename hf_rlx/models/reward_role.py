"""The role `reward`: one scoring function for the reward trainer, PPO, GRPO and best-of-N, and how scores are read.

    score      a head at each response's last real token, EOS included, by the response's own length
    combined   of an ensemble: mean - penalty * standard deviation of its members' scores
    read       combined / temperature, then normalised: what a policy is rewarded with (`RoleReward`)

What `read` needs is saved with the role (`Role.facts`), so a reward model gives the same number in another process:

| fact | what |
|---|---|
| members | names of the roles of the ensemble |
| uncertainty_penalty | how many standard deviations of the members are taken off |
| temperature | scores are divided by it; fitted on held-out pairs, so that sigma(difference) is a probability |
| normalizer | "none", "batch" or "running" |
| moments | of the tempered scores, see `RunningMoments` |
| max_length, chat_template_kwargs, special_tokens_in_messages | how texts were tokenized in training |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hf_rlx.data.pair_encoding import EncodedAnswers, encode_answers, fit
from hf_rlx.data.special_tokens import SpecialTokens
from hf_rlx.data.tokenize import encode_prompt
from hf_rlx.functional.statistics import RunningMoments
from hf_rlx.models import classifier
from hf_rlx.models.forward import hidden_states
from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.packing import Batch, split_by_tokens
from hf_rlx.types import Group

if TYPE_CHECKING:
    from hf_rlx.models.shared import SharedModel

logger = logging.getLogger(__name__)

NORMALIZERS = ("none", "batch", "running")


class CombinedScores(NamedTuple):
    """score: (B,) float32, mean - penalty * std of the members. spread: (B,) their population standard deviation, 0 of
    a single one. Both in the members' score units."""

    score: Tensor
    spread: Tensor


def score(
    shared: SharedModel,
    groups: Sequence[Group],
    role: str,
    max_tokens: int | None,
    ends: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """See `SharedModel.score`.

    Raises:
        ValueError: the role has no head; an end lies outside of its response.
    """
    name = shared._role(role).head
    if name is None:
        raise ValueError(f"role {role!r} has no head to score with; add it with add_role({role!r}, ...)")
    if shared._current != role:
        with torch.no_grad(), shared.as_role(role), shared.rollout_mode():
            return score(shared, groups, role, max_tokens, ends)
    head = classifier.head(shared.causal_lm) if name == classifier.SCORE else shared.heads[name]
    shared.verify(groups)
    scores, start = [], 0
    for row in split_by_tokens(groups, max_tokens):
        batch = shared.plan.batch(row, shared.device, shared._pad_token_id)
        count = len(batch.last_index)
        where = batch.last_index if ends is None else token_index(batch, ends[start : start + count])
        scores.append(head(hidden_states(shared._active, batch, where)))
        start += count
    return torch.cat(scores)


def token_index(batch: Batch, ends: Sequence[Sequence[int]]) -> Tensor:
    """(N,) where in the flattened tokens of a batch chosen tokens of its responses are, response after response.

    Args:
        batch: of B responses.
        ends: for each of them, indices of its tokens, the first response token being 0.

    Raises:
        ValueError: another number of lists than responses, or an index outside of its response.
    """
    lengths = batch.completion_mask.sum(dim=1)
    if len(ends) != len(lengths):
        raise ValueError(f"{len(ends)} lists of step ends for {len(lengths)} responses; give one each")
    for place, (row, length) in enumerate(zip(ends, lengths.tolist(), strict=True)):
        if any(not 0 <= end < length for end in row):
            raise ValueError(f"the step ends {list(row)} of response {place} must lie inside its {length} tokens")
    # What predicts a response's next token is the token itself; behind the last one there is none to predict.
    behind = lengths.cumsum(dim=0)
    where = batch.predict_index.roll(-1)
    some = lengths > 0
    where[behind[some] - 1] = batch.last_index[some]
    counts = torch.tensor([len(row) for row in ends], device=where.device)
    inside = torch.tensor([end for row in ends for end in row], dtype=torch.long, device=where.device)
    return where[(behind - lengths).repeat_interleave(counts) + inside]


def members_of(shared: SharedModel, role: str) -> list[str]:
    """The roles of an ensemble, `role` alone where there is none."""
    return list(shared._role(role).facts.get("members", [role]))


def combined(shared: SharedModel, groups: Sequence[Group], role: str, max_tokens: int | None = 8192) -> CombinedScores:
    """Scores of all members of a reward role's ensemble in one number each, without gradient.

    Args:
        groups: B responses in all. role: the first member. max_tokens: of one forward.
    """
    with torch.no_grad():
        each = torch.stack([shared.score(groups, member, max_tokens) for member in members_of(shared, role)])
    if len(each) == 1:
        return CombinedScores(each[0], torch.zeros_like(each[0]))
    spread = each.std(dim=0, correction=0)
    return CombinedScores(each.mean(dim=0) - shared._role(role).facts["uncertainty_penalty"] * spread, spread)


class RoleReward:
    """A reward role as a reward function: `PPOTrainer(model=shared, reward_funcs=shared.reward_function(), ...)`.

    Prompts are tokenized as for the policy. A completion is scored by the token ids that were sampled; without them,
    or where they are of a policy with another tokenizer, by its text, EOS added. A completion without a token has no
    score (None). What is left to the role (None below) is read at every call: training goes on behind it.

    Args:
        shared: the model with the role. role: its name.
        tokenizer: by default that which the role was trained with or which lies in the model's folder, else the one of
            the base's name.
        normalizer: "none", "batch" (each call by its own mean and deviation; a single row by the saved moments) or
            "running" (by all scores so far, starting with the saved moments, which move on and are saved with the
            model; of several processes each by its own until `share`); None: what the role was trained with. Inside
            `frozen()` both read the saved moments only.
        temperature: divides scores; None: the fitted one, else 1.
        max_tokens: of one forward.
        chat_template_kwargs, max_length: None: as in training.
        special_tokens: of messages, see `encode_messages`. None: as in training, where "refuse" was a check of the
            data and counts as "split" here.
        name: in logs.

    Raises:
        KeyError: no such role. ValueError: it has no head, the normaliser is unknown, no tokenizer is to be found, or
            the temperature is not positive.
    """

    runs_on_main_thread = True  # shares device and weights with the policy

    def __init__(
        self,
        shared: SharedModel,
        role: str = "reward",
        tokenizer: Any = None,
        *,
        normalizer: str | None = None,
        temperature: float | None = None,
        max_tokens: int | None = 8192,
        chat_template_kwargs: dict[str, Any] | None = None,
        max_length: int | None = None,
        special_tokens: SpecialTokens | None = None,
        name: str | None = None,
    ) -> None:
        if shared._role(role).head is None:
            raise ValueError(
                f"role {role!r} has no head to score with; train it with RewardTrainer(model=shared, ...)"
            )
        self.shared, self.role, self.__name__ = shared, role, name or role
        self._given: dict[str, Any] = {
            "normalizer": normalizer,
            "temperature": temperature,
            "max_length": max_length,
            "chat_template_kwargs": chat_template_kwargs,
            "special_tokens_in_messages": special_tokens,
        }
        if self.normalizer not in NORMALIZERS:
            raise ValueError(f"normalizer must be one of {NORMALIZERS}, got {self.normalizer!r}")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}")
        self.max_tokens = max_tokens
        self.tokenizer = tokenizer or tokenizer_of(shared)
        self._frozen = self._told = False
        self._base: dict[str, Any] | None = None  # the moments before those of `_since`, which `share` has not seen
        self._since = RunningMoments()

    @property
    def normalizer(self) -> str:
        """How scores are normalised."""
        return self._setting("normalizer") or "none"

    @property
    def temperature(self) -> float:
        """What scores are divided by."""
        given = self._setting("temperature")
        return 1.0 if given is None else float(given)

    @property
    def max_length(self) -> int | None:
        """Tokens of prompt and completion together; None: unlimited."""
        return self._setting("max_length")

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """Arguments of the chat template."""
        return self._setting("chat_template_kwargs") or {}

    @property
    def special_tokens(self) -> SpecialTokens:
        """What special tokens inside messages become."""
        return special_tokens_of(self.shared, self.role, self._given["special_tokens_in_messages"])

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float | None]:
        """Score N completions (text, or message lists); equal prompts in a row are forwarded once."""
        if not completions:
            return []
        if completion_ids is not None and not self._knows(completions, completion_ids):
            completion_ids = None
        encoded = list(self._encode(prompts, completions, completion_ids))
        groups = [group for answers in encoded for group in answers.groups()]
        found = [bool(ids) for answers in encoded for ids in answers.answers]
        raw = combined(self.shared, groups, self.role, self.max_tokens)
        kept = torch.tensor(found, device=raw.score.device)
        scores = self.read(raw.score.masked_fill(~kept, torch.nan))
        if log_metric is not None and bool(kept.any()):
            used = raw.score[kept]
            log_metric(f"reward_model/{self.__name__}/raw_mean", float(used.mean()))
            log_metric(f"reward_model/{self.__name__}/raw_std", float(used.std(correction=0)))
            if len(members_of(self.shared, self.role)) > 1:
                log_metric(f"reward_model/{self.__name__}/ensemble_std", float(raw.spread[kept].mean()))
        return [None if value != value else value for value in scores.tolist()]

    def read(self, scores: Tensor) -> Tensor:
        """(N,) combined scores as rewards: tempered and normalised, NaN left NaN. With "running" outside of `frozen()`
        the moments take them in first."""
        tempered = scores / self.temperature
        if self.normalizer == "none":
            return tempered
        facts = self.shared._role(self.role).facts
        moments = RunningMoments()
        if "moments" in facts:
            moments.load_state_dict(facts["moments"])
        if self.normalizer == "batch" and not self._frozen and int((~tempered.isnan()).sum()) > 1:
            moments = RunningMoments()
            moments.update(tempered)
        elif self.normalizer == "running" and not self._frozen:
            if not self._since.count:
                self._base = facts.get("moments")
            self._since.update(tempered)
            moments.update(tempered)
            if moments.count:
                facts["moments"] = moments.state_dict()
        return moments.normalize(tempered)

    def share(self, gathered: Callable[[list[Any]], list[Any]]) -> None:
        """Give all processes the moments of what they have scored together since the last call; between two calls each
        normalises by its own. Every process must call it.

        Args:
            gathered: the entries of all processes' lists, in the order of the processes.
        """
        facts = self.shared._role(self.role).facts
        base = self._base if self._since.count else facts.get("moments")
        states = gathered([self._since.state_dict()])
        self._since = RunningMoments()
        if len(states) > 1:
            merged = _merged([state for state in (base, *states) if state is not None and state["count"]])
            if merged is not None:
                facts["moments"] = merged

    def to(self, device: torch.device | str) -> None:
        """Move the model, unless it is quantised or accelerate has placed its parts."""
        placed = getattr(self.shared.causal_lm, "hf_device_map", None) is not None
        if not placed and self.shared.quantization_method is None:
            self.shared.to(device)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Inside the block the saved moments are used and left alone: for evaluation."""
        before, self._frozen = self._frozen, True
        try:
            yield
        finally:
            self._frozen = before

    def _setting(self, name: str) -> Any:
        """As given, else what the role was trained with."""
        given = self._given[name]
        return self.shared._role(self.role).facts.get(name) if given is None else given

    def _knows(self, completions: list[Any], completion_ids: list[list[int]]) -> bool:
        """Whether the ids are of this tokenizer: the same number is another word in another vocabulary."""
        for completion, ids in zip(completions, completion_ids, strict=True):
            text = completion if isinstance(completion, str) else completion[-1]["content"]
            if str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip() != text.strip():
                if not self._told:
                    logger.warning("%s has another tokenizer than the policy: it scores texts, EOS added", self.role)
                self._told = True
                return False
        return True

    def _encode(
        self, prompts: list[Any], completions: list[Any], completion_ids: list[list[int]] | None
    ) -> Iterator[EncodedAnswers]:
        """Runs of equal prompts, tokenized."""
        start = 0
        while start < len(prompts):
            end = start + 1
            while end < len(prompts) and prompts[end] == prompts[start]:
                end += 1
            if completion_ids is None:
                yield encode_answers(
                    prompts[start],
                    completions[start:end],
                    self.tokenizer,
                    max_length=self.max_length,
                    chat_template_kwargs=self.chat_template_kwargs,
                    special_tokens=self.special_tokens,
                )
            else:
                prompt = encode_prompt(prompts[start], self.tokenizer, self.chat_template_kwargs, self.special_tokens)
                answers = [list(ids) for ids in completion_ids[start:end]]
                yield fit(EncodedAnswers(prompt.ids, answers), self.max_length, self.tokenizer.bos_token_id)
            start = end


def _merged(states: list[dict[str, Any]]) -> dict[str, Any] | None:
    """States of `RunningMoments`, each of something, as one (Chan et al. 1979); None of none."""
    result: dict[str, Any] | None = None
    for state in states:
        if result is None:
            result = state
            continue
        (n, m), delta = (result["count"], state["count"]), state["mean"] - result["mean"]
        low, high = min(result["low"], state["low"]), max(result["high"], state["high"])
        result = {
            "count": n + m,
            "mean": low if low == high else result["mean"] + delta * m / (n + m),
            "m2": result["m2"] + state["m2"] + delta * delta * n * m / (n + m),
            "low": low,
            "high": high,
        }
    return result


def special_tokens_of(shared: SharedModel, role: str, given: SpecialTokens | None) -> SpecialTokens:
    """What a role does with special tokens inside messages: as given, else as in training. Rows were refused there so
    that none has any; a text that is scored later is no reason to stop, and splits them."""
    if given is not None:
        return given
    return "allow" if shared._role(role).facts.get("special_tokens_in_messages") == "allow" else "split"


def tokenizer_of(shared: SharedModel) -> Any:
    """That the model was trained with, else that was saved with it, else the base's.

    Raises:
        ValueError: the model has no name to find one by.
    """
    if shared.tokenizer is not None:
        return shared.tokenizer
    if shared.folder is not None and (shared.folder / "tokenizer_config.json").is_file():
        return load_tokenizer(str(shared.folder))
    if not shared.config.name_or_path:
        raise ValueError("the model was made in memory: no name to find its tokenizer by; pass tokenizer=")
    return load_tokenizer(shared.config.name_or_path)
