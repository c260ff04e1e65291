"""Rollouts by vLLM, through TRL's own client classes. The only file that imports `trl`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate.utils import gather_object
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedTokenizerBase

from hf_rlx.models.shared import SharedModel
from hf_rlx.rollout.generate import OnGroup, OnStep, eos_token_ids
from hf_rlx.rollout.sampling import SamplingParams, from_generation_kwargs, only_of_the_engine
from hf_rlx.types import Completion


class VllmGenerator:
    """The built-in generator's interface, with vLLM behind it (colocated or as a server).

    `collective`: all processes must call `generate` equally often. With how many prompts each is up to them: shorter
    lists are filled up here, because TRL's client cuts its answers into equal shares.

    `version`: what the weights are counted by (the trainer's global step). The weights are pushed when it, or a
    parameter of the policy, has changed since the last push; None pushes them at every call.

    Args:
        model: whose policy weights are pushed to vLLM.
        tokenizer: decodes completions.
        accelerator: of the trainer.
        params: sampling settings of the first rollout.
        options: keyword arguments of `trl.generation.VLLMGeneration` (mode, server, memory share, ...).
        generation_kwargs: the user's further options of `vllm.SamplingParams`. What `params` have a field for
            (temperature, max_tokens, stop, ...) must say the same as they do: the caller folds it in.

    Raises:
        ImportError: vLLM or TRL is missing; the message names both ways out.
        ValueError: the base is quantised, or the adapter trains whole modules: TRL's client would push wrong weights;
            or `generation_kwargs` contradict `params` or would break the order of the answers.
    """

    collective = True

    def __init__(
        self,
        model: SharedModel,
        tokenizer: PreTrainedTokenizerBase,
        accelerator: Any,
        params: SamplingParams,
        options: dict[str, Any],
        generation_kwargs: dict[str, Any] | None = None,
    ) -> None:
        _refuse_model(model)
        _refuse_options(generation_kwargs, params)
        try:
            import vllm  # noqa: F401
            from trl.generation.vllm_generation import VLLMGeneration
        except ImportError as error:
            raise ImportError(
                "use_vllm=True needs vLLM and TRL: pip install vllm trl. Or leave use_vllm=False: the built-in "
                "generator shares the prefill and drops finished rows by itself"
            ) from error
        self.model, self.tokenizer, self.accelerator = model, tokenizer, accelerator
        self.further = only_of_the_engine(generation_kwargs)
        self.version: int | None = None
        self._synced: tuple[int | None, int] | None = None
        # A sleeping engine forgets its weights after every rollout, and would fetch them by itself, unguarded.
        self._forgets = options.get("mode") == "colocate" and bool(options.get("enable_sleep_mode"))
        self.eos = eos_token_ids(model, tokenizer)
        self.engine = VLLMGeneration(
            model=model.model,
            accelerator=accelerator,
            processing_class=tokenizer,
            logprobs=0,
            **_settings(params, self.further),
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
        """Push the weights if they are new, sample K completions a prompt; see `Generator.generate`."""
        # Read at every call; evaluation has settings of its own.
        for name, value in _settings(params, self.further).items():
            setattr(self.engine, name, value)
        filled = [*prompt_ids, *self._agree(list(prompt_ids))]
        repeated = [ids for ids in filled for _ in range(num_generations)]
        _, completion_ids, logprobs, _ = self.engine.generate(repeated, None, num_generations)
        groups: list[list[Completion]] = []
        for start in range(0, len(prompt_ids) * num_generations, num_generations):
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

    def _agree(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        """Push the weights where any process has new ones; returns the prompts that this process is short of."""
        stamp = self.version, sum(p._version for _, p in self.model.trainable_parameters())
        new = self._forgets or self.version is None or stamp != self._synced
        told = [(len(prompt_ids), new)]
        everyone = gather_object(told) if self.accelerator.num_processes > 1 else told
        if any(other for _, other in everyone):
            with base_kept(self.model.model):
                self.engine.sync_weights()
            self._synced = stamp
        filler = prompt_ids[0] if prompt_ids else [self.tokenizer.eos_token_id or 0]
        return [filler] * (max(count for count, _ in everyone) - len(prompt_ids))

    def _completion(self, ids: list[int], logps: list[list[float | None]], params: SamplingParams) -> Completion:
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        ended = bool(ids) and (ids[-1] in self.eos or any(stop in text for stop in params.stop_strings))
        # A log-prob that the engine did not report is NaN: its importance weight is 1.
        values = [float("nan") if not token or token[0] is None else float(token[0]) for token in logps]
        return Completion(list(ids), values, ended or len(ids) < params.max_completion_length, text)


@contextmanager
def base_kept(model: nn.Module) -> Iterator[None]:
    """Put the weights under every adapter back, bit for bit, after a block that merges the adapter into them.

    In floating point W + BA - BA is not W, and what is off after a push would add up in the base, which is also the
    reference. The copies are in CPU memory, as the engine has the device's; a full fine-tune needs none.
    """
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    weights = {id(p): p for layer in layers for p in layer.get_base_layer().parameters()}.values()
    kept = [(weight, weight.detach().to("cpu", copy=True)) for weight in weights]
    try:
        yield
    finally:
        for layer in layers:
            if layer.merged:  # the block failed in between
                layer.unmerge()
        for weight, copy in kept:
            weight.data.copy_(copy)


def _refuse_model(model: SharedModel) -> None:
    way_out = "Set use_vllm=False: the built-in generator runs the adapter in place"
    if model.quantization_method is not None:
        raise ValueError(
            "use_vllm=True with a quantised base: TRL's client would merge the adapter into rounded weights and push "
            f"their packed bytes. {way_out}; or load the base in bfloat16"
        )
    whole = [name for name, part in model.model.named_modules() if isinstance(part, AuxiliaryTrainingWrapper)]
    if whole:
        raise ValueError(
            f"use_vllm=True with an adapter that trains whole modules or tokens ({whole[0]}): TRL's client would push "
            f"them under names that vLLM does not know. {way_out}; or drop modules_to_save and "
            "trainable_token_indices, and put the modules into target_modules"
        )


def _refuse_options(generation_kwargs: dict[str, Any] | None, params: SamplingParams) -> None:
    for name, why in (
        ("n", "the number of completions is num_generations"),
        ("seed", "with one seed all completions of a prompt are the same"),
        ("logprobs", "the loss needs those of the sampled tokens"),
    ):
        if name in (generation_kwargs or {}):
            raise ValueError(f"generation_kwargs must not hold {name!r}: {why}")
    for name, value in from_generation_kwargs(generation_kwargs, others=True).items():
        if getattr(params, name) != value:
            raise ValueError(
                f"generation_kwargs say {name}={value!r}, the configuration {getattr(params, name)!r}; "
                "set the configuration's field instead"
            )


def _settings(params: SamplingParams, further: dict[str, Any]) -> dict[str, Any]:
    """Sampling settings under the names of `VLLMGeneration`. No seed: the K requests of a prompt would be equal."""
    return {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p or 0.0,
        "repetition_penalty": params.repetition_penalty,
        "max_completion_length": params.max_completion_length,
        "generation_kwargs": further | ({"stop": list(params.stop_strings)} if params.stop_strings else {}),
    }
