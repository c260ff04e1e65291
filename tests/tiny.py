"""Tiny models of many families, ragged groups, and tokenizers built from scratch: no file is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from hf_rlx.types import Group

VOCAB = 64

# What most decoders call their sizes.
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# family -> (configuration class, settings that differ from `_COMMON`).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral_window": ("MistralConfig", {"sliding_window": 5}),
    "gemma": ("GemmaConfig", {"head_dim": 8}),
    "gemma3_text": (
        "Gemma3TextConfig",
        {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", {}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2_moe_window": (
        "Qwen2MoeConfig",
        {
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "use_sliding_window": True,
            "sliding_window": 100,
            "max_window_layers": 2,
        },
    ),
    "phimoe_window": ("PhimoeConfig", {"num_local_experts": 4, "sliding_window": 100}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 5}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "stablelm": ("StableLmConfig", {}),
    "falcon_h1": (
        "FalconH1Config",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8},
    ),
    "mamba": ("MambaConfig", {"state_size": 4, "conv_kernel": 3}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            "head_dim": 8,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}


def config(family: str, **changes: Any) -> Any:
    """A tiny configuration of `family`."""
    class_name, settings = FAMILIES[family]
    return getattr(transformers, class_name)(**{**_COMMON, **settings, **changes})


def causal_lm(family: str = "llama", seed: int = 0, scale: float = 8.0, **changes: Any) -> PreTrainedModel:
    """A tiny random model with weights `scale` times wider than the library's, so that no difference hides.

    At the usual deviation of 0.02 all logits of a two-layer model are nearly equal, whatever attention does.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(family, **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def lora(r: int = 4, **changes: Any) -> LoraConfig:
    """LoRA on every linear layer."""
    return LoraConfig(**{"r": r, "lora_alpha": 8, "target_modules": "all-linear", **changes})


def randomise_lora(model: torch.nn.Module, adapter: str | None = None, scale: float = 0.1, seed: int = 1) -> None:
    """Make the adapter trained-looking: B starts at 0, which hides A's gradient and the adapter itself."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name and (adapter is None or adapter in name.split(".")):
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def tokens(*lengths: int, seed: int = 3, low: int = 3, high: int = VOCAB) -> list[list[int]]:
    """Random token id lists of these lengths, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(low, high, (n,), generator=generator).tolist() for n in lengths]


def ragged_groups() -> list[Group]:
    """Four groups: K = 3 with an empty and a one-token response, K = 1, K = 2, and a one-token prompt."""
    shapes = [(7, (9, 0, 1)), (4, (5,)), (11, (3, 12)), (1, (2, 6))]
    groups = []
    for seed, (prompt, responses) in enumerate(shapes):
        first, *rest = tokens(prompt, *responses, seed=seed)
        groups.append(Group.from_lists(first, rest))
    return groups


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Name -> gradient of everything that has one."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_close(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> None:
    """Same names; per tensor the error is at most `rtol` of the tensor's norm (and of the largest one's for
    tensors whose gradient is 0 up to rounding)."""
    assert set(actual) == set(expected)
    assert expected, "nothing has a gradient"
    floor = 1e-3 * max(g.norm().item() for g in expected.values())
    for name, gradient in expected.items():
        error = (actual[name] - gradient).norm().item()
        assert error <= rtol * max(gradient.norm().item(), floor), f"{name}: off by {error:.2e}"


def word_tokenizer(words: int = VOCAB, **special: str) -> PreTrainedTokenizerFast:
    """`t3 t4 ...`: token i is the word `t<i>`; pad 0, bos 1, eos 2."""
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"t{i}": i for i in range(3, words)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"} | special
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def naive(
    model: PreTrainedModel, groups: list[Group], temperature: float = 1.0, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """The slow truth: every response forwarded alone behind its prompt, no padding, no mask, full log-softmax.

    Returns log-probs and entropies, (B, R), 0 behind each response's end.
    """
    longest = max(max(len(ids) for g in groups for ids in g.response_ids), 1)
    logp_rows, entropy_rows = [], []
    for group in groups:
        for ids in group.response_ids:
            start = len(group.prompt_ids) - 1
            logits = model(input_ids=torch.cat([group.prompt_ids, ids])[None], use_cache=False).logits[0, start:]
            logps = torch.log_softmax(logits[: len(ids)].float() / temperature, dim=-1)
            entropy = -(logps.exp() * logps).sum(-1)
            chosen = logps.gather(-1, ids[:, None])[:, 0]
            padding = (0, longest - len(ids))
            logp_rows.append(torch.nn.functional.pad(chosen, padding))
            entropy_rows.append(torch.nn.functional.pad(entropy, padding))
    entropies = torch.stack(entropy_rows)
    return torch.stack(logp_rows), entropies if entropy_grad else entropies.detach()


def weighted(values: Tensor) -> Tensor:
    """A loss that gives every token its own weight, so that swapped tokens show."""
    generator = torch.Generator().manual_seed(7)
    return (values * torch.randn(values.shape, generator=generator)).sum()
