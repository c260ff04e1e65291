"""A module whose whole tree is looked at many times a step.

`nn.Module.named_parameters` hands every name through one generator per level, and `nn.Module.train` recurses with a
slow assignment each. Roles are switched a dozen times a step, each time with several looks at everything: on a small
model that was a fifth of a training step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class WalkedModule(nn.Module):
    """`nn.Module` with quick walks over its tree: the same results in the same order."""

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        """See `nn.Module`; parents before children, each module once."""
        seen: set[nn.Module] = set() if memo is None else memo
        todo: list[tuple[str, nn.Module]] = [(prefix, self)]
        while todo:
            name, module = todo.pop()
            if remove_duplicate:
                if module in seen:
                    continue
                seen.add(module)
            yield name, module
            start = f"{name}." if name else ""
            children = [(start + key, child) for key, child in module._modules.items() if child is not None]
            todo.extend(reversed(children))

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        """See `nn.Module`."""
        seen: set[int] = set()
        for name, module in self.named_modules(None, prefix, remove_duplicate) if recurse else [(prefix, self)]:
            start = f"{name}." if name else ""
            for key, parameter in module._parameters.items():
                if parameter is None or (remove_duplicate and id(parameter) in seen):
                    continue
                seen.add(id(parameter))
                yield start + key, parameter

    def train(self, mode: bool = True) -> Any:
        """See `nn.Module`."""
        for _, module in self.named_modules():
            own = module is not self and type(module).train is not nn.Module.train
            # transformers' own does more only for models that run kernels from the Hub.
            if own and getattr(module, "use_kernels", True):
                module.train(mode)
            else:
                _set(module, mode)
        return self

    def training_flags(self) -> list[tuple[nn.Module, bool]]:
        """Every module and its training flag."""
        return [(module, module.training) for _, module in self.named_modules()]

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Evaluation mode inside the block; every flag comes back, also on an exception."""
        flags = self.training_flags()
        try:
            self.eval()
            yield
        finally:
            restore_training(flags)


def restore_training(flags: list[tuple[nn.Module, bool]]) -> None:
    """Put back what `training_flags` gave."""
    for module, mode in flags:
        _set(module, mode)


def _set(module: nn.Module, mode: bool) -> None:
    module.__dict__["training"] = mode  # `nn.Module.__setattr__` looks a flag up in every registry first
