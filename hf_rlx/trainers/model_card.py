"""The card that a trainer writes beside every model that it saves: facts out of its state, nothing else.

| file | what |
|---|---|
| README.md | the card; one that somebody has changed by hand since is left alone |
| card_facts.json | what it says, for `hf-rlx card`; the only one of them in a checkpoint |
| training.png | the curves, from two logs on and where matplotlib is installed |
| .eval_results/ | where the held-out data has an id on the Hub |
"""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError
from tqdm.auto import tqdm

from hf_rlx.assets import tiny_arith_path
from hf_rlx.cards import RunFacts, command_line, history, installed_versions
from hf_rlx.cards.beside import is_ours, write_beside
from hf_rlx.cards.command import without_local_paths
from hf_rlx.cards.facts import is_hub_id
from hf_rlx.cards.folder import SHOWN, licence_of
from hf_rlx.hub import one_line, unreachable
from hf_rlx.models.loading import weights_note
from hf_rlx.models.roles import POLICY
from hf_rlx.trainers.card_arguments import card_facts_of
from hf_rlx.trainers.checkpointing import fingerprint
from hf_rlx.trainers.progress import eval_temperature
from hf_rlx.trainers.settings import public_args, secrets_of
from hf_rlx.verifiers.format import JsonVerifier, RegexVerifier, TagVerifier
from hf_rlx.verifiers.numbers import NumberVerifier
from hf_rlx.verifiers.verdict import JudgedRows

if TYPE_CHECKING:
    from hf_rlx.trainers.base import BaseTrainer

logger = logging.getLogger(__name__)

_SECONDS = 5  # that the Hub may take to answer
_CHECKPOINT = re.compile(r"(\.tmp-)?checkpoint-\d+")
# Models that have a short name here, whose own card may not be on this machine.
_LICENCES = {"HuggingFaceTB/SmolLM2-135M-Instruct": "apache-2.0", str(tiny_arith_path()): "apache-2.0"}
# Settings that say nothing of what was learned: where things are written, how often, and on what.
_UNSHOWN = (
    *(
        "output_dir",
        "run_name",
        "logging_",
        "save_",
        "hub_",
        "push_",
        "report_",
        "disable_tqdm",
        "dataloader_",
        "log_",
    ),
    *("use_cpu", "debug", "local_rank", "_n_gpu", "project", "trackio", "do_", "ddp_", "fsdp", "accelerator_config"),
    *("resume_", "label_names", "include_", "eval_strategy", "eval_steps", "eval_on_start", "eval_delay"),
    *("per_device_eval", "load_best", "metric_for", "greater_is", "num_completions", "gradient_checkpointing"),
    *("activation_checkpointing", "generation_batch_size", "steps_per_generation", "reward_weights", "max_rollout"),
    *("model_init_kwargs", "chat_template_path", "max_tokens_per_", "isolate_", "reward_timeout", "ignore_data_skip"),
)
_VERIFIERS = (JudgedRows, NumberVerifier, RegexVerifier, TagVerifier, JsonVerifier)
_REASONS = {
    "unscored": "no completion of a rollout was scored",
    "cancelled": "the reward functions of a rollout cancelled one another",
}


@dataclass
class CardNotes:
    """What a trainer remembers for its cards.

    Attributes:
        on: whether a card goes with every model that is saved.
        given: fields of `RunFacts` that the user gave.
        first_evaluation: metrics of evaluations before the first optimizer step.
        fingerprints: name of a data set to itself and its fingerprint.
    """

    on: bool = True
    given: dict[str, Any] = field(default_factory=dict)
    first_evaluation: dict[str, Any] = field(default_factory=dict)
    fingerprints: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def note_evaluation(self, logs: dict[str, Any], step: int) -> None:
        """Keep an evaluation at step 0: `train()` begins the log anew."""
        if step or "loss" in logs:
            return
        self.first_evaluation |= {name: value for name, value in logs.items() if name.startswith("eval_")}


def save_card(trainer: BaseTrainer, folder: Path) -> None:
    """With every save of a model: the card, or of a checkpoint its facts. The model is on the disk by then, so a
    fault is logged as an error and does not stop the run."""
    if not trainer.cards.on:
        return
    try:
        if _CHECKPOINT.fullmatch(folder.name):
            facts_of(trainer).save(folder)
        elif is_ours(folder):
            write(trainer, folder)
        else:
            logger.info("%s was changed by hand and is left as it is", folder / "README.md")
    except Exception as error:
        logger.error("%s is saved, but its card was not written: %s: %s", folder, type(error).__name__, error)


def write(trainer: BaseTrainer, folder: Path, **given: Any) -> Path:
    """Write the card, whatever is there; returns its path.

    Args:
        given: fields of `RunFacts`, or transformers' and TRL's names of them (see `card_arguments`), over what the
            trainer knows; later cards of this trainer have them too.

    Raises:
        TypeError, ValueError: see `card_facts_of`.
    """
    trainer.cards.given.update(card_facts_of(given))
    return write_beside(facts_of(trainer), folder)


def facts_of(trainer: BaseTrainer) -> RunFacts:
    """What a trainer knows of its run and of its model."""
    args, shared, state = trainer.args, trainer.shared, trainer.state
    log = _log_of(trainer)
    scorer, step_scorer = getattr(trainer, "scorer", None), getattr(trainer, "step_scorer", None)
    rewards = [] if scorer is None else list(scorer.names)
    weights = [] if scorer is None or len(rewards) < 2 else [float(weight) for weight in scorer.weights]
    steps = [] if step_scorer is None else list(step_scorer.names)
    base = shared.config.name_or_path or None
    revision = getattr(shared.config, "_commit_hash", None)
    adapter = shared.roles[POLICY].adapter
    known: dict[str, Any] = {
        "method": trainer.method,
        "base_model": base,
        "base_revision": revision,
        "repo_id": getattr(trainer, "hub_model_id", None),
        "adapter": adapter is not None,
        "adapter_type": _adapter_type(shared, adapter),
        "quantization": _quantization(shared),
        **_licence(base, revision),
        **_dataset_facts(trainer),
        "rewards": rewards + [f"{name}, on steps" for name in steps],
        "reward_weights": [*weights, *(None for _ in steps)] if weights else [],
        "abstained": dict(getattr(getattr(trainer, "alerts", None), "abstained", {})),
        "hyper_parameters": hyper_parameters(args),
        "decoding": _decoding(trainer),
        "course": history.course(log),
        "alerts": alerts_of(trainer),
        "steps": state.global_step or None,
        "epochs": state.epoch or None,
        "processes": args.world_size,
        "seconds": _seconds(trainer, log),
        "command": command_line(secrets=secrets_of(args)),
        "versions": {**installed_versions(), "python": platform.python_version()},
        "hardware": hardware_line(args.device),
        "variant": _variant(args),
    }
    given = dict(trainer.cards.given)
    if base and (note := weights_note(base)) is not None:
        given["notes"] = [*given.get("notes", []), f"{note} `hf-rlx merge` makes a plain model that needs no base."]
    hooked = trainer.card_facts()
    table = _held_out(trainer, log, rewards)
    if table.get("after"):  # of the run's log, with the score before beside it
        hooked = {name: value for name, value in hooked.items() if name not in ("after", "notes")}
    tags = [*hooked.get("tags", []), *given.get("tags", [])]
    notes = [*hooked.get("notes", []), *given.get("notes", [])]
    return dataclasses.replace(RunFacts(**{**known, **table, **hooked}), **{**given, "notes": notes, "tags": tags})


def hyper_parameters(args: Any) -> dict[str, Any]:
    """What matters of a configuration, at its default or not, then what else differs from the defaults."""
    values = public_args(args)
    length = "max_steps" if values.get("max_steps", -1) > 0 else "num_train_epochs"
    shown = {name: values[name] for name in (length, *SHOWN) if values.get(name) is not None}
    shown = {name: value for name, value in shown.items() if not (value is False and name in ("bf16", "fp16"))}
    for spec in dataclasses.fields(args):
        if spec.name in shown or spec.name.startswith(_UNSHOWN) or spec.name not in values:
            continue
        default = spec.default
        if spec.default_factory is not dataclasses.MISSING:
            default = spec.default_factory()
        value = values[spec.name]
        if value is not None and spec.name not in (length, *SHOWN, "max_steps") and str(value) != _plain(default):
            shown[spec.name] = without_local_paths(value) if isinstance(value, str) else value
    return shown


def alerts_of(trainer: BaseTrainer) -> list[str]:
    """What the run warned of, in a few words each."""
    found = [_REASONS.get(name, name) for name in getattr(getattr(trainer, "alerts", None), "told", [])]
    for prefix in getattr(getattr(trainer, "watch", None), "told", []):
        where = "in evaluation" if prefix else "in training"
        found.append(f"chosen answers became less likely than at the start while the margin grew ({where})")
    return found


def hardware_line(device: torch.device) -> str:
    """The device in one line, without the host's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), {threads} thread{'s' * (threads > 1)}"


def _log_of(trainer: BaseTrainer) -> list[dict[str, Any]]:
    """The run's log; an evaluation before `train()` began, which starts the log anew, is put in front."""
    log = list(trainer.state.log_history)
    evaluated = any(entry.get("step") == 0 and any(key.startswith("eval_") for key in entry) for entry in log)
    return (
        log
        if evaluated or not trainer.cards.first_evaluation
        else [{**trainer.cards.first_evaluation, "step": 0}, *log]
    )


def _verdicts(trainer: BaseTrainer) -> set[str]:
    """Names of the reward functions that say right or wrong: verifiers without partial credit, and any with an
    attribute `binary` that is true. Of another one 0 and 1 are numbers like the rest."""
    scorer = getattr(trainer, "scorer", None)
    found = set()
    for function in [] if scorer is None else scorer.functions:
        judge = isinstance(function.call, _VERIFIERS) and not getattr(function.call, "graded", False)
        if getattr(function.call, "binary", judge):
            found.add(function.name)
    return found


def _seconds(trainer: BaseTrainer, log: list[dict[str, Any]]) -> float | None:
    """Wall clock of the training over all legs of a run that was resumed; so far, where it still trains."""
    leg = history.seconds(log)
    return (trainer.keeper.seconds if leg is None else trainer.keeper.seconds_before + leg) or None


def _held_out(trainer: BaseTrainer, log: list[dict[str, Any]], rewards: list[str]) -> dict[str, Any]:
    """Scores and measures of all held-out sets; the curve is that of the first."""
    sets: Any = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {None: trainer.eval_dataset}
    best = trainer.state.best_global_step if trainer.args.load_best_model_at_end else None
    verdicts = _verdicts(trainer)
    tables = [history.held_out(log, rewards, name, best or None, verdicts) for name in sets]
    scores = [measure for table in tables for measure in table.scores]
    measures = [measure for table in tables for measure in table.measures]
    steps = [table.step for table in tables if table.step is not None]
    found: dict[str, Any] = {
        "after_step": steps[0] if steps else None,
        "curve": history.curve(log, rewards, next(iter(sets)), verdicts),
    }
    before, after = history.score_pair(scores[0]) if scores else (None, None)
    if after is None or scores[0].dataset:
        return {**found, "measures": [*scores, *measures]}
    return {
        **found,
        "before": before,
        "after": after,
        "score_name": scores[0].name,
        "measures": [*scores[1:], *measures],
    }


def _dataset_facts(trainer: BaseTrainer) -> dict[str, Any]:
    """Names, Hub ids and fingerprints of the data sets, and whether they hold messages."""
    train: Any = trainer.train_dataset
    held_out: Any = trainer.eval_dataset
    named: dict[str, Any] = {"training": train}
    named |= held_out if isinstance(held_out, dict) else {"held-out": held_out}
    named = {name: dataset for name, dataset in named.items() if dataset is not None}
    data = {}
    for name, dataset in named.items():
        kept = trainer.cards.fingerprints.get(name)
        if kept is None or kept[0] is not dataset:
            kept = trainer.cards.fingerprints[name] = (dataset, fingerprint(dataset))
        data[name] = kept[1]
    facts: dict[str, Any] = {"data": data}
    for prefix, dataset in (("", train), ("eval_", None if isinstance(held_out, dict) else held_out)):
        hub, origin = _origin(dataset)
        facts |= {f"{prefix}dataset_id": hub, f"{prefix}dataset": origin}
    if facts["eval_dataset"] is None and facts["dataset"] is not None:
        facts["eval_dataset"] = "held-out data"  # not known to be of the training data's origin
    if train is not None and len(train):
        facts["conversational"] = any(_is_messages(value) for value in dict(train[0]).values())
    return facts


def _origin(dataset: Any) -> tuple[str | None, str | None]:
    """Hub id and name for people, as `datasets` remembers where it loaded from; (None, None) for rows in memory."""
    info: Any = getattr(dataset, "info", None)
    sources = [str(source) for source in getattr(info, "download_checksums", None) or {}]
    matches = (re.match(r"hf://datasets/([^@]+)@", source) for source in sources)
    hub = next((match[1] for match in matches if match), None) or _hub_id_of_files(dataset)
    if hub is not None:
        split = str(dataset.split) if getattr(dataset, "split", None) is not None else None
        config = info.config_name if getattr(info, "config_name", None) not in (None, "default") else None
        return hub, ", ".join([hub, *(part for part in (config, split) if part)])
    names = [Path(source).name for source in sources]
    return None, ", ".join(names[:3]) or None


def _hub_id_of_files(dataset: Any) -> str | None:
    """By the folder of its Arrow files, which `datasets` names by the commit; the Hub's cache keeps that commit's
    files under the id, which the folders above spell in small letters only."""
    for file in getattr(dataset, "cache_files", None) or []:
        commit = Path(file["filename"]).parent.name
        if re.fullmatch("[0-9a-f]{40}", commit):
            for place in Path(constants.HF_HUB_CACHE).glob(f"datasets--*/snapshots/{commit}"):
                return place.parents[1].name.removeprefix("datasets--").replace("--", "/")
    return None


def _is_messages(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and isinstance(value[0], dict) and {"role", "content"} <= set(value[0])
    )


def _licence(base: str | None, revision: str | None) -> dict[str, str]:
    """Out of the base's own card, in its folder or on the Hub; empty where it is not known."""
    if base is None:
        return {}
    if base in _LICENCES:
        return {"license": _LICENCES[base]}
    if not is_hub_id(base):
        return licence_of(Path(base))
    card = _card_of(base, revision)
    return {} if card is None else licence_of(card.parent)


@cache
def _card_of(base: str, revision: str | None) -> Path | None:
    """A base's own card, from the Hub's cache or else from the Hub, which is asked once; None where it has none or is
    out of reach."""
    cached = try_to_load_from_cache(base, "README.md", revision=revision)
    if cached is not None:  # a path, or the note that it has none
        return Path(cached) if isinstance(cached, str) else None
    if constants.HF_HUB_OFFLINE:
        return None
    try:
        # Asked for by name first: where nobody answers, the download itself would try for minutes.
        get_hf_file_metadata(hf_hub_url(base, "README.md", revision=revision), timeout=_SECONDS)
        found = hf_hub_download(base, "README.md", revision=revision, etag_timeout=_SECONDS, tqdm_class=_Silent)
    except Exception as error:
        if not isinstance(error, OSError | EntryNotFoundError) and not unreachable(error):
            raise
        logger.debug("no card of %s, and so no licence: %s", base, one_line(str(error)))
        return None
    return Path(found)


class _Silent(tqdm):
    """No bar for a small file."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


def _adapter_type(shared: Any, adapter: str | None) -> str:
    if adapter is None:
        return "lora"
    kind = shared.model.peft_config[adapter].peft_type
    return str(getattr(kind, "value", kind)).lower()


def _quantization(shared: Any) -> str | None:
    method = shared.quantization_method
    if method is None:
        return None
    config = getattr(shared.config, "quantization_config", None)
    bits = next((n for n in (4, 8) if getattr(config, f"load_in_{n}bit", False)), None)
    return " ".join([*([f"{bits}-bit"] if bits else []), str(getattr(method, "value", method))])


def _decoding(trainer: BaseTrainer) -> str | None:
    """How an online trainer answers held-out prompts."""
    args: Any = trainer.args
    if not hasattr(args, "eval_temperature"):
        return None
    answers, temperature = args.num_generations_eval or 1, eval_temperature(args)
    if temperature == 0:
        return "greedy"
    return f"{answers} sample{'s' * (answers > 1)} a prompt at temperature {temperature:g}"


def _variant(args: Any) -> str | None:
    """Which relative of GRPO or DPO a configuration is, by the switch that makes it one."""
    loss = getattr(args, "loss_type", None)
    losses = loss if isinstance(loss, list | tuple) else [loss]
    if getattr(args, "scale_rewards", None) == "leave_one_out":
        return "rloo"
    if getattr(args, "importance_sampling_level", None) == "sequence":
        return "gspo"
    return next((name for name in losses if name in ("dapo", "dr_grpo", "ipo")), None)


def _plain(default: Any) -> str:
    return str(getattr(default, "value", default))


__all__ = ["CardNotes", "alerts_of", "facts_of", "hardware_line", "hyper_parameters", "save_card", "write"]
