"""Every trainer pushes what it trained: while it trains, at the end, and after a push that failed."""

from __future__ import annotations

import io
import logging
import re
from contextlib import redirect_stdout

import pytest
import torch
import yaml
from datasets import Dataset, load_dataset
from huggingface_hub import HfApi, ModelCard

from hf_rlx.data.hub import push_pairs
from hf_rlx.hub import HubError
from hf_rlx.models.shared import SharedModel
from hf_rlx.trainers.sft import SFTConfig, SFTTrainer
from tests.hub.server import WRITER, Fault
from tests.hub.tools import ADAPTER, TOKENIZER, base, names, read, tokenizer
from tests.tiny import ragged_groups
from tests.trainers import pair_tools, ppo_tools, prm_tools, reward_tools, tools

POLICY = ["README.md", *ADAPTER, *TOKENIZER]
LICENSED = b"---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\n# A base\n"
REWARD = [*(f"reward/{name}" for name in ADAPTER), "reward/head.safetensors", "reward/role.json"]
ROLES = {
    "ppo": ["critic/head.safetensors", "critic/role.json"],
    "reward": REWARD,
    "prm": [name.replace("reward/", "step_reward/") for name in REWARD],
}


def make(kind, shared, folder, **fields):
    """A trainer of a kind over `shared`, two steps, one checkpoint a step."""
    fields = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "push_to_hub": True, **fields}
    if kind == "grpo":
        return tools.scripted(tools.config(folder, **fields), model=shared, peft_config=None)
    if kind == "ppo":
        return ppo_tools.ppo(ppo_tools.ppo_config(folder, **fields), model=shared, peft_config=None)
    if kind == "dpo":
        return pair_tools.trainer(pair_tools.config(folder, **fields), shared)
    if kind == "reward":
        return reward_tools.trainer(reward_tools.config(folder, **fields), shared)
    if kind == "prm":
        return prm_tools.trainer(prm_tools.config(folder, **fields), shared)
    rows = Dataset.from_list([{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(8)])
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "per_device_train_batch_size": 4}
    args = SFTConfig(str(folder), **{**quiet, **fields})
    return SFTTrainer(shared, args, train_dataset=rows, processing_class=tokenizer())


def run_snippet(card):
    """Execute the code under "Use" of a card; returns what it defined and what it printed."""
    found = re.search(r"## Use\n\n```python\n(.*?)```", card, re.DOTALL)
    assert found is not None
    defined, printed = {}, io.StringIO()
    with redirect_stdout(printed):
        exec(compile(found[1], "the card's snippet", "exec"), defined)
    return defined, printed.getvalue().strip()


def policy(hub):
    """A base by its Hub id with a fresh adapter."""
    return SharedModel.from_pretrained(base(hub), peft_config=tools.lora())


@pytest.mark.parametrize("kind", ["grpo", "ppo", "dpo", "reward", "prm", "sft"])
def test_every_trainer_pushes(hub, tmp_path, kind):
    """At each checkpoint and at the end weights and card; the name is the folder's; no checkpoint, no log, no
    optimizer; what comes back is what was trained."""
    folder = tmp_path / f"run-{kind}"
    trainer = make(kind, policy(hub), folder, hub_private_repo=True)
    repo = f"me/run-{kind}"
    assert trainer.hub_model_id == repo
    assert hub.repos["model", repo].private
    trainer.train()
    expected = sorted([*POLICY, *ROLES.get(kind, [])])
    assert names(hub, repo) == expected
    assert "Training in progress, step 1" in hub.repos["model", repo].messages
    trainer.push_to_hub(commit_message="Done", license="mit")  # a card that changes: no empty commit
    assert names(hub, repo) == expected
    assert hub.repos["model", repo].messages[-1] == "Done"
    card = hub.files(repo)["README.md"].decode()
    assert f"- {trainer.method}" in card
    assert "base_model: me/base" in card
    loaded = SharedModel.from_pretrained(repo)
    for name, value in read(trainer.shared).items():
        torch.testing.assert_close(read(loaded)[name], value, atol=1e-6, rtol=1e-6, msg=name)
    defined, printed = run_snippet(card)
    assert repo in (defined.get("name"), *re.findall(r'snapshot_download\("(.*?)"\)', card))
    scores = {"reward": r"\[-?[\d.e-]+\]", "prm": r"\[\[\(3, [\d.e-]+\)\]\]"}.get(kind, "(?s).*")
    assert re.fullmatch(scores, printed)


@pytest.mark.parametrize(
    ("strategy", "folders"),
    [("end", set()), ("checkpoint", {"last-checkpoint"}), ("all_checkpoints", {"checkpoint-1", "checkpoint-2"})],
)
def test_strategies(hub, tmp_path, strategy, folders):
    """`end`: nothing before `push_to_hub`; whole checkpoints only where the strategy says so, in folders of their own,
    and from there a run goes on."""
    repo = f"me/strategy-{strategy.replace('_', '-')}"
    fields = {"hub_model_id": repo, "hub_strategy": strategy, "save_total_limit": 1}
    trainer = make("grpo", policy(hub), tmp_path / "run", **fields)
    trainer.train()
    there = names(hub, repo)
    if strategy == "end":
        assert there == []
    assert {name.split("/")[0] for name in there if "/" in name} == folders
    trainer.push_to_hub()
    there = names(hub, repo)
    assert sorted(name for name in there if "/" not in name) == sorted(POLICY)
    assert {name.split("/")[0] for name in there if "/" in name} == folders
    for folder in folders:
        assert any(name.startswith(f"{folder}/optimizer") for name in there)
        loaded = SharedModel.from_pretrained(repo, subfolder=folder)
        assert loaded.roles.keys() == {"policy"}
    if strategy == "checkpoint":
        from huggingface_hub import snapshot_download

        place = snapshot_download(repo, local_dir=tmp_path / "again", allow_patterns="last-checkpoint/*")
        again = make("grpo", policy(hub), tmp_path / "other", push_to_hub=False, max_steps=3)
        again.train(resume_from_checkpoint=f"{place}/last-checkpoint")
        assert again.state.global_step == 3


def test_a_stand_alone_classifier_and_its_checkpoints(hub, tmp_path):
    """Its checkpoints hold a role.json too and are no roles."""
    fields = {"hub_model_id": "me/alone", "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = reward_tools.trainer(reward_tools.config(tmp_path, push_to_hub=True, **fields), base(hub))
    trainer.train()
    trainer.push_to_hub()
    defined, printed = run_snippet(hub.files("me/alone")["README.md"].decode())
    assert (defined["name"], type(defined["model"]).__name__) == ("me/alone", "LlamaForSequenceClassification")
    rows = {"prompts": ["17+25="], "completions": ["42"]}
    assert float(printed) == pytest.approx(trainer.shared.reward_function(max_length=64)(**rows)[0], abs=1e-5)
    assert not [name for name in names(hub, "me/alone") if "checkpoint" in name]
    scores = trainer.shared.score(ragged_groups())
    for place in ("me/alone", tmp_path):
        loaded = SharedModel.from_pretrained(place)
        torch.testing.assert_close(loaded.score(ragged_groups()), scores, atol=1e-6, rtol=1e-6)


def test_a_classifiers_adapter_and_a_whole_policy(hub, tmp_path):
    """What their pushed cards say loads them."""
    fields = {"push_to_hub": True, "max_steps": 1, "save_strategy": "no"}
    args = reward_tools.config(tmp_path / "a", hub_model_id="me/adapter", **fields)
    judge = reward_tools.trainer(args, base(hub), peft_config=tools.lora(task_type="SEQ_CLS"))
    judge.train()
    judge.push_to_hub()
    defined, printed = run_snippet(hub.files("me/adapter")["README.md"].decode())
    assert type(defined["model"]).__name__ == "PeftModelForSequenceClassification"
    rows = {"prompts": ["17+25="], "completions": ["42"]}
    scorer = judge.shared.reward_function()
    assert float(printed) == pytest.approx(scorer(**rows)[0], abs=1e-5)

    args = tools.config(tmp_path / "w", hub_model_id="me/whole-policy", **fields)
    trainer = tools.scripted(args, model=base(hub), peft_config=None)
    trainer.train()
    trainer.push_to_hub()
    defined, _ = run_snippet(hub.files("me/whole-policy")["README.md"].decode())
    assert type(defined["model"]).__name__ == "LlamaForCausalLM"
    trained = dict(trainer.shared.causal_lm.named_parameters())
    assert all(torch.equal(value, trained[name]) for name, value in defined["model"].named_parameters())


def test_data_of_the_hub_is_named_in_the_card(hub, tmp_path):
    """Pairs that were pushed and loaded: `datasets`, the result of `model-index` and the Hub's evaluation file name
    them, and the text says which split; licence and base are those of the base's repository."""
    rows = reward_tools.pairs(12).to_list()
    push_pairs(rows[:8], "me/Taught")
    push_pairs(rows[8:], "me/Taught", split="test")
    train, test = (load_dataset("me/Taught", split=split) for split in ("train", "test"))
    tools.tiny_llama().push_to_hub("me/licensed")
    HfApi().upload_file(path_or_fileobj=LICENSED, path_in_repo="README.md", repo_id="me/licensed")
    model = SharedModel.from_pretrained("me/licensed", peft_config=tools.lora())
    args = pair_tools.config(tmp_path / "named", hub_model_id="me/named", push_to_hub=True, eval_on_start=True)
    args.eval_strategy = "steps"
    args.eval_steps = 1
    trainer = pair_tools.trainer(args, model, dataset=train, eval_dataset=test.select(range(4)))
    trainer.train()
    trainer.push_to_hub()
    files = hub.files("me/named")
    card = ModelCard(files["README.md"].decode())
    assert card.data.datasets == ["me/Taught"]
    assert (card.data.base_model, card.data.license, card.data.license_name) == ("me/licensed", "other", "own")
    result = next(r for r in card.data.eval_results if r.metric_type == "accuracy")
    assert (result.dataset_type, result.dataset_name) == ("me/Taught", "me/Taught, test")
    assert "trained with DPO on [me/Taught, train](https://huggingface.co/datasets/me/Taught)" in card.text
    assert "Measured on held-out rows of me/Taught, test, n=4" in card.text
    assert "| held out | before training | after training |" in card.text
    (entry,) = yaml.safe_load(files[".eval_results/me-taught.yaml"])
    assert entry["dataset"]["id"] == "me/Taught"
    assert entry["value"] == pytest.approx(result.metric_value)


def test_a_failing_hub_does_not_stop_a_run(hub, tmp_path, caplog):
    """Uploads of checkpoints fail; the run ends, the log says what happened; afterwards the push goes through."""
    trainer = make("dpo", policy(hub), tmp_path / "failing", hub_token=WRITER)
    hub.faults = [Fault("commit", "echo", 99)]
    with caplog.at_level(logging.ERROR):
        trainer.train()
        with pytest.raises(HubError, match=r"to me/failing failed.*Push once more"):
            trainer.push_to_hub()
    assert trainer.state.global_step == 2
    assert f"pushing {tmp_path / 'failing'} to me/failing failed" in caplog.text
    assert WRITER not in caplog.text
    assert names(hub, "me/failing") == []
    hub.faults = []
    trainer.push_to_hub()
    assert names(hub, "me/failing") == sorted(POLICY)


def test_a_public_repository_is_not_pushed_to_as_private(hub, tmp_path):
    policy(hub).push_to_hub("me/was-public", tokenizer=tokenizer())
    before = names(hub, "me/was-public")
    trainer = make("sft", policy(hub), tmp_path, hub_model_id="me/was-public", hub_private_repo=True)
    with pytest.raises(HubError, match="exists and is public"):
        trainer.push_to_hub()
    assert names(hub, "me/was-public") == before


def test_without_push_to_hub_in_the_configuration(hub, tmp_path):
    """`push_to_hub()` alone makes the repository; a branch too."""
    trainer = make("sft", policy(hub), tmp_path / "later", push_to_hub=False, save_strategy="no")
    trainer.train()
    assert ("model", "me/later") not in hub.repos
    trainer.push_to_hub(private=True, license="mit")
    assert hub.repos["model", "me/later"].private
    assert "license: mit" in hub.files("me/later")["README.md"].decode()
    trainer.push_to_hub(revision="trial")
    assert names(hub, "me/later", "trial") == sorted(POLICY)


def test_a_reward_model_and_a_policy_on_one_base(hub, tmp_path):
    """The pipeline: reward model, PPO on it, one push; a policy and its reward model come back."""
    model = policy(hub)
    make("reward", model, tmp_path / "reward", push_to_hub=False, save_strategy="no").train()
    args = ppo_tools.ppo_config(tmp_path / "ppo", save_strategy="no")
    ppo_tools.ppo(args, model.reward_function(), model=model, peft_config=None).train()
    model.push_to_hub("me/pipeline")
    loaded = SharedModel.from_pretrained("me/pipeline")
    assert {"policy", "reward", "critic"} <= set(loaded.roles)
    rows = {"prompts": ["1+1=", "2+2="], "completions": ["2", "5"]}
    assert loaded.reward_function()(**rows) == pytest.approx(model.reward_function()(**rows), abs=1e-6)
    again = ppo_tools.ppo(
        ppo_tools.ppo_config(tmp_path / "again"), loaded.reward_function(), model=loaded, peft_config=None
    )
    again.train()
