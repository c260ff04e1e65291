"""Every trainer writes a card with what it saves: true, complete, and with a snippet that runs."""

from __future__ import annotations

import io
import json
import logging
import re
import struct
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, ModelCardData, metadata_load
from huggingface_hub.errors import EntryNotFoundError
from transformers import TrainerCallback

from hf_rlx.cards import RunFacts
from hf_rlx.cli import main
from hf_rlx.models.loading import load_tokenizer
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers import model_card
from hf_rlx.trainers.dpo import DPOConfig, DPOTrainer
from hf_rlx.trainers.grpo import GRPOConfig, GRPOTrainer
from hf_rlx.trainers.ipo import IPOConfig, IPOTrainer
from hf_rlx.trainers.iterative_dpo import IterativeDPOConfig, IterativeDPOTrainer
from hf_rlx.trainers.orpo import ORPOConfig, ORPOTrainer
from hf_rlx.trainers.ppo import PPOTrainer
from hf_rlx.trainers.ppo_config import PPOConfig
from hf_rlx.trainers.prm import PRMConfig, PRMTrainer
from hf_rlx.trainers.reward import RewardConfig, RewardTrainer
from hf_rlx.trainers.sft import SFTConfig, SFTTrainer
from hf_rlx.trainers.simpo import SimPOConfig, SimPOTrainer
from tests.trainers.prm_tools import solutions
from tests.trainers.reward_tools import pairs
from tests.trainers.tools import config, lora, move, rows, scripted, tiny_llama

FIELDS: dict[str, Any] = {
    "max_steps": 3,
    "logging_steps": 1,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "use_cpu": True,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "eval_on_start": True,
}
SAMPLED = {**FIELDS, "num_generations": 4, "max_completion_length": 6}


def even(completion_ids, **_: Any) -> list[float]:
    """1 for an even sum of tokens, else 0: has an accuracy."""
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


even.binary = True  # type: ignore[attr-defined]


def graded(completion_ids, **_: Any) -> list[float]:
    """A number that follows from the tokens."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def demonstrations(count: int):
    return pairs(count).rename_column("chosen", "completion").remove_columns("rejected")


def _online(trainer: Any, made: Any, **fields: Any) -> Callable[[str, str], Any]:
    def make(base: str, folder: str) -> Any:
        args = made(folder, per_device_train_batch_size=16, reward_weights=[1.0, 0.25], **{**SAMPLED, **fields})
        return trainer(base, [even, graded], args, train_dataset=rows(32), eval_dataset=rows(6), peft_config=lora())

    return make


def _rounds(base: str, folder: str) -> Any:
    args = IterativeDPOConfig(
        folder, per_device_train_batch_size=4, num_rounds=1, steps_per_round=3, **{**SAMPLED, "max_steps": -1}
    )
    return IterativeDPOTrainer(base, graded, args, train_dataset=rows(8), eval_dataset=rows(6), peft_config=lora())


def _given(trainer: Any, made: Any, data: Callable[[int], Any] = pairs, **kwargs: Any) -> Callable[[str, str], Any]:
    def make(base: str, folder: str) -> Any:
        args = made(folder, per_device_train_batch_size=4, **FIELDS)
        given = {"peft_config": lora(), **kwargs}
        return trainer(base, args=args, train_dataset=data(16), eval_dataset=data(8), **given)

    return make


# Name of the case -> how the trainer is made, the method's tag, the papers, and lines that its card must have.
CASES: dict[str, tuple[Callable[[str, str], Any], str, str, tuple[str, ...]]] = {
    "grpo": (
        _online(GRPOTrainer, GRPOConfig),
        "grpo",
        "2402.03300",
        (
            "accuracy by `even`",
            "mean total reward",
            "KL to the reference, nats a token",
            "- Rewards: `even` (weight 1), `graded` (weight 0.25)",
        ),
    ),
    "ppo": (
        _online(PPOTrainer, PPOConfig, num_generations=1),
        "ppo",
        "1707.06347",
        ("accuracy by `even`", "explained variance of the critic", "| critic | `critic/`: the policy's adapter and a"),
    ),
    "dpo": (
        _given(DPOTrainer, DPOConfig),
        "dpo",
        "2305.18290",
        (
            "accuracy of the implicit reward",
            "change of the log-prob of chosen answers, nats",
            "KL to the reference on chosen answers",
        ),
    ),
    "ipo": (_given(IPOTrainer, IPOConfig), "ipo", "2310.12036", ("margin of the implicit rewards",)),
    "simpo": (_given(SimPOTrainer, SimPOConfig), "simpo", "2405.14734", ("log-prob of chosen answers, nats",)),
    "orpo": (_given(ORPOTrainer, ORPOConfig), "orpo", "2403.07691", ("log-prob of rejected answers, nats",)),
    "iterative_dpo": (_rounds, "iterative-dpo", "2312.16682", ("mean reward", "- Rewards: `graded`\n")),
    "sft": (_given(SFTTrainer, SFTConfig, demonstrations), "sft", "2203.02155", ("perplexity", "loss, nats")),
    "full weights": (
        _given(SFTTrainer, SFTConfig, demonstrations, peft_config=None),
        "sft",
        "2203.02155",
        ("A fine-tune of `base`", "AutoModelForCausalLM.from_pretrained"),
    ),
    "reward": (
        _given(RewardTrainer, RewardConfig),
        "reward",
        "2203.02155",
        (
            "pairwise accuracy",
            "expected calibration error",
            "correlation of score and length",
            "| reward | `reward/`: a LoRA",
        ),
    ),
    "classifier": (
        _given(RewardTrainer, RewardConfig, peft_config=None),
        "reward",
        "2203.02155",
        ("A reward model, as a sequence classifier from `base`", "AutoModelForSequenceClassification.from_pretrained"),
    ),
    "classifier adapter": (
        _given(RewardTrainer, RewardConfig, peft_config=lora(task_type="SEQ_CLS")),
        "reward",
        "2203.02155",
        ("AutoPeftModelForSequenceClassification.from_pretrained",),
    ),
    "prm": (
        _given(PRMTrainer, PRMConfig, solutions),
        "prm",
        "2305.20050",
        ("accuracy over steps", "| step_reward | `step_reward/`: a LoRA", "shared.step_reward_function()"),
    ),
}


DRAWN = ("ppo", "dpo", "reward", "full weights")  # cases that draw their curves, which takes a second
PIXELS = struct.pack(">II", 645, 495)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    """A base in a folder, with a card that names its licence."""
    folder = tmp_path_factory.mktemp("models") / "base"
    tiny_llama().save_pretrained(folder)
    load_tokenizer("tiny").save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n")
    return str(folder)


def snippet(card: Path) -> str:
    """The code under "Use"."""
    found = re.search(r"## Use\n\n```python\n(.*?)```", card.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def png_size(path: Path) -> tuple[int, int]:
    return struct.unpack(">II", path.read_bytes()[16:24])


@pytest.mark.parametrize("case", CASES)
def test_a_run_leaves_its_card(case, base, tmp_path, monkeypatch, caplog):
    pytest.importorskip("matplotlib")
    if case not in DRAWN:
        monkeypatch.setattr("hf_rlx.cards.beside.plot_run", lambda _, path: path.write_bytes(bytes(16) + PIXELS))
    make, tag, paper, parts = CASES[case]
    trainer = make(base, str(tmp_path / "out"))
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert "its card was not written" not in caplog.text
    card = tmp_path / "saved" / "README.md"
    text = card.read_text()

    data = metadata_load(card)
    assert ModelCardData(**data, ignore_metadata_errors=False).to_dict() == data
    assert data["tags"][:2] == ["hf_rlx", tag]
    assert data["license"] == "cc-by-4.0"
    assert "base_model" not in data  # it is on no Hub
    task = {"reward": "text-classification", "prm": "token-classification"}.get(trainer.method, "text-generation")
    assert data["pipeline_tag"] == task
    assert data["library_name"] == ("transformers" if case in ("full weights", "classifier") else "peft")
    assert [r.metric_value for r in ModelCard.load(card).data.eval_results]
    assert paper in text

    for part in (*parts, "| held out | before training | after training |", "- Steps: 3", "learning_rate` | 0.001"):
        assert part in text, part
    assert re.search(r"- Training data: \d+ rows of .*; sha256 `[0-9a-f]{64}`", text)
    assert re.search(r"- Held-out data: \d+ rows of .*; sha256 `[0-9a-f]{64}`", text)
    assert re.search(r"\| loss \| .* \(step 1\) \| .* \(step 3\) \|", text)
    assert "![Training curves](training.png)" in text
    assert png_size(tmp_path / "saved" / "training.png")[0] in (645, 1290, 1935)
    assert "\n\n\n" not in text
    assert "None" not in text
    for name in ("README.md", "card_facts.json"):
        assert str(tmp_path) not in (tmp_path / "saved" / name).read_text()

    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(snippet(card), "the card's snippet", "exec"), {})
    assert printed.getvalue().strip() or tag not in ("reward", "prm")  # a random policy may say nothing

    if case not in DRAWN:
        return
    # The command writes the same card from what lies in the folder.
    card.unlink()
    assert main(["card", "saved"]) == 0
    assert card.read_text() == text


@pytest.mark.parametrize("kind", ["adapter", "chat"])
def test_numbers_of_the_table_are_those_of_the_log(kind, base, tmp_path, monkeypatch):
    data = pairs(8)
    if kind == "chat":
        data = data.map(
            lambda row: {
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "chosen": [{"role": "assistant", "content": row["chosen"]}],
                "rejected": [{"role": "assistant", "content": row["rejected"]}],
            }
        )
    args = DPOConfig(str(tmp_path), per_device_train_batch_size=4, **FIELDS)
    trainer = DPOTrainer(base, args=args, train_dataset=data, eval_dataset=data, peft_config=lora())
    trainer.train()
    trainer.create_model_card(model_name="Pairs", notes=["A note."])
    first, last = (log for log in trainer.state.log_history if "eval_rewards/margins" in log and log["step"] in (0, 3))
    low, high = last["eval_rewards/accuracies_low"], last["eval_rewards/accuracies_high"]
    text = (tmp_path / "README.md").read_text()
    assert first["eval_rewards/accuracies"] == 0.5  # reference and policy are one: ties
    assert f"| {last['eval_rewards/accuracies']:.3f} ({low:.3f} to {high:.3f}) |\n" in text
    facts = RunFacts.load(tmp_path)
    assert facts.after is not None
    assert (facts.after.n, facts.after.accuracy) == (8, last["eval_rewards/accuracies"])
    assert {m.name: (m.before, m.after) for m in facts.measures}["margin of the implicit rewards"] == (
        first["eval_rewards/margins"],
        last["eval_rewards/margins"],
    )
    assert text.startswith("---\n")
    assert "# Pairs\n" in text
    assert "A note.\n" in text
    assert ("apply_chat_template" in text) == (kind == "chat")
    trainer.save_model()
    monkeypatch.chdir(tmp_path.parent)
    found: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()):
        exec(compile(snippet(tmp_path / "README.md"), "the card's snippet", "exec"), found)
    assert found["output"].shape[1] >= found["inputs"]["input_ids"].shape[1]


def test_facts_that_were_given_stay(base, tmp_path):
    """`create_model_card(license=...)`, then a save: the card still has it. A card changed by hand is left alone."""
    trainer = scripted(config(tmp_path))
    trainer.create_model_card(license="mit", notes=["By me."])
    trainer.train()
    trainer.save_model()
    card = tmp_path / "README.md"
    assert "license: mit" in card.read_text()
    assert "By me." in card.read_text()
    assert "- Steps: 1\n" in card.read_text()
    card.write_text(card.read_text().replace("By me.", "By somebody else."))
    trainer.save_model()
    assert "By somebody else." in card.read_text()
    trainer.create_model_card()
    assert "By me." in card.read_text()


def test_an_evaluation_before_training_is_the_score_before(tmp_path):
    """`train()` begins the log anew."""
    args = RewardConfig(str(tmp_path), per_device_train_batch_size=4, **{**FIELDS, "eval_strategy": "no"})
    args.eval_on_start = False
    shared = SharedModel.build(tiny_llama(), lora())
    trainer = RewardTrainer(
        shared, args, train_dataset=pairs(8), eval_dataset=pairs(8), processing_class=load_tokenizer("tiny")
    )
    before = trainer.report()
    trainer.train()
    after = trainer.report()
    trainer.save_model()
    facts = RunFacts.load(tmp_path)
    assert facts.before is not None
    assert facts.after is not None
    assert (facts.before.accuracy, facts.after.accuracy) == (before.accuracy, after.accuracy)


def test_a_checkpoint_has_the_facts_and_no_card(tmp_path, capsys):
    """And `hf-rlx card` makes one of them."""
    trainer = scripted(config(tmp_path, save_strategy="steps", save_steps=1))
    trainer.train()
    folder = tmp_path / "checkpoint-1"
    assert (folder / "card_facts.json").is_file()
    assert not (folder / "README.md").exists()
    out = tmp_path / "card"
    flags = ["--out", str(out), "--repo-id", "me/model", "--license", "mit", "--dataset-id", "me/data", "--name", "N"]
    assert main(["card", str(folder), *flags]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out / "README.md")
    assert not (folder / "README.md").exists()
    data = metadata_load(out / "README.md")
    assert (data["license"], data["datasets"]) == ("mit", ["me/data"])
    text = (out / "README.md").read_text()
    assert 'name = "me/model"\n' in text
    assert "# N\n" in text
    assert "- Rewards: `by_ids`" in text


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["nowhere"], 1, "nowhere is no folder"),
        (["."], 1, "holds no model"),
        ([".", "--repo-id", "a/b/c"], 2, "--repo-id"),
    ],
)
def test_the_command_says_what_is_wrong(words, status, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        found = main(["card", *words])
    except SystemExit as error:
        found = error.code
    assert found == status
    assert message in capsys.readouterr().err


class _Shorter(TrainerCallback):
    """Puts the beginning of a leg 100 s back, as if its steps had been slow."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.trainer.keeper._began -= 100


def test_the_time_is_that_of_all_legs(tmp_path):
    """Three legs of one step, each 100 s longer than it was: of the second's checkpoint more than 200 s, at the end
    more than 300; the first two end with the step, so less than a few seconds beside."""
    for step in (1, 2, 3):
        trainer = scripted(config(tmp_path, max_steps=step, save_strategy="steps", save_steps=1))
        slow = _Shorter()
        slow.trainer = trainer
        trainer.add_callback(slow)
        trainer.train(resume_from_checkpoint=step > 1)
        trainer.save_model()
        if step == 2:
            assert 200 < RunFacts.load(tmp_path / "checkpoint-2").seconds < 260
    assert 200 < RunFacts.load(tmp_path).seconds < 260  # the last leg counts as transformers measured it
    assert 300 < RunFacts.load(tmp_path / "checkpoint-3").seconds < 360
    trainer = scripted(config(tmp_path, max_steps=3, save_strategy="steps", save_steps=1))
    trainer.train(resume_from_checkpoint=True)  # nothing is left
    trainer.save_model()
    assert 300 < RunFacts.load(tmp_path).seconds < 360


def test_only_verdicts_are_called_an_accuracy(tmp_path):
    """`tens` is graded and gives 0 and 1 here; `judged` is the same and says that it is a verdict."""

    def tens(completion_ids, **_):
        return [float(len(ids) >= 2) for ids in completion_ids]

    def judged(completion_ids, **_):
        return tens(completion_ids)

    judged.binary = True
    for reward, expected in ((tens, "| mean reward |"), (judged, "| accuracy by `judged` |")):
        trainer = scripted(config(tmp_path / reward.__name__), reward, eval_dataset=rows(6))
        metrics = trainer.evaluate()
        trainer.save_model()
        assert metrics[f"eval_accuracy/{reward.__name__}_n"] == 6  # logged in both cases
        text = (tmp_path / reward.__name__ / "README.md").read_text()
        assert expected in text
        assert ("accuracy" in text) == (reward is judged)


def test_a_fault_in_the_card_does_not_cost_the_model(tmp_path, monkeypatch, caplog):
    trainer = scripted(config(tmp_path))

    def broken(*_):
        raise RuntimeError("no facts")

    monkeypatch.setattr("hf_rlx.trainers.model_card.facts_of", broken)
    with caplog.at_level(logging.ERROR):
        trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").is_file()
    assert "is saved, but its card was not written: RuntimeError: no facts" in caplog.text
    with pytest.raises(RuntimeError, match="no facts"):
        trainer.create_model_card()


def test_alerts_and_settings(tmp_path):
    """What differs from the defaults is shown; where things are written is not."""
    trainer = scripted(config(tmp_path, epsilon_high=0.28, max_grad_norm=0.5))
    move(trainer.shared, 0.01)
    trainer.alerts.told += ["everything truncated", "unscored"]
    trainer.save_model()
    facts = RunFacts.load(tmp_path)
    assert facts.alerts == ["everything truncated", "no completion of a rollout was scored"]
    assert {"epsilon_high": 0.28, "max_grad_norm": 0.5, "num_generations": 4}.items() <= facts.hyper_parameters.items()
    assert not {"output_dir", "logging_steps", "use_cpu", "report_to", "weight_decay"} & facts.hyper_parameters.keys()
    noted = json.loads((tmp_path / "card_facts.json").read_text())
    assert "hub_token" not in str(noted)


@pytest.mark.parametrize("error", [ConnectionError("nobody"), EntryNotFoundError("no README.md")])
def test_a_base_whose_card_cannot_be_had_has_no_licence(monkeypatch, caplog, error):
    """It is asked for once, by name and with a limit; the download, which would try for minutes, is not begun, and
    nothing is said of it."""
    asked: list[float] = []

    def metadata(url, timeout):
        asked.append(timeout)
        raise error

    monkeypatch.setattr(model_card.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(model_card, "get_hf_file_metadata", metadata)
    monkeypatch.setattr(model_card, "hf_hub_download", lambda *_, **__: pytest.fail("a download was begun"))
    model_card._card_of.cache_clear()
    for _ in range(2):
        assert model_card._licence("someone/a-base", None) == {}
    assert asked == [5]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    model_card._card_of.cache_clear()


def test_offline_a_base_s_card_is_not_asked_for(monkeypatch):
    monkeypatch.setattr(model_card.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(model_card, "get_hf_file_metadata", lambda *_, **__: pytest.fail("the Hub was asked"))
    model_card._card_of.cache_clear()
    assert model_card._licence("someone/a-base", None) == {}
    model_card._card_of.cache_clear()


def test_other_weights_than_the_base_s_own_are_told(tmp_path, monkeypatch):
    """A base out of a file of 4 bits has its id all the same; a note of the user's stays beside it."""
    monkeypatch.setattr(model_card, "weights_note", lambda name: "The base's weights are those of a file.")
    trainer = scripted(config(tmp_path))
    trainer.shared.config.name_or_path = "someone/a-base"
    text = model_card.write(trainer, tmp_path / "a", notes=["Mine."]).read_text()
    assert "Mine." in text
    assert text.count("The base's weights are those of a file. `hf-rlx merge` makes a plain model") == 1
    assert model_card.write(trainer, tmp_path / "a").read_text().count("those of a file") == 1
