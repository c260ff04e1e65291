"""The notebooks: run in a kernel on the CPU with the bundled model and few steps, and looked at as they are stored.
`examples/notebooks/run.py` makes, runs and cleans them; here it is used as it is."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest
from transformers.training_args import OptimizerNames

import hf_rlx
from hf_rlx import DPOConfig, GRPOConfig, IPOConfig, ORPOConfig, PPOConfig, RewardConfig, SimPOConfig

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "notebooks"
NAMES = ("grpo_with_your_reward", "preference_dpo_family", "reward_model_then_ppo")
STEPS = 3
MACHINE = re.compile(r"/(?:work|tmp|root|home|usr|opt|var|mnt|Users)\b|[A-Z]:\\")


def load_run() -> Any:
    """`run.py`, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("notebooks_run", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUN = load_run()


def stored(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_of(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: Any) -> str:
    """All text that the cells wrote to standard output."""
    outputs = [output for cell in code_of(notebook) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def twice(notebook: Any, **replaced: str) -> Any:
    """A notebook with all its cells behind it once more. replaced: constants of the second time, by name."""
    long = nbformat.from_dict(notebook)
    for cell in notebook.cells:
        copy = nbformat.from_dict(cell)
        copy["id"] = f"{cell['id']}-{len(long.cells)}"
        for name, value in replaced.items():
            copy.source = re.sub(rf"^{name} = \S+", f"{name} = {value}", copy.source, flags=re.MULTILINE)
        long.cells.append(copy)
    return long


# --- as they are stored ----------------------------------------------------------------------------------------------


def test_every_script_is_a_notebook_and_every_notebook_a_script():
    assert tuple(path.stem for path in RUN.SCRIPTS) == NAMES
    assert tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb"))) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_script_and_notebook_are_a_pair(name):
    """jupytext reads the same cells from both; the script says how the notebook is made from it."""
    script, notebook = jupytext.read(FOLDER / f"{name}.py"), stored(name)
    assert [(c.cell_type, c.source) for c in notebook.cells] == [(c.cell_type, c.source) for c in script.cells]
    assert f"python examples/notebooks/run.py {name}" in notebook.cells[0].source
    for key in ("kernelspec", "accelerator", "colab"):
        assert notebook.metadata[key] == script.metadata[key]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_is_a_whole_run_without_this_machine(name):
    """All cells were run in their order; there is a picture, the time left, no error, no path and no time stamp."""
    path, notebook = FOLDER / f"{name}.ipynb", stored(name)
    nbformat.validate(notebook)
    code = code_of(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [o for o in outputs if o.output_type == "error" or (o.output_type == "stream" and o.name == "stderr")]
    texts = [output.get("text", "") for output in outputs]
    texts += [text for output in outputs for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
    assert not [text for text in texts if MACHINE.search(text) or "Traceback" in text or "Warning" in text]
    assert re.search(r"step +\d+ .* \d+ s left", printed(notebook))
    assert re.search(r"step +60 ", printed(notebook))
    assert all(not cell.metadata for cell in notebook.cells)
    assert set(notebook.metadata) == {"accelerator", "colab", "jupytext", "kernelspec", "language_info"}
    assert notebook.metadata.language_info == {"name": "python"}
    assert path.stat().st_size < 400 * 1024


@pytest.mark.parametrize("name", NAMES)
def test_the_first_cell_is_for_colab_and_kaggle(name):
    """It leaves torch alone, takes away the torchao that PEFT refuses, and shows one GPU to torch, before torch; the
    text names the switches. The next cell asks the doctor."""
    first, second = code_of(stored(name))[:2]
    lines = first.source.splitlines()
    assert '%pip install -q "hf_rlx[plots]"' in lines
    assert "%pip uninstall -qy torchao" in lines
    assert 'os.environ["CUDA_VISIBLE_DEVICES"] =' in first.source
    assert not re.search(r"^(import|from) (torch|hf_rlx)", first.source, re.MULTILINE)
    assert "hf_rlx.doctor(" in second.source
    text = stored(name).cells[0].source
    assert all(word in text for word in ("Colab", "T4", "Kaggle", "Internet", "run all cells again"))


@pytest.mark.parametrize("name", NAMES)
def test_the_settings_are_those_of_a_t4(name):
    """fp16, a paged 8-bit optimizer that transformers knows, fields that every configuration has, a 4-bit base with
    float16 compute, sdpa, at most 1.5 B parameters and 100 steps; the estimate stands before the first training."""
    source = "\n".join(cell.source for cell in code_of(stored(name)))
    t4 = ast.literal_eval(re.search(r"^T4 = (\{.*?^\})", source, re.MULTILINE | re.DOTALL)[1])
    assert t4 == {"fp16": True, "optim": "paged_adamw_8bit", "gradient_checkpointing": True}
    assert OptimizerNames(t4["optim"])
    for config in (GRPOConfig, PPOConfig, RewardConfig, DPOConfig, IPOConfig, SimPOConfig, ORPOConfig):
        assert set(t4) <= {field.name for field in fields(config)}
    assert "**(T4 if ON_GPU else {})" in source
    assert "four_bit_config(compute_dtype=torch.float16) if ON_GPU else None" in source
    assert '{"attn_implementation": "sdpa"}' in source
    assert all(float(size) <= 1.5 for size in re.findall(r"Qwen2\.5-([\d.]+)B", source))
    assert int(re.search(r'HF_RLX_NOTEBOOK_STEPS", (\d+)\)', source)[1]) <= 100
    assert 0 < source.index("estimate(MODEL") < source.index(".train(")
    assert re.search(r"GiB at the peak; fits: True", printed(stored(name)))


@pytest.mark.parametrize("name", NAMES)
def test_pushing_is_one_constant(name):
    """Nothing is pushed and nobody is asked to log in unless PUSH_TO names a repository."""
    notebook = stored(name)
    source = "\n".join(cell.source for cell in code_of(notebook))
    assert re.search(r'^PUSH_TO = ""', source, re.MULTILINE)
    assert source.count("notebook_login()") == 1
    assert re.search(
        r"^if PUSH_TO:\n    from huggingface_hub import notebook_login\n\n    notebook_login\(\)", source, re.M
    )
    assert re.fullmatch(r"if PUSH_TO:\n    print\(trainer\.push_to_hub\(\)\).*", code_of(notebook)[-1].source)


# --- running them ----------------------------------------------------------------------------------------------------


def test_grpo_goes_on_after_a_lost_session(tmp_path):
    """The second execution starts after step 2 of 3, keeps the score of the base, and what it saves loads. All cells
    once more, in the same kernel: nothing is left to train."""
    notebook = RUN.make(FOLDER / "grpo_with_your_reward.py")
    first = printed(RUN.execute(notebook, tmp_path, STEPS))
    assert "starting\n" in first
    assert "adapters in {'torch.float32'}" in first
    shutil.rmtree(tmp_path / "runs" / "grpo" / f"checkpoint-{STEPS}")  # as if it was killed in the last step
    both = printed(RUN.execute(twice(notebook), tmp_path, STEPS))
    second, third = both.split("going on after step 3\n")
    assert "going on after step 2\n" in second
    assert not re.search(r"step +[12]  reward", second)
    assert re.search(r"step +3  reward", second)
    # The table at the end: both sessions tell the same of the steps before.
    assert re.findall(r"step   [0-3]: .* right", first) == re.findall(r"step   [0-3]: .* right", second) != []
    assert set(hf_rlx.SharedModel.from_pretrained(tmp_path / "runs" / "grpo").roles) >= {"policy"}
    assert not re.search(r"step +\d  reward", third)


def test_reward_model_and_ppo_go_on_where_they_were(tmp_path):
    """All cells once more after PPO has lost its last checkpoint: the reward model is there and is not trained again,
    PPO goes on. All roles load."""
    notebook = RUN.make(FOLDER / "reward_model_then_ppo.py")
    cells = twice(notebook).cells
    lost = nbformat.v4.new_code_cell(f"import shutil\n\nshutil.rmtree(OUTPUT / 'ppo' / 'checkpoint-{STEPS}')")
    cells.insert(len(notebook.cells), lost)
    text = printed(RUN.execute(nbformat.from_dict({**notebook, "cells": cells}), tmp_path, STEPS))
    assert re.findall(r"^(starting|going on after step \d)$", text, re.MULTILINE) == [
        "starting",
        "starting",
        "going on after step 3",
        "going on after step 2",
    ]
    second = text.split("going on after step 3")[1]
    assert re.findall(r"step +(\d)  (?:reward|loss)", second) == ["3"]  # PPO's
    roles = set(hf_rlx.SharedModel.from_pretrained(tmp_path / "runs" / "ppo").roles)
    assert roles >= {"policy", "reward", "critic"}


def test_the_dpo_notebook_takes_every_loss_and_a_csv(tmp_path):
    """One kernel: the cells as they are, then once more for each other loss by its switch, with pairs of a CSV whose
    columns have other names, in the way that the notebook says."""
    lines = ["question,good,bad", *(f"{a}+{a}=,{2 * a},{2 * a + 1}" for a in range(11, 41))]
    (tmp_path / "mine.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    notebook = RUN.make(FOLDER / "preference_dpo_family.py")
    mine = {"PAIRS": '"mine.csv"', "COLUMNS": '{"question": "prompt", "good": "chosen", "bad": "rejected"}'}
    every = notebook
    for loss in ("ipo", "simpo", "orpo"):
        other = twice(notebook, LOSS=f'"{loss}"', **mine).cells[len(notebook.cells) :]
        for cell in other:
            cell["id"] += loss
        every = nbformat.from_dict({**every, "cells": [*every.cells, *other]})
    text = printed(RUN.execute(every, tmp_path, STEPS))
    assert text.count("24 pairs to train on, 6 held out") == 3
    for loss in ("dpo", "ipo", "simpo", "orpo"):
        assert f"\n{loss} on tiny, LORA: " in text
        assert list((tmp_path / "runs" / loss).glob("adapter_model.safetensors"))
        assert (tmp_path / "runs" / loss / "training.png").is_file()
    assert set(hf_rlx.SharedModel.from_pretrained(tmp_path / "runs" / "orpo").roles) >= {"policy"}
