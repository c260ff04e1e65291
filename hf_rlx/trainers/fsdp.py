"""FSDP2 under the trainers: what is carried, and how it is switched on where accelerate does not.

FSDP2 splits weights, gradients and optimizer states over processes. The update runs through it; rollouts, log-probs
without gradient and evaluation run on weights that are gathered once a window, as `models/sharding.py` explains.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from transformers import TrainingArguments

from hf_rlx.models.shared import SharedModel


def fsdp_on(accelerator: Accelerator, args: TrainingArguments) -> bool:
    """Whether FSDP runs; turns it on where `fsdp=True` asks for it on CPUs.

    There accelerate drops the plugin and runs DDP without a word (1.15: only its accelerators' branch reads it),
    though torch shards over gloo as well. What is set here is what that branch sets.
    """
    state = accelerator.state
    if args.fsdp and state.distributed_type == DistributedType.MULTI_CPU:
        plugin = FullyShardedDataParallelPlugin(**(args.fsdp_plugin_args or {}))
        if state.mixed_precision != "no":
            plugin.set_mixed_precision(state.mixed_precision)
        state.fsdp_plugin = plugin
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    return getattr(state, "fsdp_plugin", None) is not None


def check_fsdp(accelerator: Accelerator, shared: SharedModel, args: TrainingArguments) -> None:
    """Refuse what does not work with FSDP here, or has not been run.

    Raises:
        ValueError: FSDP1, or an option of FSDP2; the message says what to set instead.
    """
    plugin = accelerator.state.fsdp_plugin
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise ValueError("FSDP needs a newer torch (FSDPModule.reset_iter_state; 2.13 has it); or train under DDP")
    if plugin.fsdp_version != 2:
        raise ValueError("FSDP1 is not carried; use FSDP2: fsdp=True, or fsdp_version: 2 in accelerate's file")
    refused = {
        "cpu_offload": (isinstance(plugin.cpu_offload, CPUOffloadPolicy), "leave it off"),
        "cpu_ram_efficient_loading": (
            plugin.cpu_ram_efficient_loading,
            "leave it off: every process copies its reference from the weights that it loaded itself",
        ),
        "activation_checkpointing": (
            plugin.activation_checkpointing,
            "it renames the weights; use the field gradient_checkpointing",
        ),
        "ignored_modules": (plugin.ignored_modules is not None, "leave it out"),
        "state_dict_type": ("FULL" not in str(plugin.state_dict_type), "use FULL_STATE_DICT, as files hold it"),
    }
    for name, (on, instead) in refused.items():
        if on:
            raise ValueError(f"{name}={getattr(plugin, name)!r} under FSDP is not carried; {instead}")
    if accelerator.mixed_precision == "fp16":
        raise ValueError("fp16 under FSDP is not carried; use bf16=True, or fp16=False for float32")
    if shared.quantization_method is not None:
        raise ValueError("a quantised base under FSDP is not carried; train it under DDP (leave fsdp out)")
    if args.torch_compile:
        raise ValueError("torch_compile under FSDP is not carried; leave it off, or train under DDP")
    if getattr(args, "use_vllm", False):
        raise ValueError("use_vllm=True under FSDP is not carried; set use_vllm=False, or train under DDP")


def place(accelerator: Accelerator, shared: SharedModel, device: torch.device) -> None:
    """Make the model ready before FSDP splits it, which it does a decoder layer at a time.

    It moves to its device here, as FSDP does not know of the frozen copies. They take the type that FSDP computes in,
    so that a reference that equals the policy gives its log-probs to the bit.
    """
    shared.to(device)
    policy = accelerator.state.fsdp_plugin.mixed_precision_policy
    if policy is not None and policy.param_dtype is not None:
        for frozen in shared.frozen_copies.values():
            nn.Module.to(frozen, policy.param_dtype)
    present = {type(module).__name__ for module in shared.causal_lm.modules()}
    layers: Any = sorted(present & set(shared.causal_lm._no_split_modules or ()))
    shared._no_split_modules = layers  # accelerate asks here
