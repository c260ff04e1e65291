"""The memory that a run takes, from its settings alone: no weight is loaded.

Sizes are those of the longest rows that the settings allow, in a step after the first, when everything is there. How
they follow from the settings stands in `hf_rlx.models.footprint`, what the model weighs in `hf_rlx.models.blueprint`.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftConfig

from hf_rlx.models.blueprint import Blueprint, blueprint, config_of
from hf_rlx.models.footprint import Part, Run, entries_of, total_of
from hf_rlx.trainers.config import CPU_UPDATE_TOKENS, BaseConfig
from hf_rlx.trainers.online_config import OnlineConfig

GIB = 2**30
# What a program gets of each: the driver keeps the rest.
CARDS: dict[str, float] = {"t4": 14.5, "l4": 22.5, "a100": 39.4, "a100-80": 79.2}
ALGORITHMS: dict[str, str] = {
    "sft": "hf_rlx.trainers.sft:SFTConfig",
    "reward": "hf_rlx.trainers.reward:RewardConfig",
    "prm": "hf_rlx.trainers.prm:PRMConfig",
    "grpo": "hf_rlx.trainers.grpo:GRPOConfig",
    "ppo": "hf_rlx.trainers.ppo_config:PPOConfig",
    "dpo": "hf_rlx.trainers.dpo:DPOConfig",
    "ipo": "hf_rlx.trainers.ipo:IPOConfig",
    "simpo": "hf_rlx.trainers.simpo:SimPOConfig",
    "orpo": "hf_rlx.trainers.orpo:ORPOConfig",
    "iterative-dpo": "hf_rlx.trainers.iterative_dpo:IterativeDPOConfig",
}


class Advice(NamedTuple):
    """A change of the settings, and the bytes that it saves."""

    change: str
    saving: int

    def __str__(self) -> str:
        return f"{self.change}: saves {self.saving / GIB:.2f} GiB"


def capacity(card: str) -> int:
    """Bytes of a card: a name of `CARDS`; "cpu" for this machine's memory, "cuda" for its GPU's.

    Raises:
        ValueError: no such card.
    """
    name = card.lower().removeprefix("nvidia ").replace("_", "-").replace(" ", "-")
    name = {"a100-40": "a100", "a100-40gb": "a100", "a100-80gb": "a100-80"}.get(name, name)
    if name in CARDS:
        return int(CARDS[name] * GIB)
    if name == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if name == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1])
    raise ValueError(f"no card {card!r} is known; it must be one of {', '.join([*CARDS, 'cpu'])}")


@dataclass(frozen=True)
class Estimate:
    """What a run takes.

    Attributes:
        entries: what is alive, and when. run, sizes, config: what it was computed from; `config` is the model's.
        device: "cpu" or a card. what: the settings in a few words.
    """

    entries: list[Part]
    run: Run
    sizes: Blueprint
    device: str
    what: str
    config: Any = field(repr=False)

    @property
    def parts(self) -> dict[str, int]:
        """Name to bytes; those of different phases are not alive together."""
        return {part.name: part.bytes for part in self.entries}

    @property
    def phases(self) -> dict[str, int]:
        """Bytes in each phase, what is always there included."""
        always = sum(p.bytes for p in self.entries if p.phase == "always")
        sums: dict[str, int] = {p.phase: always for p in self.entries if p.phase != "always"}
        for part in self.entries:
            if part.phase != "always":
                sums[part.phase] += part.bytes
        return sums

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return max(self.phases.values())

    def fits(self, card: str | None = None) -> bool:
        """Whether the peak is within a card's memory (see `capacity`); None: that of `device`.

        Raises:
            ValueError: no such card.
        """
        return self.total <= capacity(card or self.device)

    @cached_property
    def advice(self) -> list[Advice]:
        """What to change to take less, the largest saving first; each saving is that of its change alone."""
        found = []
        for text, run, sizes in _changes(self):
            saving = self.total - total_of(entries_of(run, sizes))
            if saving > 0.01 * self.total:
                found.append(Advice(text, saving))
        return sorted(found, key=lambda advice: -advice.saving)


def estimate(
    model: Any,
    algorithm: str = "grpo",
    args: BaseConfig | Mapping[str, Any] | None = None,
    peft_config: PeftConfig | None = None,
    four_bit: bool = False,
    prompt_tokens: int = 256,
    completion_tokens: int | None = None,
    device: str = "cpu",
    roles: int = 0,
    gradient_checkpointing: bool | None = None,
) -> Estimate:
    """The memory that a run takes at its peak.

    Args:
        model: a name as for a trainer, a folder, a configuration, or a model in memory.
        algorithm: of `ALGORITHMS`.
        args: the trainer's configuration, or some of its fields; None: the defaults. Of what a configuration chooses
            by device (precision, checkpointing, `max_tokens_per_update`) it counts what it would choose on `device`.
        peft_config: the adapter that trains. None: the one in the model's folder, else all weights train.
        four_bit: the base's matrices in 4-bit NF4.
        prompt_tokens, completion_tokens: of the longest rows. None: as long as the settings allow.
        device: "cpu", "t4", "l4", "a100", "a100-80", or "cuda" for this machine's GPU.
        roles: frozen adapters beside it, such as the role `reward`.
        gradient_checkpointing: None: as `args` say, or on a GPU whose choice `args` could not make, on.

    Raises:
        ValueError: an unknown algorithm or card, lengths below 1, a 4-bit base without an adapter. OSError: no such
            model.
    """
    algorithm = algorithm.replace("_", "-")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"no algorithm {algorithm!r} is known; it must be one of {', '.join(ALGORITHMS)}")
    capacity(device)  # refuses an unknown one
    if prompt_tokens < 1 or (completion_tokens is not None and completion_tokens < 1):
        raise ValueError("prompt_tokens and completion_tokens must be at least 1")
    if not isinstance(args, BaseConfig):
        module, _, name = ALGORITHMS[algorithm].partition(":")
        made: BaseConfig = getattr(importlib.import_module(module), name)(**{"output_dir": "unused", **(args or {})})
        args = made
    loading: dict[str, Any] = dict(getattr(args, "model_init_kwargs", None) or {})
    config, there = config_of(model, trust_remote_code=args.trust_remote_code, **loading)
    peft_config = there if peft_config is None else peft_config
    if four_bit and peft_config is None:
        raise ValueError("4-bit weights cannot train; give a peft_config")
    weights = _type_of(loading.get("dtype"), config)
    compute = _compute_type(args, device, weights)
    sizes = blueprint(config, peft_config, compute)
    context = getattr(config.get_text_config(), "max_position_embeddings", None)
    run = _run_of(algorithm, args, sizes, device, prompt_tokens, completion_tokens, context)
    if gradient_checkpointing is not None:
        run = replace(run, checkpointing=gradient_checkpointing)
    trained = there is not None or (peft_config is not None and not getattr(peft_config, "init_lora_weights", True))
    if run.reference == "adapters off" and trained:
        run = replace(run, reference="adapter")
    run = replace(run, four_bit=four_bit, weights=weights, compute=compute, frozen=roles)
    name = model if isinstance(model, str) else getattr(config, "name_or_path", "") or config.model_type
    trains = "all weights" if peft_config is None else f"{str(peft_config.peft_type).rpartition('.')[2]}"
    what = f"{algorithm} on {name}, {trains}{' on a 4-bit base' if four_bit else ''}"
    return Estimate(entries_of(run, sizes), run, sizes, device, what, config)


def _run_of(
    algorithm: str, args: Any, sizes: Blueprint, device: str, prompt: int, completion: int | None, context: int | None
) -> Run:
    """The settings, but for the types, 4-bit and further roles."""
    here, cpu = torch.cuda.is_available() and not args.use_cpu, device == "cpu"
    update, checkpointing = args.max_tokens_per_update, bool(args.activation_checkpointing)
    if cpu == here:  # the configuration was made on the other kind of device
        chosen = None if here else CPU_UPDATE_TOKENS
        update = (CPU_UPDATE_TOKENS if cpu else None) if update == chosen else update
        checkpointing = not cpu
    online, samples = isinstance(args, OnlineConfig), hasattr(args, "max_rollout_rows")
    batch = groups = args.per_device_train_batch_size
    responses, rows = 1 if algorithm in ("sft", "prm") else 2, 0
    if samples:
        rows = max(1, args.max_rollout_rows // args.num_generations) * args.num_generations
        most = args.sampling_params().max_completion_length if online else args.max_completion_length
    else:
        most = max(1, (args.max_length or context or 1024) - prompt)
    if online:
        rows = min(rows, args.prompts_per_window * args.num_generations)
        responses = min(args.num_generations, batch)
        groups = math.ceil(batch / responses)
    adapter = sizes.adapter > 0
    own = getattr(args, "critic_adapter", False) or getattr(args, "critic_init_from_reward", False)
    held = algorithm in ("dpo", "ipo", "iterative-dpo") or (online and args.beta != 0)
    again = online and (algorithm == "ppo" or args.optimizer_steps_per_window * args.num_iterations > 1)
    optimizer, eight_bit = _optimizer(str(getattr(args.optim, "value", args.optim)))
    return Run(
        samples=samples,
        scores=held or again,
        responses=responses,
        groups=groups,
        rows=rows,
        prompt=prompt,
        completion=min(completion or most, most),
        update=update,
        forward=args.max_tokens_per_forward,
        checkpointing=checkpointing,
        reference="none" if not held else "adapters off" if adapter else "model",
        critic="none" if algorithm != "ppo" else "adapter" if own and adapter else "head",
        scored=algorithm in ("reward", "prm"),
        adapters=getattr(args, "ensemble_size", 1) if adapter else 0,
        optimizer=optimizer,
        eight_bit=eight_bit,
        cpu=cpu,
        packs=sizes.packs and args.packing,
    )


def _optimizer(name: str) -> tuple[int, bool]:
    """Numbers of state a weight, and whether in 8 bits each."""
    eight_bit = "8bit" in name
    if "sgd" in name or "adafactor" in name or "apollo" in name:
        return 0, eight_bit
    return (1 if any(part in name for part in ("lion", "rmsprop", "adagrad")) else 2), eight_bit


def _type_of(dtype: Any, config: Any) -> torch.dtype:
    """The type of the base's weights: float32 unless something else is asked for, as loading has it."""
    if dtype == "auto":
        dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _compute_type(args: BaseConfig, device: str, weights: torch.dtype) -> torch.dtype:
    """The type of activations: that of autocast, else that of the weights."""
    if device == "cpu":
        return torch.bfloat16 if args.bf16 else weights
    if device == "cuda":
        return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else weights
    return torch.float16 if device.lower() == "t4" else torch.bfloat16


def _changes(known: Estimate) -> Iterator[tuple[str, Run, Blueprint]]:
    """What could be changed: in words, and the run and sizes after it."""
    run, sizes = known.run, known.sizes
    if run.adapters == 0:
        adapter = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        try:
            smaller = blueprint(known.config, adapter, run.compute)
        except ValueError:
            smaller = None  # a family whose layers LoRA does not know
        if smaller is not None:
            reference = "adapters off" if run.reference == "model" else run.reference
            changed = replace(run, adapters=1, reference=reference)
            yield "train a LoRA adapter in place of all weights (peft_config)", changed, smaller
            yield "a LoRA adapter on a 4-bit base", replace(changed, four_bit=True), smaller
    elif not run.four_bit:
        yield "a 4-bit base (quantization_config=four_bit_config())", replace(run, four_bit=True), sizes
    if not run.cpu and not run.four_bit and run.weights == torch.float32 and run.adapters:
        half = str(run.compute).removeprefix("torch.")
        changed = replace(run, weights=run.compute)
        yield f'a 16-bit base (model_init_kwargs={{"dtype": "{half}"}})', changed, sizes
    if not run.checkpointing:
        yield "gradient_checkpointing=True, about a third slower", replace(run, checkpointing=True), sizes
    if run.optimizer and not run.eight_bit and not run.cpu:
        yield 'optim="paged_adamw_8bit"', replace(run, eight_bit=True, optimizer=2), sizes
    batch = run.groups * run.responses if run.samples and run.responses > 2 else run.groups
    if batch > 1:
        text = f"per_device_train_batch_size={batch // 2} with twice the gradient_accumulation_steps"
        if run.groups > 1:
            yield text, replace(run, groups=math.ceil(run.groups / 2)), sizes
        elif run.responses > 2:
            yield text, replace(run, responses=run.responses // 2), sizes
    if run.update_tokens > run.group:
        least = max(run.group, run.update_tokens // 2)
        yield f"max_tokens_per_update={least}", replace(run, update=least), sizes
    if (rows := max(run.responses, run.rows // 2)) < run.rows:
        yield f"max_rollout_rows={rows}", replace(run, rows=rows), sizes
    if run.completion > 32:
        name = "max_completion_length" if run.samples else "max_length"
        length = run.completion // 2 + (0 if run.samples else run.prompt)
        yield f"{name}={length}: shorter answers", replace(run, completion=run.completion // 2), sizes


__all__ = ["ALGORITHMS", "CARDS", "Advice", "Estimate", "Part", "Run", "capacity", "estimate"]
