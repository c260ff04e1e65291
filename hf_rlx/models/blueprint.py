"""What a model and its adapter weigh, and what a forward keeps for its backward, without loading any weight.

The model is built on the meta device, where tensors have shapes and no memory. What autograd keeps is not written down
as a formula: a forward runs there, and the tensors that it saves are counted, so every family, adapter and type counts
as what it is.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from peft import PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from hf_rlx.models.fast_linear import MIN_ELEMENTS
from hf_rlx.models.lean_blocks import lean_kept
from hf_rlx.models.loading import HUB_OPTIONS, _resolve
from hf_rlx.models.plan import packing_obstacle
from hf_rlx.models.storage import has_adapter

logger = logging.getLogger(__name__)

_TOKENS = 64  # of the forward that is counted; what it keeps grows in proportion
_ATTENTION = "hf_rlx_counted"


@dataclass(frozen=True)
class Blueprint:
    """Sizes of a model; all but `kept` and `layers` count numbers, not bytes.

    weights: of the base. matrices: of its linear layers but the vocabulary's, which 4-bit types hold.
    adapter: of the adapter; 0 without one. trainable: of what trains: the adapter, or all weights.
    linear: of matrices that are large enough for oneDNN's layout, the vocabulary's included.
    kept: bytes that a forward keeps a token for the backward, in all layers together. lean: the same of float32 on a
        CPU where `lean_blocks` takes such a model; else None.
    cache: of keys and values of one token. hidden: width of the residual stream. vocabulary: tokens.
    head_trains: whether the vocabulary matrix trains. layers: decoder layers. packs: whether packed rows run.
    """

    weights: int
    matrices: int
    adapter: int
    trainable: int
    linear: int
    kept: int
    lean: int | None
    cache: int
    hidden: int
    vocabulary: int
    head_trains: bool
    layers: int
    packs: bool


def config_of(model: Any, **kwargs: Any) -> tuple[Any, PeftConfig | None]:
    """The configuration of a model, and that of the adapter that it has.

    Args:
        model: a name for `load_causal_lm`, a folder (also of an adapter), a configuration, or a model in memory.
        kwargs: for `from_pretrained`.

    Raises:
        OSError, ValueError: there is no such model; an adapter that names no base.
    """
    if not isinstance(model, str | Path):
        wrapped = getattr(model, "model", None)  # of a SharedModel
        peft = next((m for m in (model, wrapped) if isinstance(m, PeftModel)), None)
        config = getattr(model, "config", model)
        return config, None if peft is None else peft.active_peft_config
    adapter = None
    if has_adapter(Path(model)):
        adapter = PeftConfig.from_pretrained(str(model))
        if not adapter.base_model_name_or_path:
            raise ValueError(f"the adapter in {model} names no base model; give the base, and the adapter's settings")
        model = adapter.base_model_name_or_path
    source, extra = _resolve(str(model))
    options = {name: kwargs[name] for name in (*HUB_OPTIONS, "trust_remote_code") if name in kwargs}
    return AutoConfig.from_pretrained(source, **extra, **options), adapter


def blueprint(config: Any, peft_config: PeftConfig | None = None, dtype: torch.dtype = torch.float32) -> Blueprint:
    """The sizes of a model of this configuration.

    Args:
        config: of `transformers`. peft_config: the adapter that trains; None: all weights do.
        dtype: that the forward computes in.

    Raises:
        ValueError: the adapter fits no layer.
    """
    adapter = None if peft_config is None else json.dumps(peft_config.to_dict(), sort_keys=True, default=_plain)
    return _cached(_Key(config.to_json_string(use_diff=False), adapter, str(dtype), config, peft_config, dtype))


@dataclass(frozen=True)
class _Key:
    """Equal where the texts are."""

    config: str
    adapter: str | None
    dtype: str
    given: Any
    peft_config: Any
    torch_dtype: Any

    def __hash__(self) -> int:
        return hash((self.config, self.adapter, self.dtype))

    def __eq__(self, other: object) -> bool:
        mine = (self.config, self.adapter, self.dtype)
        return isinstance(other, _Key) and mine == (other.config, other.adapter, other.dtype)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


@lru_cache(maxsize=16)
def _cached(key: _Key) -> Blueprint:
    config, text = key.given, key.given.get_text_config()
    with init_empty_weights(include_buffers=True):
        model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=key.torch_dtype)
        model.tie_weights()  # the meta device breaks what shares memory
        packs = packing_obstacle(model) is None
        base = {id(p): p for p in model.parameters()}
        head = model.get_output_embeddings()
        if key.peft_config is not None:
            with warnings.catch_warnings():
                # PEFT asks transformers whether checkpointing is on by the old name.
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
                model = get_peft_model(model, copy.deepcopy(key.peft_config))
            for parameter in model.parameters():
                if id(parameter) not in base:
                    parameter.data = parameter.data.to(key.torch_dtype)  # as autocast computes
    causal = model.get_base_model() if isinstance(model, PeftModel) else model
    linear = [m.weight for m in causal.modules() if type(m) is nn.Linear and id(m.weight) in base]
    four_bit = [m.weight for m in causal.modules() if isinstance(m, nn.Linear | Conv1D) and id(m.weight) in base]
    lean = lean_kept(causal)
    vocabulary = {id(p) for p in head.parameters()} if head is not None else set()
    every = list({id(p): p for p in model.parameters()}.values())
    heads = text.num_attention_heads if hasattr(text, "num_attention_heads") else 1
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    layers = int(text.num_hidden_layers)
    return Blueprint(
        weights=_numbers(base.values()),
        matrices=_numbers(p for p in four_bit if id(p) not in vocabulary),
        adapter=_numbers(p for p in every if id(p) not in base),
        trainable=_numbers(p for p in every if p.requires_grad),
        linear=_numbers(p for p in linear if p.numel() >= MIN_ELEMENTS),
        kept=_kept(causal, text, key.torch_dtype),
        lean=None if lean is None or key.torch_dtype != torch.float32 else 4 * lean,
        cache=2 * layers * (getattr(text, "num_key_value_heads", None) or heads) * width,
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        head_trains=any(p.requires_grad for p in head.parameters()) if head is not None else False,
        layers=layers,
        packs=packs,
    )


def _numbers(parameters: Any) -> int:
    return sum(p.numel() for p in parameters)


def _kept(model: Any, text: Any, dtype: torch.dtype) -> int:
    """Bytes that autograd keeps a token; parameters, which are there anyway, do not count."""
    own = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    seen: dict[int, Any] = {}  # held, so that no address comes twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = storage
        return tensor

    try:
        model.set_attn_implementation(_ATTENTION)
        ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model.base_model(
                input_ids=ids,
                attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device="meta"),
                position_ids=torch.arange(_TOKENS, device="meta")[None],
                use_cache=False,
            )
        assert output.last_hidden_state is not None
        return sum(storage.nbytes() for storage in seen.values()) // _TOKENS
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
        # Layers that look at values, such as a choice of experts, do not run without any.
        logger.debug("counting by formula: %s: %s", type(error).__name__, error)
        return _by_formula(text) * dtype.itemsize


def _by_formula(text: Any) -> int:
    """Numbers that a decoder layer like Llama's keeps a token, times the layers: both norms' inputs and outputs; what
    attention reads and gives; the gate before and after its activation, the other factor and their product."""
    heads = getattr(text, "num_attention_heads", 1)
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    keys = 2 * (getattr(text, "num_key_value_heads", None) or heads) * width
    inner = getattr(text, "moe_intermediate_size", None) or getattr(text, "intermediate_size", 4 * text.hidden_size)
    inner *= getattr(text, "num_experts_per_tok", None) or 1
    return int(text.num_hidden_layers) * (4 * text.hidden_size + 2 * heads * width + keys + 4 * inner)


class _Counted(torch.autograd.Function):
    """Keeps what a fused attention keeps: its inputs, its output and a log-normaliser for every query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        return None, None, None


def _counted(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return _Counted.apply(query, key, value), None


def _no_mask(*_: Any, **__: Any) -> None:
    return None


AttentionInterface.register(_ATTENTION, _counted)
AttentionMaskInterface.register(_ATTENTION, _no_mask)

__all__ = ["Blueprint", "blueprint", "config_of"]
