"""The built-in generator: every prompt prefilled once, K rows decoded from it, finished rows leave the batch."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_rlx.models.fast_linear import packed_for_sampling
from hf_rlx.models.plan import difference
from hf_rlx.models.shared import SharedModel
from hf_rlx.rollout.cache import as_index, new_cache, takes_rows
from hf_rlx.rollout.lean import lean_step
from hf_rlx.rollout.sampling import SamplingParams, sample_step, uniforms
from hf_rlx.types import Completion

logger = logging.getLogger(__name__)

OnGroup = Callable[[int, list[Completion]], None]
OnStep = Callable[[int], None]

# Compacting copies the cache, so rows leave in batches: when at least an eighth of them is done.
_COMPACT_SHARE = 0.125

# Products with one to three rows are slower than with four (measured on a CPU), so that many stay in the batch.
_MIN_ROWS = 4

# Decoding steps from which on packing the weights first is faster.
_PACKED_FROM = 8


def eos_token_ids(model: SharedModel, tokenizer: PreTrainedTokenizerBase, extra: Iterable[int] = ()) -> frozenset[int]:
    """Union of every end-of-sequence id that model, generation configuration and tokenizer name.

    Chat models often end a turn with another token than the text's EOS; taking one source only makes every
    completion run to the limit.
    """
    found: set[int] = set(extra)
    config = model.config.get_text_config()
    for value in (getattr(model.generation_config, "eos_token_id", None), getattr(config, "eos_token_id", None)):
        found.update([value] if isinstance(value, int) else value or [])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)


@dataclass
class _Row:
    """A completion that is being written."""

    prompt: int
    slot: int
    completion: Completion = field(default_factory=lambda: Completion([], [], False))


class Generator:
    """Samples K completions per prompt with the weights of a `SharedModel`'s policy.

    Args:
        model: the policy; adapters run in place, the base is never merged.
        tokenizer: decodes completions and stop strings.
        max_rows: completions that decode side by side; more prompts wait for their turn. The K completions of one
            prompt always run together, also where K is larger.
        extra_eos: further token ids that end a completion.
    """

    def __init__(
        self,
        model: SharedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_rows: int = 64,
        extra_eos: Iterable[int] = (),
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_rows = max_rows
        self.eos = eos_token_ids(model, tokenizer, extra_eos)
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self.lean: bool | None = None  # whether `LeanStep` computes what this model does; None: not tried yet

    @torch.no_grad()
    def generate(
        self,
        prompt_ids: Sequence[list[int]],
        num_generations: int,
        params: SamplingParams,
        on_group: OnGroup | None = None,
        on_step: OnStep | None = None,
    ) -> list[list[Completion]]:
        """Sample `num_generations` completions for every prompt.

        Args:
            prompt_ids: P token id lists, none empty.
            num_generations: K.
            params: sampling settings, seed included.
            on_group: called with (prompt index, its K completions) as soon as all K are done, while other
                prompts still decode: reward functions start there.
            on_step: called after every decoding step with the number of tokens sampled in it.

        Returns:
            P lists of K completions.

        Raises:
            ValueError: an empty prompt. FloatingPointError: logits that are NaN or infinite.
        """
        embeddings: Any = self.model.causal_lm.get_input_embeddings()
        # Adapters on the embedding wrap it.
        rows = getattr(embeddings, "get_base_layer", lambda: embeddings)().weight.shape[0]
        for index, ids in enumerate(prompt_ids):
            if not ids:
                raise ValueError(f"prompt {index} has no tokens; give it a BOS token or some text")
            if max(ids) >= rows:
                raise ValueError(
                    f"prompt {index} has the token id {max(ids)}, but the model embeds {rows} tokens only; its "
                    "tokenizer is larger than the model: model.resize_token_embeddings(len(tokenizer))"
                )
        done: list[list[Completion]] = [[] for _ in prompt_ids]
        # Prompts of like length share a batch: less padding in the prefill and in every later step.
        order = sorted(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i]))
        per_batch = max(1, self.max_rows // num_generations)
        with self.model.rollout_mode(), self._packed(params.max_completion_length, num_generations):
            for start in range(0, len(order), per_batch):
                self._run(
                    order[start : start + per_batch], prompt_ids, num_generations, params, done, on_group, on_step
                )
        return done

    def _packed(self, steps: int, num_generations: int) -> AbstractContextManager[None]:
        """Packed copies of the weights for this rollout; they pay for themselves within a few steps."""
        if steps < _PACKED_FROM:
            return nullcontext()
        return packed_for_sampling(self.model.causal_lm, min(self.max_rows, 32))

    def _run(
        self,
        members: list[int],
        prompt_ids: Sequence[list[int]],
        num_generations: int,
        params: SamplingParams,
        done: list[list[Completion]],
        on_group: OnGroup | None,
        on_step: OnStep | None,
    ) -> None:
        """Prefill one batch of prompts and decode all its rows to the end."""
        rows = [_Row(prompt, slot) for prompt in members for slot in range(num_generations)]
        open_rows = dict.fromkeys(members, num_generations)
        randomness = torch.cat(
            [uniforms(params.seed, i, num_generations, params.max_completion_length) for i in members]
        )
        state = _Decoding(self, [prompt_ids[i] for i in members], num_generations, params)
        active = list(range(len(rows)))  # rows in the batch, in its order; finished ones stay until compaction
        finished: set[int] = set()
        for step in range(params.max_completion_length):
            tokens, logps = sample_step(state.logits, randomness[active, step], params, state.seen)
            token_list, logp_list = tokens.tolist(), logps.tolist()
            sampled = 0
            for position, row_number in enumerate(active):
                if row_number in finished:
                    continue
                sampled += 1
                completion = rows[row_number].completion
                completion.token_ids.append(token_list[position])
                completion.logps.append(logp_list[position])
                completion.finished = self._ends(completion, params)
                if completion.finished or len(completion.token_ids) == params.max_completion_length:
                    finished.add(row_number)
                    self._close(rows, row_number, open_rows, done, on_group)
            if on_step is not None:
                on_step(sampled)
            if len(finished) == len(rows):
                return
            keep = [p for p, r in enumerate(active) if r not in finished]
            idle = [p for p, r in enumerate(active) if r in finished]
            keep = sorted(keep + idle[: max(0, _MIN_ROWS - len(keep))])
            if len(keep) <= len(active) * (1 - _COMPACT_SHARE) and state.can_drop_rows:
                state.keep_rows(keep)
                active = [active[p] for p in keep]
                tokens = tokens[as_index(keep, tokens.device)]
            state.advance(tokens)

    def _ends(self, completion: Completion, params: SamplingParams) -> bool:
        if completion.token_ids[-1] in self.eos:
            return True
        if not params.stop_strings:
            return False
        text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=False)
        return any(stop in text for stop in params.stop_strings)

    def _close(
        self,
        rows: list[_Row],
        row_number: int,
        open_rows: dict[int, int],
        done: list[list[Completion]],
        on_group: OnGroup | None,
    ) -> None:
        """A row has ended: decode its text; when it was its prompt's last one, hand the group on."""
        row = rows[row_number]
        row.completion.text = str(self.tokenizer.decode(row.completion.token_ids, skip_special_tokens=True))
        open_rows[row.prompt] -= 1
        if open_rows[row.prompt] == 0:
            done[row.prompt] = [r.completion for r in rows if r.prompt == row.prompt]
            if on_group is not None:
                on_group(row.prompt, done[row.prompt])


class _Decoding:
    """The tensors of a running batch: cache, attention mask, positions, next logits."""

    def __init__(
        self, owner: Generator, prompts: list[list[int]], num_generations: int, params: SamplingParams
    ) -> None:
        self.owner, self.lm = owner, owner.model.causal_lm
        device = owner.model.device
        longest = max(len(ids) for ids in prompts)
        ids = torch.full((len(prompts), longest), owner.pad, dtype=torch.long)
        mask = torch.zeros(len(prompts), longest, dtype=torch.long)
        for index, prompt in enumerate(prompts):
            ids[index, longest - len(prompt) :] = torch.tensor(prompt)
            mask[index, longest - len(prompt) :] = 1
        ids, mask = ids.to(device), mask.to(device)
        self.cache: Any = new_cache(self.lm.config)
        # transformers is renaming `past_key_values`; models that follow take `cache`.
        takes = inspect.signature(self.lm.forward).parameters
        self.cache_argument = next((name for name in ("cache", "past_key_values") if name in takes), "")
        if not self.cache_argument:
            raise ValueError(
                f"{type(self.lm).__name__} takes no transformers cache, which the built-in generator needs"
            )
        self.can_drop_rows = takes_rows(self.cache)
        if not self.can_drop_rows:  # the K rows are prefilled one by one
            ids, mask = ids.repeat_interleave(num_generations, 0), mask.repeat_interleave(num_generations, 0)
        # Purely recurrent models multiply their states by the mask they get: after the prefill they must get none.
        self.attends = not self.cache.layers or any(hasattr(layer, "keys") for layer in self.cache.layers)
        # Explicit positions: absolute-position models read padding as positions otherwise.
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self._forward(ids, mask, positions)
        if self.can_drop_rows:
            every: Any = torch.arange(len(prompts), device=device).repeat_interleave(num_generations)
            self.cache.reorder_cache(every)
            logits, mask = logits.repeat_interleave(num_generations, 0), mask.repeat_interleave(num_generations, 0)
            ids, positions = ids.repeat_interleave(num_generations, 0), positions.repeat_interleave(num_generations, 0)
        self.logits, self.mask, self.position = logits, mask, positions[:, -1:]
        self.lean = lean_step(self.lm, self.cache) if owner.lean is not False and self.attends else None
        self.bias: Tensor | None = None  # what `LeanStep` adds to scores: -inf on padding
        if self.lean is not None and not mask.all():
            shape = (len(mask), 1, 1, longest + params.max_completion_length)
            self.bias = torch.zeros(shape, dtype=self.lm.dtype, device=device)
            self.bias[:, 0, 0, :longest].masked_fill_(~mask.bool(), -torch.inf)
        self.seen: Tensor | None = None
        if params.repetition_penalty != 1:
            self.seen = torch.zeros(logits.shape, dtype=torch.bool, device=device)
            self.seen.scatter_(1, ids, mask.bool())
            # Padding scatters False and may erase a True of the same id: set the real ones again.
            for row, (row_ids, row_mask) in enumerate(zip(ids, mask, strict=True)):
                self.seen[row, row_ids[row_mask.bool()]] = True

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor) -> Tensor:
        cache: dict[str, Any] = {self.cache_argument: self.cache}
        output = self.lm(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1, **cache
        )
        return output.logits[:, -1]

    def keep_rows(self, keep: list[int]) -> None:
        """Drop all rows but those at `keep`."""
        index = as_index(keep, self.mask.device)
        self.cache.reorder_cache(index)
        self.mask, self.position = self.mask[index], self.position[index]
        self.logits = self.logits[index]
        self.bias = None if self.bias is None else self.bias[index]
        self.seen = None if self.seen is None else self.seen[index]

    def advance(self, tokens: Tensor) -> None:
        """Feed one token per row and compute the next logits."""
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        self.position = self.position + 1
        if self.lean is not None and self.owner.lean is None:
            self.owner.lean = self._lean_agrees(tokens)
        if self.lean is not None and self.owner.lean:
            self.logits = self._lean_logits(tokens)
        else:
            self.logits = self._forward(tokens[:, None], self.mask if self.attends else None, self.position)

    def _lean_logits(self, tokens: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias[..., : self.mask.shape[1]]
        assert self.lean is not None
        return self.lean(tokens, self.cache, bias, self.position)

    def _shorten(self, length: int) -> None:
        for layer in self.cache.layers:
            layer.shorten(length)

    def _lean_agrees(self, tokens: Tensor) -> bool:
        """Whether this step's log-probs are the model's own; leaves the cache as it was."""
        length = self.cache.get_seq_length()
        reference = self._forward(tokens[:, None], self.mask, self.position).log_softmax(-1)
        self._shorten(length)
        try:
            problem = difference(self.lm, self._lean_logits(tokens).log_softmax(-1), reference)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
            problem = f"{type(error).__name__}: {error}"
        self._shorten(length)
        if problem is not None:
            logger.info("decoding through %s's own forward: %s", type(self.lm).__name__, problem)
        return problem is None
