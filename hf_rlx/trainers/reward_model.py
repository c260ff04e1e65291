"""What `RewardTrainer(model=...)` trains: a role on a shared base, or a stand-alone sequence classifier.

| model | peft_config | what trains |
|---|---|---|
| `SharedModel` | given or not | role `reward`: adapter and head; without a config a copy of the policy's adapter |
| `PeftModel` on a causal language model | given or not | the same; the model's adapter is the policy's |
| causal language model, name or in memory | given | the same, beside a fresh policy adapter |
| name of any decoder | none | a sequence classifier, all weights (as TRL) |
| name of any decoder | task type SEQ_CLS, or `score` saved | a sequence classifier, adapter and head (as TRL) |
| sequence classifier, name or in memory | given or not | the same |
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.utils import get_peft_model_state_dict
from transformers import PreTrainedModel

from hf_rlx.models import classifier, storage
from hf_rlx.models.roles import POLICY, REWARD, STEP_REWARD
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.config import BaseConfig
from hf_rlx.trainers.given import as_shared_model, note_loading

logger = logging.getLogger(__name__)

_REWRITING = ("corda", "loftq", "lora_ga", "olora", "pissa")  # values of `init_lora_weights`


def reward_base(
    model: Any, args: BaseConfig, quantization_config: Any = None, peft_config: PeftConfig | None = None
) -> SharedModel:
    """The `model` argument as a `SharedModel` that has, or can get, the role `reward`; see the table above.

    Raises:
        ValueError: arguments that contradict each other, or a model that cannot be a reward model; names the fix.
    """
    torch.manual_seed(args.seed)  # before anything starts at random
    if isinstance(model, SharedModel):
        return _without_reward(as_shared_model(model, args, quantization_config, None), peft_config)
    if isinstance(model, str | os.PathLike):
        return _from_name(str(model), args, quantization_config, peft_config)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if classifier.is_classifier(base):
        if isinstance(model, PeftModel) and not any(
            "score" in name.split(".") for name, p in model.named_parameters() if p.requires_grad
        ):
            raise ValueError(
                "the adapter trains without the classifier's head, which would stay random and is not saved; make it "
                'with LoraConfig(task_type="SEQ_CLS", ...)'
            )
        return as_shared_model(model, args, quantization_config, _with_head(peft_config))
    if isinstance(model, PeftModel):
        return as_shared_model(model, args, quantization_config, None)  # peft_config is the reward adapter's
    if isinstance(model, PreTrainedModel) and peft_config is None:
        raise ValueError(
            f"{type(model).__name__} with all weights training cannot be a reward model beside itself; pass "
            "peft_config=LoraConfig(...) for a reward adapter on it, or a model of AutoModelForSequenceClassification "
            "with num_labels=1"
        )
    return as_shared_model(model, args, quantization_config, peft_config)


def _from_name(name: str, args: BaseConfig, quantization_config: Any, peft_config: PeftConfig | None) -> SharedModel:
    if storage.has_adapter(Path(name)):
        return _without_reward(as_shared_model(name, args, quantization_config, None), peft_config)
    beside_policy = peft_config is not None and not _wants_classifier(peft_config)
    if beside_policy and not classifier.names_classifier(name, args.trust_remote_code):
        return as_shared_model(name, args, quantization_config, _without_head(peft_config))
    kwargs: dict[str, Any] = {"trust_remote_code": True} if args.trust_remote_code else {}
    if peft_config is not None and args.device.type == "cuda" and (args.bf16 or args.fp16):
        kwargs["dtype"] = torch.bfloat16 if args.bf16 else torch.float16
    model = classifier.load_classifier(name, quantization_config, **{**kwargs, **(args.model_init_kwargs or {})})
    shared = SharedModel.build(model, _with_head(peft_config), packing=args.packing)
    storage.load_roles(shared, Path(name))
    note_loading(shared, args)
    return shared


def step_reward_base(
    model: Any, args: BaseConfig, quantization_config: Any = None, peft_config: PeftConfig | None = None
) -> SharedModel:
    """The `model` argument as a `SharedModel` that has, or can get, the role `step_reward`: one with adapters, or a
    causal language model and a `peft_config`.

    Raises:
        ValueError: a classifier, or a model whose weights would all train; names the fix.
    """
    torch.manual_seed(args.seed)  # before anything starts at random
    named = isinstance(model, str | os.PathLike)
    adapted = isinstance(model, SharedModel | PeftModel) or (named and storage.has_adapter(Path(model)))
    if isinstance(model, PreTrainedModel) and type(model).__name__.endswith("Classification"):
        raise ValueError(
            f"{type(model).__name__} is a whole model with a head; a process reward model here is an adapter and a "
            "head on a causal language model: load it with AutoModelForCausalLM and pass peft_config=LoraConfig(...)"
        )
    if not adapted and peft_config is None:
        raise ValueError(
            "a process reward model is an adapter and a head on a language model, and this one has no adapter: pass "
            "peft_config=LoraConfig(...), or a SharedModel that has one"
        )
    shared = as_shared_model(model, args, quantization_config, None if adapted else _without_head(peft_config))
    return _without_reward(shared, peft_config, STEP_REWARD)


def _without_reward(shared: SharedModel, peft_config: PeftConfig | None, role: str = REWARD) -> SharedModel:
    """Refuse a configuration for an adapter that is there."""
    if peft_config is not None and role in shared.roles:
        raise ValueError(
            f"the model has a {'reward model' if role == REWARD else 'process reward model'} already, and a "
            "peft_config was given; drop peft_config to train on it"
        )
    return shared


def add_reward_roles(shared: SharedModel, names: list[str], peft_config: PeftConfig | None) -> None:
    """Add those of the reward roles that `shared` lacks; what it has trains on.

    A role without a `peft_config` gets the policy's, and starts as a copy of the policy's adapter: a reward model is
    initialised from what the policy was fine-tuned to (InstructGPT, 2203.02155 section 3.5).

    Raises:
        ValueError: a classifier or a model whose weights all train cannot have further adapters; `peft_config` would
            change what the policy stands on, or could not be saved beside it. Names the fix.
    """
    for name in names:
        if name in shared.roles:
            if shared.roles[name].head is None:
                raise ValueError(f"the model has a role {name!r} without a head; it cannot score")
            shared.roles[name].trainable = True
            continue
        policy = shared.roles[POLICY].adapter
        if REWARD in shared.roles and shared.roles[REWARD].head == classifier.SCORE:
            raise ValueError(
                "an ensemble needs adapters on a shared base, as a process reward model does; a stand-alone "
                "classifier has ensemble_size=1"
            )
        if policy is None:
            raise ValueError(
                "all weights of this model train, so a reward adapter has no frozen base to stand on; build it with "
                "SharedModel.from_pretrained(..., peft_config=LoraConfig(...)), or train a stand-alone classifier"
            )
        config: Any = _without_head(peft_config)
        if config is not None:
            _check_beside(config, shared.model.peft_config[policy])
        state = None
        if config is None:
            config = copy.deepcopy(shared.model.peft_config[policy])
            if getattr(config, "init_lora_weights", True) is not True:
                config.init_lora_weights = True  # others rewrite the base's weights, which the policy stands on
            state = get_peft_model_state_dict(shared.model, adapter_name=policy, save_embedding_layers=False)
            state = {key: value.clone() for key, value in state.items()}
        shared.add_role(name, config, state=state)


def adapter_facts(shared: SharedModel, names: Sequence[str]) -> dict[str, Any]:
    """What must be the same on resume of the adapters of roles: kind, rank and targets."""
    facts = {}
    for name in names:
        adapter = shared.roles[name].adapter
        if adapter is not None and shared.roles[name].head != classifier.SCORE:
            config = shared.model.peft_config[adapter]
            targets = config.target_modules
            targets = sorted(targets) if isinstance(targets, list | set | tuple) else targets
            facts[name] = [str(config.peft_type), getattr(config, "r", None), targets]
    return facts


def _check_beside(config: Any, policy: Any) -> None:
    """Refuse a reward adapter that cannot stand beside the policy's."""
    start = getattr(config, "init_lora_weights", True)
    if str(start).startswith(_REWRITING):
        raise ValueError(
            f"init_lora_weights={start!r} rewrites the base's weights, which the policy stands on too; leave it True"
        )
    if bool(getattr(config, "trainable_token_indices", None)) != bool(
        getattr(policy, "trainable_token_indices", None)
    ):
        raise ValueError(
            "trainable_token_indices must be set in the adapters of policy and reward, or in neither: PEFT cannot "
            "save them otherwise"
        )


def _wants_classifier(config: Any) -> bool:
    task = str(getattr(config.task_type, "value", config.task_type))
    return task == "SEQ_CLS" or classifier.SCORE in (getattr(config, "modules_to_save", None) or [])


def _with_head(config: PeftConfig | None) -> Any:
    """For a classifier: the task type that makes PEFT train and save the head."""
    if config is None or str(getattr(config.task_type, "value", config.task_type)) == "SEQ_CLS":
        return config
    logger.info("peft_config: task_type=SEQ_CLS, so that the classifier's head trains and is saved")
    config = copy.deepcopy(config)
    config.task_type = "SEQ_CLS"
    return config


def _without_head(config: Any) -> Any:
    """For a role: its head is no module of the base."""
    kept = [name for name in getattr(config, "modules_to_save", None) or [] if name != classifier.SCORE]
    if config is None or kept == (getattr(config, "modules_to_save", None) or []):
        return config
    config = copy.deepcopy(config)
    config.modules_to_save = kept or None
    return config
