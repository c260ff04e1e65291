"""Weights that are split over processes (FSDP2): whole where something reads them, plain tensors for files.

Training forwards run through FSDP's own hooks, one a micro-step on every process. Everything else (rollouts,
reference log-probs, evaluation) does as many forwards as its data asks for, which differs between processes: it
runs inside `whole_weights`, where no forward communicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has split the weights of `model` over processes."""
    return isinstance(model, FSDPModule)


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Inside the block this process holds every weight of `model`; forwards there communicate nothing.

    Gathered once on entry, which every process must reach, and let go on exit, also after an exception. For reading
    between optimizer steps: what is written to a weight inside is lost. Without FSDP the block is nothing.
    """
    if not is_sharded(model):
        yield
        return
    root: Any = model
    parts: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    _settle(model)
    groups = [group for part in parts for group in part._get_fsdp_state()._fsdp_param_groups]
    kept = [group.post_forward_mesh_info for group in groups]  # None: weights stay after a forward
    try:
        for part in parts:
            part.unshard()
        for group in groups:
            group.post_forward_mesh_info = None
        yield
    finally:
        for group, mesh in zip(groups, kept, strict=True):
            group.post_forward_mesh_info = mesh
        # Splits the weights again, and forgets the order of the forwards above: the next backward would prefetch by
        # it, and wait for ever where another process has done other forwards.
        root.reset_iter_state()


def _settle(model: Any) -> None:
    """Name the root: FSDP takes the first module that runs a forward, which here is often an inner one. And reduce
    the gradients of all weights that train: an expert that no token of this process went to has none here only."""
    model._get_fsdp_state()._lazy_init()
    model.set_reduce_scatter_unused_params(True)


def full_state(model: nn.Module, trainable_only: bool = False) -> dict[str, Tensor]:
    """Weights and buffers by name, as whole CPU tensors, of a model that is split over processes or not.

    Every process must call it. With FSDP the first process gets them, the others an empty dictionary.

    Args:
        model: the model as trained; the name has no prefix of a wrapper. trainable_only: leave out what is frozen.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=trainable_only)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    return state


def tied(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` with one tensor for every weight that has several names in `model`: gathering makes copies of them, and
    files hold each weight once."""
    result, first = dict(state), dict[int, str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state:
            result[name] = state[first.setdefault(id(parameter), name)]
    return result


def load_full_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put weights that `full_state` gave back; names that `state` lacks stay as they are.

    Every process must call it with all of `state`.

    Raises:
        ValueError: a name that the model does not have.
    """
    options = StateDictOptions(full_state_dict=True, strict=False)
    result = set_model_state_dict(model, dict(state), options=options)
    if result.unexpected_keys:
        raise ValueError(f"the model has no weight {result.unexpected_keys[0]!r} ({len(result.unexpected_keys)} such)")


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`{"state": {parameter name: {key: whole CPU tensor or number}}, "param_groups": [...]}`, split or not.

    Every process must call it. With FSDP the first process gets it, the others an empty dictionary.
    """
    return dict(get_optimizer_state_dict(model, getattr(optimizer, "optimizer", optimizer), options=_WHOLE))


def load_full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Put a state that `full_optimizer_state` gave back. Every process must call it with all of `state`."""
    options = StateDictOptions(full_state_dict=True)
    inner = getattr(optimizer, "optimizer", optimizer)
    set_optimizer_state_dict(model, inner, dict(state), options=options)


def local(tensor: Tensor) -> Tensor:
    """This process's share of a split tensor; another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a split tensor, which every process must ask for; another tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share_of(value: Tensor, tensor: Tensor) -> Tensor:
    """`value`, a whole tensor that every process has, split as `tensor` is, of its type and on its device."""
    value = value.to(tensor.device, tensor.dtype)
    if not isinstance(tensor, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)


@contextmanager
def takes_whole_tensors(model: nn.Module) -> Iterator[None]:
    """Inside the block `load_state_dict` of `model` or of a part of it takes whole tensors for split weights too.

    Every process loads the same tensors and keeps its share.
    """

    def share(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, DTensor) and prefix + name in state:
                state[prefix + name] = share_of(state[prefix + name], parameter)

    handles = [m.register_load_state_dict_pre_hook(share) for m in model.modules()] if is_sharded(model) else []
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
