"""Tasks: a training set and a held-out set whose answers a verifier can check.

A task holds data only. What scores it is a reward function from `hf_rlx.verifiers`, named in each function's
docstring: data and verifiers are packages on one floor and do not import one another.
"""

from hf_rlx.data.tasks.arithmetic import arithmetic_problems, arithmetic_task, spoken_arithmetic_task
from hf_rlx.data.tasks.base import Task
from hf_rlx.data.tasks.generated import reasoning_gym_task
from hf_rlx.data.tasks.puzzles import countdown_task, nim_task, puzzle_task
from hf_rlx.data.tasks.word_problems import svamp_task

__all__ = [
    "Task",
    "arithmetic_problems",
    "arithmetic_task",
    "countdown_task",
    "nim_task",
    "puzzle_task",
    "reasoning_gym_task",
    "spoken_arithmetic_task",
    "svamp_task",
]
