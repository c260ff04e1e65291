"""Saved roles come back in another process: the policy by plain PEFT and transformers, the rest by SharedModel."""

import json
import subprocess
import sys

import pytest
import torch
from peft import VeraConfig
from transformers import AutoModelForCausalLM

from hf_rlx.models.plan import packing_obstacle
from hf_rlx.models.roles import CRITIC, POLICY, REWARD
from hf_rlx.models.shared import SharedModel
from hf_rlx.models.storage import has_adapter, load_into
from hf_rlx.types import Group
from tests import tiny

GROUPS = [Group.from_lists([5, 6], [[7, 8, 9, 2], [10]]), Group.from_lists([11], [[12, 13]])]

_READER = """
import json, sys, torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM
from hf_rlx.models.shared import SharedModel
from hf_rlx.types import Group

folder, kind = sys.argv[1:]
groups = [Group.from_lists([5, 6], [[7, 8, 9, 2], [10]]), Group.from_lists([11], [[12, 13]])]
model = SharedModel.from_pretrained(folder)
plain = (AutoPeftModelForCausalLM if kind == "adapter" else AutoModelForCausalLM).from_pretrained(folder).eval()
with torch.no_grad():
    print(json.dumps({
        "logps": model(groups).per_token_logps.tolist(),
        "scores": model.score(groups).tolist(),
        "values": model(groups, want_values=True).values.tolist(),
        "logits": plain(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].tolist(),
        "trainable": len(model.trainable_parameters()),
    }))
"""


def build(tmp_path, kind):
    """A policy, a reward role (with its own adapter where adapters are used) and a critic, all looking trained."""
    base = tmp_path / "base"
    tiny.causal_lm().save_pretrained(base)
    lora = tiny.lora() if kind == "adapter" else None
    model = SharedModel.from_pretrained(base, peft_config=lora)
    model.add_role(REWARD, lora)
    model.add_role(CRITIC, zero_init=False)
    tiny.randomise_lora(model)
    if kind == "weights":
        with torch.no_grad():
            for parameter in model.causal_lm.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("kind", ["adapter", "weights"])
def test_round_trip_into_another_process(tmp_path, kind):
    model = build(tmp_path, kind)
    model.prepare_reference()
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    adapter = {"adapter_config.json", "adapter_model.safetensors"}
    if kind == "adapter":
        assert files == adapter | {f"reward/{name}" for name in (*adapter, "head.safetensors", "role.json")} | {
            "critic/head.safetensors",
            "critic/role.json",
        }
    else:
        assert {"config.json", "model.safetensors", "reward/head.safetensors", "critic/head.safetensors"} <= files
        assert not any("adapter" in name or "reference" in name for name in files)
    result = subprocess.run(
        [sys.executable, "-c", _READER, str(folder), kind], capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr[-2000:]
    other = json.loads(result.stdout.splitlines()[-1])
    with torch.no_grad():
        expected = {
            "logps": model(GROUPS).per_token_logps,
            "scores": model.score(GROUPS),
            "values": model(GROUPS, want_values=True).values,
            "logits": model.causal_lm(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1],
        }
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor(other[name]), value, atol=1e-6, rtol=1e-6, msg=name)
    assert other["trainable"] == len(model.trainable_parameters())


def test_a_loaded_adapter_may_be_frozen(tmp_path):
    model = build(tmp_path, "adapter")
    model.save_pretrained(tmp_path / "saved")
    frozen = SharedModel.from_pretrained(tmp_path / "saved", is_trainable=False)
    assert frozen.trainable_parameters(POLICY) == frozen.trainable_parameters(REWARD) == []
    torch.testing.assert_close(frozen.score(GROUPS), model.score(GROUPS))


def test_load_into_a_running_model(tmp_path):
    """What resuming and `load_best_model_at_end` do: other weights in, the same numbers out, same parameters."""
    for kind in ("adapter", "weights"):
        model = build(tmp_path / kind, kind)
        model.save_pretrained(tmp_path / kind / "saved")
        scores, logps = model.score(GROUPS), model(GROUPS).per_token_logps.detach()
        objects = [id(p) for p in model.parameters()]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name or "heads" in name or kind == "weights":
                    parameter.zero_()
        assert (model.score(GROUPS) - scores).abs().max() > 1e-3
        load_into(model, tmp_path / kind / "saved")
        torch.testing.assert_close(model.score(GROUPS), scores)
        torch.testing.assert_close(model(GROUPS).per_token_logps.detach(), logps)
        assert [id(p) for p in model.parameters()] == objects  # an optimizer would still hold them


def test_a_users_adapter_name_is_saved_at_the_root(tmp_path):
    from peft import get_peft_model

    tiny.causal_lm().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = SharedModel(get_peft_model(base, tiny.lora(), adapter_name="mine"))
    tiny.randomise_lora(model)
    model.save_pretrained(tmp_path / "saved")
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    loaded = SharedModel.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        torch.testing.assert_close(loaded(GROUPS).per_token_logps, model(GROUPS).per_token_logps)


def test_saving_again_replaces_and_leaves_no_rest(tmp_path):
    model = build(tmp_path, "adapter")
    model.save_pretrained(tmp_path / "saved")
    first = (tmp_path / "saved" / "adapter_model.safetensors").read_bytes()
    tiny.randomise_lora(model, seed=9)
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "adapter_model.safetensors").read_bytes() != first
    assert not [p for p in (tmp_path / "saved").iterdir() if p.name.startswith(".")]


def test_a_failed_save_keeps_the_old_folder(tmp_path, monkeypatch):
    """Everything is written beside the folder first: an error in the middle changes no file of it."""
    model = build(tmp_path, "adapter")
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    tiny.randomise_lora(model, seed=9)

    def full_disk(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("hf_rlx.models.storage.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(folder)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_a_base_without_a_name_is_asked_for(tmp_path):
    model = SharedModel.build(tiny.causal_lm(), tiny.lora())
    tiny.randomise_lora(model)
    model.save_pretrained(tmp_path)
    assert has_adapter(tmp_path)
    with pytest.raises(ValueError, match="names no base model"):
        SharedModel.from_pretrained(tmp_path)
    loaded = SharedModel.from_pretrained(tmp_path, base=tiny.causal_lm())
    with torch.no_grad():
        torch.testing.assert_close(loaded(GROUPS).per_token_logps, model(GROUPS).per_token_logps)


def test_load_into_names_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no adapter"):
        load_into(SharedModel.build(tiny.causal_lm(), tiny.lora()), tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no model"):
        load_into(SharedModel.build(tiny.causal_lm()), tmp_path)


def test_an_adapter_whose_file_lacks_buffers(tmp_path):
    """VeRA keeps its random projections once and shows them to every layer as buffers, which stand in no file."""
    config = VeraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = SharedModel.build(tiny.causal_lm(), config)
    with torch.no_grad():
        for _, parameter in model.trainable_parameters():
            parameter.add_(0.3)
        expected = model(GROUPS).per_token_logps
        model.save_pretrained(tmp_path)
        loaded = SharedModel.build(tiny.causal_lm(), config)
        assert not torch.equal(loaded(GROUPS).per_token_logps, expected)
        loaded.load_adapter_weights(POLICY, tmp_path)
        torch.testing.assert_close(loaded(GROUPS).per_token_logps, expected, rtol=0, atol=0)


def test_an_adapter_of_another_shape_is_told(tmp_path):
    """Saved with r = 4; a run with r = 8, one of another width, and one that trains all weights."""
    SharedModel.build(tiny.causal_lm(), tiny.lora(4)).save_pretrained(tmp_path)
    for other in (
        SharedModel.build(tiny.causal_lm(), tiny.lora(8)),
        SharedModel.build(tiny.causal_lm(hidden_size=64), tiny.lora(4)),
    ):
        with pytest.raises(
            ValueError, match=r"does not fit the adapter 'policy': size mismatch for .*; give the same peft_config$"
        ):
            load_into(other, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds an adapter and no whole model.*give the peft_config"):
        load_into(SharedModel.build(tiny.causal_lm()), tmp_path)


def test_packing_obstacles():
    assert packing_obstacle(tiny.causal_lm("llama")) is None
    assert packing_obstacle(tiny.causal_lm("falcon_h1")) == "recurrent state"
    assert packing_obstacle(tiny.causal_lm("gemma2")) == "soft-capped attention scores"
    mixed = tiny.causal_lm("llama")
    mixed.config.layer_types = ["full_attention", "chunked_attention"]
    assert packing_obstacle(mixed) == "layers of type chunked_attention"
    mixed.config.layer_types, mixed.config.alibi = None, True
    assert packing_obstacle(mixed) == "ALiBi positions"
