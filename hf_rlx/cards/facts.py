"""What a run knows about itself. Only facts: what is None or empty is left out of the card."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

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


@dataclass
class RunFacts:
    """Everything a model card says. Leave out what you do not know; nothing is filled in for you.

    Attributes:
        method: algorithm, as a lower-case tag: `"grpo"`, `"ppo"`, `"dpo"`.
        base_model: Hub id or local folder of the model that training started from. A folder is named in the text by
            its last part only, and stays out of the metadata, which the Hub resolves.
        repo_id: Hub id of the trained model, for the usage snippet.
        model_name: title of the card; else taken from `repo_id`, else from the base and the method.
        adapter: True when the folder holds a PEFT adapter and not a whole model.
        license: an identifier the Hub knows, such as `"apache-2.0"`.
        pipeline_tag: the Hub's task name.
        tags: tags beyond `hf_rlx`, the method and `lora`.
        dataset: name of the training data for people.
        dataset_id: its Hub id, if it has one.
        eval_dataset: name of the held-out data; else that of `dataset`.
        eval_dataset_id: its Hub id, if it has one.
        eval_task: task of that dataset, as its leaderboard names it.
        rewards: names of the reward functions.
        hyper_parameters: field of the configuration to value, in the order to be shown.
        before: held-out score before training.
        after: held-out score after training, on the same rows.
        decoding: how those answers were made, e.g. `"greedy"`.
        steps: optimizer steps.
        seconds: wall-clock seconds of the training.
        versions: package to version; see `installed_versions`.
        hardware: one line, e.g. `"NVIDIA T4"`.
        curve: one dict a log, `step` with any of `reward`, `kl`, `accuracy`, `low` and `high` (the last three
            held-out); see `plots.plot_run`.
        notes: sentences that a reader should know, shown under the result.
        samples: dicts with `prompt` and `completion`, and `reward` if known.
    """

    method: str
    base_model: str | None = None
    repo_id: str | None = None
    model_name: str | None = None
    adapter: bool = False
    license: str | None = None
    pipeline_tag: str = "text-generation"
    tags: list[str] = field(default_factory=list)
    dataset: str | None = None
    dataset_id: str | None = None
    eval_dataset: str | None = None
    eval_dataset_id: str | None = None
    eval_task: str = "default"
    rewards: list[str] = field(default_factory=list)
    hyper_parameters: dict[str, Any] = field(default_factory=dict)
    before: Score | None = None
    after: Score | None = None
    decoding: str | None = None
    steps: int | None = None
    seconds: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    hardware: str | None = None
    curve: list[dict[str, float | None]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)


def installed_versions(packages: Iterable[str] = _PACKAGES) -> dict[str, str]:
    """Versions of those of `packages` that are installed, read from their metadata; nothing is imported."""
    installed = {d.metadata["Name"].lower().replace("-", "_"): d.version for d in metadata.distributions()}
    return {name: installed[name] for name in packages if name in installed}
