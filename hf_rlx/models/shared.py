"""`SharedModel`: one base model in every role.

| role | what runs |
|---|---|
| policy | LoRA adapter (or all weights, without PEFT) |
| reference | adapters off, a frozen copy of the adapter, or of the model: see `models/reference.py` |
| critic | a scalar head on the policy's own hidden states, or an adapter of its own |
| reward, step_reward | an adapter and a scalar head |

This file alone switches adapters and touches `requires_grad`. `as_role` restores every flag, also when an
exception passes. A role that trains runs forward *and* backward inside its own `as_role`: PEFT drops or
falsifies the first adapter's gradient when the adapter is switched between a forward and its backward (peft#2832).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import set_peft_model_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_rlx.models import reference, storage
from hf_rlx.models.forward import hidden_states, score_batch
from hf_rlx.models.heads import ScalarHead
from hf_rlx.models.loading import keep_trainable_layout, load_causal_lm
from hf_rlx.models.packing import split_by_tokens
from hf_rlx.models.plan import initial_plan, not_a_decoder, verify_plan
from hf_rlx.models.roles import CRITIC, POLICY, Flags, Role, belongs
from hf_rlx.types import Group, TokenScores


class SharedModel(nn.Module):
    """One causal language model that plays policy, reference, critic and reward model.

    Args:
        model: a `PreTrainedModel` (all weights train), or a `PeftModel` whose active adapter is the policy.
        packing: run packed prefix-tree rows where the family allows it (decided on the first forward).

    Raises:
        ValueError: the model is no decoder with a vocabulary head, uses prompt learning, or has several
            active adapters.
    """

    def __init__(self, model: PreTrainedModel | PeftModel, packing: bool = True) -> None:
        super().__init__()
        if isinstance(model, SharedModel):
            raise ValueError("the model is a SharedModel already; use it as it is")
        self.model: Any = model
        base = self.causal_lm
        obstacle = not_a_decoder(base)
        if obstacle is not None:
            raise ValueError(obstacle)
        keep_trainable_layout(base)
        adapter = None
        if isinstance(model, PeftModel):
            if model.active_peft_config.is_prompt_learning:
                raise ValueError(
                    "prompt-learning adapters change the prompt itself; use LoRA or another weight adapter"
                )
            adapter = self._single_adapter()
        self.heads = nn.ModuleDict()
        self.roles: dict[str, Role] = {POLICY: Role(adapter)}
        self.frozen_copies: dict[str, PreTrainedModel] = {}  # whole models of roles; not parameters of this module
        self._current = POLICY
        self.policy_parameters = {name for name, p in self.named_parameters() if p.requires_grad}
        self.plan = initial_plan(base, packing)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        peft_config: PeftConfig | None = None,
        quantization_config: Any = None,
        base: PreTrainedModel | None = None,
        is_trainable: bool = True,
        packing: bool = True,
        **kwargs: Any,
    ) -> SharedModel:
        """Load a base model (and give it a fresh policy adapter), or a folder that `save_pretrained` wrote.

        Args:
            name_or_path: Hub id, folder, `"tiny"` or `"smollm2"`; a folder with adapters loads its base too.
            peft_config: adapter to add, named `policy`. None: all weights train.
            quantization_config: e.g. `hf_rlx.four_bit_config()`; needs `peft_config`.
            base: base model for an adapter folder whose base has no name to load it by.
            is_trainable: whether a loaded adapter trains on.
            kwargs: for the base's `from_pretrained`.
        """
        folder = Path(name_or_path)
        if storage.has_adapter(folder):
            if peft_config is not None:
                raise ValueError(f"{folder} holds an adapter; drop peft_config to train on it, or merge it first")
            policy = storage.load_policy(folder, base, is_trainable, quantization_config, kwargs)
            shared = cls(policy, packing=packing)
        else:
            model = base if base is not None else load_causal_lm(name_or_path, quantization_config, **kwargs)
            shared = cls.build(model, peft_config, packing=packing)
        storage.load_roles(shared, folder, is_trainable)
        return shared

    @classmethod
    def build(
        cls, model: PreTrainedModel | PeftModel, peft_config: PeftConfig | None = None, packing: bool = True
    ) -> SharedModel:
        """Wrap a model that is in memory; with a `peft_config`, add a fresh adapter named `policy` first.

        Raises:
            ValueError: both a `PeftModel` and a `peft_config`: whether the old adapter should be merged, trained
                on or dropped is the caller's decision.
        """
        if peft_config is not None:
            if isinstance(model, PeftModel):
                raise ValueError(
                    "both a PeftModel and a peft_config were given; drop peft_config to train on the adapter that "
                    "the model has, or call merge_and_unload() on the model first to start a new one"
                )
            with warnings.catch_warnings():
                # PEFT asks transformers whether checkpointing is on by the old name.
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
                model = get_peft_model(model, peft_config, adapter_name=POLICY)
        return cls(model, packing=packing)

    # What the Trainer and its callbacks ask a model for.

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model, adapters injected or not."""
        base: Any = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        return base

    @property
    def _active(self) -> PreTrainedModel:
        """What runs in the current role. No attribute: a module in it would be a second name of every weight."""
        return self.frozen_copies.get(self._current, self.causal_lm)

    @property
    def config(self) -> Any:
        """The base's configuration."""
        return self.causal_lm.config

    @property
    def generation_config(self) -> Any:
        """The base's generation configuration."""
        return self.causal_lm.generation_config

    @property
    def device(self) -> torch.device:
        """Where the base is."""
        return self.causal_lm.device

    @property
    def dtype(self) -> torch.dtype:
        """The base's floating-point type."""
        return self.causal_lm.dtype

    @property
    def quantization_method(self) -> Any:
        """bitsandbytes models must not be moved; the Trainer asks here."""
        return getattr(self.causal_lm, "quantization_method", None)

    @property
    def hf_device_map(self) -> dict[str, Any]:
        """Where accelerate placed the base's parts; absent where it was not asked to."""
        return getattr(self.causal_lm, "hf_device_map")  # noqa: B009

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate` with the policy."""
        return self.model.generate(*args, **kwargs)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Recompute activations in the backward. Non-reentrant: the reentrant form gives frozen inputs no gradient."""
        options = {"use_reentrant": False, **(activation_checkpointing_kwargs or {})}
        if options["use_reentrant"] and isinstance(self.model, PeftModel):
            raise ValueError("use_reentrant=True gives adapters on a frozen base no gradient; leave it False")
        self.causal_lm.activation_checkpointing_enable(activation_checkpointing_kwargs=options, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Frozen copies move and change type with the model, though they are not its parameters."""
        for frozen in self.frozen_copies.values():
            frozen._apply(fn)
        return super()._apply(fn, recurse)

    # The forward.

    def forward(
        self,
        groups: Sequence[Group],
        *,
        temperature: float = 1.0,
        want_entropy: bool = False,
        entropy_grad: bool = False,
        want_values: bool = False,
    ) -> TokenScores:
        """Log-probs (and entropies, critic values) of every response token, in the current role.

        Args:
            groups: P groups; their prompts are computed once each.
            temperature: divides the logits, as the sampler did.
            want_entropy, entropy_grad: also entropies; differentiably.
            want_values: also the critic head's value before each token.

        Returns:
            `TokenScores`, (B, R), rows in group order.
        """
        model = self._active
        self.verify(groups)
        batch = self.plan.batch(groups, self.device, self._pad_token_id)
        return score_batch(
            model,
            batch,
            chunked=self.plan.chunked,
            temperature=temperature,
            want_entropy=want_entropy,
            entropy_grad=entropy_grad,
            critic=self.heads[CRITIC] if want_values else None,
        )

    def score(self, groups: Sequence[Group], role: str = "reward", max_tokens: int | None = 8192) -> Tensor:
        """(B,) float32 score of every response, read at its last real token, EOS included.

        The one scoring function: the reward trainer, PPO, GRPO and best-of-N all call it. Differentiable
        inside `as_role(role)`; otherwise it switches to the role by itself and computes no gradient.
        """
        head = self._role(role).head
        if head is None:
            raise ValueError(f"role {role!r} has no head to score with; add it with add_role({role!r}, ...)")
        if self._current != role:
            with torch.no_grad(), self.as_role(role), self.rollout_mode():
                return self.score(groups, role, max_tokens)
        self.verify(groups)
        scores = []
        for row in split_by_tokens(groups, max_tokens):
            batch = self.plan.batch(row, self.device, self._pad_token_id)
            hidden = hidden_states(self._active, batch)
            scores.append(self.heads[head](hidden.index_select(0, batch.last_index)))
        return torch.cat(scores)

    @property
    def _pad_token_id(self) -> int:
        """What fills padded rows; masked, so any id inside the vocabulary will do (some configurations have -1)."""
        return max(self.config.get_text_config().pad_token_id or 0, 0)

    def verify(self, groups: Sequence[Group]) -> None:
        """Decide packed or padded once, on the first groups that come."""
        if not self.plan.verified:
            with self.rollout_mode():
                self.plan = verify_plan(self._active, groups, self.plan, self.device)

    # Roles.

    @contextmanager
    def as_role(self, name: str) -> Iterator[SharedModel]:
        """Run as `name` inside the block; every adapter, `requires_grad` and training flag is put back after it.

        Raises:
            KeyError: there is no such role.
        """
        role = self._role(name)
        flags = self._snapshot()
        try:
            self._switch(name, role)
            yield self
        finally:
            self._restore(flags)

    def add_role(
        self,
        name: str,
        peft_config: PeftConfig | None = None,
        *,
        head: bool = True,
        zero_init: bool | None = None,
    ) -> None:
        """Add a role: an adapter of its own when a `peft_config` is given, else the policy's; and a scalar head.

        `zero_init` of the head defaults to True for the critic only.
        """
        if name in self.roles:
            raise ValueError(f"role {name!r} exists already")
        adapter = self.roles[POLICY].adapter
        if peft_config is not None:
            adapter = name
            self.add_adapter(name, peft_config)
        if head:
            zero = name == CRITIC if zero_init is None else zero_init
            self.heads[name] = ScalarHead(self.config.get_text_config().hidden_size, zero).to(self.device)
        self.roles[name] = Role(adapter, name if head else None)

    def prepare_reference(self) -> str:
        """Make the role `reference` from the policy as it is now; call it before the optimizer is built. Returns how:
        `"adapters_off"`, `"adapter_copy"` or `"model_copy"`; see `models/reference.py`."""
        return reference.prepare(self)

    def sync_reference(self, alpha: float) -> None:
        """reference <- alpha * policy + (1 - alpha) * reference (TRL's `sync_ref_model`, adapters too)."""
        reference.sync(self, alpha)

    def trainable_parameters(self, role: str = POLICY) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters that `role` trains."""
        return [(n, p) for n, p in self.named_parameters() if self._trains(n, role)]

    def save_pretrained(self, folder: str | Path, **kwargs: Any) -> None:
        """Policy at the root (plain `AutoPeftModelForCausalLM` or `AutoModelForCausalLM` loads it), every other
        trained role in a sub-folder with its adapter, its head and a small JSON."""
        storage.save(self, Path(folder), **kwargs)

    def load_adapter_weights(self, role: str, folder: Path) -> None:
        """Put the adapter weights saved in `folder` into `role`'s adapter.

        Raises:
            ValueError: the file has weights that the adapter lacks, or the other way round; PEFT would say nothing.
        """
        storage.load_adapter(self.model, str(self._role(role).adapter), folder, str(self.device))

    # Internals.

    def _role(self, name: str) -> Role:
        if name not in self.roles:
            raise KeyError(f"no role {name!r}; this model has {sorted(self.roles)}")
        return self.roles[name]

    def _trains(self, parameter: str, role: str) -> bool:
        state = self.roles[role]
        if not state.trainable:
            return False
        if state.head is not None and parameter.startswith(f"heads.{state.head}."):
            return True
        if role == POLICY:
            return parameter in self.policy_parameters
        return state.adapter not in (None, self.roles[POLICY].adapter) and belongs(parameter, str(state.adapter))

    def _snapshot(self) -> Flags:
        peft = isinstance(self.model, PeftModel)
        return Flags(
            [(p, p.requires_grad) for p in self.parameters()],
            [(m, m.training) for m in self.modules()],
            list(self.model.active_adapters) if peft else [],
            self.model.active_adapter if peft else "",
            peft and self._adapters_off(),
            self._current,
        )

    def _switch(self, name: str, role: Role) -> None:
        self._current = name
        if isinstance(self.model, PeftModel) and name not in self.frozen_copies:
            tuner: Any = self.model.base_model
            if role.adapter is None:
                tuner.disable_adapter_layers()
            else:
                tuner.enable_adapter_layers()
                self.model.set_adapter(role.adapter)
        for parameter_name, parameter in self.named_parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(self._trains(parameter_name, name))
        if not role.trainable:
            self.eval()

    def _restore(self, flags: Flags) -> None:
        self._current = flags.role
        if isinstance(self.model, PeftModel):
            tuner: Any = self.model.base_model
            tuner.set_adapter(flags.adapters)
            self.model.active_adapter = flags.active_adapter
            if flags.adapters_off:
                tuner.disable_adapter_layers()
            elif self._adapters_off():
                tuner.enable_adapter_layers()
        for parameter, requires_grad in flags.requires_grad:
            parameter.requires_grad_(requires_grad)
        for module, training in flags.training:
            module.training = training

    @contextmanager
    def rollout_mode(self) -> Iterator[None]:
        """Evaluation mode in the current role, for sampling and probes; training flags come back, also on an
        exception. Checkpointing is off in evaluation mode, so the key-value cache stays on (trl#3683)."""
        training = [(m, m.training) for m in self.modules()]
        try:
            self.eval()
            yield
        finally:
            for module, flag in training:
                module.training = flag

    def _adapters_off(self) -> bool:
        return any(m.disable_adapters for m in self.model.modules() if isinstance(m, BaseTunerLayer))

    def _single_adapter(self) -> str:
        active = list(self.model.active_adapters)
        if len(active) != 1:
            raise ValueError(f"the policy must be one adapter, but {active} are active; call set_adapter(name) first")
        return active[0]

    def add_adapter(self, name: str, config: PeftConfig, state: dict[str, Tensor] | None = None) -> None:
        """Add a frozen adapter, with the weights of `state` where given, without letting PEFT flip any other
        one's flags (peft#2759). Roles are usually added with `add_role`."""
        if not isinstance(self.model, PeftModel):
            raise ValueError(
                f"role {name!r} asks for an adapter, but all weights of this model train; give a peft_config"
            )
        flags = self._snapshot()
        self.model.add_adapter(name, copy.deepcopy(config))
        self._restore(flags)
        for parameter_name, parameter in self.named_parameters():
            if belongs(parameter_name, name):
                parameter.requires_grad_(False)
        if state is not None:
            set_peft_model_state_dict(self.model, state, adapter_name=name)
