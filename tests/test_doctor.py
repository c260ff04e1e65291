"""The doctor: what it looks at, what it says of good and bad machines, data and rewards, and how it prints."""

from __future__ import annotations

import io
import subprocess
import sys
import traceback

import pytest
import torch
from datasets import Dataset
from huggingface_hub import HfApi
from rich.console import Console

import hf_rlx
from hf_rlx import GRPOConfig
from hf_rlx.checkup import kind_of
from hf_rlx.cli import main
from hf_rlx.hub import HubError, telling
from hf_rlx.models.loading import load_tokenizer
from hf_rlx.preflight import machine, packages
from hf_rlx.preflight.hub import check_login, hub_findings
from hf_rlx.preflight.machine import GIB, device_findings, disk_finding, precision_finding
from hf_rlx.preflight.report import Finding, Report
from hf_rlx.preflight.tokens import tokenizer_findings
from hf_rlx.rollout.reward_models import RewardFunction
from hf_rlx.trainers.dpo import DPOConfig
from hf_rlx.trainers.reward import RewardConfig
from hf_rlx.trainers.sft import SFTConfig
from tests.trainers.reward_tools import pairs
from tests.trainers.tools import tiny_llama

SUMS = Dataset.from_dict({"prompt": [f"{i}+1=" for i in range(40)], "answer": [str(i + 1) for i in range(40)]})


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Breaking out of a box takes a second; one test does it."""
    monkeypatch.setattr(machine, "sandbox_finding", lambda: Finding("sandbox for code rewards", "level strong"))


def by_answer(completions, answer, **_):
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def by_length(completions, **_):
    return [float(len(text)) for text in completions]


def found(report, what):
    """The one finding about something."""
    (finding,) = [finding for finding in report if finding.what == what]
    return finding


def only_problem(report):
    """The one problem."""
    (problem,) = report.problems
    return problem


def grpo(folder, **fields):
    return GRPOConfig(
        str(folder), use_cpu=True, per_device_train_batch_size=8, num_generations=4, max_completion_length=8, **fields
    )


# --- the report ------------------------------------------------------------------------------------------------------


def test_a_whole_report(tmp_path):
    """On this machine everything is well, and every part has a line."""
    report = hf_rlx.doctor("tiny", SUMS, by_answer, grpo(tmp_path))
    assert report.ok, str(report)
    assert {
        *("device", "precision", "memory", "Python", "torch", "transformers", "trl", "peft", "accelerate", "datasets"),
        *("output_dir", "sandbox for code rewards", "model", "EOS", "pad", "chat template", "dataset", "steps"),
        *("tokens", "reward by_answer", "Hub"),
    } <= {finding.what for finding in report}
    assert found(report, "precision").found == "float32: the run is on a CPU"
    assert found(report, "torch").found == torch.__version__
    assert found(report, "model").found.startswith("tiny: llama, 0.8")
    # 8 completions are two prompts of four: 40 prompts are 20 rollouts.
    assert found(report, "steps").found == "20 rollouts an epoch, of 2 prompts and 8 completions"
    assert found(report, "dataset").found == "40 rows of prompts, columns prompt, answer"
    assert found(report, "reward by_answer").found.endswith("to row 0: 0.0 and 0.0")


def test_it_stays_a_function():
    """A module of the same name would take its place after the first use."""
    for _ in range(2):
        assert callable(hf_rlx.doctor)


def test_nothing_given_looks_at_the_machine():
    report = hf_rlx.doctor()
    assert {finding.what for finding in report} >= {"device", "precision", "torch", "output_dir", "Hub"}
    assert "dataset" not in {finding.what for finding in report}


def test_how_a_report_reads():
    report = Report(
        [Finding("disk", "full", "problem", "free some"), Finding("pad", "[EOS]"), Finding("x", "y", "note")]
    )
    assert (report.ok, len(report), [f.what for f in report.problems]) == (False, 3, ["disk"])
    assert str(report) == repr(report)
    assert str(report).splitlines() == [
        "problem  disk  full",
        "               -> free some",
        "ok       pad   [EOS]",
        "note     x     y",
        "1 problem, 1 notes",
    ]
    assert str(report.findings[0]) == "problem  disk: full. Fix: free some"
    text = io.StringIO()
    Console(file=text, width=100).print(report)
    assert "[EOS]" in text.getvalue()  # no markup
    assert "free some" in text.getvalue()
    assert Report([Finding("x", "y", "note")]).summary() == "no problems, 1 notes"
    assert Report().summary() == "no problems"


def test_a_part_that_fails_is_a_finding(monkeypatch):
    def broken():
        raise OSError("no such thing")
        yield

    monkeypatch.setattr(packages, "version_findings", broken)
    report = hf_rlx.doctor()
    assert only_problem(report).found == "cannot be looked at: OSError: no such thing"
    assert "Hub" in {finding.what for finding in report}


# --- device and precision --------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """Make this machine look as if it had GPUs."""

    def install(name="Tesla T4", capability=(7, 5), count=1, free=14.0, total=14.56, emulates=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: emulates)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (int(free * GIB), int(total * GIB)))

    return install


def lines(*args):
    return {finding.what: finding for finding in device_findings(*args)}


def test_a_t4(gpu):
    """bf16 is "supported" by emulation; float16 is chosen, by capability."""
    gpu()
    told = lines()
    assert told["device"].found == "Tesla T4, compute capability 7.5"
    assert told["precision"].found.startswith("float16 autocast: compute capability 7.5 has no bfloat16 (from 8.0 on)")
    assert "is_bf16_supported() says True, which is emulation" in told["precision"].found
    assert told["GPU memory"].found == "14.00 of 14.56 GiB free"
    assert {finding.verdict for finding in told.values()} <= {"ok", "note"}


def test_an_a100(gpu):
    gpu("A100", (8, 0), total=40, free=39)
    told = lines()
    assert told["precision"].found == "bfloat16 autocast: compute capability 8.0 has it (from 8.0 on)"


def test_two_gpus_without_a_launcher(gpu, monkeypatch):
    """Kaggle. With a launcher there are as many processes."""
    for name in ("LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    gpu(count=2)
    problem = lines()["GPUs"]
    assert problem.verdict == "problem"
    assert problem.found.startswith("2 GPUs are visible without a launcher")
    assert problem.fix.startswith("set CUDA_VISIBLE_DEVICES=0 before torch is imported")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "GPUs" not in lines()


def test_memory_that_others_hold(gpu):
    gpu(free=1.0)
    assert (lines()["GPU memory"].verdict, lines()["GPU memory"].fix[:22]) == ("problem", "something holds the re")
    gpu(free=5.0)
    assert lines()["GPU memory"].verdict == "note"


def test_the_precision_of_a_configuration(tmp_path, gpu):
    cpu = GRPOConfig(str(tmp_path), use_cpu=True)
    slow = GRPOConfig(str(tmp_path), use_cpu=True, bf16=True)
    assert precision_finding(cpu).verdict == "ok"
    assert (precision_finding(slow).verdict, precision_finding(slow).fix) == ("note", "leave bf16 out: float32")
    gpu()
    told = lines(cpu)
    assert told["GPU"].found == "there is one, but use_cpu=True"
    assert told["precision"].found == "float32: the run is on a CPU"


def test_little_memory_is_noted(monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: GIB)
    assert lines()["memory"].verdict == "note"
    monkeypatch.setattr(machine, "available_memory", lambda: None)
    assert "memory" not in lines()


@pytest.mark.parametrize("version", [1, 2])
def test_cached_files_of_a_container_are_memory_to_take(monkeypatch, tmp_path, version):
    """Of a limit of 1000 bytes 900 are taken, 700 of them by files that have been read: 800 are to be had."""
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    cache = "inactive_file" if version == 2 else "total_inactive_file"
    for name, text in zip((*names, "memory.stat"), ("1000\n", "900\n", f"file 750\n{cache} 700\n"), strict=True):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "_CONTAINERS", tuple((tmp_path, *rest) for _, *rest in machine._CONTAINERS))
    assert machine.available_memory() == 800
    (tmp_path / "memory.stat").unlink()
    assert machine.available_memory() == 100


def test_the_folder_of_a_run(tmp_path, monkeypatch):
    assert disk_finding(tmp_path / "a" / "b").verdict in ("ok", "note")
    (tmp_path / "file").write_text("")
    assert "is a file" in disk_finding(tmp_path / "file" / "run").found
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: type("Usage", (), {"free": GIB // 2}))
    assert disk_finding(tmp_path).verdict == "note"
    full = disk_finding(tmp_path, needed=GIB)
    assert (full.verdict, full.fix) == ("problem", "free some, set save_total_limit, or name another output_dir")
    assert "a checkpoint takes about 1.00" in full.found


# --- packages --------------------------------------------------------------------------------------------------------


def versions(monkeypatch, **changed):
    """Findings where some packages have another version; None: it is not installed."""
    real = packages.metadata.version

    def version(name):
        if name in changed and changed[name] is None:
            raise packages.metadata.PackageNotFoundError(name)
        return changed.get(name) or real(name)

    monkeypatch.setattr(packages.metadata, "version", version)
    return {finding.what: finding for finding in packages.version_findings()}


def test_versions_are_those_of_pyproject(monkeypatch):
    """The lower bounds stand there and nowhere else."""
    _, needs = packages.supported()
    assert {"torch", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes"} <= set(needs)
    told = versions(monkeypatch, peft="0.10.0", trl="2.5.0", datasets=None)
    assert told["torch"].verdict == "ok"
    assert (told["peft"].verdict, told["peft"].found) == ("problem", f"0.10.0, but hf_rlx supports {needs['peft']}")
    assert told["peft"].fix == f'pip install "peft{needs["peft"]}"'
    assert told["trl"].verdict == "problem"
    assert (told["datasets"].found, told["datasets"].verdict) == ("not installed", "problem")


def test_bitsandbytes_is_needed_by_few(monkeypatch):
    found = versions(monkeypatch, bitsandbytes=None)["bitsandbytes"]
    assert (found.verdict, found.found) == ("note", "not installed: no 4-bit weights, no 8-bit optimizers")


def test_an_old_python(monkeypatch):
    monkeypatch.setattr(packages.platform, "python_version", lambda: "3.9.1")
    assert versions(monkeypatch)["Python"].found == "3.9.1, but hf_rlx needs >=3.11"


def test_an_installed_package_tells_its_bounds_too(monkeypatch, tmp_path):
    """Where no pyproject.toml lies beside the package."""
    monkeypatch.setattr(packages, "__file__", str(tmp_path / "site" / "hf_rlx" / "preflight" / "packages.py"))
    packages.supported.cache_clear()
    try:
        python, needs = packages.supported()
        assert python.contains("3.11.0")
        assert not needs["torch"].contains("1.0")
    finally:
        packages.supported.cache_clear()


def test_optimizers_and_bitsandbytes(tmp_path, monkeypatch):
    """This bitsandbytes steps on a CPU; one that does not is told."""
    args = grpo(tmp_path, optim="paged_adamw_8bit")
    told = {f.what: f for f in packages.clash_findings(args)}
    assert (set(told), told["bitsandbytes"].verdict) == ({"bitsandbytes"}, "note")
    monkeypatch.setattr(packages, "_step_on_cpu", lambda paged: NotImplementedError(f"paged={paged}"))
    told = {f.what: f for f in packages.clash_findings(args)}
    assert told["optim"].found == "optim=paged_adamw_8bit does not run on this CPU (NotImplementedError: paged=True)"
    assert told["optim"].fix == "leave optim out, or pip install -U bitsandbytes"


# --- model and tokenizer ---------------------------------------------------------------------------------------------


def test_a_model_that_is_nowhere():
    problem = only_problem(hf_rlx.doctor("nobody/nothing"))
    assert problem.what == "model"
    assert "hf auth login" in problem.fix


def test_a_model_in_memory():
    model = tiny_llama()
    assert (
        found(hf_rlx.doctor(model), "model").found == "LlamaForCausalLM, 0.03 M parameters, 0.03 M of them trainable"
    )
    problem = only_problem(hf_rlx.doctor(model.requires_grad_(False)))
    assert problem.fix == "pass peft_config, or load the adapter with is_trainable=True"


def test_a_model_that_does_not_fit(monkeypatch):
    """The bundled model has 0.8 M parameters: 3 MiB in 32 bits."""
    monkeypatch.setattr(machine, "available_memory", lambda: 1_000_000)
    problem = only_problem(hf_rlx.doctor("tiny"))
    assert "GiB of weights in 32 bits, and 0.00 GiB are free" in problem.found
    assert "four_bit_config()" in problem.fix


def test_no_room_for_a_prompt(tmp_path):
    args = GRPOConfig(str(tmp_path), use_cpu=True, max_completion_length=100_000)
    assert found(hf_rlx.doctor("tiny", args=args), "context").fix == "lower max_completion_length"


def tokens(tokenizer, **options):
    return {finding.what: finding for finding in tokenizer_findings(tokenizer, **options)}


def test_a_tokenizer():
    tokenizer = load_tokenizer("tiny")
    told = tokens(tokenizer, conversational=True)
    assert (told["EOS"].found, told["pad"].found) == ("'<eos>'", "'<pad>'")
    assert told["chat template"].found == "there is one"
    tokenizer.pad_token = "<eos>"
    assert tokens(tokenizer)["pad"].found.startswith("the same as EOS, which is fine")
    tokenizer.chat_template = None
    assert tokens(tokenizer)["chat template"].verdict == "ok"
    problem = tokens(tokenizer, conversational=True)["chat template"]
    assert (problem.verdict, problem.found) == ("problem", "none, but the data are messages")
    tokenizer.eos_token = None
    assert tokens(tokenizer)["EOS"].verdict == "problem"
    assert tokens(tokenizer, end_tokens=[2, 5])["EOS"].verdict == "ok"


def test_a_template_whose_turns_end_otherwise():
    """Completions would never end: all of them are cut."""
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<pad>{% endfor %}"
    told = tokens(tokenizer, conversational=True)["chat template"]
    assert (told.verdict, told.found[:39]) == ("note", "ends an answer with '<pad>', which is n")
    assert "stop_strings=['<pad>']" in told.fix
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert "refuses a question and an answer" in tokens(tokenizer, conversational=True)["chat template"].found


# --- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "args", "kind"),
    [
        (["prompt"], None, "prompts"),
        (["prompt", "completion"], None, "demonstrations"),
        (["messages"], None, "demonstrations"),
        (["prompt", "chosen", "rejected"], None, "pairs"),
        (["prompt", "responses", "scores"], None, "pairs"),
        (["prompt", "completion"], GRPOConfig, "prompts"),
        (["prompt"], SFTConfig, "demonstrations"),
        (["prompt"], RewardConfig, "pairs"),
    ],
)
def test_which_kind_of_data_is_meant(tmp_path, columns, args, kind):
    data = Dataset.from_dict({column: ["1"] for column in columns})
    args = args and args(str(tmp_path), use_cpu=True)
    assert kind_of(data, args) == kind
    assert kind_of(list(data), args) == kind


def test_a_missing_column_and_its_rename():
    problem = only_problem(hf_rlx.doctor(dataset=Dataset.from_dict({"question": ["1+1="]}), reward_funcs=by_length))
    assert problem.found == "dataset has no column `prompt`; it has ['question']"
    assert problem.fix == 'if `question` is the prompt: dataset = dataset.rename_column("question", "prompt")'


def test_empty_and_strange_datasets():
    assert only_problem(hf_rlx.doctor(dataset=[])).found == "dataset is empty"
    assert "load it first" in str(only_problem(hf_rlx.doctor(dataset="gsm8k")))
    assert found(hf_rlx.doctor(dataset={"test": SUMS.select([0]), "train": SUMS}), "dataset").found.startswith(
        "40 rows"
    )


def test_too_few_rows(tmp_path):
    problem = only_problem(hf_rlx.doctor(dataset=SUMS.select([0]), args=grpo(tmp_path)))
    assert problem.found == "the dataset has 1 prompts but a rollout needs 2"
    assert problem.fix.startswith("add some, or lower per_device_train_batch_size")
    args = DPOConfig(str(tmp_path), use_cpu=True, per_device_train_batch_size=8)
    note = found(hf_rlx.doctor(dataset=pairs(3), args=args), "steps")
    assert (note.verdict, note.found) == (
        "note",
        "8 rows an optimizer step, and there are 3: every step is all of them",
    )
    assert (
        found(hf_rlx.doctor(dataset=pairs(20), args=args), "steps").found
        == "8 rows an optimizer step, 3 steps an epoch"
    )


def test_rows_that_teach_nothing_or_are_cut(tmp_path):
    same = Dataset.from_dict({"prompt": ["1+1="] * 4, "chosen": ["2"] * 4, "rejected": ["2"] * 4})
    args = DPOConfig(str(tmp_path), use_cpu=True, per_device_train_batch_size=4, max_length=4)
    report = hf_rlx.doctor("tiny", same, args=args)
    told = {finding.verdict: finding for finding in report if finding.what == "rows"}
    assert told["problem"].found.startswith("none of the 4 rows looked at teaches anything")
    assert told["note"].fix == "raise max_length, or shorten the data"
    assert "of 4 rows looked at" not in str(hf_rlx.doctor("tiny", pairs(4)))


def test_a_row_that_the_template_refuses(tmp_path):
    tokenizer_refuses = [[{"role": "tool", "content": "1"}]] * 4
    report = hf_rlx.doctor("tiny", Dataset.from_dict({"prompt": tokenizer_refuses}), args=grpo(tmp_path))
    assert found(report, "tokens").verdict in ("ok", "problem")


# --- rewards ---------------------------------------------------------------------------------------------------------


def reward_problem(function, dataset=SUMS):
    return only_problem(hf_rlx.doctor(dataset=dataset, reward_funcs=function))


def test_a_reward_with_a_missing_column():
    def right(completions, answr):
        return [0.0] * len(completions)

    problem = reward_problem(right)
    assert "requires the parameter 'answr', which no dataset column gives (did you mean 'answer'?)" in problem.found
    assert problem.fix == "rename the parameter or the column, or give it a default"
    note = found(hf_rlx.doctor(reward_funcs=right), "reward right")
    assert (note.verdict, note.fix) == ("note", "give dataset= to see whether it has them")


def test_a_reward_that_is_a_class():
    class Mine:
        def __call__(self, completions):
            return [0.0] * len(completions)

    found = only_problem(hf_rlx.doctor(reward_funcs=Mine))
    assert (found.found, found.fix) == ("reward function 'Mine' is a class", "pass an instance: Mine(...)")


@pytest.mark.parametrize(
    ("dataset", "fix"),
    [
        (Dataset.from_dict({"prompt": ["1+1="]}).to_pandas(), "write datasets.Dataset.from_pandas(...)"),
        ({"prompt": ["1+1="]}, "write datasets.Dataset.from_dict(...)"),
        (["1+1="], 'write [{"prompt": text} for text in texts]'),
    ],
)
def test_data_that_are_no_dataset(dataset, fix):
    """One problem, of the data: model and rewards are still looked at."""
    assert only_problem(hf_rlx.doctor("tiny", dataset, lambda completions: [1.0, 0.0])).fix == fix


def test_no_step(tmp_path):
    args = GRPOConfig(str(tmp_path), use_cpu=True, max_steps=0, max_completion_length=8)
    found = only_problem(hf_rlx.doctor("tiny", Dataset.from_dict({"prompt": ["1+1="] * 8}), args=args))
    assert (found.what, found.found) == ("steps", "max_steps=0: there would be no optimizer step")


def test_a_model_of_an_unknown_type(tmp_path):
    load_tokenizer("tiny").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "lama9"}')
    found = only_problem(hf_rlx.doctor(str(tmp_path)))
    assert "model type `lama9`" in found.found
    assert found.fix.startswith("pip install -U transformers")


def test_a_reward_of_strings_and_one_that_raises():
    problem = reward_problem(lambda completions, **_: ["1"] * len(completions))
    assert "returned '1' of type str; expected a number or None" in problem.found
    assert problem.fix == "return a list with one number, or None, for each completion"
    problem = reward_problem(lambda completions, **_: 1.0)
    assert "returned 1.0 of type float; expected a list of 2 rewards" in problem.found

    def fragile(completions, **_):
        return [float(text.split()[0] == "The") for text in completions]

    problem = reward_problem(fragile)  # an empty answer happens: the model may end at once
    assert "'fragile' raised IndexError: list index out of range" in problem.found
    assert "completion at index 1 of 2: ''" in problem.found
    assert "on_reward_error='skip'" in problem.fix


def test_a_reward_that_hangs(tmp_path):
    def slow(completions, **_):
        done.wait(20)
        return [0.0] * len(completions)

    import threading

    done = threading.Event()
    try:
        problem = only_problem(hf_rlx.doctor(dataset=SUMS, reward_funcs=slow, args=grpo(tmp_path, reward_timeout=0.2)))
    finally:
        done.set()
    assert "'slow' did not return within 0.2 s" in problem.found
    assert "reward_timeout" in problem.fix


def test_rewards_that_are_fine():
    async def later(completions, **_):
        return [0.5 for _ in completions]

    def bare(completions):
        return [float(len(text)) for text in completions]

    def silent(completions, **_):
        return [None for _ in completions]

    report = hf_rlx.doctor(dataset=SUMS, reward_funcs=[later, bare, silent, "operator:add", "org/model"])
    assert found(report, "reward later").found.startswith("async, of 'The answer is 42.' and an empty answer to row 0")
    assert found(report, "reward bare").found.endswith("17.0 and 0.0")
    assert found(report, "reward silent").verdict == "note"
    assert "org/model: a model, which is not tried here" in str(report)
    assert [problem.what for problem in report.problems] == ["reward add"]


def test_rewards_that_are_none():
    assert only_problem(hf_rlx.doctor(reward_funcs=[])).found == "reward_funcs is empty"
    assert "is no function" in only_problem(hf_rlx.doctor(reward_funcs=[3])).found
    assert "cannot import" in only_problem(hf_rlx.doctor(reward_funcs="operator:nothing")).found


def test_messages_reach_the_reward_as_messages():
    seen = []

    def keep(prompts, completions, **_):
        seen.append((prompts[0], completions[0]))
        return [0.0] * len(completions)

    said = [{"role": "user", "content": "1+1="}]
    hf_rlx.doctor(dataset=Dataset.from_dict({"prompt": [said]}), reward_funcs=keep)
    assert seen == [(said, [{"role": "assistant", "content": "The answer is 42."}])]
    assert RewardFunction("keep", keep, "sync").bind({"prompts": [], "completions": []})


# --- the Hub ---------------------------------------------------------------------------------------------------------


def test_without_pushing_no_network_is_used(monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi.whoami", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_" + "CANARY" * 5)
    (finding,) = hub_findings(False)
    assert (finding.verdict, "CANARY" in str(finding)) == ("ok", False)


def whoami(monkeypatch, answer):
    """Let the Hub answer so."""

    def asked(self, token=None, **_):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("huggingface_hub.HfApi.whoami", asked)
    monkeypatch.setattr("huggingface_hub.HfApi.repo_exists", lambda *_, **__: False)


def scopes(*permissions, name="me"):
    scoped = [{"entity": {"name": name}, "permissions": list(permissions)}]
    return {
        "name": "me",
        "orgs": [],
        "auth": {"accessToken": {"role": "fineGrained", "fineGrained": {"scoped": scoped}}},
    }


@pytest.mark.parametrize(
    ("answer", "repo", "told"),
    [
        ({"name": "me", "auth": {"accessToken": {"role": "write"}}}, "me/x", "logged in as me"),
        ({"name": "me"}, None, "logged in as me"),
        ({"name": "me", "orgs": [{"name": "us", "roleInOrg": "write"}]}, "us/x", "logged in as me"),
        ({"name": "me", "orgs": [{"name": "us", "roleInOrg": "read"}]}, "us/x", "may only read in 'us'"),
        ({"name": "me", "orgs": []}, "us/x", "'me' is not a member of 'us'"),
        ({"name": "me", "auth": {"accessToken": {"role": "read"}}}, "me/x", "may only read"),
        (scopes("repo.content.read", "repo.write"), "me/x", "logged in as me"),
        (scopes("repo.write", name="me/y"), "me/x", "the token may not write 'me/x'"),
        (scopes("repo.content.read"), "me/x", "may only read"),
        (ConnectionError("no route with hf_" + "CANARY" * 5), "me/x", "cannot be reached (ConnectionError: no route"),
    ],
)
def test_permission_to_write(monkeypatch, answer, repo, told):
    whoami(monkeypatch, answer)
    findings = list(hub_findings(True, repo, "hf_" + "CANARY" * 5))
    assert told in findings[-1].found
    assert findings[-1].verdict == ("ok" if told.startswith("logged") else "problem")
    assert bool(findings[-1].fix) == (findings[-1].verdict == "problem")
    assert "CANARY" not in str(findings)


def refuses(headers):
    """A header that cannot be sent, as the HTTP library tells it."""
    raise ConnectionError(f"Illegal header value {headers!r}")


@pytest.mark.parametrize("answer", ["as it is", "as its cause", "as its context"])
def test_a_traceback_has_no_token(monkeypatch, answer):
    """A token with a line's end, read from a file, cannot be sent, and the error shows it: so would its traceback."""
    token = "hf_" + "CANARY" * 5 + "\n"

    def asked(self, token=None, **_):
        if answer == "as it is":
            refuses(f"Bearer {token}")
        try:
            refuses(f"Bearer {token}")
        except ConnectionError as error:
            if answer == "as its cause":
                raise ConnectionError("not sent") from error
            raise ConnectionError("not sent")  # noqa: B904 - what is tried here

    monkeypatch.setattr("huggingface_hub.HfApi.whoami", asked)
    with pytest.raises(HubError, match="cannot be reached") as told:
        check_login(token)
    assert "CANARY" not in "".join(traceback.format_exception(told.value))
    with pytest.raises(HubError, match="asking failed: ") as told, telling("asking", token):
        HfApi().whoami(token=token)
    assert "CANARY" not in "".join(traceback.format_exception(told.value))


def test_a_cause_without_a_token_is_shown(monkeypatch):
    whoami(monkeypatch, ConnectionError("no route"))
    with pytest.raises(HubError) as told:
        check_login("hf_" + "CANARY" * 5)
    assert isinstance(told.value.__cause__, ConnectionError)


def test_nobody_is_logged_in(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    (finding,) = hub_findings(True)
    assert "there is none" in finding.found
    assert finding.fix.startswith("log in with `hf auth login`")


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path, capsys):
    file = tmp_path / "sums.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 40, encoding="utf-8")
    words = ["--model", "tiny", "--dataset", str(file), "--reward", "number", "--output-dir", str(tmp_path)]
    assert main(["doctor", *words]) == 0
    out = capsys.readouterr().out
    assert "40 rows of prompts, columns prompt, answer" in out
    assert "no problems" in out
    (tmp_path / "grpo.yaml").write_text("per_device_train_batch_size: 800\nuse_cpu: true\n", encoding="utf-8")
    assert main(["doctor", "grpo", "--config", str(tmp_path / "grpo.yaml"), *words]) == 1
    out = capsys.readouterr().out
    assert "the dataset has 40 prompts but a rollout needs 100" in out
    assert "-> add some" in out


def test_the_command_refuses_a_typo(tmp_path, capsys):
    (tmp_path / "grpo.yaml").write_text("max_stepz: 8\n", encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", "grpo", "--config", str(tmp_path / "grpo.yaml")])
    assert stopped.value.code == 2
    assert "max_steps" in capsys.readouterr().err


def test_the_sandbox_is_broken_out_of(monkeypatch):
    """Whatever there is here, or why there is none."""
    monkeypatch.undo()
    finding = machine.sandbox_finding()
    assert finding.found.startswith("level ") if finding.verdict == "ok" else "Probed" in finding.found
    monkeypatch.setattr("hf_rlx.verifiers.sandbox._kind_of", lambda level, *_: f"no {level} here")
    finding = machine.sandbox_finding()
    assert (finding.verdict, "no strong here" in finding.found) == ("note", True)
    assert "bubblewrap" in finding.fix


def test_importing_the_package_does_not_import_the_doctor():
    code = "import sys, hf_rlx; assert 'hf_rlx.checkup' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
