"""`hf-rlx merge`: what comes out says what the adapter said, and is whole or not there."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hf_rlx import SharedModel
from hf_rlx.cli import main
from hf_rlx.models.loading import load_tokenizer
from tests import tiny


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with an adapter that changes something, a head beside it, and the log-probs that it gives."""
    torch.manual_seed(0)
    model = SharedModel.from_pretrained("tiny", peft_config=tiny.lora())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    model.add_role("reward", tiny.lora())
    folder = tmp_path_factory.mktemp("trained")
    model.save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\ntags: [grpo]\n---\n# of the adapter\n")
    ids = torch.randint(model.config.vocab_size, (3, 17))
    return folder, ids, logps_of(model.causal_lm, ids), logps_of(plain_base(), ids)


def plain_base():
    return SharedModel.from_pretrained("tiny").causal_lm


def logps_of(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits.float().log_softmax(-1)


def test_merged_equals_adapter(trained, tmp_path, capsys):
    """1e-4 nats in float32, and far from the base; plain files that transformers loads by itself."""
    folder, ids, wanted, base = trained
    out = tmp_path / "merged"
    assert main(["merge", str(folder), str(out)]) == 0
    told = capsys.readouterr()
    assert told.out.strip() == str(out)
    assert told.err.startswith("hf-rlx merge: merging the policy; the roles left out: reward\n")
    merged = AutoModelForCausalLM.from_pretrained(out)
    assert merged.dtype == torch.float32
    assert (logps_of(merged, ids) - wanted).abs().max() < 1e-4
    assert (base - wanted).abs().max() > 0.1
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer_config.json", "README.md"} <= names
    assert not any("adapter" in name or name == "reward" for name in names)
    assert AutoTokenizer.from_pretrained(out).eos_token_id is not None
    card = (out / "README.md").read_text()
    for line in ("license: mit", "- merged", "- grpo", "library_name: transformers"):
        assert line in card
    assert str(folder) not in card
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_on_weights_that_two_share(tmp_path, target):
    """Merged, it changes one of embedding and head, as the adapter did; the other keeps what the base had."""
    torch.manual_seed(0)
    base = tiny.causal_lm("llama", tie_word_embeddings=True)
    base.save_pretrained(tmp_path / "base")
    load_tokenizer("tiny").save_pretrained(tmp_path / "base")
    peft_config = LoraConfig(r=2, target_modules=["q_proj", target], task_type="CAUSAL_LM")
    model = SharedModel.from_pretrained(tmp_path / "base", peft_config=peft_config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path / "adapter")
    ids = torch.randint(base.config.vocab_size, (2, 9))
    wanted = logps_of(model.causal_lm, ids)
    assert main(["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logps_of(merged, ids) - wanted).abs().max() < 1e-4
    assert (logps_of(base, ids) - wanted).abs().max() > 0.1


def test_sixteen_bits(trained, tmp_path):
    """Rounded once: each weight within a bfloat16 step (2^-8 of it) of the float32 one."""
    folder, *_ = trained
    assert main(["merge", str(folder), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    assert main(["merge", str(folder), str(tmp_path / "whole")]) == 0
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    assert half.dtype == torch.bfloat16
    for name, value in half.state_dict().items():
        torch.testing.assert_close(value, whole[name].bfloat16(), rtol=0, atol=0)


def renamed(trained, tmp_path, base):
    """A copy of the adapter whose settings name another base."""
    folder, *_ = trained
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    settings = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": base}))
    return copy


@pytest.mark.parametrize("base", ["/nowhere/at/all", None])
def test_a_base_that_is_not_found(trained, tmp_path, capsys, base):
    """The message names it, and --base brings it; nothing is left behind by the failure."""
    copy, out = renamed(trained, tmp_path, base), tmp_path / "merged"
    assert main(["merge", str(copy), str(out)]) == 1
    said = capsys.readouterr().err
    assert "--base" in said
    assert (base or "names no base model") in said
    assert list(tmp_path.iterdir()) == [copy]
    assert main(["merge", str(copy), str(out), "--base", "tiny"]) == 0
    _, ids, wanted, _ = trained
    assert (logps_of(AutoModelForCausalLM.from_pretrained(out), ids) - wanted).abs().max() < 1e-4


def test_what_is_refused(trained, tmp_path, capsys):
    folder, *_ = trained
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("kept")
    (tmp_path / "empty").mkdir()
    for words, told in (
        ([str(folder), str(tmp_path / "full")], "is there already and not empty"),
        ([str(tmp_path / "empty"), str(tmp_path / "out")], "holds no adapter"),
        (["./not/there/at/all", str(tmp_path / "out")], "does not exist"),
    ):
        assert main(["merge", *words]) == 1
        assert told in capsys.readouterr().err
    assert (tmp_path / "full" / "file").read_text() == "kept"


def test_a_folder_whose_policy_was_never_trained(tmp_path, capsys):
    """As `hf-rlx reward` leaves it: merging would give the base without a word. The role is named, and how it is used;
    the policy is merged where it is asked for by name."""
    model = SharedModel.from_pretrained("tiny", peft_config=tiny.lora())
    model.add_role("reward", tiny.lora())
    folder, out = tmp_path / "reward_model", tmp_path / "out"
    model.save_pretrained(folder)
    assert main(["merge", str(folder), str(out)]) == 1
    said = capsys.readouterr().err
    assert "was never trained, so merging it gives the base; what was trained is the role reward" in said
    assert f"hf-rlx ppo --model {folder} --reward role" in said
    assert "--role policy merges the policy" in said
    for role, told in (("reward", "so it is not merged"), ("critic", "no role 'critic'; ")):
        with pytest.raises(SystemExit, match="2"):
            main(["merge", str(folder), str(out), "--role", role])
        assert told in capsys.readouterr().err
    assert main(["merge", str(folder / "reward"), str(out)]) == 1
    assert f"The policy is merged with {folder} as folder" in capsys.readouterr().err
    assert not out.exists()
    assert main(["merge", str(folder), str(out), "--role", "policy"]) == 0
    assert (out / "model.safetensors").is_file()


def test_whole_or_not_there(trained, tmp_path, monkeypatch):
    folder, *_ = trained

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail)
    assert main(["merge", str(folder), str(tmp_path / "out")]) == 1
    assert list(tmp_path.iterdir()) == []
