"""Published recipes as fields of `GRPOConfig`: only what differs from its defaults, which are DeepSeekMath's."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.0, "dynamic_sampling": True},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0},
    "gspo": {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "beta": 0.0},
    "rloo": {
        "scale_rewards": "leave_one_out",
        "importance_sampling_level": "sequence_sum",
        "beta": 0.05,
        "kl_in_reward": True,
        "keep_zero_variance": True,
    },
    "trl": {
        "loss_type": "dapo",
        "beta": 0.0,
        "scale_ddof": 1,
        "advantage_eps": 1e-4,
        "keep_zero_variance": True,
        "use_bias_correction_kl": True,
        "disable_dropout": False,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_max": 3.0,
    },
}
