"""The bytes of a run, phase by phase, from its sizes.

    always    Python, the base, adapters and heads, frozen copies, optimizer states
    rollout   the key-value cache, the logits of a step, on a CPU the sampler's copy of the weights
    scoring   the widest layer of a forward without gradient, rows of the vocabulary matrix
    update    gradients, what one packed forward keeps for its backward, one layer's backward, vocabulary rows

The three phases follow one another: a run takes what is always there and its largest phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from hf_rlx.models.blueprint import Blueprint
from hf_rlx.models.forward import CHUNK_ELEMENTS

Phase = Literal["always", "rollout", "scoring", "update"]

_PYTHON = int(0.52 * 2**30)  # torch, transformers, peft and a trainer, imported and used
_CUDA = int(0.6 * 2**30)  # context, kernels, and what the allocator cannot use
_FOUR_BIT = 0.5 + 1 / 64 + 4 / 64 / 256  # bytes a number: NF4, a scale in 8 bits for 64, one in 32 for 256 of those


class Part(NamedTuple):
    """bytes of one thing that is alive in `phase`."""

    name: str
    bytes: int
    phase: Phase


@dataclass(frozen=True)
class Run:
    """What of the settings the memory follows from.

    samples: whether the policy generates. scores: whether there are forwards without gradient. responses: K, of one
        group in an update. groups: of a micro-batch. rows: completions that decode side by side.
    prompt, completion: tokens, at most. update, forward: limits in tokens of an update and of a forward without
        gradient, None without one. checkpointing: activations are computed again.
    reference: "none", "adapters off", "adapter" or "model". critic: "none", "head" or "adapter".
    scored: whether a scalar head is read in place of the vocabulary. adapters: that train. frozen: of other roles.
    optimizer: numbers of its states a weight, of a byte each where `eight_bit`.
    cpu: whether it runs there. packs: whether prompts are forwarded once.
    four_bit: whether the base's matrices are. weights: type of the base's. compute: of the forward.
    """

    samples: bool
    scores: bool
    responses: int
    groups: int
    rows: int
    prompt: int
    completion: int
    update: int | None
    forward: int | None
    checkpointing: bool
    reference: str
    critic: str
    scored: bool
    adapters: int
    optimizer: int
    eight_bit: bool
    cpu: bool
    packs: bool
    frozen: int = 0
    four_bit: bool = False
    weights: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32

    @property
    def group(self) -> int:
        """Tokens of one group."""
        if self.packs:
            return self.prompt + self.responses * self.completion
        return self.responses * (self.prompt + self.completion)

    @property
    def update_tokens(self) -> int:
        """Tokens of one forward and backward: whole groups up to the limit, and at least one."""
        most = self.groups if self.update is None else max(1, self.update // self.group)
        return min(self.groups, most) * self.group

    @property
    def forward_tokens(self) -> int:
        """Tokens of one forward without gradient."""
        most = self.groups if self.forward is None else max(1, self.forward // self.group)
        return min(self.groups, most) * self.group


def entries_of(run: Run, sizes: Blueprint) -> list[Part]:
    """All parts of a run that are not empty."""
    return [part for part in (*_always(run, sizes), *_rollout(run, sizes), *_update(run, sizes)) if part.bytes]


def _base_bytes(run: Run, sizes: Blueprint) -> int:
    if run.four_bit:
        return int(sizes.matrices * _FOUR_BIT) + (sizes.weights - sizes.matrices) * run.weights.itemsize
    return sizes.weights * run.weights.itemsize


def _always(run: Run, sizes: Blueprint) -> Iterator[Part]:
    base, adapter = _base_bytes(run, sizes), sizes.adapter * 4  # PEFT keeps adapters in float32
    kind = "4-bit" if run.four_bit else str(run.weights).removeprefix("torch.")
    program = ("Python and its libraries", _PYTHON) if run.cpu else ("CUDA context and kernels", _CUDA)
    yield Part(*program, "always")
    yield Part(f"base ({kind})", base, "always")
    critics = run.critic == "adapter"
    yield Part("adapters that train", adapter * (run.adapters + critics), "always")
    yield Part("adapters of other roles", adapter * run.frozen, "always")
    yield Part("reference (frozen adapter)", adapter * (run.reference == "adapter"), "always")
    yield Part("reference (frozen model)", base * (run.reference == "model"), "always")
    heads = (run.critic != "none") + run.scored * max(1, run.adapters) + run.frozen
    yield Part("scalar heads", heads * (sizes.hidden + 1) * 4, "always")
    each = 1 if run.eight_bit else _trained_bytes(run, sizes)
    yield Part("optimizer states", _trainable(run, sizes) * run.optimizer * each, "always")


def _rollout(run: Run, sizes: Blueprint) -> Iterator[Part]:
    if not run.samples:
        return
    # Made for every rollout and dropped after it; the update uses their memory again.
    if run.cpu and run.weights == torch.float32 and not run.four_bit:
        yield Part("sampler's weights in oneDNN's layout", sizes.linear * 4, "rollout")
    longest, held = run.prompt + run.completion, run.prompt + 32
    while held < longest:  # as the cache's buffers grow
        held *= 2
    yield Part("key-value cache", run.rows * held * sizes.cache * run.compute.itemsize, "rollout")
    # Logits, log-probs, probabilities and their sum, in float32.
    yield Part("logits of a step", run.rows * sizes.vocabulary * 4 * 4, "rollout")


def _update(run: Run, sizes: Blueprint) -> Iterator[Part]:
    layer = sizes.kept / sizes.layers
    answers = run.completion / run.group * run.responses  # share of a group's tokens
    if run.scores:
        yield Part("layer without gradient", int(layer * run.forward_tokens), "scoring")
        yield Part("vocabulary chunk (scoring)", _chunk(run, sizes, run.forward_tokens * answers, 2), "scoring")
    yield Part("gradients", _trainable(run, sizes) * _trained_bytes(run, sizes), "update")
    tokens = run.update_tokens
    lean = sizes.lean if run.cpu and run.packs and run.compute == torch.float32 and not run.four_bit else None
    kept = (sizes.kept if lean is None else lean) * tokens
    if run.checkpointing:  # every layer's input, and one layer computed again
        kept = int(tokens * (sizes.hidden * sizes.layers * run.compute.itemsize + layer))
    yield Part("activations", kept, "update")
    yield Part("backward of a layer", int(layer * tokens), "update")
    # A trained matrix: logits, their exponentials and their gradients. A frozen one knows its gradient beforehand.
    copies = 5 if sizes.head_trains else 2
    yield Part("vocabulary chunk", _chunk(run, sizes, tokens * answers, copies), "update")
    if not run.cpu and run.weights == torch.float32 and not run.four_bit:
        # Autocast's copies of float32 matrices are kept for the backward.
        alive = sizes.matrices / sizes.layers if run.checkpointing else sizes.matrices
        yield Part("16-bit copies of the base", int(alive) * 2, "update")


def _chunk(run: Run, sizes: Blueprint, tokens: float, copies: int) -> int:
    """Bytes of the logits that are alive at once, `copies` of them in float32, and of hidden states there."""
    if run.scored:
        return 0
    rows = max(1, min(int(tokens), CHUNK_ELEMENTS // sizes.vocabulary))
    return rows * sizes.vocabulary * 4 * copies + int(tokens) * sizes.hidden * 4 * 2


def _trainable(run: Run, sizes: Blueprint) -> int:
    """Numbers that train."""
    if run.adapters == 0:
        return sizes.trainable
    return sizes.trainable * run.adapters + sizes.adapter * (run.critic == "adapter")


def _trained_bytes(run: Run, sizes: Blueprint) -> int:
    return 4 if run.adapters else run.weights.itemsize


def total_of(entries: Sequence[Part]) -> int:
    """Bytes at the peak of these."""
    phases = {part.phase for part in entries} - {"always"}
    return max(sum(p.bytes for p in entries if p.phase in ("always", phase)) for phase in phases)


__all__ = ["Part", "Phase", "Run", "entries_of", "total_of"]
