"""What every configuration shares: TRL's defaults, strict names, and a precision that the device has."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, TypeVar, get_args

import torch
from transformers import TrainingArguments

from hf_rlx.data.special_tokens import SpecialTokens
from hf_rlx.models.loading import mixed_precision_for
from hf_rlx.secrets import masked
from hf_rlx.trainers.ranges import check_ranges
from hf_rlx.trainers.removed_fields import REMOVED_FIELDS, changes_nothing, replacement

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=type)

# Measured on two cores with SmolLM2-135M and groups of 320 tokens, beside one group at a time: two (640 tokens) take
# 8 % less time, four (1280) 14 %, for 0.2 and 0.7 GiB more of activations.
CPU_UPDATE_TOKENS = 768


def strict(cls: C) -> C:
    """Class decorator of a configuration: an unknown field names the nearest known one or its replacement, and what
    is printed holds no secret. A removed field at the default that it had is passed over with a note in the log.

    Raises (from the constructor):
        TypeError: unknown or removed fields, all of them.
    """
    original: Any = cls.__init__  # type: ignore[misc]
    known = {f.name for f in dataclasses.fields(cls) if f.init}

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(cls, kwargs, known)
        original(self, *args, **kwargs)

    cls.__init__ = init  # type: ignore[misc]
    # `HfArgumentParser` cannot parse a dictionary: it hands on text, as JSON, which `__post_init__` reads.
    written = vars(cls).get("__annotations__", {})
    dictionaries = [name for name, text in written.items() if text == "dict[str, Any] | None"]
    written.update(dict.fromkeys(dictionaries, "dict[str, Any] | str | None"))
    # A dataclass writes its own, which would show `hub_token` in every traceback and log.
    cls.__repr__ = cls.__str__ = _shown  # type: ignore[method-assign, assignment]
    return cls


def refuse_unknown(cls: type, given: dict[str, Any], known: Collection[str], **replaced: str) -> None:
    """Refuse what a configuration does not have, and take out of `given` what changes nothing.

    Args:
        cls: the configuration. given: arguments by name. known: names that it takes.
        replaced: names of this configuration alone, and what to write instead.

    Raises:
        TypeError: says of every unknown name what to write instead.
    """
    wrong = []
    for name in [name for name in given if name not in known]:
        instead = replaced.get(name) or replacement(name, known)
        if changes_nothing(name, given[name]):
            logger.info("%s has no field %s; %r, its default, changes nothing", cls.__name__, name, given.pop(name))
        elif instead is not None:
            once = " any more" if name in REMOVED_FIELDS and name not in replaced else ""
            wrong.append(f"no field `{name}`{once}; use {instead}")
        else:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
            wrong.append(f"no field `{name}`" + (f"; did you mean `{near[0]}`?" if near else ""))
    if wrong:
        raise TypeError(f"{cls.__name__} has " + "\n- and ".join(wrong))


def _shown(config: Any) -> str:
    fields = "".join(f"{name}={value!r},\n" for name, value in sorted(config.to_dict().items()))
    return f"{type(config).__name__}(\n{fields})"


_BARE: dict[str, Any] = {"nargs": "?", "const": True}  # `--bf16` without a value is True, for scripts that parse


def described(default: Any, text: str, **parsing: Any) -> Any:
    """A field with its one help text, for readers and for `--help` alike; `parsing`: for `HfArgumentParser`."""
    if isinstance(default, (list, dict, set)):
        return field(default_factory=lambda: default, metadata={"help": text, **parsing})
    return field(default=default, metadata={"help": text, **parsing})


def _dictionary(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} must be a dictionary, or one as JSON text; got {text!r}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a dictionary, got {text!r}")
    return value


@strict
@dataclass
class BaseConfig(TrainingArguments):
    """Fields of every trainer, on top of `transformers.TrainingArguments`.

    Precision: `bf16` and `fp16` left alone are chosen from the device: bf16 from compute capability 8.0 on, fp16
    on older GPUs, float32 on CPU.
    """

    logging_steps: float = described(10, "Log every so many optimizer steps.")
    # TrainingArguments types both as plain booleans; None means that the device decides.
    bf16: bool | None = described(None, "bfloat16 autocast; None: if the device has it.", **_BARE)  # type: ignore[assignment]
    fp16: bool | None = described(None, "float16 autocast; None: without bfloat16.", **_BARE)  # type: ignore[assignment]
    # Typed as text there, for the options of FSDP1.
    fsdp: bool | None = described(None, "FSDP2 over the processes of a launcher.", **_BARE)  # type: ignore[assignment]
    gradient_checkpointing: bool | None = described(
        None, "Recompute activations in the backward; None: on GPUs only, where memory is short.", **_BARE
    )
    logging_nan_inf_filter: bool = described(False, "False: a NaN loss is logged as NaN, not as 0.")
    model_init_kwargs: dict[str, Any] | None = described(None, "For `from_pretrained` when the model is a name.")
    trust_remote_code: bool = described(False, "Run code that a Hub repository carries.")
    disable_dropout: bool = described(True, "Dropout off, so that old, new and reference log-probs are one function.")
    packing: bool = described(True, "Forward each prompt once for all its responses where the model allows it.")
    max_skipped_steps: int = described(
        1, "Optimizer steps in a row that a gradient which is not finite may cost; one more ends the run."
    )
    special_tokens_in_messages: SpecialTokens = described(
        "split",
        'Special tokens written inside messages: "split" into ordinary text, "refuse", or "allow" to act as tokens, '
        "so that a dataset row can end the user's turn.",
    )
    max_tokens_per_forward: int | None = described(
        8192, "Tokens of one forward without gradient (old and reference log-probs, scores)."
    )
    max_tokens_per_update: int | None = described(
        None,
        "Tokens of one forward and backward: a micro-batch of more is done in parts, one after the other, which give "
        "the same gradient in less memory; whole groups stay together, and several processes do without. None: 768 "
        "on a CPU, where more at a time gains little; on GPUs no limit.",
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.label_smoothing_factor or self.neftune_noise_alpha is not None:
            raise ValueError(
                "label_smoothing_factor and neftune_noise_alpha are not carried: embeddings get no noise, and labels "
                "are hard; remove them"
            )
        device = torch.device("cuda" if torch.cuda.is_available() and not self.use_cpu else "cpu")
        precision = mixed_precision_for(device)
        if self.bf16 is None and self.fp16 is None:
            self.bf16, self.fp16 = precision == "bf16", precision == "fp16"
        self.bf16, self.fp16 = bool(self.bf16), bool(self.fp16)
        if self.bf16 and device.type == "cuda" and precision != "bf16":
            raise ValueError("bf16=True, but this GPU has no bfloat16 (compute capability below 8.0); use fp16=True")
        if self.max_tokens_per_update is None and device.type == "cpu":
            self.max_tokens_per_update = CPU_UPDATE_TOKENS
        if self.fp16 and (self.use_cpu or not torch.accelerator.is_available()):
            raise ValueError("fp16=True needs a GPU; on the CPU leave fp16 and bf16 alone")
        if self.activation_checkpointing is None:
            wanted = device.type == "cuda" if self.gradient_checkpointing is None else self.gradient_checkpointing
            self.activation_checkpointing = bool(wanted)
        # transformers warns about the old name on every run; the new field carries the choice.
        self.gradient_checkpointing = None
        if self.special_tokens_in_messages not in get_args(SpecialTokens):
            raise ValueError(
                f"special_tokens_in_messages must be one of {get_args(SpecialTokens)}, got "
                f"{self.special_tokens_in_messages!r}"
            )
        if self.torch_compile and device.type == "cpu":
            raise ValueError("torch_compile on a CPU is not carried: its products go through oneDNN; leave it off")
        if self.deepspeed and find_spec("deepspeed") is None:
            raise ImportError('deepspeed=... needs DeepSpeed: pip install "hf_rlx[deepspeed]", or leave it out')
        for name in ("model_init_kwargs", "generation_kwargs", "chat_template_kwargs"):
            if isinstance(getattr(self, name, None), str):  # command lines give JSON, as for TRL
                setattr(self, name, _dictionary(name, getattr(self, name)))
        super().__post_init__()

    def to_dict(self) -> dict[str, Any]:
        """`TrainingArguments.to_dict` with every secret made unreadable, also inside dictionaries and URLs: this is
        what trackers and hyper-parameter searches write down."""
        return masked(super().to_dict())
