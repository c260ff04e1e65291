"""No token in any file, log or card; a push carries the model and nothing else, and is refused with a token in it."""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file

from hf_rlx import hub as uploads
from hf_rlx.cards import RunFacts, write_card
from hf_rlx.models.hub import files_of_model
from hf_rlx.report import write_report
from hf_rlx.secrets import (
    SecretFoundError,
    is_secret_name,
    mask_text,
    masked,
    public,
    refuse_secrets,
    scan_for_secrets,
)
from hf_rlx.trainers.grpo import GRPOConfig
from tests.trainers.tools import config, scripted

HUB = "hf_" + "Canary0123456789abcdefgh"
LOGIN = "https://me:CANARYword@rollout.example:8000/v1"


def secretive(folder, **fields):
    """A configuration with a secret in every place that takes one."""
    return config(
        folder,
        hub_token="hf_CANARY_hub",
        vllm_server_base_url=LOGIN,
        **{"save_strategy": "steps", "save_steps": 1, "logging_steps": 1, **fields},
    )


def files_with_canary(folder):
    """Names of files below `folder` with a canary in them."""
    found = [path for path in Path(folder).rglob("*") if path.is_file() and b"canary" in path.read_bytes().lower()]
    return [path.relative_to(folder).as_posix() for path in found]


# --- what is written -------------------------------------------------------------------------------------------------


def test_a_run_writes_no_secret(tmp_path, monkeypatch, caplog, capfd):
    """Checkpoint, saved model, card, plot, logs, printed configuration; tokens from arguments, environment, URL."""
    monkeypatch.setenv("HF_TOKEN", HUB)
    caplog.set_level(logging.DEBUG)
    args = secretive(tmp_path, log_completions=True)
    trainer = scripted(args)
    trainer.train()
    # Loading is over: these would have gone to from_pretrained.
    args.model_init_kwargs = {"token": "hf_CANARY_load", "nested": {"api_key": "CANARY_key"}}
    trainer.save_model(str(tmp_path / "saved"))
    write_report(trainer, tmp_path / "report", before=None, after=None, notes=[f"Sampled at {LOGIN}, with {HUB}."])
    logging.getLogger("hf_rlx").warning("run with %s", args)
    assert len(list(tmp_path.rglob("*.safetensors"))) >= 3
    assert files_with_canary(tmp_path) == []
    out = capfd.readouterr()
    for text in (caplog.text, out.out, out.err):
        assert "canary" not in text.lower()
    assert "run with GRPOConfig" in caplog.text


def test_what_trackers_get_holds_no_secret(tmp_path):
    """TensorBoard and Weights & Biases write `to_json_string` and `to_sanitized_dict`; tracebacks show `repr`."""
    args = secretive(tmp_path)
    args.model_init_kwargs = {"token": "hf_CANARY_load", "revision": "main", "nested": [{"api_key": "CANARY_key"}]}
    for text in (repr(args), str(args), args.to_json_string(), str(args.to_sanitized_dict()), str(args.to_dict())):
        assert "canary" not in text.lower()
        assert "rollout.example:8000" in text
        assert "main" in text
    assert args.hub_token == "hf_CANARY_hub"
    assert args.model_init_kwargs["token"] == "hf_CANARY_load"
    assert args.vllm_server_base_url == LOGIN
    assert json.loads(args.to_json_string())["num_generations"] == 4


def test_a_card_holds_no_secret(tmp_path):
    write_card(RunFacts("grpo", notes=[LOGIN], samples=[{"prompt": HUB, "completion": "x"}]), tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "https://<LOGIN>@rollout.example:8000/v1" in text
    assert "<HUB_TOKEN>" in text
    assert files_with_canary(tmp_path) == []


# --- masking ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *[
            (n, True)
            for n in ("token", "hub_token", "WANDB_API_KEY", "password", "aws_secret_access_key", "my_secret")
        ],
        *[
            (n, False)
            for n in ("max_tokens_per_forward", "tokens", "num_generations", "key", "tokenizer", "passwords")
        ],
    ],
)
def test_names_of_secrets(name, secret):
    assert is_secret_name(name) is secret


def test_masked_keeps_everything_else():
    """Hub tokens are `hf_` and at least 20 letters or digits: function names of huggingface_hub are none."""
    assert mask_text("hf_hub_download hf_short xhf_" + "a" * 30) == "hf_hub_download hf_short xhf_" + "a" * 30
    assert mask_text("see http://a.b:80/c?d=e@f, mail me:you@here") == "see http://a.b:80/c?d=e@f, mail me:you@here"
    value = {"token": "abc", "x_token": None, "use_token": True, "a": [1, {"secret": "s"}], "d": torch.float16}
    shown = {"token": "<TOKEN>", "x_token": None, "use_token": True, "a": [1, {"secret": "<SECRET>"}]}
    assert masked(value) == {**shown, "d": torch.float16}
    assert public(value) == {"a": [1, {}], "d": "torch.float16"}
    assert public((1.5, None, Path("p"))) == [1.5, None, "p"]


# --- the search ------------------------------------------------------------------------------------------------------


def test_the_search_finds_every_kind(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "value-of-the-environment")
    monkeypatch.setenv("HF_TOKEN", "hf_live_token_with_underscores")
    (tmp_path / "a.txt").write_text(f"x {HUB} y")
    (tmp_path / "b.json").write_text(json.dumps({"url": LOGIN}))
    (tmp_path / "c.bin").write_bytes(b"\x00hf_live_token_with_underscores\x00value-of-the-environment")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d").write_text("given-secret hf_hub_download https://host/x:y@z")
    save_file({"w": torch.zeros(1)}, tmp_path / "e.safetensors", metadata={"by": HUB})
    found = [(f.file.name, f.what) for f in scan_for_secrets(tmp_path, ["given-secret", None, "short"])]
    assert found == [
        ("a.txt", "a Hub token"),
        ("b.json", "user and password in a URL"),
        ("c.bin", "the value of SOME_API_KEY"),
        ("c.bin", "the Hub token in use"),
        ("e.safetensors", "a Hub token"),
        ("sub/d".rpartition("/")[2], "a secret of the configuration"),
    ]
    assert not any("anary" in f.what for f in scan_for_secrets(tmp_path))


def test_a_secret_across_two_reads_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_rlx.secrets._CHUNK", 1000)
    for start in range(960, 1001, 5):
        (tmp_path / "x").write_bytes(b"." * start + HUB.encode() + b"." * 2000)
        assert [f.what for f in scan_for_secrets(tmp_path)] == ["a Hub token"]


def test_numbers_of_weights_are_not_read(tmp_path):
    save_file({"w": torch.frombuffer(bytearray(HUB.encode()), dtype=torch.uint8)}, tmp_path / "w.safetensors")
    assert scan_for_secrets(tmp_path) == []


def test_refusal_names_the_file_and_not_the_secret(tmp_path):
    refuse_secrets(tmp_path)
    (tmp_path / "notes.md").write_text(HUB)
    with pytest.raises(SecretFoundError, match=r"nothing was uploaded: .*notes\.md holds a Hub token") as caught:
        refuse_secrets(tmp_path)
    assert HUB not in str(caught.value)


# --- the push --------------------------------------------------------------------------------------------------------


class FakeHub:
    """Takes uploads in place of the Hub."""

    uploads: ClassVar[list[dict[str, Any]]] = []

    def list_repo_files(self, repo_id, **_):
        return []

    def upload_folder(self, folder_path, allow_patterns, **kwargs):
        every = [p.relative_to(folder_path).as_posix() for p in Path(folder_path).rglob("*") if p.is_file()]
        kwargs["files"] = sorted(filter_repo_objects(every, allow_patterns=allow_patterns))
        FakeHub.uploads.append({**kwargs, "in_background": False})
        return "commit"

    def run_as_future(self, send):
        done: Future = Future()
        done.set_result(send())
        FakeHub.uploads[-1]["in_background"] = True
        return done


@pytest.fixture
def hub(monkeypatch):
    """Uploads so far; no repository is made."""
    monkeypatch.setattr(uploads, "api", FakeHub)
    monkeypatch.setattr(uploads, "prepare", lambda repo_id, *_: repo_id)
    monkeypatch.setattr(FakeHub, "uploads", [])
    monkeypatch.setattr("hf_rlx.trainers.base.BaseTrainer.init_hf_repo", lambda self, **_: _named(self))
    return FakeHub.uploads


def _named(trainer):
    trainer.hub_model_id, trainer.push_in_progress = "me/model", None


MODEL = [
    "README.md",
    "adapter_config.json",
    "adapter_model.safetensors",
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
]


def test_a_push_carries_the_model_only(tmp_path, hub):
    trainer = scripted(secretive(tmp_path, log_completions=True))
    trainer.train()
    (tmp_path / "private.txt").write_text("mine")
    trainer.push_to_hub()
    assert hub[0]["files"] == MODEL
    assert (hub[0]["token"], hub[0]["repo_id"]) == ("hf_CANARY_hub", "me/model")
    trainer.push_to_hub(include=["completions/*"], license="mit", blocking=False)
    assert set(hub[1]["files"]) - set(MODEL) == {
        p.relative_to(tmp_path).as_posix() for p in tmp_path.glob("completions/*")
    }
    assert set(hub[1]["files"]) > set(MODEL)
    assert "license: mit" in (tmp_path / "README.md").read_text()


def test_a_push_with_a_secret_is_refused(tmp_path, hub):
    trainer = scripted(secretive(tmp_path))
    (tmp_path / "README.md").write_text("made with hf_CANARY_hub")
    with pytest.raises(SecretFoundError, match=r"README\.md holds a secret of the configuration"):
        trainer.push_to_hub()
    assert hub == []
    (tmp_path / "README.md").unlink()
    (tmp_path / "private.txt").write_text("hf_CANARY_hub")  # stays here, so it may
    trainer.push_to_hub()
    assert hub[0]["files"] == MODEL


@pytest.mark.parametrize(("strategy", "uploads"), [("end", 0), ("every_save", 2), ("checkpoint", 4)])
def test_pushes_while_training(tmp_path, hub, strategy, uploads):
    """Optimizer and random state go when the strategy asks for whole checkpoints."""
    trainer = scripted(secretive(tmp_path, push_to_hub=True, hub_strategy=strategy, max_steps=2))
    trainer.train()
    assert len(hub) == uploads
    if uploads:
        assert hub[0]["files"] == MODEL
        assert hub[0]["in_background"]
    if strategy == "checkpoint":
        assert hub[1]["path_in_repo"] == "last-checkpoint"
        assert any(name.startswith("optimizer") for name in hub[1]["files"])


def test_a_secret_stops_the_push_and_not_the_run(tmp_path, hub, caplog):
    (tmp_path / "README.md").write_text(LOGIN)
    trainer = scripted(secretive(tmp_path, push_to_hub=True, hub_strategy="every_save", max_steps=2))
    trainer.train()
    assert (trainer.state.global_step, hub) == (2, [])
    assert "step 1: nothing was uploaded" in caplog.text
    assert "README.md holds user and password in a URL" in caplog.text


def test_files_of_roles_go_too(tmp_path):
    """Role folders are those with a role.json; checkpoints, hidden and other folders stay."""
    for name in ("reward/role.json", "reward/head.safetensors", "reward/notes.txt", ".eval_results/a.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "reward/role.json").write_text('{"own_adapter": false, "head": true}')
    for name in ("checkpoint-1/model.safetensors", "other/head.safetensors", "optimizer.safetensors", "run.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "checkpoint-1/role.json").write_text('{"facts": {}}')  # of a stand-alone classifier: no role
    (tmp_path / "model-00001-of-00002.safetensors").write_text("")
    (tmp_path / "training.png").write_text("")
    assert [p.relative_to(tmp_path).as_posix() for p in files_of_model(tmp_path)] == [
        ".eval_results/a.yaml",
        "model-00001-of-00002.safetensors",
        "reward/head.safetensors",
        "reward/role.json",
        "training.png",
    ]


def test_the_card_can_be_made_alone(tmp_path):
    """`Trainer.create_model_card` of transformers asks PEFT for methods that the shared model has not."""
    trainer = scripted(config(tmp_path))
    for _ in range(2):
        trainer.create_model_card(license="apache-2.0")
    text = (tmp_path / "README.md").read_text()
    assert "license: apache-2.0" in text
    assert "trained with GRPO" in text.replace("Trained", "trained")


def test_the_token_file_is_read(tmp_path, monkeypatch):
    """The token of `hf auth login` counts as one in use."""
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "token-from-the-login-file")
    (tmp_path / "x").write_text("token-from-the-login-file")
    assert [f.what for f in scan_for_secrets(tmp_path)] == ["the Hub token in use"]


def test_configurations_print_their_class(tmp_path):
    assert repr(GRPOConfig(str(tmp_path), use_cpu=True)).startswith("GRPOConfig(\n")
