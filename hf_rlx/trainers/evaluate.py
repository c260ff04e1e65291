"""Evaluation of an online trainer: sample held-out prompts, score them, report with intervals."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_rlx.data.formats import check_prompts, naming_rows
from hf_rlx.functional import wilson_interval
from hf_rlx.rollout.collect import Collected, collect, is_collective, mark_weights
from hf_rlx.trainers.metrics import MetricStore, gathered
from hf_rlx.trainers.observe import record_lengths, record_rewards
from hf_rlx.trainers.processes import together
from hf_rlx.trainers.progress import eval_temperature

if TYPE_CHECKING:
    from hf_rlx.trainers.online import OnlineTrainer


def evaluate_rollouts(trainer: OnlineTrainer, eval_dataset: Any, prefix: str) -> dict[str, float]:
    """Sample every prompt of the evaluation set and score it.

    One greedy completion a prompt by default. Sampling draws nothing from training's random state; a reward may.

    Returns:
        `<prefix>_reward` with `_low` and `_high` (mean +- 1.96 standard errors over prompts; of a single function of 0
        and 1 Wilson's, as below) and `_n`,
        `<prefix>_rewards/<function>/mean` (of several functions with `_low`, `_high` and `_n` too, weight 0 or not),
        lengths, and for every reward function that only returned 0 and 1:
        `<prefix>_accuracy/<function>` with `_low` and `_high` (95 % Wilson interval) and `_n`.

    Raises:
        ValueError: there is no evaluation dataset.
    """
    dataset: Any = trainer.eval_dataset if eval_dataset is None else eval_dataset
    if dataset is None:
        raise ValueError("evaluate() needs an eval_dataset, here or in the constructor")
    if isinstance(dataset, dict):
        parts = [evaluate_rollouts(trainer, part, f"{prefix}_{name}") for name, part in dataset.items()]
        return {name: value for part in parts for name, value in part.items()}
    if eval_dataset is not None:
        check_prompts(dataset, "eval_dataset")
    start = time.perf_counter()
    mark_weights(trainer.sampler, trainer.state.global_step)
    named = naming_rows(dataset, "eval_dataset")
    with together(apply=not is_collective(trainer.sampler)), named, trainer.scorer.frozen():
        collected = _collect_share(trainer, dataset)
    store = MetricStore()
    for part in collected:
        record_rewards(store, part.rollouts, part.scores.names, part.scores.metrics)
        record_lengths(store, part.rollouts)
        trainer.tables.add(prefix, trainer.state.global_step, part.rollouts, part.scores)
    metrics = store.flush()
    metrics |= _intervals(collected, trainer.scorer.names)
    accuracies = _accuracies(collected, trainer)
    metrics |= accuracies | _share_of_right(accuracies, trainer)
    seconds = time.perf_counter() - start
    metrics |= {"runtime": seconds, "samples_per_second": len(dataset) / seconds}
    metrics = {f"{prefix}_{name}": value for name, value in metrics.items()}
    trainer.tables.write(prefix, trainer.state.global_step)
    trainer.log(dict(metrics))
    trainer.control = trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, metrics)
    return metrics


def _collect_share(trainer: OnlineTrainer, dataset: Any) -> list[Collected]:
    """This process's share of the evaluation rows, in batches.

    A collective sampler is called by all processes equally often: by one whose share is smaller also with no row.
    """
    args = trainer.args
    per_prompt = args.num_generations_eval or 1
    temperature = eval_temperature(args)
    indices = range(args.process_index, len(dataset), args.world_size)
    batch = max(1, args.max_rollout_rows // per_prompt)
    collected = []
    for start in range(0, math.ceil(len(dataset) / args.world_size), batch):
        if start >= len(indices) and not is_collective(trainer.sampler):
            break
        with together(apply=is_collective(trainer.sampler)):
            part = collect(
                [dataset[i] for i in indices[start : start + batch]],
                trainer.sampler,
                trainer.scorer,
                trainer.tokenizer,
                args.sampling_params(seed=start, temperature=temperature),
                per_prompt,
                chat_template_kwargs=args.chat_template_kwargs,
                special_tokens=args.special_tokens_in_messages,
                max_prompt_tokens=trainer.room_for_prompt(),
                progress=not args.disable_tqdm and trainer.is_world_process_zero(),
                description=f"evaluation {start}/{len(indices)}",
                poll=trainer.keeper.stop_if_alone,
            )
        collected.append(part)
    return [part for part in collected if part.rollouts]


def _accuracies(collected: list[Collected], trainer: OnlineTrainer) -> dict[str, float]:
    """Share of right answers of every reward function that says right or wrong only, over all processes."""
    names = trainer.scorer.names
    local = torch.cat([part.scores.rewards for part in collected]) if collected else torch.zeros(0, len(names))
    rewards = torch.tensor(gathered(local.tolist())).reshape(-1, len(names))
    metrics: dict[str, float] = {}
    for index, name in enumerate(names):
        values = rewards[:, index][~torch.isnan(rewards[:, index])]
        if not values.numel() or not torch.isin(values, torch.tensor([0.0, 1.0])).all():
            continue
        right, total = int(values.sum()), values.numel()
        low, high = wilson_interval(right, total)
        metrics |= {
            f"accuracy/{name}": right / total,
            f"accuracy/{name}_low": low,
            f"accuracy/{name}_high": high,
            f"accuracy/{name}_n": float(total),
        }
    return metrics


def _share_of_right(accuracies: dict[str, float], trainer: OnlineTrainer) -> dict[str, float]:
    """The interval of the total where one function alone has a weight and says right or wrong: that of its share,
    which stays between 0 and the weight."""
    weighted = [(n, float(w)) for n, w in zip(trainer.scorer.names, trainer.scorer.weights, strict=True) if w]
    if len(weighted) != 1 or weighted[0][1] < 0 or f"accuracy/{weighted[0][0]}_low" not in accuracies:
        return {}
    name, weight = weighted[0]
    return {f"reward_{end}": weight * accuracies[f"accuracy/{name}_{end}"] for end in ("low", "high")}


def _intervals(collected: list[Collected], names: list[str]) -> dict[str, float]:
    """Intervals of the mean total reward, and of several functions of each one's mean."""
    rollouts = [rollout for part in collected for rollout in part.rollouts]
    found = _interval("reward", [rollout.total for rollout in rollouts])
    for index, name in enumerate(names if len(names) > 1 else []):
        found |= _interval(f"rewards/{name}/mean", [rollout.rewards[:, index] for rollout in rollouts])
    return found


def _interval(name: str, groups: list[Tensor]) -> dict[str, float]:
    """Mean +- 1.96 standard errors over the prompts of all processes; none for fewer than two scored prompts.

    Args:
        name: of the metric. groups: (K,) rewards of each prompt of this process, NaN where there is none.
    """
    scored = (group[~torch.isnan(group)] for group in groups)
    means = torch.tensor(gathered([float(group.mean()) for group in scored if group.numel()]), dtype=torch.float64)
    if means.numel() < 2:
        return {}
    half, mean = 1.96 * float(means.std()) / math.sqrt(means.numel()), float(means.mean())
    return {f"{name}_low": mean - half, f"{name}_high": mean + half, f"{name}_n": float(means.numel())}
