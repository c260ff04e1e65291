"""Tasks: sizes, formats, and above all that nothing held out is trained on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset

from hf_rlx.assets import tiny_arith_path
from hf_rlx.data.tasks import (
    Task,
    arithmetic_problems,
    arithmetic_task,
    countdown_task,
    nim_task,
    puzzle_task,
    reasoning_gym_task,
    svamp_task,
)
from hf_rlx.verifiers import NumberVerifier, ReasoningGymVerifier
from hf_rlx.verifiers.puzzles import PuzzleVerifier


def rows(*prompts: str) -> Dataset:
    return Dataset.from_list([{"prompt": p, "answer": "1"} for p in prompts])


def test_a_task_refuses_leaks_and_missing_columns():
    with pytest.raises(ValueError, match="1 held-out prompts also stand in the training split"):
        Task("t", rows("a", "b"), rows("b", "c"), 8, "")
    with pytest.raises(ValueError, match=r"the test split has the columns \['x'\] but lacks \['answer', 'prompt'\]"):
        Task("t", rows("a"), Dataset.from_list([{"x": 1}]), 8, "")
    messages = Dataset.from_list([{"prompt": [{"role": "user", "content": "a"}], "answer": "1"}])
    with pytest.raises(ValueError, match="held-out"):
        Task("t", messages, messages, 8, "")


# arithmetic


def test_every_problem_is_right_and_on_one_side():
    """10,000 sums and, for a >= b, 100 * 101 / 2 = 5,050 differences."""
    sides = [list(arithmetic_problems(held_out)) for held_out in (False, True)]
    problems = dict(sides[0] + sides[1])
    assert len(problems) == len(sides[0]) + len(sides[1]) == 15_050
    for prompt, answer in problems.items():
        assert prompt[-1] == "="
        left, sign, right = prompt[:-1].partition("+" if "+" in prompt else "-")
        assert int(answer) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
    assert 0.05 < len(sides[1]) / 15_050 < 0.15


def test_swapped_sums_stay_on_the_same_side():
    held_out = {prompt for prompt, _ in arithmetic_problems(held_out=True)}
    for prompt in held_out:
        if "+" in prompt:
            left, right = prompt[:-1].split("+")
            assert f"{right}+{left}=" in held_out


def test_arithmetic_task_is_seeded_and_disjoint():
    task, again, other = arithmetic_task(50, 20), arithmetic_task(50, 20), arithmetic_task(50, 20, seed=1)
    assert task.train.column_names == ["prompt", "answer"]
    assert (len(task.train), len(task.test)) == (50, 20)
    assert list(task.train["prompt"]) == list(again.train["prompt"])
    assert list(task.train["prompt"]) != list(other.train["prompt"])
    # also across seeds: the side of a problem does not depend on the seed
    assert not set(task.train["prompt"]) & set(other.test["prompt"])
    assert len(set(task.train["prompt"])) == 50


def test_arithmetic_task_fits_the_tiny_model():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_arith_path())
    task = arithmetic_task(200, 50)
    verify = NumberVerifier("whole")
    answers = list(task.test["answer"])
    assert verify(prompts=list(task.test["prompt"]), completions=answers, answer=answers) == [1.0] * 50
    for row in task.train:
        ids = tokenizer(row["prompt"] + row["answer"]).input_ids
        assert tokenizer.unk_token_id not in ids
        assert len(row["answer"]) + 1 <= task.max_completion_length


@pytest.mark.parametrize(("n_train", "n_test"), [(0, 10), (10, 0), (15_050, 10), (10, 15_050)])
def test_arithmetic_task_says_how_many_there_are(n_train: int, n_test: int):
    with pytest.raises(ValueError, match=r"must be between 1 and \d+"):
        arithmetic_task(n_train, n_test)


# svamp


def svamp_file(folder: Path, records: list[dict]) -> Path:
    path = folder / "svamp.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
    return path


def svamp_record(i: int) -> dict:
    return {"Body": f"Tom has {i} dvds", "Question": "How many dvds has Tom?", "Answer": float(i), "Type": "x"}


def test_svamp_task(tmp_path: Path):
    records = [svamp_record(i) for i in range(10)] + [svamp_record(3)]  # a repeated question
    records[0]["Answer"] = 0.5
    task = svamp_task(svamp_file(tmp_path, records), n_train=6, n_test=4)
    assert (len(task.train), len(task.test)) == (6, 4)
    answers = sorted([*task.train["answer"], *task.test["answer"]])
    assert answers == ["1", "1/2", *"23456789"]
    (message,) = task.train[0]["prompt"]
    assert message["role"] == "user"
    assert "dvds, How many" in message["content"]
    completions = [f"He has them.\nAnswer: {a}" for a in task.test["answer"]]
    assert NumberVerifier("answer_line")([], completions, answer=list(task.test["answer"])) == [1.0] * 4


def test_svamp_task_as_plain_text(tmp_path: Path):
    task = svamp_task(svamp_file(tmp_path, [svamp_record(i) for i in range(4)]), 2, 2, conversational=False)
    assert all(isinstance(prompt, str) for prompt in task.train["prompt"])


def test_svamp_errors(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        svamp_task(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match=r"line 2: lacks \['Answer'\]"):
        svamp_task(svamp_file(tmp_path, [svamp_record(1), {"Body": "a", "Question": "b"}]))
    with pytest.raises(ValueError, match=r"has 3 different questions; 3 \+ 2 were asked for"):
        svamp_task(svamp_file(tmp_path, [svamp_record(i) for i in range(3)]), 3, 2)
    with pytest.raises(ValueError, match="at least 1"):
        svamp_task(svamp_file(tmp_path, [svamp_record(1)]), 1, 0)


# reasoning-gym


@pytest.mark.parametrize("name", ["countdown", "leg_counting", "graph_color", "rearc"])
def test_reasoning_gym_task_and_its_verifier_agree(name: str):
    """rearc compares tuples, graph_color has no reference answer: both need the entry back without loss."""
    pytest.importorskip("reasoning_gym")
    task = reasoning_gym_task(name, n_train=6, n_test=4, seed=3)
    assert (len(task.train), len(task.test)) == (6, 4)
    verify = ReasoningGymVerifier(name)
    batch = task.test[:]
    garbage = [[{"role": "assistant", "content": "Answer: no idea"}]] * 4
    assert (
        verify(prompts=batch["prompt"], completions=garbage, **{k: batch[k] for k in ("answer", "metadata")})
        == [0.0] * 4
    )
    if name == "graph_color":
        assert batch["answer"] == [None] * 4
    else:
        right = [[{"role": "assistant", "content": f"Let me see.\nAnswer: {a}"}] for a in batch["answer"]]
        assert verify(prompts=batch["prompt"], completions=right, metadata=batch["metadata"]) == [1.0] * 4


def test_reasoning_gym_task_is_seeded_and_takes_settings():
    pytest.importorskip("reasoning_gym")
    options = {"n_train": 5, "n_test": 3, "min_animals": 2, "max_animals": 2}
    one, two = reasoning_gym_task("leg_counting", **options), reasoning_gym_task("leg_counting", **options)
    assert list(one.train["metadata"]) == list(two.train["metadata"])
    assert '"num_animals": 2' in one.train[0]["metadata"]
    plain = reasoning_gym_task("leg_counting", 2, 1, conversational=False)
    assert isinstance(plain.train[0]["prompt"], str)


def test_reasoning_gym_task_says_when_a_generator_is_too_small():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match="different questions; 40 \\+ 20 were asked for"):
        reasoning_gym_task("leg_counting", 40, 20, min_animals=1, max_animals=1, min_instances=1, max_instances=1)


def test_reasoning_gym_missing_names_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r'pip install "hf_rlx\[tasks\]"'):
        reasoning_gym_task("countdown")
    with pytest.raises(ImportError, match=r'pip install "hf_rlx\[tasks\]"'):
        ReasoningGymVerifier("countdown")


# puzzles with exact rules

PUZZLES = pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("countdown", {}, lambda row: (*sorted(row["numbers"]), "to", row["target"])),
        (
            "countdown",
            {"numbers": (5, 6), "largest": 50, "every_number": False},
            lambda row: (*sorted(row["numbers"]), "to", row["target"]),
        ),
        ("countdown", {"numbers": (2, 2)}, lambda row: (*sorted(row["numbers"]), "to", row["target"])),
        ("nim", {}, lambda row: tuple(sorted(row["state"].split(" ")))),
        ("nim", {"play": "move", "piles": (3, 5)}, lambda row: tuple(sorted(row["state"].split(" ")))),
    ],
)


@PUZZLES
def test_every_puzzle_has_its_solution(name: str, options: dict, key):
    """The answer in each row is right, by the verifier of the name, in words and as plain text."""
    own = {k: v for k, v in options.items() if k in ("every_number", "play")}
    task = puzzle_task(name, 60, 25, **options)
    assert (task.name, len(task.train), len(task.test)) == (name, 60, 25)
    for rows in (task.train[:], task.test[:]):
        said = [[{"role": "assistant", "content": f"So.\nAnswer: {answer}"}] for answer in rows["answer"]]
        columns = {column: values for column, values in rows.items() if column != "prompt"}
        assert PuzzleVerifier(name, **own)(rows["prompt"], said, **columns) == [1.0] * len(said)
        assert PuzzleVerifier(name, **own)(rows["prompt"], ["no idea"] * len(said), **columns) == [0.0] * len(said)
    plain = puzzle_task(name, 2, 1, conversational=False, **options).train[0]["prompt"]
    assert isinstance(plain, str)
    assert plain.endswith("\n")


@PUZZLES
def test_puzzles_are_seeded_and_disjoint(name: str, options: dict, key):
    """Also across seeds, and in whatever order the numbers stand: a held-out puzzle is in nobody's training set."""
    task, again, other = (puzzle_task(name, 80, 20, seed, **options) for seed in (0, 0, 1))
    assert task.train.to_list() == again.train.to_list()
    assert task.test.to_list() == again.test.to_list()
    assert task.train.to_list() != other.train.to_list()
    longer = puzzle_task(name, 90, 25, 0, **options)
    assert longer.train.to_list()[:80] == task.train.to_list()
    trained = {key(row) for each in (task, other) for row in each.train}
    held_out = {key(row) for each in (task, other) for row in each.test}
    assert not trained & held_out
    assert len({key(row) for row in task.train}) == 80


def test_countdown_rows():
    task = countdown_task(200, 20, numbers=(3, 5), largest=12, largest_target=40)
    for row in task.train:
        assert 3 <= len(row["numbers"]) <= 5
        assert all(1 <= number <= 12 for number in row["numbers"])
        assert 1 <= row["target"] <= 40
        assert row["target"] not in row["numbers"]
    (message,) = task.train[0]["prompt"]
    assert "exactly once" in message["content"]
    assert message["content"].endswith(f"Target: {task.train[0]['target']}")
    (message,) = countdown_task(1, 1, every_number=False).train[0]["prompt"]
    assert "at most once" in message["content"]


def test_nim_rows_are_won_for_who_moves_first():
    """The exclusive or of the piles is not zero."""
    for row in nim_task(60, 5, piles=(2, 3), largest=7).train:
        piles = [int(size) for size in row["state"].split(" ")]
        assert 2 <= len(piles) <= 3
        assert all(1 <= size <= 7 for size in piles)
        total = 0
        for size in piles:
            total ^= size
        assert total


@pytest.mark.parametrize("name", ["countdown", "nim"])
def test_the_default_sizes_exist(name: str):
    for seed in (0, 1):
        task = puzzle_task(name, seed=seed)
        assert (len(task.train), len(task.test)) == (500, 128)


def test_puzzle_families_have_an_end():
    """Two piles of 1 or 2: 1 2 is won, 1 1 and 2 2 are lost, so there is one position in all."""
    with pytest.raises(ValueError, match=r"nim: [01] training and [01] held-out puzzles were found, 1 and 1"):
        nim_task(1, 1, piles=(2, 2), largest=2)
    with pytest.raises(ValueError, match=r"countdown: .* 50 and 5 were asked for"):
        countdown_task(50, 5, numbers=(2, 2), largest=3)
    for make, message in (
        (lambda: nim_task(1, 0), "at least 1"),
        (lambda: nim_task(1, 1, piles=(0, 2)), "1 to 20 piles"),
        (lambda: nim_task(1, 1, play="blitz"), "play must be"),  # type: ignore[arg-type]
        (lambda: countdown_task(1, 1, numbers=(1, 2)), "2 to 8 numbers"),
        (lambda: puzzle_task("countdown", 1, 1, play="move"), "unexpected keyword"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            make()


def test_puzzles_of_reasoning_gym_by_name():
    pytest.importorskip("reasoning_gym")
    task = puzzle_task("reasoning_gym/countdown", 3, 2)
    assert "metadata" in task.train.column_names
    rows = task.test[:]
    assert PuzzleVerifier("reasoning_gym/countdown")([], rows["answer"], metadata=rows["metadata"]) == [1.0] * 2
    assert puzzle_task("leg_counting", 3, 2).name == "leg_counting"


def test_tasks_do_not_import_reasoning_gym_or_torch_models():
    code = "import sys, hf_rlx.data.tasks; sys.exit('reasoning_gym' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# the bundled model itself


def test_tokenizer_gives_back_every_character():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_arith_path())
    text = "".join(map(chr, range(32, 127))) + "\n\t"
    for sample in (text, " a  b , don 't ", "<think>\n17+25=42\n</think>", ""):
        ids = tokenizer(sample).input_ids
        assert len(ids) == len(sample) + 1
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids[1:]) == sample
        assert tokenizer.decode(ids, skip_special_tokens=True) == sample
    special = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    assert special == {0, 1, 2, 3}
    assert tokenizer("é", add_special_tokens=False).input_ids == [tokenizer.unk_token_id]


def test_chat_template_renders_the_plain_form():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_arith_path())
    messages = [{"role": "user", "content": "17+25="}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "<bos>17+25="
    messages.append({"role": "assistant", "content": "42"})
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert tokenizer.decode(encoded["input_ids"]) == "<bos>17+25=42<eos>"
    assert encoded["assistant_masks"] == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]


def test_tiny_model_knows_the_answers_but_samples_about_half_of_them():
    """What the demo relies on: room to learn, and groups of samples that hold right and wrong answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_arith_path())
    model = AutoModelForCausalLM.from_pretrained(tiny_arith_path())
    assert model.dtype == torch.float32
    assert model.num_parameters() == 866_048
    task = arithmetic_task(n_train=1, n_test=256)
    batch = tokenizer(list(task.test["prompt"]), return_tensors="pt", padding=True)
    verify = NumberVerifier("whole")

    def accuracy(**how) -> float:
        with torch.inference_mode():
            ids = model.generate(**batch, max_new_tokens=task.max_completion_length, **how)
        texts = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        return sum(verify([], texts, answer=list(task.test["answer"]))) / 256

    with torch.random.fork_rng():
        torch.manual_seed(0)
        sampled = accuracy(do_sample=True, temperature=1.0, top_k=0)
    assert accuracy(do_sample=False) > 0.9
    assert 0.33 < sampled < 0.60
