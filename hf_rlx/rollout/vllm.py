"""Rollouts by vLLM, through TRL's own client classes. The only file that imports `trl`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_rlx.models.shared import SharedModel
from hf_rlx.rollout.generate import OnGroup, OnStep, eos_token_ids
from hf_rlx.rollout.sampling import SamplingParams
from hf_rlx.types import Completion


class VllmGenerator:
    """The built-in generator's interface, with vLLM behind it (colocated or as a server).

    Args:
        model: whose policy weights are pushed to vLLM before each rollout.
        tokenizer: decodes completions.
        accelerator: of the trainer.
        params: sampling settings of the first rollout.
        options: keyword arguments of `trl.generation.VLLMGeneration` (mode, server, memory share, ...).

    Raises:
        ImportError: vLLM or TRL is missing; the message names both ways out.
    """

    def __init__(
        self,
        model: SharedModel,
        tokenizer: PreTrainedTokenizerBase,
        accelerator: Any,
        params: SamplingParams,
        options: dict[str, Any],
    ) -> None:
        try:
            import vllm  # noqa: F401
            from trl.generation.vllm_generation import VLLMGeneration
        except ImportError as error:
            raise ImportError(
                "use_vllm=True needs vLLM and TRL: pip install vllm trl. Or leave use_vllm=False: the built-in "
                "generator shares the prefill and drops finished rows by itself"
            ) from error
        self.tokenizer = tokenizer
        self.eos = eos_token_ids(model, tokenizer)
        self.engine = VLLMGeneration(
            model=model.model,
            accelerator=accelerator,
            processing_class=tokenizer,
            logprobs=0,
            **_settings(params),
            **options,
        )

    def generate(
        self,
        prompt_ids: Sequence[list[int]],
        num_generations: int,
        params: SamplingParams,
        on_group: OnGroup | None = None,
        on_step: OnStep | None = None,
    ) -> list[list[Completion]]:
        """Push the weights, sample K completions a prompt; see `Generator.generate`."""
        for name, value in _settings(params).items():  # read at every call; evaluation has settings of its own
            setattr(self.engine, name, value)
        self.engine.sync_weights()
        repeated = [ids for ids in prompt_ids for _ in range(num_generations)]
        _, completion_ids, logprobs, _ = self.engine.generate(repeated, None, num_generations)
        groups: list[list[Completion]] = []
        for start in range(0, len(repeated), num_generations):
            groups.append(
                [
                    self._completion(ids, token_logps, params)
                    for ids, token_logps in zip(
                        completion_ids[start : start + num_generations],
                        logprobs[start : start + num_generations],
                        strict=True,
                    )
                ]
            )
            if on_step is not None:
                on_step(sum(len(c.token_ids) for c in groups[-1]))
            if on_group is not None:
                on_group(len(groups) - 1, groups[-1])
        return groups

    def _completion(self, ids: list[int], logps: list[list[float | None]], params: SamplingParams) -> Completion:
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        ended = bool(ids) and (ids[-1] in self.eos or any(stop in text for stop in params.stop_strings))
        # A log-prob that the engine did not report is NaN: its importance weight is 1.
        values = [float("nan") if not token or token[0] is None else float(token[0]) for token in logps]
        return Completion(list(ids), values, ended or len(ids) < params.max_completion_length, text)


def _settings(params: SamplingParams) -> dict[str, Any]:
    """Sampling settings under the names of `VLLMGeneration`. No seed: the K requests of a prompt would be equal."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p or 0.0,
        "repetition_penalty": params.repetition_penalty,
        "max_completion_length": params.max_completion_length,
        "generation_kwargs": {"stop": list(params.stop_strings)} if params.stop_strings else {},
    }
