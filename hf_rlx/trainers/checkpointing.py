"""What a checkpoint holds, and how a run goes on from it exactly.

| file | what |
|---|---|
| adapter or model, role folders, tokenizer, training_args.json | as `save_model` writes them |
| trainer_state.json | transformers': step, epoch, log history, callbacks |
| optimizer, scheduler, scaler (.json, .safetensors) | as their `state_dict` says |
| reference (.json, .safetensors) | a reference that is not simply the base: where it has moved to |
| zero-<n> (.json, .safetensors) | under DeepSpeed, in place of optimizer: each process's share |
| rank-<n> (.json, .safetensors) | of each process: random states, running loss and metrics, the trainer's own state |
| run.json | what must not change on resume: processes, batch, seed, data |
| manifest.json | size and sha256 of every file |
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_callback import ExportableState, TrainerState

from hf_rlx.models import reference
from hf_rlx.models.roles import POLICY, belongs
from hf_rlx.models.sharding import full_optimizer_state, is_sharded, load_full_optimizer_state, share_of, whole
from hf_rlx.persistence import folders
from hf_rlx.persistence.state import load_state, save_state, size_of
from hf_rlx.trainers import zero
from hf_rlx.trainers.processes import raise_together
from hf_rlx.trainers.settings import ARGS_FILE, public_args

if TYPE_CHECKING:
    from hf_rlx.models.shared import SharedModel
    from hf_rlx.trainers.base import BaseTrainer

logger = logging.getLogger(__name__)

RUN_FILE, STATE_FILE = "run.json", "trainer_state.json"
_SAMPLED_ROWS = 2000  # rows of a data set that its fingerprint reads
# Settings that may differ on resume without a word: they do not touch what is computed.
_FREE: tuple[str, ...] = (
    "save_",
    "logging_",
    "eval_",
    "hub_",
    "push_",
    "report_",
    "output_dir",
    "disable_tqdm",
)
_FREE += (
    "run_name",
    "load_best",
    "resume_",
    "dataloader_",
    "project",
    "trackio",
    "log_",
    "num_completions_",
)


def save(trainer: BaseTrainer, target: Path, position: dict[str, Any]) -> None:
    """Write a checkpoint: whole, or not at all.

    Args:
        target: `<run>/checkpoint-<step>`. position: the trainer's `run_state` at that step.

    Raises:
        DiskFullError: not enough space, before or while writing; earlier checkpoints stay.
    """
    main, needed = trainer.args.should_save, _needed(trainer, position)
    _together(target, main, needed, lambda: folders.begin(target, needed) if main else None)
    folder = folders.staging(target)
    _together(target, main, needed, lambda: _write(trainer, folder, position))
    facts = {"step": trainer.state.global_step, "trainer": type(trainer).__name__, "versions": _versions()}
    _together(target, main, needed, lambda: folders.commit(target, facts) if main else None)


def _together(target: Path, main: bool, needed: int, work: Any) -> None:
    """Do one phase of saving; where it fails in any process, it fails in all, and nothing is left behind."""
    fault: BaseException | None = None
    try:
        work()
    except Exception as error:
        fault = error
        if folders.out_of_space(error) and not isinstance(error, folders.DiskFullError):
            fault = folders.full(target, needed, shutil.disk_usage(target.parent).free)
            fault.__cause__ = error
    try:
        raise_together(fault)
    except BaseException:
        if main:
            folders.abort(target)
        raise


def _write(trainer: BaseTrainer, folder: Path, position: dict[str, Any]) -> None:
    args = trainer.args
    # Gathered before anything is written: a process that cannot write must not leave the others gathering.
    states = {} if args.save_only_model else _shared_states(trainer)
    trainer.save_model(str(folder), _internal_call=True)
    if args.should_save:
        state: Any = trainer.state
        state.stateful_callbacks = _callback_states(trainer)
        trainer.state.save_to_json(str(folder / STATE_FILE))
        (folder / RUN_FILE).write_text(json.dumps(facts_of(trainer), indent=1) + "\n", encoding="utf-8")
    if args.save_only_model:
        return
    if args.should_save:
        for name, state in states.items():
            save_state(folder, name, state)
    save_state(folder, f"rank-{args.process_index}", position)
    if trainer.zero:
        save_state(folder, f"zero-{args.process_index}", zero.optimizer_state(trainer))


def _callback_states(trainer: BaseTrainer) -> dict[str, Any]:
    """As transformers keeps them: by class name, a list where a class has several."""
    states: dict[str, list[dict]] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: found[0] if len(found) == 1 else found for name, found in states.items()}


def _shared_states(trainer: BaseTrainer, gather: bool = True) -> dict[str, Any]:
    """States that all processes have in common. Every process must call it; with split weights the one that saves
    gets the optimizer's whole state, by name. `gather` False: for the size only, it stays split."""
    split = gather and is_sharded(trainer.shared)
    optimizer: Any = trainer.optimizer
    scheduler: Any = trainer.lr_scheduler
    states: dict[str, Any] = {
        "scheduler": scheduler.state_dict(),
        "outside": outside_adapter(trainer.shared),
    }
    if not trainer.zero:
        states["optimizer"] = full_optimizer_state(trainer.shared, optimizer) if split else optimizer.state_dict()
    if trainer.accelerator.scaler is not None:
        states["scaler"] = trainer.accelerator.scaler.state_dict()
    with_model = bool(getattr(trainer.args, "sync_ref_model", False))
    moved = reference.state(trainer.shared, with_model)
    return states if moved is None else {**states, "reference": moved}


def outside_adapter(shared: SharedModel) -> dict[str, torch.Tensor]:
    """Weights that train beside the policy's adapter and belong to none, by name: its file does not hold them."""
    adapter = shared.roles[POLICY].adapter
    if adapter is None:
        return {}
    names = shared.policy_parameters
    return {n: whole(p.detach()) for n, p in shared.named_parameters() if n in names and not belongs(n, adapter)}


def _needed(trainer: BaseTrainer, position: dict[str, Any]) -> int:
    """Bytes that a checkpoint takes: weights that are saved, and the states."""
    shared = trainer.shared
    whole = shared.roles[POLICY].adapter is None
    weights = sum(p.numel() * p.element_size() for p in shared.parameters() if whole or p.requires_grad)
    if trainer.args.save_only_model:
        return weights
    each = size_of(position) + (size_of(zero.optimizer_state(trainer)) if trainer.zero else 0)
    return weights + size_of(_shared_states(trainer, gather=False)) + each * trainer.args.world_size


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers", "peft", "accelerate")}


def load_weights(trainer: BaseTrainer, folder: Path) -> None:
    """Weights that no adapter's or model's file holds: trained ones outside the adapter, and the reference's."""
    shared = trainer.shared
    if (folder / "outside.json").is_file():
        named = dict(shared.named_parameters())
        with torch.no_grad():
            for name, tensor in load_state(folder, "outside").items():
                named[name].copy_(share_of(tensor, named[name]))
    if (folder / "reference.json").is_file():
        reference.load_state(shared, load_state(folder, "reference"))


def load_optimizer(trainer: BaseTrainer, folder: Path) -> None:
    """Optimizer, scheduler and gradient scaler."""
    optimizer: Any = trainer.optimizer
    scheduler: Any = trainer.lr_scheduler
    if trainer.zero:
        zero.load_optimizer_state(trainer, load_state(folder, f"zero-{trainer.args.process_index}"))
    elif is_sharded(trainer.shared):
        load_full_optimizer_state(trainer.shared, optimizer, load_state(folder, "optimizer"))
    else:
        optimizer.load_state_dict(load_state(folder, "optimizer"))
    scheduler.load_state_dict(load_state(folder, "scheduler"))
    if trainer.accelerator.scaler is not None and (folder / "scaler.json").is_file():
        trainer.accelerator.scaler.load_state_dict(load_state(folder, "scaler"))


def finished(trainer: BaseTrainer, folder: Path) -> bool:
    """Whether the run of a checkpoint has done all its steps; then its weights and state are put in place. The loop
    itself looks only after a step, and would do one more."""
    state = TrainerState.load_from_json(str(folder / STATE_FILE))
    steps = trainer.args.max_steps
    if steps <= 0:
        steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[6]
    if state.global_step < steps:
        return False
    trainer._load_from_checkpoint(str(folder))
    trainer.state = state
    position = position_of(trainer, folder)
    trainer.keeper.seconds_before = position.get("seconds", 0.0)
    for name in ("alerts", "watch", "scorer"):  # what the card tells, and what an evaluation scores with
        if hasattr(getattr(trainer, name, None), "load_state_dict") and name in position:
            getattr(trainer, name).load_state_dict(position[name])
    if hasattr(trainer, "alerts"):
        trainer.alerts.on_train_end(trainer.args, trainer.state, trainer.control)  # adds up over the processes
    if trainer.args.load_best_model_at_end:
        trainer._load_best_model()
    logger.warning("%s has done %d of %d steps: nothing is left to train", folder, state.global_step, steps)
    return True


def position_of(trainer: BaseTrainer, folder: Path) -> dict[str, Any]:
    """This process's `run_state`."""
    return load_state(folder, f"rank-{trainer.args.process_index}")


def facts_of(trainer: BaseTrainer) -> dict[str, Any]:
    """What must not change on resume."""
    return {
        "trainer": type(trainer).__name__,
        "save_only_model": trainer.args.save_only_model,
        **trainer.run_facts(),
        "optimizer": [str(getattr(trainer.args.optim, "value", trainer.args.optim)), trainer.args.optim_args],
        "policy": _policy_of(trainer.shared),
        "frozen_weights": trainer.frozen_weights,
        "train_dataset": fingerprint(trainer.train_dataset),
    }


def _policy_of(shared: SharedModel) -> Any:
    """The adapter's settings that change what it computes; "all weights" without one."""
    adapter = shared.roles[POLICY].adapter
    if adapter is None:
        return "all weights"
    config = shared.model.peft_config[adapter].to_dict()
    names = ("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "bias", "modules_to_save")
    found = {name: config[name] for name in names if config.get(name) is not None}
    for name in ("target_modules", "modules_to_save"):
        if isinstance(config.get(name), list | set | tuple):
            found[name] = sorted(config[name])  # PEFT keeps a set, whose order changes from process to process
    return found


def frozen_weights(shared: SharedModel) -> str:
    """A sha256 over the first numbers of every weight of the base that does not train."""
    adapters = list(getattr(shared.model, "peft_config", {}))
    digest = hashlib.sha256()
    for name, parameter in shared.named_parameters():
        part_of_role = name.startswith("heads.") or any(belongs(name, adapter) for adapter in adapters)
        if not part_of_role and name not in shared.policy_parameters:
            digest.update(repr(parameter.detach().flatten()[:8].float().tolist()).encode())
    return digest.hexdigest()


def fingerprint(dataset: Any) -> dict[str, Any] | None:
    """Rows, columns, and a sha256 over up to 2,000 rows spread evenly over a data set; None for none."""
    if dataset is None:
        return None
    rows, digest = len(dataset), hashlib.sha256()
    step = max(1, -(-rows // _SAMPLED_ROWS))
    for index in range(0, rows, step):
        digest.update(json.dumps(dataset[index], sort_keys=True, default=repr).encode("utf-8", "surrogatepass"))
    columns = sorted(getattr(dataset, "column_names", None) or dataset[0])
    return {"rows": rows, "columns": columns, "sha256": digest.hexdigest()}


def check_resume(trainer: BaseTrainer, folder: Path) -> None:
    """Refuse to go on where the run could not be the same; say what else has changed.

    Raises:
        ValueError: another trainer, number of processes, batch, seed or data set; the message lists them.
    """
    if not (folder / RUN_FILE).is_file():
        raise FileNotFoundError(f"{folder / RUN_FILE} is missing: the checkpoint cannot be resumed from")
    then, now = json.loads((folder / RUN_FILE).read_text(encoding="utf-8")), facts_of(trainer)
    now = json.loads(json.dumps(now))  # as it would be read
    if then.pop("save_only_model"):
        raise ValueError(f"{folder} was written with save_only_model=True: there is no optimizer state to resume from")
    now.pop("save_only_model")
    changed = [
        f"{name}: {_short(then.get(name))} -> {_short(now.get(name))}"
        for name in {**then, **now}
        if then.get(name) != now.get(name)
    ]
    if changed:
        raise ValueError(
            f"{folder} belongs to another run and would not continue as it was. Then -> now: {'; '.join(changed)}. "
            f"Set them back, or start a new run from its weights: model={str(folder)!r}"
        )
    before = json.loads((folder / ARGS_FILE).read_text(encoding="utf-8"))
    current = json.loads(json.dumps(public_args(trainer.args)))
    differences = [
        f"{name}: {_short(old)} -> {_short(current.get(name))}"
        for name, old in before.items()
        if not name.startswith(_FREE) and name not in then and old != current.get(name)
    ]
    if differences:
        logger.warning("resuming with other settings than before: %s", "; ".join(differences))


def _short(value: Any) -> str:
    if isinstance(value, dict) and "sha256" in value:
        return f"{value['rows']} rows of {value['columns']}, sha256 {value['sha256'][:8]}"
    return repr(value)


def best_checkpoint(trainer: BaseTrainer, run: Path) -> None:
    """Note in the state where the best checkpoint lies, as transformers does."""
    if trainer.state.best_global_step:
        folder = run / f"checkpoint-{trainer.state.best_global_step}"
        if folder.exists() or trainer.state.best_global_step == trainer.state.global_step:
            trainer.state.best_model_checkpoint = os.fspath(folder)


__all__ = [
    "best_checkpoint",
    "check_resume",
    "facts_of",
    "fingerprint",
    "load_optimizer",
    "load_weights",
    "position_of",
    "save",
]
