"""A stand-alone reward model: a transformers `*ForSequenceClassification` with one label, as a `SharedModel`.

Its own weights (or its adapter) stand where a policy's would, and the role `reward` is the same weights with the
classifier's own `score` head. So it is packed, trained, scored and resumed like every other role, and saved as what it
is: `AutoModelForSequenceClassification` loads it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from hf_rlx.models.forward import hidden_states
from hf_rlx.models.loading import _resolve, load_causal_lm, load_config
from hf_rlx.models.packing import Batch

SCORE = "score"
_SUFFIX = "ForSequenceClassification"


def is_classifier(model: Any) -> bool:
    """Whether a model is a sequence classifier: a backbone and a head, no vocabulary."""
    return isinstance(model, PreTrainedModel) and _class_of(model).endswith(_SUFFIX)


def obstacle(model: Any) -> str | None:
    """Why a sequence classifier cannot be a reward model here, or None."""
    labels = getattr(model.config, "num_labels", 1)
    if labels != 1:
        return (
            f"{_class_of(model)} has num_labels={labels}; a reward model is loaded with num_labels=1, a policy with "
            "AutoModelForCausalLM"
        )
    if not isinstance(getattr(model, SCORE, None), nn.Module) or model.base_model is model:
        return (
            f"{_class_of(model)} has no `{SCORE}` head on a decoder; hf_rlx trains decoder-only reward models, e.g. "
            f"Llama{_SUFFIX}"
        )
    return None


def head(model: Any) -> Callable[[Tensor], Tensor]:
    """(N, H) hidden states -> (N,) float32 scores by the classifier's own head."""
    module = getattr(model, SCORE)

    def run(hidden: Tensor) -> Tensor:
        weight = next(p for p in module.parameters() if p.is_floating_point())
        with torch.autocast(hidden.device.type, enabled=False):
            return module(hidden.to(weight.dtype)).float().squeeze(-1)

    return run


def probe(model: PreTrainedModel, batch: Batch) -> Tensor:
    """(B, R) one number per response token that every part of its hidden state has a share in: what log-probs are for
    models with a vocabulary, to hold one forward against another."""
    hidden = hidden_states(model, batch, batch.predict_index).float()
    target = batch.targets.remainder(hidden.shape[-1])
    return batch.to_rows(hidden.log_softmax(-1).gather(-1, target[:, None])[:, 0])


def names_classifier(name_or_path: str | Path, trust_remote_code: bool = False, **kwargs: Any) -> bool:
    """Whether the checkpoint of that name was saved from a sequence classifier; `kwargs` as for `from_pretrained`.

    Raises:
        OSError: there is no such checkpoint.
    """
    source, extra = _resolve(str(name_or_path))
    if "gguf_file" in extra:
        return False
    config = load_config(source, trust_remote_code, **kwargs)
    return any(str(name).endswith(_SUFFIX) for name in config.architectures or [])


def load_classifier(name_or_path: str | Path, quantization_config: Any = None, **kwargs: Any) -> PreTrainedModel:
    """A sequence classifier with one label, from a checkpoint of one or of a causal language model.

    Args:
        name_or_path: as for `load_causal_lm`; of a language model the backbone is taken, and the head starts normal
            with deviation 1 / sqrt(H + 1).
        quantization_config, kwargs: as for `load_causal_lm`.

    Raises:
        ValueError: the model is no decoder with a `score` head.
    """
    if names_classifier(name_or_path, **kwargs):
        options = {"dtype": torch.float32, "num_labels": 1, **kwargs}
        if isinstance(options["dtype"], str) and options["dtype"] != "auto":
            options["dtype"] = getattr(torch, options["dtype"])
        if quantization_config is not None:
            options["quantization_config"] = quantization_config
        model: Any = AutoModelForSequenceClassification.from_pretrained(str(name_or_path), **options)
        problem = obstacle(model)
        if problem is not None:
            raise ValueError(f"{name_or_path}: {problem}")
        return model
    if quantization_config is not None:
        source, extra = _resolve(str(name_or_path))
        options = {"num_labels": 1, "quantization_config": quantization_config, **extra, **kwargs}
        with _quiet():
            model = AutoModelForSequenceClassification.from_pretrained(source, **options)
        return _fresh_head(model)
    return from_causal_lm(load_causal_lm(name_or_path, **kwargs))


def from_causal_lm(model: Any) -> PreTrainedModel:
    """A classifier on the backbone of a causal language model in memory, whose weights it takes over.

    Raises:
        ValueError: the family has no sequence classifier.
    """
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    try:
        with torch.device("meta"):
            classifier: Any = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise ValueError(f"{config.model_type} has no sequence classifier in transformers: {error}") from error
    problem = obstacle(classifier)
    if problem is not None:
        raise ValueError(problem)
    setattr(classifier, classifier.base_model_prefix, model.base_model)
    hidden = config.get_text_config().hidden_size
    bias = getattr(classifier.score, "bias", None) is not None
    classifier.score = nn.Linear(hidden, 1, bias=bias, device=model.device, dtype=model.dtype)
    classifier.name_or_path = classifier.config.name_or_path = model.config.name_or_path
    classifier.config.architectures = [type(classifier).__name__]
    return _fresh_head(classifier)


def _fresh_head(model: Any) -> PreTrainedModel:
    with torch.no_grad():
        nn.init.normal_(model.score.weight, std=(model.score.weight.shape[-1] + 1) ** -0.5)
        if getattr(model.score, "bias", None) is not None:
            nn.init.zeros_(model.score.bias)
    return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the report that a language model's checkpoint has no `score` and a classifier no vocabulary head."""
    log = logging.getLogger("transformers.modeling_utils")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _class_of(model: Any) -> str:
    """The class as its file defines it: quantisers and accelerate derive others from it."""
    return next((c.__name__ for c in type(model).__mro__ if c.__name__.endswith(_SUFFIX)), type(model).__name__)
