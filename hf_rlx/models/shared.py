"""`SharedModel`: one base model in every role.

| role | what runs |
|---|---|
| policy | LoRA adapter (or all weights, without PEFT) |
| reference | adapters off, a frozen copy of the adapter, or of the model: see `models/reference.py` |
| critic | a scalar head on the policy's own hidden states, or an adapter of its own |
| reward, step_reward | an adapter and a scalar head; or a whole sequence classifier, see `models/classifier.py` |

This file alone switches adapters and touches `requires_grad`. `as_role` restores every flag, also when an
exception passes. A role that trains runs forward *and* backward inside its own `as_role`: PEFT drops or
falsifies the first adapter's gradient when the adapter is switched between a forward and its backward (peft#2832).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import set_peft_model_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_rlx.models import classifier, hub, reference, reward_role, storage
from hf_rlx.models.face import ModelFace
from hf_rlx.models.forward import score_batch
from hf_rlx.models.heads import ScalarHead
from hf_rlx.models.loading import keep_trainable_layout
from hf_rlx.models.modules import restore_training
from hf_rlx.models.plan import initial_plan, not_a_decoder, verify_plan
from hf_rlx.models.roles import CRITIC, POLICY, REWARD, STEP_REWARD, Flags, Role, belongs, runs, single_adapter
from hf_rlx.models.step_role import RoleStepReward
from hf_rlx.models.targets import check_targets
from hf_rlx.types import Group, TokenScores


class SharedModel(ModelFace):
    """One causal language model that plays policy, reference, critic and reward model.

    Args:
        model: a `PreTrainedModel` (all weights train), or a `PeftModel` whose active adapter is the policy. A sequence
            classifier with one label plays the reward model only.
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
                raise ValueError("prompt-learning adapters change the prompt itself; use LoRA or another kind")
            adapter = single_adapter(model)
        self.heads = nn.ModuleDict()
        self.roles: dict[str, Role] = {POLICY: Role(adapter)}
        if classifier.is_classifier(base):
            self.roles[REWARD] = Role(adapter, classifier.SCORE)
        self.frozen_copies: dict[str, PreTrainedModel] = {}  # whole models of roles; not parameters of this module
        self._current = POLICY
        self._at_rest: tuple[str, ...] = (POLICY,)
        self.tokenizer: Any = None  # that a trainer trained it with
        self.folder: Path | None = None  # that it was loaded from
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
        revision: str | None = None,
        subfolder: str | None = None,
        token: str | bool | None = None,
        **kwargs: Any,
    ) -> SharedModel:
        """Load a base model (and give it a fresh policy adapter), or with all roles what `save_pretrained` or
        `push_to_hub` wrote.

        Args:
            name_or_path: Hub id, folder, `"tiny"` or `"smollm2"`; one with adapters loads its base too.
            peft_config: adapter to add, named `policy`. None: all weights train.
            quantization_config: e.g. `hf_rlx.four_bit_config()`; needs `peft_config`.
            base: base model for an adapter folder whose base has no name to load it by.
            is_trainable: whether a loaded adapter trains on.
            revision, subfolder, token: of the Hub; the token, default `hf auth login`, is for the base too.
            kwargs: for the base's `from_pretrained`.

        Raises:
            HubError: no such repository or revision, or it may not be read. ValueError: weights as a pickle only.
        """
        given = {"revision": revision, "subfolder": subfolder, "token": token}
        source = hub.locate(name_or_path, given, kwargs)
        model = storage.load_model(source, peft_config, base, is_trainable, quantization_config, kwargs)
        shared = cls.build(model, peft_config, packing=packing)
        if source.folder is not None:
            storage.load_roles(shared, source.folder, is_trainable)
        shared.folder = source.folder
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
            check_targets(model, peft_config)
            with warnings.catch_warnings():
                # PEFT asks transformers whether checkpointing is on by the old name.
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
                model = get_peft_model(model, peft_config, adapter_name=POLICY)
        return cls(model, packing=packing)

    @property
    def _active(self) -> PreTrainedModel:
        """What runs in the current role. No attribute: a module in it would be a second name of every weight."""
        return self.frozen_copies.get(self._current, self.causal_lm)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Frozen copies move and change type with the model, though they are not its parameters."""
        for frozen in self.frozen_copies.values():
            frozen._apply(fn)
        return super()._apply(fn, recurse)

    # The forward.

    def forward(
        self,
        groups: Sequence[Group] | None = None,
        *,
        temperature: float = 1.0,
        want_entropy: bool = False,
        entropy_grad: bool = False,
        want_values: bool = False,
        score: str | None = None,
        ends: Sequence[Sequence[int]] | None = None,
        **inputs: Any,
    ) -> TokenScores | Tensor | Any:
        """Log-probs (and entropies, critic values) of every response token, in the current role; without `groups` the
        transformers model's own forward, with its own result.

        Args:
            groups: P groups; their prompts are computed once each.
            temperature: divides the logits, as the sampler did.
            want_entropy, entropy_grad: also entropies; differentiably.
            want_values: also the critic head's value before each token.
            score, ends: the role whose `score` is wanted instead, in one row; at `ends`.
            inputs: of the transformers model, e.g. `input_ids`, `attention_mask`, `labels`; instead of `groups`.

        Returns:
            `TokenScores`, (B, R), rows in group order; with `score` a (B,) tensor.
        """
        if groups is None or inputs or isinstance(groups, Tensor):
            return self.forward_plain(groups, inputs)
        if score is not None:
            return self.score(groups, score, None, ends)
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

    def score(
        self, groups: Sequence[Group], role: str = REWARD, max_tokens: int | None = 8192, ends: Any = None
    ) -> Tensor:
        """(B,) float32 score of every response, read at its last real token, EOS included: the one scoring function;
        (N,) with `ends`, for each response indices of its tokens to read at. Differentiable inside `as_role(role)`;
        otherwise it switches to the role by itself, without gradient."""
        return reward_role.score(self, groups, role, max_tokens, ends)

    def reward_function(self, role: str = REWARD, tokenizer: Any = None, **options: Any) -> reward_role.RoleReward:
        """What `reward_funcs` of GRPO and PPO take: this model's own reward role, see `RoleReward`."""
        return reward_role.RoleReward(self, role, tokenizer, **options)

    def step_reward_function(self, role: str = STEP_REWARD, tokenizer: Any = None, **options: Any) -> RoleStepReward:
        """What their `step_reward_funcs` take: this model's own process reward model, see `RoleStepReward`."""
        return RoleStepReward(self, role, tokenizer, **options)

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

    @contextmanager
    def trains(self, *names: str) -> Iterator[None]:
        """Outside of every `as_role` the parameters of these roles require a gradient, which is what optimizers and
        DDP look for when they are built. No adapter is switched; put back after the block."""
        flags, before = self._snapshot(), self._at_rest
        try:
            self._at_rest = names
            for name, parameter in self.named_parameters():
                if parameter.is_floating_point():
                    parameter.requires_grad_(any(self._trains(name, role) for role in names))
            yield
        finally:
            self._at_rest = before
            self._restore(flags)

    def add_role(
        self,
        name: str,
        peft_config: PeftConfig | None = None,
        *,
        head: bool = True,
        zero_init: bool | None = None,
        state: dict[str, Tensor] | None = None,
    ) -> None:
        """Add a role: an adapter of its own when a `peft_config` is given, else the policy's; and a scalar head.
        `zero_init` of the head defaults to True for the critic only; `state`: what the adapter starts with."""
        if name in self.roles:
            raise ValueError(f"role {name!r} exists already")
        adapter = self.roles[POLICY].adapter
        if peft_config is not None:
            adapter = name
            self.add_adapter(name, peft_config, state)
        if head:
            zero = name == CRITIC if zero_init is None else zero_init
            self.heads[name] = ScalarHead(self.config.get_text_config().hidden_size, zero).to(self.device)
        self.roles[name] = Role(adapter, name if head else None)

    def prepare_reference(self, anew: bool = False) -> str:
        """Make the role `reference` from the policy as it is now, unless there is one (`anew`: in any case); call it
        before the optimizer is built. Returns its kind, see `models/reference.py`."""
        return reference.prepare(self, anew)

    def sync_reference(self, alpha: float) -> None:
        """reference <- alpha * policy + (1 - alpha) * reference (TRL's `sync_ref_model`, adapters too)."""
        reference.sync(self, alpha)

    def trainable_parameters(self, role: str | None = None) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters that `role` trains; None: those of the roles that `trains` says, else the policy's."""
        roles = self._at_rest if role is None else (role,)
        return [(n, p) for n, p in self.named_parameters() if any(self._trains(n, name) for name in roles)]

    def save_pretrained(self, folder: str | Path, **kwargs: Any) -> None:
        """Policy at the root (`AutoPeftModelForCausalLM` or `AutoModelForCausalLM` loads it), every other trained
        role in a sub-folder with its adapter, its head and a small JSON; the tokenizer where a trainer had one."""
        storage.save(self, Path(folder), **kwargs)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        commit_message: str = "Upload model",
        revision: str | None = None,
        create_pr: bool = False,
        tokenizer: Any = None,
        card: str | None = None,
    ) -> Any:
        """Upload all roles, the tokenizer and a card in one commit; `from_pretrained(repo_id)` brings them back.

        Args:
            repo_id: made if it is missing. private: True also refuses an existing public one.
            token: default: `hf auth login` or `HF_TOKEN`. revision: branch. create_pr: open a pull request.
            tokenizer: default: the one it was trained with, or its base's.
            card: text of the `README.md`; None keeps the one that is there, else writes what the model knows itself.

        Raises:
            HubError: the upload failed and changed nothing; it says what to do. SecretFoundError: see `hf_rlx.hub`.
        """
        options = {"private": private, "token": token, "commit_message": commit_message}
        return hub.push(self, repo_id, tokenizer, card, revision=revision, create_pr=create_pr, **options)

    def load_adapter_weights(self, role: str, folder: Path) -> None:
        """Put the adapter weights saved in `folder` into `role`'s adapter; see `storage.load_adapter`."""
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
        if role == POLICY or state.head == classifier.SCORE:
            return parameter in self.policy_parameters
        return state.adapter not in (None, self.roles[POLICY].adapter) and belongs(parameter, str(state.adapter))

    def _snapshot(self) -> Flags:
        peft = isinstance(self.model, PeftModel)
        return Flags(
            [(p, p.requires_grad) for p in self.parameters()],
            self.training_flags(),
            list(self.model.active_adapters) if peft else [],
            self.model.active_adapter if peft else "",
            peft and self._adapters_off(),
            self._current,
        )

    def _switch(self, name: str, role: Role) -> None:
        self._current = name
        if isinstance(self.model, PeftModel) and name not in self.frozen_copies and not runs(self, role.adapter):
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
        wanted = None if flags.adapters_off else flags.active_adapter
        if isinstance(self.model, PeftModel) and not (flags.adapters == [wanted] and runs(self, wanted)):
            tuner: Any = self.model.base_model
            tuner.set_adapter(flags.adapters)
            self.model.active_adapter = flags.active_adapter
            if flags.adapters_off:
                tuner.disable_adapter_layers()
            elif self._adapters_off():
                tuner.enable_adapter_layers()
        for parameter, requires_grad in flags.requires_grad:
            parameter.requires_grad_(requires_grad)
        restore_training(flags.training)

    def rollout_mode(self) -> AbstractContextManager[None]:
        """Evaluation mode in the current role, for sampling and probes; training flags come back in any case.
        Checkpointing is off in evaluation mode, so the key-value cache stays on (trl#3683)."""
        return self.evaluation()

    def _adapters_off(self) -> bool:
        return any(m.disable_adapters for m in self.model.modules() if isinstance(m, BaseTunerLayer))

    def add_adapter(self, name: str, config: PeftConfig, state: dict[str, Tensor] | None = None) -> None:
        """Add a frozen adapter, with the weights of `state` where given, and let PEFT flip no other one's flags
        (peft#2759). Roles are usually added with `add_role`."""
        if not isinstance(self.model, PeftModel):
            raise ValueError(
                f"role {name!r} asks for an adapter, but all weights of this model train; give a peft_config"
            )
        check_targets(self.model, config)
        flags = self._snapshot()
        self.model.add_adapter(name, copy.deepcopy(config))
        self._restore(flags)
        for parameter_name, parameter in self.named_parameters():
            if belongs(parameter_name, name):
                parameter.requires_grad_(False)
        if state is not None:
            set_peft_model_state_dict(self.model, state, adapter_name=name)
