"""What a run knows about itself. Only facts: what is None or empty is left out of the card."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_rlx.cards.command import without_local_paths
from hf_rlx.cards.files import replace_file
from hf_rlx.secrets import mask_text

FACTS_FILE = "card_facts.json"
"""The facts beside a saved model: `hf-rlx card` writes the card anew from them."""
_PACKAGES = ("hf_rlx", "torch", "transformers", "trl", "peft", "datasets", "accelerate", "bitsandbytes", "vllm")


@dataclass(frozen=True)
class Score:
    """A share of right answers with its interval.

    Attributes:
        accuracy: right answers over `n`, in 0..1.
        n: answers judged.
        low: lower end of the 95 % Wilson interval.
        high: upper end of it.
    """

    accuracy: float
    n: int
    low: float
    high: float

    @classmethod
    def from_counts(cls, right: int, n: int, z: float = 1.959964) -> Score:
        """Score of `right` answers out of `n`, with the Wilson interval.

        Unlike `p ± z·sqrt(p(1-p)/n)`, it stays inside 0..1 and has a width at p = 0 and p = 1, which is where small
        models often are:

            centre = (p + z²/2n) / (1 + z²/n)
            half   = z/(1 + z²/n) · sqrt(p(1-p)/n + z²/4n²)

        Args:
            right: number of right answers.
            n: number of answers judged.
            z: normal quantile; the default is the one of 95 %.

        Raises:
            ValueError: unless 0 <= right <= n and n > 0.
        """
        if n <= 0 or not 0 <= right <= n:
            raise ValueError(f"need 0 <= right <= n and n > 0, got right={right}, n={n}.")
        p = right / n
        scale = 1 + z * z / n
        centre = (p + z * z / (2 * n)) / scale
        half = z / scale * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        # At p = 0 and p = 1 the outer end is exactly 0 or 1, which rounding would miss by 1e-16.
        return cls(p, n, 0.0 if right == 0 else centre - half, 1.0 if right == n else centre + half)


@dataclass(frozen=True)
class Measure:
    """One line of the held-out table.

    Attributes:
        name: for people, with the unit.
        before, after: the number before and after training, on the same rows; None where it was not taken.
        before_interval, after_interval: 95 %; None where there is none.
        n: rows, pairs or answers that it is over.
        metric: the Hub's name for it, such as `"accuracy"`; None keeps it out of the metadata.
        dataset: name of the held-out set, where a run has several.
    """

    name: str
    before: float | None = None
    after: float | None = None
    before_interval: tuple[float, float] | None = None
    after_interval: tuple[float, float] | None = None
    n: int | None = None
    metric: str | None = None
    dataset: str | None = None


@dataclass(frozen=True)
class Course:
    """How a metric of the training logs began and ended.

    Attributes:
        name: for people, with the unit. first, last: values. first_step, last_step: the steps of these logs.
    """

    name: str
    first: float
    first_step: int
    last: float
    last_step: int


@dataclass
class RunFacts:
    """Everything a model card says. Leave out what you do not know; nothing is filled in for you.

    Attributes:
        method: algorithm, as a lower-case tag: `"grpo"`, `"ppo"`, `"dpo"`; empty: unknown.
        base_model: Hub id or local folder of the model that training started from. A folder is named in the text by
            its last part only, and stays out of the metadata, which the Hub resolves.
        base_revision: the commit of it on the Hub.
        repo_id: Hub id of the trained model, for the usage snippet.
        model_name: title of the card; else taken from `repo_id`, else from the base and the method.
        adapter: True when the folder holds a PEFT adapter and not a whole model.
        adapter_type: PEFT's name of it. quantization: of the base in training, e.g. `"4-bit bitsandbytes"`.
        adapter_settings: the adapter in a few words, e.g. `"a LoRA adapter (r 16, alpha 32)"`.
        kind: what the folder is loaded as, see `hf_rlx.cards.folder.KINDS`; None: as `adapter` and `pipeline_tag` say.
        roles: role to what is saved of it, and where.
        conversational: whether it was trained on messages, so that prompts go through the chat template.
        license: an identifier the Hub knows, such as `"apache-2.0"`. license_name, license_link: of `"other"`.
        pipeline_tag: the Hub's task name.
        tags: tags beyond `hf_rlx`, the method and `lora`.
        dataset: name of the training data for people.
        dataset_id: its Hub id, if it has one.
        eval_dataset: name of the held-out data; else that of `dataset`.
        eval_dataset_id: its Hub id, if it has one.
        eval_task: task of that dataset, as its leaderboard names it.
        data: "training" or a held-out set's name to rows, columns and sha256, see
            `hf_rlx.trainers.checkpointing.fingerprint`.
        rewards: names of the reward functions. reward_weights: their weights in the total.
        abstained: of those that left completions without a score: how many, and of how many.
        hyper_parameters: field of the configuration to value, in the order to be shown.
        before: held-out score before training.
        after: held-out score after training, on the same rows.
        score_name: what that score is called, with the unit.
        after_step: optimizer steps after which `after` and the measures were taken; None: all.
        measures: further lines of the held-out table.
        decoding: how those answers were made, e.g. `"greedy"`.
        course: metrics of the training logs, first and last.
        alerts: what the run warned of.
        steps: optimizer steps. epochs: passes over the training data. processes: that trained together.
        seconds: wall-clock seconds of the training.
        command: that started it, see `hf_rlx.cards.command.command_line`.
        versions: package to version; see `installed_versions`.
        hardware: one line, e.g. `"NVIDIA T4"`.
        curve: one dict a log, `step` with any of the columns of `plots.plot_run`.
        notes: sentences that a reader should know, shown under the result.
        samples: dicts with `prompt` and `completion`, and `reward` if known.
        variant: which relative of the method it is, for the citation, e.g. `"dr_grpo"`.
    """

    method: str
    base_model: str | None = None
    base_revision: str | None = None
    repo_id: str | None = None
    model_name: str | None = None
    adapter: bool = False
    adapter_type: str = "lora"
    quantization: str | None = None
    kind: str | None = None
    adapter_settings: str | None = None
    roles: dict[str, str] = field(default_factory=dict)
    conversational: bool = False
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    pipeline_tag: str = "text-generation"
    tags: list[str] = field(default_factory=list)
    dataset: str | None = None
    dataset_id: str | None = None
    eval_dataset: str | None = None
    eval_dataset_id: str | None = None
    eval_task: str = "default"
    data: dict[str, dict[str, Any]] = field(default_factory=dict)
    rewards: list[str] = field(default_factory=list)
    reward_weights: list[float | None] = field(default_factory=list)
    abstained: dict[str, tuple[int, int]] = field(default_factory=dict)
    hyper_parameters: dict[str, Any] = field(default_factory=dict)
    before: Score | None = None
    after: Score | None = None
    score_name: str = "accuracy"
    after_step: int | None = None
    measures: list[Measure] = field(default_factory=list)
    decoding: str | None = None
    course: list[Course] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)
    steps: int | None = None
    epochs: float | None = None
    processes: int | None = None
    seconds: float | None = None
    command: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    hardware: str | None = None
    curve: list[dict[str, float | None]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    variant: str | None = None

    def save(self, folder: Path, card_sha256: str | None = None) -> None:
        """Write `card_facts.json`: what is known, as JSON, without secrets and paths of this machine.

        Args:
            card_sha256: of the card that was written beside it: a card of another one was changed by hand.
        """
        known = {name: value for name, value in dataclasses.asdict(self).items() if value not in (None, [], {})}
        if self.base_model and not is_hub_id(self.base_model):
            known["base_model"] = f"./{Path(self.base_model).name}"  # a folder, as which it is read again
        if card_sha256 is not None:
            known["card_sha256"] = card_sha256
        replace_file(folder / FACTS_FILE, json.dumps(_shareable(known), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> RunFacts:
        """Read what `save` wrote; fields of another version of this package are left out.

        Raises:
            ValueError: the file is damaged.
        """
        path = folder / FACTS_FILE
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            known = {f.name for f in dataclasses.fields(cls)}
            found = {name: value for name, value in found.items() if name in known}
            for name in {"before", "after"} & found.keys():
                found[name] = Score(**found[name])
            found["measures"] = [_measure(entry) for entry in found.get("measures", [])]
            found["abstained"] = {name: (none, n) for name, (none, n) in found.get("abstained", {}).items()}
            found["course"] = [Course(**entry) for entry in found.get("course", [])]
            return cls(**{"method": "", **found})
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is damaged ({error}); save the model again") from error


def is_hub_id(model: str | None) -> bool:
    """True when `model` can be a Hub id and is no folder on this machine."""
    if not model or Path(model).exists():
        return False
    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True


def installed_versions(packages: Iterable[str] = _PACKAGES) -> dict[str, str]:
    """Versions of those of `packages` that are installed, read from their metadata; nothing is imported."""
    installed = _installed()
    return {name: installed[name] for name in packages if name in installed}


@cache
def _installed() -> dict[str, str]:
    """Looked up once: a card goes with every model that is saved."""
    return {d.metadata["Name"].lower().replace("-", "_"): d.version for d in metadata.distributions()}


def _measure(entry: dict[str, Any]) -> Measure:
    pairs = {name: tuple(entry[name]) for name in ("before_interval", "after_interval") if entry.get(name)}
    return Measure(**{**entry, **pairs})


def _shareable(value: Any) -> Any:
    """Plain JSON: no NaN, no secret, no path of this machine."""
    if isinstance(value, dict):
        return {str(key): _shareable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_shareable(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float):
        return value
    return without_local_paths(mask_text(str(value)))
