"""`hf-rlx pipeline ppo`: InstructGPT's three stages (2203.02155 figure 2) on one base, in about a minute on a CPU.

    demonstrations   people do sums, `17+25=` -> `42`, and slip often: supervised fine-tuning
    comparisons      six answers a sum are ranked by an annotator: a reward model
    reinforcement    PPO against the reward model, held near the fine-tuned policy

The task is synthetic, so that the true reward is known. People like round numbers near the sum: 1 for a last digit of
0, down to 0 for a 9, and 0 for what is off by more than ten or no number. Annotators rank by it with noise (Plackett
and Luce: the true reward over a temperature plus Gumbel noise). The policy never sees it; the report puts it beside
the proxy that PPO climbs.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.table import Table

from hf_rlx.cards import Measure
from hf_rlx.data.tasks import Task, arithmetic_task
from hf_rlx.data.tokenize import encode_prompt
from hf_rlx.models.loading import TINY, load_tokenizer
from hf_rlx.models.shared import SharedModel
from hf_rlx.rollout.generate import Generator
from hf_rlx.rollout.sampling import SamplingParams
from hf_rlx.trainers import model_card
from hf_rlx.trainers.ppo import PPOTrainer
from hf_rlx.trainers.ppo_config import PPOConfig
from hf_rlx.trainers.reward import RewardConfig, RewardTrainer
from hf_rlx.trainers.reward_report import RewardReport
from hf_rlx.trainers.sft import SFTConfig, SFTTrainer

NEAR = 10  # how far off an answer may be
_LENGTH = 8  # tokens of an answer
_SLIPS = (-4, -3, -2, -1, 1, 2, 3, 4)


def true_reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """The reward that the annotators mean; see the module's docstring."""
    values = []
    for text, right in zip(completions, answer, strict=True):
        number = re.fullmatch(r"-?\d{1,6}", text)
        near = number is not None and abs(int(text) - int(right)) <= NEAR
        values.append(1 - int(text[-1]) / 9 if near else 0.0)
    return values


def demonstrations(rows: list[dict[str, str]], slips: float, seed: int) -> Dataset:
    """What people write: the sum, off by up to four in a share `slips` of the cases.

    Args:
        rows: of an arithmetic task. slips: in [0, 1]. seed: of who slips where.

    Returns:
        Rows `{"prompt", "completion"}`.
    """
    rng = random.Random(seed)
    told = [int(row["answer"]) for row in rows]
    told = [number + rng.choice(_SLIPS) if rng.random() < slips else number for number in told]
    return Dataset.from_list([{"prompt": r["prompt"], "completion": str(n)} for r, n in zip(rows, told, strict=True)])


def annotated(rows: list[dict[str, str]], answers: list[list[str]], temperature: float, seed: int) -> Dataset:
    """Rankings of sampled answers by a noisy annotator.

    Args:
        rows: P rows of an arithmetic task. answers: P lists of K texts.
        temperature: of the choice, in units of the true reward: two answers that differ by d are ranked rightly with
            probability sigma(d / temperature).
        seed: of the noise.

    Returns:
        Rows `{"prompt", "responses", "ranks"}` (0: best). Equal answers share a rank; a prompt all of whose answers
        are the same is left out.
    """
    rng = random.Random(seed)
    ranked = []
    for row, texts in zip(rows, answers, strict=True):
        different = list(dict.fromkeys(text for text in texts if text))
        if len(different) < 2:
            continue
        liked = true_reward(different, [row["answer"]] * len(different))
        noisy = [value / temperature - math.log(-math.log(rng.random())) for value in liked]
        order = sorted(range(len(different)), key=lambda i: -noisy[i])
        ranked.append(
            {
                "prompt": row["prompt"],
                "responses": different,
                "ranks": [order.index(i) for i in range(len(different))],
            }
        )
    return Dataset.from_list(ranked)


@dataclass(frozen=True)
class Stage:
    """How the policy stands after a stage: one sampled answer for each of `questions` held-out sums.

    Attributes:
        true_reward: mean, with the half-width of its 95 % interval. right: share of right sums, exactly.
        proxy: mean score of the reward model of the second stage, in its own units.
    """

    name: str
    true_reward: float
    half_width: float
    right: float
    proxy: float
    questions: int


@dataclass(frozen=True)
class PipelineResult:
    """stages: base, SFT, PPO. reward_model: the reward model's report on held-out comparisons."""

    stages: list[Stage]
    reward_model: RewardReport


@dataclass
class PPOPipeline:
    """The three stages as methods on one `SharedModel`.

    Args:
        model: `"tiny"` (bundled), a folder or a Hub id of a model that can add.
        output: folder for everything that is written.
        seed: of data, adapters and sampling.
        quiet: no progress bars.
        sft_steps, reward_steps, ppo_steps: optimizer steps of each stage.
    """

    model: str = TINY
    output: str | Path = "runs/pipeline"
    seed: int = 0
    quiet: bool = False
    sft_steps: int = 60
    reward_steps: int = 120
    ppo_steps: int = 80
    slips: float = 0.6
    noise: float = 0.1

    def __post_init__(self) -> None:
        self.folder = Path(self.output)
        self.tokenizer = load_tokenizer(self.model)
        torch.manual_seed(self.seed)  # of the first adapter; trainers seed those that they add
        self.shared = SharedModel.from_pretrained(self.model, peft_config=_lora())
        self.task: Task = arithmetic_task(2400, 400, self.seed)
        rows = self.task.train.to_list()
        self.shown, self.compared, self.prompts = rows[:600], rows[600:1400], rows[1400:]
        self.held_out = self.task.test.to_list()

    def run(self) -> PipelineResult:
        """All stages; writes the model with its roles, and `pipeline.json`."""
        console, start = Console(), time.perf_counter()
        answers = {"base": self.answers()}
        self.fine_tune()
        answers["SFT"] = self.answers()
        report = self.compare()
        self.reinforce()
        answers["PPO"] = self.answers()
        stages = [self.stage(name, texts) for name, texts in answers.items()]
        self.shared.save_pretrained(self.folder)
        self.tokenizer.save_pretrained(self.folder)
        result = PipelineResult(stages, report)
        self._write(result)
        self._write_card(stages)
        console.print(table(result, time.perf_counter() - start))
        console.print(f"Policy, reward model, critic and figures: {self.folder}")
        return result

    def fine_tune(self) -> None:
        """Stage 1: the policy learns the form from people who slip."""
        SFTTrainer(
            self.shared,
            SFTConfig(per_device_train_batch_size=32, learning_rate=2e-3, **self._fields("sft", self.sft_steps)),
            train_dataset=demonstrations(self.shown, self.slips, self.seed),
            processing_class=self.tokenizer,
        ).train()

    def compare(self) -> RewardReport:
        """Stage 2: a reward model from rankings of the policy's own answers; one prompt in five is held out."""
        rows = annotated(self.compared, self.sample(self.compared, 6, seed=1), self.noise, self.seed)
        parts = rows.train_test_split(test_size=0.2, seed=self.seed)
        trainer = RewardTrainer(
            self.shared,
            RewardConfig(
                loss_type="all_pairs",
                per_device_train_batch_size=32,
                learning_rate=2e-3,
                normalizer="running",
                **self._fields("reward", self.reward_steps),
            ),
            train_dataset=parts["train"],
            eval_dataset=parts["test"],
            processing_class=self.tokenizer,
        )
        trainer.train()
        return trainer.report()

    def reinforce(self) -> None:
        """Stage 3: PPO against the reward model, near the fine-tuned policy."""
        self.last_trainer = PPOTrainer(
            self.shared,
            self.shared.reward_function(),
            PPOConfig(
                per_device_train_batch_size=128,
                num_generations=4,
                num_iterations=2,
                max_completion_length=_LENGTH,
                max_rollout_rows=128,
                learning_rate=5e-4,
                beta=0.15,
                **self._fields("ppo", self.ppo_steps),
            ),
            train_dataset=Dataset.from_list(self.prompts),
            processing_class=self.tokenizer,
        )
        self.last_trainer.train()

    def sample(self, rows: list[dict[str, str]], count: int, seed: int) -> list[list[str]]:
        """`count` answers of the policy to every row, at temperature 1."""
        prompts = [encode_prompt(row["prompt"], self.tokenizer).ids for row in rows]
        generator = Generator(self.shared, self.tokenizer, max_rows=128)
        sampled = generator.generate(prompts, count, SamplingParams(_LENGTH, seed=seed * 7919 + self.seed))
        return [[completion.text for completion in group] for group in sampled]

    def answers(self) -> list[str]:
        """One answer to every held-out sum; every stage is asked with the same random numbers."""
        return [texts[0] for texts in self.sample(self.held_out, 1, seed=2)]

    def stage(self, name: str, texts: list[str]) -> Stage:
        """What the true reward and the proxy say of a stage's answers."""
        values = torch.tensor(true_reward(texts, [row["answer"] for row in self.held_out]))
        reward = self.shared.reward_function()
        with reward.frozen():
            scores = reward([row["prompt"] for row in self.held_out], texts)
        found = [score for score in scores if score is not None]
        return Stage(
            name,
            float(values.mean()),
            1.96 * float(values.std()) / len(values) ** 0.5,
            sum(text == row["answer"] for text, row in zip(texts, self.held_out, strict=True)) / len(texts),
            sum(found) / max(len(found), 1),
            len(values),
        )

    def _fields(self, stage: str, steps: int) -> dict[str, Any]:
        """What all stages' configurations share."""
        return {
            "output_dir": str(self.folder / stage),
            "max_steps": steps,
            "lr_scheduler_type": "constant_with_warmup",
            "warmup_steps": 5,
            "logging_steps": 20,
            "save_strategy": "no",
            "report_to": "none",
            "seed": self.seed,
            "disable_tqdm": self.quiet,
        }

    def _write_card(self, stages: list[Stage]) -> None:
        """The card of the last stage, with the true reward of the base beside that of the end."""
        first, last = stages[0], stages[-1]
        before, after = ((s.true_reward - s.half_width, s.true_reward + s.half_width) for s in (first, last))
        reward = Measure(
            "true reward", first.true_reward, last.true_reward, before, after, last.questions, metric="reward"
        )
        model_card.write(
            self.last_trainer,
            self.folder,
            measures=[reward, Measure("share of right sums", first.right, last.right, n=last.questions)],
            dataset=self.task.name.replace("_", " "),
            decoding="one sample a question at temperature 1",
            notes=[
                "The third of three stages on one base: supervised fine-tuning, a reward model of rankings, and PPO "
                "against it. The base's score is that before the first stage.",
                "The true reward, which the annotators mean and the policy never sees, pays for round numbers near "
                "the sum: 1 for a last digit of 0, down to 0 for a 9, and 0 for what is off by more than ten. So the "
                "share of right sums is not what is learned.",
            ],
        )

    def _write(self, result: PipelineResult) -> None:
        facts = {"stages": [asdict(s) for s in result.stages], "reward_model": result.reward_model.metrics()}
        staged = self.folder / ".pipeline.json"
        staged.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        os.replace(staged, self.folder / "pipeline.json")


def table(result: PipelineResult, seconds: float) -> Table:
    """The stages, the true reward beside the proxy."""
    metrics = result.reward_model.metrics()
    title = f"One sampled answer to each of {result.stages[0].questions} held-out sums ({seconds:.0f} s)"
    shown = Table(
        title=title,
        caption=f"reward model: pairwise accuracy {metrics['accuracy']:.3f} on held-out comparisons, ECE "
        f"{metrics['ece']:.3f}",
    )
    for column in ("", "true reward", "95 % interval", "right", "proxy"):
        shown.add_column(column, justify="right" if column else "left")
    for s in result.stages:
        interval = f"{s.true_reward - s.half_width:.3f} - {s.true_reward + s.half_width:.3f}"
        shown.add_row(s.name, f"{s.true_reward:.3f}", interval, f"{s.right:.3f}", f"{s.proxy:+.3f}")
    return shown


def _lora() -> LoraConfig:
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
