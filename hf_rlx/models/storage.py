"""The folder layout of a `SharedModel`.

adapter_config.json, adapter_model.safetensors     the policy (or config.json, model.safetensors)
reward/adapter_config.json, ...                    any further role's adapter
reward/head.safetensors, reward/role.json          its head, how it is wired, how its scores are read
role.json                                          how a stand-alone classifier's scores are read
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import PeftConfig, PeftModel
from peft.utils import load_peft_weights, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_rlx.models import hub
from hf_rlx.models.classifier import SCORE, load_classifier, names_classifier
from hf_rlx.models.hub import ADAPTER_FILE, ADAPTER_WEIGHTS, HEAD_FILE, ROLE_FILE
from hf_rlx.models.loading import load_causal_lm
from hf_rlx.models.roles import belongs
from hf_rlx.models.sharding import tied

if TYPE_CHECKING:
    from hf_rlx.models.shared import SharedModel

logger = logging.getLogger(__name__)

_UNSAVED = ("policy", "reference")


def has_adapter(folder: Path) -> bool:
    """Whether the folder's root holds an adapter."""
    return (folder / ADAPTER_FILE).is_file()


def save(shared: SharedModel, folder: Path, state_dict: Mapping[str, Tensor] | None = None, **kwargs: Any) -> None:
    """Write all roles; everything is written beside the folder first and moved in when complete.

    `state_dict`: the weights of `shared` by name, where it does not hold them whole itself (FSDP).
    """
    state = None
    if state_dict is not None:
        state = {k.removeprefix("model."): v for k, v in tied(shared, state_dict).items()}
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".hf_rlx-", dir=folder))
    try:
        policy = shared.roles["policy"].adapter
        if policy is None:
            shared.causal_lm.save_pretrained(staging, state_dict=state, **kwargs)
        else:
            _save_adapter(shared.model, policy, staging, state)
        for name, role in shared.roles.items():
            if name in _UNSAVED:
                continue
            if role.head == SCORE:  # a classifier: the root has its weights
                (staging / ROLE_FILE).write_text(json.dumps({"facts": role.facts}, indent=2) + "\n", encoding="utf-8")
                continue
            target = staging / name
            target.mkdir()
            own = role.adapter not in (None, policy)
            if own:
                _save_adapter(shared.model, str(role.adapter), target, state)
            if role.head is not None:
                head = shared.heads[role.head].state_dict()
                if state is not None:
                    head = {k: state[f"heads.{role.head}.{k}"] for k in head}
                head = {k: v.detach().cpu().contiguous() for k, v in head.items()}
                save_file(head, target / HEAD_FILE, metadata={"format": "pt"})
            description = {"own_adapter": own, "head": role.head is not None, "facts": role.facts}
            (target / ROLE_FILE).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        _drop_stale(folder, shared)
        _move_into(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _drop_stale(folder: Path, shared: SharedModel) -> None:
    """Remove what an earlier save left and loading would take for a part of this one: an adapter where all weights
    are saved now, and roles that the model no longer has."""
    if shared.roles["policy"].adapter is None:
        for name in (ADAPTER_FILE, "adapter_model.safetensors"):
            (folder / name).unlink(missing_ok=True)
    if all(role.head != SCORE for role in shared.roles.values()):
        (folder / ROLE_FILE).unlink(missing_ok=True)
    for description in folder.glob(f"[!.]*/{ROLE_FILE}"):  # not what is staged
        if description.parent.name not in shared.roles and _describes_role(description):
            shutil.rmtree(description.parent)


def _describes_role(file: Path) -> bool:
    """Whether a role was saved there: not what else has a file of that name, as checkpoints of classifiers do."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:  # nothing of ours, so that it is left alone
        return False
    return isinstance(found, dict) and "own_adapter" in found


def _save_adapter(model: PeftModel, adapter: str, target: Path, state: dict[str, Tensor] | None) -> None:
    """PEFT puts adapters other than `default` into a sub-folder of their name; we want them at `target`."""
    with warnings.catch_warnings():
        # Offline PEFT cannot compare the vocabulary with the base's and takes it as unchanged, which it is.
        warnings.filterwarnings("ignore", "Could not find a config file in", UserWarning)
        model.save_pretrained(str(target), selected_adapters=[adapter], safe_serialization=True, state_dict=state)
    nested = target / adapter
    if adapter != "default" and nested.is_dir():
        _move_into(nested, target)
        nested.rmdir()
    (target / "README.md").unlink(missing_ok=True)  # PEFT's empty card; ours has facts in it


def _move_into(source: Path, target: Path) -> None:
    for item in sorted(source.iterdir()):
        destination = target / item.name
        if item.is_dir() and destination.is_dir():
            _move_into(item, destination)
            item.rmdir()
        else:
            os.replace(item, destination)


def load_model(
    source: hub.Source,
    peft_config: PeftConfig | None,
    base: PreTrainedModel | None,
    is_trainable: bool,
    quantization_config: Any,
    kwargs: dict[str, Any],
) -> PreTrainedModel | PeftModel:
    """The policy's model: a base with the adapter at the folder's root, named `policy`, or a base alone; see
    `SharedModel.from_pretrained`. A checkpoint of a sequence classifier gives one."""
    folder = source.folder
    if folder is None or not has_adapter(folder):
        return _load_base(source, quantization_config, kwargs) if base is None else base
    if peft_config is not None:
        raise ValueError(f"{source.name} holds an adapter; drop peft_config to train on it, or merge it first")
    _check_weights(folder)
    if base is None:
        config = PeftConfig.from_pretrained(str(folder))
        name = config.base_model_name_or_path
        if not name:
            raise ValueError(f"{folder / ADAPTER_FILE} names no base model (it was made in memory); pass base=...")
        classifier = str(getattr(config.task_type, "value", config.task_type)) == "SEQ_CLS"
        given = {"revision": config.revision, "token": source.options.get("token")}
        base = _load_base(hub.locate(name, given, kwargs), quantization_config, kwargs, classifier)
    with warnings.catch_warnings():
        # PEFT asks transformers whether checkpointing is on by the old name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return PeftModel.from_pretrained(base, str(folder), adapter_name="policy", is_trainable=is_trainable)


def _load_base(
    source: hub.Source, quantization_config: Any, kwargs: dict[str, Any], classifier: bool | None = None
) -> PreTrainedModel:
    options = {**kwargs, **source.options}
    if classifier is None:
        classifier = "gguf_file" not in kwargs and names_classifier(source.name, **options)
    return (load_classifier if classifier else load_causal_lm)(source.name, quantization_config, **options)


def _check_weights(folder: Path, *names: str) -> None:
    """Refuse an adapter (or other files, by `names`) without weights, or with pickled ones, which PEFT would load."""
    lacking = [name for name in names or (ADAPTER_FILE, ADAPTER_WEIGHTS) if not (folder / name).is_file()]
    if lacking:
        hub.refuse_pickles([path.name for path in folder.iterdir()], str(folder))
        raise FileNotFoundError(f"{folder} lacks {lacking[0]}: it was not written or not downloaded to the end")


def load_adapter(model: PeftModel, adapter: str, folder: Path, device: str) -> None:
    """Put the adapter weights saved in `folder` into the adapter of that name.

    Raises:
        ValueError: the file has weights that the adapter lacks, or the other way round (PEFT would say nothing), or
            of another shape.
    """
    _check_weights(folder)
    misfit = f"{folder} does not fit the adapter {adapter!r}"
    weights = load_peft_weights(str(folder), device=device)
    try:
        loaded: Any = set_peft_model_state_dict(model, weights, adapter_name=adapter)
    except RuntimeError as error:
        wrong = next((line.strip() for line in str(error).splitlines() if "size mismatch" in line), None)
        if wrong is None:
            raise
        raise ValueError(f"{misfit}: {wrong.rstrip('.')}; give the same peft_config") from error
    # Buffers may be missing: VeRA's shared projections follow from the configuration.
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    missing = [name for name in loaded.missing_keys if belongs(name, adapter) and name in parameters]
    if missing or loaded.unexpected_keys:
        example = (missing + loaded.unexpected_keys)[0]
        raise ValueError(
            f"{misfit}: {len(missing)} of its weights are not in the file, "
            f"{len(loaded.unexpected_keys)} of the file's are not in it, e.g. {example}; give the same peft_config"
        )


def load_roles(shared: SharedModel, folder: Path, is_trainable: bool = True) -> None:
    """Add every role that the folder's sub-folders describe, with its weights."""
    _load_facts(shared, folder)
    for place in hub.role_folders(folder):
        name = place.name
        facts = json.loads((place / ROLE_FILE).read_text(encoding="utf-8"))
        config = None
        if facts["own_adapter"]:
            _check_weights(place)
            config = PeftConfig.from_pretrained(str(place))
        shared.add_role(name, config, head=facts["head"])
        shared.roles[name].trainable = is_trainable
        shared.roles[name].facts = facts.get("facts", {})
        if config is not None:
            shared.load_adapter_weights(name, place)
        if facts["head"]:
            _check_weights(place, HEAD_FILE)
            shared.heads[name].load_state_dict(load_file(place / HEAD_FILE))


def load_into(shared: SharedModel, folder: Path) -> None:
    """Load the weights that `save` wrote at `folder` into the roles that `shared` has already.

    Raises:
        FileNotFoundError: the folder holds no weights of this kind; it names what was looked for.
    """
    policy = shared.roles["policy"].adapter
    if policy is not None:
        if not has_adapter(folder):
            raise FileNotFoundError(f"{folder} holds no adapter ({ADAPTER_FILE}), but the policy is one")
        shared.load_adapter_weights("policy", folder)
    else:
        if not (folder / "config.json").is_file():
            if has_adapter(folder):
                raise FileNotFoundError(
                    f"{folder} holds an adapter and no whole model, but here all weights train; give the peft_config "
                    "that it was trained with"
                )
            raise FileNotFoundError(f"{folder} holds no model (config.json)")
        source = type(shared.causal_lm).from_pretrained(folder, dtype=shared.dtype)
        shared.causal_lm.load_state_dict(source.state_dict())
    _load_facts(shared, folder)
    for name, role in shared.roles.items():
        if name in _UNSAVED or not (folder / name / ROLE_FILE).is_file():
            continue
        role.facts = json.loads((folder / name / ROLE_FILE).read_text(encoding="utf-8")).get("facts", {})
        if role.adapter not in (None, policy):
            shared.load_adapter_weights(name, folder / name)
        if role.head is not None:
            shared.heads[role.head].load_state_dict(load_file(folder / name / HEAD_FILE))


def _load_facts(shared: SharedModel, folder: Path) -> None:
    """What `save` noted about a stand-alone classifier's scores."""
    if (folder / ROLE_FILE).is_file():
        facts = json.loads((folder / ROLE_FILE).read_text(encoding="utf-8"))["facts"]
        for role in shared.roles.values():
            if role.head == SCORE:
                role.facts = facts
