"""Verifiers: strings in, scores out. Every class here is a reward function in TRL's sense and imports no torch."""

from hf_rlx.verifiers.code import CodeVerifier
from hf_rlx.verifiers.format import RegexVerifier
from hf_rlx.verifiers.numbers import NumberVerifier
from hf_rlx.verifiers.proof import CoqVerifier, LeanVerifier
from hf_rlx.verifiers.reasoning_gym import ReasoningGymVerifier

__all__ = ["CodeVerifier", "CoqVerifier", "LeanVerifier", "NumberVerifier", "ReasoningGymVerifier", "RegexVerifier"]
