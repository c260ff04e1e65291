"""One training run of a command: configuration, data, rewards and trainer, made and run."""

from __future__ import annotations

import importlib
import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig

from hf_rlx.cli import COMMANDS, UsageError, rewards
from hf_rlx.cli.data import Data, held_out_splits, load_data
from hf_rlx.cli.names import check_model
from hf_rlx.models.loading import dtype_of, four_bit_config, load_tokenizer
from hf_rlx.models.storage import has_adapter
from hf_rlx.persistence.folders import checkpoints
from hf_rlx.persistence.interrupts import TrainingInterrupted
from hf_rlx.trainers.base import BaseTrainer
from hf_rlx.trainers.checkpointing import STATE_FILE
from hf_rlx.trainers.config import BaseConfig
from hf_rlx.trainers.given import as_shared_model

if TYPE_CHECKING:
    from hf_rlx.cli.training import Recipe

logger = logging.getLogger(__name__)


def class_of(where: str) -> Any:
    """The class at `"module:Class"`."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


class Session:
    """Everything of a run that is known before a model is loaded.

    Args:
        recipe: of the command. options: model, data, reward and run. fields: of the configuration, as given.
        beside: folder of the configuration file.

    Attributes:
        config: of the trainer. data: rows. bars_by_default: nobody said whether there are progress bars.

    Raises:
        UsageError: of the settings. ValueError, OSError: of the data.
    """

    def __init__(
        self, recipe: Recipe, options: dict[str, Any], fields: dict[str, Any], beside: Path | None = None
    ) -> None:
        self.recipe, self.options, self.beside = recipe, options, beside
        if recipe.adapter_rate is not None and options["lora"] and "learning_rate" not in fields:
            fields = {**fields, "learning_rate": recipe.adapter_rate}
        self.config = make_config(recipe, options, fields)  # before the data: mistakes show at once
        check_model(options["model"], self.config.model_init_kwargs)
        self.data: Data = load_data(options, recipe.data, self.config.seed)
        check_held_out(self.config, self.data, options)
        length = self.data.max_completion_length
        if recipe.data == "prompts" and length is not None and "max_completion_length" not in fields:
            self.config = make_config(recipe, options, {**fields, "max_completion_length": length})
        self.defaults = class_of(recipe.config)(output_dir=None)
        self.final_evaluation = self.data.held_out is not None and fields.get("eval_strategy") != "no"
        self.bars_by_default = "disable_tqdm" not in fields
        if self.final_evaluation and "eval_on_start" not in fields and self._can_score_the_base():
            self.config.eval_on_start = True

    def _can_score_the_base(self) -> bool:
        """Whether an evaluation before the first step is wanted: of methods that sample and do not evaluate there by
        themselves, at the beginning of a run."""
        by_itself = getattr(self.config, "evaluate_rounds", False) and self.config.eval_strategy == "no"
        return self.recipe.rewards and not by_itself and self._checkpoint() is None

    @property
    def reward_specs(self) -> list[Any]:
        """What scores answers: what was asked for, else the task's own verifier.

        Raises:
            UsageError: neither is there.
        """
        if self.options["reward"]:
            return list(self.options["reward"])
        if self.data.reward is None:
            raise UsageError(
                "--reward is missing: a verifier such as number or math, module:function, file.py:function, or role"
            )
        return [self.data.reward]

    def train(self, resume_line: str) -> int:
        """Build the trainer, train, evaluate what is held out, save, push; the exit status.

        Args:
            resume_line: the command that goes on after an interruption, for the message.
        """
        functions: list[Any] = []
        trainer: BaseTrainer | None = None
        if self.recipe.rewards:
            functions = rewards.read_rewards(self.reward_specs, self.beside)
        try:
            trainer = self.trainer(functions)
            found = self._checkpoint()
            begun_at = None if found is None else _step_of(found)
            try:
                trainer.train(resume_from_checkpoint=self._resume())
            except TrainingInterrupted as stop:
                _tell_how_to_resume(trainer, self.recipe.name, resume_line)
                return int(str(stop.code))
            except Exception:
                if trainer.keeper.last_saved is not None:
                    _tell_how_to_resume(trainer, self.recipe.name, resume_line)
                raise
            self._finish(trainer, begun_at)
        finally:
            if trainer is not None and hasattr(trainer, "scorer"):
                trainer.scorer.close()
            rewards.close(functions)
        return 0

    def trainer(self, functions: Sequence[Any]) -> BaseTrainer:
        """The trainer of the recipe. `functions`: what `rewards.read_rewards` gave."""
        options = self.options
        quantization = four_bit_config() if options["load_in_4bit"] else None
        given: dict[str, Any] = {"quantization_config": quantization, "peft_config": self.adapter()}
        given["model"] = options["model"]
        if self.recipe.rewards:
            given = with_roles(given, self.config, list(functions))
        given |= {name: options[name] for name in self.recipe.arguments if options.get(name) is not None}
        quiet = bool(self.config.disable_tqdm)
        if self.bars_by_default and not sys.stderr.isatty():
            self.config.disable_tqdm = True  # a bar fills a log file; lines and tables stay
        made: BaseTrainer = class_of(self.recipe.trainer)(
            args=self.config,
            train_dataset=self.data.train,
            eval_dataset=self.data.held_out,
            **given,
        )
        if hasattr(made, "tables"):
            made.tables.quiet = quiet
        made.cards.given["dataset"] = self.data.name
        if self.data.hub_id is not None:
            made.cards.given["dataset_id"] = self.data.hub_id
        return made

    def adapter(self) -> LoraConfig | None:
        """The adapter to add; None: all weights train, or the one that the model's folder has.

        Raises:
            UsageError: settings of an adapter that is there, or not wanted.
        """
        options = self.options
        if not options["lora"]:
            if options["load_in_4bit"]:
                raise UsageError("--load-in-4bit needs an adapter to train; leave --no-lora out")
            return None
        if has_adapter(Path(options["model"])):
            logger.info("%s has an adapter, which trains on; a new one is not added", options["model"])
            return None
        modules = options["lora_target_modules"]
        if isinstance(modules, str) and modules != "all-linear" and re.fullmatch(r"[\w., ]+", modules):
            modules = [name for name in re.split("[, ]+", modules) if name]  # a text is a pattern to PEFT
        return LoraConfig(
            r=options["lora_r"],
            lora_alpha=options["lora_alpha"],
            lora_dropout=options["lora_dropout"],
            target_modules=modules,
            task_type="CAUSAL_LM",
        )

    def _checkpoint(self) -> Path | None:
        """The checkpoint to go on from; None: a new run."""
        wanted = self.options["resume"]
        if wanted is not True:
            return None if wanted is None else Path(wanted)
        there = checkpoints(Path(str(self.config.output_dir)))
        return there[0] if there else None

    def _resume(self) -> str | bool | None:
        """What to pass to `train`; `auto` without a checkpoint begins anew."""
        wanted, found = self.options["resume"], self._checkpoint()
        if wanted is True and found is None:
            logger.info("no checkpoint in %s yet: a new run begins", self.config.output_dir)
            return None
        return wanted

    def _finish(self, trainer: BaseTrainer, begun_at: int | None) -> None:
        """Evaluate, save with a card, push. `begun_at`: the checkpoint's step; None: a new run."""
        config, step = self.config, trainer.state.global_step
        seen = any(e.get("step") == step and "eval_runtime" in e for e in trainer.state.log_history)
        if self.final_evaluation and not seen:
            trainer.evaluate()
        if trainer.is_world_process_zero() and (line := held_out_line(trainer.state.log_history)) is not None:
            print(line)
        trainer.save_model()
        if config.push_to_hub:
            trainer.push_to_hub()
        if trainer.is_world_process_zero():
            if step == begun_at:
                print(f"nothing was left to train: the checkpoint has {step} steps; {_raise(config)}")
            print(f"{step} step{'s' * (step != 1)} done; the model is in {config.output_dir}")


def held_out_line(log_history: Sequence[dict[str, Any]]) -> str | None:
    """The last held-out accuracy of a reward model, of pairs or over steps in one line; None: there is none, or it was
    printed."""
    for log in reversed(log_history):
        for name in ("eval_accuracy", "eval_rewards/accuracies"):
            if name in log and f"{name}_low" in log:
                low, high = log[f"{name}_low"], log[f"{name}_high"]
                if "eval_n_steps" in log:  # right and wrong steps are not equally many: one half is nothing special
                    return f"held out: accuracy over steps {log[name]:.3f} (95 % interval {low:.3f} to {high:.3f})"
                line = f"held out: accuracy {log[name]:.3f} (95 % interval {low:.3f} to {high:.3f})"
                return line + (", not told from chance" if low <= 0.5 <= high else "")
    return None


def with_roles(given: dict[str, Any], config: BaseConfig, functions: list[Any]) -> dict[str, Any]:
    """Arguments of an online trainer: `given` (model, peft_config, ...) with the reward functions; where one is the
    model's own reward role, the model is loaded here, so that the role is there before the trainer."""
    roles = [rewards.role_of(function) for function in functions]
    if not any(roles):
        return {**given, "reward_funcs": functions}
    name = given.pop("model")
    torch.manual_seed(config.seed)  # of a fresh adapter, as the trainer would
    model = as_shared_model(name, config, **given)
    config.model_init_kwargs = None  # of a model by name
    for role in roles:
        if role is not None and role not in model.roles:
            raise UsageError(
                f"--reward role: the model {name!r} has no reward model (its roles: {', '.join(model.roles)}); train "
                "one with `hf-rlx reward` and give its folder as --model"
            )
    made = [f if role is None else model.reward_function(role) for f, role in zip(functions, roles, strict=True)]
    return {"model": model, "processing_class": load_tokenizer(name), "reward_funcs": made}


def loading_options(options: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments of `from_pretrained` that have flags of their own; None where none was given.

    Raises:
        UsageError: a type that weights cannot have.
    """
    names = {"dtype": "dtype", "attn_implementation": "attn_implementation", "model_revision": "revision"}
    loading = {name: options[option] for option, name in names.items() if options[option] is not None}
    if "dtype" in loading:
        try:
            dtype_of(loading["dtype"])
        except ValueError as error:
            raise UsageError(f"--dtype: {error}") from error
    return loading or None


def make_config(recipe: Recipe, options: dict[str, Any], fields: dict[str, Any]) -> BaseConfig:
    """The configuration of a run.

    Raises:
        UsageError: a value that the configuration refuses; its message names the field.
    """
    cls = class_of(recipe.config)
    loading = {**(fields.get("model_init_kwargs") or {}), **(loading_options(options) or {})}
    given = {**fields, **({"model_init_kwargs": loading} if loading else {})}
    preset = options.get("preset")
    try:
        made: BaseConfig = cls(**given) if preset is None else cls.preset(preset, **given)
    except (ValueError, TypeError) as error:
        raise UsageError(_command_for(fields.get("loss_type"), recipe.name) or str(error)) from error
    return made


def _command_for(loss_type: Any, command: str) -> str | None:
    """What to say of a loss that the method does not have, where it is a method of its own; else None."""
    for name in loss_type if isinstance(loss_type, list) else [loss_type]:
        if str(name) in COMMANDS and str(name) != command:
            return f"--loss-type {name}: that is a command of its own here: hf-rlx {name} instead of hf-rlx {command}"
    return None


def check_held_out(config: BaseConfig, data: Data, options: dict[str, Any]) -> None:
    """Refuse evaluations during the run without rows for them, before a model is loaded.

    Raises:
        UsageError: with the flags that hold rows out, and the split that is there.
    """
    if config.eval_strategy == "no" or data.held_out is not None:
        return
    splits = held_out_splits(options["dataset"], options["train_split"])
    there = f"--eval-split {splits[0]} ({options['dataset']} has it), " if splits else ""
    when: Any = config.eval_strategy
    raise UsageError(
        f"--eval-strategy {getattr(when, 'value', when)} evaluates, but nothing is held out; give {there}"
        "--eval-dataset FILE or --eval-fraction 0.1, or leave it out"
    )


def _step_of(checkpoint: Path) -> int | None:
    """Steps that a checkpoint has done; None where it does not say, which resuming from it then tells."""
    path = checkpoint / STATE_FILE
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError):
        return None


def _raise(config: Any) -> str:
    """How to train on from a finished run."""
    name = "num_rounds" if hasattr(config, "num_rounds") else "num_train_epochs"
    name = "max_steps" if config.max_steps > 0 else name
    option, value = "--" + name.replace("_", "-"), getattr(config, name)
    return f"to train on, repeat the command with more than {option} {value:g}"


def _tell_how_to_resume(trainer: BaseTrainer, name: str, line: str) -> None:
    if not trainer.is_world_process_zero():
        return
    saved = trainer.keeper.last_saved
    if saved is None:
        print(f"hf-rlx {name}: stopped before there was a checkpoint; start it again", file=sys.stderr)
    elif trainer.args.save_only_model:
        print(f"hf-rlx {name}: stopped; the newest weights are in {saved}", file=sys.stderr)
    else:
        launcher = ", under the launcher that started it" if trainer.accelerator.num_processes > 1 else ""
        print(f"hf-rlx {name}: stopped; saved {saved}. Go on with{launcher}:\n  {line}", file=sys.stderr)
