"""DeepSpeed's ZeRO-1 and ZeRO-2 under the trainers: what is carried, the step, and its state.

Optimizer states (with ZeRO-2 gradients too) are split over processes; every process holds all weights, so rollouts,
references and evaluation run as under DDP. The engine owns backward and step: each backward adds to its gradients
(`managed_gradient_accumulation` off), and `step` says when an optimizer step is complete, because one of ours has as
many backwards as micro-batches need. The Trainer itself is not told of DeepSpeed: its own branches save pickles and
load nothing else. Precision is autocast over float32 weights, as everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor
from transformers import TrainingArguments

from hf_rlx.models.shared import SharedModel

if TYPE_CHECKING:
    from hf_rlx.trainers.base import BaseTrainer


def check_zero(args: TrainingArguments, shared: SharedModel | None = None) -> None:
    """Refuse what does not work with DeepSpeed here, or has not been run; nothing without `deepspeed`.

    Args:
        args: of the trainer. shared: the model, where it is loaded already.

    Raises:
        ValueError: the setting and what to set instead.
    """
    if args.deepspeed_plugin is None:
        return
    config: dict[str, Any] = args.deepspeed_plugin.deepspeed_config
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    if stage == 3:
        instead = "a LoRA adapter with stage 2, or a smaller model"
        if hasattr(args, "num_generations"):
            instead = "FSDP2, which splits the weights as well: fsdp=True in place of deepspeed"
        raise ValueError(f"ZeRO-3 is not carried; take {instead}")
    if stage not in (1, 2):
        raise ValueError(
            f"deepspeed with ZeRO stage {stage} splits nothing; set stage 2, or leave deepspeed out (DDP)"
        )
    for name in ("offload_optimizer", "offload_param"):
        if (zero.get(name) or {}).get("device", "none") not in ("none", None):
            raise ValueError(f"{name} under DeepSpeed is not carried; leave it out")
    for name in ("optimizer", "scheduler"):
        if name in config:
            field = "optim, learning_rate" if name == "optimizer" else "lr_scheduler_type, warmup_steps"
            raise ValueError(f"deepspeed's own {name!r} is not carried; leave it out, and set {field}, ...")
    differs = getattr(getattr(args, "hf_deepspeed_config", None), "mismatches", None)  # a launcher sets none
    if differs:
        raise ValueError(f'deepspeed disagrees with the configuration ({"; ".join(differs)}); say "auto" there')
    if args.fp16 or (config.get("fp16") or {}).get("enabled") is True:
        raise ValueError("fp16 under DeepSpeed is not carried; use bf16=True, or fp16=False for float32, or DDP")
    if args.torch_compile:
        raise ValueError("torch_compile under DeepSpeed is not carried; leave it off, or train under DDP")
    if getattr(args, "use_vllm", False):
        raise ValueError("use_vllm=True under DeepSpeed is not carried; set use_vllm=False, or train under DDP")
    if shared is not None and shared.quantization_method is not None:
        raise ValueError("a quantised base under DeepSpeed is not carried; train it under DDP (leave deepspeed out)")


def zero_on(accelerator: Accelerator, args: TrainingArguments) -> bool:
    """Whether DeepSpeed runs; turns it on where it is asked for on CPUs, and gives its engine our settings.

    On CPUs accelerate runs DDP without a word (1.15), though DeepSpeed splits over gloo as well. What is set here is
    what its branch for accelerators sets.

    Raises:
        ValueError: `deepspeed` is asked for in a process that no launcher started.
    """
    plugin, state = args.deepspeed_plugin, accelerator.state
    if plugin is None:
        return False
    if state.distributed_type == DistributedType.MULTI_CPU:
        _turn_on_for_cpus(accelerator, plugin)
    # In one process accelerate believes in DeepSpeed as well, and the engine would look for MPI.
    if state.distributed_type != DistributedType.DEEPSPEED or not torch.distributed.is_initialized():
        raise ValueError(
            "deepspeed is set, but no launcher started this process: use `accelerate launch` or `torchrun`, or leave "
            "deepspeed out"
        )
    config = plugin.deepspeed_config
    config.update(
        {
            "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
            "gradient_accumulation_steps": 1,  # counters only: backwards add up until `step`
            "train_batch_size": args.per_device_train_batch_size * accelerator.num_processes,
            "managed_gradient_accumulation": False,
            "gradient_clipping": args.max_grad_norm,
            "bf16": {"enabled": False},
            "steps_per_print": 10**9,
        }
    )
    return True


def _turn_on_for_cpus(accelerator: Accelerator, plugin: Any) -> None:
    import deepspeed

    state: Any = accelerator.state
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)  # takes the group that is there
    plugin.select(_from_accelerator_state=True)
    state.deepspeed_plugins = plugin
    state.distributed_type = PartialState().distributed_type = DistributedType.DEEPSPEED
    accelerator.native_amp = False


def place(shared: SharedModel, args: TrainingArguments) -> None:
    """Move the model, which the engine does not do for frozen copies, and give its forward the autocast that
    accelerate leaves to the engine: references run without one."""
    shared.to(args.device)
    if args.bf16:
        shared.forward = torch.autocast(args.device.type, torch.bfloat16)(shared.forward)  # type: ignore[method-assign]


def step(trainer: BaseTrainer) -> float | None:
    """Reduce what is left to reduce, clip, and step. Returns the norm of the gradient before the clip.

    A step that no process learned from is left out: with gradients of 0 Adam's momentum would move weights. One whose
    gradient is not finite was dropped by the engine, and is counted.

    Raises:
        NonFiniteError: one such too many in a row.
    """
    made: Any = trainer.model_wrapped
    if trainer.idle:
        norm = _norm(made)
        _forget_gradients(made)
        return norm
    made.step()
    trainer.gradient_guard.note(trainer, bool(made.optimizer.overflow), "the gradient is not finite")
    norm = made.get_global_grad_norm()
    return float(norm) if norm is not None else None


def _norm(engine: Any) -> float:
    """Of the gradients so far, over all processes, as the engine's own step would find it."""
    if not engine._unmanaged_backward_count:
        return 0.0
    if engine.zero_optimization_partition_gradients():
        engine.optimizer.finalize_gradient_accumulation_boundary()
    else:
        engine.allreduce_gradients()
    return float(engine.optimizer.scaled_global_norm())


def _forget_gradients(engine: Any) -> None:
    """What the engine does with gradients that overflow."""
    engine._unmanaged_backward_count = 0
    engine.optimizer.overflow = False
    engine.optimizer.zero_grad(set_to_none=True)
    for kept in (engine.optimizer.averaged_gradients, engine.optimizer.all_grad_tensors):
        for group in kept:
            kept[group] = None


@contextmanager
def engine(trainer: BaseTrainer) -> Iterator[None]:
    """A block that trains once. Afterwards the engine's hooks are taken off the weights, so that another trainer of
    the same model can have its own. Without DeepSpeed the block is nothing.

    Raises:
        RuntimeError: this trainer has trained before; its engine is gone.
    """
    if not trainer.zero:
        yield
        return
    if isinstance(trainer.optimizer, AcceleratedOptimizer):
        raise RuntimeError("under DeepSpeed a trainer trains once; make a new one to go on")
    try:
        yield
    finally:
        made: Any = trainer.model_wrapped
        if made is not trainer.model:
            made.destroy()
            trainer.model_wrapped = trainer.model  # type: ignore[assignment]
            trainer.accelerator._models.clear()


def optimizer_state(trainer: BaseTrainer) -> dict[str, Any]:
    """This process's share: `{"optimizer": as its state_dict says, "weights": [float32 tensor, one a group]}`."""
    zero: Any = trainer.optimizer.optimizer  # type: ignore[union-attr]
    return {"optimizer": zero.optimizer.state_dict(), "weights": _shares(trainer)}


def load_optimizer_state(trainer: BaseTrainer, state: dict[str, Any]) -> None:
    """Put back what `optimizer_state` gave; the weights themselves are loaded before the engine is made."""
    zero: Any = trainer.optimizer.optimizer  # type: ignore[union-attr]
    zero.optimizer.load_state_dict(state["optimizer"])
    with torch.no_grad():
        for share, kept in zip(_shares(trainer), state["weights"], strict=True):
            share.copy_(kept)


def _shares(trainer: BaseTrainer) -> list[Tensor]:
    zero: Any = trainer.optimizer.optimizer  # type: ignore[union-attr]
    return [share.detach() for share in zero.single_partition_of_fp32_groups]
