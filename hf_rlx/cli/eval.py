"""`hf-rlx eval`: held-out accuracy of a model or an adapter, with its interval."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_rlx.cli import UsageError
from hf_rlx.cli.flags import add_flags, dataclass_flags
from hf_rlx.cli.options import DATA, MODEL, REWARD, choose, defaults
from hf_rlx.cli.settings import add_config, resolve

if TYPE_CHECKING:
    from hf_rlx.trainers.grpo import GRPOTrainer


_LENGTH = 512  # tokens of an answer where nothing says how many
_SPLIT_SEED = 42  # of a training that names none


def _option(default: Any, text: str, metavar: str | None = None) -> Any:
    return field(default=default, metadata={"help": text, "metavar": metavar})


@dataclass
class EvalOptions:
    """Flags that `hf-rlx eval` has alone."""

    split: str | None = _option(
        None,
        "split that is evaluated on; of a task always the held-out one (default: test; with --eval-fraction: train)",
        "NAME",
    )
    limit: int | None = _option(None, "first rows only")
    temperature: float = _option(0.0, "0: the most probable answer; 1: one sampled as in training")
    top_p: float = _option(1.0, "nucleus sampling")
    max_completion_length: int | None = _option(
        None, "tokens an answer, EOS included (default: the task's, else 512, or what the model's context leaves)"
    )
    batch_size: int = _option(64, "answers that decode side by side")
    seed: int | None = _option(
        None, "of sampling (default: 0), and of --eval-fraction (default: 42, which is the one of training)"
    )
    output: str | None = _option(None, "JSON file for the metrics", "FILE")
    completions: str | None = _option(None, "folder for the questions and answers (parquet)", "FOLDER")
    quiet: bool = _option(False, "no progress bar, no table of answers")


FLAGS = (
    *choose(MODEL, "model", "model_revision", "dtype", "attn_implementation", "load_in_4bit"),
    *choose(DATA, "dataset", "dataset_config", "eval_fraction", "columns"),
    *REWARD,
    *dataclass_flags(EvalOptions, "evaluation"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `hf-rlx eval` takes."""
    parser.usage = "hf-rlx eval --model M --dataset D [--reward R ...] [--config FILE] [flags]"
    parser.description = (
        "One answer to every held-out question, scored by a verifier: the share of right answers with its 95 % Wilson "
        "interval, or the mean reward where the verifier gives more than right and wrong."
    )
    add_config(parser)
    add_flags(parser, FLAGS)


def run(args: argparse.Namespace) -> int:
    """Evaluate, and print the result.

    Raises:
        UsageError: of the settings. Errors of the data and the model as they come.
    """
    options = defaults({**vars(EvalOptions()), **resolve(args, FLAGS)})
    for name in ("model", "dataset"):
        if not options[name]:
            raise UsageError(f"--{name} is missing")
    for name in ("limit", "max_completion_length", "batch_size"):
        if options[name] is not None and options[name] < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {options[name]}")
    from hf_rlx.trainers.progress import in_words

    metrics = evaluate(options, None if args.config is None else Path(args.config).parent)
    print(summary(metrics, in_words(options["temperature"])))
    if options["output"] is not None:
        facts = {name: options[name] for name in ("model", "dataset", "eval_fraction", "temperature", "seed")}
        facts["split"] = _split(options)
        target = Path(options["output"])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({**facts, "metrics": metrics}, indent=2) + "\n", encoding="utf-8")
        print(f"written to {target}")
    return 0


def _split(options: dict[str, Any]) -> str:
    """The split that rows are read of."""
    default = "test" if options["eval_fraction"] is None else "train"
    return str(options["split"] or default)


def evaluate(options: dict[str, Any], beside: Path | None = None) -> dict[str, float]:
    """The metrics of `evaluate_rollouts`, without their prefix.

    Args:
        options: of model, data, reward and evaluation. beside: folder of the configuration file.

    Raises:
        UsageError, ValueError, OSError, RuntimeError: of settings, data, model and verifier.
    """
    from hf_rlx.cli import rewards
    from hf_rlx.cli.data import load_data, located
    from hf_rlx.cli.session import loading_options
    from hf_rlx.trainers.grpo import GRPOConfig, GRPOTrainer
    from hf_rlx.trainers.progress import OneLinePrinter, OneLineProgress

    seed = _SPLIT_SEED if options["seed"] is None else options["seed"]
    place = {"dataset": located(options["dataset"], beside), "train_split": _split(options)}
    data = load_data({**options, **place}, "prompts", seed)
    rows = data.train if data.held_out is None else data.held_out
    if options["limit"] is not None:
        rows = rows.select(range(min(options["limit"], len(rows))))
    specs = options["reward"] or ([] if data.reward is None else [data.reward])
    if not specs:
        raise UsageError("--reward is missing: a verifier such as number or math, or module:function")
    functions = rewards.read_rewards(specs, beside)
    length = options["max_completion_length"] or data.max_completion_length
    trainer = None
    with _folder(options["completions"]) as folder:
        try:
            config = GRPOConfig(
                output_dir=folder,
                beta=0.0,
                learning_rate=1e-5,  # nothing is trained
                max_completion_length=length or _LENGTH,
                max_rollout_rows=options["batch_size"],
                eval_temperature=options["temperature"],
                top_p=options["top_p"],
                max_reward_failures=1.0,
                disable_tqdm=options["quiet"] or not sys.stderr.isatty(),
                report_to="none",
                seed=options["seed"] or 0,
                model_init_kwargs=loading_options(options),
            )
            trainer = GRPOTrainer(**_model(options, config, functions), args=config, eval_dataset=rows)
            trainer.tables.quiet = options["quiet"]
            for line in (OneLineProgress, OneLinePrinter):
                trainer.pop_callback(line)  # the summary says the same
            if length is None:
                _fit(trainer, rows)
            metrics = trainer.evaluate()
        finally:
            if trainer is not None:
                trainer.scorer.close()
            rewards.close(functions)
    return {name.removeprefix("eval_"): value for name, value in metrics.items()}


def summary(metrics: dict[str, float], how: str = "") -> str:
    """The result in a few lines. `how`: the answers came about."""
    lines = []
    starts = [name.removesuffix("_n") for name in metrics if name.startswith("accuracy/") and name.endswith("_n")]
    for name in starts:
        share, n = metrics[name], int(metrics[f"{name}_n"])
        low, high = metrics[f"{name}_low"], metrics[f"{name}_high"]
        right = f"{round(share * n)} of {n} right"
        lines.append(f"{name.removeprefix('accuracy/')}: {share:.3f} (95 % interval {low:.3f} to {high:.3f}), {right}")
    shown = {
        "reward": "mean reward {:.4f}",
        "completions/mean_length": "mean length {:.1f} tokens",
        "completions/clipped_ratio": "{:.1%} cut",
        "runtime": "{:.1f} s",
    }
    figures = [text.format(metrics[name]) for name, text in shown.items() if name in metrics]
    lines.append(", ".join([*([how] if how else []), *figures]))
    return "\n".join(lines)


def _fit(trainer: GRPOTrainer, rows: Any) -> None:
    """Lower the default length of an answer to what the model's context leaves beside the longest prompt."""
    from hf_rlx.data.formats import naming_rows
    from hf_rlx.rollout.collect import encode_rows

    args, context = trainer.args, trainer.shared.context_length
    if context is None or not len(rows):
        return
    with naming_rows(rows, "eval_dataset"):
        prompts = encode_rows(
            rows, trainer.tokenizer, args.chat_template_kwargs or {}, args.special_tokens_in_messages
        )
    longest = max(len(prompt.ids) for prompt in prompts)
    room = context - longest
    if 1 <= room < args.max_completion_length:  # without any room the evaluation names the prompt
        print(
            f"note: answers have up to {room} tokens, not {args.max_completion_length}: the model's context is "
            f"{context}, and the longest prompt takes {longest}",
            file=sys.stderr,
        )
        args.max_completion_length = room


def _model(options: dict[str, Any], config: Any, functions: list[Any]) -> dict[str, Any]:
    """Arguments of the trainer: the model, and the rewards."""
    from peft import LoraConfig

    from hf_rlx.cli.names import check_model
    from hf_rlx.cli.session import with_roles
    from hf_rlx.models.loading import four_bit_config
    from hf_rlx.models.storage import has_adapter

    check_model(options["model"], config.model_init_kwargs)
    given: dict[str, Any] = {"model": options["model"]}
    if options["load_in_4bit"]:
        given["quantization_config"] = four_bit_config()
        if not has_adapter(Path(options["model"])):
            # Trainers refuse 4-bit weights alone; an adapter that nothing has trained changes no answer.
            given["peft_config"] = LoraConfig(r=1, target_modules="all-linear", task_type="CAUSAL_LM")
    return with_roles(given, config, functions)


@contextmanager
def _folder(wanted: str | None) -> Iterator[str]:
    """Where the table of answers goes; a folder that vanishes where nobody wants it."""
    if wanted is not None:
        yield wanted
        return
    with tempfile.TemporaryDirectory(prefix="hf-rlx-eval-") as folder:
        yield folder
