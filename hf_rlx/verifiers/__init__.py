"""Verifiers: strings in, scores out. Every class here is a reward function in TRL's sense and imports no torch."""

from hf_rlx.verifiers.code import CodeVerifier
from hf_rlx.verifiers.format import RegexVerifier
from hf_rlx.verifiers.math import MathVerifier
from hf_rlx.verifiers.numbers import NumberVerifier
from hf_rlx.verifiers.proof import CoqVerifier, LeanVerifier
from hf_rlx.verifiers.reasoning_gym import ReasoningGymVerifier
from hf_rlx.verifiers.steps import CalculationSteps, StepCheck, check_steps

__all__ = [
    "CalculationSteps",
    "CodeVerifier",
    "CoqVerifier",
    "LeanVerifier",
    "MathVerifier",
    "NumberVerifier",
    "ReasoningGymVerifier",
    "RegexVerifier",
    "StepCheck",
    "check_steps",
]
