"""How a round of iterative DPO comes to its pairs: sample, score, pair, save, and what is told of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hf_rlx.data.formats import naming_rows
from hf_rlx.rollout.collect import Collected, collect
from hf_rlx.trainers.memory import with_fewer_rows
from hf_rlx.trainers.metrics import MetricStore, gathered
from hf_rlx.trainers.observe import record_rollouts
from hf_rlx.trainers.processes import together
from hf_rlx.trainers.rounds import Outcome, Round, counts_of, folder_of, outcome_of, write_round

if TYPE_CHECKING:
    from hf_rlx.trainers.iterative_dpo import IterativeDPOTrainer

logger = logging.getLogger(__name__)


def make_round(trainer: IterativeDPOTrainer, number: int) -> Round:
    """Round `number`, from 0, with the weights as they are. Every process must call it: each makes the pairs of its
    share of the prompts, and all get all of them.

    Raises:
        ValueError: the first round has no pair. RewardError, PromptError: see `collect`.
    """
    args, plan, step = trainer.args, trainer.plan, trainer.state.global_step
    assert plan is not None
    seed = args.data_seed if args.data_seed is not None else args.seed
    indices = plan.indices(number, len(trainer.train_dataset), seed, args.shuffle_dataset)
    mine = range(args.process_index, len(indices), args.world_size)
    longest = args.longest_row(trainer.shared.context_length)
    bos = cast("int | None", trainer.tokenizer.bos_token_id)
    with together():
        collected = _rollout(trainer, [trainer.train_dataset[indices[place]] for place in mine], number)
        trainer.alerts.rollout(collected, step)
        trainer.alerts.texts(collected.rollouts, step)
        trainer.scorer.note_rollout(collected.scores.total)
        trainer._num_tokens += record_rollouts(cast("Any", trainer), collected)
        trainer.tables.add("train", step, collected.rollouts, collected.scores)
        local = [
            outcome_of(rollout, place, args, longest, bos)
            for rollout, place in zip(collected.rollouts, mine, strict=True)
        ]
        _record(trainer.metrics["train"], local)
    for function in trainer.scorer.functions:
        if hasattr(function.call, "share"):  # running moments, the same on all processes before they are saved
            function.call.share(gathered)
    outcomes = sorted(gathered(local), key=lambda outcome: outcome.place)
    counts = {
        "round": number,
        "step": step,
        **counts_of(outcomes, args.num_generations),
        "strategy": args.pair_strategy,
        "margin": args.pair_margin,
        "reference": args.reference,
    }
    run = Path(str(args.output_dir))
    if number == 0 and trainer.is_world_process_zero() and folder_of(run, 0).exists():
        logger.warning("%s has rounds of an earlier run; this one overwrites them one by one", run / "pairs")
    with together():
        if args.should_save:
            write_round(run, number, [row for outcome in outcomes for row in outcome.saved], counts)
    made = Round(number, [outcome.row for outcome in outcomes if outcome.row is not None])
    if not made.rows:
        _tell_of_no_pairs(trainer, number, counts)
    elif trainer.is_world_process_zero():
        told = "round %d: %d pairs of %d of %d prompts, in %s"
        logger.info(told, number, counts["pairs"], len(made.rows), len(outcomes), folder_of(run, number))
    return made


def _rollout(trainer: IterativeDPOTrainer, rows: list[dict[str, Any]], number: int) -> Collected:
    """Completions with their scores; the seed follows from run seed, round and process."""
    args = trainer.args
    trainer.scorer.trainer_state = trainer.state  # train() makes a new one
    seed = ((args.seed * 1009 + number) * 64 + args.process_index) * 16
    with naming_rows(trainer.train_dataset, "train_dataset"):
        return with_fewer_rows(
            trainer.sampler,
            args.num_generations,
            lambda: collect(
                rows,
                trainer.sampler,
                trainer.scorer,
                trainer.tokenizer,
                args.sampling_params(seed=seed),
                args.num_generations,
                chat_template_kwargs=args.chat_template_kwargs,
                special_tokens=args.special_tokens_in_messages,
                max_prompt_tokens=trainer.room_for_prompt(),
                progress=not args.disable_tqdm and trainer.is_world_process_zero(),
                description=f"round {number}",
                poll=trainer.keeper.stop_if_alone,
            ),
        )


def _record(store: MetricStore, outcomes: list[Outcome]) -> None:
    """What a round's pairs tell, into the training metrics."""
    for outcome in outcomes:
        pairs = 0 if outcome.row is None else outcome.row.num_pairs
        store.add("pairs/count", pairs, reduce="sum")
        store.add("pairs/prompts", float(pairs > 0), reduce="sum")
        store.add("pairs/prompts_without", float(pairs == 0), reduce="sum")
        for row in outcome.saved:
            scores = row["scores"] if "scores" in row else (row["score_chosen"], row["score_rejected"])
            store.add("pairs/score_gap", max(scores) - min(scores))


def _tell_of_no_pairs(trainer: IterativeDPOTrainer, number: int, counts: dict[str, Any]) -> None:
    """A warning; of the first round an error."""
    why = "; ".join(f"{reason}: {count}" for reason, count in counts["prompts_without_pairs"].items())
    told = (
        f"round {number} has no pair: of {counts['prompts']} prompts with {trainer.args.num_generations} completions "
        f"each none gave one ({why})"
    )
    if number == 0:
        raise ValueError(
            f"{told}. Nothing would be learned: look at what the reward functions say of the completions "
            "(log_completions=True), take prompts that are neither always solved nor never, more num_generations or "
            "prompts_per_round, a higher temperature, or a lower pair_margin"
        )
    if trainer.is_world_process_zero():
        logger.warning("%s; its steps change nothing, the next round samples anew", told)


__all__ = ["make_round"]
