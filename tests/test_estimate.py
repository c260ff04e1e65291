"""Memory from the settings alone: counted on the meta device, compared with what real forwards keep."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import LlamaConfig

from hf_rlx import DPOConfig, GRPOConfig, SharedModel
from hf_rlx.cli import main
from hf_rlx.estimate import GIB, capacity, estimate
from hf_rlx.models.blueprint import blueprint
from tests import tiny

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
)
# 7 billion weights in few layers, which is quick to build.
LARGE = LlamaConfig(num_hidden_layers=8, hidden_size=8192, intermediate_size=22016, vocab_size=32000)


def lora(r=16):
    return LoraConfig(r=r, target_modules="all-linear", task_type="CAUSAL_LM")


def test_sizes_of_a_model_by_hand():
    """SmolLM2-135M: 30 layers of 576 * (576 + 192 + 192 + 576) + 3 * 576 * 1536 = 3,538,944 in matrices and two norms
    of 576; the embedding 49152 * 576, which is the vocabulary matrix too, and a last norm.

    LoRA of rank r on (out, in) has r * (in + out): 16 * (1152 + 768 + 768 + 1152 + 3 * 2112) a layer.
    A token keeps, a layer: 4 * 576 around the norms, queries and output of attention 576 each, keys and values 192
    each, 4 * 1536 in the gated part, 7 * 16 between LoRA's matrices, two norms' factors, 9 log-normalisers; once
    2 * 64 of the positions. The last norm keeps what the first one does not, below which nothing trains. The short
    forward keeps 2 * 576 of the residual stream, attention's as before, and of the gated part 2 * 1536. All in 4
    bytes. Keys and values: 30 * 2 * 3 * 64.
    """
    sizes = blueprint(SMOLLM2, lora())
    assert sizes.matrices == 30 * 3_538_944
    assert sizes.weights == 30 * (3_538_944 + 2 * 576) + 49152 * 576 + 576
    assert sizes.adapter == sizes.trainable == 30 * 16 * 10176
    assert sizes.linear == sizes.matrices + 49152 * 576
    layer = 4 * 576 + 2 * 576 + 2 * 192 + 4 * 1536 + 7 * 16 + 2 + 9
    assert sizes.kept == 4 * (30 * layer + 2 * 64)
    assert sizes.lean == 4 * 30 * (2 * 576 + 2 * 576 + 2 * 192 + 9 + 2 * 1536 + 7 * 16)
    assert (sizes.cache, sizes.layers, sizes.packs, sizes.head_trains) == (30 * 2 * 3 * 64, 30, True, False)
    whole = blueprint(SMOLLM2)
    assert (whole.trainable, whole.adapter, whole.head_trains) == (sizes.weights, 0, True)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "qwen3"])
@pytest.mark.parametrize("adapter", [True, False])
def test_what_a_real_forward_keeps(family, adapter):
    """Within 15 % of what autograd keeps in a forward of 96 tokens with weights. A copy of the vocabulary's rows and
    the loss are not part of it."""
    peft = lora(4) if adapter else None
    if adapter:
        peft.fan_in_fan_out = family == "gpt2"
    model = SharedModel.build(tiny.causal_lm(family), peft)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage
        return tensor

    decoder = model.causal_lm.base_model
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = decoder(input_ids=torch.randint(64, (1, 96)), use_cache=False)
    real = sum(storage.nbytes() for storage in seen.values())
    assert kept.last_hidden_state.requires_grad
    counted = blueprint(tiny.config(family), peft).kept * 96
    assert counted == pytest.approx(real, rel=0.15)


def test_layers_that_do_not_run_without_values_are_counted_by_formula():
    assert blueprint(tiny.config("qwen3_moe")).kept > 0
    assert blueprint(tiny.config("mamba")).kept > 0


def test_parts_of_a_run_with_an_adapter():
    """Beside the base (float32) stand the adapter and Adam's two numbers a weight; the reference costs nothing. An
    update has 16 tokens of prompt and 4 answers of 8."""
    fields = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 8, "use_cpu": True}
    found = estimate(SMOLLM2, "grpo", fields, lora(), prompt_tokens=16)
    sizes, parts = found.sizes, found.parts
    assert parts["base (float32)"] == 4 * sizes.weights
    assert parts["adapters that train"] == parts["gradients"] == 4 * sizes.adapter
    assert parts["optimizer states"] == 8 * sizes.adapter
    assert not any("reference" in name for name in parts)
    assert found.run.group == 16 + 4 * 8
    assert parts["activations"] == sizes.lean * 2 * (16 + 4 * 8)  # both groups fit 768 tokens
    # 8 rows of up to 24 tokens: the buffers begin at 16 + 32.
    assert parts["key-value cache"] == 8 * 48 * sizes.cache * 4
    always = sum(part.bytes for part in found.entries if part.phase == "always")
    assert found.total == max(found.phases.values()) > always


def test_parts_of_a_run_on_all_weights():
    """All weights: a frozen copy as the reference, and gradients and states of every weight; without a KL no copy."""
    found = estimate(SMOLLM2, "grpo", {"use_cpu": True})
    weights = 4 * found.sizes.weights
    assert found.parts["reference (frozen model)"] == found.parts["gradients"] == weights
    assert found.parts["optimizer states"] == 2 * weights
    assert "reference (frozen model)" not in estimate(SMOLLM2, "grpo", {"beta": 0.0}).parts
    assert "optimizer states" not in estimate(SMOLLM2, "simpo", {"optim": "sgd"}).parts
    eight = estimate(SMOLLM2, "sft", {"optim": "adamw_bnb_8bit"}).parts["optimizer states"]
    assert eight == 2 * found.sizes.weights


def test_tokens_of_an_update():
    """A pair is its prompt and two answers, 100 + 2 * 100; 768 tokens hold two, 500 one, and without a limit all 8.
    Without packing every answer has its prompt."""

    def tokens(**fields):
        config = DPOConfig("x", use_cpu=True, max_length=200, **fields)
        return estimate(SMOLLM2, "dpo", config, lora(), prompt_tokens=100).run.update_tokens

    assert (tokens(), tokens(max_tokens_per_update=500), tokens(max_tokens_per_update=10**6)) == (600, 300, 2400)
    assert tokens(packing=False) == 400
    # What a configuration chose for a CPU does not bind a card.
    config = GRPOConfig("x", use_cpu=True, max_completion_length=100, per_device_train_batch_size=32)
    on_card = estimate(SMOLLM2, "grpo", config, lora(), prompt_tokens=100, device="t4").run
    assert (on_card.update_tokens, on_card.checkpointing) == (4 * (100 + 8 * 100), True)


def test_roles_beside_the_policy():
    """PPO: a head of 577 numbers, or an adapter that trains too; a frozen adapter for every further role."""
    plain = estimate(SMOLLM2, "ppo", None, lora()).parts
    own = estimate(SMOLLM2, "ppo", {"critic_adapter": True}, lora(), roles=1).parts
    adapter = plain["adapters that train"]
    assert plain["scalar heads"] == 4 * 577
    assert own["adapters that train"] == 2 * adapter
    assert own["optimizer states"] == 2 * plain["optimizer states"]
    assert own["adapters of other roles"] == adapter
    assert "vocabulary chunk" not in estimate(SMOLLM2, "reward", None, lora()).parts


def test_what_fits_a_t4():
    """7 billion weights: 26 GiB in float32; in 4-bit 3.1 GiB beside 2 GiB of vocabulary in float32."""
    fields = {"per_device_train_batch_size": 8, "max_completion_length": 256}
    plain = estimate(LARGE, "grpo", fields, lora(), device="t4")
    four_bit = estimate(LARGE, "grpo", fields, lora(), four_bit=True, device="t4")
    assert [plain.fits(), plain.fits("t4"), four_bit.fits("t4"), plain.fits("a100-80")] == [False, False, True, True]
    base = four_bit.parts["base (4-bit)"]
    assert base == pytest.approx(0.5166 * four_bit.sizes.matrices + 4 * 2 * 32000 * 8192, rel=0.001)
    best = {advice.change: advice.saving for advice in plain.advice}
    assert best["a 4-bit base (quantization_config=four_bit_config())"] == plain.total - four_bit.total
    assert [a.saving for a in plain.advice] == sorted((a.saving for a in plain.advice), reverse=True)
    assert str(plain.advice[0]).endswith(f"saves {plain.advice[0].saving / GIB:.2f} GiB")


@pytest.mark.parametrize(
    ("changed", "fields"),
    [
        ("gradient_checkpointing", {"gradient_checkpointing": True}),
        ("per_device_train_batch_size=4", {"per_device_train_batch_size": 4}),
        ("max_completion_length=256", {"max_completion_length": 256}),
    ],
)
def test_advice_saves_what_it_says(changed, fields):
    """Doing what is said gives the total that was promised."""
    common = {"max_completion_length": 512, "use_cpu": True}
    before = estimate(SMOLLM2, "grpo", common, lora())
    (advice,) = [advice for advice in before.advice if changed in advice.change]
    given = dataclasses.replace(before.run)  # the run itself stays
    more = {"gradient_accumulation_steps": 2} if "per_device_train_batch_size" in fields else {}
    after = estimate(SMOLLM2, "grpo", common | fields | more, lora())
    assert before.total - after.total == advice.saving > 0
    assert before.run == given


def test_all_weights_are_told_of_adapters():
    changes = [advice.change for advice in estimate(LARGE, "dpo", None, device="l4").advice]
    assert any("LoRA adapter in place" in change for change in changes)
    assert any("LoRA adapter on a 4-bit base" in change for change in changes)


def test_a_model_in_memory_or_in_a_folder(tmp_path):
    """Its adapter counts; a reference that starts trained is a copy of it."""
    model = SharedModel.build(tiny.causal_lm(), lora(4))
    assert estimate(model, "dpo").sizes.adapter == sum(
        p.numel() for name, p in model.named_parameters() if "lora" in name
    )
    folder = SharedModel.from_pretrained("tiny", peft_config=lora(4))
    folder.save_pretrained(tmp_path)
    found = estimate(tmp_path, "dpo")
    assert found.parts["reference (frozen adapter)"] == found.parts["adapters that train"]
    assert isinstance(folder.causal_lm, nn.Module)


def test_wrong_settings():
    with pytest.raises(ValueError, match="no algorithm 'gpro'"):
        estimate(SMOLLM2, "gpro")
    with pytest.raises(ValueError, match="no card 'h7'"):
        estimate(SMOLLM2, "grpo", device="h7")
    with pytest.raises(ValueError, match="give a peft_config"):
        estimate(SMOLLM2, "grpo", four_bit=True)
    with pytest.raises(ValueError, match="at least 1"):
        estimate(SMOLLM2, "grpo", prompt_tokens=0)
    assert capacity("T4") == int(14.5 * GIB)
    assert capacity("A100 80GB") > capacity("a100") > capacity("l4")
    assert capacity("cpu") > GIB


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table(capsys):
    words = ["estimate", "--config", str(ROOT / "examples/configs/grpo.yaml"), "--card", "t4", "--algorithm", "grpo"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    for words in ("grpo on", "activations", "key-value cache", "at the peak", "fits in the 14.5 of t4"):
        assert words in shown


def test_the_command_for_scripts(capsys, tmp_path):
    """Numbers as JSON; 1 where it does not fit; flags win over the file, which may name algorithm and card."""
    LARGE.save_pretrained(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {tmp_path}\nalgorithm: dpo\ncard: l4\nmax_length: 4096\nfp16: true\n")
    assert main(["estimate", "--config", str(file), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["card"], found["fits"]) == ("l4", False)
    assert found["total"] == max(found["phases"].values())
    assert found["advice"][0]["saving"] > 0
    assert main(["estimate", "--config", str(file), "--json", "--load-in-4bit", "--max-length", "512"]) == 0


def test_help_has_headings_for_every_algorithm(capsys):
    """A setting stands once, under no algorithm's name; a default that differs is nobody's in particular."""
    with pytest.raises(SystemExit):
        main(["estimate", "--help"])
    text = capsys.readouterr().out
    headings = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith((" ", "usage"))]
    assert headings == ["options", "what is asked", "model and adapter", "settings of the run"]
    assert text.count("  --beta ") == text.count("  --num-generations ") == 1
    assert "(default: the algorithm's)" in text


def test_the_command_refuses_what_the_algorithm_lacks(capsys):
    for words, told in (
        (["--algorithm", "dpo", "--num-generations", "4"], "--num-generations is no setting of dpo"),
        (["--algorithm", "gpro"], "did you mean 'grpo'?"),
        ([], "--model is missing"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["estimate", *words])
        assert stop.value.code == 2
        assert told in capsys.readouterr().err
    assert main(["estimate", "--model", "tiny", "--card", "t5"]) == 1
    assert "no card 't5'" in capsys.readouterr().err


def test_lines_of_a_dry_run(tmp_path):
    """The peak on this machine in one line; of a model that is too large also what to change."""
    from hf_rlx.cli.estimate import of_session
    from hf_rlx.cli.grpo import RECIPE
    from hf_rlx.cli.options import defaults
    from hf_rlx.cli.session import Session

    LlamaConfig(num_hidden_layers=4, hidden_size=32768, intermediate_size=131072).save_pretrained(tmp_path)
    for model, verdict in (("tiny", "; fits in"), (str(tmp_path), "does NOT fit")):
        options = defaults({"model": model, "dataset": "arithmetic"})
        session = Session(RECIPE, options, {"output_dir": str(tmp_path), "use_cpu": True})
        told = of_session(session).splitlines()
        assert all(": saves " in line for line in told[1:])
        assert (len(told) > 1) == (model != "tiny")
        assert verdict in told[0]
        assert "this machine" in told[0]
