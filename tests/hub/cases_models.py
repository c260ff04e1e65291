"""Models to the Hub and back: every role, every way to name them, and what is refused."""

from __future__ import annotations

import logging
import traceback

import pytest
import torch
from huggingface_hub import HfApi, constants
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hf_rlx.hub import HubError
from hf_rlx.models.classifier import from_causal_lm
from hf_rlx.models.hub import push_folder
from hf_rlx.models.shared import SharedModel
from hf_rlx.secrets import SecretFoundError
from tests.hub.server import READER, WRITER, Fault
from tests.hub.tools import ADAPTER, SCORED, TOKENIZER, all_roles, assert_same, base, contents, names, puts, tokenizer
from tests.tiny import randomise_lora
from tests.trainers.tools import lora, tiny_llama

ROLES = [
    "README.md",
    *ADAPTER,
    *TOKENIZER[:1],
    *("critic/head.safetensors", "critic/role.json"),
    *(f"{role}/{name}" for role in ("reward", "step_reward") for name in (*ADAPTER, "head.safetensors", "role.json")),
    *TOKENIZER[1:],
]


def test_all_roles_come_back(hub, tmp_path):
    """By Hub id as by folder as in memory; one commit; the policy alone by plain PEFT."""
    shared = all_roles(hub)
    shared.save_pretrained(tmp_path)
    done = shared.push_to_hub("me/roles", commit_message="All roles")
    assert names(hub, "me/roles") == sorted(ROLES)
    assert hub.repos["model", "me/roles"].messages == ["initial commit", "All roles"]
    assert done.commit_url.startswith(f"{hub.endpoint}/me/roles/commit/")
    loaded = SharedModel.from_pretrained("me/roles")
    assert_same(loaded, shared)
    assert_same(loaded, SharedModel.from_pretrained(tmp_path))
    assert loaded.reward_function().tokenizer.get_vocab() == tokenizer().get_vocab()
    assert loaded.reward_function().temperature == 1.5
    assert {name for name, _ in loaded.trainable_parameters()} == {name for name, _ in shared.trainable_parameters()}
    assert SharedModel.from_pretrained("me/roles", is_trainable=False).trainable_parameters() == []

    ids = torch.tensor([[1, 9, 20, 33]])
    alone = AutoPeftModelForCausalLM.from_pretrained("me/roles").eval()
    with shared.rollout_mode(), torch.no_grad():
        torch.testing.assert_close(alone(ids).logits, shared.model(ids).logits, atol=1e-6, rtol=1e-6)
    assert AutoTokenizer.from_pretrained("me/roles").get_vocab() == tokenizer().get_vocab()


def test_the_card_of_a_model(hub):
    """Metadata that the Hub reads; the snippets load; a card that is there stays, `card` replaces it."""
    shared = all_roles(hub)
    shared.push_to_hub("me/card")
    text = hub.files("me/card")["README.md"].decode()
    for line in ("base_model: me/base", "library_name: peft", "- hf_rlx", *(f"`{role}/`" for role in SCORED)):
        assert line in text
    assert "license" not in text
    found = {}
    for block in text.split("```python\n")[1:]:
        exec(block.split("```")[0], found)
    assert type(found["model"]).__name__ == "PeftModelForCausalLM"
    shared.push_to_hub("me/card", card=f"My own words. {WRITER}")
    assert hub.files("me/card")["README.md"] == b"My own words. <HUB_TOKEN>"
    randomise_lora(shared.model, seed=5)
    shared.push_to_hub("me/card")
    assert hub.files("me/card")["README.md"] == b"My own words. <HUB_TOKEN>"
    assert_same(SharedModel.from_pretrained("me/card"), shared)


def test_whole_models(hub):
    """All weights train: root as transformers writes it, the critic's head beside it."""
    shared = SharedModel(tiny_llama())
    shared.add_role("critic", zero_init=False)
    shared.push_to_hub("whole", tokenizer=tokenizer())
    model = ["config.json", "generation_config.json", "model.safetensors"]
    assert names(hub, "me/whole") == sorted(
        ["README.md", "critic/head.safetensors", "critic/role.json", *model, *TOKENIZER]
    )
    loaded = SharedModel.from_pretrained("me/whole")
    assert_same(loaded, shared)
    assert loaded.config.name_or_path == "me/whole"
    plain = AutoModelForCausalLM.from_pretrained("me/whole")
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), shared.causal_lm.parameters(), strict=True))


def test_stand_alone_reward_models(hub):
    """A sequence classifier, whole and as an adapter."""
    whole = SharedModel(from_causal_lm(tiny_llama()))
    whole.roles["reward"].facts = {"temperature": 2.0}
    whole.push_to_hub("me/classifier", tokenizer=tokenizer())
    assert "AutoModelForSequenceClassification" in hub.files("me/classifier")["README.md"].decode()
    loaded = SharedModel.from_pretrained("me/classifier")
    assert loaded.roles["reward"].facts == {"temperature": 2.0}
    plain = AutoModelForSequenceClassification.from_pretrained("me/classifier")
    assert torch.equal(plain.score.weight, whole.causal_lm.score.weight)
    assert torch.equal(loaded.causal_lm.score.weight, whole.causal_lm.score.weight)


def test_branches_pull_requests_and_folders(hub, tmp_path):
    shared = all_roles(hub)
    shared.push_to_hub("me/versions")
    first = SharedModel.from_pretrained("me/versions")
    randomise_lora(shared.model, seed=2)
    shared.push_to_hub("me/versions", revision="second")
    assert_same(SharedModel.from_pretrained("me/versions", revision="second"), shared)
    assert_same(SharedModel.from_pretrained("me/versions"), first)
    sha = hub.repos["model", "me/versions"].refs["second"]
    assert_same(SharedModel.from_pretrained("me/versions", revision=sha), shared)
    done = shared.push_to_hub("me/versions", create_pr=True)
    assert done.pr_url == f"{hub.endpoint}/me/versions/discussions/1"
    assert_same(SharedModel.from_pretrained("me/versions", revision="refs/pr/1"), shared)
    assert_same(SharedModel.from_pretrained("me/versions"), first)

    shared.save_pretrained(tmp_path / "inner")
    HfApi().upload_folder(repo_id="me/versions", folder_path=tmp_path)
    assert_same(SharedModel.from_pretrained("me/versions", subfolder="inner"), shared)
    assert_same(SharedModel.from_pretrained(tmp_path, subfolder="inner"), shared)
    for given, said in (({"subfolder": "none"}, "no folder none"), ({"revision": "none"}, "no such repository or")):
        with pytest.raises(HubError, match=said):
            SharedModel.from_pretrained("me/versions", **given)
    with pytest.raises(HubError, match=r"me/nothing \(there is no folder of that name here\).*no such repository"):
        SharedModel.from_pretrained("me/nothing")


def test_a_new_layout_replaces_the_old_one(hub):
    """What an earlier push left must not be loaded with this one: roles, adapters, parts of larger weights."""
    all_roles(hub).push_to_hub("me/layout")
    HfApi().upload_file(path_or_fileobj=b"mine", path_in_repo="notes.txt", repo_id="me/layout")
    HfApi().upload_file(path_or_fileobj=b"x", path_in_repo="model-00001-of-00002.safetensors", repo_id="me/layout")
    only = SharedModel.from_pretrained(base(hub), peft_config=lora())
    randomise_lora(only.model)
    only.push_to_hub("me/layout")
    assert names(hub, "me/layout") == sorted(["README.md", *ADAPTER, "notes.txt", *TOKENIZER])
    assert_same(SharedModel.from_pretrained("me/layout"), only)
    SharedModel(tiny_llama()).push_to_hub("me/layout", tokenizer=tokenizer())
    assert not set(ADAPTER) & set(names(hub, "me/layout"))


def test_private_stays_private(hub, monkeypatch):
    shared = SharedModel.from_pretrained(base(hub), peft_config=lora())
    shared.push_to_hub("me/secret", private=True)
    assert hub.repos["model", "me/secret"].private
    shared.push_to_hub("me/open")
    before = names(hub, "me/open")
    shared.add_role("reward", lora())
    with pytest.raises(HubError, match=r"me/open exists and is public, so private=True cannot hold"):
        shared.push_to_hub("me/open", private=True)
    assert names(hub, "me/open") == before
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="private and the token may not read it"):
        SharedModel.from_pretrained("me/secret")
    assert_same(SharedModel.from_pretrained("me/secret", token=READER), SharedModel.from_pretrained("me/open"))


def test_pickles_are_neither_loaded_nor_fetched(hub, tmp_path):
    """Whatever is pickled only is refused by its name in the listing."""
    (tmp_path / "plain").mkdir()
    tiny_llama().config.save_pretrained(tmp_path / "plain")
    (tmp_path / "plain/pytorch_model.bin").write_bytes(b"a pickle")
    shared = all_roles(hub)
    shared.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter/adapter_model.safetensors").rename(tmp_path / "adapter/adapter_model.bin")
    for name in ("plain", "adapter"):
        HfApi().create_repo(f"me/pickle-{name}")
        HfApi().upload_folder(repo_id=f"me/pickle-{name}", folder_path=tmp_path / name)
        for place in (f"me/pickle-{name}", tmp_path / name):
            with pytest.raises(ValueError, match=r"pickle only \((pytorch|adapter)_model\.bin\)"):
                SharedModel.from_pretrained(place)
        with pytest.raises(ValueError, match="pickle only"):
            push_folder(tmp_path / name, "me/never")
    assert not [line for line in hub.requests if line.startswith(("GET", "HEAD")) and line.endswith(".bin")]
    assert ("model", "me/never") not in hub.repos

    # Beside safetensors a pickle is ignored, also one of a role.
    shared.push_to_hub("me/both")
    for name in ("adapter_model.bin", "reward/adapter_model.bin", "reward/head.pt"):
        HfApi().upload_file(path_or_fileobj=b"a pickle", path_in_repo=name, repo_id="me/both")
    assert_same(SharedModel.from_pretrained("me/both"), shared)
    assert not [line for line in hub.requests if "GET" in line and line.endswith((".bin", ".pt"))]


def test_without_a_connection_the_cache_serves(hub, monkeypatch):
    """And a download that broke off is not taken for a model without roles."""
    shared = all_roles(hub)
    shared.push_to_hub("me/cached")
    loaded = SharedModel.from_pretrained("me/cached")
    shared.push_to_hub("me/broken")
    hub.faults = [Fault("resolve", "503", 99, after=12)]
    with pytest.raises(OSError, match=r"loading me/broken .* failed"):
        SharedModel.from_pretrained("me/broken")
    hub.faults = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert_same(SharedModel.from_pretrained("me/cached"), loaded)
    with pytest.raises(OSError, match=r"lacks|connect to"):  # by what had arrived
        SharedModel.from_pretrained("me/broken")
    monkeypatch.undo()
    assert_same(SharedModel.from_pretrained("me/broken"), shared)


# --- interruptions ---------------------------------------------------------------------------------------------------


def test_an_upload_that_breaks_off_resumes(hub, tmp_path):
    """The connection drops in the middle of the third large file: nothing is committed; the second call sends what is
    missing and no more."""
    shared = all_roles(hub, seed=77)
    shared.save_pretrained(tmp_path)
    before = contents(tmp_path)
    start = puts(hub)
    hub.faults = [Fault("put", "drop", 999, after=2)]
    with pytest.raises(HubError) as caught:
        push_folder(tmp_path, "me/dropped")
    text = str(caught.value)
    assert f"pushing {tmp_path} to me/dropped failed" in text
    assert "Nothing was changed in the repository" in text
    assert "Push once more" in text
    assert names(hub, "me/dropped") == []
    assert contents(tmp_path) == before
    arrived = len([line for line in before if line.endswith(".safetensors") and _sha(before[line]) in hub.lfs])
    assert arrived >= 2
    hub.faults, tried = [], puts(hub)
    assert tried - start > 6  # each was tried again before giving up
    push_folder(tmp_path, "me/dropped")
    assert puts(hub) - tried == 6 - arrived  # of six
    assert_same(SharedModel.from_pretrained("me/dropped"), shared)


def _sha(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def test_a_commit_that_fails_changes_nothing(hub):
    """Whatever the server says: the message names the repository and the next step; a second call sends no file."""
    shared = all_roles(hub)
    shared.push_to_hub("me/atomic")
    before = hub.files("me/atomic")
    for how in ("500", "drop", "503"):
        randomise_lora(shared.model, seed=ord(how[0]))
        hub.faults = [Fault("commit", how, 99)]
        with pytest.raises(HubError, match=r"pushing the model to me/atomic failed.*Push once more"):
            shared.push_to_hub("me/atomic")
        assert hub.files("me/atomic") == before
        hub.faults, sent = [], puts(hub)
        shared.push_to_hub("me/atomic")
        assert puts(hub) == sent
        before = hub.files("me/atomic")
    assert_same(SharedModel.from_pretrained("me/atomic"), shared)


def test_one_dropped_connection_is_not_even_noticed(hub):
    hub.faults = [Fault("put", "drop", 1), Fault("batch", "503", 1)]
    all_roles(hub).push_to_hub("me/robust")
    assert "adapter_model.safetensors" in names(hub, "me/robust")


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "said"),
    [
        ("hf_" + "Unknown0123456789abcdefg", "does not know the token"),
        (READER, "needs write access"),
        ("", "nobody is logged in to the Hub"),
    ],
    ids=["unknown", "may-read-only", "none"],  # not the tokens
)
def test_who_may_not_push_is_told_why(hub, monkeypatch, token, said):
    """And the token stands in no message and no traceback, whether it comes from the environment or as an argument."""
    shared = SharedModel.from_pretrained(base(hub), peft_config=lora())
    if token:
        with pytest.raises(HubError, match=said) as caught:
            shared.push_to_hub("me/refused", token=token)
        assert token not in "".join(traceback.format_exception(caught.value))
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HubError, match=said) as caught:
        shared.push_to_hub("refused")
    assert not token or token not in "".join(traceback.format_exception(caught.value))
    assert ("model", "me/refused") not in hub.repos


def test_a_server_that_repeats_the_token(hub):
    """Its words are shown without the token, and so is the traceback."""
    shared = SharedModel.from_pretrained(base(hub), peft_config=lora())
    hub.faults = [Fault("commit", "echo", 9)]
    with pytest.raises(HubError, match="Bearer <HUB_TOKEN>") as caught:
        shared.push_to_hub("me/echo")
    assert WRITER not in "".join(traceback.format_exception(caught.value))


def test_a_push_without_a_connection_is_told(hub, monkeypatch):
    """The first question is whether there is a card to keep: where it fails, the upload tells why."""

    class TransportError(Exception):  # as the HTTP library of the client calls it
        pass

    shared = SharedModel.from_pretrained(base(hub), peft_config=lora())

    def unplugged(*_, **__):
        raise TransportError("Connection refused")

    for name in ("file_exists", "create_repo"):
        monkeypatch.setattr(HfApi, name, unplugged)
    with pytest.raises(HubError, match=r"pushing the model to me/away failed: TransportError: .*Push once more"):
        shared.push_to_hub("me/away")


def test_another_name_is_refused(hub):
    with pytest.raises(HubError, match="the name has another owner"):
        SharedModel.from_pretrained(base(hub), peft_config=lora()).push_to_hub("others/model")


def test_a_folder_with_a_token_is_not_sent(hub, tmp_path):
    """Searched before anything goes out, the repository's name included."""
    shared = all_roles(hub)
    shared.save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text(f"made with {WRITER}")
    before = len(hub.requests)
    with pytest.raises(SecretFoundError, match=r"README\.md holds") as caught:
        push_folder(tmp_path, "me/leak")
    assert WRITER not in str(caught.value)
    assert len(hub.requests) == before
    (tmp_path / "README.md").unlink()  # nor may the test itself leave it behind


def test_xet_without_a_server_for_it(hub, monkeypatch):
    """Its client would try for more than a minute, silently."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    with pytest.raises(HubError, match=r"has no xet.*set HF_HUB_DISABLE_XET=1 before Python starts"):
        SharedModel.from_pretrained(base(hub), peft_config=lora()).push_to_hub("me/xet")


def test_a_base_on_this_machine_only_is_said(hub, caplog, tmp_path):
    """Nobody else could load the adapter."""
    with caplog.at_level(logging.WARNING):
        SharedModel.from_pretrained("tiny", peft_config=lora()).push_to_hub("me/local-base")
    assert "names the folder" in caplog.text
    assert "push the base too" in caplog.text
    with pytest.raises(FileNotFoundError, match="holds no model"):
        push_folder(tmp_path, "me/empty")
