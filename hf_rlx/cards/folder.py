"""What lies in the folder of a saved model: how it is loaded, which roles it holds, and what else is known there.

| kind | what lies there | loaded by |
|---|---|---|
| adapter | a PEFT adapter of a language model | `AutoPeftModelForCausalLM` |
| model | a whole language model | `AutoModelForCausalLM` |
| reward | the role `reward` beside a policy | `SharedModel.from_pretrained(...).reward_function()` |
| step_reward | the role `step_reward` beside a policy | `SharedModel.from_pretrained(...).step_reward_function()` |
| classifier | a whole sequence classifier | `AutoModelForSequenceClassification` |
| classifier_adapter | a PEFT adapter with the head of one | `AutoPeftModelForSequenceClassification` |
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from hf_rlx.cards import history
from hf_rlx.cards.command import short_path
from hf_rlx.cards.facts import FACTS_FILE, RunFacts

KINDS = ("adapter", "model", "reward", "step_reward", "classifier", "classifier_adapter")
ROLES = {"text-classification": "reward", "token-classification": "step_reward"}
"""The Hub's name of a task to the role that does it."""
_ADAPTER, _CONFIG, _ROLE, _STATE = "adapter_config.json", "config.json", "role.json", "trainer_state.json"
_ARGS, _RUN = "training_args.json", "run.json"
SHOWN = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "num_generations", "num_iterations", "max_completion_length", "max_length"),
    *("temperature", "beta", "kl_estimator", "kl_in_reward", "loss_type", "scale_rewards", "epsilon", "gamma"),
    *("lam", "vf_coef", "gamma_beta_ratio", "label_smoothing", "rpo_alpha", "center_rewards_coefficient"),
    *("ensemble_size", "normalizer", "bf16", "fp16", "seed"),
)
"""Fields of configurations that a card shows also at their default, in this order."""


def kind_of(folder: Path, role: str | None) -> str | None:
    """The kind of what lies in `folder`; None: no model that is known here.

    Args:
        role: what the run trained: "reward", "step_reward", or None for a policy, which may carry these roles too.
    """
    if (folder / _ADAPTER).is_file():
        if _json(folder / _ADAPTER).get("task_type") == "SEQ_CLS":
            return "classifier_adapter"
        return role if role is not None and (folder / role / _ROLE).is_file() else "adapter"
    if (folder / _CONFIG).is_file():
        names = _json(folder / _CONFIG).get("architectures") or []
        return "classifier" if any("SequenceClassification" in name for name in names) else "model"
    return None


def roles_of(folder: Path) -> dict[str, str]:
    """Role to one line on what is saved of it, and where; empty for a folder that holds the policy alone."""
    found = {}
    for path in sorted(folder.glob(f"[!.]*/{_ROLE}")):
        role = _json(path)
        if "own_adapter" not in role:  # a checkpoint of a stand-alone classifier
            continue
        adapter = _adapter_line(path.parent) if role.get("own_adapter") else "the policy's adapter"
        head = " and a scalar head" if role.get("head") else ""
        found[path.parent.name] = f"`{path.parent.name}/`: {adapter}{head}{_reading(role.get('facts') or {})}"
    if not found:
        return {}
    root = _adapter_line(folder) if (folder / _ADAPTER).is_file() else "all weights"
    return {"policy": f"the folder itself: {root}", **found}


def completed(facts: RunFacts, folder: Path) -> RunFacts:
    """`facts` with what the folder says of kind and roles, where they say nothing themselves."""
    kind = facts.kind or kind_of(folder, ROLES.get(facts.pipeline_tag))
    settings = facts.adapter_settings
    if settings is None and (folder / _ADAPTER).is_file():
        settings = _adapter_line(folder)
    roles = facts.roles or roles_of(folder)
    return dataclasses.replace(facts, kind=kind, roles=roles, adapter_settings=settings)


def facts_from_folder(folder: Path) -> RunFacts:
    """The facts that a run left in its folder: `card_facts.json`, or without it what the other files say.

    Args:
        folder: as `save_model` wrote it, or a checkpoint.

    Raises:
        FileNotFoundError: there is no such folder. ValueError: it holds no model, or a damaged file.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder")
    if (folder / FACTS_FILE).is_file():
        return RunFacts.load(folder)
    run = _json(folder / _RUN)
    method = str(run.get("trainer", "")).removesuffix("Trainer").lower().replace("iterativedpo", "iterative_dpo")
    role = {"reward": "reward", "prm": "step_reward"}.get(method)
    kind = kind_of(folder, role)
    if kind is None:
        raise ValueError(f"{folder} holds no model: neither {_ADAPTER} nor {_CONFIG} is there")
    adapter, settings = _json(folder / _ADAPTER), _json(folder / _ARGS)
    state = _json(folder / _STATE)
    log = state.get("log_history") or []
    rewards = _rewards_in(log)
    table = history.held_out(log, rewards, verdicts=())  # which functions judge is not told there
    before, after = history.score_pair(table.scores[0]) if table.scores else (None, None)
    scores = table.scores[1:] if after else table.scores
    role = "reward" if kind.startswith("classifier") else role
    task = next((task for task, name in ROLES.items() if name == role), "text-generation")
    return RunFacts(
        method=method,
        base_model=adapter.get("base_model_name_or_path") or None,
        adapter=bool(adapter),
        adapter_type=str(adapter.get("peft_type", "lora")).lower(),
        pipeline_tag=task,
        tags=["reward-model"] if role else [],
        data={"training": run["train_dataset"]} if run.get("train_dataset") else {},
        rewards=rewards,
        hyper_parameters={name: settings[name] for name in SHOWN if settings.get(name) is not None},
        before=before,
        after=after,
        score_name=table.scores[0].name if after else "accuracy",
        after_step=table.step,
        measures=[*scores, *table.measures],
        course=history.course(log),
        steps=state.get("global_step"),
        epochs=state.get("epoch"),
        processes=run.get("world_size"),
        seconds=history.seconds(log),
        curve=history.curve(log, rewards, verdicts=()),
    )


def licence_of(folder: Path) -> dict[str, str]:
    """`license`, `license_name` and `license_link` out of the card in `folder`; empty where it names none."""
    path = folder / "README.md"
    if not path.is_file():
        return {}
    import yaml
    from huggingface_hub import metadata_load

    try:
        found = metadata_load(path) or {}
    except (yaml.YAMLError, ValueError, UnicodeDecodeError):  # somebody else's card, which may be anything
        return {}
    names = ("license", "license_name", "license_link")
    return {name: found[name] for name in names if isinstance(found.get(name), str)} if "license" in found else {}


def _rewards_in(log: list[dict[str, Any]]) -> list[str]:
    """Reward functions, by what the training logs call them."""
    names = [key.split("/")[1] for entry in log for key in entry if re.fullmatch(r"rewards/[^/]+/mean", key)]
    return [name for name in dict.fromkeys(names) if name != "soft_overlong"]


def _adapter_line(folder: Path) -> str:
    config = _json(folder / _ADAPTER)
    name = str(config.get("peft_type", "PEFT"))
    name = "LoRA" if name == "LORA" else name
    parts = [f"{short} {config[long]}" for long, short in (("r", "r"), ("lora_alpha", "alpha")) if config.get(long)]
    if config.get("lora_dropout"):
        parts.append(f"dropout {config['lora_dropout']}")
    targets = config.get("target_modules")
    if targets:
        names = [targets] if isinstance(targets, str) else sorted({name.rpartition(".")[2] for name in targets})
        parts.append(f"on {', '.join(names)}")
    return f"a {name} adapter" + (f" ({', '.join(parts)})" if parts else "")


def _reading(facts: dict[str, Any]) -> str:
    """How a reward role's scores are read, as far as it is not simply the score."""
    parts = []
    if facts.get("members"):
        parts.append(f"an ensemble of {len(facts['members'])}")
    if facts.get("temperature"):
        parts.append(f"scores are divided by {facts['temperature']:.3g}")
    if facts.get("normalizer") not in (None, "none"):
        parts.append(f"normalised ({facts['normalizer']})")
    return "; " + ", ".join(parts) if parts else ""


def _json(path: Path) -> dict[str, Any]:
    """A file's dictionary; empty where there is no file.

    Raises:
        ValueError: it is damaged.
    """
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{short_path(str(path))} is damaged: {error}") from error
    return found if isinstance(found, dict) else {}
