"""Verifiers: strings in, scores out. Every class here is a reward function in TRL's sense and imports no torch."""

from hf_rlx.verifiers.code import CodeVerifier
from hf_rlx.verifiers.combine import Gate, Product, Weighted
from hf_rlx.verifiers.countdown import CountdownVerifier
from hf_rlx.verifiers.format import JsonVerifier, RegexVerifier, TagVerifier
from hf_rlx.verifiers.math import MathVerifier
from hf_rlx.verifiers.nim import NimVerifier
from hf_rlx.verifiers.numbers import NumberVerifier
from hf_rlx.verifiers.proof import CoqVerifier, LeanVerifier
from hf_rlx.verifiers.puzzles import PuzzleVerifier
from hf_rlx.verifiers.reasoning_gym import ReasoningGymVerifier
from hf_rlx.verifiers.shaping import EosRequired, LengthPenalty, RepetitionPenalty, ScriptVerifier
from hf_rlx.verifiers.steps import CalculationSteps, StepCheck, check_steps

__all__ = [
    "CalculationSteps",
    "CodeVerifier",
    "CoqVerifier",
    "CountdownVerifier",
    "EosRequired",
    "Gate",
    "JsonVerifier",
    "LeanVerifier",
    "LengthPenalty",
    "MathVerifier",
    "NimVerifier",
    "NumberVerifier",
    "Product",
    "PuzzleVerifier",
    "ReasoningGymVerifier",
    "RegexVerifier",
    "RepetitionPenalty",
    "ScriptVerifier",
    "StepCheck",
    "TagVerifier",
    "Weighted",
    "check_steps",
]
