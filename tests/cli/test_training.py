"""Commands that train, on the bundled model: every example configuration, resuming after a signal, dry runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from peft import AutoPeftModelForCausalLM

from hf_rlx import SharedModel
from hf_rlx.cli import main
from hf_rlx.cli.training import resume_line
from hf_rlx.persistence.folders import checkpoints

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "examples" / "configs"
TRAINING = ["sft", "reward", "prm", "grpo", "ppo", "dpo", "ipo", "simpo", "orpo", "iterative-dpo"]
QUICK = ["--use-cpu", "--disable-tqdm", "--report-to", "none", "--lora-r", "2"]
SMALL = {  # what makes an example quick beside max_steps
    "grpo": ["--per-device-train-batch-size", "16", "--eval-strategy", "no"],
    "ppo": ["--per-device-train-batch-size", "16", "--eval-strategy", "no"],
    "iterative-dpo": [
        *("--prompts-per-round", "4", "--num-generations", "4", "--no-evaluate-rounds", "--num-rounds", "1"),
        *("--per-device-train-batch-size", "4", "--eval-strategy", "no"),
    ],
}


def test_every_command_that_trains_has_an_example():
    assert {*TRAINING, "pipeline", "eval"} <= {path.stem for path in CONFIGS.glob("*.yaml")}


@pytest.mark.parametrize("name", TRAINING)
def test_examples_run(name, tmp_path, capsys):
    """Two steps; the folder has what the command trained, its card and tokenizer."""
    words = ["--config", str(CONFIGS / f"{name}.yaml"), "--output-dir", str(tmp_path / "run"), "--max-steps", "2"]
    assert main([name, *words, *QUICK, *SMALL.get(name, [])]) == 0
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"adapter_model.safetensors", "tokenizer.json", "README.md", "training_args.json"} <= names
    assert ("reward" in names) == (name == "reward")
    assert ("step_reward" in names) == (name == "prm")
    assert "2 steps done; the model is in" in capsys.readouterr().out
    settings = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    used = json.loads((tmp_path / "run" / "training_args.json").read_text(encoding="utf-8"))
    assert used["learning_rate"] == float(settings["learning_rate"])
    assert used["max_steps"] == 2


def test_the_pipeline_reads_its_example(tmp_path, monkeypatch):
    """Flags win over the file; `null` leaves the recipe's number."""
    from hf_rlx import pipeline

    seen = {}

    class Stub:
        def __init__(self, *args, **steps):
            seen.update(args=args, steps=steps)

        def run(self):
            seen["ran"] = True

    monkeypatch.setattr(pipeline, "PPOPipeline", Stub)
    words = ["--config", str(CONFIGS / "pipeline.yaml"), "--output", str(tmp_path / "run"), "--ppo-steps", "3"]
    assert main(["pipeline", "ppo", *words]) == 0
    assert seen == {
        "args": ("tiny", str(tmp_path / "run"), 0, False),
        "steps": {"reward_steps": 80, "ppo_steps": 3},
        "ran": True,
    }


def test_ppo_against_the_reward_role_of_a_folder(tmp_path):
    """`hf-rlx reward`, then `hf-rlx ppo --reward role` on what it wrote; the folder has policy, reward and critic."""
    first, second = tmp_path / "reward", tmp_path / "ppo"
    data = ["--config", str(CONFIGS / "reward.yaml")]
    assert (
        main(["reward", *data, "--output-dir", str(first), "--max-steps", "1", "--eval-strategy", "no", *QUICK]) == 0
    )
    words = ["--model", str(first), "--dataset", "arithmetic:n_train=32,n_test=4", "--reward", "role"]
    words += ["--output-dir", str(second), "--max-steps", "1", "--eval-strategy", "no"]
    assert main(["ppo", *words, "--per-device-train-batch-size", "16", *QUICK[:-2]]) == 0
    assert {"policy", "reward", "critic"} <= SharedModel.from_pretrained(second).roles.keys()


def test_no_lora_trains_all_weights(tmp_path):
    words = ["--model", "tiny", "--dataset", "arithmetic:n_train=32,n_test=4", "--no-lora", "--max-steps", "1"]
    words += ["--output-dir", str(tmp_path / "run"), "--eval-strategy", "no", "--learning_rate=1e-4"]
    assert main(["sft", *words, *QUICK[:-2]]) == 0
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_an_own_csv_with_own_columns(tmp_path):
    """DPO on a file whose columns are called otherwise; the adapter loads with plain PEFT."""
    file = tmp_path / "mine.csv"
    file.write_text("question,good,bad\n" + "".join(f"{i}+1=,{i + 1},{i + 2}\n" for i in range(8)), encoding="utf-8")
    words = ["--model_name_or_path", "tiny", "--dataset_name", str(file), "--output_dir", str(tmp_path / "run")]
    words += ["--columns", "prompt=question", "chosen=good", "rejected=bad", "--max_steps", "1"]
    assert main(["dpo", *words, *QUICK]) == 0
    AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run")


def test_a_dry_run_tells_a_length_that_the_context_does_not_hold(capsys):
    """The bundled model has 128 positions."""
    assert main(["grpo", "--config", str(CONFIGS / "grpo.yaml"), "--max-completion-length", "128", "--dry-run"]) == 1
    assert "leaves no token for a prompt in the model's context of 128" in capsys.readouterr().err


def test_a_dry_run_of_steps(capsys):
    """BOS, nine characters; a step has its line break at the end, where it is read."""
    assert main(["prm", "--config", str(CONFIGS / "prm.yaml"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "first prompt, 10 tokens:\n  <bos>|3|0|+|1|9|+|3|5|=\n" in out
    assert "step 1, 9 tokens, read at the last; right with probability 0:\n  3|0|+|1|9|=|3|9|\\n\n" in out


def test_a_task_has_no_steps(capsys):
    with pytest.raises(SystemExit):
        main(["prm", "--model", "tiny", "--dataset", "arithmetic"])
    assert "needs rows with solutions in steps and their labels" in capsys.readouterr().err


# Mistakes.


def test_mistakes_end_with_one_line(tmp_path, capsys):
    """Status 2 for settings, 1 for data and rewards; nothing is written."""
    run = ["--output-dir", str(tmp_path / "run"), *QUICK]
    typo = tmp_path / "typo.yaml"
    typo.write_text("model: tiny\ndataset: arithmetic\nlearnig_rate: 1e-3\n", encoding="utf-8")
    own_env = tmp_path / "env.yaml"
    own_env.write_text("model: tiny\nenv:\n  HF_TOKEN: hf_secret\n", encoding="utf-8")
    small = ["--model", "tiny", "--dataset", "arithmetic:n_train=16,n_test=4"]
    usage = {
        "set them before the command: export HF_TOKEN=...\n": ["--config", str(own_env)],
        "--model is missing": ["--dataset", "arithmetic"],
        "--dataset is missing": ["--model", "tiny"],
        "'learnig_rate'; did you mean 'learning_rate'?": ["--config", str(typo)],
        "num_generations must be at least 2": [*small, "--num-generations", "1"],
        "--max-steps: a whole number is wanted, got 'many'": [*small, "--max-steps", "many"],
        "no preset 'dapoo'": [*small, "--preset", "dapoo"],
        "nothing is called 'mth'; did you mean 'math'?": [*small, "--reward", "mth"],
        "needs an adapter to train": [*small, "--no-lora", "--load-in-4bit"],
        "--config: there is no file nope.yaml (looked for in": ["--config", "nope.yaml"],
        "--lora-r must be at least 1, got 0": [*small, "--lora-r", "0"],
        "--lora-r must be at least 1, got -4": [*small, "--lora-r", "-4"],
        "--lora-dropout must be 0 or more and below 1, got 1": [*small, "--lora-dropout", "1"],
    }
    for message, words in usage.items():
        with pytest.raises(SystemExit) as stop:
            main(["grpo", *run, *words])
        assert stop.value.code == 2, message
        error = capsys.readouterr().err
        assert message in error
        assert error.startswith("usage: hf-rlx grpo --model M --dataset D [--reward R ...]")
        assert len(error.splitlines()) == 2
    (tmp_path / "wrong.jsonl").write_text('{"question": "a"}\n', encoding="utf-8")
    words = ["--model", "tiny", "--dataset", str(tmp_path / "wrong.jsonl"), "--reward", "math"]
    assert main(["grpo", *words, *run]) == 1
    error = capsys.readouterr().err
    assert (
        "hf-rlx grpo: error: train_dataset has no column `prompt`; it has ['question']. If `question` is the prompt: "
        "--columns prompt=question\n" in error
    )
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_a_command(tmp_path, capsys):
    """SimPO and ORPO are no losses of DPO here; IPO is both."""
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 2, encoding="utf-8")
    words = ["dpo", "--model", "tiny", "--dataset", str(rows), "--dry-run", "--output-dir", str(tmp_path / "run")]
    for name in ("simpo", "orpo"):
        with pytest.raises(SystemExit, match="2"):
            main([*words, "--loss-type", name])
        assert f"a command of its own here: hf-rlx {name} instead of hf-rlx dpo" in capsys.readouterr().err
    assert main([*words, "--loss-type", "ipo"]) == 0


def test_several_problems_in_flags(tmp_path, capsys):
    """Each of them in the words of the command line; what both files lack is said once."""
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"question": "a", "accepted": "b", "rejected": "c"}\n' * 2, encoding="utf-8")
    (tmp_path / "file").write_text("", encoding="utf-8")
    data = ["--dataset", str(rows), "--eval-dataset", str(rows), "--output-dir", str(tmp_path / "file")]
    assert main(["dpo", "--model", "tiny", *data, *QUICK]) == 1
    error = capsys.readouterr().err
    assert "2 problems:\n  1. train_dataset has no column `chosen`" in error
    assert "If so: --columns chosen=accepted prompt=question. The same holds for eval_dataset\n" in error


# Dry runs.


def test_a_dry_run_says_what_would_be_done_and_does_nothing(tmp_path, monkeypatch, capsys):
    """Settings that differ from the defaults as YAML that `--config` takes, and the first row as tokens:
    `91+21=` is <bos> and six characters, `112` three and <eos>."""
    monkeypatch.chdir(tmp_path)
    assert main(["dpo", "--config", str(CONFIGS / "dpo.yaml"), "--hub-token", "hf_" + "a" * 30, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert "hf_aaa" not in out
    settings = out.split("# data")[0]
    again = yaml.safe_load(settings)
    assert again["learning_rate"] == 5e-4
    assert again["lora_r"] == 16
    assert "weight_decay" not in again
    (tmp_path / "again.yaml").write_text(settings, encoding="utf-8")
    assert main(["dpo", "--config", "again.yaml", "--dataset", str(CONFIGS / "data" / "sums.csv"), *DRY]) == 0
    capsys.readouterr()
    assert "48 rows to train on, 12 held out; columns prompt, chosen, rejected" in out
    assert re.search(r"^# memory: 0\.\d\d GiB at the peak .* fits in the", out, re.M)
    prompt, chosen = out.split("first prompt, ")[1].split("chosen, ")
    assert "|9|1|+|2|1|=" in prompt
    assert prompt.startswith("7 tokens, not in the loss")
    assert chosen.startswith("4 tokens, in the loss:\n  1|1|2|")
    assert "rejected, 4 tokens, in the loss:\n  1|2|2|" in chosen
    assert main(["dpo", "--config", str(CONFIGS / "dpo.yaml"), "--max-length", "6", "--dry-run"]) == 0
    assert "3 of prompt and answers lost tokens to max_length" in capsys.readouterr().out  # 7 and 4 twice to 3 and 3
    assert main(["grpo", "--config", str(CONFIGS / "grpo.yaml"), "--dry-run", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "then 8 answers of up to 8 tokens are sampled" in out
    assert "# rewards: 1 x number_whole" in out
    assert yaml.safe_load(out.split("# data")[0])["weight_decay"] == 0.0


@pytest.mark.parametrize("name", TRAINING)
def test_every_dry_run_has_settings_data_tokens_and_the_estimate(name, tmp_path, monkeypatch, capsys):
    """The settings as YAML, the counts, the first row as tokens, the memory; for methods that sample the rewards, and
    that the base will be scored."""
    monkeypatch.chdir(tmp_path)
    assert main([name, "--config", str(CONFIGS / f"{name}.yaml"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    settings = yaml.safe_load(out.split("# data")[0])
    written = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    assert settings["model"] == "tiny"
    assert settings["learning_rate"] == float(written["learning_rate"])
    assert re.search(r"^# data: .+, \d+ rows to train on, \d+ held out", out, re.M)
    assert re.search(r"^first prompt, \d+ tokens.*:\n  <bos>\|", out, re.M)
    assert re.search(r"^# memory: 0\.\d\d GiB at the peak .* fits in the", out, re.M)
    samples = name in ("grpo", "ppo", "iterative-dpo")
    assert ("# rewards: 1 x number_whole" in out) == samples
    assert settings.get("eval_on_start", False) == (name in ("grpo", "ppo"))
    assert list(tmp_path.iterdir()) == []


DRY = ["--eval-dataset", str(CONFIGS / "data" / "sums_held_out.csv"), "--dry-run"]


# Signals.

SIGNALLING = """
import os, signal
import re
from pathlib import Path

CALLS = []

def reward(completions, **kwargs):
    CALLS.append(1)
    told = Path(__file__).with_suffix(".told")
    if len(CALLS) > {calls} and not told.exists():
        told.touch()
        os.kill(os.getpid(), signal.{name})
    return [float(len(c)) for c in completions]
"""


def signalling(folder: Path, name: str) -> list[str]:
    """Words of a run whose reward function sends a signal in the third rollout of two prompts."""
    (folder / "told.py").write_text(SIGNALLING.format(name=name, calls=5), encoding="utf-8")
    words = [
        "--model",
        "tiny",
        "--dataset",
        "arithmetic:n_train=64,n_test=4",
        "--reward",
        f"{folder / 'told.py'}:reward",
    ]
    words += ["--output-dir", str(folder / "run"), "--max-steps", "4", "--per-device-train-batch-size", "8"]
    return [*words, "--num-generations", "4", "--eval-strategy", "no", *QUICK]


def resume_words(err: str) -> list[str]:
    """The command that the message says, split."""
    (line,) = [line for line in err.splitlines() if "--resume auto" in line]
    return shlex.split(line)


def test_sigterm_saves_and_says_how_to_go_on(tmp_path, capsys):
    """Exit status 143 and the same command with `--resume auto`, which finishes the run."""
    words = signalling(tmp_path, "SIGTERM")
    assert main(["grpo", *words]) == 143
    error = capsys.readouterr().err
    saved = checkpoints(tmp_path / "run")
    assert saved
    assert f"hf-rlx grpo: stopped; saved {saved[0]}. Go on with:" in error
    again = resume_words(error)
    assert again == ["hf-rlx", "grpo", *words, "--resume", "auto"]
    assert main(again[1:]) == 0
    assert "4 steps done" in capsys.readouterr().out
    # Once more: nothing is left to do, and the message would say the word once.
    assert main([*again[1:]]) == 0


@pytest.mark.timeout(300)
def test_the_line_that_goes_on_has_no_token():
    token = "hf_" + "a" * 34
    words = [
        "--hub_token",
        token,
        "--model",
        "tiny",
        f"--hub-token={token}",
        "--dataset",
        f"https://me:{token}@x.example/y",
    ]
    line = resume_line("grpo", [*words, "--resume", "auto", "--seed", "1"])
    assert line == "hf-rlx grpo --model tiny --dataset 'https://me:<HUB_TOKEN>@x.example/y' --seed 1 --resume auto"


def test_ctrl_c_ends_the_command_with_130(tmp_path):
    """As a user starts it."""
    words = signalling(tmp_path, "SIGINT")
    done = subprocess.run(
        [sys.executable, "-m", "hf_rlx.cli", "grpo", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 130, done.stderr[-800:]
    assert "Traceback" not in done.stderr
    assert resume_words(done.stderr)[-2:] == ["--resume", "auto"]
    assert checkpoints(tmp_path / "run")


def test_resume_auto_begins_anew_where_nothing_is(tmp_path, capsys):
    """For a job that is started again and again by the same line; a folder that is not there is an error."""
    words = ["--model", "tiny", "--dataset", "arithmetic:n_train=32,n_test=4", "--max-steps", "1", *QUICK]
    words += ["--output-dir", str(tmp_path / "run"), "--eval-strategy", "no"]
    assert main(["sft", *words, "--resume"]) == 0
    assert main(["sft", *words, "--resume", str(tmp_path / "run" / "checkpoint-9")]) == 1
    assert "there is no checkpoint" in capsys.readouterr().err


def test_a_reward_role_that_is_not_there_is_named(tmp_path, capsys):
    """The bundled model has no reward model: a wrong setting, with the command that makes one."""
    words = ["grpo", "--model", "tiny", "--dataset", "arithmetic", "--reward", "role", "--max-steps", "1"]
    with pytest.raises(SystemExit, match="2"):
        main([*words, "--output-dir", str(tmp_path)])
    told = capsys.readouterr().err
    assert (
        "--reward role: the model 'tiny' has no reward model (its roles: policy); train one with `hf-rlx reward`"
        in told
    )


@pytest.mark.parametrize("name", ["./nothing", "runs/a/b", "/nothing/here"])
def test_a_model_folder_that_is_not_there_is_named(tmp_path, monkeypatch, capsys, name):
    """And is not asked for at the Hub."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["sft", "--model", name, "--dataset", "arithmetic"])
    assert f"--model: there is no folder {name}" in capsys.readouterr().err


def test_held_out_pairs_are_told_at_the_end(tmp_path, capsys, caplog):
    """With their interval; and a second run in the same folder says that the first one's checkpoints are there."""
    words = ["dpo", "--config", str(CONFIGS / "dpo.yaml"), "--output-dir", str(tmp_path), "--max-steps", "1"]
    words += ["--eval-dataset", str(CONFIGS / "data" / "sums_held_out.csv")]
    assert main(words) == 0
    assert re.search(
        r"^held out: accuracy 0\.\d{3} \(95 % interval 0\.\d{3} to \d\.\d{3}\)", capsys.readouterr().out, re.M
    )
    caplog.clear()
    assert main(words) == 0
    assert "has checkpoints of an earlier run (checkpoint-1); this run begins anew" in caplog.text


def test_the_pipeline_example_runs(tmp_path, capsys):
    """One step a stage: the folder has the roles and the figures."""
    words = [
        "pipeline",
        "ppo",
        "--config",
        str(CONFIGS / "pipeline.yaml"),
        "--output",
        str(tmp_path / "run"),
        "--quiet",
    ]
    assert main([*words, "--quiet", "--sft-steps", "1", "--reward-steps", "1", "--ppo-steps", "1"]) == 0
    assert {"policy", "reward", "critic"} <= SharedModel.from_pretrained(tmp_path / "run").roles.keys()
    assert "true reward" in capsys.readouterr().out
