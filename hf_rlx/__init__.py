"""hf_rlx: reinforcement learning for language models on one small GPU, a free notebook, or a CPU.

Public names load on first use: `import hf_rlx` is quick and needs neither TRL nor bitsandbytes.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# On import bitsandbytes asks for an optional kernel package, also where nothing is 4-bit; it runs without.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

_HOME = {
    "Group": "hf_rlx.types",
    "Rollout": "hf_rlx.types",
    "Completion": "hf_rlx.types",
    "TokenScores": "hf_rlx.types",
    "SharedModel": "hf_rlx.models.shared",
    "four_bit_config": "hf_rlx.models.loading",
    "load_causal_lm": "hf_rlx.models.loading",
    "load_tokenizer": "hf_rlx.models.loading",
    "Generator": "hf_rlx.rollout.generate",
    "SamplingParams": "hf_rlx.rollout.sampling",
    "RewardScorer": "hf_rlx.rollout.scoring",
    "RewardError": "hf_rlx.rollout.reward_models",
    "PRMConfig": "hf_rlx.trainers.prm",
    "PRMTrainer": "hf_rlx.trainers.prm",
    "StepReport": "hf_rlx.trainers.prm_report",
    "label_calculations": "hf_rlx.trainers.step_labels",
    "RewardConfig": "hf_rlx.trainers.reward",
    "RewardTrainer": "hf_rlx.trainers.reward",
    "SFTConfig": "hf_rlx.trainers.sft",
    "SFTTrainer": "hf_rlx.trainers.sft",
    "RewardReport": "hf_rlx.trainers.reward_report",
    "evaluate_on_policy": "hf_rlx.trainers.policy_report",
    "GRPOConfig": "hf_rlx.trainers.grpo",
    "GRPOTrainer": "hf_rlx.trainers.grpo",
    "PPOConfig": "hf_rlx.trainers.ppo_config",
    "PPOTrainer": "hf_rlx.trainers.ppo",
    "DPOConfig": "hf_rlx.trainers.dpo",
    "DPOTrainer": "hf_rlx.trainers.dpo",
    "IPOConfig": "hf_rlx.trainers.ipo",
    "IPOTrainer": "hf_rlx.trainers.ipo",
    "SimPOConfig": "hf_rlx.trainers.simpo",
    "SimPOTrainer": "hf_rlx.trainers.simpo",
    "ORPOConfig": "hf_rlx.trainers.orpo",
    "ORPOTrainer": "hf_rlx.trainers.orpo",
    "IterativeDPOConfig": "hf_rlx.trainers.iterative_dpo",
    "IterativeDPOTrainer": "hf_rlx.trainers.iterative_dpo",
    "HubError": "hf_rlx.hub",
    "push_pairs": "hf_rlx.data.hub",
    "DIFFERS_FROM_TRL": "hf_rlx.trainers.differences",
    "doctor": "hf_rlx.checkup",
}

__all__ = [
    "DIFFERS_FROM_TRL",
    "Completion",
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "Generator",
    "Group",
    "HubError",
    "IPOConfig",
    "IPOTrainer",
    "IterativeDPOConfig",
    "IterativeDPOTrainer",
    "ORPOConfig",
    "ORPOTrainer",
    "PPOConfig",
    "PPOTrainer",
    "PRMConfig",
    "PRMTrainer",
    "RewardConfig",
    "RewardError",
    "RewardReport",
    "RewardScorer",
    "RewardTrainer",
    "Rollout",
    "SFTConfig",
    "SFTTrainer",
    "SamplingParams",
    "SharedModel",
    "SimPOConfig",
    "SimPOTrainer",
    "StepReport",
    "TokenScores",
    "__version__",
    "doctor",
    "evaluate_on_policy",
    "four_bit_config",
    "label_calculations",
    "load_causal_lm",
    "load_tokenizer",
    "push_pairs",
]

if TYPE_CHECKING:
    from hf_rlx.checkup import doctor
    from hf_rlx.data.hub import push_pairs
    from hf_rlx.hub import HubError
    from hf_rlx.models.loading import four_bit_config, load_causal_lm, load_tokenizer
    from hf_rlx.models.shared import SharedModel
    from hf_rlx.rollout.generate import Generator
    from hf_rlx.rollout.reward_models import RewardError
    from hf_rlx.rollout.sampling import SamplingParams
    from hf_rlx.rollout.scoring import RewardScorer
    from hf_rlx.trainers.differences import DIFFERS_FROM_TRL
    from hf_rlx.trainers.dpo import DPOConfig, DPOTrainer
    from hf_rlx.trainers.grpo import GRPOConfig, GRPOTrainer
    from hf_rlx.trainers.ipo import IPOConfig, IPOTrainer
    from hf_rlx.trainers.iterative_dpo import IterativeDPOConfig, IterativeDPOTrainer
    from hf_rlx.trainers.orpo import ORPOConfig, ORPOTrainer
    from hf_rlx.trainers.policy_report import evaluate_on_policy
    from hf_rlx.trainers.ppo import PPOTrainer
    from hf_rlx.trainers.ppo_config import PPOConfig
    from hf_rlx.trainers.prm import PRMConfig, PRMTrainer
    from hf_rlx.trainers.prm_report import StepReport
    from hf_rlx.trainers.reward import RewardConfig, RewardTrainer
    from hf_rlx.trainers.reward_report import RewardReport
    from hf_rlx.trainers.sft import SFTConfig, SFTTrainer
    from hf_rlx.trainers.simpo import SimPOConfig, SimPOTrainer
    from hf_rlx.trainers.step_labels import label_calculations
    from hf_rlx.types import Completion, Group, Rollout, TokenScores


_TRAINERS_OF_TRL = {
    "RLOO": 'GRPOTrainer, whose GRPOConfig.preset("rloo", ...) it is',
    "OnlineDPO": "IterativeDPOTrainer, which samples, scores and pairs in rounds",
    "XPO": "IterativeDPOTrainer, which samples, scores and pairs in rounds",
    "NashMD": "IterativeDPOTrainer, which samples, scores and pairs in rounds",
    "KTO": "DPOTrainer for pairs; for single answers with labels `from trl import KTOTrainer`",
    "CPO": 'SimPOTrainer (loss_type="simpo") or ORPOTrainer, which have no reference either',
    "BCO": "DPOTrainer for pairs; for single answers with labels `from trl import KTOTrainer`",
    "GKD": "`from trl.experimental.gkd import GKDTrainer`",
    "PPOv2": "PPOTrainer",
}
_OF_TRL = {
    "AutoModelForCausalLMWithValueHead": "the model itself: PPOTrainer gives it a critic",
    "AutoModelForSeq2SeqLMWithValueHead": "a decoder-only model: PPOTrainer gives it a critic",
    "create_reference_model": "nothing: trainers make the reference from the model",
    "LengthSampler": "max_completion_length of the configuration; for penalties on length soft_overlong_cache",
    **{f"{name}Trainer": instead for name, instead in _TRAINERS_OF_TRL.items()},
    **{f"{name}Config": instead.replace("Trainer", "Config") for name, instead in _TRAINERS_OF_TRL.items()},
    **{
        name: f"`from trl import {name}`, which goes with these trainers"
        for name in (
            "ModelConfig",
            "ScriptArguments",
            "TrlParser",
            "get_peft_config",
            "get_quantization_config",
            "get_kbit_device_map",
        )
    },
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _OF_TRL:
        raise ImportError(f"hf_rlx has no {name}; use {_OF_TRL[name]}")
    raise AttributeError(f"module 'hf_rlx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
