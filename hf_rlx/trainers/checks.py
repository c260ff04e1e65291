"""Arguments of a trainer, checked by kind before anything is loaded: each message names the argument and the fix."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from peft import PeftConfig, PeftModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainingArguments

from hf_rlx.models.classifier import is_classifier
from hf_rlx.models.roles import POLICY
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers import checkpointing
from hf_rlx.trainers.config import BaseConfig
from hf_rlx.trainers.overrides import ignored_override
from hf_rlx.trainers.removed_fields import replacement

logger = logging.getLogger(__name__)


def check_arguments(
    model: Any, args: Any, config: type[BaseConfig], processing_class: Any = None, peft_config: Any = None
) -> None:
    """Refuse arguments of the wrong kind.

    Args:
        model, args, processing_class, peft_config: of the trainer.
        config: the class that `args` must be of.

    Raises:
        TypeError: names the argument, what it got, and what to pass instead.
    """
    if isinstance(model, TrainingArguments):
        name = config.__name__.replace("Config", "Trainer")
        rewards = "reward_funcs=..., " if "num_generations" in config.__dataclass_fields__ else ""
        raise TypeError(
            f"the model comes first, not {_kind(model)}: {name}(model, {rewards}args=config, train_dataset=..., "
            "processing_class=tokenizer)"
        )
    if not isinstance(args, config):
        raise TypeError(
            f"args must be a hf_rlx.{config.__name__}, got {_kind(args)}{_args_hint(args, config.__name__)}"
        )
    if not isinstance(model, str | os.PathLike | PreTrainedModel | PeftModel | SharedModel):
        hint = ""
        if isinstance(model, type):
            hint = "; pass an instance, e.g. of AutoModelForCausalLM.from_pretrained(...)"
        elif isinstance(model, nn.Module):
            hint = "; a module that is no transformers model cannot be saved and loaded by name"
        raise TypeError(
            f"model must be a name, a folder, or a causal language model of transformers, got {_kind(model)}{hint}"
        )
    if processing_class is not None and not isinstance(processing_class, PreTrainedTokenizerBase):
        hint = ""
        if isinstance(processing_class, str | os.PathLike):
            hint = f"; load it: AutoTokenizer.from_pretrained({os.fspath(processing_class)!r})"
        elif isinstance(processing_class, ProcessorMixin):
            hint = "; vision and audio are not carried: pass processing_class=processor.tokenizer for text"
        raise TypeError(f"processing_class must be a tokenizer of transformers, got {_kind(processing_class)}{hint}")
    if peft_config is not None and not isinstance(peft_config, PeftConfig):
        hint = "; write peft.LoraConfig(**config)" if isinstance(peft_config, dict) else ""
        hint = "; pass the model that has it as model=" if isinstance(peft_config, nn.Module) else hint
        raise TypeError(
            f"peft_config must be a configuration of PEFT such as LoraConfig, got {_kind(peft_config)}{hint}"
        )


def _kind(value: Any) -> str:
    """What `value` is, in words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    module = type(value).__module__.split(".")[0]
    return type(value).__name__ if module == "builtins" else f"a {module}.{type(value).__name__}"


def _args_hint(args: Any, name: str) -> str:
    if isinstance(args, dict):
        return f"; write {name}(**args)"
    if hasattr(args, "column_names"):
        return "; name the arguments: train_dataset=..."
    if hasattr(args, "per_device_train_batch_size"):
        return f'; import it with "from hf_rlx import {name}": the names of the fields are the same'
    return ""


# What other versions and libraries call a trainer's arguments.
_RENAMED = {
    "tokenizer": "processing_class",
    "config": "args",
    "training_args": "args",
    "dataset": "train_dataset",
    "reward_func": "reward_funcs",
    "reward_function": "reward_funcs",
    "reward_model": "reward_funcs",
    "lora_config": "peft_config",
}
# Arguments of other trainers that none here has, and what to do instead.
_LEFT_OUT = {
    "formatting_func": "dataset = dataset.map(...) makes the text beforehand",
    "data_collator": "rows become packed groups; change the dataset instead",
    "compute_loss_func": "a subclass may override `minibatch_loss` (GRPO, PPO), `pair_objective` or `pair_loss`",
    "optimizer_cls_and_kwargs": "pass optimizers=(optimizer, scheduler), or args with optim and optim_args",
    "model_init": "pass the model, or its name, as model=",
    "compute_metrics": "evaluate() has the metrics",
    "preprocess_logits_for_metrics": "evaluate() has the metrics",
    "ref_model": "there is no reference, or it is made from the model",
}


def name_arguments(trainer: Any) -> None:
    """Make the constructor of a trainer's class name what an unknown argument is called, or where it belongs, and
    refuse a subclass that overrides what is never called.

    Args:
        trainer: the class; one without a constructor of its own, or that takes anything, takes what it took.
    """
    original = vars(trainer).get("__init__")
    if ignored_override(trainer) is not None:
        original = _refusing(trainer.__init__)
        trainer.__init__ = original
        return
    known = {} if original is None else inspect.signature(original).parameters
    if original is None or any(p.kind is p.VAR_KEYWORD for p in known.values()):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in known:
                raise unknown_argument(trainer, name)
        original(self, *args, **kwargs)

    trainer.__init__ = init


def _refusing(original: Any) -> Any:
    """A constructor that says what its class overrides in vain; one that a subclass has put right goes on."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if (problem := ignored_override(type(self))) is not None:
            raise TypeError(problem)
        original(self, *args, **kwargs)

    return init


def unknown_argument(trainer: Any, name: str) -> TypeError:
    """What to say of an argument that a trainer's constructor does not have.

    Args:
        trainer: the class. name: of the argument.
    """
    known = list(inspect.signature(trainer.__init__).parameters)
    return TypeError(f"{trainer.__name__} has no argument {name!r}{_instead(trainer, name, known)}")


def _instead(trainer: Any, name: str, known: list[str]) -> str:
    if _RENAMED.get(name) in known:
        return f"; it is called `{_RENAMED[name]}`"
    written = str(inspect.get_annotations(trainer).get("args"))
    config = getattr(sys.modules.get(trainer.__module__), written, None)
    field = getattr(config, "__dataclass_fields__", {}).get(name)
    if field is not None and not str(field.metadata.get("help", "")).startswith("Not carried"):
        return f"; it belongs to the configuration: args={written}({name}=...)"
    if name in _LEFT_OUT:
        return f"; {_LEFT_OUT[name]}"
    instead = replacement(name, getattr(config, "__dataclass_fields__", {}))
    if instead is not None:
        return f"; use {instead}"
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean `{near[0]}`?" if near else ""


def check_trainable(shared: SharedModel, roles: Sequence[str]) -> None:
    """Refuse a run in which nothing would change although loss and gradient norm look alive (trl#6700).

    Raises:
        ValueError: no parameter of a role is trainable, or the model is none that could be a policy.
    """
    if shared.quantization_method is not None and not isinstance(shared.model, PeftModel):
        raise ValueError("a quantised model needs an adapter to train; pass peft_config=LoraConfig(...)")
    if POLICY not in roles:
        idle = [role for role in roles if not shared.trainable_parameters(role)]
        if idle:
            raise ValueError(f"no parameter of the role {idle[0]!r} is trainable; add it anew with a peft_config")
        return
    if is_classifier(shared.causal_lm):
        raise ValueError(
            f"{type(shared.causal_lm).__name__} has no vocabulary head, so it is no policy; load it with "
            "AutoModelForCausalLM, or train it with RewardTrainer"
        )
    adapter = shared.roles[POLICY].adapter
    task = None if adapter is None else shared.model.peft_config[adapter].task_type
    if str(getattr(task, "value", task)) not in ("None", "CAUSAL_LM"):
        raise ValueError(
            f'the peft_config has task_type="{getattr(task, "value", task)}", and a policy saved with it could not be '
            'loaded; write task_type="CAUSAL_LM", or leave it out'
        )
    if shared.trainable_parameters(POLICY):
        outside = checkpointing.outside_adapter(shared)
        if outside:
            logger.warning(
                "%d weights train that belong to no adapter, e.g. %s: checkpoints hold them, but save_model writes "
                "the adapter only; name their modules in LoraConfig(modules_to_save=[...])",
                len(outside),
                next(iter(outside)),
            )
        return
    if isinstance(shared.model, PeftModel):
        raise ValueError(
            f"no parameter is trainable: the adapter {shared.roles[POLICY].adapter!r} was loaded frozen; load it with "
            "PeftModel.from_pretrained(..., is_trainable=True)"
        )
    raise ValueError("no parameter is trainable: set requires_grad on the model, or pass peft_config=LoraConfig(...)")
