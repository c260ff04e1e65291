"""Cards: what is known is said once and parses; what is unknown leaves no trace."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load

from hf_rlx.cards import Course, Measure, RunFacts, Score, installed_versions, render_card, write_card
from hf_rlx.cards.facts import is_hub_id

FULL = {
    "method": "grpo",
    "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "repo_id": "me/smol-maths",
    "adapter": True,
    "license": "apache-2.0",
    "tags": ["reasoning", "grpo"],
    "dataset": "SVAMP, training part",
    "dataset_id": "ChilleD/SVAMP",
    "eval_dataset": "SVAMP, held-out part",
    "eval_dataset_id": "ChilleD/SVAMP",
    "rewards": ["number_answer_line", "format"],
    "hyper_parameters": {"learning_rate": 1e-5, "beta": 0.04, "note": "a|b\nc"},
    "before": Score.from_counts(30, 100),
    "after": Score.from_counts(60, 100),
    "decoding": "greedy",
    "steps": 200,
    "seconds": 3725.0,
    "versions": {"torch": "2.13.0", "hf_rlx": "0.1.0"},
    "hardware": "NVIDIA T4",
    "samples": [
        {"prompt": "17+25=", "completion": "42", "reward": 1.0},
        {"prompt": [{"role": "user", "content": "1+1?"}], "completion": "```\n---\n2\n```"},
    ],
}


def load(facts: RunFacts, folder: Path) -> ModelCard:
    return ModelCard.load(write_card(facts, folder))


def test_full_card_round_trip(tmp_path: Path):
    card = load(RunFacts(**FULL), tmp_path)
    data = card.data.to_dict()
    assert data["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert data["library_name"] == "peft"
    assert data["pipeline_tag"] == "text-generation"
    assert data["base_model_relation"] == "adapter"
    assert data["tags"] == ["hf_rlx", "grpo", "lora", "generated_from_trainer", "reasoning"]
    assert data["datasets"] == ["ChilleD/SVAMP"]
    assert data["license"] == "apache-2.0"
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.6)
    assert (result.dataset_type, result.dataset_name) == ("ChilleD/SVAMP", "SVAMP, held-out part")
    for text in (
        "# smol-maths",
        "| held out | before training | after training |\n|---|---|---|\n",
        "| accuracy | 0.300 (0.219 to 0.396) | 0.600 (0.502 to 0.691) |\n",
        "Measured on held-out rows of SVAMP, held-out part, n=100, greedy. In brackets",
        'name = "me/smol-maths"\nmodel = AutoPeftModelForCausalLM.from_pretrained(name)',
        "- Rewards: `number_answer_line`, `format`\n- Steps: 200\n- Time: 1 h 2 min\n- Hardware: NVIDIA T4\n",
        "eprint = {2402.03300}",
        "| `learning_rate` | 1e-05 |",
        "| `note` | a\\|b c |",
        "Completion (reward 1):\n\n```text\n42\n```",
        "Prompt:\n\n```text\nuser: 1+1?\n```",
        "Completion:\n\n````text\n```\n---\n2\n```\n````",
        "torch 2.13.0, hf_rlx 0.1.0",
    ):
        assert text in card.text, text


def test_what_is_unknown_leaves_no_trace(tmp_path: Path):
    card = load(RunFacts(method="dpo"), tmp_path)
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["hf_rlx", "dpo", "generated_from_trainer"],
    }
    for absent in (
        "license",
        "None",
        "More Information Needed",
        "Result",
        "Training\n",
        "Samples",
        "Versions",
        "Roles",
        "| ",
    ):
        assert absent not in card.content, absent
    assert "# dpo model\n\nTrained with DPO by `hf_rlx`" in card.content
    assert "AutoModelForCausalLM.from_pretrained(name)" in card.content
    assert not (tmp_path / ".eval_results").exists()
    assert "\n\n\n" not in card.content


@pytest.mark.parametrize("dropped", sorted(set(FULL) - {"method"}))
def test_every_fact_can_be_missing(dropped: str, tmp_path: Path):
    facts = {key: value for key, value in FULL.items() if key != dropped}
    card = load(RunFacts(**facts), tmp_path)
    assert "None" not in card.content
    assert "More Information Needed" not in card.content
    assert "\n\n\n" not in card.content
    assert ("license" in card.data.to_dict()) == (dropped != "license")
    assert (card.data.eval_results is not None) == (dropped != "after")
    assert card.content.count("```") % 2 == 0


def test_a_base_that_was_not_measured_is_told(tmp_path: Path):
    """With the way to measure it; not where the score is there, or nothing is."""
    line = "The score before training is not known: a run with `eval_on_start=True` measures it."
    score = Score.from_counts(3, 4)
    for before, after, told in ((None, score, True), (score, score, False), (None, None, False)):
        text = write_card(RunFacts("grpo", before=before, after=after), tmp_path).read_text()
        assert text.count(line) == told
        assert "\n\n\n" not in text
    assert f", of shares Wilson's.\n\n{line}\n\n## Use" in str(render_card(RunFacts("grpo", after=score)))


def test_lines_over_different_rows_say_so(tmp_path: Path):
    """A count that all lines share stands below the table, others in their lines."""
    same = [Measure("a", 1.0, n=8), Measure("b", 2.0, n=8), Measure("c", 3.0)]
    text = write_card(RunFacts("grpo", measures=same), tmp_path).read_text()
    assert "Measured on held-out rows, n=8." in text
    assert "| b |" in text
    other = [*same, Measure("d", 4.0, n=7)]
    text = write_card(RunFacts("grpo", measures=other), tmp_path).read_text()
    assert "Measured on held-out rows." in text
    assert all(head in text for head in ("| a, n=8 |", "| b, n=8 |", "| c |", "| d, n=7 |"))


def test_completions_without_a_score_are_told(tmp_path: Path):
    """12 of 1096 are 1.095 per cent; kept beside the card."""
    facts = RunFacts("grpo", rewards=["judge", "short"], abstained={"judge": (12, 1096)})
    text = write_card(facts, tmp_path).read_text()
    assert "- Rewards: `judge`, `short`\n- Without a score by `judge`: 12 of 1,096 completions (1.1%)\n" in text
    facts.save(tmp_path)
    assert RunFacts.load(tmp_path).abstained == {"judge": (12, 1096)}


def test_a_local_base_is_named_without_its_path_and_stays_out_of_the_metadata(tmp_path: Path):
    base = tmp_path / "secret-user" / "tiny_arith"
    base.mkdir(parents=True)
    content = str(render_card(RunFacts(method="grpo", base_model=str(base), adapter=True)))
    assert "base_model" not in content
    assert "secret-user" not in content
    assert "# tiny_arith-grpo\n\nA LoRA adapter for `tiny_arith`, trained with GRPO by" in content
    assert 'name = "."  # the path of this folder' in content


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/model", True),
        ("gpt2", True),
        (None, False),
        ("", False),
        ("/a/b", False),
        ("./a", False),
        ("a/b/c", False),
    ],
)
def test_is_hub_id(model: str | None, expected: bool):
    assert is_hub_id(model) is expected


def test_plot_is_shown_only_when_it_is_there(tmp_path: Path):
    facts = RunFacts(**FULL)
    assert "training.png" not in write_card(facts, tmp_path).read_text()
    (tmp_path / "training.png").write_bytes(b"png")
    assert "![Training curves](training.png)" in write_card(facts, tmp_path).read_text()


def test_eval_results_file(tmp_path: Path):
    write_card(RunFacts(**FULL), tmp_path)
    (file,) = (tmp_path / ".eval_results").iterdir()
    assert file.name == "chilled-svamp.yaml"
    assert yaml.safe_load(file.read_text()) == [
        {
            "dataset": {"id": "ChilleD/SVAMP", "task_id": "default"},
            "value": 0.6,
            "notes": "greedy, n=100, 95% Wilson interval 0.5020 to 0.6906",
        }
    ]


def test_writing_replaces_and_leaves_nothing_behind(tmp_path: Path):
    folder = tmp_path / "new" / "model"
    write_card(RunFacts(method="dpo"), folder)
    path = write_card(RunFacts(method="grpo"), folder)
    assert path == folder / "README.md"
    assert "GRPO" in path.read_text()
    assert [p.name for p in folder.iterdir()] == ["README.md"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_failed_write_keeps_the_old_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_card(RunFacts(method="dpo"), tmp_path)
    before = path.read_text()

    def full_disk(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("hf_rlx.cards.files.os.replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_card(RunFacts(method="grpo"), tmp_path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["README.md"]


def test_wilson_interval():
    """Known values: 8 of 10 gives 0.490 to 0.943 (Wilson 1927's formula); 0 of n ends at z²/(n + z²)."""
    score = Score.from_counts(8, 10)
    assert (score.accuracy, score.n) == (0.8, 10)
    assert (score.low, score.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    none = Score.from_counts(0, 10)
    assert (none.low, none.high) == (0.0, pytest.approx(3.8415 / 13.8415, abs=1e-4))
    assert Score.from_counts(10, 10).high == 1.0
    for right, n in ((1, 0), (-1, 5), (6, 5)):
        with pytest.raises(ValueError, match="right"):
            Score.from_counts(right, n)


def test_installed_versions_reads_metadata_only():
    versions = installed_versions(["huggingface_hub", "jinja2", "no_such_package"])
    assert set(versions) == {"huggingface_hub", "jinja2"}


def test_cards_do_not_import_torch_or_matplotlib():
    code = "import sys, hf_rlx.cards; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


MORE = {
    **FULL,
    "base_revision": "0123456789abcdef",
    "reward_weights": [1.0, 0.25],
    "data": {
        "training": {"rows": 12345, "columns": ["answer", "prompt"], "sha256": "aa11"},
        "held-out": {"rows": 100, "columns": ["answer", "prompt"], "sha256": "bb22"},
    },
    "measures": [
        Measure("mean length, tokens", 12.5, 1234.5),
        Measure("perplexity", None, 3.0, n=100, metric="perplexity", dataset="hard"),
    ],
    "course": [Course("KL to the reference, nats a token", 0.0, 10, 0.00123, 200)],
    "alerts": ["everything truncated"],
    "epochs": 1.5,
    "processes": 2,
    "command": "python train.py --beta 0.04",
    "adapter_settings": "a LoRA adapter (r 16, alpha 32)",
}


def test_everything_else_that_a_run_can_say(tmp_path: Path):
    card = load(RunFacts(**MORE), tmp_path)
    for text in (
        "at commit `0123456789ab`, trained with GRPO on",
        "- Rewards: `number_answer_line` (weight 1), `format` (weight 0.25)\n",
        "- Training data: 12,345 rows of `answer`, `prompt`; sha256 `aa11` (over up to 2,000 rows, evenly spread)\n",
        "- Held-out data: 100 rows of `answer`, `prompt`; sha256 `bb22`\n",
        "- Adapter: LoRA adapter (r 16, alpha 32)\n",
        "- Epochs: 1.5\n",
        "- Processes: 2\n",
        "| mean length, tokens | 12.500 | 1234 |\n",
        "| perplexity, hard |  | 3.000 |\n",
        "| KL to the reference, nats a token | 0.000 (step 10) | 0.00123 (step 200) |\n",
        "Alerts that the run raised:\n\n- everything truncated\n",
        "```bash\npython train.py --beta 0.04\n```\n",
    ):
        assert text in card.text, text
    assert "\n\n\n" not in card.content
    results = [(r.metric_type, r.metric_value, r.dataset_name, r.metric_name) for r in card.data.eval_results]
    assert results == [
        ("accuracy", 0.6, "SVAMP, held-out part", "accuracy (n=100, 95% interval 0.502 to 0.691)"),
        ("perplexity", 3.0, "hard", "perplexity (n=100)"),
    ]
    assert card.data.metrics == ["accuracy", "perplexity"]


def test_the_metadata_is_what_the_hub_reads(tmp_path: Path):
    """Parsed and written again it is the same, model-index included; a licence of its own keeps name and link."""
    facts = RunFacts(**{**MORE, "license": "other", "license_name": "own", "license_link": "https://x.example/l"})
    path = write_card(facts, tmp_path)
    data = metadata_load(path)
    again = ModelCardData(**data, ignore_metadata_errors=False)
    assert again.to_dict() == data
    assert (data["license"], data["license_name"], data["license_link"]) == ("other", "own", "https://x.example/l")
    assert data["model-index"][0]["name"] == "smol-maths"
    assert [r.unique_identifier for r in again.eval_results] == [
        r.unique_identifier for r in ModelCard.load(path).data.eval_results
    ]


@pytest.mark.parametrize(
    ("adapter", "quantization", "tags"),
    [(True, None, ["lora"]), (True, "4-bit bitsandbytes", ["qlora"]), (False, None, [])],
)
def test_tags_and_relation(adapter: bool, quantization: str | None, tags: list[str]):
    facts = RunFacts("sft", base_model="org/base", adapter=adapter, quantization=quantization)
    data = render_card(facts).data
    assert data.tags == ["hf_rlx", "sft", *tags, "generated_from_trainer"]
    assert data["base_model_relation"] == ("adapter" if adapter else "finetune")


@pytest.mark.parametrize(
    ("after_step", "heading"), [(None, "after training"), (200, "after training"), (150, "after step 150 of 200")]
)
def test_the_table_says_after_which_step(after_step: int | None, heading: str):
    assert f"| held out | before training | {heading} |\n" in str(
        render_card(RunFacts(**{**FULL, "after_step": after_step}))
    )


@pytest.mark.parametrize(
    ("method", "variant", "papers"),
    [
        ("grpo", None, ["2402.03300"]),
        ("grpo", "dr_grpo", ["2402.03300", "2503.20783"]),
        ("ppo", None, ["1707.06347", "2203.02155"]),
        ("dpo", None, ["2305.18290"]),
        ("ipo", None, ["2310.12036"]),
        ("simpo", None, ["2405.14734"]),
        ("orpo", None, ["2403.07691"]),
        ("iterative_dpo", None, ["2312.16682", "2305.18290"]),
        ("reward", None, ["2203.02155"]),
        ("sft", None, ["2203.02155"]),
        ("something", None, []),
    ],
)
def test_each_method_cites_its_paper(method: str, variant: str | None, papers: list[str]):
    text = str(render_card(RunFacts(method, variant=variant)))
    assert re.findall(r"eprint = \{([\d.]+)\}", text) == papers
    assert ("## Citation" in text) == bool(papers)


def test_no_path_and_no_secret_of_this_machine(tmp_path: Path):
    """Also not in the facts beside the card, which say again what it says; a local base stays a local one."""
    base = tmp_path / "models" / "tiny"
    base.mkdir(parents=True)
    facts = RunFacts(
        **{
            **MORE,
            "base_model": str(base),
            "notes": [f"Sampled from {tmp_path}/data/rows.jsonl, with hf_{'a' * 30}."],
            "hyper_parameters": {"path": str(tmp_path / "x" / "y.json"), "url": "https://u:pw123456@host/x"},
        }
    )
    path = write_card(facts, tmp_path / "out")
    facts.save(tmp_path / "out")
    assert "Sampled from rows.jsonl, with <HUB_TOKEN>." in path.read_text()
    for file in (path, tmp_path / "out" / "card_facts.json"):
        text = file.read_text()
        assert str(tmp_path) not in text
        assert "aaaaaaaa" not in text
        assert "pw123456" not in text
    again = RunFacts.load(tmp_path / "out")
    assert again.base_model == "./tiny"
    assert (again.before, again.measures, again.course) == (facts.before, facts.measures, facts.course)
    assert write_card(again, tmp_path / "again").read_text() == path.read_text()


def test_facts_of_another_version_are_read(tmp_path: Path):
    (tmp_path / "card_facts.json").write_text('{"method": "dpo", "of_a_later_version": 1}')
    assert RunFacts.load(tmp_path) == RunFacts("dpo")
    (tmp_path / "card_facts.json").write_text('{"method": "dpo", "measures": [3]}')
    with pytest.raises(ValueError, match=r"card_facts\.json is damaged"):
        RunFacts.load(tmp_path)


def test_a_snippet_names_the_folder_from_where_one_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`runs/a` from the folder in which it was trained; elsewhere, and from a file system's root, the name alone."""
    folder = tmp_path / "runs" / "a"
    for here, told in ((tmp_path, "./runs/a"), (tmp_path / "runs", "./a"), (folder, "./a"), (Path("/"), "./a")):
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(here)
        text = write_card(RunFacts("grpo", adapter=True), folder).read_text()
        assert f'name = "{told}"  # the path of this folder' in text
