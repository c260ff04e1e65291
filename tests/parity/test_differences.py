"""The table `DIFFERS_FROM_TRL`, and the proof of each of its entries: what TRL does, and what we do, on one batch.

The batch (see `conftest.py`) has two groups of three completions with 2, 3, 4 and 4, 2, 2 tokens, of which one in each
group was cut; K = 3, so a group's sample standard deviation of [1, 0, 0.5] is 0.5 and its population's is 0.408248.
"""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainingArguments

from hf_rlx import (
    DIFFERS_FROM_TRL,
    GRPOConfig,
    GRPOTrainer,
    SFTConfig,
    four_bit_config,
    load_causal_lm,
    load_tokenizer,
)
from hf_rlx.data.tokenize import encode_prompt
from hf_rlx.models.loading import mixed_precision_for
from hf_rlx.rollout.scoring import RewardScorer
from hf_rlx.trainers.grpo import AGGREGATION
from hf_rlx.trainers.metrics import MetricStore
from hf_rlx.trainers.observe import record_rewards

trl = pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")

ROOT = Path(__file__).resolve().parents[2]
NAN = float("nan")
SPLIT = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}


def lengths(completions, **_):
    """Characters of each completion, as a reward."""
    return [float(len(text)) for text in completions]


def assert_scaled(ours, theirs, factor):
    """Every gradient of ours is `factor` times TRL's, and they are not 0."""
    assert max(g.abs().max() for g in theirs.grads.values()) > 0.05
    for name, grad in theirs.grads.items():
        torch.testing.assert_close(ours.grads[name], factor * grad, atol=2e-6, rtol=0)


# --- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", DIFFERS_FROM_TRL)
def test_every_entry_names_a_reason_and_a_test_that_exists(key):
    difference = DIFFERS_FROM_TRL[key]
    assert difference.reason
    assert difference.trl != difference.ours
    file, _, name = difference.test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, difference.test


def test_every_proof_belongs_to_an_entry():
    """No proof in this file is forgotten in the table."""
    proofs = {difference.test.rpartition("::")[2] for difference in DIFFERS_FROM_TRL.values()}
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    tests = {n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}
    about_the_table = {name for name in tests if name.startswith("test_every_")}
    assert tests - about_the_table <= proofs, tests - about_the_table - proofs


def test_every_default_in_the_table_is_a_field():
    for key in DIFFERS_FROM_TRL:
        owner, dot, field = key.partition(".")
        if dot:
            owners = {cls.__name__: cls for config in (GRPOConfig, SFTConfig) for cls in config.__mro__}
            assert field in owners[owner].__dataclass_fields__


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_advantages_use_the_population_std(sides):
    """[1, 0, 0.5]: 0.5 / 0.408248 = 1.224745 with the population's, 0.5 / (0.5 + 1e-4) = 0.9998 with the sample's."""
    theirs = sides.trl_inputs(sides.trl_trainer())["advantages"]
    trainer, rollouts = sides.our_trainer(preset="grpo"), sides.rollouts()
    trainer.compute_advantages(rollouts)
    torch.testing.assert_close(rollouts[0].advantages, torch.tensor([1.224742, -1.224742, 0.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(theirs[:3], torch.tensor([0.9998, -0.9998, 0.0]), atol=1e-6, rtol=0)


def test_flat_groups_leave_loss_and_denominators(sides):
    """One of two groups is flat: the other's mean over completions is over 3, not over 6."""
    rewards = [[0.7, 0.7, 0.7], [0.25, 0.75, 2.0]]
    theirs = sides.run_trl(rewards, loss_type="grpo")
    assert_scaled(sides.run_ours(rewards, loss_type="grpo", keep_zero_variance=False), theirs, 2.0)
    assert_scaled(sides.run_ours(rewards, loss_type="grpo", keep_zero_variance=True), theirs, 1.0)


def test_unscored_completions_leave_the_denominators(sides):
    """5 of 6 completions have a reward."""
    rewards = [[1.0, NAN, 0.0], [0.25, 0.75, 2.0]]
    theirs = sides.run_trl(rewards, loss_type="grpo")
    assert_scaled(sides.run_ours(rewards, loss_type="grpo"), theirs, 6 / 5)


def test_truncated_completions_leave_the_denominators(sides):
    """4 of 6 completions ended by themselves; the cut ones stay in their group's baseline on both sides."""
    fields = {"loss_type": "grpo", "mask_truncated_completions": True}
    assert_scaled(sides.run_ours(**fields), sides.run_trl(**fields), 6 / 4)


def test_nan_under_the_mask_is_harmless(sides, shift):
    lengths = torch.tensor([2, 3, 4, 4, 2, 2])
    padding = torch.arange(4)[None] >= lengths[:, None]
    dirty = shift.masked_fill(padding, NAN)
    assert torch.tensor(sides.run_trl(shift=dirty).loss).isnan()
    clean, ours = sides.run_ours(shift=shift), sides.run_ours(shift=dirty)
    assert ours.losses == clean.losses
    assert all(torch.equal(ours.grads[name], grad) for name, grad in clean.grads.items())


def test_a_log_ratio_of_100_nats_stays_finite(sides):
    """Row 1 has a negative advantage, whose ratio no clip bounds from above: e^100 overflows float32, e^20 does not.
    The clamp's gradient is 0 there, so the gradients are those of the other tokens alone."""
    far = torch.zeros(6, 4)
    far[1, 0] = -100.0
    assert torch.tensor(sides.run_trl(shift=far).loss).isinf()
    ours = sides.run_ours(shift=far)
    assert torch.tensor(ours.loss).isfinite()
    assert max(g.abs().max() for g in ours.grads.values()) < 10


def test_a_reference_100_nats_away_stays_finite(sides):
    """Plain k3 has gradient 0 beyond the clamp; with the ratio on it, e^20 times the ratio's gradient is left."""
    far = torch.zeros(6, 4)
    far[1, 0] = 100.0
    assert torch.tensor(sides.run_trl(ref_shift=far, beta=0.1).loss).isinf()
    plain, weighted = (sides.run_ours(ref_shift=far, beta=0.1, use_bias_correction_kl=on) for on in (False, True))
    assert max(g.abs().max() for g in plain.grads.values()) < 10
    assert torch.tensor([plain.loss, weighted.loss]).isfinite().all()
    assert all(g.isfinite().all() for g in weighted.grads.values())


def test_bnpo_does_not_depend_on_the_split(sides):
    """9 and 8 tokens in two micro-batches: the mean of two means is not the mean over 17."""
    whole, split = (sides.run_ours(loss_type="bnpo", **fields) for fields in ({}, SPLIT))
    assert split.loss == pytest.approx(whole.loss, abs=1e-6)
    assert_scaled(split, sides.run_trl(loss_type="dapo", **SPLIT), 1.0)
    theirs = [sides.run_trl(loss_type="bnpo", **fields).loss for fields in ({}, SPLIT)]
    assert theirs[0] == pytest.approx(whole.loss, abs=1e-6)
    assert abs(theirs[0] - theirs[1]) > 1e-4


def test_dapo_divides_by_the_step_s_own_tokens(sides):
    """Two optimizer steps in a window, of 9 and 8 tokens: ours divides by 9 and 8, TRL twice by 17 / 2."""
    fields = {"loss_type": "dapo", "per_device_train_batch_size": 3, "steps_per_generation": 2}
    ours, theirs = sides.run_ours(**fields), sides.run_trl(**fields)
    sums = [loss * tokens for loss, tokens in zip(ours.losses, (9, 8), strict=True)]
    assert sums == pytest.approx([loss * 8.5 for loss in theirs.losses], abs=1e-5)
    assert abs(sums[0]) > 0.1


def test_the_entropy_bonus_is_averaged_as_the_loss(sides):
    """Ours is the same however the step is split; TRL's is a mean of micro-batch means."""
    fields = {"loss_type": "dapo", "entropy_coef": 1.0}
    ours = [sides.run_ours(**fields, **split).loss for split in ({}, SPLIT)]
    theirs = [sides.run_trl(**fields, **split).loss for split in ({}, SPLIT)]
    assert ours[0] == pytest.approx(ours[1], abs=1e-6)
    assert ours[0] == pytest.approx(theirs[0], abs=1e-6)
    assert abs(theirs[0] - theirs[1]) > 1e-4
    # Completion means weigh the bonus like the loss, a token mean does not.
    by_row = [run(loss_type="grpo", entropy_coef=1.0).loss for run in (sides.run_ours, sides.run_trl)]
    assert abs(by_row[0] - by_row[1]) > 1e-4


def test_attention_dropout_is_switched_off(sides):
    def attention(model):
        return model.model.layers[0].self_attn.attention_dropout

    made = [sides.model(), sides.model()]
    for model in made:
        model.config.attention_dropout = model.model.layers[0].self_attn.attention_dropout = 0.25
    ours = sides.our_trainer(model=made[0], disable_dropout=True)
    args = trl.GRPOConfig(str(sides.folder), use_cpu=True, bf16=False, disable_dropout=True)
    rows = Dataset.from_dict({"prompt": ["1+1="] * 8})
    theirs = trl.GRPOTrainer(made[1], len, args, train_dataset=rows, processing_class=sides.tokenizer)
    assert attention(ours.shared.causal_lm) == 0.0
    assert attention(theirs.model) == 0.25


def test_sequence_ratios_need_completion_means():
    assert trl.GRPOConfig("x", bf16=False, importance_sampling_level="sequence", loss_type="dapo").beta == 0.0
    assert GRPOConfig("x", importance_sampling_level="sequence").loss_type == "grpo"
    for loss_type in set(AGGREGATION) - {"grpo"}:
        with pytest.raises(ValueError, match="weigh completions by their length"):
            GRPOConfig("x", importance_sampling_level="sequence", loss_type=loss_type)


def test_the_logged_kl_is_plain_k3(sides, shift):
    ours, theirs = (
        [run(shift=shift, beta=0.1, use_bias_correction_kl=on).metrics["kl"] for on in (True, False)]
        for run in (sides.run_ours, sides.run_trl)
    )
    assert ours[0] == ours[1] == pytest.approx(theirs[1], abs=1e-6)
    assert abs(theirs[0] - theirs[1]) > 1e-4


def test_reward_std_is_within_a_group(sides):
    """Groups [0, 1, 2] and [10, 11, 12]: sample std 1 within each, 5.549775 over all six."""
    rewards = [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]
    trainer = sides.trl_trainer(rewards)
    sides.trl_inputs(trainer)
    store = MetricStore()
    record_rewards(store, sides.rollouts(rewards), ["reward_0"], {})
    ours, theirs = store.flush(), {k: v[0] for k, v in trainer._metrics["train"].items()}
    assert ours["reward_std"] == pytest.approx(1.0)
    assert theirs["reward_std"] == pytest.approx(5.549775)
    for name in ("reward", "rewards/reward_0/mean", "rewards/reward_0/std", "frac_reward_zero_std"):
        assert ours[name] == pytest.approx(theirs[name]), name


def test_special_tokens_in_messages_are_text():
    """The bundled template opens with <bos>; a user who writes one gets a second one in TRL, letters in ours."""
    tokenizer = load_tokenizer("tiny")
    messages = [{"role": "user", "content": "<bos>1+1="}]
    theirs = tokenizer.apply_chat_template([messages], add_generation_prompt=True, tokenize=True, return_dict=True)
    assert theirs["input_ids"][0].count(tokenizer.bos_token_id) == 2
    ours = encode_prompt(messages, tokenizer)
    assert ours.ids.count(tokenizer.bos_token_id) == 1
    assert ours.neutralised == 1


# --- the loop --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")])
def test_precision_is_chosen_from_the_device(monkeypatch, capability, expected):
    """A T4 (7.5) says that it supports bfloat16, which it emulates."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    assert mixed_precision_for(torch.device("cuda")) == expected
    ours, theirs = GRPOConfig("x", use_cpu=True), trl.GRPOConfig("x", use_cpu=True)
    assert (ours.bf16, ours.fp16) == (False, False)
    assert theirs.bf16 is True


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_adapters_on_a_4_bit_base_stay_float32(tmp_path):
    pytest.importorskip("bitsandbytes")
    tokenizer, rows = load_tokenizer("tiny"), Dataset.from_dict({"prompt": ["1+1="] * 8})
    lora = {"target_modules": "all-linear", "r": 2}
    base = load_causal_lm("tiny", four_bit_config())
    theirs = trl.GRPOTrainer(
        base,
        lengths,
        trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=LoraConfig(**lora),
    )
    assert {p.dtype for p in theirs.model.parameters() if p.requires_grad} == {torch.bfloat16}
    ours = GRPOTrainer(
        "tiny",
        lengths,
        GRPOConfig(str(tmp_path), use_cpu=True),
        train_dataset=rows,
        quantization_config=four_bit_config(),
        peft_config=LoraConfig(**lora),
    )
    assert {p.dtype for p in ours.shared.parameters() if p.requires_grad} == {torch.float32}


def test_evaluation_is_one_greedy_completion(sides):
    asked = []

    class Recorder:
        def __init__(self, inner):
            self.inner = inner

        def generate(self, prompt_ids, num_generations, params, on_group=None, on_step=None):
            asked.append((num_generations, params.temperature))
            return self.inner.generate(prompt_ids, num_generations, params, on_group, on_step)

    rows = Dataset.from_dict({"prompt": sides.prompts})
    for fields in ({}, {"num_generations_eval": 4}, {"eval_temperature": 0.3}):
        trainer = sides.our_trainer(temperature=0.9, **fields)
        trainer.sampler = Recorder(trainer.sampler)
        trainer.evaluate(rows)
    assert asked == [(1, 0.0), (4, 0.9), (1, 0.3)]


def test_each_process_holds_whole_groups(monkeypatch):
    """Two processes with four completions each: one group of eight for TRL, half a group each for us."""
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: 2))
    fields = {"per_device_train_batch_size": 4, "num_generations": 8, "use_cpu": True}
    assert trl.GRPOConfig("x", bf16=False, **fields).generation_batch_size == 8
    with pytest.raises(ValueError, match="groups stay whole on one process"):
        GRPOConfig("x", **fields)
    assert GRPOConfig("x", **fields | {"gradient_accumulation_steps": 2}).prompts_per_window == 1


def test_groups_stay_whole_in_micro_batches(sides):
    trainer, rollouts = sides.our_trainer(**SPLIT), sides.rollouts()
    trainer.compute_advantages(rollouts)
    assert [[g.num_responses for g in b.groups] for b in trainer.minibatches(rollouts)] == [[3], [3]]


def test_a_window_is_at_least_one_optimizer_step():
    fields = {"gradient_accumulation_steps": 4, "steps_per_generation": 1, "use_cpu": True}
    assert trl.GRPOConfig("x", bf16=False, **fields).steps_per_generation == 1
    ours = GRPOConfig("x", **fields)
    assert (ours.steps_per_generation, ours.optimizer_steps_per_window) == (4, 1)
    assert ours.generation_batch_size == 4 * ours.per_device_train_batch_size


def test_a_prompt_without_room_is_refused(sides):
    """The model's context is 64 tokens, a completion may have 8: 56 are left, 57 with BOS are too many."""
    trainer = sides.our_trainer()
    assert trainer.room_for_prompt() == 56
    with pytest.raises(ValueError, match="a prompt of 57 tokens leaves no room for 8 new ones"):
        trainer.rollout([{"prompt": "1" * 56}], 0)
    assert len(trainer.rollout([{"prompt": "1" * 55}], 0).rollouts[0].prompt_ids) == 56


def test_streaming_datasets_are_refused(sides):
    stream = Dataset.from_dict({"prompt": ["1+1="]}).to_iterable_dataset()
    with pytest.raises(ValueError, match="train_dataset is a streaming dataset; load it whole"):
        GRPOTrainer(sides.model(), lengths, train_dataset=stream, processing_class=sides.tokenizer)


def test_reward_functions_are_called_by_group_in_threads(sides):
    """Two groups of three: 6 rows at once on the main thread; 3 and 3 elsewhere. A call of ours that fails for three
    rows is made again for each of them."""
    calls = []

    def reward(completions, **_):
        calls.append((len(completions), threading.current_thread() is threading.main_thread()))
        return [0.0] * len(completions)

    def alone_only(completions, **_):
        reward(completions)
        if len(completions) > 1:
            raise RuntimeError("one at a time")
        return [1.0]

    theirs = sides.trl_trainer()
    theirs.reward_funcs = [reward]
    sides.trl_inputs(theirs)
    assert calls == [(6, True)]
    prompts = [{"prompt": prompt} for prompt in sides.prompts]
    for function, on_error, expected in ((reward, "raise", [3, 3]), (alone_only, "skip", [3, 1, 1, 1] * 2)):
        calls.clear()
        ours = sides.our_trainer()
        ours.scorer = RewardScorer(function, on_error=on_error)
        ours.rollout(prompts, 0)
        ours.scorer.close()
        assert calls == [(count, False) for count in expected]


# Another value than the default, by type; fields that this does not fit are given here.
OTHER = {"log_multimodal": False, "ds3_gather_for_generation": False, "max_tool_calling_iterations": 3}
NOT_CARRIED = sorted(
    name for name, f in GRPOConfig.__dataclass_fields__.items() if f.metadata.get("help", "").startswith("Not carried")
)


def test_what_is_not_carried_is_refused(sides):
    assert len(NOT_CARRIED) > 20
    for name in NOT_CARRIED:
        default = GRPOConfig.__dataclass_fields__[name].default
        value = OTHER.get(name, True if default is False else (default or 0.0) + 0.5)
        with pytest.raises(ValueError, match=f"{name}.*not carried"):
            GRPOConfig("x", **{name: value})
    for loss_type in ("cispo", "sapo", "luspo", "vespo"):
        with pytest.raises(ValueError, match=r"loss_type must be one of .* use trl\.GRPOTrainer"):
            GRPOConfig("x", loss_type=loss_type)
    with pytest.raises(ValueError, match="auto_find_batch_size"):
        GRPOConfig("x", auto_find_batch_size=True)
    with pytest.raises(ValueError, match="the built-in generator has no option 'num_beams'"):
        GRPOConfig("x", generation_kwargs={"num_beams": 4})
    for argument in ("tools", "rollout_func", "environment_factory"):
        with pytest.raises(ValueError, match=f"{argument} is not carried"):
            GRPOTrainer(sides.model(), lengths, processing_class=sides.tokenizer, **{argument: [lengths]})


def test_contradicting_arguments_are_refused(sides):
    rows = Dataset.from_dict({"prompt": ["1+1="] * 8})
    args = GRPOConfig("x", use_cpu=True, model_init_kwargs={"dtype": "float32"})
    with pytest.raises(ValueError, match="model_init_kwargs works with a model name"):
        GRPOTrainer(sides.model(), lengths, args, rows, processing_class=sides.tokenizer)
    with pytest.raises(ValueError, match="quantization_config works with a model name"):
        GRPOTrainer(
            sides.model(),
            lengths,
            GRPOConfig("x", use_cpu=True),
            rows,
            processing_class=sides.tokenizer,
            quantization_config={},
        )


def test_the_reference_adapter_moves_with_the_policy(sides):
    """A fresh adapter's B is 0, and so is its reference's; after one move by 0.6 the reference's B is 0.6 policy's."""
    rows = Dataset.from_dict({"prompt": ["1+1="] * 8})
    fields = {"sync_ref_model": True, "beta": 0.1, "use_cpu": True}
    lora = LoraConfig(target_modules=["q_proj"], r=2)
    with pytest.raises(NotImplementedError, match="sync_ref_model"):
        trl.GRPOTrainer(
            sides.model_path,
            lengths,
            trl.GRPOConfig(str(sides.folder), bf16=False, **fields),
            train_dataset=rows,
            processing_class=sides.tokenizer,
            peft_config=lora,
        )
    args = GRPOConfig(str(sides.folder), ref_model_mixup_alpha=0.6, **fields)
    trainer = GRPOTrainer(sides.model(), lengths, args, rows, processing_class=sides.tokenizer, peft_config=lora)
    named = dict(trainer.shared.named_parameters())
    policy = {n: p for n, p in named.items() if "lora_B.policy" in n}
    with torch.no_grad():
        for p in policy.values():
            p.fill_(0.5)
    trainer.shared.sync_reference(args.ref_model_mixup_alpha)
    named = dict(trainer.shared.named_parameters())
    assert policy
    for name in policy:
        moved = named[name.replace("lora_B.policy", "lora_B.reference")]
        torch.testing.assert_close(moved, torch.full_like(moved, 0.3))


def test_a_saved_run_has_no_pickle_and_no_token(sides, tmp_path):
    trainer = sides.our_trainer(hub_token="hf_neverWriteThis")
    trainer.save_model(str(tmp_path))
    files = {p.name for p in tmp_path.rglob("*")}
    assert "training_args.json" in files
    assert not [name for name in files if name.endswith((".bin", ".pkl", ".pt"))]
    assert not [p.name for p in tmp_path.rglob("*") if p.is_file() and b"neverWriteThis" in p.read_bytes()]
